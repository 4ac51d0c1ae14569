"""Finds the best shapes of a run on a cluster, and explains why no similar shape is better.

    choices ----- rules of run files -----> legal ----- state fits -----> ordered by guess, the fastest first
                                                                                |
    best <--- time of the cheapest option that fits <--- memory of each option <-+   until no bound is below the tenth best

A memory option (recomputation, offloading) costs time.  So for each shape, the search times the cheapest options that fit
and no others.  The front of memory and time is that of all computed candidates, with all options of the best shapes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from math import gcd, inf
from multiprocessing import get_all_start_methods, get_context
from typing import Any, TypeAlias

from megazero.config import ConfigError, ResolvedRun, RunConfig
from megazero.config.load import import_extensions, resolve
from megazero.engine.outline import schedule_factory_of
from megazero.plan.choices import Bounds, MemoryOption, ShapeChoice, Space, config_of, groups_in, option_words, space_of
from megazero.plan.cluster import Cluster
from megazero.plan.devices import size_text
from megazero.plan.memory import fullest_of
from megazero.plan.state_trace import fewest_micro_batches
from megazero.plan.step_time import step_time_of

LIMIT = 400  # shapes whose memory is computed
_BEST = 10
_EXPLAINED = 3  # of the best: their options and the choices next to them are timed
_ROUND = 6  # shapes that are computed before the tenth best is compared again
_MORE = 3  # times the limit while nothing fits


@dataclass(frozen=True)
class Need:
    """The memory and time that a run needs.

    Args:
        peak: most bytes on the device of a rank.
        where: a description of the fullest pipeline rank and the moment.
        seconds: duration of a step; infinite if it was not computed.
    """

    peak: int
    where: str
    seconds: float = inf


@dataclass(frozen=True, kw_only=True)
class Candidate(Need):
    """A choice with its memory and time."""

    choice: ShapeChoice


@dataclass(frozen=True)
class Judge:
    """Computes the memory and the time of a run on a cluster, as a plan does."""

    cluster: Cluster

    def memory(self, run: ResolvedRun) -> tuple[int, str]:
        """Return the peak bytes of the fullest pipeline rank, and a description of the rank and the moment."""
        fullest = fullest_of(run, self.cluster)
        return fullest.peak, f"{fullest.name}, {fullest.moment}"

    def seconds(self, run: ResolvedRun) -> float:
        """Return the seconds of a step.

        Only some micro-batches are simulated: once a pipeline is full, each adds the same time.
        """
        # Pipelines' worth of micro-batches until it is full.
        fills = 2 if schedule_factory_of(run.config).chunks == 2 else 1
        some = fewest_micro_batches(run, fills * run.config.parallel.pp)
        if run.accumulation <= 2 * some:
            return step_time_of(run, self.cluster).seconds
        first, second = (step_time_of(run, self.cluster, micro_batches=count).seconds for count in (some, 2 * some))
        return first + (second - first) * (run.accumulation - some) / some


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Args:
        best: the fastest shapes that fit, each with the cheapest memory option that makes it fit; the fastest first.
        limits: for each of the best, why the next value of every key is not better.
        front: candidates that fit and that no computed candidate beats in both time and memory, by time.
        computed: the candidates whose time is known.
        least: the computed candidate with the least memory; None if none was computed.
        refused: how many shapes a rule of run files refuses, by the key that the rule names.
        counted: how many shapes (choices without a memory option) there are, as "shapes"; how many of them are "too_large"
            (for the state alone or with every option), "slower" (the bound exceeds the tenth best), "computed", and
            "left_out" for want of time.
        own: the shape of the run file; None if it is for another number of ranks.
    """

    best: tuple[Candidate, ...]
    limits: tuple[tuple[str, ...], ...]
    front: tuple[Candidate, ...]
    computed: tuple[Candidate, ...]
    least: Candidate | None
    refused: Mapping[str, int]
    counted: Mapping[str, int]
    own: Need | None = None

    def beats_best(self, capacity: int) -> bool:
        """Whether the run file's shape fits `capacity` bytes and is faster than the best."""
        if self.own is None or self.own.peak > capacity:
            return False
        return not self.best or self.own.seconds < self.best[0].seconds


def search(
    run: ResolvedRun,
    judge: Judge,
    *,
    own: ResolvedRun | None = None,
    space: Space | None = None,
    processes: int = 1,
    report: Callable[[str], None] = lambda _: None,
    time_is_up: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """Compare the shapes of a run with a fixed model and global batch.

    Args:
        run: the run on one rank, from `base_of`.
        judge: computes memory and time on its cluster; copied to each process.
        own: the run of the run file, if it is for as many ranks; computed even if `space` does not contain it.
        space: the values of each key; None for the values worth comparing.
        processes: how many processes compute.
        report: called with a line of progress now and then.
        time_is_up: once this returns True, no further shape is computed.
    """
    cluster = judge.cluster
    space = space or space_of(run.config, cluster.ranks, cluster.per_node)
    bounds, capacity = Bounds(run, cluster), cluster.device.memory_bytes
    refused: Counter[str] = Counter()
    legal = list(_legal(run.config, space, cluster.ranks, refused))
    states = {
        shape: min(bounds.state_bytes(replace(shape, option=option)) for option in space.options) for shape in legal
    }
    small = sorted((shape for shape in legal if states[shape] <= capacity), key=bounds.guess)
    shapes, too_large = len(legal) + refused.total(), len(legal) - len(small)
    counted = Counter(shapes=shapes, too_large=too_large, slower=0, computed=0, left_out=0)
    with computing(partial(_compute, run.config, judge), processes) as compute:
        looked = _Look(compute, bounds, space.options, capacity, counted)
        looked.at(small, report, time_is_up)
        best = looked.best
        smallest = sorted(legal, key=states.__getitem__)
        if not best or not time_is_up():
            looked.all_options_of(best[:_EXPLAINED] or smallest[:_BEST])
        looked.next_choices_of(best, space, time_is_up=time_is_up())
    return SearchResult(
        tuple(looked.known[choice] for choice in best),
        tuple(tuple(_limits(run.config, choice, looked, space, cluster)) for choice in best),
        tuple(front_of(looked.fitting)),
        tuple(candidate for candidate in looked.known.values() if candidate.seconds < inf),
        min(looked.known.values(), key=lambda candidate: candidate.peak, default=None),
        dict(refused.most_common()),
        counted,
        None if own is None else Need(*judge.memory(own), judge.seconds(own)),
    )


def base_of(config: RunConfig, global_batch_size: int) -> ResolvedRun:
    """Resolve the run on one rank, with every searched key at its default.  Raises: ConfigError."""
    training = config.training.model_copy(update={"global_batch_size": global_batch_size})
    elastic = type(config.elastic)()
    base = config.model_copy(update={"training": training, "elastic": elastic})
    return resolve(config_of(base, ShapeChoice(zero_stage=base.zero.stage)), 1)


def front_of(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates of the Pareto front of time and memory, by time."""
    least = inf
    for candidate in sorted(candidates, key=lambda candidate: (candidate.seconds, candidate.peak)):
        if candidate.peak < least:
            least = candidate.peak
            yield candidate


# ---- legal shapes


def _legal(config: RunConfig, space: Space, ranks: int, refused: Counter[str]) -> Iterator[ShapeChoice]:
    """Yield the shapes that the rules of run files allow; count the others by the key that the rule names."""
    known: dict[ShapeChoice, str | None] = {}  # sharding breaks no rule that its shape keeps
    for choice in groups_in(space, config, ranks):
        frame = replace(choice, zero_stage=1, gather_policy="action", shard_group=0, ep=1)
        if frame not in known:
            known[frame] = None
            try:
                resolve(config_of(config, frame), ranks)
            except ConfigError as error:
                known[frame] = error.problems[0].key
        key = known[frame]
        if key is None:
            yield choice
        else:
            refused[key] += 1


# ---- the computation


Work: TypeAlias = Sequence[tuple[ShapeChoice, Sequence[MemoryOption]]]
Known: TypeAlias = dict[ShapeChoice, Candidate]


@contextmanager
def computing(
    compute: Callable[[ShapeChoice, Sequence[MemoryOption], str], Known], processes: int
) -> Iterator[Callable[[Work, str], Iterator[Known]]]:
    """Yield a function that computes shapes in several processes and yields their candidates in order.

    Shapes with equal stages go to the same process, which caches their traces.

    Args:
        compute: (shape, memory options, mode) -> candidates; see `_compute`.
        processes: how many processes to start.
    """
    if processes == 1:
        yield lambda work, mode: (compute(shape, options, mode) for shape, options in work)
        return
    method = "fork" if "fork" in get_all_start_methods() else "spawn"
    with ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, get_context(method))) for _ in range(processes)]
        pool_of = defaultdict[object, ProcessPoolExecutor](cycle(pools).__next__)

        def computed(work: Work, mode: str) -> Iterator[Known]:
            waiting = [
                pool_of[shape.tp, shape.cp, shape.pp, shape.schedule].submit(compute, shape, options, mode)
                for shape, options in work
            ]
            yield from (future.result() for future in waiting)

        yield computed


@dataclass
class _Look:
    """The state of a search."""

    compute: Callable[[Work, str], Iterator[Known]]
    bounds: Bounds
    options: Sequence[MemoryOption]
    capacity: int
    counted: Counter[str]
    known: Known = field(default_factory=dict)

    @property
    def fitting(self) -> list[Candidate]:
        """The candidates that fit and whose time is known."""
        return [need for need in self.known.values() if need.seconds < inf and need.peak <= self.capacity]

    def at(self, shapes: Sequence[ShapeChoice], report: Callable[[str], None], time_is_up: Callable[[], bool]) -> None:
        """Compute shapes in this order, except those that cannot be among the best."""
        waiting = list(shapes)
        while waiting:
            best = self.best
            tenth = self.known[best[-1]].seconds if len(best) == _BEST else inf
            now: list[ShapeChoice] = []
            while waiting and len(now) < _ROUND:
                shape = waiting.pop(0)
                if self.bounds.seconds(shape) >= tenth:
                    self.counted["slower"] += 1
                elif self.counted["computed"] + len(now) >= LIMIT * (1 if best else _MORE) or time_is_up():
                    self.counted["left_out"] += 1
                else:
                    now.append(shape)
            self._compute([(shape, self.options) for shape in now], "least")
            self.counted["computed"] += len(now)
            if best and now:
                fastest = self.known[best[0]].seconds
                report(f"{self.counted['computed']} shapes computed, the best takes {fastest:.3f} s: {best[0]}")

    def all_options_of(self, choices: Iterable[ShapeChoice]) -> None:
        """Compute every memory option of these shapes, for the front; if nothing fits, for the least memory needed."""
        shapes = dict.fromkeys(replace(shape, option=MemoryOption()) for shape in choices)
        self._compute([(shape, self.options) for shape in shapes], "every")

    def next_choices_of(self, best: Sequence[ShapeChoice], space: Space, *, time_is_up: bool) -> None:
        """Compute the choices next to the best ones, to explain why they are not better.  Time those of the first few."""
        first, others = best[:_EXPLAINED], best[_EXPLAINED:]
        for group, mode in ((first, "memory"),) if time_is_up else ((first, "every"), (others, "memory")):
            near = dict.fromkeys(other for choice in group for _, other in _next_choices(choice, space))
            unknown = [choice for choice in near if choice not in self.known]
            self._compute([(replace(choice, option=MemoryOption()), [choice.option]) for choice in unknown], mode)

    def _compute(self, work: Work, mode: str) -> None:
        for found in self.compute(work, mode):
            self.known |= {
                choice: candidate
                for choice, candidate in found.items()
                if choice not in self.known or candidate.seconds < inf
            }
            if mode == "least" and not any(candidate.seconds < inf for candidate in found.values()):
                self.counted["too_large"] += 1

    @property
    def best(self) -> list[ShapeChoice]:
        """The ten fastest shapes without repetition."""
        found: dict[ShapeChoice, ShapeChoice] = {}
        for _, _, choice in sorted((candidate.seconds, candidate.peak, candidate.choice) for candidate in self.fitting):
            found.setdefault(replace(choice, option=MemoryOption()), choice)
        return list(found.values())[:_BEST]


def _compute(config: RunConfig, judge: Judge, shape: ShapeChoice, options: Sequence[MemoryOption], mode: str) -> Known:
    """Compute the memory of a shape with each option; `mode`: time the "least" options that fit, "every" one, or none."""
    import_extensions(config.launch.extensions)  # a new process has not imported them
    found, fitting = Known(), dict[MemoryOption, ResolvedRun]()
    first, *others = sorted(options, key=lambda option: option.order)
    for option in (first, *others[-1:], *others[:-1]):
        if mode == "least" and any(known.needs_no_more_than(option) for known in fitting):
            continue
        choice = replace(shape, option=option)
        try:
            run = resolve(config_of(config, choice), judge.cluster.ranks)
        except ConfigError:  # this shape has no such sharding or option
            continue
        found[choice] = Candidate(*judge.memory(run), choice=choice)
        if found[choice].peak <= judge.cluster.device.memory_bytes:
            fitting[option] = run
        elif mode == "least" and [option] == others[-1:]:  # even the option that saves most does not fit
            break
    for option, run in fitting.items() if mode != "memory" else ():
        if mode == "every" or not any(other.needs_no_more_than(option) for other in fitting if other != option):
            choice = replace(shape, option=option)
            found[choice] = replace(found[choice], seconds=judge.seconds(run))
    return found


# ---- why not better


def _next_choices(choice: ShapeChoice, space: Space) -> Iterator[tuple[str, ShapeChoice]]:
    """Yield choices with one key changed to the next value that promises less time, and the change in words."""
    for name, values in (("tp", space.tp), ("cp", space.cp), ("pp", space.pp), ("ep", space.ep)):
        own = getattr(choice, name)
        if value := max((size for size in values if size < own), default=0):
            changes: dict[str, Any] = {name: value}
            if name == "cp":
                changes["ulysses"] = gcd(choice.ulysses, value)
            if name == "pp" and value == 1:
                changes |= {"schedule": "1f1b", "virtual_stages": 1}
            yield f"{name} {value} instead of {own}", replace(choice, **changes)
    larger = min((size for size in space.micro_batch if size > choice.micro_batch), default=0)
    if larger:
        yield f"micro-batch {larger} instead of {choice.micro_batch}", replace(choice, micro_batch=larger)
    lower = max((stage for stage in space.zero_stages if stage < choice.zero_stage), default=None)
    if lower is not None:
        other = replace(choice, zero_stage=lower, gather_policy="action", shard_group=0)
        yield f"ZeRO {lower} instead of {choice.zero_stage}", other
    own = choice.option
    lighter = [option for option in space.options if option != own and option.needs_no_more_than(own)]
    if lighter:
        option = max(lighter, key=lambda option: option.order)
        words = " and ".join(option_words(option)) or "nothing recomputed or offloaded"
        yield words, replace(choice, option=option)


def _limits(config: RunConfig, best: ShapeChoice, looked: _Look, space: Space, cluster: Cluster) -> Iterator[str]:
    """Yield why each choice next to the best is not better, if it was computed."""
    for words, other in _next_choices(best, space):
        found = looked.known.get(other)
        if found is None:
            try:
                resolve(config_of(config, other), cluster.ranks)
            except ConfigError as error:
                yield f"{words}: {error.problems[0]}"
        elif found.seconds < inf:
            change = found.seconds / looked.known[best].seconds - 1
            yield f"{words} would take {abs(change):.1%} {'more' if change >= 0 else 'less'}"
        elif found.peak <= looked.capacity:
            yield f"{words} would fit with {size_text(found.peak)}; its time was not computed"
        else:
            yield f"{words} would need {size_text(found.peak)} of {size_text(looked.capacity)}"
