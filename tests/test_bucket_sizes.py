"""Sizes of buckets: what a link, a host and a memory limit ask for; and that no number of a run depends on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import DEVICE, run_world
from torch import Tensor
from worlds import LR, engine_on, micro_batches, run_of, state_on, whole

from megazero.config import ResolvedRun
from megazero.parallel_state import Axis, Links, ParallelState, RankGrid
from megazero.zero.bucket_plan import DEFAULT_BYTES, BucketSizes, bucket_sizes
from megazero.zero.reductions import ReductionQueue
from megazero.zero.sharding import Placement, ShardingPolicy

MIB = 2**20


def _sizes(ranks: int, numel: int, *, device: str = "cpu", hides: bool = True, cuts: bool = False) -> BucketSizes:
    axis = Axis("dp", tuple(range(ranks)))
    policy = ShardingPolicy(
        2 if cuts else 1, torch.float32, Placement(axis, Axis("replica")), torch.device(device), on_cpu=device == "cpu"
    )
    return bucket_sizes("auto", policy, numel, cuts=cuts, hides=hides)


@pytest.mark.parametrize("cuts", [False, True])
def test_over_sockets_pieces_are_no_smaller_than_half_a_mebibyte_and_buckets_few(cuts: bool) -> None:
    for ranks in (2, 4, 8, 64, 512):
        for numel in (10**6, 4 * 10**6, 10**8, 7 * 10**9):
            sizes = _sizes(ranks, numel, cuts=cuts)
            nbytes = 4 * sizes.elements
            most = max(DEFAULT_BYTES, 4 * numel // 8) * (0.4 if cuts else 1)
            assert nbytes >= min(MIB // 2 * ranks, 0.99 * most)
            assert numel / sizes.elements < 65 or nbytes >= 0.99 * DEFAULT_BYTES * (0.4 if cuts else 1)
            # one fills, two are sent and two arrive, within two buckets' worth of memory
            assert 2 * sizes.bucket_bytes >= (5 if cuts else 2) * nbytes * 0.99
            assert sizes.bucket_bytes == DEFAULT_BYTES or ranks >= 64


def test_a_small_model_has_buckets_to_hide_behind_its_backward() -> None:
    """The benchmarks' `tiny`, 3.7 M parameters, between two hosts; a block's attention fits into one."""
    assert 3_700_000 // _sizes(2, 3_700_000).elements >= 13
    assert _sizes(2, 3_700_000).elements >= 4 * 256**2 + 2 * 256


def test_in_the_memory_of_one_host_and_on_devices_buckets_are_large() -> None:
    assert _sizes(2, 10**6, hides=False) == BucketSizes(DEFAULT_BYTES // 4, DEFAULT_BYTES)
    assert _sizes(8, 10**9, device="cuda") == BucketSizes(DEFAULT_BYTES // 4, DEFAULT_BYTES)
    assert _sizes(512, 10**10, device="cuda") == BucketSizes(512 * MIB // 4, 512 * MIB)
    assert _sizes(1, 10**9, hides=False) == BucketSizes(MIB, 4 * MIB)  # nothing is sent


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_over_any_number_of_ranks_there_are_buckets_to_hide_and_buffers_stay_below_whole_gradients(device: str) -> None:
    """Else stage 2 over 2,048 ranks would take more memory than stage 1."""
    for ranks in (512, 2048, 16384):
        for numel in (10**8, 10**9, 10**10):
            assert numel / _sizes(ranks, numel, device=device).elements >= 8
            buffers = 2 * _sizes(ranks, numel, device=device, cuts=True).bucket_bytes
            assert buffers <= max(2 * DEFAULT_BYTES, 4 * numel // 4)


def _sizes_between_hosts(rank: int, run: ResolvedRun, local_world_size: int) -> tuple[BucketSizes, float]:
    parallel, group = run.config.parallel, run.config.zero.shard_group_size
    grid = RankGrid(tp=parallel.tp, dp=run.dp)
    state = ParallelState(
        replace(grid, shard_group_size=group), rank, Links(timeout_seconds=20, local_world_size=local_world_size)
    )
    engine = engine_on(rank, run, state=state)
    norm = engine.train_step(micro_batches(run, state, 0), LR).grad_norm
    return engine.sharded_model.parameters.sizes, norm


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on GPUs all axes have NCCL")
@pytest.mark.parametrize(
    "sections",
    [{"zero": {"stage": 1, "shard_group_size": 2}}, {"parallel": {"tp": 2}, "zero": {"stage": 1}}],
    ids=["shard groups of 2", "tp 2"],
)
def test_ranks_have_the_same_buckets_where_some_groups_are_within_a_host_of_3_and_others_are_not(
    sections: dict[str, Any],
) -> None:
    """Of two groups one may share memory while the other sends messages."""
    sections["zero"]["bucket_bytes"] = "auto"
    large = {"family": "llama", "hidden_size": 128, "ffn_hidden_size": 1024, "vocab_size": 2048}
    found = run_world(4, _sizes_between_hosts, run_of(4, model=large, **sections), 3, timeout=60)
    assert len(set(found)) == 1, found


def test_a_size_that_is_set_is_the_size() -> None:
    policy = ShardingPolicy(1, torch.float32, Placement(Axis("dp", (0, 1)), Axis("replica")), torch.device("cpu"))
    assert bucket_sizes(8192, policy, 10**9, cuts=False, hides=True) == BucketSizes(2048, 8192)
    assert bucket_sizes(8192, policy, 10**9, cuts=True, hides=True) == BucketSizes(800, 8192)


def _gradients(rank: int, runs: list[ResolvedRun]) -> list[tuple[int, dict[str, Tensor] | None, Any]]:
    """Of each run: most reductions under way at once, the gradients, and buffers and their limit."""
    found, state = [], state_on(rank, runs[0], shares_memory=False)
    finish = ReductionQueue.finish
    for run in runs:
        engine, under_way = engine_on(rank, run, state=state), [0]

        def count(self: ReductionQueue, under_way: list[int] = under_way) -> None:
            under_way.append(len(self._in_flight))
            finish(self)

        with patch.object(ReductionQueue, "finish", count):
            engine.compute_gradients(micro_batches(run, state, 0))
        reducer = engine.sharded_model.reducer
        parts = sum(len(bucket.gradient_chunks) for bucket in reducer.buckets)
        sizes = reducer.reductions.buffer_bytes, reducer.reductions.most_buffer_bytes
        found.append((parts - max(under_way), whole(engine, "gradient"), sizes))
        engine.sharded_model.close()
    return found


@pytest.mark.skipif(DEVICE.type != "cpu", reason="over gloo")
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_have_the_same_bits_in_buckets_of_any_size_and_all_are_under_way_at_the_end(stage: int) -> None:
    """Those of `"auto"`, that is: with a small `bucket_bytes` they wait for buffers, whose limit holds."""
    sizes: tuple[int | str, ...] = ("auto", 65536, 4096)
    runs = [
        run_of(
            4, model={"family": "llama"}, zero={"stage": stage, "bucket_bytes": size}, training={"micro_batch_size": 2}
        )
        for size in sizes
    ]
    for of_rank in run_world(4, _gradients, runs):
        wanted = of_rank[0][1]
        for size, (finished, gradients, (buffers, most)) in zip(sizes, of_rank, strict=True):
            assert buffers <= most, size
            assert finished == 0 or size != "auto", size
            assert (gradients is None) == (wanted is None)
            if gradients is not None and wanted is not None:
                assert all(torch.equal(gradients[name], wanted[name]) for name in wanted), size
