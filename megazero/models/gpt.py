"""The parts that every GPT here shares, written once for every cluster shape.  A family (`models/llama`) assembles
them.

tokens -> embedding -> block 0 ... block n-1 -> final norm -> head -> loss
          [first stage]   [this stage's layers]     [last stage]

block:  x + attention(norm(x)),  then  x + mlp(norm(x))        activations: [seq, batch, hidden]
        under sequence parallelism norms, residuals and dropout see [seq / tp, batch, hidden]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import compress
from math import sqrt
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from megazero.layers.attention import Attention, AttentionCore, RotaryEmbedding, SharedKVHead
from megazero.layers.attention_kernels import AttentionKernel, CausalAttention, SlidingWindow
from megazero.layers.context_attention import ContextAttention, KernelWindow
from megazero.layers.counter_rng import Dropout, Residual
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear, WeightGradQueue
from megazero.layers.mlp import GELU, Gated, SwiGLU
from megazero.layers.norm import HeadNorm, Heads, LayerNorm, RMSNorm, WidthNorm
from megazero.layers.sample_part import SamplePart, TokenLayout
from megazero.layers.spec import Initializer, LinearSpec, NamedRows, ParamSpec, rows_spec
from megazero.layers.vocabulary import (
    LOGITS_BYTES,
    Logits,
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from megazero.models.activation_config import Region
from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.models.stages import StageLayout
from megazero.parallel_state import Axis
from megazero.settings import ConfigError, Problem

if TYPE_CHECKING:
    from megazero.layers.experts import MixtureOfExperts

D = TypeVar("D", bound=Dropout)


@dataclass(frozen=True)
class MicroBatch:
    """The input of a stage for one micro-batch.

    Args:
        sample_ids: int64 [batch], the global index of each sample in the run; dropout masks are keyed by it.
        tokens: int64 [seq, batch]; None on stages without the embedding.
        labels: int64 [seq, batch]; None on stages where neither head nor routers need them, and to get logits instead
            of a loss.
        part: which tokens of the samples these are; None for whole samples that are one document each.
    """

    sample_ids: Tensor
    tokens: Tensor | None = None
    labels: Tensor | None = None
    part: SamplePart | None = None

    @property
    def layout(self) -> TokenLayout:
        """Return the layout of the micro-batch's tokens, for the layers."""
        return TokenLayout(self.sample_ids, self.part, self.labels)


@dataclass(frozen=True)
class BuildContext:
    """Builds the layers of a stage, and holds the sizes, axes and tables that they share.

    Args:
        model: resolved.
        tp: the tensor-parallel axis.
        sequence_parallel: split norms, residuals and dropout by sequence over tp.
        seed: of the run.
        device: of computed tables.
        wgrad_queue: takes the weight gradients; None returns them to autograd.
        dtype: of activations.
        context: attention for samples that are split over ranks or hold several documents; None if there are none.
        logits_bytes: maximum for the logits of a chunk, see `Logits`.
        ep: the axis over which experts are distributed.
    """

    model: ModelConfig
    tp: Axis
    sequence_parallel: bool
    seed: int
    device: torch.device
    wgrad_queue: WeightGradQueue | None = None
    dtype: torch.dtype = torch.float32
    context: ContextAttention | None = None
    logits_bytes: int = LOGITS_BYTES
    ep: Axis = field(default_factory=partial(Axis, "ep"))

    @cached_property
    def kernel(self) -> AttentionKernel:
        """The attention kernel of the layers of a stage."""
        return self._kernel(self.model.sliding_window)

    @cached_property
    def whole_kernel(self) -> AttentionKernel:
        """The attention kernel of layers without a window, in a model where other layers have one."""
        return self._kernel(None)

    def _kernel(self, size: int | None) -> AttentionKernel:
        if (cap := self.model.attn_logit_softcapping) is not None:
            from megazero.layers.capped_attention import CappedAttention  # not loaded for other models

            return CappedAttention(cap, size or self.model.seq_len, self.device)
        if self.context is not None:
            return self.context if size else self.context.without_window()
        if size is None or size >= self.model.seq_len:
            return CausalAttention()
        if self.device.type == "cuda" and self.dtype != torch.float32 and self.head_size % 8 == 0:
            return KernelWindow(size, self.device)
        return SlidingWindow(size, self.dtype, self.device)

    @property
    def heads(self) -> Heads:
        """The heads of the model's attention."""
        return Heads(self.model.num_heads, self.kv_heads, self.head_size, self.tp)

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
        """Initial values of embeddings, head and router."""
        return Initializer("normal", self.model.init_std)

    def vocabulary(self, name: str) -> ParamSpec:
        """Build the spec of the embedding's or the head's weight.  Its rows are tokens; their number need not be
        divisible by tp.
        """
        model, rows = self.model, NamedRows(name, self.model.vocab_size)
        return rows_spec((rows,), model.hidden_size, 0, self.init, tied=bool(model.tie_embeddings))

    def positions(self, name: str) -> ParamSpec:
        """Build the spec of learned positions."""
        rows, model = (NamedRows(name, self.model.seq_len),), self.model
        return rows_spec(rows, model.hidden_size, None, self.init, sum_over_tp=self._cuts_sequence)

    def column(
        self,
        weight: tuple[NamedRows, ...],
        bias: tuple[NamedRows, ...] = (),
        in_features: int | None = None,
        *,
        transposed: bool = False,
    ) -> ColumnParallelLinear:
        """Build a projection into a block, from the hidden size unless `in_features` says otherwise."""
        init = Initializer("normal", self._matrix_std)
        linear = LinearSpec(weight, in_features or self.model.hidden_size, bias, init, transposed)
        return ColumnParallelLinear(
            linear, self.tp, sequence_parallel=self.sequence_parallel, wgrad_queue=self.wgrad_queue
        )

    def experts(self, prefix: str, keys: tuple[str, str, str], shared: SwiGLU | None = None) -> MixtureOfExperts:
        """Build a mixture of experts named `prefix`.  With `router_bias_rate`, sigmoids and a bias choose the experts of a
        token; without, a softmax.

        Args:
            keys: names of an expert's gate, up and down projections.
            shared: the MLP of shared experts; None for none.
        """
        from megazero.layers import experts  # not loaded for dense models

        model, names = self.model, [f"{prefix}.experts.{expert}" for expert in range(self.model.num_experts or 0)]
        gate, up, down = keys
        inner = [tuple(NamedRows(f"{name}.{key}.weight", model.expert_size) for key in (gate, up)) for name in names]
        outer = [(NamedRows(f"{name}.{down}.weight", model.hidden_size),) for name in names]
        common: dict[str, Any] = {"ep": self.ep, "wgrad_queue": self.wgrad_queue}
        k, groups = model.experts_per_token or 1, (model.expert_groups, model.groups_per_token)
        choice = experts.Choice(k, bool(model.renormalize_gates), model.routed_scaling_factor, *groups)
        sizes, kind = (
            (model.hidden_size, len(names)),
            experts.Router if model.router_bias_rate is None else experts.SigmoidRouter,
        )
        router = kind(f"{prefix}.gate", sizes, choice, sum_over_tp=self._cuts_sequence, init=self.init, **common)
        gate_up = experts.ExpertLinear(inner, model.hidden_size, init=self.init, **common)
        routed = router, gate_up, experts.ExpertLinear(outer, model.expert_size, init=self._onto_residual, **common)
        if shared is None:
            return experts.MixtureOfExperts(*routed)
        return experts.WithSharedExperts(*routed, shared)

    def row(
        self, weight: NamedRows, in_features: int, bias: NamedRows | None = None, *, transposed: bool = False
    ) -> RowParallelLinear:
        """Build a projection back to the residual stream.  Its initial values shrink with depth (Radford et al. 2019)."""
        linear = LinearSpec((weight,), in_features, () if bias is None else (bias,), self._onto_residual, transposed)
        return RowParallelLinear(
            linear, self.tp, sequence_parallel=self.sequence_parallel, wgrad_queue=self.wgrad_queue
        )

    def attention(
        self,
        qkv: ColumnParallelLinear,
        out: RowParallelLinear,
        rope: RotaryEmbedding | None = None,
        qk_norm: HeadNorm | WidthNorm | None = None,
        kernel: AttentionKernel | None = None,
    ) -> Attention:
        """Build grouped-query attention between two projections, with `kernel` if one is given."""
        return Attention(qkv, AttentionCore(self.heads, kernel or self.kernel, rope, qk_norm), out)

    def rms_norm(
        self, name: str, size: int | None = None, eps: float | None = None, *, offset: bool = False
    ) -> RMSNorm:
        """Build an RMSNorm, of the hidden size and with the model's epsilon unless they are given."""
        sizes = name, size or self.model.hidden_size, eps or self.model.norm_eps
        return RMSNorm(*sizes, sum_over_tp=self._cuts_sequence, offset=offset)

    def layer_norm(self, name: str) -> LayerNorm:
        """Build a LayerNorm of the hidden size."""
        return LayerNorm(name, self.model.hidden_size, self.model.norm_eps, sum_over_tp=self._cuts_sequence)

    @property
    def _onto_residual(self) -> Initializer:
        return Initializer("normal", self._matrix_std / sqrt(2 * self.model.num_layers))

    @property
    def _matrix_std(self) -> float:
        """Standard deviation of a block's matrices.  With muP, the variance falls with the width (Yang et al. 2022,
        table 8).
        """
        return self.model.init_std / sqrt(self.model.width_ratio)

    @property
    def _cuts_sequence(self) -> bool:
        return self.sequence_parallel and self.tp.size > 1

    def rounded(self, factor: float) -> float:
        """Round a factor to the type of activations, as transformers does that of a Gemma's embeddings."""
        return float(torch.tensor(factor, dtype=self.dtype, device="cpu"))

    def dropout(self, site: str) -> Dropout:
        """Build dropout with the name `site`, which keys its mask."""
        return self._dropout(Dropout, site)

    def residual(self, site: str) -> Residual:
        """Build the residual sum of a branch, with dropout named `site`."""
        residual = self._dropout(Residual, site)
        residual.scale = self.model.residual_multiplier
        return residual

    def _dropout(self, cls: type[D], site: str) -> D:
        part = self.tp.index if self.sequence_parallel else 0
        return cls(self.model.dropout, site, self.seed, self.model.seq_len, part, self.device)


class Block(nn.Module):
    """One transformer layer, pre-norm, with two residual branches.

    Args:
        context: builds the residual sums.
        sites: canonical names of the two branches; dropout masks are keyed by them.
        norms: of attention and of the MLP.
        attention, mlp: the two branches.  A family's own modules must map [seq or seq / tp, batch, hidden] to the same
            shape; attention's forward also takes the `TokenLayout`.
    """

    def __init__(
        self,
        context: BuildContext,
        sites: tuple[str, str],
        norms: tuple[nn.Module, ...],
        attention: Attention,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms[:2]
        self.attention, self.mlp = attention, mlp
        self.attention_residual, self.mlp_residual = map(context.residual, sites)

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Run the layer.  x: [seq or seq / tp, batch, hidden], unchanged in shape."""
        x, normed = self.join_attention(x, self.attention(self.attention_norm(x), layout), layout)
        return self.mlp_residual(x, self.run_mlp(normed, layout), layout)

    def run_mlp(self, normed: Tensor, _: TokenLayout) -> Tensor:
        """Run the second branch, without its residual sum."""
        return self.mlp(normed)

    def join_attention(self, x: Tensor, branch: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """Return the residual sum after attention, and its norm.  Both are compiled and recomputed as one piece."""
        x = self.attention_residual(x, branch, layout)
        return x, self.mlp_norm(x)

    def regions(self) -> dict[Region, list[nn.Module]]:
        """Return the submodules that each region of `[activations]` recomputes, in forward order.

        "block" excludes the last projection, because no backward reads its result.
        """
        (attention, out), (mlp, _) = _parts(self.attention), _parts(self.mlp)
        joined = [self.attention_residual, self.mlp_norm]
        regions = self._regions([self.attention_norm, *attention], [*out, *joined], mlp)
        return regions | {"norms": [self.attention_norm, *joined], "mlp": [*joined, *mlp]}

    def _regions(
        self, attention: list[nn.Module], residual: list[nn.Module], mlp: list[nn.Module], *rest: nn.Module
    ) -> dict[Region, list[nn.Module]]:
        """Build the result of `regions`.  `rest`: further modules that a recomputed block runs again."""
        return {
            "norms": [self.attention_norm, self.mlp_norm],
            "activation": [part for part in _parts(self.mlp)[0] if part is getattr(self.mlp, "activation", None)],
            "attention": attention,
            "residual": residual,
            "mlp": mlp,
            "block": [*attention, *residual, *mlp, *rest],
        }


class PostNormBlock(Block):
    """Like `Block`, but with norms after attention and after the MLP, before each residual sum (OLMo 2)."""

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        x = self.attention_residual(x, self.attention_norm(self.attention(x, layout)), layout)
        return self.mlp_residual(x, self.mlp_norm(self.mlp(x)), layout)

    def regions(self) -> dict[Region, list[nn.Module]]:
        (attention, out), (mlp, down) = _parts(self.attention), _parts(self.mlp)
        residual = [*out, self.attention_norm, self.attention_residual]
        return self._regions(attention, residual, mlp, *down, self.mlp_norm)


class AroundNormBlock(Block):
    """Like `Block`, with additional norms after attention and after the MLP, before each residual sum (Gemma 2, GLM-4).

    `norms`: before attention and before the MLP, then after attention and after the MLP.
    """

    def __init__(
        self, context: BuildContext, sites: tuple[str, str], norms: tuple[nn.Module, ...], *branches: Any
    ) -> None:
        super().__init__(context, sites, norms, *branches)
        self.attention_out_norm, self.mlp_out_norm = norms[2:]

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        branch = self.attention(self.attention_norm(x), layout)
        x = self.attention_residual(x, self.attention_out_norm(branch), layout)
        return self.mlp_residual(x, self.mlp_out_norm(self.mlp(self.mlp_norm(x))), layout)

    def regions(self) -> dict[Region, list[nn.Module]]:
        (attention, out), (mlp, down) = _parts(self.attention), _parts(self.mlp)
        residual = [*out, self.attention_out_norm, self.attention_residual, self.mlp_norm]
        return self._regions([self.attention_norm, *attention], residual, mlp, *down, self.mlp_out_norm)


def _parts(branch: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules of a branch before its last projection, and the projection.  A script's own branch is one
    module.
    """
    owner = next(base for base in type(branch).__mro__ if "forward" in vars(base))
    return branch.parts() if "parts" in vars(owner) else ([branch], [])  # type: ignore[operator]


class Embedding(nn.Module):
    """Convert tokens to hidden states: the first unit of the first stage.

    `name` and `positions`: canonical names of the weight and of the learned positions; None for a model without
    positions.
    """

    def __init__(self, context: BuildContext, name: str, positions: str | None = None) -> None:
        super().__init__()
        model, cut = context.model, context.sequence_parallel
        queue = None if model.tie_embeddings else context.wgrad_queue  # if tied, autograd adds the head's gradient
        self.tokens = VocabParallelEmbedding(
            context.vocabulary(name), context.tp, sequence_parallel=cut, wgrad_queue=queue
        )
        self.positions: PositionEmbedding | None = None
        if positions is not None:
            self.positions = PositionEmbedding(context.positions(positions), context.tp)
        self.dropout = context.dropout("embedding")

    def forward(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """Look up the embeddings.  tokens: int64 [seq, batch] -> [seq or seq / tp, batch, hidden]."""
        x = self.tokens(tokens)
        return self.dropout(x if self.positions is None else self.positions(x, layout), layout)


class ScaledEmbedding(Embedding):
    """Like `Embedding` without learned positions, multiplied by `scale`."""

    def __init__(self, context: BuildContext, name: str, scale: float) -> None:
        super().__init__(context, name)
        self.scale = scale

    def forward(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        return self.dropout(self.tokens(tokens) * self.scale, layout)


class Head(nn.Module):
    """Final norm, logits and loss: the last unit of the last stage.

    Args:
        context: builds the logits.
        norm: the final norm.
        name: canonical name of the weight; the embedding's name if embeddings are tied.
        tied_weight: the embedding's parameter, if embeddings are tied and this stage holds it.
    """

    def __init__(self, context: BuildContext, norm: nn.Module, name: str, tied_weight: nn.Parameter | None) -> None:
        super().__init__()
        self.norm = norm
        cap, queue = context.model.final_logit_softcapping, context.wgrad_queue
        logits = Logits(context.vocabulary(name), context.tp, cap, context.logits_bytes)
        self.output = VocabParallelHead(logits, tied_weight, queue, sequence_parallel=context.sequence_parallel)

    def forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Compute the fp32 sum of losses over counted tokens, or logits if labels is None.  x: [seq or seq / tp, batch,
        hidden].
        """
        return self.output(self.norm(x), labels)


class ScaledHead(Head):
    """Like `Head`, with logits multiplied by `scale`."""

    def __init__(self, scale: float, context: BuildContext, *of_head: Any) -> None:
        super().__init__(context, *of_head)
        self.scale = scale

    def forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        return self.output(self.norm(x) * self.scale, labels)


def head_of(context: BuildContext, *of_head: Any) -> Head:
    """Build a head whose logits are divided by `model.logits_scaling` and by the width ratio of muP (Yang et al. 2022,
    table 8).
    """
    divisor = context.model.logits_scaling * context.model.width_ratio
    return Head(context, *of_head) if divisor == 1.0 else ScaledHead(1.0 / divisor, context, *of_head)


# Some of these read their weights only within their own forward, the others only call layers.  Exact types, because a
# subclass may read weights elsewhere.  Expert layers, which dense models do not load, have the attribute
# `reads_weights` instead.
_LAYERS = (ColumnParallelLinear, RowParallelLinear, RMSNorm, LayerNorm, HeadNorm, WidthNorm)
_BLOCKS = (Block, PostNormBlock, AroundNormBlock)
_OTHERS = (*_BLOCKS, Attention, AttentionCore, SharedKVHead, SwiGLU, GELU, Gated, Residual)
_READS = dict.fromkeys(_LAYERS, True) | dict.fromkeys((*_OTHERS, nn.GELU, nn.Identity), False)


class GPTStage(nn.Module):
    """The part of a GPT that one pipeline stage holds."""

    def __init__(self, context: BuildContext, layout: StageLayout) -> None:
        super().__init__()
        family = FAMILIES[context.model.family]
        self.embedding = family.embedding(context) if layout.has_embedding else None
        self.layers = layout.layers
        self.blocks = nn.ModuleList(family.blocks(context, layout.layers))
        if context.context is not None:
            check_knows_parts(self.blocks, context.model.family)
        shared = self.embedding.tokens.weight if self.embedding is not None and context.model.tie_embeddings else None
        self.head = family.head(context, shared) if layout.has_head else None

    def units(self) -> list[nn.Module]:
        """Return the modules that ZeRO-3 gathers one at a time, in forward order."""
        return [unit for unit in (self.embedding, *self.blocks, self.head) if unit is not None]

    def readers(self, unit: nn.Module) -> list[nn.Module]:
        """Return the layers of a block that can each wait for their own weights.

        Empty for the embedding and the head, and for a block that holds a module of an unknown class, because that
        module may read its layers' weights itself.
        """
        modules = list(unit.modules())
        reads = [vars(type(module)).get("reads_weights", _READS.get(type(module))) for module in modules]
        return [] if None in reads else list(compress(modules, reads))

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


def check_knows_parts(blocks: Iterable[nn.Module], family: str) -> None:
    """Check that every block handles parts of samples and documents.  Other blocks would attend as if samples were
    whole.

    A block declares this by its `attention`, or if it has none, by any of its modules.

    Raises: ConfigError: a block does not declare that it handles them.
    """
    for block in blocks:
        own = getattr(block, "attention", None)
        if not any(map(_knows_parts, block.modules() if own is None else (getattr(own, "_orig_mod", own),))):
            which = "no module" if own is None else f"the attention, {type(own).__name__},"
            rule = f"{which} of its {type(block).__name__} says `knows_parts = True`: cp and data.document_mask need it"
            hint = (
                "attend with `BuildContext.attention`, or say this in the class that defines `forward` and asks its "
                "`TokenLayout` for positions and `BuildContext.context` to attend"
            )
            raise ConfigError([Problem("model.family", family, rule, hint)])


def _knows_parts(module: nn.Module) -> bool:
    """Whether the module declares it in the place that defines its `forward`: the instance, its class, or a base class."""
    for owner in (module, *type(module).__mro__):
        if "knows_parts" in vars(owner):
            return bool(module.knows_parts)
        if "forward" in vars(owner):
            break
    return False
