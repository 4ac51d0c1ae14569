"""The proof of a schedule: it is simulated before it runs, and its messages are put in an order that cannot deadlock.

    simulate   who computes what when; refuses a schedule with a dependency that is never met
    program    the same actions with SEND and RECV between them, each direction in one agreed order
    prove      simulates a program under the strictest rule: the messages of a direction pass one after the other on
               each rank, each only once both sides have posted it

[Note: agreed order]  Messages from lower to higher ranks ("down") and back ("up") travel over communicators of their own,
so the order matters within a direction only.  There all messages are put in the order of the simulated time at which they
are produced, and every rank posts its own in that order.  Take the earliest message that has not passed: both its ranks
have finished all earlier ones, so neither can be stuck behind another message.  `prove` plays it all the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

from megazero.schedules.action import Action, ActionKind, MessageAction, Schedule

Program: TypeAlias = tuple[tuple[Action | MessageAction, ...], ...]
RankAction: TypeAlias = tuple[int, Action]

_BEFORE = {ActionKind.BACKWARD: ActionKind.FORWARD, ActionKind.WEIGHT: ActionKind.BACKWARD}


class ScheduleError(ValueError):
    """A schedule that cannot run.  `rank` and `action` are the first offending ones, where there are any."""

    def __init__(self, message: str, rank: int | None = None, action: Action | None = None) -> None:
        super().__init__(message)
        self.rank, self.action = rank, action


@dataclass(frozen=True)
class Costs:
    """Time of each part of a rank's work on one micro-batch, in all its chunks together, in any one unit."""

    forward: float = 1.0
    backward: float = 1.0  # gradient of the input
    weight: float = 1.0
    hop: float = 0.0  # from one rank to another

    def of(self, action: Action, schedule: Schedule) -> float:
        """Time that an action takes; a chunk has its share of the rank's work."""
        if action.kind is ActionKind.FORWARD:
            whole = self.forward
        elif action.kind is ActionKind.WEIGHT:
            whole = self.weight
        else:
            whole = self.backward + (0.0 if schedule.splits_backward else self.weight)
        return whole / schedule.chunks


@dataclass(frozen=True)
class Timeline:
    """When every action of a schedule runs: (rank, action) -> (start, end)."""

    schedule: Schedule
    spans: dict[RankAction, tuple[float, float]]

    @property
    def makespan(self) -> float:
        """From time 0 to the last end."""
        return max(end for _, end in self.spans.values())

    def idle(self, rank: int) -> float:
        """Time within the makespan in which a rank computes nothing."""
        return self.makespan - sum(end - start for (at, _), (start, end) in self.spans.items() if at == rank)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time."""
        ranks = range(self.schedule.pp)
        return sum(self.idle(rank) for rank in ranks) / (self.makespan * self.schedule.pp)


def measured_costs(timeline: Timeline) -> Costs:
    """Mean cost of each part of a rank's work in a timeline that was measured; without a hop, which it cannot tell."""

    def mean(kind: ActionKind) -> float:
        times = [end - start for (_, action), (start, end) in timeline.spans.items() if action.kind is kind]
        return sum(times) / max(1, len(times)) * timeline.schedule.chunks

    return Costs(mean(ActionKind.FORWARD), mean(ActionKind.BACKWARD), mean(ActionKind.WEIGHT))


def peak_activations(schedule: Schedule, rank: int) -> int:
    """Most activations that a rank holds at once, each of one micro-batch on one chunk; 0 without a backward.

    They are held from the forward to the end of the backward, its weight gradient included.
    """
    if not schedule.has_backward:
        return 0
    last = ActionKind.WEIGHT if schedule.splits_backward else ActionKind.BACKWARD
    held = peak = 0
    for action in schedule.ranks[rank]:
        held += {ActionKind.FORWARD: 1, last: -1}.get(action.kind, 0)
        peak = max(peak, held)
    return peak


def _check_complete(schedule: Schedule) -> None:
    """Every rank has every action once and no other, each after the one before it of the same micro-batch and chunk."""
    kinds = [ActionKind.FORWARD]
    if schedule.has_backward:
        kinds += [ActionKind.BACKWARD, ActionKind.WEIGHT] if schedule.splits_backward else [ActionKind.BACKWARD]
    for rank, actions in enumerate(schedule.ranks):
        text = f"{schedule.name}: rank {rank}"
        chunks = [chunk for at, chunk in schedule.placement if at == rank]
        wanted = {Action(k, m, c) for k in kinds for m in range(schedule.microbatches) for c in chunks}
        index_of = {action: index for index, action in reversed(list(enumerate(actions)))}
        if repeated := [action for index, action in enumerate(actions) if index_of[action] < index]:
            raise ScheduleError(f"{text} runs {repeated[0]} twice", rank, repeated[0])
        if missing := sorted(wanted - set(actions), key=str):
            raise ScheduleError(f"{text} never runs {missing[0]}", rank, missing[0])
        if surplus := sorted(set(actions) - wanted, key=str):
            raise ScheduleError(f"{text} runs {surplus[0]}, which is no part of a step", rank, surplus[0])
        for action in actions:
            before = Action(_BEFORE.get(action.kind, action.kind), action.microbatch, action.chunk)
            if index_of[before] > index_of[action]:
                raise ScheduleError(f"{text} runs {action} before {before}", rank, action)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Compute when every action of a schedule runs.

    Raises:
        ScheduleError: an action is missing, runs twice, or waits for one that never runs.
    """
    _check_complete(schedule)
    costs = costs or Costs()
    spans: dict[RankAction, tuple[float, float]] = {}
    clock, at = [0.0] * schedule.pp, [0] * schedule.pp
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                source = schedule.source(rank, action)
                if source is not None:
                    if source not in spans:
                        break
                    clock[rank] = max(clock[rank], spans[source][1] + (costs.hop if source[0] != rank else 0.0))
                start = clock[rank]
                clock[rank] += costs.of(action, schedule)
                spans[rank, action] = (start, clock[rank])
                at[rank] += 1
                moved = True
    for rank, actions in enumerate(schedule.ranks):
        if at[rank] < len(actions):
            action = actions[at[rank]]
            source = schedule.source(rank, action)
            waits = "" if source is None else f", which waits for {source[1]} on rank {source[0]}"
            raise ScheduleError(f"{schedule.name}: deadlock; rank {rank} stops at {action}{waits}", rank, action)
    return Timeline(schedule, spans)


def program(schedule: Schedule) -> Program:
    """Put sends and receives among the actions, and prove the result.

    Raises:
        ScheduleError: as `simulate` and `prove`.
    """
    spans = simulate(schedule).spans
    messages = sorted(
        (spans[rank, action][1], rank, index, action, target)
        for rank, actions in enumerate(schedule.ranks)
        for index, action in enumerate(actions)
        if (target := schedule.target(rank, action)) is not None and target[0] != rank
    )
    ends = [[spans[rank, action][1] for action in actions] for rank, actions in enumerate(schedule.ranks)]
    index_of = [{action: index for index, action in enumerate(actions)} for actions in schedule.ranks]
    # Per rank: messages to post before action i (index len(actions): after the last), in global message order.
    posts: list[list[tuple[int, Action | MessageAction]]] = [[] for _ in range(schedule.pp)]
    latest: dict[tuple[int, bool], int] = {}
    for time, sender, index, action, (receiver, use) in messages:
        # The receive is posted before the action during which the message arrives, or its use where that comes first.
        ahead = min(bisect_left(ends[receiver], time), index_of[receiver][use])
        for rank, before, message in (
            (sender, index + 1, MessageAction(ActionKind.SEND, action, use, receiver)),
            (receiver, ahead, MessageAction(ActionKind.RECV, action, use, sender)),
        ):
            # never before an earlier message of the same direction
            key = (rank, message.goes_down(rank))
            latest[key] = max(before, latest.get(key, 0))
            posts[rank].append((latest[key], message))
    placed = tuple(  # the sort is stable: messages keep their order and come before the action of the same index
        tuple(step for _, step in sorted([*posts[rank], *enumerate(actions)], key=lambda post: post[0]))
        for rank, actions in enumerate(schedule.ranks)
    )
    prove(schedule, placed)
    return placed


def prove(schedule: Schedule, placed: Program) -> None:
    """Simulate a program of `schedule` whose messages pass in order, each once both sides have posted it.

    Raises:
        ScheduleError: a rank waits forever, a message is used before it was received or sent before it was computed, or a
            message has only one side.
    """
    _check_faithful(schedule, placed)
    at = [0] * len(placed)
    posted: list[tuple[deque[MessageAction], deque[MessageAction]]] = [(deque(), deque()) for _ in placed]  # up, down
    known: list[set[RankAction | None]] = [{None} for _ in placed]  # results that a rank has computed or received
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(placed):
            while at[rank] < len(steps):
                step = steps[at[rank]]
                if isinstance(step, MessageAction):
                    if step.kind is ActionKind.SEND and (rank, step.carries) not in known[rank]:
                        raise ScheduleError(f"{schedule.name}: rank {rank} posts {step} before {step.carries}")
                    posted[rank][step.goes_down(rank)].append(step)
                elif schedule.source(rank, step) in known[rank]:
                    known[rank].add((rank, step))
                else:
                    break
                at[rank] += 1
                moved = True
            for down in (False, True):
                moved |= _pass_messages(rank, [queues[down] for queues in posted], known)
    for rank, steps in enumerate(placed):
        if at[rank] < len(steps):
            raise ScheduleError(f"{schedule.name}: deadlock; rank {rank} stops at {steps[at[rank]]}")
        for left in [*posted[rank][0], *posted[rank][1]][:1]:
            raise ScheduleError(f"{schedule.name}: rank {rank} posts {left}, which no rank answers")


def _check_faithful(schedule: Schedule, placed: Program) -> None:
    """A program computes what its schedule says, and every message goes where the schedule says."""
    for rank, steps in enumerate(placed):
        text = f"{schedule.name}: rank {rank}"
        computed = [step for step in steps if isinstance(step, Action)]
        for found, wanted in zip_longest(computed, schedule.ranks[rank]):
            if found != wanted:
                raise ScheduleError(f"{text} runs {found} where the schedule has {wanted}")
        for step in steps:
            if isinstance(step, MessageAction):
                sender, receiver = (rank, step.peer) if step.kind is ActionKind.SEND else (step.peer, rank)
                if schedule.target(sender, step.carries) != (receiver, step.lands):
                    raise ScheduleError(f"{text} posts {step} for {step.lands}, which is no message")


def _pass_messages(rank: int, posted: Sequence[deque[MessageAction]], known: list[set[RankAction | None]]) -> bool:
    """Pass the messages at the head of both queues of a pair; a rank's queue moves strictly in order."""
    moved = False
    while posted[rank]:
        head = posted[rank][0]
        other = posted[head.peer]
        if not other or other[0].peer != rank or other[0].carries != head.carries or other[0].kind is head.kind:
            return moved
        receiver, sender = (rank, head.peer) if head.kind is ActionKind.RECV else (head.peer, rank)
        known[receiver].add((sender, head.carries))
        posted[rank].popleft()
        other.popleft()
        moved = True
    return moved
