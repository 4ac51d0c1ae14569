"""Where the flat state of a rank lies between its uses: on the device, in host memory, or in a file on a local disk.

    place     elements                          a transfer to or from the device
    device    a tensor                          a copy on the current stream
    host      a tensor, page-locked if asked    a copy on the current stream, beside the computation
    file      a region of the rank's file       a worker reads or writes, by way of page-locked memory

    file of rank 3   [ array 0   |pad| array 1 |pad| ... | free ]      regions begin at multiples of 4096 bytes

Invariant: the operations of one array take effect in the order in which they were started.  Two of them run side by side
only if they touch different elements or both read, so the array can be streamed: part k is written while part k + 1 is
read (Rajbhandari et al. 2021, ZeRO-Infinity, section 6).

[Note: a file without a name] The file is unlinked as soon as it is open.  The kernel then frees the space when the last
descriptor closes, however the process ends; `df` counts the space meanwhile, `ls` shows nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Literal, Protocol, Self

import torch
from torch import Tensor

ALIGN_BYTES: Final = 4096  # a page of memory and a block of most disks
WORKERS: Final = 2  # one reads while the other writes
_ZEROS: Final = 8 * 2**20  # bytes written at once where the file system cannot preallocate
_OTHERWISE: Final = " or set zero.offload.nvme_path to another disk; the newest checkpoint is untouched"


class StorageError(RuntimeError):
    """State could not be kept where the configuration wants it: which file and operation, how many bytes, what to do."""


def _failed(path: Path, what: str, error: OSError) -> str:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = f"{'free space on' if is_full else 'check the disk and the permissions of'} {path.parent}"
    return f"{path}: {what} failed: {error.strerror or error}; {remedy}{_OTHERWISE}"


class Transfer:
    """A copy that runs behind the caller's back.

    Args:
        wait: blocks until it is complete, and raises if it failed.
        finish: what is left to do after the first wait that succeeds.
    """

    def __init__(self, wait: Callable[[], None], finish: Callable[[], None] | None = None) -> None:
        self._wait, self._finish = wait, finish

    def wait(self) -> None:
        """Make the result visible to the caller: to the current stream if it lies on a CUDA device, else to the host.

        Raises:
            StorageError: the operation failed, at every call.
        """
        self._wait()
        if self._finish is not None:
            self._finish()
            self._finish = None


class FlatArray(Protocol):
    """`numel` elements of `dtype` in one of three places.

    Attributes:
        place: where they lie.
        tensor: the elements, [numel], where they are addressable, else None.  Whoever changes them in place calls
            `flush` before it.
    """

    numel: int
    dtype: torch.dtype

    @property
    def place(self) -> Literal["device", "host", "file"]: ...

    @property
    def tensor(self) -> Tensor | None: ...

    @property
    def nbytes(self) -> int: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop): themselves (device, host) or a CPU copy (file), after all earlier writes."""
        ...

    def write(self, start: int, values: Tensor) -> None:
        """Set the elements from `start` on.  `values` may lie on any device and have any dtype."""
        ...

    def start_read(self, out: Tensor, start: int) -> Transfer:
        """Copy the elements from `start` on into `out`, [n] contiguous in `dtype`, not to be touched before `wait`."""
        ...

    def start_write(self, start: int, values: Tensor) -> Transfer:
        """As `write`, but `values` must not change before `wait`.  Later reads see them without a `wait` between."""
        ...

    def flush(self) -> None:
        """Block the host until every operation is complete, and raise what any write has failed of."""
        ...


@dataclass(eq=False)
class _Operation:
    """A read or a write of elements [start, stop)."""

    start: int
    stop: int
    writes: bool

    def conflicts(self, other: _Operation) -> bool:
        """Whether the order of the two matters."""
        return (self.writes or other.writes) and self.start < other.stop and other.start < self.stop


def _check_range(numel: int, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"elements [{start}, {stop}) are not within an array of {numel} elements")


def _check_out(out: Tensor, dtype: torch.dtype) -> None:
    if out.dtype != dtype or out.dim() != 1 or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, [n] and {dtype}; it is {list(out.shape)} with strides {out.stride()}, {out.dtype}"
        )


def _flat(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, [n] contiguous in `dtype`, on their device: a copy that also converts would not run behind the host."""
    return values.detach().to(dtype).reshape(-1).contiguous()


# --- On the device and in host memory.


@dataclass(eq=False)
class _Copy(_Operation):
    event: torch.cuda.Event


class InMemory:
    """A flat array that is a tensor.

    Args:
        tensor: the elements, [numel] contiguous.
        place: what the memory is for; without an accelerator both are CPU memory.
    """

    def __init__(self, tensor: Tensor, place: Literal["device", "host"]) -> None:
        _check_out(tensor, tensor.dtype)
        self.tensor, self.numel, self.dtype = tensor, tensor.numel(), tensor.dtype
        self.place: Literal["device", "host"] = place
        self._under_way: list[_Copy] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) themselves, after all earlier writes."""
        _check_range(self.numel, start, stop)
        self._queue_behind(_Operation(start, stop, writes=False), self.tensor.device)
        return self.tensor[start:stop]

    def write(self, start: int, values: Tensor) -> None:
        """Set the elements from `start` on."""
        self.start_write(start, values).wait()

    def start_read(self, out: Tensor, start: int) -> Transfer:
        """Copy the elements from `start` on into `out`."""
        _check_out(out, self.dtype)
        operation = _Operation(start, start + out.numel(), writes=False)
        _check_range(self.numel, operation.start, operation.stop)
        return self._copy(out, self.tensor[operation.start : operation.stop], operation)

    def start_write(self, start: int, values: Tensor) -> Transfer:
        """Copy `values` to the elements from `start` on."""
        operation = _Operation(start, start + values.numel(), writes=True)
        _check_range(self.numel, operation.start, operation.stop)
        # Between memories the narrower format travels; within one a conversion is part of the copy.
        dtype = values.dtype if values.device == self.tensor.device else self.dtype
        return self._copy(self.tensor[operation.start : operation.stop], _flat(values, dtype), operation)

    def flush(self) -> None:
        """Block the host until every copy is complete."""
        for copy in self._under_way:
            copy.event.synchronize()
        self._under_way.clear()

    def _queue_behind(self, operation: _Operation, device: torch.device) -> None:
        """Order what comes next on `device`'s current stream, or on the host, behind the copies that it conflicts with."""
        self._under_way = [copy for copy in self._under_way if not copy.event.query()]
        for copy in filter(operation.conflicts, self._under_way):
            if device.type == "cuda":
                torch.cuda.current_stream(device).wait_event(copy.event)
            else:
                copy.event.synchronize()

    def _copy(self, target: Tensor, source: Tensor, operation: _Operation) -> Transfer:
        device = target.device if target.is_cuda else source.device
        self._queue_behind(operation, device)
        with torch.no_grad():
            target.copy_(source, non_blocking=True)
        if device.type != "cuda":
            return Transfer(lambda: None)
        event = torch.cuda.current_stream(device).record_event()
        self._under_way.append(_Copy(operation.start, operation.stop, operation.writes, event))
        if target.is_cuda and (source.is_cuda or not operation.writes):
            return Transfer(lambda: torch.cuda.current_stream(device).wait_event(event))
        return Transfer(event.synchronize)  # the host may read the target, or change the source, after the wait


_NO_PINNING: Final = "set zero.offload.pin_memory=false"
_LESS_OFFLOADING: Final = "lower zero.offload.ratio or set zero.offload.optimizer and zero.offload.parameters to nvme"


def in_host_memory(numel: int, dtype: torch.dtype, *, pin: bool, remedy: str | None = None) -> InMemory:
    """Zeros in host memory, page-locked if `pin` and there is a CUDA device.

    Raises:
        StorageError: the memory cannot be had, or not be locked; it ends with the remedy, of offloading when None.
    """
    try:
        tensor = torch.zeros(numel, dtype=dtype)
    except RuntimeError as error:  # torch's allocator has no type of its own for it
        raise StorageError(
            f"host memory: no {numel * dtype.itemsize} bytes ({error}); {remedy or _LESS_OFFLOADING}"
        ) from error
    if pin and numel and torch.cuda.is_available():
        _pin(tensor, remedy or _NO_PINNING)
    return InMemory(tensor, "host")


def _pin(tensor: Tensor, remedy: str) -> None:
    """Page-lock the memory of a tensor for as long as it lives.

    torch's own allocator of pinned memory rounds a request up to a power of two, so that 5 GiB take 8; locking pages
    that are already there takes no more (as torch.distributed._state_dict_utils does).
    """
    runtime, address, nbytes = torch.cuda.cudart(), tensor.data_ptr(), tensor.nbytes
    code = int(runtime.cudaHostRegister(address, nbytes, 1))  # 1: for every device
    if code != 0:
        raise StorageError(
            f"host memory: locking {nbytes} bytes failed with CUDA error {code}; raise `ulimit -l` or {remedy}"
        )

    def unpin() -> None:
        torch.cuda.synchronize()  # a copy may still read or write here
        runtime.cudaHostUnregister(address)

    weakref.finalize(tensor, unpin).atexit = False


# --- In a file.


@dataclass(eq=False)
class _Job(_Operation):
    """An operation for the workers: `run` it behind the jobs `after` and note why it failed, if so."""

    array: InFile
    what: str
    run: Callable[[], None]
    after: list[_Job] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    failure: str | None = None

    def execute(self) -> None:
        for job in self.after:  # they left the queue before this one did, so one of the workers is at them
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
            self.array.is_failure_told |= self.failure == self.array.failure
            raise StorageError(self.failure)


def _work(queue: SimpleQueue[_Job | None]) -> None:
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


class InFile:
    """A flat array in a region of a FileStore, zero at first; made by `FileStore.allocate`.

    After a write failed the elements are unknown, so every later operation of the array fails with the same message.
    """

    tensor: None = None
    place: Literal["file"] = "file"

    def __init__(self, store: FileStore, offset: int, numel: int, dtype: torch.dtype) -> None:
        self.store, self.offset, self.numel, self.dtype = store, offset, numel, dtype
        self.failure: str | None = None
        self.is_failure_told = False
        self._under_way: list[_Job] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    def read(self, start: int, stop: int) -> Tensor:
        """A CPU copy of elements [start, stop), after all earlier writes."""
        _check_range(self.numel, start, stop)
        out = torch.empty(stop - start, dtype=self.dtype)
        self.start_read(out, start).wait()
        return out

    def write(self, start: int, values: Tensor) -> None:
        """Set the elements from `start` on."""
        self.start_write(start, values).wait()

    def start_read(self, out: Tensor, start: int) -> Transfer:
        """Read the elements from `start` on into `out`; the copy to a CUDA device is queued by `wait`."""
        _check_out(out, self.dtype)
        buffer = torch.empty(out.shape, dtype=self.dtype, pin_memory=True) if out.is_cuda else out
        descriptor, offset = self.store.descriptor, self._byte(start)

        def run() -> None:
            _move(lambda memory, at: os.preadv(descriptor, [memory], at), _memory(buffer), offset)

        job = self._submit("reading", start, start + out.numel(), run, writes=False)
        if buffer is out:
            return Transfer(job.wait)

        def finish() -> None:
            with torch.no_grad():
                out.copy_(buffer, non_blocking=True)  # torch keeps the pinned buffer until the stream has read it

        return Transfer(job.wait, finish)

    def start_write(self, start: int, values: Tensor) -> Transfer:
        """Write `values` to the elements from `start` on; values on a CUDA device are copied on the current stream."""
        values = _flat(values, self.dtype)
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

        return Transfer(self._submit("writing", start, start + values.numel(), run, writes=True).wait)

    def flush(self) -> None:
        """Block until every operation is complete and the disk has confirmed the writes (fdatasync of the file)."""
        descriptor = self.store.descriptor
        self._submit("flushing", 0, self.numel, lambda: os.fdatasync(descriptor), writes=True).wait()

    def _byte(self, element: int) -> int:
        return self.offset + element * self.dtype.itemsize

    def _submit(self, verb: str, start: int, stop: int, run: Callable[[], None], *, writes: bool) -> _Job:
        _check_range(self.numel, start, stop)
        what = f"{verb} {(stop - start) * self.dtype.itemsize} bytes at byte {self._byte(start)}"
        job = _Job(start, stop, writes, self, what, run)
        self.store.submit(job)
        return job

    def queue_behind(self, job: _Job) -> None:
        """Note which unfinished jobs of this array `job` has to wait for."""
        self._under_way = [earlier for earlier in self._under_way if not earlier.done.is_set()]
        job.after = list(filter(job.conflicts, self._under_way))
        self._under_way.append(job)


def region_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of a FileStore that an array takes, padding included."""
    return -(-numel * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES


class FileStore:
    """One file of a rank, of a fixed size, for arrays in regions.

    Args:
        directory: on a local disk; it must exist.
        rank: for the file's name.
        nbytes: size of the file: the sum of `region_bytes` over its arrays.

    Raises:
        StorageError: the directory is missing or closed to us, or `nbytes` do not fit.  Free space is compared first, but
            ranks of one node all see the same free space: it is the preallocation that settles it.
    """

    def __init__(self, directory: Path, rank: int, nbytes: int) -> None:
        self.path, self.nbytes = directory / f"megazero-{os.getpid()}-rank{rank}.bin", nbytes
        self.descriptor = self._open(directory, f"megazero-{os.getpid()}-rank{rank}-")
        self._used, self._is_closed, self._lock = 0, False, threading.Lock()
        self._arrays: list[InFile] = []
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
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

    def submit(self, job: _Job) -> None:
        """Hand a job to the workers."""
        with self._lock:  # a job must enter the queue after those that it waits for
            if self._is_closed:
                raise StorageError(f"{self.path}: {job.what} failed: the file is closed")
            job.array.queue_behind(job)
            self._queue.put(job)

    def close(self) -> None:
        """Wait for every operation and give the space back; harmless when closed already.

        Raises:
            StorageError: a write failed and nobody has been told.
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
        if any(array.is_failure_told for array in self._arrays):
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


# --- How much fits where.

# Below the root of the control groups: limit, use, statistics, and the statistic of page cache that is given up first.
_CGROUPS: Final = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def _fields(path: Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


def free_memory_bytes(
    device: torch.device, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Free memory of a CUDA device, or of the host within the limit of this container.

    All ranks of a node share the host's.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _fields(meminfo)["MemAvailable"] * 1024
    for limit, used, statistics, cache in _CGROUPS:
        if (cgroup / limit).exists() and (text := (cgroup / limit).read_text().strip()) != "max":
            in_use = int((cgroup / used).read_text()) - _fields(cgroup / statistics)[cache]
            free = min(free, max(int(text) - in_use, 0))
    return free


def choose_place(
    needed_device_bytes: int, offloadable_bytes: int, free_device: int, free_host: int, free_disk: int | None
) -> Literal["none", "cpu", "nvme"]:
    """The fastest place where the state fits: what `auto` means.

    A tenth of device and host memory stays free, for allocators lose some and a full host kills without an error.  The file
    is preallocated, so the disk may fill up.

    Args:
        needed_device_bytes: bytes on the device with nothing offloaded, the offloadable ones included.
        offloadable_bytes: those of them that may lie elsewhere.
        free_device: free bytes of the device.
        free_host: free bytes of the host that are this rank's to use.
        free_disk: likewise of the disk, None without one.

    Raises:
        ValueError: it fits nowhere.
    """

    def fits(needed: int, free: int) -> bool:
        return needed * 10 <= free * 9

    if fits(needed_device_bytes, free_device):
        return "none"
    if fits(needed_device_bytes - offloadable_bytes, free_device):
        if fits(offloadable_bytes, free_host):
            return "cpu"
        if free_disk is not None and offloadable_bytes <= free_disk:
            return "nvme"
    disk = "no disk is set (zero.offload.nvme_path)" if free_disk is None else f"{free_disk} on the disk"
    raise ValueError(
        f"the state fits nowhere: {needed_device_bytes} bytes are needed on the device, {offloadable_bytes} of them can be"
        f" offloaded; free are {free_device} on the device, {free_host} on the host (of both, 90% are used) and {disk};"
        " use more ranks, a higher zero.stage or a smaller model"
    )
