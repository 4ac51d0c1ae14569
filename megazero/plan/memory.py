"""The memory of every pipeline rank by kind, at the moment of a step when the rank is fullest.

    live      state | saved by earlier passes | messages | gradients so far | temporaries of the running pass
              [----------- from one pass to the next ----------------------]   [- its own peak -]
    peak      the largest sum over all passes of the rank's own schedule and the end of the step

State comes from a trace of the engine (`state_trace`), activations and temporaries of a pass from a trace of the layers
(`unit_trace`), and the order of passes from the schedule.  All ranks of a stage need equal memory, since shards are padded
to one size.  A layer that offloads its activations has them on the device during its own passes and those of the next
layer.  On a CPU, offloading frees nothing.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

from megazero.config import ResolvedRun
from megazero.engine.outline import schedule_of
from megazero.layers.activation_offload import NEAR
from megazero.models.activation_config import LayerPolicy
from megazero.models.stages import StageLayout, cut_by_rank
from megazero.parallel_state.grid import Coordinate
from megazero.plan import unit_trace
from megazero.plan.cluster import Cluster
from megazero.plan.devices import size_text
from megazero.plan.operator_times import flops_of
from megazero.plan.state_trace import TABLES, fewest_micro_batches, trace_state
from megazero.plan.unit_trace import EMBEDDING, HEAD, StageUnit, UnitTrace, message_bytes, trace_unit, units_of
from megazero.schedules.action import Action, Op, Schedule
from megazero.schedules.proof import Steps, peak_activations, program, steps_of, what_messages_confirm
from megazero.zero.parameters import SECONDARY_SHARD

ACTIVATIONS, WORKING, MESSAGES, BATCH = "activations", "working memory", "pipeline messages", "tokens"
COMMUNICATORS, SLACK = "communicators", "allocator slack"
END_OF_STEP = "end of the step"
STATE_KINDS = ("parameters", "gradients", "optimizer", "average", SECONDARY_SHARD)
#: Bytes of an NCCL communicator, documented and not measured: 16 channels of NCCL_BUFFSIZE (4 MiB), and LL128's buffers.
COMMUNICATOR_BYTES = 16 * (4 + 5) * 2**20
#: Assumed share of the tensors' bytes by which a GPU's caching allocator reserves more than it uses (expandable segments).
ALLOCATOR_SLACK = 0.02
_INT64 = 8
_SURE = 0.02  # of a GPU's memory: what is stated of communicators and slack may be off by so much


@dataclass(frozen=True)
class RankMemory:
    """The memory of one pipeline rank at its fullest moment.

    Args:
        stage: index of the pipeline rank.
        kinds: bytes on the device by kind; they sum to `peak`.
        off_device: bytes in files and host memory, by kind and place.  On a CPU, host memory is part of `kinds`.
        peak: bytes of all tensors; on GPUs, also the assumed bytes of communicators and of the allocator.
        moment: when the rank is fullest: `backward of layer 3, micro-batch 7`.
        state: bytes of model state and ZeRO's buffers after a step by kind, as the engine counts them.
        elements: number of parameters on the rank.
        kept: most bytes on the device that forward passes save for their backward passes.
        kept_off_device: most such bytes on the host or in an arena.
        again: FLOPs that recomputation adds to the rank's step, as a fraction of the step's FLOPs without it.
        name: `pipeline rank 2`, or `a rank` without a pipeline.
    """

    stage: int
    kinds: Mapping[str, int]
    off_device: Mapping[str, int]
    peak: int
    moment: str
    state: Mapping[str, int]
    elements: int = 0
    kept: int = 0
    kept_off_device: int = 0
    again: float = 0.0
    name: str = "a rank"

    def fit_text(self, capacity: int) -> str:
        """Return a sentence on whether the rank fits `capacity` bytes, how much is left, and when the rank is fullest."""
        when = f"{size_text(self.peak)} of {size_text(capacity)} on {self.name}, most in the {self.moment}"
        if self.peak > capacity:
            return f"does not fit: {when}; {size_text(self.peak - capacity)} too much"
        left = 1 - self.peak / capacity
        return f"fits: {when}" + (f"; only {left:.1%} is left, less than a plan is sure of" if left < _SURE else "")


def memory_of(run: ResolvedRun, cluster: Cluster, stages: Collection[int] | None = None) -> tuple[RankMemory, ...]:
    """Plan the memory of each pipeline rank in `stages`, or of all."""
    schedule = _filling_the_pipeline(run)
    wanted = range(schedule.pp) if stages is None else sorted(stages)
    return tuple(_Walk(run, schedule, stage, cluster).result() for stage in wanted)


def fullest_of(run: ResolvedRun, cluster: Cluster) -> RankMemory:
    """Plan the memory of the fullest pipeline rank, faster than `memory_of`.

    Only three ranks can be the fullest: the first has the most micro-batches, the second only layers, the last the head.
    """
    last = run.config.parallel.pp - 1
    return max(memory_of(run, cluster, {0, min(1, last), last}), key=lambda rank: rank.peak)


def with_decided_offload(run: ResolvedRun, cluster: Cluster) -> ResolvedRun:
    """Return the run with `zero.offload` = auto resolved to the least offloading that fits the cluster's devices.

    Unlike a real start, this does not check the free host memory, which a plan cannot know.
    """
    offload = run.config.zero.offload
    asked = [key for key in ("optimizer", "parameters") if getattr(offload, key) == "auto"]
    if not asked:
        return run

    def decided(places: dict[str, str]) -> ResolvedRun:
        zero = run.config.zero.model_copy(update={"offload": offload.model_copy(update=places)})
        words = ", ".join(f"{key} {place}" for key, place in places.items())
        note = f"zero.offload auto: {words}, by the memory of {cluster.device.name}; host memory is not looked at"
        return replace(run, config=run.config.model_copy(update={"zero": zero}), notices=(*run.notices, note))

    places = [{key: "cpu" if at < count else "none" for at, key in enumerate(asked)} for count in range(len(asked) + 1)]
    for choice in places[:-1]:
        if cluster.processors or fullest_of(decided(choice), cluster).peak <= cluster.device.memory_bytes:
            return decided(choice)  # offloading frees nothing on a CPU
    return decided(places[-1])


def _filling_the_pipeline(run: ResolvedRun) -> Schedule:
    """Return a schedule that fills the pipeline twice, or the whole schedule if memory keeps growing after that."""
    pp, schedule = run.config.parallel.pp, schedule_of(run)
    short = schedule_of(replace(run, accumulation=fewest_micro_batches(run, 2 * pp)))
    grows = any(peak_activations(short, rank) < peak_activations(schedule, rank) for rank in range(pp))
    return schedule if grows else short


#: The actions of a rank, messages included, and the sends that each arriving message confirms.
_Path: TypeAlias = tuple[Steps, Mapping[Action, Sequence[Action]]]


@lru_cache(maxsize=64)
def _paths_of(schedule: Schedule, on_cuda: bool) -> tuple[_Path, ...]:
    """Return the actions of every pipeline rank, with its messages."""
    placed, device, stages = program(schedule), "cuda" if on_cuda else "cpu", range(schedule.pp)
    return tuple((steps_of(placed, stage, device), what_messages_confirm(placed, stage)) for stage in stages)


#: Chunk, micro-batch, index of the unit in the chunk.
_Layer: TypeAlias = tuple[int, int, int]


class _Walk:
    """Walks one pipeline rank through its schedule and finds its fullest moment."""

    def __init__(self, run: ResolvedRun, schedule: Schedule, stage: int, cluster: Cluster) -> None:
        per_node, on_cuda = cluster.per_node, cluster.processors == 0
        chunks = cut_by_rank(run.config.model, run.config.parallel.layout, schedule.placement)[stage]
        first = run.grid.rank(Coordinate(0, 0, 0, stage))
        self._state = state = trace_state(run, first, per_node=per_node, on_cuda=on_cuda)
        self._schedule, self._stage, self._on_cuda = schedule, stage, on_cuda
        self._steps, self._confirmed = _paths_of(schedule, on_cuda)[stage]
        of_first = unit_trace.trace_key(run, on_cuda=on_cuda, per_node=per_node, adds=False)
        of_others = unit_trace.trace_key(run, on_cuda=on_cuda, per_node=per_node) if _adds_up(run) else of_first
        self._key = of_others
        self._left_out = run.accumulation - schedule.microbatches
        config, self._model, self._message = run.config, run.config.model, message_bytes(run)
        units = units_of(config, schedule)[stage]
        every = [unit for own in units for unit in own]
        self._layer_keys = {unit.name: unit.key for unit in every if not isinstance(unit.key, str)}
        self._in_arena = any(key.policy.contiguous for key in self._layer_keys.values())
        self._moves = {unit.name for unit in every if unit.offloads}
        self._most_moved = 0
        self._near: list[tuple[_Layer, int]] = []  # on the device, with what of it moves; the last one last
        passes = [action for action in schedule.ranks[stage] if action.op is not Op.WEIGHT]
        self._next = dict(pairwise(passes))
        # By whether a micro-batch adds its gradients to those of others, and by chunk.
        self._units = [
            [self._traces_of(chunk, own, key) for chunk, own in enumerate(units)] for key in (of_first, of_others)
        ]
        self._saved = self._messages = self._moved = self._gradients = self._most_saved = 0  # bytes beyond the state
        self._most: tuple[int, dict[str, int], str] = (-1, {}, "")
        self._tokens = _batch_bytes(run, chunks)
        tables = sum(map(self._tables_of, self._units[0]))
        self._tables = tables * (run.accumulation if config.data.document_mask else 1)
        self._base = sum(state.kinds.values()) + self._tokens + self._tables

    def _traces_of(
        self, chunk: int, units: Sequence[StageUnit], key: unit_trace.TraceKey
    ) -> list[tuple[str, UnitTrace]]:
        keys = [replace(key, cuts=self._state.cuts.get((chunk, at), ())) for at in range(len(units))]
        return [(unit.name, trace_unit(own, unit.key)) for own, unit in zip(keys, units, strict=True)]

    def _tables_of(self, units: Sequence[tuple[str, UnitTrace]]) -> int:
        """Return the bytes of a chunk's tables of rotary angles.  Layers with the same rotary positions share a table."""
        largest = dict[object, int]()
        for name, trace in units:
            positions = self._model.rope_of(self._layer_keys[name].layer) if name in self._layer_keys else name
            largest[positions] = max(largest.get(positions, 0), trace.tables)
        return sum(largest.values())

    def result(self) -> RankMemory:
        """Walk the schedule and return the fullest moment."""
        sending: dict[Action, int] = {}
        for step in self._steps:
            if isinstance(step, Action):
                self._most_saved = max(self._most_saved, self._saved)
                for sent in self._confirmed.get(step, ()):
                    self._messages -= sending.pop(sent)
                self._compute(step)
            elif step.op is Op.SEND:  # from now on only the message holds the tensor
                sending[step.carries] = self._message
                self._saved -= self._message
                self._messages += self._message
            elif step.op is Op.OPEN:
                self._messages += self._message
                self._note(0, f"receive for {step.lands}")
        self._note(self._state.end - self._gradients, END_OF_STEP)
        peak, kinds, moment = self._most
        on_device = self._in_arena or not self._on_cuda
        if on_device:  # the arena stays as large as it was at its fullest
            kinds[ACTIVATIONS] = kinds.get(ACTIVATIONS, 0) + self._most_moved
            peak += self._most_moved
        if self._on_cuda:
            kinds |= {COMMUNICATORS: self._state.communicators * COMMUNICATOR_BYTES, SLACK: int(peak * ALLOCATOR_SLACK)}
            peak = sum(kinds.values())
        counted = dict(self._state.counted)
        if self._in_arena:
            counted["activation_arena"] = counted.get("activation_arena", 0) + self._most_moved
        away = self._state.off_device
        away |= {f"{ACTIVATIONS} on host": self._most_moved} if self._most_moved and not on_device else {}
        elements = sum(map(sum, self._state.elements.values()))
        about = elements, self._most_saved, self._most_moved, self._again()
        name = "a rank" if self._schedule.pp == 1 else f"pipeline rank {self._stage}"
        return RankMemory(self._stage, kinds, away, peak, moment, counted, *about, name)

    def _again(self) -> float:
        """Return the FLOPs that recomputation adds, as a fraction of those without it."""
        own = bare = 0.0
        for name, trace in (unit for units in self._units[1] for unit in units):
            own += flops_of(trace)
            key = self._layer_keys.get(name)
            bare += flops_of(trace if key is None else trace_unit(self._key, key._replace(policy=LayerPolicy())))
        return own / bare - 1 if bare else 0.0

    def _compute(self, action: Action) -> None:
        units = list(enumerate(self._units[action.microbatch > 0][action.chunk]))
        is_forward = action.op is Op.FORWARD
        arrives = self._arrives(action)
        if arrives:  # the first unit owns the message that arrived
            self._messages -= self._message
            self._saved += self._message
        held = 0  # of the gradient that arrived, which stays until the backward ends
        for number, (name, trace) in units if is_forward else reversed(units):
            passed = trace.of(action.op)
            if passed is None:
                continue
            text = f"{unit_trace.PASS_NAMES[action.op]} of {name}, micro-batch {self._number(action)}"
            moves = name in self._moves and action.op is not Op.WEIGHT
            moved = trace.forward.net_bytes if moves else 0
            own: _Layer = action.chunk, action.microbatch, number
            if self._moves and name not in (EMBEDDING, HEAD) and action.op is not Op.WEIGHT:
                self._work_on(action, number)
            beside = sum(count for layer, count in self._near if not (is_forward and layer == own))
            levels = self._state.levels.get((action.microbatch > 0, action.chunk, number), {})
            for span in passed.spans:
                held = max(
                    held, self._message * (arrives and number == units[-1][0] and span.parameter == unit_trace.DY)
                )
                before = self._gradients
                live, made, peak = levels.get(span.parameter, (before, before, before))
                self._gradients = live  # it falls where buckets are reduced
                self._note(span.live + beside + held + peak - live, text)
                self._note(span.peak + beside + held + max(made, before) - live, text)
            self._saved += passed.net_bytes + (-moved if is_forward else moved)
            if action.op is not Op.WEIGHT:
                self._moved += (moved + trace.in_arena) * (1 if is_forward else -1)
            self._most_moved = max(self._most_moved, self._moved)
            self._near = [(layer, 0 if not is_forward and layer == own else count) for layer, count in self._near]

    def _work_on(self, action: Action, number: int) -> None:
        """Bring the activations of a layer and its neighbour to the device, as `ActivationStore` does."""
        layers = self._layers_of(action)
        near = [(action, number)]
        if action.op is Op.BACKWARD and number != layers[0]:
            near.append((action, layers[layers.index(number) - 1]))
        elif action.op is Op.BACKWARD or number == layers[-1]:  # the last layer of the backward that follows
            following = self._next.get(action)
            if following is not None and following.op is not Op.FORWARD and (last := self._layers_of(following)):
                near.append((following, last[-1]))
        for passed, at in near:
            name, trace = self._units[passed.microbatch > 0][passed.chunk][at]
            key = passed.chunk, passed.microbatch, at
            count = trace.forward.net_bytes if name in self._moves else 0
            self._near = [*(other for other in self._near if other[0] != key), (key, count)][-NEAR:]

    def _layers_of(self, action: Action) -> list[int]:
        """Return which units of a pass are layers."""
        units = self._units[action.microbatch > 0][action.chunk]
        return [number for number, (name, _) in enumerate(units) if name not in (EMBEDDING, HEAD)]

    def _number(self, action: Action) -> int:
        """Return the number of a micro-batch in the whole step; a shortened step has the first ones and the last."""
        is_last = action.microbatch == self._schedule.microbatches - 1
        return action.microbatch + self._left_out * is_last

    def _arrives(self, action: Action) -> bool:
        """Whether another pipeline rank sends what an action needs."""
        source = self._schedule.source(self._stage, action) if action.op is not Op.WEIGHT else None
        return source is not None and source[0] != self._stage

    def _note(self, beyond: int, moment: str) -> None:
        """Record a moment at which `beyond` bytes are live in addition to state, activations, gradients and messages."""
        state, gradients = self._state, self._gradients
        peak = self._base + self._saved + self._messages + gradients + beyond
        if peak > self._most[0]:
            kinds = Counter(state.kinds)
            kinds.update({"gradients": gradients, TABLES: self._tables, BATCH: self._tokens, WORKING: beyond})
            kinds.update({ACTIVATIONS: self._saved, MESSAGES: self._messages})
            self._most = peak, {kind: count for kind, count in kinds.items() if count}, moment


def _adds_up(run: ResolvedRun) -> bool:
    """Whether the gradients of several micro-batches are summed before they are reduced."""
    zero = run.config.zero
    return run.accumulation > 1 and not (zero.stage >= 2 and run.shards > 1 and zero.reduce == "micro_batch")


def _batch_bytes(run: ResolvedRun, chunks: Sequence[StageLayout]) -> int:
    """Return the bytes of a step's tokens, labels and sample ids.  Sequence shards hold tokens and labels separately."""
    config, ids = run.config, run.micro_batch_size * _INT64
    uses = [any(layout.has_embedding for layout in chunks), any(layout.has_head for layout in chunks)]
    length = config.model.seq_len
    each = sum(uses) * length // config.parallel.cp if config.has_shards else (length + 1) * any(uses)
    return run.accumulation * (each * run.micro_batch_size * _INT64 + ids)
