"""The best shapes of a run on a cluster, and why each is not better still.

    choices ----- rules of the run file -----> legal ----- state fits -----> by guess, the best first
                                                                                |
    best <---- time of the least relief that fits <---- memory of each relief <-+   until no bound is below the tenth

A relief (recomputation, offloading) costs time, so of one shape only those are timed without which it does not fit.  The
front of memory and time is that of everything computed, with all reliefs of the best shapes.
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
from megazero.engine.outline import kind_of
from megazero.plan.choices import Bounds, Choice, Relief, Space, config_of, groups_in, relief_words, space_of
from megazero.plan.cluster import Cluster
from megazero.plan.devices import size_text
from megazero.plan.memory import fullest_of
from megazero.plan.state_trace import fewest_micro_batches
from megazero.plan.step_time import step_time_of

LIMIT = 400  # shapes whose memory is computed
_BEST = 10
_EXPLAINED = 3  # of them: the reliefs and neighbours of these are timed
_ROUND = 6  # shapes that are computed before the tenth best is compared again
_MORE = 3  # times the limit while nothing fits


@dataclass(frozen=True)
class Need:
    """Memory and time of a run.

    Args:
        peak: most bytes on the device of a rank.
        where: the fullest pipeline rank and the moment, in words.
        seconds: of a step; infinite where it was not computed.
    """

    peak: int
    where: str
    seconds: float = inf


@dataclass(frozen=True, kw_only=True)
class Candidate(Need):
    """A choice of which the need is known."""

    choice: Choice


@dataclass(frozen=True)
class Judge:
    """Computes the memory and time of a run on a cluster, as a plan does."""

    cluster: Cluster

    def memory(self, run: ResolvedRun) -> tuple[int, str]:
        """Return the peak of the fullest pipeline rank, and where and when it is."""
        fullest = fullest_of(run, self.cluster)
        return fullest.peak, f"{fullest.name}, {fullest.moment}"

    def seconds(self, run: ResolvedRun) -> float:
        """Return a step's seconds.  Once a pipeline is full, every micro-batch adds the same, so only some are simulated."""
        fills = 2 if kind_of(run.config).chunks == 2 else 1  # pipelines' worth of micro-batches until it is full
        some = fewest_micro_batches(run, fills * run.config.parallel.pp)
        if run.accumulation <= 2 * some:
            return step_time_of(run, self.cluster).seconds
        first, second = (step_time_of(run, self.cluster, micro_batches=count).seconds for count in (some, 2 * some))
        return first + (second - first) * (run.accumulation - some) / some


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Args:
        best: the fastest shapes that fit, each with the least relief that makes it fit; the fastest first.
        limits: of each of the best, why the next value of every key is not better.
        front: no other computed candidate that fits takes less time and less memory; by time.
        computed: the candidates of which the time is known.
        least: the computed candidate that needs the least memory; None where none was computed.
        refused: shapes that a rule of the run file refuses, by its key.
        counted: "shapes" in all (choices without recomputation and offloading), and of these "too_large" for the state alone
            or with every relief, "slower" (the bound is above the tenth best), "computed", and "left_out" beyond the limit.
        own: the run file's own shape; None where it is for another number of ranks.
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
        """Whether the run file's own shape fits and is faster than the best."""
        if self.own is None or self.own.peak > capacity:
            return False
        return not self.best or self.own.seconds < self.best[0].seconds


def search(
    run: ResolvedRun,
    cluster: Cluster,
    judge: Judge,
    *,
    own: ResolvedRun | None = None,
    space: Space | None = None,
    processes: int = 1,
    say: Callable[[str], None] = lambda _: None,
    is_late: Callable[[], bool] = lambda: False,
) -> Found:
    """Compare the shapes of a run; its model and global batch are fixed.

    Args:
        run: on one rank, from `base_of`.
        judge: copied to the processes.
        own: the run as its file has it, if it has as many ranks; computed whatever the space is.
        space: the values of each key; None for those worth comparing.
        say: called with a line of progress now and then.
        is_late: no further shape is computed once this returns True.
    """
    space = space or space_of(run.config, cluster.ranks, cluster.per_node)
    bounds, capacity = Bounds(run, cluster), cluster.device.memory_bytes
    refused: Counter[str] = Counter()
    legal = list(_legal(run.config, space, cluster.ranks, refused))
    states = {
        shape: min(bounds.state_bytes(replace(shape, relief=relief)) for relief in space.reliefs) for shape in legal
    }
    small = sorted((shape for shape in legal if states[shape] <= capacity), key=bounds.guess)
    shapes, too_large = len(legal) + refused.total(), len(legal) - len(small)
    counted = Counter(shapes=shapes, too_large=too_large, slower=0, computed=0, left_out=0)
    with computing(partial(_compute, run.config, judge, cluster.ranks, capacity), processes) as compute:
        looked = _Look(compute, bounds, space.reliefs, capacity, counted)
        looked.at(small, say, is_late)
        best = looked.best
        smallest = sorted(legal, key=states.__getitem__)
        if not best or not is_late():
            looked.all_reliefs_of(best[:_EXPLAINED] or smallest[:_BEST])
        looked.neighbours_of(best, space, is_late=is_late())
    return Found(
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
    """Return the run with every searched key at its default, on one rank.  Raises: ConfigError."""
    training = config.training.model_copy(update={"global_batch_size": global_batch_size})
    elastic = type(config.elastic)()
    base = config.model_copy(update={"training": training, "elastic": elastic})
    return resolve(config_of(base, Choice(zero_stage=base.zero.stage)), 1)


def front_of(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the Pareto front of time and memory, by time."""
    least = inf
    for candidate in sorted(candidates, key=lambda candidate: (candidate.seconds, candidate.peak)):
        if candidate.peak < least:
            least = candidate.peak
            yield candidate


# ---- what can run


def _legal(config: RunConfig, space: Space, ranks: int, refused: Counter[str]) -> Iterator[Choice]:
    """Yield the shapes that the run file's rules allow; count the others by the key that a rule names."""
    known: dict[Choice, str | None] = {}  # sharding breaks no rule that its shape keeps
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


# ---- what is computed


Work: TypeAlias = Sequence[tuple[Choice, Sequence[Relief]]]
Known: TypeAlias = dict[Choice, Candidate]


@contextmanager
def computing(
    compute: Callable[[Choice, Sequence[Relief], str], Known], processes: int
) -> Iterator[Callable[[Work, str], Iterator[Known]]]:
    """A context with a function that computes shapes in `processes` processes and yields their candidates in order.

    Shapes with equal stages go to the same process, which caches their traces.
    """
    if processes == 1:
        yield lambda work, mode: (compute(shape, reliefs, mode) for shape, reliefs in work)
        return
    method = "fork" if "fork" in get_all_start_methods() else "spawn"
    with ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, get_context(method))) for _ in range(processes)]
        pool_of = defaultdict[object, ProcessPoolExecutor](cycle(pools).__next__)

        def computed(work: Work, mode: str) -> Iterator[Known]:
            waiting = [
                pool_of[shape.tp, shape.cp, shape.pp, shape.schedule].submit(compute, shape, reliefs, mode)
                for shape, reliefs in work
            ]
            yield from (future.result() for future in waiting)

        yield computed


@dataclass
class _Look:
    """The state of a search."""

    compute: Callable[[Work, str], Iterator[Known]]
    bounds: Bounds
    reliefs: Sequence[Relief]
    capacity: int
    counted: Counter[str]
    known: Known = field(default_factory=dict)

    @property
    def fitting(self) -> list[Candidate]:
        """The candidates that fit and of which the time is known."""
        return [one for one in self.known.values() if one.seconds < inf and one.peak <= self.capacity]

    def at(self, shapes: Sequence[Choice], say: Callable[[str], None], is_late: Callable[[], bool]) -> None:
        """Compute shapes in this order, but none that cannot be among the best."""
        waiting = list(shapes)
        while waiting:
            best = self.best
            tenth = self.known[best[-1]].seconds if len(best) == _BEST else inf
            now: list[Choice] = []
            while waiting and len(now) < _ROUND:
                shape = waiting.pop(0)
                if self.bounds.seconds(shape) >= tenth:
                    self.counted["slower"] += 1
                elif self.counted["computed"] + len(now) >= LIMIT * (1 if best else _MORE) or is_late():
                    self.counted["left_out"] += 1
                else:
                    now.append(shape)
            self._compute([(shape, self.reliefs) for shape in now], "least")
            self.counted["computed"] += len(now)
            if best and now:
                fastest = self.known[best[0]].seconds
                say(f"{self.counted['computed']} shapes computed, the best takes {fastest:.3f} s: {best[0]}")

    def all_reliefs_of(self, choices: Iterable[Choice]) -> None:
        """Compute every relief of these shapes, for the front; if nothing fits, for the least memory that any needs."""
        shapes = dict.fromkeys(replace(shape, relief=Relief()) for shape in choices)
        self._compute([(shape, self.reliefs) for shape in shapes], "every")

    def neighbours_of(self, best: Sequence[Choice], space: Space, *, is_late: bool) -> None:
        """Compute the neighbours of the best choices, to say why these are not better; time only those of the first few."""
        first, others = best[:_EXPLAINED], best[_EXPLAINED:]
        for part, mode in ((first, "memory"),) if is_late else ((first, "every"), (others, "memory")):
            near = dict.fromkeys(other for choice in part for _, other in _neighbours(choice, space))
            unknown = [choice for choice in near if choice not in self.known]
            self._compute([(replace(choice, relief=Relief()), [choice.relief]) for choice in unknown], mode)

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
    def best(self) -> list[Choice]:
        """The ten fastest shapes, each once."""
        found: dict[Choice, Choice] = {}
        for _, _, choice in sorted((one.seconds, one.peak, one.choice) for one in self.fitting):
            found.setdefault(replace(choice, relief=Relief()), choice)
        return list(found.values())[:_BEST]


def _compute(
    config: RunConfig, judge: Judge, ranks: int, capacity: int, shape: Choice, reliefs: Sequence[Relief], mode: str
) -> Known:
    """Compute the memory of a shape by relief, and the time of the "least" reliefs that fit, of "every" one, or of none."""
    import_extensions(config.launch.extensions)  # in a process that was started anew
    found, fitting = Known(), dict[Relief, ResolvedRun]()
    first, *others = sorted(reliefs, key=lambda relief: relief.order)
    for relief in (first, *others[-1:], *others[:-1]):
        if mode == "least" and any(known.needs_no_more_than(relief) for known in fitting):
            continue
        choice = replace(shape, relief=relief)
        try:
            run = resolve(config_of(config, choice), ranks)
        except ConfigError:  # sharding or relief that this shape does not know
            continue
        found[choice] = Candidate(*judge.memory(run), choice=choice)
        if found[choice].peak <= capacity:
            fitting[relief] = run
        elif mode == "least" and [relief] == others[-1:]:  # all of it is not enough
            break
    for relief, run in fitting.items() if mode != "memory" else ():
        if mode == "every" or not any(other.needs_no_more_than(relief) for other in fitting if other != relief):
            choice = replace(shape, relief=relief)
            found[choice] = replace(found[choice], seconds=judge.seconds(run))
    return found


# ---- why not better


def _neighbours(choice: Choice, space: Space) -> Iterator[tuple[str, Choice]]:
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
    own = choice.relief
    lighter = [relief for relief in space.reliefs if relief != own and relief.needs_no_more_than(own)]
    if lighter:
        relief = max(lighter, key=lambda relief: relief.order)
        words = " and ".join(relief_words(relief)) or "nothing recomputed or offloaded"
        yield words, replace(choice, relief=relief)


def _limits(config: RunConfig, best: Choice, looked: _Look, space: Space, cluster: Cluster) -> Iterator[str]:
    """Yield for each neighbour why it is not better; nothing for one that was not computed."""
    for words, other in _neighbours(best, space):
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
