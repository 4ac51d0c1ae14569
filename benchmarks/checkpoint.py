"""What a checkpoint costs, beside plain files and torch.distributed.checkpoint, on two ranks of one machine.

    python -m benchmarks.checkpoint [--stage 1] [--megabytes 500] [--rounds 7] [--directory /tmp]

    one round      train    step | step | step, save | step | step ...      the last ones while a thread writes
                   copy     of as many bytes in host memory
                   save     ours | plain | dcp | dcp async                  training stands still; each until durable
                   load     ours by hash | ours by size                     after "save, ours"; from the page cache
                            dcp | dcp sharded                               after "save, dcp"

    ours           Engine.save with a Saver, and Engine.load: whole tensors, hashes, an index per kind, a manifest
    plain          safetensors.torch.save_file and fsync of the same tensors, each rank those that it writes in ours
    dcp            torch.distributed.checkpoint of the same state: weights whole on every rank, moments as DTensors
                   sharded by rows, which is what ZeRO 1 and 2 keep
    dcp sharded    the weights sharded as well, and left so

All of them live in the same two processes, one thread each, and take turns within a round, so that a disturbance hits all;
every second round they go in reverse.  What a round takes is that of its slower rank.  Files are removed as soon as they
have been read: a virtual machine gives free memory back to its host, and whoever needs more page cache than the one before
would pay for getting it again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.contenders import Megazero
from benchmarks.report import markdown, middle_of, number, spread
from benchmarks.setting import MODELS, ModelSize, Setting, positive
from megazero.checkpoint.save import gather_logical
from megazero.checkpoint.saver import Saver, snapshot_of
from megazero.comm.collectives import gather_objects
from megazero.engine import Position
from megazero.plan.processes import in_processes

DP, NORMAL_STEPS, MOST_STEPS_BEHIND = 2, 2, 20
HIDDEN, VOCABULARY = 768, 8192
MOMENTS = ("exp_avg", "exp_avg_sq")
LAYER_PARAMETERS = 4 * HIDDEN**2 + 3 * HIDDEN * 2048 + 2 * HIDDEN
SLACK = "1.3 steps + copy"
STATE_BYTES = 12  # of a parameter: the fp32 weight and two moments


# ---------------------------------------------------------------------------------------------------------------------
# Those that are timed


class Ours(Megazero):
    """The engine, and the saver that writes behind it."""

    def __init__(self, setting: Setting, rank: int) -> None:
        super().__init__(setting, rank, Path(), products="fastest")
        self.state, self.config, self._batch = self.engine.state, self.engine.config, setting.batch(0, rank)
        self.durable = threading.Event()
        snapshot = snapshot_of(self.engine.sharded_model.sharded_state, self.state, None)
        self.saver = Saver(snapshot, self.state.saving_axes(120), report=lambda _: self.durable.set())

    def train(self) -> None:
        """A step."""
        self.step(*self._batch)

    def begin_save(self, place: Path) -> None:
        """Until training may go on."""
        self.durable.clear()
        self.engine.save(place, Position(), "", saver=self.saver)

    def is_writing(self) -> bool:
        """The same answer on both ranks."""
        writing = torch.tensor(self.state.rank == 0 and not self.durable.is_set(), dtype=torch.int)
        dist.all_reduce(writing)
        return bool(writing)

    def save(self, place: Path) -> None:
        """Until it is durable."""
        self.begin_save(place)
        self.saver.finish()

    def load(self, place: Path, verify: str) -> None:
        """Into the engine, ready for the next step."""
        checkpoint = self.config.checkpoint.model_copy(update={"verify": verify})
        self.engine.config = self.config.model_copy(update={"checkpoint": checkpoint})
        self.engine.load(place, "")

    def written_here(self) -> dict[str, Tensor]:
        """The tensors that this rank writes, by kind and name; copies."""
        state = self.engine.sharded_model.sharded_state
        return {
            f"{kind}.{name}": tensor.clone()
            for kind in state.state_kinds
            for name, tensor in gather_logical(state, kind, self.state)
        }


def save_plainly(tensors: dict[str, Tensor], directory: Path, rank: int) -> None:
    """One safetensors file of this rank, durable."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{rank}.safetensors"
    save_file(tensors, path)
    for flushed in (path, directory):
        descriptor = os.open(flushed, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class Peer:
    """torch.distributed.checkpoint of the same state.

    Args:
        shapes: of every logical tensor, by kind and name.
        shards_weights: keep weights as DTensors too.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], rank: int, *, shards_weights: bool) -> None:
        self.returned_seconds = 0.0
        mesh = init_device_mesh("cpu", (DP,))
        generator = torch.Generator().manual_seed(0)
        self.state: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            whole = torch.randn(shape, generator=generator)
            self.state[name] = whole
            if shards_weights or name.startswith(MOMENTS):
                mine = whole.chunk(DP)[rank].clone()
                self.state[name] = DTensor.from_local(mine, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())

    def save(self, directory: Path) -> None:
        """Until it is durable."""
        dcp.save(self.state, storage_writer=FileSystemWriter(directory))

    def save_behind(self, directory: Path) -> None:
        """Until it is durable; `returned_seconds` is when training could have gone on."""
        begin = time.perf_counter()
        future: Any = dcp.async_save(self.state, storage_writer=FileSystemWriter(directory))
        self.returned_seconds = time.perf_counter() - begin
        future.result()

    def load(self, directory: Path) -> None:
        """Into the same tensors."""
        dcp.load(self.state, storage_reader=FileSystemReader(directory))

    def check(self, directory: Path) -> None:
        """Raises: ValueError where loading does not bring back what was saved."""
        local = [value.to_local() if isinstance(value, DTensor) else value for value in self.state.values()]
        before = [tensor.double().sum() for tensor in local]
        for tensor in local:
            tensor.zero_()
        self.load(directory)
        if before != [tensor.double().sum() for tensor in local]:
            raise ValueError("what torch.distributed.checkpoint loads is not what it saved")


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks


def _timed(action: Callable[..., Any], *args: Any) -> float:
    dist.barrier()
    begin = time.perf_counter()
    action(*args)
    return time.perf_counter() - begin


def _train(ours: Ours, place: Path) -> dict[str, float]:
    """Steps before, at and behind a save."""
    normal = [_timed(ours.train) for _ in range(NORMAL_STEPS)]
    call = 0.0

    def step_and_save() -> None:
        nonlocal call
        ours.train()
        begin = time.perf_counter()
        ours.begin_save(place)
        call = time.perf_counter() - begin

    saving = _timed(step_and_save)
    behind = []
    while len(behind) < MOST_STEPS_BEHIND and ours.is_writing():
        behind.append(_timed(ours.train))
    ours.saver.finish()
    found = {"step": mean(normal), "step that saves": saving, "save, call": call}
    return found | ({"step, writing behind": mean(behind)} if behind else {})


class _Contest:
    """All that is timed on one rank."""

    def __init__(self, rank: int, setting: Setting, root: Path) -> None:
        self.rank, self.ours = rank, Ours(setting, rank)
        self.ours.train()  # AdamW has moments from now on
        self.plain = self.ours.written_here()
        self.bytes = sum(tensor.nbytes for tensor in self.plain.values())
        everyone = gather_objects({name: tuple(t.shape) for name, t in self.plain.items()}, self.ours.state.world)
        shapes = {name: shape for part in everyone for name, shape in part.items()}
        self.peer = Peer(shapes, rank, shards_weights=False)
        self.sharded = Peer(shapes, rank, shards_weights=True)
        self._memory = torch.ones(2, self.bytes, dtype=torch.uint8)
        self._kept = root / "sharded"  # only read, so one is enough
        self.sharded.save(self._kept)

    def round(self, root: Path, *, forward: bool, checks: bool) -> dict[str, float]:
        """Seconds of one round, by what is timed."""
        found = _train(self.ours, root / "behind")
        self._remove(root / "behind")
        found["copy"] = _timed(lambda: self._memory[0].copy_(self._memory[1]))
        saves: dict[str, Callable[[Path], Any]] = {
            "save, ours": self.ours.save,
            "save, plain": lambda place: save_plainly(self.plain, place, self.rank),
            "save, dcp": self.peer.save,
            "save, dcp async": self.peer.save_behind,
        }
        loads: dict[str, dict[str, Callable[[Path], Any]]] = {
            "save, ours": {
                "load, ours by hash": lambda place: self.ours.load(place, "hash"),
                "load, ours by size": lambda place: self.ours.load(place, "size"),
            },
            "save, dcp": {"load, dcp": self.peer.load, "load, dcp sharded": lambda _: self.sharded.load(self._kept)},
        }
        for name in list(saves)[:: 1 if forward else -1]:
            place = root / name
            found[name] = _timed(saves[name], place)
            if checks and name == "save, dcp":
                self.peer.check(place)
                self.sharded.check(self._kept)
            for what, load in list(loads.get(name, {}).items())[:: 1 if forward else -1]:
                found[what] = _timed(load, place)
            self._remove(place)
        found["save, dcp async, call"] = self.peer.returned_seconds
        return found

    def _remove(self, place: Path) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(place)
        dist.barrier()


def _measure(rank: int, setting: Setting, rounds: int, root: Path) -> tuple[list[dict[str, float]], int]:
    """Seconds of every round on one rank, one that warms up before them, and the bytes that it writes."""
    contest = _Contest(rank, setting, root)
    return [contest.round(root, forward=n % 2 == 0, checks=n == 0) for n in range(rounds + 1)], contest.bytes


# ---------------------------------------------------------------------------------------------------------------------
# What it says


# What was timed, what its ratio is to, and what that ratio is to be at most.
ROWS: Sequence[tuple[str, str, float | None]] = (
    ("step", "", None),
    ("copy", "", None),
    ("save, call", "copy", None),
    ("step that saves", SLACK, 1.0),
    ("step, writing behind", "step", None),
    ("save, plain", "", None),
    ("save, ours", "save, plain", 1.2),
    ("save, dcp", "save, plain", None),
    ("save, dcp async", "save, plain", None),
    ("save, dcp async, call", "copy", None),
    ("load, dcp", "", None),
    ("load, dcp sharded", "", None),
    ("load, ours by hash", "load, dcp", 1.0),
    ("load, ours by hash", "load, dcp sharded", None),
    ("load, ours by size", "load, dcp", 1.0),
    ("load, ours by size", "load, dcp sharded", None),
)


def table(rounds: Sequence[dict[str, float]]) -> str:
    """Milliseconds, median and range, and the same of ratios within a round."""
    rows = []
    for name, beside, promise in ROWS:
        has = [{**one, SLACK: 1.3 * one["step"] + one["copy"]} for one in rounds if name in one]
        if has:
            ms = spread(middle_of([one[name] * 1e3 for one in has]), 0)
            ratio = spread(middle_of([one[name] / one[beside] for one in has]), 3) if beside else ""
            rows.append((name, ms, beside, ratio, number(promise, 1)))
    return markdown(("what", "ms", "beside", "ratio, by round", "promised"), rows)


def file_system(path: Path) -> str:
    """Type of the file system that a path lies on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    above = [(point, kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(above, key=lambda mount: len(mount[0]))[1]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument("--megabytes", type=float, default=500, help="of weights and moments; whole layers of 85 MB")
    parser.add_argument("--rounds", type=positive, default=7, help="after one that warms up")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where the files go, and are removed again")
    given = parser.parse_args()
    layers = round((given.megabytes * 1e6 / STATE_BYTES - 2 * HIDDEN * VOCABULARY) / LAYER_PARAMETERS)
    MODELS["saved"] = ModelSize(HIDDEN, max(1, layers), 12, VOCABULARY, seq_len=128, micro_batch_size=4)
    os.environ["LOCAL_WORLD_SIZE"] = str(DP)
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        setting = Setting("saved", DP, zero_stage=given.stage, micro_batch_size=4)
        ranks = in_processes(DP, _measure, setting, given.rounds, Path(directory), timeout=3600)
        kind = file_system(Path(directory))
    slower = [
        {name: max(one[name] for one in both) for name in both[0]}
        for both in zip(*(rounds for rounds, _ in ranks), strict=True)
    ]
    size, first = sum(nbytes for _, nbytes in ranks), slower[0]["save, call"]
    print(f"{size / 1e6:.0f} MB on {kind}; the first save, whose memory is new, was called for {first * 1e3:.0f} ms")
    print(table(slower[1:]))


if __name__ == "__main__":
    main()
