"""Collectives through memory that is shared by the CPU ranks of one host.

    rank 0's area   [ half 0 | half 1 ]     every rank writes its own area and reads the others'
    rank 1's area   [ half 0 | half 1 ]
    round k         write half k % 2 | signal every peer | wait for their signals | read the others' half k % 2

[Note: two halves]  A rank that has signalled round k + 1 has finished reading round k.  So once all peers have
signalled round k + 1, half k % 2 may be written again, and one signal per round is enough.

[Note: one order]  The ranks' operations in a channel are paired by their order.  Every half carries the label of its
operation, and a rank that finds a different label raises.  Ranks may differ in the order in which they start gathers
and reductions, so each of the two kinds has its own channel.  All-to-alls and shifts are started where a layer runs,
like most reductions, so they use the channel of reductions.

Sums are taken in rank order, so every rank gets the same bits.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from megazero.comm.backend import place_shard
from megazero.comm.messages import LABEL_BYTES, REDUCTIONS, OrderError, check_labels, combine, encoded
from megazero.cpu.rendezvous import HostRanks, Poller
from megazero.parallel_state import Axis
from megazero.parallel_state.axis import Counts, Wait
from megazero.parallel_state.state import Group

HALF_BYTES = 1 << 19
_LABELLED_BYTES = HALF_BYTES + LABEL_BYTES
AREA_BYTES = 2 * _LABELLED_BYTES

_ONE_ROUND_BYTES = 1 << 16  # up to this size every rank sums everything, which saves a round

# An operation: request the areas of a round, write its own, yield, read the others', and so on.
Rounds: TypeAlias = Generator[None, None, None]


@dataclass(eq=False)
class _Operation:
    """One operation of a channel."""

    label: bytes  # equal on all ranks
    rounds: Rounds
    has_begun: bool = False
    is_done: bool = False


class Channel:
    """Runs operations of one kind among the ranks of a group, in the order in which they are started."""

    def __init__(self, host_ranks: HostRanks, index: int, timeout_seconds: float, poller: Poller) -> None:
        self.peers, self._areas = host_ranks
        self.index, self.size = index, len(self._areas)
        self._timeout, self._poller = timeout_seconds, poller
        wholes = [torch.frombuffer(area, dtype=torch.uint8) for area in self._areas]
        self._halves = [[whole[half * _LABELLED_BYTES :][:HALF_BYTES] for whole in wholes] for half in range(2)]
        self._views: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._half = 0
        self._broken = ""  # the reason why no further operation is possible
        self._started: deque[_Operation] = deque()
        poller.add(self._progress, self.peers)

    def areas(self, dtype: torch.dtype) -> list[Tensor]:
        """Return every rank's half of this round, 1-D."""
        key = self._half, dtype
        if key not in self._views:
            with torch.inference_mode(False):  # the first caller may be in inference mode
                self._views[key] = [half.view(dtype) for half in self._halves[self._half]]
        return self._views[key]

    def start(self, label: str, rounds: Rounds) -> Wait:
        """Start an operation.  If no other operation is in progress, its first round is written immediately.

        Raises:
            OrderError: the ranks started operations with different labels.
            RuntimeError: an earlier operation was interrupted half-way.
        """
        if self._broken:
            raise RuntimeError(self._broken)
        operation = _Operation(encoded(label), rounds)
        self._started.append(operation)
        self._progress()
        return lambda: self._finish(operation)

    def interrupt(self) -> None:
        """Make all operations that wait in this channel fail, here and on the peers.  Any thread may call it."""
        for peer in self.peers:
            peer.hang_up()

    def close(self) -> None:
        """Disconnect from the peers."""
        for peer in self.peers:
            peer.close()
        self.peers, self._areas, self._halves = [], [], []
        self._views.clear()
        self._started.clear()

    def _finish(self, operation: _Operation) -> None:
        """Wait for an operation.  Raises: RuntimeError: a peer has died, exceeded the timeout, or runs another
        operation.
        """
        self._progress()
        deadline = time.monotonic() + self._timeout
        while not operation.is_done:
            if self._broken:
                raise RuntimeError(self._broken)
            if not self.peers:
                raise RuntimeError("this rank has left its group and closed the shared memory")
            if any(peer.is_lost and not peer.signals for peer in self.peers):
                self._fail("Connection closed by a rank of this host")
            if not self._poller.poll(deadline - time.monotonic()):
                self._fail(f"Timed out waiting {self._timeout:g} s for a rank of this host")

    def _fail(self, why: str) -> NoReturn:
        """Break the channel.  An operation that nobody waits for would write into tensors that may be in other use by
        then.
        """
        self._broken = why
        self.interrupt()
        raise RuntimeError(why)

    def _progress(self) -> None:
        """Run the operations as far as the peers' signals allow.

        An operation that is stopped half-way (by an interrupt, or for lack of memory) breaks the channel, here and on
        the peers.  Otherwise the next operation would take the peers' signals, and so their data, for its own.
        """
        if self._broken:
            return
        try:
            self._run_started()
        except OrderError as error:  # raised on the peers as well
            self._broken = str(error)
            raise
        except BaseException as error:
            self._broken = (
                f"{type(error).__name__} stopped an operation of this rank half-way; its group can run no other"
            )
            self.interrupt()
            raise

    def _run_started(self) -> None:
        while self._started:
            first = self._started[0]
            if first.has_begun:
                if not all(peer.signals for peer in self.peers):
                    return
                for peer in self.peers:
                    peer.signals -= 1
                label = self._label
                check_labels({at: area[label] for at, area in enumerate(self._areas)}, first.label)
                self._half = 1 - self._half  # an operation still reads the areas that it requested before
            first.has_begun = True
            try:
                next(first.rounds)
            except StopIteration:
                first.is_done = True
                self._started.popleft()
                continue
            self._areas[self.index][self._label] = first.label
            for peer in self.peers:
                peer.signal()

    @property
    def _label(self) -> slice:
        """The position of the label in this round's half."""
        return slice(self._half * _LABELLED_BYTES + HALF_BYTES, (self._half + 1) * _LABELLED_BYTES)


class SharedMemoryBackend:
    """Collectives of ranks that all run on this host.  Each kind of operation has its own channel."""

    needs_scratch = runs_by_itself = False

    def __init__(self, reduce: Channel, gather: Channel, poller: Poller) -> None:
        self.reduce, self.gather, self.poller = reduce, gather, poller

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait:
        rounds = all_reduce_rounds(self.reduce, tensor.detach().view(-1), REDUCTIONS[op])
        return self.reduce.start(label_of("all_reduce", tensor, axis), rounds)

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait:
        rounds = all_gather_rounds(self.gather, place_shard(out, shard, axis))
        return self.gather.start(label_of("all_gather", shard, axis, label), rounds)

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis) -> Wait:
        rounds = reduce_scatter_rounds(self.reduce, out.detach().view(-1), full.detach().view(axis.size, -1).unbind(0))
        return self.reduce.start(label_of("reduce_scatter", full, axis), rounds)

    def all_to_all(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        out, x = out.detach(), x.detach()
        label = label_of("all_to_all", x, axis, f"{list(x.shape)}")
        wait = self.reduce.start(label, all_to_all_rounds(self.reduce, out, x))
        out[axis.index].copy_(x[axis.index])  # while the peers write their areas
        return wait

    def all_to_all_rows(self, out: Tensor, x: Tensor, axis: Axis, sends: Counts, receives: Counts) -> Wait:
        width = prod(x.shape[1:])
        counts = [[count * width for count in counts] for counts in (sends, receives)]
        flat_out, flat_x = out.detach().view(-1), x.detach().view(-1)
        label = f"all_to_all of rows of {list(x.shape[1:])} {x.dtype} over {axis.name}"
        return self.reduce.start(label, uneven_all_to_all_rounds(self.reduce, flat_out, flat_x, *counts))

    def ring_shift(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        rounds = _ring_shift(self.reduce, out.detach().view(-1), x.detach().view(-1))
        return self.reduce.start(label_of("ring_shift", x, axis), rounds)

    def check_order(self) -> None:
        """No-op: here each gather already checks that all ranks gather the same thing."""

    def link_bytes(self, *_: object) -> int:
        """Return 0: all ranks are on one host."""
        return 0

    def close(self) -> None:
        """Close both channels, and drop all references to their memory."""
        self.reduce.close()
        self.gather.close()
        self.poller.forget()


def poller_of(group: Group) -> Poller | None:
    """Return the poller shared by all groups of this rank that use shared memory; None if there is no such group."""
    for sibling in group.siblings:
        for backend in sibling.backends.values():
            if isinstance(backend, SharedMemoryBackend):
                return backend.poller
    return None


def label_of(operation: str, tensor: Tensor, axis: Axis, what: str = "") -> str:
    """Build the label of an operation, which is the same on all ranks that take part."""
    return f"{operation} of {what}{', ' if what else ''}{tensor.numel()} {tensor.dtype} over {axis.name}"


def slices_of(elements: int, longest: int) -> list[slice]:
    """Cut into slices of at most `longest` elements, one per round.

    An empty tensor has a round too, because ranks compare labels in it.
    """
    return [slice(start, min(start + longest, elements)) for start in range(0, max(elements, 1), longest)]


def all_reduce_rounds(channel: Channel, flat: Tensor, op: Callable[..., Tensor]) -> Rounds:
    """Replace a 1-D tensor by its reduction over all ranks."""
    me = channel.index
    for at in slices_of(flat.numel(), HALF_BYTES // flat.element_size()):
        values, mine = flat[at], slice(at.stop - at.start)
        areas = [area[mine] for area in channel.areas(flat.dtype)]
        areas[me].copy_(values)
        yield
        if channel.size == 2 or values.nbytes <= _ONE_ROUND_BYTES:
            combine(values, areas, op)
            continue
        slices = values.tensor_split(channel.size)
        combine(slices[me], [area.tensor_split(channel.size)[me] for area in areas], op)
        areas = [area[mine] for area in channel.areas(flat.dtype)]
        sums = [area.tensor_split(channel.size)[index] for index, area in enumerate(areas)]
        sums[me].copy_(slices[me])
        yield
        for index, target in enumerate(slices):
            if index != me:
                target.copy_(sums[index])


def reduce_scatter_rounds(
    channel: Channel, out: Tensor, shards: Sequence[Tensor], op: Callable[..., Tensor] = torch.add
) -> Rounds:
    """Set `out` to the sum of every rank's shard for this rank.

    All are 1-D and of equal length.  `out` may be this rank's own shard.
    """
    me = channel.index
    longest = HALF_BYTES // out.element_size() // (channel.size - 1)

    def term(area: Tensor, source: int, target: int, length: int) -> Tensor:
        """Return where the area of rank `source` holds its term for rank `target`."""
        start = (target - (target > source)) * longest
        return area[start : start + length]

    for at in slices_of(out.numel(), longest):
        areas, length = channel.areas(out.dtype), at.stop - at.start
        for index, shard in enumerate(shards):
            if index != me:
                term(areas[me], me, index, length).copy_(shard[at])
        yield
        arrived = [term(area, index, me, length) if index != me else shards[me][at] for index, area in enumerate(areas)]
        if me > 1:  # `out` is written before this rank's own term is added, and may share its memory
            arrived[me] = arrived[me].clone()
        combine(out[at], arrived, op)


def all_gather_rounds(channel: Channel, shards: Sequence[Tensor]) -> Rounds:
    """Fill every rank's shard, 1-D, of equal length.  This rank's own shard is already filled."""
    me = channel.index
    for at in slices_of(shards[me].numel(), HALF_BYTES // shards[me].element_size()):
        areas, mine = channel.areas(shards[me].dtype), slice(at.stop - at.start)
        areas[me][mine].copy_(shards[me][at])
        yield
        for index, area in enumerate(areas):
            if index != me:
                shards[index][at].copy_(area[mine])


def _ring_shift(channel: Channel, out: Tensor, x: Tensor) -> Rounds:
    """Set `out` to the previous rank's x, 1-D.  The first rank receives the last rank's."""
    for at in slices_of(x.numel(), HALF_BYTES // x.element_size()):
        areas, mine = channel.areas(x.dtype), slice(at.stop - at.start)
        areas[channel.index][mine].copy_(x[at])
        yield
        out[at].copy_(areas[channel.index - 1][mine])


def all_to_all_rounds(channel: Channel, out: Tensor, x: Tensor) -> Rounds:
    """Fill every row of `out` except this rank's own.

    With any strides, each element is copied once into shared memory and once out of it.
    """
    me, others = channel.index, channel.size - 1
    for block in _blocks(x.shape[1:], HALF_BYTES // x.element_size() // others):
        leaving, arriving = x[:, *block], out[:, *block]
        shape = (others, *leaving.shape[1:])
        # A rank's area has no row for the rank itself.
        areas = [area[: prod(shape)].view(shape) for area in channel.areas(x.dtype)]
        areas[me][:me].copy_(leaving[:me])
        areas[me][me:].copy_(leaving[me + 1 :])
        yield
        for index, area in enumerate(areas):
            if index != me:
                arriving[index].copy_(area[me - (me > index)])


def uneven_all_to_all_rounds(channel: Channel, out: Tensor, x: Tensor, sends: Counts, receives: Counts) -> Rounds:
    """Fill `out`, 1-D, with what every rank sends to this rank, in rank order.  Counts are in elements.

    In the first round, a rank's area begins with the counts that it sends to each rank.  Then its elements follow in
    order, without those for itself.
    """
    me, first, mine = channel.index, sum(sends[: channel.index]), sends[channel.index]
    leaving = [(0, x[:first]), (first, x[first + mine :])]
    arriving = out.split(list(receives))
    arriving[me].copy_(x[first : first + mine])
    sent_counts = torch.tensor([*sends[:me], 0, *sends[me + 1 :]])
    header = sent_counts.nbytes // x.element_size()
    at, end, length, table = 0, 1, HALF_BYTES // x.element_size() - header, list[list[int]]()
    while at < end:
        areas, counts = [area[header:] for area in channel.areas(x.dtype)], channel.areas(sent_counts.dtype)
        if not table:
            counts[me][: channel.size].copy_(sent_counts)
        for start, elements in leaving:
            _copy_overlap(areas[me][:length], at, elements, start)
        yield
        if not table:
            table = [area[: channel.size].tolist() for area in counts]
            if (sent := [row[me] for row in table]) != [*receives[:me], 0, *receives[me + 1 :]]:
                raise OrderError(f"ranks send {sent} elements where {list(receives)} are expected")
        for index, row in enumerate(table):
            if index != me:
                _copy_overlap(arriving[index], sum(row[:me]), areas[index][:length], at)
        at, end = at + length, max(map(sum, table))


def _copy_overlap(target: Tensor, first: int, source: Tensor, start: int) -> None:
    """Copy the elements that two intervals of one sequence have in common.

    `first`, `start`: where the target and the source begin in the sequence.
    """
    low, high = max(first, start), min(first + len(target), start + len(source))
    if low < high:
        target[low - first : high - first].copy_(source[low - start : high - start])


def _blocks(shape: Sequence[int], longest: int) -> list[tuple[int | slice, ...]]:
    """Return indices that cut a tensor into blocks of at most `longest` elements.

    An empty tensor is one block, as in `slices_of`.
    """
    if prod(shape) <= longest:
        return [()]
    inner = prod(shape[1:])
    if inner > longest:
        return [(index, *rest) for index in range(shape[0]) for rest in _blocks(shape[1:], longest)]
    return [(rows,) for rows in slices_of(shape[0], longest // inner)]
