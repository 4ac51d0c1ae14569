"""Saving behind the training: the step pays for a copy of its shards to host memory, a thread does the rest.

    training   step | copy | step | step | step | ...              copy | step
    thread                 [ gather | write, hash | flush | commit ]   [ gather ...

The thread has communicators of its own, so its messages never meet those of a step.  The copy's memory is used again for
every checkpoint; one save is under way at a time, and the next waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.checkpoint.folder import Folder
from megazero.checkpoint.gather import Source
from megazero.checkpoint.index import CheckpointError, TrainerState
from megazero.checkpoint.save import save_checkpoint
from megazero.comm.collectives import LostPeerError, gather_objects
from megazero.parallel_state import ParallelState
from megazero.zero.bucket import Bucket, Run, intersect
from megazero.zero.state import MASTER, MODEL, ShardedState
from megazero.zero.storage import free_memory_bytes, in_host_memory

_REMEDY = "set checkpoint.asynchronous = false"


class Snapshot:
    """A copy in host memory of what a rank gives to a checkpoint.

    Args:
        state: what is copied.
        pins_memory: page-lock the memory, so that a CUDA device copies into it at full speed.

    Attributes:
        kinds: what the last copy holds.
    """

    def __init__(self, state: ShardedState, *, pins_memory: bool) -> None:
        self.buckets: Sequence[Bucket] = state.buckets
        self._state, self._pins = state, pins_memory
        self._copies: dict[tuple[str, Bucket], Tensor] = {}
        self.kinds: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of a copy, of all kinds that the state will ever have."""
        state = self._state
        masters = (MASTER,) if state.dtype(MODEL) != torch.float32 else ()
        return sum(
            (bucket.counted.stop - bucket.counted.start) * state.dtype(kind).itemsize
            for kind in (MODEL, *masters, *state.optimizer.known_states)
            for bucket in self.buckets
            if self.holds(kind, bucket)
        )

    def take(self) -> None:
        """Copy what the state is now."""
        self.kinds = self._state.kinds
        for kind in self.kinds:
            for bucket in self.buckets:
                if self.holds(kind, bucket):
                    self._copy(kind, bucket)
        if self._pins:
            torch.cuda.current_stream().synchronize()

    def _copy(self, kind: str, bucket: Bucket) -> None:
        first, last = bucket.counted.start, bucket.counted.stop
        if (kind, bucket) not in self._copies:
            memory = in_host_memory(last - first, self.dtype(kind), pin=self._pins, remedy=_REMEDY)
            self._copies[kind, bucket] = memory.tensor
        copy = self._copies[kind, bucket]
        for _, part in bucket.layout.runs(lambda info: info.group):  # within one, the optimizer's state is in one piece
            run = intersect(part, bucket.counted)
            if run is not None:
                copy[run.start - first : run.stop - first].copy_(self._state.read(kind, bucket, run), non_blocking=True)

    def dtype(self, kind: str) -> torch.dtype:
        """Dtype in which a kind is kept."""
        return self._state.dtype(kind)

    def holds(self, kind: str, bucket: Bucket) -> bool:
        """Whether a bucket has this kind."""
        return self._state.holds(kind, bucket)

    def read(self, kind: str, bucket: Bucket, run: Run) -> Tensor:
        """The elements as they were when the copy was made, 1-D."""
        first = bucket.counted.start
        return self._copies[kind, bucket][run.start - first : run.stop - first]


@dataclass(frozen=True)
class SaveReport:
    """What one save took.

    Args:
        folder: the step directory.
        bytes: of the tensors in it.
        waited_seconds: training stood still for the save before this one.
        copy_seconds: training stood still for the copy, or for everything where there is none.
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
    """Writes checkpoints of one state.  Made, and called, on every rank.

    Args:
        state: what is saved.
        at: this rank's place.
        host_memory_bytes: largest copy on a rank; None for half of the memory that is free, shared among the ranks of this
            machine; 0 for none: training waits while a checkpoint is written.
        timeout_seconds: how long a rank may wait for a peer that is writing.
        report: takes each report on rank 0, from the thread, as soon as there is one.
        after: called on rank 0 after each checkpoint, before the report; may raise OSError.
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
        self._snapshot = Snapshot(state, pins_memory=at.device.type == "cuda")
        needed = self._snapshot.nbytes
        if host_memory_bytes is None:
            host_memory_bytes = free_memory_bytes(torch.device("cpu")) // 2 // at.neighbours
        short = [
            f"rank {rank} needs {wants:,} bytes of host memory for it and may take {has:,}"
            for rank, (wants, has) in enumerate(gather_objects((needed, host_memory_bytes), at.world))
            if wants > has
        ]
        self.refusal: str | None = short[0] if short else None  # why there is no room for a copy
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | LostPeerError | None = None

    def save(
        self, folder: Folder, trainer: TrainerState, files: Mapping[str, bytes], *, moves_latest: bool = True
    ) -> None:
        """Begin a checkpoint of what the state is now; arguments as `save_checkpoint`.

        Waits for the one before to be durable.  That one's failure has been reported and is forgotten here.

        Raises:
            LostPeerError: a rank is gone.
        """
        started = time.perf_counter()
        self._join()
        if isinstance(self._failure, LostPeerError):
            raise self._failure
        self._failure = None
        ready = time.perf_counter()
        source: Source = self._state
        if self.refusal is None:
            self._snapshot.take()
            source = self._snapshot
        copied = time.perf_counter()

        def write() -> None:
            size, error = 0, None
            try:
                size = save_checkpoint(
                    folder, source, self._at, trainer, files, moves_latest=moves_latest, axes=self._axes
                )
                if self._at.rank == 0:
                    self._after(folder)
            except (CheckpointError, LostPeerError) as failure:
                self._failure, error = failure, str(failure)
            except OSError as failure:  # of what comes after: the checkpoint is there
                error = str(failure)
            except Exception as failure:
                self._failure = CheckpointError(f"{folder} could not be written ({failure!r})")
                raise  # the thread's own hook prints where
            if self._at.rank == 0:
                end = time.perf_counter()
                standing = (end if source is self._state else copied) - ready
                self._report(SaveReport(folder, size, ready - started, standing, end - started, error))

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()
        if self.refusal is not None:
            self._join()
            if isinstance(self._failure, LostPeerError):  # those that went on would wait for those that still save
                raise self._failure

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait until the last checkpoint is durable.  Raises: CheckpointError, LostPeerError, where it failed; once."""
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
