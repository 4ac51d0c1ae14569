"""How long the passes of a unit take, and which of their collectives the rank waits for.

    compute  | mm dx | mm dW |      | mul ...         a collective begins where the program starts it, and ends at the
    tp               [ reduce-scatter ]               first operator that reads its result: what is left is exposed

A trace tells of a collective where it is started, after the memory of its result was taken; collectives of an axis follow
each other.  On a calibrated host nothing runs beside: the rank that computes is the one that copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megazero.config import ResolvedRun
from megazero.plan.cluster import Cluster
from megazero.plan.collective_times import GroupLink, link_of
from megazero.plan.fake_tensors import Event, Message
from megazero.plan.operator_times import Kernel, events_on_cuda, kernels_of, measured_kernels
from megazero.plan.unit_trace import PassTrace, UnitKey, UnitTrace, trace_units


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass on one rank.

    Args:
        compute: of the rank's own operators.
        exposed, hidden: of collectives by axis: what the rank waits for, and what passes meanwhile.
    """

    compute: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    hidden: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From its begin to its end."""
        return self.compute + sum(self.exposed.values())

    def beside(self, axis: str, seconds: float) -> PassTime:
        """Add communication that runs beside the pass: what takes longer than the pass is exposed."""
        left = max(0.0, seconds - self.seconds)
        return added([self, PassTime(0.0, {axis: left}, {axis: seconds - left})])


@dataclass(frozen=True)
class UnitTime:
    """Seconds of a unit's passes.  `kept`: bytes that its forward leaves for its backward."""

    forward: PassTime
    backward: PassTime
    weight: PassTime
    kept: int = 0


def added(times: Iterable[PassTime]) -> PassTime:
    """Add up passes that run one after another."""
    compute, exposed, hidden = 0.0, Counter[str](), Counter[str]()
    for passed in times:
        compute += passed.compute
        exposed.update(passed.exposed)
        hidden.update(passed.hidden)
    return PassTime(compute, exposed, hidden)


def unit_times(
    run: ResolvedRun,
    cluster: Cluster,
    links: Mapping[str, GroupLink],
    traces: Mapping[UnitKey, UnitTrace] | None = None,
) -> dict[UnitKey, UnitTime]:
    """Return the times of every unit of a run; `traces`: in place of its own."""
    on_cuda = cluster.processors == 0
    traces = traces or trace_units(run, on_cuda=on_cuda, per_node=cluster.per_node)
    wish = run.config.training.compile
    is_compiled = on_cuda if wish == "auto" else bool(wish)
    return {key: _unit_time(trace, cluster, links, is_compiled=is_compiled) for key, trace in traces.items()}


def _unit_time(trace: UnitTrace, cluster: Cluster, links: Mapping[str, GroupLink], *, is_compiled: bool) -> UnitTime:
    passes = [passed for passed in (trace.forward, trace.backward, trace.weight) if passed is not None]
    times = []
    for at, passed in enumerate(passes):
        later = [event for after in passes[at + 1 :] for event in after.events]
        times.append(pass_time(passed, cluster, links, later, is_compiled=is_compiled))
    return UnitTime(times[0], times[1], times[2] if len(times) > 2 else PassTime(), trace.forward.kept)


def pass_time(
    trace: PassTrace,
    cluster: Cluster,
    links: Mapping[str, GroupLink],
    later: Sequence[Event] = (),
    *,
    is_compiled: bool,
) -> PassTime:
    """Return the time of a pass; `later`: events that follow it in the same unit."""
    device, clock, table = cluster.device, _Clock(links), cluster.table
    if table is None:
        steps = kernels_of(events_on_cuda(trace.events), device, later, is_compiled=is_compiled)
        launch_seconds = device.launch_seconds
    else:
        steps, launch_seconds = measured_kernels(trace.events, device, table), 0.0
    for step in steps:
        if isinstance(step, Message):
            clock.start(step)
        else:
            clock.run(step)
        if table is not None:  # nothing runs beside anything
            clock.wait()
    clock.wait()
    launches = clock.operators * launch_seconds  # the host runs ahead, but a device that is faster waits for it
    return PassTime(max(clock.compute, launches), clock.exposed, clock.hidden)


class _Clock:
    """Walks through a pass: one stream computes, one for each axis communicates."""

    def __init__(self, links: Mapping[str, GroupLink]) -> None:
        self._links = links
        self._now = 0.0
        self._free = Counter[str]()  # when the stream of an axis is free
        self._under_way: list[tuple[frozenset[int], str, float, float]] = []  # results, axis, seconds, end
        self.compute, self.operators = 0.0, 0
        self.exposed, self.hidden = Counter[str](), Counter[str]()

    def start(self, message: Message) -> None:
        """Begin a collective."""
        link = link_of(self._links, message.axis, message.operation)
        seconds = link.seconds(message.operation, message.sent_bytes)
        end = max(self._now, self._free[message.axis]) + seconds
        self._free[message.axis] = end  # type: ignore[assignment]
        self._under_way.append((message.fills, message.axis, seconds, end))

    def run(self, kernel: Kernel) -> None:
        """Wait for what a kernel reads, then run it."""
        self._finish([collective for collective in self._under_way if collective[0] & kernel.reads])
        self._now += kernel.seconds
        self.compute += kernel.seconds
        self.operators += 1

    def wait(self) -> None:
        """Wait for all that is under way."""
        self._finish(list(self._under_way))

    def _finish(self, ended: Sequence[tuple[frozenset[int], str, float, float]]) -> None:
        for collective in ended:
            _, axis, seconds, end = collective
            waited = min(max(0.0, end - self._now), seconds)
            self.exposed[axis] += waited  # type: ignore[assignment]
            self.hidden[axis] += seconds - waited  # type: ignore[assignment]
            self._now = max(self._now, end)
            self._under_way.remove(collective)
