"""Memory of tensors: host memory, copies that run beside a GPU's work, and an arena in one buffer.

    arena    [ taken |  free  | taken |    free    |  taken  |  free  ]
               line 0: short-lived                    line 1: lives until the step ends

A tensor takes the smallest free range of its line that is large enough.  Lines have no end: a range beyond the buffer
gets extra memory, and `Arena.reserve`, called while nothing is taken, allocates a buffer as long as the lines have
become.  A step that acquires and releases in the order of the previous step finds the same ranges, so it fits.  Tensors
that live until the step's end have a line of their own, since they would leave gaps between the short-lived ones.

[Note: page-locked]  Locking pages may wait for the device, and so for a message that another rank sends only after it
has locked its own pages.  So on the host only `reserve` locks pages, and it is called when no running message waits for
one from this rank.  Copies to extra memory block the host.

[Note: streams]  Copies run on two streams of their own.  A copy starts after all work that the compute stream has been
given before: its source has then been computed, and its target is no longer read.  The compute stream waits for a copy
before it uses the result, and before memory that the copy reads or writes, on the device or the host, is released.  So
the next copy into that memory, on any stream, comes after it.  The host waits only for what it reads or overwrites
itself.

    compute stream   layer 0 | layer 1 | layer 2 | ...
    to the device       [ 1 ]     [ 2 ]     [ 3 ]            what the next layer needs
    to the host                   [ 0 ]     [ 1 ]            what the last layer has finished

Source: C_B and M_D of Rajbhandari et al. 2020, section 6.
"""

import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megazero.comm.backend import address_of

#: Tensors begin at a multiple of this many bytes, as with torch's CUDA allocator.
ALIGNMENT = 512

_ENDLESS = 1 << 62
_LESS_OFFLOADING: Final = "lower zero.offload.ratio or set zero.offload.optimizer and zero.offload.parameters to nvme"


class StorageError(RuntimeError):
    """State does not fit, or cannot be read or written, in its configured location."""


def host_tensor(numel: int, dtype: torch.dtype, *, pin: bool, remedy: str | None = None) -> Tensor:
    """Return zeros in host memory, [numel], page-locked if `pin` and there is a CUDA device.

    Raises:
        StorageError: the memory cannot be allocated or locked; the message ends with `remedy`, or with advice on
            offloading.
    """
    try:
        tensor = torch.zeros(numel, dtype=dtype)
    except RuntimeError as error:  # torch's CPU allocator has no error type of its own
        hint = f"{remedy or _LESS_OFFLOADING}"
        raise StorageError(f"host memory: no {numel * dtype.itemsize} bytes ({error}); {hint}") from error
    if pin and numel and torch.cuda.is_available():
        page_lock(tensor, remedy or "set zero.offload.pin_memory=false")
    return tensor


def page_lock(tensor: Tensor, remedy: str) -> None:
    """Lock the pages of a tensor's memory for as long as it lives.  Raises: StorageError.

    torch's allocator of pinned memory rounds a request up to a power of two, so that 5 GiB take 8 GiB.  Locking existing
    pages takes no more memory than requested (as torch.distributed._state_dict_utils does).
    """
    runtime, address, nbytes = torch.cuda.cudart(), tensor.data_ptr(), tensor.nbytes
    code = int(runtime.cudaHostRegister(address, nbytes, 1))  # 1: for every device
    if code != 0:
        hint = f"raise `ulimit -l` or {remedy}"
        raise StorageError(f"host memory: locking {nbytes} bytes failed with CUDA error {code}; {hint}")

    def unpin() -> None:
        torch.cuda.synchronize()  # a copy may still read or write this memory
        runtime.cudaHostUnregister(address)

    weakref.finalize(tensor, unpin).atexit = False


class Copier:
    """Copies between device and host, synchronously.  `StreamCopier` overlaps them with the computation."""

    def start(self, target: Tensor, source: Tensor) -> Any | None:
        """Start a copy after the work queued so far on the current stream.  Returns a mark to wait for."""
        return self.run(partial(target.copy_, source, non_blocking=True), to_host=source.is_cuda)

    def run(self, work: Callable[[], Any], *, to_host: bool) -> Any | None:  # noqa: ARG002
        """Call `work` on the stream of this direction, so that its kernels run after the current stream's work.  Returns
        a mark to wait for.
        """
        return work()

    def wait(self, mark: Any) -> Any:
        """Let the current stream's later work wait for the marked work.  Returns the result of that `work`."""
        return mark

    def finish(self, mark: Any) -> None:
        """Block the host until the marked work is done."""

    def follow(self, mark: Any, work: Callable[[], object]) -> Callable[[], object]:
        """Let the host call `work` after a copy has ended.  Works run in the order in which they were passed.  Returns the
        function that waits for it.
        """
        self.finish(mark)
        work()
        return lambda: None


class StreamCopier(Copier):
    """Copies of a CUDA device, on one stream for each direction.  Host memory must be page-locked."""

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
        with torch.cuda.device(self._device):  # a new thread has device 0, where waiting would create a CUDA context
            mark[0].synchronize()

    def follow(self, mark: tuple[torch.cuda.Event, Any], work: Callable[[], object]) -> Callable[[], object]:
        def wait_and_work() -> None:
            self.finish(mark)
            work()

        return self._thread.submit(wait_and_work).result


def copier_on(device: torch.device) -> Copier:
    """Return a new copier for a device.  Each use needs its own copier, since a copy waits for the earlier copies of its
    copier.
    """
    return StreamCopier(device) if device.type == "cuda" else Copier()


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
        end: the largest `stop` of all ranges that were ever taken.
    """

    def __init__(self, *free: _Range) -> None:
        self._free = list(free)  # sorted; no two of them touch
        self.end = 0

    def take(self, nbytes: int) -> _Range | None:
        """Take `nbytes` from the smallest range that is large enough; None if there is none."""
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
        """Free a range, and join it with adjacent free ranges."""
        at = bisect(self._free, freed)
        if at < len(self._free) and self._free[at][:2] == (freed.buffer, freed.stop):
            freed = freed._replace(stop=self._free.pop(at).stop)
        if at and (self._free[at - 1].buffer, self._free[at - 1].stop) == freed[:2]:
            at -= 1
            freed = freed._replace(start=self._free.pop(at).start)
        self._free.insert(at, freed)


class _Taken(NamedTuple):
    """The ranges that a tensor occupies: in its line and, if the line ends beyond the buffer, in extra memory."""

    line: int
    within: _Range
    further: _Range | None


class Arena:
    """Allocates tensors of many sizes from one flat buffer, so that the device's allocator has no gaps.

    Released memory may be acquired again at once: work on another CUDA stream must wait for its earlier use first.

    Args:
        device: the device to allocate on.
        remedy: advice for the error message, on how to use less host memory.
        pins: page-lock host memory if there is a CUDA device.

    Attributes:
        nbytes: bytes that the arena has taken from the allocator.
    """

    def __init__(self, device: torch.device, remedy: str | None = None, *, pins: bool = False) -> None:
        self._device, self._remedy, self._pins = device, remedy, pins
        self._buffers: list[Tensor] = []  # the buffer, if `reserve` has allocated one, and extra memory
        self._reserved = [0, 0]  # bytes of the buffer, by line
        self._lines = [_FreeRanges(_Range(0, 0, _ENDLESS)) for _ in self._reserved]
        self._further = _FreeRanges()
        self._taken: dict[tuple[int, int], _Taken] = {}  # by `address_of` the memory
        self._dropped: deque[Tensor] = deque()
        self.nbytes = self._nbytes_in_use = 0

    @property
    def nbytes_in_use(self) -> int:
        """Bytes in use, with each range rounded up to `ALIGNMENT`."""
        self._release_dropped()
        return self._nbytes_in_use

    def reserve(self, nbytes: int = 0) -> None:
        """Allocate one buffer as large as the most bytes that were ever in use at once, and at least `nbytes`.  No-op
        while memory is in use.

        Raises: StorageError, the memory cannot be allocated or locked.
        """
        self._release_dropped()
        wanted = [max(line.end, had) for line, had in zip(self._lines, self._reserved, strict=True)]
        wanted[0] = max(wanted[0], rounded_up(nbytes) if nbytes else 0)
        if not self._taken and wanted != self._reserved:
            self._buffers.clear()  # before the new one is allocated
            self._further, self._reserved, self.nbytes = _FreeRanges(), [0, 0], 0
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # otherwise the old extra memory would stay reserved beside the buffer
            try:
                self._allocate(sum(wanted), pin=self._pins)
            except (StorageError, torch.OutOfMemoryError):
                if self._pins:
                    raise
                return  # gaps can make lines longer than the memory in use: use extra memory, as in the first step
            self._reserved = wanted

    def acquire(self, nbytes: int, *, line: int = 0) -> Tensor:
        """Return memory, uint8 [nbytes], with undefined content.

        Args:
            line: 1 for memory that is acquired once per step and released at its end, else 0.

        Raises: StorageError.
        """
        self._release_dropped()
        needed, end = rounded_up(nbytes), self._lines[line].end
        within, further = self._lines[line].take(needed), None
        assert within is not None  # a line has no end
        buffer, start = 0, within.start + self._reserved[0] * line
        if within.stop > self._reserved[line]:
            try:
                further = self._further.take(needed) or self._allocate(needed, pin=False)
            except BaseException:
                self._lines[line].give_back(within)
                self._lines[line].end = end  # otherwise every later `reserve` would ask for more than there is
                raise
            buffer, start = further.buffer, further.start
        memory = self._buffers[buffer][start : start + nbytes].data  # `.data`: each tensor has its own version counter
        self._taken[address_of(memory)] = _Taken(line, within, further)
        self._nbytes_in_use += needed
        return memory

    def drop(self, memory: Tensor) -> None:
        """Release memory at the arena's next call.  For `__del__`, which any thread may run, even during a call of the
        arena.
        """
        self._dropped.append(memory)

    def _release_dropped(self) -> None:
        while self._dropped:
            self.release(self._dropped.popleft())

    def release(self, memory: Tensor) -> None:
        """Return memory to the arena.  Raises: KeyError: the memory is not in use."""
        line, within, further = self._taken.pop(address_of(memory))
        self._nbytes_in_use -= within.nbytes
        self._lines[line].give_back(within)
        if further is not None:
            self._further.give_back(further)

    def _allocate(self, nbytes: int, *, pin: bool) -> _Range:
        """Allocate another buffer.  Returns its whole range."""
        if self._device.type == "cpu":
            buffer = host_tensor(nbytes, torch.uint8, pin=pin, remedy=self._remedy)
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._buffers.append(buffer)
        self.nbytes += nbytes
        return _Range(len(self._buffers) - 1, 0, nbytes)


def rounded_up(nbytes: int) -> int:
    """Return the bytes that `acquire(nbytes)` takes from an arena."""
    return -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
