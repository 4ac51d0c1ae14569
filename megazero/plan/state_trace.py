"""Traces a rank's model state, ZeRO's buffers and traffic: a step of the real engine in which no layer computes.

    Engine on tensors without data           weights, master weights, moments, tables, gather buffers
      every action of the schedule           units are gathered, gradients reach their buckets, buckets are reduced
      end of the step                        sums, norm, optimizer, gathers

The second step is measured, because buffers exist by then; with offloaded weights the fourth, because the engine prefetches
more of them once it knows their order.  Communication moves no data but is counted.  A step of many micro-batches repeats
itself, so the difference between two short steps is the traffic of one repetition.  Pipeline ranks that have equally many
layers and neither embedding nor head share a trace, if the order of their actions changes neither memory nor traffic.  State
in files has its buffers, but no file is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from megazero.comm.collectives import all_reduce
from megazero.config import ResolvedRun, RunConfig
from megazero.config.derive import micro_batch_multiple
from megazero.engine.gpt import Engine
from megazero.engine.outline import schedule_factory_of
from megazero.engine.step import sum_over_ranks
from megazero.models.stages import StageLayout, cut_by_rank
from megazero.parallel_state.axis import Traffic
from megazero.plan.fake_ranks import HOST, FakeState, RecordedTraffic, without_files
from megazero.plan.fake_tensors import FakeTensors, Message, kernel_bytes
from megazero.plan.unit_trace import Cuts, order_of_gradients, slot_of, trace_units
from megazero.schedules.action import Action, Op
from megazero.zero.gather import UnitGatherer
from megazero.zero.sharding import ChunkSlot

TABLES, END_OF_PASSES, UPDATE = "tables", "end of the passes", "update"


class Sent(NamedTuple):
    """The traffic of one operation over one axis in a step of one rank.

    Args:
        link_bytes: those of the sent bytes that go to other nodes.
    """

    sent_bytes: int = 0
    link_bytes: int = 0
    calls: int = 0

    def plus(self, more: Sent, times: int = 1) -> Sent:
        """Return the sum of this and `times` times `more`."""
        return Sent(*(own + other * times for own, other in zip(self, more, strict=True)))


Order: TypeAlias = tuple[tuple[str, bool], ...]
LevelKey: TypeAlias = tuple[bool, int, int]


class Level(NamedTuple):
    """Bytes above those at the start of a step, from the moment at which a parameter's gradient has reached its bucket."""

    live: int
    made: int  # while it is made, slot by slot
    peak: int  # meanwhile


@dataclass(frozen=True)
class StateTrace:
    """The model state and traffic of one rank.

    Args:
        kinds: bytes on the device throughout a step, by kind.  On a CPU, they include host memory.
        counted: bytes after a step as the engine counts them, by kind; the kind names the place if off the device.
        levels: bytes as gradients arrive, by (is a later micro-batch, virtual stage, unit of the stage)
            and parameter.
        end: most bytes beyond `kinds` at the end of the step.
        traffic: traffic of a step by (axis, operation), without that of layers and without messages of the pipeline.
        elements: parameters of each unit on this rank, by virtual stage.
        stepped: elements whose optimizer state this rank owns, padding included.
        communicators: number of groups with several ranks that this rank belongs to.
        cuts: parameters with gradients in several bucket chunks, by virtual stage and unit of the stage.
        messages: collectives that start in each action of a short step, at the end of the passes, and in the update.
    """

    kinds: Mapping[str, int]
    counted: Mapping[str, int]
    levels: Mapping[LevelKey, Mapping[str, Level]]
    end: int
    traffic: Mapping[tuple[str, str], Sent]
    elements: Mapping[int, tuple[int, ...]]
    stepped: int
    communicators: int = 0
    cuts: Mapping[tuple[int, int], Cuts] = field(default_factory=dict)
    messages: Mapping[Action | str, tuple[Message, ...]] = field(default_factory=dict)

    @property
    def off_device(self) -> dict[str, int]:
        """Bytes in files and, unless the run is on a CPU, in host memory."""
        return {name: count for name, count in self.counted.items() if " on " in name and name not in self.kinds}


def trace_state(run: ResolvedRun, rank: int, *, per_node: int, on_cuda: bool) -> StateTrace:
    """Trace the model state and the traffic of a rank.  Results are cached.

    Args:
        rank: global rank.
        per_node: ranks of a node.
        on_cuda: the run is on GPUs.
    """
    few, step = _short_step(run)
    times = (run.accumulation - few) // step
    alike = _alike(run, rank, per_node)
    order = order_of_gradients(trace_units(run, on_cuda=on_cuda, per_node=per_node).values())
    more, longer = _trace(_without_training(run), few, step if times else 0, alike, per_node, on_cuda, order)
    traffic = {key: sent.plus(more.get(key, Sent()), times - 1) for key, sent in longer.traffic.items()}
    return replace(longer, traffic=traffic)


_GIVES = (Op.BACKWARD, Op.WEIGHT)


def _short_step(run: ResolvedRun) -> tuple[int, int]:
    """Return the micro-batches of a short step, and how many each repetition of a longer step adds."""
    config = run.config
    step = schedule_factory_of(config).microbatch_multiple(config.parallel.pp)
    if config.parallel.schedule_file is not None:  # it has one number of micro-batches
        return run.accumulation, step
    repeats = -(-(config.parallel.pp + 1) // step) if config.zero.stage == 3 else 1  # until gathers repeat themselves
    return run.accumulation - max((run.accumulation - (repeats + 1) * step) // step, 0) * step, step


def fewest_micro_batches(run: ResolvedRun, least: int) -> int:
    """Return the smallest number of micro-batches, at least `least`, that the schedule allows; at most that of the run."""
    parallel = run.config.parallel
    if parallel.schedule_file is not None:
        return run.accumulation
    multiple = micro_batch_multiple(parallel)
    return min(run.accumulation, -(-least // multiple) * multiple)


def _without_training(run: ResolvedRun) -> ResolvedRun:
    """Reset the keys that change neither memory nor traffic of the state, so that more runs share a trace."""
    config = run.config
    update: dict[str, object] = {"training": type(config.training)()}
    if not config.activations.contiguous:  # gradients have no buffers in an arena of activations
        update["activations"] = type(config.activations)()
    config = config.model_copy(update=update)
    return replace(run, config=config, micro_batch_size=1, accumulation=1, global_batch_size=run.dp)


def _alike(run: ResolvedRun, rank: int, per_node: int) -> int:
    """Return the first rank with the same state and traffic: of a stage with equal chunks, a whole number of nodes away."""
    grid, at, dense = run.grid, run.grid.coordinate(rank), run.config.model.first_dense_layers
    factory = schedule_factory_of(run.config)
    placement = factory.placement(grid.pp, factory.chunks_of(run.config.parallel.virtual_stages))
    if run.config.zero.stage >= (2 if len(placement) > grid.pp else 3):  # when units are gathered and buckets are full
        return rank

    def size(layout: StageLayout) -> tuple[int, int, bool, bool]:
        return len(layout.layers), sum(at < dense for at in layout.layers), layout.has_embedding, layout.has_head

    sizes = [list(map(size, own)) for own in cut_by_rank(run.config.model, run.config.parallel.layout, placement)]
    for stage in range(1, at.pp):  # the first pipeline rank has the embedding
        first = grid.rank(replace(at, pp=stage))
        if sizes[stage] == sizes[at.pp] and ((rank - first) % per_node == 0 or grid.world_size <= per_node):
            return first
    return rank


@lru_cache(maxsize=512)
def _trace(
    run: ResolvedRun, few: int, step: int, rank: int, per_node: int, on_cuda: bool, order: Order
) -> tuple[Mapping[tuple[str, str], Sent], StateTrace]:
    """Trace a step of `few + step` micro-batches, and the traffic that `step` of them add to the passes of others."""
    config = run.config
    factory, parallel = schedule_factory_of(config), config.parallel
    with without_files(), FakeTensors(kernel_bytes=kernel_bytes(on_cuda=on_cuda)) as fake:
        traffic = RecordedTraffic(fake.operators)
        state = FakeState(run, rank, per_node, None, traffic, on_cuda=on_cuda)
        driver = _Driver(Engine(without_auto(config), state, factory), fake, order)
        built, elements = fake.live, driver.elements()
        engine = driver.engine
        stepped = sum(bucket.owned.size for bucket in engine.sharded_model.parameters.buckets if bucket.layout.trains)
        absent = engine.sharded_model.parameters.absent_gradient_bytes()
        tables = built - _in_memory(engine.memory_bytes()) + absent

        def run_passes(count: int) -> dict[tuple[str, str], Sent]:
            traffic.reset()
            schedule = factory.build(parallel.pp, count, factory.chunks_of(parallel.virtual_stages))
            driver.run_passes(schedule.ranks[state.at.pp], count)
            return _sent(traffic)

        for _ in range(2 if config.zero.offload.parameters == "none" else 4):
            longer = run_passes(few + step)
            driver.end_step()
        sent = _sent(traffic)
        counted, messages = engine.memory_bytes(), driver.messages
        base, levels, end, absent = driver.base, driver.levels, driver.end, driver.absent_at_start
        short = run_passes(few) if step else longer
        more = {key: own.plus(short.get(key, Sent()), -1) for key, own in longer.items()}
        other = base - _in_memory(counted) + absent - tables
        cuts = driver.cuts()
        engine.sharded_model.close()
    here = {name: count for name, count in counted.items() if " on " not in name or not (on_cuda or "file" in name)}
    here["gradients"] -= absent
    kinds = here | {TABLES: tables, "other": other}
    communicators = sum(len(ranks) > 1 and purpose != HOST for _, ranks, purpose in state.made)
    return more, StateTrace(kinds, counted, levels, end, sent, elements, stepped, communicators, cuts, messages)


def _unnamed(held: ChunkSlot) -> ChunkSlot:
    return replace(held, slot=slot_of(held.slot.info.shape, held.slot.start))


def _in_memory(counted: Mapping[str, int]) -> int:
    return sum(count for kind, count in counted.items() if not kind.endswith("on file"))


def _sent(traffic: Traffic) -> dict[tuple[str, str], Sent]:
    return {
        key: Sent(traffic.sent_bytes[key], traffic.link_bytes[key], calls)
        for key, calls in traffic.calls.items()
        if traffic.sent_bytes[key] or key[1] not in ("gather_objects", "from_first")
    }


def without_auto(config: RunConfig) -> RunConfig:
    """Replace `zero.offload` = auto, which depends on this machine's free memory, by "none"."""
    offload = config.zero.offload
    update = {key: "none" for key in ("optimizer", "parameters") if getattr(offload, key) == "auto"}
    zero = config.zero.model_copy(update={"offload": offload.model_copy(update=update)})
    return config.model_copy(update={"zero": zero})


class _Driver:
    """Runs steps of an engine without computing its layers."""

    def __init__(self, engine: Engine, fake: FakeTensors, order: Order) -> None:
        self.engine, self._fake = engine, fake
        self.base = self.end = self.absent_at_start = 0
        self.levels: dict[LevelKey, dict[str, Level]] = {}
        self.messages: dict[Action | str, tuple[Message, ...]] = {}
        self._units = [
            [self._names(chunk, unit, order) for unit in stage.units()] for chunk, stage in enumerate(engine._stages)
        ]

    def cuts(self) -> dict[tuple[int, int], Cuts]:
        """Return the parameters with gradients in several bucket chunks, by (virtual stage, unit)."""
        model, found = self.engine.sharded_model, dict[tuple[int, int], Cuts]()
        chunks_of, by_name = model.reducer.chunks_of, model.parameters.by_name
        for chunk, units in enumerate(self._units):
            for at, names in enumerate(units):
                of_params = {
                    short: [gradients.chunk_slots[index] for _, gradients, index in chunks_of[id(by_name[name])]]
                    for short, (name, _) in names.items()
                }
                cut = ((short, tuple(map(_unnamed, slots))) for short, slots in of_params.items() if len(slots) > 1)
                found[chunk, at] = tuple(cut)
        return found

    def elements(self) -> dict[int, tuple[int, ...]]:
        """Count the parameters of each unit, by chunk."""
        home = self.engine.sharded_model.parameters.by_name
        return {
            chunk: tuple(sum(home[name].numel() for name, _ in names.values()) for names in units)
            for chunk, units in enumerate(self._units)
        }

    def _note_messages(self, moment: Action | str) -> None:
        """Record the messages that started since the moment before."""
        self.messages[moment] = self._fake.messages
        self._fake.operators.clear()

    def run_passes(self, actions: Any, micro_batches: int) -> None:
        """Run the actions of a step."""
        engine, model = self.engine, self.engine.sharded_model
        model.begin_step(micro_batches)
        self.base, self.levels, self.messages = self._fake.live, {}, {}
        self.absent_at_start = model.parameters.absent_gradient_bytes()
        if engine.batch_slice.labels:
            all_reduce(torch.zeros((), dtype=torch.float64), engine.state.dp_cp).wait()
        gatherer = model.parameters.gatherer
        passes = [action for action in actions if action.op is not Op.WEIGHT]
        last = Op.WEIGHT if len(passes) < len(actions) else Op.BACKWARD
        following = dict(zip(passes, [*passes[1:], None], strict=True))
        for action in actions:
            follower = following.get(action)
            if gatherer is not None and follower is not None:
                gatherer.order.expect(follower.chunk, follower.op is Op.FORWARD)
            gathers = None if action.op is Op.WEIGHT else gatherer
            self._run_pass(gathers, action)
            if action.op is last:
                model.reducer.close_pass(action.chunk)
            self._note_messages(action)
        self._fake.peak = self._fake.live
        model.finish_gradients()
        self._note_messages(END_OF_PASSES)

    def end_step(self) -> None:
        """Update the weights."""
        engine, model = self.engine, self.engine.sharded_model
        nothing = torch.zeros((), dtype=torch.float64)
        sum_over_ranks(model, model.square_sum(), nothing, nothing)
        model.update(1.0, engine.config.optimizer.grad_clip)
        self.end = self._fake.peak - self.base
        self._note_messages(UPDATE)

    def _run_pass(self, gatherer: UnitGatherer | None, action: Action) -> None:
        model, chunk, units = self.engine.sharded_model, action.chunk, list(enumerate(self._units[action.chunk]))
        first, is_forward = sum(len(names) for names in self._units[:chunk]), action.op is Op.FORWARD
        for number, names in units if is_forward else reversed(units):
            if gatherer is not None:
                unit = gatherer.units[first + number]
                if is_forward:
                    unit.pre_forward()
                    unit.post_forward(None)
                else:
                    unit.pre_backward()
            levels = self.levels.setdefault((action.microbatch > 0, chunk, number), {})
            for short, (name, op) in names.items():
                if op is not action.op:
                    continue
                parameter, self._fake.peak = model.parameters.by_name[name], self._fake.live
                made = max(self._fake.live for _ in model.reducer._open(parameter)) - self.base
                before = levels.get(short, Level(0, 0, 0))
                now = self._fake.live - self.base, made, self._fake.peak - self.base
                levels[short] = Level(*map(max, before, now))

    def _names(self, chunk: int, unit: torch.nn.Module, order: Order) -> dict[str, tuple[str, Op]]:
        """Map the names of a unit's parameters to their full names and the operation that gives their gradients."""
        home = self.engine.sharded_model.parameters.by_name
        path = {id(module): name for name, module in self.engine._chunks[chunk].named_modules()}[id(unit)]
        names = {name: (f"{chunk}.{path}.{name}", _GIVES[in_weight_pass]) for name, in_weight_pass in order}
        return {name: found for name, found in names.items() if found[0] in home}
