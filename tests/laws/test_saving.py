"""Law 2 and 5 while training goes on: what is saved is the state at the call, and a save that fails loses nothing."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from worlds import GPT2, LLAMA, LR, engine_on, micro_batches, run_of

import megazero
from megazero.checkpoint import save
from megazero.checkpoint.folder import LocalFolder, Output, ReadBytes
from megazero.checkpoint.index import CheckpointError, find_damage, read_manifest, read_trainer_state, step_folder
from megazero.checkpoint.saver import Saver, SaveReport, snapshot_of
from megazero.config import ResolvedRun
from megazero.engine import Engine, Position

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp 2, stage 1": (2, {"model": LLAMA, "zero": {"stage": 1}}),
    "dp 2, stage 0, gpt2": (2, {"model": GPT2, "zero": {"stage": 0}}),
    "tp 2 pp 2, bf16": (4, {"model": LLAMA, "parallel": {"tp": 2, "pp": 2}, "precision": {"dtype": "bf16"}}),
    "dp 2 x 2, stage 3, bf16": (
        4,
        {"model": LLAMA, "zero": {"stage": 3, "shard_group_size": 2}, "precision": {"dtype": "bf16"}},
    ),
    "dp 2, on files": (2, {"model": LLAMA, "zero": {"stage": 2, "offload": {"optimizer": "nvme"}}}),
}


def _saver(engine: Engine) -> tuple[Saver, list[SaveReport]]:
    reports: list[SaveReport] = []
    snapshot = snapshot_of(engine.sharded_model.sharded_state, engine.state, None)
    return Saver(snapshot, engine.state.saving_axes(60), reports.append), reports


def _step(engine: Engine, run: ResolvedRun, step: int) -> float:
    return engine.train_step(micro_batches(run, engine.state, step), LR).loss


def _save_both_ways(rank: int, run: ResolvedRun, root: Path) -> list[SaveReport]:
    engine = engine_on(rank, run)
    saver, reports = _saver(engine)
    for step in range(3):
        _step(engine, run, step)
        engine.save(root / "waited" / f"{step}", Position(step), "data")
        engine.save(
            root / "behind" / f"{step}", Position(step), "data", saver=saver
        )  # and on with the next step at once
    _step(engine, run, 3)
    saver.finish()
    engine.sharded_model.close()
    return reports


@pytest.mark.parametrize("name", RUNS)
def test_what_is_saved_behind_the_training_is_the_state_at_the_call(name: str, tmp_path: Path) -> None:
    world, sections = RUNS[name]
    if "offload" in sections.get("zero", {}):
        sections["zero"]["offload"]["nvme_path"] = str(tmp_path)
    reports = run_world(world, _save_both_ways, run_of(world, **sections), tmp_path)[0]
    assert [report.error for report in reports] == [None] * 3
    for step in range(3):
        waited, behind = (read_manifest(tmp_path / way / f"{step}") for way in ("waited", "behind"))
        assert waited == behind
        assert find_damage(tmp_path / "behind" / f"{step}") == []
        assert reports[step].bytes == sum(
            record.bytes for file, record in waited.items() if file.endswith(".safetensors")
        ) - _header_bytes(tmp_path / "behind" / f"{step}")


def _header_bytes(directory: Path) -> int:
    files = directory.glob("*.safetensors")
    return sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)


def _too_large(rank: int, root: Path) -> tuple[str | None, list[SaveReport], int]:
    run = run_of(2, model=LLAMA)
    engine = engine_on(rank, run)
    snapshot = snapshot_of(engine.sharded_model.sharded_state, engine.state, 1000 if rank == 1 else None)
    reports: list[SaveReport] = []
    saver = Saver(snapshot, engine.state.saving_axes(60), reports.append)
    engine.save(root / "step", Position(), "data", saver=saver)
    return snapshot.refusal, reports, len(find_damage(root / "step"))  # there already: the call has waited


def test_a_state_that_does_not_fit_in_host_memory_is_saved_while_training_waits(tmp_path: Path) -> None:
    results = run_world(2, _too_large, tmp_path)
    for refusal, _, damage in results:
        assert refusal.startswith("rank 1 needs")
        assert refusal.endswith("and may take 1,000")
        assert damage == 0
    report = results[0][1][0]
    assert report.copy_seconds == pytest.approx(report.seconds, rel=0.5)


class _Gate(LocalFolder):
    """A disk that writes nothing until it is opened."""

    gate = threading.Event()

    def child(self, name: str) -> LocalFolder:
        return _Gate(self.path / name)

    def create(self, name: str) -> Output:
        assert self.gate.wait(60)
        return super().create(name)


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    run = run_of(1, model=LLAMA)
    engine = engine_on(0, run)
    saver, reports = _saver(engine)
    _Gate.gate.clear()
    engine.save(_Gate(tmp_path / "step-00000001"), Position(1), "data", saver=saver)
    _step(engine, run, 0)  # training goes on
    assert reports == []
    threading.Timer(0.3, _Gate.gate.set).start()
    engine.save(tmp_path / "step-00000002", Position(2), "data", saver=saver)
    assert [report.folder.name for report in reports[:1]] == ["step-00000001"]
    saver.finish()
    assert reports[1].waited_seconds > 0.1
    assert find_damage(tmp_path / "step-00000001") == find_damage(tmp_path / "step-00000002") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", place], check=True)


def _fill(rank: int, root: Path) -> tuple[list[float], list[SaveReport], str | None]:
    run = run_of(2, model=LLAMA)
    engine = engine_on(rank, run)
    saver, reports = _saver(engine)
    losses = []
    failure = None
    for step in range(4):
        if step == 2 and rank == 0:  # room for part of the next
            free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
            (root / "other").write_bytes(b"x" * (free - 100_000))
        if step == 3 and rank == 0:
            (root / "other").unlink()
        losses.append(_step(engine, run, step))
        engine.save(step_folder(root, step + 1), Position(step + 1), "data", saver=saver)
        try:
            saver.finish()
        except CheckpointError as error:
            failure = str(error)
    return losses, reports, failure


def test_a_full_disk_is_told_with_the_bytes_needed_and_training_goes_on(small_disk: Path) -> None:
    results = run_world(2, _fill, small_disk)
    losses, reports, _ = results[0]
    assert losses[-1] < losses[0]
    assert [report.error is None for report in reports] == [True, True, False, True]
    assert not any(report.ends_run for report in reports)
    for _, _, failure in results:
        assert "No space left on device" in failure
        assert f"it takes {reports[0].bytes:,} bytes" in failure
        assert "older checkpoints are untouched" in failure
    assert "No space left on device" in str(reports[2].error)
    for step in (1, 2, 4):
        assert find_damage(step_folder(small_disk, step)) == []
    assert not (small_disk / "step-00000003").exists()  # its part was removed: room for the next
    assert (small_disk / "latest").read_text() == "step-00000004\n"


def _count_reads(rank: int, origin: Path, run: ResolvedRun) -> int:
    """Bytes of tensor files that this rank reads to load a checkpoint."""
    engine = engine_on(rank, run, init_weights=False)
    read = 0
    original = LocalFolder.open

    def open_counting(folder: LocalFolder, name: str) -> ReadBytes:
        read_bytes = original(folder, name)

        def counting(start: int, stop: int) -> torch.Tensor:
            nonlocal read
            read += stop - start
            return read_bytes(start, stop)

        return counting

    LocalFolder.open = open_counting  # type: ignore[method-assign]
    engine.load(origin, "data")
    return read


@pytest.mark.parametrize(
    ("world", "sections"),
    [
        (2, {"zero": {"stage": 0}}),
        (4, {"zero": {"stage": 1, "shard_group_size": 2}}),
        (4, {"zero": {"stage": 3}, "parallel": {"pp": 2}}),
    ],
    ids=["dp 2, stage 0", "dp 2 x 2, stage 1", "dp 2 pp 2, stage 3"],
)
def test_all_ranks_together_read_every_byte_once(world: int, sections: dict[str, Any], tmp_path: Path) -> None:
    run = run_of(1, model=LLAMA)
    engine = engine_on(0, run)
    _step(engine, run, 0)
    engine.save(tmp_path / "s", Position(1), "data")
    counts = run_world(world, _count_reads, tmp_path / "s", run_of(world, model=LLAMA, **sections))
    kinds = ("master", "exp_avg", "exp_avg_sq")
    state = sum(4 * sum(p.numel() for p in engine.chunks.parameters()) for _ in kinds)
    headers = world * _header_bytes(tmp_path / "s")
    assert 0 <= sum(counts) - state <= headers + world * 3 * 200 * 128  # rows across borders


def test_the_validation_loss_of_a_step_is_kept_with_it(tmp_path: Path) -> None:
    engine = engine_on(0, run_of(1, model=LLAMA))
    engine.save(tmp_path / "a", Position(), "data", val_loss=1.5)
    assert read_trainer_state(tmp_path / "a").val_loss == 1.5


def _script(rank: int, root: Path) -> tuple[list[float], list[float], str]:
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 8)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}
    engine, *_ = megazero.initialize(model=module, config=config)

    def step() -> float:
        loss = engine(torch.ones(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss)

    step()
    engine.save_checkpoint(root, tag="a", asynchronous=True)
    after = [step(), step()]
    engine.load_checkpoint(root, tag="a")  # waits for it
    again = [step(), step()]
    (root / "b").mkdir(exist_ok=True)
    (root / "b" / "notes.txt").write_text("mine")
    engine.save_checkpoint(root, tag="b", asynchronous=True)
    with pytest.raises(CheckpointError) as refusal:
        engine.finish_saving()
    engine.finish_saving()  # told once
    return after, again, str(refusal.value)


def test_a_script_saves_behind_its_steps_too(tmp_path: Path) -> None:
    for after, again, refusal in run_world(2, _script, tmp_path):
        assert after == again
        assert "holds notes.txt, which no checkpoint of ours has" in refusal


def _stumble(rank: int, root: Path) -> tuple[str, list[bool]]:
    run = run_of(2, model=LLAMA)
    engine = engine_on(rank, run)
    saver, reports = _saver(engine)
    if rank == 1:

        def no_memory(*_: Any) -> None:
            raise RuntimeError("no memory")

        save.HostBuffers.take = no_memory  # type: ignore[method-assign]
        threading.excepthook = lambda _: None
    engine.save(root / "a", Position(), "data", saver=saver)
    try:
        engine.save(root / "b", Position(), "data", saver=saver)
    except Exception as error:
        return type(error).__name__, [report.ends_run for report in reports]
    return "went on", []


def test_an_error_of_one_ranks_own_ends_the_run_instead_of_leaving_the_ranks_out_of_step(tmp_path: Path) -> None:
    assert run_world(2, _stumble, tmp_path) == [("LostPeerError", [True]), ("RuntimeError", [])]


class _Net(torch.nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        self.a.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))).float().square().mean()


def _thaw(rank: int, root: Path) -> bool:
    def engine_of(frozen: bool) -> Any:
        torch.manual_seed(rank)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "Adam"},
        }
        return megazero.initialize(model=_Net(frozen), config=config)[0]

    frozen = engine_of(True)
    frozen.backward(frozen(torch.ones(2, 8, dtype=torch.bfloat16)))
    frozen.step()
    frozen.save_checkpoint(root, tag="a")
    thawed = engine_of(False)
    thawed.load_checkpoint(root, tag="a", load_module_only=True)
    wanted = frozen.module_state_dict()
    return all(torch.equal(value, wanted[name]) for name, value in thawed.module_state_dict().items())


def test_a_parameter_that_was_frozen_is_trained_from_its_weights(tmp_path: Path) -> None:
    assert run_world(2, _thaw, tmp_path) == [True, True]
