"""DeepSpeed's ZeRO stages around torch's fused AdamW.

Chosen by measuring here (tiny and small models, 2 ranks), each a few percent: gradients not copied into a contiguous
bucket in stages 1 and 2; torch's own linear and no persistent parameters in stage 3.  The default bucket of 5e8 elements
would be 2 GB of fresh pages; overlap_comm changes nothing, since the CPU accelerator has no streams.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # asked for, it does not warn that it found no other

import deepspeed
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.models import PlainStage, adamw, loss_of
from benchmarks.setting import GRAD_CLIP, Setting

BUCKET_ELEMENTS = 8_000_000
GRADIENTS_IN_PLACE = {"contiguous_gradients": False}
ALL_SHARDED = {"memory_efficient_linear": False, "stage3_param_persistence_threshold": 0}
OPTIONS = {1: GRADIENTS_IN_PLACE, 2: GRADIENTS_IN_PLACE, 3: ALL_SHARDED}


class DeepSpeed:
    """deepspeed.initialize with a client optimizer; forward, backward and step of each micro-batch."""

    def __init__(self, setting: Setting, rank: int, weights: Path, *, stage: int) -> None:
        self.dp_index, self._accumulation = rank, setting.accumulation
        model = PlainStage(setting.model_config(), load_file(weights))
        bucket = min(BUCKET_ELEMENTS, sum(parameter.numel() for parameter in model.parameters()))
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": setting.micro_batch_size,
            "gradient_accumulation_steps": setting.accumulation,
            "gradient_clipping": GRAD_CLIP,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket, **OPTIONS[stage]},
            "zero_allow_untested_optimizer": True,
        }
        if setting.dtype == "bf16":
            config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        with contextlib.redirect_stdout(sys.stderr):
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=adamw(list(model.parameters())), config=config, dist_init_required=False
            )

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        total = 0.0
        for part, label in zip(tokens.chunk(self._accumulation), labels.chunk(self._accumulation), strict=True):
            loss = loss_of(self.engine(part), label)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item() / self._accumulation
        return total


stage_1, stage_2, stage_3 = (partial(DeepSpeed, stage=stage) for stage in (1, 2, 3))
