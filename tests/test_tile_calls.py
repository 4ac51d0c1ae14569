"""Many tiles in one call of a variable-length kernel: the numbers of plain attention, whatever documents and window.

The kernel is CUDA's; here loops over segments stand for it, which also check what it is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from harness import DEVICE
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl

from megazero.layers import attention_kernels, tile_calls
from megazero.layers.attention_kernels import CAUSAL, EVERY_KEY, Segments, Sight, TileKernel, merge, packs_tiles
from megazero.layers.context_attention import ContextAttention, KernelWindow
from megazero.layers.sequence_shard import sequence_shard
from megazero.layers.tile_calls import EVERYTHING, OneTile, PackedTiles, calls
from megazero.layers.token_layout import Tile
from megazero.parallel_state import Axis

HEADS, KV_HEADS, SIZE, SEQ = 4, 2, 8, 48
CPU, WHOLE = torch.device("cpu"), Axis("whole")
DOCUMENTS: dict[str, list[list[int]]] = {
    "two samples": [[7, 1, 20, 1, 1, 18], [48]],
    "one sample": [[16, 16, 16]],
    "of one token": [[1] * 48, [1] * 20 + [28]],
}


def _segments(q: Tensor, k: Tensor, segments: Segments) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, keys, scores [heads, rows, keys]) of each segment, as flash attention masks them (set_params_fprop and mask.h);
    checks what torch's kernels do not."""
    q_ends, k_ends, most_queries, most_keys, (before, after) = segments
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


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(HEADS, len(q))
    for rows, keys, scores in _segments(q, k, segments):
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _of_heads(v[keys]))
    return out, lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, ...]:
    """dS = P (dO v^T - rowsum(dO O)), as in FlashAttention-2."""
    assert lse.shape == (q.shape[1], len(q))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for rows, keys, scores in _segments(q, k, segments):
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


def _in_ring(size: int, lengths: list[list[int]], window: int | None) -> list[Tensor]:
    """out, dq, dk and dv of all tokens, in order: what the ranks of a ring compute, one after the other."""
    dtype, seq = torch.float64 if DEVICE.type == "cpu" else torch.bfloat16, sum(lengths[0])
    q, k, v, grad = (x.to(DEVICE, dtype) for x in _inputs(len(lengths), seq))
    rings = [Axis("ring", tuple(range(size)), index) for index in range(size)]
    shards = [sequence_shard(lengths, seq, WHOLE, ring, DEVICE) for ring in rings]
    rows = [shard.rows.t()[:, None, :, None] for shard in shards if shard is not None]
    its_k, its_v = ([x.take_along_dim(of_rank, 2) for of_rank in rows] for x in (k, v))
    out, dq = (torch.zeros(q.shape, dtype=torch.float64, device=DEVICE) for _ in range(2))
    gradients = [[torch.zeros(x.shape, dtype=torch.float64, device=DEVICE) for x in its] for its in (its_k, its_v)]
    for of_rank, shard in zip(rows, shards, strict=True):
        assert shard is not None
        own_q, own_grad = (x.take_along_dim(of_rank, 2) for x in (q, grad))
        own_out = torch.zeros_like(own_q, dtype=torch.promote_types(dtype, torch.float32))
        lse = torch.full_like(own_out[..., 0], -torch.inf)
        its_calls = [
            (source, one) for source in range(size) for one in calls(shard, source, window, own_q, its_k[source])
        ]
        for source, call in its_calls:
            mine, its_lse = own_out[call.queries], lse[call.queries]
            merge(mine, its_lse, *call.forward(own_q, its_k[source], its_v[source]))
            own_out[call.queries], lse[call.queries] = mine, its_lse
        own_dq = torch.zeros_like(own_q, dtype=torch.float64)
        for source, call in its_calls:
            given = own_grad, own_q, its_k[source], its_v[source], own_out.to(dtype), lse
            of_queries, *of_keys = call.backward(*given)
            own_dq[call.queries] += of_queries
            for sums, found in zip(gradients, of_keys, strict=True):
                sums[source][call.keys] += found
        for whole, own in ((out, own_out), (dq, own_dq)):
            whole.scatter_(2, of_rank.expand_as(own), own.double())
    dk, dv = (torch.cat(its, 2) for its in gradients)
    places = torch.cat(rows, 2).expand_as(dk)
    return [out.cpu(), dq.cpu(), *(torch.empty_like(x).scatter_(2, places, x).cpu() for x in (dk, dv))]


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


@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed_tiles_give_plain_attention(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA in bf16, in whichever kernels are chosen there."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(tile_calls, "packs_tiles", lambda q: True)
        monkeypatch.setattr(tile_calls, "varlen_forward", _plain_forward)
        monkeypatch.setattr(tile_calls, "varlen_backward", _plain_backward)
        monkeypatch.setattr(tile_calls, "takes_cudnn", lambda q, k: True)
    monkeypatch.setattr(tile_calls, "_LEAST_ROWS", 16)
    cases = [(lengths, window) for lengths in DOCUMENTS.values() for window in (None, 5, 17, 24)]
    for lengths, window in [*cases, *(([[300, 1, 211, 512]], window) for window in (None, 100, 400))]:
        for got, wanted in zip(_in_ring(size, lengths, window), _formula(lengths, window), strict=True):
            error = float((got - wanted).abs().max() / wanted.abs().max())
            assert error < (1e-12 if DEVICE.type == "cpu" else 2e-2), (lengths, window)


def _calls_of(lengths: list[list[int]], ring: Axis, source: int, batch: int, window: int | None = None) -> list[object]:
    shard = sequence_shard(lengths, SEQ, WHOLE, ring, CPU)
    assert shard is not None
    q = torch.empty(batch, HEADS, SEQ // ring.size, SIZE)
    first = calls(shard, source, window, q, q)
    assert calls(shard, source, window, q, q) is first  # made once for all layers
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
    assert [len(one.segments.q_ends) - 1 for one in _calls_of([[1] * SEQ], WHOLE, 0, 1)] == [10, 10, 10, 10, 8]  # type: ignore[attr-defined]


def _sights_of(found: list[object]) -> list[tuple[Sight, bool]]:
    """Of packed calls: what is seen, and whether rows are taken as they lie."""
    return [(one.segments.sight, one.queries is one.keys is EVERYTHING) for one in found]  # type: ignore[attr-defined]


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
    """Its operators know the names, and take arguments where the schema says; without a window they are given none."""
    given: list[dict[str, object]] = []

    class Operators:
        def __getattr__(self, operator: str) -> Any:
            names = [one.name for one in getattr(torch.ops.aten, operator).default._schema.arguments]

            def call(*args: object, **window: int) -> list[None]:
                assert set(window) <= {*names[len(args) :]}
                given.append(
                    {"causal": args[names.index("is_causal")], "longest": args[names.index("max_k")], **window}
                )
                return [None] * 3

            return call

    monkeypatch.setattr(attention_kernels, "_aten", Operators())
    x, ends = torch.empty(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    sides = {"window_size_left": 4, "window_size_right": 0}
    for sight, window in ((EVERY_KEY, {}), (CAUSAL, {}), (Sight(4, 0), sides)):
        segments = Segments(ends, ends, 3, 4, sight)
        attention_kernels.varlen_forward(x, x, x, segments)
        attention_kernels.varlen_backward(x, x, x, x, x, x, segments)
        assert given[-2:] == [{"causal": sight == CAUSAL, "longest": 4, **window}] * 2


def test_a_newer_flash_attention_is_activated_or_its_lack_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    activated: list[str] = []
    names = {8: None, 9: "FA3", 10: "FA4" if torch.__version__ >= "2.13" else None}
    for (major, name), installed in product(names.items(), (True, False)):
        activate = activated.append if installed else activate_flash_attention_impl  # here it is not
        monkeypatch.setattr(attention_kernels, "activate_flash_attention_impl", activate)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=major: (major, 0))
        attention_kernels.activate_newest_flash_attention.cache_clear()
        with warnings.catch_warnings(record=True) as said:
            for _ in range(2):
                attention_kernels.activate_newest_flash_attention(torch.device("cuda"))
        assert [f"{name}:" in str(one.message) for one in said] == [True] * (name is not None and not installed)
    assert activated == list(filter(None, names.values()))


class _Cudnn:
    """cuDNN's operators as torch calls them, for one sample: what it has compiled for strides of q and k reads `grad` and
    `out` by the strides that these had at that time."""

    def __init__(self) -> None:
        self.compiled: dict[object, list[tuple[int, ...]]] = {}

    def _scaled_dot_product_cudnn_attention(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[object, ...]:
        assert rest[:3] == (None, True, 0.0)  # no mask; computes the log-sum-exp; no dropout
        out, lse = _plain_forward(*_rows_first(q, k, v), _one_segment(q, k, causal=rest[3]))
        return torch.empty_like(q).copy_(out.transpose(0, 1)), lse[None, ..., None], *[None] * 7

    def _scaled_dot_product_cudnn_attention_backward(self, *given: Any) -> list[Tensor]:
        (grad, q, k, v, out, lse), (queries, keys, dropout, causal) = given[:6], given[-4:]
        assert (queries, keys, dropout, lse.shape) == (q.shape[2], k.shape[2], 0.0, (*q.shape[:3], 1))
        strides = self.compiled.setdefault((q.stride(), k.stride(), q.shape, causal), [grad.stride(), out.stride()])
        grad, out = (x.as_strided(x.shape, its) for x, its in zip((grad, out), strides, strict=True))
        tensors = _rows_first(grad, q, k, v, out)
        grads = _plain_backward(*tensors, lse[0, ..., 0], _one_segment(q, k, causal=causal))
        return [x.transpose(0, 1)[None] for x in grads]


def _rows_first(*tensors: Tensor) -> list[Tensor]:
    return [x[0].transpose(0, 1) for x in tensors]


def _one_segment(q: Tensor, k: Tensor, *, causal: bool) -> Segments:
    ends = (torch.tensor([0, x.shape[2]], dtype=torch.int32) for x in (q, k))
    return Segments(*ends, q.shape[2], k.shape[2], CAUSAL if causal else EVERY_KEY)


def test_cudnns_tiles_give_plain_attention_in_whatever_order_gradients_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries 24 ... 47 see keys 0 ... 23, all of them, and their own; results are merged, gradients summed."""
    monkeypatch.setattr(attention_kernels, "_aten", _Cudnn())
    monkeypatch.setattr(attention_kernels, "_kernel_of_tiles", lambda *_: SDPBackend.CUDNN_ATTENTION)
    kernel, half = TileKernel(), SEQ // 2
    early, late = slice(half), slice(half, SEQ)
    tiles = ((Tile(half, SEQ, 0, half), early), (Tile(half, SEQ, half, SEQ, 0), late))
    q, k, v, grad = _inputs(1)
    wanted = [x[:, :, late] for x in _formula([[SEQ]], None)]
    for given in (grad, grad.contiguous()):
        results = [kernel.forward(q[:, :, late], k[:, :, at], v[:, :, at], tile, None) for tile, at in tiles]
        (out, lse), other = results
        merge(out, lse, *other)
        tensors = given[:, :, late], q[:, :, late]
        grads = [kernel.backward(*tensors, k[:, :, at], v[:, :, at], out, lse, tile, None) for tile, at in tiles]
        (of_early, *_), (of_late, *of_keys) = grads  # no other query sees the late keys
        for found, of_formula in zip((out, of_early + of_late, *of_keys), wanted, strict=True):
            torch.testing.assert_close(found, of_formula, rtol=1e-10, atol=1e-12)


def test_cudnn_compiles_for_the_shapes_of_whole_samples_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of a document may be alone in its call too, but its length is another one in each micro-batch."""
    monkeypatch.setattr(tile_calls, "packs_tiles", lambda q: True)
    for lengths, kind in (([[SEQ]], OneTile), ([[SEQ - 5, 1, 1, 1, 1, 1]], PackedTiles)):
        for index, source in ((0, 1), (1, 0)):
            (call,) = _calls_of(lengths, Axis("ring", (0, 1), index), source, 1)
            assert isinstance(call, kind)


def test_only_cuda_in_16_bits_packs_and_its_heads_are_multiples_of_8() -> None:
    class OnCuda:
        def __init__(self, dtype: torch.dtype, size: int) -> None:
            self.dtype, self.shape, self.is_cuda = dtype, (1, HEADS, SEQ, size), True

    assert not packs_tiles(torch.empty(1, 1, 1, 8, dtype=torch.bfloat16))
    assert not packs_tiles(OnCuda(torch.float32, 12))  # type: ignore[arg-type]
    assert packs_tiles(OnCuda(torch.bfloat16, 64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_dim to 16"):
        packs_tiles(OnCuda(torch.float16, 12))  # type: ignore[arg-type]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a kernel of CUDA")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_window_of_cudas_kernel_is_that_of_the_formula(compiled: bool) -> None:
    given = [x.to(DEVICE, torch.bfloat16) for x in _inputs(2, 500)]
    leaves, attend = [x.requires_grad_() for x in given[:3]], KernelWindow(100, DEVICE).attend
    out = (torch.compile(attend, fullgraph=True) if compiled else attend)(*leaves)
    for got, wanted in zip([out, *torch.autograd.grad(out, leaves, given[3])], _formula([[500]] * 2, 100), strict=True):
        assert float((got.cpu() - wanted).abs().max() / wanted.abs().max()) < 2e-2


@pytest.mark.parametrize("window", [None, 600])
def test_long_documents_on_a_cpu_give_plain_attention(window: int | None) -> None:
    """Their causal tiles are cut (cpu/attention.py); gradients have the type of what they are of."""
    lengths = [[300, 511, 60], [871]]
    shard = sequence_shard(lengths, 871, WHOLE, WHOLE, CPU)
    assert shard is not None
    q, k, v, grad = _inputs(2, 871)
    errors = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = ContextAttention((WHOLE, WHOLE), window, torch.float32).attend(*leaves, shard)
        got = [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]
        assert {x.dtype for x in got} == {dtype}
        wanted = _formula(lengths, window)
        errors.append(
            max(float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(got, wanted, strict=True))
        )
    assert errors[0] < 1e-12
    assert errors[1] < 2e-2
