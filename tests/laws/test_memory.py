"""Law 3: memory is what the paper says (Rajbhandari et al. 2020, figure 1), measured on the tensors that exist."""

from __future__ import annotations

import pytest
from harness import run_world
from worlds import LLAMA, LR, engine_on, micro_batches, run_of

from megazero.config import ResolvedRun

UNTIED = LLAMA | {"tie_embeddings": False, "vocab_size": 64}  # divides by tp, so that no row is padding


def _measure(rank: int, run: ResolvedRun) -> tuple[dict[str, int], int, int, int]:
    """Bytes after a step; parameters on this rank; padding elements; elements of the largest bucket."""
    engine = engine_on(rank, run)
    engine.train_step(micro_batches(run, engine.state, 0), LR)
    layouts = [bucket.layout for bucket in engine.parameters.buckets]
    padding = sum(layout.padded_numel - layout.numel for layout in layouts)
    assert all(layout.padded_numel - layout.numel < 16 * max(1, run.dp) for layout in layouts)
    largest = max(layout.padded_numel for layout in layouts)
    return engine.memory_bytes(), sum(layout.numel for layout in layouts), padding, largest


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}], ids=["alone", "pp 2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_model_state_bytes_equal_the_zero_formula(
    zero_stage: int, dp: int, dtype: str, parallel: dict[str, int]
) -> None:
    world = dp * parallel.get("pp", 1)
    run = run_of(world, model=UNTIED, parallel=parallel, zero={"stage": zero_stage}, precision={"dtype": dtype})
    weight, master = (4, 0) if dtype == "fp32" else (2, 4)
    for measured, parameters, padding, largest in run_world(world, _measure, run):
        stored = parameters + padding
        per_parameter = weight / (dp if zero_stage == 3 else 1) + master / (dp if zero_stage >= 1 else 1)
        assert measured["parameters"] == stored * per_parameter
        assert measured["gradients"] == stored * 4 / (dp if zero_stage >= 2 else 1)
        # moments cover parameters, not padding: the last shard has fewer
        moments = 8 * parameters / (dp if zero_stage >= 1 else 1)
        assert abs(measured["optimizer"] - moments) <= 8 * padding
        if zero_stage < 3:
            assert measured["gather_buffers"] == 0
        # two reductions under way hold what arrives, and from stage 2 on what they send, beside two buckets that fill
        buffers = {0: 0, 1: 2, 2: 6, 3: 6}[zero_stage]
        assert measured["gradient_buffers"] <= buffers * largest * 4


def test_working_buffers_of_stage_3_do_not_grow_with_depth() -> None:
    sizes = []
    for layers in (2, 6):
        run = run_of(2, model=UNTIED | {"num_layers": layers}, zero={"stage": 3})
        measured, *_ = run_world(2, _measure, run)[0]
        sizes.append((measured["gather_buffers"], measured["gradient_buffers"]))
    assert sizes[0] == sizes[1]


def test_a_stage_3_rank_never_makes_the_whole_model() -> None:
    """Parameters are made on the meta device and drawn shard by shard."""
    run = run_of(4, model=UNTIED | {"num_layers": 8}, zero={"stage": 3})
    measured, parameters, *_ = run_world(4, _measure, run)[0]
    assert measured["parameters"] + measured["gather_buffers"] < 4 * parameters * 0.6
