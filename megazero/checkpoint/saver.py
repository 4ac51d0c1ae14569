"""Saving in the background: training waits for a copy of its shards to host memory, a thread does the rest.

    training   step | copy | step | step | step | ...              copy | step
    thread                 [ gather | write, hash | flush | commit ]   [ gather ...

The thread has communicators of its own, so its messages never mix with those of a step.  The copy's memory is used again
for every checkpoint.  One save runs at a time; the next waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megazero.checkpoint.folder import Folder
from megazero.checkpoint.gather import Source
from megazero.checkpoint.index import CheckpointError, TrainerState
from megazero.checkpoint.save import save_checkpoint
from megazero.comm.collectives import LostPeerError, gather_objects
from megazero.parallel_state import ParallelState
from megazero.zero.bucket import Bucket, Run, intersect
from megazero.zero.offload import free_memory_bytes
from megazero.zero.state import ShardedState
from megazero.zero.storage import StorageError, in_host_memory

_REMEDY = "set checkpoint.asynchronous = false"


def _counted(bucket: Bucket) -> int:
    return bucket.counted.stop - bucket.counted.start


class Snapshot:
    """A copy in host memory of a rank's part of a checkpoint.

    Args:
        state: what is copied.
        device: of the state; for CUDA the memory is page-locked, so that it copies at full speed.

    Attributes:
        kinds: of the last copy.
    """

    def __init__(self, state: ShardedState, device: torch.device) -> None:
        self.buckets: Sequence[Bucket] = state.buckets
        self._state, self._device = state, device
        self._copies: dict[tuple[str, Bucket], Tensor] = {}
        self.kinds: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of a copy with all kinds that the state will ever have."""
        return sum(_counted(bucket) * self.dtype(kind).itemsize for kind, bucket in self._all())

    def _all(self) -> Iterator[tuple[str, Bucket]]:
        for kind in self._state.known_kinds:
            for bucket in self.buckets:
                if self.holds(kind, bucket):
                    yield kind, bucket

    def reserve(self) -> None:
        """Allocate the memory.  Raises: StorageError."""
        pins = self._device.type == "cuda"
        for kind, bucket in self._all():
            memory = in_host_memory(_counted(bucket), self.dtype(kind), pin=pins, remedy=_REMEDY)
            self._copies[kind, bucket] = memory.tensor

    def release(self) -> None:
        """Free the memory."""
        self._copies.clear()

    def take(self) -> None:
        """Copy the present state."""
        self.kinds = self._state.kinds
        for kind in self.kinds:
            for bucket in self.buckets:
                if self.holds(kind, bucket):
                    self._copy(kind, bucket)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _copy(self, kind: str, bucket: Bucket) -> None:
        first = bucket.counted.start
        copy = self._copies[kind, bucket]
        for _, part in bucket.layout.runs(
            lambda info: info.group
        ):  # the optimizer's state is contiguous within a group
            run = intersect(part, bucket.counted)
            if run is not None:
                copy[run.start - first : run.stop - first].copy_(self._state.read(kind, bucket, run), non_blocking=True)

    def dtype(self, kind: str) -> torch.dtype:
        """Dtype of a kind."""
        return self._state.dtype(kind)

    def holds(self, kind: str, bucket: Bucket) -> bool:
        """Whether a bucket has this kind."""
        return self._state.holds(kind, bucket)

    def read(self, kind: str, bucket: Bucket, run: Run) -> Tensor:
        """The copied elements, 1-D."""
        first = bucket.counted.start
        return self._copies[kind, bucket][run.start - first : run.stop - first]


@dataclass(frozen=True)
class SaveReport:
    """Size and times of one save.

    Args:
        folder: the step directory.
        bytes: of the tensors in it.
        waited_seconds: training waited for the save before this one.
        copy_seconds: training waited for the copy, or for everything if there is none.
        seconds: from the call until the checkpoint was durable.
        error: why there is no checkpoint, or None.
    """

    folder: Folder
    bytes: int
    waited_seconds: float
    copy_seconds: float
    seconds: float
    error: str | None = None


class Saver:
    """Writes checkpoints of one state.  Made and called on every rank.

    Args:
        state: what is saved.
        at: this rank.
        host_memory_bytes: largest copy on a rank; None for half of the free memory, shared among the ranks of this
            machine; 0 for no copy: training waits while a checkpoint is written.
        timeout_seconds: how long a rank may wait for a peer that is writing.
        report: called on rank 0, in the thread, with the report of each save.
        after: called on rank 0 after each checkpoint, before the report; if it raises, the report has its error.
    """

    def __init__(
        self,
        state: ShardedState,
        at: ParallelState,
        *,
        host_memory_bytes: int | None,
        timeout_seconds: float,
        report: Callable[[SaveReport], None],
        after: Callable[[Folder], None] = lambda _: None,
    ) -> None:
        self._state, self._at, self._report, self._after = state, at, report, after
        self._axes = at.saving_axes(timeout_seconds)
        self._snapshot = Snapshot(state, at.device)
        if host_memory_bytes is None:
            host_memory_bytes = free_memory_bytes(torch.device("cpu")) // 2 // at.neighbours
        mine = self._reserve(host_memory_bytes)
        everyone = [f"rank {rank} {why}" for rank, why in enumerate(gather_objects(mine, at.world)) if why]
        self.refusal: str | None = everyone[0] if everyone else None  # why there is no memory for a copy
        if self.refusal is not None:
            self._snapshot.release()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def _reserve(self, limit: int) -> str | None:
        """Allocate the memory for the copy; returns why that is impossible, or None."""
        needed = self._snapshot.nbytes
        if needed > limit:
            return f"needs {needed:,} bytes of host memory for it and may take {limit:,}"
        try:
            self._snapshot.reserve()
        except StorageError as error:
            return str(error)
        return None

    def save(
        self, folder: Folder, trainer: TrainerState, files: Mapping[str, bytes], *, moves_latest: bool = True
    ) -> None:
        """Begin a checkpoint of the present state; arguments as `save_checkpoint`.

        Waits until the previous one is durable.  If that one failed, it has been reported and is forgotten here.

        Raises:
            LostPeerError: a rank has died.
            Exception: an error of this rank alone; the others wait for it, so it must not go on.
        """
        started = time.perf_counter()
        self._join()
        self._check_in_step()
        self._failure = None
        ready = time.perf_counter()
        source: Source = self._state
        copied: float | None = None
        if self.refusal is None:
            self._snapshot.take()
            source, copied = self._snapshot, time.perf_counter()
        write = partial(
            save_checkpoint, folder, source, self._at, trainer, files, moves_latest=moves_latest, axes=self._axes
        )
        self._thread = threading.Thread(
            target=self._write, args=(folder, write, started, ready, copied), name="checkpoint", daemon=True
        )
        self._thread.start()
        if self.refusal is not None:
            self._join()
            self._check_in_step()

    def _write(
        self, folder: Folder, write: Callable[[], int], started: float, ready: float, copied: float | None
    ) -> None:
        """The thread's work.  Times: of the call, after waiting for the previous save, after the copy, if there is one."""
        size, error = 0, None
        try:
            size = write()
        except (CheckpointError, LostPeerError) as failure:
            self._failure, error = failure, str(failure)
        except Exception as failure:
            self._failure = failure
            raise  # the thread's own hook prints where
        if self._at.rank == 0:
            error = error or self._do_after(folder)
            end = time.perf_counter()
            self._report(SaveReport(folder, size, ready - started, (copied or end) - ready, end - started, error))

    def _do_after(self, folder: Folder) -> str | None:
        """Call `after`; returns why it failed, or None.  The checkpoint is complete either way."""
        try:
            self._after(folder)
        except Exception as failure:  # an object store has errors of its own
            return f"{folder.name} was saved, but the work after it failed: {failure!r}"
        return None

    def _check_in_step(self) -> None:
        """Raises: a failure that the ranks do not share; if this rank went on, it would wait for those that still save."""
        if self._failure is not None and not isinstance(self._failure, CheckpointError):
            raise self._failure

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait until the last checkpoint is durable.  Raises: its failure, as `save` or CheckpointError; once."""
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
