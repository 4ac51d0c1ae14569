"""A forward beside a backward: they take turns at exchanges, and no bit depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_world
from worlds import MIXTRAL, engine_on, micro_batches, run_of, state_on, whole

from megazero.config import ResolvedRun
from megazero.engine.turns import AbandonedError, Turns


def test_two_functions_take_turns_where_they_would_wait() -> None:
    turns, log = Turns(), list[str]()

    def passing(name: str, times: int) -> Callable[[], str]:
        def run() -> str:
            for index in range(times):
                log.append(f"{name}{index}")
                turns.pass_on()
            log.append(f"{name} ends")
            return name

        return run

    for _ in range(2):
        assert turns.run(passing("b", 2), passing("f", 4)) == ("b", "f")
        assert log == "b0 f0 b1 f1,b ends,f2 f3,f ends".replace(" e", "_e").replace(" ", ",").replace("_", " ").split(
            ","
        )
        log.clear()
    turns.pass_on()  # alone: nobody to wait for


@pytest.mark.parametrize("fails", ["aside", "here"])
def test_the_error_of_one_reaches_the_caller_and_the_other_is_left_where_it_waits(fails: str) -> None:
    turns, ended = Turns(), list[str]()

    def pass_on_or_fail(name: str) -> None:
        try:
            turns.pass_on()
            if name == fails:
                raise ValueError(name)
            turns.pass_on()
            turns.pass_on()
        except AbandonedError:
            ended.append(name)
            raise

    for _ in range(2):
        with pytest.raises(ValueError, match=fails):
            turns.run(lambda: pass_on_or_fail("aside"), lambda: pass_on_or_fail("here"))
        turns.pass_on()
    assert ended == [name for name in ("aside", "here") if name != fails] * 2


MODEL = MIXTRAL | {"num_layers": 4, "num_experts": 4}
KINDS: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {  # by pp
    1: {
        "stage 1, selective": ({"stage": 1}, {"recompute": "selective"}),
        "stage 3": ({"stage": 3}, {}),
        "stage 3, recomputed": ({"stage": 3}, {"recompute": "full"}),
        "stage 3, for the chunk": ({"stage": 3, "gather_policy": "chunk"}, {}),
    },
    2: {
        "stage 0": ({"stage": 0}, {}),
        "stage 2, recomputed": ({"stage": 2}, {"recompute": "full"}),
        "on the host": ({"stage": 3}, {"offload": "host"}),  # its pairs run one after the other
    },
}


#: By schedule and pp, how many pairs take turns on each rank.
PAIRS = {("dualpipev", 1): [1], ("dualpipev", 2): [3], ("interleaved-pairs", 1): [2], ("interleaved-pairs", 2): [3, 5]}


def _gradients(rank: int, runs: dict[str, dict[str, ResolvedRun]]) -> dict[str, dict[str, Any]]:
    """By kind and schedule: loss and gradients, and how many pairs took turns."""
    run_turns = Turns.run
    state, found = state_on(rank, next(iter(runs.values()))["1f1b"]), {}
    for kind, by_schedule in runs.items():
        found[kind] = {}
        for name, run in by_schedule.items():
            engine, pairs = engine_on(rank, run, state=state), [0]

            def counting(turns: Turns, *passes: Any, pairs: list[int] = pairs) -> Any:
                pairs[0] += 1
                return run_turns(turns, *passes)

            Turns.run = counting  # type: ignore[method-assign]
            loss = engine.compute_gradients(micro_batches(run, state, 0)).loss
            found[kind][name] = loss, whole(engine, "gradient"), pairs[0]
    return found


@pytest.mark.parametrize("pp", KINDS)
def test_pairs_give_the_bits_of_1f1b_on_every_zero_stage(pp: int) -> None:
    """Ranks of ep exchange rows in every layer; with pp 1 a V is two chunks of a rank, and experts have replicas.  Of
    interleaved-pairs with pp 2, some are of one chunk."""
    runs = {
        kind: {
            name: run_of(
                4,
                model=MODEL,
                parallel={"pp": pp, "ep": 2, "schedule": name, "virtual_stages": chunks},
                zero=zero,
                training={"accumulation": 2 * pp},
                activations=activations,
            )
            for name, chunks in (("1f1b", 1), ("dualpipev", 2), ("interleaved-pairs", 2))
        }
        for kind, (zero, activations) in KINDS[pp].items()
    }
    for found in run_world(4, _gradients, runs):
        for kind, by_schedule in found.items():
            loss, gradients, _ = by_schedule.pop("1f1b")
            for schedule, (own_loss, own, own_pairs) in by_schedule.items():
                assert own_loss == loss, f"{schedule}, {kind}"
                assert own_pairs in (0,) if kind == "on the host" else PAIRS[schedule, pp], f"{schedule}, {kind}"
                for name, gradient in (gradients or {}).items():
                    assert torch.equal(own[name], gradient), f"{name}, {schedule}, {kind}"
