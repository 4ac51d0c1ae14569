"""Garbage is collected between steps only, and a step leaves no tensor for the collector."""

import gc
from typing import Any

import pytest
import torch
from harness import run_world
from worlds import LLAMA, engine_on, micro_batches, run_of, state_on

from megazero.config import ResolvedRun
from megazero.engine import Position
from megazero.training.callbacks.base import SampleRange, StepRecord
from megazero.training.callbacks.speed import GarbageCollection


def test_garbage_waits_for_its_step_and_everything_is_as_before_afterwards() -> None:
    collections: list[dict[str, Any]] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "stop":
            collections.append(info)

    gc.unfreeze()
    gc.callbacks.append(note)
    collection = GarbageCollection(every_steps=3)
    records = [StepRecord(Position(step), SampleRange(0, 7)) for step in range(7)]
    try:
        collection.on_start()
        assert gc.get_freeze_count() > 0
        collections.clear()
        for step in range(1, 7):
            cycles = [[] for _ in range(5000)]  # enough to start an automatic collection
            for cycle in cycles:
                cycle.append(cycle)
            del cycles, cycle
            assert len(collections) == (step - 1) // 3
            collection.after_step(records[step])
        assert [info["collected"] for info in collections] == [15000, 15000]
        collection.close()
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_a_program_has_frozen_and_disabled_stays_so() -> None:
    gc.unfreeze()
    gc.freeze()
    gc.disable()
    try:
        collection = GarbageCollection()
        collection.on_start()
        collection.close()
        assert gc.get_freeze_count() > 0
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def _tensors_in_cycles(rank: int, runs: list[ResolvedRun]) -> list[int]:
    state, found = state_on(rank, runs[0]), []
    for run in runs:
        engine = engine_on(rank, run, state=state)
        engine.train_step(micro_batches(run, engine.state, 0), 1e-3)
        gc.collect()
        gc.disable()
        for step in range(1, 3):
            engine.train_step(micro_batches(run, engine.state, step), 1e-3)
        engine.evaluate(micro_batches(run, engine.state, 50))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found.append(sum(isinstance(one, torch.Tensor) for one in gc.garbage))
        gc.garbage.clear()
    return found


@pytest.mark.parametrize(
    ("parallel", "stages"), [({}, (0, 1, 2, 3)), ({"pp": 2, "schedule": "zb-h1"}, (1,)), ({"tp": 2}, (0,))]
)
def test_a_step_leaves_no_tensor_in_a_cycle(parallel: dict[str, Any], stages: tuple[int, ...]) -> None:
    runs = [run_of(2, model=LLAMA, parallel=parallel, zero={"stage": stage}) for stage in stages]
    for found in run_world(2, _tensors_in_cycles, runs):
        assert found == [0] * len(stages)
