"""Products fused with an exchange over tp by torch's symmetric memory, whose ranks read one another's GPUs over NVLink.

    copies      shard of rank r + 1 | shard of r + 2 | ...
    products    own shard           | of r + 1       | of r + 2 ...           and before a scatter the other way around

torch registers the operators for CUDA only.  Its buffers lie outside of torch's allocator.

Source: torch.distributed._symmetric_memory; "Introducing Async Tensor Parallelism in PyTorch" (torchtitan, 2024).
"""

import torch
import torch.distributed._symmetric_memory  # registers torch.ops.symm_mem
from torch import Tensor

from megazero.parallel_state import Axis


def can_fuse(axis: Axis, device: torch.device) -> bool:
    """Whether these ranks can read one another's memory directly, because they are GPUs of the same host."""
    return device.type == "cuda" and not any(map(axis.is_off_host, range(axis.size)))


def gather_and_multiply(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """Gather x over the axis in rank order, and return x @ weight.T.

    x: [n, ..., k], weight: [m, k] -> [n * axis size, ..., m].
    """
    axis.traffic.add(axis.name, "all_gather", x.nbytes * (axis.size - 1))
    group = axis.process_group.group_name
    return torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, group, return_A=False)[1][0]


def multiply_and_scatter(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """Compute x @ weight.T, sum it over the axis, and return this rank's rows of the sum.

    x: [n, ..., k], weight: [m, k] -> [n / axis size, ..., m].
    """
    y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, axis.process_group.group_name)
    axis.traffic.add(axis.name, "reduce_scatter", y.nbytes * (axis.size - 1))
    return y
