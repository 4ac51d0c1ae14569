"""Law 5 for what lies on a disk: whatever has happened to a checkpoint, it is refused by the file's name, or it is whole."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import run_world
from worlds import LLAMA, LR, engine_on, micro_batches, run_of, state_on

from megazero.checkpoint.folder import FileRecord, LocalFolder, folder_at
from megazero.checkpoint.index import CheckpointError, find_damage, find_newest, read_manifest, write_manifest
from megazero.checkpoint.lock import Ownership, checkpoints_of
from megazero.config import ResolvedRun
from megazero.engine import Engine, Position
from megazero.parallel_state import ParallelState
from megazero.training.callbacks.checkpointing import Checkpointing
from megazero.training.watchdog import Watchdog

CASES = 200


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks have written after two steps, the second of them in step-00000002."""
    root = tmp_path_factory.mktemp("run")

    def write(rank: int) -> None:
        run = run_of(2, model=LLAMA, zero={"stage": 1})
        engine = engine_on(rank, run)
        for step in range(2):
            engine.train_step(micro_batches(run, engine.state, step), LR)
            engine.save(root / f"step-{step + 1:08d}", Position(step + 1), "data")

    run_world(2, write)
    return root


def _flip(path: Path, random_: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    path.write_bytes(bytes(data))


def _cut(path: Path, random_: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: random_.randrange(len(data))])


def _lose(path: Path, random_: random.Random) -> None:
    path.unlink()


def _lengthen(path: Path, random_: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes(random_.randrange(1, 9)))


def _edit(index: dict[str, str], random_: random.Random) -> None:
    """What a hand may do to the map of tensors to files."""
    one, other = random_.sample(sorted(index), 2)
    files = sorted(set(index.values()))
    match random_.randrange(4):
        case 0:
            del index[one]
        case 1:
            index[one] = next(file for file in files if file != index[one])
        case 2:
            index[one + ".copy"] = index[one]
        case _:
            index[other + "_"] = index.pop(other)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """One rank that loads whatever it is given."""
    return engine_on(0, run_of(1, model=LLAMA), init_weights=False)


def _refused(engine: Engine, directory: Path, file: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        engine.load(directory, "data")
    assert file in str(refusal.value)


def test_every_damage_is_refused_by_the_name_of_the_file(engine: Engine, saved: Path, tmp_path: Path) -> None:
    random_ = random.Random(1)
    good = saved / "step-00000002"
    engine.load(good, "data")
    names = sorted(path.name for path in good.iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    for case in range(CASES):
        directory = tmp_path / f"step-{case:08d}"
        shutil.copytree(good, directory)
        kind = case % 5
        if kind < 4:
            name = random_.choice(names)
            (_flip, _cut, _lose, _lengthen)[kind](directory / name, random_)
        else:
            name, other = random_.sample(shards, 2)
            (directory / name).rename(directory / "aside")
            (directory / other).rename(directory / name)
            (directory / "aside").rename(directory / other)
        _refused(engine, directory, name)
        shutil.rmtree(directory)


def _declare(directory: Path) -> None:
    """Write the manifest anew, as of files that were always so."""
    folder = LocalFolder(directory)
    records = {name: FileRecord(folder.size(name) or 0, folder.hash(name)) for name in read_manifest(directory)}
    write_manifest(directory, records)


@pytest.mark.parametrize("declared", [False, True], ids=["by hand", "with a manifest to match"])
def test_an_index_edited_by_hand_is_refused(engine: Engine, saved: Path, tmp_path: Path, declared: bool) -> None:
    random_ = random.Random(2)
    for case in range(12):
        directory = tmp_path / f"step-{case:08d}"
        shutil.copytree(saved / "step-00000002", directory)
        path = directory / f"{('model', 'exp_avg', 'exp_avg_sq')[case % 3]}.safetensors.index.json"
        index = json.loads(path.read_text())
        _edit(index["weight_map"], random_)
        path.write_text(json.dumps(index, indent=2) + "\n")
        if declared:
            _declare(directory)
        with pytest.raises(CheckpointError, match=r"\.safetensors"):
            engine.load(directory, "data")


def test_a_checkpoint_from_before_a_key_of_the_model_loads_with_its_default(
    engine: Engine, saved: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "step-00000002"
    shutil.copytree(saved / "step-00000002", directory)
    path = directory / "trainer_state.json"
    stored = json.loads(path.read_text())
    for key in ("rope_theta", "norm_eps", "tie_embeddings"):
        del stored["model"][key]
    path.write_text(json.dumps(stored))
    _declare(directory)
    assert engine.load(directory, "data").step == 2
    other = engine_on(0, run_of(1, model=LLAMA | {"rope_theta": 500.0}), init_weights=False)
    with pytest.raises(CheckpointError, match=r"model.rope_theta is 500.0, the checkpoint has 10000.0"):
        other.load(directory, "data")


def test_a_checkpoint_of_a_newer_format_is_no_damage(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    manifest = read_manifest(root / "step-00000002")
    with monkeypatch.context() as newer:
        newer.setattr("megazero.checkpoint.index.FORMAT_VERSION", 2)
        write_manifest(root / "step-00000002", manifest)
    run = run_of(1, model=LLAMA, checkpoint={"directory": str(root), "on_damage": "fallback"})
    with pytest.raises(CheckpointError, match="step-00000002 has format 2 and this release reads format 1: a newer"):
        _resume(0, run)
    assert find_newest(root) == folder_at(root / "step-00000002")


def test_files_in_each_others_place_are_refused_where_only_sizes_are_checked(saved: Path, tmp_path: Path) -> None:
    engine = engine_on(0, run_of(1, model=LLAMA, checkpoint={"verify": "size"}), init_weights=False)
    engine.load(saved / "step-00000001", "data")
    moments = ("exp_avg-00001-of-00002.safetensors", "exp_avg_sq-00001-of-00002.safetensors")
    for case, (step, name, other) in enumerate([("2", moments[0], moments[1]), ("1", moments[0], moments[0])]):
        directory = tmp_path / f"step-{case:08d}"
        shutil.copytree(saved / "step-00000002", directory)
        data = (saved / f"step-0000000{step}" / other).read_bytes()
        (directory / name).write_bytes(data)
        manifest = read_manifest(directory)
        write_manifest(directory, manifest | {name: replace(manifest[name], bytes=len(data))})
        _refused(engine, directory, name)


def _checkpointing(run: ResolvedRun, state: ParallelState, log: Callable[[str], None]) -> Checkpointing:
    return Checkpointing(run.config, checkpoints_of(run.config), Watchdog(state, 60, Path()), log)


def _resume(rank: int, run: ResolvedRun) -> tuple[int, str | None, list[str]]:
    lines: list[str] = []
    state = state_on(rank, run)
    checkpoints = _checkpointing(run, state, lines.append)
    assert checkpoints.find()
    engine = engine_on(rank, run, init_weights=False, state=state)
    position = checkpoints.resume(engine, "data")
    checkpoints.save(replace(position, step=2), None)
    checkpoints.on_end(position)
    return position.step, checkpoints.newest, lines


def _damaged_run(saved: Path, root: Path, damage: Callable[[Path, random.Random], None]) -> Path:
    shutil.copytree(saved, root)
    damage(root / "step-00000002" / "exp_avg-00002-of-00002.safetensors", random.Random(3))
    return root


def test_a_run_falls_back_to_the_newest_good_one_where_it_may(saved: Path, tmp_path: Path) -> None:
    root = _damaged_run(saved, tmp_path / "run", _flip)
    wish = {"directory": str(root), "on_damage": "fallback"}
    results = run_world(2, _resume, run_of(2, model=LLAMA, zero={"stage": 2}, checkpoint=wish))
    step, newest, lines = results[0]
    assert [result[0] for result in results] == [1, 1]
    assert step == 1
    assert "exp_avg-00002-of-00002.safetensors has changed since it was written" in lines[0]
    assert "step-00000002 is marked as damaged; going back to step-00000001" in lines[0]
    assert newest == str(root / "step-00000002")  # its step could be saved again
    assert find_newest(root) == folder_at(root / "step-00000002")


def test_a_run_stops_at_damage_unless_told_otherwise(saved: Path, tmp_path: Path) -> None:
    root = _damaged_run(saved, tmp_path / "run", _cut)
    run = run_of(1, model=LLAMA, checkpoint={"directory": str(root)})
    with pytest.raises(CheckpointError, match=r"exp_avg-00002-of-00002\.safetensors has .* bytes"):
        _resume(0, run)
    assert find_newest(root) == folder_at(root / "step-00000002")
    assert (root / "latest").read_text() == "step-00000002\n"
    _lose(root / "step-00000001" / "config.json", random.Random())
    run = run_of(1, model=LLAMA, checkpoint={"directory": str(root), "on_damage": "fallback"})
    for _ in range(2):  # a run never begins anew unasked, nor when the same command is repeated
        with pytest.raises(CheckpointError, match="no older checkpoint is left"):
            _resume(0, run)
    assert (root / "latest").read_text() == "step-00000001\n"


def _apart(rank: int, root: Path) -> str:
    checkpoint, training = {"directory": str(root / ("a" if rank == 0 else "b"))}, {"run_dir": str(root / "run")}
    run = run_of(2, model=LLAMA, checkpoint=checkpoint, training=training)
    with pytest.raises(CheckpointError) as refusal, Ownership(run.config, state_on(rank, run), print, lambda: False):
        pass
    return str(refusal.value)


def test_ranks_that_share_no_disk_are_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megazero.checkpoint.lock._ANSWER_SECONDS", 0.2)
    for text in run_world(2, _apart, tmp_path):
        assert "rank 1 on " in text
        assert "cannot see what rank 0 on " in text
        assert "checkpoints need a directory that all ranks share" in text


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("method", ["hash", "size", "read"])
def test_a_storage_that_does_not_answer_is_no_damage(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, number: int
) -> None:
    """A good checkpoint is not set aside for a moment's silence of a network."""
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    run = run_of(1, model=LLAMA, checkpoint={"directory": str(root), "on_damage": "fallback"})

    original = getattr(LocalFolder, method)

    def silent(folder: LocalFolder, name: str) -> Any:
        if folder.name == "step-00000002" and name != "manifest.json":
            raise OSError(number, os.strerror(number))
        return original(folder, name)

    monkeypatch.setattr(LocalFolder, method, silent)
    with pytest.raises(CheckpointError, match=rf"cannot be read .*{os.strerror(number)}.* Try again"):
        _resume(0, run)
    monkeypatch.undo()
    assert find_newest(root) == folder_at(root / "step-00000002")
    assert find_damage(root / "step-00000002") == []


def test_a_file_in_anothers_place_lets_the_run_fall_back_where_only_sizes_are_checked(
    saved: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    name = "exp_avg-00001-of-00002.safetensors"
    shutil.copy(root / "step-00000001" / name, root / "step-00000002" / name)
    wish = {"directory": str(root), "on_damage": "fallback", "verify": "size"}
    step, _, lines = _resume(0, run_of(1, model=LLAMA, checkpoint=wish))
    assert step == 1
    assert f"{name} is of step 1, but the file of step 2 belongs here" in lines[0]


def _begun_elsewhere(saved: Path, root: Path) -> tuple[ResolvedRun, ParallelState]:
    wish = {"directory": str(root), "resume": str(saved / "step-00000002"), "on_damage": "fallback"}
    run = run_of(1, model=LLAMA, checkpoint=wish)
    return run, state_on(0, run)


def test_a_run_begun_from_a_path_falls_back_among_its_own_steps(saved: Path, tmp_path: Path) -> None:
    run, state = _begun_elsewhere(saved, tmp_path)
    engine = engine_on(0, run, init_weights=False, state=state)
    checkpoints = _checkpointing(run, state, print)
    assert checkpoints.find()
    position = checkpoints.resume(engine, "data")
    for step in (4, 6):
        checkpoints.save(replace(position, step=step), None)
    checkpoints.on_end(position)
    (tmp_path / "step-00000006" / "trainer_state.json").write_text("{")
    lines: list[str] = []
    again = _checkpointing(run, state, lines.append)
    assert again.find()
    assert again.resume(engine, "data").step == 4
    assert "step-00000006 is marked as damaged; going back to step-00000004" in lines[0]
    shutil.copytree(saved / "step-00000001", tmp_path / "step-00000001")  # of another run
    (tmp_path / "step-00000004" / "config.json").unlink()
    last = _checkpointing(run, state, lines.append)
    assert last.find()
    assert last.resume(engine, "data").step == 2
    assert "step-00000004 is marked as damaged; going back to step-00000002" in "\n".join(lines)


def test_going_back_never_loads_what_another_run_left_in_the_directory(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "step-00000001", tmp_path / "step-00000001")
    run, state = _begun_elsewhere(saved, tmp_path)
    engine = engine_on(0, run, init_weights=False, state=state)
    checkpoints = _checkpointing(run, state, print)
    assert checkpoints.find()
    checkpoints.resume(engine, "data")
    back = checkpoints.roll_back(3)
    assert back is not None
    assert back.step == 2
