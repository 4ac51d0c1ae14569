"""How elements of a tensor move from the layout of another framework to ours, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megazero.checkpoint.foreign.names import Move
from megazero.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


def rows_of_pairs(heads: Callable[[ModelConfig], int]) -> tuple[Move, Move]:
    """(take, give) for the rows of q or k, whose rotary positions turn neighbours there and halves of a head here.

        theirs  a0 b0 a1 b1 a2 b2        each pair (a, b) is turned by one angle
        ours    a0 a1 a2 b0 b1 b2

    Args:
        heads: how many heads the rows hold.
    """

    def take(tensor: Tensor, model: ModelConfig) -> Tensor:
        return tensor.unflatten(0, (heads(model), -1, 2)).transpose(1, 2).flatten(0, 2)

    def give(tensor: Tensor, model: ModelConfig) -> Tensor:
        return tensor.unflatten(0, (heads(model), 2, -1)).transpose(1, 2).flatten(0, 2)

    return take, give


def kv_heads(model: ModelConfig) -> int:
    """Key and value heads of a resolved model."""
    return model.num_kv_heads or model.num_heads


def of_query_groups(part: str) -> Move:
    """ "q", "k" or "v" of rows that hold them by query group, as Megatron's `linear_qkv` does, biases included.

    theirs  q0 q1 k0 v0 | q2 q3 k1 v1        4 heads, 2 groups
    """

    def take(tensor: Tensor, model: ModelConfig) -> Tensor:
        groups = kv_heads(model)
        queries = model.num_heads // groups
        grouped = tensor.unflatten(0, (groups, queries + 2, -1))
        return (
            grouped[:, :queries].flatten(0, 2) if part == "q" else grouped[:, queries + "kv".index(part)].flatten(0, 1)
        )

    return take


def half(part: int) -> Move:
    """The first or second half of the rows."""
    return lambda tensor, _: tensor.unflatten(0, (2, -1))[part]


def without_padding(tensor: Tensor, model: ModelConfig) -> Tensor:
    """The rows of the vocabulary, of a table that is padded to a multiple of some number."""
    return tensor[: model.vocab_size]
