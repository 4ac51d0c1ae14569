"""Proof that a schedule can run: it is simulated first, and its messages are put in an order that cannot deadlock.

    simulate       when each rank computes what; refuses a schedule with a dependency that is never met
    program        the same actions with OPEN, RECV and SEND between them, every message in one agreed order
    play           when a program's actions run on a machine where the messages of a direction pass one after the other
    prove          plays a program on the two machines that exist
    plan_of_rank   what one rank runs of a proved program, for the executor

[Note: two machines]  Messages from lower to higher ranks ("down") and back ("up") have separate communicators.  A
message passes once both sides have posted it, after all earlier ones of its direction on both ranks.

    gloo   its own threads send messages while the host computes; a receive is posted when its memory is opened
    NCCL   the host only queues work for the device: actions in one stream, each direction in another.  A message is a
           batch of its own, since a batch ends as a whole.  A send waits for the actions queued before it, a receive
           for those before its OPEN, an action for its inputs.  And wherever the host waits for the device (a
           synchronize, cudaFree when memory is short, a kernel that is loaded or measured at its first use), no later
           step is queued until all earlier ones of its rank have ended, messages included.  The proof lets every host
           wait at every step.

Sources: NCCL's user guide, "Point-to-point communication" (a call in a group ends with its group) and "CUDA stream
semantics"; torch's ProcessGroupNCCL, where batched messages use the group's communicator and its one stream, which
first waits for the current stream (`syncStream`).

[Note: agreed order]  All messages are sorted by the simulated time t at which they are produced.  A rank sends and
receives a message before its first action that starts at t or later, and opens it before its first action that ends at
t or later. So at most one action, the one that runs while the message arrives, lies between OPEN and RECV.  Now order
everything by simulated time, an action by its start and a message before it: a step waits only for earlier ones, even
if every host waits at every step.  So neither machine can deadlock; `prove` plays the program all the same.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import TypeAlias

from megazero.schedules.action import Action, MessageAction, Op, Schedule

Steps: TypeAlias = tuple[Action | MessageAction, ...]
Program: TypeAlias = tuple[Steps, ...]
RankAction: TypeAlias = tuple[int, Action]
Posted: TypeAlias = deque[tuple[MessageAction, float]]

_BEFORE = {Op.BACKWARD: Op.FORWARD, Op.WEIGHT: Op.BACKWARD}


class ScheduleError(ValueError):
    """The schedule cannot run.  `rank` and `action` name the first action that cannot run, if there is one."""

    def __init__(self, message: str, rank: int | None = None, action: Action | None = None) -> None:
        super().__init__(message)
        self.rank, self.action = rank, action


@dataclass(frozen=True)
class Costs:
    """Times of a rank's forward, backward and weight gradient on one micro-batch, over all its chunks; in any unit."""

    forward: float = 1.0
    backward: float = 1.0  # gradient of the input
    weight: float = 1.0
    hop: float = 0.0  # a message from one rank to another

    def of(self, action: Action, schedule: Schedule, rank: int = 0) -> float:
        """Return the time of an action.  The chunks of a rank, and all ranks, have equal work."""
        if action.op is Op.FORWARD:
            whole = self.forward
        elif action.op is Op.WEIGHT:
            whole = self.weight
        else:
            whole = self.backward + (0.0 if schedule.splits_backward else self.weight)
        return whole / schedule.chunks

    def earliest(self, rank: int, action: Action) -> float:
        """Return the time before which an action cannot start."""
        return 0.0


@dataclass(frozen=True)
class Timeline:
    """The times of all actions of a schedule: (rank, action) -> (start, end)."""

    schedule: Schedule
    spans: dict[RankAction, tuple[float, float]]

    def whole_span(self, rank: int, action: Action) -> tuple[float, float]:
        """Return (start, end) of an action, or of the whole pair that contains it."""
        together = self.schedule.together(rank, action)
        return self.spans[rank, together[0]][0], self.spans[rank, together[-1]][1]

    @property
    def makespan(self) -> float:
        """Time from 0 to the end of the last action."""
        return max(end for _, end in self.spans.values())

    def idle(self, rank: int) -> float:
        """Return the time within the makespan in which a rank computes nothing."""
        return self.makespan - sum(end - start for (at, _), (start, end) in self.spans.items() if at == rank)

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks divided by their total time."""
        ranks = range(self.schedule.pp)
        return sum(self.idle(rank) for rank in ranks) / (self.makespan * self.schedule.pp)


def peak_activations(schedule: Schedule, rank: int) -> int:
    """Return the most activations that a rank holds at once, each of one micro-batch on one chunk; 0 without a
    backward.

    An activation is held from its forward to the end of its backward, with the weight gradient.
    """
    if not schedule.has_backward:
        return 0
    last = Op.WEIGHT if schedule.splits_backward else Op.BACKWARD
    held = peak = 0
    for action in schedule.ranks[rank]:
        held += {Op.FORWARD: 1, last: -1}.get(action.op, 0)
        peak = max(peak, held)
    return peak


def _check_complete(schedule: Schedule) -> None:
    """Check that each rank has each action once, and after the previous action of the same micro-batch and chunk."""
    ops = [Op.FORWARD]
    if schedule.has_backward:
        ops += [Op.BACKWARD, Op.WEIGHT] if schedule.splits_backward else [Op.BACKWARD]
    for rank, actions in enumerate(schedule.ranks):
        text = f"{schedule.name}: rank {rank}"
        chunks = [chunk for at, chunk in schedule.placement if at == rank]
        wanted = {Action(op, m, c) for op in ops for m in range(schedule.microbatches) for c in chunks}
        index_of = {action: index for index, action in reversed(list(enumerate(actions)))}
        if repeated := [action for index, action in enumerate(actions) if index_of[action] < index]:
            raise ScheduleError(f"{text} runs {repeated[0]} twice", rank, repeated[0])
        if missing := sorted(wanted - set(actions), key=str):
            raise ScheduleError(f"{text} never runs {missing[0]}", rank, missing[0])
        if surplus := sorted(set(actions) - wanted, key=str):
            raise ScheduleError(f"{text} runs {surplus[0]}, which is no part of a step", rank, surplus[0])
        for action, following in zip_longest(actions, actions[1:]):
            if (rank, action) in schedule.beside and (following is None or following.op is not Op.BACKWARD):
                raise ScheduleError(f"{text} runs {action} beside {following}, which is no backward", rank, action)
            before = Action(_BEFORE.get(action.op, action.op), action.microbatch, action.chunk)
            if index_of[before] > index_of[action]:
                raise ScheduleError(f"{text} runs {action} before {before}", rank, action)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Compute the start and end time of every action of a schedule.

    Raises:
        ScheduleError: an action is missing, runs twice, or waits for an action that never runs.
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
                needs = schedule.needs(rank, action)
                if not all(need in spans for need in needs):
                    break
                there = (spans[need][1] + (costs.hop if need[0] != rank else 0.0) for need in needs)
                clock[rank] = max((clock[rank], *there))
                start = max(clock[rank], costs.earliest(rank, action))
                clock[rank] = start + costs.of(action, schedule, rank)
                spans[rank, action] = (start, clock[rank])
                at[rank] += 1
                moved = True
    for rank, actions in enumerate(schedule.ranks):
        if at[rank] < len(actions):
            action = actions[at[rank]]
            source = next((need for need in schedule.needs(rank, action) if need not in spans), None)
            waits = "" if source is None else f", which waits for {source[1]} on rank {source[0]}"
            raise ScheduleError(f"{schedule.name}: deadlock; rank {rank} stops at {action}{waits}", rank, action)
    return Timeline(schedule, spans)


def program(schedule: Schedule) -> Program:
    """Insert the steps of the messages between the actions, and prove the result; see [Note: agreed order].

    Raises:
        ScheduleError: as `simulate` and `prove`.
    """
    whole_numbers = Costs(schedule.chunks, schedule.chunks, schedule.chunks)  # so that sums of times are exact
    timeline = simulate(schedule, whole_numbers)
    messages = []
    for sender, action in timeline.spans:
        _, time = timeline.whole_span(sender, action)
        target = schedule.target(sender, action)
        if target is not None and target[0] != sender:
            down = sender < target[0]
            # Of messages produced at the same time, a rank receives first, so it can open the memory before its own action.
            messages.append(((time, down, sender if down else -sender), sender, action, target))
    wholes = [[timeline.whole_span(rank, action) for action in own] for rank, own in enumerate(schedule.ranks)]
    starts, ends = ([[span[side] for span in own] for own in wholes] for side in (0, 1))
    # For each rank: (index of the next action, step); messages with the same index are in the agreed order.
    steps: list[list[tuple[int, Action | MessageAction]]] = [[] for _ in schedule.ranks]
    for (time, *_), sender, action, (receiver, use) in sorted(messages, key=lambda message: message[0]):
        for rank, op, peer, times in (
            (sender, Op.SEND, receiver, starts),
            (receiver, Op.OPEN, sender, ends),
            (receiver, Op.RECV, sender, starts),
        ):
            steps[rank].append((bisect_left(times[rank], time), MessageAction(op, action, use, peer)))
    placed = tuple(  # the sort is stable
        tuple(step for _, step in sorted([*steps[rank], *enumerate(actions)], key=lambda step: step[0]))
        for rank, actions in enumerate(schedule.ranks)
    )
    prove(schedule, placed)
    return placed


def received_when_opened(steps: Steps) -> Steps:
    """Return one rank's steps for gloo: every receive directly after its OPEN."""
    moved: list[Action | MessageAction] = []
    for step in steps:
        if step.op is not Op.RECV:
            moved.append(step)
        if isinstance(step, MessageAction) and step.op is Op.OPEN:
            moved.append(replace(step, op=Op.RECV))
    return tuple(moved)


@dataclass(frozen=True)
class RankPlan:
    """The plan by which the executor runs a step on one pipeline rank.

    Args:
        steps: actions and messages of the rank, in order.
        pairs: the actions of each pair, by each of them; an action that is missing runs alone.
        following: the forward or backward after each forward or backward.
        held_for: the action under which a result is stored: the one that uses it on this rank, or the one that computed
            it until it is sent.
        confirmed: see `what_messages_confirm`.
    """

    rank: int
    steps: Steps
    pairs: Mapping[Action, tuple[Action, ...]]
    following: Mapping[Action, Action]
    held_for: Mapping[Action, Action]
    confirmed: Mapping[Action, Sequence[Action]]


def plan_of_rank(schedule: Schedule, rank: int, device_type: str) -> RankPlan:
    """Prove a schedule and return the plan of one rank.  Raises: ScheduleError, as `program`."""
    placed, actions = program(schedule), schedule.ranks[rank]
    targets = {action: target for action in actions if (target := schedule.target(rank, action)) is not None}
    return RankPlan(
        rank,
        steps_of(placed, rank, device_type),
        {action: pair for action in actions if len(pair := schedule.together(rank, action)) > 1},
        dict(pairwise(action for action in actions if action.op is not Op.WEIGHT)),
        {action: use if at == rank else action for action, (at, use) in targets.items()},
        what_messages_confirm(placed, rank),
    )


def steps_of(placed: Program, rank: int, device_type: str) -> Steps:
    """Return the steps of a rank: on NCCL those of the program, on gloo with every receive as early as possible."""
    return placed[rank] if device_type == "cuda" else received_when_opened(placed[rank])


def what_messages_confirm(placed: Program, rank: int) -> dict[Action, list[Action]]:
    """For each action that uses a message of a peer, return the sends that this message confirms: the peer had used
    their data before it sent the message.

    Their tensors can then be freed without a wait.  Not every backend can tell that a send is done.
    """
    confirmed: dict[Action, list[Action]] = {}
    for steps in placed:
        ours = [step for step in steps if isinstance(step, MessageAction) and step.peer == rank]
        coming = {message.lands: message.carries for message in ours if message.op is Op.RECV}
        used: list[Action] = []
        for step in steps:
            if isinstance(step, Action):
                used += [coming[step]] if step in coming else []
            elif step.op is Op.SEND and step.peer == rank and used:
                confirmed[step.lands], used = used, []
    return confirmed


def prove(schedule: Schedule, placed: Program) -> None:
    """Play a program of `schedule` on gloo, and on NCCL with hosts that wait at every step; see [Note: two machines].

    Raises:
        ScheduleError: a rank waits forever, a message is used before it is received or sent before it is computed, or
            only one side of a message is posted.
    """
    _check_faithful(schedule, placed)
    play(schedule, tuple(map(received_when_opened, placed)))
    play(schedule, placed, host_waits=True)


@dataclass
class _Rank:
    """State of a rank while a program is played."""

    at: int = 0  # index of the next step
    clock: float = 0.0  # end of the last action
    opened: dict[Action, float] = field(default_factory=dict)  # by the action that uses the message
    known: dict[RankAction, float] = field(default_factory=dict)  # times of results, computed or received
    # By direction (up, down): posted messages, each with the earliest time at which it may pass; and when the last one
    # passed.
    posted: tuple[Posted, Posted] = field(default_factory=lambda: (deque(), deque()))
    passed: list[float] = field(default_factory=lambda: [0.0, 0.0])


def play(schedule: Schedule, placed: Program, costs: Costs | None = None, *, host_waits: bool = False) -> Timeline:
    """Compute the start and end time of every action of a program; see [Note: two machines].

    Args:
        placed: for NCCL, from `program`; for gloo, with every rank's steps from `received_when_opened`.
        host_waits: before every step, a rank waits until all messages that it has posted have passed.

    Raises:
        ScheduleError: as `prove`.
    """
    costs = costs or Costs()
    ranks = [_Rank() for _ in placed]
    spans: dict[RankAction, tuple[float, float]] = {}
    moved = True
    while moved:
        moved = False
        for index, rank in enumerate(ranks):
            while rank.at < len(placed[index]) and not (host_waits and any(rank.posted)):
                if host_waits:
                    rank.clock = max(rank.clock, *rank.passed)
                step = placed[index][rank.at]
                if isinstance(step, MessageAction):
                    _post(rank, index, step, schedule.name, host_waits=host_waits)
                elif all(need in rank.known for need in schedule.needs(index, step)):
                    there = (rank.known[need] for need in schedule.needs(index, step))
                    start = max((rank.clock, *there, costs.earliest(index, step)))
                    rank.clock = rank.known[index, step] = start + costs.of(step, schedule, index)
                    spans[index, step] = (start, rank.clock)
                else:
                    break
                rank.at += 1
                moved = True
            moved |= _pass_messages(schedule, ranks, index, costs.hop)
    when = " where the host waits for the device" if host_waits else ""
    for index, rank in enumerate(ranks):
        if rank.at < len(placed[index]):
            raise ScheduleError(f"{schedule.name}: deadlock{when}; rank {index} stops at {placed[index][rank.at]}")
        for left, _ in [*rank.posted[0], *rank.posted[1]][:1]:
            raise ScheduleError(f"{schedule.name}: rank {index} posts {left}, which no rank answers")
    return Timeline(schedule, spans)


def _post(rank: _Rank, index: int, step: MessageAction, name: str, *, host_waits: bool) -> None:
    """Execute a rank's next step, a side of a message."""
    if step.op is Op.OPEN:
        rank.opened[step.lands] = rank.clock
        return
    if step.op is Op.SEND and (index, step.carries) not in rank.known:
        raise ScheduleError(f"{name}: rank {index} posts {step} before {step.carries}")
    if step.op is Op.RECV and step.lands not in rank.opened:
        raise ScheduleError(f"{name}: rank {index} posts {step} before it is opened")
    is_ahead = step.op is Op.RECV and not host_waits
    ready = rank.opened[step.lands] if is_ahead else rank.clock
    rank.posted[step.goes_down(index)].append((step, ready))


def _pass_messages(schedule: Schedule, ranks: list[_Rank], index: int, hop: float) -> bool:
    """Pass the messages of rank `index` that are next on both of their ranks.  Returns whether any passed."""
    moved = False
    for down in (False, True):
        while posted := ranks[index].posted[down]:
            head, ready = posted[0]
            peer = ranks[head.peer]
            if not peer.posted[down]:
                break
            other, other_ready = peer.posted[down][0]
            if other.peer != index or other.carries != head.carries or other.op is head.op:
                break
            end = max(ready, other_ready, ranks[index].passed[down], peer.passed[down]) + hop
            receiver, sender = (index, head.peer) if head.op is Op.RECV else (head.peer, index)
            ranks[receiver].known[schedule.last_together(sender, head.carries)] = end
            for rank in (ranks[index], peer):
                rank.posted[down].popleft()
                rank.passed[down] = end
            moved = True
    return moved


def _check_faithful(schedule: Schedule, placed: Program) -> None:
    """Check that a program runs the actions of its schedule, and sends each message where the schedule needs it."""
    for rank, steps in enumerate(placed):
        text = f"{schedule.name}: rank {rank}"
        computed = [step for step in steps if isinstance(step, Action)]
        for found, wanted in zip_longest(computed, schedule.ranks[rank]):
            if found != wanted:
                raise ScheduleError(f"{text} runs {found} where the schedule has {wanted}")
        for step, following in zip_longest(steps, steps[1:]):
            if isinstance(step, Action):
                if isinstance(following, MessageAction) and schedule.last_together(rank, step) != (rank, step):
                    raise ScheduleError(f"{text} posts {following} within the pair of {step}")
            else:
                sender, receiver = (rank, step.peer) if step.op is Op.SEND else (step.peer, rank)
                if schedule.target(sender, step.carries) != (receiver, step.lands):
                    raise ScheduleError(f"{text} posts {step} for {step.lands}, which is no message")


def check_runnable(schedule: Schedule) -> None:
    """Check that `program` accepts a schedule.  Raises: ScheduleError, with a drawing of the actions around the error."""
    try:
        program(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{error}\n{draw_refused(schedule, error)}".rstrip()) from error


def draw_refused(schedule: Schedule, error: ScheduleError) -> str:
    """Draw the actions around the refused one, >F3<, and around its input, (F3).  "" if the error names no action.

    There is one line for each of the two ranks.  The refused action may be missing from its rank's list.
    """
    rank, action = error.rank, error.action
    if rank is None or action is None:
        return ""
    source = schedule.source(rank, action) if (rank, action.chunk) in schedule.placement else None
    forms = {source: "({})", (rank, action): ">{}<"}
    lines = []
    for other in sorted({rank, source[0] if source else rank}):
        actions = schedule.ranks[other]
        marked = [at for at, there in enumerate(actions) if (other, there) in forms] or [len(actions)]
        around = range(max(0, marked[0] - 4), min(len(actions), marked[-1] + 5))
        words = [forms.get((other, actions[index]), "{}").format(actions[index]) for index in around]
        before, after = ["..."] * (around.start > 0), ["..."] * (around.stop < len(actions))
        lines.append(" ".join((">" if other == rank else " ", f"rank {other:<3}", *before, *words, *after)))
    if action not in schedule.ranks[rank]:
        lines.append(f"  {action} is not in the list of rank {rank}")
    return "\n".join(lines)
