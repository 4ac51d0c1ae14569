"""The names and layouts of a family's tensors in torchtitan, Megatron-Core and transformers.

    theirs                                                          ours
    torchtitan   layers.3.attention.wq.weight    row pairs   ->     model.layers.3.self_attn.q_proj.weight
    Megatron     decoder.layers.3...linear_qkv   q, k, v     ->     ... q_proj.weight, ... k_proj.weight, ... v_proj.weight

Each of our tensors consists of elements of one of their tensors, moved but not changed, so moments can be moved in the same
way.  `{}` stands for the number of the layer.

The tables themselves are in tables.toml.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from megazero.models.config import ModelConfig, RopeScaling
from megazero.models.family import HuggingFaceFormat
from megazero.models.registry import FAMILIES

_LAYER = re.compile(r"\.(\d+)\.")
_NOTHING = re.compile(r"(?!)")


Move: TypeAlias = Callable[[Tensor, ModelConfig], Tensor]  # moves elements; the model is resolved; may return a view


def unmoved(tensor: Tensor, model: ModelConfig) -> Tensor:
    """Return the tensor unchanged."""
    return tensor


@dataclass(frozen=True)
class Theirs:
    """Where one of our tensors is in a checkpoint of another framework.

    Args:
        name: name of their tensor.
        take: their tensor -> ours.  Raises RuntimeError for an impossible shape.
        give: our tensor -> theirs; None if theirs contains more than ours.
    """

    name: str
    take: Move = unmoved
    give: Move | None = unmoved


@dataclass(frozen=True)
class NameTable:
    """The names and layouts that a framework gives to the tensors of a family.

    Args:
        name: name of the table in commands.
        embedding: our name of the embedding table, which is used to find their prefix.
        tensors: their tensors by our names; a tensor that is not listed has the same name there.
        dropped: a prefix that our names have and theirs do not.
        head: their name of the output layer.  If embeddings are tied, it may be a copy of the embedding.
        buffers: their names of stored tensors that are no parameters.
        own: keys of [model] that no tensor reveals, with the values in the framework's own models of this family.
        unscaled: words for rotary positions without scaling, if the framework's own models scale them.
        rotations: their name of stored rotary rotations, complex [positions, head size / 2]; "" if they store none.
        prefix: a prefix of all their names in this checkpoint.
    """

    name: str
    embedding: str
    tensors: dict[str, Theirs] = field(default_factory=dict)
    dropped: str = ""
    head: str = "lm_head.weight"
    buffers: re.Pattern[str] = _NOTHING
    own: Mapping[str, Any] = field(default_factory=dict)
    unscaled: str = ""
    rotations: str = ""
    prefix: str = ""

    def theirs(self, ours: str) -> Theirs:
        """Return where one of our tensors is."""
        layer = _LAYER.search(ours)
        pattern = ours if layer is None else f"{ours[: layer.start(1)]}{{}}{ours[layer.end(1) :]}"
        found = self.tensors.get(pattern) or Theirs(pattern.removeprefix(self.dropped))
        return replace(found, name=self.prefix + found.name.replace("{}", layer[1] if layer else ""))


def rows_of_pairs(heads: Callable[[ModelConfig], int]) -> tuple[Move, Move]:
    """Return (take, give) for the rows of q or k.  They rotate pairs of adjacent rows, we rotate the halves of a head.

        theirs  a0 b0 a1 b1 a2 b2        each pair (a, b) is rotated by one angle
        ours    a0 a1 a2 b0 b1 b2

    Args:
        heads: number of heads in the rows.
    """

    def moved(pairs: tuple[int, int], tensor: Tensor, model: ModelConfig) -> Tensor:
        return tensor.unflatten(0, (heads(model), *pairs)).transpose(1, 2).flatten(0, 2)

    return partial(moved, (-1, 2)), partial(moved, (2, -1))


def kv_heads(model: ModelConfig) -> int:
    """Return the number of key and value heads of a resolved model."""
    return model.num_kv_heads or model.num_heads


def of_query_groups(projection: str) -> Move:
    """Return a function that takes "q", "k" or "v" from rows stored by query group, as in Megatron's `linear_qkv`.

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
    """Return a function that takes the first or the second half of the rows."""
    return lambda tensor, _: tensor.unflatten(0, (2, -1))[index]


def without_padding(tensor: Tensor, model: ModelConfig) -> Tensor:
    """Drop the padding rows after the vocabulary."""
    return tensor[: model.vocab_size]


def of_heads(tensor: Tensor, model: ModelConfig) -> Tensor:
    """Reorder q, k, v of each head to q | k | v of all heads, for GPT-2.  Our matrices of GPT-2 are [in, out]."""
    rows = tensor.unflatten(0, (model.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return rows.t() if rows.dim() == 2 else rows


def transposed(tensor: Tensor, model: ModelConfig) -> Tensor:
    """Transpose [out, in] to [in, out], or back."""
    return tensor.t()


#: The pairs (take, give), by the names that tables.toml uses.
MOVES: dict[str, tuple[Move, Move | None]] = {
    "": (unmoved, unmoved),
    "pairs of q": rows_of_pairs(lambda model: model.num_heads),
    "pairs of k": rows_of_pairs(kv_heads),
    **{f"{projection} of groups": (of_query_groups(projection), None) for projection in "qkv"},
    "first half": (half(0), None),
    "second half": (half(1), None),
    "unpadded": (without_padding, None),
    "qkv of heads": (of_heads, None),
    "transposed": (transposed, transposed),
}


def data_beside(module: str) -> dict[str, Any]:
    """Read the .toml file with the name of a module, next to it.  `module`: path of the module."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))


def _read_table(tables: Mapping[str, Any], key: str) -> NameTable:
    """Build the table of a key of tables.toml."""
    given = dict(tables[key])
    base = _read_table(tables, given.pop("base")) if "base" in given else NameTable("", "")
    own = {name: None if value == "none" else value for name, value in given.pop("own", base.own).items()}
    if isinstance(scaling := own.get("rope_scaling"), dict):
        own["rope_scaling"] = RopeScaling(**scaling)
    places = {ours: theirs.partition(" | ") for ours, theirs in given.pop("tensors").items()}
    tensors = {ours: Theirs(name, *MOVES[move]) for ours, (name, _, move) in places.items()}
    buffers = re.compile(given.pop("buffers", base.buffers))
    return replace(base, **given, own=own, buffers=buffers, tensors=base.tensors | tensors)


_DATA = data_beside(__file__)
#: Tables by family.  A script adds those of its own family.
TABLES = {
    family: tuple(_read_table(_DATA["tables"], key) for key in keys) for family, keys in _DATA["families"].items()
}


def names_of_transformers(form: HuggingFaceFormat) -> tuple[NameTable, NameTable]:
    """Return the tables of transformers' names, with and without the model's prefix.

    A model that was saved without its head has no prefix.
    """
    whole = NameTable("hugging-face", form.embedding, head=form.head, buffers=re.compile(form.buffers))
    return whole, replace(whole, dropped=form.prefix)


def tables_of(family: str) -> tuple[NameTable, ...]:
    """Return the tables of a family, the likeliest first.  The last ones are the names of transformers, or our own."""
    form = FAMILIES[family].hugging_face
    return (*TABLES.get(family, ()), *([NameTable("own", "")] if form is None else names_of_transformers(form)))
