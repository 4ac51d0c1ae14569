"""Reads checkpoints of DeepSpeed: shards of ZeRO 1 to 3, the whole optimizer of stage 0, and universal checkpoints.

    latest                                          "global_step300"
    global_step300/
      mp_rank_00_model_states.pt                    weights, names and shapes, counters; at stage 0 the optimizer, too
      zero_pp_rank_0_mp_rank_00_model_states.pt     in its place at stage 3: a file of each rank, with empty weights
      zero_pp_rank_0_mp_rank_00_optim_states.pt     flat fp32 masters and moments of each rank; under bf16, prefixed by bf16_
      zero/NAME/fp32.pt, exp_avg.pt, ...            universal: whole tensors instead of the optim_states

    stages 1, 2   group 0   | w0 | w1 ....|.... w1 | b1 |pad|     in the order of param_shapes
                            [    rank 0   |   rank 1        ]
    stage 3       group 0   [w0 |w1 |b1 ]   [w0 |w1 |b1 ]         each rank holds 1/W of each parameter, rounded up
                               rank 0          rank 1

The files are pickles.  None is executed: what is no tensor or plain value becomes a stand-in (`pickles`), with a note.

Sources: of deepspeed, runtime/engine.py, runtime/zero/stage_1_and_2.py and stage3.py, checkpoint/ds_to_universal.py,
utils/zero_to_fp32.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megazero.checkpoint.folder import LocalFolder
from megazero.checkpoint.index import LATEST, CheckpointError
from megazero.formats.foreign import ADAM, ForeignCheckpoint, LazyTensor, foreign_errors
from megazero.formats.pickles import load_tensors
from megazero.formats.tables import data_beside
from megazero.models.config import ModelConfig
from megazero.zero.state import MASTER, MODEL

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
UNIVERSAL = "zero"
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_STATE = "optimizer_state_dict"
_FP32 = "fp32"  # of universal checkpoints
_KNOWN = data_beside(__file__)


def find_deepspeed(folder: LocalFolder) -> LocalFolder | None:
    """Return the folder with a checkpoint of DeepSpeed: this folder, or the folder that its `latest` names."""
    tag = folder.read(LATEST).decode(errors="replace").strip() if folder.has(LATEST) else "."
    named = folder.child(tag) if tag == Path(tag).name and tag != ".." else folder
    return next((at for at in (folder, named) if any(map(_MODEL_FILE.fullmatch, at.files()))), None)


def read_deepspeed(folder: LocalFolder, _: ModelConfig) -> ForeignCheckpoint:
    """Read a checkpoint of DeepSpeed.  Raises: CheckpointError."""
    at = find_deepspeed(folder)
    if at is None:
        raise CheckpointError(f"{folder} holds no *_model_states.pt, nor does a folder that its {LATEST!r} names")
    with foreign_errors(str(at)):
        return _Reader(at).read()


@dataclass(frozen=True)
class _FlatRange:
    """An interval of a rank's flat group that holds elements of a parameter."""

    rank: int
    group: int
    start: int
    numel: int


# Name, shape and ranges of a parameter.
_Place: TypeAlias = tuple[str, tuple[int, ...], list[_FlatRange]]


def _joined(flat: Sequence[Sequence[Tensor]], ranges: Sequence[_FlatRange], shape: tuple[int, ...]) -> Tensor:
    """Concatenate the ranges of a parameter.  `flat`: the flat groups of each rank."""
    return torch.cat([flat[span.rank][span.group].narrow(0, span.start, span.numel) for span in ranges]).view(shape)


class _Reader:
    """Reads the folder of one step."""

    def __init__(self, folder: LocalFolder) -> None:
        self.folder, self.found = folder, ForeignCheckpoint(str(folder))
        self.models: dict[int, str] = {}  # by rank, names of files
        self.optimizers: dict[int, str] = {}
        for name in folder.files():
            for pattern, files in ((_MODEL_FILE, self.models), (_OPTIMIZER_FILE, self.optimizers)):
                if match := pattern.fullmatch(name):
                    if int(match["mp"]):
                        raise CheckpointError(f"{name} is of tensor parallelism: import what ds_to_universal makes")
                    rank = int(match["rank"] or 0)
                    if rank in files:
                        raise CheckpointError(f"{folder} holds {files[rank]} and {name}: move the older save away")
                    files[rank] = name
            if name.endswith(".pt") and name not in (*self.models.values(), *self.optimizers.values()):
                self.found.unknown.append(f"file {name}")
        self.is_universal = UNIVERSAL in folder.folders()

    def read(self) -> ForeignCheckpoint:
        found = self.found
        state = self._load(self._file(self.models, 0))
        found.step, found.samples = int(state["global_steps"]), int(state["global_samples"])
        self._note(state)
        listed = [{name: tuple(shape) for name, shape in group.items()} for group in state["param_shapes"] or ()]
        shapes = {name: shape for group in listed for name, shape in group.items()}
        if self.is_universal:
            self._read_universal(shapes)
        elif listed:
            self._read_shards(listed)
        elif state["optimizer"] is not None:
            self._read_stage_0(state)
        self._read_weights(state, shapes)
        if set(found.tensors) & set(ADAM):
            self._check_updates(found.step - int(state["skipped_steps"]))
        return found.finished()

    # -- files

    def _load(self, name: str) -> Any:
        with foreign_errors(f"{self.folder}/{name}"):
            loaded, classes = load_tensors(self.folder.path / name)
        for known in classes:
            if not (known.startswith("deepspeed.") and known.rpartition(".")[2] in _KNOWN["classes"].split()):
                self.found.notes[f"{name} names {known}, which was not run"] = None
        return loaded

    def _file(self, files: Mapping[int, str], rank: int) -> str:
        if rank not in files:
            name = next(iter(files.values()), f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            name = re.sub(r"(?<=zero_pp_rank_)\d+", str(rank), name)
            raise CheckpointError(f"{self.folder}/{name} is missing")
        return files[rank]

    def _note(self, state: Mapping[str, Any]) -> None:
        for key, why in _KNOWN["not_taken"].items():
            if state.get(key) is not None:
                self.found.notes[f"{key} is not taken over: {why}"] = None
        config = (state.get("ds_config") or {}).get("optimizer") or {}
        if str(config.get("type")).lower() == "adam":
            given = config.get("params") or {}
            decoupled = given.get("adam_w_mode", True) and given.get("adamw_mode", True)
            self.found.add_setting("ds_config.optimizer", "decoupled_weight_decay", decoupled)
        if own := sorted(str(key) for key in state.keys() - {*_KNOWN["keys"].split(), *_KNOWN["not_taken"]}):
            self.found.notes[f"client_state is not taken over: {', '.join(own)}"] = None

    # -- the optimizer

    def _read_shards(self, listed: Sequence[Shapes]) -> None:
        """Read the masters and moments of ZeRO 1 to 3.  `listed`: the shapes of the parameters of each group."""
        first = self._load(self._file(self.optimizers, 0))[_STATE]
        counts = first["partition_count"]
        world = max(counts) if isinstance(counts, list) else int(counts)
        if extra := [name for rank, name in self.optimizers.items() if rank >= world]:
            raise CheckpointError(f"{self.folder} is of {world} ranks, but holds {extra[0]}: of another save?")
        ranks = [first, *(self._load(self._file(self.optimizers, rank))[_STATE] for rank in range(1, world))]
        base = first.get("base_optimizer_state", first.get(_STATE))
        self._add_groups(base["param_groups"] if isinstance(base, dict) else (), first)
        flat = [self._flat_groups(rank) for rank in ranks]
        if any(of_rank.keys() != flat[0].keys() for of_rank in flat):
            raise ValueError(f"only some ranks hold {', '.join(set().union(*flat) - {MASTER})}")
        ranges_of = _ranges_at_stage_3 if "fp32_flat_groups" in first else _ranges_at_stages_1_and_2
        for name, shape, held in ranges_of(ranks, listed):
            for state_kind in flat[0]:
                groups = [of_rank[state_kind] for of_rank in flat]
                elements = sum(min(span.numel, groups[span.rank][span.group].numel() - span.start) for span in held)
                if elements != prod(shape):
                    held_text = f"{elements} elements of {state_kind} of {name}, {shape}"
                    raise CheckpointError(f"{self.folder}: ranks hold {held_text}")
                tensor = LazyTensor(shape, groups[0][0].dtype, partial(_joined, groups, held, shape))
                self.found.tensors.setdefault(state_kind, {})[name] = tensor

    def _flat_groups(self, rank: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """Return the flat groups of a rank, by kind."""
        stage_3 = "fp32_flat_groups" in rank
        fp32 = rank["fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"]
        base = rank[_STATE if stage_3 else "base_optimizer_state"]
        states = base["state"] if isinstance(base, dict) else dict(enumerate(base))  # a list if it is elastic
        flat = {MASTER: [tensor.detach().view(-1) for tensor in fp32]}
        for number, state in states.items():
            for state_kind in self._moments(state, f"group {number}"):
                flat.setdefault(state_kind, [torch.empty(0)] * len(fp32))[number] = state[state_kind].view(-1)
        return flat

    def _moments(self, state: Mapping[str, Any], of: str) -> list[str]:
        """Return which moments a state holds.  Its step is recorded, and any other entry is listed as unknown."""
        if "step" in state:
            self.found.updates.add(int(state["step"]))
        lines = (f"optimizer state {state_kind!r} of {of}" for state_kind in state if state_kind not in (*ADAM, "step"))
        self.found.unknown += [line for line in lines if line not in self.found.unknown]
        return [state_kind for state_kind in ADAM if state_kind in state]

    def _check_updates(self, expected: int) -> None:
        """Compare AdamW's count of updates with that of the model file, which is `expected`."""
        if not self.found.updates:
            self.found.updates.add(expected)
            self.found.notes["the optimizer does not count its updates: the count is taken from global_steps"] = None
        for updates in self.found.updates:
            if updates == expected + 1:  # some of its optimizers take a step, on gradients of zero, when they are made
                self.found.notes[f"AdamW has counted {updates} updates, one more than the run"] = None
            elif updates != expected:
                self.found.unknown.append(f"AdamW's count of {updates} updates (the run counts {expected})")

    def _add_groups(self, groups: Iterable[Mapping[str, Any]], state: Mapping[str, Any]) -> None:
        """Add the settings of the optimizer's groups.  `state`: of the ZeRO optimizer around it."""
        for number, group in enumerate(groups):
            for key, value in group.items():
                self.found.add_setting(f"param_groups.{number}.{key}", key, value)
        if state.get("dynamic_loss_scale"):
            self.found.notes["the loss scale is not taken over: under fp16 it begins anew"] = None

    def _read_universal(self, shapes: Shapes) -> None:
        zero = self.folder.child(UNIVERSAL)
        for file in zero.files():
            if file != "optimizer_state.pt":
                self.found.unknown.append(f"file {UNIVERSAL}/{file}")
                continue
            state = self._load(f"{UNIVERSAL}/{file}")
            self._add_groups(state["param_groups"], state)
            for number, own in state.get(_STATE, {}).get("state", {}).items():  # of stage 3, where it has the steps
                self._moments(own, f"group {number}")
        for name in zero.folders():
            for file in zero.child(name).files():
                state_kind, _, end = file.rpartition(".")
                loaded = self._load(f"{UNIVERSAL}/{name}/{file}") if end == "pt" else None
                value = loaded.get("param") if isinstance(loaded, dict) else loaded
                if state_kind == "step" and isinstance(value, int | float | Tensor):
                    self.found.updates.add(int(value))
                elif state_kind in (_FP32, *ADAM) and isinstance(value, Tensor):
                    shape = shapes.get(name, value.shape)  # flat where it was written at stage 3
                    held = LazyTensor.of(value.view(shape if prod(shape) == value.numel() else value.shape))
                    self.found.tensors.setdefault(MASTER if state_kind == _FP32 else state_kind, {})[name] = held
                else:
                    self.found.unknown.append(f"file {UNIVERSAL}/{name}/{file}")

    def _read_stage_0(self, state: Mapping[str, Any]) -> None:
        """Read moments that torch stores by parameter number.  Order and shape tell the names."""
        outer = state["optimizer"]
        base = outer.get(_STATE, outer)
        self._add_groups(base["param_groups"], outer)
        fp32 = [tensor for group in outer.get("fp32_groups", ()) for tensor in group]
        if not (fp32 or base["state"]):
            return  # saved before the first step
        nothing = torch.empty(0)
        names: dict[tuple[int, ...], list[str]] = {}  # by shape, as the next
        numbers: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # each after the place of its group
        for name, tensor in self._parameters(state).items():
            names.setdefault(tuple(tensor.shape), []).append(name)
        for place, group in enumerate(base["param_groups"]):
            for number in group["params"]:
                shape = tuple((fp32[number] if fp32 else base["state"].get(number, {}).get(ADAM[0], nothing)).shape)
                numbers.setdefault(shape, []).append((place, number))
        for shape, found in numbers.items():
            if len(names.get(shape, ())) != len(found) or len({place for place, _ in found}) > 1:
                few = f"the {len(found)} of it are not the {len(names.get(shape, ()))} weights in order"
                why = f"at stage 0 it has numbers and no names, and {few}; save at ZeRO stage 1"
                self.found.unknown.append(f"optimizer state of shape {list(shape)} ({why})")
                continue
            for name, (_, number) in zip(names[shape], found, strict=True):
                own = base["state"].get(number, {})
                for state_kind in self._moments(own, name):
                    self.found.tensors.setdefault(state_kind, {})[name] = LazyTensor.of(own[state_kind])
                if fp32:
                    self.found.tensors.setdefault(MASTER, {})[name] = LazyTensor.of(fp32[number])
        self.found.notes["moments of stage 0 were named in the order of the module's parameters"] = None

    # -- the weights

    def _parameters(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the module's parameters by name; tied parameters once, by their first name."""
        others = {*state["buffer_names"], *(state["shared_params"] or {})}
        found: dict[Any, tuple[str, Tensor]] = {}
        for name, tensor in state["module"].items():
            if name not in others:
                found.setdefault((tensor.data_ptr(), tensor.shape) if tensor.numel() else name, (name, tensor))
        return dict(found.values())

    def _read_weights(self, state: Mapping[str, Any], shapes: Shapes) -> None:
        """Read the weights in the dtype of training.  A frozen parameter has no moments there and gets zeros here."""
        tensors = self.found.tensors
        weights, masters = tensors[MODEL], tensors.get(MASTER, {})
        frozen = {name: tuple(shape) for name, shape in (state["frozen_param_shapes"] or {}).items()}
        for name, tensor in self._parameters(state).items():
            shape = shapes.get(name, frozen.get(name, tuple(tensor.shape)))
            if tensor.numel() == prod(shape):
                master = masters.get(name)
                weights[name] = replace(LazyTensor.of(tensor), read=partial(self._checked, name, tensor, master))
            elif name in masters:  # stage 3 stores an empty tensor
                weights[name] = LazyTensor(shape, tensor.dtype, partial(_cast, masters[name], tensor.dtype))
            elif name in frozen:
                weights[name] = LazyTensor(shape, tensor.dtype, partial(self._frozen, name, shape))
            else:
                self.found.unknown.append(f"weight {name}, which is stored empty")
        at_rest = [name for name in weights if name not in shapes] if shapes else []
        for name in at_rest:
            masters.setdefault(name, weights[name])
            for state_kind in tensors.keys() & set(ADAM):
                zeros = partial(torch.zeros, weights[name].shape)
                tensors[state_kind][name] = LazyTensor(weights[name].shape, torch.float32, zeros)
        if at_rest:
            self.found.notes[f"frozen there, trained here with moments that begin at zero: {', '.join(at_rest)}"] = None
        for name in state["buffer_names"]:
            weights[name] = LazyTensor.of(state["module"][name])
        for name in set(state["shared_params"] or ()):
            masters.pop(name, None)
        if all(weight.dtype == torch.float32 for weight in weights.values()):
            tensors.pop(MASTER, None)  # they are the weights

    def _checked(self, name: str, weight: Tensor, master: LazyTensor | None) -> Tensor:
        """Return a weight after comparing it with its master, which proves that the shards were joined as they were cut."""
        if master is not None and not torch.equal(master.read().to(weight.dtype).view(weight.shape), weight):
            hint = "of a universal one, made under round_robin_gradients, import what it was made of"
            raise CheckpointError(f"{self.folder}: the fp32 master of {name} is not that of its weight; {hint}")
        return weight.detach()

    def _frozen(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a frozen parameter of stage 3 from the model files of all ranks."""
        fragments: list[Tensor] = []
        while sum(fragment.numel() for fragment in fragments) < prod(shape):
            state = self._load(self._file(self.models, len(fragments)))
            fragments.append(state["frozen_param_fragments"][name].view(-1))
        return torch.cat(fragments)[: prod(shape)].view(shape)


def _cast(master: LazyTensor, dtype: torch.dtype) -> Tensor:
    return master.read().to(dtype)


def _ranges_at_stages_1_and_2(ranks: Sequence[Mapping[str, Any]], listed: Sequence[Shapes]) -> Iterator[_Place]:
    """Yield name, shape and ranges of each parameter at stages 1 and 2.

    The files' param_slice_mappings are not read: under round_robin_gradients DeepSpeed 0.19 writes those of another order.
    """
    padding = ranks[0].get("param_alignment_paddings")
    for group, shapes in enumerate(listed):
        size, start = ranks[0]["single_partition_of_fp32_groups"][group].numel(), 0
        for number, (name, shape) in enumerate(shapes.items()):
            stop = start + prod(shape)
            held = ((rank, max(start, rank * size), min(stop, rank * size + size)) for rank in range(len(ranks)))
            ranges = [_FlatRange(rank, group, low - rank * size, high - low) for rank, low, high in held if low < high]
            yield name, shape, ranges
            start = stop + (padding[group][number] if padding else 0)


def _ranges_at_stage_3(ranks: Sequence[Mapping[str, Any]], listed: Sequence[Shapes]) -> Iterator[_Place]:
    """Yield name, shape and ranges of each parameter at stage 3."""
    for group, shapes in enumerate(listed):
        start = 0
        for name, shape in shapes.items():
            per_rank = -(-prod(shape) // len(ranks))
            left = [max(min(per_rank, prod(shape) - rank * per_rank), 0) for rank in range(len(ranks))]
            yield name, shape, [_FlatRange(rank, group, start, numel) for rank, numel in enumerate(left)]
            start += per_rank
        for rank, state in enumerate(ranks):
            if state["fp32_flat_groups"][group].numel() != start:
                raise ValueError(f"group {group} of rank {rank} has not the {start} elements of its parameters")
