"""Law 1: any shape, one run.  Gradients, norms, losses and weights equal those of an independent plain model."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from harness import run_world
from worlds import GPT2, LLAMA, difference, on_one_state, pairwise, run_of, train, train_on, train_plainly

from megazero.config import ResolvedRun
from megazero.engine import Engine

TOLERANCE = 1e-5
CLIP = 0.5  # below the norm of the first steps, so that clipping acts
UNEVEN = {"num_layers": 3}  # over two stages
UNTIED, TIED = LLAMA | UNEVEN | {"tie_embeddings": False}, LLAMA | UNEVEN | {"tie_embeddings": True}
SHAPES = {
    "tp2 sp pp2 dp2": (8, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2 sp in pieces": (2, {"tp": 2, "sequence_parallel": True, "tp_overlap": "pieces"}),
    "pp2": (2, {"pp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
}


@lru_cache(maxsize=8)
def _plain(family: str, tied: bool, clip: float) -> dict[str, Any]:
    model = (GPT2 if family == "gpt2" else LLAMA) | UNEVEN | {"tie_embeddings": tied}
    run = run_of(1, model=model, optimizer={"grad_clip": clip})
    return train_plainly(run)


def _assert_agrees(got: dict[str, Any], wanted: dict[str, Any], case: str = "") -> None:
    assert set(got["initial"]) == set(wanted["initial"])
    for name, tensor in wanted["initial"].items():
        assert torch.equal(got["initial"][name], tensor), f"initial {name} {case}"
    assert got["loss"] == pytest.approx(wanted["loss"], rel=TOLERANCE), case
    assert got["norm"] == pytest.approx(wanted["norm"], rel=TOLERANCE), case
    whole_norm = wanted["norm"][0]
    for name, tensor in wanted["gradients"].items():
        # A gradient that is zero in exact arithmetic (a key's bias) is rounding noise in both: measured against the norm.
        if float(tensor.norm()) < 1e-6 * whole_norm:
            assert float(got["gradients"][name].norm()) < 1e-5 * whole_norm, f"gradient of {name} {case}"
        else:
            assert difference(got["gradients"][name], tensor) < TOLERANCE, f"gradient of {name} {case}"
    for name, tensor in wanted["weights"].items():
        assert difference(got["weights"][name], tensor) < TOLERANCE, f"weights of {name} {case}"


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "cut": {"recompute": ["mlp", "norms"], "partition": True},  # where ranks of tp have the same
    "full, on the host": {"recompute": "full", "offload": "host"},
    "selective, in one piece": {"recompute": "selective", "contiguous": True},
}
CASES = pairwise(
    shape=list(SHAPES),
    zero_stage=range(4),
    order=[("1f1b", 1), ("1f1b", 4), ("gpipe", 2)],  # schedule and accumulation; without a pipeline the last are one
    name=["untied", "tied", "gpt2"],
    activations=list(ACTIVATIONS),
)


def train_offloading(engine: Engine, run: ResolvedRun, *args: Any) -> dict[str, Any] | None:
    """As `train_on`; where activations are offloaded, those of this small model too."""
    if engine.offload is not None:
        engine.offload.smallest_bytes = 64
    result = train_on(engine, run, *args)
    assert engine.offload is None or engine.offload.pool.nbytes > 0
    return result


@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_gives_the_plain_models_gradients_and_weights(shape: str) -> None:
    """Shapes, stages, schedules, accumulation, models and what is kept, pairwise; the cases of a shape in one world, one
    engine after the other."""
    world, parallel = SHAPES[shape]
    whole_on_tp = "tp" in parallel and "sequence_parallel" not in parallel
    models = {"untied": UNTIED, "tied": TIED, "gpt2": GPT2 | UNEVEN}
    cases = [case for case in CASES if case["shape"] == shape]
    runs = [
        run_of(
            world,
            model=models[case["name"]],
            parallel=parallel | {"schedule": case["order"][0]},
            zero={"stage": case["zero_stage"]},
            training={"accumulation": case["order"][1]},
            activations={
                key: value
                for key, value in ACTIVATIONS[case["activations"]].items()
                if key != "partition" or whole_on_tp
            },
        )
        for case in cases
    ]
    for case, got in zip(cases, run_world(world, on_one_state, runs, train_offloading)[0], strict=True):
        name = case["name"]
        _assert_agrees(got, _plain("gpt2" if name == "gpt2" else "llama", name != "untied", CLIP), str(case))


def test_one_rank_is_the_plain_model() -> None:
    for model, tied in ((UNTIED, False), (TIED, True), (GPT2 | UNEVEN, True)):
        runs = [run_of(1, model=model, zero={"stage": zero_stage}) for zero_stage in range(4)]
        for zero_stage, got in enumerate(run_world(1, on_one_state, runs, train_on)[0]):
            _assert_agrees(got, _plain(model["family"], tied, CLIP), f"stage {zero_stage}")


OTHER_ORDER = {"order": "pp-dp-cp-tp"}


@pytest.mark.slow
def test_clipping_is_by_the_norm_over_all_ranks() -> None:
    """And not at all; in `test_any_shape_gives_...` the clip is another one."""
    clips = (0.0, 0.1)
    runs = [
        run_of(4, model=TIED, parallel={"tp": 2}, zero={"stage": 2}, optimizer={"grad_clip": clip}) for clip in clips
    ]
    for clip, got in zip(clips, run_world(4, on_one_state, runs, train_on)[0], strict=True):
        _assert_agrees(got, _plain("llama", True, clip), f"clip {clip}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "parallel", "zero_stage"),
    [(4, {}, 1), (3, {"pp": 3, "dp": 1}, 1), (4, OTHER_ORDER | {"tp": 2}, 3), (4, OTHER_ORDER | {"pp": 2}, 3)],
)
def test_more_shapes_give_the_plain_models_run(world: int, parallel: dict[str, Any], zero_stage: int) -> None:
    run = run_of(world, model=TIED, parallel=parallel, zero={"stage": zero_stage})
    _assert_agrees(run_world(world, train, run)[0], _plain("llama", True, CLIP))


def _train_in_bucket_chunks(engine: Engine, run: ResolvedRun) -> dict[str, Any]:
    if engine.batch_slice.tokens:  # this rank has the embedding
        assert any(len(bucket.gradient_chunks) > 2 for bucket in engine.sharded_model.reducer.buckets)
    return train_on(engine, run)


@pytest.mark.parametrize(
    ("parallel", "chunk_tokens"),
    [({}, 1000), ({}, 8), ({"pp": 2, "schedule": "zbv"}, 8)],
    ids=["one chunk", "chunks of the loss", "zbv, chunks of the loss"],
)
def test_weights_that_are_reduced_in_bucket_chunks_have_the_plain_models_gradients(
    parallel: dict[str, Any], chunk_tokens: int
) -> None:
    """Embedding and head as large as several blocks: stage 3 has no smaller chunks."""
    stages = parallel.get("pp", 1)
    model = (UNTIED if parallel or chunk_tokens == 8 else GPT2) | {"vocab_size": 961, "num_layers": 2 * stages}
    zeros = [{"stage": 2}, {"stage": 3, "offload": {} if parallel else {"optimizer": "cpu"}}]
    training = {"accumulation": 2 * stages, "logits_chunk_bytes": chunk_tokens * 961 * 4}
    runs = [run_of(2 * stages, model=model, parallel=parallel, zero=zero, training=training) for zero in zeros]
    plain = train_plainly(run_of(1, model=model))
    results = run_world(2 * stages, on_one_state, runs, _train_in_bucket_chunks)[0]
    for zero, got in zip(zeros, results, strict=True):
        _assert_agrees(got, plain, str(zero))


def test_padded_vocabulary_leaves_no_trace() -> None:
    """5 tokens over tp 2 leave one padded row; over tp 4 the last rank would have rows 6 and 7 only: none is real."""
    tiny = {"family": "llama", "vocab_size": 5, "num_kv_heads": 4, "tie_embeddings": False}
    alone = run_world(1, train, run_of(1, model=tiny))[0]
    for tp in (2, 4):
        run = run_of(tp, model=tiny, parallel={"tp": tp, "sequence_parallel": True}, zero={"stage": 3})
        _assert_agrees(run_world(tp, train, run)[0], alone)


@pytest.mark.slow
def test_dropout_drops_the_same_elements_on_every_shape() -> None:
    model = TIED | {"dropout": 0.3}
    alone = run_world(1, train, run_of(1, model=model))[0]
    assert alone["loss"][0] != pytest.approx(_plain("llama", True, CLIP)["loss"][0], rel=2e-5)
    for parallel in ({"tp": 2, "sequence_parallel": True}, {"tp": 2}, {"pp": 2}, {}):
        _assert_agrees(run_world(2, train, run_of(2, model=model, parallel=parallel))[0], alone)
