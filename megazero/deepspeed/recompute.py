"""`deepspeed.checkpointing`: calls that are recomputed in the backward, and how what they keep of their arguments is kept.

    argument  --[partition]-->  this rank's part of it  --[cpu, contiguous]-->  one buffer on the host, or on the device

One configuration holds for the process, as in DeepSpeed: that of `configure`, else the `activation_checkpointing` block
that `initialize` reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.arena import Arena, rounded_up
from megazero.deepspeed.config import load_deepspeed_config
from megazero.deepspeed.config_check import check_keys
from megazero.deepspeed.config_schema import CheckpointingBlock
from megazero.deepspeed.equal_arguments import EqualArguments
from megazero.deepspeed.script_utils import log_dist
from megazero.deepspeed.topology import PipelineParallelGrid
from megazero.layers.activation_offload import Copier, KeptStorage, KeptView, StreamCopier, is_its_memory, work_on
from megazero.layers.checkpoint import CheckpointedCall
from megazero.layers.recompute import WHOLE
from megazero.parallel_state import Axis, ParallelState
from megazero.parallel_state.groups import Group
from megazero.parallel_state.state import TIMEOUT, local_device
from megazero.settings import ConfigError


@dataclass
class _Configured:
    """What holds for the calls of this process; for those that a recomputation makes again, what held in their forward."""

    options: CheckpointingBlock = field(default_factory=CheckpointingBlock)
    axis: Axis = WHOLE
    by_script: bool = False
    stores: dict[torch.device, _Store] = field(default_factory=dict)
    equal: EqualArguments = field(default_factory=EqualArguments)
    locks_in_calls: bool = True  # the host's pages; False where a pipeline's messages may be under way in a call

    def store(self, device: torch.device) -> _Store:
        """Where arguments that are on a device are kept."""
        if device not in self.stores:
            self.stores[device] = _Store(device, self.options)
        return self.stores[device]


_NOW = _Configured()
_NEAR = 2  # calls whose arguments are on the device


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function(*args, **kwargs)` returns, recomputed in the backward; of a list or tuple of one, that one.

    See `megazero.checkpoint`.  Parameters and tensors with `no_checkpointing = True` are kept as they are.
    """
    result = run_recomputed(function, *args, **kwargs)
    if isinstance(result, tuple | list):
        return result[0] if len(result) == 1 else tuple(result)
    return result


non_reentrant_checkpoint = checkpoint


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
        partition_activations, ..., profile: the keys of that block; docs/deepspeed_config.md says what they do, and that
            the last two have no effect.

    Raises:
        ConfigError: the configuration, or an option, is wrong.
        TypeError: `mpu_` does not know the tensor-parallel ranks.
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
        block = load_deepspeed_config(deepspeed_config, replicas).json.activation_checkpointing
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
    }
    written = {name: value for name, value in given.items() if value is not None}
    block = block.model_copy(update=_checked("configure", written))
    if block.contiguous_memory_optimization and not block.number_checkpoints:
        raise ValueError("contiguous_checkpointing needs num_checkpoints, the calls that one buffer has room for")
    _let_hold(block, axis)
    _NOW.by_script = True


def configure_by_block(block: CheckpointingBlock, axis: Axis) -> None:
    """Apply the JSON's `activation_checkpointing` block, unless the script called `configure`; `axis`: of tp."""
    if not _NOW.by_script:
        _let_hold(block, axis)


def _let_hold(block: CheckpointingBlock, axis: Axis) -> None:
    _hold(_Configured(block, axis, _NOW.by_script))
    if block.partition_activations and axis.size == 1:
        log_dist("partition_activations changes nothing: no mpu with more than one tensor-parallel rank is given", [0])


def is_configured() -> bool:
    """Whether the script has called `configure`."""
    return _NOW.by_script


def reset() -> None:
    """Let go of the buffers; what lies in them stays until its backward."""
    _NOW.stores.clear()
    _NOW.equal.clear()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Say whether tensor-parallel ranks share what is kept."""
    _change_options({"partition_activations": partition_activation})


def set_num_layers(nlayers: int) -> None:
    """Say how many calls one buffer of contiguous memory has room for.  Raises: ConfigError: it is no count."""
    _change_options(_checked("set_num_layers", {"number_checkpoints": nlayers}))


def _change_options(given: dict[str, Any]) -> None:
    _hold(replace(_NOW, options=_NOW.options.model_copy(update=given)))


def _hold(configured: _Configured) -> None:
    global _NOW  # noqa: PLW0603
    configured.locks_in_calls = _NOW.locks_in_calls
    _NOW = configured


def _checked(call: str, given: dict[str, Any]) -> dict[str, Any]:
    """Keys of the block as a configuration may have them.  Raises: ConfigError."""
    config, checked = check_keys({"activation_checkpointing": given})
    if checked.problems:
        raise ConfigError(checked.problems, f"deepspeed.checkpointing.{call}")
    return {name: getattr(config.activation_checkpointing, name) for name in given}


class _ConfiguredCall(CheckpointedCall):
    """A call that keeps its arguments as configured.

    Attributes:
        views: what lies in a store; `before`: the call before it there.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, cut: Axis) -> None:
        self._parts: list[Tensor] = []
        self._cut_arguments: list[Tensor] = []
        self.views: list[KeptView] = []
        self.before: weakref.ref[_ConfiguredCall] | None = None
        self._configured = _NOW
        super().__init__(function, args, kwargs, cut)
        _NOW.equal.check(self._function.__qualname__, self._cut_arguments, cut)
        if self._parts:
            self._store = _NOW.store(self._parts[0].device)
            self._store.keep(self, self._parts)
        self._parts, self._cut_arguments = [], []

    @property
    def kept(self) -> list[KeptStorage]:
        """The storages of its views."""
        return [view.storage for view in self.views]

    def run_again(self) -> None:
        if self.views:
            self._store.begin_backward(self)
        now = _NOW
        _hold(self._configured)
        try:
            super().run_again()
        finally:
            _hold(now)

    def _pack_argument(self, tensor: Tensor) -> Any:
        argument = super()._pack_argument(tensor)
        if argument.whole_shape is not None:
            self._cut_arguments.append(tensor.detach())
        return argument

    def _keeps_as_it_is(self, tensor: Tensor) -> bool:
        marked = getattr(tensor, "no_checkpointing", False)
        return super()._keeps_as_it_is(tensor) or marked or not is_its_memory(tensor)

    def _keep_argument(self, part: Tensor) -> Any:
        moves = _NOW.options.cpu_checkpointing or _NOW.options.contiguous_memory_optimization
        elsewhere = self._parts and self._parts[0].device != part.device
        if not moves or elsewhere or self._keeps_as_it_is(part):
            return super()._keep_argument(part)
        shows_part = part.untyped_storage().nbytes() > part.nbytes
        if shows_part and any(step == 0 < size - 1 for size, step in zip(part.shape, part.stride(), strict=True)):
            return super()._keep_argument(part)  # a copy would hold elements that the storage has once
        # A view of more than itself is copied, without the gaps: whole storages are kept.
        self._parts.append(part.detach().clone() if shows_part else part)
        return _InStore(len(self._parts) - 1, part.stride())

    def _kept_argument(self, kept: Any) -> Tensor:
        if not isinstance(kept, _InStore):
            return super()._kept_argument(kept)
        tensor = self._store.take(self.views[kept.number])
        if tensor.stride() != kept.stride:
            tensor = tensor.new_empty_strided(tensor.size(), kept.stride).copy_(tensor)
        return tensor


@contextmanager
def pipeline_step() -> Iterator[None]:
    """Lock the host memory of arguments at its begin, and in no call: see [Note: page-locked] of `comm/arena.py`."""
    for store in _NOW.stores.values():
        store.arena.reserve()
    _NOW.locks_in_calls = False
    try:
        yield
    finally:
        _NOW.locks_in_calls = True


class _InStore(NamedTuple):
    """An argument in a store: its number among those of its call, and how it lay in memory."""

    number: int
    stride: tuple[int, ...]


class _Store:
    """Keeps the arguments of checkpointed calls in one buffer, on the host or on the device, until their backward.

    Those on the host are on the device too while they are copied there, and from shortly before their backward: the
    arguments of the call that is worked on, and of one neighbour; see `layers/activation_offload.py`.
    """

    def __init__(self, device: torch.device, options: CheckpointingBlock) -> None:
        self._on_host, self._count = options.cpu_checkpointing, options.number_checkpoints or 1
        where, remedy = torch.device("cpu") if self._on_host else device, "keep fewer arguments (cpu_checkpointing)"
        self.arena = Arena(where, remedy, pins=self._on_host)
        self.copier = StreamCopier(device) if self._on_host and device.type == "cuda" else Copier()
        self._near: list[weakref.ref[_ConfiguredCall]] = []

    def keep(self, call: _ConfiguredCall, tensors: list[Tensor]) -> None:
        """Start copying the arguments of a call."""
        if _NOW.locks_in_calls or not self._on_host:
            is_new, nbytes = not self.arena.nbytes, sum(rounded_up(one.untyped_storage().nbytes()) for one in tensors)
            self.arena.reserve(self._count * nbytes if is_new else 0)
        call.views = [KeptView.of(one, KeptStorage(one, self.arena, self.copier)) for one in tensors]
        call.before = self._near[-1] if self._near else None
        self._work_on(call)

    def begin_backward(self, call: _ConfiguredCall) -> None:
        """Have the arguments of a call on the device, and start bringing those of the call before it."""
        for one in (call, call.before() if call.before else None) if self._on_host else ():
            if one is not None:
                self._work_on(one)
                for storage in one.kept:
                    storage.bring()

    def take(self, view: KeptView) -> Tensor:
        """An argument, on its device."""
        tensor = view.tensor()
        if not self._on_host:
            view.storage.leave()
        return tensor

    def _work_on(self, call: _ConfiguredCall) -> None:
        near = [one for reference in self._near if (one := reference()) is not None]
        self._near = [weakref.ref(one) for one in work_on(call, near, _NEAR if self._on_host else 0)]


def _tensor_parallel(mpu: Any) -> Axis:
    """The tensor-parallel ranks of what a script calls mpu."""
    if isinstance(mpu, PipelineParallelGrid):
        mpu = mpu.parallel_state
    if isinstance(mpu, ParallelState):
        return mpu.tp
    name = "tensor_model" if hasattr(mpu, "get_tensor_model_parallel_rank") else "model"
    if not hasattr(mpu, f"get_{name}_parallel_world_size"):
        raise TypeError(
            f"mpu_ is {mpu!r}, which does not know the tensor-parallel ranks; give a ParallelState, a "
            "PipelineParallelGrid, an object with Megatron's get_model_parallel_world_size and get_model_parallel_group, "
            "or None"
        )
    if getattr(mpu, f"get_{name}_parallel_world_size")() == 1:
        return WHOLE
    process_group = getattr(mpu, f"get_{name}_parallel_group")()
    group = Group(
        process_group, local_device(), TIMEOUT.total_seconds(), shares_memory=False, neighbours=1, siblings=()
    )
    return Axis("tp", tuple(dist.get_process_group_ranks(process_group)), dist.get_rank(process_group), group)
