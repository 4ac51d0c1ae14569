"""Builds the layers of a stage for a model family, so that the family's code does not mention ranks.

sizes of the model, axes, device  ->  BuildContext  ->  column, row, attention, rms_norm, experts ...  ->  a block
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import nn

from megazero.layers.attention import Attention, AttentionCore, AttentionKernel, CausalAttention, RotaryEmbedding
from megazero.layers.counter_rng import Dropout, dropout_key
from megazero.layers.heads import HeadNorm, Heads, WidthNorm
from megazero.layers.linear import BY_AUTOGRAD, ColumnParallelLinear, RowParallelLinear, WeightGradQueue
from megazero.layers.norm import LayerNorm, OffsetRMSNorm, Residual, RMSNorm
from megazero.layers.spec import Initializer, LinearSpec, NamedRows, ParamSpec, expert_spec, rows_spec
from megazero.layers.vocabulary import LOGITS_BYTES
from megazero.models.config import ModelConfig
from megazero.parallel_state import Axis
from megazero.settings import ConfigError, Problem

if TYPE_CHECKING:
    from megazero.layers.context_attention import ContextAttention
    from megazero.layers.experts import MixtureOfExperts
    from megazero.layers.mlp import SwiGLU


@dataclass(frozen=True)
class BuildContext:
    """Builds the layers of a stage, and holds the sizes, axes and tables that they share.

    Args:
        model: the resolved model.
        tp: the tensor-parallel axis.
        sequence_parallel: split norms, residuals and dropout by sequence over tp.
        seed: seed of the run.
        device: device of computed tables.
        wgrad_queue: receives the weight gradients; `BY_AUTOGRAD` returns them to autograd.
        dtype: dtype of activations.
        context: attention for samples that are split over ranks or hold several documents; None if there are none.
        logits_bytes: maximum for the logits of a chunk, see `Logits`.
        ep: the axis over which experts are distributed.
    """

    model: ModelConfig
    tp: Axis
    sequence_parallel: bool
    seed: int
    device: torch.device
    wgrad_queue: WeightGradQueue = BY_AUTOGRAD
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
            from megazero.layers.capped_attention import CappedAttention  # each kernel is loaded where it is chosen

            return CappedAttention(cap, size or self.model.seq_len, self.device)
        if self.context is not None:
            return self.context if size else self.context.without_window()
        if size is None or size >= self.model.seq_len:
            return CausalAttention()
        if self.device.type == "cuda" and self.dtype != torch.float32 and self.head_size % 8 == 0:
            from megazero.layers.context_attention import KernelWindow

            return KernelWindow(size, self.device)
        from megazero.layers.attention_kernels import SlidingWindow

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
        """Build a column-parallel projection into a block.  Its input has the hidden size unless `in_features` is given."""
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
        k, groups = model.experts_per_token or 1, (model.expert_groups, model.groups_per_token)
        choice = experts.Choice(k, bool(model.renormalize_gates), model.routed_scaling_factor, *groups)
        scores = (NamedRows(f"{prefix}.gate.weight", len(names)),)
        router = experts.Router if model.router_bias_rate is None else experts.SigmoidRouter
        scored = rows_spec(scores, model.hidden_size, None, self.init, sum_over_tp=self._cuts_sequence)
        on_ranks = self.ep, self.wgrad_queue
        gate_up = experts.ExpertLinear(expert_spec(inner, model.hidden_size, self.init), *on_ranks)
        onto_residual = experts.ExpertLinear(expert_spec(outer, model.expert_size, self._onto_residual), *on_ranks)
        routed = router(scored, choice, *on_ranks), gate_up, onto_residual
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
        sizes, norm = (size or self.model.hidden_size, eps or self.model.norm_eps), OffsetRMSNorm if offset else RMSNorm
        return norm(name, *sizes, sum_over_tp=self._cuts_sequence)

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
        """Round a factor to the dtype of activations, as transformers rounds the factor of Gemma's embeddings."""
        return float(torch.tensor(factor, dtype=self.dtype, device="cpu"))

    def dropout(self, site: str) -> Dropout:
        """Build dropout with the name `site`, which keys its mask."""
        seq_shard = self.tp.index if self.sequence_parallel else 0
        return Dropout(self.model.dropout, dropout_key(self.seed, site, self.device), self.model.seq_len, seq_shard)

    def residual(self, site: str) -> Residual:
        """Build the residual sum of a branch, with dropout named `site`."""
        return Residual(self.model.residual_multiplier, self.dropout(site) if self.model.dropout else None)


def check_supports_shards(blocks: Iterable[nn.Module], family: str) -> None:
    """Check that every block supports sequence shards and documents.  Other blocks would attend as if samples were
    whole.

    A block declares this by its `attention`, or if it has none, by any of its modules.

    Raises: ConfigError: a block does not declare that it handles them.
    """
    for block in blocks:
        own = getattr(block, "attention", None)
        if not any(map(_supports_shards, block.modules() if own is None else (getattr(own, "_orig_mod", own),))):
            which = "no module" if own is None else f"the attention, {type(own).__name__},"
            rule = f"{which} of its {type(block).__name__} sets `supports_shards = True`: cp and data.document_mask need it"
            hint = (
                "attend with `BuildContext.attention`, or set it in the class whose `forward` takes positions from "
                "its `TokenLayout` and attends with `BuildContext.context`"
            )
            raise ConfigError([Problem("model.family", family, rule, hint)])


def _supports_shards(module: nn.Module) -> bool:
    """Whether the module declares `supports_shards` where its `forward` is defined: in the instance, its class or a base
    class.
    """
    for owner in (module, *type(module).__mro__):
        if "supports_shards" in vars(owner):
            return bool(module.supports_shards)
        if "forward" in vars(owner):
            break
    return False
