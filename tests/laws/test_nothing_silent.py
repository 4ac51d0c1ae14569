"""Law 5: nothing is silent.  Each fault ends in one error that says what was found, on every rank, with nothing lost."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from harness import run_world
from worlds import LLAMA, LR, engine_on, micro_batches, run_of

from megazero.checkpoint.folder import folder_at
from megazero.checkpoint.index import (
    MANIFEST,
    CheckpointError,
    TrainerState,
    find_damage,
    find_newest,
    write_unfinished,
)
from megazero.checkpoint.load import open_checkpoint
from megazero.checkpoint.save import save_checkpoint
from megazero.config import ResolvedRun
from megazero.engine import NonFiniteError

TIED = LLAMA | {"tie_embeddings": True}


def _state(run: ResolvedRun, step: int) -> TrainerState:
    return TrainerState(step, step * 8, 0, step, "data", run.config.model.model_dump(), {}, {}, {})


def _save(rank: int, run: ResolvedRun, directory: Path, step: int) -> str:
    engine = engine_on(rank, run)
    try:
        save_checkpoint(directory, engine.sharded_model.sharded_state, engine.state, _state(run, step), {})
    except CheckpointError as error:
        return str(error)
    return ""


def _load(rank: int, run: ResolvedRun, *directories: Path) -> list[tuple[str, bool]]:
    """Of each directory the error, and whether this rank's state is as it was before."""
    engine, found = engine_on(rank, run), []
    buckets = engine.sharded_model.parameters.buckets
    before = [bucket.master.read(0, bucket.master.numel).clone() for bucket in buckets]
    for directory in directories:
        error = ""
        try:
            open_checkpoint(directory, engine.sharded_model.sharded_state, engine.state)
        except CheckpointError as refusal:
            error = str(refusal)
        found.append((error, all(torch.equal(a, b.master.tensor) for a, b in zip(before, buckets, strict=True))))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("law5") / "step-00000001"
    assert run_world(4, _save, run_of(4, model=TIED, parallel={"tp": 2}), directory, 1) == [""] * 4
    return directory


FILES = (
    "model-00001-of-00004.safetensors",
    "exp_avg_sq-00003-of-00004.safetensors",
    "model.safetensors.index.json",
    "trainer_state.json",
)
DAMAGES = {
    "deleted": lambda data: None,
    "truncated": lambda data: data[:-5],
    "changed": lambda data: _flipped(data, 0.5),
}


def _flipped(data: bytes, position: float) -> bytes:
    at = int(position * len(data))
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_damaged_file_is_refused_by_name_on_every_rank(saved: Path, tmp_path: Path) -> None:
    cases = [(file, damage) for file in FILES for damage in DAMAGES.values()]
    cases += [(MANIFEST, lambda data, at=at: _flipped(data, at)) for at in (0.1, 0.3, 0.5, 0.7, 0.9)]
    directories = [tmp_path / str(number) / saved.name for number in range(len(cases))]
    for directory, (file, damage) in zip(directories, cases, strict=True):
        shutil.copytree(saved, directory)
        data = damage((directory / file).read_bytes())
        (directory / file).unlink() if data is None else (directory / file).write_bytes(data)
    for found in run_world(2, _load, run_of(2, model=TIED, parallel={"pp": 2}), *directories):
        for (error, same), (file, _) in zip(found, cases, strict=True):
            assert file in error
            assert same
    assert find_damage(saved) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 1}, "belongs to no parameter"),
        ({"num_layers": 3}, "is missing"),
        ({"ffn_hidden_size": 96}, r"has shape \[64, 32\], this model needs \[96, 32\]"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(saved: Path, change: dict[str, int], says: str) -> None:
    (((error, same),),) = run_world(1, _load, run_of(1, model=TIED | change), saved)
    assert "another model" in error
    assert re.search(says, error)
    assert same


def test_a_directory_without_a_manifest_is_not_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    """What a run that was killed while saving leaves: it is ignored, and can be written again."""
    older, newer = tmp_path / "step-00000001", tmp_path / "step-00000002"
    shutil.copytree(saved, older)
    shutil.copytree(saved, newer)
    names = [path.name for path in newer.iterdir() if path.name != MANIFEST]
    write_unfinished(folder_at(newer), [*names, "model-00009-of-00009.safetensors"])
    (newer / MANIFEST).unlink()
    (newer / "model-00009-of-00009.safetensors.0a1b2c3d.partial").write_bytes(b"half")
    assert find_newest(tmp_path) == folder_at(older)
    (((error, _),),) = run_world(1, _load, run_of(1, model=TIED), newer)
    assert "not a complete checkpoint" in error
    assert run_world(1, _save, run_of(1, model=TIED), newer, 2) == [""]
    assert find_newest(tmp_path) == folder_at(newer)
    assert find_damage(newer) == []


def test_a_complete_checkpoint_is_never_overwritten(saved: Path) -> None:
    errors = run_world(2, _save, run_of(2, model=TIED), saved, 1)
    assert all("already holds a complete checkpoint" in error for error in errors)
    assert find_damage(saved) == []


def test_nothing_is_saved_through_a_link(tmp_path: Path) -> None:
    (theirs := tmp_path / "theirs").mkdir()
    write_unfinished(folder_at(theirs), ["model-00001-of-00001.safetensors"])
    (theirs / "model-00001-of-00001.safetensors").write_bytes(b"theirs")
    (link := tmp_path / "step-00000001").symlink_to(theirs)
    (error,) = run_world(1, _save, run_of(1, model=TIED), link, 1)
    assert "is a link" in error
    assert (theirs / "model-00001-of-00001.safetensors").read_bytes() == b"theirs"


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}])
def test_nothing_is_removed_that_no_checkpoint_has_written(tmp_path: Path, parallel: dict[str, int]) -> None:
    """A model of somebody else, whose files have the names of ours, lies where a checkpoint is to be written."""
    directory = tmp_path / "model"
    directory.mkdir()
    theirs = {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "model-00001-of-00002.safetensors": b"more",
        "tokenizer.json": b"[]",
    }
    for name, data in theirs.items():
        (directory / name).write_bytes(data)
    for error in run_world(2, _save, run_of(2, model=TIED, parallel=parallel), directory, 1):
        assert "holds config.json, model-00001-of-00002.safetensors, model.safetensors" in error
        assert "nothing was deleted" in error
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == theirs


def test_a_failing_disk_is_reported_on_every_rank_and_keeps_older_checkpoints(saved: Path, tmp_path: Path) -> None:
    """The directory cannot be made: a file stands where it should be."""
    (tmp_path / "step-00000002").write_text("in the way")
    errors = run_world(4, _save, run_of(4, model=TIED, parallel={"pp": 2}), tmp_path / "step-00000002", 2)
    assert all("could not be written" in error and "step-00000002" in error for error in errors)
    assert find_damage(saved) == []


def _poisoned(rank: int, run: ResolvedRun, poisoned_rank: int) -> tuple[str, bool]:
    engine = engine_on(rank, run)
    before = [bucket.master.read(0, bucket.master.numel).clone() for bucket in engine.sharded_model.parameters.buckets]
    if rank == poisoned_rank:  # one element of one rank's shard
        engine.sharded_model.parameters.buckets[0].weights[0] = float("nan")
        before[0] = engine.sharded_model.parameters.buckets[0].master.tensor.clone()
    error = ""
    try:
        engine.train_step(micro_batches(run, engine.state, 0), LR)
    except NonFiniteError as found:
        error = str(found)
    now = [bucket.master.tensor for bucket in engine.sharded_model.parameters.buckets]
    return error, all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, now, strict=True))


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_a_non_finite_gradient_on_one_rank_stops_all_before_any_steps(zero_stage: int) -> None:
    run = run_of(4, model=TIED, parallel={"pp": 2}, zero={"stage": zero_stage})
    for error, unchanged in run_world(4, _poisoned, run, 3):
        assert "must be finite" in error
        assert unchanged


def _masked(rank: int, run: ResolvedRun) -> str:
    engine = engine_on(rank, run)
    batches = micro_batches(run, engine.state, 0)
    for batch in batches:
        batch.labels.fill_(-100)
    with pytest.raises(NonFiniteError, match="no token is counted") as found:
        engine.train_step(batches, LR)
    return str(found.value)


def test_a_batch_without_a_counted_token_is_an_error_everywhere() -> None:
    assert len(set(run_world(2, _masked, run_of(2, model=TIED)))) == 1
