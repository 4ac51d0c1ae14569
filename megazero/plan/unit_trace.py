"""Traces one unit of a stage in one micro-batch: the real layers, run on tensors without data.

    forward     x  -> [ operators and collectives, in order ] -> y      saved: tensors for the backward, + y - x
    backward    dy -> [ ...                                 ] -> dx     saved: - the tensors of the forward, + dx - dy
    weight            [ products, if the schedule splits    ]

A stage runs its units one after another, so the bytes saved by the passes so far add up to the rank's activations.

    between units      x and dy are freed as soon as nothing needs them, as in the middle of a stage
    not in a trace     parameters, buckets and tables, which live before the pass and after it

Traces run as on a CPU.  On CUDA, attention's kernels have other names, some read keys once for each query head, and a
product of 16-bit factors adds to fp32 gradients without a temporary.  Offloaded activations count as on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from megazero.comm.memory import Arena
from megazero.config import ResolvedRun, RunConfig
from megazero.engine.outline import schedule_of
from megazero.layers.activation_offload import ActivationStore
from megazero.layers.context_attention import ContextAttention
from megazero.layers.fp8 import EMULATED, Kernels, Scaling, emulated_groups, scaled_grouped_mm, scaled_mm, use_fp8
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear, WeightGradQueue
from megazero.layers.recompute import WHOLE
from megazero.layers.sequence_shard import SequenceShard, TokenLayout, shard_at
from megazero.layers.spec import whole_spec
from megazero.layers.token_layout import ring_ranges, work
from megazero.layers.vocabulary import BLOCK_BYTES, grad_logits_by_blocks, statistics_by_blocks
from megazero.models.activation_config import LayerPolicy, layer_policies
from megazero.models.build_context import BuildContext
from megazero.models.config import ModelConfig
from megazero.models.gpt import GPTStage
from megazero.models.stages import StageLayout, cut_by_rank
from megazero.models.wrappers import save_by_policy
from megazero.parallel_state import Axis
from megazero.parallel_state.state import Group
from megazero.plan.fake_ranks import FakeBackend, RecordedTraffic, make_fake, real_backend
from megazero.plan.fake_tensors import Event, FakeTensors, Message, Operator, kernel_bytes
from megazero.plan.simulated_world import Alone
from megazero.schedules.action import Op, Schedule
from megazero.zero.gradients import GradientReducer
from megazero.zero.sharding import DTYPES, ChunkSlot, ParamInfo, Slot, StridedBlocks

EMBEDDING, HEAD = "embedding", "head"
PASS_NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.WEIGHT: "weight gradients"}


class LayerKey(NamedTuple):
    """Identifies layers with equal traces: the activation policy, and the first layer of equal MLP, window and positions."""

    policy: LayerPolicy
    layer: int = 0


#: EMBEDDING, HEAD, or a key that all equal layers share.
UnitKey: TypeAlias = str | LayerKey
#: The parameters of a unit with gradients in several bucket chunks, by name, and the slot in each chunk.
Cuts: TypeAlias = tuple[tuple[str, tuple[ChunkSlot, ...]], ...]


DY, ADDED = "dy", "added"
_MUCH = 1 << 50  # bytes that hold nothing


class MemorySpan(NamedTuple):
    """Memory from the moment when a parameter's gradient reaches its bucket until the next gradient does.

    Args:
        parameter: its name; "" at the start, DY when the unit no longer needs dy, ADDED once the gradient is in its bucket.
        live: bytes at that moment, relative to the start of the pass.
        peak: most bytes until the next moment, relative to the start of the pass.
    """

    parameter: str
    live: int
    peak: int


@dataclass(frozen=True)
class PassTrace:
    """The trace of a forward, a backward or a weight-gradient pass of one unit on one rank, for one micro-batch.

    Args:
        events: operators and messages, in order.
        net_bytes: live bytes after the pass minus live bytes before it; negative if the pass frees more than it saves.
        spans: memory over time; the first span begins with the pass.
    """

    events: tuple[Event, ...]
    net_bytes: int = 0
    spans: tuple[MemorySpan, ...] = ()


@dataclass(frozen=True)
class UnitTrace:
    """The traces of a unit's passes.  A unit is the embedding, a layer or the head.

    Args:
        forward, backward: traces of these passes.
        weight: the weight-gradient pass; None if the backward computes the weight gradients.
        tables: bytes that the first forward allocates for good: rotary angles of the rank's tokens.
        in_arena: bytes that the forward saves in an arena until the backward; the passes do not count them.
    """

    forward: PassTrace
    backward: PassTrace
    weight: PassTrace | None
    tables: int = 0
    in_arena: int = 0

    def of(self, op: Op) -> PassTrace | None:
        """Return the trace of a pass by the operation of its action."""
        return {Op.FORWARD: self.forward, Op.BACKWARD: self.backward}.get(op, self.weight)


@dataclass(frozen=True)
class TraceKey:
    """All settings that a trace depends on."""

    model: ModelConfig
    samples: int
    ranks_of_tp: tuple[int, ...]
    ranks_of_cp: tuple[int, ...]
    ulysses: int
    sequence_parallel: bool
    documents: bool
    dtype: torch.dtype
    accumulate_dtype: torch.dtype
    reduce_dtype: torch.dtype
    splits: bool
    saves_logits: bool
    adds: bool  # gradients are added to those of other micro-batches
    holds_both_ends: bool  # the stage of the embedding has the head, and their weight may be one
    per_node: int
    on_cuda: bool
    logits_bytes: int
    ranks_of_ep: tuple[int, ...]
    cuts: Cuts = ()


def trace_units(run: ResolvedRun, *, on_cuda: bool, per_node: int = 0) -> Mapping[UnitKey, UnitTrace]:
    """Trace the embedding, the head and every distinct layer, in a micro-batch after the first.

    Args:
        on_cuda, per_node: see `trace_key`.
    """
    key = trace_key(run, on_cuda=on_cuda, per_node=per_node)
    units = (unit.key for chunks in units_of(run.config, schedule_of(run)) for own in chunks for unit in own)
    return {unit: trace_unit(key, unit) for unit in dict.fromkeys(units)}


def trace_unit(key: TraceKey, unit: UnitKey) -> UnitTrace:
    """Trace the passes of the embedding, the head, or a layer.  Results are cached."""
    if isinstance(unit, str):
        return _head(key) if unit == HEAD else _embedding(replace(key, saves_logits=False))
    return _layer(replace(key, saves_logits=False, holds_both_ends=False), *unit)


def trace_key(run: ResolvedRun, *, on_cuda: bool, per_node: int = 0, adds: bool = True) -> TraceKey:
    """Return the settings that the traces of a run's units depend on.

    Args:
        on_cuda: the run is on GPUs.
        per_node: ranks of a host; 0 if all ranks are on one host.
        adds: gradients are added to those of earlier micro-batches; False in the first micro-batch of a step.
    """
    config, schedule = run.config, schedule_of(run)
    parallel, precision, grid = config.parallel, config.precision, run.grid
    # FlexAttention saves what kernels without a cap save
    uncapped = {"attn_logit_softcapping": None} if on_cuda else {}
    return TraceKey(
        config.model.model_copy(update={"num_layers": 1} | uncapped),
        run.micro_batch_size,
        grid.group_of(0, "tp"),
        grid.group_of(0, "cp"),
        parallel.ulysses,
        parallel.sequence_parallel,
        config.data.document_mask,
        DTYPES[precision.dtype],
        DTYPES[precision.accumulate_dtype],
        DTYPES[precision.reduce_dtype],
        schedule.splits_backward,
        schedule.waiting_losses <= 1,
        adds or precision.dtype == precision.accumulate_dtype,
        parallel.pp * schedule.chunks == 1 and bool(config.model.tie_embeddings),
        per_node or run.world_size,
        on_cuda,
        config.training.logits_chunk_bytes,
        next(zip(*grid.expert_table(0), strict=True)),
    )


def message_bytes(run: ResolvedRun) -> int:
    """Return the bytes of a message between stages: the hidden states of one micro-batch on one rank."""
    config, parallel = run.config, run.config.parallel
    tokens = config.model.seq_len // parallel.cp * run.micro_batch_size
    cuts = parallel.tp if parallel.sequence_parallel else 1
    return tokens // cuts * config.model.hidden_size * DTYPES[config.precision.dtype].itemsize


def slot_of(shape: tuple[int, ...], start: int = 0) -> Slot:
    """Return a slot for a parameter of this shape; all parameters of a shape get equal slots."""
    return Slot(ParamInfo("", shape, whole_spec("", shape), 0), start)


def order_of_gradients(traces: Iterable[UnitTrace]) -> tuple[tuple[str, bool], ...]:
    """Return the parameters in the order of their gradients, each with whether a weight-gradient pass computes it."""
    passes = ((trace, passed) for trace in traces for passed in (trace.backward, trace.weight) if passed)
    names = ((span.parameter, passed is trace.weight) for trace, passed in passes for span in passed.spans)
    return tuple(dict.fromkeys(name for name in names if name[0] not in ("", DY, ADDED)))


class StageUnit(NamedTuple):
    """A unit of a stage ("embedding", "head" or "layer 3") and the key of its trace, which has nothing offloaded."""

    name: str
    key: UnitKey
    offloads: bool = False  # its activations go to the host


def units_of(config: RunConfig, schedule: Schedule) -> list[list[list[StageUnit]]]:
    """Return the units by pipeline rank and chunk, in order."""
    cuts = config.parallel.tp > 1 and not config.parallel.sequence_parallel
    model, found = config.model, list[list[list[StageUnit]]]()
    fp8 = config.precision.fp8_of_layers(model.num_layers)
    dense = model.first_dense_layers
    traits = [(at < dense, model.window_of(at), model.rope_of(at)) for at in range(model.num_layers)]
    for rank, chunks in enumerate(cut_by_rank(model, config.parallel.layout, schedule.placement)):
        layers = [layer for layout in chunks for layer in layout.layers]
        policies = layer_policies(config.activations, layers, rank, cuts=cuts, fp8=fp8)
        found.append([])
        for layout in chunks:
            units = []
            for layer in layout.layers:
                key = LayerKey(replace(policies[layer], offload=False), traits.index(traits[layer]))
                units.append(StageUnit(f"layer {layer}", key, policies[layer].offload))
            first = [StageUnit(EMBEDDING, EMBEDDING)] if layout.has_embedding else []
            last = [StageUnit(HEAD, HEAD)] if layout.has_head else []
            found[-1].append([*first, *units, *last])
    return found


@lru_cache(maxsize=512)
def _layer(key: TraceKey, policy: LayerPolicy, layer: int) -> UnitTrace:
    with _Bench(key, StageLayout(range(layer, layer + 1), has_embedding=False, has_head=False)) as bench:
        block = bench.stage.blocks[0]
        store = ActivationStore(torch.device("cpu"), bench.arena) if policy.contiguous else None
        if policy.fp8 is not None:
            bench.multiply_in_fp8(block, policy.fp8)
        save_by_policy([(block, policy)], WHOLE if key.sequence_parallel else bench.tp, store)
        if store is not None:
            store.stay(block.parameters())
        return bench.trace(block, lambda x: block(x, bench.layout), bench.hidden)


@lru_cache(maxsize=256)
def _embedding(key: TraceKey) -> UnitTrace:
    with _Bench(key, StageLayout(range(0), has_embedding=True, has_head=key.holds_both_ends)) as bench:
        embedding = bench.stage.embedding
        assert embedding is not None
        of_embedding = bench.trace(embedding, lambda _: embedding(bench.tokens, bench.layout), None)
        tied = embedding.tokens.weight.nbytes if key.holds_both_ends else 0
    passed = of_embedding.backward
    at = [span.parameter for span in passed.spans].index("tokens.weight")  # autograd has added the head's part by then
    summed = [span._replace(live=span.live - tied, peak=span.peak - tied) for span in passed.spans[at:]]
    backward = replace(passed, net_bytes=passed.net_bytes - tied, spans=(*passed.spans[:at], *summed))
    return replace(of_embedding, backward=backward)


@lru_cache(maxsize=256)
def _head(key: TraceKey) -> UnitTrace:
    with _Bench(key, StageLayout(range(0), has_embedding=key.holds_both_ends, has_head=True)) as bench:
        head = bench.stage.head
        assert head is not None
        head.output.saves_logits = key.saves_logits
        if key.on_cuda:
            head.output.statistics_of = partial(statistics_by_blocks, nbytes=BLOCK_BYTES)
            head.output.grad_logits_of = partial(grad_logits_by_blocks, nbytes=BLOCK_BYTES)
        bench.gradients.holds = key.holds_both_ends
        return bench.trace(head, lambda x: head(x, bench.tokens), bench.hidden)


class _Bench:
    """Runs a unit of a stage on tensors that hold no data and with collectives that send nothing."""

    def __init__(self, key: TraceKey, layout: StageLayout) -> None:
        self._key, self._layout = key, layout
        self._window = key.model.window_of(layout.layers.start)
        self._has_kernels = key.on_cuda and key.dtype == torch.bfloat16
        self._fake = FakeTensors(
            records=True, kernel_bytes=kernel_bytes(on_cuda=key.on_cuda), groups_products=self._has_kernels
        )
        self._queue = WeightGradQueue()
        self.arena = Arena(torch.device("cpu"))

    def __enter__(self) -> _Bench:
        key, cpu = self._key, torch.device("cpu")
        shard = self._shard()  # made of real tensors: they are cached
        self._fake.__enter__()
        self.arena.reserve(_MUCH)
        traffic = RecordedTraffic(self._fake.operators)
        of_cp = [key.ranks_of_cp[: key.ulysses], key.ranks_of_cp[:: key.ulysses]]
        self.tp = self._axis("tp", key.ranks_of_tp, traffic)
        ulysses, ring = (self._axis("cp", ranks, traffic) for ranks in of_cp)  # as a run's state names both
        ring = replace(ring, index=self._busiest)
        attends = None
        if shard is not None:
            attends = ContextAttention((ulysses, ring), key.model.sliding_window, key.reduce_dtype, on_cuda=key.on_cuda)
        of_all = key.model, self.tp, key.sequence_parallel, 0, cpu, self._queue, key.dtype, attends, key.logits_bytes
        context = BuildContext(*of_all, ep=self._axis("ep", key.ranks_of_ep, traffic))
        with torch.device("meta"):
            self.stage = GPTStage(context, self._layout)
        self.gradients = self._queue.accumulator = _Gradients(self._queue, self.stage, key, self._fake)
        tokens = key.model.seq_len // len(key.ranks_of_cp)
        self.tokens = torch.zeros(tokens, key.samples, dtype=torch.int64)
        self.layout = TokenLayout(torch.zeros(key.samples, dtype=torch.int64), shard)
        own = tokens // self.tp.size if key.sequence_parallel else tokens
        self.hidden = (own, key.samples, key.model.hidden_size)
        return self

    def __exit__(self, *error: object) -> None:
        self._fake.__exit__(*error)

    def _axis(self, name: str, ranks: tuple[int, ...], traffic: RecordedTraffic) -> Axis:
        """Return the axis of the first of these ranks."""
        if len(ranks) == 1:
            return Axis(name, ranks, traffic=traffic)
        per_node = self._key.per_node
        group = Group(None, torch.device("cpu"), 0.0, False, per_node, ())
        backend, hosts = real_backend(ranks, 0, per_node, on_cuda=self._key.on_cuda)
        make_fake(group, FakeBackend(backend, hosts, Alone(), self._fills))
        return Axis(name, ranks, 0, group, traffic)

    def _fills(self, result: Tensor) -> None:
        """Record that the last counted operation writes this tensor."""
        operators = self._fake.operators
        at, started = next((at, event) for at, event in reversed([*enumerate(operators)]) if isinstance(event, Message))
        operators[at] = replace(started, fills=frozenset({self._fake.number(result)}))

    @property
    def _busiest(self) -> int:
        """Return the index of the ring's busiest rank: with a window, ranks have unequal work."""
        key = self._key
        ring = len(key.ranks_of_cp) // key.ulysses
        pairs = [work(ranges, self._window) for ranges in ring_ranges((key.model.seq_len,), ring)]
        return pairs.index(max(pairs))

    def _shard(self) -> SequenceShard | None:
        key, window = self._key, self._window or self._key.model.seq_len
        in_kernel = key.on_cuda and key.dtype != torch.float32 and window < key.model.seq_len  # as KernelWindow
        if len(key.ranks_of_cp) == 1 and not key.documents and not in_kernel:
            return None
        sizes = key.ulysses, 0, len(key.ranks_of_cp) // key.ulysses, self._busiest
        count = key.samples if key.documents else 1  # documents give each sample its positions
        each = [(key.model.seq_len,)] * count
        return replace(shard_at(each, *sizes, torch.device("cpu")), fits_any=not key.documents)

    def multiply_in_fp8(self, block: nn.Module, scaling: Scaling) -> None:
        """Let a block multiply in fp8.  On CUDA, each rounding is one kernel without temporaries."""
        groups = scaled_grouped_mm if scaling == "rowwise" else emulated_groups
        use_fp8(block, scaling, Kernels(scaled_mm, groups) if self._has_kernels else EMULATED)
        for module in block.modules() if self._key.on_cuda else ():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.product.compile(self._one_kernel)

    def _one_kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that allocates the results of `function` and is recorded as one operator."""

        def run(x: Tensor, *more: Any) -> Any:
            given = [value for value in (x, *more) if isinstance(value, Tensor)]
            shapes = function(*(value.to("meta") if isinstance(value, Tensor) else value for value in (x, *more)))
            made = tree_map(lambda like: torch.empty_strided(like.shape, like.stride(), dtype=like.dtype), shapes)
            value = self._fake.value
            operator = Operator("fp8.round", tuple(map(value, given)), tuple(map(value, tree_leaves(made))))
            self._fake.operators.append(operator)
            return made

        return run

    def trace(
        self, unit: nn.Module, run: Callable[[Tensor | None], Tensor], shape: tuple[int, ...] | None
    ) -> UnitTrace:
        """Run the passes of a unit and return their traces.

        Args:
            unit: the module.
            run: runs its forward on an input.
            shape: shape of the input; None if the unit reads tokens.
        """
        self.gradients.names = {id(parameter): name for name, parameter in unit.named_parameters()}
        before = self._fake.live
        with torch.no_grad():
            run(None if shape is None else torch.empty(shape, dtype=self._key.dtype))
        tables = self._fake.live - before
        return replace(self._passes(run, shape), tables=tables)

    def _passes(self, run: Callable[[Tensor | None], Tensor], shape: tuple[int, ...] | None) -> UnitTrace:
        fake, queue, key = self._fake, self._queue, self._key
        self.gradients.marks = marks = _Marks(fake)
        x = None if shape is None else torch.empty(shape, dtype=key.dtype) + torch.empty((), requires_grad=True)
        if x is not None:
            x.register_hook(marks.end_backward)
        marks.begin()
        y = run(x)
        del x
        forward, in_arena = marks.end(), self.arena.nbytes_in_use
        loss = _Output.apply(y, marks)
        del y
        queue.defers = key.splits
        queue.begin_pass()
        loss.backward()
        backward = marks.backward or marks.end()
        if not key.splits:
            return UnitTrace(forward, backward, None, in_arena=in_arena)
        marks.begin()
        queue.run_oldest()
        return UnitTrace(forward, backward, marks.end(), in_arena=in_arena)


class _Marks:
    """Measures the memory of a pass."""

    def __init__(self, fake: FakeTensors) -> None:
        self._fake, self._start = fake, 0
        self._spans: list[MemorySpan] = []
        self.backward: PassTrace | None = None
        self._dy = 0  # its storage
        fake.on_free = lambda number: self.arrive(DY) if number == self._dy else None

    def begin(self, dy: Tensor | None = None) -> None:
        """Start to measure a pass."""
        self._dy = 0 if dy is None else self._fake.value(dy).storage
        self._fake.operators.clear()
        self._start, self._spans = self._fake.live, []
        self.arrive("")

    def arrive(self, parameter: str) -> None:
        """End the current span, because a parameter's gradient has reached its bucket, and begin the next."""
        self._end_span()
        self._fake.peak = self._fake.live
        self._spans.append(MemorySpan(parameter, self._fake.live - self._start, 0))

    def _end_span(self) -> None:
        self._spans[-1:] = [span._replace(peak=self._fake.peak - self._start) for span in self._spans[-1:]]

    def end(self) -> PassTrace:
        """End the pass and return its trace."""
        self._end_span()
        return PassTrace(tuple(self._fake.operators), self._fake.live - self._start, tuple(self._spans))

    def end_backward(self, gradient: Tensor) -> None:
        """End the backward with the gradient of the unit's input."""
        gradient.contiguous()  # the next rank receives into contiguous memory
        self.backward = self.end()


class _Output(torch.autograd.Function):
    """Makes a scalar of y, and allocates dy in its backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, marks: _Marks) -> Tensor:
        ctx.like, ctx.marks = torch.empty_like(y, device="meta"), marks
        return torch.zeros((), dtype=y.dtype)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        gradient = torch.empty_like(ctx.like, device="cpu")
        ctx.marks.begin(gradient)
        return gradient, None


class _Gradients(GradientReducer):
    """Makes the parameters, and adds their gradients to buckets that are never reduced."""

    def __init__(self, queue: WeightGradQueue, stage: nn.Module, key: TraceKey, fake: FakeTensors) -> None:
        self._queue, self._sums, self._cuts, self._fake = queue, dict[int, Tensor](), dict(key.cuts), fake
        self.names, self.marks = dict[int, str](), _Marks(fake)
        self.holds = False  # the head's gradient of a tied weight waits in autograd for the embedding's
        self._held: Tensor | None = None
        self._adds, self._adds_wide = key.adds, key.on_cuda and key.accumulate_dtype == torch.float32 != key.dtype
        made: dict[int, nn.Parameter] = {}
        for module in stage.modules():
            for name, old in module._parameters.items():
                if old is None:
                    continue
                new = made.setdefault(id(old), nn.Parameter(torch.empty(old.shape, dtype=key.dtype)))
                module._parameters[name] = new
        for new in made.values():
            self._sums[id(new)] = torch.empty(new.numel(), dtype=key.accumulate_dtype)
            new.register_post_accumulate_grad_hook(self.take)

    def take(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if self.holds and parameter.dim() > 1:
            self._held = gradient
            return
        if gradient is None:  # a layer has added it without autograd
            return
        if self._queue.defers and parameter.dim() == 1:
            self._queue.defer(parameter, gradient)
        else:
            self.add(parameter, gradient)

    def add_products(self, weight: Tensor, factors: Iterable[tuple[Tensor, Tensor]]) -> None:
        if not self._adds_wide:
            super().add_products(weight, factors)
            return
        self.marks.arrive(self.names[id(weight)])
        value, total = self._fake.value, self._sums[id(weight)].view(weight.shape)
        for a, b in factors:  # a kernel that the CPU does not have
            inputs = value(total), value(a.t()), value(b)
            self._fake.operators.append(Operator("aten.addmm.dtype_out", inputs, inputs[:1]))
        self._launch(weight)

    def _open(self, weight: Tensor, *, launches: bool = True) -> Iterator[tuple[ChunkSlot, Tensor, bool]]:
        name, total = self.names[id(weight)], self._sums[id(weight)]
        self.marks.arrive(name)
        slot = slot_of(tuple(weight.shape))
        uncut = ChunkSlot(slot, (StridedBlocks(0, slot.stop),), 0, slot.interval, slot.stop)
        for chunk_slot in self._cuts.get(name, (uncut,)):
            yield chunk_slot, total[: chunk_slot.stop - chunk_slot.start], not self._adds
        if launches:
            self._launch(weight)

    def _launch(self, weight: Tensor) -> None:  # noqa: ARG002
        """Send nothing to other ranks."""
        self.marks.arrive(ADDED)
