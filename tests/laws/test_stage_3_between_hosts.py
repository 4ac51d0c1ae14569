"""Stage 3 and hybrid sharding where ranks are on several hosts: a secondary shard of the weights within each host, gathers
ahead of their use, sums over replicas during the backward.  None of it changes a bit, but where sums take another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from delayed_backend import delayed_collectives
from harness import DEVICE, run_world
from torch import Tensor, nn
from worlds import LLAMA, LR, engine_on, micro_batches, run_of, state_on, traffic_and_memory, train_on
from zero_worlds import Sharded, assert_same, plain_gradients, random_batches, seeded

from megazero.comm.messages import LostPeerError, OrderError
from megazero.config import ResolvedRun
from megazero.parallel_state import Links, ParallelState, RankGrid
from megazero.parallel_state.axis import Traffic
from megazero.zero.bucket import Bucket
from megazero.zero.gather import Unit, UnitGatherer
from megazero.zero.gather_buffers import GatherBuffers
from megazero.zero.weight_gathers import WeightGathers

UNTIED = LLAMA | {"tie_embeddings": False, "vocab_size": 64}
DEEP, THREE_LAYERS = UNTIED | {"num_layers": 5}, UNTIED | {"num_layers": 3}
HPZ = {"stage": 3, "secondary_shard_size": 2}
PLAIN = {"stage": 3}


def _results(rank: int, runs: Sequence[ResolvedRun], late: Sequence[bool]) -> list[dict[str, Any] | None]:
    """What each run gives, some of them with collectives that come late."""
    found, states = [], dict[bool, ParallelState]()
    for run, is_late in zip(runs, late, strict=True):
        if not is_late:
            found.append(_trained(rank, run, states.setdefault(False, state_on(rank, run))))
            continue
        with delayed_collectives(rank):
            found.append(_trained(rank, run, states.setdefault(True, state_on(rank, run))))
    return found


def _trained(rank: int, run: ResolvedRun, state: ParallelState) -> dict[str, Any] | None:
    engine = engine_on(rank, run, state=state)
    results = train_on(engine, run, evaluates=True, masters=True)
    engine.sharded_model.close()
    return results


def _assert_equal_bits(a: dict[str, Any], b: dict[str, Any], case: object) -> None:
    assert a["loss"] == b["loss"], case
    assert a["norm"] == b["norm"], case
    for kind in ("gradients", "weights", "masters"):
        assert a[kind].keys() == b[kind].keys()
        for name, tensor in a[kind].items():
            assert torch.equal(tensor, b[kind][name]), (case, kind, name)


# ---------------------------------------------------------------------------------------------------------------------
# A secondary shard of the weights


# As many bytes as hold two blocks, so that units take turns in three buffers or more.
AHEAD = {"prefetch_bytes": 80_000}
SHAPES = [
    (4, {}, [{"precision": {"dtype": "bf16"}, "model": LLAMA}, {"activations": {"recompute": "full"}}]),
    (8, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, [{"model": UNTIED | {"num_layers": 4}}]),
    (8, {"tp": 2}, [{"model": LLAMA}]),
]


@pytest.mark.parametrize(("world", "parallel", "cases"), SHAPES, ids=["dp 4", "interleaved", "tp 2"])
def test_a_secondary_shard_and_gathers_ahead_change_no_bit_even_if_every_result_comes_late(
    world: int, parallel: dict[str, Any], cases: list[dict[str, Any]]
) -> None:
    """fp32 and bf16, several micro-batches, recomputation, tied embeddings; each with an evaluation between two steps."""
    zeros = [PLAIN, HPZ | AHEAD, HPZ] if world == 4 else [PLAIN, HPZ | AHEAD | {"gather_policy": "chunk"}]
    given = {"model": UNTIED, "parallel": parallel, "training": {"accumulation": 2} if world == 4 else {}}
    runs = [run_of(world, zero=zero, **given | case) for case in cases for zero in zeros]
    found = run_world(world, _results, runs, [zero is not PLAIN for zero in zeros] * len(cases))[0]
    for at, case in enumerate(cases):
        plain, *others = found[len(zeros) * at :][: len(zeros)]
        for zero, other in zip(zeros[1:], others, strict=True):
            _assert_equal_bits(plain, other, (case, zero))


class _Experts(nn.Module):
    """Some layers are frozen, and the input decides which of the others are used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.layers[1].requires_grad_(False)
        self.layers[4].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            h = torch.tanh(layer(x))
            x = x + h * (0.0 if index == 3 and x.mean() > 0 else 1.0)
            if index == 2:
                x = x + F.linear(h, self.layers[0].weight.detach())  # read outside its unit
        return x.square().mean()


def test_a_script_with_frozen_and_unused_parameters_has_the_same_bits_with_a_secondary_shard() -> None:
    """A script's own modules: every gather tells all ranks what it gathers."""

    def law(rank: int) -> None:
        batches = random_batches(3, 4, 2, 3, 16)
        found = []
        for zero in ({}, {"secondary_shard_size": 2}, {"secondary_shard_size": 2, "prefetch_bytes": 4000}):
            sharded = Sharded(seeded(_Experts), 3, rank, 4, **zero)
            for step in batches:
                sharded.step(step[rank], max_norm=0.3)
            found.append(sharded.whole("master") | sharded.whole("model"))
        for other in found[1:]:
            assert_same(other, found[0], rtol=0.0, atol=0.0)

    run_world(4, law)


class _Routed(nn.Module):
    """Each batch says in which order its layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, batch: tuple[Sequence[int], Tensor]) -> Tensor:
        order, x = batch
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x.square().mean()


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared memory", "gloo"])
def test_hosts_that_run_different_units_are_told_though_each_gathers_for_itself(shares_memory: bool) -> None:
    """In the second micro-batch no weights cross between hosts any more."""
    x = torch.ones(3, 16)

    def law(rank: int) -> str:
        sharded = Sharded(seeded(_Routed), 3, rank, 4, secondary_shard_size=2, shares_memory=shares_memory)
        sharded.zero.begin_step(2)
        try:
            for order in ((0, 1, 2, 3, 4), (0, 1, 4) if rank < 2 else (0, 3, 4)):
                sharded.module((order, x)).backward()
                sharded.reducer.close_pass(0)
            sharded.zero.finish_gradients()
        except (OrderError, LostPeerError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    told = run_world(4, law)
    assert any(text.startswith("OrderError") and "bucket of layers.3" in text for text in told), told


def test_between_hosts_a_secondary_shard_gathers_psi_once_a_step_and_takes_psi_over_its_ranks() -> None:
    """Over 4 ranks on 2 hosts: Ψ · 3/4 over all of them for the first forward, whatever the accumulation; all else
    within a host, Ψ · 1/2 a pass less the units that are still in their buffers (Wang et al. 2023, section 3.2)."""
    for dtype, width, accumulation in (("fp32", 4, 1), ("bf16", 2, 2)):
        given = {"model": THREE_LAYERS, "precision": {"dtype": dtype}, "training": {"accumulation": accumulation}}
        runs = [run_of(4, zero=zero, **given) for zero in (PLAIN, HPZ)]
        for plain, second in run_world(4, traffic_and_memory, runs):
            units = plain["units"]
            psi, passes = sum(units), 2 * accumulation
            kept = [sum(units[-2:]) if index % 2 else sum(units[:2]) for index in range(1, passes)]
            assert plain["sent"]["dp", "all_gather"] == width * (passes * psi - sum(kept)) * 3 // 4
            assert second["sent"].pop(("dp", "all_gather")) == width * psi * 3 // 4
            assert second["sent"].pop(("secondary", "all_gather")) == width * ((passes - 1) * psi - sum(kept)) // 2
            rest = {key: sent for key, sent in plain["sent"].items() if key != ("dp", "all_gather")}
            assert second["sent"] == rest
            assert second["memory"].pop("secondary_shard") == width * psi // 2
            assert second["memory"] == plain["memory"]


# ---------------------------------------------------------------------------------------------------------------------
# Gathers ahead


def _buffers(units: Sequence[int], prefetch: int) -> int:
    """How many buffers units take in turn: the most that hold `prefetch` elements beside the largest unit; two at least."""
    fitting = [
        n for n in range(3, len(units) + 1) if sum(max(units[at::n]) for at in range(n)) - max(units) <= prefetch
    ]
    return max([2, *fitting])


@contextmanager
def _noted() -> Iterator[list[tuple[Any, ...]]]:
    """Visits of units and the starts of gathers, in their order."""
    events: list[tuple[Any, ...]] = []
    run, gather = UnitGatherer.run, GatherBuffers.start

    def noted_run(self: UnitGatherer, unit: Unit, *, is_forward: bool) -> None:
        events.append(("runs", unit.index))
        run(self, unit, is_forward=is_forward)
        events.append(("ahead of", unit.index))

    def start(self: GatherBuffers, bucket: Bucket) -> Any:
        events.append(("gathers", bucket.layout.unit))
        return gather(self, bucket)

    with patch.object(UnitGatherer, "run", noted_run), patch.object(GatherBuffers, "start", start):
        yield events


def _gathers(rank: int, runs: Sequence[ResolvedRun]) -> list[dict[str, Any]]:
    state, found = state_on(rank, runs[0]), []
    for run in runs:
        engine = engine_on(rank, run, state=state)
        engine.train_step(micro_batches(run, state, 0), LR)
        with _noted() as events:
            engine.train_step(micro_batches(run, state, 1), LR)
        units = [bucket.layout.padded_numel for bucket in engine.sharded_model.parameters.buckets]
        found.append({"units": units, "events": events, "buffers": engine.memory_bytes()["gather_buffers"]})
    return found


BLOCK = 9280  # elements of a block, more than the embedding's and the head's


def test_units_are_gathered_ahead_by_bytes_into_as_many_buffers_as_these_hold() -> None:
    """Memory is the largest unit of each buffer, to the byte; a gather starts as soon as its bytes and its buffer allow; and
    each pass gathers what the buffers do not hold."""
    bytes_ahead = (0, BLOCK, BLOCK * 3 // 2, 2 * BLOCK, 3 * BLOCK, 100 * BLOCK)
    runs = [
        run_of(2, model=DEEP, zero={"stage": 3, "prefetch_bytes": 4 * ahead}, training={"accumulation": 2})
        for ahead in bytes_ahead
    ]
    for ahead, found in zip(bytes_ahead * 2, chain(*run_world(2, _gathers, runs)), strict=True):
        units = found["units"]
        assert max(units) == BLOCK
        count = _buffers(units, ahead)
        assert count == {0: 2, BLOCK: 2, BLOCK * 3 // 2: 2, 2 * BLOCK: 3, 3 * BLOCK: 4}.get(ahead, len(units))
        assert found["buffers"] == 4 * sum(max(units[at::count]) for at in range(count))
        order = [*range(len(units)), *reversed(range(len(units)))] * 2
        ran, held, gathered, wanted = 0, dict[int, int](), [], []
        for kind, unit in found["events"]:
            if kind == "gathers":
                held[unit % count] = unit
                gathered.append(unit)
            elif kind == "runs":
                assert order[ran] == held[unit % count] == unit
                ran += 1
            else:  # it has looked ahead
                for following in _within(order[ran:], [unit], units, ahead, count):
                    assert held[following % count] == following, (ran, unit, following)
        assert ran == len(order)
        held.clear()
        for unit in order:
            wanted += [unit] if held.get(unit % count) != unit else []
            held[unit % count] = unit
        assert gathered == wanted


def _updates(rank: int, runs: Sequence[ResolvedRun]) -> list[list[tuple[str, int]]]:
    """Of the second step and what follows it: units as they run, are gathered and, bucket by bucket, stepped."""
    state, found, start = state_on(rank, runs[0], shares_memory=False), [], WeightGathers.start_behind_forward
    for run in runs:
        engine = engine_on(rank, run, state=state)
        engine.train_step(micro_batches(run, state, 0), LR)
        with _noted() as events:

            def stepped(self: WeightGathers, bucket: Bucket, events: list[Any] = events) -> None:
                events.append(("steps", bucket.layout.unit))
                start(self, bucket)

            WeightGathers.start_behind_forward = stepped  # type: ignore[method-assign]
            engine.train_step(micro_batches(run, state, 1), LR)
            WeightGathers.start_behind_forward = start  # type: ignore[method-assign]
            engine.evaluate(micro_batches(run, state, 2))
        engine.train_step(micro_batches(run, state, 3), LR)
        engine.sharded_model.close()
        found.append([event for event in events if event[0] != "ahead of"])
    return found


def test_an_update_gathers_the_units_that_a_forward_uses_first_as_soon_as_each_is_stepped() -> None:
    """As many as a forward has under way at its first unit; it gathers the others alone, so that nothing more is sent."""
    first = {0: 1, BLOCK: 1, 3 * BLOCK: 3, 100 * BLOCK: 6}  # the embedding; and two blocks; all but the head
    runs = [run_of(2, model=DEEP, zero={"stage": 3, "prefetch_bytes": 4 * ahead}) for ahead in first]
    for count, events in zip([*first.values()] * 2, chain(*run_world(2, _updates, runs)), strict=True):
        step, update = events.index(("steps", 0)), list[tuple[str, int]]()
        for unit in range(7):
            update += [("steps", unit), ("gathers", unit)][: 2 if unit < count else 1]
        assert events[step : step + len(update)] == update
        gathered = [unit for kind, unit in events[step + len(update) :] if kind == "gathers"]
        assert gathered == list(range(count, 7))


def _buffer_bytes(rank: int, runs: Sequence[ResolvedRun], shares_memory: bool) -> list[int]:
    found, state = [], state_on(rank, runs[0], shares_memory=shares_memory)
    for run in runs:
        engine = engine_on(rank, run, state=state)
        for step in range(3):  # from the third on a forward knows what follows its first unit
            engine.train_step(micro_batches(run, state, step), LR)
        found.append(engine.memory_bytes()["gather_buffers"])
        engine.sharded_model.close()
    return found


def test_what_an_update_gathers_takes_no_more_buffers_than_a_forward(tmp_path: Path) -> None:
    """Where hosts share memory an update gathers nothing; quantized and offloaded weights pass through staging."""
    zeros: list[dict[str, Any]] = [{"quantized_weights": True}]
    zeros.append({"offload": {"parameters": "nvme", "nvme_path": str(tmp_path)}})
    sizes = (0, 12 * BLOCK, 400 * BLOCK)
    runs = [run_of(2, model=DEEP, zero={"stage": 3, "prefetch_bytes": n} | zero) for zero in zeros for n in sizes]
    assert run_world(2, _buffer_bytes, runs, False) == run_world(2, _buffer_bytes, runs, True)


def _within(coming: Sequence[int], before: list[int], units: Sequence[int], ahead: int, count: int) -> Iterator[int]:
    """The first of the coming units, and those that `ahead` elements hold, until one needs the buffer of one before it."""
    for number, unit in enumerate(coming):
        size = sum(units[one] for one in coming[: number + 1])
        if (number and size > ahead) or any(one % count == unit % count and one != unit for one in before):
            return
        before.append(unit)
        yield unit


# ---------------------------------------------------------------------------------------------------------------------
# Hybrid sharding


REPLICA = ("replica", "all_reduce")
HYBRID = ({"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "reduce": "step"})


def _calls(
    rank: int, runs: Sequence[ResolvedRun], local_world_size: int = 1
) -> list[tuple[list[tuple[str, str, int]], int, int]]:
    """Of the second step: every collective and its bytes; chunks of all buckets; bytes of buffers over their limit."""
    shards = runs[0].config.zero.shard_group_size
    grid = RankGrid(dp=runs[0].dp)
    state = ParallelState(
        replace(grid, shard_group_size=shards),
        rank,
        Links(DEVICE, timeout_seconds=60, local_world_size=local_world_size),
    )
    found, add = [], Traffic.add
    for run in runs:
        engine = engine_on(rank, run, state=state)
        calls: list[tuple[str, str, int]] = []

        def note(self: Traffic, axis: str, operation: str, sent: int, *linked: int, calls: list[Any] = calls) -> None:
            calls.append((axis, operation, sent))
            add(self, axis, operation, sent, *linked)

        engine.train_step(micro_batches(run, state, 0), LR)
        Traffic.add = note  # type: ignore[method-assign]
        engine.train_step(micro_batches(run, state, 1), LR)
        Traffic.add = add  # type: ignore[method-assign]
        reducer = engine.sharded_model.reducer
        chunks = sum(len(bucket.gradient_chunks) for bucket in reducer.buckets)
        found.append((calls, chunks, reducer.reductions.buffer_bytes - reducer.reductions.most_buffer_bytes))
    return found


@pytest.mark.parametrize(("dtype", "zeros"), [("fp32", HYBRID[1:3]), ("bf16", HYBRID)], ids=["fp32", "bf16"])
def test_replicas_sum_each_bucket_chunk_once_during_the_backward_in_the_format_of_reductions(
    dtype: str, zeros: Sequence[dict[str, Any]]
) -> None:
    """2Ψ/2 · 1/2 of `reduce_dtype` for a shard of half the parameters in 2 groups, and begun as soon as the chunk's last
    reduction within the group has ended: two chunks later at most."""
    precision = {"dtype": "bf16", "reduce_dtype": dtype}
    given = {"model": THREE_LAYERS, "precision": precision, "training": {"accumulation": 2}}
    runs = [run_of(4, zero={"shard_group_size": 2} | zero, **given) for zero in zeros]
    for results in run_world(4, _calls, runs):
        for zero, (calls, chunks, excess) in zip(zeros, results, strict=True):
            rounds = 2 if zero["stage"] > 1 and "reduce" not in zero else 1
            order = [
                axis for axis, operation, _ in calls if (axis, operation) in (("shard", "reduce_scatter"), REPLICA)
            ]
            sums = [sent for axis, operation, sent in calls if (axis, operation) == REPLICA]
            reduced = sum(sent for axis, operation, sent in calls if (axis, operation) == ("shard", "reduce_scatter"))
            assert len(sums) == chunks
            assert order.count("shard") == chunks * rounds
            assert sum(sums) * rounds == reduced  # 2 · 1/2 of half the elements, and 1/2 of all of them
            behind = order[: order.index("replica")].count("shard")
            assert behind - chunks * (rounds - 1) <= 3, zero
            assert excess <= 0


def test_replicas_sum_during_the_backward_also_where_reductions_need_no_call_of_the_rank() -> None:
    """Shards over two hosts of two: reductions run in a thread, without scratch, as NCCL's do in a stream."""
    zeros = [{"stage": 1}, {"stage": 3, "reduce": "step"}]
    runs = [run_of(8, zero={"shard_group_size": 4} | zero, model=UNTIED) for zero in zeros]
    for results in run_world(8, _calls, runs, 2):
        for zero, (calls, chunks, _) in zip(zeros, results, strict=True):
            order = [
                axis for axis, operation, _ in calls if (axis, operation) in (("shard", "reduce_scatter"), REPLICA)
            ]
            assert order.count("shard") == order.count("replica") == chunks
            assert order[: order.index("replica")].count("shard") <= 3, zero


def test_groups_that_share_the_state_train_as_one_group_does_even_if_every_result_comes_late() -> None:
    """Up to the order of sums."""
    zeros = [HYBRID[0], HYBRID[2]]
    runs = [run_of(4, model=UNTIED, zero=zero, training={"accumulation": 2}) for zero in zeros]
    groups = [
        run_of(4, model=UNTIED, zero=zero | {"shard_group_size": 2}, training={"accumulation": 2}) for zero in zeros
    ]
    one_group = run_world(4, _results, runs, [False] * len(runs))[0]
    for zero, whole, split in zip(zeros, one_group, run_world(4, _results, groups, [True] * len(runs))[0], strict=True):
        assert split["loss"] == pytest.approx(whole["loss"], rel=1e-6), zero
        assert split["norm"] == pytest.approx(whole["norm"], rel=1e-5), zero
        assert_same(split["gradients"], whole["gradients"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("late", [False, True])
def test_a_micro_batch_that_follows_the_last_one_is_added_to_the_sums_of_all_groups(late: bool) -> None:
    """A script may end a step later than it has said: each group then adds to what all groups have summed."""

    def law(rank: int) -> None:
        step = random_batches(1, 4, 3, 3, 16)[0]
        expected = plain_gradients(seeded(_Experts), step)
        with delayed_collectives(rank) if late else nullcontext():
            for zero in HYBRID:
                sharded = Sharded(seeded(_Experts), rank=rank, world=4, shard_group_size=2, **zero)
                sharded.zero.begin_step(1)
                for number, batch in enumerate(step[rank], 1):
                    if number > 1:
                        sharded.reducer.reopen()
                        sharded.reducer.rounds = number
                    sharded.module(batch).backward()
                    sharded.reducer.close_pass(0)
                sharded.zero.finish_gradients()
                assert_same(sharded.whole("gradient"), expected)

    run_world(4, law)
