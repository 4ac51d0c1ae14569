"""A directory has one owner: who takes it, who is refused, and who learns that it has lost it."""

from __future__ import annotations

import errno
import os
import signal
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import run_world

from megazero.checkpoint import lock as locks
from megazero.checkpoint.folder import Folder, LocalFolder, folder_at
from megazero.checkpoint.index import OwnerError
from megazero.checkpoint.lock import GONE_LOOKS, DirectoryLock, has_ended, process_identity

ELSEWHERE = "a-boot pid:[1] 4711 1000"  # the identity of a process on another host


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return folder_at(tmp_path / "run" if request.param == "disk" else f"memory://{uuid.uuid4().hex}/run")


def _elsewhere(folder: Folder, monkeypatch: pytest.MonkeyPatch, launchers: tuple[str, ...] = ()) -> DirectoryLock:
    """A lock that a process on another host has taken."""
    with monkeypatch.context() as there:
        there.setattr(locks, "process_identity", lambda _: ELSEWHERE)
        there.setattr(socket, "gethostname", lambda: "node-3")
        owner = DirectoryLock(folder, launchers)
        assert owner.try_to_take() is None
    return owner


def _fail(error: OSError) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("has_prior", [False, True])
@pytest.mark.parametrize("look", range(1, 4))
def test_of_two_that_look_one_after_the_other_one_takes_it(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, has_prior: bool, look: int
) -> None:
    """The first takes the lock at any of the second's looks at the directory."""
    if has_prior:
        prior = DirectoryLock(folder)
        assert prior.try_to_take() is None
        prior.release()
    first, second, looks, kind = DirectoryLock(folder), DirectoryLock(folder), [0], type(folder)
    real = kind.files

    def files(self: Folder) -> list[str]:
        found = real(self)
        looks[0] += 1
        if looks[0] == look:
            with monkeypatch.context() as inner:
                inner.setattr(kind, "files", real)
                with suppress(OwnerError):
                    first.try_to_take()
        return found

    monkeypatch.setattr(kind, "files", files)
    with suppress(OwnerError):
        second.try_to_take()
    assert (first.held is None) != (second.held is None)
    for lock in (first, second):
        if lock.held is not None:
            lock.held.check()


def test_files_that_no_lock_has_written_stay(tmp_path: Path) -> None:
    names = ["00000001_notes.txt", "00000000", "00000001.json.bak", "0"]
    (tmp_path / "owner").mkdir()
    for name in names:
        (tmp_path / "owner" / name).touch()
    for _ in range(2):
        lock = DirectoryLock(LocalFolder(tmp_path))
        assert lock.try_to_take() is None
        lock.release()
    assert {path.name for path in (tmp_path / "owner").iterdir()} >= set(names)


def test_no_process_has_the_process_identity_another() -> None:
    mine = process_identity(os.getpid())
    assert has_ended(mine) is False
    kernel, _, started = mine.rsplit(" ", 2)
    child = os.fork()
    if not child:
        signal.pause()
    theirs = process_identity(child)
    assert has_ended(theirs) is False
    assert has_ended(f"{kernel} {child} {int(started) - 1}") is True  # the PID of a process that has ended, used again
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert has_ended(theirs) is True  # a zombie writes nothing
    os.waitpid(child, 0)
    assert has_ended(theirs) is True
    assert has_ended(ELSEWHERE) is None
    assert has_ended("") is None


def test_an_owner_that_was_killed_on_this_host_is_replaced_at_once(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        DirectoryLock(LocalFolder(tmp_path)).try_to_take()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    second = DirectoryLock(LocalFolder(tmp_path))
    assert second.try_to_take() is None
    assert second.taken_from is not None
    assert second.taken_from.pid == child


def test_an_owner_elsewhere_is_replaced_when_its_heartbeat_stands_still(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks are counted: a time in which the storage answers nobody does not end an owner."""
    first, second = _elsewhere(folder, monkeypatch), DirectoryLock(folder)
    for _ in range(GONE_LOOKS):
        owner = second.try_to_take()
        assert owner is not None
        assert (owner.host, owner.pid) == ("node-3", os.getpid())
    assert second.try_to_take() is None
    with pytest.raises(
        OwnerError, match=f"this run has lost .* to process {os.getpid()} on {socket.gethostname()}, since"
    ):
        first.heartbeat()
    assert second.held is not None
    second.held.check()
    first.release()  # and does not disturb
    second.held.check()


def test_an_owner_elsewhere_with_a_heartbeat_keeps_the_lock(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _elsewhere(folder, monkeypatch), DirectoryLock(folder)
    first.heartbeat()
    assert second.try_to_take() is not None
    first.heartbeat()
    with pytest.raises(OwnerError, match="on node-3, since"):
        second.try_to_take()


def test_a_restart_by_the_same_elastic_launcher_takes_over_at_once(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _elsewhere(folder, monkeypatch, ("agent 1", "agent 2"))
    assert DirectoryLock(folder).try_to_take() is not None  # without a launcher
    assert DirectoryLock(folder, ("agent 3",)).try_to_take() is not None  # another job
    assert DirectoryLock(folder, ("agent 2", "agent 3")).try_to_take() is None
    assert folder.child("owner").files() == ["00000002.json"]
    with pytest.raises(OwnerError, match="this run has lost"):
        first.heartbeat()


BROKEN = [b'{"run": ', b'{"launchers": null}', b'{"launchers": [{}]}', b'{"run": "r", "pid": 1, "process": 4}', b"[]"]


@pytest.mark.parametrize("content", BROKEN)
def test_a_lock_file_that_cannot_be_read_is_watched_like_one_elsewhere(tmp_path: Path, content: bytes) -> None:
    files = LocalFolder(tmp_path / "owner")
    files.make()
    files.write("00000003.json", content)
    second = DirectoryLock(LocalFolder(tmp_path))
    while (owner := second.try_to_take()) is not None:
        assert f"lock file {files}/00000003.json cannot be parsed" in str(owner)
    assert files.files() == ["00000004.json"]


@pytest.mark.parametrize("lives", [True, False])
def test_a_lock_file_that_cannot_be_read_does_not_hide_its_elder(tmp_path: Path, lives: bool) -> None:
    """A start on a full disk has left one that is empty."""
    folder = LocalFolder(tmp_path)
    first = DirectoryLock(folder)
    assert first.try_to_take() is None
    (tmp_path / "owner" / "00000002.json").touch()
    first.heartbeat()
    if lives:
        with pytest.raises(OwnerError, match=f"still running: process {os.getpid()}"):
            DirectoryLock(folder).try_to_take()
        first.heartbeat()
        return
    first.release()
    assert DirectoryLock(folder).try_to_take() is None
    assert folder.child("owner").files() == ["00000003.json"]


def test_a_start_on_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LocalFolder(tmp_path)
    first = DirectoryLock(folder)
    assert first.try_to_take() is None
    first.release()
    before = folder.child("owner").files()
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _fail(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            DirectoryLock(folder).try_to_take()
    assert folder.child("owner").files() == before
    assert DirectoryLock(folder).try_to_take() is None


def test_a_start_ends_where_what_it_creates_is_not_there(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that cleans up, or a store that accepts a file and does not show it."""
    monkeypatch.setattr(type(folder), "create_new", lambda *_: False)
    with pytest.raises(FileNotFoundError, match=r"00000001\.json"):
        DirectoryLock(folder).try_to_take()


def test_an_owner_whose_lock_file_was_removed_creates_it_again(folder: Folder) -> None:
    """As by `rm -r owner`, or by moving the directory."""
    first = DirectoryLock(folder)
    assert first.try_to_take() is None
    assert first.heartbeat()
    assert first.held is not None
    files = folder.child("owner")
    files.remove(*files.files())
    files.remove_empty()
    first.held.check()
    assert not first.held.is_there()
    assert not first.heartbeat()
    assert first.held.is_there()
    assert first.heartbeat()
    with pytest.raises(OwnerError, match="still running"):
        DirectoryLock(folder).try_to_take()


def test_an_owner_whose_lock_file_was_removed_has_lost_to_one_that_came_since(folder: Folder) -> None:
    for _ in range(2):
        first = DirectoryLock(folder)
        assert first.try_to_take() is None
        first.release()
    files = folder.child("owner")
    files.remove(*files.files())
    second = DirectoryLock(folder)
    assert second.try_to_take() is None
    with pytest.raises(OwnerError, match="this run has lost"):
        first.heartbeat()
    assert second.heartbeat()
    assert files.files() == ["00000001.beat", "00000001.json"]


def test_of_an_owner_that_creates_its_file_again_and_one_that_comes_one_owns_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes between the look of the owner and its new file."""
    folder = LocalFolder(tmp_path)
    for _ in range(2):
        first, second = DirectoryLock(folder), DirectoryLock(folder)
        assert first.try_to_take() is None
        first.release()
    files, create = folder.child("owner"), LocalFolder.create_new
    files.remove(*files.files())

    def create_late(files: LocalFolder, name: str, data: bytes) -> bool:
        monkeypatch.undo()
        assert second.try_to_take() is None
        return create(files, name, data)

    monkeypatch.setattr(LocalFolder, "create_new", create_late)
    assert not first.heartbeat()
    assert first.heartbeat()
    with pytest.raises(OwnerError, match="this run has lost"):
        second.heartbeat()


def test_one_that_looked_long_ago_does_not_replace_a_later_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look and its lock file two others have owned the folder: the number that it takes is free again."""
    folder, later = LocalFolder(tmp_path), []
    released = DirectoryLock(folder)
    released.try_to_take()
    released.release()
    create = LocalFolder.create_new

    def create_late(files: LocalFolder, name: str, data: bytes) -> bool:
        monkeypatch.undo()
        for _ in range(2):
            later.append(DirectoryLock(folder))
            assert later[-1].try_to_take() is None
            if len(later) == 1:
                later[-1].release()
        return create(files, name, data)

    monkeypatch.setattr(LocalFolder, "create_new", create_late)
    with pytest.raises(OwnerError):
        DirectoryLock(folder).try_to_take()
    later[1].held.check()
    assert folder.child("owner").files() == ["00000003.json"]


def _race(_: int, folder: LocalFolder) -> bool:
    mine = DirectoryLock(folder)
    try:
        return mine.try_to_take() is None
    except OwnerError:
        return False
    finally:
        dist.barrier()  # no one ends before all have tried


@pytest.mark.parametrize("before", ["nobody", "released", "killed"])
def test_of_many_that_start_at_once_one_owns_it(tmp_path: Path, before: str) -> None:
    folder = LocalFolder(tmp_path)

    def own(_: int) -> None:
        first = DirectoryLock(folder)
        first.try_to_take()
        if before == "released":
            first.release()

    if before != "nobody":
        run_world(1, own)
    assert sorted(run_world(8, _race, folder)) == [False] * 7 + [True]
