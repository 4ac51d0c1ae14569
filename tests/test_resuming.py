"""A resumed run says what it does otherwise than the run that wrote the checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest

from megazero.checkpoint.index import CheckpointError, TrainerState, read_trainer_state
from megazero.config import RunConfig, resolve
from megazero.data.identity import fingerprint_of
from megazero.data.tokenizer import load_tokenizer
from megazero.engine import Position
from megazero.engine.phases import check_same_run, phases_after, position_after
from megazero.training.resuming import tell_changes
from tests.tokenizer_files import write_tokenizer


def _config(**sections: Any) -> RunConfig:
    return resolve(RunConfig.model_validate(sections), 1).config


def _written_by(config: RunConfig, step: int, fingerprint: str = "a") -> TrainerState:
    """The state of a run in which every step read 4 samples and changed the weights."""
    model, whole = config.model.model_dump(), config.model_dump(mode="json")
    return TrainerState(step, 4 * step, 0, step, fingerprint, model, whole, {}, {})


def _told(trainer: TrainerState, config: RunConfig, fingerprint: str = "a") -> list[str]:
    phases = phases_after(trainer, config, fingerprint)
    return tell_changes(trainer, config, Position(trainer.step, trainer.consumed_samples, 0, phases))


def test_the_same_configuration_has_nothing_to_tell() -> None:
    config = _config()
    assert _told(_written_by(config, 10), config) == []
    assert _told(TrainerState(0, 0, 0, 0, "", config.model.model_dump(), {}, {}, {}), config) == [], "imported"


@pytest.mark.parametrize("later", [{}, {"of_a_later_release": 1}])
def test_a_run_goes_on_from_what_any_release_has_written(tmp_path: Path, later: dict[str, int]) -> None:
    """The first release wrote these nine keys."""
    config = _config()
    counts = {"step": 5, "consumed_samples": 20, "consumed_tokens": 80, "optimizer_steps": 5, "data_fingerprint": "a"}
    tables = {"model": config.model.model_dump(mode="json"), "config": {}, "shape": {}, "versions": {}}
    (tmp_path / "trainer_state.json").write_text(json.dumps(counts | tables | later))
    trainer = read_trainer_state(tmp_path)
    check_same_run("it", config, "a", trainer)
    position = position_after(trainer, config, "a")
    assert (position.step, position.samples, position.tokens) == (5, 20, 80)


def test_a_run_without_a_step_left_says_so_and_begins_no_phase() -> None:
    before = _config(training={"steps": 6})
    for steps in (5, 6):
        now = _config(
            training={"steps": steps, "run_dir": "runs/x"},
            lr_schedule={"name": "linear"},
            checkpoint={"accept_changes": ["lr_schedule"]},
        )
        line, *others = _told(_written_by(before, 6), now)
        assert f"nothing is left to train: the run is at step 6 and training.steps is {steps}; raise it" in line
        assert 'training.run_dir (now "runs/x")' in line
        assert not [other for other in others if "begins" in other or "runs from" in other]


def test_keys_that_differ_are_told_with_both_values_and_places_are_not() -> None:
    before = _config(optimizer={"betas": [0.9, 0.95]}, training={"global_batch_size": 8, "run_dir": "a"})
    now = _config(
        optimizer={"betas": [0.9, 0.99]},
        precision={"dtype": "fp16"},
        training={"global_batch_size": 16, "run_dir": "b"},
        checkpoint={"resume": "somewhere", "directory": "s3://user:secret@host/bucket"},
        logging={"peak_flops": 1e12},
    )
    (line,) = _told(_written_by(before, 10), now)
    for told in (
        'precision.dtype "bf16" -> "fp16"',
        "training.global_batch_size 8 -> 16",
        "optimizer.betas [0.9, 0.95] -> [0.9, 0.99]",
        "logging.peak_flops unset -> 1000000000000.0",
    ):
        assert told in line
    assert "secret" not in line
    assert "run_dir" not in line


def test_a_longer_rope_is_a_change_of_the_rope() -> None:
    """A key whose value is a table is one key, whatever it was before, and begins a phase where it is accepted."""
    yarn = {"type": "yarn", "factor": 4.0, "original_seq_len": 1024}
    before, accepts = _config(), {"accept_changes": ["rope"]}
    now = _config(model={"rope_scaling": yarn}, checkpoint=accepts)
    line = _told(_written_by(before, 10), now)[0]
    assert 'begins (checkpoint.accept_changes): model.rope_scaling unset -> { type = "yarn", factor = 4.0' in line
    imported = TrainerState(0, 0, 0, 0, "", {}, {}, {}, {})
    assert "model.rope_scaling unset ->" in _told(imported, now, "")[0]
    again = _config(model={"rope_scaling": yarn | {"factor": 8.0}}, checkpoint=accepts)
    assert "factor = 4.0" in _told(_written_by(now, 10), again)[0]
    check_same_run("it", again, "a", _written_by(now, 10))
    with pytest.raises(CheckpointError, match=r"model\.rope_scaling is .*accept_changes = \[\"rope\"\]"):
        check_same_run("it", _config(model={"rope_scaling": yarn}), "a", _written_by(before, 10))


@pytest.mark.parametrize("new", [True, False])
def test_a_mask_of_documents_changes_only_where_it_is_accepted(new: bool) -> None:
    before, now = _config(data={"document_mask": not new}), {"document_mask": new}
    trainer = _written_by(before, 10)
    told = str(new).lower()
    with pytest.raises(
        CheckpointError, match=rf"document_mask is {told}, .*\. If .*accept_changes = \[\"document_mask\"\] begins"
    ):
        check_same_run("it", _config(data=now), "a", trainer)
    accepts = _config(data=now, checkpoint={"accept_changes": ["document_mask"]})
    check_same_run("it", accepts, "a", trainer)
    (line,) = _told(trainer, accepts)
    assert line.endswith(f"data.document_mask {str(not new).lower()} -> {told}")
    (phase,) = phases_after(trainer, accepts, "a")
    assert (phase.first_sample, phase.schedule_step) == (0, 0), "samples and schedule go on"
    check_same_run("it", _config(data=now), "a", _written_by(accepts, 12))


def test_a_run_whose_documents_ended_otherwise_is_told_how(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", "a <stop> </s>", "</s> <stop>")
    then, now = (fingerprint_of([], load_tokenizer(path, end).fingerprint, []) for end in ("<stop>", "</s>"))
    config = _config(data={"tokenizer": str(path), "sources": ["it"]})
    with pytest.raises(CheckpointError, match=r'other data.*\. data.eod_token = "<stop>" ends documents as before\.'):
        check_same_run("it", config, now, _written_by(config, 10, then))


def test_a_mask_of_documents_is_compared_only_with_a_run_that_read_data() -> None:
    masked, trainer = _config(data={"document_mask": True}), _written_by(_config(), 10)
    check_same_run("it", masked, "a", TrainerState(0, 0, 0, 0, "", trainer.model, {}, {}, {}))
    del trainer.config["data"]["document_mask"]  # an older release did not know it and had none
    check_same_run("it", _config(), "a", trainer)
    with pytest.raises(CheckpointError, match=r"another run: data\.document_mask is true, the checkpoint has false"):
        check_same_run("it", masked, "a", trainer)


def test_all_that_is_to_be_accepted_is_told_at_once() -> None:
    now = _config(model={"seq_len": 2048}, data={"document_mask": True})
    with pytest.raises(CheckpointError, match=r"accept_changes = \[\"document_mask\", \"seq_len\"\] begins"):
        check_same_run("it", now, "a", _written_by(_config(), 10))
    accepts = _config(data={"document_mask": True}, checkpoint={"accept_changes": ["rope", "document_mask"]})
    advised = r"other data.*accept_changes = \[\"data\", \"document_mask\", \"rope\"\] begins"
    with pytest.raises(CheckpointError, match=advised):  # with what is accepted already: it replaces that
        check_same_run("it", accepts, "b", _written_by(_config(), 10))


def test_learned_positions_keep_their_number_and_nothing_else_is_advised() -> None:
    """Samples could not become longer: the weight has a row for each position."""
    gpt2 = {"family": "gpt2", "num_kv_heads": None}
    trainer = _written_by(_config(model=gpt2), 10)
    longer = _config(model=gpt2 | {"seq_len": 2048}, checkpoint={"accept_changes": ["seq_len"]})
    with pytest.raises(CheckpointError, match=r"has learned 1024 positions.*set model\.seq_len to 1024$"):
        check_same_run("it", longer, "a", trainer)


def test_a_key_that_an_older_release_did_not_know_had_its_default() -> None:
    trainer = _written_by(_config(), 10)
    del trainer.config["training"]["skip_steps"], trainer.config["zero"]["offload"]
    assert _told(trainer, _config()) == []
    assert _told(trainer, _config(training={"skip_steps": [20]})) == [
        "changed since the checkpoint was written: training.skip_steps [] -> [[20, 20]]"
    ]


def test_more_steps_tell_what_becomes_of_the_learning_rate() -> None:
    """A cosine to 0.1: at update k of n, 0.1 + 0.9 (1 + cos(pi k / (n - 1))) / 2, and 0.1 where it has ended."""
    trainer = _written_by(_config(optimizer={"lr": 1.0}, training={"steps": 1000}), 1000)
    now = 0.1 + 0.9 * (1 + cos(pi * 1000 / 1999)) / 2
    assert _told(trainer, _config(optimizer={"lr": 1.0}, training={"steps": 2000})) == [
        "changed since the checkpoint was written: training.steps 1000 -> 2000",
        f"learning rate of step 1001: 0.1 by the checkpoint's schedule of 1000 steps, which has ended; now {now:.4g}, in "
        "a run of 2000 steps",
    ]


def test_a_phase_tells_what_it_accepts_and_then_what_else_has_changed() -> None:
    trainer = _written_by(_config(optimizer={"lr": 1.0}, training={"steps": 1000}), 1000)
    sections: dict[str, Any] = {
        "optimizer": {"lr": 1.0, "weight_decay": 0.0},
        "model": {"seq_len": 2048},
        "lr_schedule": {"name": "linear", "min_lr_ratio": 0.0},
        "training": {"steps": 1201},
        "checkpoint": {"accept_changes": ["seq_len", "lr_schedule"]},
    }
    told = _told(trainer, _config(**sections), "b")
    assert told[0].startswith("phase 2 of the run begins (checkpoint.accept_changes): model.seq_len 1024 -> 2048, ")
    assert 'lr_schedule.name "cosine" -> "linear"' in told[0]
    assert told[1:] == [
        "its data is read from the first sample, which is sample 4000 of the run",
        "its learning-rate schedule begins anew and runs from step 1001 to 1201",
        "changed since the checkpoint was written: optimizer.weight_decay 0.1 -> 0.0",
        "learning rate of step 1001: 0.1 by the checkpoint's schedule of 1000 steps, which has ended; now 1, in a run of "
        "1201 steps",
    ]
    # within the phase: the same command, then a longer one without the name, which follows another curve
    config = _config(**sections)
    phases = phases_after(trainer, config, "b")
    within = _written_by(config, 1100, "b")
    within = replace(within, phases=[vars(phase) for phase in phases])
    assert _told(within, config, "b") == ["in phase 2 of the run, which began after step 1000"]
    sections |= {"training": {"steps": 1401}, "checkpoint": {"accept_changes": ["seq_len"]}}
    told = _told(within, _config(**sections), "b")
    assert told[0] == "in phase 2 of the run, which began after step 1000"
    assert told[2] == (
        "learning rate of step 1101: 0.5 by the checkpoint's schedule of 1201 steps; now 0.75, in a run of 1401 steps"
    )
