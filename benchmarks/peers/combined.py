"""FSDP2 x DTensor's tensor and sequence parallelism x torch's 1F1B, as torchtitan composes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.models import PlainStage, adamw, loss_of
from benchmarks.peers.tensor_parallel import parallelize, whole
from benchmarks.setting import GRAD_CLIP, Setting
from megazero.models.stages import cut_evenly


class Combined:
    """One stage of the pipeline, cut over tp and then sharded over dp.

    Weights stay whole from a step's first forward to its last backward, and gradients are reduced once per step:
    torchtitan's choice under a pipeline, where each micro-batch would gather them anew.
    """

    def __init__(self, setting: Setting, rank: int, weights: Path) -> None:
        mesh = init_device_mesh("cpu", (setting.pp, setting.dp, setting.tp), mesh_dim_names=("pp", "dp", "tp"))
        mesh["dp", "tp"]._flatten("dp_tp")  # the norm then needs one collective instead of two; torchtitan does so too
        self.dp_index, index, count = mesh.get_local_rank("dp"), mesh.get_local_rank("pp"), setting.accumulation
        model = setting.model_config()
        self.model = PlainStage(model, load_file(weights), cut_evenly(model.num_layers, setting.pp)[index], setting.tp)
        parallelize(self.model, mesh["tp"], split=setting.sequence_parallel)
        options: dict[str, Any] = {"mesh": mesh["dp"], "reshard_after_forward": False}
        if setting.dtype == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in self.model.blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return loss_of(logits, labels) / count

        self._pipeline = mesh.get_group("pp")
        stage = PipelineStage(self.model, index, setting.pp, torch.device("cpu"), group=self._pipeline)
        self.schedule = Schedule1F1B(stage, count, loss_fn=loss, scale_grads=False)
        self._is_first, self._is_last = stage.is_first, stage.is_last
        self._parameters = list(self.model.parameters())
        self.optimizer = adamw(self._parameters)

    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        losses: list[Tensor] = []
        with loss_parallel():
            self.schedule.step(
                *([tokens] if self._is_first else []),
                target=labels if self._is_last else None,
                losses=losses if self._is_last else None,
                return_outputs=False,
            )
        squared = whole(get_total_norm([p.grad for p in self._parameters if p.grad is not None], foreach=True)) ** 2
        dist.all_reduce(squared, group=self._pipeline)
        clip_grads_with_norm_(self._parameters, GRAD_CLIP, squared.sqrt(), foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(whole(loss.detach()).item() for loss in losses) if losses else None
