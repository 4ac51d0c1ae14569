"""Law 1 over schedules: each is the plain model's run under every ZeRO stage, and all are bit-equal on one shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from harness import DEVICE, run_world
from test_any_shape import ACTIVATIONS, _assert_agrees, train_offloading
from worlds import (
    GPT2,
    LLAMA,
    LR,
    STEPS,
    engine_on,
    micro_batches,
    on_one_state,
    pairwise,
    run_of,
    state_on,
    train_on,
    train_plainly,
    whole,
)

from megazero.config import ResolvedRun
from megazero.engine import initialize
from megazero.models.gpt import MicroBatch
from megazero.schedules.action import Action, Op, Schedule, loop
from megazero.schedules.proof import ScheduleError

DEEP = {"num_layers": 5}  # does not divide by 2 ranks of 2 chunks
MODELS = {
    "untied": LLAMA | DEEP | {"tie_embeddings": False},
    "tied": LLAMA | DEEP | {"tie_embeddings": True},
    "gpt2": GPT2 | DEEP,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "virtual_stages": 2},
    "interleaved-pairs": {"schedule": "interleaved-pairs", "virtual_stages": 2},
    "zb-h1": {"schedule": "zb-h1"},
    "zbv": {"schedule": "zbv"},
    "dualpipev": {"schedule": "dualpipev"},
}


@lru_cache(maxsize=4)
def _plain(model: str) -> dict[str, Any]:
    run = run_of(1, model=MODELS[model])
    return train_plainly(run)


CASES = pairwise(
    schedule=list(SCHEDULES),
    degrees=[(1, 2), (2, 1)],
    zero_stage=(1, 2, 3),  # stage 0 is that of `test_tied_or_not_...`
    model=list(MODELS),
    policy=[("action", "selective"), ("chunk", "full, on the host"), ("step", "none")],  # of weights and of activations
)
CASES += [
    {"schedule": name, "degrees": (2, 2), "zero_stage": 3, "model": "tied", "policy": ("action", "selective")}
    for name in ("zbv", "dualpipev")
]


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 1), (2, 2)])
def test_every_schedule_takes_every_zero_stage(tp: int, dp: int) -> None:
    """Schedules, shapes, stages, models, what is kept of activations and, in stage 3, of weights, pairwise; the cases of a
    shape in one world."""
    world = 2 * tp * dp
    cases = [case for case in CASES if case["degrees"] == (tp, dp)]
    runs = [
        run_of(
            world,
            model=MODELS[case["model"]],
            parallel={
                "pp": 2,
                "tp": tp,
                "sequence_parallel": case["zero_stage"] % 2 == 1,
                **SCHEDULES[case["schedule"]],
            },
            zero={"stage": case["zero_stage"]}
            | ({"gather_policy": case["policy"][0]} if case["zero_stage"] == 3 else {}),
            training={"accumulation": 4 if case["schedule"] in ("1f1b", "zb-h1") else 2},
            activations=ACTIVATIONS[case["policy"][1]],
        )
        for case in cases
    ]
    results = run_world(world, on_one_state, runs, train_offloading, True)[0]
    for case, got in zip(cases, results, strict=True):
        _assert_agrees(got, _plain(case["model"]), str(case))


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zbv", "dualpipev"])
def test_tied_or_not_on_two_ranks_and_two_replicas(schedule: str) -> None:
    parallel, models = {"pp": 2, **SCHEDULES[schedule]}, ("untied", "tied")
    runs = [
        run_of(4, model=MODELS[model], parallel=parallel, zero={"stage": 0}, training={"accumulation": 2})
        for model in models
    ]
    for model, got in zip(models, run_world(4, on_one_state, runs, train_on, True)[0], strict=True):
        _assert_agrees(got, _plain(model), model)


def _gradients(rank: int, runs: dict[str, ResolvedRun], counts: Sequence[int]) -> dict[int, dict[str, Any]]:
    """By number of micro-batches, of one sample each, and by schedule: the gradients; on rank 0."""
    state = state_on(rank, runs["gpipe"])
    found: dict[int, dict[str, Any]] = {microbatches: {} for microbatches in counts}
    for schedule, run in runs.items():
        engine = initialize(run.config, state)
        model = run.config.model
        for microbatches, by_schedule in found.items():
            if schedule.startswith("interleaved") and microbatches % state.pp.size:
                continue
            generator = torch.Generator().manual_seed(microbatches)
            samples = torch.randint(0, model.vocab_size, (microbatches, model.seq_len + 1, 1), generator=generator)
            batches = [
                MicroBatch(torch.tensor([index], device=DEVICE), sample[:-1].contiguous(), sample[1:].contiguous())
                for index, sample in enumerate(samples.to(DEVICE))
            ]
            engine.compute_gradients(batches)
            by_schedule[schedule] = whole(engine, "gradient")
    return found


@pytest.mark.parametrize(
    ("pp", "tied", "counts"), [(2, False, (1, 4, 5)), (2, True, (2, 8)), (4, True, (3, 8))], ids=str
)
def test_all_schedules_give_bit_equal_gradients_on_one_shape(pp: int, tied: bool, counts: Sequence[int]) -> None:
    model = LLAMA | {"num_layers": 2 * pp, "tie_embeddings": tied}
    runs = {
        name: run_of(pp, model=model, parallel={"pp": pp, **given}, training={"accumulation": 8})
        for name, given in SCHEDULES.items()
    }
    for microbatches, by_schedule in run_world(pp, _gradients, runs, counts)[0].items():
        assert len(by_schedule) == len(SCHEDULES) - 2 * (microbatches % pp > 0)
        wanted = by_schedule.pop("gpipe")
        for schedule, got in by_schedule.items():
            for name, tensor in wanted.items():
                assert torch.equal(got[name], tensor), f"{name} under {schedule}, {microbatches} micro-batches"


def test_weight_gradients_that_gather_their_inputs_later_are_bit_equal() -> None:
    """Under sequence parallelism: at once, and deferred with a shard of the input."""
    runs = {
        name: run_of(
            4,
            model=LLAMA | {"num_layers": 2, "tie_embeddings": False},
            parallel={"pp": 2, "tp": 2, "sequence_parallel": True, **SCHEDULES[name]},
        )
        for name in ("gpipe", "zb-h1")
    }
    for by_schedule in run_world(4, _gradients, runs, (3,))[0].values():
        wanted = by_schedule.pop("gpipe")
        assert by_schedule
        for schedule, got in by_schedule.items():
            assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items()), schedule


def test_any_cut_of_the_layers_is_the_same_run() -> None:
    two: list[Any] = ["cost", (("embed",), (5, "head")), (("embed", 4), (1, "head"))]
    four = (("embed", 2), (0,), (2,), (1, "head"))  # a chunk without a layer has no weight gradient that could wait
    shapes = [SCHEDULES["1f1b"] | {"layout": layout} for layout in two]
    shapes += [SCHEDULES[name] | {"layout": four} for name in ("interleaved", "zbv")]
    runs = [run_of(4, model=MODELS["tied"], parallel={"pp": 2, **shape}, zero={"stage": 3}) for shape in shapes]
    for shape, got in zip(shapes, run_world(4, on_one_state, runs, train_on, True)[0], strict=True):
        _assert_agrees(got, _plain("tied"), str(shape))


def _own(rank: int, run: ResolvedRun, schedule: Schedule) -> tuple[list[float], str]:
    """Losses under a schedule of the user's own, and the error of one that cannot run."""
    state = state_on(rank, run)
    engine = initialize(run.config, state, schedule=schedule)
    losses = [engine.train_step(micro_batches(run, state, step), LR).loss for step in range(STEPS)]
    broken = replace(schedule, ranks=(schedule.ranks[0][::-1], *schedule.ranks[1:]))
    with pytest.raises(ScheduleError) as refused:
        initialize(run.config, state, schedule=broken).train_step(micro_batches(run, state, 0), LR)
    return losses, str(refused.value)


def test_a_schedule_of_the_users_own_runs_and_a_broken_one_is_refused_before_the_first_step() -> None:
    """Forwards and backwards as in GPipe, but the weight gradients of a rank all at the end."""
    kinds = (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)
    actions = tuple(Action(kind, index) for kind in kinds for index in range(4))
    own = Schedule("mine", 4, loop(2), (actions, actions))
    run = run_of(2, model=MODELS["untied"], parallel={"pp": 2}, training={"accumulation": 4})
    for losses, error in run_world(2, _own, run, own):
        assert losses == pytest.approx(_plain("untied")["loss"], rel=1e-5)
        assert "mine: rank 0" in error


def _failing_on_the_way(rank: int, run: ResolvedRun) -> tuple[list[float], list[float]]:
    """Losses and norms of some steps, after one that failed between a backward and its weight gradients."""
    engine = engine_on(rank, run)
    backwards = 0

    def fail(action: Action) -> None:
        nonlocal backwards
        backwards += action.op is Op.BACKWARD
        if backwards == 2:  # called before and after: the first backward has ended
            raise RuntimeError("on purpose")

    engine.on_action = fail
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.compute_gradients(micro_batches(run, engine.state, 0))
    engine.on_action = lambda _: None
    statistics = [engine.train_step(micro_batches(run, engine.state, step), LR) for step in range(STEPS)]
    return [one.loss for one in statistics], [one.grad_norm for one in statistics]


def test_a_step_that_failed_leaves_no_weight_gradient_behind() -> None:
    run = run_of(1, model=MODELS["untied"], parallel={"schedule": "zb-h1"}, training={"accumulation": 4})
    ((losses, norms),) = run_world(1, _failing_on_the_way, run)
    assert losses == pytest.approx(_plain("untied")["loss"], rel=1e-5)
    assert norms == pytest.approx(_plain("untied")["norm"], rel=1e-5)
