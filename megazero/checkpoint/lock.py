"""One owner for each directory that a run writes, by a lock file with a heartbeat.

    owner/00000007.json     the lock: run, process, host, since when; created once, never replaced
    owner/00000007.beat     a new random text from the owner every 10 s while it runs; "released" after its end

A process takes the lock by creating the file of the next number, which only one process can do.  It then removes the
file of the previous owner.  Before it writes anything, every process of a run checks whether the run's lock file is
still there (`HeldLock`).  If there is no lock file at all, someone has removed it, and the owner creates it again.

A lock is taken over only from an owner that has ended.  If the owner ran on this host, its process must be gone.
Otherwise the elastic launcher that started it must belong to this run as well, or its heartbeat must not change for
`GONE_LOOKS` looks, one per second.  Looks are counted instead of seconds because the owner cannot write its heartbeat
either while the storage does not answer.  Clocks of two hosts are never compared: a heartbeat only has to change.

The package `filelock` does not fit: its locks are for paths, not for object stores.  On some mounts of Lustre, NFS and
FUSE, `flock` locks only within one host, without notice.  Its `SoftFileLease` regards a process in another container
with the same host name as gone, and takes over after an outage of the storage.
"""

import errno
import os
import re
import socket
import threading
import time
import uuid
from collections import Counter, defaultdict
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
from megazero.settings import Log, listed

HEARTBEAT_SECONDS = 10.0  # time between two heartbeats
GONE_SECONDS = 60.0  # an owner without a heartbeat for this long has ended
LOOK_SECONDS = 1.0  # time between two looks at the heartbeat of an owner on another host
GONE_LOOKS = int(GONE_SECONDS / LOOK_SECONDS)
_ANSWER_SECONDS = 5.0  # wait so long for a new file to appear, twice for the first answer after this process was frozen
_RELEASED = b"released\n"
_LOCK_FILE = re.compile(r"\d{8}\.json")
_OWN_FILE = re.compile(r"\d{8}\.(json|beat|by)(\.[0-9a-f]{8}\.partial)?")  # earlier releases wrote `.by`


@dataclass(frozen=True)
class Owner:
    """The owner of a lock."""

    run: str
    host: str = ""
    pid: int = 0  # 0 for a lock file that cannot be parsed, which `run` then describes
    process: str = ""  # see `process_identity`
    since: str = ""  # a date, for people
    launchers: Sequence[str] = ()  # hashes of the identities of the elastic launchers of all ranks

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since} (run {self.run})" if self.pid else self.run


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
        with suppress(PermissionError):  # it runs, as another user
            os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return None
    return process_identity(int(pid)) not in ("", identity)


@dataclass(frozen=True)
class HeldLock:
    """A lock that a run has taken, as seen by each process of the run."""

    files: Folder  # `owner` in the folder that is locked
    name: str
    content: bytes

    def check(self) -> None:
        """Check that this run still holds the lock.  Call it before any change in the folder.

        Raises: OwnerError: another owner has taken the lock.
        """
        # The owner may create its file again between the first two looks.
        if not (self.is_there() or not (names := _lock_files(self.files)) or self.is_there()):
            by = _newest(self.files, names)[1]
            raise OwnerError(f"this run has lost {self.files.parent} to {by}; it ends without writing anything more")

    def is_there(self) -> bool:
        """Whether the lock file exists.  Raises: OSError: the storage does not answer."""
        return self.files.read_if_there(self.name) == self.content


class DirectoryLock:
    """Takes and holds the lock of a folder for this process' run.

    Args:
        launchers: hashes of the identities of the elastic launchers of all ranks.  An earlier run that one of them
            started has ended.
    """

    def __init__(self, folder: Folder, launchers: Iterable[str] = ()) -> None:
        self.folder, self._files = folder, folder.child("owner")
        self.held: HeldLock | None = None  # set once the lock is taken
        self.taken_from: Owner | None = None  # the previous owner, if it ended without releasing the folder
        since, pid = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), os.getpid()
        identity, run = process_identity(pid), uuid.uuid4().hex[:12]
        self._owner = Owner(run, socket.gethostname(), pid, identity, since, sorted(launchers))
        # For each lock file of an owner on another host, how often each of its heartbeats was seen.
        self._looks: defaultdict[str, Counter[bytes]] = defaultdict(Counter)

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
            if self._create(HeldLock(self._files, f"{number:08d}.json", to_json(asdict(self._owner)))):
                return None

    def _create(self, lock: HeldLock) -> bool:
        """Create a lock file and remove older ones.  Return whether it is the newest, which this process then holds."""
        self._files.make()
        if not self._files.create_new(lock.name, lock.content):
            if not _lock_files(self._files):
                raise FileNotFoundError(errno.ENOENT, "a new file is not there", f"{self._files}/{lock.name}")
            return False  # another process created it first, or a later owner has removed it
        if _lock_files(self._files)[-1:] != [lock.name]:
            self._files.remove(lock.name)  # several owners have taken the lock since this process looked
            return False
        own = filter(_OWN_FILE.fullmatch, self._files.files())
        self._files.remove(*(name for name in own if name[:8] < lock.name[:8]))
        self.held = lock
        return True

    def _owner_among(self, names: Sequence[str]) -> Owner | None:
        """Return the owner by some lock files, unless it has ended.  Raises: OwnerError: it is known to be running."""
        if not names:
            return None
        name, owner = _newest(self._files, names)
        heartbeat = self._files.read_if_there(f"{name[:8]}.beat")
        self.taken_from = owner if owner.pid and heartbeat != _RELEASED else None
        ended = heartbeat == _RELEASED or has_ended(owner.process)
        if ended is None and set(owner.launchers) & set(self._owner.launchers):
            ended = True  # this is a restart by the same launcher, which has ended the earlier ranks
        if ended is None:
            self._looks[name][heartbeat] += 1
            is_running = len(self._looks[name]) > 1
            ended = False if is_running else self._looks[name][heartbeat] > GONE_LOOKS or None
        if ended is False:
            raise OwnerError(
                f"{self.folder} belongs to a run that is still running: {owner}. Nothing was changed. Stop that run "
                "first, or give this one directories of its own (training.run_dir, checkpoint.directory)"
            )
        return None if ended else owner

    def heartbeat(self) -> bool:
        """Show that the owner is running.  Return False if its lock file had to be created again.

        Raises: OwnerError: another run has taken the lock.  OSError: the storage fails.
        """
        assert self.held is not None
        if not (was_there := self.held.is_there()):
            self.held.check()
            if not self._create(self.held):
                self.held.check()
        self._files.write(f"{self.held.name[:8]}.beat", f"{uuid.uuid4().hex}\n".encode())
        return was_there

    def release(self) -> None:
        """Let the next run take the folder at once.  Never raises."""
        with suppress(OSError):
            if self.held is not None and self.held.is_there():
                self._files.write(f"{self.held.name[:8]}.beat", _RELEASED)


def checkpoints_of(config: RunConfig) -> Folder:
    """Return the folder of a run's checkpoints.  Raises: ValueError for a URL that cannot be used."""
    return folder_at(config.checkpoint.directory or Path(config.training.run_dir) / "checkpoints")


class Ownership:
    """A context in which the run owns its run_dir and the directory of its checkpoints.  On every rank.

    Rank 0 takes a lock on both, keeps their heartbeats going in a thread, and releases them at the end.  Every rank
    looks for the lock file before it writes a checkpoint.  Between two saves only the thread talks to the storage: a
    step does not wait for a storage that does not answer.

    Args:
        log: prints a line on the terminal of rank 0.
        wants_stop: asked while the run waits to see whether another owner still runs.

    Attributes:
        root: the directory of the checkpoints; whatever the run writes there goes through it.

    Raises (when it is entered, on every rank):
        OwnerError: another run owns one of the directories.
        CheckpointError: the ranks do not share the directory of the checkpoints, or it cannot be written.
    """

    root: Folder

    def __init__(self, config: RunConfig, state: ParallelState, log: Log, wants_stop: Callable[[], bool]) -> None:
        self._config, self._state, self._log, self._wants_stop = config, state, log, wants_stop
        self._locks: list[DirectoryLock] = []  # on rank 0; the last one is that of `root`
        self._error: OwnerError | None = None
        self._thread = threading.Thread(target=self._send_heartbeats, name="lock", daemon=True)
        self._over = threading.Event()
        # When the last look at the locks began, and the look after which `check` has already waited once for a newer one.
        self._looked, self._waited = _now(), 0.0

    def __enter__(self) -> Self:
        try:
            self._take()
        except BaseException:
            self.__exit__()
            raise
        if self._locks:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_SECONDS)
        for lock in self._locks:
            lock.release()

    def check(self) -> None:
        """End a run that has lost a directory; called after each step.  Raises: OwnerError, on rank 0."""
        if self._locks and self._is_old() and self._looked != self._waited:
            # the process may have been frozen until now; or a request hangs: then wait once
            self._waited = self._looked
            _within(2 * _ANSWER_SECONDS, lambda: self._error is not None or not self._is_old())
        if self._error is not None:
            raise self._error

    def _is_old(self) -> bool:
        """Whether another run may have taken a lock since this one last looked."""
        return _now() - self._looked > GONE_SECONDS

    def _take(self) -> None:
        """Take the locks, and make sure that all ranks see that of `root`."""
        world, run_dir = self._state.world, self._config.training.run_dir
        own, root = agree(lambda: (folder_at(run_dir), checkpoints_of(self._config)), world, CheckpointError)
        launcher = process_identity(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else ""
        launchers = {*gather_objects(launcher and xxhash.xxh3_64_hexdigest(launcher.encode()), world)} - {""}
        if self._state.rank == 0:
            paths = [str(at.path.resolve() if isinstance(at, LocalFolder) else at) for at in (own, root)]
            self._locks = [DirectoryLock(at, launchers) for at in dict(zip(paths, (own, root), strict=True)).values()]
        has_said = False
        while waits_for := on_first(self._try_to_take, world, CheckpointError):
            if not has_said:
                self._log(f"{waits_for}; waiting about {GONE_SECONDS:.0f} s to see whether it still runs")
            has_said = True
            if any(gather_objects(self._wants_stop(), world)):
                raise OwnerError(f"{waits_for}; this run was asked to stop before it knew whether that one still runs")
            time.sleep(LOOK_SECONDS)
        held = on_first(lambda: self._locks[-1].held, world, CheckpointError)
        assert held is not None
        lock = replace(held, files=root.child("owner"))
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
                    self._log(f"{lock.folder} belonged to {lock.taken_from}, which has ended; taken over")
        except OSError as error:
            hint = "its disk or bucket must exist, be writable and have space; or set other directories in the run file"
            raise CheckpointError(f"{lock.folder} cannot be written ({error}); {hint}") from error
        return ""

    def _send_heartbeats(self) -> None:
        """Send heartbeats until the run ends, the next at once after the process was frozen.  The thread's target."""
        while self._error is None and not self._over.wait(min(1.0, HEARTBEAT_SECONDS)):
            if (began := _now()) - self._looked >= HEARTBEAT_SECONDS:
                for lock in self._locks:
                    with suppress(Exception):  # the storage does not answer: whatever is written there looks again
                        self._heartbeat(lock)
                self._looked = began

    def _heartbeat(self, lock: DirectoryLock) -> None:
        try:
            if not lock.heartbeat():
                self._log(f"{lock.folder}: the lock file of this run had been removed or moved away; made again")
        except OwnerError as error:
            self._error = error


def _now() -> float:
    """Return the time in seconds of a clock that continues while the machine is suspended, if the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _check_shared(lock: HeldLock, state: ParallelState) -> None:
    """Make sure that every rank sees the lock file of rank 0.  Raises: CheckpointError naming those that do not."""
    seen = gather_objects((_within(_ANSWER_SECONDS, lock.is_there), socket.gethostname()), state.world)
    if blind := [f"rank {rank} on {host}" for rank, (sees, host) in enumerate(seen) if not sees]:
        raise CheckpointError(
            f"{listed(blind)} cannot see what rank 0 on {seen[0][1]} writes in {lock.files.parent}: checkpoints need a "
            "directory that all ranks share. Set checkpoint.directory to a shared file system, or to a URL such as s3://bucket/run"
        )


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds, at most so long.  Return whether it does; False if only the storage failed."""
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if condition():
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)


def _lock_files(files: Folder) -> list[str]:
    return [name for name in files.files() if _LOCK_FILE.fullmatch(name)]


def _newest(files: Folder, names: Sequence[str]) -> tuple[str, Owner]:
    """Return the newest of some lock files, and its owner.  A file that cannot be parsed does not hide an older one."""
    found = [(name, _owner_in(files, name)) for name in reversed(names)]
    return next((entry for entry in found if entry[1].pid), found[0])


def _owner_in(files: Folder, name: str) -> Owner:
    with suppress(ValueError, TypeError):
        owner = Owner(**parse_json(files.read_if_there(name)))
        # a TypeError if one of these is no text
        return replace(owner, process="" + owner.process, launchers=sorted({*owner.launchers}))
    return Owner(f"an unknown run, whose lock file {files}/{name} cannot be parsed")
