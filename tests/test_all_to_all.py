"""All-to-all: who gets which part, from any memory, and the exchange of heads for sequence that Ulysses makes of it.

What attention makes of that: test_context_attention.py.
"""

from __future__ import annotations

import pytest
import torch
from harness import run_world
from torch import Tensor

from megazero.comm.collectives import all_to_all
from megazero.comm.head_exchange import SequenceForHeads, start_heads_for_sequence
from megazero.comm.messages import OrderError
from megazero.cpu.shared_memory import HALF_BYTES, SharedMemoryBackend
from megazero.cpu.sockets import SocketBackend
from megazero.parallel_state import Axis, Links, ParallelState, RankGrid

LONG = HALF_BYTES // 4 + 40  # fp32 elements: several rounds, and the last one short
SHAPES = ((), (0,), (3, 0, 2), (1,), (7, 3), (2, LONG), (90, 2, 5, 64))
WORLDS = [(2, True), (3, True), (4, True), (2, False), (3, False), (4, False)]
worlds = pytest.mark.parametrize(("world", "shares"), WORLDS)


def _axis(rank: int, world: int, shares: bool = True, timeout_seconds: float = 60) -> Axis:
    links = Links(timeout_seconds=timeout_seconds, shares_memory=shares)
    return ParallelState(RankGrid(cp=world, cp_ulysses=world), rank, links).cp_ulysses


def _message(source: int, target: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    return ((numbers * 7 + source * 31 + target * 5) % 127).to(dtype)


def _everything_arrives(rank: int, world: int, shares: bool) -> None:
    axis = _axis(rank, world, shares)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in SHAPES:
            x = torch.stack([_message(rank, target, shape, dtype) for target in range(world)])
            wanted = torch.stack([_message(source, rank, shape, dtype) for source in range(world)])
            backwards = list(range(x.dim()))[::-1]
            turned = x.permute(backwards).contiguous().permute(backwards)  # the same values in another order in memory
            for sent, out in ((x, torch.zeros_like(x)), (turned, torch.zeros_like(turned))):
                axis.traffic.reset()
                all_to_all(out, sent, axis).wait()
                assert torch.equal(out, wanted), (dtype, shape)
                sent_bytes = (world - 1) * wanted[0].numel() * wanted.element_size()
                assert axis.traffic.by_axis() == {"cp": sent_bytes}
    assert isinstance(axis.group.backends["cpu"], SharedMemoryBackend if shares else SocketBackend)


@worlds
def test_part_j_of_rank_i_arrives_as_part_i_on_rank_j(world: int, shares: bool) -> None:
    run_world(world, _everything_arrives, world, shares)


@pytest.mark.parametrize(
    ("out", "x"),
    [(torch.zeros(2, 3), torch.zeros(2, 4)), (torch.zeros(2), torch.zeros(2).int()), 2 * (torch.zeros(3),)],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(out: Tensor, x: Tensor) -> None:
    axis = Axis("cp", (0, 1))
    with pytest.raises(ValueError, match="over cp of 2 ranks"):
        all_to_all(out, x, axis)
    assert not axis.traffic.calls


def _shapes_differ(rank: int) -> str:
    axis = _axis(rank, 2)
    x = torch.zeros((2, 3, 2) if rank else (2, 2, 3))
    with pytest.raises(OrderError) as caught:
        all_to_all(torch.empty_like(x), x, axis).wait()
    return str(caught.value)


def test_ranks_with_other_shapes_are_an_error_that_names_both() -> None:
    said = run_world(2, _shapes_differ)[0]
    assert "all_to_all of [2, 3, 2]" in said
    assert "all_to_all of [2, 2, 3]" in said


# ---------------------------------------------------------------------------------------------------------------------
# Heads for sequence

BATCH, SEQ, SIZE = 2, 24, 8


def _whole(heads: int, seed: int) -> Tensor:
    """[batch, heads, seq, size] of all ranks, as a view of [seq, batch, heads, size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SEQ, BATCH, heads, SIZE, generator=generator, dtype=torch.float64).permute(1, 2, 0, 3)


def _heads_for_sequence(x: Tensor, axis: Axis, heads: slice) -> Tensor:
    result, pending = start_heads_for_sequence(x, axis, heads)
    pending.wait()
    return result


def _moved(rank: int, world: int, shares: bool) -> None:
    """All heads of a rank at once, then in two exchanges that are under way together."""
    axis, whole = _axis(rank, world, shares), _whole(3 * world, 0)
    for dtype in (torch.float32, torch.bfloat16):
        for memory in (whole.to(dtype), whole.to(dtype).contiguous()):
            mine, of_heads = memory.chunk(world, dim=2)[rank], memory.chunk(world, dim=1)[rank]
            for pieces in ([slice(0, 3)], [slice(0, 1), slice(1, 3)]):
                back = SequenceForHeads(axis, 3)
                for heads in pieces:
                    got = _heads_for_sequence(mine, axis, heads)
                    assert torch.equal(got, of_heads[:, heads])
                    assert got.stride(-1) == 1
                    back.start(got, heads)
                assert torch.equal(back.result(), mine)
                assert back.result().permute(2, 0, 1, 3).is_contiguous()
    calls, sent = axis.traffic.calls["cp", "all_to_all"], axis.traffic.sent_bytes["cp", "all_to_all"]
    assert calls == 4 * (2 + 4)
    assert sent == 2 * 4 * (4 + 2) * whole.numel() // world * (world - 1) // world


@worlds
def test_rank_i_has_the_ith_piece_of_the_sequence_and_gets_the_ith_group_of_heads(world: int, shares: bool) -> None:
    run_world(world, _moved, world, shares)
