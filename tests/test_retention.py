"""Which checkpoints stay, and that removing the others can be killed at any moment."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness import killed, run_world
from hypothesis import given
from hypothesis import strategies as st
from quickstart import ONE_STAGE, QUICKSTART, TINY

from megazero.checkpoint.folder import Folder, LocalFolder
from megazero.checkpoint.index import (
    MANIFEST,
    CheckpointError,
    DamagedError,
    TrainerState,
    find_damage,
    find_newest,
    is_complete,
    mark_damaged,
    note_val_loss,
    read_manifest,
    read_trainer_state,
    step_folder,
    step_folders,
    step_of,
    to_json,
    val_loss_of,
    write_manifest,
    write_unfinished,
)
from megazero.checkpoint.load import reading
from megazero.checkpoint.retention import Pruner, Retention, retained_steps
from megazero.config import load_config
from megazero.parallel_state import Axis, ParallelState, RankGrid
from megazero.training.trainer import train

DEEP = b"[" * 100_000  # more than Python reads


def _write(root: Path, step: int, val_loss: float | None = None) -> Folder:
    folder = step_folder(root, step)
    folder.make()
    state = TrainerState(step, 0, 0, 0, "", {}, {}, {}, {}, val_loss=val_loss)
    records = {}
    for name, data in {
        "trainer_state.json": to_json(vars(state)),
        "model-00001-of-00001.safetensors": b"x" * 64,
    }.items():
        records[name] = folder.write(name, data)
    write_manifest(folder, records)
    return folder


def _prune(root: Path, policy: Retention) -> list[Folder]:
    return Pruner(root, policy, Axis("world")).prune()[0]


def _steps(root: Path) -> list[int]:
    return [step_of(folder) for folder in step_folders(root) if is_complete(folder)]


@given(
    st.dictionaries(st.integers(1, 60), st.one_of(st.none(), st.floats(0, 9)), max_size=20),
    st.integers(0, 4), st.integers(0, 7), st.integers(0, 3),
)  # fmt: skip
def test_the_newest_the_regular_and_the_best_stay(
    losses: dict[int, float | None], last: int, every: int, best: int
) -> None:
    kept = retained_steps(losses, Retention(last, every, best))
    if not last:
        assert kept == set(losses)
        return
    order = sorted(losses)
    ranked = sorted((loss, step) for step, loss in losses.items() if loss is not None)
    for step, loss in losses.items():
        is_best = loss is not None and ranked.index((loss, step)) < best
        wanted = step in order[-last:] or (every > 0 and step % every == 0) or is_best
        assert (step in kept) == wanted


def test_losses_on_other_data_are_ranked_apart() -> None:
    """The loss on new data may be lower from the first step on; the best on the data before stay."""
    losses: dict[int, float | None] = {1: 3.0, 2: 2.5, 3: 2.7, 4: 1.0, 5: 0.9, 6: None}
    data = {1: "a", 2: "a", 3: "a", 4: "b", 5: "b", 6: "b"}
    assert retained_steps(losses, Retention(1, 0, 1), data) == {2, 5, 6}
    assert retained_steps(losses, Retention(1, 0, 2), data) == {2, 3, 4, 5, 6}
    assert retained_steps(losses, Retention(1, 0, 1)) == {5, 6}


def test_pruning_removes_the_others_and_what_was_left_half_written(tmp_path: Path) -> None:
    losses = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: 2.5, 60: None}
    for step, loss in losses.items():
        _write(tmp_path, step, loss)
    half, being_written = step_folder(tmp_path, 25), step_folder(tmp_path, 70)
    for folder in (half, being_written):
        folder.make()
        write_unfinished(folder, ["model-00001-of-00001.safetensors"])
        folder.write("model-00001-of-00001.safetensors.0a1b2c3d.partial", b"x")
        folder.write("manifest.json.0a1b2c3d.partial", b"{")
    (tmp_path / "notes").mkdir()
    removed = _prune(tmp_path, Retention(keep_last=2, keep_every_steps=30, keep_best=1))
    assert sorted(map(step_of, removed)) == [10, 25, 40]
    assert _steps(tmp_path) == [20, 30, 50, 60]
    assert being_written.files()
    assert (tmp_path / "notes").is_dir()
    assert _prune(tmp_path, Retention()) == []


def test_one_that_is_read_stays_until_it_is_not(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _write(tmp_path, step)
    with reading(step_folder(tmp_path, 1)), reading(step_folder(tmp_path, 1)):
        _prune(tmp_path, Retention(keep_last=1))
        assert _steps(tmp_path) == [1, 3]
    _prune(tmp_path, Retention(keep_last=1))
    assert _steps(tmp_path) == [3]
    with (
        pytest.raises(CheckpointError, match="step-00000001 is not a complete checkpoint"),
        reading(step_folder(tmp_path, 1)),
    ):
        pass


def test_a_reader_elsewhere_counts_until_it_has_been_seen_for_a_day_whatever_its_clock_says(tmp_path: Path) -> None:
    for step in (1, 2):
        _write(tmp_path, step)
    LocalFolder(tmp_path / "reading").make()
    LocalFolder(tmp_path / "reading").write("step-00000001.1000000000.abc", b"")
    now = [5.0]
    pruner = Pruner(tmp_path, Retention(keep_last=1), Axis("world"), lambda: now[0])
    for seconds in (5.0, 86400.0):
        now[0] = seconds
        assert pruner.prune() == ([], [])
    now[0] = 86406.0
    pruner.prune()
    assert _steps(tmp_path) == [2]


def test_a_reader_that_was_killed_on_this_host_holds_nothing_back(tmp_path: Path) -> None:
    for step in (1, 2):
        _write(tmp_path, step)

    def read() -> None:
        with reading(step_folder(tmp_path, 1)):
            os.kill(os.getpid(), signal.SIGKILL)

    killed(read)
    assert len(list((tmp_path / "reading").iterdir())) == 1
    _prune(tmp_path, Retention(keep_last=1))
    assert _steps(tmp_path) == [2]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", 10**400),
        ("consumed_samples", None),
        ("optimizer_steps", -1),
        ("phases", "x"),
        ("val_loss", 10**400),
        ("trained", {"a": []}),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_trainer_state_with_a_value_of_another_type_is_damaged_and_the_key_is_named(
    tmp_path: Path, key: str, value: object
) -> None:
    state = vars(TrainerState(1, 0, 0, 0, "", {}, {}, {}, {}, val_loss=float("nan")))
    LocalFolder(tmp_path).write("trainer_state.json", to_json(state | {"of_a_later_release": 1}))
    assert read_trainer_state(tmp_path).step == 1
    LocalFolder(tmp_path).write("trainer_state.json", to_json(state | {key: value}))
    with pytest.raises(DamagedError, match=rf"trainer_state\.json is damaged .ValueError.*{key}"):
        read_trainer_state(tmp_path)


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """Files beside ours, directories that nothing shows to be a checkpoint's, and what a link points to."""
    elsewhere = _write(tmp_path / "elsewhere", 1)
    for step in (2, 4, 9):
        _write(tmp_path, step)
    foreign = step_folder(tmp_path, 3)  # looks like a checkpoint that was not finished, and is a model of somebody
    foreign.make()
    foreign.write("model.safetensors", b"weights")
    step_folder(tmp_path, 2).write("notes.txt", b"mine")
    step_folder(tmp_path, 4).child("more").make()
    (tmp_path / "step-00000001").symlink_to(tmp_path / "elsewhere" / "step-00000001")
    assert sorted(map(step_of, _prune(tmp_path, Retention(keep_last=1)))) == [2, 4]
    assert step_folder(tmp_path, 2).files() == ["notes.txt"]
    assert step_folder(tmp_path, 3).read("model.safetensors") == b"weights"
    assert step_folder(tmp_path, 4).folders() == ["more"]
    assert find_damage(elsewhere) == []
    with pytest.raises(CheckpointError, match="is a link and belongs elsewhere"):
        mark_damaged(step_folder(tmp_path, 1))
    assert find_damage(elsewhere) == []


def test_a_reader_that_comes_while_it_is_removed_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        _write(tmp_path, step)
    remove = LocalFolder.remove
    with ExitStack() as readers:

        def remove_late(folder: LocalFolder, *names: str) -> None:
            if MANIFEST in names:
                monkeypatch.undo()
                readers.enter_context(reading(step_folder(tmp_path, 1)))
            remove(folder, *names)

        monkeypatch.setattr(LocalFolder, "remove", remove_late)
        assert _prune(tmp_path, Retention(keep_last=1)) == []
        assert _steps(tmp_path) == [1, 2]
        assert find_damage(step_folder(tmp_path, 1)) == []


@pytest.mark.parametrize(
    "damage",
    [lambda path: path.unlink(), lambda path: path.write_bytes(b"short"), lambda path: path.write_bytes(b"y" * 64)],
    ids=["gone", "cut", "same size"],
)
def test_the_only_good_one_stays(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    for step in (1, 2):
        _write(tmp_path, step)
    damage(tmp_path / "step-00000002" / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="none is intact: step-00000001 not removed"):
        _prune(tmp_path, Retention(keep_last=1))
    assert _steps(tmp_path) == [1, 2]
    _write(tmp_path, 3)
    removed, damage_told = Pruner(tmp_path, Retention(keep_last=2), Axis("world")).prune()
    assert (_steps(tmp_path), len(removed), damage_told) == ([2, 3], 1, [])


def test_damage_of_one_that_is_kept_is_told(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _write(tmp_path, step)
    (tmp_path / "step-00000003" / "model-00001-of-00001.safetensors").write_bytes(b"y" * 64)
    removed, damage = Pruner(tmp_path, Retention(keep_last=2), Axis("world")).prune()
    assert [step_of(folder) for folder in removed] == [1]
    assert "model-00001-of-00001.safetensors has changed" in damage[0]


def test_what_is_newer_than_the_newest_intact_one_that_is_kept_stays(tmp_path: Path) -> None:
    """Of 3 and 9 the regular step is intact, the newest is not: 8, which no rule keeps, is the best that there is."""
    for step in range(1, 10):
        _write(tmp_path, step)
    (tmp_path / "step-00000009" / "model-00001-of-00001.safetensors").write_bytes(b"y" * 64)
    Pruner(tmp_path, Retention(keep_last=1, keep_every_steps=3), Axis("world")).prune()
    assert _steps(tmp_path) == [3, 6, 7, 8, 9]


def test_a_copy_of_a_step_under_a_name_of_the_users_own_takes_nobodys_place(tmp_path: Path) -> None:
    for step in (2, 3, 4):
        _write(tmp_path, step)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-2")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-9")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-000000010")
    assert (newest := find_newest(tmp_path)) is not None
    assert newest.name == "step-00000004"
    _prune(tmp_path, Retention(keep_last=1, keep_every_steps=2))
    copies = ["step-2", "step-9", "step-000000010"]
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-00000002", "step-00000004", *copies}


def _prune_together(rank: int, root: Path) -> tuple[list[str], int]:
    """The removed ones, and the bytes of tensor files that this rank has read to verify what stays."""
    read = 0
    original = LocalFolder.hash

    def counting(folder: LocalFolder, name: str) -> str:
        nonlocal read
        read += folder.size(name) or 0
        return original(folder, name)

    LocalFolder.hash = counting  # type: ignore[method-assign]
    axis = ParallelState(RankGrid(dp=2), rank).world
    return [folder.name for folder in Pruner(root, Retention(keep_last=1), axis).prune()[0]], read


def test_the_ranks_share_the_work_of_verifying(tmp_path: Path) -> None:
    for step in (1, 2):
        _write(tmp_path, step)
    (removed, first), (also, second) = run_world(2, _prune_together, tmp_path)
    assert removed == also == ["step-00000001"]
    assert min(first, second) > 0
    assert first + second == sum(record.bytes for record in read_manifest(step_folder(tmp_path, 2)).values())


def test_sizes_alone_are_compared_where_the_run_asks_for_no_more(tmp_path: Path) -> None:
    def train_without_hashes(_: int) -> list[int]:
        def refuse(folder: LocalFolder, name: str) -> str:
            raise AssertionError(f"{folder}/{name} was hashed")

        words = [*TINY, *ONE_STAGE, "training.steps=2", f"training.run_dir={tmp_path}", "checkpoint.asynchronous=false"]
        words += ["checkpoint.save_every_steps=1", "checkpoint.keep_last=1", "checkpoint.verify=size"]
        LocalFolder.hash = refuse  # type: ignore[method-assign]
        train(load_config(QUICKSTART, words, 1), ParallelState(RankGrid()), lambda _: None)
        return _steps(tmp_path / "checkpoints")

    assert run_world(1, train_without_hashes) == [[2]]


@pytest.mark.parametrize("operation", range(1, 9))
def test_a_crash_while_pruning_leaves_only_whole_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: int
) -> None:
    for step in (1, 2, 3):
        _write(tmp_path, step)

    class KilledError(BaseException):
        pass

    count = 0

    def killing(method: Callable[..., None]) -> Callable[..., None]:
        def wrapped(folder: LocalFolder, *args: str) -> None:
            nonlocal count
            count += 1
            if count == operation:
                raise KilledError
            method(folder, *args)

        return wrapped

    def remove_one_by_one(folder: LocalFolder, names: tuple[str, ...]) -> None:
        for name in names:
            remove_one(folder, [name])

    remove_one = killing(LocalFolder._remove)
    monkeypatch.setattr(LocalFolder, "_remove", remove_one_by_one)
    monkeypatch.setattr(LocalFolder, "write", killing(LocalFolder.write))
    try:
        _prune(tmp_path, Retention(keep_last=1))
        assert operation > count
    except KilledError:
        pass
    assert 3 in _steps(tmp_path)
    for folder in step_folders(tmp_path):
        assert not is_complete(folder) or find_damage(folder) == []
    monkeypatch.undo()
    _prune(tmp_path, Retention(keep_last=1))
    assert [folder.name for folder in step_folders(tmp_path)] == ["step-00000003"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damaged", [MANIFEST, "model-00001-of-00001.safetensors"])
def test_what_a_user_has_put_beside_a_damaged_checkpoint_stays(tmp_path: Path, damaged: str) -> None:
    for step in (1, 2):
        _write(tmp_path, step)
    folder = step_folder(tmp_path, 2)
    folder.write("model.safetensors.index.json", b"{}")
    write_manifest(folder, read_manifest(folder) | {"model.safetensors.index.json": folder.write("a", b"{}")})
    folder.remove("a")
    for name in ("lora.safetensors", "lora-00001-of-00001.safetensors", "adapter.safetensors.index.json"):
        folder.write(name, b"mine")
    _flip(tmp_path / folder.name / damaged)
    mark_damaged(folder)
    assert find_newest(tmp_path) == step_folder(tmp_path, 1)
    _write(tmp_path, 3)
    _prune(tmp_path, Retention(keep_last=1))
    assert folder.files() == ["adapter.safetensors.index.json", "lora-00001-of-00001.safetensors", "lora.safetensors"]


@pytest.mark.parametrize("content", [DEEP, to_json({"name": "dvc", "files": {"data.csv": 1}})], ids=["deep", "dvc"])
@pytest.mark.parametrize("name", [MANIFEST, "unfinished.json", "damaged-manifest.json"])
def test_a_list_of_another_program_names_no_files_of_ours(tmp_path: Path, name: str, content: bytes) -> None:
    foreign = step_folder(tmp_path, 3)
    foreign.make()
    for file, data in {"data.csv": b"mine", name: content}.items():
        foreign.write(file, data)
    for step in (4, 8):
        _write(tmp_path, step)
    removed = _prune(tmp_path, Retention(keep_last=1))
    assert [folder.name for folder in removed] == ["step-00000004"]
    assert foreign.files() == sorted(["data.csv", name])
    if name == MANIFEST:
        with pytest.raises(CheckpointError, match="no checkpoint of ours has written"):
            mark_damaged(foreign)
        assert foreign.files() == ["data.csv", MANIFEST]


ODD_NOTES = [DEEP, b"[]", b'{"val_loss": 1' + b"0" * 400 + b"}"]


@pytest.mark.parametrize(
    "odd", [*range(8), *ODD_NOTES], ids=range(8 + len(ODD_NOTES))
)  # a bit that flips, or all of it
def test_one_whose_validation_loss_is_damaged_counts_as_one_of_the_best(tmp_path: Path, odd: int | bytes) -> None:
    for step, loss in enumerate((1.0, 2.0, 3.0), start=1):
        note_val_loss(_write(tmp_path, step), loss)
    path = tmp_path / "step-00000001" / "evaluation.json"
    data = bytearray(path.read_bytes())
    data[data.index(b"1.0")] ^= 1 << (odd if isinstance(odd, int) else 0)
    path.write_bytes(odd if isinstance(odd, bytes) else bytes(data))
    with pytest.raises(DamagedError, match=r"evaluation\.json is damaged"):
        val_loss_of(step_folder(tmp_path, 1))
    _prune(tmp_path, Retention(keep_last=1, keep_best=1))
    assert _steps(tmp_path) == [1, 2, 3]
    path.unlink()
    _prune(tmp_path, Retention(keep_last=1, keep_best=1))
    assert _steps(tmp_path) == [2, 3]
