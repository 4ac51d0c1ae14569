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
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from megazero.checkpoint.folder import Folder
from megazero.checkpoint.index import OwnerError, to_json
from megazero.data.sealed import parse_json

HEARTBEAT_SECONDS = 10.0  # time between two heartbeats
GONE_SECONDS = 60.0  # an owner without a heartbeat for this long has ended
LOOK_SECONDS = 1.0  # time between two looks at the heartbeat of an owner on another host
GONE_LOOKS = int(GONE_SECONDS / LOOK_SECONDS)
_OWNER, _RELEASED = "owner", b"released\n"
_LOCK_FILE = re.compile(r"\d{8}\.json")
_OWN_FILE = re.compile(r"\d{8}\.(json|beat|by)(\.[0-9a-f]{8}\.partial)?")  # `.by` is of earlier releases


@dataclass(frozen=True)
class Owner:
    """Who holds a lock."""

    run: str
    host: str
    pid: int
    process: str  # see `process_identity`
    since: str  # a date, for people
    launchers: Sequence[str] = ()  # hashes of the identities of the elastic launchers of all ranks

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since} (run {self.run})"


_UNKNOWN = Owner("unknown", "an unknown host", 0, "", "an unknown time")


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
        if not (self.is_there() or not _lock_files(self.files) or self.is_there()):
            newest = _newest(self.files, _lock_files(self.files))
            by = "" if newest is None else f" to {_parsed(newest[1]) or newest[0]}"
            raise OwnerError(f"this run has lost {self.folder}{by}; it ends without writing anything more")

    def is_there(self) -> bool:
        """Whether the lock file exists.  Raises: OSError: the storage does not answer."""
        return _read(self.files, self.name) == self.content

    @property
    def files(self) -> Folder:
        """The folder of the lock file."""
        return self.folder.child(_OWNER)


class DirectoryLock:
    """Takes and holds the lock of a folder for this process' run.

    Args:
        launchers: identities of the elastic launchers of all ranks.  An earlier run that one of them started has ended.
    """

    def __init__(self, folder: Folder, launchers: Iterable[str] = ()) -> None:
        self.folder, self._files = folder, folder.child(_OWNER)
        self.held: HeldLock | None = None  # set once the lock is taken
        self.taken_from: Owner | None = None  # the previous owner, if it ended without releasing the folder
        since, pid = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), os.getpid()
        hashes = sorted({xxhash.xxh3_64_hexdigest(launcher.encode()) for launcher in launchers})
        self._owner = Owner(uuid.uuid4().hex[:12], socket.gethostname(), pid, process_identity(pid), since, hashes)
        self._beats = 0
        self._seen: tuple[str, bytes] | None = None  # lock file and heartbeat of an owner on another host
        self._looks = 0  # number of looks that found these unchanged

    def look(self) -> None:
        """Raises: OwnerError: its owner is known to run, on this host."""
        if (newest := _newest(self._files, _lock_files(self._files))) is not None:
            self._has_ended(*newest)

    def try_to_take(self) -> Owner | None:
        """Take the lock if its owner has ended.

        Returns: None if this run now holds the lock.  Otherwise the owner, which may still be running: try again after
        `LOOK_SECONDS`.

        Raises: OwnerError: the owner is running.
        """
        while True:
            # From one listing: an owner that comes after it has the next number, too, and one of the two cannot create it.
            names = _lock_files(self._files)
            newest = _newest(self._files, names)
            if newest is not None and not self._has_ended(*newest):
                return _parsed(newest[1]) or _UNKNOWN
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
        names = _lock_files(self._files)
        if names[-1:] != [lock.name]:
            self._files.remove(lock.name)  # several owners have taken the lock since this process looked
            return False
        own = filter(_OWN_FILE.fullmatch, self._files.files())
        self._files.remove(*(name for name in own if name[:8] < lock.name[:8]))
        return True

    def _has_ended(self, name: str, content: bytes) -> bool:
        """Whether the owner is known to have ended.  Raises: OwnerError: it is known to be running."""
        owner, beat = _parsed(content), _read(self._files, _heartbeat_of(name))
        self.taken_from = None if beat == _RELEASED else owner
        ended = True if beat == _RELEASED else has_ended((owner or _UNKNOWN).process)
        if ended is None:
            if owner is not None and not {*owner.launchers}.isdisjoint(self._owner.launchers):
                return True
            before, self._seen = self._seen, (name, beat)
            ended = False if before and before[0] == name and before[1] != beat else None
            self._looks = self._looks + 1 if before == self._seen else 0
        if ended is False:
            raise OwnerError(
                f"{self.folder} belongs to a run that is still running: {owner or name}. Nothing was changed. Stop that run "
                "first, or give this one directories of its own (training.run_dir, checkpoint.directory)"
            )
        return bool(ended) or self._looks >= GONE_LOOKS

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


def _lock_files(files: Folder) -> list[str]:
    return [name for name in files.files() if _LOCK_FILE.fullmatch(name)]


def _newest(files: Folder, names: Sequence[str]) -> tuple[str, bytes] | None:
    """Return the newest of some lock files, and its content.  A file that cannot be parsed does not hide an older one."""
    found = [(name, _read(files, name)) for name in reversed(names)]
    return next((one for one in found if _parsed(one[1])), found[0] if found else None)


def _heartbeat_of(name: str) -> str:
    return name.removesuffix(".json") + ".beat"


def _read(files: Folder, name: str) -> bytes:
    try:
        return files.read(name)
    except FileNotFoundError:
        return b""


def _parsed(content: bytes) -> Owner | None:
    try:
        return Owner(**parse_json(content))
    except (ValueError, TypeError):  # incomplete, or from another version
        return None
