"""torch.distributed.pipelining, as fast as its options allow.

No whole-batch outputs are merged, and the mean over micro-batches is taken in the loss instead of in a pass over all
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.models import PlainStage, adamw, loss_of
from benchmarks.setting import GRAD_CLIP, Setting
from megazero.models.stages import cut_evenly
from megazero.schedules.action import Placement, loop, v_shape


class Pipeline:
    """One torch schedule over all ranks.

    Args:
        schedule: the class.
        place: where its stages run.

    Raises:
        ValueError: more stages than layers; bf16.
    """

    def __init__(
        self, setting: Setting, rank: int, weights: Path, *, schedule: type, place: Callable[[Setting], Placement]
    ) -> None:
        if setting.dtype == "bf16":
            raise ValueError("torch.distributed.pipelining has no bf16 with fp32 master weights of its own")
        self.dp_index, count = 0, setting.accumulation
        model, placement = setting.model_config(), place(setting)
        layouts = cut_evenly(model.num_layers, len(placement))
        mine = [index for index, (holder, _) in enumerate(placement) if holder == rank]
        loaded = load_file(weights)
        modules = [PlainStage(model, loaded, layouts[index]) for index in mine]
        self._takes_tokens = any(module.embedding is not None for module in modules)
        self._takes_labels = any(module.head is not None for module in modules)
        stages = [
            PipelineStage(module, index, len(layouts), torch.device("cpu"))
            for module, index in zip(modules, mine, strict=True)
        ]

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return loss_of(logits, labels) / count

        is_single = issubclass(schedule, PipelineScheduleSingle)
        self.schedule = schedule(stages[0] if is_single else stages, count, loss_fn=loss, scale_grads=False)
        self._parameters = [p for module in modules for p in module.parameters()]
        self.optimizer = adamw(self._parameters)

    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        losses: list[Tensor] = []
        self.schedule.step(
            *([tokens] if self._takes_tokens else []),
            target=labels if self._takes_labels else None,
            losses=losses if self._takes_labels else None,
            return_outputs=False,
        )
        squared = get_total_norm([p.grad for p in self._parameters if p.grad is not None], foreach=True) ** 2
        dist.all_reduce(squared)
        clip_grads_with_norm_(self._parameters, GRAD_CLIP, squared.sqrt(), foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).detach().sum().item() if losses else None


def _loop(setting: Setting) -> Placement:
    return loop(setting.pp)


def _interleaved(setting: Setting) -> Placement:
    return loop(setting.pp, 2)


def _interleaved_where_layers_allow(setting: Setting) -> Placement:
    return loop(setting.pp, min(2, setting.size.num_layers // setting.pp))


def _v_shape(setting: Setting) -> Placement:
    return v_shape(setting.pp)


GPipe = partial(Pipeline, schedule=ScheduleGPipe, place=_loop)
OneForwardOneBackward = partial(Pipeline, schedule=Schedule1F1B, place=_loop)
Interleaved = partial(Pipeline, schedule=ScheduleInterleaved1F1B, place=_interleaved)
InterleavedZeroBubble = partial(Pipeline, schedule=ScheduleInterleavedZeroBubble, place=_interleaved_where_layers_allow)
ZeroBubbleV = partial(Pipeline, schedule=ScheduleZBVZeroBubble, place=_v_shape)
