"""AdamW's state as Megatron's distributed optimizer keeps it: flat buckets without names (`dp_reshardable`).

    optimizer.distributed.dp_group_idx_G.gbuf_idx_C.dtype_(...).bucket_idx_B.exp_avg        [elements]

    parameters of one rank, the last first   | output_layer |pad| final_layernorm |pad|  ...  | word_embeddings |
    buckets                                  [ bucket 0                      ][ bucket 1                        ]

G counts the ranks that hold one model, those of tensor parallelism first; C counts the pipeline chunks of a rank.  A
parameter begins on a multiple of 64 elements.  Which parameter lies where is not saved: it follows from the order of the
modules and from the degrees.  `param`, the fp32 master, must round to the weight, so another layout is refused.

Source: megatron/core/optimizer/distrib_optimizer.py (`sharded_param_state_dp_reshardable`); the order is that of the
parameters of its GPTModel, with norms as modules of their own or within TransformerEngine's linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.checkpoint.hugging_face.match import LazyTensor

BUCKET = re.compile(r"(optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\..+\.bucket_idx_(\d+)\.)(\w+)")
_ALIGNMENT = 64  # elements
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EMBEDDING, _PROBE = "embedding.word_embeddings.weight", "decoder.layers.0.self_attention.linear_proj.weight"
_NORM = "linear_qkv.layer_norm"  # as a module by itself it comes first in its layer
_MODULES = f"word_emb position_emb linear_proj {_NORM} linear_qkv q_layer k_layer fc1.layer_norm fc1 fc2 final_ output_"
_SPLIT = re.compile(
    r".*(?:(?:word_embeddings|output_layer|qkv|fc1)\.(?:weight|bias)|(?P<columns>(?:proj|fc2)\.weight))"
)
_Sizes: TypeAlias = Mapping[tuple[int, int, int, str], int]
_Places: TypeAlias = dict[
    tuple[str, int], tuple[str, int]
]  # by name and rank of tensor parallelism: a bucket, and where it begins there


def _places(sizes: _Sizes, weights: Mapping[str, LazyTensor], tp: int, norms_apart: bool) -> _Places:
    """Where each parameter lies if the ranks were so many and this the order; nothing if the buckets have other lengths."""
    layers = 1 + max(int(found[1]) for name in weights if (found := _LAYER.match(name)))

    def position(name: str) -> tuple[int, int, bool]:
        layer = _LAYER.match(name)
        place = next((at for at, module in enumerate(_MODULES.split()) if module in name), layers)
        number = int(layer[1]) if layer else -1 if name.startswith("embedding.") else layers
        return number, 0 if norms_apart and _NORM in name else place, name.endswith("bias")

    order = sorted((*position(name), name) for name in weights)
    pp = (1 + max(group for group, *_ in sizes)) // tp
    stages = pp * (1 + max(chunk for _, chunk, *_ in sizes))
    names: list[str] = []
    places: _Places = {}
    for (group, chunk, bucket_number, bucket), size in sorted(sizes.items()):
        if bucket_number == 0:
            stage = chunk * pp + group // tp
            is_tied = stage == stages - 1 > 0 and "output_layer.weight" not in weights  # then it has a copy
            owned = [name for number, *_, name in order if min(max(number, 0) * stages // layers, stages - 1) == stage]
            names = [*names, *owned, *([_EMBEDDING] if is_tied else [])]
        end = 0
        while names and (start := -(-end // _ALIGNMENT) * _ALIGNMENT) < size:
            name = names.pop()
            end = start + prod(weights[name].shape) // (tp if _SPLIT.fullmatch(name) else 1)
            places.setdefault((name, group % tp), (bucket, start))
        if not end <= size < end + _ALIGNMENT:
            return {}
    return {} if names else places


def in_buckets(
    sizes: _Sizes, rows: Callable[[str, int, int], Tensor], weights: Mapping[str, LazyTensor], *, is_gated: bool
) -> Callable[[str, str], Tensor] | None:
    """What reads a whole tensor by its kind and by the name of its weight; None where no layout fits.

    Args:
        sizes: elements of each bucket, by its group, chunk, number, and its name up to the kind.
        rows: reads the elements from `start` to `stop` of an entry.
        weights: by Megatron's name, layers by number.
        is_gated: `linear_fc1` holds gate and up, which are split each by itself.
    """

    def read(places: _Places, tp: int, kind: str, name: str) -> Tensor:
        shape, split = list(weights[name].shape), _SPLIT.fullmatch(name)
        dim = 1 if split and split["columns"] else 0
        if is_gated and split and "fc1" in name:
            shape, dim = [2, shape[0] // 2, *shape[1:]], 1
        shape[dim] //= (count := tp if split else 1)
        found = [places[name, rank] for rank in range(count)]
        parts = [rows(bucket + kind, start, start + prod(shape)).reshape(shape) for bucket, start in found]
        return torch.cat(parts, dim).reshape(weights[name].shape)

    groups = 1 + max(group for group, *_ in sizes)
    for tp, norms_apart in product((tp for tp in range(1, groups + 1) if groups % tp == 0), (False, True)):
        if _PROBE in weights and (places := _places(sizes, weights, tp, norms_apart)):
            probe = weights[_PROBE].read()
            if torch.equal(read(places, tp, "param", _PROBE).to(probe.dtype), probe):
                return partial(read, places, tp)
    return None
