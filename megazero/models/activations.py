"""Makes the blocks of a stage keep what their policies say.

    Block.forward          -> SavingBlock: within it the results of recomputed regions are dropped, or all goes to the host
      Block.most           -> Recomputed     "block"
        Block.attended     -> Recomputed     "attention"
        Block.inner        -> Recomputed     "mlp"
          norm.forward     -> Recomputed     "norms"
          mlp.product      -> Recomputed     "activation"

Each is set on the instance in front of the method of its class, so a block without a policy runs as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megazero.layers.recompute import WHOLE, DroppingOutputs, KeptResults, Recomputed
from megazero.layers.saved_tensors import SavedTensorHooks
from megazero.models.activation_config import LayerPolicy, Region
from megazero.parallel_state import Axis

if TYPE_CHECKING:
    from megazero.models.gpt import Block


class SavingBlock:
    """A block's forward, within the hooks of its policy.

    Attributes:
        function: the forward itself; `models/compiled.py` compiles it.
    """

    def __init__(self, function: Callable[..., Any], offload: Callable[[], SavedTensorHooks] | None) -> None:
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
    blocks: Iterable[tuple[Block, LayerPolicy]],
    tp: Axis,
    offload: Callable[[], SavedTensorHooks] | None = None,
) -> None:
    """Apply each layer's policy to its block.

    Args:
        blocks: each with its policy.
        tp: over which `partition` cuts; of one rank where sequence parallelism has cut already.
        offload: hooks for the forward of one block that keep what is saved on the host.
    """
    for block, policy in blocks:
        kept = KeptResults() if policy.keep_attention else None
        block.attention.kept = kept
        for owner, name, region in _regions(block, policy):
            cut = tp if policy.partition and region != "activation" else WHOLE
            attends = region in ("attention", "block")
            owner.__dict__[name] = Recomputed(getattr(owner, name), kept if attends else None, cut)
        if policy.recompute or policy.offload:
            block.mlp_dropout.remakes_mask = "block" in policy.recompute
            block.__dict__["forward"] = SavingBlock(block.forward, offload if policy.offload else None)


def _regions(block: Block, policy: LayerPolicy) -> Iterator[tuple[nn.Module, str, Region]]:
    """(owner, its function, region) of what a policy recomputes in a block."""
    within = policy.recompute
    if "block" in within:
        yield block, "most", "block"
    if "attention" in within:
        yield block, "attended", "attention"
    if "mlp" in within:
        yield block, "inner", "mlp"
    if "norms" in within and "attention" not in within:
        yield block.attention_norm, "forward", "norms"
    if "norms" in within and "mlp" not in within:
        yield block.mlp_norm, "forward", "norms"
    if "activation" in within:
        yield block.mlp, "product", "activation"
