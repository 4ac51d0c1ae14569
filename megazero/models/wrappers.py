"""Wraps the modules of a block, as the engine requests: with recomputation, an arena for activations, or compiled code.

    Block.forward            -> SavingBlock    within it the results of recomputed modules are dropped, or saved in an arena
      attention_norm.forward -> Recomputed     where a policy names the module; see `Block.regions`
      attention.core.forward -> compiled code  and so each module that neither communicates nor multiplies by a weight

Each wrapper is set as an attribute of the instance, which hides the method of its class.  So a block without a policy
runs as it is written.

[Note: compiled modules]  Norms, the core of attention, activations, residual sums and the loss are compiled.  The sum
after attention and the norm that follows are compiled as one function, which reads the sum once and adds up its
gradients.
The first block compiles them; the modules of other blocks have the same sizes, so their guards select the same code.  A
linear layer is not compiled: it communicates over tp and adds its weight gradient to the bucket within its own autograd
function, with handles and queues that a compiler must not record.  Only its rounding to fp8 is compiled.  A norm over
all heads and the exchange of a shared kv head are not compiled either.  A recomputed module runs the same code, so it
rounds at the same places. Modules of a script are compiled whole.

[Note: alignment]  Weights are stored in a bucket one after the other.  CUDA code that was compiled for aligned weights
reads 16 bytes at a time, and torch does not check the alignment in the next block that runs it, so all weights must be
aligned.

Sizes are constants of the code, so an evaluation with another micro-batch compiles once more.  Nothing that differs
between blocks may be a Python number (see `Dropout`), or each block would be compiled again.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from megazero.layers.attention import Attention, AttentionCore, CausalAttention, RotaryEmbedding
from megazero.layers.attention_kernels import TapedAttention
from megazero.layers.counter_rng import Dropout
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.mlp import GELU, SwiGLU
from megazero.layers.recompute import WHOLE, DroppingOutputs, Recomputed, Tape
from megazero.layers.saved_tensors import SavedTensorHooks
from megazero.layers.vocabulary import grad_logits_of, statistics_of
from megazero.models.activation_config import UNCUT, LayerPolicy
from megazero.models.gpt import Block, GPTStage, is_known
from megazero.parallel_state import Axis

if TYPE_CHECKING:
    from megazero.layers.activation_offload import ActivationStore

_ALIGNED_BYTES = 16
_CONTAINERS = (Attention, SwiGLU, GELU)


class SavingBlock:
    """The forward of a block, run within the saved-tensor hooks of its policy.

    Attributes:
        function: the forward itself; `compile_blocks` compiles it for a script's own block.
    """

    def __init__(self, function: Callable[..., Any], offload: Callable[[], SavedTensorHooks] | None = None) -> None:
        self.function, self._offload = function, offload

    @_disable_dynamo(recursive=False)  # like torch.compiler.disable, but imports the compiler only when called
    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*args)
        with ExitStack() as stack:
            if self._offload is not None:
                stack.enter_context(self._offload())
            stack.enter_context(DroppingOutputs())
            return self.function(*args)


def save_by_policy(
    blocks: Iterable[tuple[nn.Module, LayerPolicy]], tp: Axis, offload: "ActivationStore | None" = None
) -> None:
    """Apply each layer's policy to its block.  A block with its own forward is recomputed as a whole, or not at all.

    Args:
        blocks: the blocks of a chunk, in order, each with its policy.
        tp: the axis over which `partition` splits saved tensors; of size 1 if sequence parallelism has split them
            already.
        offload: takes saved tensors to its arena; None if no policy of this rank requests it.

    Raises:
        ValueError: a policy recomputes a region that a block does not have.
    """
    blocks = list(blocks)
    for number, (block, policy) in enumerate(blocks, 1):
        _recompute(block, policy, tp)
        hooks = None
        if offload is not None:
            offload.stay(_tables(block))
            offload.shared |= {id(held): held for held in _rotary_tables(block)}
            hooks = partial(offload.layer, offloads=policy.moves, is_last=number == len(blocks))
        if policy.recompute or hooks is not None:
            block.__dict__["forward"] = SavingBlock(block.forward, hooks)


def _recompute(block: nn.Module, policy: LayerPolicy, tp: Axis) -> None:
    """Wrap each module that a policy recomputes in a `Recomputed`."""
    tape = Tape() if policy.keep_attention else None
    draws = not all(map(is_known, block.modules()))  # a script's module may use torch's random generators
    for module, is_cut in recomputed_modules(block, policy).items():
        cores = [inner for inner in module.modules() if isinstance(inner, AttentionCore)]
        for core in cores:
            core.tape = tape
            if tape is not None and type(core.kernel) is CausalAttention:
                core.kernel = TapedAttention()
        shards, (owner, name) = tp if is_cut else WHOLE, _method_of(module, block)
        if name not in vars(owner):  # one method may run two of the modules
            owner.__dict__[name] = Recomputed(getattr(owner, name), tape if cores else None, shards, draws=draws)
    if has_regions(block):
        for module in block.mlp_residual.modules():
            if isinstance(module, Dropout):
                module.remakes_mask = "block" in policy.recompute


def recomputed_modules(block: nn.Module, policy: LayerPolicy) -> dict[nn.Module, bool]:
    """Return the modules that a policy recomputes, in forward order, each with whether `partition` shards its saved input.

    A module has no saved input if the module before it is recomputed as well.
    """
    if not has_regions(block):
        if policy.recompute - {"block"}:
            raise ValueError(
                f"activations.recompute: {type(block).__name__} has a forward of its own and can be recomputed only as a "
                'whole; write "full" or "none"'
            )
        return dict.fromkeys([block] * bool(policy.recompute), policy.partition)
    regions = block.regions()
    for region in policy.recompute:
        if not regions[region]:
            hint = f"a {type(block.mlp).__name__} has no module to recompute for it"
            raise ValueError(f"activations.recompute: {region}: {hint}")
    chosen = {module for region in policy.recompute for module in regions[region]}
    cut = {module for region in policy.recompute - UNCUT for module in regions[region]} if policy.partition else set()
    order = regions["block"]
    starts = {module for before, module in pairwise([None, *order]) if before not in chosen}
    return {module: module in cut & starts for module in order if module in chosen}


def _method_of(module: nn.Module, block: nn.Module) -> tuple[nn.Module, str]:
    """Return the object and its method that run a module of a block.  They may run another module as well."""
    joins = type(block).forward is Block.forward and module in (block.attention_residual, block.mlp_norm)
    return (block, "join_attention") if joins else (module, "forward")


def has_regions(block: nn.Module) -> TypeGuard[Block]:
    """Whether a block defines its regions for policies: the class that defines its `forward` also defines `regions`."""
    owner = next(base for base in type(block).__mro__ if "forward" in vars(base))
    return isinstance(block, Block) and "regions" in vars(owner)


def _tables(block: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of a block that are neither parameters nor activations: rotary tables, masks, keys."""
    from megazero.layers.activation_offload import PLAIN_TENSORS  # few runs need it

    for module in block.modules():
        yield from module.buffers(recurse=False)
        for value in vars(module).values():
            held = (value, *getattr(value, "__dict__", {}).values())
            yield from (tensor for tensor in held if type(tensor) in PLAIN_TENSORS)


def _rotary_tables(block: nn.Module) -> list[set[int]]:
    """Return the storages of the tables that each rotary embedding of a block holds for the micro-batches in progress."""
    values = (value for module in block.modules() for value in vars(module).values())
    return [value.held for value in values if isinstance(value, RotaryEmbedding)]


def can_compile(setting: bool | str, device: torch.device, parameters: Iterable[Tensor]) -> bool:
    """Whether the blocks of a run that may be compiled can be.

    Args:
        setting: `training.compile`.
        device, parameters: of this rank.

    Raises:
        ValueError: `compile` is true, but the blocks cannot be compiled; see [Note: alignment].
    """
    aligned = device.type != "cuda" or all(parameter.data_ptr() % _ALIGNED_BYTES == 0 for parameter in parameters)
    if setting is True and not aligned:
        raise ValueError(
            f"training.compile=true: on CUDA every weight must begin at a multiple of {_ALIGNED_BYTES} bytes, and some do "
            "not; take model.hidden_size and ffn_hidden_size as multiples of 8 * parallel.tp, or set training.compile=false"
        )
    return aligned


def compile_blocks(stage: GPTStage, backend: str = "inductor") -> None:
    """Compile the modules of every block, and the loss.  The compiler runs when they are first called.

    Only the modules' own `forward` is replaced; hooks and names of parameters stay.
    """
    compiled: dict[Any, Any] = {}

    def compile_once(function: Any) -> Any:
        """Compile a method once for all blocks."""
        code = function.__func__ if isinstance(function, MethodType) else function
        if code not in compiled:
            compiled[code] = torch.compile(code, dynamic=False, backend=backend)
        return MethodType(compiled[code], function.__self__) if isinstance(function, MethodType) else compiled[code]

    for layer in stage.blocks.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer.product.compile(compile_once)
    for block in stage.blocks:
        modules = list(_compiled_modules(block))
        for inner in (inner for module in modules for inner in module.modules()):
            if not getattr(inner, "compiles", True):
                _replace((inner, "forward"), torch.compiler.disable)
        for method in dict.fromkeys(_method_of(module, block) for module in modules):
            _replace(method, compile_once)
    if stage.head is not None:
        output = stage.head.output
        output.statistics_of = torch.compile(statistics_of, dynamic=False, backend=backend)
        output.grad_logits_of = torch.compile(grad_logits_of, dynamic=False, backend=backend)


def _compiled_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules to compile.  A script's own module is compiled whole."""
    if has_regions(module) or type(module) in _CONTAINERS:
        for child in module.children():
            yield from _compiled_modules(child)
    elif getattr(module, "compiles", True):
        yield module


def _replace(method: tuple[nn.Module, str], change: Callable[[Any], Any]) -> None:
    """Replace what runs as a module's forward or a block's method, inside its recomputation and arena wrappers."""
    owner, name = method
    function = getattr(owner, name)
    if isinstance(function, SavingBlock | Recomputed):
        function.function = change(function.function)
    else:
        owner.__dict__[name] = change(function)  # a module's forward: `nn.Module.__call__` calls it between the hooks
