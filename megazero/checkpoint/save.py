"""Saving a checkpoint: ranks send shards to writers, which stream whole tensors into files; rank 0 completes the
checkpoint.

    dp 0 tp 0  [===]                    local flat, tp 0  [======]      sections -> q_proj
    dp 1 tp 0     [===]   -- send -->                                               k_proj       --> files --> manifest
    dp 0 tp 1  [===]        writer      local flat, tp 1  [======]                  v_proj
    dp 1 tp 1     [===]

Each element of the state is sent at most once.  The plan is a pure function of the layouts, so every rank knows every
message.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from heapq import heapify, heappop, heappush
from math import prod
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from megazero.checkpoint.folder import FileRecord, Folder, Location, folder_at
from megazero.checkpoint.index import (
    LATEST,
    MANIFEST,
    TRAINER_STATE,
    UNFINISHED,
    CheckpointError,
    TrainerState,
    index_name,
    is_complete,
    own_files,
    remove_own_files,
    to_index,
    to_json,
    write_manifest,
    write_unfinished,
)
from megazero.checkpoint.tensor_file import SafetensorsWriter
from megazero.comm.agreement import agree
from megazero.comm.collectives import Pending, exchange, gather_objects, wait_all
from megazero.parallel_state import Axis, ParallelState
from megazero.parallel_state.state import SavingAxes
from megazero.zero.bucket import Bucket
from megazero.zero.sharding import BucketLayout, Interval, Slot
from megazero.zero.state import MASTER, ShardedState

T = TypeVar("T")
_FAILED = "checkpoint {} could not be written ({}); older checkpoints are untouched"
_SENDS_IN_FLIGHT = 16  # parameters being sent at the same time
_RECEIVED_AHEAD = 2  # parameters that may arrive while their writer works on earlier ones
_SLACK = 1.1  # a writer may exceed its fair share of elements by this factor, if that saves sending them

Messages: TypeAlias = list[tuple[Tensor, int]]  # (tensor, the other rank)


@dataclass(frozen=True)
class SavePlan:
    """Which rank writes which tensors; the same for every checkpoint of a run."""

    assignments: tuple[Assignment, ...]  # those in which this rank sends or writes
    writers: tuple[int, ...]  # every rank that writes a file of each state kind

    def file(self, state_kind: str, rank: int) -> str:
        """Return the file name of a writer."""
        return f"{state_kind}-{self.writers.index(rank) + 1:05d}-of-{len(self.writers):05d}.safetensors"


def plan_saving(source: ShardedState, at: ParallelState, world: Axis) -> SavePlan:
    """Decide which rank writes which tensors.  Collective over `world`; called once per run."""
    assignments = assign_writers(source.buckets, at)
    writes = gather_objects(any(assignment.writer == at.rank for assignment in assignments), world)
    return SavePlan(assignments, tuple(rank for rank, does in enumerate(writes) if does))


def save_checkpoint(
    location: Location,
    source: ShardedState,
    at: ParallelState,
    trainer: TrainerState,
    files: Mapping[str, bytes],
    *,
    moves_latest: bool = True,
    axes: SavingAxes | None = None,
    plan: SavePlan | None = None,
) -> int:
    """Write the whole state of a run into a new step directory, and wait until it is durable.  Collective.

    Args:
        location: the step directory, which all ranks share.
        source: this rank's shard of the state.
        files: further small files by name; those of rank 0 are written.
        moves_latest: let `latest` point to this checkpoint.
        axes: communicators to use; None for those of the training.
        plan: see `plan_saving`; None to compute it here.

    Returns: bytes of all tensors.

    Raises:
        CheckpointError: on every rank.  Older checkpoints are untouched, and the files of this one are removed.  It is
            also raised if the directory holds files that no checkpoint of ours has written; these files stay.
        OwnerError: on every rank: this run does not, or no longer, own the directory.
    """
    folder, axes = folder_at(location), axes or SavingAxes(at.model, at.world)

    def on_first(action: Callable[[], None]) -> None:
        agree(action if at.rank == 0 else lambda: None, axes.world, CheckpointError)

    plan = plan or plan_saving(source, at, axes.world)
    tensor_files = [plan.file(state_kind, rank) for state_kind in source.state_kinds for rank in plan.writers]
    on_first(lambda: _prepare(folder, [*tensor_files, *map(index_name, source.state_kinds), TRAINER_STATE, *files]))
    own = _write_own(folder, source, plan, trainer.step, at, axes.model)
    of_ranks = gather_objects(own, axes.world)
    on_first(lambda: _commit(folder, of_ranks, source.state_kinds, trainer, files, moves_latest))
    return sum(written.bytes for written in of_ranks)


def _write_own(
    folder: Folder, source: ShardedState, plan: SavePlan, step: int, at: ParallelState, stage: Axis
) -> _Written:
    """Gather the tensors of this rank's pipeline stage, and write the ones assigned to this rank.

    A writer whose disk fails continues to receive tensors and drops them, so that no other rank waits for it.
    """
    written, buffers, open_files = _Written(), HostBuffers(), dict[str, SafetensorsWriter]()
    for state_kind in source.state_kinds:
        held = [entry for entry in plan.assignments if source.holds(state_kind, source.buckets[entry.bucket])]
        own = [entry for entry in held if entry.writer == at.rank]
        layout = {
            name: (source.dtype(state_kind, source.buckets[entry.bucket]), shape)
            for entry in own
            for name, shape in entry.logical_shapes().items()
        }
        file, metadata = plan.file(state_kind, at.rank) if own else "", {"kind": state_kind, "step": str(step)}
        sizes = {name: dtype.itemsize * prod(shape) for name, (dtype, shape) in layout.items()}
        written.tensors[state_kind] = {name: (file, size) for name, size in sizes.items()}
        begin = partial(SafetensorsWriter, folder, file, layout, metadata)
        writer = written.attempt(f"{folder}/{file}", begin) if own else None
        if writer is not None:
            open_files[file] = writer
        for assignment, local in gather_locals(source, state_kind, held, at, stage, buffers):
            for name, tensor in assemble(assignment, local).items():
                if writer is not None:
                    written.attempt(f"{folder}/{file}", partial(writer.write, name, tensor))
    for file, writer in open_files.items():  # last, so that the disk works while the other state kinds are gathered
        record = written.attempt(file, writer.finish)
        if record is None:
            writer.abandon()
        else:
            written.records[file] = record
    return written


def _prepare(folder: Folder, names: Iterable[str]) -> None:
    """Create the directory for files of these names, and remove files of these names that an interrupted run left
    there.
    """
    folder.check_lock()
    try:
        if folder.is_link:
            hint = "Remove it, or choose another name"
            raise CheckpointError(f"{folder} is a link: what it holds belongs elsewhere. {hint}")
        if is_complete(folder):
            raise CheckpointError(f"{folder} already holds a complete checkpoint; remove it, or write elsewhere")
        ours = set(own_files(folder))
        foreign = [name for name in folder.files() if name not in ours] + folder.folders()
        if foreign:
            raise CheckpointError(
                f"{folder} holds {', '.join(sorted(foreign)[:3])}, which no checkpoint of ours has left; nothing was "
                "deleted. Choose another name, or remove it"
            )
        remove_own_files(folder)
        folder.make()
        write_unfinished(folder, names)
    except OSError as error:
        raise CheckpointError(_FAILED.format(folder.name, error)) from error


@dataclass
class _Written:
    """The files that a rank has written, or the first error that stopped it."""

    error: str | None = None
    records: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, dict[str, tuple[str, int]]] = field(default_factory=dict)  # state kind -> name -> (file, bytes)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, including those that could not be written."""
        return sum(size for tensors in self.tensors.values() for _, size in tensors.values())

    def attempt(self, path: str, action: Callable[[], T]) -> T | None:
        """Run an action unless an earlier one failed.  An error is held until the commit, where all ranks learn of it."""
        if self.error is None:
            try:
                return action()
            except Exception as error:  # of any kind: all ranks must learn of it
                self.error = f"{path}: {getattr(error, 'strerror', None) or error}"
        return None


def _commit(
    folder: Folder,
    of_ranks: Sequence[_Written],
    state_kinds: Sequence[str],
    trainer: TrainerState,
    files: Mapping[str, bytes],
    moves_latest: bool,
) -> None:
    """Complete the checkpoint if every rank has written its files."""
    folder.check_lock()
    try:
        for rank, written in enumerate(of_ranks):
            if written.error is not None:
                raise CheckpointError(f"rank {rank}: {written.error}")
        small = dict(files)
        for state_kind in state_kinds:
            tensors = {name: stored for own in of_ranks for name, stored in own.tensors.get(state_kind, {}).items()}
            files_of_tensors = {name: file for name, (file, _) in sorted(tensors.items())}
            small[index_name(state_kind)] = to_index(files_of_tensors, sum(size for _, size in tensors.values()))
        small[TRAINER_STATE] = to_json(asdict(trainer))
        records = {name: record for own in of_ranks for name, record in own.records.items()}
        for name, data in small.items():
            records[name] = folder.write(name, data)
        write_manifest(folder, records)
    except Exception as failure:
        needed, free = sum(own.bytes for own in of_ranks), folder.parent.free_bytes()
        beside = "" if free is None else f"; {folder.parent} has {free:,} bytes free beside what was written"
        with suppress(Exception):
            if not folder.has(MANIFEST):
                remove_own_files(folder)  # frees the space for the next checkpoint
        reason = f"{failure}; it takes {needed:,} bytes{beside}"
        raise CheckpointError(_FAILED.format(folder.name, reason)) from failure
    with suppress(Exception):  # the manifest decides
        folder.remove(UNFINISHED)
    if moves_latest:  # after the manifest, which alone makes a checkpoint complete
        try:
            folder.parent.write(LATEST, (folder.name + "\n").encode())
        except Exception as failure:
            raise CheckpointError(
                f"checkpoint {folder.name} is complete, but {folder.parent}/{LATEST} could not be written ({failure})"
            ) from failure


@dataclass(frozen=True)
class Assignment:
    """One parameter, or the experts of it that one ep rank holds, and the rank that writes it."""

    bucket: int
    slot: Slot
    writer: int
    shards: tuple[tuple[int, int, Interval], ...]  # (rank, index in `places`, elements of the bucket), none twice
    places: tuple[tuple[int, int], ...]  # of the local tensors: index in, and size of, the splitting axis

    def logical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors to be written, by name."""
        spec = self.slot.info.spec
        regions = spec.regions(*self.places[0]) if spec.of_experts else spec.regions(0, 1)
        return {region.name: region.stored_shape for region in regions}


def assign_writers(buckets: Sequence[Bucket], at: ParallelState) -> tuple[Assignment, ...]:
    """Distribute the parameters of this rank's stage over its ranks, the largest first.

    A parameter goes to the rank that holds most of it.  If that rank already has its fair share, the parameter goes to
    the least loaded rank.  The duplicate of a tied parameter is not written.  All ranks of the stage compute the same
    assignments.  The time grows with the number of shards of parameters, so this is called once per run.

    Returns:
        The assignments in which this rank takes part, in bucket order.
    """
    load = dict.fromkeys(at.model.ranks, 0)
    loads = [(0, rank) for rank in load]  # a heap; entries that disagree with `load` are outdated
    heapify(loads)
    found = []
    first_copies = [(index, bucket) for index, bucket in enumerate(buckets) if not bucket.is_duplicate]
    same = cache(lambda tp: at.grid.group_of(at.grid.rank(replace(at.at, tp=tp)), "dp", "cp"))  # as `at.dp_cp`
    experts = at.grid.expert_table(at.rank)

    def holders(slot: Slot) -> list[tuple[tuple[tuple[int, int], ...], list[tuple[int, ...]]]]:
        """Return the places of each assignment's local tensors, and the ranks that share each local tensor."""
        if slot.info.spec.of_experts:
            return [(((index, len(experts)),), [ranks]) for index, ranks in enumerate(experts)]
        size = 1 if slot.info.spec.split is None else at.tp.size
        return [(tuple((tp, size) for tp in range(size)), [same(tp) for tp in range(size)])]

    slots = [
        (index, slot, bucket.layout, *places)
        for index, bucket in first_copies
        for slot in bucket.layout.slots
        for places in holders(slot)
    ]
    most = _SLACK * sum(prod(slot.info.shape) for _, slot, *_ in slots) / len(load)
    for index, slot, layout, places, ranks in sorted(slots, key=lambda entry: -prod(entry[1].info.shape)):
        size, shards = prod(slot.info.shape), tuple(_shards(slot, layout, ranks))
        held: Counter[int] = Counter()
        for rank, _, interval in shards:
            held[rank] += interval.size
        writer = max(held, key=lambda rank: (held[rank], -load[rank], -rank), default=None)
        if writer is None or load[writer] + size > most:
            while loads[0][0] != load[loads[0][1]]:
                heappop(loads)
            writer = loads[0][1]
        load[writer] += size
        heappush(loads, (load[writer], writer))
        if at.rank == writer or at.rank in held:
            found.append(Assignment(index, slot, writer, shards, places))
    return tuple(sorted(found, key=lambda entry: (entry.bucket, entry.slot.start, entry.places)))


def _shards(slot: Slot, layout: BucketLayout, ranks: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int, Interval]]:
    """Yield (rank, index of the local tensor, elements of the bucket) for each shard of a parameter, each element once.

    `ranks`: for each local tensor, the ranks that share it.  Its first copy lies on the first of these ranks.
    """
    each = layout.shard_numel
    for number, same in enumerate(ranks):
        for index in range(slot.start // each, -(-slot.stop // each)):
            interval = Interval(max(slot.start, index * each), min(slot.stop, (index + 1) * each))
            yield same[index], number, interval


class HostBuffers:
    """A pool of host memory.

    It is reused because the first write to new memory takes several times as long: the system must map each page.
    """

    def __init__(self) -> None:
        self.free: list[Tensor] = []  # the caller returns buffers here after use

    def take(self, size: int) -> Tensor:
        """Return a buffer of at least `size` bytes, with arbitrary content."""
        self.free.sort(key=len)
        for index, memory in enumerate(self.free):
            if len(memory) >= size:
                return self.free.pop(index)
        if self.free:
            self.free.pop()  # all are too small: drop one, so that the pool never grows beyond what was in use at once
        return torch.empty(size, dtype=torch.uint8)


def gather_locals(
    source: ShardedState,
    state_kind: str,
    assignments: Sequence[Assignment],
    at: ParallelState,
    axis: Axis,
    buffers: HostBuffers | None = None,
) -> Iterator[tuple[Assignment, list[Tensor]]]:
    """Yield, on its writer, every assigned parameter as the local tensors of all TP ranks, on the CPU.

    All ranks of `axis` must iterate to the end.

    Args:
        source: the state.  A local tensor that the writer itself holds completely on the CPU is yielded without a copy.
        state_kind: the state to gather, such as exp_avg.
        assignments: those of this rank.
        at: this rank's position.
        axis: the ranks that exchange shards.
        buffers: memory for the local tensors, which are then valid only until the next ones are requested; None to
            allocate new memory each time.
    """
    sending: deque[tuple[list[Pending], Messages]] = deque()  # keeps sent tensors alive until they have left
    arriving: deque[tuple[Assignment, list[Tensor], list[Tensor], list[Pending]]] = deque()

    def arrived() -> Iterator[tuple[Assignment, list[Tensor]]]:
        assignment, flats, taken, receiving = arriving.popleft()
        wait_all(receiving)
        yield assignment, [flat.view(assignment.slot.info.shape) for flat in flats]
        if buffers is not None:
            buffers.free += taken

    for assignment in assignments:
        sends, receives, flats, taken = _transfers(source, state_kind, assignment, at, buffers or HostBuffers())
        pendings = exchange(sends, receives, axis)
        sending.append((pendings[: len(sends)], sends))
        while len(sending) > _SENDS_IN_FLIGHT:
            wait_all(sending.popleft()[0])
        if assignment.writer == at.rank:
            arriving.append((assignment, flats, taken, pendings[len(sends) :]))
        while len(arriving) > _RECEIVED_AHEAD:
            yield from arrived()
    while arriving:
        yield from arrived()
    for pendings, _ in sending:
        wait_all(pendings)


def _transfers(
    source: ShardedState, state_kind: str, assignment: Assignment, at: ParallelState, buffers: HostBuffers
) -> tuple[Messages, Messages, list[Tensor], list[Tensor]]:
    """Return the messages of one parameter.  On its writer, also return the flat local tensors and the buffers they
    use.
    """
    bucket, slot = source.buckets[assignment.bucket], assignment.slot
    dtype = source.dtype(state_kind, bucket)
    nbytes = prod(slot.info.shape) * dtype.itemsize
    sends: Messages = []
    receives: Messages = []
    flats = [torch.empty(0) for _ in assignment.places]
    taken: list[Tensor] = []
    for rank, number, interval in assignment.shards:
        if at.rank not in (rank, assignment.writer):
            continue
        own = source.read(state_kind, bucket, interval).detach() if rank == at.rank else None
        if own is not None and assignment.writer != at.rank:
            sends.append((own.to("cpu", copy=own.device.type != "cpu"), assignment.writer))
            continue
        if own is not None and interval == slot.interval:
            flats[number] = own.cpu()
            continue
        if not flats[number].numel():
            taken.append(buffers.take(nbytes))
            flats[number] = taken[-1][:nbytes].view(dtype)
        target = flats[number][interval.start - slot.start : interval.stop - slot.start]
        if own is None:
            receives.append((target, rank))
        else:
            target.copy_(own)
    return sends, receives, flats, taken


def assemble(assignment: Assignment, local: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return whole logical tensors, as a checkpoint stores them; views of `local` if they are contiguous there.

    `local`: the local tensors of all places of the assignment.
    """
    spec, shapes = assignment.slot.info.spec, assignment.logical_shapes()
    whole: dict[str, Tensor] = {}
    for place, tensor in zip(assignment.places, local, strict=True):
        for region in spec.regions(*place) if tensor.numel() else ():
            source = tensor.view(-1)[region.start : region.start + region.numel].view(region.shape)
            if not region.transposed and region.shape == region.whole:  # whole, in the order of the file
                whole[region.name] = source
                continue
            target = whole.setdefault(region.name, local[0].new_empty(shapes[region.name]))
            (target.t() if region.transposed else target)[region.box] = source
    return {name: whole.get(name, local[0].new_empty(shape)) for name, shape in shapes.items()}


def gather_logical(source: ShardedState, state_kind: str, at: ParallelState) -> Iterator[tuple[str, Tensor]]:
    """Yield every logical tensor of this rank's stage, on its writer only.  All ranks must iterate to the end."""
    assignments, buckets = assign_writers(source.buckets, at), source.buckets
    # As `load`: what has no masters has its weights among them.
    held = [entry for entry in assignments if state_kind == MASTER or source.holds(state_kind, buckets[entry.bucket])]
    for assignment, local in gather_locals(source, state_kind, held, at, at.model):
        yield from assemble(assignment, local).items()
