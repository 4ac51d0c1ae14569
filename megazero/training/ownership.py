"""The directories of a run belong to it from its start to its end: its run_dir and the directory of its checkpoints.

rank 0        takes a lock on both, keeps their heartbeats going in a thread, releases them at the end
every rank    sees the lock file in the directory of the checkpoints, and looks for it before it writes there

Between two saves only the thread talks to the storage: a step does not wait for a storage that does not answer.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Self

from megazero.checkpoint.folder import Folder, LocalFolder, folder_at
from megazero.checkpoint.index import CheckpointError, OwnerError
from megazero.checkpoint.lock import (
    GONE_SECONDS,
    HEARTBEAT_SECONDS,
    LOOK_SECONDS,
    DirectoryLock,
    HeldLock,
    process_identity,
)
from megazero.comm.agreement import agree, on_first
from megazero.comm.collectives import gather_objects
from megazero.config import RunConfig
from megazero.parallel_state import ParallelState
from megazero.settings import Say, listed
from megazero.training.callbacks.base import Callback, StepRecord
from megazero.training.resuming import checkpoints_of

_APPEARS_SECONDS = 5.0  # a shared file system may show a new file a moment late
_ANSWER_SECONDS = 10.0  # a step waits so long, once, for the first answer after this process was frozen


class Ownership(Callback):
    """A context in which the run owns its directories; after each step it ends a run that has lost one.  On every rank.

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

    def __init__(self, config: RunConfig, state: ParallelState, say: Say, wants_stop: Callable[[], bool]) -> None:
        self._config, self._state, self._say, self._wants_stop = config, state, say, wants_stop
        self._locks: list[DirectoryLock] = []  # on rank 0; the last one is that of `root`
        self._error: OwnerError | None = None
        self._thread = threading.Thread(target=self._keep, name="lock", daemon=True)
        self._over = threading.Event()
        self._looked = self._waited = 0.0  # when the last look at the locks began; for which one a step has waited

    def __enter__(self) -> Self:
        try:
            self._take()
        except BaseException:
            self.__exit__()
            raise
        if self._locks:
            self._looked = _now()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_APPEARS_SECONDS)
        for lock in self._locks:
            lock.release()

    def after_step(self, _: StepRecord) -> None:
        """Raises: OwnerError, on rank 0: the run has lost a directory."""
        if self._locks and self._is_old() and self._looked != self._waited:
            # the process may have been frozen until now; or a request hangs: then wait once
            self._waited = self._looked
            self._await_look()
        if self._error is not None:
            raise self._error

    def _is_old(self) -> bool:
        """Whether another run may have taken a lock since this one last looked."""
        return _now() - self._looked > GONE_SECONDS

    def _await_look(self) -> None:
        end = time.monotonic() + _ANSWER_SECONDS
        while self._error is None and self._is_old() and time.monotonic() < end:
            time.sleep(0.01)

    def _take(self) -> None:
        """Take the locks, and make sure that all ranks see that of `root`."""
        world, run_dir = self._state.world, self._config.training.run_dir
        own, root = agree(lambda: (folder_at(run_dir), checkpoints_of(self._config)), world, CheckpointError)
        by_launcher = "TORCHELASTIC_RUN_ID" in os.environ
        launchers = set(gather_objects(process_identity(os.getppid()) if by_launcher else "", world)) - {""}
        if self._state.rank == 0:
            folders = {_real(folder): folder for folder in (own, root)}
            self._locks = [DirectoryLock(folder, launchers) for folder in folders.values()]
        is_told = False
        while waits_for := on_first(self._try_to_take, world, CheckpointError):
            if not is_told:
                self._say(f"{waits_for}; waiting about {GONE_SECONDS:.0f} s to see whether it still runs")
            is_told = True
            if any(gather_objects(self._wants_stop(), world)):
                raise OwnerError(f"{waits_for}; this run was asked to stop before it knew whether that one still runs")
            time.sleep(LOOK_SECONDS)
        held = on_first(lambda: self._locks[-1].held, world, CheckpointError)
        assert held is not None
        lock = replace(held, folder=root)
        _check_shared(lock, self._state)
        self.root = root.locked(lock.check)

    def _try_to_take(self) -> str:
        """Try to take all locks.  Returns "", or which owner this run has to wait for."""
        try:
            for lock in self._locks:
                if lock.held is not None:
                    lock.heartbeat()
                elif (owner := lock.try_to_take()) is not None:
                    return f"{lock.folder} belongs to {owner}"
                elif lock.taken_from is not None:
                    self._say(f"{lock.folder} belonged to {lock.taken_from}, which has ended; taken over")
        except FileNotFoundError as error:
            hint = "correct training.run_dir or checkpoint.directory, or make the bucket"
            raise CheckpointError(f"{lock.folder} cannot be made ({error}); {hint}") from error
        except OSError as error:
            raise CheckpointError(f"{lock.folder} cannot be written ({error})") from error
        return ""

    def _keep(self) -> None:
        """Send heartbeats until the run ends, the next at once after the process was frozen.  The thread's target."""
        while self._error is None and not self._over.wait(min(1.0, HEARTBEAT_SECONDS)):
            if (began := _now()) - self._looked >= HEARTBEAT_SECONDS:
                for lock in self._locks:
                    self._heartbeat(lock)
                self._looked = began

    def _heartbeat(self, lock: DirectoryLock) -> None:
        try:
            if not lock.heartbeat():
                self._say(f"{lock.folder}: the lock file of this run had been removed or moved away; made again")
        except OwnerError as error:
            self._error = error
        except Exception:  # the storage does not answer: whatever is written there looks again
            return


def _now() -> float:
    """A clock in seconds that goes on while the machine is suspended, if the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _real(folder: Folder) -> str:
    return str(folder.path.resolve() if isinstance(folder, LocalFolder) else folder)


def _check_shared(lock: HeldLock, state: ParallelState) -> None:
    """Make sure that every rank sees the lock file of rank 0.  Raises: CheckpointError naming those that do not."""
    seen = gather_objects((_appears(lock), socket.gethostname()), state.world)
    blind = [f"rank {rank} on {host}" for rank, (sees, host) in enumerate(seen) if not sees]
    if blind:
        raise CheckpointError(
            f"{listed(blind)} cannot see what rank 0 on {seen[0][1]} writes in {lock.folder}: checkpoints need a directory "
            "that all ranks share. Set checkpoint.directory to a shared file system, or to a URL such as s3://bucket/run"
        )


def _appears(lock: HeldLock) -> bool:
    end = time.monotonic() + _APPEARS_SECONDS
    while True:
        with suppress(OSError):
            if lock.is_there():
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
