"""One owner for each directory that a run writes: a lease that is claimed, renewed, taken over and lost.

    owner/00000007.json     the claim of the owner: run, process, host, since when; written once, never replaced
    owner/00000007.beat     a count that the owner raises while it runs; "released" when it has ended
    owner/00000007.by       identities of the elastic launchers that have started the run; one of each node, so not in the
                            claim, which every writer reads again and again

To claim is to create the file of the next number, which only one process can do.  The new owner then removes the claim of
the old one.  A run owns the directory until another claim has replaced its own, so every process of a run can look, before
it writes anything, whether the run still owns it (`Fence`).  Where there is no claim at all, someone has removed it: the
owner claims the directory again.

A claim is taken over if its owner has ended.  On this host its process is gone.  Elsewhere, it was started by the same
elastic launcher, which has stopped it; or its count stands still for `GONE_SECONDS`, looked at once a second: of a time in
which the storage did not answer a look only one second counts, as the owner could not write either.  No two clocks are
compared.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megazero.checkpoint.folder import Folder
from megazero.checkpoint.index import OwnerError, to_json
from megazero.data.sealed import parse_json

RENEW_SECONDS = 10.0  # between two renewals
GONE_SECONDS = 60.0  # an owner that has not renewed its lease for so long has ended
LOOK_SECONDS = 1.0  # between two looks at the lease of an owner elsewhere
_OWNER, _RELEASED = "owner", b"released\n"
_CLAIM = re.compile(r"\d{8}\.json")


@dataclass(frozen=True)
class Claim:
    """Who owns a directory."""

    run: str
    host: str
    pid: int
    process: str  # see `identity_of`
    since: str  # a date, for people

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since} (run {self.run})"


def identity_of(pid: int) -> str:
    """Boot of the host, PID namespace, PID and start time: no other process ever has the same.  "" where unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{_kernel()} {pid} {'ended' if fields[0] in 'ZX' else fields[19]}"
    except OSError:
        return ""


def _kernel() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")


def is_gone(identity: str) -> bool | None:
    """Whether a process of this host has ended; None for one that cannot be seen from here."""
    try:
        kernel, pid, _ = identity.rsplit(" ", 2)
        if kernel != _kernel():
            return None
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is another user's
        pass
    except (OSError, ValueError):
        return None
    return identity_of(int(pid)) not in ("", identity)


@dataclass(frozen=True)
class Fence:
    """Raises OwnerError where the run does not own a folder any more.  Called before anything in it changes."""

    folder: Folder
    name: str  # of the run's claim, in `owner`
    claim: bytes

    def __call__(self) -> None:
        if not self.holds():
            files = self.folder.child(_OWNER)
            newest = _newest(files, _claims(files))
            by = "" if newest is None else f" to {_parsed(newest[1]) or newest[0]}"
            raise OwnerError(f"this run has lost {self.folder}{by}; it ends without writing anything more")

    def holds(self) -> bool:
        """Whether no other claim has replaced the run's own.  Raises: OSError, the storage does not say."""
        # asked again: the owner may have made its claim anew since
        return self.is_there() or not _claims(self.folder.child(_OWNER)) or self.is_there()

    def is_there(self) -> bool:
        """Whether the claim can be seen.  Raises: OSError, the storage does not say."""
        return _read(self.folder.child(_OWNER), self.name) == self.claim


class Lease:
    """The right of this process's run to write into a folder.

    Args:
        launchers: identities of the elastic launchers of all ranks; a run that one of them had started before has ended.
        clock: in seconds.
    """

    def __init__(
        self, folder: Folder, launchers: Collection[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self._files, self._clock = folder, folder.child(_OWNER), clock
        since, pid = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), os.getpid()
        self._claim = Claim(uuid.uuid4().hex[:12], socket.gethostname(), pid, identity_of(pid), since)
        self._launchers = set(launchers)
        # a claim, its count, for how many seconds that has stood still, and when it was looked at
        self._watched: tuple[str, bytes, float, float] | None = None
        self._beats = 0
        self.fence: Fence | None = None  # once it is taken
        self.taken_from: Claim | None = None  # the owner before, if it has ended without releasing the folder

    def try_to_take(self) -> Claim | None:
        """Take the lease, once.

        Returns: None if this run owns the folder now; else its owner, of which is not known yet whether it still runs: ask
        again in a second.

        Raises: OwnerError: its owner runs.
        """
        while True:
            claims = _claims(self._files)
            newest = _newest(self._files, claims)
            if newest is not None and not self._has_ended(*newest):
                return _parsed(newest[1]) or Claim("unknown", "an unknown host", 0, "", "an unknown time")
            number = 1 + max(map(_number, claims), default=0)
            fence = Fence(self.folder, f"{number:08d}.json", to_json(asdict(self._claim)))
            if self._create(fence):
                self.fence = fence
                return None

    def _create(self, fence: Fence) -> bool:
        """Create a claim and remove the older ones; whether it is the newest."""
        self._files.make()
        try:
            if not self._files.create_new(fence.name, fence.claim):
                return False  # another one was faster
        except FileNotFoundError:
            if not _claims(self._files):
                raise  # there is no such bucket; otherwise a later owner has removed the claim again
        claims = _claims(self._files)
        if claims[-1:] != [fence.name]:
            self._files.remove(fence.name)  # several have come and gone since this one looked
            return False
        if self._launchers:
            self._files.write(_launchers_of(fence.name), to_json(sorted(self._launchers)))
        self._files.remove(*(old for one in claims[:-1] for old in (one, _beat_of(one), _launchers_of(one))))
        return True

    def _has_ended(self, name: str, data: bytes) -> bool:
        """Raises: OwnerError: the owner runs."""
        claim, beat = _parsed(data), _read(self._files, _beat_of(name))
        self.taken_from = None if beat == _RELEASED else claim
        if beat == _RELEASED:
            return True
        gone = None if claim is None else is_gone(claim.process)
        if gone is None and self._launchers and self._launchers & _launchers(self._files, name):
            gone = True
        if gone is None:
            now = self._clock()
            if self._watched is None or self._watched[0] != name:
                self._watched = name, beat, 0.0, now
            _, before, still, looked = self._watched
            still += min(now - looked, LOOK_SECONDS)
            self._watched = name, before, still, now
            if before != beat:
                gone = False
            elif still >= GONE_SECONDS:
                gone = True
        if gone is False:
            raise OwnerError(
                f"{self.folder} belongs to a run that is still running: {claim or name}. Nothing was changed. Stop that run "
                "first, or give this one directories of its own (training.run_dir, checkpoint.directory)"
            )
        return bool(gone)

    def renew(self) -> bool:
        """Show that the owner runs; whether its claim was still there, else it was made again.

        Raises: OwnerError, it has lost the lease; OSError.
        """
        assert self.fence is not None
        if not (was_there := self.fence.is_there()):
            self.fence()
            if not self._create(self.fence):
                self.fence()
        self._beats += 1
        self._files.write(_beat_of(self.fence.name), f"{self._beats}\n".encode())
        return was_there

    def release(self) -> None:
        """Let the next run take the folder at once; never raises."""
        with suppress(OSError):
            if self.fence is not None and self.fence.is_there():
                self._files.write(_beat_of(self.fence.name), _RELEASED)


def _claims(files: Folder) -> list[str]:
    return [name for name in files.files() if _CLAIM.fullmatch(name)]


def _newest(files: Folder, names: Sequence[str]) -> tuple[str, bytes] | None:
    """The newest claim, and what it says.  One that cannot be understood does not hide another one."""
    claims = [(name, _read(files, name)) for name in reversed(names)]
    return next((one for one in claims if _parsed(one[1])), claims[0] if claims else None)


def _number(name: str) -> int:
    return int(name.removesuffix(".json"))


def _beat_of(name: str) -> str:
    return name.removesuffix(".json") + ".beat"


def _launchers_of(name: str) -> str:
    return name.removesuffix(".json") + ".by"


def _launchers(files: Folder, name: str) -> set[str]:
    with suppress(ValueError, TypeError):  # there is none, or it is of another version
        return set(parse_json(_read(files, _launchers_of(name))))
    return set()


def _read(files: Folder, name: str) -> bytes:
    try:
        return files.read(name)
    except FileNotFoundError:
        return b""


def _parsed(data: bytes) -> Claim | None:
    try:
        return Claim(**parse_json(data))
    except (ValueError, TypeError):  # half written, or of another version
        return None
