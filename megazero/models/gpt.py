"""The parts that every GPT here shares, written once for every cluster shape; a family (`models/llama`) puts them together.

tokens -> embedding -> block 0 ... block n-1 -> final norm -> head -> loss
          [first stage]   [this stage's layers]     [last stage]

block:  x + attention(norm(x)),  then  x + mlp(norm(x))        activations: [seq, batch, hidden]
        under sequence parallelism norms, residuals and dropout see [seq / tp, batch, hidden]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor, nn

from megazero.layers.attention import Attention, RotaryEmbedding, SlidingWindow
from megazero.layers.counter_rng import Dropout
from megazero.layers.cross_entropy import VocabParallelHead
from megazero.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear, WeightGradQueue
from megazero.layers.mlp import GELU, SwiGLU
from megazero.layers.norm import LayerNorm, RMSNorm
from megazero.layers.qk_norm import HeadNorm, WidthNorm
from megazero.layers.spec import Initializer, NamedRows, ParamSpec
from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.models.stages import StageLayout
from megazero.parallel_state import Axis


@dataclass(frozen=True)
class MicroBatch:
    """The input of a stage for one micro-batch.

    Args:
        sample_ids: int64 [batch], the global index of each sample in the run; keys dropout.
        tokens: int64 [seq, batch]; None on stages without the embedding.
        labels: int64 [seq, batch]; None on stages without the head, and to have logits instead of a loss.
    """

    sample_ids: Tensor
    tokens: Tensor | None = None
    labels: Tensor | None = None


@dataclass(frozen=True)
class BuildContext:
    """What every layer of a stage is built with.

    Args:
        model: resolved.
        tp: the tensor-parallel axis.
        sequence_parallel: cut norms, residuals and dropout by sequence over tp.
        seed: the run's.
        device: of computed tables.
        wgrad_queue: takes the weight gradients; None returns them to autograd.
        dtype: of activations.
    """

    model: ModelConfig
    tp: Axis
    sequence_parallel: bool
    seed: int
    device: torch.device
    wgrad_queue: WeightGradQueue | None = None
    dtype: torch.dtype = torch.float32

    @cached_property
    def window(self) -> SlidingWindow | None:
        """What the layers of a stage attend to; None where that is every position up to a token's own."""
        size = self.model.sliding_window
        return None if size is None or size >= self.model.seq_len else SlidingWindow(size, self.dtype, self.device)

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.model.head_size

    @property
    def kv_heads(self) -> int:
        """Key and value heads of the whole model."""
        return self.model.num_kv_heads or self.model.num_heads

    @property
    def ffn_hidden_size(self) -> int:
        """Inner size of the feed-forward block."""
        if self.model.ffn_hidden_size is None:
            raise ValueError("model.ffn_hidden_size is not resolved; build models from a resolved config")
        return self.model.ffn_hidden_size

    @property
    def init(self) -> Initializer:
        """Initial values of embeddings and of projections into a block."""
        return Initializer("normal", self.model.init_std)

    def vocabulary(self, name: str) -> ParamSpec:
        """The weight of the embedding or of the head; its rows are tokens and need not be divisible by tp."""
        model, rows = self.model, NamedRows(name, self.model.vocab_size)
        return ParamSpec((rows,), model.hidden_size, 0, self.init, tied=bool(model.tie_embeddings))

    def column(
        self, weight: tuple[NamedRows, ...], bias: tuple[NamedRows, ...] = (), *, transposed: bool = False
    ) -> ColumnParallelLinear:
        """A projection from the hidden size into a block."""
        return ColumnParallelLinear(
            weight,
            self.model.hidden_size,
            self.tp,
            bias_sections=bias,
            sequence_parallel=self.sequence_parallel,
            init=self.init,
            transposed=transposed,
            wgrad_queue=self.wgrad_queue,
        )

    def row(
        self, weight: NamedRows, in_features: int, bias: NamedRows | None = None, *, transposed: bool = False
    ) -> RowParallelLinear:
        """A projection back onto the residual stream; its initial values shrink with depth (Radford et al. 2019)."""
        return RowParallelLinear(
            weight,
            in_features,
            self.tp,
            bias_section=bias,
            sequence_parallel=self.sequence_parallel,
            init=Initializer("normal", self.model.init_std / sqrt(2 * self.model.num_layers)),
            transposed=transposed,
            wgrad_queue=self.wgrad_queue,
        )

    def attention(
        self,
        qkv: ColumnParallelLinear,
        out: RowParallelLinear,
        rope: RotaryEmbedding | None = None,
        qk_norm: HeadNorm | WidthNorm | None = None,
    ) -> Attention:
        """Grouped-query attention between two projections."""
        return Attention(qkv, out, self.model.num_heads, self.kv_heads, self.head_size, rope, qk_norm, self.window)

    def head_norm(self, names: tuple[str, str]) -> HeadNorm:
        """RMSNorm of each query and key; `names` are for queries and for keys."""
        return HeadNorm(names, self.head_size, self.model.norm_eps, self.tp)

    def width_norm(self, names: tuple[str, str]) -> WidthNorm:
        """RMSNorm of all queries and all keys together; `names` are for queries and for keys."""
        sizes = self.model.attention_size, self.kv_heads * self.head_size
        return WidthNorm(names, sizes, self.model.norm_eps, self.tp)

    def rms_norm(self, name: str) -> RMSNorm:
        """RMSNorm of the hidden size."""
        return RMSNorm(name, self.model.hidden_size, self.model.norm_eps, sum_over_tp=self._cuts_sequence)

    def layer_norm(self, name: str) -> LayerNorm:
        """LayerNorm of the hidden size."""
        return LayerNorm(name, self.model.hidden_size, self.model.norm_eps, sum_over_tp=self._cuts_sequence)

    @property
    def _cuts_sequence(self) -> bool:
        return self.sequence_parallel and self.tp.size > 1

    def dropout(self, site: str) -> Dropout:
        """Dropout under the name `site`, which keys its mask."""
        part = self.tp.index if self.sequence_parallel else 0
        return Dropout(self.model.dropout, site, self.seed, self.model.seq_len, part, self.device)


class Block(nn.Module):
    """One transformer layer, pre-norm, with two residual branches.

    Args:
        context: builds the dropouts.
        sites: canonical names of the two branches; they key dropout.
        norms: of attention and of the MLP.
        attention, mlp: the two branches; or modules of a family's own, [seq or seq / tp, batch, hidden] unchanged in shape:
            they are recomputed as a whole if they do not tell `heads` from `out`, and `inner` from `down`.
    """

    def __init__(
        self,
        context: BuildContext,
        sites: tuple[str, str],
        norms: tuple[nn.Module, nn.Module],
        attention: Attention,
        mlp: SwiGLU | GELU,
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp
        self.attention_dropout, self.mlp_dropout = map(context.dropout, sites)

    def attended(self, x: Tensor) -> Tensor:
        """What attention's output projection reads: [seq, batch, heads * size of this rank]."""
        return _begin(self.attention, "heads", self.attention_norm(x))

    def inner(self, x: Tensor) -> Tensor:
        """What the MLP's down projection reads: [seq, batch, inner size of this rank]."""
        return _begin(self.mlp, "inner", self.mlp_norm(x))

    def joined(self, x: Tensor, attended: Tensor, sample_ids: Tensor) -> Tensor:
        """The residual stream after attention, of the one before and what the output projection reads."""
        return x + self.attention_dropout(_end(self.attention, "heads", "out", attended), sample_ids)

    def most(self, x: Tensor, sample_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Everything before the down projection, whose result no backward reads: what it reads, and the residual stream."""
        x = self.joined(x, self.attended(x), sample_ids)
        return self.inner(x), x

    def forward(self, x: Tensor, sample_ids: Tensor) -> Tensor:
        """[seq or seq / tp, batch, hidden], unchanged in shape; sample_ids int64 [batch]."""
        inner, x = self.most(x, sample_ids)
        return x + self.mlp_dropout(_end(self.mlp, "inner", "down", inner), sample_ids)


class PostNormBlock(Block):
    """As `Block`, but the norms come after attention and after the MLP, before each residual sum (OLMo 2)."""

    def attended(self, x: Tensor) -> Tensor:
        return _begin(self.attention, "heads", x)

    def inner(self, x: Tensor) -> Tensor:
        return _begin(self.mlp, "inner", x)

    def joined(self, x: Tensor, attended: Tensor, sample_ids: Tensor) -> Tensor:
        branch = self.attention_norm(_end(self.attention, "heads", "out", attended))
        return x + self.attention_dropout(branch, sample_ids)

    def most(self, x: Tensor, sample_ids: Tensor) -> tuple[Tensor, Tensor]:
        """All but the last residual sum: the norm reads the result of the down projection."""
        x = self.joined(x, self.attended(x), sample_ids)
        return self.mlp_norm(_end(self.mlp, "inner", "down", self.inner(x))), x

    def forward(self, x: Tensor, sample_ids: Tensor) -> Tensor:
        branch, x = self.most(x, sample_ids)
        return x + self.mlp_dropout(branch, sample_ids)


def _begin(branch: nn.Module, first: str, x: Tensor) -> Tensor:
    """All of a branch before its last projection; of a branch that does not tell them apart, all."""
    result: Tensor = getattr(branch, first, branch)(x)
    return result


def _end(branch: nn.Module, first: str, last: str, x: Tensor) -> Tensor:
    """What `_begin` has left."""
    result: Tensor = getattr(branch, last)(x) if hasattr(branch, first) else x
    return result


class Embedding(nn.Module):
    """Tokens to hidden states: the first unit of the first stage.

    `name` and `positions` are the canonical names of the weight and of the learned positions, None for a model without.
    """

    def __init__(self, context: BuildContext, name: str, positions: str | None = None) -> None:
        super().__init__()
        model, cut = context.model, context.sequence_parallel
        queue = None if model.tie_embeddings else context.wgrad_queue  # else autograd adds the head's gradient, too
        self.tokens = VocabParallelEmbedding(
            context.vocabulary(name), context.tp, sequence_parallel=cut, wgrad_queue=queue
        )
        self.positions: nn.Module = nn.Identity()
        if positions is not None:
            self.positions = PositionEmbedding(
                positions, model.seq_len, model.hidden_size, context.tp, sequence_parallel=cut, init=context.init
            )
        self.dropout = context.dropout("embedding")

    def forward(self, tokens: Tensor, sample_ids: Tensor) -> Tensor:
        """int64 [seq, batch] -> [seq or seq / tp, batch, hidden]."""
        return self.dropout(self.positions(self.tokens(tokens)), sample_ids)


class Head(nn.Module):
    """Final norm, logits and loss: the last unit of the last stage.

    Args:
        context: builds the logits.
        norm: the final norm.
        name: canonical name of the weight; the embedding's where embeddings are tied.
        tied_weight: the embedding's parameter when this stage holds it and embeddings are tied.
    """

    def __init__(self, context: BuildContext, norm: nn.Module, name: str, tied_weight: nn.Parameter | None) -> None:
        super().__init__()
        self.norm = norm
        self.output = VocabParallelHead(
            context.vocabulary(name),
            context.tp,
            sequence_parallel=context.sequence_parallel,
            weight=tied_weight,
            wgrad_queue=context.wgrad_queue,
        )

    def forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """[seq or seq / tp, batch, hidden] -> fp32 sum of losses over counted tokens; logits where labels is None."""
        return self.output(self.norm(x), labels)


class GPTStage(nn.Module):
    """The part of a GPT that one pipeline stage holds."""

    def __init__(self, context: BuildContext, layout: StageLayout) -> None:
        super().__init__()
        family = FAMILIES[context.model.family]
        self.embedding = family.embedding(context) if layout.has_embedding else None
        self.blocks = nn.ModuleList(family.blocks(context, layout.layers))
        shared = self.embedding.tokens.weight if self.embedding is not None and context.model.tie_embeddings else None
        self.head = family.head(context, shared) if layout.has_head else None

    def units(self) -> list[nn.Module]:
        """The modules that ZeRO-3 gathers one at a time, in forward order."""
        return [unit for unit in (self.embedding, *self.blocks, self.head) if unit is not None]

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Hidden states for the next stage; on the last stage the loss summed over counted tokens, or without labels logits.

        x: [seq or seq / tp, batch, hidden] from the previous stage; None on the first.
        """
        if self.embedding is not None:
            x = self.embedding(batch.tokens, batch.sample_ids)
        if x is None:
            raise ValueError("a stage without the embedding needs the previous stage's output")
        for block in self.blocks:
            x = block(x, batch.sample_ids)
        return x if self.head is None else self.head(x, batch.labels)
