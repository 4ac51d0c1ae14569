"""A schedule takes as long as its paper says, and cannot get stuck, on gloo and on NCCL as `nccl.py` emulates it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import run_world
from nccl import is_stuck, makespan, one_by_one, pair_of, waiting
from test_any_schedule import MODELS, SCHEDULES, _gradients
from worlds import run_of, state_on

from megazero.comm.collectives import Pending
from megazero.engine.stage_runner import executors
from megazero.parallel_state import Axis, ParallelState
from megazero.plan.step_callbacks import ActionClock
from megazero.schedules import executor, proof
from megazero.schedules import registry as kinds
from megazero.schedules.action import Action, MessageAction, Op, Schedule, loop, v_shape
from megazero.schedules.proof import Costs, Program, ScheduleError, play, program, prove, received_when_opened, simulate


def built_in(name: str, pp: int, microbatches: int, chunks: int = 2) -> Schedule:
    kind = kinds.SCHEDULES[name]
    return kind.build(pp, microbatches, kind.chunks or chunks)


def every_built_in() -> Iterator[Schedule]:
    for name in kinds.SCHEDULES:
        for pp, microbatches in ((1, 3), (2, 2), (2, 8), (3, 9), (4, 4), (4, 8), (5, 20), (8, 8)):
            yield built_in(name, pp, microbatches, 2 + microbatches % 2)


def of_gloo(placed: Program) -> Program:
    return tuple(map(received_when_opened, placed))


def random_schedule(random: Random, most: tuple[int, int, int] = (4, 5, 2)) -> Schedule:
    """Any order of actions that their dependencies allow, in any placement; `most` ranks, micro-batches and chunks."""
    pp, microbatches, chunks = random.randint(2, most[0]), random.randint(1, most[1]), random.randint(1, most[2])
    placement = list(v_shape(pp) if chunks == 2 and random.random() < 0.5 else loop(pp, chunks))
    if random.random() < 0.3:
        random.shuffle(placement)
    splits = random.random() < 0.5
    stages = range(len(placement))
    ready = [("F", microbatch, 0) for microbatch in range(microbatches)]
    ranks: list[list[Action]] = [[] for _ in range(pp)]
    beside, pairs = set[tuple[int, Action]](), random.choice([0.0, 0.7])
    favour = [random.random() for _ in range(pp)]  # some ranks run ahead
    while ready:
        weights = [favour[placement[stage][0]] + 0.05 for _, _, stage in ready]
        kind, microbatch, stage = ready.pop(random.choices(range(len(ready)), weights)[0])
        rank, chunk = placement[stage]
        ranks[rank].append(Action(Op(kind), microbatch, chunk))
        backwards = [one for one in ready if one[0] == "B" and placement[one[2]][0] == rank]
        chosen = [(kind, microbatch, stage)]
        if kind == "F" and backwards and random.random() < pairs:
            beside.add((rank, ranks[rank][-1]))
            chosen.append(ready.pop(ready.index(backwards[0])))
            ranks[rank].append(Action(Op.BACKWARD, chosen[1][1], placement[chosen[1][2]][1]))
        for kind, microbatch, stage in chosen:
            if kind == "F":
                ready.append(("F", microbatch, stage + 1) if stage + 1 in stages else ("B", microbatch, stage))
            elif kind == "B":
                ready += [("B", microbatch, stage - 1)] if stage else []
                ready += [("W", microbatch, stage)] if splits else []
    return Schedule("random", microbatches, tuple(placement), tuple(map(tuple, ranks)), beside=frozenset(beside))


def random_costs(random: Random) -> Costs:
    return Costs(*(random.randint(1, 9) for _ in range(3)), hop=random.choice([0, 0, 1, 5]))


# ---- what the emulation says of our programs


def test_every_schedule_has_the_makespan_of_its_paper_on_both_machines() -> None:
    """`test_schedules.py` holds `simulate` to the papers."""
    for schedule in every_built_in():
        wanted = simulate(schedule)
        placed = program(schedule)
        for machine in (placed, of_gloo(placed)):
            assert makespan(schedule, [*map(one_by_one, machine)]) == pytest.approx(wanted.makespan, rel=1e-12)
            found = play(schedule, machine).spans
            assert all(found[key] == pytest.approx(span, rel=1e-12) for key, span in wanted.spans.items())


def check_random(seed: int, most: tuple[int, int, int] = (4, 5, 2)) -> bool:
    """A random schedule on both machines; whether gloo's order of posts is a deadlock on NCCL."""
    random = Random(seed)
    schedule, costs = random_schedule(random, most), random_costs(random)
    placed = program(schedule)
    for machine in (placed, of_gloo(placed)):
        assert play(schedule, machine, costs).makespan == makespan(schedule, [*map(one_by_one, machine)], costs)
        assert play(schedule, machine).makespan == pytest.approx(simulate(schedule).makespan, rel=1e-12)
    slowest = [waiting(one_by_one(steps)) for steps in placed]
    assert play(schedule, placed, costs, host_waits=True).makespan == makespan(schedule, slowest, costs)
    return is_stuck(schedule, [waiting(one_by_one(steps)) for steps in of_gloo(placed)])


def test_any_schedule_that_can_run_runs_on_both_machines() -> None:
    """75 at random: none gets stuck, and the order of the posts costs no time.  Gloo's order would be stuck on NCCL."""
    assert sum(check_random(seed) for seed in range(75)) > 12


def test_a_program_that_only_nccl_cannot_run_is_refused() -> None:
    """1F1B on two ranks: each receives ahead of an action what the other sends after its own, and both hosts wait."""
    schedule = built_in("1f1b", 2, 4)
    placed = of_gloo(program(schedule))
    play(schedule, placed)
    with pytest.raises(ScheduleError, match="1f1b: deadlock where the host waits for the device; rank 0 stops at F"):
        prove(schedule, placed)


def test_between_open_and_receive_lies_at_most_one_action_and_the_message_arrives_during_it() -> None:
    for schedule in every_built_in():
        spans = simulate(schedule).spans
        for rank, steps in enumerate(program(schedule)):
            at = {(step.op, step.lands): i for i, step in enumerate(steps) if isinstance(step, MessageAction)}
            for (kind, use), received in at.items():
                if kind is not Op.RECV:
                    continue
                actions = [one for one in steps[at[Op.OPEN, use] : received] if isinstance(one, Action)]
                between = {pair_of(schedule, rank, action) for action in actions}
                assert len(between) <= 1
                for parts in between:
                    start, end = spans[rank, parts[0]][0], spans[rank, parts[-1]][1]
                    at_rank, source = schedule.source(rank, use)
                    assert start < spans[at_rank, pair_of(schedule, at_rank, source)[-1]][1] <= end + 1e-9


# ---- the executor


def _gradients_in_nccls_order(rank: int, runs: dict[str, Any]) -> dict[int, dict[str, Any]]:
    proof.steps_of = lambda placed, rank, _: placed[rank]  # type: ignore[assignment]
    return _gradients(rank, runs, (4,))


def test_posts_in_nccls_order_give_the_same_bits() -> None:
    model = MODELS["untied"] | {"num_layers": 4}
    runs = {
        name: run_of(2, model=model, parallel={"pp": 2, **given}, training={"accumulation": 4})
        for name, given in SCHEDULES.items()
    }
    usual = run_world(2, _gradients, runs, (4,))[0][4]
    found = run_world(2, _gradients_in_nccls_order, runs)[0][4]
    for name, wanted in usual.items():
        assert all(torch.equal(found[name][key], tensor) for key, tensor in wanted.items()), name


class FakeGpu:
    """A device module that logs: what is posted in which stream, after which events."""

    def __init__(self, log: list[str]) -> None:
        self.current, outer = "actions", self

        class Event:
            def record(self) -> None:
                self.after = [line for line in log if len(line) == 2][-1:] or ["nothing"]

            def wait(self) -> None:
                log.append(f"{outer.current} waits for {self.after[0]}")

        self.Event, self.Stream = Event, lambda: "aside"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


def test_on_a_gpu_a_receive_waits_for_what_was_queued_before_the_action_it_is_posted_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second rank of 1F1B: F1 arrives when F0 ends, and its receive is queued after F0 but does not wait for it."""
    log: list[str] = []
    gpu = FakeGpu(log)

    def exchange(sends: list[Any], receives: list[Any], axis: Axis) -> list[Pending]:
        what = "SEND" if sends else "RECV"
        log.append(f"{what} in {gpu.current}")
        return [Pending(lambda: log.append(f"wait for {what} in {gpu.current}"))]

    class Logging:
        def expect(self, following: Action) -> None:
            pass

        def forward(self, chunk: int, microbatch: int, x: Any) -> None:
            log.append(f"F{microbatch}")

        def backward(self, chunk: int, microbatch: int, grad: Any) -> tuple[torch.Tensor]:
            log.append(f"B{microbatch}")
            return (torch.empty(1),)

    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    monkeypatch.setattr(executor, "exchange", exchange)
    group: Any = SimpleNamespace(device=torch.device("cuda"))
    axis = Axis("pp", (0, 1), 1, group)
    made = executor.Executor(built_in("1f1b", 2, 2), (axis, axis), lambda use: (torch.empty(1),), lambda action: None)
    made.run(Logging())  # type: ignore[arg-type]
    assert log == [
        "aside waits for nothing",
        "RECV in aside",
        "wait for RECV in actions",
        "F0",
        "aside waits for nothing",
        "RECV in aside",
        "B0",
        "SEND in actions",
        "wait for RECV in actions",
        "F1",
        "B1",
        "SEND in actions",
        "wait for SEND in actions",
        "wait for SEND in actions",
    ]


def test_a_gpu_runs_the_program_itself_and_gloo_receives_when_it_opens() -> None:
    placed = program(built_in("1f1b", 3, 6))
    for rank, steps in enumerate(placed):
        assert proof.steps_of(placed, rank, "cuda") == steps
        early = proof.steps_of(placed, rank, "cpu")
        assert sorted(map(str, early)) == sorted(map(str, steps))
        for one, following in pairwise(early):
            if one.op is Op.OPEN:
                assert (following.op, following.lands) == (Op.RECV, one.lands)


def _connected(rank: int, run: Any, names: list[str]) -> list[dict[Any, int]]:
    """Messages that a rank sends when executors are made, by schedule."""
    state: ParallelState = state_on(rank, run)
    counts = []
    for name in names:
        state.traffic.reset()
        kind = kinds.SCHEDULES[name]
        executors(kind, kind.chunks or 2, state, lambda shape, action: ())
        counts.append(dict(state.traffic.sent_bytes))
    return counts


def test_every_two_ranks_that_will_exchange_messages_are_connected_before_the_first_step() -> None:
    """Four bytes along every edge of the pipeline: a V has no edge but those between neighbours, a loop has one more."""
    names = ["1f1b", "interleaved", "zbv"]
    run = run_of(4, model=MODELS["untied"] | {"num_layers": 8}, parallel={"pp": 4})
    for rank, found in enumerate(run_world(4, _connected, run, names)):
        neighbours = 1 if rank in (0, 3) else 2
        assert found == [{("pp", "send_recv"): 4 * edges} for edges in (neighbours, 2, neighbours)]


# ---- a measured step


def test_a_clock_on_a_gpu_never_waits_for_it_within_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            log.append("waited")

        def elapsed_time(self, other: Any) -> float:
            return float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("a wait for the device"))
    clock = ActionClock(torch.device("cuda"))
    first, second = Action(Op.FORWARD, 0), Action(Op.BACKWARD, 0)
    for action, at in ((first, 250.0), (first, 500.0), (second, 1500.0), (second, 2000.0)):
        now[0] = at
        clock.mark(action)
    assert not log
    assert clock.spans() == [(first, (0.25, 0.5)), (second, (1.5, 2.0))]
    for action, at in ((first, 3000.0), (second, 3000.0), (first, 4000.0), (second, 4000.0)):  # a pair
        now[0] = at
        clock.mark(action)
    assert clock.spans()[2:] == [(first, (3.0, 3.5)), (second, (3.5, 4.0))]
    assert log
