"""`torch.compile` for what lies between matrix products: norms, rotations, activations, residual sums and the loss.

    call of a block      hooks (ZeRO-3 gathers the weights) -> compiled forward -> hooks (the weights are hidden)
    one code for all     block 0 compiles; a block of the same sizes finds that code by its guards
    the loss             its two passes over the logits are a kernel each

[Note: linear layers]  Tracing stops before a linear layer.  It communicates over tp and adds its weight gradient to the
bucket inside an autograd function of its own, with handles and queues that a compiler must not record.  So do a norm over
all heads and the exchange of a shared key and value head, which communicate too.

[Note: alignment]  Weights are stored in a bucket one after the other.  CUDA code that was compiled for aligned weights reads
16 bytes at a time, and torch does not check the weights of the next block that runs it; so all must be aligned.

[Note: norms]  A norm is a piece of its own, and so is what lies between two linear layers.  A recomputed region begins and
ends where pieces do, so whatever is recomputed runs the same pieces: others would be fused, and round, at other places.

Sizes are constants of the code: an evaluation compiles once more for its micro-batches.  Nothing that differs between blocks
may be a Python number (see `Dropout`), or each block would be compiled again.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from megazero.layers.attention import SharedKVHead
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.norm import WidthNorm
from megazero.layers.recompute import Recomputed
from megazero.layers.vocabulary import slope_of, statistics_of
from megazero.models.activations import SavingBlock
from megazero.models.gpt import Block, GPTStage

_ALIGNED_BYTES = 16


def may_compile(setting: bool | str, device: torch.device) -> bool:
    """Whether a run compiles its blocks if it can.

    Args:
        setting: `training.compile`; "auto" does on CUDA where it can.  On a CPU it takes minutes and a C++ compiler.
    """
    return device.type == "cuda" if setting == "auto" else bool(setting)


def wants_compiling(setting: bool | str, device: torch.device, parameters: Iterable[Tensor]) -> bool:
    """Whether a run compiles its blocks.

    Args:
        setting: see `may_compile`.
        device, parameters: of this rank.

    Raises:
        ValueError: `compile` is true and cannot be; see [Note: alignment].
    """
    if not may_compile(setting, device):
        return False
    aligned = device.type != "cuda" or all(parameter.data_ptr() % _ALIGNED_BYTES == 0 for parameter in parameters)
    if setting is True and not aligned:
        raise ValueError(
            f"training.compile=true: on CUDA every weight must begin at a multiple of {_ALIGNED_BYTES} bytes, and some do "
            "not; take model.hidden_size and ffn_hidden_size as multiples of 8 * parallel.tp, or set training.compile=false"
        )
    return aligned


def compile_blocks(stage: GPTStage, backend: str = "inductor") -> None:
    """Have every block of a stage, and its loss, run compiled code; the compiler works when they are first called.

    Only the blocks' own `forward` is replaced; hooks and names of parameters stay.
    """
    compiled: dict[Any, Any] = {}

    def compile_once(function: Any) -> Any:
        """One code for a method of all blocks."""
        code = function.__func__ if isinstance(function, MethodType) else function
        if code not in compiled:
            compiled[code] = torch.compile(code, dynamic=False, backend=backend)
        return MethodType(compiled[code], function.__self__) if isinstance(function, MethodType) else compiled[code]

    for block in stage.blocks:
        for layer in block.modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear | WidthNorm | SharedKVHead):
                _replace_forward(layer, torch.compiler.disable(layer.forward))
        for norm in (block.attention_norm, block.mlp_norm) if isinstance(block, Block) else ():
            if not isinstance(norm.forward, Recomputed):
                plain = MethodType(type(norm).forward, norm)
                _replace_forward(norm, torch.compiler.disable(compile_once(plain)))
        for layer in block.modules():
            for wrapper in [one for one in layer.__dict__.values() if isinstance(one, Recomputed)]:
                wrapper.function = compile_once(wrapper.function)
        if isinstance(block.forward, SavingBlock):
            block.forward.function = compile_once(block.forward.function)
        else:
            _replace_forward(block, compile_once(block.forward))
    if stage.head is not None:
        output = stage.head.output
        output.statistics_of = torch.compile(statistics_of, dynamic=False, backend=backend)
        output.slope_of = torch.compile(slope_of, dynamic=False, backend=backend)


def _replace_forward(module: nn.Module, forward: Any) -> None:
    module.__dict__["forward"] = forward  # on the instance, and called by `nn.Module.__call__` between the hooks
