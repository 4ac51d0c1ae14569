"""One owner for each directory that a run writes, by a lock file with a heartbeat.

    owner/00000007.json     the lock: run, process, host, since when; created once, never replaced
    owner/00000007.beat     a count that the owner increments every 10 s while it runs; "released" after its end

A process takes the lock by creating the file of the next number, which only one process can do.  It then removes the
file of the previous owner.  Before it writes anything, every process of a run checks whether the run's lock file is
still there (`HeldLock`).  If there is no lock file at all, someone has removed it, and the owner creates it again.

A lock is taken over only from an owner that has ended.  If the owner ran on this host, its process must be gone.
Otherwise the elastic launcher that started it must belong to this run as well, or its heartbeat must not change for
`GONE_LOOKS` looks, one per second.  Looks are counted instead of seconds because the owner cannot write its heartbeat
either while the storage does not answer.  The clocks of two hosts are never compared.

The package `filelock` does not fit: its locks are for paths, not for object stores.  On some mounts of Lustre, NFS and
FUSE, `flock` locks only within one host, without notice.  Its `SoftFileLease` regards a process in another container
with the same host name as gone, and takes over after an outage of the storage.
"""

import os
import re
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import xxhash

from megazero.checkpoint.folder import Folder, LocalFolder, folder_at
from megazero.checkpoint.index import CheckpointError, OwnerError, to_json
from megazero.comm.agreement import agree, on_first
from megazero.comm.collectives import gather_objects
from megazero.config import RunConfig
from megazero.data.sealed import parse_json
from megazero.parallel_state import ParallelState
from megazero.settings import Say, listed

HEARTBEAT_SECONDS = 10.0  # time between two heartbeats
GONE_SECONDS = 60.0  # an owner without a heartbeat for this long has ended
LOOK_SECONDS = 1.0  # time between two looks at the heartbeat of an owner on another host
GONE_LOOKS = int(GONE_SECONDS / LOOK_SECONDS)
_APPEARS_SECONDS = 5.0  # a shared file system may show a new file a moment late
_ANSWER_SECONDS = 10.0  # a step waits so long, once, for the first answer after this process was frozen
_RELEASED = b"released\n"
_LOCK_FILE = re.compile(r"\d{8}\.json")
_OWN_FILE = re.compile(r"\d{8}\.(json|beat|by)(\.[0-9a-f]{8}\.partial)?")  # `.by` is of earlier releases


@dataclass(frozen=True)
class Owner:
    """The owner of a lock."""

    run: str = "unknown"
    host: str = "an unknown host"
    pid: int = 0
    process: str = ""  # see `process_identity`
    since: str = "an unknown time"  # a date, for people
    launchers: Sequence[str] = ()  # hashes of the identities of the elastic launchers of all ranks

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since} (run {self.run})"


_UNKNOWN = Owner()  # of a lock file that is incomplete, or from another version


def process_identity(pid: int) -> str:
    """Identify a process for ever by the host's boot, the PID namespace, the PID and its start time; "" if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{_kernel()} {pid} {'ended' if fields[0] in 'ZX' else fields[19]}"
    except OSError:
        return ""


def _kernel() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")


def has_ended(identity: str) -> bool | None:
    """Whether a process has ended; None if it ran on another host or in another container, where this cannot be known."""
    try:
        kernel, pid, _ = identity.rsplit(" ", 2)
        if kernel != _kernel():
            return None
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it runs, as another user
        pass
    except (OSError, ValueError):
        return None
    return process_identity(int(pid)) not in ("", identity)


@dataclass(frozen=True)
class HeldLock:
    """A lock that a run has taken, as seen by each process of the run."""

    folder: Folder
    name: str  # of the lock file, in `owner`
    content: bytes

    def check(self) -> None:
        """Check that this run still holds the lock.  Call it before any change in the folder.

        Raises: OwnerError: another owner has taken the lock.
        """
        # The owner may create its file again between the first two looks.
        files = _files_of(self.folder)
        if not (self.is_there() or not (names := _lock_files(files)) or self.is_there()):
            by = _newest(files, names)[1]
            raise OwnerError(f"this run has lost {self.folder} to {by}; it ends without writing anything more")

    def is_there(self) -> bool:
        """Whether the lock file exists.  Raises: OSError: the storage does not answer."""
        return _read(_files_of(self.folder), self.name) == self.content


class DirectoryLock:
    """Takes and holds the lock of a folder for this process' run.

    Args:
        launchers: hashes of the identities of the elastic launchers of all ranks.  An earlier run that one of them
            started has ended.
    """

    def __init__(self, folder: Folder, launchers: Iterable[str] = ()) -> None:
        self.folder, self._files = folder, _files_of(folder)
        self.held: HeldLock | None = None  # set once the lock is taken
        self.taken_from: Owner | None = None  # the previous owner, if it ended without releasing the folder
        since, pid = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), os.getpid()
        identity, run = process_identity(pid), uuid.uuid4().hex[:12]
        self._owner = Owner(run, socket.gethostname(), pid, identity, since, sorted(launchers))
        self._beats = 0
        self._looks: Counter[tuple[str, bytes]] = Counter()  # by lock file and heartbeat of an owner on another host

    def look(self) -> None:
        """Check that no owner is known to run on this host.  Raises: OwnerError."""
        self._owner_among(_lock_files(self._files))

    def try_to_take(self) -> Owner | None:
        """Take the lock if its owner has ended.

        Returns: None if this run now holds the lock.  Otherwise the owner, which may still be running: try again after
        `LOOK_SECONDS`.

        Raises: OwnerError: the owner is running.
        """
        while True:
            # From one listing: an owner that comes after it has the next number, too, and one of the two cannot create it.
            names = _lock_files(self._files)
            if (owner := self._owner_among(names)) is not None:
                return owner
            number = 1 + max((int(name[:8]) for name in names), default=0)
            lock = HeldLock(self.folder, f"{number:08d}.json", to_json(asdict(self._owner)))
            if self._create(lock):
                self.held = lock
                return None

    def _create(self, lock: HeldLock) -> bool:
        """Create a lock file and remove older ones.  Return whether it is the newest."""
        self._files.make()
        try:
            if not self._files.create_new(lock.name, lock.content):
                return False  # another process created it first
        except FileNotFoundError:
            if not _lock_files(self._files):
                raise  # there is no such bucket; otherwise a later owner has removed the file again
        if _lock_files(self._files)[-1:] != [lock.name]:
            self._files.remove(lock.name)  # several owners have taken the lock since this process looked
            return False
        own = filter(_OWN_FILE.fullmatch, self._files.files())
        self._files.remove(*(name for name in own if name[:8] < lock.name[:8]))
        return True

    def _owner_among(self, names: Sequence[str]) -> Owner | None:
        """Return the owner by some lock files, unless it has ended.  Raises: OwnerError: it is known to be running."""
        if not names:
            return None
        name, owner = _newest(self._files, names)
        beat = _read(self._files, _heartbeat_of(name))
        self.taken_from = None if beat == _RELEASED or owner is _UNKNOWN else owner
        is_restart = not set(owner.launchers).isdisjoint(self._owner.launchers)
        ended = beat == _RELEASED or has_ended(owner.process)
        if ended is None and not is_restart:
            self._looks[name, beat] += 1
            is_alive = len([seen for seen, _ in self._looks if seen == name]) > 1
            ended = False if is_alive else self._looks[name, beat] > GONE_LOOKS or None
        if ended is False:
            raise OwnerError(
                f"{self.folder} belongs to a run that is still running: {owner}. Nothing was changed. Stop that run "
                "first, or give this one directories of its own (training.run_dir, checkpoint.directory)"
            )
        return None if ended or is_restart else owner

    def heartbeat(self) -> bool:
        """Increment the count that shows that the owner is running.  Return False if its lock file had to be created
        again.

        Raises: OwnerError: another run has taken the lock.  OSError: the storage fails.
        """
        assert self.held is not None
        if not (was_there := self.held.is_there()):
            self.held.check()
            if not self._create(self.held):
                self.held.check()
        self._beats += 1
        self._files.write(_heartbeat_of(self.held.name), f"{self._beats}\n".encode())
        return was_there

    def release(self) -> None:
        """Let the next run take the folder at once.  Never raises."""
        with suppress(OSError):
            if self.held is not None and self.held.is_there():
                self._files.write(_heartbeat_of(self.held.name), _RELEASED)


def checkpoints_of(config: RunConfig) -> Folder:
    """Return the folder of a run's checkpoints.  Raises: ValueError for a URL that cannot be used."""
    return folder_at(config.checkpoint.directory or Path(config.training.run_dir) / "checkpoints")


class Ownership:
    """A context in which the run owns its run_dir and the directory of its checkpoints.  On every rank.

    Rank 0 takes a lock on both, keeps their heartbeats going in a thread, and releases them at the end.  Every rank
    looks for the lock file before it writes a checkpoint.  Between two saves only the thread talks to the storage: a
    step does not wait for a storage that does not answer.

    Args:
        say: prints a line on the terminal of rank 0.
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

    def check(self) -> None:
        """End a run that has lost a directory; called after each step.  Raises: OwnerError, on rank 0."""
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
        launcher = process_identity(os.getppid()) if by_launcher else ""
        launchers = {*gather_objects(launcher and xxhash.xxh3_64_hexdigest(launcher.encode()), world)} - {""}
        if self._state.rank == 0:
            paths = [str(at.path.resolve() if isinstance(at, LocalFolder) else at) for at in (own, root)]
            self._locks = [DirectoryLock(at, launchers) for at in dict(zip(paths, (own, root), strict=True)).values()]
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
    """Return the time in seconds of a clock that continues while the machine is suspended, if the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _check_shared(lock: HeldLock, state: ParallelState) -> None:
    """Make sure that every rank sees the lock file of rank 0.  Raises: CheckpointError naming those that do not."""
    seen = gather_objects((_appears(lock), socket.gethostname()), state.world)
    if blind := [f"rank {rank} on {host}" for rank, (sees, host) in enumerate(seen) if not sees]:
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


def _files_of(folder: Folder) -> Folder:
    return folder.child("owner")


def _lock_files(files: Folder) -> list[str]:
    return [name for name in files.files() if _LOCK_FILE.fullmatch(name)]


def _newest(files: Folder, names: Sequence[str]) -> tuple[str, Owner]:
    """Return the newest of some lock files, and its owner.  A file that cannot be parsed does not hide an older one."""
    found = [(name, _parsed(_read(files, name))) for name in reversed(names)]
    return next((entry for entry in found if entry[1] is not _UNKNOWN), found[0])


def _heartbeat_of(name: str) -> str:
    return name.removesuffix(".json") + ".beat"


def _read(files: Folder, name: str) -> bytes:
    try:
        return files.read(name)
    except FileNotFoundError:
        return b""


def _parsed(content: bytes) -> Owner:
    try:
        owner = Owner(**parse_json(content))
        return replace(owner, launchers=sorted({*owner.launchers}))
    except (ValueError, TypeError):
        return _UNKNOWN
