"""Profiles and snapshots of memory: which ranks write them, what is in them, and that no other step is touched."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import run_world
from test_training import _record
from worlds import LLAMA, run_of, state_on

from megazero.engine import Position
from megazero.plan.step_callbacks import MemorySnapshot, StepProfile, add_snapshot


def _profiled(rank: int, run: Any) -> list[bool]:
    """Five steps, each of one product; rank 2 works longest, and rank 1 has gone back to step 2 once like the others."""
    context: Any = SimpleNamespace(run=run, engine=SimpleNamespace(state=state_on(rank, run)), log=print)
    callback, is_on = StepProfile(context), []
    for step in (1, 2, 2, 3, 4, 5):
        if step == 2 and len(is_on) == 2:
            callback.on_rollback(Position(1))
        callback.before_step(Position(step - 1))
        is_on.append(torch.autograd._profiler_enabled())
        torch.ones(step, 7) @ torch.ones(7, 3)
        callback.after_step(replace(_record(step), work_seconds=0.1 + rank))
    callback.close()
    return is_on


def test_rank_0_and_the_slowest_rank_write_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    run = run_of(
        3,
        model=LLAMA,
        training={"run_dir": str(tmp_path / "run"), "global_batch_size": 6},
        logging={"profile_steps": [2, 3]},
    )
    assert run_world(3, _profiled, run) == [[False, True, True, True, False, False]] * 3
    files = sorted((tmp_path / "run").iterdir())
    assert [path.name for path in files] == [f"profile-step-00000003-rank-{rank}.json.gz" for rank in (0, 2)]
    for path in files:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert sum(event.get("name") == "aten::mm" for event in events) == 2


def test_memory_is_recorded_in_one_step_and_where_it_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    memory = torch.cuda.memory  # a stand-in for the device
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled="all": calls.append(enabled))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append(Path(path).name))
    run, said = run_of(1, model=LLAMA, training={"run_dir": str(tmp_path)}, logging={"memory_snapshot": 2}), list[str]()

    def steps(device: str) -> Any:
        state = SimpleNamespace(rank=0, device=torch.device(device))
        callback = MemorySnapshot(SimpleNamespace(run=run, engine=SimpleNamespace(state=state), log=said.append))  # type: ignore[arg-type]
        for step in (1, 2, 3):
            callback.before_step(Position(step - 1))
            callback.after_step(_record(step))
        return state

    full = add_snapshot("no memory is left", run, steps("cuda"), None)
    assert calls == ["all", "memory-step-00000002-rank-0.pickle", None, "memory-out-rank-0.pickle"]
    assert full.startswith("no memory is left\n")
    assert add_snapshot("no memory is left", run, steps("cpu"), None) == "no memory is left"
    assert said[1] == "logging.memory_snapshot: torch has snapshots of CUDA's memory only, and this run is on a CPU"
    assert len(calls) == 4
