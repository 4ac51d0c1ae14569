"""Law 2 and 5: whoever writes a run's directories owns them, and proves it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import metrics_of, run_command, run_world
from quickstart import ONE_STAGE, QUICKSTART, TINY
from worlds import loop_of, state_on

from megazero.checkpoint import lock as locks
from megazero.checkpoint.folder import LocalFolder, Output
from megazero.checkpoint.index import CheckpointError, OwnerError, find_damage
from megazero.checkpoint.lock import GONE_LOOKS, GONE_SECONDS, DirectoryLock
from megazero.comm.messages import LostPeerError
from megazero.config import ResolvedRun
from megazero.data.writer import IndexedWriter
from megazero.training.trainer import train

ELSEWHERE = "a-boot pid:[1] 4711 1000"  # the identity of a process on another host


def _run_in(folder: Path, world: int) -> ResolvedRun:
    return loop_of(
        folder / "run",
        world,
        data={"sources": [str(folder / "corpus")]},
        logging={"every_steps": 1},
        checkpoint={"save_every_steps": 2, "asynchronous": False},
        training={"steps": 6},
    )


def _write_data(folder: Path) -> None:
    with IndexedWriter(folder / "corpus", np.uint16) as writer:
        writer.add_documents(np.random.default_rng(5).integers(0, 257, 4000, np.uint16), [4000])


def _files(folder: Path) -> dict[str, bytes]:
    """What lies below a folder, but for locks and for files that are not finished."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".partial")
    return {str(path): path.read_bytes() for path in found if path.parent.name != "owner"}


def _losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics_of(run_dir)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_is_started_twice_is_one_run(tmp_path: Path, ranks: int) -> None:
    """As from two terminals; here the second start has another seed, which would show."""

    def start(seed: int, run_dir: Path) -> Any:
        words = [*TINY, *ONE_STAGE, f"launch.nproc_per_node={ranks}", f"training.seed={seed}", "training.steps=40"]
        words += [f"training.run_dir={run_dir}", "checkpoint.save_every_steps=5", "checkpoint.keep_last=2"]
        return run_command("train", QUICKSTART, *words)

    with ThreadPoolExecutor() as pool:
        both = list(pool.map(start, (1, 2), [tmp_path / "run"] * 2))
    assert sorted(done.returncode for done in both) == [0, 2], [done.stderr for done in both]
    winner = [done.returncode for done in both].index(0)
    said = both[1 - winner].stderr
    assert "belongs to a run that is still running: process " in said
    assert f"on {socket.gethostname()}, since 20" in said
    assert "the same command" not in said
    assert start(winner + 1, tmp_path / "alone").returncode == 0
    assert _losses(tmp_path / "run") == _losses(tmp_path / "alone")
    for step in (35, 40):
        directories = [tmp_path / name / "checkpoints" / f"step-{step:08d}" for name in ("run", "alone")]
        assert find_damage(directories[0]) == []
        weights = [{path.name: path.read_bytes() for path in one.glob("*.safetensors")} for one in directories]
        assert weights[0] == weights[1]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    run = _run_in(tmp_path, 1)
    with pytest.raises(CheckpointError, match=rf"{tmp_path / 'run'} cannot be written .*Not a directory|File exists"):
        locks.Ownership(run.config, state_on(0, run), print, lambda: False).__enter__()


def _take_over(folder: Path) -> None:
    """As a process on another host, which has seen no heartbeat for a minute."""
    owner = folder / "owner" / "00000001.json"
    lock_file = owner.read_bytes()
    owner.write_bytes(lock_file.replace(json.loads(lock_file)["process"].encode(), ELSEWHERE.encode()))
    other = DirectoryLock(LocalFolder(folder))
    for _ in range(GONE_LOOKS):
        assert other.try_to_take() is not None
    assert other.try_to_take() is None


def _train_until_lost(
    rank: int, run: ResolvedRun, watch: Callable[[Callable[[], None]], Callable[[str], None]], where: str
) -> tuple[str, str, dict[str, bytes], dict[str, bytes]]:
    """Train; when `watch` says so, another run takes over.  The error, and the files then and at the end."""
    folder = Path(run.config.training.run_dir)
    then: list[dict[str, bytes]] = []

    def take_over() -> None:
        if rank == 0:
            _take_over(folder / where)
            then.append(_files(folder))
            # No step goes on before the lock was looked at, which is now done all the time.
            locks.GONE_SECONDS, locks.HEARTBEAT_SECONDS = -1.0, 0.0

    try:
        train(run, state_on(rank, run), watch(take_over))
    except (OwnerError, LostPeerError) as error:
        return type(error).__name__, str(error), then[0] if then else {}, _files(folder)
    return "went on", "", {}, {}


def _after_step_3(take_over: Callable[[], None]) -> Callable[[str], None]:
    return lambda line: take_over() if line.startswith("step 3/") else None


def _while_saving_step_4(take_over: Callable[[], None]) -> Callable[[str], None]:
    create = LocalFolder.create

    def create_late(folder: LocalFolder, name: str) -> Output:
        if folder.name == "step-00000004" and name.startswith("exp_avg-"):
            take_over()
        return create(folder, name)

    LocalFolder.create = create_late  # type: ignore[method-assign]
    return lambda _: None


@pytest.mark.parametrize("where", ["", "checkpoints"], ids=["run_dir", "checkpoints"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_has_lost_a_directory_ends_before_it_writes_anything(tmp_path: Path, world: int, where: str) -> None:
    _write_data(tmp_path)
    results = run_world(world, _train_until_lost, _run_in(tmp_path, world), _after_step_3, where)
    kind, text, then, end = results[0]
    assert kind == "OwnerError"
    assert f"this run has lost {tmp_path / 'run' / where}" in text
    assert f"on {socket.gethostname()}, since 20" in text
    assert then == end
    assert all("lost" in text for _, text, *_ in results)


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_loses_its_checkpoints_while_it_saves_publishes_nothing_more(tmp_path: Path, world: int) -> None:
    _write_data(tmp_path)
    results = run_world(world, _train_until_lost, _run_in(tmp_path, world), _while_saving_step_4, "checkpoints")
    assert [kind for kind, *_ in results] == ["OwnerError"] * world
    _, _, then, end = results[0]
    assert then == end
    assert str(tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json") in end
    assert str(tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json") not in end


def _ownership(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: Callable[[str], None] = print,
    wants_stop: Callable[[], bool] = lambda: False,
) -> tuple[locks.Ownership, list[float]]:
    """Of one rank, and its clock."""
    run, now = _run_in(tmp_path, 1), [1000.0]
    monkeypatch.setattr(locks, "_now", lambda: now[0])
    return locks.Ownership(run.config, state_on(0, run), log, wants_stop), now


def test_a_step_does_not_wait_for_a_storage_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.0)
    owner, now = _ownership(tmp_path, monkeypatch)
    read, asked = LocalFolder.read, threading.Semaphore(0)

    def refuse(folder: LocalFolder, name: str) -> bytes:
        assert threading.current_thread() is not threading.main_thread()
        asked.release()
        raise TimeoutError

    with owner:
        monkeypatch.setattr(LocalFolder, "read", refuse)
        monkeypatch.setattr(locks, "_within", lambda *_: pytest.fail("a step waits"))
        for _ in range(5):
            now[0] += 50
            while asked.acquire(blocking=False):  # what the thread asked before
                pass
            for _ in range(5):  # at least one whole turn of the thread
                assert asked.acquire(timeout=30)
            owner.check()
        monkeypatch.setattr(LocalFolder, "read", read)


def test_a_request_that_hangs_costs_one_step_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr(locks, "_ANSWER_SECONDS", 0.01)
    owner, now = _ownership(tmp_path, monkeypatch)
    read, hangs, goes_on = LocalFolder.read, threading.Event(), threading.Event()
    wait, waits = locks._within, []

    def count(seconds: float, condition: Callable[[], bool]) -> bool:
        waits.append(1)
        return wait(seconds, condition)

    def hang(folder: LocalFolder, name: str) -> bytes:
        hangs.set()
        assert goes_on.wait(30)
        return read(folder, name)

    with owner:
        monkeypatch.setattr(locks, "_within", count)
        monkeypatch.setattr(LocalFolder, "read", hang)
        assert hangs.wait(30)
        for _ in range(5):
            now[0] += 100
            owner.check()
        assert waits == [1]
        monkeypatch.setattr(LocalFolder, "read", read)
        goes_on.set()


def test_a_process_that_was_frozen_looks_before_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, now = _ownership(tmp_path, monkeypatch)
    with owner:
        owner.check()
        _take_over(tmp_path / "run" / "checkpoints")
        owner.check()  # nobody has looked yet
        now[0] += GONE_SECONDS + 1
        with pytest.raises(OwnerError, match="this run has lost"):
            owner.check()


def test_a_run_whose_lock_file_was_removed_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    owner, now = _ownership(tmp_path, monkeypatch, log=said.append)
    with owner:
        (tmp_path / "run").rename(tmp_path / "other")
        now[0] += GONE_SECONDS + 1
        owner.check()
        owner.root.write("x", b"")
    assert [line.split(":")[0] for line in said] == [str(tmp_path / "run"), str(tmp_path / "run" / "checkpoints")]


def test_a_start_that_waits_for_an_owner_hears_that_it_is_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wants = iter([False, True])
    monkeypatch.setattr(locks, "LOOK_SECONDS", 0.0)
    first, _ = _ownership(tmp_path, monkeypatch)
    second, _ = _ownership(tmp_path, monkeypatch, wants_stop=lambda: next(wants))
    with first:
        monkeypatch.setattr(locks, "has_ended", lambda _: None)
        with pytest.raises(OwnerError, match="asked to stop"):
            second.__enter__()
        first.check()
