"""Estimates how long operators and passes take on a device, from the records of `FakeTensors`.

    product     max(FLOPs / (peak x share x waves), bytes read / bandwidth) + bytes written / bandwidth      2 m n k FLOPs
    attention   FLOPs / (peak x share)            forward 2 products, backward 5; causal: half of each
    others      bytes read and written / (bandwidth x share)

A compiled block has fewer kernels: the operators between two products form one kernel, which reads the tensors made before
it and writes the tensors used after it.  An addition to the gradients right after a product is part of that product.

    mm -> [ mul, silu, mul ] -> mm         8 tensors pass through memory, compiled 3

On a calibrated host, an operator takes its measured time plus the host time per operator.

Multiprocessors compute a product in tiles of 128 x 256, in waves, and write the results at the end of a wave; in the last
wave, some multiprocessors may have no tile.

In a pass, a collective begins where the program starts it.  The first operator that reads its result waits for it, and this
wait is its exposed time.  Collectives of one axis run one after another.  On a calibrated host nothing overlaps, because the
processor that computes also copies.

    compute  | mm dx | mm dW |      | mul ...
    tp               [ reduce-scatter ]

Source: roofline, Williams et al. 2009; tiles and waves, NVIDIA's "Matrix Multiplication Background", sections 3 and 4; FLOPs
of attention's passes, Dao 2023, section 4.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import TypeAlias

import torch

from megazero.config import ResolvedRun
from megazero.plan.calibration import OperatorTable
from megazero.plan.cluster import Cluster
from megazero.plan.collective_times import GroupLink, link_of
from megazero.plan.devices import Device
from megazero.plan.fake_tensors import Event, Message, Operator
from megazero.plan.unit_trace import PassTrace, UnitKey, UnitTrace, trace_units
from megazero.zero.sharding import DTYPE_NAMES

_ALLOCATES = ("empty", "new_empty", "detach", "alias", "scalar_tensor")
# Products, and the place of their first factor.
_PRODUCTS = (("aten.mm.", 0), ("aten.addmm.", 1), ("aten.bmm.", 0), ("aten.baddbmm.", 1), ("aten._scaled_mm.", 0))
_TAKES_ROWS = ("embedding.default", "gather.default", "index_select", "index.Tensor")
_PUTS_ROWS = ("index_put_", "scatter_", "index_add_")


@dataclass(frozen=True)
class Kernel:
    """A kernel on a device.

    Args:
        seconds: time on the device.
        reads: numbers of the storages that it reads.
    """

    seconds: float
    reads: frozenset[int]


Step: TypeAlias = "Kernel | Message"


@dataclass(frozen=True)
class ProductShape:
    """A batch of `count` matrix products [m, k] x [k, n]."""

    dtype: torch.dtype
    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of the products: a multiplication and an addition for each of count * m * n * k."""
        return 2.0 * self.count * self.m * self.n * self.k


def product_of(operator: Operator) -> ProductShape | None:
    """Return the shape of a matrix product; None for any other operator."""
    name, inputs = operator.name, operator.inputs
    if name.startswith("mkldnn._linear_pointwise"):
        x, weight = inputs[0], inputs[1]
        return ProductShape(x.dtype, prod(x.shape[:-1]), weight.shape[0], x.shape[-1])
    if name.startswith(("aten._grouped_mm.", "aten._scaled_grouped_mm.")):
        # The rows of one expert after another, or sums over the rows of each.
        a, b, of_each = inputs[0], inputs[1], operator.outputs[0].shape
        rows = a.shape[-1] // of_each[0] if len(of_each) == 3 else a.shape[-1]
        return ProductShape(a.dtype, of_each[-2], b.shape[-1], rows, prod(of_each[:-2]))
    for prefix, first in _PRODUCTS:
        if name.startswith(prefix):
            a, b = inputs[first], inputs[first + 1]
            return ProductShape(a.dtype, a.shape[-2], b.shape[-1], a.shape[-1], prod(a.shape[:-2]))
    return None


def attention_flops(operator: Operator) -> float | None:
    """Return the FLOPs of fused attention; None for any other operator."""
    if "_attention" not in operator.name:
        return None
    is_backward = "backward" in operator.name
    query, key = operator.inputs[1:3] if is_backward else operator.inputs[:2]
    batch, heads, rows, size = query.shape
    seen = rows * key.shape[-2] / (2 if operator.is_causal else 1)
    return (10.0 if is_backward else 4.0) * batch * heads * seen * size


def flops_of(trace: UnitTrace) -> float:
    """Return the FLOPs of a unit's products and attention in one micro-batch, recomputation included."""
    passes = filter(None, (trace.forward, trace.backward, trace.weight))
    operators = [event for passed in passes for event in passed.events if isinstance(event, Operator)]
    products = sum(shape.flops for operator in operators if (shape := product_of(operator)) is not None)
    return products + sum(attention_flops(operator) or 0.0 for operator in operators)


def moved_bytes(operator: Operator) -> float:
    """Return the bytes that an operator reads and writes."""
    short = operator.name.partition(".")[2]
    if short.startswith(_ALLOCATES):
        return 0.0
    written = sum(value.nbytes for value in operator.outputs)
    if short.startswith(_TAKES_ROWS):
        return 2.0 * written
    if short.startswith(_PUTS_ROWS):
        return 2.0 * operator.inputs[-1].nbytes
    return float(sum(value.nbytes for value in operator.inputs) + written)


def events_on_cuda(events: Sequence[Event]) -> list[Event]:
    """Return the events of a pass as a GPU would run it.

    A trace runs as on a CPU, where attention computes in fp32 and in tiles.  This drops the copies before and after
    attention.  Of the tiles of the same queries one remains, with the messages between them: a GPU computes and merges many
    tiles in one call.
    """
    seen = {at: event for at, event in enumerate(events) if isinstance(event, Operator) and attention_flops(event)}
    read = {value.storage for attention in seen.values() for value in attention.inputs}
    made = {value.storage for attention in seen.values() for value in attention.outputs}
    same: dict[int, int] = {}  # storage of a copy: that of what was copied
    left_out = set[int]()
    for at, event in enumerate(events):
        if isinstance(event, Operator) and event.name.startswith("aten._to_copy") and event.inputs:
            source = event.inputs[0].storage
            if event.outputs[0].storage in read or source in made:
                same[event.outputs[0].storage] = same.get(source, source)
                left_out.add(at)
    tiles: dict[tuple[bool, int], list[int]] = {}  # by direction and queries
    for at, attention in seen.items():
        is_backward = "backward" in attention.name
        query = attention.inputs[1 if is_backward else 0].storage
        tiles.setdefault((is_backward, same.get(query, query)), []).append(at)
    left_out |= {at for of_queries in tiles.values() for at in range(of_queries[0], of_queries[-1])} - seen.keys()
    found: list[Event] = []
    for at, event in enumerate(events):
        if isinstance(event, Message):
            found.append(replace(event, fills=frozenset(same.get(storage, storage) for storage in event.fills)))
        elif at not in left_out:
            inputs = tuple(value._replace(storage=same.get(value.storage, value.storage)) for value in event.inputs)
            found.append(replace(event, inputs=inputs))
    return found


def kernels_of(
    events: Sequence[Event],
    device: Device,
    later: Iterable[Event],
    *,
    is_compiled: bool,
    table: OperatorTable | None = None,
) -> Iterator[Step]:
    """Yield the kernels and messages of a pass.

    Args:
        events: operators and messages of the pass.
        device: the device on which it runs.
        later: events of later passes, which read tensors that this pass saves.
        is_compiled: torch.compile fuses the operators between two products.
        table: measured times of a calibrated host, where nothing is compiled; None for the data sheet.
    """
    if not is_compiled or table is not None:
        for event in events:
            yield event if isinstance(event, Message) else _kernel(event, device, table)
        return
    every = enumerate([*events, *later])
    last_read = {read.storage: at for at, event in every if isinstance(event, Operator) for read in event.inputs}
    chain: list[Operator] = []
    product: int | None = None  # storage of the last product's result
    for at, event in enumerate(events):
        if isinstance(event, Operator) and product_of(event) is None and attention_flops(event) is None:
            ends_sum = event.name in ("aten.add_.Tensor", "aten.copy_.default")  # of a product, to a gradient
            if not chain and product is not None and ends_sum and event.inputs[-1].storage == product:
                product = None
                continue
            chain.append(event)
            continue
        if chain:
            yield _fused(chain, device, last_read, at)
            chain = []
        yield event if isinstance(event, Message) else _kernel(event, device)
        product = event.outputs[0].storage if isinstance(event, Operator) and event.outputs else None
    if chain:
        yield _fused(chain, device, last_read, len(events))


def _fused(chain: Sequence[Operator], device: Device, last_read: dict[int, int], end: int) -> Kernel:
    moved = fused_bytes(chain, {storage for storage, at in last_read.items() if at >= end})
    reads = frozenset(value.storage for operator in chain for value in operator.inputs)
    return Kernel(moved / (device.memory_bandwidth * device.memory_share), reads)


def fused_bytes(chain: Sequence[Operator], used_later: set[int]) -> float:
    """Return the bytes that a fused chain of operators reads and writes.

    Args:
        chain: the operators of one kernel, in order.
        used_later: numbers of the storages that kernels after this one read.
    """
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    for operator in chain:
        if operator.name.partition(".")[2].startswith(_ALLOCATES):
            made.update((value.storage, 0) for value in operator.outputs)
            continue
        rows = operator.name.partition(".")[2].startswith(_TAKES_ROWS + _PUTS_ROWS)
        for value in operator.inputs:
            if value.storage not in made:
                size = min(value.nbytes, 2 * operator.outputs[0].nbytes) if rows and operator.outputs else value.nbytes
                read[value.storage] = max(read.get(value.storage, 0), size)
        for value in operator.outputs:
            made[value.storage] = max(made.get(value.storage, 0), value.nbytes)
    final = {value.storage for value in chain[-1].outputs}
    return float(sum(read.values()) + sum(size for storage, size in made.items() if storage in used_later | final))


def _kernel(operator: Operator, device: Device, table: OperatorTable | None = None) -> Kernel:
    seconds = operator_seconds(operator, device, table) + (0.0 if table is None else table.host_seconds)
    return Kernel(seconds, frozenset(value.storage for value in operator.inputs))


def operator_seconds(operator: Operator, device: Device, table: OperatorTable | None = None) -> float:
    """Return the seconds of an operator on the device: from `table` if it has them, else from the data sheet."""
    if (shape := product_of(operator)) is not None:
        return _product_seconds(shape, operator, device, table)
    bytes_per_second = device.memory_bandwidth * device.memory_share
    if (flops := attention_flops(operator)) is not None:
        if table is not None and (known := table.operator(operator.name, flops)) is not None:
            return known
        is_backward = "backward" in operator.name
        share = device.attention_backward_share if is_backward else device.attention_share
        peak = device.peak_flops["bf16"]  # fp32 runs, too: as TF32 at best
        return max(flops / (peak * share), moved_bytes(operator) / bytes_per_second)
    moved = moved_bytes(operator)
    if table is not None and moved and (known := table.operator(operator.name, moved)) is not None:
        return known
    return moved / bytes_per_second


def _product_seconds(shape: ProductShape, operator: Operator, device: Device, table: OperatorTable | None) -> float:
    dtype = "fp8" if shape.dtype == torch.float8_e4m3fn else DTYPE_NAMES.get(shape.dtype, "fp32")
    if table is not None and (known := table.product(dtype, shape.m, shape.n, shape.k)) is not None:
        return known * shape.count
    moved = float(sum(value.nbytes for value in operator.inputs))
    computing = shape.flops / (device.peak_of(dtype) * device.product_share * wave_share(shape, device))
    return max(computing, moved / (device.memory_bandwidth * device.memory_share)) + writing_seconds(
        replace(shape, dtype=operator.outputs[0].dtype), device
    )


def writing_seconds(shape: ProductShape, device: Device) -> float:
    """Return the seconds that a product takes to write its results."""
    return shape.count * shape.m * shape.n * shape.dtype.itemsize / (device.memory_bandwidth * device.memory_share)


def wave_share(shape: ProductShape, device: Device) -> float:
    """Return the fraction of multiprocessors that have a tile of 128 x 256, averaged over the waves of a product."""
    if not device.multiprocessors:
        return 1.0
    counts = [shape.count * ceil(shape.m / a) * ceil(shape.n / b) for a, b in ((128, 256), (256, 128))]
    units = device.multiprocessors
    exact = shape.count * shape.m * shape.n / (128 * 256)
    return max(exact / (units * ceil(count / units)) for count in counts)


# ---- passes


@dataclass(frozen=True)
class PassTime:
    """The seconds of a pass on one rank.

    Args:
        compute: seconds of the rank's operators.
        exposed: seconds for which the rank waits for collectives, by axis.
        hidden: seconds of collectives that overlap with computation, by axis.
    """

    compute: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    hidden: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Duration of the pass."""
        return self.compute + sum(self.exposed.values())

    def beside(self, axis: str, seconds: float) -> PassTime:
        """Add communication that overlaps with the pass.  Its time beyond the end of the pass is exposed."""
        left = max(0.0, seconds - self.seconds)
        return added([self, PassTime(0.0, {axis: left}, {axis: seconds - left})])


@dataclass(frozen=True)
class UnitTime:
    """The times of a unit's passes.  `saved_bytes`: what its forward saves for its backward."""

    forward: PassTime
    backward: PassTime
    weight: PassTime
    saved_bytes: int = 0


def added(times: Iterable[PassTime]) -> PassTime:
    """Return the sum of passes that run one after another."""
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
    """Return the times of every unit of a run.  `traces` replaces the run's own traces."""
    on_cuda = cluster.processors == 0
    traces = traces or trace_units(run, on_cuda=on_cuda, per_node=cluster.per_node)
    requested = run.config.training.compile
    is_compiled = on_cuda if requested == "auto" else bool(requested)
    return {key: _unit_time(trace, cluster, links, is_compiled=is_compiled) for key, trace in traces.items()}


def _unit_time(trace: UnitTrace, cluster: Cluster, links: Mapping[str, GroupLink], *, is_compiled: bool) -> UnitTime:
    passes = [passed for passed in (trace.forward, trace.backward, trace.weight) if passed is not None]
    times = []
    for at, passed in enumerate(passes):
        later = [event for after in passes[at + 1 :] for event in after.events]
        times.append(pass_time(passed, cluster, links, later, is_compiled=is_compiled))
    return UnitTime(times[0], times[1], times[2] if len(times) > 2 else PassTime(), trace.forward.net_bytes)


def pass_time(
    trace: PassTrace,
    cluster: Cluster,
    links: Mapping[str, GroupLink],
    later: Sequence[Event] = (),
    *,
    is_compiled: bool,
) -> PassTime:
    """Return the times of a pass.  `later`: events of the later passes of the same unit."""
    device, clock, table = cluster.device, _Clock(links), cluster.table
    events = events_on_cuda(trace.events) if table is None else trace.events
    steps = kernels_of(events, device, later, is_compiled=is_compiled, table=table)
    for step in steps:
        if isinstance(step, Message):
            clock.start(step)
        else:
            clock.run(step)
        if table is not None:  # nothing overlaps
            clock.wait()
    clock.wait()
    # The host runs ahead, but a device that is faster waits for it; a calibrated host's time is in its kernels.
    launches = clock.operators * device.launch_seconds if table is None else 0.0
    return PassTime(max(clock.compute, launches), clock.exposed, clock.hidden)


class _Clock:
    """Simulates a pass: one stream computes, and a stream for each axis communicates."""

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
        """Wait for all collectives under way."""
        self._finish(list(self._under_way))

    def _finish(self, ended: Sequence[tuple[frozenset[int], str, float, float]]) -> None:
        for collective in ended:
            _, axis, seconds, end = collective
            waited = min(max(0.0, end - self._now), seconds)
            self.exposed[axis] += waited  # type: ignore[assignment]
            self.hidden[axis] += seconds - waited  # type: ignore[assignment]
            self._now = max(self._now, end)
            self._under_way.remove(collective)
