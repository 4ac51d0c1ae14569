"""Attention's FLOP/s on one device: documents, sliding windows and the ranks of a ring beside one whole causal call.

    python -m benchmarks.gpu_attention                   32 query heads, 8 key heads, size 128, bf16, 8192 tokens
    python -m benchmarks.gpu_attention --device cpu      in small: does it run at all?

Forward and backward of one layer's attention, in turns; medians.  FLOPs are those of the pairs that queries see: 4 and 10 a
pair, head and element of its size.  A ring is that of its first rank; the keys of others are a copy of its own, in place of
the messages, and nothing is sent.  Each case's result is compared with the formula of attention in fp32 first.  All run in
FlashAttention 2, where they take it, and then in the newest that torch can load, which their names then end with.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel

from benchmarks.report import markdown, write_whole
from megazero.comm.collectives import Pending
from megazero.layers import attention_kernels, context_attention
from megazero.layers.attention import AttentionKernel, CausalAttention
from megazero.layers.attention_kernels import SlidingWindow
from megazero.layers.context_attention import ContextAttention, KernelWindow, Ring
from megazero.layers.sequence_shard import sequence_shard
from megazero.parallel_state import Axis

ALONE = Axis("cp")
TOLERANCE = 2e-2  # of a gradient's norm


@dataclass
class Case:
    """One way to attend.

    Args:
        pairs: that the queries of this rank see, per head.
        run: does a forward and a backward, and returns out, dq, dk and dv.
        exact: whether these are the gradients of `inputs`, for a check.
    """

    name: str
    pairs: float
    run: Callable[[], Sequence[Tensor]]
    lengths: Sequence[int] = ()
    window: int | None = None
    exact: bool = True


@dataclass(frozen=True)
class Layer:
    """Sizes, and where they are computed."""

    device: torch.device
    seq: int
    heads: int = 32
    kv_heads: int = 8
    size: int = 128

    def inputs(self, seq: int | None = None) -> list[Tensor]:
        """q, k, v, which want gradients, and the gradient of the output; [1, heads, seq, size] as in a layer: by seq."""
        generator, dtype = torch.Generator(self.device).manual_seed(7), torch.bfloat16
        shapes = [
            (1, seq or self.seq, heads, self.size) for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]
        drawn = [torch.randn(shape, generator=generator, device=self.device, dtype=dtype) for shape in shapes]
        return [x.transpose(1, 2).requires_grad_(number < 3) for number, x in enumerate(drawn)]


def seen_pairs(lengths: Sequence[int], window: int | None = None) -> int:
    """Pairs of a query and a key of its document, up to itself and no further back than the window."""
    return sum(n * (n + 1) // 2 - (max(n - window, 0) * (n - window + 1) // 2 if window else 0) for n in lengths)


def cases_of(layer: Layer, documents: Sequence[int], windows: Sequence[int], rings: Sequence[int]) -> list[Case]:
    """All ways to attend; the first two are whole calls, by torch's choice and by cuDNN."""
    q, k, v, slope = layer.inputs()

    def through(attend: Callable[[], Tensor]) -> Callable[[], Sequence[Tensor]]:
        def run() -> Sequence[Tensor]:
            out = attend()
            return out, *torch.autograd.grad(out, (q, k, v), slope)

        return run

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    whole = (layer.seq,)
    kernel = CausalAttention()
    found = [Case("whole, torch's choice", seen_pairs(whole), through(lambda: kernel.attend(q, k, v)), whole)]
    if layer.device.type == "cuda":
        found.append(Case("whole, cuDNN", seen_pairs(whole), through(cudnn), whole))
    for length in documents:
        lengths = (length,) * (layer.seq // length)
        shard = sequence_shard([lengths], layer.seq, ALONE, ALONE, layer.device)
        packed = ContextAttention((ALONE, ALONE), None, torch.float32, on_cuda=layer.device.type == "cuda")
        attend = through(lambda shard=shard, packed=packed: packed.attend(q, k, v, shard))
        found.append(Case(f"documents of {length}", seen_pairs(lengths), attend, lengths))
    for window in windows:
        on_cuda = layer.device.type == "cuda"
        sliding: AttentionKernel = (
            KernelWindow(window, layer.device) if on_cuda else SlidingWindow(window, q.dtype, layer.device)
        )
        attend = through(lambda sliding=sliding: sliding.attend(q, k, v))
        found.append(Case(f"window of {window}", seen_pairs(whole, window), attend, whole, window))
    for ranks in rings:
        found.append(Case(f"ring of {ranks}, a rank", seen_pairs(whole) / ranks, ring_of(layer, ranks), exact=False))
    return found


def ring_of(layer: Layer, ranks: int) -> Callable[[], Sequence[Tensor]]:
    """The work of the first rank of a ring."""
    axis = Axis("cp", tuple(range(ranks)))
    shard = sequence_shard(None, layer.seq, ALONE, axis, layer.device)
    assert shard is not None
    q, k, v, slope = (x.detach() for x in layer.inputs(layer.seq // ranks))
    ring = Ring(axis, None, torch.float32, context_attention.tile_kernel(on_cpu=layer.device.type == "cpu"))

    def shift(arriving: Tensor, leaving: Tensor, _: Axis) -> Pending:
        arriving.copy_(leaving)
        return Pending()

    def run() -> Sequence[Tensor]:
        true, context_attention.ring_shift = context_attention.ring_shift, shift
        try:
            out, lse = ring.forward(q, k, v, shard)
            of_keys = ring.key_gradients(k, v)
            return out, ring.backward(slope, q, k, v, out, lse, shard, of_keys), *of_keys.total()
        finally:
            context_attention.ring_shift = true

    return run


def worst_error(layer: Layer, case: Case) -> float:
    """How far out and the gradients of the first key head, and of its query heads, are from the formula in fp32, by norm."""
    q, k, v, slope = layer.inputs()
    found, errors, groups = case.run(), [], layer.heads // layer.kv_heads
    at = torch.arange(layer.seq, device=layer.device)
    document = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths)).to(layer.device)
    seen = (at[:, None] >= at) & (document[:, None] == document) & (at[:, None] - at < (case.window or layer.seq))
    mine, keys = slice(0, groups), slice(0, 1)
    leaves = [x[:, heads].detach().float().requires_grad_() for x, heads in ((q, mine), (k, keys), (v, keys))]
    scores = leaves[0] @ leaves[1].transpose(-1, -2) / layer.size**0.5
    out = scores.masked_fill_(~seen, -torch.inf).softmax(-1) @ leaves[2]
    expected = (out, *torch.autograd.grad(out, leaves, slope[:, mine].float()))
    for wanted, got in zip(
        expected, (found[0][:, mine], found[1][:, mine], found[2][:, keys], found[3][:, keys]), strict=True
    ):
        errors.append(float(((got.float() - wanted).norm() / wanted.norm()).detach()))
    return max(errors)


def seconds_of(case: Case, device: torch.device, repeats: int) -> float:
    """Of one forward and backward, the mean of some in a row."""
    begun = time.perf_counter()
    for _ in range(repeats):
        case.run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) / repeats


def measure(layer: Layer, *, small: bool) -> list[tuple[Case, float, float]]:
    """Check and time every case, with the flash attention that is active: (case, seconds, error)."""
    lengths, windows = (layer.seq, layer.seq // 4, layer.seq // 8), (layer.seq // 8, layer.seq // 2)
    cases = cases_of(layer, lengths, windows, (2, 4, 8))
    errors = {case.name: worst_error(layer, case) for case in cases if case.exact}
    if wrong := {name: error for name, error in errors.items() if not error < TOLERANCE}:
        raise SystemExit(f"these are not attention: {wrong}")
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(2 if small else 8):  # the first warms up
        for case in cases:
            times[case.name] += [seconds_of(case, layer.device, 1 if small else 8)] * (number > 0)
    newest = current_flash_attention_impl()
    named = (case if newest is None else replace(case, name=f"{case.name}, {newest}") for case in cases)
    return [(new, median(times[case.name]), errors.get(case.name, 0)) for new, case in zip(named, cases, strict=True)]


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seq", type=int, help="tokens; 8192 on CUDA, 256 on a CPU")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device, small = torch.device(given.device), given.device == "cpu"
    layer = Layer(device, given.seq or (256 if small else 8192), *((4, 2, 16) if small else ()))
    name, newest = "activate_newest_flash_attention", attention_kernels.activate_newest_flash_attention
    with patch.object(attention_kernels, name), patch.object(context_attention, name):
        measured = measure(layer, small=small)
    if not small:
        newest(device)
        measured += measure(layer, small=small) if current_flash_attention_impl() else []
    rows, lines = [], []
    best = max(case.pairs / seconds for case, seconds, _ in measured if case.name.startswith("whole"))
    for case, seconds, error in measured:
        rate, share = 14 * case.pairs * layer.heads * layer.size / seconds / 1e12, case.pairs / seconds / best
        rows.append((case.name, f"{1e3 * seconds:.2f}", f"{rate:.0f}", f"{share:.2f}", f"{error:.4f}"))
        lines.append({"name": case.name, "ms": 1e3 * seconds, "tflops": rate, "of_whole": share})
    print(markdown(("attention", "ms", "TFLOP/s", "of whole", "error"), rows))
    if given.out is not None:
        write_whole(given.out, json.dumps({"seq": layer.seq, "lines": lines}) + "\n")


if __name__ == "__main__":
    main()
