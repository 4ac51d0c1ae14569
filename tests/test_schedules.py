"""Schedules are proved before they run: complete, free of deadlock, with the bubble and the memory of the papers.

[Note: the second proof]  `simulate` and `prove` play a schedule step by step.  The tests ask another question of the
same program: are its events (a step is reached, a message passes) free of cycles?  A program that can run is exactly
one whose events can be put in an order, on gloo and on NCCL where every host waits at every step; `nccl.py` orders them.

[Note: chunk time]  With costs of `chunks` each, every forward, backward and weight gradient of a chunk takes 1, so that
idle times are whole numbers.  Divided by the chunks they are in units of a rank's work on one micro-batch.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nccl import is_stuck, one_by_one, pair_of, waiting

from megazero.schedules.action import Action, MessageAction, Op, Placement, Schedule, loop
from megazero.schedules.factory import GivenSchedule, forward_only
from megazero.schedules.gpipe import GPIPE
from megazero.schedules.interleaved import INTERLEAVED
from megazero.schedules.one_f_one_b import ONE_F_ONE_B
from megazero.schedules.proof import (
    Costs,
    Program,
    ScheduleError,
    peak_activations,
    play,
    program,
    prove,
    received_when_opened,
    simulate,
)
from megazero.schedules.registry import SCHEDULES
from megazero.schedules.zero_bubble import ZERO_BUBBLE_H1, ZERO_BUBBLE_V

gpipe, interleaved, one_forward_one_backward = GPIPE.build, INTERLEAVED.build, ONE_F_ONE_B.build
zero_bubble_h1, zero_bubble_v = ZERO_BUBBLE_H1.build, ZERO_BUBBLE_V.build

SHAPES = [(pp, m) for pp in range(1, 9) for m in (*range(1, 13), 14, 16, 24)]
SPLIT = ("zb-h1", "zbv", "dualpipev")
INTERLEAVED_KINDS = {"interleaved": 0, "interleaved-pairs": 1}  # forwards that the warm-up has more

every_kind = pytest.mark.parametrize("name", SCHEDULES)


def shapes(name: str) -> Iterator[tuple[int, int, int]]:
    """The (pp, m, chunks) up to (8, 24, 4) that a kind can have."""
    for pp, m in SHAPES:
        if SCHEDULES[name].chunks is not None:
            yield pp, m, SCHEDULES[name].chunks
        elif m % pp == 0:
            yield from ((pp, m, chunks) for chunks in (2, 3, 4))


@cache
def every(name: str) -> list[Schedule]:
    """A kind's schedules of all shapes."""
    return [SCHEDULES[name].build(*shape) for shape in shapes(name)]


@cache
def every_program(name: str) -> list[tuple[Schedule, Program]]:
    """The same with their programs, and those of their forwards alone."""
    schedules = [*every(name), *map(forward_only, every(name))]
    return [(schedule, program(schedule)) for schedule in schedules]


@st.composite
def small_schedules(draw: st.DrawFn, pp: tuple[int, int] = (1, 4)) -> Schedule:
    """A small schedule of any kind."""
    name, ranks, m = draw(st.sampled_from(list(SCHEDULES))), draw(st.integers(*pp)), draw(st.integers(1, 4))
    if SCHEDULES[name].chunks is None:
        return SCHEDULES[name].build(ranks, ranks * (1 + m // 3), draw(st.integers(2, 3)))
    return SCHEDULES[name].build(ranks, m, SCHEDULES[name].chunks)


def chunk_time(schedule: Schedule, hop: int = 0) -> Costs:
    """[Note: chunk time]"""
    return Costs(schedule.chunks, schedule.chunks, schedule.chunks, hop)


def idle_times(schedule: Schedule) -> list[float]:
    """Idle time of each rank, in units of a chunk's forward."""
    timeline = simulate(schedule, chunk_time(schedule))
    return [timeline.idle(rank) for rank in range(schedule.pp)]


def actions(text: str) -> tuple[Action, ...]:
    """ "F0 F1.1 B0 W0" as actions."""
    parsed = []
    for word in text.split():
        microbatch, _, chunk = word[1:].partition(".")
        parsed.append(Action(Op(word[0]), int(microbatch), int(chunk or 0)))
    return tuple(parsed)


def schedule_of(*ranks: str, placement: Placement | None = None, microbatches: int = 2) -> Schedule:
    return Schedule("by hand", microbatches, placement or loop(len(ranks)), tuple(actions(rank) for rank in ranks))


def printed(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, rank)) for rank in schedule.ranks]


# ---- the second proof

Computed = tuple[Op, int, int]
"""F, B or W of a micro-batch on a virtual stage."""


def needed(kind: Op, microbatch: int, stage: int, stages: int) -> Computed | None:
    """What must be computed before, or None for a micro-batch's first forward."""
    if kind is Op.WEIGHT:
        return Op.BACKWARD, microbatch, stage
    if kind is Op.FORWARD:
        return (kind, microbatch, stage - 1) if stage else None
    return (kind, microbatch, stage + 1) if stage + 1 < stages else (Op.FORWARD, microbatch, stage)


def has_order(before: dict) -> bool:
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


def can_run(schedule: Schedule, placed: Program) -> bool:
    """Whether the events of a program have an order on both machines that `nccl.py` emulates."""
    for rank, steps in enumerate(placed):
        done, opened = set(), set()
        for step, following in itertools.zip_longest(steps, steps[1:]):
            if isinstance(step, Action):
                done.add(step)
                if isinstance(following, MessageAction) and pair_of(schedule, rank, step)[-1] != step:
                    return False
            elif step.op is Op.OPEN:
                opened.add(step.lands)
            elif (step.carries not in done) if step.op is Op.SEND else (step.lands not in opened):
                return False
    gloo = [one_by_one(steps) for steps in map(received_when_opened, placed)]
    try:
        return not any(
            is_stuck(schedule, machine) for machine in (gloo, [waiting(one_by_one(steps)) for steps in placed])
        )
    except (KeyError, ValueError):  # a message that is used before it is received, or has one side
        return False


# ---- every schedule, exhaustively


@every_kind
def test_every_shape_is_proved(name):
    assert len(every_program(name)) == 2 * len(list(shapes(name)))


@every_kind
def test_a_second_proof_agrees(name):
    for schedule, placed in every_program(name):
        if schedule.pp in (1, 2, 3, 5, 8) and schedule.microbatches in (1, 4, 10):
            assert can_run(schedule, placed)


@every_kind
def test_a_schedule_is_of_the_shape_that_was_asked_for(name):
    for schedule, (pp, m, chunks) in zip(every(name), shapes(name), strict=True):
        assert (schedule.name, schedule.pp, schedule.microbatches, schedule.chunks) == (name, pp, m, chunks)
        assert schedule.placement == SCHEDULES[name].placement(pp, chunks)
        assert sorted(schedule.placement) == list(itertools.product(range(pp), range(chunks)))
        assert schedule.splits_backward == (name in SPLIT)


@every_kind
def test_a_program_is_its_schedule_with_each_message_sent_once_and_received_once(name):
    for schedule, placed in every_program(name):
        assert tuple(tuple(s for s in steps if isinstance(s, Action)) for steps in placed) == schedule.ranks
        sent, received = Counter(), Counter()
        for rank, steps in enumerate(placed):
            for step in steps:
                if step.op is Op.SEND:
                    sent[step.carries, step.lands, rank, step.peer] += 1
                elif step.op is Op.RECV:
                    received[step.carries, step.lands, step.peer, rank] += 1
        wanted = Counter()
        for (rank, chunk), (after, its) in itertools.pairwise(schedule.placement):
            for i in range(schedule.microbatches) if rank != after else ():
                wanted[Action(Op.FORWARD, i, chunk), Action(Op.FORWARD, i, its), rank, after] += 1
                if schedule.has_backward:
                    wanted[Action(Op.BACKWARD, i, its), Action(Op.BACKWARD, i, chunk), after, rank] += 1
        assert sent == received == wanted


@every_kind
def test_every_microbatch_passes_every_chunk_once_and_in_order(name):
    """The order of backwards and weight gradients is what makes the accumulated gradients of all schedules bit-equal."""
    kinds = (Op.FORWARD, Op.BACKWARD, Op.WEIGHT) if name in SPLIT else (Op.FORWARD, Op.BACKWARD)
    for schedule in every(name):
        wanted = {
            (kind, chunk): list(range(schedule.microbatches)) for kind in kinds for chunk in range(schedule.chunks)
        }
        for rank in schedule.ranks:
            found: dict[tuple[Op, int], list[int]] = {}
            for action in rank:
                found.setdefault((action.op, action.chunk), []).append(action.microbatch)
            assert found == wanted


@every_kind
def test_an_evaluation_is_the_forwards_of_the_training_schedule_in_its_order(name):
    for training in every(name):
        schedule = forward_only(training)
        forwards = tuple(tuple(a for a in rank if a.op is Op.FORWARD) for rank in training.ranks)
        assert schedule == replace(
            training, name=f"{name}, forward only", ranks=forwards, has_backward=False, beside=frozenset()
        )
        assert not schedule.splits_backward
        assert not any(peak_activations(schedule, rank) for rank in range(schedule.pp))


@every_kind
def test_a_given_schedule_evaluates_any_number_of_microbatches(name):
    """One from a file trains with its own number; an evaluation has as many as its samples make."""
    for training in every(name):
        if training.microbatches > 8 or training.pp > 4:
            continue
        for count in (1, training.microbatches, training.microbatches + 1, 3 * training.microbatches):
            schedule = GivenSchedule(training).build_forward(training.pp, count, training.chunks)
            program(schedule)  # proved: it cannot deadlock
            for rank in schedule.ranks:
                passes = [(action.microbatch, action.chunk) for action in rank]
                assert sorted(passes) == [(m, chunk) for m in range(count) for chunk in range(training.chunks)]
        with pytest.raises(ValueError, match="is for pp="):
            GivenSchedule(training).build_forward(training.pp + 1, 1, training.chunks)


# ---- order, as in the papers


@pytest.mark.parametrize(("name", "more"), INTERLEAVED_KINDS.items())
def test_interleaved_warms_up_with_two_forwards_per_stage_that_follows_and_a_group_per_further_chunk(name, more):
    """Narayanan et al. 2021, figure 4 below; the warm-up is that of Megatron-LM.  After it every forward is in a pair."""
    for schedule in every(name):
        pp, work = schedule.pp, schedule.microbatches * schedule.chunks
        for stage, rank in enumerate(schedule.ranks):
            warmup = min(2 * (pp - stage - 1) + (schedule.chunks - 1) * pp + more, work)
            assert sum(at == stage for at, _ in schedule.beside) == more * (work - warmup)
            assert "".join(a.op for a in rank) == "F" * warmup + "FB" * (work - warmup) + "B" * warmup
            forwards = [(a.microbatch // pp, a.chunk, a.microbatch) for a in rank if a.op is Op.FORWARD]
            backwards = [(a.microbatch // pp, -a.chunk, a.microbatch) for a in rank if a.op is Op.BACKWARD]
            assert forwards == sorted(forwards)
            assert backwards == sorted(backwards)


def test_zb_h1_without_its_weight_gradients_is_1f1b_and_rank_s_keeps_s_of_them_back():
    """Qi et al. 2024, section 2.1: the schedule is 1F1B, and W fills what were waits."""
    for split, whole in zip(every("zb-h1"), every("1f1b"), strict=True):
        assert tuple(tuple(a for a in rank if a.op is not Op.WEIGHT) for rank in split.ranks) == whole.ranks
        for stage, rank in enumerate(split.ranks):
            kept = 0
            for action, following in itertools.pairwise((*rank, None)):
                kept += {Op.BACKWARD: 1, Op.WEIGHT: -1}.get(action.op, 0)
                is_due = following is not None and following.op is Op.WEIGHT
                assert kept <= stage + is_due


# ---- memory


def test_peak_activations_are_those_of_the_papers():
    """Of a micro-batch on a chunk.  GPipe all; 1F1B one per stage from here on; ZB-H1 as many as 1F1B's first rank."""
    for pp, m in SHAPES:
        for stage in range(pp):
            assert peak_activations(gpipe(pp, m), stage) == m
            assert peak_activations(one_forward_one_backward(pp, m), stage) == min(pp - stage, m)
            assert peak_activations(zero_bubble_h1(pp, m), stage) == min(pp, m)


@pytest.mark.parametrize(("name", "more"), INTERLEAVED_KINDS.items())
def test_interleaved_holds_its_warmup_and_one_more(name, more):
    for schedule in every(name):
        pp, v = schedule.pp, schedule.chunks
        for stage in range(pp):
            bound = 2 * (pp - stage - 1) + (v - 1) * pp + 1 + more
            assert peak_activations(schedule, stage) == min(bound, schedule.microbatches * v)


def test_zbv_holds_as_much_as_the_first_rank_of_1f1b_in_chunks_of_half_the_size():
    """Qi et al. 2024b, "ZB-V": the memory of 1F1B, on every rank."""
    for schedule in every("zbv"):
        peaks = [peak_activations(schedule, rank) for rank in range(schedule.pp)]
        assert max(peaks) <= 2 * min(schedule.pp, schedule.microbatches)


def test_dualpipev_holds_a_chunk_more_than_a_v_of_zero_bubble():
    """DeepSeek-AI: PP + 1 activations of one of PP = 2 pp stages."""
    for schedule in every("dualpipev"):
        peaks = [peak_activations(schedule, rank) for rank in range(schedule.pp)]
        assert max(peaks) <= min(2 * schedule.pp + 1, 2 * schedule.microbatches)
        if schedule.microbatches >= 2 * schedule.pp:
            assert set(peaks) == {2 * schedule.pp + 1}


# ---- idle time


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("costs", [Costs(1, 1, 1), Costs(2, 1, 1), Costs(1, 3, 2)])
def test_the_bubble_is_that_of_the_paper(name, costs):
    """Idle (p - 1)(t_f + t_b) per rank, (p - 1) / (m + p - 1) of the step (Narayanan et al. 2021, section 2.2)."""
    work = costs.forward + costs.backward + costs.weight
    for schedule in every(name):
        pp, m = schedule.pp, schedule.microbatches
        timeline = simulate(schedule, costs)
        assert timeline.makespan == (m + pp - 1) * work
        assert [timeline.idle(rank) for rank in range(pp)] == [(pp - 1) * work] * pp
        assert timeline.bubble_fraction == pytest.approx((pp - 1) / (m + pp - 1))


@pytest.mark.parametrize("name", INTERLEAVED_KINDS)
def test_interleaving_divides_the_bubble_by_the_chunks(name):
    """Narayanan et al. 2021, section 2.2."""
    for schedule in every(name):
        assert idle_times(schedule) == [(schedule.pp - 1) * 3] * schedule.pp
        bubble = (schedule.pp - 1) / schedule.chunks
        assert simulate(schedule).bubble_fraction == pytest.approx(bubble / (schedule.microbatches + bubble))


def test_zb_h1_is_idle_for_a_third_of_1f1b():
    """(p - 1)(F + B - W) (Qi et al. 2024, table 2) once the pipeline is full; one more for each micro-batch that lacks."""
    for schedule in every("zb-h1"):
        lacking = max(schedule.pp - schedule.microbatches, 0)
        assert idle_times(schedule) == [schedule.pp - 1 + lacking] * schedule.pp


def test_zbv_is_idle_for_half_of_zb_h1_once_it_is_full():
    """A V cannot do better than (pp - 1) / 2: the last rank begins half a forward per rank late."""
    for schedule in every("zbv"):
        pp, m = schedule.pp, schedule.microbatches
        timeline = simulate(schedule)
        assert [timeline.idle(rank) for rank in range(pp)] == [max(2 * pp - 1 - m, (pp - 1) / 2)] * pp


def test_dualpipev_is_idle_as_its_authors_say_and_pairs_its_steady_state():
    """(PP/2 - 1)(F&B + B - 3W) in times of a chunk, PP = 2 pp stages and B whole, for 2 pp micro-batches or more."""
    for schedule in every("dualpipev"):
        pp, m = schedule.pp, schedule.microbatches
        forward, whole, weight, together = 1, 2, 1, 3
        full = (pp - 1) * (together + whole - 3 * weight)
        assert idle_times(schedule) == [max(2 * (2 * pp - 1 - m), full)] * pp
        for rank in range(pp) if m >= 2 * pp else ():
            steady = 2 * (m - 2 * pp + rank + 1) - (rank == pp - 1)  # the first of the last rank is none
            assert sum(at == rank for at, _ in schedule.beside) == steady + (pp - rank - 1)
            assert forward + whole == together


@settings(deadline=None, max_examples=150)
@given(schedule=small_schedules(), times=st.tuples(*[st.integers(1, 9)] * 4))
def test_each_action_starts_as_soon_as_its_rank_is_free_and_its_input_is_there(schedule, times):
    chunks, placement = schedule.chunks, schedule.placement
    forward, backward, weight, hop = times
    spans = simulate(schedule, Costs(forward * chunks, backward * chunks, weight * chunks, hop)).spans
    if not schedule.splits_backward:
        backward += weight
    for rank, order in enumerate(schedule.ranks):
        free = 0
        for action in order:
            there = 0
            parts = pair_of(schedule, rank, action)
            for part in parts if action == parts[0] else ():  # all of a pair waits for all that it needs
                source = needed(part.op, part.microbatch, placement.index((rank, part.chunk)), len(placement))
                at, chunk = placement[source[2]] if source else (0, 0)
                if source and (at != rank or Action(source[0], source[1], chunk) not in parts):
                    *_, last = pair_of(schedule, at, Action(source[0], source[1], chunk))
                    there = max(there, spans[at, last][1] + (hop if at != rank else 0))
            assert spans[rank, action][0] == max(free, there)
            free = spans[rank, action][1]
            length = {Op.FORWARD: forward, Op.BACKWARD: backward, Op.WEIGHT: weight}[action.op]
            assert free - spans[rank, action][0] == length


# ---- receives ahead of their use


def compute_between_receive_and_use(placed: Program, kind: Op) -> list[list[int]]:
    """Per rank, in order of use: how many actions run between opening a message and using it."""
    gaps: list[list[int]] = []
    for steps in placed:
        posted = {
            step.lands: i for i, step in enumerate(steps) if isinstance(step, MessageAction) and step.op is Op.OPEN
        }
        used = [(i, step) for i, step in enumerate(steps) if step in posted and step.op is kind]
        gaps.append([sum(isinstance(s, Action) for s in steps[posted[step] + 1 : i]) for i, step in used])
    return gaps


def test_1f1b_posts_the_receive_of_a_forward_before_the_backward_that_precedes_it():
    """So the activation travels while the backward runs: on every rank, for all but the first micro-batch."""
    for pp, m in (shape for shape in SHAPES if shape[0] > 1):
        gaps = compute_between_receive_and_use(program(one_forward_one_backward(pp, m)), Op.FORWARD)
        assert gaps[0] == []
        for rank in range(1, pp):
            assert len(gaps[rank]) == m
            assert all(gap >= 1 for gap in gaps[rank][1:])


# ---- schedules by hand


def test_actions_and_transfers_print_as_in_the_papers():
    assert printed(one_forward_one_backward(2, 3)) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert printed(gpipe(2, 2)) == ["F0 F1 B0 B1"] * 2
    assert printed(zero_bubble_h1(2, 3)) == ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]
    assert printed(interleaved(2, 2, 2)) == ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1", "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"]
    forward = Action(Op.FORWARD, 0)
    assert str(MessageAction(Op.SEND, forward, forward, 1)) == "SEND(F0->1)"
    assert str(MessageAction(Op.RECV, forward, forward, 0)) == "RECV(F0<-0)"


def test_interleaved_refuses_groups_that_are_not_full_and_names_the_nearest_that_are():
    for pp, m in SHAPES:
        if m % pp:
            nearest = " and ".join(str(n) for n in range(m - pp + 1, m + pp) if n > 0 and n % pp == 0)
            with pytest.raises(ValueError, match=f"multiples of pp={pp}, got {m}; nearest: {nearest}$"):
                interleaved(pp, m, 2)


# ---- damaged schedules are refused


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("F0 F1 B0 B1 F2", "F0 B0 F1 B1"), r"rank 0 runs F2, which is no part"),
        (("F0 F1 B0 B1", "F0 B0 F1 B1 B1.1"), r"rank 1 runs B1.1, which is no part"),
        (("F0 F1 B0 B1", "F0 B1 F1 B0"), r"rank 1 runs B1 before F1"),
        (("B0 F0 F1 B1", "F0 B0 F1 B1"), r"rank 0 runs B0 before F0"),
        (("F0 B0 F1 B1", "F0 F1 B0 B1"), r"deadlock; rank 0 stops at B0, which waits for B0 on rank 1"),
    ],
)
def test_a_damaged_schedule_is_refused_by_the_name_of_the_action(ranks, message):
    with pytest.raises(ScheduleError, match=message):
        program(schedule_of(*ranks))


@settings(deadline=None, max_examples=150)
@given(schedule=small_schedules(), data=st.data())
def test_a_missing_or_doubled_action_is_refused_wherever_it_is(schedule, data):
    rank = data.draw(st.integers(0, schedule.pp - 1))
    order = schedule.ranks[rank]
    at = data.draw(st.integers(0, len(order) - 1))
    action = order[at]
    # Without its only weight gradient a schedule is one whose backwards are whole.
    assume(sum(map(len, schedule.ranks)) > 3 or action.op is not Op.WEIGHT)
    for damaged, message in (
        (order[:at] + order[at + 1 :], f"never runs {action}"),
        ((*order, action), f"runs {action} twice"),
    ):
        ranks = (*schedule.ranks[:rank], damaged, *schedule.ranks[rank + 1 :])
        with pytest.raises(ScheduleError, match=f"rank {rank} {message}$"):
            program(replace(schedule, ranks=ranks))


@settings(deadline=None, max_examples=300)
@given(schedule=small_schedules(pp=(1, 3)), moves=st.integers(1, 5), data=st.data())
def test_any_order_of_actions_is_run_or_refused_as_its_dependencies_say(schedule, moves, data):
    """Actions are moved at random, pairs apart: accepted exactly when the actions, messages left aside, have an order."""
    ranks = [list(rank) for rank in schedule.ranks]
    for _ in range(moves):
        order = data.draw(st.sampled_from(ranks))
        action = order.pop(data.draw(st.integers(0, len(order) - 1)))
        order.insert(data.draw(st.integers(0, len(order))), action)
    before: dict[Computed, set[Computed]] = {}
    for rank, order in enumerate(ranks):
        names = [(a.op, a.microbatch, schedule.placement.index((rank, a.chunk))) for a in order]
        for previous, name in itertools.pairwise((None, *names)):
            before[name] = {previous, needed(*name, len(schedule.placement))} - {None}
    moved = replace(schedule, ranks=tuple(map(tuple, ranks)), beside=frozenset())
    if has_order(before):
        assert can_run(moved, program(moved))
    else:
        with pytest.raises(ScheduleError, match=r"rank \d (runs|stops at) [FBW]\d"):
            program(moved)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("F0 F1&B0 B1", "F0 B0 F1 B1", ""),
        ("F0 F1&B0 B1", "F0 F1 B0 B1", "deadlock; rank 0 stops at F1, which waits for B0 on rank 1"),
        ("F0 F1 B0 B1", "F0&B0 F1 B1", "deadlock; rank 0 stops at B0, which waits for B0 on rank 1"),
        ("F0&F1 B0 B1", "F0 B0 F1 B1", "rank 0 runs F0 beside F1, which is no backward"),
    ],
)
def test_a_pair_waits_for_all_that_it_needs(first, second, message):
    """Rank 1 sends B0 after F0, or after F1, which is of the pair that waits for it."""
    schedule = schedule_of(first.replace("&", " "), second.replace("&", " "))
    words = [(rank, word) for rank, text in enumerate((first, second)) for word in text.split() if "&" in word]
    paired = replace(schedule, beside=frozenset((rank, *actions(word[: word.index("&")])) for rank, word in words))
    with pytest.raises(ScheduleError, match=message) if message else nullcontext():
        program(paired)


def test_a_message_within_a_pair_is_refused():
    schedule = SCHEDULES["dualpipev"].build(2, 4, 2)
    (first, second) = program(schedule)
    at, steps = index_of(first, "F3"), list(first)
    posted = next(index for index in range(at, len(steps)) if isinstance(steps[index], MessageAction))
    steps.insert(at + 1, steps.pop(posted))
    with pytest.raises(ScheduleError, match=r"rank 0 posts .* within the pair of F3$"):
        prove(schedule, (tuple(steps), second))


# ---- damaged programs are refused


def index_of(steps: tuple[Action | MessageAction, ...], name: str) -> int:
    return [str(step) for step in steps].index(name)


def test_messages_of_the_two_directions_do_not_wait_for_each_other():
    """Each direction has its own communicator: a rank may post its first receive from above before all its sends.

    Unless its host waits for the device before it has sent what it must.
    """
    schedule = one_forward_one_backward(2, 4)
    first, second = program(schedule)
    names = ("OPEN(B0<-1)", "RECV(B0<-1)")
    moved = [first[index_of(first, name)] for name in names]
    early = ((*moved, *(step for step in first if str(step) not in names)), second)
    assert not is_stuck(schedule, [one_by_one(steps) for steps in map(received_when_opened, early)])
    assert is_stuck(schedule, [waiting(one_by_one(steps)) for steps in early])
    play(schedule, tuple(map(received_when_opened, early)))
    with pytest.raises(ScheduleError, match="deadlock where the host waits for the device; rank 0 stops at F0"):
        prove(schedule, early)


def test_a_send_before_its_action_is_refused():
    schedule = gpipe(2, 2)
    first, second = program(schedule)
    at, steps = index_of(first, "F1"), list(first)
    assert str(steps[at + 1]) == "SEND(F1->1)"
    steps[at : at + 2] = steps[at + 1], steps[at]
    with pytest.raises(ScheduleError, match=r"rank 0 posts SEND\(F1->1\) before F1"):
        prove(schedule, (tuple(steps), second))


@settings(deadline=None, max_examples=300)
@given(
    schedule=st.one_of(small_schedules(pp=(2, 4)), small_schedules(pp=(2, 4)).map(forward_only)),
    moves=st.integers(1, 3),
    data=st.data(),
)
def test_prove_and_the_second_proof_agree_on_any_damage(schedule, moves, data):
    """Transfers are moved and lost at random: refused exactly when the events have no order."""
    placed = program(schedule)
    for _ in range(moves):
        rank = data.draw(st.integers(0, schedule.pp - 1))
        steps = list(placed[rank])
        transfers = [index for index, step in enumerate(steps) if not isinstance(step, Action)]
        assume(transfers)
        step = steps.pop(data.draw(st.sampled_from(transfers)))
        if data.draw(st.integers(0, 5)) > 0:
            steps.insert(data.draw(st.integers(0, len(steps))), step)
        placed = (*placed[:rank], tuple(steps), *placed[rank + 1 :])
    if can_run(schedule, placed):
        prove(schedule, placed)
    else:
        with pytest.raises(ScheduleError):
            prove(schedule, placed)
