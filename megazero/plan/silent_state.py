"""The `ParallelState` of a simulated rank: the real one's axes and groups, in the real order, over silent backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from megazero.config import ResolvedRun
from megazero.parallel_state import Axis, ParallelState
from megazero.parallel_state.groups import Group, Traffic
from megazero.plan.silent import Alone, Meeting, SilentBackend, make_silent, real_backend
from megazero.plan.simulated_world import GroupMeeting, SimulatedWorld
from megazero.zero import offload
from megazero.zero.file_store import FileStore

HOST = "host"
"""Purpose of the groups of a node's ranks."""


class MadeGroup(NamedTuple):
    """A process group that has this rank as a member."""

    ranks: tuple[int, ...]
    purpose: str


class SilentState(ParallelState):
    """The `ParallelState` of one simulated rank.

    Args:
        run: gives the grid and what depends on keys.
        per_node: ranks of a node.
        on_cuda: the backends are those of a run on GPUs; the tensors are on the CPU anyway.
        world: the simulated ranks; None for this one alone.
        traffic: counts what is sent.

    Attributes:
        made: the groups of this rank, in the order in which they are made.
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
        self._simulated, self._on_cuda, self._count = world, on_cuda, 0
        self.made: list[MadeGroup] = []
        parallel, zero = run.config.parallel, run.config.zero
        cpu, seconds = torch.device("cpu"), parallel.timeout_seconds
        grid = self._whole = run.grid
        super().__init__(
            grid,
            rank,
            cpu,
            seconds,
            zero.shard_group_size,
            min(per_node, grid.world_size),
            shares_memory=not on_cuda,
            cp_ulysses=parallel.ulysses,
            traffic=traffic,
        )

    @property
    def device_type(self) -> str:
        """Type of the device that the run computes on; the tensors are on the CPU."""
        return "cuda" if self._on_cuda else "cpu"

    def _started(self) -> int:
        return self._whole.world_size

    def _group(self, ranks: tuple[int, ...], purpose: str, name: str) -> Group | None:
        return self._silenced(super()._group(ranks, purpose, name), ranks, purpose)

    def _host_axis(self, name: str, ranks: tuple[int, ...]) -> Axis:
        axis = super()._host_axis(name, ranks)
        self._silenced(axis.group, ranks, HOST)
        return axis

    def _silenced(self, group: Group | None, ranks: tuple[int, ...], purpose: str) -> Group | None:
        if group is not None and group.messages is None and self.rank in ranks:
            real, hosts = real_backend(ranks, ranks.index(self.rank), self.local_world_size, on_cuda=self._on_cuda)
            make_silent(group, SilentBackend(real, hosts, self._meeting(ranks, purpose)))
            self.made.append(MadeGroup(ranks, purpose))
        return group

    def _meeting(self, ranks: tuple[int, ...], purpose: str) -> Meeting:
        if self._simulated is None:
            return Alone()
        return GroupMeeting(self._simulated, self.rank, ranks, purpose, one_channel=self._on_cuda)

    def _process_group(self, ranks: tuple[int, ...], *_: object) -> Any:
        self._count += 1
        if self.rank in ranks and self._simulated is not None:
            GroupMeeting(self._simulated, self.rank, ranks, "", one_channel=True).made(self._count)
        return None


class UnmadeFile(FileStore):
    """A `FileStore` without a file, for tensors without data: every request is done at once."""

    def __init__(self, directory: Path, _: int, nbytes: int) -> None:
        self.path, self.nbytes, self.descriptor = directory, nbytes, -1
        self._used, self._arrays = 0, []

    def move(self, *_: object) -> Callable[[], None]:
        """Nothing moves."""
        return lambda: None

    def submit(self, *_: object) -> Future[str | None]:
        """Nothing is queued."""
        done: Future[str | None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """There is nothing to free."""


@contextmanager
def without_files() -> Iterator[None]:
    """A context in which no file is made for offloaded state."""
    with patch.object(offload, "FileStore", UnmadeFile):
        yield
