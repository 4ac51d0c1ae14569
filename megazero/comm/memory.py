"""Memory of tensors: which memory one lies in, host memory, its copies beside a GPU's work, and an arena of one buffer.

    arena    [ taken |  free  | taken |    free    |  taken  |  free  ]
               line 0: comes and goes                 line 1: stays until the step ends

A tensor takes the smallest free range of its line that is large enough.  Lines have no end: a range beyond the buffer gets
memory of its own, and `Arena.reserve`, called while nothing is taken, makes a buffer as long as the lines have become.  A
step that takes and gives back in the order of the step before finds the same ranges, so it fits.  What stays until the
step's end has a line of its own, since it would leave gaps among what comes and goes.

[Note: page-locked]  Locking pages may wait for the device, and so for a message that a rank sends only after it has locked
its own.  So on the host only `reserve` locks pages; it is called where no message under way waits for one of this rank's.
Copies to a further buffer block the host.

[Note: streams]  Copies run on two streams of their own.  Work on them starts behind all that the compute stream has been
given so far: what it reads is computed, and what it overwrites is no longer read.  The compute stream waits for a copy
before it uses the result, and before memory that the copy reads or writes, here or on the host, is given back; so the next
copy into that memory, on whatever stream, comes after it.  The host waits for what it reads or overwrites itself, alone.

    compute stream   layer 0 | layer 1 | layer 2 | ...
    to the device       [ 1 ]     [ 2 ]     [ 3 ]            what the next layer needs
    to the host                   [ 0 ]     [ 1 ]            what the last one has left

Source: C_B and M_D of Rajbhandari et al. 2020, section 6.
"""

from __future__ import annotations

import weakref
from bisect import bisect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes at whose multiples tensors begin, as with torch's CUDA allocator."""

_ENDLESS = 1 << 62
_LESS_OFFLOADING: Final = "lower zero.offload.ratio or set zero.offload.optimizer and zero.offload.parameters to nvme"


def storage_of(tensor: Tensor) -> int:
    """A number that all tensors in the same memory share, and no other that lives at the same time has."""
    return int(tensor.untyped_storage()._cdata)


def address_of(tensor: Tensor) -> tuple[int, int]:
    """Its memory, and the byte at which it begins there."""
    return storage_of(tensor), int(tensor.storage_offset()) * tensor.element_size()


class StorageError(RuntimeError):
    """State does not fit, or cannot be read or written, where the configuration wants it."""


def host_tensor(numel: int, dtype: torch.dtype, *, pin: bool, remedy: str | None = None) -> Tensor:
    """Zeros in host memory, [numel], page-locked if `pin` and there is a CUDA device.

    Raises:
        StorageError: the memory cannot be allocated or locked; the message ends with `remedy`, or one for offloading.
    """
    try:
        tensor = torch.zeros(numel, dtype=dtype)
    except RuntimeError as error:  # torch's allocator has no error type of its own
        raise StorageError(
            f"host memory: no {numel * dtype.itemsize} bytes ({error}); {remedy or _LESS_OFFLOADING}"
        ) from error
    if pin and numel and torch.cuda.is_available():
        page_lock(tensor, remedy or "set zero.offload.pin_memory=false")
    return tensor


def page_lock(tensor: Tensor, remedy: str) -> None:
    """Lock the pages of a tensor's memory for as long as it lives.  Raises: StorageError.

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


class Copier:
    """Copies between device and host, synchronously.  `StreamCopier` overlaps them with the computation."""

    def start(self, target: Tensor, source: Tensor) -> Any | None:
        """Start a copy after the work queued so far on the current stream; its mark."""
        return self.run(partial(_copy, target, source), to_host=source.is_cuda)

    def run(self, work: Callable[[], Any], *, to_host: bool) -> Any | None:  # noqa: ARG002
        """Call `work` with what it queues on the stream of this direction, after that of the current stream; its mark."""
        return work()

    def wait(self, mark: Any) -> Any:
        """Have the current stream wait before any work that is queued from now on; what the work has returned."""
        return mark

    def finish(self, mark: Any) -> None:
        """Have the host wait."""

    def follow(self, mark: Any, work: Callable[[], object]) -> Callable[[], object]:
        """Have the host call `work` once a copy has ended, in the order of the calls; what waits for it."""
        self.finish(mark)
        work()
        return lambda: None


class StreamCopier(Copier):
    """Copies of a CUDA device, on one stream for each direction; the host must be page-locked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, "after copies")

    def run(self, work: Callable[[], Any], *, to_host: bool) -> tuple[torch.cuda.Event, Any]:
        stream = self._to_host if to_host else self._to_device
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            result = work()
        return stream.record_event(), result

    def wait(self, mark: tuple[torch.cuda.Event, Any]) -> Any:
        torch.cuda.current_stream(self._device).wait_event(mark[0])
        return mark[1]

    def finish(self, mark: tuple[torch.cuda.Event, Any]) -> None:
        with torch.cuda.device(self._device):  # a thread's own is device 0, where waiting would start CUDA
            mark[0].synchronize()

    def follow(self, mark: tuple[torch.cuda.Event, Any], work: Callable[[], object]) -> Callable[[], object]:
        def wait_and_work() -> None:
            self.finish(mark)
            work()

        return self._thread.submit(wait_and_work).result


def copier_on(device: torch.device) -> Copier:
    """The copier of a device; one for each use, since its copies wait for those before them."""
    return StreamCopier(device) if device.type == "cuda" else Copier()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


class _Range(NamedTuple):
    """Bytes [start, stop) of a buffer."""

    buffer: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class _FreeRanges:
    """The free ranges of some buffers.

    Attributes:
        end: stop of the range that was taken furthest from its buffer's begin.
    """

    def __init__(self, *free: _Range) -> None:
        self._free = list(free)  # sorted; no two of them touch
        self.end = 0

    def take(self, nbytes: int) -> _Range | None:
        """Take so many bytes of the smallest range that has them."""
        fitting = [free for free in self._free if free.nbytes >= nbytes]
        if not fitting:
            return None
        free = min(fitting, key=lambda free: free.nbytes)
        self._free.remove(free)
        taken = free._replace(stop=free.start + nbytes)
        if taken != free:
            self.give_back(free._replace(start=taken.stop))
        self.end = max(self.end, taken.stop)
        return taken

    def give_back(self, freed: _Range) -> None:
        """Free a range, joined with the free ranges that touch it."""
        at = bisect(self._free, freed)
        if at < len(self._free) and self._free[at][:2] == (freed.buffer, freed.stop):
            freed = freed._replace(stop=self._free.pop(at).stop)
        if at and (self._free[at - 1].buffer, self._free[at - 1].stop) == freed[:2]:
            at -= 1
            freed = freed._replace(start=self._free.pop(at).start)
        self._free.insert(at, freed)


class _Taken(NamedTuple):
    """A tensor's range of its line and, where that lies beyond the buffer, of the further memory."""

    line: int
    within: _Range
    further: _Range | None


class Arena:
    """Allocates tensors of many sizes from one flat buffer, so that the device's allocator keeps no gaps.

    Memory that was released may be acquired again at once: whoever uses it on another CUDA stream waits for that first.

    Args:
        device: of the memory.
        remedy: how to need less memory on the host, for the error when there is too little.
        pins: page-lock it, on the host, where there is CUDA.

    Attributes:
        nbytes, nbytes_in_use: bytes from the allocator, and those acquired, each range rounded up to `ALIGNMENT`.
    """

    def __init__(self, device: torch.device, remedy: str | None = None, *, pins: bool = False) -> None:
        self._device, self._remedy, self._pins = device, remedy, pins
        self._buffers: list[Tensor] = []  # the buffer, if `reserve` has made one, and further memory
        self._reserved = [0, 0]  # bytes of the buffer, by line
        self._lines = [_FreeRanges(_Range(0, 0, _ENDLESS)) for _ in self._reserved]
        self._further = _FreeRanges()
        self._taken: dict[tuple[int, int], _Taken] = {}  # by `address_of` its memory
        self.nbytes = self.nbytes_in_use = 0

    def reserve(self, nbytes: int = 0) -> None:
        """Allocate one buffer for all that was ever in use at once, and at least so many bytes; not while any is in use.

        Raises: StorageError: there is not so much memory to lock.
        """
        wanted = [max(line.end, had) for line, had in zip(self._lines, self._reserved, strict=True)]
        wanted[0] = max(wanted[0], rounded_up(nbytes) if nbytes else 0)
        if not self._taken and wanted != self._reserved:
            self._buffers.clear()  # before the new one is allocated
            self._further, self._reserved, self.nbytes = _FreeRanges(), [0, 0], 0
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # else what was further memory would stay reserved beside the buffer
            try:
                self._allocate(sum(wanted), pin=self._pins)
            except (StorageError, torch.OutOfMemoryError):
                if self._pins:
                    raise
                return  # the lines may be longer than what was in use at once: further memory, as in the first step
            self._reserved = wanted

    def acquire(self, nbytes: int, *, line: int = 0) -> Tensor:
        """Memory, uint8 [nbytes], with undefined content.  Raises: StorageError.

        `line`: 1 for what is acquired once in a step and released at its end.
        """
        needed, end = rounded_up(nbytes), self._lines[line].end
        within, further = self._lines[line].take(needed), None
        assert within is not None  # a line has no end
        buffer, start = 0, within.start + self._reserved[0] * line
        if within.stop > self._reserved[line]:
            try:
                further = self._further.take(needed) or self._allocate(needed, pin=False)
            except BaseException:
                self._lines[line].give_back(within)
                self._lines[line].end = end  # else every later `reserve` would ask for what cannot be had
                raise
            buffer, start = further.buffer, further.start
        memory = self._buffers[buffer][start : start + nbytes].data  # changes of it are not those of others
        self._taken[address_of(memory)] = _Taken(line, within, further)
        self.nbytes_in_use += needed
        return memory

    def release(self, memory: Tensor) -> None:
        """Take memory back.  Raises: KeyError: it is not in use."""
        line, within, further = self._taken.pop(address_of(memory))
        self.nbytes_in_use -= within.nbytes
        self._lines[line].give_back(within)
        if further is not None:
            self._further.give_back(further)

    def _allocate(self, nbytes: int, *, pin: bool) -> _Range:
        """Allocate a further buffer, whole."""
        if self._device.type == "cpu":
            buffer = host_tensor(nbytes, torch.uint8, pin=pin, remedy=self._remedy)
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._buffers.append(buffer)
        self.nbytes += nbytes
        return _Range(len(self._buffers) - 1, 0, nbytes)


def rounded_up(nbytes: int) -> int:
    """The bytes that `acquire(nbytes)` takes of an arena."""
    return -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
