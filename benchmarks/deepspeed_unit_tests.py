"""Runs DeepSpeed's own unit tests with DeepSpeed and with megazero in its place, on the CPU, and says which pass.

    git clone https://github.com/deepspeedai/DeepSpeed
    python -m benchmarks.deepspeed_unit_tests --deepspeed DeepSpeed [--only PATTERN] [--sides megazero]

A test counts if it passes with the DeepSpeed that is installed.  Each test runs in processes of its own, as many as it asks for
up to four, forked, with a limit of time.  `--only checkpoint/test_lr` or `--only TestOneCycle` runs a part and keeps the other
results; `--sides megazero` keeps DeepSpeed's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
SECONDS, RANKS = 60, 4  # of a test; the most that it may start
FILES = """runtime/zero/test_*.py v1/zero/test_*.py runtime/pipe/test_*.py pipe/test_*.py checkpoint/test_*.py
    runtime/half_precision/test_*.py v1/half_precision/test_*.py runtime/test_lr_schedulers.py runtime/test_precision_*.py
    runtime/test_ds_config_*.py runtime/test_ds_initialize.py runtime/test_autocast.py runtime/test_data.py
    runtime/test_multi*.py runtime/test_no_sync_ctxt.py runtime/test_runtime_utils.py"""
SIDE = "UNIT_TESTS_SIDE"
# Why a test of megazero may fail: pattern of "file::test error" -> the reason, a test of what is private to DeepSpeed.
PRIVATE: dict[str, str] = {}


def main() -> None:
    """Run the tests, keep their results in a JSON file and make the page of it."""
    parser = argparse.ArgumentParser(description="DeepSpeed's unit tests with DeepSpeed and with megazero.")
    parser.add_argument("--deepspeed", type=Path, required=True, help="a checkout of DeepSpeed")
    parser.add_argument("--only", default="", help="part of a test's file::name")
    parser.add_argument("--sides", nargs="*", default=["deepspeed", "megazero"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    stored = given.results / "deepspeed_unit_tests.json"
    results = json.loads(stored.read_text()) if stored.exists() else {"deepspeed": {}, "megazero": {}}
    tests = given.deepspeed.resolve() / "tests"
    files = sorted({file for pattern in FILES.split() for file in (tests / "unit").glob(pattern)})
    part = given.only.partition("::")[0]
    names = [str(file.relative_to(tests)) for file in files]
    for name in [name for name in names if part in name] or names:
        for side in given.sides:
            kept = {test: end for test, end in results[side].items() if not (test.startswith(name) and given.only in test)}
            results[side] = kept | _run(tests, name, side, given.only)
        stored.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")
    (given.results / "deepspeed_unit_tests.md").write_text(_page(results["deepspeed"], results["megazero"]))


def _run(tests: Path, file: str, side: str, only: str) -> dict[str, str]:
    """How each test of a file ends: "passed", "skipped: why" or the error; the file's own error under its name."""
    with tempfile.TemporaryDirectory() as made:
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", SIDE: side}
        environment |= {"UNIT_TESTS_OUT": f"{made}/out", "UNIT_TESTS_ONLY": only}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.deepspeed_unit_tests", "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist", "-W", "ignore", f"--basetemp={made}/tmp", file]
        print(f"{side:10}{file}", end=" ", flush=True)
        started = time.monotonic()
        ran = subprocess.run(command, cwd=tests, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        out = Path(made) / "out"
        ends = dict(json.loads(line) for line in out.read_text().splitlines()) if out.exists() else {}
        counts = Counter(end.partition(":")[0] if end.startswith(("passed", "skipped")) else "failed" for end in ends.values())
        print(f"{dict(counts)} in {time.monotonic() - started:.0f} s", "" if ends else ran.stdout[-2000:], flush=True)
        return ends


def _page(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """The table for people."""
    kinds = ("both", "refused by name", "private", "differs")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    lines: dict[str, Counter[str]] = defaultdict(Counter)
    for test in [test for test, end in sorted(theirs.items()) if end == "passed"]:
        file = test.partition("::")[0]
        kind, text = _kind(test, ours.get(test) or ours.get(file) or "not run")
        counts[file][kind] += 1
        lines[kind][f"{file} | {text}" if kind == "differs" else text] += 1
    rows = [f"| {file} | {sum(each.values())} | " + " | ".join(str(each[kind] or "") for kind in kinds) + " |" for file, each in counts.items()]
    total = sum(counts.values(), Counter())
    rows.append(f"| all | {sum(total.values())} | " + " | ".join(str(total[kind]) for kind in kinds) + " |")
    page = ["# DeepSpeed's unit tests", "", *(__doc__ or "").split("\n\n    git")[0].splitlines(), ""]
    page += ["| file | pass with DeepSpeed | " + " | ".join(kinds) + " |", "|---|" + "---|" * 5, *rows]
    for kind in kinds[1:]:
        page += ["", f"| {kind} | tests |", "|---|---|", *(f"| {text} | {count} |" for text, count in lines[kind].most_common())]
    return "\n".join(page) + "\n"


def _kind(test: str, end: str) -> tuple[str, str]:
    if end == "passed":
        return "both", ""
    for pattern, reason in PRIVATE.items():
        if re.search(pattern, f"{test} {end}"):
            return "private", reason
    refused = re.match(r"refused (.*)", end)
    text = re.sub(r"\s+", " ", refused[1] if refused else f"{test.partition('::')[2]} | {end}").replace("|", "/")
    return ("refused by name" if refused else "differs"), text[:300]


# What follows runs within pytest, of which this file is a plugin.
if SIDE in os.environ:
    if os.environ[SIDE] == "megazero":
        from megazero.deepspeed.mirror import stand_for_deepspeed

        stand_for_deepspeed()
    from deepspeed.accelerator import get_accelerator  # before the checkout's is found

    if os.environ[SIDE] == "deepspeed":  # compiles for minutes, once
        for builder in ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder"):
            get_accelerator().create_op_builder(builder).load(verbose=False)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave what is asked for, and let each test start its ranks through this file."""
    items[:] = [item for item in items if os.environ["UNIT_TESTS_ONLY"] in item.nodeid]
    if "unit.common" in sys.modules:
        sys.modules["unit.common"].DistributedExec._launch_procs = _launch


def pytest_pyfunc_call(pyfuncitem: Any) -> bool:
    """Run a test without ranks in a process of its own, too."""
    names = pyfuncitem._fixtureinfo.argnames
    _forked(lambda _: pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}), 1)
    return True


def pytest_runtest_logreport(report: Any) -> None:
    """Keep how a test ended."""
    if report.when == "call" or report.outcome != "passed":
        text = report.longrepr[2] if report.skipped else str(report.longrepr or "")
        end = {"passed": "passed", "skipped": f"skipped: {text}"}.get(report.outcome, text)
        if "refused " in end or "failed " in end:
            end = end[min(at for at in (end.find("refused "), end.find("failed ")) if at >= 0) :]
        _keep(report.nodeid, end)


def pytest_collectreport(report: Any) -> None:
    """Keep why a file cannot be imported."""
    if report.failed:
        errors = re.findall(r"^E\s+(.*)", str(report.longrepr), re.MULTILINE)
        _keep(report.nodeid, f"file: {errors[-1] if errors else report.longrepr}")


def _keep(test: str, end: str) -> None:
    with open(os.environ["UNIT_TESTS_OUT"], "a") as file:
        file.write(json.dumps([test, end[:1500]]) + "\n")


def _launch(test: Any, ranks: int, init_method: str) -> None:
    """In place of DistributedExec._launch_procs."""
    port = sys.modules["unit.common"].get_master_port()  # type: ignore[attr-defined]
    arguments = (ranks, port, init_method)
    _forked(lambda rank: test._dist_run(rank, *arguments), ranks)


def _forked(work: Callable[[int], Any], ranks: int) -> None:
    """Call `work(rank)` in forked processes.  The first failure is the test's; then the others have five seconds."""
    if ranks > RANKS:
        pytest.skip(f"{ranks} ranks")
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [context.Process(target=_rank, args=(work, rank, pipe[1])) for rank, pipe in enumerate(pipes)]
    for process in processes:
        process.start()
    deadline, ends, left = time.monotonic() + SECONDS, [], {pipe[0]: process for pipe, process in zip(pipes, processes)}
    for pipe in pipes:
        pipe[1].close()
    while left and (ready := wait(list(left), max(0, deadline - time.monotonic()))):
        for pipe in ready:
            left.pop(pipe)
            try:
                ends.append(pipe.recv())
            except EOFError:
                ends.append(("failed", "a rank died"))
            if ends[-1][0] != "passed":
                deadline = min(deadline, time.monotonic() + 5)
    for process in processes:
        process.join(0.1 if left else max(0, deadline - time.monotonic()))
        process.kill()
        process.join()
    failed = [text for end, text in ends if end == "failed"] or ([f"failed within {SECONDS} s"] if left else [])
    if failed:
        pytest.fail(next((text for text in failed if text.startswith("refused")), failed[0]), pytrace=False)
    if skipped := [text for end, text in ends if end == "skipped"]:
        pytest.skip(skipped[0])


def _rank(work: Callable[[int], Any], rank: int, pipe: Any) -> None:
    """One process of a test: send how it ended, wait for the others, leave."""
    import torch.distributed as dist

    try:
        message = work(rank)
        pipe.send(("skipped", message) if isinstance(message, str) and message else ("passed", ""))
        if dist.is_initialized():
            dist.barrier()
    except pytest.skip.Exception as skip:
        pipe.send(("skipped", str(skip)))
    except BaseException as error:
        pipe.send(("failed", _described(error)))
    finally:
        sys.stdout.flush()
        os._exit(0)


def _described(error: BaseException) -> str:
    """Kind of failure, error and place; refused: megazero itself raised it, and not as an assertion."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    refused = last.filename.startswith(str(ROOT / "megazero")) and (last.line or "").startswith("raise ")
    calls = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "/multiprocessing/" not in frame.filename]
    text = f"{type(error).__name__}: {str(error)[:900]}"
    return f"refused {text}" if refused else f"failed {text} [{' '.join(calls[-4:])}]"


if __name__ == "__main__":
    main()
