"""Updated weights travel behind the next forward, and nobody can tell but the clock.

Where a test needs late weights it takes `DelayedBackend`: until a gather is waited for, what it brings is not a number.
"""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from delayed_backend import DelayedBackend
from harness import DEVICE, run_world
from torch import Tensor, nn
from worlds import LR, engine_on, micro_batches, run_of, state_of, state_on

from megazero.comm.collectives import Pending, all_gather
from megazero.comm.messages import LostPeerError
from megazero.config import ResolvedRun
from megazero.cpu.sockets import SocketBackend
from megazero.engine import Engine
from megazero.engine.phases import Position
from megazero.engine.step import NonFiniteError
from megazero.layers.mlp import SwiGLU
from megazero.models.gpt import GPTStage
from megazero.parallel_state import Links, ParallelState, RankGrid
from megazero.training.callbacks.base import Callback, RunContext, StepRecord
from megazero.training.callbacks.registry import CALLBACKS, RegisteredCallback
from megazero.zero.bucket import Bucket, in_order_of_use
from megazero.zero.parameters import ShardedParameters
from megazero.zero.state import GRADIENT
from megazero.zero.weight_gathers import WeightGathers

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the test double stands for gloo")


@contextmanager
def _waiting_at_once() -> Iterator[None]:
    start = WeightGathers.start

    def start_and_wait(self: WeightGathers, bucket: Bucket) -> None:
        start(self, bucket)
        self.wait()

    with patch.object(WeightGathers, "start", start_and_wait):
        yield


TIED, UNTIED = {"tie_embeddings": True}, {"tie_embeddings": False}
DEEP = {"num_layers": 4}
HALF = {"dtype": "bf16"}
# By ranks and shape: (model, zero, precision, parallel); every stage, schedule, format and policy is in one of them.
SHAPES: list[tuple[int, dict[str, Any], list[tuple[dict[str, Any], ...]]]] = [
    (
        2,
        {},
        [
            (UNTIED, {"stage": 1}, {}, {}),
            (TIED, {"stage": 2}, HALF, {}),
            (TIED, {"stage": 1, "offload": {"optimizer": "cpu", "ratio": 0.5}}, {}, {}),
            (UNTIED, {"stage": 3, "persistent_elements": 1500}, {}, {}),
            (UNTIED, {"stage": 0, "bucket_bytes": 4096}, {}, {}),
            (TIED, {"stage": 0, "bucket_bytes": 4096}, HALF | {"reduce_dtype": "fp32"}, {}),
        ],
    ),
    (4, {"tp": 2}, [(TIED, {"stage": 1}, HALF, {"sequence_parallel": True})]),
    (
        4,
        {"pp": 2},
        [
            (TIED, {"stage": 1}, {}, {"schedule": "1f1b"}),
            (UNTIED, {"stage": 2}, {}, {"schedule": "zb-h1"}),
            (TIED | DEEP, {"stage": 2}, HALF, {"schedule": "interleaved", "virtual_stages": 2}),
            (UNTIED | DEEP, {"stage": 1}, {}, {"schedule": "zbv"}),
            (TIED | DEEP, {"stage": 0, "bucket_bytes": 4096}, {}, {"schedule": "zbv"}),
        ],
    ),
    (4, {}, [(UNTIED, {"stage": 1, "shard_group_size": 2}, {}, {})]),
]


def _runs(world: int, parallel: dict[str, Any], cases: Sequence[tuple[dict[str, Any], ...]]) -> list[ResolvedRun]:
    return [
        run_of(
            world,
            model={"family": "llama"} | model,
            zero=zero,
            precision=precision,
            parallel=parallel | more,
            training={"micro_batch_size": 8 // world},
        )
        for model, zero, precision, more in cases
    ]


def _weights(engine: Engine) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in engine.chunks.parameters()]


def _trained(run: ResolvedRun, state: ParallelState, folder: Path | None) -> tuple[list[float], list[Tensor], Any]:
    """Losses and norms of steps and of an evaluation, all weights that this rank sees, and the bytes that it has sent."""
    engine, numbers = engine_on(state.rank, run, state=state), []
    assert engine.sharded_model.parameters.hides_gathers
    state.traffic.reset()
    for step in range(2):
        statistics = engine.train_step(micro_batches(run, state, step), LR)
        numbers += [statistics.loss, statistics.grad_norm]
        if step == 0:
            numbers.append(engine.evaluate(micro_batches(run, state, 50)).loss)
    sent = dict(state.traffic.sent_bytes)
    if folder is not None:  # both while weights travel
        engine.save(folder, Position(2), "data")
        saved = _weights(engine)
        engine.train_step(micro_batches(run, state, 2), LR)
        engine.load(folder, "data")
        assert all(map(torch.equal, _weights(engine), saved))
    weights = [] if run.config.zero.stage == 3 else _weights(engine)
    engine.sharded_model.close()
    return numbers, weights, sent


def _late_and_at_once(rank: int, world: int, folder: Path) -> None:
    for number, (_, parallel, cases) in enumerate(shape for shape in SHAPES if shape[0] == world):
        runs = _runs(world, parallel, cases)
        state = state_on(rank, runs[0], shares_memory=False)
        for index, run in enumerate(runs):
            with _waiting_at_once():
                losses, weights, sent = _trained(run, state, None)
            late = _trained(run, state, folder / f"{number}" if index == 0 else None)
            assert not any(map(isnan, losses))
            assert (losses, sent) == (late[0], late[2]), run.config
            assert all(map(torch.equal, weights, late[1])), run.config


@pytest.mark.parametrize("world", [2, 4])
def test_late_weights_give_the_bits_and_the_bytes_of_weights_that_are_waited_for(world: int, tmp_path: Path) -> None:
    """Stages and persistent parameters, tp, schedules with one and two chunks, ties, offload, groups."""
    with patch("megazero.comm.collectives.choose_backend", lambda *_: DelayedBackend(SocketBackend(), 0)):
        run_world(world, _late_and_at_once, world, tmp_path)


def _order(rank: int, run: ResolvedRun) -> tuple[list[str], list[tuple[list[str], int]]]:
    """Buckets as their gathers start; those that each wait of a forward is for, and how many are left after it."""
    engine = engine_on(rank, run, state=state_on(rank, run, shares_memory=False))
    started: list[str] = []
    waits: list[tuple[list[str], int]] = []
    start, wait_for = WeightGathers.start, WeightGathers.wait_for

    def note_start(self: WeightGathers, bucket: Bucket) -> None:
        started.append(bucket.layout.name)
        start(self, bucket)

    def note_wait(self: WeightGathers, buckets: Sequence[Bucket]) -> None:
        names = [bucket.layout.name for bucket in buckets if bucket in self._under_way]
        wait_for(self, buckets)
        waits.append((names, len(self._under_way)))

    with patch.object(WeightGathers, "start", note_start), patch.object(WeightGathers, "wait_for", note_wait):
        engine.train_step(micro_batches(run, engine.state, 0), LR)
        started.clear()
        waits.clear()
        engine.train_step(micro_batches(run, engine.state, 1), LR)  # its forwards wait, its update starts
    engine.sharded_model.close()
    return started, [one for one in waits if one[0]]


def test_gathers_start_in_the_order_of_use_and_a_layer_waits_for_its_own_alone() -> None:
    model = {"family": "llama", "num_layers": 4, "tie_embeddings": False}
    run = run_of(2, model=model, zero={"stage": 1, "bucket_bytes": 1024}, training={"micro_batch_size": 4})
    for started, waits in run_world(2, _order, run):
        assert [name for names, _ in waits for name in names] == started
        waited = 0
        for names, left in waits:
            assert len(names) == 1 or not names[0].startswith("bucket of 0.blocks")
            waited += len(names)
            assert left == len(started) - waited
        assert len(started) >= 4 * 4 + 2  # qkv, out, gate and up, down


FAMILIES: list[dict[str, Any]] = [
    {"family": "llama"},
    {"family": "gpt2"},
    {"family": "qwen3"},  # a norm of each head
    {"family": "olmo2"},  # norms of all heads, and behind each branch
    {"family": "mixtral", "num_experts": 4},
]


def _of_families(rank: int, runs: Sequence[ResolvedRun]) -> None:
    for run in runs:
        state = state_on(rank, run, shares_memory=False)
        with _waiting_at_once(), patch.object(GPTStage, "readers", lambda *_: []):
            losses, weights, sent = _trained(run, state, None)
        buckets: list[Bucket] = []
        with patch.object(ShardedParameters, "_bind", _noting(buckets)):
            late = _trained(run, state, None)
        of_first_block = [one for one in buckets if one.layout.slots[0].info.name.startswith("0.blocks.0.")]
        assert len(of_first_block) > 1, run.config
        assert not any(map(isnan, losses))
        assert (losses, sent) == (late[0], late[2]), run.config
        assert all(map(torch.equal, weights, late[1])), run.config


def _noting(buckets: list[Bucket]) -> Any:
    bind = ShardedParameters._bind

    def noting(self: ShardedParameters, *arguments: Any) -> None:
        buckets[:] = self.buckets
        bind(self, *arguments)

    return noting


def test_layers_that_wait_for_their_weights_alone_give_the_bits_of_blocks_that_wait_for_all() -> None:
    """All families, stages 1 to 3, recomputed too; what a layer reads before its weights are there is not a number."""
    runs = [
        run_of(
            2,
            model=model,
            zero={"stage": stage, "bucket_bytes": "auto"},
            activations={"recompute": recompute},
            training={"micro_batch_size": 2, "accumulation": 2},
        )
        for model in FAMILIES
        for stage, recompute in ((0, "none"), (1, "none"), (2, "full"), (3, "selective"), (3, "full"))
        if model["family"] == "olmo2" or (stage, recompute) == (3, "full")
    ]
    with (
        patch("megazero.comm.collectives.choose_backend", lambda *_: DelayedBackend(SocketBackend(), 0)),
        patch("megazero.zero.bucket_plan._SOCKET_BYTES", 1024),
    ):
        run_world(2, _of_families, runs)


def test_a_block_with_a_module_of_a_familys_own_waits_as_a_whole() -> None:
    """It may read the weights of another one."""
    engine = engine_on(0, run_of(1, model={"family": "llama"}))
    (stage,) = engine._stages
    block = stage.blocks[0]
    readers = stage.readers(block)
    assert {id(one) for reader in readers for one in reader.parameters()} == {id(one) for one in block.parameters()}
    assert stage.head is not None
    assert stage.readers(stage.head) == []

    class Own(SwiGLU):
        """Reads the weights of its layers itself."""

    block.mlp.__class__ = Own
    assert stage.readers(block) == []
    other = stage.blocks[1]
    assert stage.readers(other)
    other.mlp_residual = nn.Tanh()  # one without parameters may be given another's
    assert stage.readers(other) == []


def _hooked(rank: int, run: ResolvedRun) -> list[float]:
    """What a script's hook on a block sees of its last layer."""
    engine = engine_on(rank, run, state=state_on(rank, run, shares_memory=False))
    (stage,) = engine._stages
    seen: list[float] = []
    stage.blocks[0].register_forward_pre_hook(lambda block, _: seen.append(block.mlp.down.weight.abs().sum().item()))
    for step in range(3):
        engine.train_step(micro_batches(run, engine.state, step), LR)
    engine.sharded_model.close()
    return seen


def test_a_scripts_hook_on_a_block_sees_all_its_weights() -> None:
    found = []
    for stage in (0, 1, 3):
        run = run_of(2, model={"family": "llama"}, zero={"stage": stage, "bucket_bytes": "auto"})
        with (
            patch("megazero.comm.collectives.choose_backend", lambda *_: DelayedBackend(SocketBackend(), 0)),
            patch("megazero.zero.bucket_plan._SOCKET_BYTES", 1024),
        ):
            found += run_world(2, _hooked, run)
    plain = found[2]
    assert not any(map(isnan, plain))
    assert len(set(plain)) > 1
    assert all(one == pytest.approx(plain, rel=1e-6) for one in found)


def _spread_over_both_passes(rank: int, run: ResolvedRun, folder: Path) -> None:
    """Beside a run that sends all gradients behind the backward."""
    state, found = state_on(rank, run, shares_memory=False), []
    for spreads in (False, True):
        with nullcontext() if spreads else patch("megazero.zero.bucket_plan.added", lambda _: {}):
            engine = engine_on(rank, run, state=state)
        buckets = engine.sharded_model.parameters.buckets
        late = [bucket for bucket in buckets if bucket.gathers_weights]
        assert late if spreads else not late
        if spreads and run.config.parallel.pp == 1:
            able = [one for one in buckets if one.layout.tie is None and one.layout.padded_numel <= 4 * 1024]
            first, numel = in_order_of_use(able)[: len(late)], sum(bucket.layout.numel for bucket in able)
            assert set(late) == set(first)
            behind = [sum(bucket.layout.numel for bucket in first[:count]) for count in (len(late) - 1, len(late))]
            assert behind[0] < 2 / 3 * numel <= behind[1]
        numbers: list[Any] = []
        path = folder / f"{spreads}"
        for step in range(5):
            batches, lr = micro_batches(run, state, step), LR / (1 + step)
            if step == 3:  # a script that looks at the gradients, and then steps
                statistics = engine.compute_gradients(batches)
                numbers.append(state_of(engine, [GRADIENT]))
                assert engine.update(lr)
            else:
                statistics = engine.train_step(batches, lr)
            assert not spreads or len(engine.sharded_model.parameters.gathers._under_way) == len(late)
            numbers += [statistics.loss, statistics.grad_norm]
            if step == 0:
                numbers.append(engine.sharded_model.optimizer_scalars())
            if step == 1:
                numbers.append(engine.evaluate(micro_batches(run, state, 50)).loss)
            if step == 2:
                engine.save(path, Position(3), "data")
        numbers.append(state_of(engine, [GRADIENT, *engine.sharded_model.sharded_state.state_kinds]))
        engine.load(path, "data")
        numbers.append(state_of(engine))
        engine.train_step(micro_batches(run, state, 7), LR)
        numbers.append(state_of(engine))
        engine.sharded_model.close()
        found.append(numbers)
    for plain, hidden in zip(*found, strict=True):
        if isinstance(plain, dict) and all(isinstance(one, Tensor) for one in plain.values()):
            assert plain.keys() == hidden.keys()
            assert all(torch.equal(plain[name], hidden[name]) for name in plain)
        else:
            assert plain == hidden


STAGE_0: list[tuple[int, dict[str, Any]]] = [  # (ranks, sections)
    (3, {"precision": HALF, "optimizer": {"name": "lion"}, "training": {"accumulation": 2, "global_batch_size": 6}}),
    (4, {"model": TIED | DEEP, "parallel": {"pp": 2, "schedule": "zbv"}}),
    (4, {"model": TIED, "parallel": {"tp": 2, "sequence_parallel": True}}),
]


@pytest.mark.parametrize(("world", "sections"), STAGE_0, ids=["bf16, lion", "tied, zbv", "sequence parallel"])
def test_stage_0_that_sends_in_both_passes_is_the_run_that_sends_in_the_backward_alone(
    world: int, sections: dict[str, Any], tmp_path: Path
) -> None:
    """Each rank updates a shard; the other weights are not numbers until they are waited for, and nobody can tell."""
    run = run_of(
        world,
        model={"family": "llama", "num_layers": 3, "tie_embeddings": False} | sections.get("model", {}),
        zero={"stage": 0, "bucket_bytes": 4096},
        precision={"reduce_dtype": "fp32"} | sections.get("precision", {}) if "precision" in sections else {},
        optimizer={"grad_clip": 0.5} | sections.get("optimizer", {}),
        parallel=sections.get("parallel", {}),
        training={"micro_batch_size": 1} | sections.get("training", {}),
    )
    with (
        patch("megazero.comm.collectives.choose_backend", lambda *_: DelayedBackend(SocketBackend(), 0)),
        patch("megazero.cpu.sockets._SMALL_BYTES", 512),  # sums of buckets are in the order of ranks
    ):
        run_world(world, _spread_over_both_passes, run, tmp_path, timeout=60)


def _after_failures(rank: int, run: ResolvedRun) -> str:
    engine = engine_on(rank, run, state=state_on(rank, run, shares_memory=False))
    gathers, batches = engine.sharded_model.parameters.gathers, micro_batches(run, engine.state, 0)
    engine.train_step(batches, LR)
    assert gathers._under_way
    good = [parameter.detach().clone() for parameter in engine.chunks.parameters()]
    no_loss = torch.tensor([torch.nan, 1.0], dtype=torch.float64)
    with patch.object(Engine, "_run", lambda *_, **__: no_loss.unbind()), pytest.raises(NonFiniteError):
        engine.train_step(batches, LR)
    assert not gathers._under_way
    assert all(map(torch.equal, engine.chunks.parameters(), good))
    engine.train_step(batches, LR)
    assert gathers._under_way
    if rank == 1:
        return ""
    with pytest.raises(LostPeerError):  # the peer's weights may have come, but no gradients do
        engine.train_step(batches, LR)
    engine.sharded_model.close()
    assert not gathers._under_way
    return "closed"


def test_a_step_that_fails_leaves_nothing_under_way() -> None:
    run = run_of(
        2, model={"family": "llama"}, zero={"stage": 1, "bucket_bytes": 1024}, training={"micro_batch_size": 4}
    )
    assert run_world(2, _after_failures, run)[0] == "closed"


def _lost(rank: int, runs: Sequence[ResolvedRun]) -> None:
    for run in runs:
        engine = engine_on(rank, run, state=state_on(rank, run, shares_memory=False))
        batches = micro_batches(run, engine.state, 0)
        engine.train_step(batches, LR)
        with patch.object(Pending, "wait", side_effect=RuntimeError("a rank was lost")), pytest.raises(RuntimeError):
            _ = engine.chunks
        for look in (
            partial(getattr, engine, "chunks"),
            partial(engine.evaluate, batches),
            partial(engine.train_step, batches, LR),
        ):
            with pytest.raises(RuntimeError, match="a rank was lost"):
                look()


def test_weights_that_did_not_come_are_not_seen_by_whoever_looks_again() -> None:
    run_world(2, _lost, [run_of(2, model={"family": "llama"}, zero={"stage": stage}) for stage in (0, 1)])


def _dropped(rank: int, run: ResolvedRun) -> list[float]:
    state, losses = state_on(rank, run, shares_memory=False), []
    for late in range(3):
        engine = engine_on(rank, run, state=state)
        losses.append(engine.compute_gradients(micro_batches(run, state, 0)).loss)
        if rank == late:
            time.sleep(0.3)  # what the other ranks receive is still to come when they drop their model
        engine.update(LR)
        assert engine.sharded_model.parameters.gathers._under_way
        del engine
        gc.collect()
    return losses


def test_a_model_that_is_dropped_while_weights_travel_does_not_stop_the_next_one() -> None:
    run = run_of(2, model={"family": "llama"}, zero={"stage": 1, "bucket_bytes": 4096})
    for losses in run_world(2, _dropped, run, timeout=40):
        assert len(losses) == 3
        assert len(set(losses)) == 1


def _interrupted(rank: int) -> list[list[float]]:
    axis, found = ParallelState(RankGrid(dp=3), rank, Links(timeout_seconds=10, shares_memory=False)).dp, []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    for label in ("", "weights"):
        whole = torch.zeros(3)
        all_gather(whole, torch.zeros(1), axis).wait()
        if rank == 2:
            time.sleep(0.5)
        pending = all_gather(whole, torch.full((1,), float(rank)), axis, label)
        if rank < 2:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                pending.wait()
        pending.wait()
        found.append(whole.tolist())
    return found


def test_weights_whose_wait_was_interrupted_can_be_waited_for() -> None:
    assert run_world(3, _interrupted, timeout=40) == [[[0.0, 1.0, 2.0]] * 2] * 3


class _Keeps(Callback):
    """A script's callback that reads the parameters which it has found at the start."""

    def __init__(self, context: RunContext) -> None:
        self._weights = list(context.engine.chunks.parameters())

    def after_step(self, record: StepRecord) -> None:
        record.metrics["whole"] = float(all(weight.isfinite().all() for weight in self._weights))


def _kept(rank: int, run: ResolvedRun) -> float:
    engine, record = engine_on(rank, run, state=state_on(rank, run, shares_memory=False)), SimpleNamespace(metrics={})
    CALLBACKS.register("keeps", _Keeps)
    callback = RegisteredCallback("keeps", SimpleNamespace(engine=engine, log=print))  # type: ignore[arg-type]
    engine.train_step(micro_batches(run, engine.state, 0), LR)
    assert engine.sharded_model.parameters.gathers._under_way
    callback.after_step(record)  # type: ignore[arg-type]
    engine.sharded_model.close()
    return float(record.metrics["whole"])


def test_a_callback_sees_the_weights_of_the_step_in_parameters_that_it_has_kept() -> None:
    run = run_of(2, model={"family": "llama"}, zero={"stage": 1, "bucket_bytes": 4096})
    with patch("megazero.comm.collectives.choose_backend", lambda *_: DelayedBackend(SocketBackend(), 0)):
        assert run_world(2, _kept, run, timeout=40) == [1.0, 1.0]
