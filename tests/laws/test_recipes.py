"""What people add to the loss and to the step is the same on every shape: that of the plain model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import metrics_of, run_world
from mup import best_of
from plain_model import causal_attention, logits
from test_any_shape import _assert_agrees
from torch import Tensor
from worlds import (
    GPT2,
    LLAMA,
    LR,
    difference,
    engine_on,
    global_batch,
    initial_weights,
    loop_of,
    micro_batches,
    on_one_state,
    plain_config,
    plain_trainer,
    run_of,
    state_on,
    train_on,
    train_plainly,
    whole,
)

from megazero.checkpoint.hugging_face.exporter import export_model
from megazero.config import ResolvedRun
from megazero.engine import Engine, Position
from megazero.training.batches import open_corpus_of
from megazero.training.trainer import Trainer

SHAPES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (4, {"parallel": {"tp": 2, "sequence_parallel": True}, "zero": {"stage": 3}}),
    (4, {"parallel": {"pp": 2, "schedule": "zb-h1"}, "zero": {"stage": 2}}),
    (4, {"parallel": {"tp": 2, "cp": 2}}),
]
HEADS = [
    (LLAMA | {"tie_embeddings": False, "final_logit_softcapping": 0.3}, {"z_loss_coef": 0.02}),
    (GPT2, {"z_loss_coef": 0.02, "logits_chunk_bytes": 4096}),
    (LLAMA | {"tie_embeddings": False, "mup_base_width": 8, "mup_base_head_dim": 2}, {}),
    (GPT2 | {"mup_base_width": 16}, {}),
    (LLAMA | {"tie_embeddings": True, "final_logit_softcapping": 0.3}, {"logits_chunk_bytes": 4096}),
]


RAMP = {"start": 2, "increment": 2, "samples": 16}
SIZES = [2, 2, 2, 4, 4, 6, 8, 8]  # 3 increments, each for 16 / 3 samples


def _train_until(rank: int, run: ResolvedRun, end: int) -> None:
    state = state_on(rank, run)
    trainer = Trainer(run, state, lambda _: None, lambda: trainer.position.step + 1 >= end)
    trainer.run()


def test_a_batch_that_ramps_up_goes_on_in_the_middle_on_any_shape(tmp_path: Path) -> None:
    """Also where dp does not divide it.  Sizes are Megatron-LM's, and rates follow the steps."""

    def run_on(world: int, **sections: dict[str, Any]) -> ResolvedRun:
        training = {"batch_ramp": RAMP, "micro_batch_size": 1, "steps": 8}
        schedule = {"name": "linear", "min_lr_ratio": 0.0}
        return loop_of(tmp_path, world, training=training, lr_schedule=schedule, **sections)

    cuts = {"parallel": {"tp": 2, "pp": 2, "schedule": "zb-h1"}, "zero": {"stage": 2}}
    for world, end, sections in ((4, 4, {"zero": {"stage": 3}}), (4, 7, cuts), (1, 8, {})):
        run_world(world, _train_until, run_on(world, **sections), end)
    run = run_on(1)
    trainer, stream, first = plain_trainer(run), open_corpus_of(run.config).train, 0
    for step, (size, got) in enumerate(zip(SIZES, metrics_of(tmp_path), strict=True)):
        samples = torch.from_numpy(stream.batch(range(first, first + size)))
        wanted = trainer.step(samples[:, :-1], samples[:, 1:], LR * (1 - step / 7))
        assert (got["step"], got["global_batch_size"]) == (step + 1, size)
        assert [got["loss"], got["grad_norm"]] == pytest.approx([wanted.loss, wanted.grad_norm], rel=2e-5)
        first += size


def _with_z_loss(engine: Engine, run: ResolvedRun) -> Any:
    z_loss = engine.compute_gradients(micro_batches(run, engine.state, 0)).z_loss
    found = train_on(engine, run)
    return found and found | {"z": z_loss}


def _plain_z_loss(run: ResolvedRun) -> float:
    tokens, labels = global_batch(run, 0)
    scores = logits(initial_weights(run), plain_config(run), tokens)[labels != -100]
    return run.config.training.z_loss_coef * float(scores.logsumexp(-1).square().mean())


def test_a_soft_cap_a_z_loss_and_mup_are_those_of_the_plain_model_on_every_shape() -> None:
    def runs(world: int, **sections: dict[str, Any]) -> list[ResolvedRun]:
        return [run_of(world, model=model, **sections, training=training) for model, training in HEADS]

    wanted = [train_plainly(run) | {"z": _plain_z_loss(run)} for run in runs(1)]
    for world, sections in SHAPES:
        found = run_world(world, on_one_state, runs(world, **sections), _with_z_loss)[0]
        for got, plain in zip(found, wanted, strict=True):
            _assert_agrees(got, plain, str(sections))
            assert got["z"] == pytest.approx(plain["z"], rel=1e-5)


def _change_of_logits(rank: int, runs: list[ResolvedRun]) -> list[float]:
    """Root mean square by which four steps change the logits of a batch."""
    state, found = state_on(rank, runs[0]), []
    for run in runs:
        engine, batches = engine_on(rank, run, state=state), micro_batches(run, state, 0)
        asked = [replace(batch, labels=None) for batch in batches]
        before = [engine.chunks[0](None, batch).detach() for batch in asked]
        for step in range(4):
            engine.train_step(micro_batches(run, state, step), LR)
        after = [engine.chunks[0](None, batch).detach() for batch in asked]
        found.append(float(torch.cat([b - a for a, b in zip(before, after, strict=True)]).square().mean().sqrt()))
        engine.sharded_model.close()
    return found


def test_with_mup_steps_change_logits_as_much_at_every_width() -> None:
    """The coordinate check of Yang et al. 2022, appendix D.1; without muP wider models change more."""

    def changes(**mup: int) -> list[float]:
        sizes = [{"hidden_size": width, "ffn_hidden_size": 2 * width, "num_kv_heads": 4} for width in (32, 256)]
        runs = [run_of(1, model={"family": "llama"} | size | mup) for size in sizes]
        return run_world(1, _change_of_logits, runs)[0]

    narrow, wide = changes(mup_base_width=32, mup_base_head_dim=8)
    assert 0.5 * narrow < wide < 1.1 * narrow
    narrow, wide = changes()
    assert wide > 4 * narrow


def _best_rates(_: int) -> list[int]:
    tiny = {"base": 32, "exponents": (-8, -6), "steps": 40, "seq_len": 32}
    return [best_of(width, **tiny, mup=mup) for width, mup in ((32, True), (128, True), (128, False))]


def test_the_best_rate_of_a_narrow_model_is_that_of_a_wide_one_with_mup_alone() -> None:
    """Yang et al. 2022, figure 1, on the quickstart's text; `python tests/mup.py` has the widths 64 to 512."""
    narrow, wide, without = run_world(1, _best_rates)[0]
    assert narrow == wide > without


def test_an_export_of_mup_is_a_plain_model_that_computes_the_same(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = run_of(1, model=LLAMA | {"mup_base_width": 8, "tie_embeddings": False})
    engine = engine_on(0, run)
    engine.save(tmp_path / "step", Position(), "data")
    export_model(tmp_path / "step", tmp_path / "out")
    tokens, _ = global_batch(run, 0)
    ours = logits(initial_weights(run), plain_config(run), tokens)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits, ours)


CLIP = 1.0


def _largest_scores(run: ResolvedRun, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Of the first batch in the plain model, by layer and key head."""
    found = []

    def watched(q: Tensor, k: Tensor, v: Tensor, unseen: Tensor) -> Tensor:
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) / q.shape[-1] ** 0.5
        largest = scores.masked_fill(unseen, -torch.inf).amax((0, 2, 3))
        found.append(largest.unflatten(0, (k.shape[1], -1)).amax(1))
        return causal_attention(q, k, v, unseen)

    monkeypatch.setattr("plain_model.causal_attention", watched)
    logits(initial_weights(run), plain_config(run), global_batch(run, 0)[0])
    return found


def _one_step(engine: Engine, run: ResolvedRun) -> Any:
    engine.train_step(micro_batches(run, engine.state, 0), LR)
    return whole(engine, "master")


def test_qk_clip_shrinks_queries_and_keys_of_the_same_heads_on_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA | {"tie_embeddings": False, "init_std": 0.1}
    scores = _largest_scores(run_of(1, model=model), monkeypatch)
    assert {bool(score > CLIP) for layer in scores for score in layer} == {True, False}
    offload = {"zero": {"stage": 2, "offload": {"optimizer": "cpu"}}, "activations": {"recompute": "full"}}
    for world, sections in [*SHAPES[:-1], (2, offload)]:
        muon = {"name": "muon", "lr": LR}
        runs = [run_of(world, model=model, optimizer=muon | clip, **sections) for clip in ({}, {"qk_clip": CLIP})]
        plain, clipped = run_world(world, on_one_state, runs, _one_step)[0]
        for layer, largest in enumerate(scores):
            factors = (CLIP / largest.clamp(min=CLIP)).sqrt()
            for key, repeated in (("q_proj", 2 * 8), ("k_proj", 8)):
                name = f"model.layers.{layer}.self_attn.{key}.weight"
                plain[name] = plain[name] * factors.repeat_interleave(repeated)[:, None]
        for name, wanted in plain.items():
            assert difference(clipped[name], wanted) < 1e-4, f"{name} {sections}"
