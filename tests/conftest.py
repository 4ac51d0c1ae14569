"""Test folders that hold shared modules, and how processes of the tests share the cores."""

import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from megazero.cpu.processor import schedule_as_batch_job

gc.disable()  # until all tests are collected: it would look for garbage among modules that stay

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parent / "laws"),
    str(Path(__file__).parent / "extending"),
]

schedule_as_batch_job()  # worlds have more ranks than there are cores
# OpenMP's threads must not spin either while they wait for one that has no core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

ON_CPU = os.environ.get("MEGAZERO_TEST_DEVICE", "cpu") == "cpu"
if ON_CPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks that a test starts compute where it says, on every machine
    # The first backward starts a thread for each device, after which nothing can be forked.  Where torch is built for CUDA,
    # fake tensors make it count devices that are not there, so the first backward comes before them.
    torch.ones((), requires_grad=True).backward()

# On a busy machine an example may wait for a core: no test depends on the wall clock.
settings.register_profile("megazero", deadline=None)
settings.load_profile("megazero")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--small", action="store_true", help="the first case of every test, without those marked slow")


# They import or keep what takes 100 MB: a process that has it is slow to fork, so it is forked no more than it must.
LAST = (
    "test_schedules", "test_data_tokenize", "test_plain_model", "test_hugging_face", "test_foreign", "test_families",
    "test_folder", "test_compiled",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test-fast`: a law that holds for one shape is quick evidence; `make test` proves it for all."""
    items.sort(key=lambda item: item.path.name.startswith(LAST))
    if not config.getoption("--small"):
        return
    first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
    kept = [
        item for item in items if first[item.nodeid.partition("[")[0]] is item and not item.get_closest_marker("slow")
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """On a GPU each test has a process of its own: the ranks of the next one cannot be forked from what has started CUDA."""
    if ON_CPU:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_run_alone, args=(pyfuncitem.obj, given, sender))
    child.start()
    assert child.pid is not None
    sender.close()
    try:
        kind, text = receiver.recv()
    except EOFError:
        kind, text = "failed", "the test's process died"
    finally:  # also where the test's time is up
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # ranks that it has left would slow the next ones
    child.join()
    if kind != "passed":
        (pytest.skip if kind == "skipped" else pytest.fail)(text)
    return True


def _run_alone(test: Callable[..., Any], given: dict[str, Any], out: Connection) -> None:
    os.setpgid(0, 0)
    try:
        test(**given)
        out.send(("passed", ""))
    except pytest.skip.Exception as reason:
        out.send(("skipped", str(reason)))
    except BaseException:
        out.send(("failed", traceback.format_exc()))
    out.close()
    os._exit(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_finish() -> None:
    """What is there now stays: nobody looks through it for garbage again."""
    gc.freeze()
    gc.enable()
