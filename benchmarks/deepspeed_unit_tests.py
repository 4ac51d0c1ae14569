"""Runs DeepSpeed's own unit tests with DeepSpeed and with megazero in its place, on the CPU, and says which pass.

    git clone https://github.com/deepspeedai/DeepSpeed
    python -m benchmarks.deepspeed_unit_tests --deepspeed DeepSpeed [--only PART] [--sides megazero]

A test counts if it passes with the DeepSpeed that is installed.  Each test runs in forked processes of its own, as many as it
asks for up to four, with a limit of time.  `--only checkpoint/test_lr` or `--only zero/test_zero.py::TestZero3` runs a part and
keeps the other results; `--sides megazero` keeps DeepSpeed's.

A test that fails is one of three: megazero refuses by name what it needs; it looks at what is private to DeepSpeed, or at what
megazero does otherwise on purpose (`REASONS`); or the two differ.
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

RESULTS, ROOT = Path(__file__).parent / "results", Path(__file__).parent.parent
SECONDS, RANKS = 60, 4  # of a test; the most that it may start
FILES = """runtime/zero/test_*.py v1/zero/test_*.py runtime/pipe/test_*.py pipe/test_*.py checkpoint/test_*.py
    runtime/half_precision/test_*.py v1/half_precision/test_*.py runtime/test_lr_schedulers.py runtime/test_precision_*.py
    runtime/test_ds_config_*.py runtime/test_ds_initialize.py runtime/test_autocast.py runtime/test_data.py
    runtime/test_multi*.py runtime/test_no_sync_ctxt.py runtime/test_runtime_utils.py"""
SIDE, OUT, ONLY = "UNIT_TESTS_SIDE", "UNIT_TESTS_OUT", "UNIT_TESTS_ONLY"
KINDS = ("pass with both", "refused by name", "private", "differ")
PRIVATE = "it is private to DeepSpeed"
REASONS = {
    PRIVATE: PRIVATE,
    r"'(OneCycle|Warmup\w+)' object has no": "attributes of a schedule by which DeepSpeed computes the rate",
}
"""Pattern of "file::test how it ended" -> why a test may fail."""


def main() -> None:
    """Run the tests, keep their results in a JSON file and make the page of it."""
    parser = argparse.ArgumentParser(description="DeepSpeed's unit tests with DeepSpeed and with megazero.")
    parser.add_argument("--deepspeed", type=Path, required=True, help="a checkout of DeepSpeed")
    parser.add_argument("--only", default="", help="part of a test's file::name")
    parser.add_argument("--sides", nargs="*", default=["deepspeed", "megazero"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    stored, tests = given.results / "deepspeed_unit_tests.json", given.deepspeed.resolve() / "tests"
    results = json.loads(stored.read_text()) if stored.exists() else {"deepspeed": {}, "megazero": {}}
    files = sorted({file for pattern in FILES.split() for file in (tests / "unit").glob(pattern)})
    for name in [str(file.relative_to(tests)) for file in files]:
        for side in given.sides if given.only.partition("::")[0] in name else ():
            again = {test for test in results[side] if test.startswith(name) and given.only in test} | {name}
            kept = {test: end for test, end in results[side].items() if test not in again}
            results[side] = kept | _run(tests, name, side, given.only)
        stored.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")
    stored.with_suffix(".md").write_text(_page(results["deepspeed"], results["megazero"]))


def _run(tests: Path, file: str, side: str, only: str) -> dict[str, str]:
    """How each test of a file ended: "passed", "skipped: why" or the error; under the file's name, why it has no tests."""
    with tempfile.TemporaryDirectory() as made:
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        environment |= {SIDE: side, OUT: f"{made}/out", ONLY: only}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "benchmarks.deepspeed_unit_tests",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-p", "no:xdist", "-W", "ignore", f"--basetemp={made}/tmp", file]
        ran = subprocess.run(command, cwd=tests, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        lines = Path(f"{made}/out").read_text().splitlines() if os.path.exists(f"{made}/out") else []
        ends = dict(json.loads(line) for line in lines)
        print(
            side,
            file,
            dict(Counter(re.split("[: ]", end)[0] for end in ends.values())) or ran.stdout[-2000:],
            flush=True,
        )
        return ends


def _page(theirs: dict[str, str], ours: dict[str, str]) -> str:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    lines: dict[str, Counter[str]] = defaultdict(Counter)
    for test in [test for test, end in sorted(theirs.items()) if end == "passed"]:
        file = test.partition("::")[0]
        kind, text = _kind(test, ours.get(test) or ours.get(file) or "not run")
        for row in (file, "all"):
            counts[row][kind] += 1
        lines[kind][text] += 1
    counts["all"] = counts.pop("all")  # the last row
    page = ["# DeepSpeed's unit tests", "", *(__doc__ or "").strip().splitlines(), ""]
    page += [f"| file | pass with DeepSpeed | {' | '.join(KINDS)} |", "|---|" + "---|" * (1 + len(KINDS))]
    for file, row in counts.items():
        page.append(f"| {file} | {sum(row.values())} | {' | '.join(str(row[kind] or '') for kind in KINDS)} |")
    for kind in KINDS[1:]:
        page += [
            "",
            f"| {kind} | tests |",
            "|---|---|",
            *(f"| {text} | {n} |" for text, n in lines[kind].most_common()),
        ]
    return "\n".join(page) + "\n"


def _kind(test: str, end: str) -> tuple[str, str]:
    if end == "passed":
        return KINDS[0], ""
    if reason := next((reason for pattern, reason in REASONS.items() if re.search(pattern, f"{test} {end}")), None):
        return "private", reason
    is_refused = end.startswith("refused ")
    text = re.sub(r"\S*/tmp/\S*/", "", end.removeprefix("refused ") if is_refused else f"{test}: {end}")
    return "refused by name" if is_refused else "differ", re.sub(r"\s+", " ", text).replace("|", "/")[:300]


# What follows runs within pytest, of which this file is a plugin.
if os.environ.get(SIDE) == "megazero":
    from megazero.deepspeed import mirror

    refused = mirror._reason
    mirror._reason = lambda path: refused(path) or PRIVATE  # so that a file is not lost for a private name at its top
    mirror.stand_for_deepspeed()
elif SIDE in os.environ:  # before the checkout's is found
    from deepspeed.accelerator import get_accelerator

    for builder in ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder"):  # compiled once, which takes minutes
        get_accelerator().create_op_builder(builder).load(verbose=False)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave what is asked for, and let each test start its ranks through this file."""
    items[:] = [item for item in items if os.environ[ONLY] in item.nodeid]
    if common := sys.modules.get("unit.common"):
        setattr(common.DistributedExec, "_launch_procs", _launch)


def _launch(test: Any, ranks: int, store: str) -> None:
    port = sys.modules["unit.common"].get_master_port()
    _forked(lambda rank: test._dist_run(rank, ranks, port, store), ranks)


def pytest_pyfunc_call(pyfuncitem: Any) -> bool:
    """Run a test without ranks in a process of its own, too."""
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    _forked(lambda _: pyfuncitem.obj(**given), 1)
    return True


def pytest_runtest_logreport(report: Any) -> None:
    """Keep how a test ended."""
    if report.when == "call" or report.outcome != "passed":
        text = f"skipped {report.longrepr[2]}" if report.skipped else str(report.longrepr or "passed")
        _keep(report.nodeid, text[max(0, text.find("refused "), text.find("failed ")) :])


def pytest_collectreport(report: Any) -> None:
    """Keep why a file cannot be imported."""
    if report.failed:
        _keep(report.nodeid, "failed " + str(report.longrepr).strip().splitlines()[-1])


def _keep(test: str, end: str) -> None:
    with open(os.environ[OUT], "a") as file:
        file.write(json.dumps([test, end[:600]]) + "\n")


def _forked(work: Callable[[int], Any], ranks: int) -> None:
    """Call `work(rank)` in forked processes, until all have ended or one has failed."""
    if ranks > RANKS:
        pytest.skip(f"{ranks} ranks")
    context, deadline = multiprocessing.get_context("fork"), time.monotonic() + SECONDS
    reader, writer = context.Pipe(duplex=False)
    processes = [context.Process(target=_rank, args=(work, rank, writer)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            has_ended = reader.poll(max(0, deadline - time.monotonic()))
            end = reader.recv() if has_ended else f"failed: no end within {SECONDS} s"
            if end.startswith("skipped "):
                pytest.skip(end.removeprefix("skipped "))
            if end:
                pytest.fail(end, pytrace=False)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(work: Callable[[int], Any], rank: int, pipe: Any) -> None:
    """A process of a test: it sends how it ended, "" if it passed, and stays for the sake of the others."""
    try:
        skipped = work(rank)
        end = f"skipped {skipped}" if isinstance(skipped, str) and skipped else ""
    except pytest.skip.Exception as skip:
        end = f"skipped {skip}"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        is_refused = str(ROOT / "megazero") in frames[-1].filename and (frames[-1].line or "").startswith("raise ")
        place = " ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-4:])
        end = f"{'refused' if is_refused else 'failed'} {type(error).__name__}: {str(error)[:400]}"
        end += "" if is_refused else f" [{place}]"
    pipe.send(end)
    time.sleep(SECONDS)


if __name__ == "__main__":
    main()
