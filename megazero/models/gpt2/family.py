"""GPT-2: learned positions, LayerNorm, GELU, biases, tied embeddings (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megazero.models.config import ModelConfig
from megazero.models.family import HuggingFaceFormat, ModelFamily, ModelRule, attention_weights
from megazero.settings import Problem

if TYPE_CHECKING:
    from torch import nn

    from megazero.models.build_context import BuildContext
    from megazero.models.gpt import Block, Embedding, Head


def _unsupported(config: Mapping[str, Any], seq_len: int | None) -> Iterator[str]:
    if seq_len is not None and seq_len != config.get("n_positions"):
        yield (
            f"seq_len={seq_len}, but a gpt2 has its n_positions={config.get('n_positions')!r} rows of learned "
            "positions; leave seq_len out"
        )


def _dropouts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dropout of embedding, residual branches and attention.  A missing key is 0.1, as in transformers."""
    return {key: config.get(key, 0.1) or 0.0 for key in ("embd_pdrop", "resid_pdrop", "attn_pdrop")}


def _dropout(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dropout if embedding and residual branches have the same, else 0."""
    embedding, branches, _ = _dropouts(config).values()
    return {"dropout": embedding if embedding == branches else 0.0}


def _lost(config: Mapping[str, Any]) -> Iterator[str]:
    embedding, branches, attention = _dropouts(config).values()
    if embedding != branches:
        yield f"embd_pdrop = {embedding!r} and resid_pdrop = {branches!r}: model.dropout is one number for both; set it"
    if attention:
        yield f"attn_pdrop = {attention!r}: attention here drops nothing; model.dropout may be set"


class GPT2Family(ModelFamily):
    """The family GPT-2."""

    ties_embeddings, learns_positions = True, True
    hugging_face = HuggingFaceFormat().variant(
        "gpt2",
        extra=lambda model: {"embd_pdrop": model.dropout, "resid_pdrop": model.dropout, "attn_pdrop": 0.0},
        read_extra=_dropout,
        problems=_unsupported,
        lost=_lost,
    )

    def rules(self) -> tuple[ModelRule, ...]:
        """The rules of every family, and that embeddings must be tied."""
        return (*super().rules(), ModelRule(("model.tie_embeddings",), self.check_tied))

    def check_kv_heads(self, model: ModelConfig, _: int) -> Iterator[Problem]:
        """Check that there are as many key and value heads as query heads."""
        if model.num_kv_heads not in (None, model.num_heads):
            rule = f"must be num_heads={model.num_heads}: gpt2 has no grouped-query attention"
            yield Problem("model.num_kv_heads", model.num_kv_heads, rule, "leave it out")

    def check_tied(self, model: ModelConfig, _: int) -> Iterator[Problem]:
        """Check that embeddings are tied."""
        if model.tie_embeddings is False:
            rule = "must be true for gpt2: its output layer is the embedding table"
            yield Problem("model.tie_embeddings", False, rule, "leave it out")

    def layer_weights(self, model: ModelConfig) -> float:
        """Count the elements of a layer's matrices: q, k, v, out; up, down."""
        return attention_weights(model) + 2 * model.hidden_size * (model.ffn_hidden_size or self.ffn_hidden_size(model))

    def embedding(self, context: BuildContext) -> Embedding:
        from megazero.models.gpt import Embedding

        return Embedding(context, "transformer.wte.weight", "transformer.wpe.weight")

    def blocks(self, context: BuildContext, layers: Sequence[int]) -> list[Block]:
        from megazero.models.gpt2.block import gpt2_block

        return [gpt2_block(layer, context) for layer in layers]

    def head(self, context: BuildContext, tied_weight: nn.Parameter | None) -> Head:
        from megazero.models.gpt import Head

        return Head(context, context.layer_norm("transformer.ln_f"), "transformer.wte.weight", tied_weight)


GPT2 = GPT2Family()
