"""Law 1 over a border: a run that changes on purpose goes on with weights and moments, on any shape, as a plain trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import metrics_of, run_command, run_world
from test_checkpoint import _stored
from test_data_corpus import write_pair
from worlds import LR, difference, loop_of, over, plain_trainer, state_on

from megazero.checkpoint.index import CheckpointError, read_trainer_state
from megazero.config import ResolvedRun
from megazero.data import open_corpus
from megazero.data.indexed import IndexedDataset
from megazero.engine import Engine
from megazero.training.batches import DataError, open_corpus_of, without_trained
from megazero.training.trainer import train

pytestmark = pytest.mark.slow  # starts whole runs

VOCABULARY, SEED = 257, 7
EVERYTHING = ["data", "seq_len", "rope", "lr_schedule", "batch"]
# What each phase of a run changes, and the learning rates that follow, by hand.
CHANGES: list[dict[str, Any]] = [
    {},
    {
        "model": {"seq_len": 32, "rope_theta": 500.0},
        "data": {"sources": ["two"]},
        "optimizer": {"lr": LR / 2},
        "lr_schedule": {"name": "linear", "min_lr_ratio": 0.5},
        "training": {"global_batch_size": 4, "steps": 5},
        "checkpoint": {"accept_changes": EVERYTHING},
    },
    {
        "optimizer": {"lr": LR / 4},
        "lr_schedule": {"name": "constant", "min_lr_ratio": 0.1},
        "training": {"steps": 7},
        "checkpoint": {"accept_changes": ["lr_schedule"]},
    },
]
RATES = [LR, LR, LR / 2, LR / 2 * 0.75, LR / 4, LR / 4, LR / 4]
# source, seq_len, the samples of each step in the source's own order
READS = [("one", 16, range(8)), ("one", 16, range(8, 16))]
READS += [("two", 32, range(4 * step, 4 * step + 4)) for step in range(5)]
TOKENS = [8 * 16, 16 * 16, *(16 * 16 + step * 4 * 32 for step in range(1, 6))]
SHAPES: list[tuple[int, dict[str, Any], int]] = [
    (1, {}, 0),
    (2, {}, 3),
    (2, {"tp": 2, "sequence_parallel": True}, 1),
    (4, {"pp": 2}, 2),
]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of random bytes, `one` and `two`."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(3)
    for name in ("one", "two"):
        write_pair(folder / name, random.integers(0, VOCABULARY, 4096))
    return folder


def _run(
    corpora: Path, run_dir: Path, phase: int, world: int = 1, parallel: Any = None, stage: int = 0, **more: Any
) -> ResolvedRun:
    """The run file of a phase, with further sections on top."""
    config: dict[str, Any] = {
        "parallel": parallel or {},
        "zero": {"stage": stage},
        "data": {"sources": ["one"], "validation_fraction": 0.0},
        "training": {"steps": 2},
    }
    config = over(config, *CHANGES[: phase + 1], more)
    config["data"]["sources"] = [str(corpora / name) for name in config["data"]["sources"]]
    return loop_of(run_dir, world, **config)


def _train(rank: int, run: ResolvedRun, stop_at: int = 0, bad_sample: int | None = None) -> dict[str, Any]:
    """A run to its end, or stopped after so many steps; what it printed, and why it ended, if it did."""
    shown: list[str] = []
    asked = 0
    intact = Engine._run

    def wants_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == stop_at

    def spoiled(self: Engine, batches: Any, *, trains: bool) -> Any:
        loss_sum, tokens = intact(self, batches, trains=trains)
        is_bad = any(bad_sample in batch.sample_ids.tolist() for batch in batches)
        return (loss_sum * float("nan") if is_bad else loss_sum), tokens

    Engine._run = spoiled  # type: ignore[method-assign]
    try:
        train(run, state_on(rank, run), shown.append, wants_stop)
    except (CheckpointError, DataError) as error:
        return {"shown": shown, "error": str(error)}
    return {"shown": shown, "error": ""}


def _measured(run_dir: Path) -> list[tuple[Any, ...]]:
    return [(one["step"], one["loss"], one["grad_norm"], one["lr"], one["tokens"]) for one in metrics_of(run_dir)]


def _plainly(corpora: Path, folder: Path) -> dict[str, Any]:
    """The three phases on the plain model: it swaps data, length, rotary base and rate, and keeps weights and moments."""
    runs = [_run(corpora, folder, phase) for phase in range(3)]
    trainer = plain_trainer(runs[0])
    opened = {
        (source, seq_len): open_corpus(
            [(str(corpora / source), 1.0)],
            tokenizer="byte",
            seq_len=seq_len,
            seed=SEED,
            validation_fraction=0.0,
            cache_dir=folder,
            vocab_size=VOCABULARY,
        )
        for source, seq_len in {(source, seq_len) for source, seq_len, _ in READS}
    }
    out: dict[str, Any] = {"loss": [], "norm": []}
    for (source, seq_len, samples), rate in zip(READS, RATES, strict=True):
        theta = 500.0 if source == "two" else 10000.0
        trainer.config = replace(trainer.config, seq_len=seq_len, rope_theta=theta)
        batch = torch.from_numpy(opened[source, seq_len].train.batch(list(samples)))
        step = trainer.step(batch[:, :-1], batch[:, 1:], rate)
        out["loss"].append(step.loss)
        out["norm"].append(step.grad_norm)
    for kind, tensors in (
        ("model", trainer.weights),
        ("exp_avg", trainer.first_moment),
        ("exp_avg_sq", trainer.second_moment),
    ):
        out[kind] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return out


@pytest.mark.slow
def test_a_run_that_changes_data_length_rope_batch_and_schedule_is_the_plain_trainers_on_any_shape(
    corpora: Path, tmp_path: Path
) -> None:
    """Every phase on another shape than the one before; every shape goes on from one and is gone on from by another."""
    wanted = run_world(1, lambda _: _plainly(corpora, tmp_path))[0]
    for first in (0, 2):
        run_dir = tmp_path / str(first)
        for phase in range(3):
            world, parallel, stage = SHAPES[(first + phase) % len(SHAPES)]
            out = run_world(world, _train, _run(corpora, run_dir, phase, world, parallel, stage))[0]
            assert out["error"] == ""
            begun = [line for line in out["shown"] if line.startswith(f"phase {phase + 1} of the run begins")]
            assert len(begun) == (phase > 0), out["shown"]
        lines = metrics_of(run_dir)
        assert [line["step"] for line in lines] == list(range(1, 8))
        assert [line["tokens"] for line in lines] == TOKENS
        assert [line["lr"] for line in lines] == pytest.approx(RATES, rel=1e-12)
        assert [line["loss"] for line in lines] == pytest.approx(wanted["loss"], rel=1e-5)
        assert [line["grad_norm"] for line in lines] == pytest.approx(wanted["norm"], rel=1e-5)
        assert [line.get("phase", 1) for line in lines] == [1, 1, 2, 2, 2, 3, 3]
        newest = run_dir / "checkpoints" / "step-00000007"
        stored = _stored(newest)
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            for name, tensor in wanted[kind].items():
                assert difference(stored[kind][name], tensor) < 2e-5, f"{kind} of {name}, from shape {first}"
        phases = read_trainer_state(newest).phases
        if first == 0:
            listed = run_command("checkpoint", "inspect", newest).stdout
            assert (
                "phase 3, after step 5: lr_schedule.name, lr_schedule.min_lr_ratio, optimizer.lr, training.steps changed"
                in listed
            )
        assert [phase["step"] for phase in phases] == [2, 5]
        assert [phase["first_sample"] for phase in phases] == [16, 16]
        assert [phase["schedule_step"] for phase in phases] == [2, 5]
        assert phases[0]["changed"]["model.seq_len"] == [16, 32]
        assert phases[0]["changed"]["model.rope_theta"] == [10000.0, 500.0]
        assert phases[0]["changed"]["training.global_batch_size"] == [8, 4]
        assert phases[0]["changed"]["data.sources"] == [[str(corpora / "one")], [str(corpora / "two")]]
        assert phases[1]["changed"] == {
            "optimizer.lr": [LR / 2, LR / 4],
            "lr_schedule.name": ["linear", "constant"],
            "lr_schedule.min_lr_ratio": [0.5, 0.1],
            "training.steps": [5, 7],
        }


@pytest.mark.slow
@pytest.mark.parametrize(("world", "parallel", "stage"), [(2, {}, 3), (2, {"pp": 2}, 1)])
def test_the_same_command_goes_on_within_the_phase_bit_by_bit(
    world: int, parallel: dict[str, Any], stage: int, corpora: Path, tmp_path: Path
) -> None:
    """Begun from another run's checkpoint, stopped after a step of the phase, and repeated."""
    shape = (world, parallel, stage)
    run_world(world, _train, _run(corpora, tmp_path / "first", 0, *shape))
    origin = {"checkpoint": {"resume": str(tmp_path / "first/checkpoints/step-00000002"), "accept_changes": EVERYTHING}}
    run_world(world, _train, _run(corpora, tmp_path / "whole", 1, *shape, **origin))
    parts = _run(corpora, tmp_path / "parts", 1, *shape, **origin)
    assert "phase 2 of the run begins" in "\n".join(run_world(world, _train, parts, 1)[0]["shown"])
    shown = "\n".join(run_world(world, _train, parts)[0]["shown"])
    assert "in phase 2 of the run, which began after step 2" in shown
    assert "begins" not in shown
    assert "changed since" not in shown
    assert _measured(tmp_path / "parts") == _measured(tmp_path / "whole")
    last = [read_trainer_state(tmp_path / name / "checkpoints" / "step-00000005") for name in ("whole", "parts")]
    assert last[0].phases == last[1].phases
    assert len(last[0].phases) == 1


def test_what_is_not_accepted_is_refused_as_ever_and_says_how_to_accept_it(corpora: Path, tmp_path: Path) -> None:
    run_world(1, _train, _run(corpora, tmp_path, 0))

    def refusal(accepts: list[str], **changed: Any) -> str:
        run = _run(corpora, tmp_path, 0, **changed, checkpoint={"accept_changes": accepts})
        return str(run_world(1, _train, run)[0]["error"])

    other_data, longer = {"data": {"sources": ["two"]}}, {"model": {"seq_len": 32}}
    assert "trained on other data" in refusal([], **other_data)
    assert 'checkpoint.accept_changes = ["data", "rope", "batch"]' in refusal(["batch", "rope"], **other_data)
    assert "model.seq_len is 32, the checkpoint has 16" in refusal(["data", "rope"], **longer)
    assert 'checkpoint.accept_changes = ["seq_len"]' in refusal([], **longer)
    assert 'accept_changes = ["data", "seq_len", "rope"]' in refusal(["data", "seq_len"], model={"rope_theta": 500.0})
    assert "trained on other data" in refusal(["seq_len"], **other_data, **longer)
    assert "trained on other data" in refusal(["seq_len"], **longer, training={"seed": 8})
    assert "model.hidden_size is 64" in refusal(EVERYTHING, model={"hidden_size": 64})
    assert "accept_changes" not in refusal(EVERYTHING, model={"hidden_size": 64})
    gpt2 = {"family": "gpt2", "num_kv_heads": 4}
    run_world(1, _train, _run(corpora, tmp_path / "gpt2", 0, model=gpt2))
    out = run_world(
        1,
        _train,
        _run(corpora, tmp_path / "gpt2", 0, model=gpt2 | {"seq_len": 32}, checkpoint={"accept_changes": EVERYTHING}),
    )
    assert "has learned 16 positions, and this run has model.seq_len = 32" in out[0]["error"]
    assert refusal(["seq_len"], **longer, training={"steps": 3}) == "", "the same data, cut into longer samples"


def test_other_data_alone_begins_at_its_first_sample_while_the_schedule_goes_on(corpora: Path, tmp_path: Path) -> None:
    """A phase goes on where nothing that its checkpoint records has changed, though its files may have been moved."""
    schedule = {"lr_schedule": {"name": "linear", "min_lr_ratio": 0.0}}
    run_world(1, _train, _run(corpora, tmp_path / "all", 0, **schedule, training={"steps": 5}))
    run_world(1, _train, _run(corpora, tmp_path / "run", 0, **schedule, training={"steps": 5}), 2)
    changed = {"data": {"sources": ["two"]}, "checkpoint": {"accept_changes": EVERYTHING}}
    out = run_world(1, _train, _run(corpora, tmp_path / "run", 0, **schedule, training={"steps": 5}, **changed))[0]
    assert "its data is read from the first sample, which is sample 16 of the run" in out["shown"]
    assert not [line for line in out["shown"] if "schedule begins anew" in line]
    rates = [[line["lr"] for line in metrics_of(tmp_path / name)] for name in ("all", "run")]
    assert rates[0] == rates[1]
    state = read_trainer_state(tmp_path / "run" / "checkpoints" / "step-00000005")
    (phase,) = state.phases
    assert set(phase["changed"]) == {"data.sources", "data fingerprint"}
    assert state.consumed_samples == 40
    # a copy of the data under another path is the same data
    copy = tmp_path / "two"
    for suffix in (".bin", ".idx"):
        copy.with_suffix(suffix).write_bytes((corpora / "two").with_suffix(suffix).read_bytes())
    changed["data"] = {"sources": [str(copy)]}
    out = run_world(1, _train, _run(corpora, tmp_path / "run", 0, **schedule, training={"steps": 5}, **changed))[0]
    assert "in phase 2 of the run, which began after step 2" in out["shown"]
    assert f'changed since the checkpoint was written: data.sources ["{corpora}/two"] -> ["{copy}"]' in out["shown"]


def test_a_rollback_to_where_the_phase_began_reads_on_behind_the_bad_samples(corpora: Path, tmp_path: Path) -> None:
    run_world(1, _train, _run(corpora, tmp_path / "first", 0))
    begin = {"resume": str(tmp_path / "first/checkpoints/step-00000002"), "accept_changes": ["data"]}
    phase = {"data": {"sources": ["two"]}, "checkpoint": begin}
    back = _run(corpora, tmp_path / "back", 0, **phase, training={"steps": 5, "on_non_finite": "rollback"})
    out = run_world(1, _train, back, 0, 29)[0]  # in step 4
    assert "samples 24 to 31 are left out; back to step 2, continuing with sample 32" in "\n".join(out["shown"])
    run_world(1, _train, _run(corpora, tmp_path / "over", 0, **phase, training={"steps": 7, "skip_steps": [[3, 4]]}))
    wanted = {line["step"] - 2: line.get("loss") for line in metrics_of(tmp_path / "over")}
    assert {line["step"]: line["loss"] for line in metrics_of(tmp_path / "back")} == {
        step: wanted[step] for step in (3, 4, 5)
    }
    (recorded,) = read_trainer_state(tmp_path / "back" / "checkpoints" / "step-00000005").phases
    assert (recorded["step"], recorded["first_sample"]) == (2, 16)


def test_what_any_phase_has_trained_on_is_not_evaluated_in_a_later_one(corpora: Path, tmp_path: Path) -> None:
    """4,096 tokens: 255 windows of 16 or 127 of 32.  Phase 1 trains on 192 of `one`, so on its targets up to token 3,072."""
    source = {"path": str(corpora / "one"), "name": "old", "every_steps": 1, "samples": 2}
    held = {"data": {"validation_fraction": 0.25}}
    run_world(1, _train, _run(corpora, tmp_path / "a", 0, **held))
    state = read_trainer_state(tmp_path / "a/checkpoints/step-00000002")
    assert list(state.trained.values()) == [3072]

    def phase(name: str, start: str, step: int = 2, seq_len: int = 16, **data: Any) -> ResolvedRun:
        origin = {"resume": str(tmp_path / f"{start}/checkpoints/step-{step:08d}"), "accept_changes": EVERYTHING}
        more = {"data": data, "model": {"seq_len": seq_len}, "training": {"steps": step + 1}, "checkpoint": origin}
        return _run(corpora, tmp_path / name, 0, **more)

    other = {"sources": ["two"], "validation_sources": [source], "validation_fraction": 0.1}
    key = "data.validation_sources: old"
    for seq_len, told in ((16, "63 of 255"), (32, "31 of 127")):
        run = phase(f"b{seq_len}", "a", seq_len=seq_len, **other)
        out = run_world(1, _train, run)[0]
        assert f"{key}: {told} samples are evaluated; an earlier phase trained on the others" in out["shown"]
        old = without_trained(open_corpus_of(run.config), state.trained, print).named_validation["old"]
        tokens = IndexedDataset(corpora / "one").tokens
        np.testing.assert_array_equal(old.batch([0])[0], tokens[3072 : 3072 + seq_len + 1])
        assert len(read_trainer_state(tmp_path / f"b{seq_len}/checkpoints/step-00000003").trained) == 2
    # what is held out again may not grow into it, nor may a third phase forget the first
    out = run_world(1, _train, phase("c", "a", validation_fraction=0.5))[0]
    assert (
        "data.validation_fraction: 63 of 127 samples are evaluated; an earlier phase trained on the others"
        in out["shown"]
    )
    out = run_world(1, _train, phase("d", "b16", 3, **other | {"validation_fraction": 0.2}))[0]
    assert f"{key}: 63 of 255 samples are evaluated; an earlier phase trained on the others" in out["shown"]
    run_world(1, _train, _run(corpora, tmp_path / "all", 0))
    out = run_world(1, _train, phase("e", "all", **other))[0]
    assert f"{key}: an earlier phase of the run has trained on all 255 samples" in out["error"]
