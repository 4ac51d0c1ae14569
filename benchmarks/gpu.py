"""Every check that needs a GPU, the most valuable first: as many as fit into the minutes there are.

    python -m benchmarks.gpu --minutes 12        on a CUDA device, from the repository's root
    python -m benchmarks.gpu --only step         checks whose name begins so
    python -m benchmarks.gpu --rehearse          the same queue in small on a CPU: does each check still run?

A check of `gpu.toml` is a command.  It is skipped where its last result is of this device and of the same files that it
measures, and it passed, or where it needs more devices.  A check that fails or takes too long ends alone; the queue goes on.
After each, `results/gpu/NAME.json` and the page `results/gpu/README.md` say what it found, with device, versions, commit and
command.  So a second call goes on where the first one ended, and tries again last what has failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from string import Template
from tempfile import mkdtemp
from typing import Any

import torch

from benchmarks.report import machine, markdown, write_whole

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "gpu"
NEEDED = "pydantic xxhash filelock einops safetensors tokenizers pytest xdist pytest_timeout hypothesis"
_ON_CUDA = {"MEGAZERO_TEST_DEVICE": "cuda", "MEGAZERO_SHARE_DEVICE": "1", "NCCL_SOCKET_IFNAME": "lo"}
PATIENCE = 1.7  # a check may take so many times its expected seconds
_MOST_LINES = 60  # of a check's output that are kept
# Checks are forked from a server that has imported what they need, which takes a new process 5 to 30 s.
_PROCESSES = mp.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["pytest", "benchmarks.gpu_step"])


@dataclass(frozen=True)
class Check:
    """One command of the queue.

    Args:
        name: of its result's file.
        title: what the page says of it.
        seconds: that it takes on an H100, its compilation included.
        command: arguments of Python, "-m" and a module first; "{out}" stands for a file for its JSON, "{folder}" for the
            folder of all results.
        rehearsal: the same in small, for a CPU.
        measures: folders and files whose change makes its result old.
        devices: that it needs.
    """

    name: str
    title: str
    seconds: int
    command: str
    rehearsal: str
    measures: str
    devices: int = 1

    def version(self) -> str:
        """A digest of the command and of all files that it measures."""
        digest = sha256(self.command.encode())
        for name in self.measures.split():
            path = ROOT / name
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(file.read_bytes())
        return digest.hexdigest()[:16]


def _read_queue() -> tuple[Check, ...]:
    document, words = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")), dict[str, str]()

    def filled(value: Any) -> Any:
        return Template(value).substitute(words) if isinstance(value, str) else value

    for name, text in document["words"].items():
        words[name] = filled(text)
    return tuple(Check(**{key: filled(value) for key, value in check.items()}) for check in document["check"])


QUEUE = _read_queue()


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


def _become(words: list[str], log: Path, environment: Mapping[str, str]) -> None:
    """Run a module as a program, in a process of its own."""
    os.setsid()
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def run_check(check: Check, folder: Path, where: dict[str, str], limit: float, environment: dict[str, str]) -> Outcome:
    """Run a check, with all that it starts, for `limit` seconds at most; `environment`: variables beside this process's."""
    out, log = folder / f"{check.name}.report.json", folder / f"{check.name}.log"
    _, *words = (part.format(out=out, folder=folder) for part in shlex.split(check.command))
    begun = time.monotonic()
    process = _PROCESSES.Process(target=_become, args=(words, log, environment))
    process.start()
    assert process.pid is not None
    process.join(limit)
    ended = "passed" if process.exitcode == 0 else f"failed ({process.exitcode})"
    if process.exitcode is None:
        ended = f"took over {limit:.0f} s"
        os.killpg(process.pid, signal.SIGINT)  # tests then say what failed
        process.join(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # ranks that a test has left, too
    output = log.read_text(errors="replace").splitlines()
    told = [line for line in output if re.match(r"\||FAILED|ERROR|\w*Error|\d+ (passed|failed|skipped)", line)]
    report = json.loads(out.read_text()) if out.exists() else None
    out.unlink(missing_ok=True)
    shown = f"python {check.command}".replace(" --out {out}", "").replace("{folder}", "benchmarks/results/gpu")
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


def queue_of(checks: Sequence[Check], outcomes: dict[str, Outcome], where: dict[str, str], devices: int) -> list[Check]:
    """The checks to run, last those that have failed with the same code; says which are skipped."""
    chosen, again = list[Check](), list[Check]()
    for check in checks:
        last = outcomes.get(check.name)
        is_known = last is not None and (last.version, last.where.get("gpu")) == (check.version(), where.get("gpu"))
        if check.devices > devices:
            print(f"{check.name}: skipped, it needs {check.devices} devices")
        elif last is not None and is_known and last.ended == "passed":
            print(f"{check.name}: measured on this device with the same code already")
        else:
            (again if is_known else chosen).append(check)
    return chosen + again


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
    os.environ.setdefault(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # else a process that has looked for devices cannot fork
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
    devices = sys.maxsize if given.rehearse else torch.cuda.device_count()
    for check in queue_of(checks, outcomes, where, devices):
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
