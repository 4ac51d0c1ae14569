"""AdamW's state as Megatron's distributed optimizer keeps it: flat buckets without names (`dp_reshardable`).

    optimizer.distributed.dp_group_idx_G.gbuf_idx_C.dtype_(...).bucket_idx_B.exp_avg        [elements]

    parameters of one rank, the last first     | output_layer |pad| final_layernorm |pad|  ...  | word_embeddings |
    buckets                                    [ bucket 0                           ][ bucket 1                   ]

G counts the ranks that hold one model, those of tensor parallelism first; C counts the pipeline chunks of a rank.  A parameter begins
on a multiple of 64 elements.  Which parameter lies where is not saved: it follows from the order of the modules and from the
degrees.  `param`, the fp32 master, must round to the weight, so a layout that is not theirs is refused.

Source: megatron/core/optimizer/distrib_optimizer.py (`_compute_per_buffer_param_layout`, `sharded_param_state_dp_reshardable`);
the order is that of `named_parameters` of its GPTModel, with norms as modules or within TransformerEngine's linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf, prod
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.checkpoint.foreign.source import ForeignTensor
from megazero.checkpoint.index import CheckpointError

BUCKET = re.compile(r"(optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\..+\.bucket_idx_(\d+)\.)(\w+)")
HINT = "save once with Megatron's --dist-ckpt-optim-fully-reshardable, which keeps it by parameter"
_ALIGNMENT = 64  # elements
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EMBEDDING, _PROJECTION = "embedding.word_embeddings.weight", "decoder.layers.0.self_attention.linear_proj.weight"
_FUSED = ("word_emb", "position_emb", "linear_proj", "linear_qkv.layer_norm", "linear_qkv", "q_layer", "k_layer")
_FUSED += ("linear_fc1.layer_norm", "linear_fc1", "linear_fc2", "final_layernorm", "output_layer")
_SEPARATE = ("word_emb", "position_emb", "linear_qkv.layer_norm", *_FUSED[2:])
# The dimension that tensor parallelism splits, by the end of the name.
_SPLIT = {"qkv.weight": 0, "qkv.bias": 0, "fc1.weight": 0, "fc1.bias": 0, "proj.weight": 1, "fc2.weight": 1}
_SPLIT |= {"word_embeddings.weight": 0, "output_layer.weight": 0}
_Places: TypeAlias = dict[str, dict[int, tuple[str, int]]]  # by name and rank of tensor parallelism: a bucket, and where it begins


@dataclass(frozen=True)
class Buckets:
    """The buckets of a checkpoint, and the weights that they are of.

    Args:
        sizes: elements of each bucket, by its group, chunk, number and name; the name ends before the kind of state.
        rows: reads the elements from `start` to `stop` of an entry.
        weights: by Megatron's name, layers by number.
        is_gated: `linear_fc1` holds gate and up, which are split each by itself.
    """

    sizes: Mapping[tuple[int, int, int, str], int]
    rows: Callable[[str, int, int], Tensor]
    weights: Mapping[str, ForeignTensor]
    is_gated: bool

    def tensors(self, kinds: Mapping[str, str]) -> dict[str, dict[str, ForeignTensor]]:
        """Whole tensors by our kind and by Megatron's name; none where no layout fits.

        Args:
            kinds: our kind of each of theirs; that of `param` is compared with the weight when it is read.
        """
        groups = 1 + max(group for group, *_ in self.sizes)
        for tp, modules in product((size for size in range(1, groups + 1) if groups % size == 0), (_FUSED, _SEPARATE)):
            places = self._places(groups // tp, tp, modules)
            if set(places) == set(self.weights) and self._rounds(_PROJECTION, self._read(places, "param", _PROJECTION)):
                return {
                    ours: {
                        name: ForeignTensor(weight.shape, torch.float32, partial(self._read_checked, places, kind, name))
                        for name, weight in self.weights.items()
                    }
                    for kind, ours in kinds.items()
                }
        return {}

    def _places(self, pp: int, tp: int, modules: tuple[str, ...]) -> _Places:
        """Where each parameter lies if these were the degrees and the order; nothing if that is not how long the buckets are."""
        order = sorted(self.weights, key=partial(_position, modules))
        layers = 1 + max(int(found[1]) for name in order if (found := _LAYER.match(name)))
        stages = pp * (1 + max(chunk for _, chunk, *_ in self.sizes))
        rest: dict[tuple[int, int], list[str]] = {}
        places: _Places = {}
        for group, chunk, number, bucket in sorted(self.sizes):
            if number == 0:
                stage = chunk * pp + group // tp
                names = [name for name in order if _stage(name, layers, stages) == stage]
                is_tied = stage == stages - 1 > 0 and "output_layer.weight" not in self.weights
                rest[group, chunk] = [*names, *([_EMBEDDING] if is_tied else [])]
            names, end, size = rest[group, chunk], 0, self.sizes[group, chunk, number, bucket]
            while names and (start := -(-end // _ALIGNMENT) * _ALIGNMENT) < size:
                name = names.pop()
                end = start + prod(self.weights[name].shape) // (tp if _split(name) is not None else 1)
                places.setdefault(name, {}).setdefault(group % tp, (bucket, start))
            if not end <= size < end + _ALIGNMENT:
                return {}
        return {} if any(rest.values()) else places

    def _read(self, places: _Places, kind: str, name: str) -> Tensor:
        """A whole tensor of the parts that the ranks of tensor parallelism have."""
        shape, split = list(self.weights[name].shape), _split(name)
        if self.is_gated and "linear_fc1." in name and split is not None:
            shape, split = [2, shape[0] // 2, *shape[1:]], 1
        local = list(shape)
        if split is not None:
            local[split] //= len(places[name])
        size = prod(local)
        parts = [
            self.rows(bucket + kind, start, start + size).reshape(local)
            for _, (bucket, start) in sorted(places[name].items())[: None if split is not None else 1]
        ]
        return torch.cat(parts, split or 0).reshape(self.weights[name].shape)

    def _rounds(self, name: str, master: Tensor) -> bool:
        weight = self.weights[name].read()
        return torch.equal(master.to(weight.dtype), weight)

    def _read_checked(self, places: _Places, kind: str, name: str) -> Tensor:
        """Raises: CheckpointError: what lies there is not the master of this weight."""
        tensor = self._read(places, kind, name)
        if kind == "param" and not self._rounds(name, tensor):
            raise CheckpointError(f"the master of {name} in the optimizer's buckets is not its weight; {HINT}")
        return tensor


def _position(modules: tuple[str, ...], name: str) -> tuple[float, int, bool]:
    """Where a parameter comes in the order of `named_parameters`."""
    layer = _LAYER.match(name)
    place = next((number for number, module in enumerate(modules) if module in name), len(modules))
    return int(layer[1]) if layer else -1 if name.startswith("embedding.") else inf, place, name.endswith("bias")


def _stage(name: str, layers: int, stages: int) -> int:
    """The pipeline stage of a parameter, where layers are spread evenly."""
    layer = _LAYER.match(name)
    return int(layer[1]) * stages // layers if layer else 0 if name.startswith("embedding.") else stages - 1


def _split(name: str) -> int | None:
    """The dimension that tensor parallelism splits."""
    return next((split for end, split in _SPLIT.items() if name.endswith(end)), None)
