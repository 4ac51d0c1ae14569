"""Makes the blocks of a stage keep what their policies say.

    Block.forward          -> SavingBlock: within it the results of recomputed regions are dropped, or all goes to an arena
      Block.most           -> Recomputed     "block"
        Block.attended     -> Recomputed     "attention"
        Block.joined       -> Recomputed     "residual"
        Block.inner        -> Recomputed     "mlp"
          norm.forward     -> Recomputed     "norms"
          mlp.product      -> Recomputed     "activation"

Each is set on the instance in front of the method of its class, so a block without a policy runs as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from megazero.layers.activation_offload import PLAIN_TENSORS, ActivationStore
from megazero.layers.attention import Attention, RotaryEmbedding
from megazero.layers.recompute import WHOLE, DroppingOutputs, KeptResults, Recomputed
from megazero.layers.saved_tensors import SavedTensorHooks
from megazero.models.activation_config import UNCUT, LayerPolicy, Region
from megazero.models.gpt import Block, PostNormBlock
from megazero.parallel_state import Axis


class SavingBlock:
    """A block's forward, within the hooks of its policy.

    Attributes:
        function: the forward itself; `models/compiled.py` compiles it.
    """

    def __init__(self, function: Callable[..., Any], offload: Callable[[], SavedTensorHooks] | None = None) -> None:
        self.function, self._offload = function, offload

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*args)
        with ExitStack() as stack:
            if self._offload is not None:
                stack.enter_context(self._offload())
            stack.enter_context(DroppingOutputs())
            return self.function(*args)


def save_by_policy(
    blocks: Iterable[tuple[nn.Module, LayerPolicy]], tp: Axis, offload: ActivationStore | None = None
) -> None:
    """Apply each layer's policy to its block.  A block with a forward of its own is recomputed as a whole, or not at all.

    Args:
        blocks: of a chunk, in order, each with its policy.
        tp: over which `partition` cuts; of one rank where sequence parallelism has cut already.
        offload: takes what is kept to its arena; None where no policy of this rank says so.

    Raises:
        ValueError: a policy recomputes a part of a block that does not have it.
    """
    blocks = list(blocks)
    for number, (block, policy) in enumerate(blocks, 1):
        kept, draws = KeptResults() if policy.keep_attention else None, _may_draw(block)
        if kept is not None and isinstance(block, Block) and isinstance(block.attention, Attention):
            block.attention.kept = kept
        for owner, name, region in _parts_of(block, policy):
            if not hasattr(owner, name):
                raise ValueError(
                    f"activations.recompute: {region} needs a {name} of {type(owner).__name__}, which has none"
                )
            cut = tp if policy.partition and region not in UNCUT else WHOLE
            attends = region in ("attention", "block")
            owner.__dict__[name] = Recomputed(getattr(owner, name), kept if attends else None, cut, draws=draws)
        hooks = None
        if offload is not None:
            offload.stay(_tables(block))
            offload.shared |= {id(held): held for held in _tables_of_parts(block)}
            hooks = partial(offload.layer, offloads=policy.moves, is_last=number == len(blocks))
        if policy.recompute or hooks is not None:
            if has_regions(block):
                block.mlp_dropout.remakes_mask = "block" in policy.recompute
            block.__dict__["forward"] = SavingBlock(block.forward, hooks)


def _may_draw(block: nn.Module) -> bool:
    """Whether a block may use torch's generators: the package's own modules draw by position."""
    return any(not type(part).__module__.startswith("megazero.") for part in block.modules())


def _tables(block: nn.Module) -> Iterator[Tensor]:
    """The tensors of a block that are neither parameters nor activations: rotary tables, masks, keys."""
    for part in block.modules():
        yield from part.buffers(recurse=False)
        for held in vars(part).values():
            owner = getattr(held, "__self__", held)  # of a method
            yield from (one for one in (owner, *getattr(owner, "__dict__", {}).values()) if type(one) in PLAIN_TENSORS)


def _tables_of_parts(block: nn.Module) -> list[set[int]]:
    """The storages of the tables that each rotary embedding of a block holds for micro-batches under way."""
    return [held.held for part in block.modules() for held in vars(part).values() if isinstance(held, RotaryEmbedding)]


def has_regions(block: nn.Module) -> TypeGuard[Block]:
    """Whether a block runs in the parts that policies name: a forward of its own may do anything."""
    return isinstance(block, Block) and type(block).forward in (Block.forward, PostNormBlock.forward)


def _parts_of(block: nn.Module, policy: LayerPolicy) -> list[tuple[nn.Module, str, Region]]:
    if has_regions(block):
        return list(recomputed_parts(block, policy))
    if not policy.recompute:
        return []
    if policy.recompute != {"block"}:
        raise ValueError(
            f"activations.recompute: {type(block).__name__} has a forward of its own and can be recomputed only as a whole; "
            'write "full" or "none"'
        )
    return [(block, "forward", "block")]


def recomputed_parts(block: Block, policy: LayerPolicy) -> Iterator[tuple[nn.Module, str, Region]]:
    """(owner, its function, region) of what a policy recomputes in a block that has regions."""
    within = policy.recompute
    if "block" in within:
        yield block, "most", "block"
    if "attention" in within:
        yield block, "attended", "attention"
    if "residual" in within:
        yield block, "joined", "residual"
    if "mlp" in within:
        yield block, "inner", "mlp"
    if "norms" in within and "attention" not in within:
        yield block.attention_norm, "forward", "norms"
    if "norms" in within and "mlp" not in within:
        yield block.mlp_norm, "forward", "norms"
    if "activation" in within:
        yield block.mlp, "product", "activation"
