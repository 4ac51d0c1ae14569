"""Flat arrays in one file per rank, read and written by two worker threads.

    file of rank 3   [ array 0   |pad| array 1 |pad| ... | free ]      regions begin at multiples of 4096 bytes

[Note: a file without a name] The file is unlinked as soon as it is open.  The kernel then frees the space when the last
descriptor closes, however the process ends; `df` counts the space meanwhile, `ls` shows nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from megazero.zero.storage import Access, FlatArray, PendingCopy, StorageError, as_flat, check_out, check_range

ALIGN_BYTES: Final = 4096  # a page of memory and a block of most disks
WORKERS: Final = 2  # one reads while the other writes
_ZEROS: Final = 8 * 2**20  # bytes written at once where the file system cannot preallocate
_OTHERWISE: Final = " or set zero.offload.nvme_path to another disk; the newest checkpoint is untouched"


def _failed(path: Path, what: str, error: OSError) -> str:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = f"{'free space on' if is_full else 'check the disk and the permissions of'} {path.parent}"
    return f"{path}: {what} failed: {error.strerror or error}; {remedy}{_OTHERWISE}"


@dataclass(eq=False)
class FileJob(Access):
    """A read or a write for the workers: `run` it after the jobs `after`; `failure` says why it failed."""

    array: InFile
    what: str
    run: Callable[[], None]
    after: list[FileJob] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    failure: str | None = None

    def execute(self) -> None:
        for job in self.after:  # they left the queue before this one, so a worker is running them
            job.done.wait()
        self.failure = self.array.failure
        try:
            if self.failure is None:
                self.run()
        except OSError as error:
            self.failure = _failed(self.array.store.path, self.what, error)
        except Exception as error:  # a worker must outlive whatever a job does
            self.failure = f"{self.array.store.path}: {self.what} failed: {type(error).__name__}: {error}"
        if self.writes and self.array.failure is None:
            self.array.failure = self.failure
        self.after, self.run = [], lambda: None  # lets go of the tensors
        self.done.set()

    def wait(self) -> None:
        self.done.wait()
        if self.failure is not None:
            self.array.is_failure_raised |= self.failure == self.array.failure
            raise StorageError(self.failure)


def _work(queue: SimpleQueue[FileJob | None]) -> None:
    while (job := queue.get()) is not None:
        job.execute()


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; numpy knows no bf16, so every dtype goes as bytes."""
    return tensor.detach().view(torch.uint8).numpy().data


def _move(operation: Callable[[memoryview, int], int], memory: memoryview, offset: int) -> None:
    """Repeat a read or a write, which may do less than asked, until all of `memory` has moved."""
    done = 0
    while done < len(memory):
        try:
            count = operation(memory[done:], offset + done)
        except InterruptedError:
            continue
        if count == 0:
            raise OSError(errno.EIO, f"the file ended {len(memory) - done} bytes early")
        done += count


class InFile(FlatArray):
    """A flat array in a region of a FileStore, zero at first; made by `FileStore.allocate`.

    After a write failed the elements are unknown, so every later operation of the array fails with the same message.
    """

    tensor: None = None
    location = "file"

    def __init__(self, store: FileStore, offset: int, numel: int, dtype: torch.dtype) -> None:
        self.store, self.offset, self.numel, self.dtype = store, offset, numel, dtype
        self.failure: str | None = None
        self.is_failure_raised = False
        self._under_way: list[FileJob] = []

    def read(self, start: int, stop: int) -> Tensor:
        check_range(self.numel, start, stop)
        out = torch.empty(stop - start, dtype=self.dtype)
        self.start_read(out, start).wait()
        return out

    def start_read(self, out: Tensor, start: int) -> PendingCopy:
        check_out(out, self.dtype)
        buffer = torch.empty(out.shape, dtype=self.dtype, pin_memory=True) if out.is_cuda else out
        descriptor, offset = self.store.descriptor, self._byte(start)

        def run() -> None:
            _move(lambda memory, at: os.preadv(descriptor, [memory], at), _memory(buffer), offset)

        job = self._submit("reading", start, start + out.numel(), run, writes=False)
        if buffer is out:
            return PendingCopy(job.wait)

        def finish() -> None:
            with torch.no_grad():
                out.copy_(buffer, non_blocking=True)  # torch keeps the pinned buffer until the stream has read it

        return PendingCopy(job.wait, finish)

    def start_write(self, start: int, values: Tensor) -> PendingCopy:
        values = as_flat(values, self.dtype)
        buffer, copied = values, None
        if values.is_cuda:
            buffer = torch.empty(values.shape, dtype=self.dtype, pin_memory=True)
            buffer.copy_(values, non_blocking=True)
            copied = torch.cuda.current_stream(values.device).record_event()
        descriptor, offset = self.store.descriptor, self._byte(start)

        def run() -> None:
            if copied is not None:
                copied.synchronize()
            _move(lambda memory, at: os.pwritev(descriptor, [memory], at), _memory(buffer), offset)

        return PendingCopy(self._submit("writing", start, start + values.numel(), run, writes=True).wait)

    def flush(self) -> None:
        descriptor = self.store.descriptor  # the disk must confirm the writes, too
        self._submit("flushing", 0, self.numel, lambda: os.fdatasync(descriptor), writes=True).wait()

    def _byte(self, element: int) -> int:
        return self.offset + element * self.dtype.itemsize

    def _submit(self, verb: str, start: int, stop: int, run: Callable[[], None], *, writes: bool) -> FileJob:
        check_range(self.numel, start, stop)
        what = f"{verb} {(stop - start) * self.dtype.itemsize} bytes at byte {self._byte(start)}"
        job = FileJob(start, stop, writes, self, what, run)
        self.store.submit(job)
        return job

    def queue_behind(self, job: FileJob) -> None:
        """Tell `job` which unfinished jobs of this array it has to wait for."""
        self._under_way = [earlier for earlier in self._under_way if not earlier.done.is_set()]
        job.after = list(filter(job.conflicts, self._under_way))
        self._under_way.append(job)


def region_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of a FileStore that an array takes, padding included."""
    return -(-numel * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES


class FileStore:
    """One file of a rank, of a fixed size, for arrays in regions.

    Args:
        directory: an existing one on a local disk.
        rank: for the file's name.
        nbytes: size of the file: the sum of `region_bytes` over its arrays.

    Raises:
        StorageError: the directory is missing or not writable, or `nbytes` do not fit.  Free space is compared first, but
            all ranks of one node see the same free space, so only the preallocation is certain.
    """

    def __init__(self, directory: Path, rank: int, nbytes: int) -> None:
        self.path, self.nbytes = directory / f"megazero-{os.getpid()}-rank{rank}.bin", nbytes
        self.descriptor = self._open(directory, f"megazero-{os.getpid()}-rank{rank}-")
        self._used, self._is_closed, self._lock = 0, False, threading.Lock()
        self._arrays: list[InFile] = []
        self._queue: SimpleQueue[FileJob | None] = SimpleQueue()
        self._workers = [
            threading.Thread(target=_work, args=(self._queue,), name=f"megazero-storage-{index}", daemon=True)
            for index in range(WORKERS)
        ]
        for worker in self._workers:
            worker.start()

    def _open(self, directory: Path, prefix: str) -> int:
        if not directory.is_dir():
            raise StorageError(f"{directory}: no such directory; create it{_OTHERWISE}")
        try:
            free = shutil.disk_usage(directory).free
            if free < self.nbytes:
                raise StorageError(
                    f"{directory}: a file of {self.nbytes} bytes does not fit, {free} bytes are free;"
                    f" free space on {directory}{_OTHERWISE}"
                )
            descriptor, name = tempfile.mkstemp(".bin", prefix, directory)
            self.path = Path(name)
            os.unlink(name)  # [Note: a file without a name]
        except OSError as error:
            raise StorageError(_failed(self.path, f"creating a file of {self.nbytes} bytes", error)) from error
        try:
            _preallocate(descriptor, self.nbytes)
        except OSError as error:
            os.close(descriptor)
            what = f"reserving {self.nbytes} bytes ({free} bytes were free)"
            raise StorageError(_failed(self.path, what, error)) from error
        return descriptor

    def allocate(self, numel: int, dtype: torch.dtype) -> InFile:
        """A new array of zeros.

        Raises:
            StorageError: the store is full or closed.
        """
        needed, free = region_bytes(numel, dtype), self.nbytes - self._used
        if needed > free:
            raise StorageError(
                f"{self.path}: {numel} elements of {dtype} take {needed} bytes and {free} of the file's {self.nbytes} are"
                " left; make the file as large as the sum of region_bytes over its arrays"
            )
        array = InFile(self, self._used, numel, dtype)
        self._used += needed
        self._arrays.append(array)
        return array

    def submit(self, job: FileJob) -> None:
        """Hand a job to the workers."""
        with self._lock:  # a job must enter the queue after those that it waits for
            if self._is_closed:
                raise StorageError(f"{self.path}: {job.what} failed: the file is closed")
            job.array.queue_behind(job)
            self._queue.put(job)

    def close(self) -> None:
        """Wait for every operation and free the space; a second call does nothing.

        Raises:
            StorageError: a write failed, and no call has raised it yet.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for _ in self._workers:
                self._queue.put(None)
        for worker in self._workers:
            worker.join()
        os.ftruncate(self.descriptor, 0)  # a forked process, of a data loader say, may hold the file open
        os.close(self.descriptor)
        if any(array.is_failure_raised for array in self._arrays):
            return  # one disk, one error
        for array in self._arrays:
            if array.failure is not None:
                raise StorageError(array.failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _preallocate(descriptor: int, nbytes: int) -> None:
    """Reserve zeroed blocks, so that no later write can find the disk full."""
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, nbytes)
        zeros = memoryview(bytes(min(_ZEROS, nbytes)))
        for offset in range(0, nbytes, _ZEROS):
            piece = zeros[: nbytes - offset]
            _move(lambda memory, at: os.pwritev(descriptor, [memory], at), piece, offset)
