"""DistributedDataParallel, with and without ZeroRedundancyOptimizer, and FSDP2, as fast as their options allow."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders import passes
from benchmarks.models import ADAMW, DECAY, PlainStage, adamw, groups_of, loss_of
from benchmarks.setting import GRAD_CLIP, Setting


class Replicated:
    """DistributedDataParallel and fused AdamW."""

    def __init__(self, setting: Setting, rank: int, weights: Path) -> None:
        if setting.dtype == "bf16":
            raise ValueError("DistributedDataParallel has no bf16 with fp32 master weights of its own")
        self.dp_index = rank
        model = PlainStage(setting.model_config(), load_file(weights))
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = self._optimizer(list(model.parameters()))
        self._accumulation = setting.accumulation

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return adamw(parameters)

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        *early, last = zip(tokens.chunk(self._accumulation), labels.chunk(self._accumulation), strict=True)
        loss = 0.0
        if early:
            with self.model.no_sync():
                for part, label in early:
                    loss += passes(self.model, part, label, 1) / self._accumulation
        final = loss_of(self.model(last[0]), last[1]) / self._accumulation
        final.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss + final.item()


class ZeroRedundancy(Replicated):
    """DistributedDataParallel and ZeroRedundancyOptimizer around fused AdamW."""

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        decayed, whole = groups_of(parameters, DECAY)
        made = ZeroRedundancyOptimizer(
            decayed["params"], torch.optim.AdamW, weight_decay=DECAY, parameters_as_bucket_view=True, **ADAMW
        )
        made.add_param_group(whole)
        return made


class FSDP2:
    """fully_shard on each block and on the whole model."""

    def __init__(self, setting: Setting, rank: int, weights: Path, *, reshard: bool) -> None:
        self.dp_index = rank
        self.model = PlainStage(setting.model_config(), load_file(weights))
        options: dict[str, Any] = {"reshard_after_forward": reshard}
        if setting.dtype == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in self.model.blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        self.optimizer = adamw(list(self.model.parameters()))
        self._accumulation = setting.accumulation

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        loss = passes(self.model, tokens, labels, self._accumulation)
        nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


fully_sharded = partial(FSDP2, reshard=True)
gradients_sharded = partial(FSDP2, reshard=False)
