"""Law 2: the checkpoint does not know the cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

from megazero.checkpoint.index import CheckpointError
from megazero.config import ResolvedRun
from megazero.engine import Engine, Position

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


@dataclass(frozen=True)
class Part:
    """A part of a run: load or draw, save again what was loaded if asked, do some steps, save."""

    run: ResolvedRun
    steps: range
    origin: Path | None = None
    save_to: Path | None = None
    save_again_to: Path | None = None


def do_parts(rank: int, parts: Sequence[Part]) -> list[tuple[list[float], str]]:
    """Parts of runs of one shape, one after the other; of each the losses, or why its checkpoint was refused."""
    state, done = state_on(rank, parts[0].run, on_one_machine=True), []
    for part in parts:
        engine = engine_on(rank, part.run, init_weights=part.origin is None, state=state)
        try:
            done.append((_do_on(engine, part), ""))
        except CheckpointError as error:
            done.append(([], str(error)))
        engine.sharded_model.close()
    return done


def _do_on(engine: Engine, part: Part) -> list[float]:
    steps = part.steps
    if part.origin is not None:
        assert engine.load(part.origin, "data") == Position(steps.start, steps.start * 8, 0)
    if part.save_again_to is not None:
        engine.save(part.save_again_to, Position(steps.start, steps.start * 8, 0), "data")
    losses = [engine.train_step(micro_batches(part.run, engine.state, step), LR).loss for step in steps]
    if part.save_to is not None:
        engine.save(part.save_to, Position(steps.stop, steps.stop * 8, 0), "data")
    return losses


def losses_of(world: int, *parts: Part) -> list[list[float]]:
    """What `do_parts` gives, on every rank the same."""
    first, *others = run_world(world, do_parts, parts)
    assert all(one == first for one in others)
    assert not any(error for _, error in first)
    return [losses for losses, _ in first]


def _losses_of_models(name: str, steps: range, **places: Path) -> dict[str, list[float]]:
    """Every model's losses on one shape, in one world; each has a folder of its own in the places of `Part`."""
    parts = []
    for model, given in MODELS.items():
        parts.append(Part(_of(name, given)[1], steps, **{place: path / model for place, path in places.items()}))
    return dict(zip(MODELS, losses_of(SHAPES[name][0], *parts), strict=True))


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
        losses_of(world, Part(run, range(0), save_to=tmp_path / name))
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
    wanted = _losses_of_models("one rank", range(3))
    first = _losses_of_models("pp 2 dp 2, stage 2", range(1), save_to=tmp_path / "origin")
    places = {name: {"origin": tmp_path / "origin", "save_again_to": tmp_path / name} for name in SHAPES}
    resumed = {name: _losses_of_models(name, range(1, 3), **of_shape) for name, of_shape in places.items()}
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
    losses_of(world, Part(run, range(1), save_to=tmp_path / "bf16"))
    stored = _stored(tmp_path / "bf16")
    assert set(stored) == {"model", "master", "exp_avg", "exp_avg_sq"}
    for name, tensor in stored["model"].items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, stored["master"][name].to(torch.bfloat16))
    world, run = _of("tp 2 with sp", TIED)
    losses_of(world, Part(run, range(1, 1), tmp_path / "bf16", tmp_path / "fp32"))
    for name, tensor in _stored(tmp_path / "fp32")["model"].items():
        assert torch.equal(tensor, stored["master"][name])
    world, run = _of("dp 2, stage 3", TIED, **bf16)
    losses_of(world, Part(run, range(1, 1), tmp_path / "fp32", tmp_path / "again"))
    again = _stored(tmp_path / "again")
    for kind in stored:
        for name, tensor in stored[kind].items():
            assert torch.equal(again[kind][name], tensor), f"{kind} of {name}"


@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_a_step_directory_and_gives_our_logits(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    world, run = _of("pp 2 dp 2, stage 2", MODELS[model])
    losses_of(world, Part(run, range(1), save_to=tmp_path / "step"))
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
    engine.load(origin, "data")
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
    engine.save(directory, Position(), "data")
    return engine.state.traffic.sent_bytes["stage", "send_recv"]
