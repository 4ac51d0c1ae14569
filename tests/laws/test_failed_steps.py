"""A step that fails half-way leaves nothing behind: the next one has the bits and the memory of a run that never failed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import run_world
from torch import Tensor
from worlds import LLAMA, LR, engine_on, micro_batches, run_of, state_of, state_on

from megazero.checkpoint import load
from megazero.checkpoint.index import CheckpointError
from megazero.comm.memory import Copier
from megazero.config import ResolvedRun
from megazero.engine import Engine
from megazero.engine.phases import Position
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.gradients import GradientReducer
from megazero.zero.quantized import BlockFormat
from megazero.zero.reductions import ReductionQueue
from megazero.zero.weight_gathers import HalfSteppedError, WeightGathers

PLACES = [
    (Copier, "start"),
    (ReductionQueue, "start"),
    (ReductionQueue, "acquire"),
    (BufferPool, "acquire"),
    (GradientReducer, "take"),
    (BlockFormat, "quantize"),
    (BlockFormat, "dequantize"),
]
CASES: list[dict[str, Any]] = [
    {"activations": {"recompute": "full", "offload": "host"}, "zero": {"stage": 3}},
    {"activations": {"recompute": "selective", "contiguous": True}, "zero": {"stage": 2}},
    {"activations": {}, "zero": {"stage": 2}},
    {"activations": {}, "zero": {"stage": 3, "quantized_weights": True, "quantized_gradients": 8}},
]


class _PlannedError(RuntimeError):
    pass


def _memory(engine: Engine) -> tuple[int, ...]:
    store, model = engine.offload, engine.sharded_model
    gatherer = model.parameters.gatherer
    of_store = () if store is None else (store.pool.nbytes, store.pool.nbytes_in_use, len(store.pool._buffers))
    return (
        engine.sharded_model.reducer.reductions.buffer_bytes,
        0 if gatherer is None else gatherer.buffers.nbytes,
        *of_store,
    )


def _two_steps(engine: Engine, run: ResolvedRun) -> tuple[list[Tensor], tuple[int, ...]]:
    for step in range(2):
        engine.train_step(micro_batches(run, engine.state, step), LR)
    return [bucket.gradient.clone() for bucket in engine.sharded_model.reducer.buckets], _memory(engine)


def _fail(rank: int, run: ResolvedRun, number: int) -> None:
    """In each place once: at its first call in every second case, else at its third."""
    state = state_on(rank, run)

    def fresh() -> Engine:
        engine = engine_on(rank, run, state=state)
        if engine.offload is not None:
            engine.offload.smallest_bytes = 0
        return engine

    wanted, memory = _two_steps(fresh(), run)
    for place, (owner, name) in enumerate(PLACES):
        engine, real, calls, fails_at = fresh(), getattr(owner, name), [0], (1, 3)[(place + number) % 2]

        def failing(*args: Any, real: Any = real, calls: Any = calls, at: int = fails_at, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise _PlannedError
            return real(*args, **more)

        setattr(owner, name, failing)
        try:
            engine.compute_gradients(micro_batches(run, state, 7))
        except _PlannedError:
            pass
        else:
            continue  # the place is not called so often
        finally:
            setattr(owner, name, real)
        found, held = _two_steps(engine, run)
        case = f"{run.config.activations} {run.config.zero}: {name}, call {fails_at}"
        assert all(map(torch.equal, found, wanted)), case
        assert held == memory, case


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_a_failed_step_leaves_no_memory_taken(number: int) -> None:
    run_world(2, _fail, run_of(2, model=LLAMA, training={"accumulation": 2}, **CASES[number]), number)


def _without_gradients(rank: int, run: ResolvedRun) -> bool:
    engine = engine_on(rank, run)
    before = [bucket.read(bucket.master, bucket.owned).clone() for bucket in engine.sharded_model.reducer.buckets]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(RuntimeError, match="has no gradients"):
            engine.train_step(micro_batches(run, engine.state, 0), LR)
    now = [bucket.read(bucket.master, bucket.owned) for bucket in engine.sharded_model.reducer.buckets]
    return all(map(torch.equal, before, now))


def test_a_training_step_without_gradients_is_refused() -> None:
    """It moved the weights: by momentum and decay, at norm 0."""
    assert run_world(1, _without_gradients, run_of(1, model=LLAMA)) == [True]


class _Interrupts:
    """Counts the places in an update, and interrupts it at one of them.

    `world`: one rank is interrupted before any line that moves weights; several, which do not own as many parts, all
    before the gather of the same bucket.
    """

    files = ("optimizer.py", "sharded_model.py", "weight_gathers.py", "parameters.py", "file_stepper.py")

    def __init__(self, world: int, at: int | None = None) -> None:
        self.world, self.at, self.places = world, at, 0

    def __enter__(self) -> _Interrupts:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.world > 1:
            if frame.f_code is WeightGathers.start.__code__:
                self._come()
            return None
        path = Path(frame.f_code.co_filename)
        return self._line if path.parent.name == "zero" and path.name in self.files else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._come()
        return self._line

    def _come(self) -> None:
        self.places += 1
        if self.places == self.at:
            sys.settrace(None)
            raise KeyboardInterrupt


def _nobody_sees(engine: Engine, run: ResolvedRun, folder: Path) -> None:
    for look in (
        lambda: engine.chunks,
        lambda: engine.train_step(micro_batches(run, engine.state, 1), LR),
        lambda: engine.evaluate(micro_batches(run, engine.state, 1)),
        lambda: engine.save(folder / "never", Position(1), "data"),
    ):
        with pytest.raises(HalfSteppedError, match="load a checkpoint"):
            look()


def _interrupted_updates(rank: int, runs: list[ResolvedRun], shares_memory: bool, folder: Path) -> list[int]:
    """How many of the interrupts of each run were told afterwards."""
    state, told = state_on(rank, runs[0], on_one_machine=shares_memory, shares_memory=shares_memory), []
    for number, run in enumerate(runs):
        engine, saved = engine_on(rank, run, state=state), folder / str(number)
        engine.train_step(micro_batches(run, state, 0), LR)
        engine.save(saved, Position(1), "data")
        old = state_of(engine)
        engine.compute_gradients(micro_batches(run, state, 1))
        with _Interrupts(state.world.size) as whole:
            engine.update(LR)
        new, count = state_of(engine), 0
        for at in range(1, whole.places + 1, max(1, whole.places // 6)):
            engine.load(saved, "data")
            engine.compute_gradients(micro_batches(run, state, 1))
            with pytest.raises(KeyboardInterrupt), _Interrupts(state.world.size, at):
                engine.update(LR)
            try:
                found = state_of(engine)
            except HalfSteppedError:
                count += 1
                _nobody_sees(engine, run, folder)
            else:
                same = [name for name in found if torch.equal(found[name], old[name])]
                assert len(same) == len(old) or all(torch.equal(found[name], new[name]) for name in new), (run, at)
        assert not (folder / "never").exists()
        engine.load(saved, "data")
        engine.train_step(micro_batches(run, state, 1), LR)
        again = state_of(engine)
        assert all(torch.equal(again[name], new[name]) for name in new)
        engine.sharded_model.close()
        told.append(count)
    return told


@pytest.mark.parametrize(
    ("world", "shares_memory"), [(1, True), (2, True), (2, False)], ids=["alone", "on one host", "between hosts"]
)
def test_an_update_that_was_interrupted_is_not_seen_saved_or_gone_on_with(
    world: int, shares_memory: bool, tmp_path: Path
) -> None:
    """Before any line: the old state, the new one, or an error at every look until a checkpoint is loaded."""
    zeros: list[dict[str, Any]] = [{"stage": stage, "bucket_bytes": 4096} for stage in range(4)]
    zeros.append({"stage": 2, "offload": {"optimizer": "nvme", "nvme_path": str(tmp_path), "ratio": 0.5}})
    runs = [run_of(world, model=LLAMA, zero=zero) for zero in zeros]
    for told in run_world(world, _interrupted_updates, runs, shares_memory, tmp_path / "saved", timeout=120):
        assert min(told) > 1


def _broken_off_loads(rank: int, runs: list[ResolvedRun], folder: Path) -> None:
    state, read = state_on(rank, runs[0], on_one_machine=False, shares_memory=False), load._read_range
    for number, run in enumerate(runs):
        engine, plain, saved = (*(engine_on(rank, run, state=state) for _ in range(2)), folder / str(number))
        engine.save(saved, Position(0), "data")
        old = state_of(engine)
        for one in (engine, plain):
            one.train_step(micro_batches(run, state, 0), LR)
        with pytest.raises(CheckpointError):  # the last update may still be under way
            engine.load(saved, "other data")
        found, wanted = state_of(engine), state_of(plain)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        parts = iter(range(5))

        def breaks_off(*given: Any, parts: Iterator[int] = parts) -> int:
            if rank == 1 and next(parts, None) is None:
                raise ConnectionError("the storage does not answer")
            return read(*given)

        with patch.object(load, "_read_range", breaks_off), pytest.raises(CheckpointError, match="does not answer"):
            engine.load(saved, "data")
        _nobody_sees(engine, run, folder)
        engine.load(saved, "data")
        found = state_of(
            engine, [kind for kind in engine.sharded_model.sharded_state.state_kinds if kind in ("model", "master")]
        )
        assert all(torch.equal(found[name], old[name]) for name in found)
        for one in (engine, plain):
            one.sharded_model.close()


def test_a_load_that_is_refused_changes_nothing_and_what_one_that_breaks_off_leaves_is_not_seen(tmp_path: Path) -> None:
    runs = [run_of(2, model=LLAMA, zero={"stage": stage, "bucket_bytes": 4096}) for stage in (0, 1, 3)]
    run_world(2, _broken_off_loads, runs, tmp_path, timeout=120)
