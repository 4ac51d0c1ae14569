"""Flat state on the device, in host memory and in a file: one behaviour in three locations, and reported failures."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import killed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megazero.comm.memory import StorageError
from megazero.zero.file_store import ALIGN_BYTES, FileStore, region_bytes
from megazero.zero.offload import choose_location
from megazero.zero.storage import FlatArray, InMemory, free_memory_bytes, in_host_memory

Usage = namedtuple("Usage", "total used free")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LOCATIONS = ["device", "host", "file"]
N = 5000  # fp32: neither a page nor a multiple of one


@contextmanager
def make(location: str, numel: int, dtype: torch.dtype, directory: Path) -> Iterator[FlatArray]:
    if location == "device":
        yield InMemory(torch.zeros(numel, dtype=dtype, device=DEVICES[-1]), "device")
    elif location == "host":
        yield in_host_memory(numel, dtype, pin=True)
    else:
        with closing(FileStore(directory, 0, region_bytes(numel, dtype))) as store:
            yield store.allocate(numel, dtype)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with closing(FileStore(tmp_path, 3, 64 * ALIGN_BYTES)) as store:
        yield store


def around(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., int]) -> None:
    """Let the workers call function(real, *args) instead of the real operation."""
    real = getattr(os, name)
    monkeypatch.setattr(os, name, lambda *args: function(real, *args))


def slow(real: Callable[..., int], *args: object) -> int:
    """Takes a while, so that what should wait for it shows."""
    time.sleep(0.001)
    return real(*args)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


# --- One behaviour in three locations.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("location", LOCATIONS)
def test_what_is_written_is_read(location: str, dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    values = torch.randn(N, generator=torch.Generator().manual_seed(0)).to(dtype)
    with make(location, N, dtype, tmp_path) as array:
        assert (array.location, array.numel, array.dtype, array.nbytes) == (location, N, dtype, values.nbytes)
        assert torch.equal(array.read(0, N).cpu(), torch.zeros(N, dtype=dtype))
        array.write(0, values.to(device))
        assert torch.equal(array.read(0, N).cpu(), values)
        out = torch.empty(1001, dtype=dtype, device=device)
        copy = array.start_read(out, 13)
        copy.wait()
        out_then = out.clone()
        array.start_write(13, torch.zeros(7, device=device)).wait()
        copy.wait()  # again: it must not copy again
        assert torch.equal(out.cpu(), values[13:1014])
        assert torch.equal(out, out_then)
        assert array.read(12, 21).cpu().tolist() == [values[12], *[0] * 7, values[20]]
        array.flush()


@pytest.mark.parametrize("location", ["device", "host"])
def test_elements_in_memory_are_not_copied(location: str, tmp_path: Path) -> None:
    with make(location, N, torch.float32, tmp_path) as array:
        assert array.tensor is not None
        array.read(3, 5).fill_(2)
        assert array.tensor[2:6].tolist() == [0, 2, 2, 0]


@pytest.mark.parametrize("location", LOCATIONS)
def test_values_of_another_dtype_and_of_any_strides_are_converted(location: str, tmp_path: Path) -> None:
    values = torch.arange(24.0, dtype=torch.float64).view(4, 6).T.requires_grad_()
    with make(location, 40, torch.bfloat16, tmp_path) as array:
        array.write(3, values)
        array.write(30, torch.arange(10.0)[::2])
        assert array.read(3, 27).tolist() == values.flatten().tolist()
        assert array.read(30, 35).tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("location", LOCATIONS)
def test_ranges_and_buffers_that_do_not_fit_are_refused(location: str, tmp_path: Path) -> None:
    with make(location, 10, torch.float32, tmp_path) as array:
        assert array.read(10, 10).numel() == 0
        array.write(10, torch.empty(0))
        for call in (
            lambda: array.read(4, 11),
            lambda: array.read(5, 4),
            lambda: array.write(9, torch.zeros(2)),
            lambda: array.start_read(torch.empty(3), -1),
        ):
            with pytest.raises(ValueError, match="not within an array of 10 elements"):
                call()
        for out in (torch.empty(3, dtype=torch.float16), torch.empty(2, 2), torch.empty(6)[::2]):
            with pytest.raises(ValueError, match="out must be contiguous"):
                array.start_read(out, 0)


@pytest.mark.parametrize("location", LOCATIONS)
@settings(deadline=None, max_examples=40)
@given(
    numel=st.integers(1, 3000),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 2999), st.integers(0, 3000), st.booleans()), max_size=30),
)
def test_any_sequence_of_copies_is_that_of_an_array(
    location: str, numel: int, steps: list[tuple[bool, int, int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Transfers that nobody waits for, in any ranges, act in the order in which they were started."""
    expected, reads = np.zeros(numel, np.float32), []
    with make(location, numel, torch.float32, tmp_path_factory.getbasetemp()) as array:
        for step, (writes, begin, length, waits) in enumerate(steps, 1):
            start = begin % numel
            stop = min(start + length, numel)
            if writes:
                values = torch.arange(start, stop, dtype=torch.float32) + step / 64
                expected[start:stop] = values.numpy()
                copy = array.start_write(start, values)
            else:
                out = torch.full((stop - start,), -1.0)
                copy = array.start_read(out, start)
                reads.append((copy, out, expected[start:stop].copy()))
            if waits:
                copy.wait()
        for copy, out, then in reads:
            copy.wait()
            np.testing.assert_array_equal(out.numpy(), then)
        np.testing.assert_array_equal(array.read(0, numel).cpu().numpy(), expected)


# --- Order, and what runs side by side.


def test_a_read_sees_the_writes_before_it_and_none_after(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    array, started = store.allocate(N, torch.float32), []
    around(monkeypatch, "pwritev", slow)
    for value in range(1, 101):
        write, out = array.start_write(0, torch.full((N,), float(value))), torch.empty(N)
        started.append((write, array.start_read(out, 0), out, value))
    for write, read, out, value in reversed(started):
        read.wait()
        write.wait()
        assert bool((out == value).all())


def test_parts_of_one_array_are_read_and_written_at_once(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write of one part and a read of another meet at a barrier: in turn, each would wait there for ever."""
    array, barrier = store.allocate(100, torch.float32), threading.Barrier(2, timeout=30)

    def meet(real: Callable[..., int], *args: object) -> int:
        barrier.wait()
        return real(*args)

    around(monkeypatch, "preadv", meet)
    around(monkeypatch, "pwritev", meet)
    write, read = array.start_write(0, torch.ones(50)), array.start_read(torch.empty(50), 50)
    write.wait()
    read.wait()


def test_a_finished_copy_keeps_no_memory(store: FileStore) -> None:
    array, memory = store.allocate(10, torch.float32), np.ones(10, np.float32)
    alive, values = weakref.ref(memory), torch.from_numpy(memory)
    copies = [array.start_write(0, values), array.start_write(5, values[5:])]
    del values, memory
    assert alive() is not None
    for copy in copies:
        copy.wait()
    assert alive() is None
    assert len(copies) == 2


@pytest.mark.parametrize("limit", [1, 3, 4097])
def test_operations_that_do_less_than_asked_are_repeated(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    array, values, calls = store.allocate(600, torch.float32), torch.randn(600), iter(range(10**6))

    def short(real: Callable[..., int], fd: int, buffers: list[memoryview], offset: int) -> int:
        if next(calls) % 5 == 2:
            raise InterruptedError
        return real(fd, [buffers[0][:limit]], offset)

    around(monkeypatch, "preadv", short)
    around(monkeypatch, "pwritev", short)
    array.write(0, values)
    assert torch.equal(array.read(0, 600), values)


# --- Failures.


def test_a_disk_that_another_rank_has_filled_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = os.listdir("/proc/self/fd")
    failing(monkeypatch, "posix_fallocate", errno.ENOSPC)
    with pytest.raises(StorageError, match=r"rank7.*reserving 8192 bytes .*No space left on device; free space on"):
        FileStore(tmp_path, 7, 8192)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_a_directory_that_is_missing_or_closed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"nowhere: no such directory; create it or set zero.offload.nvme_path"):
        FileStore(tmp_path / "nowhere", 0, 8192)

    def refuse(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)  # the tests may run as root, whom no directory refuses
    with pytest.raises(StorageError, match=r"creating a file of 8192 bytes failed: Permission denied; check"):
        FileStore(tmp_path, 0, 8192)


def test_a_failed_write_is_reported_at_its_wait_and_ever_after(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, other = store.allocate(100, torch.float32), store.allocate(100, torch.float32)
    with monkeypatch.context() as patch:
        failing(patch, "pwritev", errno.ENOSPC)
        copy = array.start_write(10, torch.ones(50))
        with pytest.raises(StorageError) as caught:
            copy.wait()
    message = str(caught.value)
    assert message.startswith(str(store.path))
    assert "writing 200 bytes at byte 40 failed: No space left on device; free space on " in message
    assert message.endswith("set zero.offload.nvme_path to another disk; the newest checkpoint is untouched")
    for call in (copy.wait, lambda: array.read(0, 1), array.flush, lambda: array.write(0, torch.ones(1))):
        with pytest.raises(StorageError) as caught:
            call()
        assert str(caught.value) == message
    other.write(0, torch.ones(100))
    assert other.read(0, 100).sum() == 100


@pytest.mark.parametrize("tell", ["read", "flush", "close"])
def test_a_failed_write_that_nobody_waited_for_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: str
) -> None:
    store = FileStore(tmp_path, 0, 8192)
    array = store.allocate(100, torch.float32)
    failing(monkeypatch, "pwritev", errno.EIO)
    array.start_write(0, torch.ones(100))
    call = {"read": lambda: array.read(0, 100), "flush": array.flush, "close": store.close}[tell]
    with pytest.raises(StorageError, match="writing 400 bytes at byte 0 failed: Input/output error; check the disk"):
        call()
    store.close()  # raised once, so not again
    store.close()


def test_a_disk_that_fails_late_is_reported_by_flush(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes its cache to the disk after pwritev has returned; only fdatasync reports what became of it."""
    array = store.allocate(100, torch.float32)
    array.write(0, torch.ones(100))
    failing(monkeypatch, "fdatasync", errno.EIO)
    with pytest.raises(StorageError, match="flushing 400 bytes at byte 0 failed: Input/output error"):
        array.flush()


def test_a_failed_read_is_one_clear_error(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    array = store.allocate(100, torch.float32)
    array.write(0, torch.ones(100))
    with monkeypatch.context() as patch:
        failing(patch, "preadv", errno.EIO)
        copy = array.start_read(torch.empty(25), 75)
        with pytest.raises(
            StorageError, match="reading 100 bytes at byte 300 failed: Input/output error; check"
        ) as caught:
            copy.wait()
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert array.read(0, 100).sum() == 100  # the elements themselves are unharmed


def test_a_file_that_has_shrunk_is_reported(store: FileStore) -> None:
    array = store.allocate(2048, torch.float32)
    os.ftruncate(store.descriptor, 4096)
    with pytest.raises(StorageError, match="the file ended 4096 bytes early"):
        array.read(0, 2048)


# --- Nothing stays behind.


def test_closing_waits_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors, threads = os.listdir("/proc/self/fd"), threading.active_count()
    store = FileStore(tmp_path, 0, 8192)
    duplicate = os.dup(store.descriptor)  # as a forked process has it
    array = store.allocate(100, torch.float32)
    around(monkeypatch, "pwritev", slow)
    copies = [array.start_write(0, torch.ones(100)) for _ in range(5)]
    store.close()
    store.close()
    for copy in copies:
        copy.wait()
    assert os.fstat(duplicate).st_blocks == 0
    os.close(duplicate)
    assert list(tmp_path.iterdir()) == []
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (len(descriptors), threads)
    with pytest.raises(StorageError, match="reading 4 bytes at byte 0 failed: the file is closed"):
        array.read(0, 1)


def test_a_process_that_dies_leaves_no_file(tmp_path: Path) -> None:
    def die() -> None:
        FileStore(tmp_path, 0, 8192).allocate(10, torch.float32).write(0, torch.ones(10))
        os.kill(os.getpid(), signal.SIGKILL)

    killed(die)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_process_ends_though_a_disk_does_not_answer(tmp_path: Path) -> None:
    program = (
        "import os, sys, threading, torch; from pathlib import Path; from megazero.zero.file_store import FileStore;"
        "array = FileStore(Path(sys.argv[1]), 0, 8192).allocate(10, torch.float32);"
        "os.preadv = lambda *_: threading.Event().wait();"
        "array.start_read(torch.empty(10), 0); print('ends')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


def test_a_worker_of_a_file_stays_out_of_torch(tmp_path: Path) -> None:
    """Where a thread waits for the interpreter's lock in C++ while the interpreter exits, the process aborts."""
    calls: set[str] = set()

    def note(_: object, event: str, called: object) -> None:
        if event == "c_call":
            owner = getattr(called, "__self__", None)
            calls.add(f"{type(owner).__module__}.{getattr(called, '__name__', called)}")

    threading.setprofile(note)  # of threads that start from now on
    try:
        store = FileStore(tmp_path, 0, 8192)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    array = store.allocate(10, torch.float32)
    array.start_write(0, torch.arange(10.0)).wait()
    out = torch.empty(10)
    array.start_read(out, 0).wait()
    array.flush()
    store.close()
    assert out.tolist() == list(range(10))
    assert any("preadv" in name for name in calls)
    assert not {name for name in calls if "torch" in name}


# --- How much fits where.


@pytest.mark.parametrize(
    ("needed", "offloadable", "free", "location"),
    [
        (90, 60, (100, 0, None), "none"),
        (91, 60, (100, 0, 60), "nvme"),
        (91, 60, (100, 66, 1000), "nvme"),
        (91, 60, (100, 67, 1000), "cpu"),
        (91, 60, (100, 67, None), "cpu"),
        (1000, 910, (100, 0, 910), "nvme"),
        (0, 0, (0, 0, None), "none"),
    ],
)
def test_the_fastest_location_that_fits_is_chosen(
    needed: int, offloadable: int, free: tuple[int, int, int | None], location: str
) -> None:
    assert choose_location(needed, offloadable, *free) == location


@pytest.mark.parametrize(
    ("needed", "offloadable", "free", "said"),
    [
        (91, 60, (100, 66, None), "91 .* 60 .* 100 on the device, 66 on the host .* no disk is set"),
        (91, 60, (100, 66, 59), "91 .* 60 .* 100 on the device, 66 on the host .* 59 on the disk"),
        (1000, 909, (100, 5000, 5000), "1000 .* 909 .* 100 on the device, 5000 on the host .* 5000 on the disk"),
    ],
)
def test_what_fits_nowhere_is_refused_with_the_numbers(
    needed: int, offloadable: int, free: tuple[int, int, int | None], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        choose_location(needed, offloadable, *free)


def write_all(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8000 * 1024),
        ({"memory.max": "max\n"}, 8000 * 1024),
        ({"memory.max": "5000\n", "memory.current": "3000", "memory.stat": "anon 1\ninactive_file 700\n"}, 2700),
        ({"memory.max": "99999999", "memory.current": "3000", "memory.stat": "inactive_file 0"}, 8000 * 1024),
        ({"memory.max": "5000", "memory.current": "5600", "memory.stat": "inactive_file 0"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "5000",
                "memory/memory.usage_in_bytes": "4000",
                "memory/memory.stat": "inactive_file 9\ntotal_inactive_file 500",
            },
            1500,
        ),
    ],
)
def test_free_host_memory_is_the_lower_of_machine_and_container(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    write_all(tmp_path, {"meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\nHugePages_Total:       0\n", **files})
    assert free_memory_bytes(torch.device("cpu"), tmp_path / "meminfo", tmp_path) == expected


# --- Page-locked memory, as far as it can be seen without CUDA.


class Runtime:
    """Stands in for torch.cuda.cudart()."""

    def __init__(self, code: int) -> None:
        self.code, self.locked = code, {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


def with_runtime(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_host_memory_is_locked_to_the_byte_for_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(0)
    with_runtime(monkeypatch, runtime)
    arrays: list[InMemory] = [in_host_memory(numel, torch.float32, pin=True) for numel in (1000, 0)]
    in_host_memory(1000, torch.float32, pin=False)
    assert runtime.locked == {arrays[0].tensor.data_ptr(): 4000}
    arrays.clear()
    gc.collect()
    assert runtime.locked == {}


def test_memory_that_cannot_be_locked_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with_runtime(monkeypatch, Runtime(2))
    with pytest.raises(StorageError, match=r"locking 4000 bytes failed with CUDA error 2; .*pin_memory=false"):
        in_host_memory(1000, torch.float32, pin=True)


def test_memory_that_cannot_be_had_is_reported() -> None:
    with pytest.raises(StorageError, match=r"no 4611686018427387904 bytes"):
        in_host_memory(2**60, torch.float32, pin=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_see_each_others_copies() -> None:
    """Written on one stream and read on another, part by part: the order is that of the calls."""
    array, streams = in_host_memory(2**22, torch.float32, pin=True), [torch.cuda.Stream() for _ in range(2)]
    assert array.tensor.is_pinned()
    outs: list[Tensor] = []
    for value in range(20):
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(10**6)
            array.start_write(0, torch.full((2**22,), float(value), device="cuda"))
        with torch.cuda.stream(streams[1]):
            outs.append(torch.empty(2**22, device="cuda"))
            array.start_read(outs[-1], 0)
    array.flush()
    assert all(bool((out == value).all()) for value, out in enumerate(outs))
