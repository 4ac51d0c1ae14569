"""The parts that every GPT here shares, written once for every cluster shape; a family (`models/llama`) puts them together.

tokens -> embedding -> block 0 ... block n-1 -> final norm -> head -> loss
          [first stage]   [this stage's layers]     [last stage]

block:  x + attention(norm(x)),  then  x + mlp(norm(x))        activations: [seq, batch, hidden]
        under sequence parallelism norms, residuals and dropout see [seq / tp, batch, hidden]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor, nn

from megazero.layers.attention import Attention, RotaryEmbedding, SharedKVHead, SlidingWindow
from megazero.layers.context_attention import ContextAttention
from megazero.layers.counter_rng import Dropout
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear, WeightGradQueue
from megazero.layers.mlp import GELU, SwiGLU
from megazero.layers.norm import HeadNorm, LayerNorm, RMSNorm, WidthNorm
from megazero.layers.sample_part import SamplePart, TokenLayout
from megazero.layers.spec import Initializer, NamedRows, ParamSpec
from megazero.layers.vocabulary import PositionEmbedding, VocabParallelEmbedding, VocabParallelHead
from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.models.stages import StageLayout
from megazero.parallel_state import Axis
from megazero.settings import ConfigError, Problem


@dataclass(frozen=True)
class MicroBatch:
    """The input of a stage for one micro-batch.

    Args:
        sample_ids: int64 [batch], the global index of each sample in the run; keys dropout.
        tokens: int64 [seq, batch]; None on stages without the embedding.
        labels: int64 [seq, batch]; None on stages without the head, and to have logits instead of a loss.
        part: which tokens of the samples these are; None for all, of one document each.
    """

    sample_ids: Tensor
    tokens: Tensor | None = None
    labels: Tensor | None = None
    part: SamplePart | None = None

    @property
    def layout(self) -> TokenLayout:
        """What layers are told of it."""
        return TokenLayout(self.sample_ids, self.part)


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
        context: attends where samples are cut over ranks, or hold several documents; None where none are.
    """

    model: ModelConfig
    tp: Axis
    sequence_parallel: bool
    seed: int
    device: torch.device
    wgrad_queue: WeightGradQueue | None = None
    dtype: torch.dtype = torch.float32
    context: ContextAttention | None = None

    @cached_property
    def window(self) -> SlidingWindow | None:
        """How far the layers of a stage see; None where that is all positions up to a token's own, or `context` attends."""
        size = self.model.sliding_window
        if size is None or size >= self.model.seq_len or self.context is not None:
            return None
        return SlidingWindow(size, self.dtype, self.device)

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
        return Attention(
            qkv, out, self.model.num_heads, self.kv_heads, self.head_size, rope, qk_norm, self.window, self.context
        )

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
        attention, mlp: the two branches; or modules of a family's own, [seq or seq / tp, batch, hidden] unchanged in
            shape (attention's takes the `TokenLayout` too): they are recomputed as a whole if they do not tell `heads` from
            `out`, and `inner` from `down`.
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

    def attended(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """What attention's output projection reads: [seq, batch, heads * size of this rank]."""
        return _begin(self.attention, "heads", self.attention_norm(x), layout)

    def inner(self, x: Tensor) -> Tensor:
        """What the MLP's down projection reads: [seq, batch, inner size of this rank]."""
        return _begin(self.mlp, "inner", self.mlp_norm(x))

    def joined(self, x: Tensor, attended: Tensor, layout: TokenLayout) -> Tensor:
        """The residual stream after attention, of the one before and what the output projection reads."""
        return x + self.attention_dropout(_end(self.attention, "heads", "out", attended), layout)

    def most(self, x: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """Everything before the down projection, whose result no backward reads: what it reads, and the residual stream."""
        x = self.joined(x, self.attended(x, layout), layout)
        return self.inner(x), x

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """[seq or seq / tp, batch, hidden], unchanged in shape."""
        inner, x = self.most(x, layout)
        return x + self.mlp_dropout(_end(self.mlp, "inner", "down", inner), layout)


class PostNormBlock(Block):
    """As `Block`, but the norms come after attention and after the MLP, before each residual sum (OLMo 2)."""

    def attended(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return _begin(self.attention, "heads", x, layout)

    def inner(self, x: Tensor) -> Tensor:
        return _begin(self.mlp, "inner", x)

    def joined(self, x: Tensor, attended: Tensor, layout: TokenLayout) -> Tensor:
        branch = self.attention_norm(_end(self.attention, "heads", "out", attended))
        return x + self.attention_dropout(branch, layout)

    def most(self, x: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """All but the last residual sum: the norm reads the result of the down projection."""
        x = self.joined(x, self.attended(x, layout), layout)
        return self.mlp_norm(_end(self.mlp, "inner", "down", self.inner(x))), x

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        branch, x = self.most(x, layout)
        return x + self.mlp_dropout(branch, layout)


def _begin(branch: nn.Module, first: str, x: Tensor, *layout: TokenLayout) -> Tensor:
    """All of a branch before its last projection; of a branch that does not tell them apart, all."""
    result: Tensor = getattr(branch, first, branch)(x, *layout)
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
        self.positions: PositionEmbedding | None = None
        if positions is not None:
            self.positions = PositionEmbedding(
                positions, model.seq_len, model.hidden_size, context.tp, sequence_parallel=cut, init=context.init
            )
        self.dropout = context.dropout("embedding")

    def forward(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """int64 [seq, batch] -> [seq or seq / tp, batch, hidden]."""
        x = self.tokens(tokens)
        return self.dropout(x if self.positions is None else self.positions(x, layout), layout)


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


# Layers read their weights within their own forward alone, the others only call layers.  Exact types: a subclass may read
# them elsewhere.
_LAYERS = {ColumnParallelLinear, RowParallelLinear, RMSNorm, LayerNorm, HeadNorm, WidthNorm}
_KNOWN = _LAYERS | {Block, PostNormBlock, Attention, SharedKVHead, SwiGLU, GELU, Dropout}


class GPTStage(nn.Module):
    """The part of a GPT that one pipeline stage holds."""

    def __init__(self, context: BuildContext, layout: StageLayout) -> None:
        super().__init__()
        family = FAMILIES[context.model.family]
        self.embedding = family.embedding(context) if layout.has_embedding else None
        self.blocks = nn.ModuleList(family.blocks(context, layout.layers))
        if context.context is not None:
            check_knows_parts(self.blocks, context.model.family)
        shared = self.embedding.tokens.weight if self.embedding is not None and context.model.tie_embeddings else None
        self.head = family.head(context, shared) if layout.has_head else None

    def units(self) -> list[nn.Module]:
        """The modules that ZeRO-3 gathers one at a time, in forward order."""
        return [unit for unit in (self.embedding, *self.blocks, self.head) if unit is not None]

    def readers(self, unit: nn.Module) -> list[nn.Module]:
        """The layers of a block that wait for their own weights.

        None of the embedding and of the head, nor where a block holds a module of another class: it may read the weights of
        its layers itself.
        """
        kinds = [(module, type(module)) for module in unit.modules()]
        return [module for module, kind in kinds if kind in _LAYERS] if {kind for _, kind in kinds} <= _KNOWN else []

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Hidden states for the next stage; on the last stage the loss summed over counted tokens, or without labels logits.

        x: [seq or seq / tp, batch, hidden] from the previous stage; None on the first.
        """
        layout = batch.layout
        if self.embedding is not None:
            x = self.embedding(batch.tokens, layout)
        if x is None:
            raise ValueError("a stage without the embedding needs the previous stage's output")
        for block in self.blocks:
            x = block(x, layout)
        return x if self.head is None else self.head(x, batch.labels)


def check_knows_parts(blocks: Iterable[nn.Module], family: str) -> None:
    """Make sure that every block knows parts of samples and documents: another would attend as if they were whole samples.

    Asked is a block's `attention`, or where it has none, all that it holds.

    Raises: ConfigError: one does not say so.
    """
    for block in blocks:
        own = getattr(block, "attention", None)
        if not any(map(_knows_parts, block.modules() if own is None else (getattr(own, "_orig_mod", own),))):
            which = "no module" if own is None else f"the attention, {type(own).__name__},"
            rule = (
                f"{which} of its {type(block).__name__} says `knows_parts = True`, which parallel.cp above 1 and "
                "data.document_mask need"
            )
            hint = (
                "attend with `BuildContext.attention`, or write this into the class of an attention that asks its "
                "`TokenLayout` for positions, and `BuildContext.context` to attend; a class whose `forward` or `heads` is "
                "another than its base's says it anew"
            )
            raise ConfigError([Problem("model.family", family, rule, hint)])


def _knows_parts(module: nn.Module) -> bool:
    """Whether what defines a module's `forward` and `heads` says so: itself, its class, or one that this is made of."""
    for one in (module, *type(module).__mro__):
        if "knows_parts" in vars(one):
            return bool(module.knows_parts)
        if vars(one).keys() & {"forward", "heads"}:
            break
    return False
