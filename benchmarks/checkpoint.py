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
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.report import machine
from megazero.checkpoint.save import gather_logical
from megazero.checkpoint.saver import Saver
from megazero.comm.collectives import gather_objects
from megazero.config import RunConfig, resolve
from megazero.engine import Engine, Position, initialize
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import ParallelState, RankGrid
from megazero.plan.processes import in_processes

DP, LR, NORMAL_STEPS, MOST_STEPS_BEHIND = 2, 1e-5, 2, 20
HIDDEN, VOCABULARY = 768, 8192
MOMENTS = ("exp_avg", "exp_avg_sq")
LAYER_PARAMETERS = 4 * HIDDEN**2 + 3 * HIDDEN * 2048 + 2 * HIDDEN
STATE_BYTES = 12  # of a parameter: the fp32 weight and two moments


@dataclass(frozen=True)
class Setting:
    """What is the same for all rounds of a run."""

    stage: int
    layers: int
    micro_batch_size: int
    seq_len: int
    rounds: int
    directory: str


# ---------------------------------------------------------------------------------------------------------------------
# Those that are timed


class Ours:
    """The engine, and the saver that writes behind it."""

    def __init__(self, setting: Setting, rank: int) -> None:
        config = {
            "model": {
                "family": "llama",
                "hidden_size": HIDDEN,
                "num_layers": setting.layers,
                "num_heads": 12,
                "ffn_hidden_size": 2048,
                "vocab_size": VOCABULARY,
                "seq_len": setting.seq_len,
            },
            "zero": {"stage": setting.stage},
            "precision": {"dtype": "fp32"},
            "optimizer": {"lr": LR},
            "training": {"micro_batch_size": setting.micro_batch_size, "accumulation": 1, "seed": 7},
        }
        self.config = resolve(RunConfig.model_validate(config), DP).config
        self.state = ParallelState(RankGrid(dp=DP), rank, timeout_seconds=120, local_world_size=DP)
        self.engine: Engine = initialize(self.config, self.state)
        self.durable = threading.Event()
        self.saver = Saver(
            self.engine.sharded_model.sharded_state,
            self.state,
            host_memory_bytes=None,
            axes=self.state.saving_axes(120),
            report=lambda _: self.durable.set(),
        )
        shape = (setting.micro_batch_size, setting.seq_len + 1)
        tokens = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(rank))
        ids = torch.arange(setting.micro_batch_size) + rank * setting.micro_batch_size
        self._batch = MicroBatch(ids, tokens[:, :-1].t().contiguous(), tokens[:, 1:].t().contiguous())

    def step(self) -> None:
        """A training step."""
        self.engine.train_step([self._batch], LR)

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
            for kind in state.kinds
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
    normal = [_timed(ours.step) for _ in range(NORMAL_STEPS)]
    call = 0.0

    def step_and_save() -> None:
        nonlocal call
        ours.step()
        begin = time.perf_counter()
        ours.begin_save(place)
        call = time.perf_counter() - begin

    saving = _timed(step_and_save)
    behind = []
    while len(behind) < MOST_STEPS_BEHIND and ours.is_writing():
        behind.append(_timed(ours.step))
    ours.saver.finish()
    usual = statistics.mean(normal)
    found = {"step": usual, "step that saves": saving, "save, call": call}
    if behind:
        found["step, writing behind"] = statistics.mean(behind)
    return found


class _Contest:
    """All that is timed on one rank."""

    def __init__(self, rank: int, setting: Setting) -> None:
        self.rank, self.ours = rank, Ours(setting, rank)
        self.ours.step()  # AdamW has moments from now on
        self.plain = self.ours.written_here()
        self.bytes = sum(tensor.nbytes for tensor in self.plain.values())
        everyone = gather_objects({name: tuple(t.shape) for name, t in self.plain.items()}, self.ours.state.world)
        shapes = {name: shape for part in everyone for name, shape in part.items()}
        self.peer = Peer(shapes, rank, shards_weights=False)
        self.sharded = Peer(shapes, rank, shards_weights=True)
        self._memory = torch.ones(2, self.bytes, dtype=torch.uint8)
        self._kept = Path(setting.directory) / "sharded"  # only read, so one is enough
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


def _measure(rank: int, setting: Setting) -> dict[str, Any]:
    """Seconds of every round on one rank; the first round is not among them, but for what its save cost."""
    contest = _Contest(rank, setting)
    root = Path(setting.directory)
    rounds = [contest.round(root, forward=n % 2 == 0, checks=n == 0) for n in range(setting.rounds + 1)]
    return {"rounds": rounds[1:], "first": rounds[0], "bytes": contest.bytes}


# ---------------------------------------------------------------------------------------------------------------------
# What it says


@dataclass(frozen=True)
class Row:
    """One quantity: milliseconds (median, least, most), and the same of its ratio to another, taken within a round.

    Args:
        name: what was timed.
        ms: of the slower rank.
        beside: what the ratio is to.
        ratio: None where there is none.
        promise: the ratio is to be at most that.
    """

    name: str
    ms: tuple[float, float, float]
    beside: str = ""
    ratio: tuple[float, float, float] | None = None
    promise: float | None = None


def _spread(values: list[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def rows_of(rounds: list[dict[str, float]]) -> list[Row]:
    """Every quantity that was measured, with the ratios that matter."""

    def row(
        name: str, beside: str = "", of: Callable[[dict[str, float]], float] | None = None, most: Any = None
    ) -> Row:
        has = [one for one in rounds if name in one]
        ms = _spread([one[name] * 1e3 for one in has]) if has else (0.0, 0.0, 0.0)
        ratio = _spread([one[name] / of(one) for one in has]) if has and of is not None else None
        return Row(name, ms, beside, ratio, most)

    return [
        row("step"),
        row("copy"),
        row("save, call", "copy", lambda one: one["copy"]),
        row("step that saves", "1.3 steps + copy", lambda one: 1.3 * one["step"] + one["copy"], 1.0),
        row("step, writing behind", "step", lambda one: one["step"]),
        row("save, plain"),
        row("save, ours", "plain", lambda one: one["save, plain"], 1.2),
        row("save, dcp", "plain", lambda one: one["save, plain"]),
        row("save, dcp async", "plain", lambda one: one["save, plain"]),
        row("save, dcp async, call", "copy", lambda one: one["copy"]),
        row("load, dcp"),
        row("load, dcp sharded"),
        row("load, ours by hash", "dcp", lambda one: one["load, dcp"], 1.0),
        row("load, ours by hash", "dcp sharded", lambda one: one["load, dcp sharded"]),
        row("load, ours by size", "dcp", lambda one: one["load, dcp"], 1.0),
        row("load, ours by size", "dcp sharded", lambda one: one["load, dcp sharded"]),
    ]


HEADS = ("what", "ms", "beside", "ratio, by round", "promised")


def _cells(row: Row) -> tuple[str, ...]:
    median, least, most = row.ms
    ratio = "" if row.ratio is None else "{:.3f} ({:.3f} to {:.3f})".format(*row.ratio)
    promise = "" if row.promise is None else f"{row.promise:.1f}"
    return row.name, f"{median:.0f} ({least:.0f} to {most:.0f})", row.beside, ratio, promise


def table(rows: list[Row]) -> str:
    """Markdown, aligned for the terminal."""
    cells = [HEADS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADS))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def file_system(path: Path) -> str:
    """Type of the file system that a path lies on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    above = [(point, kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(above, key=lambda mount: len(mount[0]))[1]


def main() -> None:
    """Measure, print one table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument("--megabytes", type=float, default=500, help="of weights and moments; whole layers of 85 MB")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="of each rank; its step should take about 1 s")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7, help="after one that warms up")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where the files go, and are removed again")
    given = parser.parse_args()
    rest = given.megabytes * 1e6 / STATE_BYTES - 2 * HIDDEN * VOCABULARY
    layers = max(1, round(rest / LAYER_PARAMETERS))
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        setting = Setting(given.stage, layers, given.micro_batch_size, given.seq_len, given.rounds, directory)
        ranks = in_processes(2, _measure, setting, timeout=3600)
        kind = file_system(Path(directory))
    slower = [
        {name: max(one[name] for one in both) for name in both[0]}
        for both in zip(*(rank["rounds"] for rank in ranks), strict=True)
    ]
    rows = rows_of(slower)
    first = max(rank["first"]["save, call"] for rank in ranks)
    size = sum(rank["bytes"] for rank in ranks)
    print(f"{size / 1e6:.0f} MB on {kind}; the first save, whose memory is new, was called for {first * 1e3:.0f} ms")
    print(table(rows))
    result = {**machine(), **asdict(setting), "bytes": size, "file_system": kind, "first_call_ms": first * 1e3}
    print(json.dumps(result | {"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
