"""The comparison of context parallelism computes one attention in many ways, and two hosts are joined by a slow link."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.attention_work import AttentionWork
from benchmarks.context import BUILDERS, FLOORS, HYBRID, Line, measure, peaks_of
from benchmarks.hosts_net import Network, NoHostsError, hosts_of
from benchmarks.worlds import World

pytestmark = pytest.mark.slow  # starts whole runs

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
DEEPSPEED = "DeepSpeed Ulysses"
ROOT = Path(__file__).parent.parent


def _by_name(work: AttentionWork, names: list[str]) -> dict[str, Line]:
    lines, rounds = measure(work, peaks_of(work, names), seconds=0)
    assert rounds == 3
    return {line.name: line for line in lines}


@pytest.mark.parametrize(("world", "dtype"), [(4, "bf16")])
def test_every_way_computes_attention_of_the_whole_sequence(world: int, dtype: str) -> None:
    names = [name for name in BUILDERS if name != DEEPSPEED and (name != HYBRID or world > 2)]
    lines = _by_name(AttentionWork(64, world, dtype, 8, 2, 16), names)
    assert not [line for line in lines.values() if line.failure]
    assert all(line.error is not None for name, line in lines.items() if name not in FLOORS)
    floor = min(lines[name].ms[0] for name in FLOORS)  # type: ignore[index]
    assert all(line.above_floor is not None for line in lines.values())
    assert any(line.above_floor == 0 and line.ms[0] == floor for line in lines.values())  # type: ignore[index]
    # The interfaces count what else this machine sends, too.
    assert lines["gathered keys"].sent_bytes >= _gathered_bytes(world, dtype)  # type: ignore[operator]
    assert lines["megazero ring"].metered_bytes == _ring_bytes(world, dtype)
    assert lines["megazero Ulysses over gloo"].metered_bytes == _ulysses_bytes(world, dtype)


def _gathered_bytes(world: int, dtype: str) -> float:
    """Keys and values to all other ranks, and as much of their gradients: 64 tokens, 2 heads of 16."""
    return 2 * 2 * {"bf16": 2, "fp32": 4}[dtype] * (2 * 16) * 64 * (world - 1) / world


def _ring_bytes(world: int, dtype: str) -> float:
    """Keys and values twice, and their gradients in fp32 once, to all other ranks: 64 tokens, 2 heads of 16."""
    element = {"bf16": 2, "fp32": 4}[dtype]
    return 2 * (2 * element + 4) * (2 * 16) * 64 * (world - 1) / world


def _ulysses_bytes(world: int, dtype: str) -> float:
    """Of a rank's queries and result, and of keys and values with a head for each rank at least, forward and back."""
    element = {"bf16": 2, "fp32": 4}[dtype]
    return 2 * element * (2 * 8 * 16 + 2 * max(2, world) * 16) * (64 / world) * (world - 1) / world


@needs_deepspeed
@pytest.mark.parametrize("world", [2, 4])
def test_deepspeed_computes_it_with_fewer_heads_of_keys_than_ranks(world: int) -> None:
    line = _by_name(AttentionWork(64, world, "fp32", 4, 2, 16), [DEEPSPEED])[DEEPSPEED]
    assert line.failure is None
    assert line.error is not None


class _Sends:
    """Rank 0 sends a tensor to rank 1."""

    dp_index = 0

    def __init__(self, rank: int, *, size: int) -> None:
        self._rank, self._tensor = rank, torch.zeros(size, dtype=torch.uint8)

    def step(self, *batch: torch.Tensor) -> None:
        (dist.recv if self._rank else dist.send)(self._tensor, 1 - self._rank)


def _turn(network: Network, size: int) -> tuple[float, float]:
    """Seconds and bytes over the link."""
    world = World("sends", partial(_Sends, size=size), AttentionWork(64, 2), network)
    try:
        world.turn(range(1))
        turn = world.turn(range(1))
        return turn.seconds[0], turn.link_bytes
    finally:
        world.close()


def test_two_hosts_are_joined_by_a_link_of_the_rate_that_was_asked_for() -> None:
    size, mbit = 4_000_000, 100
    try:
        with hosts_of(2, mbit) as network:
            seconds, sent = _turn(network, size)
    except NoHostsError as error:
        pytest.skip(str(error))
    assert size <= sent < 1.2 * size
    assert seconds > 0.9 * (size - 200_000) * 8 / (mbit * 1e6)  # the bucket holds 128 KB that go at once
