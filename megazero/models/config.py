"""The `[model]` section of a run file."""

from collections.abc import Collection
from typing import Annotated

from pydantic import Field

from megazero.models.registry import FAMILIES
from megazero.models.rope_scaling import RopeScaling
from megazero.registry import NameIn
from megazero.settings import ActsWhere, Count, Epsilon, Positive, Section, ShareBelowOne


def _of_families(key: str) -> ActsWhere:
    def reading(_: object) -> tuple[str, ...]:
        return tuple(name for name in FAMILIES if key in FAMILIES[name].reads)

    return ActsWhere("model.family", reading, "this family does not read it (ModelFamily.reads)")


class ModelConfig(Section):
    """The network: its family and its sizes."""

    family: Annotated[str, NameIn(FAMILIES)] = "llama"
    """The layers and their names; see docs/models.md."""
    hidden_size: Annotated[int, Field(ge=1, le=2**20)] = 1024
    """Width of the residual stream; where head_dim is unset a multiple of num_heads (rotary positions: of twice that)."""
    num_layers: Annotated[int, Field(ge=1, le=2**14)] = 24
    """Number of transformer blocks; at least one for each pipeline stage."""
    num_heads: Count = 16
    """Attention heads; a multiple of parallel.tp."""
    num_kv_heads: Count | None = None
    """Key and value heads: divides num_heads, and is a multiple of parallel.tp or divides it. Unset: num_heads."""
    head_dim: Annotated[Count | None, _of_families("head_dim")] = None
    """Size of one head; even where positions are rotary. Unset: hidden_size / num_heads."""
    ffn_hidden_size: Count | None = None
    """Inner width of the MLP. Unset: 4*hidden_size (gpt2), or 8/3 of it up to a multiple of 256 (all others)."""
    vocab_size: Count = 50304
    """Number of token ids; any number, since the table is padded where tensor parallelism needs it."""
    seq_len: Count = 1024
    """Tokens in a sample."""
    tie_embeddings: bool | None = None
    """Whether the output layer is the embedding table. Unset: true for gpt2, which has no other form; else false."""
    norm_eps: Epsilon = 1e-5
    """Added to the variance in every norm."""
    rope_theta: Annotated[Positive, _of_families("rope_theta")] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: Annotated[RopeScaling | None, _of_families("rope_scaling")] = None
    """Rotary frequencies for more positions than before: type = "linear", "yarn" or "llama3"; see docs/models.md."""
    sliding_window: Annotated[Count | None, _of_families("sliding_window")] = None
    """Positions that a token attends to, its own included. Unset: all up to its own."""
    dropout: ShareBelowOne = 0.0
    """Probability of dropping an element after the embedding and after each residual branch."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights."""

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def attention_size(self) -> int:
        """Elements of all heads together: the width of the queries, and of what the output projection takes."""
        return self.num_heads * self.head_size

    @property
    def mean_reach(self) -> float:
        """Positions that a token attends to, averaged over a sample: seq_len / 2, fewer with a window."""
        return self.reach_in([self.seq_len])

    def reach_in(self, lengths: Collection[int]) -> float:
        """The same where attention stays within documents of these lengths."""
        windows = [min(self.sliding_window or length, length) for length in lengths]
        seen = sum(length * window - window**2 / 2 for length, window in zip(lengths, windows, strict=True))
        return seen / sum(lengths)
