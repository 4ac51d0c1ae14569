"""Law 2 with context parallelism: a checkpoint does not know how samples were cut, and a run may go on with longer ones.

step      0 ---- 1 -------- 3
seq_len   16     64               weights and moments go on, with another rotary base
shape     dp 2   2 x 2 ...        the plain trainer's losses, whatever the shapes
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import metrics_of, run_world
from test_checkpoint import _stored
from test_data_corpus import write_pair
from worlds import (
    GPT2,
    LLAMA,
    LR,
    SAMPLES,
    difference,
    documents_of,
    engine_on,
    global_batch,
    loop_of,
    micro_batches,
    over,
    plain_trainer,
    run_of,
    state_on,
    whole,
)

from megazero.checkpoint.index import read_trainer_state
from megazero.config import ResolvedRun
from megazero.engine import Position
from megazero.training.batches import open_sources
from megazero.training.trainer import train

pytestmark = pytest.mark.slow  # starts whole runs

UNTIED = LLAMA | {"tie_embeddings": False}
TWO_BY_TWO: dict[str, Any] = {"cp": 4, "cp_method": "hybrid", "cp_ulysses": 2}
RING: dict[str, Any] = {"cp": 2, "cp_method": "ring"}
ULYSSES: dict[str, Any] = {"cp": 2, "cp_method": "ulysses"}
# world, [parallel], ZeRO stage
SHAPES: list[tuple[int, dict[str, Any], int]] = [
    (2, RING, 1),
    (1, {}, 0),
    (2, ULYSSES, 3),
    (4, TWO_BY_TWO, 2),
    (4, RING | {"tp": 2, "sequence_parallel": True}, 3),
    (4, ULYSSES | {"pp": 2}, 1),
    (8, TWO_BY_TWO | {"pp": 2}, 3),
]
OPTIMIZER = {"grad_clip": 0.5, "eps": 1e-4}  # as in test_long_context


def _of(shape: tuple[int, dict[str, Any], int], model: dict[str, Any]) -> ResolvedRun:
    world, parallel, stage = shape
    sections = {"parallel": parallel, "zero": {"stage": stage}, "optimizer": OPTIMIZER}
    return run_of(world, model=model, data={"document_mask": True}, **sections)


def _one_step(rank: int, run: ResolvedRun, step: int, folder: Path) -> tuple[float, dict[str, Any] | None]:
    """Load what the step before has saved, save it once more, train a step and save it: its loss, and the weights."""
    engine = engine_on(rank, run, init_weights=step == 0)
    if step > 0:
        begun = Position(step, step * SAMPLES, 0)
        assert engine.load(folder / f"{step}", "data") == begun
        engine.save(folder / f"{step} again", begun, "data")
    loss = engine.train_step(micro_batches(run, engine.state, step, "random"), LR).loss
    engine.save(folder / f"{step + 1}", Position(step + 1, (step + 1) * SAMPLES, 0), "data")
    return loss, whole(engine, "model")


def _plain_by_step(_: int, run: ResolvedRun, steps: int) -> list[tuple[float, dict[str, Any]]]:
    trainer = plain_trainer(run)
    found = []
    for step in range(steps):
        loss = trainer.step(*global_batch(run, step, "random"), documents=documents_of(run, step, "random")).loss
        found.append((loss, {name: weight.detach().clone() for name, weight in trainer.weights.items()}))
    return found


def test_a_checkpoint_does_not_know_how_samples_were_cut(tmp_path: Path) -> None:
    """Two runs whose every step is on another shape are those of the plain model, which is never stopped."""
    ring, alone, ulysses, both, ring_tp, ulysses_pp, both_pp = SHAPES
    orders = ((UNTIED, (ring, both, ulysses_pp, alone)), (GPT2, (ulysses, ring_tp, both_pp)))
    for model, shapes in orders:
        folder = tmp_path / str(model["family"])
        wanted = run_world(1, _plain_by_step, _of(alone, model), len(shapes))[0]
        for step, (shape, (loss, weights)) in enumerate(zip(shapes, wanted, strict=True)):
            got = run_world(shape[0], _one_step, _of(shape, model), step, folder)[0]
            assert got[0] == pytest.approx(loss, rel=1e-5), shape
            for name, weight in weights.items():
                assert difference(got[1][name], weight) < 1e-5, (name, shape)
            if step == 0:
                continue
            begun, copied = _stored(folder / f"{step}"), _stored(folder / f"{step} again")
            assert set(begun) == set(copied)
            for kind, tensors in begun.items():
                assert all(torch.equal(copied[kind][name], tensor) for name, tensor in tensors.items()), (kind, shape)


# ---------------------------------------------------------------------------------------------------------------------
# The loop: evaluation, checkpoints, phases

VOCABULARY, PHASE_STEPS = 257, (1, 3)
LENGTHENED = {"seq_len": 64, "rope_theta": 500.0}
SCALED = {"seq_len": 64, "rope_scaling": {"type": "llama3", "factor": 4.0, "original_seq_len": 16}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random bytes in documents of 1 to 60."""
    random = np.random.default_rng(3)
    borders = np.unique(random.integers(1, 8192, 400))
    lengths = np.diff(borders, prepend=0, append=8192).tolist()
    return write_pair(tmp_path_factory.mktemp("data") / "text", random.integers(0, VOCABULARY, 8192), lengths)


def _run(corpus: str, run_dir: Path, shape: tuple[int, dict[str, Any], int], **sections: dict[str, Any]) -> ResolvedRun:
    world, parallel, stage = shape
    config: dict[str, Any] = {
        "model": UNTIED,
        "parallel": parallel,
        "zero": {"stage": stage},
        "data": {"sources": [corpus], "validation_fraction": 0.25, "document_mask": True},
        "training": {"steps": PHASE_STEPS[0], "global_batch_size": 4, "eval_every_steps": 1, "eval_samples": 6},
        "checkpoint": {"save_every_steps": 1},
    }
    return loop_of(run_dir, world, **over(config, sections))


def _train(rank: int, run: ResolvedRun) -> list[str]:
    shown: list[str] = []
    train(run, state_on(rank, run), shown.append, lambda: False)
    return shown


def _second(model: dict[str, Any], **checkpoint: Any) -> dict[str, dict[str, Any]]:
    """Sections of the second phase."""
    accepts = {"accept_changes": ["seq_len", "rope"]}
    return {"model": model, "training": {"steps": PHASE_STEPS[1]}, "checkpoint": accepts | checkpoint}


def test_a_run_goes_from_short_samples_to_long_ones_as_the_plain_trainer(corpus: str, tmp_path: Path) -> None:
    wanted = run_world(1, lambda _: _plainly(corpus, tmp_path))[0]
    for index, (first, then) in enumerate([((2, {}, 1), SHAPES[3]), (SHAPES[0], SHAPES[5]), (SHAPES[4], SHAPES[1])]):
        folder = tmp_path / str(index)
        run_world(first[0], _train, _run(corpus, folder, first))
        shown = run_world(then[0], _train, _run(corpus, folder, then, **_second(LENGTHENED)))[0]
        assert [line for line in shown if line.startswith("phase 2 of the run begins")], shown
        lines = metrics_of(folder)
        for name in ("loss", "grad_norm", "val_loss"):
            assert [line[name] for line in lines] == pytest.approx(wanted[name], rel=1e-5), (name, first, then)
        assert [line["tokens"] for line in lines] == wanted["tokens"], "labels across borders are not counted"
        stored = _stored(folder / "checkpoints" / f"step-{PHASE_STEPS[1]:08d}")
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            for name, tensor in wanted[kind].items():
                assert difference(stored[kind][name], tensor) < 2e-5, (kind, name, first, then)
        (phase,) = read_trainer_state(folder / "checkpoints" / f"step-{PHASE_STEPS[1]:08d}").phases
        assert phase["changed"]["model.seq_len"] == [16, 64]


def _plainly(corpus: str, folder: Path) -> dict[str, Any]:
    """Both phases on the plain model, with the documents that the index has."""
    runs = [_run(corpus, folder, (1, {}, 0)), _run(corpus, folder, (1, {}, 0), **_second(LENGTHENED))]
    trainer = plain_trainer(runs[0])
    out: dict[str, Any] = {"loss": [], "grad_norm": [], "val_loss": [], "tokens": []}
    seen = 0
    for run, steps, theta in zip(runs, (range(1), range(2)), (10000.0, 500.0), strict=True):
        model = run.config.model
        trainer.config = replace(trainer.config, seq_len=model.seq_len, rope_theta=theta)
        opened = open_sources(run.config, [(corpus, 1.0)])
        evaluated = opened.validation
        assert evaluated is not None
        for step in steps:
            batch = _plain_batch(opened.train, range(4 * step, 4 * step + 4))
            taken = trainer.step(*batch[:2], documents=batch[2])
            seen += int((batch[1] != -100).sum())
            held_out = _plain_batch(evaluated, range(6))
            out["loss"].append(taken.loss)
            out["grad_norm"].append(taken.grad_norm)
            out["val_loss"].append(trainer.gradients(*held_out)[0])
            out["tokens"].append(seen)
    kinds = {"model": trainer.weights, "exp_avg": trainer.first_moment, "exp_avg_sq": trainer.second_moment}
    for kind, tensors in kinds.items():
        out[kind] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return out


def _plain_batch(stream: Any, samples: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and the number of each token's document; by the tokens' places in the text, not by their ids."""
    tokens = torch.from_numpy(stream.batch(list(samples)))
    found = stream.documents(list(samples))
    lengths = [torch.tensor(each) for each, _ in found]
    documents = torch.stack([torch.arange(len(each)).repeat_interleave(each) for each in lengths])
    labels = tokens[:, 1:].clone()
    labels[:, :-1][documents[:, 1:] != documents[:, :-1]] = -100
    for row, (_, goes_on) in zip(labels, found, strict=True):
        if not goes_on:
            row[-1] = -100
    return tokens[:, :-1], labels, documents


def test_a_scaled_rotary_base_and_a_document_mask_begin_a_phase_on_any_cut(corpus: str, tmp_path: Path) -> None:
    """The mask begins with the long samples; a run on one rank is the measure."""
    measured = []
    second = _second(SCALED, accept_changes=["seq_len", "rope", "document_mask"])
    run_world(1, _train, _run(corpus, tmp_path / "short", SHAPES[1], data={"document_mask": False}))
    for index, shape in enumerate((SHAPES[1], SHAPES[3], SHAPES[5])):
        folder = shutil.copytree(tmp_path / "short", tmp_path / str(index))
        shown = "\n".join(run_world(shape[0], _train, _run(corpus, folder, shape, **second))[0])
        assert "data.document_mask false -> true" in shown
        measured.append([(line["loss"], line["grad_norm"], line["val_loss"]) for line in metrics_of(folder)])
    for got in measured[1:]:
        assert got == [pytest.approx(line, rel=1e-5) for line in measured[0]]


def test_an_elastic_run_changes_how_samples_are_cut_with_its_world(corpus: str, tmp_path: Path) -> None:
    """4 ranks share a sample, then 2 with a third one that is spare, then 4 again."""
    alone, folder = tmp_path / "alone", tmp_path / "elastic"
    elastic = {"enabled": True, "shapes": [{"world_size": 4, "cp": 4}, {"world_size": 3, "cp": 2}]}
    run_world(1, _train, _run(corpus, alone, SHAPES[1], training={"steps": 3}))
    for world, cp, spare, stop in ((4, 4, 0, 1), (3, 2, 1, 2), (4, 4, 0, 3)):
        run = _run(corpus, folder, (world, {"cp": 1}, 1), elastic=elastic, training={"steps": stop})
        assert (run.config.parallel.cp, run.dp, run.spare_ranks) == (cp, 1, spare)
        run_world(world - spare, _train, run)
    got, wanted = (
        [(line["loss"], line["grad_norm"], line["val_loss"]) for line in metrics_of(one)] for one in (folder, alone)
    )
    assert got == [pytest.approx(line, rel=1e-5) for line in wanted]
