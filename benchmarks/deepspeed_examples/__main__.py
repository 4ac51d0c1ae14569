"""Runs DeepSpeed's published training examples under DeepSpeed and under megazero, and compares their losses.

    git clone https://github.com/deepspeedai/DeepSpeedExamples
    python -m benchmarks.deepspeed_examples --examples DeepSpeedExamples [--only cifar gan]

Every script runs as it is, on the CPU, on random data of the shape of its own (`run_one.py`).  A cell of the report is the
largest relative difference of the losses that all ranks recorded, or the last line of what failed.  --only writes no report.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product, takewhile
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

RESULTS = Path(__file__).parent.parent / "results" / "deepspeed_examples.md"
ROOT = Path(__file__).parent.parent.parent
SECONDS = 500
Losses: TypeAlias = list[list[float]]  # of each rank
FORMATS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
SAME = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}  # largest relative difference that counts as equal


@dataclass(frozen=True)
class Case:
    """One run of an example."""

    world: int
    dtype: str
    stage: int


@dataclass(frozen=True)
class Example:
    """A script, and how it is run.

    Attributes:
        arguments: of the script, for a case and the path of its configuration.
        config: the configuration's file, beside the script.
        changes: what a case changes in the configuration, beside the stage and the format.
        images: how many random images a data set has.
    """

    script: str
    arguments: Callable[[Case, str], list[str]]
    config: str | None = None
    changes: Callable[[Case], dict[str, Any]] = lambda _: {}
    images: int = 64
    stages: tuple[int, ...] = (0, 1, 2, 3)
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    worlds: tuple[int, ...] = (1, 2)


def _words(text: str) -> Callable[[Case, str], list[str]]:
    return lambda case, config: text.format(case=case, config=config).split()


_PIPELINE = "pipeline_parallelism/train.py"
_SMALL_PIPELINE = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
EXAMPLES = {
    "cifar": Example(
        "cifar/cifar10_deepspeed.py",
        _words("--epochs 1 --dtype {case.dtype} --stage {case.stage} --log-interval 4"),
        images=128,
    ),
    "gan": Example(
        "gan/gan_deepspeed_train.py",
        _words(
            "--dataset cifar10 --imageSize 64 --workers 0 --batchSize 8 --ngf 4 --ndf 4 --nz 8 "
            "--tensorboard_path tensorboard --deepspeed_config {config}"
        ),
        "gan_deepspeed_config.json",
        lambda case: {"train_batch_size": 8 * case.world},
        dtypes=("fp32",),  # its data are fp32 in every format
    ),
    "data parallel": Example(
        _PIPELINE,
        _words("--backend gloo --steps 4 --pipeline-parallel-size 0 --deepspeed_config {config}"),
        "ds_config.json",
        lambda _: _SMALL_PIPELINE,
        dtypes=("fp32",),
    ),
    "pipeline": Example(
        _PIPELINE,
        _words("--backend gloo --steps 4 --pipeline-parallel-size {case.world} --deepspeed_config {config}"),
        "ds_config.json",
        lambda _: _SMALL_PIPELINE,
        stages=(0, 1),
        dtypes=("fp32",),
    ),
    "imagenet": Example(
        "imagenet/main.py",
        _words("--deepspeed --deepspeed_config {config} --arch resnet18 --epochs 1 -b 8 -j 0 --seed 3"),
        "config/ds_config.json",
        lambda case: {"train_batch_size": 8 * case.world},
        images=32,
        dtypes=("fp32",),
        worlds=(1,),  # at its end it gathers from as many ranks as there are GPUs
    ),
    "bf16_master_weight": Example(
        "bf16_master_weight/train.py",
        _words(
            "--deepspeed_config {config} --hidden_dim 32 --num_layers 2 --num_heads 4 --vocab_size 128 --batch_size 4 "
            "--seq_length 16 --num_steps 6 --warmup_steps 1"
        ),
        "configs/baseline.json",
        lambda case: {"bf16": {"enabled": False}},
        dtypes=("fp32", "bf16"),
    ),
}


def main() -> None:
    """Run the cases that are asked for, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=Path, required=True, help="a checkout of DeepSpeedExamples")
    parser.add_argument("--only", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    asked = parser.parse_args()
    training = asked.examples.resolve() / "training"
    rows = [_HEAD]
    for name in asked.only:
        example = EXAMPLES[name]
        for world, dtype in product(example.worlds, example.dtypes):
            cells = {stage: _compare(example, Case(world, dtype, stage), training) for stage in example.stages}
            rows.append(
                f"| {name} | {world} | {dtype} | " + " | ".join(cells.get(stage, "") for stage in range(4)) + " |"
            )
            print(rows[-1], flush=True)
    if len(asked.only) == len(EXAMPLES):
        parts = [__doc__.strip().split("\n\n")[i] for i in (0, 2)] + ["\n".join(rows)]
        RESULTS.write_text("# DeepSpeed's training examples\n\n" + "\n\n".join(parts) + "\n")


_HEAD = "| example | processes | format | stage 0 | stage 1 | stage 2 | stage 3 |\n|---|---|---|---|---|---|---|"


def _compare(example: Example, case: Case, training: Path) -> str:
    """The largest difference; where DeepSpeed fails or differs, that beside its stage 0 in fp32, too."""
    ours, our_error = _run("megazero", example, case, training)
    if ours is None:
        return f"megazero: {our_error}"
    theirs, their_error = _run("deepspeed", example, case, training)
    difference = _difference(ours, theirs)
    if difference <= SAME[case.dtype]:
        return f"{difference:.1e}"
    text = f"DeepSpeed: {their_error}" if theirs is None else f"**differs by {difference:.1e}**"
    plain = Case(case.world, "fp32", 0)
    unsharded, _ = _run("deepspeed", example, plain, training)
    known = f"{_difference(ours, unsharded):.1e} beside stage 0 in fp32" if unsharded is not None else "megazero runs"
    return text if case == plain and unsharded is not None else f"{known}; {text}"


def _difference(ours: Losses, theirs: Losses | None) -> float:
    """The largest relative difference; infinite where the runs have other numbers of losses."""
    if theirs is None or [len(one) for one in ours] != [len(one) for one in theirs]:
        return inf
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=True)]
    return max(abs(one - other) / max(abs(other), 1e-2) for one, other in pairs)


@cache
def _run(side: str, example: Example, case: Case, training: Path) -> tuple[Losses | None, str]:
    """The losses of every rank, or None and the error."""
    script = training / example.script
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = folder / "config.json"
        if example.config is not None:
            settings = json.loads((script.parent / example.config).read_text())
            zero = settings.get("zero_optimization", {}) | {"stage": case.stage}
            settings |= {"zero_optimization": zero, **example.changes(case), **FORMATS[case.dtype]}
            config.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"]
        command += ["--nproc_per_node", str(case.world), "-m", "benchmarks.deepspeed_examples.run_one"]
        command += [side, made, str(script), *example.arguments(case, str(config))]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment |= {"EXAMPLES": str(example.images), "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, cwd=folder, env=environment, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return None, f"no end within {SECONDS} s"
        if ran.returncode:
            return None, _error_in(ran.stderr)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(case.world)], ""


def _error_in(text: str) -> str:
    """The last error of a rank, with the indented lines that follow."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines()]
    starts = [at for at, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b(?!.*ChildFailed)", line)]
    starts = [at for at in starts if "ChildFailedError" not in lines[at]]
    if not starts:
        return "it ended with an error"
    shown = [lines[starts[-1]], *takewhile(lambda line: line.startswith(" "), lines[starts[-1] + 1 :])]
    return " ".join(" ".join(shown).split())[:260].replace("|", "/")


if __name__ == "__main__":
    main()
