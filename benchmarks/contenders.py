"""megazero itself, the plain loop on one device, and the floors that nothing with the same compute can go below."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.models import PlainStage, adamw, loss_of
from benchmarks.setting import GRAD_CLIP, LR, Setting
from benchmarks.worlds import Work
from megazero.checkpoint.save import gather_logical
from megazero.config import RunConfig
from megazero.cpu.processor import schedule_as_batch_job
from megazero.engine import Engine, initialize
from megazero.layers import linear
from megazero.models.gpt import MicroBatch
from megazero.models.stages import cut_evenly
from megazero.parallel_state import Links, ParallelState, RankGrid
from megazero.schedules.proof import simulate
from megazero.schedules.registry import SCHEDULES


def initial_weights(config: RunConfig) -> dict[str, Tensor]:
    """What every contender starts from, by logical name; of a configuration for one rank, a function of its seed alone."""
    engine = initialize(config, ParallelState(RankGrid(), 0, Links(timeout_seconds=60)))
    found = gather_logical(engine.sharded_model.sharded_state, "model", engine.state)
    return {name: tensor.clone() for name, tensor in found}


def write_weights(setting: Setting, file: Path) -> None:
    """Draw the initial weights of a row's model into a safetensors file."""
    save_file(initial_weights(Setting(setting.model, 1).config()), file)


class Megazero:
    """The engine.

    Args:
        products: "torch" for the products that the peers use, "fastest" for what a run has.
        shares_memory: ranks of one host exchange through memory, as in a run; False takes gloo, as the peers do.
        options: of the configuration, as in `Setting.config`.
    """

    def __init__(
        self,
        setting: Setting,
        rank: int,
        weights: Path,
        *,
        products: str,
        shares_memory: bool = True,
        options: Sequence[str] = (),
    ) -> None:
        if products == "torch":
            linear.cpu_product = lambda: None  # type: ignore[assignment]
        schedule_as_batch_job()  # as a run does
        grid = RankGrid(tp=setting.tp, dp=setting.dp, pp=setting.pp)
        local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        state = ParallelState(
            grid, rank, Links(timeout_seconds=120, local_world_size=local_world_size, shares_memory=shares_memory)
        )
        self.engine: Engine = initialize(setting.config(options), state)
        self.dp_index = self.engine.state.dp.index
        self._size = setting.micro_batch_size

    def meter(self) -> int:
        """Bytes that this rank has sent, as ring volume."""
        return sum(self.engine.state.traffic.sent_bytes.values())

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        batches = [
            MicroBatch(torch.arange(at, at + self._size), t.t().contiguous(), label.t().contiguous())
            for at, t, label in zip(
                range(0, len(tokens), self._size), tokens.split(self._size), labels.split(self._size), strict=True
            )
        ]
        return self.engine.train_step(batches, LR).loss


megazero = partial(Megazero, products="torch")
megazero_over_gloo = partial(Megazero, products="torch", shares_memory=False)
megazero_as_shipped = partial(Megazero, products="fastest")


class Plain:
    """One device, no framework."""

    def __init__(self, setting: Setting, rank: int, weights: Path) -> None:
        if setting.dtype != "fp32":
            raise ValueError(f"the plain loop computes in fp32 only, got dtype {setting.dtype}")
        self.dp_index = rank
        self.model = PlainStage(setting.model_config(), load_file(weights))
        self.optimizer = adamw(list(self.model.parameters()))
        self._accumulation = setting.accumulation

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        loss = passes(self.model, tokens, labels, self._accumulation)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def passes(model: torch.nn.Module, tokens: Tensor, labels: Tensor, accumulation: int) -> float:
    """Forward and backward of each micro-batch; the mean loss."""
    total = 0.0
    for part, label in zip(tokens.chunk(accumulation), labels.chunk(accumulation), strict=True):
        loss = loss_of(model(part), label) / accumulation
        loss.backward()
        total += loss.item()
    return total


class _Gather(torch.autograd.Function):
    """Stands for an all-gather that takes no time: [batch, part, width] -> a constant [batch, seq, width]."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, constant: Tensor) -> Tensor:
        ctx.length = part.shape[1]
        return constant.view_as(constant)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient[:, : ctx.length].contiguous(), None


class _Scatter(torch.autograd.Function):
    """Stands for a reduce-scatter that takes no time: [batch, seq, width] -> its first [batch, part, width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int, constant: Tensor) -> Tensor:
        ctx.constant = constant
        return x[:, :length].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.constant, None, None


class SplitSequence:
    """A stage as sequence parallelism runs it: norms and residuals on 1/tp of the sequence, the rest on all of it."""

    def __init__(self, stage: PlainStage, whole: torch.Size, tp: int) -> None:
        self._stage, self._part = stage, whole[1] // tp
        self._constant, self._gradient = torch.full(whole, 0.1), torch.full(whole, 1e-3)

    def __call__(self, x: Tensor) -> Tensor:
        stage = self._stage
        if stage.embedding is not None:
            x = self._scatter(stage.embedding(x))
        for block in stage.blocks:
            x = x + self._scatter(block.out(block.mix(block.qkv(self._gather(block.attention_norm(x))))))
            gate, up = block.gate_up(self._gather(block.mlp_norm(x))).chunk(2, dim=-1)
            x = x + self._scatter(block.down(F.silu(gate) * up))
        return x if stage.head is None or stage.norm is None else stage.head(self._gather(stage.norm(x)))

    def _gather(self, part: Tensor) -> Tensor:
        return _Gather.apply(part, self._constant)

    def _scatter(self, x: Tensor) -> Tensor:
        return _Scatter.apply(x, self._part, self._gradient)


class Floor:
    """A rank's own compute, fed with constants: its stages, its part of every matrix, its share of the optimizer.

    Nothing is sent.
    """

    def __init__(self, setting: Setting, rank: int, weights: Path) -> None:
        at = RankGrid(tp=setting.tp, dp=setting.dp, pp=setting.pp).coordinate(rank)
        self.dp_index, self._setting = at.dp, setting
        model, tp = setting.model_config(), setting.tp
        kind = SCHEDULES[setting.schedule]
        placement = kind.placement(setting.pp, kind.chunks or setting.virtual_stages)
        layouts = cut_evenly(model.num_layers, len(placement))
        mine = [index for index, (holder, _) in enumerate(placement) if holder == at.pp]
        loaded = load_file(weights)
        self._stages = [PlainStage(model, loaded, layouts[index], tp) for index in mine]
        for stage in self._stages:
            _cut(stage, at.tp, tp)
        whole = torch.Size((setting.micro_batch_size, model.seq_len, model.hidden_size))
        split = setting.sequence_parallel and tp > 1
        self._shape = (whole[0], whole[1] // tp, whole[2]) if split else whole
        self._runs = [SplitSequence(stage, whole, tp) if split else stage for stage in self._stages]
        parameters = [p for stage in self._stages for p in stage.parameters()]
        # under ZeRO a rank steps as many elements as 1 / dp of the model's
        self._parameters = self._stepped = parameters
        if setting.zero_stage:
            count = sum(p.numel() for p in parameters) // setting.dp
            self._stepped = [torch.nn.Parameter(torch.zeros(count // 4, 4))]
            self._stepped[0].grad = torch.zeros(count // 4, 4)
        self.optimizer = adamw(self._stepped)

    def step(self, tokens: Tensor, labels: Tensor) -> Work:
        begin = time.perf_counter()
        size = self._setting.micro_batch_size
        for part, label in zip(tokens.split(size), labels.split(size), strict=True):
            for stage, run in zip(self._stages, self._runs, strict=True):
                if stage.embedding is None:
                    x = torch.full(self._shape, 0.1, requires_grad=True)
                else:
                    x = part % stage.embedding.num_embeddings
                y = run(x)
                if stage.head is not None:
                    loss_of(y, label % y.shape[-1]).backward()
                else:
                    y.backward(torch.full(self._shape, 1e-3))
        between = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(self._stepped, GRAD_CLIP)
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        return Work(between - begin, time.perf_counter() - between)


def _cut(stage: PlainStage, index: int, tp: int) -> None:
    """Keep one tensor-parallel rank's part of every matrix."""

    def keep(linear: torch.nn.Linear, dim: int) -> None:
        linear.weight = torch.nn.Parameter(linear.weight.detach().chunk(tp, dim)[index].contiguous())

    if tp == 1:
        return
    for block in stage.blocks:
        keep(block.qkv, 0)
        keep(block.gate_up, 0)
        keep(block.out, 1)
        keep(block.down, 1)
    if stage.head is not None:
        keep(stage.head, 0)
    if stage.embedding is not None:
        rows = stage.embedding.weight.detach().chunk(tp)[index].clone()
        stage.embedding = torch.nn.Embedding.from_pretrained(rows, freeze=False)


def idle_share(setting: Setting) -> float:
    """Idle time that the schedule prescribes, in parts of a rank's work: (p - 1) / m for GPipe and 1F1B."""
    if setting.pp == 1:
        return 0.0
    kind = SCHEDULES[setting.schedule]
    chunks = kind.chunks or setting.virtual_stages
    schedule = kind.build(setting.pp, setting.accumulation, chunks)
    return float(simulate(schedule).makespan / (3 * setting.accumulation) - 1)


def floor_seconds(works: list[Work], idle: float) -> float:
    """A step's floor: the busiest rank's work, and idle times in which the other ranks fill or drain the pipeline."""
    times = [work.passes for work in works]
    busiest = max(times)
    others = (sum(times) - busiest) / (len(times) - 1) if len(times) > 1 else busiest
    return busiest + idle * others + max(work.rest for work in works)
