"""Names and layouts that other frameworks give to a family's tensors.

    theirs                                                          ours
    torchtitan   layers.3.attention.wq.weight    row pairs   ->     model.layers.3.self_attn.q_proj.weight
    Megatron     decoder.layers.3...linear_qkv   q, k, v     ->     ... q_proj.weight, ... k_proj.weight, ... v_proj.weight

A tensor of ours is made of one tensor of theirs by moving elements only, so the moments are moved as the weights are.
`megazero/formats` has the tables of other frameworks; `{}` stands for the number of the layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from megazero.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Move: TypeAlias = "Callable[[Tensor, ModelConfig], Tensor]"  # of elements; `model` is resolved; may give a view

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
        tensors: by our name; one that is not listed has the same name there.
        dropped: a prefix that our names have and theirs have not.
        embedding: our name of the embedding table, which tells a prefix of theirs.
        head: their name of the output layer.  Where embeddings are tied it may hold a copy of the embedding.
        buffers: their names of stored tensors that are no parameters.
        own: keys of [model] that no tensor shows, with the values that the framework's own models of this family have.
        unscaled: in words, rotary positions without scaling, where its own models scale them.
        turns: their name of the turns of rotary positions, complex [positions, head size / 2], where a release stored them.
    """

    name: str
    embedding: str
    tensors: Mapping[str, Theirs] = field(default_factory=dict)
    dropped: str = ""
    head: str = "lm_head.weight"
    buffers: re.Pattern[str] = _NOTHING
    own: Mapping[str, Any] = field(default_factory=dict)
    unscaled: str = ""
    turns: str = ""

    def theirs(self, ours: str) -> Theirs:
        """Where a tensor of ours lies."""
        layer = _LAYER.search(ours)
        pattern = ours if layer is None else f"{ours[: layer.start(1)]}{{}}{ours[layer.end(1) :]}"
        found = self.tensors.get(pattern) or Theirs(pattern.removeprefix(self.dropped))
        return found if layer is None else Theirs(found.name.replace("{}", layer[1]), found.take, found.give)
