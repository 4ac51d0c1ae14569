"""An emulation of NCCL under torch, by which schedules and the proof of the package are judged; it shares no code with them.

Each rank has a host, which queues operations in order, a stream of actions, and a stream of batches for each direction:

    host      0 ----- 1 ----- 2 ----- WAIT ----- 4       a host that waits goes on when all that it has queued has ended
    actions   F0 ------------ B0 --------------- F1      an action also waits for the batches that bring what it needs
    down           [RECV F1, SEND F0]                    a batch starts after the one before it and after the actions that
    up                             [RECV B1]             were queued before it; it ends when all its messages have passed

A message passes once the batches of both sides have started.  A receive that was opened earlier waits only for the actions
queued before that.  All this is a graph of events; an order of it is a run, a cycle is a deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from megazero.schedules.action import Action, MessageAction, Op, Schedule
from megazero.schedules.proof import Costs

WAIT = "wait"
Batch: TypeAlias = tuple[MessageAction, ...]
Operation: TypeAlias = Action | Batch | str
Operations: TypeAlias = Sequence[Operation]
Step: TypeAlias = Action | MessageAction


def pair_of(schedule: Schedule, rank: int, action: Action) -> tuple[Action, ...]:
    """The parts of the pair that an action is in, or it alone: a forward, the backward behind it, its weight gradient."""
    order = schedule.ranks[rank]
    at = order.index(action)
    for first in range(max(0, at - 2), at + 1):
        if (rank, order[first]) in schedule.beside:
            backward, *rest = order[first + 1 : first + 3]
            weight = Action(Op.WEIGHT, backward.microbatch, backward.chunk)
            parts = order[first : first + 2 + (rest == [weight])]
            if action in parts:
                return parts
    return (action,)


def one_by_one(steps: Iterable[Step]) -> list[Operation]:
    """Every message is a batch of its own."""
    return [step if isinstance(step, Action) else (step,) for step in steps]


def waiting(operations: Operations) -> list[Operation]:
    """The host waits before every operation, and at the end."""
    return [one for operation in operations for one in (WAIT, operation)] + [WAIT]


def makespan(schedule: Schedule, ranks: Sequence[Operations], costs: Costs | None = None) -> float:
    """When the last action ends.  Raises: CycleError for a deadlock, ValueError for a message with one side."""
    costs = costs or Costs()
    before: dict[Hashable, set[Hashable]] = {}
    sides: defaultdict[Hashable, list[Op]] = defaultdict(list)
    for rank, operations in enumerate(ranks):
        for event, earlier in _events(schedule, rank, operations, sides):
            before.setdefault(event, set()).update(earlier)
    for message, kinds in sides.items():
        if sorted(kinds) != [Op.RECV, Op.SEND]:
            raise ValueError(f"{message} has the sides {kinds}")
    ends: dict[Hashable, float] = {}
    for event in TopologicalSorter(before).static_order():
        start = max((ends[one] for one in before[event]), default=0.0)
        kind, _, *rest = event
        length = costs.of(rest[0], schedule) if kind == "action" else costs.hop if kind == "message" else 0.0
        ends[event] = start + length
    return max(end for (kind, *_), end in ends.items() if kind == "action")


def is_stuck(schedule: Schedule, ranks: Sequence[Operations]) -> bool:
    """Whether a program is a deadlock."""
    try:
        makespan(schedule, ranks)
    except CycleError:
        return True
    return False


def _events(
    schedule: Schedule, rank: int, operations: Operations, sides: defaultdict[Hashable, list[Op]]
) -> Iterator[tuple[Hashable, set[Hashable]]]:
    """(event, events before it) of one rank; an event is a kind, a rank and what it is."""
    queued: set[Hashable] = set()  # the ends of all that the host has queued
    host: set[Hashable] = set()  # where it is
    action: set[Hashable] = set()  # the last one
    ended: dict[bool, set[Hashable]] = {False: set(), True: set()}  # the last batch of each direction
    opened: dict[Action, set[Hashable]] = {}
    brings: dict[Action, Hashable] = {}
    for index, operation in enumerate(operations):
        here = ("host", rank, index)
        yield here, host | (queued if operation == WAIT else set())
        host = {here}
        if isinstance(operation, Action):
            event = ("action", rank, operation)
            together = pair_of(schedule, rank, operation)
            needs = set()
            for part in together if operation == together[0] else ():  # the parts of a pair start together
                source = schedule.source(rank, part)
                if source is not None and (source[0] != rank or source[1] not in together):
                    needs.add(brings[part] if source[0] != rank else ("action", *source))
            yield event, host | action | needs
            action = {event}
            queued.add(event)
        elif isinstance(operation, tuple) and operation[0].op is Op.OPEN:
            opened[operation[0].lands] = action | host
        elif isinstance(operation, tuple):
            (down,) = {one.goes_down(rank) for one in operation}
            start, end = ("start", rank, index), ("end", rank, index)
            yield start, host | ended[down]
            passed = set()
            for one in operation:
                sends = one.op is Op.SEND
                yield start, action if sends else opened.get(one.lands, action)
                message = ("message", rank if sends else one.peer, one.carries)
                sides[message].append(one.op)
                yield message, {start}
                passed.add(message)
                if not sends:
                    brings[one.lands] = end
            yield end, passed
            ended[down] = {end}
            queued.add(end)
