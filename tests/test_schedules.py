"""Schedules are proved before they run: complete, free of deadlock, with the bubble and the memory of the papers.

[Note: the second proof]  `simulate` and `prove` play a schedule step by step.  The tests ask another question of the
same program: are its events (a step is reached, a message passes) free of cycles?  A program that can run is exactly
one whose events can be put in an order.
"""

import itertools
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megazero.schedules.action import Action, Kind, Schedule, Transfer, straight
from megazero.schedules.generators import GENERATORS, forward_only, gpipe, one_forward_one_backward
from megazero.schedules.simulate import Costs, Program, ScheduleError, peak_activations, program, prove, simulate

TRAINING = (gpipe, one_forward_one_backward)
ALL = (*TRAINING, forward_only)
SHAPES = [(pp, m) for pp in range(1, 9) for m in range(1, 25)]

every_schedule = pytest.mark.parametrize("generate", ALL, ids=lambda generate: generate.__name__)
every_training = pytest.mark.parametrize("generate", TRAINING, ids=lambda generate: generate.__name__)


def actions(text: str) -> tuple[Action, ...]:
    """ "F0 F1.1 B0" as actions."""
    parsed = []
    for word in text.split():
        microbatch, _, chunk = word[1:].partition(".")
        parsed.append(Action(Kind(word[0]), int(microbatch), int(chunk or 0)))
    return tuple(parsed)


def schedule_of(*ranks: str, chunks: int = 1, microbatches: int = 2) -> Schedule:
    placement = tuple((rank, chunk) for chunk in range(chunks) for rank in range(len(ranks)))
    return Schedule("by hand", microbatches, placement, tuple(actions(rank) for rank in ranks))


# ---- the second proof


def can_run(placed: Program, chunks: int = 1) -> bool:
    """Whether the events of a program have an order.

    A message is (F or B, micro-batch, the virtual stage that it comes from, the rank that it goes to).  It has two
    sides; the messages of a rank pass in the order in which the rank posts them.
    """
    pp = len(placed)
    last = pp * chunks - 1
    before: dict[object, set[object]] = {}  # event -> events that must come first
    sides: dict[object, list[Kind]] = {}
    for rank, steps in enumerate(placed):
        previous_step = previous_message = None
        for index, step in enumerate(steps):
            here = (rank, index)
            before[here] = {previous_step} - {None}
            previous_step = here
            if isinstance(step, Transfer):
                sender = rank if step.kind is Kind.SEND else step.peer
                receiver = step.peer if step.kind is Kind.SEND else rank
                message = (step.carries.kind, step.carries.microbatch, step.carries.chunk * pp + sender, receiver)
                sides.setdefault(message, []).append(step.kind)
                before.setdefault(message, set()).update({here, previous_message} - {None})
                previous_message = message
                if step.kind is Kind.SEND:
                    before[here].add(("computed", step.carries.kind, step.carries.microbatch, message[2]))
            else:
                stage = step.chunk * pp + rank
                before[("computed", step.kind, step.microbatch, stage)] = {here}
                source = stage - 1 if step.kind is Kind.FORWARD else stage + 1
                if 0 <= source <= last:
                    local = ("computed", step.kind, step.microbatch, source)
                    before[here].add(local if pp == 1 else (step.kind, step.microbatch, source, rank))
                elif step.kind is Kind.BACKWARD:
                    before[here].add(("computed", Kind.FORWARD, step.microbatch, stage))
    known = all(needed in before for first in before.values() for needed in first)
    paired = all(sorted(kinds) == [Kind.RECV, Kind.SEND] for kinds in sides.values())
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return known and paired


# ---- every schedule, exhaustively


@every_schedule
def test_every_shape_is_proved(generate):
    for pp, m in SHAPES:
        program(generate(pp, m))


@every_schedule
def test_a_second_proof_agrees(generate):
    for pp, m in itertools.product((1, 2, 3, 5, 8), (1, 2, 4, 7, 12)):
        assert can_run(program(generate(pp, m)))


@every_schedule
def test_a_program_is_its_schedule_with_each_message_sent_once_and_received_once(generate):
    for pp, m in SHAPES:
        schedule = generate(pp, m)
        placed = program(schedule)
        assert tuple(tuple(s for s in steps if isinstance(s, Action)) for steps in placed) == schedule.ranks
        sent, received = Counter(), Counter()
        for rank, steps in enumerate(placed):
            for step in steps:
                if isinstance(step, Transfer):
                    assert step.lands == step.carries  # one chunk per rank: both sides have the same name
                    if step.kind is Kind.SEND:
                        sent[step.carries, rank, step.peer] += 1
                    else:
                        received[step.carries, step.peer, rank] += 1
        forwards = {(Action(Kind.FORWARD, i), s, s + 1) for i in range(m) for s in range(pp - 1)}
        backwards = {(Action(Kind.BACKWARD, i), s + 1, s) for i in range(m) for s in range(pp - 1)}
        assert sent == received == Counter(forwards | backwards if schedule.has_backward else forwards)


@every_schedule
def test_every_microbatch_goes_forward_and_backward_once_on_every_stage_in_order(generate):
    """The order of backwards is what makes gradients of all schedules bit-equal."""
    for pp, m in SHAPES:
        schedule = generate(pp, m)
        assert schedule.pp == pp
        for rank in schedule.ranks:
            assert [a.microbatch for a in rank if a.kind is Kind.FORWARD] == list(range(m))
            backwards = [a.microbatch for a in rank if a.kind is Kind.BACKWARD]
            assert backwards == (list(range(m)) if schedule.has_backward else [])


def test_1f1b_warms_up_with_one_forward_per_stage_that_follows():
    """Narayanan et al. 2021, figure 4: warm-up, then one forward and one backward in turn, then the rest."""
    for pp, m in SHAPES:
        for stage, rank in enumerate(one_forward_one_backward(pp, m).ranks):
            warmup = min(pp - stage - 1, m)
            kinds = "".join(action.kind for action in rank)
            assert kinds == "F" * warmup + "FB" * (m - warmup) + "B" * warmup


def test_1f1b_holds_the_activations_of_the_stages_that_follow_and_gpipe_those_of_all_microbatches():
    for pp, m in SHAPES:
        for stage in range(pp):
            assert peak_activations(one_forward_one_backward(pp, m), stage) == min(pp - stage, m)
            assert peak_activations(gpipe(pp, m), stage) == m


@every_training
def test_the_bubble_is_that_of_the_paper(generate):
    """Idle (p - 1)(t_f + t_b) per rank, (p - 1) / (m + p - 1) of the step (Narayanan et al. 2021, section 2.2)."""
    for pp, m in SHAPES:
        timeline = simulate(generate(pp, m), Costs(forward=1, backward=2, hop=0))
        assert timeline.makespan == (m + pp - 1) * 3
        assert [timeline.idle(rank) for rank in range(pp)] == [(pp - 1) * 3] * pp
        assert timeline.bubble_fraction == pytest.approx(float(Fraction(pp - 1, m + pp - 1)))


def test_an_evaluation_is_idle_for_the_forwards_that_fill_and_drain_the_pipeline():
    for pp, m in SHAPES:
        timeline = simulate(forward_only(pp, m))
        assert timeline.makespan == m + pp - 1
        assert [timeline.idle(rank) for rank in range(pp)] == [pp - 1] * pp


@every_schedule
@settings(deadline=None, max_examples=40)
@given(pp=st.integers(1, 5), m=st.integers(1, 8), times=st.tuples(*[st.integers(1, 9)] * 3))
def test_each_action_starts_as_soon_as_its_rank_is_free_and_its_input_is_there(generate, pp, m, times):
    forward, backward, hop = times
    schedule = generate(pp, m)
    spans = simulate(schedule, Costs(forward, backward, hop)).spans
    for rank, order in enumerate(schedule.ranks):
        free = 0
        for action in order:
            if action.kind is Kind.FORWARD:
                there = 0 if rank == 0 else spans[rank - 1, action][1] + hop
            elif rank == pp - 1:
                there = spans[rank, Action(Kind.FORWARD, action.microbatch)][1]
            else:
                there = spans[rank + 1, action][1] + hop
            assert spans[rank, action][0] == max(free, there)
            free = spans[rank, action][1]
            assert free - spans[rank, action][0] == (forward if action.kind is Kind.FORWARD else backward)


def test_one_microbatch_crosses_the_pipeline_and_returns_with_a_hop_between_ranks():
    assert simulate(one_forward_one_backward(4, 1), Costs(1, 2, 0.5)).makespan == 4 * 3 + 6 * 0.5
    assert simulate(one_forward_one_backward(1, 3), Costs(1, 2, 0.5)).makespan == 9


# ---- receives ahead of their use


def compute_between_receive_and_use(placed: Program, kind: Kind) -> list[list[int]]:
    """Per rank, in order of use: how many actions run between posting a receive and using it."""
    gaps: list[list[int]] = []
    for steps in placed:
        posted = {
            step.lands: i for i, step in enumerate(steps) if isinstance(step, Transfer) and step.kind is Kind.RECV
        }
        used = [(i, step) for i, step in enumerate(steps) if step in posted and step.kind is kind]
        gaps.append([sum(isinstance(s, Action) for s in steps[posted[step] + 1 : i]) for i, step in used])
    return gaps


def test_1f1b_posts_the_receive_of_a_forward_before_the_backward_that_precedes_it():
    """So the activation travels while the backward runs: on every rank, for all but the first micro-batch."""
    for pp, m in itertools.product(range(2, 9), range(1, 25)):
        gaps = compute_between_receive_and_use(program(one_forward_one_backward(pp, m)), Kind.FORWARD)
        assert gaps[0] == []
        for rank in range(1, pp):
            assert len(gaps[rank]) == m
            assert all(gap >= 1 for gap in gaps[rank][1:])


# ---- schedules by hand


def test_actions_and_transfers_print_as_in_the_papers():
    schedule = one_forward_one_backward(2, 3)
    assert [" ".join(map(str, rank)) for rank in schedule.ranks] == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert " ".join(map(str, gpipe(2, 2).ranks[0])) == "F0 F1 B0 B1"
    assert str(Action(Kind.FORWARD, 3, 1)) == "F3.1"
    forward = Action(Kind.FORWARD, 0)
    assert str(Transfer(Kind.SEND, forward, forward, 1)) == "SEND(F0->1)"
    assert str(Transfer(Kind.RECV, forward, forward, 0)) == "RECV(F0<-0)"


INTERLEAVED = "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"


def test_a_rank_with_two_chunks_sends_forwards_round_the_ring_and_backwards_home():
    schedule = schedule_of(INTERLEAVED, INTERLEAVED, chunks=2)
    placed = program(schedule)
    assert can_run(placed, chunks=2)
    sends = [[str(s) for s in steps if isinstance(s, Transfer) and s.kind is Kind.SEND] for steps in placed]
    assert sorted(sends[0]) == sorted(f"SEND({a}->1)" for a in ("F0", "F1", "F0.1", "F1.1", "B0.1", "B1.1"))
    assert sorted(sends[1]) == sorted(f"SEND({a}->0)" for a in ("F0", "F1", "B0.1", "B1.1", "B0", "B1"))
    wrapped = next(s for s in placed[1] if isinstance(s, Transfer) and str(s) == "SEND(F0->0)")
    assert wrapped.lands == Action(Kind.FORWARD, 0, 1)


def test_chunks_on_one_rank_hand_over_without_messages():
    schedule = schedule_of("F0 F0.1 B0.1 F1 B0 F1.1 B1.1 B1", chunks=2)
    assert program(schedule) == schedule.ranks


@pytest.mark.parametrize("generate", [*GENERATORS.values(), forward_only])
@pytest.mark.parametrize(("pp", "m"), [(0, 1), (1, 0), (-2, 4)])
def test_an_impossible_shape_is_an_error_with_both_numbers(generate, pp, m):
    with pytest.raises(ValueError, match=f"pp={pp} and microbatches={m} must both be at least 1"):
        generate(pp, m)


# ---- damaged schedules are refused


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("F0 F1 B0", "F0 B0 F1 B1"), r"rank 0 never runs B1"),
        (("F0 F1 B0 B1", "F0 B0 B1"), r"rank 1 never runs F1"),
        (("F0 F1 B0 B0 B1", "F0 B0 F1 B1"), r"rank 0 runs B0 twice"),
        (("F0 F1 B0 B1", "F0 B0 F1 F1 B1"), r"rank 1 runs F1 twice"),
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


def test_an_odd_order_that_can_run_is_not_refused():
    """Rank 0 sends both forwards before it waits for anything, so rank 1 may take them in either order."""
    assert can_run(program(schedule_of("F0 F1 B0 B1", "F1 B1 F0 B0")))


def test_a_backward_in_an_evaluation_is_refused():
    with pytest.raises(ScheduleError, match="rank 0 runs B0, which is no part of a step"):
        program(replace(gpipe(2, 1), has_backward=False))


@every_training
@settings(deadline=None, max_examples=60)
@given(pp=st.integers(1, 4), m=st.integers(1, 4), data=st.data())
def test_a_missing_or_doubled_action_is_refused_wherever_it_is(generate, pp, m, data):
    schedule = generate(pp, m)
    rank = data.draw(st.integers(0, pp - 1))
    at = data.draw(st.integers(0, 2 * m - 1))
    order = schedule.ranks[rank]
    action = order[at]
    for damaged, verb in ((order[:at] + order[at + 1 :], "never runs"), ((*order, action), "runs")):
        ranks = (*schedule.ranks[:rank], damaged, *schedule.ranks[rank + 1 :])
        with pytest.raises(ScheduleError, match=f"rank {rank} {verb} {action}"):
            program(replace(schedule, ranks=ranks))


@settings(deadline=None, max_examples=150)
@given(pp=st.integers(1, 4), m=st.integers(1, 4), data=st.data())
def test_any_order_of_actions_is_run_or_refused_as_its_dependencies_say(pp, m, data):
    """Ranks in shuffled order: accepted exactly when the actions, messages left aside, have an order."""
    ranks = tuple(tuple(data.draw(st.permutations(rank))) for rank in one_forward_one_backward(pp, m).ranks)
    before: dict[object, set[object]] = {}
    for rank, order in enumerate(ranks):
        for previous, action in itertools.pairwise((None, *order)):
            needs = {(rank, previous)} if previous else set()
            if action.kind is Kind.FORWARD and rank > 0:
                needs.add((rank - 1, action))
            if action.kind is Kind.BACKWARD:
                needs.add((rank + 1, action) if rank < pp - 1 else (rank, Action(Kind.FORWARD, action.microbatch)))
            before[rank, action] = needs
    schedule = Schedule("shuffled", m, straight(pp), ranks)
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        with pytest.raises(ScheduleError):
            program(schedule)
    else:
        assert can_run(program(schedule))


# ---- damaged programs are refused


def index_of(steps: tuple[Action | Transfer, ...], name: str) -> int:
    return [str(step) for step in steps].index(name)


def swapped(placed: Program, rank: int, one: int, other: int) -> Program:
    steps = list(placed[rank])
    steps[one], steps[other] = steps[other], steps[one]
    return (*placed[:rank], tuple(steps), *placed[rank + 1 :])


def without(placed: Program, rank: int, name: str) -> Program:
    at = index_of(placed[rank], name)
    return (*placed[:rank], placed[rank][:at] + placed[rank][at + 1 :], *placed[rank + 1 :])


@pytest.mark.parametrize(
    ("rank", "name", "message"),
    [
        (1, "RECV(F0<-0)", "rank 0 stops at B0"),
        (1, "RECV(F2<-0)", "rank 0 stops at B1"),
        (0, "RECV(B2<-1)", "rank 0 stops at B2"),
        (0, "SEND(F1->1)", "rank 0 stops at B0"),
        (1, "SEND(B2->0)", "rank 0 stops at B2"),
    ],
)
def test_a_program_with_one_side_of_a_message_is_refused(rank, name, message):
    schedule = one_forward_one_backward(2, 3)
    damaged = without(program(schedule), rank, name)
    assert not can_run(damaged)
    with pytest.raises(ScheduleError, match=message):
        prove(schedule, damaged)


def test_a_message_that_nobody_answers_is_refused_even_when_all_actions_run():
    schedule = forward_only(2, 1)
    placed = program(schedule)
    stray = Transfer(Kind.SEND, Action(Kind.FORWARD, 0), Action(Kind.FORWARD, 0), 1)
    with pytest.raises(ScheduleError, match=r"rank 0 posts SEND\(F0->1\), which no rank answers"):
        prove(schedule, ((*placed[0], stray), placed[1]))


def test_two_transfers_of_a_pair_swapped_on_one_side_are_refused():
    schedule = gpipe(2, 3)
    placed = program(schedule)
    one, other = (index_of(placed[1], f"RECV(F{m}<-0)") for m in (0, 1))
    damaged = swapped(placed, 1, one, other)
    assert not can_run(damaged)
    with pytest.raises(ScheduleError, match="deadlock; rank 0 stops at B0"):
        prove(schedule, damaged)


def test_a_send_and_a_receive_of_a_pair_swapped_on_one_side_are_refused():
    schedule = one_forward_one_backward(2, 4)
    placed = program(schedule)
    one = index_of(placed[0], "SEND(F2->1)")
    assert str(placed[0][one + 1]) == "RECV(B1<-1)"
    damaged = swapped(placed, 0, one, one + 1)
    assert not can_run(damaged)
    with pytest.raises(ScheduleError, match="deadlock; rank 0 stops at B1"):
        prove(schedule, damaged)


def test_a_send_before_its_action_is_refused():
    schedule = gpipe(2, 2)
    placed = program(schedule)
    at = index_of(placed[0], "F1")
    assert str(placed[0][at + 1]) == "SEND(F1->1)"
    with pytest.raises(ScheduleError, match=r"rank 0 posts SEND\(F1->1\) before F1"):
        prove(schedule, swapped(placed, 0, at, at + 1))


def test_a_receive_after_its_use_is_refused():
    schedule = gpipe(2, 2)
    placed = program(schedule)
    damaged = swapped(placed, 1, index_of(placed[1], "RECV(F0<-0)"), index_of(placed[1], "F0"))
    with pytest.raises(ScheduleError, match="deadlock; rank 0 stops at B0"):
        prove(schedule, damaged)


@settings(deadline=None, max_examples=300)
@given(
    generate=st.sampled_from(ALL), pp=st.integers(2, 4), m=st.integers(1, 4), moves=st.integers(1, 3), data=st.data()
)
def test_prove_and_the_second_proof_agree_on_any_damage(generate, pp, m, moves, data):
    """Transfers are moved and lost at random: refused exactly when the events have no order."""
    schedule = generate(pp, m)
    placed = program(schedule)
    for _ in range(moves):
        rank = data.draw(st.integers(0, pp - 1))
        steps = list(placed[rank])
        transfers = [index for index, step in enumerate(steps) if not isinstance(step, Action)]
        assume(transfers)
        step = steps.pop(data.draw(st.sampled_from(transfers)))
        if data.draw(st.integers(0, 5)) > 0:
            steps.insert(data.draw(st.integers(0, len(steps))), step)
        placed = (*placed[:rank], tuple(steps), *placed[rank + 1 :])
    if can_run(placed):
        prove(schedule, placed)
    else:
        with pytest.raises(ScheduleError):
            prove(schedule, placed)


@pytest.mark.parametrize("damage", ["missing", "twice", "lands elsewhere"])
def test_a_program_that_is_not_its_schedule_is_refused(damage):
    schedule = gpipe(2, 2)
    first, second = program(schedule)
    if damage == "missing":
        damaged = (first[:-1], second)
    elif damage == "twice":
        damaged = ((*first, first[-1]), second)
    else:
        elsewhere = Action(Kind.FORWARD, 7)
        damaged = (
            first,
            tuple(replace(step, lands=elsewhere) if str(step) == "RECV(F0<-0)" else step for step in second),
        )
    with pytest.raises(ScheduleError, match="gpipe: rank"):
        prove(schedule, damaged)
