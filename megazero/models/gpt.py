"""The modules that every GPT here shares, written once for every cluster shape.  A family (`models/llama`) assembles
them.

tokens -> embedding -> block 0 ... block n-1 -> final norm -> head -> loss
          [first stage]   [this stage's layers]     [last stage]

block:  x + attention(norm(x)),  then  x + mlp(norm(x))        activations: [seq, batch, hidden]
        under sequence parallelism norms, residuals and dropout see [seq / tp, batch, hidden]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megazero.layers.linear import BY_AUTOGRAD
from megazero.layers.sequence_shard import SequenceShard, TokenLayout
from megazero.layers.vocabulary import Logits, PositionEmbedding, VocabParallelEmbedding, VocabParallelHead
from megazero.models.activation_config import Region
from megazero.models.build_context import BuildContext, check_supports_shards
from megazero.models.registry import FAMILIES
from megazero.models.stages import StageLayout


@dataclass(frozen=True)
class MicroBatch:
    """The input of a stage for one micro-batch.

    Args:
        sample_ids: int64 [batch], the global index of each sample in the run; dropout masks are keyed by it.
        tokens: int64 [seq, batch]; None on stages without the embedding.
        labels: int64 [seq, batch]; None on stages where neither head nor routers need them, and to get logits instead
            of a loss.
        shard: says which tokens of the samples these are; None for whole samples of one document each.
    """

    sample_ids: Tensor
    tokens: Tensor | None = None
    labels: Tensor | None = None
    shard: SequenceShard | None = None

    @property
    def layout(self) -> TokenLayout:
        """Return the layout of the micro-batch's tokens, for the layers."""
        return TokenLayout(self.sample_ids, self.shard, self.labels)


class Block(nn.Module):
    """One transformer layer, pre-norm, with two residual branches.

    Args:
        context: builds the residual sums.
        sites: canonical names of the two branches; dropout masks are keyed by them.
        norms: the norms before attention and before the MLP.
        branches: attention and the MLP.  A family's own modules must map [seq or seq / tp, batch, hidden] to the same
            shape; attention's forward also takes the `TokenLayout`.
    """

    def __init__(
        self, context: BuildContext, sites: tuple[str, str], norms: Sequence[nn.Module], *branches: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms[:2]
        self.attention, self.mlp = branches
        self.attention_residual, self.mlp_residual = map(context.residual, sites)

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Run the layer.  x: [seq or seq / tp, batch, hidden], unchanged in shape."""
        x, normed = self.join_attention(x, self.attention(self.attention_norm(x), layout), layout)
        return self.mlp_residual(x, self.run_mlp(normed, layout), layout)

    def run_mlp(self, normed: Tensor, _: TokenLayout) -> Tensor:
        """Run the second branch, without its residual sum."""
        return self.mlp(normed)

    def join_attention(self, x: Tensor, branch: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """Return the residual sum after attention, and its norm.  They are compiled and recomputed together."""
        x = self.attention_residual(x, branch, layout)
        return x, self.mlp_norm(x)

    def regions(self) -> dict[Region, list[nn.Module]]:
        """Return the submodules that each region of `[activations]` recomputes, in forward order.

        "block" excludes the last projection, because no backward reads its result.
        """
        (attention, out), (mlp, _) = body_and_projection(self.attention), body_and_projection(self.mlp)
        joined = [self.attention_residual, self.mlp_norm]
        regions = self._regions([self.attention_norm, *attention], [*out, *joined], mlp)
        return regions | {"norms": [self.attention_norm, *joined], "mlp": [*joined, *mlp]}

    def _regions(
        self, attention: list[nn.Module], residual: list[nn.Module], mlp: list[nn.Module], *rest: nn.Module
    ) -> dict[Region, list[nn.Module]]:
        """Build the result of `regions`.  `rest`: further modules that a recomputed block runs again."""
        activation = getattr(self.mlp, "activation", None)
        return {
            "norms": [self.attention_norm, self.mlp_norm],
            "activation": [module for module in body_and_projection(self.mlp)[0] if module is activation],
            "attention": attention,
            "residual": residual,
            "mlp": mlp,
            "block": [*attention, *residual, *mlp, *rest],
        }


def body_and_projection(branch: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules of a branch before its last projection, and the projection.  A script's own branch is one
    module.
    """
    owner = next(base for base in type(branch).__mro__ if "forward" in vars(base))
    return branch.body_and_projection() if "body_and_projection" in vars(owner) else ([branch], [])  # type: ignore[operator]


def _undropped(x: Tensor, _: TokenLayout) -> Tensor:
    return x


def _scaling(factor: float) -> Callable[[Tensor], Tensor]:
    return nn.Identity() if factor == 1.0 else partial(torch.mul, other=factor)


class Embedding(nn.Module):
    """Convert tokens to hidden states: the first unit of the first stage.

    Args:
        context: builds the layers.
        name, positions: canonical names of the weight and of the learned positions; None for a model without positions.
        scale: factor on the embeddings of tokens.
    """

    def __init__(self, context: BuildContext, name: str, positions: str | None = None, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scaled = _scaling(scale)
        model, cut = context.model, context.sequence_parallel
        queue = BY_AUTOGRAD if model.tie_embeddings else context.wgrad_queue  # which adds a tied head's gradient
        self.tokens = VocabParallelEmbedding(
            context.vocabulary(name), context.tp, sequence_parallel=cut, wgrad_queue=queue
        )
        self.positions: PositionEmbedding | None = None
        if positions is not None:
            self.positions = PositionEmbedding(context.positions(positions), context.tp)
        self.dropout: Callable[[Tensor, TokenLayout], Tensor] = (
            context.dropout("embedding") if model.dropout else _undropped
        )

    def forward(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """Look up the embeddings.  tokens: int64 [seq, batch] -> [seq or seq / tp, batch, hidden]."""
        x = self.scaled(self.tokens(tokens))
        return self.dropout(x if self.positions is None else self.positions(x, layout), layout)


class Head(nn.Module):
    """Final norm, logits and loss: the last unit of the last stage.

    Logits are divided by `model.logits_scaling` and by the width ratio of muP (Yang et al. 2022, table 8).

    Args:
        context: builds the logits.
        norm: the final norm.
        name: canonical name of the weight; the embedding's name if embeddings are tied.
        tied_weight: the embedding's parameter, if embeddings are tied and this stage holds it.
    """

    def __init__(self, context: BuildContext, norm: nn.Module, name: str, tied_weight: nn.Parameter | None) -> None:
        super().__init__()
        self.norm = norm
        self.scaled = _scaling(1.0 / (context.model.logits_scaling * context.model.width_ratio))
        cap, queue = context.model.final_logit_softcapping, context.wgrad_queue
        logits = Logits(context.vocabulary(name), context.tp, cap, context.logits_bytes)
        self.output = VocabParallelHead(logits, tied_weight, queue, sequence_parallel=context.sequence_parallel)

    def forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Compute the fp32 sum of losses over counted tokens, or logits if labels is None.  x: [seq or seq / tp, batch,
        hidden].
        """
        return self.output(self.scaled(self.norm(x)), labels)


def is_known(module: nn.Module) -> bool:
    """Whether a module comes from this package or is one of torch's modules that its blocks hold, rather than a
    script's.
    """
    return type(module).__module__.startswith("megazero.") or type(module) in (nn.GELU, nn.Identity)


class GPTStage(nn.Module):
    """The layers of a GPT on one pipeline stage."""

    def __init__(self, context: BuildContext, layout: StageLayout) -> None:
        super().__init__()
        family = FAMILIES[context.model.family]
        self.embedding = family.embedding(context) if layout.has_embedding else None
        self.layers = layout.layers
        self.blocks = nn.ModuleList(family.blocks(context, layout.layers))
        if context.context is not None:
            check_supports_shards(self.blocks, context.model.family)
        shared = self.embedding.tokens.weight if self.embedding is not None and context.model.tie_embeddings else None
        self.head = family.head(context, shared) if layout.has_head else None

    def units(self) -> list[nn.Module]:
        """Return the modules that ZeRO-3 gathers one at a time, in forward order."""
        return [unit for unit in (self.embedding, *self.blocks, self.head) if unit is not None]

    def readers(self, unit: nn.Module) -> list[nn.Module]:
        """Return the layers of a block that hold weights.  Each can wait for its own, which it reads in its forward only.

        Empty for the embedding and the head, and for a block that holds a module of a script, because that module may
        read its layers' weights itself.
        """
        known = unit in self.blocks and all(map(is_known, unit.modules()))
        return [module for module in unit.modules() if module._parameters] if known else []

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Run the stage.

        Args:
            x: [seq or seq / tp, batch, hidden] from the previous stage; None on the first stage.
            batch: the input of the micro-batch.

        Returns:
            Hidden states for the next stage.  On the last stage, the loss summed over counted tokens; without labels,
            the logits.
        """
        layout = batch.layout
        if self.embedding is not None:
            x = self.embedding(batch.tokens, layout)
        if x is None:
            raise ValueError("a stage without the embedding needs the previous stage's output")
        for block in self.blocks:
            x = block(x, layout)
        return x if self.head is None else self.head(x, batch.labels)
