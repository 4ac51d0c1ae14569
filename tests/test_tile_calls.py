"""Many tiles in one call of a variable-length kernel: the numbers of plain attention, whatever documents and window.

The kernel is CUDA's; here loops over pieces stand for it, which also check what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from harness import run_world
from torch import Tensor

from megazero.layers import attention_kernels, tile_calls
from megazero.layers.attention_kernels import CAUSAL, EVERY_KEY, Pieces, Sight, packs_tiles
from megazero.layers.context_attention import ContextAttention
from megazero.layers.sample_part import part_of
from megazero.layers.tile_calls import EVERYTHING, OneTile, PackedTiles, calls
from megazero.parallel_state import Axis, ParallelState, RankGrid

HEADS, KV_HEADS, SIZE, SEQ = 4, 2, 8, 48
CPU, WHOLE = torch.device("cpu"), Axis("whole")
DOCUMENTS: dict[str, list[list[int]]] = {
    "two samples": [[7, 1, 20, 1, 1, 18], [48]],
    "one sample": [[16, 16, 16]],
    "of one token": [[1] * 48, [1] * 20 + [28]],
}


def _pieces(q: Tensor, k: Tensor, pieces: Pieces) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, keys, scores [heads, rows, keys]) of each piece, as flash attention masks them (set_params_fprop and mask.h);
    checks what torch's kernels do not."""
    q_ends, k_ends, most_queries, most_keys, (before, after) = pieces
    assert min(before, after) >= -1
    before, after = (-1 if count >= most_keys else count for count in (before, after))
    if before < 0 <= after:
        before = most_keys
    elif after < 0 <= before:
        after = most_keys
    assert q_ends.dtype == k_ends.dtype == torch.int32
    assert (int(q_ends[-1]), int(k_ends[-1])) == (len(q), len(k))  # exact: no padding at the tail
    sizes = q_ends.diff(), k_ends.diff()
    assert all(size.min() > 0 for size in sizes)
    assert [int(size.max()) for size in sizes] == [most_queries, most_keys]
    assert (before, after) != CAUSAL or sizes[0].equal(sizes[1])
    for a, b, c, d in zip(q_ends[:-1], q_ends[1:], k_ends[:-1], k_ends[1:], strict=True):
        rows, keys = slice(int(a), int(b)), slice(int(c), int(d))
        scores = torch.einsum("qhd,khd->hqk", q[rows], _of_heads(k[keys])) * SIZE**-0.5
        at = torch.arange(int(b - a)) + int((d - c) - (b - a))  # the key that each row stands beside
        ahead = torch.arange(int(d - c)) - at[:, None]
        unseen = ((before >= 0) & (ahead < -before)) | ((after >= 0) & (ahead > after))
        assert not unseen.all(1).any()  # the kernel would give such rows zeros
        yield rows, keys, scores.masked_fill(unseen, -torch.inf)


def _of_heads(x: Tensor) -> Tensor:
    return x.repeat_interleave(HEADS // KV_HEADS, dim=1)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(HEADS, len(q))
    for rows, keys, scores in _pieces(q, k, pieces):
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _of_heads(v[keys]))
    return out, lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pieces: Pieces
) -> tuple[Tensor, ...]:
    """dS = P (dO v^T - rowsum(dO O)), as in FlashAttention-2."""
    assert lse.shape == (q.shape[1], len(q))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for rows, keys, scores in _pieces(q, k, pieces):
        p = (scores - lse[:, rows, None]).exp()
        inner = torch.einsum("qhd,khd->hqk", grad[rows], _of_heads(v[keys]))
        ds = p * (inner - (grad[rows] * out[rows]).sum(-1).t()[..., None]) * SIZE**-0.5
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, _of_heads(k[keys]))
        of_keys = torch.einsum("hqk,qhd->khd", ds, q[rows]), torch.einsum("hqk,qhd->khd", p, grad[rows])
        dk[keys], dv[keys] = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in of_keys)
    return dq, dk, dv


def _inputs(batch: int, seq: int = SEQ) -> list[Tensor]:
    """q, k, v and the gradient of the output, [batch, heads, seq, size] with seq first in memory, as a layer has them."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    drawn = (torch.randn(seq, batch, n, SIZE, dtype=torch.float64, generator=generator) for n in heads)
    return [x.permute(1, 2, 0, 3) for x in drawn]


def _attend(
    rank: int, world: int, cases: list[tuple[list[list[int]], int | None]]
) -> list[tuple[Tensor, list[Tensor]]]:
    state = ParallelState(RankGrid(cp=world), rank, timeout_seconds=60)
    tile_calls.packs_tiles = lambda q: True
    tile_calls.varlen_forward, tile_calls.varlen_backward = _plain_forward, _plain_backward
    found = []
    for lengths, window in cases:
        part = part_of(lengths, SEQ, WHOLE, state.cp_ring, CPU)
        assert part is not None
        rows = part.rows.t()[:, None, :, None]
        q, k, v, grad = (x.take_along_dim(rows, 2).requires_grad_() for x in _inputs(len(lengths)))
        out = ContextAttention(WHOLE, state.cp_ring, window, torch.float32).attend(q, k, v, part)
        found.append((rows, [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]))
    return found


def _formula(lengths: list[list[int]], window: int | None) -> list[Tensor]:
    """out, dq, dk and dv of softmax(q k^T / sqrt(size)) v in one piece, with a mask."""
    seq = sum(lengths[0])
    q, k, v, grad = (x.requires_grad_() for x in _inputs(len(lengths), seq))
    document = torch.stack([torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in lengths])
    back = torch.arange(seq)[:, None] - torch.arange(seq)
    seen = (document[:, :, None] == document[:, None]) & (back >= 0) & (back < (window or seq))
    scores = q @ k.repeat_interleave(HEADS // KV_HEADS, 1).mT * SIZE**-0.5
    p = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    out = p @ v.repeat_interleave(HEADS // KV_HEADS, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_packed_tiles_give_plain_attention(world: int) -> None:
    cases = [(lengths, window) for lengths in DOCUMENTS.values() for window in (None, 5, 17, 24)]
    results = run_world(world, _attend, world, cases)
    for number, case in enumerate(cases):
        rows = torch.cat([result[number][0] for result in results], 2)
        for parts, wanted in zip(
            zip(*(result[number][1] for result in results), strict=True), _formula(*case), strict=True
        ):
            got = torch.empty_like(wanted).scatter_(2, rows.expand_as(wanted), torch.cat(parts, 2))
            torch.testing.assert_close(
                got, wanted, rtol=1e-6 if world > 1 else 1e-12, atol=1e-6 if world > 1 else 1e-12
            )


def _calls_of(lengths: list[list[int]], ring: Axis, source: int, batch: int, window: int | None = None) -> list[object]:
    part = part_of(lengths, SEQ, WHOLE, ring, CPU)
    assert part is not None
    q = torch.empty(batch, HEADS, SEQ // ring.size, SIZE)
    first = calls(part, source, window, q, q)
    assert calls(part, source, window, q, q) is first  # made once for all layers
    return list(first)


def test_a_step_has_two_calls_at_most_and_its_own_documents_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_calls, "packs_tiles", lambda q: True)
    for name, lengths in DOCUMENTS.items():
        for index, source in ((0, 0), (0, 1), (1, 0), (1, 1)):
            found = _calls_of(lengths, Axis("ring", (0, 1), index), source, len(lengths))
            assert len(found) <= 2, name
            if source == index and name != "of one token":
                (one,) = found
                assert isinstance(one, PackedTiles)
                assert one.queries is one.keys is EVERYTHING
    assert isinstance(_calls_of([[SEQ]], WHOLE, 0, 1)[0], OneTile)  # as torch's own attention of whole samples
    monkeypatch.setattr(tile_calls, "_MOST_TILES", 10)
    assert [len(one.pieces.q_ends) - 1 for one in _calls_of([[1] * SEQ], WHOLE, 0, 1)] == [10, 10, 10, 10, 8]  # type: ignore[attr-defined]


def _sights_of(found: list[object]) -> list[tuple[Sight, bool]]:
    """Of packed calls: what is seen, and whether rows are taken as they lie."""
    return [(one.pieces.sight, one.queries is one.keys is EVERYTHING) for one in found]  # type: ignore[attr-defined]


def test_a_sliding_window_is_the_kernels_own_and_never_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_calls, "packs_tiles", lambda q: True)
    monkeypatch.setattr(tile_calls, "OneTile", None)  # what takes masks
    causal = Sight(4, 0)
    for lengths in ([[SEQ]], [[SEQ], [20, 28]], [[2, 40, 5, 1]]):  # documents longer and shorter than the window of 5
        assert _sights_of(_calls_of(lengths, WHOLE, 0, len(lengths), window=5)) == [(causal, True)], lengths
    ring = Axis("ring", (0, 1), 0)  # positions 0-11 and 36-47; rank 1 has 12-35
    assert _sights_of(_calls_of([[SEQ]], ring, 0, 1, window=5)) == [(causal, True)]
    # queries 36-39 see keys 32-35: the last query stands 4 behind the last key
    assert _sights_of(_calls_of([[SEQ]], ring, 1, 1, window=5)) == [(Sight(0, -1), False)]


def test_flash_attention_is_given_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators know the names, and take them where the schema says."""
    given: list[dict[str, int]] = []

    class Operators:
        def _flash_attention_forward(self, *_: object, **window: int) -> list[object]:
            names = {one.name for one in torch.ops.aten._flash_attention_forward.default._schema.arguments}
            assert window.keys() < names
            assert (_[-2], len(_)) == (window == {"window_size_left": -1, "window_size_right": 0}, 10)
            given.append(window)
            return [None, None]

        def _flash_attention_backward(self, *_: object, **window: int) -> list[object]:
            names = {one.name for one in torch.ops.aten._flash_attention_backward.default._schema.arguments}
            assert window.keys() < names
            assert (_[-3], len(_)) == (window == {"window_size_left": -1, "window_size_right": 0}, 14)
            given.append(window)
            return [None, None, None]

    monkeypatch.setattr(attention_kernels, "_aten", Operators())
    x, ends = torch.empty(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    for sight in (EVERY_KEY, CAUSAL, Sight(4, 0)):
        pieces = Pieces(ends, ends, 4, 4, sight)
        attention_kernels.varlen_forward(x, x, x, pieces)
        attention_kernels.varlen_backward(x, x, x, x, x, x, pieces)
        assert given[-2:] == [{"window_size_left": sight.before, "window_size_right": sight.after}] * 2


def test_only_cuda_in_16_bits_packs_and_its_heads_are_multiples_of_8() -> None:
    class OnCuda:
        def __init__(self, dtype: torch.dtype, size: int) -> None:
            self.dtype, self.shape, self.is_cuda = dtype, (1, HEADS, SEQ, size), True

    assert not packs_tiles(torch.empty(1, 1, 1, 8, dtype=torch.bfloat16))
    assert not packs_tiles(OnCuda(torch.float32, 12))  # type: ignore[arg-type]
    assert packs_tiles(OnCuda(torch.bfloat16, 64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_dim to 16"):
        packs_tiles(OnCuda(torch.float16, 12))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 600])
def test_long_documents_on_a_cpu_give_plain_attention(window: int | None) -> None:
    """Their causal tiles are cut (cpu/attention.py); gradients have the type of what they are of."""
    lengths = [[300, 511, 60], [871]]
    part = part_of(lengths, 871, WHOLE, WHOLE, CPU)
    assert part is not None
    q, k, v, grad = _inputs(2, 871)
    errors = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = ContextAttention(WHOLE, WHOLE, window, torch.float32).attend(*leaves, part)
        got = [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]
        assert {x.dtype for x in got} == {dtype}
        wanted = _formula(lengths, window)
        errors.append(
            max(float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(got, wanted, strict=True))
        )
    assert errors[0] < 1e-12
    assert errors[1] < 2e-2
