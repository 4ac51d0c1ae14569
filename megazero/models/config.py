"""The `[model]` section of a run file."""

from typing import Annotated

from megazero.models.registry import FAMILIES
from megazero.registry import NameIn
from megazero.settings import ActsWhere, Count, Positive, Section, ShareBelowOne


def _of_families(key: str) -> ActsWhere:
    def reading(_: object) -> tuple[str, ...]:
        return tuple(name for name in FAMILIES if key in FAMILIES[name].reads)

    return ActsWhere("model.family", reading, "this family does not read it (ModelFamily.reads)")


class ModelConfig(Section):
    """The network: its family and its sizes."""

    family: Annotated[str, NameIn(FAMILIES)] = "llama"
    """Llama (RMSNorm, rotary positions, SwiGLU) or GPT-2 (LayerNorm, learned positions, GELU)."""
    hidden_size: Count = 1024
    """Width of the residual stream; a multiple of num_heads (llama: of twice num_heads)."""
    num_layers: Count = 24
    """Number of transformer blocks; at least one for each pipeline stage."""
    num_heads: Count = 16
    """Attention heads; a multiple of parallel.tp."""
    num_kv_heads: Count | None = None
    """Key and value heads, for grouped-query attention: divides num_heads. Unset: num_heads, as gpt2 always has it."""
    ffn_hidden_size: Count | None = None
    """Inner width of the MLP. Unset: 4*hidden_size (gpt2), or 8/3 of it up to a multiple of 256 (llama)."""
    vocab_size: Count = 50304
    """Number of token ids; any number, since the table is padded where tensor parallelism needs it."""
    seq_len: Count = 1024
    """Tokens in a sample."""
    tie_embeddings: bool | None = None
    """Whether the output layer is the embedding table. Unset: false (llama) or true (gpt2, which has no other form)."""
    norm_eps: Positive = 1e-5
    """Added to the variance in every norm."""
    rope_theta: Annotated[Positive, _of_families("rope_theta")] = 10000.0
    """Base of the rotary frequencies."""
    dropout: ShareBelowOne = 0.0
    """Probability of dropping an element after the embedding and after each residual branch."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights."""
