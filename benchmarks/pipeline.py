"""Our pipeline schedules beside torch.distributed.pipelining, on two ranks of one machine.

    python -m benchmarks.pipeline [--schedule gpipe,1f1b,...] [--microbatches 8] [--rounds 7] [--model tiny|small]

    one round      barrier | ours | barrier | peer | barrier | floor | barrier | peer | barrier | ours | ...
    ours           Engine.train_step: forward, backward, norm and loss over both ranks, fused AdamW
    peer           the same Llama in plain torch modules, with the same initial weights, cut into stages, under a torch
                   schedule; then fused AdamW and zero_grad
    floor          the peer's modules on this rank's micro-batches without any communication, and the idle time that the
                   schedule itself prescribes; the work of each schedule is measured, its bubble is computed

Both engines live in the same two processes, one thread each, and take turns, so that a disturbance hits both.  A step
takes as long as its slower rank.  The first three losses must agree, or nothing is reported.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import multiprocessing as mp
import os
import platform
import re
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by every optimizer; once here instead of once per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from megazero.checkpoint.gather import gather_logical
from megazero.comm.collectives import gather_objects
from megazero.config import RunConfig, resolve
from megazero.config.schema import ModelConfig
from megazero.engine import Engine, initialize
from megazero.models.gpt import MicroBatch
from megazero.models.stages import StageLayout, cut_evenly
from megazero.parallel_state import ParallelState, RankGrid
from megazero.schedules.action import Placement, loop, v_shape
from megazero.schedules.generators import FAMILIES
from megazero.schedules.simulate import simulate

PP, LR, CHECKED_STEPS, WARMUP_STEPS = 2, 3e-4, 3, 2
LOSS_TOLERANCE = 1e-4
MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "vocab_size": 512, "seq_len": 128},
    "small": {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "vocab_size": 8192, "seq_len": 256},
}


@dataclass(frozen=True)
class Contest:
    """One of our schedules and its peer.

    Args:
        ours: the name in the configuration.
        peer: the class of torch.distributed.pipelining.
        placement: where the peer's stages run.
    """

    ours: str
    peer: type
    placement: Placement


CONTESTS: dict[str, Contest] = {
    "gpipe": Contest("gpipe", ScheduleGPipe, loop(PP)),
    "1f1b": Contest("1f1b", Schedule1F1B, loop(PP)),
    "interleaved": Contest("interleaved", ScheduleInterleaved1F1B, loop(PP, 2)),
    "zb-h1": Contest("zb-h1", ScheduleInterleavedZeroBubble, loop(PP, 2)),
    "zb-h1, one chunk": Contest("zb-h1", ScheduleInterleavedZeroBubble, loop(PP, 1)),
    "zbv": Contest("zbv", ScheduleZBVZeroBubble, v_shape(PP)),
}


@dataclass(frozen=True)
class Setting:
    """What is the same for every contest of a run."""

    model: str
    microbatches: int
    micro_batch_size: int
    rounds: int
    steps: int  # of each engine in a round
    zero_stage: int

    @property
    def samples(self) -> int:
        """Samples in an optimizer step."""
        return self.microbatches * self.micro_batch_size


# ---------------------------------------------------------------------------------------------------------------------
# The peer's model: Llama in plain torch modules, [batch, seq, hidden]


class PlainBlock(nn.Module):
    """One Llama layer; q|k|v and gate|up are one matrix each, as in ours."""

    def __init__(self, model: ModelConfig, layer: int, weights: dict[str, Tensor], rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()

        def linear(*names: str) -> nn.Linear:
            value = torch.cat([weights[f"model.layers.{layer}.{name}.weight"] for name in names])
            made = nn.Linear(value.shape[1], value.shape[0], bias=False)
            made.weight.data.copy_(value)
            return made

        def gain(name: str) -> nn.Parameter:
            return nn.Parameter(weights[f"model.layers.{layer}.{name}.weight"].clone())

        self.heads, self.eps, self.rope = model.num_heads, model.norm_eps, rope
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = linear("self_attn.o_proj")
        self.gate_up, self.down = linear("mlp.gate_proj", "mlp.up_proj"), linear("mlp.down_proj")
        self.attention_gain, self.mlp_gain = gain("input_layernorm"), gain("post_attention_layernorm")

    def _rotate(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * self.rope[0] + torch.cat([-high, low], dim=-1) * self.rope[1]

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        normed = F.rms_norm(x, (hidden,), self.attention_gain, self.eps)
        heads = self.qkv(normed).view(batch, seq, 3 * self.heads, hidden // self.heads).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden))
        gate, up = self.gate_up(F.rms_norm(x, (hidden,), self.mlp_gain, self.eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PlainStage(nn.Module):
    """The layers of one pipeline stage: int64 [batch, seq] or hidden states -> hidden states or logits."""

    def __init__(self, model: ModelConfig, layout: StageLayout, weights: dict[str, Tensor]) -> None:
        super().__init__()
        size = model.hidden_size // model.num_heads
        frequency = model.rope_theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.outer(torch.arange(model.seq_len, dtype=torch.float64), frequency).repeat(1, 2)
        rope = angle.cos().float(), angle.sin().float()
        self.has_embedding, self.has_head, self.eps = layout.has_embedding, layout.has_head, model.norm_eps
        if layout.has_embedding:
            self.embedding = nn.Parameter(weights["model.embed_tokens.weight"].clone())
        self.blocks = nn.ModuleList(PlainBlock(model, layer, weights, rope) for layer in layout.layers)
        if layout.has_head:
            self.gain = nn.Parameter(weights["model.norm.weight"].clone())
            self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
            self.head.weight.data.copy_(weights["lm_head.weight"])

    def forward(self, x: Tensor) -> Tensor:
        if self.has_embedding:
            x = F.embedding(x, self.embedding)
        for block in self.blocks:
            x = block(x)
        return self.head(F.rms_norm(x, self.gain.shape, self.gain, self.eps)) if self.has_head else x


def _adamw(parameters: Sequence[nn.Parameter], config: RunConfig, lr: float) -> torch.optim.AdamW:
    given = config.optimizer
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": given.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=given.betas, eps=given.eps, fused=True)


# ---------------------------------------------------------------------------------------------------------------------
# The three that are timed.  Each has step(tokens, labels: int64 [samples, seq]).


class Ours:
    """The engine under one schedule."""

    def __init__(self, contest: Contest, setting: Setting, rank: int) -> None:
        parallel: dict[str, Any] = {"pp": PP, "schedule": contest.ours}
        if contest.ours == "interleaved":
            parallel["virtual_stages"] = 2
        config = {
            "model": {"family": "llama", **MODELS[setting.model]},
            "parallel": parallel,
            "zero": {"stage": setting.zero_stage},
            "precision": {"dtype": "fp32"},
            "optimizer": {"lr": LR, "grad_clip": 0.0},
            "training": {"micro_batch_size": setting.micro_batch_size, "accumulation": setting.microbatches, "seed": 7},
        }
        self.config = resolve(RunConfig.model_validate(config), PP).config
        self.state = ParallelState(RankGrid(pp=PP), rank, timeout_seconds=120)
        self.engine: Engine = initialize(self.config, self.state)
        self._size = setting.micro_batch_size

    def weights(self) -> dict[str, Tensor]:
        """Every logical tensor of the model, on every rank."""
        mine = dict(gather_logical(self.engine.sharded_model.sharded_state, "model", self.engine.state))
        parts = gather_objects({name: tensor.clone() for name, tensor in mine.items()}, self.engine.state.world)
        return {name: tensor for part in parts for name, tensor in part.items()}

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """Mean loss, on every rank."""
        batches = [
            MicroBatch(torch.arange(at, at + self._size), t.t().contiguous(), label.t().contiguous())
            for at, t, label in zip(
                range(0, len(tokens), self._size), tokens.split(self._size), labels.split(self._size), strict=True
            )
        ]
        return self.engine.train_step(batches, LR).loss


class Peer:
    """torch.distributed.pipelining on plain modules, as fast as its options allow.

    No whole-batch outputs are merged, and the mean is taken in the loss instead of in a pass over all gradients.
    """

    def __init__(self, contest: Contest, setting: Setting, rank: int, config: RunConfig, weights: dict[str, Tensor]):
        layouts = cut_evenly(config.model.num_layers, len(contest.placement))
        mine = [index for index, (at, _) in enumerate(contest.placement) if at == rank]
        self.modules = [PlainStage(config.model, layouts[index], weights) for index in mine]
        self.takes_tokens = any(module.has_embedding for module in self.modules)
        self.takes_labels = any(module.has_head for module in self.modules)
        stages = [
            PipelineStage(module, index, len(layouts), torch.device("cpu"))
            for module, index in zip(self.modules, mine, strict=True)
        ]
        count = setting.microbatches

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / count

        is_single = contest.peer in (ScheduleGPipe, Schedule1F1B)
        self.schedule = contest.peer(stages[0] if is_single else stages, count, loss_fn=loss, scale_grads=False)
        self.optimizer = _adamw([p for module in self.modules for p in module.parameters()], config, LR)

    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        """Mean loss, on the rank of the last stage."""
        losses: list[Tensor] = []
        self.schedule.step(
            *([tokens] if self.takes_tokens else []),
            target=labels if self.takes_labels else None,
            losses=losses if self.takes_labels else None,
            return_outputs=False,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).detach().sum()) if losses else None


class Floor:
    """The peer's modules on this rank's micro-batches, one after the other, fed with constants; nothing is sent."""

    def __init__(self, peer: Peer, setting: Setting, config: RunConfig) -> None:
        self.modules = copy.deepcopy(peer.modules)
        self.optimizer = _adamw([p for module in self.modules for p in module.parameters()], config, 0.0)
        self._size = setting.micro_batch_size
        self._shape = (self._size, config.model.seq_len, config.model.hidden_size)
        self.passes_seconds = self.optimizer_seconds = 0.0

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        """Leaves its times in `passes_seconds` and `optimizer_seconds`."""
        begin = time.perf_counter()
        for part, label in zip(tokens.split(self._size), labels.split(self._size), strict=True):
            for module in self.modules:
                x = part if module.has_embedding else torch.full(self._shape, 0.1, requires_grad=True)
                y = module(x)
                if module.has_head:
                    F.cross_entropy(y.flatten(0, 1), label.flatten()).backward()
                else:
                    y.backward(torch.full(self._shape, 1e-3))
        passes = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.passes_seconds, self.optimizer_seconds = passes - begin, time.perf_counter() - passes


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks


def _batch(config: RunConfig, setting: Setting, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (setting.samples, config.model.seq_len + 1)
    samples = torch.randint(0, config.model.vocab_size, shape, generator=generator)
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def _measure(rank: int, name: str, setting: Setting, with_peer: bool) -> dict[str, Any]:
    """One contest on one rank.  Returns its seconds, [round][step], by engine, and the losses of the checked steps."""
    contest = CONTESTS[name]
    ours = Ours(contest, setting, rank)
    weights = ours.weights()
    peer = Peer(contest, setting, rank, ours.config, weights) if with_peer else None
    del weights
    losses = []
    for step in range(CHECKED_STEPS):
        batch = _batch(ours.config, setting, step)
        losses.append((ours.step(*batch), peer.step(*batch) if peer else None))
    floor = Floor(peer, setting, ours.config) if peer else None
    named: list[tuple[str, Callable[..., Any]]] = [("ours", ours.step)]
    if peer and floor:
        named += [("peer", peer.step), ("floor", floor.step)]
    found: dict[str, list[list[Any]]] = {key: [] for key, _ in named}
    for number in range(-WARMUP_STEPS, setting.rounds):
        times: dict[str, list[Any]] = {key: [] for key, _ in named}
        for turn in range(setting.steps if number >= 0 else 1):
            batch = _batch(ours.config, setting, CHECKED_STEPS + turn)
            for key, step_of in named if turn % 2 == 0 else named[::-1]:
                dist.barrier()
                begin = time.perf_counter()
                step_of(*batch)
                times[key].append(time.perf_counter() - begin)
                if key == "floor" and floor:
                    times[key][-1] = (floor.passes_seconds, floor.optimizer_seconds)
        if number >= 0:
            for key, values in times.items():
                found[key].append(values)
    return {"seconds": found, "losses": losses}


def _main(rank: int, store: str, body: Callable[..., Any], args: tuple[Any, ...], out: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        torch.set_num_threads(1)
        timeout = datetime.timedelta(seconds=120)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PP, timeout=timeout)
        answer = ("ok", body(rank, *args))
    except BaseException as error:
        answer = ("error", (f"{type(error).__name__}: {error}", traceback.format_exc()))
    out.send(answer)
    out.close()
    os._exit(0)  # gloo's threads may still wait for a lost rank


class RankFailedError(RuntimeError):
    """A rank raised, died or did not finish."""


def run_ranks(body: Callable[..., Any], *args: Any, timeout: float = 600) -> list[Any]:
    """body(rank, *args) on two forked gloo ranks; results in rank order.  Raises: RankFailedError."""
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(PP):
            receiver, sender = context.Pipe(duplex=False)
            given = (rank, str(Path(folder) / "store"), body, args, sender)
            processes.append(context.Process(target=_main, args=given, daemon=True))
            processes[-1].start()
            sender.close()
            pipes.append(receiver)
        try:
            results: dict[int, Any] = {}
            while len(results) < PP:
                ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], timeout)
                if not ready:
                    raise RankFailedError(f"no rank finished within {timeout} s")
                rank = pipes.index(ready[0])
                try:
                    kind, results[rank] = pipes[rank].recv()
                except EOFError:
                    raise RankFailedError(f"rank {rank} died without a result") from None
                if kind == "error":
                    short, trace = results[rank]
                    raise RankFailedError(f"rank {rank}: {short}") from RuntimeError(trace)
            return [results[rank] for rank in range(PP)]
        finally:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                process.join()


# ---------------------------------------------------------------------------------------------------------------------
# What it says


@dataclass(frozen=True)
class Row:
    """What one contest measured: milliseconds of a step (median, least, most), and ours over the peer.

    Args:
        ratio_of_medians: over all steps.
        ratio: median over the rounds of a round's ratio of medians.
        ratio_range: least and most of a round's ratio.
        floor: milliseconds.
        loss_difference: largest relative difference of the checked steps.
        error: why there is no peer.
    """

    schedule: str
    peer: str
    ours_ms: tuple[float, float, float]
    peer_ms: tuple[float, float, float] | None = None
    ratio_of_medians: float | None = None
    ratio: float | None = None
    ratio_range: tuple[float, float] | None = None
    floor_ms: float | None = None
    loss_difference: float | None = None
    error: str | None = None


def _spread(seconds: list[list[float]]) -> tuple[float, float, float]:
    flat = [value * 1e3 for values in seconds for value in values]
    return statistics.median(flat), min(flat), max(flat)


def _slower_rank(ranks: list[dict[str, Any]], key: str) -> list[list[float]]:
    both = [rank["seconds"][key] for rank in ranks]
    return [[max(pair) for pair in zip(*values, strict=True)] for values in zip(*both, strict=True)]


def _floor_ms(ranks: list[dict[str, Any]], contest: Contest, microbatches: int) -> float:
    """The busier rank's work, and the other's share in the idle time that the schedule prescribes.

    For gpipe and 1f1b with equal ranks this is (m + p - 1) / m times the work, plus the optimizer.
    """
    family = FAMILIES[contest.ours]
    schedule = family.generate(PP, microbatches, family.chunks or 2)
    idle = simulate(schedule).makespan / (3 * microbatches) - 1  # forward, backward and weights take 1 each
    passes, stepping = [], []
    for rank in ranks:
        values = [value for values in rank["seconds"]["floor"] for value in values]
        passes.append(statistics.median(value[0] for value in values))
        stepping.append(statistics.median(value[1] for value in values))
    return (max(passes) + idle * min(passes) + max(stepping)) * 1e3


def contest_row(name: str, setting: Setting) -> Row:
    """Measure one contest.  Raises: RankFailedError, and ValueError where the losses differ."""
    contest = CONTESTS[name]
    chunks = len(contest.placement) // PP
    title = contest.peer.__name__ + (f", {chunks} chunks" if chunks > 1 else "")
    try:
        ranks = run_ranks(_measure, name, setting, True)
    except RankFailedError as error:
        alone = run_ranks(_measure, name, setting, False)
        return Row(name, title, _spread(_slower_rank(alone, "ours")), error=str(error).splitlines()[0])
    last = contest.placement[-1][0]
    difference = max(abs(a - b) / abs(b) for a, b in ranks[last]["losses"])
    if difference > LOSS_TOLERANCE:
        raise ValueError(f"{name}: losses (ours, peer) {ranks[last]['losses']} differ by more than {LOSS_TOLERANCE}")
    ours, peer = _slower_rank(ranks, "ours"), _slower_rank(ranks, "peer")
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(ours, peer, strict=True)]
    return Row(
        name,
        title,
        _spread(ours),
        _spread(peer),
        _spread(ours)[0] / _spread(peer)[0],
        statistics.median(ratios),
        (min(ratios), max(ratios)),
        _floor_ms(ranks, contest, setting.microbatches),
        difference,
    )


HEADS = ("schedule", "peer", "ours ms", "peer ms", "ratio of medians", "ratio, by round", "floor ms", "loss diff")


def _cells(row: Row) -> tuple[str, ...]:
    def times(values: tuple[float, float, float]) -> str:
        return f"{values[0]:.1f} ({values[1]:.1f} to {values[2]:.1f})"

    if row.peer_ms is None or row.ratio_range is None:
        return row.schedule, row.peer, times(row.ours_ms), f"cannot run: {row.error}", "", "", "", ""
    low, high = row.ratio_range
    return (
        row.schedule,
        row.peer,
        times(row.ours_ms),
        times(row.peer_ms),
        f"{row.ratio_of_medians:.3f}",
        f"{row.ratio:.3f} ({low:.3f} to {high:.3f})",
        f"{row.floor_ms:.1f}",
        f"{row.loss_difference:.1e}",
    )


def table(rows: Sequence[Row]) -> str:
    """Markdown, aligned for the terminal."""
    cells = [HEADS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADS))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def machine() -> dict[str, str]:
    """Where this runs."""
    found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "cpu": found[1] if found else platform.processor(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def main() -> None:
    """Measure, print one table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="gpipe,1f1b,interleaved,zb-h1,zbv", help="comma-separated")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of each in a round")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--zero-stage", type=int, default=1)
    given = parser.parse_args()
    setting = Setting(
        given.model, given.microbatches, given.micro_batch_size, given.rounds, given.steps, given.zero_stage
    )
    names = [name for name in CONTESTS if name.split(",")[0] in given.schedule.split(",")]
    rows = []
    for name in names:
        rows.append(contest_row(name, setting))
        print("  ".join(_cells(rows[-1])), flush=True)
    print()
    print(table(rows))
    print(json.dumps({**machine(), **asdict(setting), "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
