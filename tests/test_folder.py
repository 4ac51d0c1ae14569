"""A folder of files: the same on a disk, in memory and in an object store."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import run_world
from safetensors.torch import load_file, save_file
from worlds import LLAMA, engine_on, micro_batches, run_of

from megazero.checkpoint.folder import FileRecord, Folder, LocalFolder, folder_at
from megazero.checkpoint.index import (
    UNFINISHED,
    CheckpointError,
    OwnerError,
    find_damage,
    find_newest,
    step_folders,
    write_unfinished,
)
from megazero.checkpoint.lock import DirectoryLock, Ownership
from megazero.checkpoint.save import _prepare
from megazero.checkpoint.tensor_file import SafetensorsWriter, open_tensors
from megazero.config import RunConfig
from megazero.engine import Position
from megazero.parallel_state import ParallelState, RankGrid


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of a server on this machine that speaks S3."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    boto3.client("s3").create_bucket(Bucket="runs")
    yield "s3://runs"
    os.environ.clear()
    os.environ |= before
    server.stop()


@pytest.fixture(params=["disk", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """An empty folder."""
    if request.param == "disk":
        return folder_at(tmp_path / "a" / "b")
    if request.param == "memory":
        return folder_at(f"memory://{uuid.uuid4().hex}/b")
    return folder_at(f"{request.getfixturevalue('bucket')}/{uuid.uuid4().hex}/b")


def test_a_file_is_there_when_it_is_finished_and_not_before(folder: Folder) -> None:
    folder.make()
    assert folder.size("x") is None
    output = folder.create("x")
    output.write(b"0123")
    assert not folder.has("x") or "memory://" in str(folder)  # which shows files as they grow
    output.write(memoryview(b"456789"))
    record = output.finish()
    assert (folder.size("x"), folder.read("x"), record.bytes) == (10, b"0123456789", 10)
    assert folder.open("x")(2, 5).numpy().tobytes() == b"234"
    assert folder.hash("x") == record.xxh3


def test_two_writers_of_one_name_do_not_mix(folder: Folder) -> None:
    folder.make()
    first, second = folder.create("x"), folder.create("x")
    first.write(b"first")
    second.write(b"the second")
    first.finish()
    second.finish()
    assert folder.read("x") == b"the second"
    assert folder.files() == ["x"]


def test_one_of_several_creates_a_new_file(folder: Folder) -> None:
    folder.make()
    assert folder.create_new("x", b"a")
    assert not folder.create_new("x", b"b")
    assert folder.create_new("x", b"a")
    assert folder.read("x") == b"a"


def test_nothing_changes_in_a_locked_folder(folder: Folder) -> None:
    folder.make()
    folder.write("x", b"old")

    def refuse() -> None:
        raise OwnerError("not yours")

    behind = folder.locked(refuse)
    for change in (lambda: behind.write("x", b"new"), lambda: behind.remove("x")):
        with pytest.raises(OwnerError):
            change()
    with pytest.raises(OwnerError):
        behind.child("sub").parent.write("x", b"new")
    assert behind == folder
    assert behind.files() == ["x"]
    assert behind.read("x") == b"old" or "memory://" in str(folder)  # which shows files as they grow


def test_a_folder_has_one_owner_on_every_storage(folder: Folder) -> None:
    first, second = DirectoryLock(folder), DirectoryLock(folder)
    assert first.try_to_take() is None
    first.heartbeat()
    with pytest.raises(OwnerError, match=rf"still running: process {os.getpid()} on .*, since 20"):
        second.try_to_take()
    first.release()
    assert second.try_to_take() is None
    with pytest.raises(OwnerError, match="this run has lost"):
        first.heartbeat()
    second.heartbeat()
    assert folder.child("owner").files() == ["00000002.beat", "00000002.json"]


def test_a_large_tensor_goes_to_an_object_store_in_parts(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megazero.checkpoint.folder._PART_BYTES", 5 << 20)
    monkeypatch.setattr("megazero.checkpoint.folder._WRITE_BYTES", 1 << 20)
    folder = folder_at(f"{bucket}/{uuid.uuid4().hex}")
    tensor = torch.arange(4 << 20, dtype=torch.float32)
    writer = SafetensorsWriter(folder, "x", {"a": (tensor.dtype, tuple(tensor.shape))})
    writer.write("a", tensor)
    writer.finish()
    assert torch.equal(open_tensors(folder, "x")[0]["a"].whole(), tensor)


def test_a_file_that_is_given_up_leaves_nothing(folder: Folder) -> None:
    folder.make()
    folder.write("x", b"old")
    output = folder.create("x")
    output.write(b"new")
    output.abandon()
    assert folder.read("x") == b"old" or "memory://" in str(folder)
    assert folder.files() == ["x"]


def test_files_and_folders_are_listed_and_removed(folder: Folder) -> None:
    assert folder.files() == folder.folders() == []
    folder.make()
    folder.write("x", b"1")
    folder.child("sub").make()
    folder.child("sub").write("y", b"2")
    assert (folder.files(), folder.folders()) == (["x"], ["sub"])
    assert folder.child("sub").parent == folder
    assert folder.child("sub").name == "sub"
    assert folder_at(str(folder)) == folder
    folder.remove("x")
    folder.remove("x")
    assert folder.files() == []
    folder.child("sub").remove_empty()
    assert folder.child("sub").files() == ["y"]
    folder.child("sub").write("z", b"3")
    folder.child("sub").remove("y", "gone", "z")
    folder.child("sub").remove("y", "z")
    folder.child("sub").remove_empty()
    assert folder.folders() == []
    with pytest.raises(FileNotFoundError):
        folder.open("x")


def test_a_typo_in_the_name_of_a_bucket_does_not_make_one(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket.replace('runs', 'rnus')}/a"
    folder = folder_at(url)
    folder.make()
    with pytest.raises(FileNotFoundError):
        folder.write("x", b"1")
    sections = {"training": {"run_dir": str(tmp_path)}, "checkpoint": {"directory": url}}
    ownership = Ownership(RunConfig.model_validate(sections), ParallelState(RankGrid()), print, lambda: False)
    with pytest.raises(CheckpointError, match=r"rnus/a cannot be written .* bucket must exist"), ownership:
        pass
    import boto3

    assert [bucket["Name"] for bucket in boto3.client("s3").list_buckets()["Buckets"]] == ["runs"]


def test_an_entry_that_cannot_be_read_does_not_make_a_folder_look_empty(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to("file/within")
    with pytest.raises(NotADirectoryError):
        folder_at(tmp_path).files()


def test_a_url_that_cannot_be_used_says_why() -> None:
    with pytest.raises(ValueError, match="nope://x/y cannot be used: Protocol not known: nope"):
        folder_at("nope://x/y")


def test_a_library_s_own_error_is_one_of_the_storage(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    import fsspec

    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "_cache", {})  # one that has credentials would be used again
    folder = folder_at(f"{bucket}/a")
    for call in (folder.files, lambda: folder.size("x"), lambda: folder.write("x", b"1")):
        with pytest.raises(OSError, match=r"the storage refuses: Unable to locate credentials"):
            call()


def test_what_we_write_the_safetensors_library_reads_and_back(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.zeros(0, 4),
        "d": torch.randn(2, 3, 4).half(),
        "e": torch.tensor(2.5),
    }
    folder = LocalFolder(tmp_path)
    writer = SafetensorsWriter(folder, "x", {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, {"kind": "k"})
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    assert writer.finish() == FileRecord((tmp_path / "x").stat().st_size, folder.hash("x"))
    theirs = load_file(tmp_path / "x")
    save_file(tensors, tmp_path / "y")
    for file in ("x", "y"):
        ours, _ = open_tensors(folder, file)
        for name, tensor in tensors.items():
            assert torch.equal(ours[name].whole(), tensor)
            assert torch.equal(theirs[name], tensor)
    assert torch.equal(open_tensors(folder, "y")[0]["a"].rows(1, 3), tensors["a"][1:3])


def _write_checkpoints(rank: int, root: str) -> list[float]:
    run = run_of(2, model=LLAMA, zero={"stage": 3})
    engine = engine_on(rank, run)
    losses = []
    for step in range(2):
        losses.append(engine.train_step(micro_batches(run, engine.state, step), 1e-3).loss)
        engine.save(folder_at(root).child(f"step-{step + 1:08d}"), Position(step + 1), "data")
    return losses


def _go_on(rank: int, root: str) -> float:
    run = run_of(1, model=LLAMA, zero={"stage": 1})
    engine = engine_on(rank, run, init_weights=False)
    engine.load(folder_at(root).child("step-00000001"), "data")
    return engine.train_step(micro_batches(run, engine.state, 1), 1e-3).loss


@pytest.mark.slow
def test_a_run_goes_on_from_an_object_store_on_another_shape(bucket: str) -> None:
    losses = run_world(2, _write_checkpoints, f"{bucket}/run")[0]
    root = folder_at(f"{bucket}/run")
    assert [folder.name for folder in step_folders(root)] == ["step-00000001", "step-00000002"]
    newest = find_newest(root)
    assert newest is not None
    assert newest.name == "step-00000002"
    assert find_damage(newest) == []
    assert root.read("latest") == b"step-00000002\n"
    assert run_world(1, _go_on, f"{bucket}/run")[0] == pytest.approx(losses[1], rel=1e-6)
    data = bytearray(newest.read("model-00001-of-00002.safetensors"))
    data[-1] ^= 1
    newest.write("model-00001-of-00002.safetensors", bytes(data))
    assert "model-00001-of-00002.safetensors has changed" in find_damage(newest)[0]
    newest.remove("config.json")
    assert any("config.json is missing" in line for line in find_damage(newest))


def test_what_a_killed_save_has_left_is_removed(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    names = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    for name in names:
        (tmp_path / name).touch()
    write_unfinished(folder, names)
    _prepare(folder, ["model-00001-of-00001.safetensors"])
    assert folder.files() == [UNFINISHED]
