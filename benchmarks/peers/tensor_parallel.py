"""DTensor: `parallelize_module` with torchtitan's plan for a Llama.

    replicated sequence   embedding -> all-reduce | norm | qkv -> out -> all-reduce | norm | gate_up -> down -> ...
    split sequence        embedding -> reduce-scatter | norm of 1/tp | all-gather -> qkv -> out -> reduce-scatter ...

The head's logits stay cut by vocabulary and the loss is taken across the cut.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.models import PlainStage, adamw, loss_of
from benchmarks.setting import GRAD_CLIP, Setting


def parallelize(stage: PlainStage, mesh: DeviceMesh, *, split: bool) -> None:
    """Cut a stage over a mesh of one dimension.

    Args:
        stage: laid out for as many ranks as the mesh has.
        split: norms and residuals have 1/tp of the sequence; else all of it.
    """
    between = Shard(1) if split else Replicate()  # [batch, seq, hidden]
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.qkv": ColwiseParallel(input_layouts=between),
        "blocks.*.out": RowwiseParallel(output_layouts=between),
        "blocks.*.gate_up": ColwiseParallel(input_layouts=between),
        "blocks.*.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if split:
        plan |= {name: SequenceParallel() for name in ("blocks.*.attention_norm", "blocks.*.mlp_norm", "norm")}
    there = {name for name, _ in stage.named_children()}
    parallelize_module(stage, mesh, {name: style for name, style in plan.items() if name.partition(".")[0] in there})


def whole(x: Tensor) -> Tensor:
    """The value of a tensor that may be cut or a partial sum."""
    return x.full_tensor() if isinstance(x, DTensor) else x


class TensorParallel:
    """One stage over all ranks, and fused AdamW on the parts."""

    def __init__(self, setting: Setting, rank: int, weights: Path, *, split: bool) -> None:
        if setting.dtype == "bf16":
            raise ValueError("DTensor's tensor parallelism has no bf16 with fp32 master weights of its own")
        self.dp_index, self._accumulation = 0, setting.accumulation
        self.model = PlainStage(setting.model_config(), load_file(weights), tp=setting.tp)
        parallelize(self.model, init_device_mesh("cpu", (setting.tp,)), split=split)
        parameters = list(self.model.parameters())
        self.optimizer = adamw(parameters)
        # with a replicated sequence the gains are plain tensors, which torch's norms do not mix with cut ones
        kinds = [[p for p in parameters if isinstance(p, DTensor) is cut] for cut in (True, False)]
        self._kinds = [kind for kind in kinds if kind]

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        total = 0.0
        for part, label in zip(tokens.chunk(self._accumulation), labels.chunk(self._accumulation), strict=True):
            with loss_parallel():
                loss = loss_of(self.model(part), label) / self._accumulation
                loss.backward()
            total += whole(loss.detach()).item()
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _clip(self) -> None:
        norms = [get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in self._kinds]
        norm = torch.linalg.vector_norm(torch.stack([whole(one) for one in norms]))
        for kind in self._kinds:
            clip_grads_with_norm_(kind, GRAD_CLIP, norm)


replicated_sequence = partial(TensorParallel, split=False)
split_sequence = partial(TensorParallel, split=True)
