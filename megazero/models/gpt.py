"""One GPT in two families, written once for every cluster shape.

tokens -> embedding -> block 0 ... block n-1 -> final norm -> head -> loss
          [first stage]   [this stage's layers]     [last stage]

block:  x + attention(norm(x)),  then  x + mlp(norm(x))        activations: [seq, batch, hidden]
        under sequence parallelism norms, residuals and dropout see [seq / tp, batch, hidden]

Llama   RoPE, RMSNorm, SwiGLU, grouped-query attention, no biases (Touvron et al. 2023)
GPT-2   learned positions, LayerNorm, GELU, biases, tied embeddings (Radford et al. 2019)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from megazero.layers.attention import Attention
from megazero.layers.cross_entropy import VocabParallelHead
from megazero.layers.dropout import Dropout
from megazero.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear, WeightGradQueue
from megazero.layers.mlp import GELU, SwiGLU
from megazero.layers.norm import LayerNorm, RMSNorm
from megazero.layers.rope import RotaryEmbedding
from megazero.layers.spec import Init, Section
from megazero.models.config import ModelConfig
from megazero.models.hf_names import GPT2Names, LlamaNames
from megazero.models.stages import StageLayout
from megazero.parallel_state import Axis


@dataclass(frozen=True)
class MicroBatch:
    """What one micro-batch brings to a stage.

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
        model: the resolved model section.
        tp: the tensor-parallel axis.
        sequence_parallel: cut norms, residuals and dropout by sequence over tp.
        seed: the run's seed.
        device: where computed tables lie.
        wgrad_queue: takes the weight gradients; None returns them to autograd.
    """

    model: ModelConfig
    tp: Axis
    sequence_parallel: bool
    seed: int
    device: torch.device
    wgrad_queue: WeightGradQueue | None = None

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.model.hidden_size // self.model.num_heads

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
    def init(self) -> Init:
        """Initialisation of embeddings and of projections into a block."""
        return Init("normal", self.model.init_std)

    @property
    def residual_init(self) -> Init:
        """Initialisation of projections onto the residual stream, smaller with depth (Radford et al. 2019)."""
        return Init("normal", self.model.init_std / sqrt(2 * self.model.num_layers))

    def column(
        self, sections: tuple[Section, ...], biases: tuple[Section, ...], transposed: bool
    ) -> ColumnParallelLinear:
        """A projection from the hidden size into a block."""
        return ColumnParallelLinear(
            sections,
            self.model.hidden_size,
            self.tp,
            bias_sections=biases,
            sequence_parallel=self.sequence_parallel,
            init=self.init,
            transposed=transposed,
            wgrad_queue=self.wgrad_queue,
        )

    def row(self, name: str, in_features: int, bias: str | None, transposed: bool) -> RowParallelLinear:
        """A projection from a block back onto the residual stream."""
        hidden = self.model.hidden_size
        return RowParallelLinear(
            Section(name, hidden),
            in_features,
            self.tp,
            bias_section=Section(bias, hidden) if bias else None,
            sequence_parallel=self.sequence_parallel,
            init=self.residual_init,
            transposed=transposed,
            wgrad_queue=self.wgrad_queue,
        )

    def norm(self, name: str) -> nn.Module:
        """The family's norm."""
        kind = LayerNorm if self.model.family == "gpt2" else RMSNorm
        partial = self.sequence_parallel and self.tp.size > 1
        return kind(name, self.model.hidden_size, self.model.norm_eps, sum_over_tp=partial)

    def dropout(self, site: str) -> Dropout:
        """Dropout at one place of the model."""
        part = self.tp.index if self.sequence_parallel else 0
        return Dropout(self.model.dropout, site, self.seed, self.model.seq_len, part, self.device)


class Block(nn.Module):
    """One transformer layer, pre-norm, with two residual branches.

    Args:
        sites: canonical names of the two branches; they key dropout.
        norms: before attention and before the MLP.
        attention, mlp: the two branches.
        context: what every layer is built with.
    """

    def __init__(
        self,
        sites: tuple[str, str],
        norms: tuple[nn.Module, nn.Module],
        attention: Attention,
        mlp: nn.Module,
        context: BuildContext,
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp
        self.attention_dropout = context.dropout(sites[0])
        self.mlp_dropout = context.dropout(sites[1])

    def forward(self, x: Tensor, sample_ids: Tensor) -> Tensor:
        """[seq or seq / tp, batch, hidden], unchanged in shape; sample_ids int64 [batch]."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)), sample_ids)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), sample_ids)


def llama_block(layer: int, context: BuildContext, rope: RotaryEmbedding | None) -> Block:
    """A Llama layer under its Hugging Face names."""
    named = LlamaNames().block
    hidden, ffn = context.model.hidden_size, context.ffn_hidden_size
    kv_rows = context.kv_heads * context.head_size
    rows = {"q": hidden, "k": kv_rows, "v": kv_rows}
    qkv = tuple(Section(named(layer, f"self_attn.{key}_proj.weight"), rows[key]) for key in rows)
    gate_up = tuple(Section(named(layer, f"mlp.{key}_proj.weight"), ffn) for key in ("gate", "up"))
    attention = Attention(
        context.column(qkv, (), False),
        context.row(named(layer, "self_attn.o_proj.weight"), hidden, None, False),
        context.model.num_heads,
        context.kv_heads,
        context.head_size,
        rope,
    )
    mlp = SwiGLU(
        context.column(gate_up, (), False), context.row(named(layer, "mlp.down_proj.weight"), ffn, None, False)
    )
    norms = tuple(context.norm(named(layer, part)) for part in ("input_layernorm", "post_attention_layernorm"))
    sites = named(layer, "self_attn"), named(layer, "mlp")
    return Block(sites, (norms[0], norms[1]), attention, mlp, context)


def gpt2_block(layer: int, context: BuildContext, rope: RotaryEmbedding | None) -> Block:
    """A GPT-2 layer under its Hugging Face names; q, k and v are blocks of one stored tensor."""
    named = GPT2Names().block
    hidden, ffn = context.model.hidden_size, context.ffn_hidden_size
    weight, bias = (
        tuple(Section(named(layer, f"attn.c_attn.{kind}"), hidden, part * hidden, 3 * hidden) for part in range(3))
        for kind in ("weight", "bias")
    )
    attention = Attention(
        context.column(weight, bias, True),
        context.row(named(layer, "attn.c_proj.weight"), hidden, named(layer, "attn.c_proj.bias"), True),
        context.model.num_heads,
        context.kv_heads,
        context.head_size,
        rope,
    )
    up = context.column(
        (Section(named(layer, "mlp.c_fc.weight"), ffn),), (Section(named(layer, "mlp.c_fc.bias"), ffn),), True
    )
    mlp = GELU(up, context.row(named(layer, "mlp.c_proj.weight"), ffn, named(layer, "mlp.c_proj.bias"), True))
    norms = context.norm(named(layer, "ln_1")), context.norm(named(layer, "ln_2"))
    return Block((named(layer, "attn"), named(layer, "mlp")), norms, attention, mlp, context)


class Embedding(nn.Module):
    """Tokens to hidden states: the first unit of the first stage.  Arguments: see `BuildContext`."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        model, names = context.model, GPT2Names() if context.model.family == "gpt2" else LlamaNames()
        self.tokens = VocabParallelEmbedding(
            names.embedding,
            model.vocab_size,
            model.hidden_size,
            context.tp,
            sequence_parallel=context.sequence_parallel,
            tied=bool(model.tie_embeddings),
            init=context.init,
        )
        self.positions = (
            PositionEmbedding(
                names.positions,
                model.seq_len,
                model.hidden_size,
                context.tp,
                sequence_parallel=context.sequence_parallel,
                init=context.init,
            )
            if isinstance(names, GPT2Names)
            else nn.Identity()
        )
        self.dropout = context.dropout("embedding")

    def forward(self, tokens: Tensor, sample_ids: Tensor) -> Tensor:
        """int64 [seq, batch] -> [seq or seq / tp, batch, hidden]."""
        return self.dropout(self.positions(self.tokens(tokens)), sample_ids)


class Head(nn.Module):
    """Final norm, logits and loss: the last unit of the last stage.

    Args:
        context: see `BuildContext`.
        tied_weight: the embedding's parameter when this stage holds it and embeddings are tied.
    """

    def __init__(self, context: BuildContext, tied_weight: nn.Parameter | None) -> None:
        super().__init__()
        model, names = context.model, GPT2Names() if context.model.family == "gpt2" else LlamaNames()
        self.norm = context.norm(names.final_norm)
        self.output = VocabParallelHead(
            names.embedding if model.tie_embeddings or isinstance(names, GPT2Names) else names.head,
            model.vocab_size,
            model.hidden_size,
            context.tp,
            sequence_parallel=context.sequence_parallel,
            tied=bool(model.tie_embeddings),
            init=context.init,
            weight=tied_weight,
            gradients=context.wgrad_queue,
        )

    def forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """[seq or seq / tp, batch, hidden] -> fp32 sum of losses over counted tokens; logits where labels is None."""
        return self.output(self.norm(x), labels)


class GPTStage(nn.Module):
    """The part of a GPT that one pipeline stage holds.

    Args:
        context: what every layer is built with.
        layout: which layers and ends this stage holds.
    """

    def __init__(self, context: BuildContext, layout: StageLayout) -> None:
        super().__init__()
        model = context.model
        rope = None
        if model.family == "llama":
            rope = RotaryEmbedding(context.head_size, model.seq_len, model.rope_theta, context.device)
        block = gpt2_block if model.family == "gpt2" else llama_block
        self.embedding = Embedding(context) if layout.has_embedding else None
        self.blocks = nn.ModuleList(block(layer, context, rope) for layer in layout.layers)
        shared = self.embedding.tokens.weight if self.embedding is not None and model.tie_embeddings else None
        self.head = Head(context, shared) if layout.has_head else None

    def units(self) -> list[nn.Module]:
        """The modules that ZeRO-3 gathers one at a time, in forward order."""
        ends = ([self.embedding] if self.embedding else [], [self.head] if self.head else [])
        return [*ends[0], *self.blocks, *ends[1]]

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Hidden states for the next stage; on the last stage the loss summed over counted tokens, or without labels logits.

        Args:
            x: [seq or seq / tp, batch, hidden] from the previous stage; None on the first.
            batch: this micro-batch's tokens, labels and sample ids.
        """
        if self.embedding is not None:
            x = self.embedding(batch.tokens, batch.sample_ids)
        if x is None:
            raise ValueError("a stage without the embedding needs the previous stage's output")
        for block in self.blocks:
            x = block(x, batch.sample_ids)
        return x if self.head is None else self.head(x, batch.labels)
