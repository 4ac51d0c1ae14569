"""Measures this machine for plans: the operators that real training steps call, then collectives.

    sizes        small Llamas and GPT-2s: layers, embedding, head, optimizer; whole and split as tp splits them
    operators    in one process: time every operator of a step, then the step; the difference is host time per operator
    collectives  over 2, 4 and 8 ranks
    steps        whole runs on all processors, compared with their plans; the ratio scales the time of every operator

Every measurement runs in forked processes of one thread each, because CPU ranks have one thread.  It takes some minutes, or
one with `quick`.

For a GPU, the plan uses its data sheet and the shares of the peaks that the operators of large Llamas reached:

    [4096, 4096] x [4096, 11008]     FLOPs / (seconds - writing) of full waves / peak     product_share
    attention of 4,096 tokens        FLOPs / seconds / peak                               attention_share, backward
    add, mul, copy                   bytes / seconds / bandwidth                          memory_share
    the step of a small model        the host's seconds for an operator                   launch_seconds

Without a data sheet, the fastest product and the fastest copy are taken as the peaks (for fp32, too), and PCIe as the link.
The host runs ahead of the GPU, so a whole step gives an upper bound of the host's time per operator: the smallest bound of
all steps is used.
"""

import gc
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any_only, tree_iter

from megazero.config import ResolvedRun, RunConfig, resolve
from megazero.engine.outline import elements_in, stages_of
from megazero.parallel_state import Links, ParallelState, RankGrid
from megazero.plan.calibration import Calibration, MeasuredProduct, OperatorTable, Samples
from megazero.plan.cluster import Cluster
from megazero.plan.devices import LINKS, Device, Link, device_of
from megazero.plan.fake_tensors import Operator, Value
from megazero.plan.operator_times import (
    ProductShape,
    attention_flops,
    moved_bytes,
    product_of,
    wave_share,
    writing_seconds,
)
from megazero.plan.processes import in_processes
from megazero.plan.speed_probe import LR, ON_GPU, OneRankState, SpeedProbe, small_run, started, step_seconds
from megazero.plan.step_time import step_time_of
from megazero.zero.sharding import DTYPE_NAMES

_STEPS = 5
_MODEL = {"family": "llama", "hidden_size": 256, "num_layers": 6, "num_heads": 4, "vocab_size": 512, "seq_len": 128}
_IN_A_ROW, _MOST_RANKS = 3, 8  # of whole steps
_OPTIMIZER = ("aten._fused_adamw_", "aten.linalg_vector_norm", "aten._foreach")


#: Measured times under ("product", dtype, m, n, k), ("operator", name, size), ("optimizer", elements) and ("host",), in
#: units of the probe's time at that moment; and the probe's seconds under ("probe",).
Record: TypeAlias = dict[tuple[Any, ...], list[float]]


class _Timed(TorchDispatchMode):
    """Times every operator on a device, except views."""

    def __init__(self, device: torch.device, synchronize: Callable[[], None]) -> None:
        super().__init__()
        self._device_type, self._synchronize = device.type, synchronize
        self.found: list[tuple[Operator, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._synchronize()
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._synchronize()
        seconds = time.perf_counter() - begin
        here = tree_any_only(torch.Tensor, lambda value: value.device.type == self._device_type, (args, kwargs, result))
        if here and not func.is_view:
            inputs, outputs = (tuple(_values(values)) for values in ((args, kwargs), result))
            causal = "attention" in str(func) and any(value is True for value in tree_iter((args, kwargs)))
            self.found.append((Operator(str(func), inputs, outputs, causal), seconds))
        return result


def _values(found: Any) -> Iterator[Value]:
    return (Value(0, tuple(x.shape), x.dtype) for x in tree_iter(found) if isinstance(x, torch.Tensor))


def sizes(*, quick: bool = False, on_gpu: bool = False) -> list[ResolvedRun]:
    """Return one-rank runs whose layers are as large as those of tensor-parallel ranks.

    Args:
        quick: return fewer runs.
        on_gpu: return runs large enough for a GPU; the first one is bound by the host.
    """
    if on_gpu:
        every = product((2048,) if quick else (2048, 4096), (1,) if quick else (1, 4), (2048, 4096))
        return [small_run("llama", *shape, **ON_GPU) for shape in ((256, 1, 128), *every)]
    hidden, cuts, tokens = ((256,), (1, 2), (128, 512)) if quick else ((128, 256, 512), (1, 2, 4), (64, 128, 256, 512))
    return [
        small_run(family, width, cut, count)
        for family, width, cut, count in product(("llama", "gpt2"), hidden, cuts, tokens)
        if family == "llama" or (width <= 256 and cut == 1)
    ]


def _measured(_: int, runs: list[ResolvedRun], device: torch.device) -> Record:
    """Time every operator in the steps of these runs."""
    record: Record = defaultdict(list)
    on_gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    probe = SpeedProbe(device, synchronize)
    for run in runs:
        engine, batches = started(run, OneRankState(RankGrid(), links=Links(device)))
        before = probe.seconds()
        whole = median(step_seconds(engine, batches, synchronize) for _ in range(_STEPS))
        between = probe.seconds()
        timed: list[list[tuple[Operator, float]]] = []
        for _ in range(_STEPS):
            with _Timed(device, synchronize) as mode:
                engine.train_step(batches, LR)
            timed.append(mode.found)
        after = probe.seconds()
        record["probe",] += [before, between, after]
        unit = (between + after) / 2
        medians = [(operator, seconds / unit) for operator, seconds in medians_of(timed)]
        note_step(record, run, medians, whole / ((before + between) / 2), on_gpu=on_gpu)
        del engine
        gc.collect()
    return record


def medians_of(steps: list[list[tuple[Operator, float]]]) -> list[tuple[Operator, float]]:
    """Return the median seconds of each operator call that all steps have in common; on a GPU a few steps have others."""
    found: dict[tuple[Operator, int], list[float]] = defaultdict(list)
    for step in steps:
        calls = Counter[Operator]()
        for operator, seconds in step:
            calls[operator] += 1
            found[operator, calls[operator]].append(seconds)
    return [(operator, median(times)) for (operator, _), times in found.items() if len(times) == len(steps)]


def note_step(
    record: Record, run: ResolvedRun, medians: list[tuple[Operator, float]], whole: float, *, on_gpu: bool
) -> None:
    """Add a step's operator times to the record, and the remaining time of the step as host time.

    Args:
        medians: time of each operator call, in units of the probe.
        whole: time of the whole step, in the same units.
    """
    count, stepped = len(medians), 0.0
    if on_gpu:  # every timing contains one launch and one wait; the shortest consists of nothing else
        least = min(seconds for operator, seconds in medians if moved_bytes(operator))
        medians = [(operator, seconds - least) for operator, seconds in medians if seconds > least]
    for operator, seconds in medians:
        if operator.name.startswith(_OPTIMIZER):
            stepped += seconds
        elif (shape := product_of(operator)) is not None:
            key = ("product", DTYPE_NAMES.get(shape.dtype, "fp32"), shape.m, shape.n, shape.k)
            record[key].append(seconds / shape.count)
        else:
            record["operator", operator.name, attention_flops(operator) or moved_bytes(operator)].append(seconds)
    record["optimizer", float(sum(map(elements_in, stages_of(run.config))))].append(stepped)
    own = 0.0 if on_gpu else sum(seconds for _, seconds in medians)  # a GPU computes while the host goes on
    record["host",].append(max(0.0, whole - own) / count)


def _probed(_: int) -> float:
    """Return the seconds of the probe while all other processes run theirs, too."""
    probe = SpeedProbe(torch.device("cpu"))
    dist.barrier()
    return probe.seconds()


def table_of(times: Record, *, on_gpu: bool) -> OperatorTable:
    """Return the operator times of a record in seconds, at the median speed of the probe."""
    samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for measured, *about in times:
        if (measured == "operator" and about[1]) or measured == "optimizer":
            name = about[0] if measured == "operator" else measured
            samples[name].append((about[-1], median(times[measured, *about])))
    keys = sorted(key[1:] for key in times if key[0] == "product")
    products = tuple(
        MeasuredProduct(dtype, m, n, k, median(times["product", dtype, m, n, k])) for dtype, m, n, k in keys
    )
    host = (min if on_gpu else median)(times["host",])
    operators = {name: tuple(sorted(found)) for name, found in samples.items()}
    return OperatorTable(products, operators, host).scaled(median(times["probe",]))


def calibrate(*, quick: bool = False, report: Callable[[str], None] = print) -> Calibration:
    """Measure this machine: its first GPU if it has one, else its processors.  `report` prints a line of progress."""
    begin = time.perf_counter()
    (gpu,) = in_processes(1, gpu_here)  # in a child: once this process has used CUDA, its forks cannot
    runs, place = sizes(quick=quick, on_gpu=gpu is not None), torch.device("cpu" if gpu is None else "cuda")
    report(f"{len(runs)} models in one process")
    (record,) = in_processes(1, _measured, runs, place)
    table, probe = table_of(record, on_gpu=gpu is not None), median(record["probe",])
    if gpu is not None:
        if not gpu.peak_flops:
            report(
                f"{gpu.name} has no data sheet here: its peaks are the fastest operators, and its link is assumed to be PCIe"
            )
        device = fitted(gpu, table)
        report(", ".join(f"{name} {value:.3f}" for name, value in vars(device).items() if name.endswith("_share")))
        return Calibration(device, 0, device.link, table, {}, (probe, probe))
    from megazero.cpu.calibration import collective_samples  # a GPU is measured without the annex `cpu`

    processors, collectives = len(os.sched_getaffinity(0)), dict[str, Samples]()
    for ranks in (2, 4) if quick else (2, 4, 8):
        report(f"collectives of {ranks} ranks")
        collectives |= in_processes(ranks, collective_samples, 3 if quick else 12)[0]
    (_, first), *_, (size, last) = collectives["send_recv 2"]
    within, probes = Link("this machine", size / last, first), (probe, median(in_processes(processors, _probed)))
    device = _device(table, within)
    bare = Calibration(device, processors, within, table, collectives, probes)
    report("steps of runs, compared with their plans")
    stretch = step_stretch(bare, 1 if quick else 3)
    report(f"{stretch:.3f} times as long as planned; {time.perf_counter() - begin:.0f} s")
    return replace(bare, table=table.scaled(stretch))


def _device(table: OperatorTable, link: Link) -> Device:
    """Describe a host as a device, by its fastest fp32 product and its fastest copy."""
    fastest = max(2.0 * product.m * product.n * product.k / product.seconds for product in table.products)
    peaks = dict.fromkeys(("bf16", "fp16", "fp32"), fastest)
    copies = [size / seconds for name in table.operators if "add" in name for size, seconds in table.operators[name]]
    memory, bandwidth = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), max(copies, default=1e10)
    return Device("cpu", memory, peaks, bandwidth, bandwidth, link)


# ---- whole steps: they take longer than the sum of their timed operators (cold caches, buffers between actions, system
# calls).  One factor for the machine covers all of that


def step_stretch(bare: Calibration, turns: int = 3) -> float:
    """Return the median ratio of measured to planned step time.

    Args:
        bare: the calibration without this ratio.
        turns: how often each run's steps are measured.
    """
    ratios = []
    for run in _whole_runs(bare.processors):
        world, link = run.world_size, bare.within
        cluster = Cluster(bare.device, world, world, link, link, bare.processors, bare)
        ranks = in_processes(run.world_size, _whole_steps, run, bare.processors, turns)
        probe = bare.probe_seconds[run.world_size > 1]
        slowest = [max(steps) for steps in zip(*(seconds for seconds, _ in ranks), strict=True)]
        probes = [max(beside) for beside in zip(*(beside for _, beside in ranks), strict=True)]
        found = median(seconds * probe / probed for seconds, probed in zip(slowest, probes, strict=True))
        ratios.append(found / step_time_of(run, cluster).seconds)
    return median(ratios)


def _whole_runs(processors: int) -> Iterator[ResolvedRun]:
    """Yield a run of one rank, then runs with one and two ranks per processor, each with and without a pipeline."""
    shared = min(processors, _MOST_RANKS // 2)
    worlds = [1, *(count for count in (shared, 2 * shared) if count > 1)]
    for world, pp in product(worlds, (1, 2)):
        if world % pp == 0:
            document = {
                "model": _MODEL,
                "parallel": {"pp": pp},
                "precision": {"dtype": "fp32"},
                "training": {"micro_batch_size": 2, "accumulation": 4 * pp, "compile": False},
            }
            yield resolve(RunConfig.model_validate(document), world)


def _whole_steps(rank: int, run: ResolvedRun, processors: int, turns: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps, and those of the probe just before and after.  Ranks without a probe report 0 for it."""
    device = torch.device("cpu")
    state = ParallelState(run.grid, rank, Links(device, local_world_size=run.world_size))
    probe = SpeedProbe(device) if rank < processors else None

    def probed() -> float:
        dist.barrier()
        seconds = 0.0 if probe is None else probe.seconds()
        dist.barrier()
        return seconds

    engine, batches = started(run, state)
    seconds, beside, before = list[float](), list[float](), probed()
    for _ in range(turns):
        step_seconds(engine, batches)  # not counted: the probe has evicted the model from the caches
        seconds += [step_seconds(engine, batches) for _ in range(_IN_A_ROW)]
        after = probed()
        beside += [(before + after) / 2] * _IN_A_ROW
        before = after
    return seconds, beside


# ---- the shares of a GPU


_LARGE = 4  # an operator up to 4 times smaller than the largest still measures the device, not the launch
_MOVES = ("aten.add.", "aten.add_.", "aten.mul.", "aten._to_copy.", "aten.clone.")  # copy_ reads less than we count


def gpu_here(_: int) -> Device | None:
    """Return CUDA's first device; None without CUDA.  Call it in a forked process.

    Its peaks are empty if there is no data sheet for it.
    """
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    link = LINKS["pcie4"]
    bare = Device(found.name, 0, {}, 0.0, link.bytes_per_second, link, found.multi_processor_count)
    return replace(device_of(found.name) or bare, memory_bytes=found.total_memory)


def fitted(device: Device, table: OperatorTable) -> Device:
    """Return the device with the shares of its peaks that large bf16 operators reached.

    A share stays as it is where the table has no operator that measures it.
    """
    operators = [(name, sample) for name, samples in table.operators.items() for sample in samples]
    moves = _rates(sample for name, sample in operators if name.startswith(_MOVES))
    bandwidth = device.memory_bandwidth or max(moves)
    device = replace(device, memory_bandwidth=bandwidth, memory_share=_share(moves, bandwidth, device.memory_share))
    timed = [(ProductShape(torch.bfloat16, p.m, p.n, p.k), p.seconds) for p in table.products if p.dtype == "bf16"]
    products = _rates((a.flops, (seconds - writing_seconds(a, device)) * wave_share(a, device)) for a, seconds in timed)
    peaks = device.peak_flops or dict.fromkeys(("bf16", "fp16", "fp32"), max(products))
    forward = _rates(sample for name, sample in operators if "_attention" in name and "backward" not in name)
    backward = _rates(sample for name, sample in operators if "_attention" in name and "backward" in name)
    device = replace(device, peak_flops=peaks, launch_seconds=table.host_seconds or device.launch_seconds)
    return replace(
        device,
        product_share=_share(products, peaks["bf16"], device.product_share),
        attention_share=_share(forward, peaks["bf16"], device.attention_share),
        attention_backward_share=_share(backward, peaks["bf16"], device.attention_backward_share),
    )


def _rates(samples: Iterable[tuple[float, float]]) -> list[float]:
    """Return size / seconds of the samples with large sizes."""
    found = [(size, seconds) for size, seconds in samples if seconds > 0]
    largest = max((size for size, _ in found), default=0.0)
    return [size / seconds for size, seconds in found if size * _LARGE >= largest]


def _share(rates: list[float], peak: float, otherwise: float) -> float:
    return min(1.0, median(rates) / peak) if rates else otherwise
