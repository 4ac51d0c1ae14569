"""Is the run well: policies as values, then whole runs that meet bad samples, stop on request, and skip steps."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import metrics_of, run_world
from torch import Tensor
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from worlds import loop_of, state_on

from megazero.checkpoint.folder import Folder
from megazero.checkpoint.index import (
    CheckpointError,
    find_newest,
    is_complete,
    read_trainer_state,
    step_folders,
    step_of,
    val_loss_of,
)
from megazero.config import ResolvedRun, RunConfig
from megazero.config.schema import LoggingConfig, TrainingConfig
from megazero.engine import Engine, NonFiniteError, Position, StepStatistics
from megazero.models.gpt import MicroBatch
from megazero.training.callbacks import checkpointing, speed
from megazero.training.callbacks.base import Callback, RunContext, SampleRange, StepDecision, StepRecord
from megazero.training.callbacks.health import LossSpikes, NonFinitePolicy, count_skipped
from megazero.training.callbacks.registry import CALLBACKS, CallbackError, RegisteredCallback, name_problems
from megazero.training.callbacks.speed import RankWork, Stragglers, slow_ranks, spread_of
from megazero.training.check import describe
from megazero.training.trainer import Trainer, train

pytestmark = pytest.mark.slow  # starts whole runs

SOUND, BAD = StepStatistics(2.0, 1.0, 64), StepStatistics(nan, nan, 64, finite=False)
SAMPLES = SampleRange(128, 135)


def _policy(**keys: Any) -> NonFinitePolicy:
    return NonFinitePolicy(TrainingConfig(**keys), lambda _: None)


def _step(statistics: StepStatistics, step: int = 1) -> StepRecord:
    return StepRecord(Position(step), SAMPLES, statistics)


def test_by_default_a_step_that_is_not_finite_stops_the_run_and_names_its_samples() -> None:
    policy = _policy()
    assert policy.after_step(_step(SOUND, 16)) is None
    with pytest.raises(NonFiniteError, match=r"step 17, samples 128 to 135: loss=nan .* must be finite") as found:
        policy.after_step(_step(BAD, 17))
    assert "training.skip_steps=[17]" in str(found.value)
    with pytest.raises(NonFiniteError) as found:
        _policy(skip_steps=[3, [5, 9]]).after_step(_step(BAD, 17))
    assert "training.skip_steps=[3,[5,9],17]" in str(found.value), (
        "on the command line it takes the place of the file's"
    )


def test_updates_are_left_out_until_there_are_too_many_in_a_row() -> None:
    policy = _policy(on_non_finite="skip", non_finite_limit=3)
    assert [policy.after_step(_step(statistics)) for statistics in (BAD, BAD, SOUND, BAD, BAD)] == [None] * 5
    with pytest.raises(NonFiniteError, match="3 such steps in a row"):
        policy.after_step(_step(BAD, 6))


def test_a_run_rolls_back_only_so_often() -> None:
    policy = _policy(on_non_finite="rollback", non_finite_limit=2)
    decisions = [policy.after_step(_step(statistics)) for statistics in (BAD, SOUND, BAD, SOUND)]
    assert decisions == [StepDecision.ROLL_BACK, None, StepDecision.ROLL_BACK, None]
    with pytest.raises(NonFiniteError, match="already rolled back 2 times"):
        policy.after_step(_step(BAD, 9))


def test_steps_to_skip_are_counted_from_a_step_on() -> None:
    ranges = ((5, 5), (8, 10), (10, 12), (13, 13))
    counts = [count_skipped(step, ranges) for step in range(1, 15)]
    assert counts == [0, 0, 0, 0, 1, 0, 0, 6, 5, 4, 3, 2, 1, 0]
    assert count_skipped(1, ()) == 0


def _losses(count: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    return (3 + 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)).tolist()


class _Spikes(LossSpikes):
    """Keeps its last report."""

    def __init__(self, sigmas: float, skip_steps: Sequence[tuple[int, int]] = ()) -> None:
        self.lines: list[str] = []
        super().__init__(sigmas, skip_steps, self.lines.append)

    def of(self, loss: float, step: int = 201) -> float | None:
        """The metric of a step with this loss."""
        record = _step(StepStatistics(loss, 1.0, 64), step)
        self.after_step(record)
        found = record.metrics.get("loss_spike")
        assert found is None or isinstance(found, float)
        return found


def test_a_spike_is_reported_by_its_deviations_and_hides_no_other() -> None:
    for skipped, setting in (((), "[201]"), ([(2, 4)], "[[2,4],201]")):
        spikes = _Spikes(6.0, skipped)
        assert all(spikes.of(loss) is None for loss in _losses(200))
        assert spikes.lines == []
        for _ in range(2):
            sigmas = spikes.of(9.0)
            assert sigmas is not None
            assert 20 < sigmas < 80
            line = spikes.lines.pop()
            assert line.startswith(f"step 201: loss 9.0000 is {sigmas:.1f} deviations above its recent mean ")
            assert float(line.split("recent mean ")[1].split(";")[0]) == pytest.approx(3.0, abs=0.1)
            assert "samples 128 to 135" in line
            assert f"training.skip_steps={setting}" in line


def test_nothing_is_reported_before_the_warm_up_of_falling_losses_of_equal_losses_or_at_zero_sigmas() -> None:
    early = _Spikes(6.0)
    assert [early.of(loss) for loss in [3.0] * 10 + [9.0] + [3.0] * 9] == [None] * 20
    falling = _Spikes(6.0)
    assert all(falling.of(10 - 0.05 * step) is None for step in range(150))
    equal = _Spikes(6.0)
    assert all(equal.of(3.0 + 1e-6 * (step % 2)) is None for step in range(100))
    silent = _Spikes(0.0)
    assert all(silent.of(loss) is None for loss in [*_losses(50), 1e9])


def test_a_loss_that_stays_high_becomes_normal_and_one_that_is_no_number_changes_nothing() -> None:
    spikes = _Spikes(6.0)
    for loss in _losses(100):
        spikes.of(loss)
    assert spikes.of(nan) is None
    found = [spikes.of(loss + 2) is not None for loss in _losses(200)]
    assert found[0]
    assert not any(found[100:])


def _work(seconds: list[float], stages: int = 1) -> list[RankWork]:
    size = len(seconds) // stages
    return [RankWork(1, rank, f"node-{rank // 2}", rank // size, each) for rank, each in enumerate(seconds)]


def test_the_slow_rank_is_named_with_the_median_of_its_stage() -> None:
    ((slow, median),) = slow_ranks(_work([1.2, 1.21, 1.22, 1.92]), 1.3)
    assert (slow.rank, slow.host, median) == (3, "node-1", 1.21)
    assert slow_ranks(_work([1.2, 1.21, 1.22, 1.5]), 1.3) == []
    # the last stage has more to do, which is nobody's fault
    assert slow_ranks(_work([1.0, 1.0, 2.0, 2.0], stages=2), 1.3) == []
    assert [work.rank for work, _ in slow_ranks(_work([1.0, 1.0, 1.0, 2.0, 2.0, 4.0], stages=2), 1.3)] == [5]
    # ranks that are alone in their stages have only one another to be compared with
    assert [work.rank for work, _ in slow_ranks(_work([1.0, 1.0, 1.0, 2.0], stages=4), 1.3)] == [3]


def test_a_difference_that_nobody_would_notice_is_not_reported() -> None:
    assert slow_ranks(_work([0.001, 0.001, 0.009]), 1.3) == []
    assert spread_of(_work([0.3, 0.1, 0.2])) == {"min": 0.1, "median": 0.2, "max": 0.3, "slowest_rank": 0}


def _stragglers(rank: int, store: Store) -> Stragglers:
    state: Any = SimpleNamespace(rank=rank, world=SimpleNamespace(size=2), at=SimpleNamespace(pp=0))
    return Stragglers(LoggingConfig(straggler_every_steps=1), state, store, print)


def _worked(step: int) -> StepRecord:
    return StepRecord(Position(step), SAMPLES, work_seconds=0.1)


def test_a_run_outlives_the_store_in_which_slow_ranks_are_looked_for() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = [_stragglers(rank, TCPStore("127.0.0.1", server.port, None, False)) for rank in range(2)]
    for step in range(1, 5):
        for rank in ranks:
            rank.after_step(_worked(step))
        if step == 1:
            del server
            time.sleep(0.1)


class _Hanging(Store):
    def set(self, *_: str) -> None:
        threading.Event().wait()


def test_a_store_that_hangs_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "_LAST_SECONDS", 0.01)
    store = _Hanging()
    rank = _stragglers(0, store)
    for step in (1, 2):
        rank.after_step(replace(_worked(step), is_last=step == 2))
    assert capsys.readouterr().out.count("does not answer") == 1


def test_a_rank_that_writes_late_is_waited_for_and_reported() -> None:
    store = HashStore()
    first, late = _stragglers(0, store), _stragglers(1, store)
    first.after_step(_worked(1))
    for step in (2, 3):
        first.after_step(early := _worked(step))
        assert "own_seconds" not in early.metrics
    late.after_step(_worked(3))
    first.after_step(record := _worked(4))
    assert record.metrics["own_seconds"]["max"] == 0.1  # type: ignore[index]


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs

BATCH = 8


def _run(
    world: int,
    run_dir: Path,
    *,
    steps: int = 8,
    save: int = 0,
    logging: Any = None,
    checkpoint: Any = None,
    lr_schedule: Any = None,
    **training: Any,
) -> ResolvedRun:
    return loop_of(
        run_dir,
        world,
        lr_schedule=lr_schedule or {},
        training={"steps": steps, **training},
        checkpoint={"save_every_steps": save} | (checkpoint or {}),
        logging=logging or {},
    )


def _spoil(step: int) -> None:
    """Make the loss of the samples that come as `step`'s in a run without detours no number, wherever they come."""
    intact = Engine._run
    bad = (step - 1) * BATCH + BATCH - 1  # on the last dp rank

    def run(self: Engine, batches: Any, *, trains: bool) -> tuple[Tensor, Tensor]:
        loss_sum, tokens = intact(self, batches, trains=trains)
        has_bad = trains and any((batch.sample_ids == bad).any() for batch in batches)
        return (loss_sum * nan if has_bad else loss_sum), tokens

    Engine._run = run  # type: ignore[method-assign]


def _train(rank: int, run: ResolvedRun, health: tuple[int, ...] = (), stop_at: int = 0) -> dict[str, Any]:
    """A run; rank 1 asks for its end in step `stop_at`."""
    for step in health:
        _spoil(step)
    shown: list[str] = []
    asked = 0

    def wants_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == stop_at and rank == run.world_size - 1

    out: dict[str, Any] = {"shown": shown, "error": ""}
    try:
        summary = train(run, state_on(rank, run), shown.append, wants_stop)
        out |= {"step": summary.step, "stopped": summary.stopped, "checkpoint": summary.checkpoint}
    except NonFiniteError as error:
        out["error"] = str(error)
    return out


def _losses_of(run_dir: Path) -> dict[int, float | None]:
    return {line["step"]: line.get("loss") for line in metrics_of(run_dir)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float | None]:
    """Losses of six steps."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run_world(2, _train, _run(2, run_dir, steps=6))
    return _losses_of(run_dir)


@pytest.fixture(scope="module")
def without_step_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("without")
    run = _run(2, run_dir, steps=9, skip_steps=[5])
    out, _ = run_world(2, _train, run)
    assert "step 5 is skipped (training.skip_steps): samples 32 to 39" in out["shown"]
    return run_dir


def test_a_skipped_step_consumes_its_samples_and_changes_nothing(without_step_5: Path) -> None:
    lines = metrics_of(without_step_5)
    assert [line["step"] for line in lines] == list(range(1, 10))
    consumed = {"source_samples": {"python-stdlib": 40}, "source_tokens": {"python-stdlib": 40 * 16}}
    own = {"step": 5, "tokens": lines[3]["tokens"], "sent_bytes": {}, "skipped": "passed over"}
    assert lines[4] == own | consumed
    assert all("loss" in line for line in lines if line["step"] != 5)


@pytest.mark.parametrize("schedule", ["wsd", "linear", "constant"])
def test_the_learning_rates_of_a_run_that_skips_steps_are_those_that_it_and_check_tell(
    schedule: str, tmp_path: Path
) -> None:
    skipped = [[4, 6], [5, 8], 14]
    run = _run(1, tmp_path, steps=14, skip_steps=skipped, lr_schedule={"name": schedule, "warmup_steps": 2})
    first, *more = [text for subject, text in describe(run, 1) if subject == "rate"]
    (stopped,) = run_world(1, _train, run, (), 7)
    (resumed,) = run_world(1, _train, run)
    rates = {line["step"]: line["lr"] for line in metrics_of(tmp_path) if "lr" in line}
    told = re.findall(r"(\S+) at step (\d+)", first)
    assert [int(step) for _, step in told] == [1, 2, 10, 13]  # of updates 1, 2, 5 and 8
    assert [rate for rate, _ in told] == [f"{rates[int(step)]:.3g}" for _, step in told]
    for shown in (stopped["shown"], resumed["shown"]):
        assert [line for line in shown if "schedule unfinished" in line] == more
    peak, end = run.config.optimizer.lr, 0.1 * run.config.optimizer.lr
    reached = f"the last is update 8 of 14, and the learning rate ends at {rates[13]:.3g}, not {end:.3g}"
    assert [line.partition(": ")[2] for line in more] == ([] if schedule == "constant" else [reached])
    assert schedule != "wsd" or rates[13] == peak


def test_a_step_that_is_not_finite_is_as_if_it_had_been_skipped(tmp_path: Path, without_step_5: Path) -> None:
    out, other = run_world(2, _train, _run(2, tmp_path, steps=9, on_non_finite="skip"), (5,))
    assert out["error"] == other["error"] == ""
    assert "step 5 is not finite: samples 32 to 39 are left out, no weight has changed" in out["shown"]
    assert _losses_of(tmp_path) == _losses_of(without_step_5)
    assert metrics_of(tmp_path)[4]["skipped"] == "not finite"


@pytest.mark.slow
@pytest.mark.parametrize("back", [4, 3])
def test_a_rollback_leaves_the_samples_out_and_every_step_once_in_the_metrics(tmp_path: Path, back: int) -> None:
    """From step 4 or 3 on the run is one that skips what lies between that step and the samples behind step 5."""
    out, other = run_world(2, _train, _run(2, tmp_path / "back", save=back, on_non_finite="rollback"), (5,))
    assert out["error"] == other["error"] == ""
    assert f"samples 32 to 39 are left out; back to step {back}, continuing with sample 40" in "\n".join(out["shown"])
    run_world(2, _train, _run(2, tmp_path / "over", steps=10, skip_steps=[[back + 1, 5]]))
    wanted = _losses_of(tmp_path / "over")
    shift = 5 - back
    assert _losses_of(tmp_path / "back") == {
        step: wanted[step if step <= back else step + shift] for step in range(1, 9)
    }
    assert [line["step"] for line in metrics_of(tmp_path / "back")] == list(range(1, 9))
    assert (
        metrics_of(tmp_path / "back")[-1]["tokens"] == (8 + shift) * BATCH * 16
    )  # those of the bad step were read, too
    assert out["step"] == 8


def test_a_checkpoint_after_a_rollback_remembers_where_the_samples_are(tmp_path: Path, without_step_5: Path) -> None:
    assert run_world(2, _train, _run(2, tmp_path, steps=6, save=2, on_non_finite="rollback"), (5,))[0]["step"] == 6
    run_world(2, _train, _run(2, tmp_path, steps=8, save=2))
    wanted = _losses_of(without_step_5)
    assert _losses_of(tmp_path) == {step: wanted[step if step < 5 else step + 1] for step in range(1, 9)}


def test_a_rollback_needs_a_checkpoint_and_has_a_limit(tmp_path: Path) -> None:
    for out in run_world(2, _train, _run(2, tmp_path / "none", save=4, on_non_finite="rollback"), (3,)):
        assert "step 3, samples 16 to 23, is not finite, and there is no checkpoint to roll back to" in out["error"]
    run = _run(2, tmp_path / "often", save=2, on_non_finite="rollback", non_finite_limit=1)
    for out in run_world(2, _train, run, (3, 5)):
        assert "already rolled back 1 times" in out["error"]


def test_one_rank_that_wants_to_stop_stops_all_after_the_step_and_the_run_can_go_on(
    tmp_path: Path, undisturbed: dict[int, float | None]
) -> None:
    for out in run_world(2, _train, _run(2, tmp_path, steps=6), (), 3):
        assert (out["step"], out["stopped"], out["error"]) == (3, True, "")
        assert out["checkpoint"].endswith("step-00000003")
    for out in run_world(2, _train, _run(2, tmp_path, steps=6)):
        assert (out["step"], out["stopped"]) == (6, False)
    assert _losses_of(tmp_path) == undisturbed


def _evaluation_fails(rank: int, run: ResolvedRun) -> str:
    def fails(*_: Any) -> Any:
        raise ValueError("the evaluation is broken")

    Engine.evaluate = fails  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the evaluation is broken"):
        train(run, state_on(rank, run), lambda _: None)
    return str(find_newest(Path(run.config.training.run_dir) / "checkpoints"))


def test_an_evaluation_that_fails_loses_neither_its_step_nor_its_metrics(
    tmp_path: Path, undisturbed: dict[int, float | None]
) -> None:
    run = _run(2, tmp_path, steps=6, save=2, eval_every_steps=4)
    for newest in run_world(2, _evaluation_fails, run):
        assert newest.endswith("step-00000004")
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4]
    run_world(2, _train, run)
    assert _losses_of(tmp_path) == undisturbed


def test_a_validation_loss_that_comes_after_the_save_decides_what_is_kept(tmp_path: Path) -> None:
    run = _run(2, tmp_path, steps=6, save=1, eval_every_steps=2, checkpoint={"keep_last": 1, "keep_best": 2})
    run_world(2, _train, run)
    losses = {line["step"]: line["val_loss"] for line in metrics_of(tmp_path) if "val_loss" in line}
    assert sorted(losses) == [2, 4, 6]
    kept = {step_of(folder): val_loss_of(folder) for folder in step_folders(tmp_path / "checkpoints")}
    best = sorted(losses, key=lambda step: losses[step])[:2]
    assert kept == {step: losses[step] for step in {6, *best}}


def _train_with_slow_evaluations(rank: int, run: ResolvedRun, breaks: bool) -> dict[str, Any]:
    """An evaluation ends when the save before it has; a note of its loss is refused if `breaks`."""
    evaluate, note = Engine.evaluate, checkpointing.index.note_val_loss

    def after_the_save(engine: Engine, batches: list[MicroBatch]) -> StepStatistics:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join(60)
        return evaluate(engine, batches)

    def refuses(folder: Folder, val_loss: float) -> None:
        if breaks:
            raise RuntimeError("503 Slow Down")
        note(folder, val_loss)

    Engine.evaluate, checkpointing.index.note_val_loss = after_the_save, refuses  # type: ignore[method-assign]
    return _train(rank, run)


@pytest.mark.parametrize("breaks", [False, True])
def test_an_evaluation_that_outlasts_its_save_and_a_note_that_fails_end_no_run(breaks: bool, tmp_path: Path) -> None:
    run = _run(2, tmp_path, steps=4, save=2, eval_every_steps=2, checkpoint={"keep_last": 1, "timeout_seconds": 30})
    run_world(2, _train_with_slow_evaluations, run, breaks)
    assert [folder.name for folder in step_folders(tmp_path / "checkpoints")] == ["step-00000004"]


class _RollsBack(Callback):
    """Rejects step 4 once, after it was evaluated."""

    def __init__(self, context: RunContext) -> None:
        self.has_rejected, self._checkpoints = False, Path(context.run.config.training.run_dir) / "checkpoints"

    def after_step(self, record: StepRecord) -> StepDecision | None:
        rejects = record.step == 4 and record.val_loss is not None and not self.has_rejected
        self.has_rejected |= rejects
        if self.has_rejected and record.step == 3:
            assert (self._checkpoints / "latest").read_text() == "step-00000002\n"
        return StepDecision.ROLL_BACK if rejects else None


def _train_with_rollback(rank: int, run: ResolvedRun) -> dict[str, Any]:
    CALLBACKS.register("rolls-back", _RollsBack)
    return _train(rank, run)


def test_a_step_that_is_rolled_back_after_its_evaluation_leaves_no_checkpoint(tmp_path: Path) -> None:
    run = _run(2, tmp_path, steps=5, save=2, eval_every_steps=4, callbacks=["rolls-back"])
    out, _ = run_world(2, _train_with_rollback, run)
    assert any("step 4 is rolled back: samples 24 to 31 are left out; back to step 2" in line for line in out["shown"])
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4, 5]
    state = read_trainer_state(tmp_path / "checkpoints" / "step-00000004")
    assert state.consumed_samples == 6 * BATCH  # of the second time


def _train_with_damage(rank: int, run: ResolvedRun) -> str:
    """Step 2 is damaged before step 4 is rolled back."""
    reject = _RollsBack.after_step

    def damage(self: _RollsBack, record: StepRecord) -> StepDecision | None:
        if (decision := reject(self, record)) is not None and rank == 0:
            file = next(Path(run.config.training.run_dir, "checkpoints", "step-00000002").glob("model-*.safetensors"))
            file.write_bytes(file.read_bytes()[:-4] + b"\1\2\3\4")
        return decision

    _RollsBack.after_step = damage  # type: ignore[method-assign]
    try:
        _train_with_rollback(rank, run)
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_rollback_removes_nothing_before_another_step_is_loaded(damaged: bool, tmp_path: Path) -> None:
    """Step 2, where the run began, is pruned when step 4 is saved, which is before that is evaluated; or it is damaged."""
    checkpoint = {"keep_last": 0 if damaged else 1, "on_damage": "fallback"}
    run_world(2, _train, _run(2, tmp_path, save=2, steps=2, checkpoint=checkpoint))
    run = _run(2, tmp_path, save=2, steps=5, eval_every_steps=2, checkpoint=checkpoint, callbacks=["rolls-back"])
    if damaged:
        for told in run_world(2, _train_with_damage, run):
            assert "no older checkpoint is left" in told
    else:
        assert "there is no checkpoint to roll back to" in run_world(2, _train_with_rollback, run)[0]["error"]
    assert is_complete(tmp_path / "checkpoints" / "step-00000004")


class _Misspelt(Callback):
    def __init__(self, value: Any, after: Any = None, before: Any = None) -> None:
        self.value, self.after, self.before = value, after, before

    def before_step(self, position: Position) -> Any:
        return self.before

    def after_stp(self, record: StepRecord) -> None:
        raise AssertionError("no hook")

    def after_step(self, record: StepRecord) -> Any:
        record.metrics["mine"] = self.value
        return self.after


def _told(tmp_path: Path, *made: Any) -> list[str]:
    """What a run of one step says of each of these callbacks."""

    def body(rank: int) -> list[str]:
        found = []
        for number, callback in enumerate(made):
            run = _run(1, tmp_path / str(number), steps=1, callbacks=[f"mine {number}"])
            CALLBACKS.register(f"mine {number}", lambda context, callback=callback: callback)
            try:
                found.append(" ".join(_train(rank, run)["shown"]))
            except CallbackError as error:
                found.append(str(error))
        return found

    return run_world(1, body)[0]


def test_a_value_that_is_no_metric_a_class_that_is_no_callback_and_a_misspelt_hook_are_told(tmp_path: Path) -> None:
    # of the last one: this step has none
    value, other, *hooks = _told(
        tmp_path, *map(_Misspelt, [torch.tensor(3.0)]), object(), *map(_Misspelt, [{"a": 1.5}, None])
    )
    for text in (value, other):
        assert "(training.callbacks) failed" in text
    assert "record.metrics['mine'] must be a number, a text or a table of numbers, got tensor(3.)" in value
    assert "must derive from" in other
    for text in hooks:
        assert "has after_stp, which a run never calls; did you mean after_step?" in text


def test_a_decision_that_is_none_is_told(tmp_path: Path) -> None:
    before = [_Misspelt(1.0, before=decision) for decision in ("STOP", StepDecision.STOP)]
    after = [_Misspelt(1.0, after=decision) for decision in ("STOP", StepDecision.SKIP)]
    told = _told(tmp_path, *before, *after)
    for text in told[:2]:
        assert "before_step returned" in text
        assert "must return None or StepDecision.SKIP" in text
    for text in told[2:]:
        assert "after_step returned" in text
        assert "must return None or StepDecision.STOP or StepDecision.ROLL_BACK" in text


def test_every_hook_of_a_registered_callback_is_called() -> None:
    hooks = {name for name in vars(Callback) if not name.startswith("_")}
    assert hooks == {name for name in vars(RegisteredCallback) if not name.startswith("_")}


def test_a_wish_to_stop_that_only_an_evaluation_hears_stops_all(tmp_path: Path) -> None:
    """Step 2 is skipped and asks nobody; the evaluation after it is the second to ask."""
    run = _run(2, tmp_path, skip_steps=[2], eval_every_steps=2)
    for out in run_world(2, _train, run, (), 2):
        assert (out["step"], out["stopped"], out["error"]) == (2, True, "")
        assert out["checkpoint"].endswith("step-00000002")
    assert ["val_loss" in line for line in metrics_of(tmp_path)] == [False, True]


def _train_slowly(rank: int, run: ResolvedRun) -> list[str]:
    """Every step takes rank 1 0.4 s of its own work and rank 0 0.1 s."""
    intact = Trainer._compute

    def compute(self: Trainer, record: StepRecord) -> None:
        intact(self, record)
        assert 0 < (record.work_seconds or 0) <= (record.seconds or 0)
        record.work_seconds = (0.1, 0.4)[rank]

    Trainer._compute = compute  # type: ignore[method-assign]
    shown: list[str] = []
    train(run, state_on(rank, run), shown.append)
    return shown


def test_a_slow_rank_is_named_with_its_host(tmp_path: Path) -> None:
    run = _run(2, tmp_path, steps=4, logging={"straggler_every_steps": 2})
    shown, _ = run_world(2, _train_slowly, run)
    named = [line for line in shown if "is slow" in line]
    assert len(named) == 2
    assert all(line.startswith("rank 1 on ") and "s of its own work per step, the median is" in line for line in named)
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines if "own_seconds" in line] == [3, 4], "with the step after; the last at once"
    assert lines[2]["own_seconds"] == {"min": 0.1, "median": 0.1, "max": 0.4, "slowest_rank": 1}
    assert LoggingConfig().straggler_every_steps == 50


class _WithoutContext(Callback):
    """Has hooks alone."""


def test_a_callback_that_cannot_be_made_of_the_context_is_told_before_a_run_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CALLBACKS._registered, "mine", _WithoutContext)
    monkeypatch.setitem(CALLBACKS._registered, "right", lambda context: _WithoutContext())
    (problem,) = name_problems(RunConfig(training=TrainingConfig(callbacks=("mine", "right"))))
    assert "mine(context)" in str(problem)
    assert "__init__(self, context)" in str(problem)
