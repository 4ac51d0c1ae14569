"""Flat arrays in one file per rank.  Two worker threads read and write them.

    file of rank 3   [ array 0   |pad| array 1 |pad| ... | free ]      regions begin at multiples of 4096 bytes

[Note: a file without a name] The file is unlinked as soon as it is open.  The kernel then frees its space when the last
descriptor closes, however the process ends.  Until then `df` counts the space, and `ls` does not list the file.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final, TypeAlias

import torch
from torch import Tensor

from megazero.comm.collectives import Pending
from megazero.comm.memory import StorageError
from megazero.zero.storage import Access, FlatArray, as_flat, check_out

ALIGN_BYTES: Final = 4096  # a page of memory and a block of most disks
WORKERS: Final = 2  # one reads while the other writes
#: `os.preadv` or `os.pwritev`: (descriptor, buffers, offset) -> bytes that were moved.
Operation: TypeAlias = Callable[[int, list[memoryview], int], int]
_OTHERWISE: Final = " or set zero.offload.nvme_path to another disk; the newest checkpoint is untouched"


def _failed(path: Path, what: str, error: OSError) -> str:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = f"{'free space on' if is_full else 'check the disk and the permissions of'} {path.parent}"
    return f"{path}: {what} failed: {error.strerror or error}; {remedy}{_OTHERWISE}"


def _move(operation: Operation, descriptor: int, memory: memoryview, offset: int) -> None:
    """Repeat a read or a write until all of `memory` is transferred, since a call may transfer less."""
    done = 0
    while done < len(memory):
        try:
            count = operation(descriptor, [memory[done:]], offset + done)
        except InterruptedError:
            continue
        if count == 0:
            raise OSError(errno.EIO, f"the file ended {len(memory) - done} bytes early")
        done += count


class InFile(FlatArray):
    """A flat array in a region of a FileStore, initially zero.  Created by `FileStore.allocate`.

    If a write fails, the elements are undefined: every later operation on the array fails with the same message.
    """

    tensor: None = None
    location = "file"

    def __init__(self, store: FileStore, offset: int, numel: int, dtype: torch.dtype) -> None:
        self.store, self.offset, self.numel, self.dtype = store, offset, numel, dtype
        self.failure: str | None = None
        self.under_way: list[tuple[Access, Future[str | None]]] = []

    def read(self, start: int, stop: int) -> Tensor:
        self.access(start, stop, writes=False)
        out = torch.empty(stop - start, dtype=self.dtype)
        self.start_read(out, start).wait()
        return out

    def start_read(self, out: Tensor, start: int) -> Pending:
        check_out(out, self.dtype)
        buffer = torch.empty(out.shape, dtype=self.dtype, pin_memory=True) if out.is_cuda else out
        run = self.store.move(os.preadv, buffer, self._byte(start))

        def finish() -> None:
            with torch.no_grad():
                out.copy_(buffer, non_blocking=True)  # torch keeps the pinned buffer until the stream has read it

        wait = self._start("reading", self.access(start, start + out.numel(), writes=False), run)
        return Pending(wait, None if buffer is out else finish)

    def start_write(self, start: int, values: Tensor) -> Pending:
        values = as_flat(values, self.dtype)
        buffer, copied, device = values, None, values.device
        if values.is_cuda:
            buffer = torch.empty(values.shape, dtype=self.dtype, pin_memory=True)
            buffer.copy_(values, non_blocking=True)
            copied = torch.cuda.current_stream(values.device).record_event()
        move = self.store.move(os.pwritev, buffer, self._byte(start))

        def run() -> None:
            if copied is not None:
                with torch.cuda.device(device):  # a new thread has device 0, where waiting would create a CUDA context
                    copied.synchronize()
            move()

        wait, held = self._start("writing", self.access(start, start + values.numel(), writes=True), run), [buffer]
        return Pending(wait, held.clear)

    def flush(self) -> None:
        sync = partial(os.fdatasync, self.store.descriptor)  # the disk must confirm the writes, too
        self._start("flushing", self.access(0, self.numel, writes=True), sync)()

    def _byte(self, element: int) -> int:
        return self.offset + element * self.dtype.itemsize

    def _start(self, verb: str, access: Access, run: Callable[[], None]) -> Callable[[], None]:
        """Queue `run` for a worker, and return a function that waits for it and raises if it failed."""
        what = f"{verb} {(access.stop - access.start) * self.dtype.itemsize} bytes at byte {self._byte(access.start)}"
        future = self.store.submit(self, access, what, run)

        def wait() -> None:
            failure = future.result()
            if failure is not None:
                self.store.is_failure_raised |= failure == self.failure
                raise StorageError(failure)

        return wait


def _execute(
    array: InFile, access: Access, what: str, run: Callable[[], None], after: Sequence[Future[str | None]]
) -> str | None:
    """Run an operation once the earlier operations that conflict with it have ended.

    Returns the message of the failure, or None.
    """
    wait_for_all(after)  # they left the queue before this one, so a worker is running them
    if array.failure is not None:
        return array.failure
    try:
        run()
    except OSError as error:
        failure = _failed(array.store.path, what, error)
    except Exception as error:
        failure = f"{array.store.path}: {what} failed: {type(error).__name__}: {error}"
    else:
        return None
    if access.writes:
        array.failure = array.failure or failure
    return failure


Job: TypeAlias = tuple["Future[str | None]", Callable[[], str | None]]


def _work(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        future, execute = job
        failure = execute()
        del job, execute  # the waiting thread must free the buffer: its allocator would miss it here
        future.set_result(failure)
        del future


def region_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of a FileStore that an array takes, with padding."""
    return -(-numel * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES


class FileStore:
    """The file of one rank, in an existing directory of a local disk.

    Args:
        nbytes: size of the file: the sum of `region_bytes` over its arrays.

    Raises:
        StorageError: the directory is missing or not writable, or the file does not fit.
    """

    def __init__(self, directory: Path, rank: int, nbytes: int) -> None:
        self.path, self.nbytes = directory / f"megazero-{os.getpid()}-rank{rank}.bin", nbytes
        self.descriptor = self._open(directory, f"megazero-{os.getpid()}-rank{rank}-")
        self.is_failure_raised = False  # whether a caller has seen the error of a failed write
        self._used, self._is_closed, self._lock = 0, False, threading.Lock()
        self._arrays: list[InFile] = []
        # daemon threads: the interpreter can exit although a disk does not respond
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._workers = [threading.Thread(target=_work, args=(self._queue,), daemon=True) for _ in range(WORKERS)]
        for worker in self._workers:
            worker.start()

    def _open(self, directory: Path, prefix: str) -> int:
        if not directory.is_dir():
            raise StorageError(f"{directory}: no such directory; create it{_OTHERWISE}")
        try:
            free = shutil.disk_usage(directory).free
            descriptor, name = tempfile.mkstemp(".bin", prefix, directory)
            self.path = Path(name)
            os.unlink(name)  # [Note: a file without a name]
        except OSError as error:
            raise StorageError(_failed(self.path, f"creating a file of {self.nbytes} bytes", error)) from error
        try:
            if self.nbytes:
                os.posix_fallocate(descriptor, 0, self.nbytes)  # zeros; no later write can find the disk full
        except OSError as error:
            os.close(descriptor)
            what = f"reserving {self.nbytes} bytes ({free} bytes were free)"
            raise StorageError(_failed(self.path, what, error)) from error
        return descriptor

    def allocate(self, numel: int, dtype: torch.dtype) -> InFile:
        """Allocate an array of zeros."""
        array = InFile(self, self._used, numel, dtype)
        self._used += region_bytes(numel, dtype)
        self._arrays.append(array)
        return array

    def move(self, operation: Operation, tensor: Tensor, offset: int) -> Callable[[], None]:
        """Return a function, for a worker, that reads a tensor's elements from the file or writes them to it.

        The function makes no torch calls.  At exit, the interpreter stops every thread that asks for its lock; if the
        thread is in C++ code at that time, the process aborts.
        """
        memory = tensor.detach().view(torch.uint8).numpy().data  # numpy has no bf16, so every dtype is viewed as bytes
        return partial(_move, operation, self.descriptor, memory, offset)

    def submit(self, array: InFile, access: Access, what: str, run: Callable[[], None]) -> Future[str | None]:
        """Queue an operation for the workers, after all operations that conflict with it.

        The future's result is the error message, or None if the operation succeeded.
        """
        with self._lock:  # under the lock, so that an operation enters the queue after those that it waits for
            if self._is_closed:
                raise StorageError(f"{self.path}: {what} failed: the file is closed")
            array.under_way = [(earlier, future) for earlier, future in array.under_way if not future.done()]
            after = [future for earlier, future in array.under_way if earlier.conflicts(access)]
            future: Future[str | None] = Future()
            self._queue.put((future, partial(_execute, array, access, what, run, after)))
            array.under_way.append((access, future))
        return future

    def close(self) -> None:
        """Wait for every operation and free the space.

        Raises: StorageError: a write failed and no earlier call has reported it.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for _ in self._workers:
            self._queue.put(None)
        for worker in self._workers:
            worker.join()
        os.ftruncate(self.descriptor, 0)  # frees the space even if a forked process holds the file open
        os.close(self.descriptor)
        failures = [array.failure for array in self._arrays if array.failure is not None]
        if failures and not self.is_failure_raised:  # report a disk's failure once
            raise StorageError(failures[0])
