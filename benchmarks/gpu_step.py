"""One training step on one device: megazero beside a plain PyTorch loop.

    python -m benchmarks.gpu_step                                   a Llama of 1.3 billion parameters, on a CUDA device
    python -m benchmarks.gpu_step --model tiny --device cpu         does it run at all

    one round      megazero, some steps | plain, some steps        each from an idle device to an idle device
    megazero       Engine.train_step: forward and backward of the micro-batches, norm, clip, sharded AdamW, ZeRO stage 0
    plain          the same Llama in plain torch modules, blocks compiled alike; in bf16 with fp32 master weights, which are
                   clipped and stepped by torch's fused AdamW and copied back

Both start from the same weights, read the same tokens and live in one process.  The first losses must agree, or nothing is
reported.  Nothing is written but with --out or --profile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.models import PlainStage, adamw, loss_of
from benchmarks.report import machine, markdown
from benchmarks.setting import GRAD_CLIP, LR, SEED
from benchmarks.trace import read_business
from megazero.checkpoint.save import gather_logical
from megazero.config import RunConfig, resolve
from megazero.engine import initialize
from megazero.models.activation_config import PRESETS
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import ParallelState, RankGrid
from megazero.training.callbacks.speed import model_flops_per_token, peak_flops
from megazero.training.world import prefer_expandable_segments

CHECKED_STEPS = 3  # the first of them compiles
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Memory of the larger at its default batch, in bytes a parameter: megazero 2 + 4 + 4 + 8 (weights, masters, gradients,
# moments), plain 2 + 2 + 4 + 4 + 8 (and bf16 gradients): 51 GB together, and 7 to 11 GB of activations and logits a sample.
MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 128, "vocab_size": 512, "seq_len": 64},
    "1.3b": {
        "hidden_size": 2048, "num_layers": 24, "num_heads": 16, "ffn_hidden_size": 5504,
        "vocab_size": 32000, "seq_len": 4096,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What is the same for both.

    Args:
        model: a key of `MODELS`.
        dtype: of weights and activations, "bf16" or "fp32".
        micro_batch_size: samples in a forward.
        accumulation: micro-batches in a step.
        compile: whether blocks are compiled.
        recompute: megazero's activations; what is named there.
        keep_attention, offload: likewise.
    """

    model: str
    dtype: str
    micro_batch_size: int
    accumulation: int
    compile: bool
    recompute: str = "none"
    keep_attention: bool = False
    offload: str = "none"

    @property
    def samples(self) -> int:
        """Samples in a step."""
        return self.micro_batch_size * self.accumulation

    def config(self) -> RunConfig:
        """megazero's configuration."""
        document = {
            "model": {"family": "llama", **MODELS[self.model]},
            "zero": {"stage": 0},
            "activations": {
                "recompute": self.recompute if self.recompute in PRESETS else self.recompute.split("+"),
                "keep_attention": self.keep_attention,
                "offload": self.offload,
            },
            "precision": {"dtype": self.dtype},
            "optimizer": {"lr": LR, "grad_clip": GRAD_CLIP},
            "training": {
                "micro_batch_size": self.micro_batch_size,
                "accumulation": self.accumulation,
                "seed": SEED,
                "compile": self.compile,
            },
        }
        return resolve(RunConfig.model_validate(document), 1).config

    def batch(self, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and labels of a step, int64 [samples, seq]."""
        sizes = MODELS[self.model]
        generator = torch.Generator().manual_seed(step)
        samples = torch.randint(0, sizes["vocab_size"], (self.samples, sizes["seq_len"] + 1), generator=generator)
        return samples[:, :-1].to(device), samples[:, 1:].to(device)


class Megazero:
    """The engine."""

    name = "megazero"

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self._size = setting.micro_batch_size
        self.engine = initialize(setting.config(), ParallelState(RankGrid(), 0, device))
        self._device = device

    def weights(self) -> dict[str, Tensor]:
        """Whole tensors by name, in fp32 on the host."""
        state = self.engine.sharded_model.sharded_state
        return {name: tensor.float().cpu() for name, tensor in gather_logical(state, "master", self.engine.state)}

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One optimizer step; the mean loss."""
        ids = torch.arange(len(tokens), device=self._device)
        parts = zip(ids.split(self._size), tokens.split(self._size), labels.split(self._size), strict=True)
        batches = [MicroBatch(which, token.t().contiguous(), label.t().contiguous()) for which, token, label in parts]
        return self.engine.train_step(batches, LR).loss


class Plain:
    """One device, no framework."""

    name = "plain PyTorch"

    def __init__(self, setting: Setting, device: torch.device, weights: dict[str, Tensor]) -> None:
        self._accumulation, dtype = setting.accumulation, DTYPES[setting.dtype]
        self.model = PlainStage(setting.config().model, weights).to(device, dtype)
        for block in self.model.blocks:
            block.rope = tuple(table.to(device) for table in block.rope)
            if setting.compile:
                block.compile(dynamic=False)
        self._weights = list(self.model.parameters())
        self._masters = self._weights
        if dtype != torch.float32:
            whole = dict(PlainStage(setting.config().model, weights).named_parameters())
            self._masters = [nn.Parameter(whole[name].detach().to(device)) for name, _ in self.model.named_parameters()]
        self._optimizer = adamw(self._masters)
        # Weights are bf16 already; the rotation's result, in fp32 like its tables, is brought back for attention.
        self._autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One optimizer step; the mean loss."""
        total = torch.zeros((), device=tokens.device)
        for token, label in zip(tokens.chunk(self._accumulation), labels.chunk(self._accumulation), strict=True):
            with self._autocast:
                loss = loss_of(self.model(token), label) / self._accumulation
            loss.backward()
            total += loss.detach()
        if self._masters is not self._weights:
            for master, weight in zip(self._masters, self._weights, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self._masters, GRAD_CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._masters is not self._weights:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, self._masters)
        return total.item()


@dataclass
class Meter:
    """Time and memory of one contender, which shares the device with another.

    Args:
        device: where it computes.
    """

    device: torch.device
    ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    held_bytes: int = 0
    peak_bytes: int | None = None

    def run(self, work: Callable[[], object]) -> float:
        """Do some work on an idle device; milliseconds until it is idle again."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device) if cuda else 0
        started = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize(self.device)
        elapsed = 1e3 * (time.perf_counter() - started)
        if cuda:
            peak = self.held_bytes + torch.cuda.max_memory_allocated(self.device) - before
            self.peak_bytes = max(peak, self.peak_bytes or 0)
            self.held_bytes += torch.cuda.memory_allocated(self.device) - before
        return elapsed


@dataclass(frozen=True)
class Line:
    """What is reported of one contender: milliseconds of a step, and what follows from their median."""

    name: str
    median_ms: float
    least_ms: float
    most_ms: float
    tokens_per_second: float
    mfu: float | None
    peak_bytes: int | None
    losses: list[float]


def line_of(name: str, meter: Meter, setting: Setting) -> Line:
    """Sum a contender's steps up."""
    model, tokens = setting.config().model, setting.samples * MODELS[setting.model]["seq_len"]
    per_second = 1e3 * tokens / median(meter.ms)
    peak = peak_flops(meter.device, DTYPES[setting.dtype], None)
    mfu = None if peak is None else per_second * model_flops_per_token(model) / peak
    return Line(name, median(meter.ms), min(meter.ms), max(meter.ms), per_second, mfu, meter.peak_bytes, meter.losses)


def _train(one: Megazero | Plain, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    for batch in batches:
        one.step(*batch)


def measure(setting: Setting, device: torch.device, rounds: int, steps: int, profile: Path | None) -> list[Line]:
    """Run both in turns.

    Raises:
        RuntimeError: their first losses differ.
    """
    meters = {name: Meter(device) for name in (Megazero.name, Plain.name)}
    made: list[Megazero | Plain] = []

    def make_plain() -> None:
        assert isinstance(made[0], Megazero)
        made.append(Plain(setting, device, made[0].weights()))

    meters[Megazero.name].run(lambda: made.append(Megazero(setting, device)))
    meters[Plain.name].run(make_plain)
    for step in range(CHECKED_STEPS):
        batch = setting.batch(step, device)
        for one in made:
            meter = meters[one.name]
            meter.run(lambda one=one, meter=meter, batch=batch: meter.losses.append(one.step(*batch)))
    losses = [meters[one.name].losses for one in made]
    worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
    if not worst <= LOSS_TOLERANCE[setting.dtype]:
        raise RuntimeError(f"the losses differ by {worst:.2e}, so the times would compare two models: {losses}")
    for round_ in range(rounds):
        batches = [setting.batch(CHECKED_STEPS + round_ * steps + step, device) for step in range(steps)]
        for one in made if round_ % 2 == 0 else made[::-1]:
            whole = meters[one.name].run(partial(_train, one, batches))
            meters[one.name].ms.append(whole / steps)
    if profile is not None:
        with torch.profiler.profile() as trace:
            meters[Megazero.name].run(lambda: made[0].step(*setting.batch(0, device)))
        trace.export_chrome_trace(str(profile))
    return [line_of(one.name, meters[one.name], setting) for one in made]


def table(lines: Sequence[Line]) -> str:
    """Both contenders."""
    heads = ("contender", "step ms (least to most)", "tokens/s", "MFU", "peak GB")
    rows = [
        (
            line.name,
            f"{line.median_ms:.1f} ({line.least_ms:.1f} to {line.most_ms:.1f})",
            f"{line.tokens_per_second:,.0f}",
            "" if line.mfu is None else f"{line.mfu:.1%}",
            "" if line.peak_bytes is None else f"{line.peak_bytes / 1e9:.1f}",
        )
        for line in lines
    ]
    return markdown(heads, rows)


def main() -> None:
    """Measure, print one table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1.3b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="by default on CUDA, and not on a CPU")
    parser.add_argument(
        "--recompute", default="none", help="of megazero: none, selective, full, or norms+mlp and the like"
    )
    parser.add_argument("--keep-attention", action="store_true", help="with --recompute full")
    parser.add_argument("--offload", choices=("none", "host"), default="none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of each contender in a round")
    parser.add_argument("--profile", type=Path, help="write a trace of one of megazero's steps here: ....json.gz")
    parser.add_argument("--out", type=Path, help="write the JSON here, too: benchmarks/results/....json")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; to see whether the benchmark runs at all: --model tiny --device cpu")
    prefer_expandable_segments(os.environ)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    compiles = device.type == "cuda" if given.compile is None else given.compile
    kept = given.recompute, given.keep_attention, given.offload
    setting = Setting(given.model, given.dtype, given.micro_batch_size, given.accumulation, compiles, *kept)
    lines = measure(setting, device, given.rounds, given.steps, given.profile)
    where = machine() | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})
    report = json.dumps({"machine": where, "setting": asdict(setting), "lines": [asdict(line) for line in lines]})
    print(table(lines))
    print(report)
    if given.profile is not None and device.type == "cuda":
        print(read_business(given.profile))
    if given.out is not None:
        given.out.write_text(report + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
