"""The directories of a run belong to it from its start to its end: its run_dir and the directory of its checkpoints.

rank 0        takes a lease on both, renews them in a thread, releases them at the end
every rank    sees the claim on the directory of the checkpoints, and looks for it before it writes there

Between two saves only the thread talks to the storage: a step does not wait for one that does not answer.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from megazero.checkpoint.folder import Folder, LocalFolder, folder_at
from megazero.checkpoint.index import CheckpointError, OwnerError
from megazero.checkpoint.lease import GONE_SECONDS, LOOK_SECONDS, RENEW_SECONDS, Fence, Lease, identity_of
from megazero.comm.collectives import agree, from_first, gather_objects
from megazero.config import RunConfig
from megazero.parallel_state import ParallelState
from megazero.training.callbacks.base import Callback, StepRecord
from megazero.training.resuming import checkpoints_of

T = TypeVar("T")

_APPEARS_SECONDS = 5.0  # a shared file system may show a new file a moment late
_ANSWER_SECONDS = 10.0  # a step waits so long, once, for the first answer after this process was frozen


class Ownership(Callback):
    """A context in which the run owns its directories.  On every rank; after a step it ends a run that has lost one.

    Args:
        say: takes lines for the terminal, on rank 0.
        wants_stop: asked while the run waits to see whether another owner still runs.

    Attributes:
        root: the directory of the checkpoints; whatever the run writes there goes through it.

    Raises (when it is entered, on every rank):
        OwnerError: another run owns one of the directories.
        CheckpointError: the ranks do not share the directory of the checkpoints, or it cannot be written.
    """

    root: Folder

    def __init__(
        self,
        config: RunConfig,
        state: ParallelState,
        say: Callable[[str], None],
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config, self._state, self._say, self._wants_stop = config, state, say, wants_stop
        self._leases: list[Lease] = []  # on rank 0; the last one is that of `root`
        self._error: OwnerError | None = None
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._over, self._wakes = False, threading.Event()  # the thread is to end, or to ask the storage now
        self._answers = threading.Condition()
        self._asked = self._answered = 0  # how often the thread has asked the storage; the last time that has an answer
        self._moved = self._waited = (
            0.0  # when the thread began to wait or to ask; when it had, as a step waited for it
        )

    def __enter__(self) -> Self:
        try:
            self._own()
        except BaseException:
            self._release()
            raise
        if self._leases:
            self._moved = _now()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._wakes.set()
        if self._leases:
            self._thread.join(_APPEARS_SECONDS)
        self._release()

    def after_step(self, _: StepRecord) -> None:
        """Raises: OwnerError, on rank 0: the run has lost a directory."""
        if self._leases and _now() - (moved := self._moved) > GONE_SECONDS and moved != self._waited:
            self._waited = moved  # the process may have been frozen until now; or a request hangs: then wait once
            self._await_answer()
        if self._error is not None:
            raise self._error

    def _await_answer(self) -> None:
        """Wait for the answer to a request that begins from now on."""
        with self._answers:
            asked = self._asked
            self._wakes.set()
            self._answers.wait_for(lambda: self._answered > asked or self._error is not None, _ANSWER_SECONDS)

    def _own(self) -> None:
        world, run_dir = self._state.world, self._config.training.run_dir
        own, root = agree(lambda: (folder_at(run_dir), checkpoints_of(self._config)), world, CheckpointError)
        by_launcher = "TORCHELASTIC_RUN_ID" in os.environ
        launchers = set(gather_objects(identity_of(os.getppid()) if by_launcher else "", world)) - {""}
        if self._state.rank == 0:
            folders = {_real(folder): folder for folder in (own, root)}
            self._leases = [Lease(folder, launchers) for folder in folders.values()]
        is_told = False
        while waits_for := self._on_first(self._take):
            if not is_told:
                self._say(f"{waits_for}; waiting about {GONE_SECONDS:.0f} s to see whether it still runs")
            is_told = True
            if any(gather_objects(self._wants_stop(), world)):
                raise OwnerError(f"{waits_for}; this run was asked to stop before it knew whether that one still runs")
            time.sleep(LOOK_SECONDS)
        fence = replace(self._on_first(self._fence), folder=root)
        _check_shared(fence, self._state)
        self.root = root.fenced(fence)

    def _on_first(self, action: Callable[[], T]) -> T:
        """What rank 0 finds, on all ranks.  Raises: CheckpointError, on all ranks."""
        world = self._state.world
        answer = agree(lambda: action() if self._state.rank == 0 else None, world, CheckpointError)
        found = from_first(answer, world)
        assert found is not None
        return found

    def _take(self) -> str:
        """Take the leases; "" if this run has all of them now, else the owner for which it has to wait."""
        try:
            for lease in self._leases:
                if lease.fence is not None:
                    lease.renew()
                elif (owner := lease.try_to_take()) is not None:
                    return f"{lease.folder} belongs to {owner}"
                elif lease.taken_from is not None:
                    self._say(f"{lease.folder} belonged to {lease.taken_from}, which has ended; taken over")
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{lease.folder} cannot be made ({error}); correct training.run_dir or checkpoint.directory, "
                "or make the bucket"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{lease.folder} cannot be written ({error})") from error
        return ""

    def _fence(self) -> Fence:
        fence = self._leases[-1].fence
        assert fence is not None
        return fence

    def _renew(self) -> None:
        """The thread's work."""
        while self._error is None:
            self._wakes.wait(RENEW_SECONDS)
            self._wakes.clear()
            if self._over:
                return
            with self._answers:
                self._asked, self._moved = self._asked + 1, _now()
            self._confirm()
            with self._answers:
                self._answered, self._moved = self._asked, _now()
                self._answers.notify_all()

    def _confirm(self) -> None:
        for lease in self._leases:
            try:
                if not lease.renew():
                    self._say(f"{lease.folder}: the claim of this run had been removed or moved away; made again")
            except OwnerError as error:
                self._error = error
            except Exception:  # a storage that does not answer: whatever is written there looks again
                continue

    def _release(self) -> None:
        for lease in self._leases:
            lease.release()


def _now() -> float:
    """Seconds, with those in which the machine was suspended, where the system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _real(folder: Folder) -> str:
    return str(folder.path.resolve() if isinstance(folder, LocalFolder) else folder)


def _check_shared(fence: Fence, state: ParallelState) -> None:
    """Make sure that every rank sees the claim of rank 0.  Raises: CheckpointError naming those that do not."""
    seen = gather_objects((_appears(fence), socket.gethostname()), state.world)
    blind = [f"rank {rank} on {host}" for rank, (sees, host) in enumerate(seen) if not sees]
    if blind:
        shown = ", ".join(blind[:8]) + (f" and {len(blind) - 8} more" if len(blind) > 8 else "")
        raise CheckpointError(
            f"{shown} cannot see what rank 0 on {seen[0][1]} writes in {fence.folder}: checkpoints need a directory that "
            "all ranks share. Set checkpoint.directory to a shared file system, or to a URL such as s3://bucket/run"
        )


def _appears(fence: Fence) -> bool:
    end = time.monotonic() + _APPEARS_SECONDS
    while True:
        with suppress(OSError):
            if fence.is_there():
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
