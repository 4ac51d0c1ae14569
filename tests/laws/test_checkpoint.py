"""Law 2: the checkpoint does not know the cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from plain_model import logits
from safetensors.torch import load_file
from worlds import (
    GPT2,
    LLAMA,
    LR,
    engine_on,
    global_batch,
    initial_weights,
    micro_batches,
    plain_config,
    run_of,
    state_on,
)

from megazero.checkpoint.index import HF_CONFIG, TrainerState, to_json
from megazero.checkpoint.load import open_checkpoint
from megazero.checkpoint.save import save_checkpoint
from megazero.config import ResolvedRun
from megazero.engine import Engine
from megazero.models.registry import FAMILIES
from megazero.parallel_state import ParallelState

TIED, UNTIED = LLAMA | {"tie_embeddings": True}, LLAMA | {"tie_embeddings": False}
MODELS = {"untied": UNTIED, "tied": TIED, "gpt2": GPT2}
SHAPES: dict[str, tuple[int, dict[str, Any], int]] = {
    "one rank": (1, {}, 0),
    "dp 2, stage 3": (2, {}, 3),
    "tp 2 with sp": (2, {"tp": 2, "sequence_parallel": True}, 1),
    "pp 2 dp 2, stage 2": (4, {"pp": 2}, 2),
    "tp 2 pp 2 dp 2, stage 1": (8, {"tp": 2, "pp": 2}, 1),
    "dp 4, stage 1": (4, {}, 1),
}


def _save(engine: Engine, directory: Path, step: int) -> None:
    config = engine.config
    state = TrainerState(step, step * 8, 0, step, "data", config.model.model_dump(), {}, {}, {})
    files = {
        HF_CONFIG: to_json(FAMILIES[config.model.family].hugging_face_config(config.model, config.precision.dtype))
    }
    save_checkpoint(directory, engine.sharded_model.sharded_state, engine.state, state, files)


def _run(rank: int, run: ResolvedRun, origin: Path | None, steps: range, save_to: Path | None) -> list[float]:
    """Load or draw, do some steps, save; the losses."""
    return _run_on(state_on(rank, run), run, origin, steps, save_to)


def _run_on(
    at: ParallelState,
    run: ResolvedRun,
    origin: Path | None,
    steps: range,
    save_to: Path | None,
    again: Path | None = None,
) -> list[float]:
    engine = engine_on(at.rank, run, init_weights=origin is None, state=at)
    if origin is not None:
        found = open_checkpoint(origin, engine.sharded_model.sharded_state, engine.state)
        assert found.trainer.step == steps.start
        engine.sharded_model.load(found.read, None)
    if again is not None:
        _save(engine, again, steps.start)
    losses = [engine.train_step(micro_batches(run, engine.state, step), LR).loss for step in steps]
    if save_to is not None:
        _save(engine, save_to, steps.stop)
    return losses


def _run_models(
    name: str, steps: range, origin: Path | None = None, save_to: Path | None = None, again: Path | None = None
) -> dict[str, list[float]]:
    """Every model's losses on one shape, in one world; each has a folder of its own in `origin`, `save_to` and `again`,
    where it is saved before the steps."""

    def body(rank: int) -> dict[str, list[float]]:
        runs = {model: _of(name, given)[1] for model, given in MODELS.items()}
        at = state_on(rank, runs["tied"])
        return {
            model: _run_on(
                at, run, origin and origin / model, steps, save_to and save_to / model, again and again / model
            )
            for model, run in runs.items()
        }

    return run_world(SHAPES[name][0], body)[0]


def _stored(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every tensor of every kind, read with safetensors alone."""
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for index in directory.glob("*.index.json"):
        kind = index.name.split(".")[0]
        for name, file in json.loads(index.read_text())["weight_map"].items():
            kinds.setdefault(kind, {})[name] = load_file(directory / file)[name]
    return kinds


def _of(name: str, model: dict[str, Any], **sections: Any) -> tuple[int, ResolvedRun]:
    world, parallel, stage = SHAPES[name]
    return world, run_of(world, model=model, parallel=parallel, zero={"stage": stage}, **sections)


@pytest.mark.slow
def test_step_0_is_bit_equal_from_every_shape(tmp_path: Path) -> None:
    """Each model from two shapes."""
    for index, name in enumerate(SHAPES):
        model = list(MODELS)[index % 3]
        world, run = _of(name, MODELS[model])
        run_world(world, _run, run, None, range(0), tmp_path / name)
        stored, wanted = _stored(tmp_path / name), initial_weights(run)
        assert set(stored) == {"model", "exp_avg", "exp_avg_sq"}
        assert set(stored["model"]) == set(wanted)
        for key, tensor in wanted.items():
            assert torch.equal(stored["model"][key], tensor), f"{key} of {model} from {name}"
            assert stored["exp_avg"][key].shape == tensor.shape
            assert not stored["exp_avg"][key].any()


@pytest.mark.slow
def test_a_run_resumed_on_any_shape_holds_every_bit_and_goes_on_as_if_uninterrupted(tmp_path: Path) -> None:
    """Loading on another shape and saving again changes no bit of weights and moments; the second loss sees the moments."""
    wanted = _run_models("one rank", range(3))
    first = _run_models("pp 2 dp 2, stage 2", range(1), save_to=tmp_path / "origin")
    resumed = {name: _run_models(name, range(1, 3), tmp_path / "origin", again=tmp_path / name) for name in SHAPES}
    for model, losses in wanted.items():
        assert first[model] == pytest.approx(losses[:1], rel=1e-5), model
        origin = _stored(tmp_path / "origin" / model)
        for name, of_models in resumed.items():
            assert of_models[model] == pytest.approx(losses[1:], rel=1e-5), (model, name)
            again = _stored(tmp_path / name / model)
            for kind, tensors in origin.items():
                assert set(again[kind]) == set(tensors)
                for key, tensor in tensors.items():
                    assert torch.equal(again[kind][key], tensor), f"{kind} of {key}, {model} through {name}"


def test_masters_carry_a_run_between_precisions(tmp_path: Path) -> None:
    """bf16 saves its fp32 masters; fp32 resumes from them, and bf16 from fp32, without loss."""
    bf16 = {"precision": {"dtype": "bf16"}}
    world, run = _of("pp 2 dp 2, stage 2", TIED, **bf16)
    run_world(world, _run, run, None, range(1), tmp_path / "bf16")
    stored = _stored(tmp_path / "bf16")
    assert set(stored) == {"model", "master", "exp_avg", "exp_avg_sq"}
    for name, tensor in stored["model"].items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, stored["master"][name].to(torch.bfloat16))
    world, run = _of("tp 2 with sp", TIED)
    run_world(world, _run, run, tmp_path / "bf16", range(1, 1), tmp_path / "fp32")
    for name, tensor in _stored(tmp_path / "fp32")["model"].items():
        assert torch.equal(tensor, stored["master"][name])
    world, run = _of("dp 2, stage 3", TIED, **bf16)
    run_world(world, _run, run, tmp_path / "fp32", range(1, 1), tmp_path / "again")
    again = _stored(tmp_path / "again")
    for kind in stored:
        for name, tensor in stored[kind].items():
            assert torch.equal(again[kind][name], tensor), f"{kind} of {name}"


@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_a_step_directory_and_gives_our_logits(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    world, run = _of("pp 2 dp 2, stage 2", MODELS[model])
    run_world(world, _run, run, None, range(1), tmp_path / "step")
    tokens, _ = global_batch(run, 0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "step", attn_implementation="eager")
    with torch.no_grad():
        given = theirs(input_ids=tokens).logits
        ours = torch.tensor(run_world(2, _logits, _of("tp 2 with sp", MODELS[model])[1], tmp_path / "step")[0])
        plain = logits(_stored(tmp_path / "step")["model"], plain_config(run), tokens)
    assert (ours - given).norm() / given.norm() < 1e-5
    assert (plain - given).norm() / given.norm() < 1e-5


def _logits(rank: int, run: ResolvedRun, origin: Path) -> Any:
    """Our model's logits [batch, seq, vocab], computed over tp."""
    engine = engine_on(rank, run, init_weights=False)
    found = open_checkpoint(origin, engine.sharded_model.sharded_state, engine.state)
    engine.sharded_model.load(found.read, None)
    batches = [replace(batch, labels=None) for batch in micro_batches(run, engine.state, 0)]
    with torch.no_grad():
        parts = [engine.chunks[0](None, batch) for batch in batches]
    return torch.cat([part.transpose(0, 1) for part in parts]).numpy()


def test_the_state_is_sent_to_its_writers_once(tmp_path: Path) -> None:
    """Traffic of a save is at most the state itself: every element has one source and one writer."""
    world, run = _of("tp 2 pp 2 dp 2, stage 1", UNTIED)
    sent = sum(run_world(world, _bytes_of_a_save, run, tmp_path / "step"))
    state = sum(file.stat().st_size for file in (tmp_path / "step").glob("*.safetensors"))
    assert 0 < sent < state


def _bytes_of_a_save(rank: int, run: ResolvedRun, directory: Path) -> int:
    engine = engine_on(rank, run)
    engine.state.traffic.reset()
    _save(engine, directory, 0)
    return engine.state.traffic.sent_bytes["stage", "send_recv"]
