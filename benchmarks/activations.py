"""What dropping activations frees and costs: our policies beside torch's checkpoint and a selective set of saved operations.

    python -m benchmarks.activations [--lengths 256,1024,4096] [--dtypes fp32,bf16] [--seconds 40] [--out NAME]

One round runs every contender once, forward and backward of the same few blocks of `small` with the same weights and one
sample, one thread, on the matrix products of torch; the next round begins with another one.  Gradients must agree first.

ms       processor time of the thread (`time.thread_time`): what waits for a core is not in it.  A contender's time is the
         median of its ratios to our blocks without a policy in the same round, times the median of those
kept     bytes that live after the forward and did not before, by the allocator's own records; nothing is rounded

ours                     our blocks under each policy
our blocks, ...          our blocks without a policy, within `torch.utils.checkpoint`
plain, ...               the same Llama in plain torch modules
    checkpoint           each block; without re-entrance and without the states of random generators, which is its fastest
    selective ops        each block, with the set of operations whose results torchtitan saves in its selective mode: every
                         second matrix product, attention; written with `create_selective_checkpoint_contexts`
    core attention       from q | k | v to attention's output only (Korthikanti et al. 2022, section 5)

glibc keeps freed memory for the next round, as torch's allocator for CUDA does, so no time goes to fresh pages.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.partitioners import get_default_op_list
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.models import PlainStage
from benchmarks.report import machine, markdown
from benchmarks.setting import DTYPES, Setting, positive, whole_numbers
from megazero.layers import linear
from megazero.layers.linear import BY_AUTOGRAD
from megazero.layers.recompute import WHOLE
from megazero.layers.sequence_shard import TokenLayout
from megazero.models.activation_config import PRESETS, LayerPolicy, Region
from megazero.models.build_context import BuildContext
from megazero.models.config import ModelConfig
from megazero.models.gpt import Block
from megazero.models.registry import FAMILIES
from megazero.models.stages import StageLayout
from megazero.models.wrappers import save_by_policy

RESULTS = Path(__file__).parent / "results"
LENGTHS = (256, 512, 1024, 2048, 4096)
REUSED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}
GRADIENT_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
OURS = "none"
RECOMPUTED: Sequence[tuple[Region, ...]] = (
    ("norms",), ("activation",), ("norms", "activation"), ("norms", "activation", "residual"), ("mlp",), ("norms", "mlp"),
    ("norms", "residual", "mlp"), ("block",),
)  # fmt: skip
POLICIES = [
    *(LayerPolicy(frozenset(regions)) for regions in ((), *RECOMPUTED)),
    *(LayerPolicy(frozenset(regions), keep_attention=True) for regions in (("attention", "mlp"), ("block",))),
]
Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """Blocks, and how their activations are kept.

    Args:
        name: under which it is reported; those of one kind of blocks share what is before the comma.
        layers: each [seq, batch, hidden] or, of plain blocks, [batch, seq, hidden] -> as its input.
        parameters: of the layers.
        transposed: takes [batch, seq, hidden].
    """

    name: str
    layers: Sequence[Layer]
    parameters: Sequence[nn.Parameter]
    transposed: bool = False

    @property
    def base(self) -> str:
        """The contender with the same blocks that keeps everything."""
        return "plain, none" if self.transposed else OURS

    def forward(self, x: Tensor) -> Tensor:
        """[seq, batch, hidden], unchanged in shape."""
        x = x.transpose(0, 1) if self.transposed else x
        for layer in self.layers:
            x = layer(x)
        return x.transpose(0, 1) if self.transposed else x

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


@dataclass(frozen=True)
class Point:
    """What one contender keeps and takes: bytes, and milliseconds with their quartiles; see the head of the file."""

    name: str
    base: str
    kept: int
    ms: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """All contenders at one length."""

    length: int
    dtype: str
    blocks: int
    rounds: int
    points: dict[str, Point]

    def freed(self, point: Point, base: str) -> int:
        """Bytes that `base` keeps beyond a point."""
        return self.points[base].kept - point.kept

    def added(self, point: Point, base: str) -> float:
        """Milliseconds that a point takes beyond `base`."""
        return point.ms - self.points[base].ms

    def rate(self, point: Point, base: str) -> str:
        """MB freed per millisecond added, for tables; nothing where nothing is freed."""
        freed, added = self.freed(point, base), self.added(point, base)
        return "" if freed <= 0 else "no time" if added <= 0 else f"{freed / added / 1e6:.2f}"

    def ahead(self, peer: Point) -> Point | None:
        """The policy of ours that keeps no more than a peer in the least time, if it takes no more."""
        fits = [one for one in self.points.values() if "," not in one.name and one.kept <= peer.kept]
        best = min(fits, key=lambda one: one.ms, default=None)
        return best if best is not None and best.ms <= peer.ms else None


# ---------------------------------------------------------------------------------------------------------------------
# Contenders


def contenders(length: int, dtype: str, blocks: int) -> list[Contender]:
    """All, with the same weights: those of our blocks are shared, those of plain blocks are copies."""
    model = Setting("small", 1).model_config().model_copy(update={"seq_len": length, "num_layers": blocks})
    ours = _our_blocks(model, dtype)
    weights = {
        section.name: part.detach()
        for block in ours
        for module in block.modules()
        for key, spec in getattr(module, "specs", {}).items()
        for section, part in zip(
            spec.names.rows, getattr(module, key).split([s.rows for s in spec.names.rows]), strict=True
        )
    }
    no_ends = StageLayout(range(blocks), False, False)
    plain = list(PlainStage(model, weights, no_ends).to(DTYPES[dtype]).blocks)
    made = [_under_policy(ours, policy) for policy in POLICIES]
    layout = TokenLayout(torch.zeros(1, dtype=torch.int64))
    ours_parameters = [p for block in ours for p in block.parameters()]
    for name, run in WITHIN_CHECKPOINT.items():
        layers = [partial(run, partial(_call, block, layout)) for block in ours]
        made.append(Contender(f"our blocks, {name}", layers, ours_parameters))
    cored = copy.deepcopy(plain)
    for block in cored:
        block.mix = partial(_checkpointed, block.mix)  # type: ignore[method-assign]
    plain_runs: dict[str, Sequence[Layer]] = {"none": plain, "core attention": cored}
    plain_runs |= {name: [partial(run, block) for block in plain] for name, run in WITHIN_CHECKPOINT.items()}
    for name, layers in plain_runs.items():
        owners = cored if layers is cored else plain
        parameters = [p for block in owners for p in block.parameters()]
        made.append(Contender(f"plain, {name}", layers, parameters, transposed=True))
    return made


def _our_blocks(model: ModelConfig, dtype: str) -> list[Block]:
    context = BuildContext(model, WHOLE, False, 0, torch.device("cpu"), BY_AUTOGRAD, DTYPES[dtype])
    blocks = FAMILIES[model.family].blocks(context, range(model.num_layers))
    return [block.to(DTYPES[dtype]) for block in blocks if isinstance(block, Block)]


def _under_policy(blocks: Sequence[Block], policy: LayerPolicy) -> Contender:
    parameters = [p for block in blocks for p in block.parameters()]
    mine = copy.deepcopy(list(blocks), {id(p): p for p in parameters})
    save_by_policy([(block, policy) for block in mine], WHOLE)
    layout = TokenLayout(torch.zeros(1, dtype=torch.int64))
    return Contender(policy.name, [partial(_call, block, layout) for block in mine], parameters)


def _call(block: Block, layout: TokenLayout, x: Tensor) -> Tensor:
    result: Tensor = block(x, layout)
    return result


def _checkpointed(run: Layer, x: Tensor, **options: Any) -> Tensor:
    result: Tensor = checkpoint(run, x, use_reentrant=False, **options)
    return result


def _saved_operations() -> set[Any]:
    """What torchtitan's selective mode saves and one device without experts calls, and attention on a CPU."""
    attention = (
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_flash_attention_for_cpu", "linear", "max",
    )  # fmt: skip
    named = {getattr(torch.ops.aten, name).default for name in attention}
    return named | {operation.default for operation in get_default_op_list().compute_intensive_ops}


def _every_second_product() -> Any:
    """The contexts of one block's selective checkpoint."""
    saved, counts = _saved_operations(), {False: 0, True: 0}
    products = {torch.ops.aten.mm.default, torch.ops.aten.linear.default}

    def decide(context: Any, operation: Any, *_: object, **__: object) -> CheckpointPolicy:
        if operation in products:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


WITHIN_CHECKPOINT: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "checkpoint": partial(_checkpointed, preserve_rng_state=False),
    "selective ops": partial(_checkpointed, preserve_rng_state=False, context_fn=_every_second_product),
}


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def measure(length: int, dtype: str, blocks: int, seconds: float) -> Curve:
    """One curve, in about so many seconds and at least three rounds.  Raises: RuntimeError: gradients differ."""
    torch.manual_seed(0)
    hidden = Setting("small", 1).size.hidden_size
    x, slope = (torch.randn(length, 1, hidden).to(DTYPES[dtype]) for _ in range(2))
    made = contenders(length, dtype, blocks)
    kept = check_same(made, x, slope, dtype)
    taken: dict[str, list[float]] = {one.name: [] for one in made}
    end, number = time.monotonic() + seconds, 0
    gc.disable()
    while number < 3 or time.monotonic() < end:
        gc.collect()
        first = number * 5 % len(made)
        for one in made[first:] + made[:first]:
            taken[one.name].append(_timed(one, x, slope))
        number += 1
    gc.enable()
    whole = median(taken[OURS]) * 1e3
    points = {}
    for one in made:
        ratios = [mine / base for mine, base in zip(taken[one.name], taken[OURS], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        points[one.name] = Point(one.name, one.base, kept[one.name], middle * whole, low * whole, high * whole)
    return Curve(length, dtype, blocks, number, points)


def _timed(one: Contender, x: Tensor, slope: Tensor) -> float:
    x = x.detach().requires_grad_()
    begin = time.thread_time()
    one.forward(x).backward(slope)
    end = time.thread_time()
    one.clear()
    return end - begin


def check_same(made: Sequence[Contender], x: Tensor, slope: Tensor, dtype: str) -> dict[str, int]:
    """By name the bytes that each keeps; the allocator tells the profiler."""
    expected: dict[str, list[Tensor]] = {}
    kept = {}
    for one in made:
        leaf = x.detach().requires_grad_()
        with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
            y = one.forward(leaf)
        kept[one.name] = sum(event.nbytes() for event in profile.kineto_results.events() if event.name() == "[memory]")
        y.backward(slope)
        del y  # freed here, and not in the next one's record
        gradients = [tensor.grad for tensor in (leaf, *one.parameters) if tensor.grad is not None]
        one.clear()
        own = expected.setdefault(one.base, gradients)
        if not all(torch.equal(a, b) for a, b in zip(gradients, own, strict=True)):
            raise RuntimeError(f"{one.name} gives other gradients than {one.base}, so their times do not compare")
    ours, plain = (expected[base][0].float() for base in (OURS, "plain, none"))
    worst = float((ours - plain).abs().max() / ours.abs().max())
    if not worst <= GRADIENT_TOLERANCE[dtype]:
        raise RuntimeError(
            f"the gradients of ours and plain differ by {worst:.1e}, so the times would compare two models"
        )
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# What it says


def table(curve: Curve) -> str:
    """All points of a curve, those that keep most first."""
    heads = (
        "contender", "kept MB", "ms (quartiles)", "freed MB", "added ms", "MB / ms", "beyond ours: MB / ms",
        "ahead of it",
    )  # fmt: skip
    rows = []
    for point in sorted(curve.points.values(), key=lambda one: -one.kept):
        is_peer, ahead = "," in point.name, curve.ahead(point)
        rows.append(
            (
                point.name,
                f"{point.kept / 1e6:.2f}",
                f"{point.ms:.1f} ({point.low:.1f} to {point.high:.1f})",
                f"{curve.freed(point, point.base) / 1e6:.2f}",
                f"{curve.added(point, point.base):.1f}",
                curve.rate(point, point.base),
                curve.rate(point, OURS),
                ("" if not is_peer else "none of ours" if ahead is None else ahead.name),
            )
        )
    return markdown(heads, rows)


def main() -> None:
    """Measure, print a table for each length and dtype, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=whole_numbers, default=LENGTHS, help="comma-separated")
    parser.add_argument("--dtypes", default="fp32,bf16", help="comma-separated")
    parser.add_argument("--seconds", type=positive, default=40, help="of each curve; it has three rounds at least")
    parser.add_argument("--out", help="write benchmarks/results/NAME.md and NAME.jsonl")
    given = parser.parse_args()
    if any(os.environ.get(key) != value for key, value in REUSED_MEMORY.items()):  # read when the process starts
        again = [sys.executable, "-m", "benchmarks.activations", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | REUSED_MEMORY)
    torch.set_num_threads(1)
    linear.cpu_product = lambda: None  # type: ignore[assignment]
    lines, pages = [json.dumps({"machine": machine(), "selective": PRESETS["selective"], **vars(given)})], []
    for dtype, length in product(given.dtypes.split(","), given.lengths):
        curve = measure(length, dtype, max(1, min(4, 2048 // length)), given.seconds)
        pages.append(f"## {dtype}, {length} tokens, {curve.blocks} blocks, {curve.rounds} rounds\n\n{table(curve)}\n")
        lines.append(json.dumps(asdict(curve)))
        print(pages[-1], flush=True)
        if given.out:  # after every curve, so that an interrupted run loses one
            (RESULTS / f"{given.out}.md").write_text("\n".join(pages), encoding="utf-8")
            (RESULTS / f"{given.out}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
