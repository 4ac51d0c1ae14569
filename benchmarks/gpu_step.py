"""One training step on one device: megazero, variants of its run file, and a plain PyTorch loop.

    python -m benchmarks.gpu_step                                    a Llama of 1.3 billion parameters, on a CUDA device
    python -m benchmarks.gpu_step --model 8b --apart                 6 layers of the shape of Llama 3 8B, sequences of 8192
    python -m benchmarks.gpu_step --apart --variant "activations.recompute=full activations.keep_attention=true"
    python -m benchmarks.gpu_step --model tiny --device cpu          does it run at all

    one round      megazero, some steps | plain, some steps        each from an idle device to an idle device
    --apart        all rounds of one contender, then it is freed and the next is built: for what does not fit beside another
    megazero       Engine.train_step: forward and backward of the micro-batches, norm, clip, sharded AdamW, ZeRO stage 0
    a variant      megazero with other values of its run file
    plain          the same Llama in plain torch modules, blocks compiled alike; in bf16 with fp32 master weights, which are
                   clipped and stepped by torch's fused AdamW and copied back

All start from the same weights, read the same tokens and live in one process.  The first losses must agree, or nothing is
reported.  Nothing is written but with --out or --profile.  Where something is offloaded, a trace of one more forward and
backward says what share of the copies a computation hides.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import PlainStage, adamw, loss_of
from benchmarks.report import machine, markdown, write_whole
from benchmarks.setting import DTYPES, GRAD_CLIP, LR, SEED, with_options
from benchmarks.trace import hidden_share, read_business
from megazero.checkpoint.save import gather_logical
from megazero.config import ConfigError, ResolvedRun, resolve
from megazero.config.problems import validate
from megazero.engine import initialize
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import Links, ParallelState, RankGrid
from megazero.plan.calibrate import calibrate
from megazero.plan.calibration import write_calibration
from megazero.plan.cluster import Cluster, cluster_of
from megazero.plan.memory import fullest_of
from megazero.plan.step_time import step_time_of
from megazero.training.callbacks.speed import model_flops_per_token, peak_flops
from megazero.training.world import prefer_expandable_segments

CHECKED_STEPS = 3  # the first of them compiles
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
# Memory of 1.3b at its default batch, in bytes a parameter: megazero 2 + 4 + 4 + 8 (weights, masters, gradients, moments),
# plain 2 + 2 + 4 + 4 + 8 (and bf16 gradients): 51 GB together, and 7 to 11 GB of activations and logits a sample.
MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 128, "vocab_size": 512, "seq_len": 64},
    "1.3b": {
        "hidden_size": 2048, "num_layers": 24, "num_heads": 16, "ffn_hidden_size": 5504,
        "vocab_size": 32000, "seq_len": 4096,
    },
    "8b": {
        "hidden_size": 4096, "num_layers": 6, "num_heads": 32, "num_kv_heads": 8, "ffn_hidden_size": 14336,
        "vocab_size": 128256, "seq_len": 8192,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What is the same for all.

    Args:
        model: a key of `MODELS`.
        dtype: of weights and activations, "bf16" or "fp32".
        micro_batch_size: samples in a forward.
        accumulation: micro-batches in a step.
        compile: whether blocks are compiled.
        options: of megazero alone, "section.key=value" each; those of `model` hold for the plain loop, too.
    """

    model: str
    dtype: str
    micro_batch_size: int
    accumulation: int
    compile: bool
    options: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Samples in a step."""
        return self.micro_batch_size * self.accumulation

    def run(self) -> ResolvedRun:
        """megazero's run.  Raises: ConfigError."""
        document: dict[str, dict[str, Any]] = {
            "model": {"family": "llama", **MODELS[self.model]},
            "zero": {"stage": 0},
            "precision": {"dtype": self.dtype},
            "optimizer": {"lr": LR, "grad_clip": GRAD_CLIP},
            "training": {
                "micro_batch_size": self.micro_batch_size,
                "accumulation": self.accumulation,
                "seed": SEED,
                "compile": self.compile,
            },
        }
        problems, config = validate(with_options(document, self.options))
        if problems:
            raise ConfigError(problems)
        return resolve(config, 1)

    def batch(self, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and labels of a step, int64 [samples, seq]."""
        model = self.run().config.model
        generator = torch.Generator().manual_seed(step)
        samples = torch.randint(0, model.vocab_size, (self.samples, model.seq_len + 1), generator=generator)
        return samples[:, :-1].to(device), samples[:, 1:].to(device)


class Megazero:
    """The engine."""

    name = "megazero"

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self._size = setting.micro_batch_size
        self.engine = initialize(setting.run().config, ParallelState(RankGrid(), 0, Links(device)))
        self._device = device

    def weights(self) -> dict[str, Tensor]:
        """Whole tensors by name, in fp32 on the host."""
        state = self.engine.sharded_model.sharded_state
        return {
            name: tensor.to("cpu", torch.float32, copy=True)
            for name, tensor in gather_logical(state, "master", self.engine.state)
        }

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One optimizer step; the mean loss."""
        return self.engine.train_step(self._batches(tokens, labels), LR).loss

    def hidden_copies(self, tokens: Tensor, labels: Tensor) -> float:
        """Of the time of copies between host and device in a step's passes, the share in which a kernel computes."""
        with TemporaryDirectory() as folder:
            with torch.profiler.profile() as trace:
                self.engine.compute_gradients(self._batches(tokens, labels))
                torch.cuda.synchronize(self._device)
            trace.export_chrome_trace(f"{folder}/trace.json")
            return hidden_share(Path(folder, "trace.json"))

    def _batches(self, tokens: Tensor, labels: Tensor) -> list[MicroBatch]:
        ids = torch.arange(len(tokens), device=self._device)
        parts = zip(ids.split(self._size), tokens.split(self._size), labels.split(self._size), strict=True)
        return [MicroBatch(which, token.t().contiguous(), label.t().contiguous()) for which, token, label in parts]

    def close(self) -> None:
        """Free what lies outside of the device."""
        self.engine.sharded_model.close()


class Plain:
    """One device, no framework."""

    name = "plain PyTorch"

    def __init__(self, setting: Setting, device: torch.device, weights: dict[str, Tensor]) -> None:
        self._accumulation, dtype = setting.accumulation, DTYPES[setting.dtype]
        self.model = PlainStage(setting.run().config.model, weights).to(device, dtype)
        for block in self.model.blocks:
            block.rope = tuple(table.to(device) for table in block.rope)
            if setting.compile:
                block.compile(dynamic=False)
        self._weights = list(self.model.parameters())
        self._masters = self._weights
        if dtype != torch.float32:
            whole = dict(PlainStage(setting.run().config.model, weights).named_parameters())
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

    def close(self) -> None:
        """Nothing lies outside of the device."""


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
    hidden: float | None = None

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
    hidden: float | None  # of copies between host and device, where something is offloaded
    planned_ms: float | None = None
    planned_bytes: int | None = None


def with_plan(line: Line, setting: Setting, cluster: Cluster) -> Line:
    """The line with what `megazero plan` predicts."""
    run = setting.run()
    seconds, memory = step_time_of(run, cluster).seconds, fullest_of(run, cluster)
    return replace(line, planned_ms=1e3 * seconds, planned_bytes=memory.peak)


def line_of(name: str, meter: Meter, setting: Setting) -> Line:
    """Sum a contender's steps up."""
    model = setting.run().config.model
    tokens = setting.samples * model.seq_len
    per_second = 1e3 * tokens / median(meter.ms)
    peak = peak_flops(meter.device, DTYPES[setting.dtype], None)
    mfu = None if peak is None else per_second * model_flops_per_token(model) / peak
    times = median(meter.ms), min(meter.ms), max(meter.ms)
    return Line(name, *times, per_second, mfu, meter.peak_bytes, meter.losses, meter.hidden)


def measure(
    settings: Mapping[str, Setting], device: torch.device, rounds: int, steps: int, *, apart: bool, profile: Path | None
) -> list[Line]:
    """Run all contenders, in turns or one after the other.

    Args:
        settings: by the contender's name; megazero is the first, the others are variants of it, and the plain loop.
        rounds, steps: that are timed: so many rounds of so many steps.
        profile: where a trace of a step of the first goes.

    Raises:
        RuntimeError: their first losses differ.
    """
    meters = {name: Meter(device) for name in settings}
    weights: dict[str, Tensor] = {}

    def make(name: str) -> Megazero | Plain:
        made: list[Megazero | Plain] = []
        plain = name == Plain.name
        build = partial(Plain, weights=weights) if plain else Megazero
        meters[name].run(lambda: made.append(build(settings[name], device)))
        if not weights and Plain.name in settings:
            assert isinstance(made[0], Megazero)
            weights.update(made[0].weights())
        return made[0]

    for group in [[name] for name in settings] if apart else [list(settings)]:
        made = {name: make(name) for name in group}
        for step in range(CHECKED_STEPS):
            for name, contender in made.items():
                batch, meter = settings[name].batch(step, device), meters[name]
                meter.run(lambda one=contender, meter=meter, batch=batch: meter.losses.append(one.step(*batch)))
        for round_ in range(rounds):
            for name in group if round_ % 2 == 0 else group[::-1]:
                batches = [settings[name].batch(CHECKED_STEPS + round_ * steps + step, device) for step in range(steps)]
                whole = meters[name].run(lambda one=made[name], all_=batches: [one.step(*batch) for batch in all_])
                meters[name].ms.append(whole / steps)
        if profile is not None and Megazero.name in made:
            with torch.profiler.profile() as trace:
                meters[Megazero.name].run(partial(made[Megazero.name].step, *settings[Megazero.name].batch(0, device)))
            trace.export_chrome_trace(str(profile))
        for name, contender in made.items():
            if isinstance(contender, Megazero) and device.type == "cuda" and "offload" in str(settings[name].options):
                meters[name].hidden = contender.hidden_copies(*settings[name].batch(0, device))
            contender.close()
            print(line_of(name, meters[name], settings[name]), flush=True)  # what is known if another one fails
        if apart:
            del made, contender
            _free()
    losses = {name: meter.losses for name, meter in meters.items()}
    worst = max(abs(a - b) for its in losses.values() for a, b in zip(losses[Megazero.name], its, strict=True))
    if not worst <= LOSS_TOLERANCE[settings[Megazero.name].dtype]:
        raise RuntimeError(f"the losses differ by {worst:.2e}, so the times would compare two models: {losses}")
    return [line_of(name, meters[name], setting) for name, setting in settings.items()]


def _free() -> None:
    torch._dynamo.reset()  # compiled blocks hold what they were compiled for
    gc.collect()
    torch.cuda.empty_cache()


def measured_in(folder: Path) -> list[tuple[Line, Setting]]:
    """megazero's steps that the queue of `benchmarks.gpu` has measured into a folder."""
    found = []
    for file in sorted(folder.glob("*.json")):
        report = json.loads(file.read_text()).get("report") or {}
        for line in report.get("lines", []) if "settings" in report else []:
            asked = report["settings"][line["name"]]
            if line["name"] != Plain.name:
                named = Line(**line | {"name": f"{file.stem}: {line['name']}"})
                found.append((named, Setting(**asked | {"options": tuple(asked["options"])})))
    return found


def calibrated() -> str:
    """The file of a calibration of this device, made in forked processes, before this one starts CUDA."""
    file = Path(mkdtemp(), "calibration.json")
    write_calibration(calibrate(quick=True), file)
    return str(file)


def predict(folder: Path, gpu: str, out: Path) -> None:
    """Print and write the steps of a folder with what `megazero plan` predicts for them."""
    cluster = cluster_of(gpu, 1)
    planned = [with_plan(line, setting, cluster) for line, setting in measured_in(folder)]
    print(table(planned))
    write_whole(out, json.dumps({"planned": [asdict(line) for line in planned]}) + "\n")


def table(lines: Sequence[Line]) -> str:
    """All contenders."""
    heads = (
        "contender",
        "step ms (least to most)",
        "planned",
        "tokens/s",
        "MFU",
        "peak GB",
        "planned",
        "copies hidden",
    )
    rows = [
        (
            line.name,
            f"{line.median_ms:.1f} ({line.least_ms:.1f} to {line.most_ms:.1f})",
            "" if line.planned_ms is None else f"{line.planned_ms:.1f}",
            f"{line.tokens_per_second:,.0f}",
            "" if line.mfu is None else f"{line.mfu:.1%}",
            "" if line.peak_bytes is None else f"{line.peak_bytes / 1e9:.1f}",
            "" if line.planned_bytes is None else f"{line.planned_bytes / 1e9:.1f}",
            "" if line.hidden is None else f"{line.hidden:.0%}",
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
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="of all of megazero's runs")
    parser.add_argument("--variant", action="append", default=[], metavar="'KEY=VALUE ...'", help="one more contender")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain loop out")
    parser.add_argument("--apart", action="store_true", help="one contender after the other, not in turns")
    parser.add_argument(
        "--plan", metavar="GPU", help="show what `megazero plan --gpu GPU` predicts; 'here' calibrates first"
    )
    parser.add_argument(
        "--measured", type=Path, metavar="FOLDER", help="measure nothing; --plan is for the steps in here"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of each contender in a round")
    parser.add_argument("--profile", type=Path, help="write a trace of one of megazero's steps here: ....json.gz")
    parser.add_argument("--out", type=Path, help="write the JSON here, too: benchmarks/results/....json")
    given = parser.parse_args()
    plan = calibrated() if given.plan == "here" else given.plan
    if given.measured is not None:
        predict(given.measured, plan, given.out)
        sys.exit()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; to see whether the benchmark runs at all: --model tiny --device cpu")
    prefer_expandable_segments(os.environ)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    compiles = device.type == "cuda" if given.compile is None else given.compile
    sizes = given.model, given.dtype, given.micro_batch_size, given.accumulation, compiles
    settings = {Megazero.name: Setting(*sizes, tuple(given.set))}
    settings |= {f"megazero, {variant}": Setting(*sizes, (*given.set, *variant.split())) for variant in given.variant}
    if not given.no_plain:
        settings[Plain.name] = settings[Megazero.name]
    try:
        for setting in settings.values():
            setting.run()
    except ConfigError as error:
        sys.exit(str(error))
    lines = measure(settings, device, given.rounds, given.steps, apart=given.apart, profile=given.profile)
    if plan is not None:
        cluster = cluster_of(plan, 1)
        lines = [line if line.name == Plain.name else with_plan(line, settings[line.name], cluster) for line in lines]
    where = machine() | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})
    asked = {name: asdict(setting) for name, setting in settings.items()}
    report = json.dumps({"machine": where, "settings": asked, "lines": [asdict(line) for line in lines]})
    print(table(lines))
    print(report)
    if given.profile is not None and device.type == "cuda":
        print(read_business(given.profile))
    if given.out is not None:
        write_whole(given.out, report + "\n")


if __name__ == "__main__":
    main()
