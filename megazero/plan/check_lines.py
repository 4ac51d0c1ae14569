"""The lines that `megazero check` and the start of a run print about memory, context parallelism and documents."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch

from megazero.config import ResolvedRun
from megazero.config.derive import sent_by_attention
from megazero.data.corpus import without_borders
from megazero.layers.token_layout import balance, ring_ranges, work
from megazero.plan.advice import advice_text
from megazero.plan.cluster import Cluster, cluster_of, some_cluster, with_memory
from megazero.plan.devices import size_text
from megazero.plan.memory import RankMemory, memory_of, with_decided_offload
from megazero.plan.unit_trace import units_of
from megazero.schedules.action import Schedule
from megazero.schedules.proof import peak_activations
from megazero.settings import counted
from megazero.training.check import DeviceNeeds


def memory_lines(
    run: ResolvedRun, gpu: str | None, device_gib: float | None, ranks_per_node: int
) -> Callable[[Schedule], DeviceNeeds]:
    """Return `lines_on` for a run, to be called with the run's schedule once it is known.

    Args:
        gpu: a device of `plan.devices`, or a file of `megazero calibrate`; None if the user named none.
        device_gib: memory of a rank's device in GiB; None if it is not known.

    Raises:
        ValueError, OSError: see `cluster_of`.
    """
    cluster = None
    if gpu is not None or device_gib is not None:
        names = "--world-size", "--nproc-per-node"
        cluster = cluster_of(gpu or "h200", run.world_size, ranks_per_node, options=names)
    if cluster is not None and device_gib is not None:
        cluster = with_memory(cluster, device_gib, on_cuda=run.config.launch.device != "cpu")
    return partial(lines_on, run, cluster, ranks_per_node=ranks_per_node)


def lines_on(run: ResolvedRun, cluster: Cluster | None, schedule: Schedule, *, ranks_per_node: int = 8) -> DeviceNeeds:
    """Return the lines on a rank's memory, and whether it fits.  Without a cluster it counts as fitting."""
    on_cuda = run.config.launch.device != "cpu"  # "auto" may choose CUDA; the start of a run prints its choice
    any_cluster = cluster or some_cluster(run, ranks_per_node, on_cuda=on_cuda)
    run = with_decided_offload(run, any_cluster)
    ranks = memory_of(run, any_cluster)
    lines = [("memory", line) for line in (_state(run, ranks), *_saved(run, schedule, ranks, on_cuda=on_cuda))]
    if cluster is None:
        return DeviceNeeds(lines)
    fits, text = _plan(run, cluster, ranks)
    return DeviceNeeds([*lines, ("plan", text)], fits)


def _state(run: ResolvedRun, ranks: Sequence[RankMemory]) -> str:
    """Describe model state and ZeRO's buffers by kind, on the rank that has the most."""
    largest = max(ranks, key=lambda rank: sum(rank.state.values()))
    kinds = sorted(largest.state.items(), key=lambda item: -item[1])
    texts = ", ".join(f"{kind.replace('_', ' ')} {size_text(count)}" for kind, count in kinds if count)
    return (
        f"{size_text(sum(largest.state.values()))} of model state on {largest.name}: {texts}; ZeRO {run.config.zero.stage}, "
        f"{largest.elements:.4g} parameters; activations saved for the backward come on top"
    )


def _saved(run: ResolvedRun, schedule: Schedule, ranks: Sequence[RankMemory], *, on_cuda: bool) -> Iterator[str]:
    """Describe what each pipeline rank saves for its backward passes, and name the fullest."""
    fullest = max(ranks, key=lambda rank: rank.kept)
    for rank in ranks:
        most = "; the fullest" if len(ranks) > 1 and rank is fullest else ""
        device = " on CUDA" if on_cuda else ""
        yield f"{rank.name} saves for its backward passes{device} at most {_saved_text(run, schedule, rank)}{most}"


def _saved_text(run: ResolvedRun, schedule: Schedule, rank: RankMemory) -> str:
    """Return `12.0 MiB, 4 micro-batches; 32 layers: norms+activation recomputed`."""
    units = [(unit.key, unit.offloads) for own in units_of(run.config, schedule)[rank.stage] for unit in own]
    names = sorted(replace(key.policy, offload=moves).name for key, moves in units if not isinstance(key, str))
    layers = "".join(
        f"; {counted(len(list(same)), 'layer')}: {'nothing' if policy == 'none' else policy} recomputed{comma}{rest}"
        for (policy, comma, rest), same in groupby(name.partition(", ") for name in names)
    )
    place = "in an arena" if run.config.activations.contiguous else "on the host"
    away = f" and {size_text(rank.kept_off_device)} {place}" if rank.kept_off_device else ""
    batches = peak_activations(schedule, rank.stage) / schedule.chunks
    more = f"; {rank.again:.1%} more to compute" if rank.again else ""
    return f"{size_text(rank.kept)}{away}, {counted(batches, 'micro-batch')}{layers or '; no layer'}{more}"


def start_line(run: ResolvedRun, schedule: Schedule, device: torch.device) -> str:
    """Describe what the fullest pipeline rank saves for its backward passes."""
    try:
        ranks = memory_of(run, some_cluster(run, run.world_size, on_cuda=device.type == "cuda"))
    except Exception as error:  # a script's own layers may raise anything; a run does not need its plan
        return f"activations: not known ({type(error).__name__}: {error})"
    fullest = max(ranks, key=lambda rank: rank.kept)
    return f"activations on {fullest.name}, at most {_saved_text(run, schedule, fullest)}"


def _plan(run: ResolvedRun, cluster: Cluster, ranks: Sequence[RankMemory]) -> tuple[bool, str]:
    """Return whether the fullest rank fits its device, and a line on that with the rank's memory by kind."""
    fullest, has = max(ranks, key=lambda rank: rank.peak), cluster.device.memory_bytes
    ordered = sorted(fullest.kinds.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{size_text(count)} {kind.replace('_', ' ')}" for kind, count in ordered if count >= 2**20)
    text = f"{fullest.fit_text(has)}: {kinds}"
    if fullest.peak <= has:
        return True, text
    return False, f"{text}; {advice_text(run, cluster, fullest, fullest.peak - has)}"


# ---- context parallelism and documents


def describe_context(run: ResolvedRun, samples: Sequence[Sequence[int]] | None) -> Iterator[str]:
    """Yield a line on context parallelism if the run uses it, and a line on the documents that bound attention.

    Args:
        samples: for some samples, the lengths of their documents in tokens; None if the data is not on this machine.
    """
    config = run.config
    masks, whole = config.data.document_mask, [[config.model.seq_len]]
    if config.parallel.cp > 1:
        yield _sent_by_attention(run) + _balance(run, samples if masks else whole)
    if masks:
        yield "documents: not known, the data is not on this machine" if samples is None else _documents(run, samples)
        yield from without_borders(samples or ())


def _sent_by_attention(run: ResolvedRun) -> str:
    parallel, ulysses = run.config.parallel, run.config.parallel.ulysses
    sent = sent_by_attention(run.config, run.micro_batch_size, ulysses)
    texts = " + ".join(f"{operation} {count:,}" for operation, count in sent.items() if count)
    return (
        f"cp {parallel.cp}, {parallel.cp_method}: Ulysses {ulysses} x ring {parallel.cp // ulysses}; for each layer and "
        f"micro-batch a rank sends {sum(sent.values()):,} bytes ({texts}), forward and backward"
    )


def _balance(run: ResolvedRun, samples: Sequence[Sequence[int]] | None) -> str:
    """Describe the load balance of a ring: query-key pairs of the busiest rank over the mean of all ranks."""
    ring = run.config.parallel.cp // run.config.parallel.ulysses
    if ring == 1:
        return "; ranks have equal work"
    if samples is None:
        return ""
    model = run.config.model
    windows = model.layers_of_window.items()
    found = [sum(count * balance(lengths, ring, window) for window, count in windows) for lengths in samples]
    found = [each / model.num_layers for each in found]
    most = f", {max(found):.3f} at most" if len(found) > 1 else ""
    return f"; pairs on the busiest ring rank over their mean: {sum(found) / len(found):.3f}{most}"


def _documents(run: ResolvedRun, samples: Sequence[Sequence[int]]) -> str:
    model, every = run.config.model, [length for lengths in samples for length in lengths]

    def pairs(lengths: Sequence[int]) -> int:
        return sum(count * work(ring_ranges(lengths, 1)[0], window) for window, count in model.layers_of_window.items())

    seen = sum(map(pairs, samples)) / (len(samples) * pairs([model.seq_len]))
    return (
        f"documents: {len(every) / len(samples):.1f} in a sample, of {sum(every) / len(every):,.0f} tokens on average and "
        f"{max(every):,} at most; attention sees {seen:.1%} of the pairs of whole samples "
        f"(the first {counted(len(samples), 'sample')})"
    )
