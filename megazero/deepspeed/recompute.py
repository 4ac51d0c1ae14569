"""`megazero.checkpoint` and `deepspeed.checkpointing`: calls that are recomputed in the backward, and where their
arguments wait for it.

    forward     y = f(x)       x goes to the host (cpu_checkpointing), or into one buffer of the device (contiguous memory)
    backward    y' = f(x)      x is copied back during the backward of the call before it

One configuration holds for the process, as in DeepSpeed: that of `configure`, else the `activation_checkpointing` block
that `initialize` reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megazero.comm.memory import Arena
from megazero.deepspeed.config import check_keys, note_on, read_json
from megazero.deepspeed.config_schema import CheckpointingBlock
from megazero.deepspeed.script_utils import log_dist
from megazero.layers.activation_offload import ActivationStore
from megazero.layers.recompute import Recomputation
from megazero.parallel_state.state import local_device
from megazero.settings import ConfigError


@dataclass
class _Configured:
    """The configuration of this process.

    Attributes:
        by_script: the script has called `configure`.
        store: holds the arguments; None leaves them where they are.
        in_pipeline: messages of a pipeline may be under way: see [Note: page-locked] of `comm/memory.py`.
        depth: nested calls that run now.  The outermost alone stores its arguments: it makes those of the others again.
    """

    options: CheckpointingBlock = field(default_factory=CheckpointingBlock)
    by_script: bool = False
    store: ActivationStore | None = None
    in_pipeline: bool = False
    depth: int = 0

    def apply(self, options: CheckpointingBlock) -> None:
        """Store the arguments of calls as `options` set from now on."""
        self.options, self.store = options, None
        device = local_device()
        if options.cpu_checkpointing:
            self.store = ActivationStore(device)
        elif options.contiguous_memory_optimization:
            self.store = ActivationStore(device, Arena(device, "store fewer arguments, or use cpu_checkpointing"))


_NOW = _Configured()


def checkpoint_as_deepspeed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `checkpoint`.  A list or tuple of one result is returned as this result, a longer one as a tuple."""
    result = checkpoint(function, *args, **kwargs)
    if isinstance(result, tuple | list):
        return result[0] if len(result) == 1 else tuple(result)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, and save only the arguments for its backward: `megazero.checkpoint`.

    The function runs again in the backward, so it must compute the same again, with random numbers of torch's default
    generators.  Its side effects, such as running averages of a batch norm, happen twice.  Calls may be nested, and the
    function may call modules that ZeRO-3 gathers.

    Args:
        function: a module or any other callable.
        args, kwargs: tensors, possibly in tuples, lists and dicts.  Tensors in other objects are saved as well, but changes
            to them before the backward are not detected.  The configuration says where arguments are stored; parameters
            stay where they are.
        use_reentrant: must be False.

    Raises:
        ValueError: `use_reentrant` is true.
        RuntimeError: in the backward: the function did not compute the same again, or an argument was changed in place.
            In the function: it calls `backward` (`torch.autograd.grad` is allowed).
    """
    if use_reentrant:
        raise ValueError("megazero.checkpoint takes no use_reentrant=True, a backward within a backward; leave it out")
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    store = _NOW.store
    if store is None or _NOW.depth:
        return _Call(function).run(args, kwargs)
    if not store.pool.nbytes_in_use:  # the first call of a pass
        if not _NOW.in_pipeline:
            store.begin_step()
        store.begin_pass("script")
    store.stay(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter))
    with store.layer():
        return _Call(function).run(args, kwargs)


class _Call(Recomputation):
    """One call of a script's function, run with its arguments as a tuple and its keywords as a dict.

    A script's function depends on more than its arguments: on torch's random numbers and on autocast.  The second run finds
    both as the first did.  States of generators are kept only where the function drew from them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return function(*args, **kwargs)

        call.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
        self._autocast = _autocast_states()
        super().__init__(call, draws=True)

    def run(self, *args: Any) -> Any:
        with _nested():
            return super().run(*args)

    def run_again(self) -> None:
        with _nested(), ExitStack() as contexts:
            for state, now in zip(self._autocast, _autocast_states(), strict=True):
                if state != now:
                    device, enabled, dtype = state
                    contexts.enter_context(torch.autocast(device, dtype, enabled))
            super().run_again()


def _autocast_states() -> list[tuple[str, bool, torch.dtype]]:
    """Return (device, whether autocast is on, its dtype) for each device."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]


@contextmanager
def _nested() -> Iterator[None]:
    _NOW.depth += 1
    try:
        yield
    finally:
        _NOW.depth -= 1


@contextmanager
def pipeline_step() -> Iterator[None]:
    """Run a step of a pipeline in a `with` block: host memory for arguments is page-locked at its start, not in calls."""
    if _NOW.store is not None:
        _NOW.store.begin_step()
    _NOW.in_pipeline = True
    try:
        yield
    finally:
        _NOW.in_pipeline = False


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
    """Set where calls of `checkpoint` store their arguments from now on.

    Args:
        mpu_: no effect.
        deepspeed_config: a configuration or its path; its `activation_checkpointing` block replaces options that are None.
        partition_activations, ..., profile: the keys of that block; see docs/deepspeed_config.md.

    Raises: ConfigError: the block or an option is wrong.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    source: Mapping[str, Any] = {}
    if deepspeed_config is not None:
        source = deepspeed_config if isinstance(deepspeed_config, Mapping) else read_json(Path(deepspeed_config))
    block = dict(source.get("activation_checkpointing") or {})
    block |= {name: value for name, value in given.items() if value is not None}
    config, checked = check_keys({"activation_checkpointing": block})
    if checked.problems:
        raise ConfigError(checked.problems, "deepspeed.checkpointing.configure")
    for note in note_on(checked.idle):
        log_dist(f"note: {note}", [0])
    _NOW.apply(config.activation_checkpointing)
    _NOW.by_script = True


def configure_by_block(block: CheckpointingBlock, tp: int) -> None:
    """Apply the `activation_checkpointing` block of the JSON, unless the script has called `configure`.

    Raises: ValueError: arguments are to be cut over several tensor-parallel ranks.
    """
    if not _NOW.by_script:
        _NOW.apply(block)
    if tp > 1 and _NOW.options.partition_activations:
        raise ValueError(f"partition_activations is not supported with {tp=}, whose layers cut activations themselves")


def is_configured() -> bool:
    """Whether the script has called `configure`."""
    return _NOW.by_script


def reset() -> None:
    """Release the buffers.  Arguments in them stay until their backward."""
    _NOW.apply(_NOW.options)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """No-op: sequence parallelism of the tensor-parallel layers shards their activations."""


def set_num_layers(nlayers: int) -> None:
    """No-op: the buffer gets the size that a step needs."""
