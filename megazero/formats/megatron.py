"""Checkpoints of Megatron-Core in the format `torch_dist`: that of torch.distributed.checkpoint, and a file common.pt.

    .metadata, __0_0.distcp             decoder.layers.self_attention.linear_qkv.weight   [layers, ...], or one for each
                                        optimizer.state.exp_avg.NAME, .exp_avg_sq, .fp32_param or .param
    common.pt                           args, iteration, the settings and the step of the optimizer
    metadata.json                       {"sharded_backend": "torch_dist"}

NeMo 2 keeps the same below `weights`, with names behind `module.`, no args, and the model's configuration in
`context/model.yaml`.

[Note: buckets]  Under `dp_reshardable` AdamW's state lies in flat buckets without names:

    optimizer.distributed.dp_group_idx_G.gbuf_idx_C.dtype_(...).bucket_idx_B.exp_avg        [elements]

    parameters of one rank, the last first   | output_layer |pad| final_layernorm |pad|  ...  | word_embeddings |
    buckets                                  [ bucket 0                      ][ bucket 1                        ]

G counts the ranks that hold one model, those of tensor parallelism first; C counts the pipeline chunks of a rank.  A
parameter begins on a multiple of 64 elements.  Which parameter lies where is not saved: it follows from the order of the
modules (that of Megatron's GPTModel, with norms as modules of their own or within TransformerEngine's linear layers) and
from the degrees.  `param`, the fp32 master, must round to the weight, so another layout is refused.

Source: megatron/core/dist_checkpointing; optimizer/distrib_optimizer.py (`fully_reshardable`, `fully_sharded_model_space`,
`sharded_param_state_dp_reshardable`);
training/checkpointing.py; NeMo: nemo/lightning/io/pl.py and pytorch/strategies/megatron_strategy.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves_with_path

from megazero.checkpoint.folder import LocalFolder
from megazero.checkpoint.index import CheckpointError
from megazero.formats.dcp import METADATA, DcpFolder
from megazero.formats.foreign import ADAM, ForeignCheckpoint, LazyTensor, foreign_errors
from megazero.formats.pickles import load_tensors
from megazero.formats.tables import data_beside
from megazero.models.config import ModelConfig, RopeScaling
from megazero.models.registry import FAMILIES
from megazero.zero.state import MASTER, MODEL

COMMON, _NEMO_SAMPLES = "common.pt", "consumed_samples"
_FLAG = "save once with Megatron's --dist-ckpt-optim-fully-reshardable"
_STATE = re.compile(r"optimizer\.state\.(?P<kind>\w+)\.(?P<name>.+)")
_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": MASTER, "param": MASTER}
_STACKED = re.compile(r"(?P<before>(?:.+\.)?decoder\.layers)\.(?P<after>\D.*)")
_ARGS = data_beside(__file__)
_OFF, _UNSET = _ARGS["constant"]["off"].split(), _ARGS["constant"]["unset"].split()
_CONSTANT: dict[str, Any] = dict.fromkeys(_OFF, False) | dict.fromkeys(_UNSET) | _ARGS["constant"]["values"]


def read_nemo(folder: LocalFolder, model: ModelConfig) -> ForeignCheckpoint:
    """Read a folder of NeMo 2, whose configuration takes the place of the args.  Raises: as `read_megatron`."""
    stated: Any = {}
    if (context := folder.child("context")).has("model.yaml") and find_spec("yaml"):
        with foreign_errors(f"{context}/model.yaml"):
            stated = import_module("yaml").safe_load(context.read("model.yaml"))["config"]
    args = {_ARGS["nemo"].get(key, str(key)): value for key, value in dict(stated).items() if value is not None}
    if isinstance(function := args.get("activation_func"), dict):
        args["activation_func"] = str(function.get("_target_")).rpartition(".")[2]
    args |= {"use_rope_scaling": True} if "rope_scaling_factor" in args else {}
    return read_megatron(folder.child("weights"), model, args)


def read_megatron(folder: LocalFolder, model: ModelConfig, args: Mapping[str, Any] | None = None) -> ForeignCheckpoint:
    """Read a checkpoint of Megatron-Core.  Raises: CheckpointError, also if its args describe another model."""
    path = folder.path / COMMON
    with foreign_errors(str(path)):
        common, named = load_tensors(path)
    if not isinstance(common, dict):
        raise CheckpointError(f"{path} must hold a dictionary, it holds a {type(common).__name__}")
    args = (vars(common["args"]) if hasattr(common.get("args"), "__dict__") else {}) if args is None else args
    step = common.get("iteration", common.get("global_step", 0))
    loaded = [stated for stated in common.values() if isinstance(stated, Mapping)]  # NeMo: of the module of the data
    by_nemo = next((stated[_NEMO_SAMPLES] for stated in loaded if _NEMO_SAMPLES in stated), None)
    samples = args.get("consumed_train_samples", by_nemo)
    if any(not isinstance(count, int) or count < 0 for count in (step, samples or 0)):
        raise CheckpointError(f"{folder}/{COMMON}: iteration and consumed_train_samples must be numbers from 0")
    if differ := list(differences(args, model)):
        raise CheckpointError(f"{folder}/{COMMON} is of another model than the run file: {'; '.join(differ)}")
    source, found = DcpFolder(folder), ForeignCheckpoint(str(folder), step=step, samples=samples)
    # `_is` takes plain values
    found.notes |= dict.fromkeys(f"{name}, a class in {COMMON}, is not read" for name in named)
    found.unknown += [f"{name} (named in {METADATA})" for name in source.unknown if not name.startswith("megatron.")]
    for name in (*(f"{COMMON}: {key}" for key in common), *source.values()):
        if not found.is_not_taken(name, _ARGS["not_taken"]):
            found.unknown.append(f"{name} ({_FLAG})" if ".param_state/" in name else name)
    _add_tensors(found, source, model)
    if not args:
        found.notes[f"{COMMON} has no args: nothing but names and shapes was compared with the run file"] = None
    if ADAM[0] in found.tensors:
        own = [read() for name, read in source.values().items() if re.fullmatch(r"optimizer\..+\.optimizer/.*", name)]
        _add_updates(found, [common.get("optimizer"), *own], args)
    found.finished().optimizer = _settings(args)
    return found


def _add_updates(found: ForeignCheckpoint, states: list[Any], args: Mapping[str, Any]) -> None:
    """Find how often AdamW has updated the tensors."""
    if not _is(stated := args.get("optimizer", "adam"), "adam"):
        raise CheckpointError(f"{COMMON}: optimizer={stated!r}, supported is 'adam'")
    leaves = ((getattr(path[-1], "key", None), value) for path, value in tree_leaves_with_path(states) if path)
    found.updates = {int(value) for key, value in leaves if key in ("step", "common_step") and value is not None}
    if not found.updates:
        found.updates = {found.step or 0}
        found.notes[f"AdamW's updates are taken as the {found.step} steps, since {COMMON} does not say"] = None


def differences(args: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    """Yield each contradiction between the checkpoint's args and the run file."""
    stated = dict(args)
    if not stated.get("group_query_attention", True):  # then the number of groups means nothing
        stated["num_query_groups"] = stated.get("num_attention_heads")
    if stated.get("position_embedding_type", "rope") != "rope":
        stated = {key: value for key, value in stated.items() if not key.startswith("rotary")}
    for key, ours in _ARGS["sizes"].items():
        if stated.get(key) is not None and not _is(stated[key], getattr(model, ours)):
            yield f"{key}={stated[key]!r}, model.{ours} is {getattr(model, ours)!r}"
    for key, value in (_CONSTANT | _ARGS["constant"]["llama" if _turns(model) else "gpt2"]).items():
        if key in stated and not _is(stated[key], value):
            yield f"{key}={stated[key]!r}, supported is {value!r}"
    if stated and _window(stated.get("window_size")) != model.sliding_window:
        yield f"window_size={stated.get('window_size')!r}, model.sliding_window is {model.sliding_window!r}"
    if stated and _scaling(stated) != model.rope_scaling:
        scales = [f"{key}={stated[key]!r}" for key in stated if "rope_scaling" in key or "interpolation" in key]
        yield f"{', '.join(scales) or 'no scaling of rotary positions'}, model.rope_scaling is {model.rope_scaling!r}"


def _scaling(stated: Mapping[str, Any]) -> RopeScaling | None:
    """Return the scaling of rotary positions.  Source: megatron/core/models/common/embeddings/rotary_pos_embedding.py."""
    if (factor := stated.get("rotary_seq_len_interpolation_factor") or 1) != 1:
        return RopeScaling(type="linear", factor=factor)
    low, high = stated.get("low_freq_factor", 1.0), stated.get("high_freq_factor", 4.0)
    factor, length = stated.get("rope_scaling_factor", 8.0), stated.get("old_context_len", 8192)
    numbers = {"factor": factor, "original_seq_len": length, "low_freq_factor": low, "high_freq_factor": high}
    return RopeScaling(type="llama3", **numbers) if stated.get("use_rope_scaling") else None


def _turns(model: ModelConfig) -> bool:
    """Return whether positions are rotary, as in all families like Llama."""
    return "rope_theta" in FAMILIES[model.family].reads


def _is(stated: Any, value: Any) -> bool:
    """Return whether an argument, which may be any object, equals a plain value."""
    stated = tuple(stated) if isinstance(stated, list) else stated
    return isinstance(stated, bool | int | float | str | tuple | None) and stated == value


def _window(stated: Any) -> Any:
    """Convert window_size (positions before and after a token; -1: no end) to model.sliding_window, which counts it."""
    if stated is None or (isinstance(stated, list | tuple) and len(stated) == 2 and _is(stated[0], -1)):
        return None
    plain = isinstance(stated, list | tuple) and len(stated) == 2 and _is(stated[1], 0) and isinstance(stated[0], int)
    return stated[0] + 1 if plain else stated


def _add_tensors(found: ForeignCheckpoint, source: DcpFolder, model: ModelConfig) -> None:
    """Add weights, moments and masters, by the names of weights."""
    weights, sizes, tensors = found.tensors[MODEL], {}, source.tensors()
    for name, tensor in sorted(tensors.items(), key=lambda item: item[0].startswith("optimizer.")):
        state, bucket = _STATE.fullmatch(name), _BUCKET.fullmatch(name)
        beside = [tensors.get(bucket[1] + state_kind) for state_kind in ("param", *ADAM)] if bucket else []
        if bucket and all(moment is not None and moment.shape == tensor.shape for moment in beside):
            sizes[int(bucket[2]), int(bucket[3]), int(bucket[4]), bucket[1]] = prod(tensor.shape)
        elif bucket or (state and state["kind"] not in _KINDS):
            found.unknown.append(name)
        else:
            state_kind, short = (_KINDS[state["kind"]], state["name"]) if state else (MODEL, name)
            short = short.removeprefix("module.")
            stacked = _STACKED.fullmatch(short) if tensor.shape else None
            layers = source.slices(name) if stacked else [tensor]
            for layer, held in enumerate(layers):
                weight_name = f"{stacked['before']}.{layer}.{stacked['after']}" if stacked else short
                found.add_tensor(state_kind, weight_name, _whole(held, weights.get(weight_name)), entry=name)
    if sizes and (read := _in_buckets(sizes, source.rows, weights, is_gated=_turns(model))):
        for state_kind, name in product(("param", *ADAM), weights):
            tensor = LazyTensor(weights[name].shape, torch.float32, partial(read, state_kind, name))
            found.add_tensor(_KINDS[state_kind], name, tensor, entry=f"optimizer.distributed.* ({state_kind})")
    elif sizes:
        found.unknown.append(f"optimizer.distributed.* (buckets that do not tell where each parameter lies: {_FLAG})")
    for name in found.tensors.get(MASTER, {}).keys() & weights.keys():
        master = found.tensors[MASTER][name]
        found.tensors[MASTER][name] = replace(master, read=partial(_master, name, master, weights[name]))


def _master(name: str, master: LazyTensor, weight: LazyTensor) -> Tensor:
    """Read a master.  Raises: CheckpointError: it does not round to its weight."""
    tensor, model = master.read(), weight.read()
    if tensor.shape == model.shape and not torch.equal(tensor.to(model.dtype), model):
        raise CheckpointError(f"{name}: its fp32 master does not round to it; leave the state out by --ignore '* of *'")
    return tensor


def _whole(held: LazyTensor, weight: LazyTensor | None) -> LazyTensor:
    """Return a tensor in the shape of its weight.  Up to 0.15 it is [shards along each dimension, elements of a shard]."""
    if weight is None or len(held.shape) != len(weight.shape) + 1:
        return held
    counts, places = held.shape[:-1], range(len(weight.shape))
    local = [size // max(count, 1) for size, count in zip(weight.shape, counts, strict=True)]
    if (*counts, prod(local)) != held.shape or prod(held.shape) != prod(weight.shape):
        return held
    order = [at for place in places for at in (place, place + len(places))]
    return replace(
        held, shape=weight.shape, read=lambda: held.read().reshape(*counts, *local).permute(order).reshape(weight.shape)
    )


def _settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Convert args to keys of our [optimizer]."""
    found = {key: args[key] for key in ("lr", "weight_decay") if args.get(key) is not None}
    found |= {"eps": args["adam_eps"]} if "adam_eps" in args else {}
    found |= {"name": "adam"} if args.get("decoupled_weight_decay") is False else {}
    return found | ({"betas": [args["adam_beta1"], args["adam_beta2"]]} if "adam_beta1" in args else {})


# In buckets; see [Note: buckets].

_BUCKET = re.compile(r"(optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\..+\.bucket_idx_(\d+)\.)(\w+)")
_ALIGNMENT = 64  # elements
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EMBEDDING, _PROBE = "embedding.word_embeddings.weight", "decoder.layers.0.self_attention.linear_proj.weight"
_NORM = "linear_qkv.layer_norm"  # as a module by itself it comes first in its layer
_MODULES = f"word_emb position_emb linear_proj {_NORM} linear_qkv q_layer k_layer fc1.layer_norm fc1 fc2 final_ output_"
_SPLIT = re.compile(r".*((word_embeddings|output_layer|qkv|fc1)\.(weight|bias)|(?P<columns>(proj|fc2)\.weight))")
_Sizes: TypeAlias = Mapping[tuple[int, int, int, str], int]
# By name and rank of tensor parallelism: a bucket, and where it begins there.
_Places: TypeAlias = dict[tuple[str, int], tuple[str, int]]


def _places(sizes: _Sizes, weights: Mapping[str, LazyTensor], tp: int, separate_norms: bool) -> _Places:
    """Locate each parameter for a number of ranks and an order of modules; empty if the buckets have other lengths."""
    layers = 1 + max(int(found[1]) for name in weights if (found := _LAYER.match(name)))

    def position(name: str) -> tuple[int, int, bool]:
        layer = _LAYER.match(name)
        place = next((at for at, module in enumerate(_MODULES.split()) if module in name), layers)
        number = int(layer[1]) if layer else -1 if name.startswith("embedding.") else layers
        return number, 0 if separate_norms and _NORM in name else place, name.endswith("bias")

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


def _in_buckets(
    sizes: _Sizes, rows: Callable[[str, int, int], Tensor], weights: Mapping[str, LazyTensor], *, is_gated: bool
) -> Callable[[str, str], Tensor] | None:
    """Return a function that reads a whole tensor by kind and weight name; None if no layout fits.

    Args:
        sizes: elements of each bucket, by its group, chunk, number, and its name up to the kind.
        rows: reads the elements from `start` to `stop` of an entry.
        weights: by Megatron's name, layers by number.
        is_gated: `linear_fc1` holds gate and up, which are split each by itself.
    """

    def read(places: _Places, tp: int, state_kind: str, name: str) -> Tensor:
        shape, split = list(weights[name].shape), _SPLIT.fullmatch(name)
        dim = 1 if split and split["columns"] else 0
        if is_gated and split and "fc1" in name:
            shape, dim = [2, shape[0] // 2, *shape[1:]], 1
        shape[dim] //= (count := tp if split else 1)
        found = [places[name, rank] for rank in range(count)]
        shards = [rows(bucket + state_kind, start, start + prod(shape)).reshape(shape) for bucket, start in found]
        return torch.cat(shards, dim).reshape(weights[name].shape)

    groups = 1 + max(group for group, *_ in sizes)
    for tp, separate_norms in product((tp for tp in range(1, groups + 1) if groups % tp == 0), (False, True)):
        if _PROBE in weights and (places := _places(sizes, weights, tp, separate_norms)):
            probe = weights[_PROBE].read()
            if torch.equal(read(places, tp, "param", _PROBE).to(probe.dtype), probe):
                return partial(read, places, tp)
    return None
