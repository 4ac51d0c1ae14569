"""Collectives and messages that move no data, between ranks that need not exist.

    make_fake(group, FakeBackend(TorchBackend, None, Alone()))
    all_reduce(x, tp).wait()          over an axis of that group: returns at once, and its bytes are counted as usual

A fake backend has the properties of the real backend that `comm` reads: whether it needs scratch memory, whether it runs in
the background, how many bytes it sends to other hosts.  A `GroupMeeting` checks that the ranks of a group start the same
operations; a rank that is simulated alone assumes that the others do the same as itself.

`FakeState` is the `ParallelState` of a simulated rank.  It makes the axes and groups of the real one, in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch

from torch import Tensor

from megazero.comm.backend import TorchBackend, over_contiguous, place_shard
from megazero.config import ResolvedRun
from megazero.parallel_state import Axis, Links, ParallelState
from megazero.parallel_state.axis import Counts, Traffic, Wait
from megazero.parallel_state.grid import Hosts, hosts_of
from megazero.parallel_state.state import Backend, Group
from megazero.plan.fake_tensors import Event, Message
from megazero.plan.simulated_world import Alone, GroupMeeting, SimulatedWorld
from megazero.zero import offload
from megazero.zero.file_store import FileStore

#: The purpose that names the groups of the ranks of one node.
HOST = "host"
Real: TypeAlias = type[Backend]


class RecordedTraffic(Traffic):
    """Counts traffic as usual, and also appends every operation to `events`, in order."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def add(self, axis: str, operation: str, sent_bytes: int, link_bytes: int = 0) -> None:
        super().add(axis, operation, sent_bytes, link_bytes)
        self.events.append(Message(operation, axis, sent_bytes, link_bytes))


def _holding(tensor: Tensor, wait: Wait) -> Wait:
    """Return a wait that keeps a tensor's storage alive.  It does not keep the tensor, whose hooks may refer to the wait."""
    return partial(lambda wait, _: wait(), wait, tensor.untyped_storage())


class FakeBackend:
    """A `parallel_state.Backend` that moves nothing but has the properties of a real backend.

    As in a real run, the sent tensor stays alive until the wait, and a gather on a CPU sends from its result.

    Args:
        real: the class of the real backend.
        hosts: the hosts of the group's ranks, for a backend that uses shared memory within a host.
        meeting: compares each operation with those of other simulated ranks, and makes its wait.
        fills: called with the result of each operation when it starts.
    """

    def __init__(
        self, real: Real, hosts: Hosts | None, meeting: Alone, fills: Callable[[Tensor], None] = lambda _: None
    ) -> None:
        self._real, self._is_nccl, self.meeting, self._fills = real, real is TorchBackend, meeting, fills
        self.needs_scratch, self.runs_by_itself = real.needs_scratch, real.runs_by_itself
        self.link_bytes = _link_bytes(real, hosts)

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait:
        return self._start("all_reduce", tensor, tensor, axis, op)

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait:
        self._fills(out)
        if not self._is_nccl:
            place_shard(out, shard, axis)
        sent = shard if self._is_nccl else out
        return _holding(sent, self.meeting.operation("all_gather", shard, axis, label))

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis) -> Wait:
        return self._start("reduce_scatter", out, full, axis)

    def all_to_all(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        if not self._is_nccl:
            out[axis.index].copy_(x[axis.index])
        start = partial(self._start, "all_to_all", axis=axis)
        # Ranks that copy out of each other's memory take any strides.
        return over_contiguous(out, x, start) if self.runs_by_itself else start(out, x)

    def all_to_all_rows(self, out: Tensor, x: Tensor, axis: Axis, *_: Counts) -> Wait:
        return self._start("all_to_all", out, x, axis)

    def ring_shift(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        return self._start("ring_shift", out, x, axis)

    def _start(self, name: str, out: Tensor, sent: Tensor, axis: Axis, label: str = "") -> Wait:
        self._fills(out)
        return _holding(sent, self.meeting.operation(name, sent, axis, label))

    def check_order(self) -> None:
        """No-op: labels are compared when an operation starts."""

    def close(self) -> None:
        """No-op: there is nothing to release."""


def _link_bytes(real: Real, hosts: Hosts | None) -> Callable[[str, Tensor, Axis], int]:
    if real is TorchBackend:
        return TorchBackend().link_bytes
    from megazero.cpu.sockets import SocketBackend  # a plan for GPUs works without the annex `cpu`
    from megazero.cpu.two_level import TwoLevelBackend, link_bytes_between

    if real is TwoLevelBackend and hosts is not None:
        return partial(link_bytes_between, hosts)
    return SocketBackend().link_bytes if real is SocketBackend else lambda *_: 0


def real_backend(ranks: Sequence[int], index: int, per_node: int, *, on_cuda: bool) -> tuple[Real, Hosts | None]:
    """Return the class of a group's backend in a real run, and on CPUs the hosts of its ranks.

    Args:
        ranks: global ranks of the group.
        index: this rank's index in `ranks`.
        per_node: ranks of a node, numbered consecutively.
        on_cuda: the run is on GPUs.
    """
    if on_cuda:
        return TorchBackend, None
    from megazero.cpu.transport import backend_between

    hosts = hosts_of([str(rank // per_node) for rank in ranks], index)
    return backend_between(hosts), hosts


def make_fake(group: Group, backend: FakeBackend) -> None:
    """Replace the backend and the messages of a group by fake ones."""
    group.backends["cpu"] = backend
    group.messages = backend.meeting


# ---- the state of a rank


class MadeGroup(NamedTuple):
    """A process group that this rank is a member of."""

    name: str
    ranks: tuple[int, ...]
    purpose: str


class FakeState(ParallelState):
    """The `ParallelState` of one simulated rank.

    Args:
        run: the resolved run.
        per_node: ranks of a node.
        on_cuda: use the backends of a run on GPUs; the tensors are on the CPU either way.
        world: the simulated ranks; None simulates this rank alone.
        traffic: counts the bytes sent.

    Attributes:
        made: the groups of this rank, in the order in which it makes them.
    """

    def __init__(
        self,
        run: ResolvedRun,
        rank: int,
        per_node: int,
        world: SimulatedWorld | None,
        traffic: Traffic,
        *,
        on_cuda: bool,
    ) -> None:
        self._simulated, self._on_cuda, self._count, self._traffic = world, on_cuda, 0, traffic
        self.made: list[MadeGroup] = []
        self._whole, seconds = run.grid, run.config.parallel.timeout_seconds
        local_size = min(per_node, self._whole.world_size)
        super().__init__(self._whole, rank, Links(None, seconds, local_size, shares_memory=not on_cuda))

    @property
    def device_type(self) -> str:
        """Type of the device of the real run, "cuda" or "cpu".  The tensors here are on the CPU."""
        return "cuda" if self._on_cuda else "cpu"

    def _started(self) -> int:
        return self._whole.world_size

    def _new_traffic(self) -> Traffic:
        return self._traffic

    def _group(self, ranks: tuple[int, ...], purpose: str, name: str) -> Group | None:
        return self._made_fake(super()._group(ranks, purpose, name), ranks, purpose, name)

    def _host_axis(self, name: str, ranks: tuple[int, ...]) -> Axis:
        axis = super()._host_axis(name, ranks)
        self._made_fake(axis.group, ranks, HOST, name)
        return axis

    def _made_fake(self, group: Group | None, ranks: tuple[int, ...], purpose: str, name: str) -> Group | None:
        if group is not None and group.messages is None and self.rank in ranks:
            real, hosts = real_backend(ranks, ranks.index(self.rank), self.local_world_size, on_cuda=self._on_cuda)
            make_fake(group, FakeBackend(real, hosts, self._meeting(ranks, purpose)))
            self.made.append(MadeGroup(name, ranks, purpose))
        return group

    def _meeting(self, ranks: tuple[int, ...], purpose: str) -> Alone:
        if self._simulated is None:
            return Alone()
        return GroupMeeting(self._simulated, self.rank, ranks, purpose, one_channel=self._on_cuda)

    def _process_group(self, ranks: tuple[int, ...], *_: object) -> Any:
        self._count += 1
        if self.rank in ranks and self._simulated is not None:
            GroupMeeting(self._simulated, self.rank, ranks, "", one_channel=True).made(self._count)
        return None


class UnmadeFile(FileStore):
    """A `FileStore` without a file, for tensors without data.  Every request completes at once."""

    def __init__(self, directory: Path, _: int, nbytes: int) -> None:
        self.path, self.nbytes, self.descriptor = directory, nbytes, -1
        self._used, self._arrays = 0, []

    def move(self, *_: object) -> Callable[[], None]:
        """No-op."""
        return lambda: None

    def submit(self, *_: object) -> Future[str | None]:
        """No-op."""
        done: Future[str | None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """No-op."""


@contextmanager
def without_files() -> Iterator[None]:
    """Make no files for offloaded state within a `with` block."""
    with patch.object(offload, "FileStore", UnmadeFile):
        yield
