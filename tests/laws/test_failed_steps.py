"""A step that fails half-way leaves nothing behind: the next one has the bits and the memory of a run that never failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_world
from torch import Tensor
from worlds import LLAMA, LR, engine_on, micro_batches, run_of, state_on

from megazero.config import ResolvedRun
from megazero.engine import Engine
from megazero.layers.activation_offload import Copier
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.gradients import GradientReducer
from megazero.zero.quantized import BlockFormat
from megazero.zero.reductions import ReductionQueue

PLACES = [
    (Copier, "start"),
    (ReductionQueue, "start"),
    (ReductionQueue, "_acquire"),
    (BufferPool, "_new"),
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
    store, gatherer = engine.offload, engine.sharded_model.parameters.gatherer
    of_store = () if store is None else (store.pool.nbytes, store.pool.nbytes_in_use, len(store.pool._buffers))
    return engine.sharded_model.reducer.buffer_bytes, 0 if gatherer is None else gatherer.nbytes, *of_store


def _two_steps(engine: Engine, run: ResolvedRun) -> tuple[list[Tensor], tuple[int, ...]]:
    for step in range(2):
        engine.train_step(micro_batches(run, engine.state, step), LR)
    return [bucket.gradient.clone() for bucket in engine.sharded_model.reducer.buckets], _memory(engine)


def _fail(rank: int, run: ResolvedRun) -> None:
    state = state_on(rank, run)

    def fresh() -> Engine:
        engine = engine_on(rank, run, state=state)
        if engine.offload is not None:
            engine.offload.smallest_bytes = 0
        return engine

    wanted, memory = _two_steps(fresh(), run)
    for owner, name in PLACES:
        for fails_at in (1, 3):
            engine, real, calls = fresh(), getattr(owner, name), [0]

            def failing(*args: Any, real: Any = real, calls: Any = calls, at: int = fails_at, **more: Any) -> Any:
                calls[0] += 1
                if calls[0] == at:
                    raise _PlannedError
                return real(*args, **more)

            setattr(owner, name, failing)
            try:
                engine.compute_gradients(micro_batches(run, state, 7))
            except _PlannedError:
                pass  # the last one only where the place is called so often
            finally:
                setattr(owner, name, real)
            found, held = _two_steps(engine, run)
            case = f"{run.config.activations} {run.config.zero}: {name}, call {fails_at}"
            assert all(map(torch.equal, found, wanted)), case
            assert held == memory, case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_failed_step_leaves_no_memory_taken(case: dict[str, Any]) -> None:
    run_world(2, _fail, run_of(2, model=LLAMA, training={"accumulation": 2}, **case))


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
