"""Runs DeepSpeed's own unit tests with DeepSpeed and with megazero in its place, on the CPU, and says which pass.

    git clone https://github.com/deepspeedai/DeepSpeed
    python -m benchmarks.deepspeed_unit_tests DeepSpeed [--only PART] [--sides megazero]

A test counts if it passes with the DeepSpeed that is installed.  Each test runs in forked processes of its own, as many as it
asks for up to four.  `--only checkpoint/test_lr` or `--only zero/test_zero.py::TestZero3` runs a part and keeps the other
results; `--sides megazero` keeps DeepSpeed's.

What fails is one of three: megazero refuses by name what the test needs; the test looks at what is private to DeepSpeed, or at
what megazero does otherwise on purpose (`REASONS`); or the two differ.
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
from pathlib import Path
from typing import Any

import pytest

ROOT, SIDE, OUT, ONLY = Path(__file__).parent.parent, "UNIT_TESTS_SIDE", "UNIT_TESTS_OUT", "UNIT_TESTS_ONLY"
SECONDS, RANKS = 60, 4  # of a test; the most that it may start
FILES = """runtime/zero/test_*.py v1/zero/test_*.py runtime/pipe/test_*.py pipe/test_*.py checkpoint/test_*.py
    runtime/half_precision/test_*.py v1/half_precision/test_*.py runtime/test_lr_schedulers.py runtime/test_precision_*.py
    runtime/test_ds_config_*.py runtime/test_ds_initialize.py runtime/test_autocast.py runtime/test_data.py
    runtime/test_multi*.py runtime/test_no_sync_ctxt.py runtime/test_runtime_utils.py"""
KINDS = ("pass with both", "refused by name", "private or on purpose", "differ")
PRIVATE = "a name that is private to DeepSpeed"
REASONS = {
    PRIVATE: PRIVATE,
    r"'(OneCycle|Warmup\w+)' object has no": "attributes of a schedule by which DeepSpeed computes the rate",
}
"""Pattern of "file::test how it ended" -> why a test may fail."""


def main() -> None:
    """Run the tests, keep their results in a JSON file and make the page of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("deepspeed", type=Path, help="a checkout of DeepSpeed")
    parser.add_argument("--only", default="", help="part of a test's file::name")
    parser.add_argument("--sides", nargs="*", default=["deepspeed", "megazero"])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    stored, tests = given.results / "deepspeed_unit_tests.json", given.deepspeed.resolve() / "tests"
    results = json.loads(stored.read_text()) if stored.exists() else {"deepspeed": {}, "megazero": {}}
    files = sorted({file for pattern in FILES.split() for file in (tests / "unit").glob(pattern)})
    for name in [str(file.relative_to(tests)) for file in files]:
        for side in given.sides if given.only.partition("::")[0] in name else ():
            kept = {
                test: results[side][test]
                for test in results[side]
                if not test.startswith(name) or given.only not in test
            }
            results[side] = kept | _run(tests, name, side, given.only)
            stored.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")
    stored.with_suffix(".md").write_text(_page(results["deepspeed"], results["megazero"]))


def _run(tests: Path, file: str, side: str, only: str) -> dict[str, str]:
    """How each test of a file ended; under the file's own name, why it has no tests."""
    with tempfile.TemporaryDirectory() as made:
        out = Path(made, "out")
        out.touch()
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        environment |= {SIDE: side, OUT: str(out), ONLY: only}
        command = (
            f"-m pytest -p benchmarks.deepspeed_unit_tests -p no:cacheprovider -p no:xdist -W ignore {file}".split()
        )
        command = [sys.executable, *command, f"--basetemp={made}/tests"]
        subprocess.run(command, cwd=tests, env=environment, stdout=subprocess.DEVNULL, check=False)
        ends = dict(json.loads(line) for line in out.read_text().splitlines())
    print(side, file, dict(Counter(end.split()[0] for end in ends.values())), flush=True)
    return ends


def _page(theirs: dict[str, str], ours: dict[str, str]) -> str:
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    texts: dict[str, Counter[str]] = defaultdict(Counter)
    for test in [test for test, end in sorted(theirs.items()) if end == "passed"]:
        file = test.partition("::")[0]
        kind, text = _kind(test, ours.get(test) or ours.get(file) or "not run")
        rows[file][kind] += 1
        texts[kind][text] += 1
    rows["all"] = sum(rows.values(), Counter())
    page = ["# DeepSpeed's unit tests", "", *(__doc__ or "").strip().splitlines(), ""]
    page += [f"| file | pass with DeepSpeed | {' | '.join(KINDS)} |", "|---|" + "---|" * (1 + len(KINDS))]
    for file, row in rows.items():
        page.append(f"| {file} | {sum(row.values())} | {' | '.join(str(row[kind] or '') for kind in KINDS)} |")
    for kind in KINDS[1:]:
        page += ["", f"| {kind} | tests |", "|---|---|"]
        page += [f"| {text} | {count} |" for text, count in texts[kind].most_common()]
    return "\n".join(page) + "\n"


def _kind(test: str, end: str) -> tuple[str, str]:
    if end == "passed":
        return KINDS[0], ""
    if reason := next((reason for pattern, reason in REASONS.items() if re.search(pattern, f"{test} {end}")), None):
        return KINDS[2], reason
    text = end.removeprefix("refused ") if end.startswith("refused ") else f"{test}: {end}"
    text = re.sub(r"\s+", " ", re.sub(r"\S*/tmp/\S*/", "", text)).replace("|", "/")[:300]
    return KINDS[1 if end.startswith("refused ") else 3], text


# What follows runs within pytest, of which this file is a plugin.
if os.environ.get(SIDE) == "megazero":
    from megazero.deepspeed import mirror

    refused = mirror._reason
    mirror._reason = lambda path: refused(path) or PRIVATE  # so that no file is lost for what it imports at its top
    mirror.stand_for_deepspeed()
elif SIDE in os.environ:  # before the checkout's is found
    from deepspeed.accelerator import get_accelerator

    for builder in ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder"):  # compiled once, which takes minutes
        get_accelerator().create_op_builder(builder).load(verbose=False)
if SIDE in os.environ:
    from deepspeed.runtime.engine import DeepSpeedEngine

    DeepSpeedEngine.sparse_tensor_module_names = frozenset()  # an attribute that only the tests of older releases read


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave what is asked for, and let each test start its ranks through this file."""
    items[:] = [item for item in items if os.environ[ONLY] in item.nodeid]
    if "unit.common" in sys.modules:
        sys.modules["unit.common"].DistributedExec._launch_procs = _launch


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
        _keep(report, f"skipped {report.longrepr[2]}" if report.skipped else str(report.longrepr or "passed"))


def pytest_collectreport(report: Any) -> None:
    """Keep why a file cannot be imported."""
    if report.failed:
        _keep(report, "failed " + str(report.longrepr).strip().splitlines()[-1])


def _keep(report: Any, end: str) -> None:
    with open(os.environ[OUT], "a") as file:
        file.write(json.dumps([report.nodeid, end[:600]]) + "\n")


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
            is_ended = reader.poll(max(0, deadline - time.monotonic()))
            end = reader.recv() if is_ended else f"failed: no end within {SECONDS} s"
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
        place = "" if is_refused else " ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-4:])
        end = f"{'refused' if is_refused else 'failed'} {type(error).__name__}: {str(error)[:400]} {place}"
    pipe.send(end)
    time.sleep(SECONDS)


if __name__ == "__main__":
    main()
