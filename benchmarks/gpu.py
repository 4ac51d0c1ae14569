"""Every check that needs a GPU, the most valuable first: as many as fit into the minutes there are.

    python -m benchmarks.gpu --minutes 12        on a CUDA device, from the repository's root
    python -m benchmarks.gpu --only step         checks whose name begins so
    python -m benchmarks.gpu --rehearse          the same queue in small on a CPU: does each check still run?

A check is a command.  It is skipped where its last result is of this device and of the same files that it measures, and it
passed.  A check that fails or takes too long ends alone; the queue goes on.  After each, `results/gpu/NAME.json` and
the page `results/gpu/README.md` say what it found, with device, versions, commit and command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from benchmarks.report import machine, markdown, write_whole

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "gpu"
NEEDED = "pydantic xxhash filelock einops safetensors tokenizers pytest xdist pytest_timeout hypothesis"
LAWS = "any_shape precision_and_offload any_schedule quantized muon fp8 loss_scale pipeline experts expert_parallel"
_ON_CUDA = {"MEGAZERO_TEST_DEVICE": "cuda", "MEGAZERO_SHARE_DEVICE": "1", "NCCL_SOCKET_IFNAME": "lo"}
_TROUBLES = "every_signal or second_signal_ends or launcher_that_dies or loses_a_rank or finds_no_memory"
PATIENCE = 1.7  # a check may take so many times its expected seconds
_MOST_LINES = 60  # of a check's output that are kept
_PYTEST = ("-m", "pytest", "-rfE", "-p", "no:cacheprovider", "--timeout", "150")
_STEP = ("-m", "benchmarks.gpu_step")
_TINY = (*_STEP, "--model", "tiny", "--device", "cpu", "--rounds", "1", "--steps", "1", "--accumulation", "2")
_8B = ("--model", "8b", "--apart", "--steps", "2")
_SAMPLES = ("--micro-batch-size", "1", "--accumulation", "4", "--rounds", "3")
_FP8 = tuple(
    x for kind in ("rowwise", "blockwise") for x in ("--variant", f"precision.fp8={kind} precision.fp8_layers=all")
)
POLICIES = (
    *("--variant", "activations.recompute=selective"),
    *("--variant", "activations.recompute=full activations.keep_attention=true"),
    *("--variant", "activations.recompute=full"),
    *("--variant", "activations.offload=host"),
)
_OFFLOADED = (
    *("--variant", "activations.recompute=full activations.keep_attention=true activations.offload=host"),
    *("--variant", "zero.stage=3 zero.offload.parameters=cpu zero.offload.optimizer=cpu"),
)


@dataclass(frozen=True)
class Check:
    """One command of the queue.

    Args:
        name: of its result's file.
        title: what the page says of it.
        seconds: that it takes on an H100, its compilation included.
        command: arguments of Python; "{out}" stands for a file for its JSON.
        rehearsal: the same in small, for a CPU.
        measures: folders and files whose change makes its result old.
    """

    name: str
    title: str
    seconds: int
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    measures: tuple[str, ...]

    def version(self) -> str:
        """A digest of the command and of all files that it measures."""
        digest = sha256(" ".join(self.command).encode())
        for name in self.measures:
            path = ROOT / name
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(file.read_bytes())
        return digest.hexdigest()[:16]


_TRUNK = tuple(
    f"megazero/{room}"
    for room in ("comm", "engine", "layers", "models", "optim", "parallel_state", "schedules", "zero")
)
_STEPS = (*_TRUNK, "benchmarks/gpu_step.py", "benchmarks/models.py")
QUEUE = (
    Check(
        "laws", "Laws in small, several ranks on the one device over NCCL", 180,
        (*_PYTEST, "-n", "4", "--dist", "worksteal", "--small", *(f"tests/laws/test_{law}.py" for law in LAWS.split()),
         "tests/test_tile_calls.py"),
        (*_PYTEST, "-n", "0", "--small", "tests/laws/test_loss_scale.py"),
        (*_TRUNK, "tests/laws", "tests/test_tile_calls.py"),
    ),
    Check(
        "train", "`megazero train` with several ranks on the device: signals, resumption, lost ranks, full memory", 120,
        (*_PYTEST, "-n", "3", "tests/test_signals.py", "tests/test_out_of_memory.py", "-k", _TROUBLES),
        (*_PYTEST, "-n", "0", "tests/test_signals.py", "-k", "second_signal_ends"),
        (*_TRUNK, "megazero/training", "tests/test_signals.py", "tests/test_out_of_memory.py"),
    ),
    Check(
        "step_1.3b", "A step of 1.3 billion parameters at 4K", 100,
        (*_STEP, "--rounds", "3", "--steps", "3", "--out", "{out}"), (*_TINY, "--out", "{out}"), _STEPS,
    ),
    Check(
        "step_8b_8k", "A step of 6 layers of Llama 3 8B's shape at 8K, vocabulary 128,256", 100,
        (*_STEP, *_8B, *_SAMPLES, *_FP8[:2], "--out", "{out}"),
        (*_TINY, "--apart", "--set", "model.num_kv_heads=2", "--out", "{out}"), _STEPS,
    ),
    Check(
        "fp8_8b_8k", "Linear layers in fp8, 8 such layers, vocabulary 32,768", 70,
        (*_STEP, *_8B, *_SAMPLES, "--no-plain", "--set", "model.num_layers=8", "model.vocab_size=32768", *_FP8,
         "--out", "{out}"),
        (*_TINY, "--apart", "--no-plain", *_FP8, "--out", "{out}"), _STEPS,
    ),
    Check(
        "policies", "Activations: what each policy frees and costs beside the plan, 4 layers of that shape at 8K", 130,
        (*_STEP, *_8B, *_SAMPLES, "--no-plain", "--set", "model.num_layers=4", "--plan", "here", "--out", "{out}",
         *POLICIES),
        (*_TINY, "--apart", "--no-plain", "--plan", "h100", "--out", "{out}", *POLICIES),
        (*_STEPS, "megazero/plan"),
    ),
    Check(
        "offload", "Offloading at 8K, 8 layers of that shape, two samples a step, not compiled: share of copies hidden", 70,
        (*_STEP, *_8B, "--micro-batch-size", "2", "--accumulation", "1", "--rounds", "1", "--no-plain", "--no-compile",
         "--set", "model.num_layers=8", "model.vocab_size=8192", "--out", "{out}", *_OFFLOADED),
        (*_TINY, "--apart", "--no-plain", "--out", "{out}", *_OFFLOADED), _STEPS,
    ),
    Check(
        "attention", "Attention: documents, rings and windows beside one whole causal call", 50,
        ("-m", "benchmarks.gpu_attention", "--out", "{out}"),
        ("-m", "benchmarks.gpu_attention", "--device", "cpu", "--out", "{out}"),
        ("megazero/layers", "benchmarks/gpu_attention.py"),
    ),
    Check(
        "experts", "A layer of experts beside a dense one of equal FLOPs", 30,
        ("-m", "benchmarks.gpu_experts", "--out", "{out}"),
        ("-m", "benchmarks.gpu_experts", "--device", "cpu", "--out", "{out}"),
        ("megazero/layers", "benchmarks/gpu_experts.py"),
    ),
)  # fmt: skip


@dataclass
class Outcome:
    """What a check found.

    Args:
        version: see `Check.version`.
        where: device, driver, versions, commit.
        lines: of its output that name failures, or its table.
        report: the JSON that it wrote.
    """

    name: str
    command: str
    version: str
    ended: str
    seconds: float
    where: dict[str, str]
    lines: list[str] = field(default_factory=list)
    report: dict[str, Any] | None = None


def where_measured() -> dict[str, str]:
    """Device, driver, versions and commit."""
    found = machine()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found["commit"] = (
        os.environ.get("MEGAZERO_COMMIT") or commit.stdout.strip() or "unknown"
    )  # a copy may have no history
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return found


def run_check(check: Check, folder: Path, where: dict[str, str], limit: float, environment: dict[str, str]) -> Outcome:
    """Run a check, with all that it starts, for `limit` seconds at most; `environment`: variables beside this process's."""
    out, log = folder / f"{check.name}.report.json", folder / f"{check.name}.log"
    command = [part.format(out=out) for part in check.command]
    begun, ended = time.monotonic(), "passed"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        ended = ended if process.wait(limit) == 0 else f"failed ({process.returncode})"
    except subprocess.TimeoutExpired:
        ended = f"took over {limit:.0f} s"
        os.killpg(process.pid, signal.SIGINT)  # tests then say what failed
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # ranks that a test has left, too
    output = log.read_text(errors="replace").splitlines()
    told = [line for line in output if re.match(r"\||FAILED|ERROR|\w*Error|\d+ (passed|failed|skipped)", line)]
    report = json.loads(out.read_text()) if out.exists() else None
    out.unlink(missing_ok=True)
    shown = " ".join(["python", *command]).replace(f" --out {out}", "")
    return Outcome(
        check.name, shown, check.version(), ended, time.monotonic() - begun, where, told[-_MOST_LINES:], report
    )


def read_outcomes(folder: Path) -> dict[str, Outcome]:
    """The results that a folder has, by name; one that cannot be read is left out."""
    found = {}
    for file in folder.glob("*.json"):
        try:
            found[file.stem] = Outcome(**json.loads(file.read_text()))
        except (ValueError, TypeError):
            print(f"{file} is not a result of this queue")
    return found


def page(outcomes: dict[str, Outcome]) -> str:
    """The page of all results."""
    heads = ("check", "ended", "seconds", "device", "commit")
    known = [(check, outcomes[check.name]) for check in QUEUE if check.name in outcomes]
    rows = [
        (check.name, one.ended, f"{one.seconds:.0f}", one.where.get("gpu", "CPU"), one.where["commit"])
        for check, one in known
    ]
    return "\n".join(
        ["# On one GPU", "", "`python -m benchmarks.gpu` wrote this.", "", markdown(heads, rows), *_chapters(known)]
    )


def _chapters(known: Sequence[tuple[Check, Outcome]]) -> Iterator[str]:
    for check, one in known:
        versions = ", ".join(f"{key} {value}" for key, value in one.where.items() if key not in ("cpu", "cores", "gpu"))
        yield f"\n## {check.title}\n\n    {one.command}\n\n{one.where.get('gpu', 'CPU')}; {versions}.\n"
        yield "\n".join(line if line.startswith("|") else f"    {line}" for line in one.lines)
    yield ""


def queue_of(checks: Sequence[Check], outcomes: dict[str, Outcome], where: dict[str, str]) -> list[Check]:
    """The checks to run; says which are skipped."""
    chosen = []
    for check in checks:
        last, wanted = outcomes.get(check.name), ("passed", check.version(), where.get("gpu"))
        if last and (last.ended, last.version, last.where.get("gpu")) == wanted:
            print(f"{check.name}: measured on this device with the same code already")
        else:
            chosen.append(check)
    return chosen


def main() -> int:
    """Run the queue; 1 where a check did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--only", default="", metavar="NAME", help="checks whose name begins so")
    parser.add_argument("--rehearse", action="store_true", help="in small, on a CPU")
    parser.add_argument("--folder", type=Path, help=f"of the results; {RESULTS}, or a new one for a rehearsal")
    given = parser.parse_args()
    if missing := [name for name in NEEDED.split() if find_spec(name) is None]:
        sys.exit(f"missing here: {', '.join(missing)}; pip install -e '.[test]'")
    if not given.rehearse and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --rehearse runs the queue in small on a CPU")
    checks = [check for check in QUEUE if check.name.startswith(given.only)]
    if not checks:
        parser.error(f"no check begins with {given.only!r}; there are {', '.join(check.name for check in QUEUE)}")
    if given.rehearse:  # what is small is a check of its own, whose result stands for no other
        checks = [replace(check, command=check.rehearsal) for check in checks]
    folder: Path = given.folder or (Path(mkdtemp(prefix="rehearsal-")) if given.rehearse else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    end, where, outcomes = time.monotonic() + 60 * given.minutes, where_measured(), read_outcomes(folder)
    environment = {} if given.rehearse else _ON_CUDA
    failed = 0
    for check in queue_of(checks, outcomes, where):
        left = end - time.monotonic()
        if left < check.seconds:
            print(f"{check.name}: about {check.seconds} s, {left:.0f} s are left; skipped")
            continue
        outcome = run_check(check, folder, where, min(left, PATIENCE * check.seconds), environment)
        outcomes[check.name], failed = outcome, failed + (outcome.ended != "passed")
        print(f"{check.name}: {outcome.ended} in {outcome.seconds:.0f} s", *outcome.lines, sep="\n  ", flush=True)
        write_whole(folder / f"{check.name}.json", json.dumps(asdict(outcome), indent=1) + "\n")
        write_whole(folder / "README.md", page(outcomes))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
