"""Saving in the background: training waits only until its shards are copied to host memory; a thread does the rest.

    training   step | copy | step | step | step | ...              copy | step
    thread                 [ gather | write, hash | flush | commit ]   [ gather ...

The thread has its own communicators, so its messages never mix with those of a step.  The memory of the copy is reused
for every checkpoint.  One save runs at a time; the next one waits for it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from megazero.checkpoint.folder import Folder
from megazero.checkpoint.index import CheckpointError, OwnerError, TrainerState
from megazero.checkpoint.save import plan_saving, save_checkpoint
from megazero.comm.collectives import gather_objects
from megazero.comm.memory import StorageError
from megazero.comm.messages import LostPeerError
from megazero.parallel_state import ParallelState
from megazero.parallel_state.state import SavingAxes
from megazero.zero.bucket import Bucket
from megazero.zero.sharding import Interval, intersect
from megazero.zero.state import ShardedState
from megazero.zero.storage import free_memory_bytes, in_host_memory

_REMEDY = "set checkpoint.asynchronous = false"


class Snapshot(ShardedState):
    """A copy of this rank's state in host memory, made by the last `take`.

    Attributes:
        state: what is copied.
        at: this rank's position.
        refusal: why some rank has no memory for a copy; None if all have.
    """

    state_kinds: tuple[str, ...] = ()  # of the last copy
    refusal: str | None = None

    def __init__(self, state: ShardedState, at: ParallelState) -> None:
        super().__init__(state.parameters, state.optimizer, state.average)
        self.state, self.at, self._device = state, at, at.device
        self._copies: dict[tuple[str, Bucket], Tensor] = {}

    def _arrays(self, state_kinds: tuple[str, ...]) -> Iterator[tuple[str, Bucket]]:
        return (array for array in product(state_kinds, self.buckets) if self.holds(*array))

    def reserve(self, limit: int) -> str | None:
        """Allocate memory for a copy of all state kinds, at most `limit` bytes.  Return the reason if it cannot, else
        None.
        """
        arrays = self._arrays(self.known_state_kinds)
        sizes = {(state_kind, bucket): bucket.counted.size for state_kind, bucket in arrays}
        needed = sum(numel * self.dtype(*array).itemsize for array, numel in sizes.items())
        if needed > limit:
            return f"needs {needed:,} bytes of host memory for it and may take {limit:,}"
        pins = self._device.type == "cuda"  # pinned memory is copied to at full speed
        try:
            for array, numel in sizes.items():
                self._copies[array] = in_host_memory(numel, self.dtype(*array), pin=pins, remedy=_REMEDY).tensor
        except StorageError as error:
            return str(error)
        return None

    def take(self) -> None:
        """Copy the current state."""
        self.state_kinds = self.state.state_kinds
        for state_kind, bucket in self._arrays(self.state_kinds):
            # the optimizer's state is contiguous within a group
            for _, group in bucket.layout.intervals(lambda info: info.group):
                if (interval := intersect(group, bucket.counted)) is not None:
                    source = self.state.read(state_kind, bucket, interval)
                    self.read(state_kind, bucket, interval).copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def read(self, state_kind: str, bucket: Bucket, interval: Interval) -> Tensor:
        """Return the copied elements, 1-D."""
        first = bucket.counted.start
        return self._copies[state_kind, bucket][interval.start - first : interval.stop - first]


def snapshot_of(state: ShardedState, at: ParallelState, host_memory_bytes: int | None) -> Snapshot:
    """Allocate the copy of a state on every rank, or on none.  Collective.

    Args:
        state: what is saved.
        at: this rank's position.
        host_memory_bytes: maximum size of the copy on a rank.  None for half of the free memory, divided among the
            ranks of this machine.  0 for no copy: training waits while a checkpoint is written.
    """
    snapshot = Snapshot(state, at)
    if host_memory_bytes is None:
        host_memory_bytes = free_memory_bytes(torch.device("cpu")) // 2 // at.local_world_size
    reasons = gather_objects(snapshot.reserve(host_memory_bytes), at.world)
    if any(reasons):
        snapshot = Snapshot(state, at)  # frees the memory
        snapshot.refusal = next(f"rank {rank} {why}" for rank, why in enumerate(reasons) if why)
    return snapshot


def _ends_run(failure: Exception | None) -> bool:
    """Whether a failure ends the run: because only some ranks know of it, or because another run owns the directory."""
    return isinstance(failure, OwnerError) or not (failure is None or isinstance(failure, CheckpointError))


@dataclass(frozen=True)
class SaveReport:
    """Size and times of one save."""

    folder: Folder
    bytes: int  # of the tensors
    waited_seconds: float  # how long training waited for the previous save
    copy_seconds: float  # how long training waited for the copy, or for the whole save if there is no copy
    seconds: float  # from the call until the checkpoint was durable
    error: str | None = None  # why there is no checkpoint
    ends_run: bool = False  # training cannot continue after this error


class Saver:
    """Writes checkpoints of one state.  Constructed and called on every rank.

    Args:
        snapshot: of the state that is saved; see `snapshot_of`.
        axes: communicators that only this saver uses while a save is in progress.
        report: called on rank 0, in the thread, with the report of each save.
        after: called on every rank, in the thread, after each checkpoint and before the report.  It may make collective
            calls over the saving axes.  If it raises, the report contains its error.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        axes: SavingAxes,
        report: Callable[[SaveReport], None],
        after: Callable[[Folder], None] = lambda _: None,
    ) -> None:
        self._snapshot, self._at, self._axes, self._report, self._after = snapshot, snapshot.at, axes, report, after
        self._plan = plan_saving(snapshot.state, self._at, self._at.world)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(
        self, folder: Folder, trainer: TrainerState, files: Mapping[str, bytes], *, moves_latest: bool = True
    ) -> None:
        """Begin a checkpoint of the current state.  Arguments as in `save_checkpoint`.

        First waits until the previous checkpoint is durable.  If that one failed, its error has already been reported
        and is not raised again.

        Raises:
            LostPeerError: a rank has died.
            OwnerError: the run no longer owns its directory.
            Exception: an error of this rank alone.  The other ranks wait for it, so the run must not continue.
        """
        called = time.perf_counter()
        self._join()
        self._failure = None
        began = time.perf_counter()
        source, copied = self._snapshot.state, None
        if self._snapshot.refusal is None:
            self._snapshot.take()
            source, copied = self._snapshot, time.perf_counter()
        write = partial(save_checkpoint, folder, source, self._at, trainer, files, axes=self._axes, plan=self._plan)
        write = partial(write, moves_latest=moves_latest)
        self._thread = threading.Thread(
            target=self._write, args=(folder, write, called, began, copied), name="checkpoint", daemon=True
        )
        self._thread.start()
        if copied is None:
            self._join()

    def _write(
        self, folder: Folder, write: Callable[[], int], called: float, began: float, copied: float | None
    ) -> None:
        """Do the thread's work.  `copied` is None if training waits for the whole save."""
        size, error = 0, None
        try:
            size = write()
        except (CheckpointError, LostPeerError) as failure:
            self._failure, error = failure, str(failure)
        except Exception as failure:
            self._failure = failure
            raise  # the thread's excepthook prints the traceback
        if error is None:
            try:
                self._after(folder)
            except Exception as failure:  # of any kind: the checkpoint itself is complete
                error = f"{folder.name} was saved, but the work after it failed: {failure!r}"
                self._failure = failure if isinstance(failure, LostPeerError | OwnerError) else None
        if self._at.rank == 0:
            end, ends_run = time.perf_counter(), _ends_run(self._failure)
            seconds = (began - called, (copied or end) - began, end - called)
            self._report(SaveReport(folder, size, *seconds, error, ends_run))

    def _join(self) -> None:
        """Wait for the thread.  Raises: a failure after which the run cannot continue."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None and _ends_run(self._failure):
            raise self._failure

    def finish(self) -> None:
        """Wait until the last checkpoint is durable.  Raises: its failure, as `save` does, or CheckpointError; only
        once.
        """
        try:
            self._join()
        finally:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
