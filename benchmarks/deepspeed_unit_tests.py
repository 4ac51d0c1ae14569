"""Runs DeepSpeed's own unit tests with DeepSpeed and with megazero in its place, on the CPU, and says which pass.

    git clone https://github.com/deepspeedai/DeepSpeed
    python -m benchmarks.deepspeed_unit_tests DeepSpeed [checkpoint/test_lr | zero/test_zero.py::TestZero3PadTests]

A test counts if it passes with the DeepSpeed that is installed.  Each test runs in forked processes of its own, as many as
it asks for up to four.  The results of a part replace those in the JSON file; those of DeepSpeed stay as they are.

What fails is one of three: megazero refuses by name what the test needs; the test looks at what is private to DeepSpeed, or
at what megazero does otherwise on purpose (patterns and reasons are in `deepspeed_unit_tests.toml`); or the two differ.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT, SIDE, OUT = Path(__file__).parent.parent, "UNIT_TESTS_SIDE", "UNIT_TESTS_OUT"
SECONDS, RANKS = 60, 4  # of a test; the most that it may start
FILES = """runtime/zero/test_*.py v1/zero/test_*.py runtime/pipe/test_*.py pipe/test_*.py checkpoint/test_*.py
    runtime/half_precision/test_*.py v1/half_precision/test_*.py runtime/test_lr_schedulers.py runtime/test_precision_*.py
    runtime/test_ds_config_*.py runtime/test_ds_initialize.py runtime/test_autocast.py runtime/test_data.py
    runtime/test_multi*.py runtime/test_no_sync_ctxt.py runtime/test_runtime_utils.py"""
KINDS = ("pass with both", "refused by name", "private or on purpose", "differ")


def main(checkout: str, part: str = "") -> None:
    """Run the tests, keep their results in a JSON file and make the page of it."""
    stored, tests = ROOT / "benchmarks/results/deepspeed_unit_tests.json", Path(checkout).resolve() / "tests"
    results = json.loads(stored.read_text()) if stored.exists() else {"deepspeed": {}, "megazero": {}}
    files = {str(file.relative_to(tests)) for pattern in FILES.split() for file in (tests / "unit").glob(pattern)}
    if not files:
        sys.exit(f"{tests} holds no tests: give a checkout of DeepSpeed")
    file_part, colons, test = part.partition("::")
    for target in [file + colons + test for file in sorted(files) if file_part in file]:
        if not any(name.startswith(target) for name in results["deepspeed"]):
            results["deepspeed"] |= _run(tests, target, "deepspeed")
        ours = results["megazero"] | _run(tests, target, "megazero")
        results["megazero"] = {name: end for name, end in ours.items() if results["deepspeed"].get(name) == "passed"}
        stored.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")
    stored.with_suffix(".md").write_text(_page(results["deepspeed"], results["megazero"]))


def _run(tests: Path, target: str, side: str) -> dict[str, str]:
    """How each test ended."""
    with tempfile.TemporaryDirectory() as made:
        Path(made, "out").touch()
        given = "DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1 "
        given += f"PYTHONPATH={ROOT} {SIDE}={side} {OUT}={made}/out"
        environment = os.environ | dict(pair.split("=") for pair in given.split())
        command = f"-m pytest -p benchmarks.deepspeed_unit_tests -p no:cacheprovider -W ignore --basetemp={made}/tests"
        command = [sys.executable, *command.split(), target]
        subprocess.run(command, cwd=tests, env=environment, stdout=subprocess.DEVNULL, check=False)
        lines = map(json.loads, Path(made, "out").read_text().splitlines())
        ends = {test: end if side == "megazero" else end.split()[0] for test, end in lines}
    print(side, target, dict(Counter(end.partition(" ")[0] for end in ends.values())), flush=True)
    return ends


def _page(theirs: dict[str, str], ours: dict[str, str]) -> str:
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    texts: dict[str, Counter[str]] = defaultdict(Counter)
    for test in [test for test, end in sorted(theirs.items()) if end == "passed"]:
        kind, text = _kind(test, ours.get(test, "not run"))
        rows[test.partition("::")[0]][kind] += 1
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
    reasons = tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
    if found := [reason for reason, patterns in reasons if re.search("|".join(patterns), f"{test} {end}")]:
        return KINDS[2], found[0]
    text = end.removeprefix("refused ") if end.startswith("refused ") else f"{test}: {end}"
    return KINDS[1 if end.startswith("refused ") else 3], text.replace("|", "/")[:300]


# What follows runs within pytest, as its plugin.
if os.environ.get(SIDE) == "megazero":
    from megazero.deepspeed import mirror

    refused = mirror._reason
    mirror._reason = lambda path: refused(path) or "private"  # so that no file is lost for what it imports
    mirror.stand_for_deepspeed()
if SIDE in os.environ:  # before the checkout's DeepSpeed is found
    from deepspeed.runtime.engine import DeepSpeedEngine

    DeepSpeedEngine.sparse_tensor_module_names = frozenset()  # an attribute that only the tests of older releases read
if os.environ.get(SIDE) == "deepspeed":
    from deepspeed.accelerator import get_accelerator

    for builder in ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder"):  # compiled once, which takes minutes
        get_accelerator().create_op_builder(builder).load(verbose=False)


def pytest_collection_finish() -> None:
    """Let each test start its ranks through this file."""
    if common := sys.modules.get("unit.common"):
        common.DistributedExec._launch_procs = _launch


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
        end = f"skipped {report.longrepr[2]}" if report.skipped else str(report.longrepr or "passed")
        with open(os.environ[OUT], "a") as file:
            file.write(json.dumps([report.nodeid, re.sub(r"(?<!\S)/\S*/", "", " ".join(end.split()))[:400]]) + "\n")


def _forked(work: Any, ranks: int) -> None:
    """Call `work(rank)` in forked processes, until all have ended or one has failed."""
    if ranks > RANKS:
        pytest.skip(f"{ranks} ranks")
    context, deadline = multiprocessing.get_context("fork"), time.monotonic() + SECONDS
    reader, writer = context.Pipe(duplex=False)
    processes = [context.Process(target=_rank, args=(work, rank, writer)) for rank in range(ranks)]
    for process in processes:
        process.start()
    ends = [""]
    while not ends[-1] and len(ends) <= ranks:
        is_ended = reader.poll(max(0, deadline - time.monotonic()))
        ends.append(reader.recv() if is_ended else f"failed: no end within {SECONDS} s")
    for process in processes:
        process.kill()
        process.join()
    if ends[-1].startswith("skipped "):
        pytest.skip(ends[-1].removeprefix("skipped "))
    if ends[-1]:
        pytest.fail(ends[-1], pytrace=False)


def _rank(work: Any, rank: int, pipe: Any) -> None:
    """A process of a test: it sends how it ended, "" if it passed, and stays for the sake of the others."""
    try:
        end = f"skipped {skipped}" if isinstance(skipped := work(rank), str) and skipped else ""
    except pytest.skip.Exception as skip:
        end = f"skipped {skip}"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_refused = str(ROOT / "megazero") in last.filename and (last.line or "").startswith("raise ")
        end = f"{'refused' if is_refused else 'failed'} {type(error).__name__}: {str(error)[:500]}"
    pipe.send(end)
    time.sleep(SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
