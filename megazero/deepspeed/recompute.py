"""`deepspeed.checkpointing`: calls that are recomputed in the backward, and how what they keep of their arguments is kept.

    argument  --[partition]-->  this rank's part of it  --[cpu]-->  host memory  --[contiguous]-->  a row of one buffer

One configuration holds for the process, as in DeepSpeed: that of `configure`, else the `activation_checkpointing` block
that `initialize` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.deepspeed.config import load_deepspeed_config
from megazero.deepspeed.config_schema import CheckpointingBlock
from megazero.deepspeed.script_utils import log_dist
from megazero.deepspeed.topology import PipelineParallelGrid
from megazero.layers.checkpoint import CheckpointedCall
from megazero.layers.recompute import WHOLE
from megazero.parallel_state import TIMEOUT, Axis, Group, ParallelState, local_device


@dataclass
class _Configured:
    """What holds for the calls of this process."""

    options: CheckpointingBlock = field(default_factory=CheckpointingBlock)
    axis: Axis = WHOLE
    by_script: bool = False
    rows: dict[tuple[int, torch.dtype, torch.device], _Rows] = field(default_factory=dict)


_NOW = _Configured()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function(*args, **kwargs)` returns, recomputed in the backward; of a list or tuple of one, that one.

    See `megazero.checkpoint`.  Parameters and tensors with `no_checkpointing = True` are kept as they are.
    """
    result = run_recomputed(function, *args, **kwargs)
    if isinstance(result, tuple | list):
        return result[0] if len(result) == 1 else tuple(result)
    return result


non_reentrant_checkpoint = checkpoint


def run_recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function(*args, **kwargs)` returns, as it is; recomputed in the backward under the present configuration."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    cut = _NOW.axis if _NOW.options.partition_activations else WHOLE
    return _ConfiguredCall(function, args, kwargs, cut).run()


def configure(
    mpu_: Any,
    deepspeed_config: str | Path | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how calls of `checkpoint` keep their arguments from now on.

    Args:
        mpu_: knows the tensor-parallel ranks: a `ParallelState`, a `PipelineParallelGrid`, or Megatron's `mpu`; None: as
            in the last call.
        deepspeed_config: a configuration, or its path, whose `activation_checkpointing` block holds where an option
            below is None.
        partition_activations, ..., profile: the keys of that block; docs/deepspeed_config.md says what they do.

    Raises:
        ConfigError: the configuration is wrong.
        ValueError: options that do not fit together.
    """
    axis = _NOW.axis if mpu_ is None else _tensor_parallel(mpu_)
    block = CheckpointingBlock()
    if deepspeed_config is not None:
        replicas = dist.get_world_size() // axis.size if dist.is_initialized() else 1
        if isinstance(mpu_, ParallelState):
            replicas = mpu_.dp.size
        elif mpu_ is not None:
            replicas = mpu_.get_data_parallel_world_size()
        block = load_deepspeed_config(deepspeed_config, replicas).keys.activation_checkpointing
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    block = block.model_copy(update={name: value for name, value in given.items() if value is not None})
    if block.contiguous_memory_optimization and not block.number_checkpoints:
        raise ValueError("contiguous_checkpointing needs num_checkpoints, the calls that one buffer has room for")
    _NOW.options, _NOW.axis, _NOW.by_script = block, axis, True
    reset()


def configure_by_block(block: CheckpointingBlock, axis: Axis) -> None:
    """Let a configuration's block hold, unless the script has called `configure`; `axis`: tensor parallelism."""
    if not _NOW.by_script:
        _NOW.options, _NOW.axis = block, axis
        reset()


def is_configured() -> bool:
    """Whether the script has called `configure`."""
    return _NOW.by_script


def reset() -> None:
    """Let go of the buffers of contiguous memory; what lies in them stays until its backward."""
    _NOW.rows.clear()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Say whether tensor-parallel ranks share what is kept."""
    _NOW.options = _NOW.options.model_copy(update={"partition_activations": partition_activation})


def set_num_layers(nlayers: int) -> None:
    """Say how many calls one buffer of contiguous memory has room for."""
    _NOW.options = _NOW.options.model_copy(update={"number_checkpoints": nlayers})


class _ConfiguredCall(CheckpointedCall):
    """A call that keeps its arguments as configured."""

    def run(self) -> Any:
        with _boundary("forward"):
            return super().run()

    def run_again(self) -> None:
        with _boundary("recomputation"):
            super().run_again()

    def _keeps_as_it_is(self, tensor: Tensor) -> bool:
        return super()._keeps_as_it_is(tensor) or getattr(tensor, "no_checkpointing", False)

    def _keep_argument(self, tensor: Tensor) -> Any:
        options = _NOW.options
        if not (options.cpu_checkpointing or options.contiguous_memory_optimization) or self._keeps_as_it_is(tensor):
            return super()._keep_argument(tensor)
        device = torch.device("cpu") if options.cpu_checkpointing else tensor.device
        if not options.contiguous_memory_optimization:
            return _Moved(_copied(tensor.detach(), _empty(tensor.shape, tensor.dtype, device)), tensor.device, None)
        key = tensor.numel(), tensor.dtype, device
        row = _NOW.rows.setdefault(key, _Rows(*key)).take(options.number_checkpoints or 1)
        return _Moved(_copied(tensor.detach(), row.tensor.view(tensor.shape)), tensor.device, row)

    def _kept_argument(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Moved):
            return super()._kept_argument(kept)
        if kept.tensor.device == kept.home:
            return kept.tensor
        return kept.tensor.to(kept.home, non_blocking=True)


class _Moved(NamedTuple):
    """A copy of an argument, where the argument was, and the row that it lies in."""

    tensor: Tensor
    home: torch.device
    row: _Row | None


class _Row:
    """A row of a buffer, taken as long as this exists."""

    def __init__(self, free: list[Tensor]) -> None:
        self._free, self.tensor = free, free.pop()

    def __del__(self) -> None:
        self._free.append(self.tensor)


class _Rows:
    """Rows of `numel` elements, allocated `count` at a time: once, if no more are ever kept together."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._row = (numel,), dtype, device
        self._free: list[Tensor] = []

    def take(self, count: int) -> _Row:
        """A free row, [numel]."""
        if not self._free:
            (numel,), dtype, device = self._row
            self._free.extend(reversed(_empty((count, numel), dtype, device).unbind()))
        return _Row(self._free)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory; on the host page-locked where there is CUDA, so that copies do not stop the host."""
    pins = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(shape, dtype=dtype, device=device, pin_memory=pins)


def _copied(tensor: Tensor, into: Tensor) -> Tensor:
    """A copy, in the order of the device's work, so that the tensor's memory may be used again at once."""
    return into.copy_(tensor, non_blocking=True)


@contextmanager
def _boundary(name: str) -> Iterator[None]:
    """A context around one run of a function: waits for the device, and reports the time, where that is configured."""
    profiles = _NOW.options.profile
    waits = torch.cuda.is_available() and (profiles or _NOW.options.synchronize_checkpoint_boundary)
    if waits:
        torch.cuda.synchronize()
    began = perf_counter()
    yield
    if waits:
        torch.cuda.synchronize()
    if profiles:
        log_dist(f"time (ms) | {name}: {1000 * (perf_counter() - began):.2f}", ranks=[0])


def _tensor_parallel(mpu: Any) -> Axis:
    """The tensor-parallel ranks of what a script calls mpu."""
    if isinstance(mpu, PipelineParallelGrid):
        mpu = mpu.parallel_state
    if isinstance(mpu, ParallelState):
        return mpu.tp
    name = "tensor_model" if hasattr(mpu, "get_tensor_model_parallel_rank") else "model"
    if getattr(mpu, f"get_{name}_parallel_world_size")() == 1:
        return WHOLE
    process_group = getattr(mpu, f"get_{name}_parallel_group")()
    group = Group(process_group, local_device(), TIMEOUT.total_seconds(), shares_memory=False, siblings=())
    return Axis("tp", tuple(dist.get_process_group_ranks(process_group)), dist.get_rank(process_group), group)
