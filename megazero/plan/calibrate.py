"""Measuring this machine for plans: operators as the project's own steps call them, then collectives.

    sizes        a layer, the ends and the optimizer of small Llamas and GPT-2s, whole and cut as tp cuts them
    alone        one process: every operator of a step is timed, then the step: the rest is the host's, per operator
    crowded      the same on every processor at once
    collectives  of 2, 4 and 8 ranks, and how long these wait for the last of them
    steps        of runs beside their plans: what is left stretches every operator

Every measurement runs in forked processes of one thread each, since ranks on a CPU have one.  Minutes; `quick`: seconds.
"""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megazero.config import ResolvedRun
from megazero.plan.activations import elements_in, stages_of
from megazero.plan.calibrate_collectives import collective_samples, mean_of
from megazero.plan.calibrate_steps import step_stretch
from megazero.plan.calibration import Calibration, OperatorTable, Product, Samples, with_itself
from megazero.plan.devices import Device, Link
from megazero.plan.fake_tensors import Operator, Value
from megazero.plan.operator_times import attention_flops, moved_bytes, product_of
from megazero.plan.processes import in_processes
from megazero.plan.speed_probe import LR, SpeedProbe, small_run, started, step_seconds
from megazero.zero.bucket import DTYPE_NAMES

_STEPS = 5
_OPTIMIZER = ("aten._fused_adamw_", "aten.linalg_vector_norm", "aten._foreach")


@dataclass
class _Record:
    """Times by what was done, in units of the probe's at that moment; and the probe's seconds."""

    products: dict[tuple[str, int, int, int], list[float]] = field(default_factory=partial(defaultdict, list))
    operators: dict[tuple[str, float], list[float]] = field(default_factory=partial(defaultdict, list))
    optimizer: list[tuple[float, float]] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)

    def add(self, other: _Record) -> _Record:
        """This one, with the times of another process."""
        for own, others in ((self.products, other.products), (self.operators, other.operators)):
            for key, times in others.items():
                own[key] += times  # type: ignore[index]
        for name in ("optimizer", "host", "probes"):
            getattr(self, name).extend(getattr(other, name))
        return self


class _Timed(TorchDispatchMode):
    """Times every operator that is no view."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        super().__init__()
        self._synchronize = synchronize
        self.found: list[tuple[Operator, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._synchronize()
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._synchronize()
        seconds = time.perf_counter() - begin
        if not func.is_view:
            inputs, outputs = (tuple(_values(one)) for one in ((args, kwargs), result))
            causal = "attention" in str(func) and any(one is True for one in tree_iter((args, kwargs)))
            self.found.append((Operator(str(func), inputs, outputs, causal), seconds))
        return result


def _values(found: Any) -> Iterator[Value]:
    return (Value(0, tuple(one.shape), one.dtype) for one in tree_iter(found) if isinstance(one, torch.Tensor))


def sizes(*, quick: bool) -> list[ResolvedRun]:
    """Runs of one rank, whose layers are those of ranks that share a model, too."""
    hidden, cuts, tokens = ((256,), (1, 2), (128, 512)) if quick else ((128, 256, 512), (1, 2, 4), (64, 128, 256, 512))
    found = []
    for family, width, cut, count in product(("llama", "gpt2"), hidden, cuts, tokens):
        if family == "gpt2" and (cut > 1 or width > 256):
            continue
        found.append(small_run(family, width, cut, count))
    return found


def _measured(_: int, runs: list[ResolvedRun]) -> _Record:
    """Times of the operators of these runs' steps, while the other processes run theirs."""
    record, device = _Record(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    synchronize = torch.cuda.synchronize if device.type == "cuda" else _nothing
    probe = SpeedProbe(device, synchronize)
    for run in runs:
        engine, batches = started(run, device)
        dist.barrier()
        before = probe.seconds()
        whole = median(step_seconds(engine, batches, synchronize) for _ in range(_STEPS))
        between = probe.seconds()
        timed: list[list[tuple[Operator, float]]] = []
        for _ in range(_STEPS):
            with _Timed(synchronize) as mode:
                engine.train_step(batches, LR)
            timed.append(mode.found)
        after = probe.seconds()
        record.probes += [before, between, after]
        _keep(record, run, timed, whole, ((before + between) / 2, (between + after) / 2))
        del engine
        gc.collect()
    return record


def _nothing() -> None:
    """A CPU has done what was called."""


def _keep(
    record: _Record,
    run: ResolvedRun,
    timed: list[list[tuple[Operator, float]]],
    whole: float,
    probes: tuple[float, float],
) -> None:
    """Medians over the steps, operator by operator; all steps call the same.

    Args:
        probes: the probe's seconds beside the whole steps, and beside those whose operators were timed.
    """
    medians = [(same[0][0], median(seconds for _, seconds in same) / probes[1]) for same in zip(*timed, strict=True)]
    whole /= probes[0]
    own, stepped, count = 0.0, 0.0, 0
    for operator, seconds in medians:
        own, count = own + seconds, count + 1
        if operator.name.startswith(_OPTIMIZER):
            stepped += seconds
        elif (shape := product_of(operator)) is not None:
            key = (DTYPE_NAMES.get(shape.dtype, "fp32"), shape.m, shape.n, shape.k)
            record.products[key].append(seconds / shape.count)
        else:
            size = attention_flops(operator) or moved_bytes(operator)
            record.operators[operator.name, size].append(seconds)
    elements = sum(map(elements_in, stages_of(run.config)))
    record.optimizer.append((float(elements), stepped))
    record.host.append(max(0.0, whole - own) / count)


def _table(record: _Record) -> OperatorTable:
    """In seconds, at the speed of the median probe."""
    by_name: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (name, size), times in record.operators.items():
        if size:
            by_name[name].append((size, median(times)))
    by_name["optimizer"] = record.optimizer
    products = tuple(Product(*key, median(times)) for key, times in sorted(record.products.items()))
    relative = OperatorTable(products, {name: _samples(found) for name, found in by_name.items()}, median(record.host))
    return relative.scaled(median(record.probes))


def _samples(found: list[tuple[float, float]]) -> Samples:
    """By size; several of one size are their median."""
    by_size: dict[float, list[float]] = defaultdict(list)
    for size, seconds in found:
        by_size[size].append(seconds)
    return tuple(sorted((size, median(seconds)) for size, seconds in by_size.items()))


def calibrate(*, quick: bool = False, say: Callable[[str], None] = print) -> Calibration:
    """Measure this machine: its one GPU if it has one, else its processors."""
    on_gpu, begin = torch.cuda.is_available(), time.perf_counter()
    processors = 0 if on_gpu else len(os.sched_getaffinity(0))
    runs = sizes(quick=quick)
    say(f"{len(runs)} small models in one process")
    (record,) = in_processes(1, _measured, runs)
    alone, probes = _table(record), [median(record.probes)]
    crowded, collectives = alone, dict[str, Samples]()
    if processors > 1:
        say(f"the same in {processors} processes")
        record = reduce(_Record.add, in_processes(processors, _measured, runs))
        crowded = _table(record)
        probes.append(median(record.probes))
    if processors:
        for ranks in (2, 4) if quick else (2, 4, 8):
            say(f"collectives of {ranks} ranks")
            collectives |= mean_of(in_processes(ranks, collective_samples, 0, 3 if quick else 12))
    device, within = _device(alone, on_gpu=on_gpu), _link_of(collectives)
    conditions = f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    device, both = replace(device, link=within), (probes[0], probes[-1])
    bare = with_itself(Calibration(device, processors, within, alone, crowded, collectives, both, conditions))
    say("steps of runs beside their plans")
    stretch = step_stretch(bare, torch.cuda.synchronize if on_gpu else _nothing, 1 if quick else 3)
    say(f"{stretch:.3f} times as long as planned; {time.perf_counter() - begin:.0f} s")
    return with_itself(replace(bare, alone=alone.scaled(stretch), crowded=crowded.scaled(stretch)))


def _device(table: OperatorTable, *, on_gpu: bool) -> Device:
    """What was measured as a device: the fastest product, and the fastest copy."""
    fastest: dict[str, float] = {}
    for one in table.products:
        fastest[one.dtype] = max(fastest.get(one.dtype, 0.0), 2.0 * one.m * one.n * one.k / one.seconds)
    peaks = {dtype: fastest.get(dtype, max(fastest.values())) for dtype in ("bf16", "fp16", "fp32")}
    copies = [size / seconds for name in table.operators if "add" in name for size, seconds in table.operators[name]]
    name, memory = "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        name, memory = properties.name, properties.total_memory
    return Device(name, memory, peaks, max(copies, default=1e10), max(copies, default=1e10), Link("none", 1e10, 1e-5))


def _link_of(collectives: Mapping[str, Samples]) -> Link:
    """Messages between two ranks as a link."""
    samples = collectives.get("send_recv 2")
    if not samples:
        return Link("one device", 1e10, 1e-5)
    (_, first), (size, last) = samples[0], samples[-1]
    return Link("this machine", size / last, first)
