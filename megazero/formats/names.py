"""Names and layouts that other frameworks give to a family's tensors.

    theirs                                                          ours
    torchtitan   layers.3.attention.wq.weight    row pairs   ->     model.layers.3.self_attn.q_proj.weight
    Megatron     decoder.layers.3...linear_qkv   q, k, v     ->     ... q_proj.weight, ... k_proj.weight, ... v_proj.weight

A tensor of ours is made of one tensor of theirs by moving elements only, so moments move as the weights do.  `{}` stands
for the number of the layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megazero.checkpoint.hugging_face.match import Move, Names
from megazero.models.config import ModelConfig

_LAYER = re.compile(r"\.(\d+)\.")
_NOTHING = re.compile(r"(?!)")


def unmoved(tensor: Tensor, model: ModelConfig) -> Tensor:
    """The tensor as it is."""
    return tensor


@dataclass(frozen=True)
class Theirs:
    """Where a tensor of ours lies in a checkpoint of another framework.

    Args:
        name: of their tensor.
        take: from their tensor to ours.  Raises RuntimeError for a shape that cannot be.
        give: from ours to theirs; None where theirs holds more than ours.
    """

    name: str
    take: Move = unmoved
    give: Move | None = unmoved


@dataclass(frozen=True)
class NameTable:
    """How one framework names and lays out the tensors of a family.

    Args:
        name: of the table, as commands take it.
        embedding: our name of the embedding table, by which a prefix of theirs is found.
        tensors: by our name; one that is not listed has the same name there.
        dropped: a prefix that our names have and theirs have not.
        head: their name of the output layer.  Where embeddings are tied it may hold a copy of the embedding.
        buffers: their names of stored tensors that are no parameters.
        own: keys of [model] that no tensor shows, with the values that the framework's own models of this family have.
        unscaled: in words, rotary positions without scaling, where its own models scale them.
        rotations: their name of stored rotary rotations, complex [positions, head size / 2]; "" where they store none.
        prefix: before all of their names in this checkpoint.
    """

    name: str
    embedding: str
    tensors: Mapping[str, Theirs] = field(default_factory=dict)
    dropped: str = ""
    head: str = "lm_head.weight"
    buffers: re.Pattern[str] = _NOTHING
    own: Mapping[str, Any] = field(default_factory=dict)
    unscaled: str = ""
    rotations: str = ""
    prefix: str = ""

    def theirs(self, ours: str) -> Theirs:
        """Where a tensor of ours lies, without the prefix."""
        layer = _LAYER.search(ours)
        pattern = ours if layer is None else f"{ours[: layer.start(1)]}{{}}{ours[layer.end(1) :]}"
        found = self.tensors.get(pattern) or Theirs(pattern.removeprefix(self.dropped))
        return found if layer is None else Theirs(found.name.replace("{}", layer[1]), found.take, found.give)

    def names(self, ours: Iterable[str]) -> Names:
        """Where all tensors of a model lie."""
        places = {name: self.theirs(name) for name in ours}
        theirs = {name: self.prefix + place.name for name, place in places.items()}
        moves = {name: place.take for name, place in places.items() if place.take is not unmoved}
        return Names(theirs, theirs.get(self.embedding, ""), self.prefix + self.head, self.is_buffer, moves)

    def is_buffer(self, name: str) -> bool:
        """Whether a stored tensor of theirs is no parameter."""
        return self.buffers.fullmatch(name.removeprefix(self.prefix)) is not None


def rows_of_pairs(heads: Callable[[ModelConfig], int]) -> tuple[Move, Move]:
    """(take, give) for the rows of q or k: rotary positions rotate neighbouring rows there, and halves of a head here.

        theirs  a0 b0 a1 b1 a2 b2        each pair (a, b) is rotated by one angle
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


def of_query_groups(projection: str) -> Move:
    """ "q", "k" or "v" of rows that hold them by query group, as Megatron's `linear_qkv` does, biases included.

    theirs  q0 q1 k0 v0 | q2 q3 k1 v1        4 heads, 2 groups
    """

    def take(tensor: Tensor, model: ModelConfig) -> Tensor:
        groups = kv_heads(model)
        queries = model.num_heads // groups
        grouped = tensor.unflatten(0, (groups, queries + 2, -1))
        if projection == "q":
            return grouped[:, :queries].flatten(0, 2)
        return grouped[:, queries + "kv".index(projection)].flatten(0, 1)

    return take


def half(index: int) -> Move:
    """The first or second half of the rows."""
    return lambda tensor, _: tensor.unflatten(0, (2, -1))[index]


def without_padding(tensor: Tensor, model: ModelConfig) -> Tensor:
    """The rows of the vocabulary, of a table that is padded to a multiple of some number."""
    return tensor[: model.vocab_size]
