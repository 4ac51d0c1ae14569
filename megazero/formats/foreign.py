"""The contents of a checkpoint of another framework, under its own names, and a match of our tensors with them.

files of theirs --reader--> ForeignCheckpoint --match_state--> our names, shapes, order --write_step--> a step of ours
                            their names, lazy                  still lazy                   one tensor at a time
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.index import CheckpointError
from megazero.checkpoint.shards import CHUNK_ELEMENTS
from megazero.formats.tables import Move, NameTable, unmoved
from megazero.models.config import ModelConfig, RopeScaling
from megazero.settings import listed, toml_value
from megazero.zero.sharding import DTYPE_NAMES
from megazero.zero.state import MODEL

ADAM = ("exp_avg", "exp_avg_sq")
# The keys of AdamW's groups: its settings; how it is computed; and what ours computes in one way only.
_SETTINGS = ("name", "betas", "eps", "weight_decay", "lr", "initial_lr")
_COMPUTED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "step")
_SHOWN = 5  # problems in an error
_COUNTS = 2**53  # none is as large: a float does not count that far
_CONSTANT = {"amsgrad": False, "maximize": False, "bias_correction": True}
NOT_RESUMED = "not taken over: weights alone are read, and moments begin anew"
# Modules that torch.compile, DDP, FSDP, recomputation and Lightning wrap around parts of a model.
_WRAPPERS = re.compile(r"(?<![^.])(?:module|_orig_mod|_forward_module|_(?:fsdp|checkpoint)_wrapped_module)\.")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in a file, read on demand.  `read` may return a view of the file; do not write to it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """Wrap a tensor that is in memory already."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.detach)


@contextmanager
def foreign_errors(path: str) -> Iterator[None]:
    """Within a `with` block, turn any error of parsing a foreign file into a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{path} is damaged, or laid out in another way ({error!r:.200})") from error


@dataclass
class ForeignCheckpoint:
    """The contents of a checkpoint of another framework.  A reader fills it in; `finished` adds the last two fields.

    Args:
        path: path of the checkpoint, for messages.
        tensors: tensors by kind ("model", "master", "exp_avg", "exp_avg_sq"), then by their foreign name.
        step, samples: steps of the run and samples consumed; None if the checkpoint does not say.
        notes: a line on each thing that was recognised but is not imported.
        unknown: names of entries that were not recognised.
        updates: counts of updates in the state of the tensors; they must agree.
        settings: AdamW's settings by key, with the distinct values of all groups.
        optimizer_steps: updates of the weights, for AdamW's bias correction; 0 without moments.
        optimizer: settings of the optimizer, by the keys of our [optimizer] section.
    """

    path: str
    tensors: dict[str, dict[str, LazyTensor]] = field(default_factory=lambda: {MODEL: {}})
    step: int | None = None
    samples: int | None = None
    notes: dict[str, None] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    updates: set[int] = field(default_factory=set)
    settings: dict[str, list[Any]] = field(default_factory=dict)
    optimizer_steps: int = 0
    optimizer: dict[str, Any] = field(default_factory=dict)

    def add_tensor(self, state_kind: str, name: str, tensor: LazyTensor, *, entry: str) -> None:
        """Add a tensor.  A second tensor of the same kind and name is listed as unknown, as `entry`."""
        if self.tensors.setdefault(state_kind, {}).setdefault(name, tensor) is not tensor:
            self.unknown.append(f"{entry} (beside another {state_kind} of {name})")

    def add_step(self, step: int, *, entry: str) -> None:
        """Set the step of the run.  A contradicting step is listed as unknown, as `entry`."""
        self.step = step if self.step is None else self.step
        if self.step != step:
            self.unknown.append(f"{entry} (beside a step of {self.step})")

    def add_setting(self, name: str, key: str, value: Any) -> None:
        """Add a setting of one of the optimizer's groups.  A value that is not finite is listed as unknown.

        Args:
            name: name of the entry, for messages.
            key: key of the setting in AdamW's groups.
            value: its value.
        """
        if key in _COMPUTED:
            return
        if key == "decoupled_weight_decay":
            key, value = "name", "adamw" if value else "adam"
        items = value if (is_list := isinstance(value, list | tuple)) else [value]
        numbers = [item.item() if isinstance(item, Tensor) else item for item in items]
        value = numbers if is_list else numbers[0]
        if not all(isfinite(number) for number in numbers if isinstance(number, float)):
            self.unknown.append(f"{name}={value}")
        elif key in _SETTINGS:
            seen = self.settings.setdefault(key, [])
            seen += [] if value in seen else [value]
        elif key not in _CONSTANT or value != _CONSTANT[key]:
            self.unknown.append(f"{name}={value}")

    def is_not_taken(self, name: str, reasons: Mapping[str, str]) -> bool:
        """Return whether an entry is recognised but not imported, and add a note on it.

        Args:
            name: name of the entry.
            reasons: patterns of such names, each with the reason for the note, or "" for no note.  Entries for which the
                first group of the pattern matches the same text share a note.
        """
        for pattern, reason in reasons.items():
            if found := re.fullmatch(pattern, name):
                if reason:
                    self.notes[f"{found[found.lastindex or 0]} is not taken over: {reason}"] = None
                return True
        return False

    def finished(self) -> ForeignCheckpoint:
        """Fill in the last fields and return the checkpoint.  Raises: CheckpointError: counts of updates disagree."""
        self.optimizer_steps = max(self.updates, default=0)
        counts = {"steps": self.step or 0, "samples": self.samples or 0, "updates": self.optimizer_steps}
        for what, count in counts.items():
            if not 0 <= count < _COUNTS:
                raise CheckpointError(f"{self.path} counts {count} {what}, which no run has: it is damaged")
        if len(self.updates) > 1:
            least, most = min(self.updates), max(self.updates)
            raise CheckpointError(f"{self.path}: AdamW has updated some tensors {least} times and others {most}")
        self.step = self.optimizer_steps if self.step is None else self.step
        found = dict(self.settings)
        found["lr"] = found.pop("initial_lr", found.get("lr", []))  # `lr` is that of the last step
        for key, values in found.items():
            if len(values) > 1:
                self.notes[f"{key} is not taken over: it differs between tensors, {values[0]} and {values[1]}"] = None
        decay = found.get("weight_decay", [])
        if len(decay) == 1 and decay[0]:
            self.notes[f"weight_decay {decay[0]} fell on all tensors there, here on matrices only"] = None
        # a value that differs between tensors is left to the run file
        self.optimizer = {key: values[0] for key, values in found.items() if len(values) == 1}
        return self


def match_state(
    found: ForeignCheckpoint,
    model: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    tables: Sequence[NameTable],
    *,
    model_source: str,
    ignore: Sequence[str] = (),
) -> tuple[dict[str, dict[str, LazyTensor]], list[str]]:
    """Match stored tensors with ours; return ours by kind, in the order of `shapes`, and lines for the user.

    Args:
        found: the foreign checkpoint.
        model: the resolved model.
        shapes: shapes of our logical tensors, by name.
        tables: tables of names; one of them must fit.
        model_source: the file that describes the model, for messages.
        ignore: patterns, as for file names, of names that may be left out.

    Raises:
        CheckpointError: a tensor is missing, has another shape or dtype, or an entry is not recognised; the message lists
            all such tensors and entries.
    """
    states = {state_kind: wanted(tensors, ignore, _label(state_kind)) for state_kind, tensors in found.tensors.items()}
    # all of a kind may be ignored
    states = {state_kind: tensors for state_kind, tensors in states.items() if tensors or state_kind == MODEL}
    # A script may keep the model behind a prefix of its own, and the state of the optimizer not.
    others = [tensors for state_kind, tensors in states.items() if state_kind != MODEL]
    weights, of_model = states[MODEL], _best_table([states[MODEL]], tables, shapes, found.path)
    of_others = _best_table(others, tables, shapes, found.path) if others else of_model
    notes, problems, matched = [*found.notes], list[str](), dict[str, dict[str, LazyTensor]]()
    unknown = {name: f"{name} is not understood" for name in found.unknown}
    for name, line in _not_shown(of_model, weights.get(of_model.prefix + of_model.rotations), model):
        unknown |= {name: line} if name else {}
        notes += [] if name else [line]
    for state_kind, tensors in states.items():
        table = of_model if state_kind == MODEL else of_others
        matched[state_kind], wrong, unmatched = match(tensors, table, model, shapes, label=_label(state_kind))
        problems += wrong
        unknown |= unmatched
    head, embedding = of_model.prefix + of_model.head, of_model.theirs(of_model.embedding).name
    pair = [weights[name] for name in (head, embedding) if name in weights]
    if not model.tie_embeddings and len(pair) == 2 and is_same(*pair):
        notes.append(f"{head} equals {embedding}: if they were tied there, set model.tie_embeddings = true")
    left = [line for name, line in unknown.items() if not is_named(name, ignore)]
    if lines := [*problems, *left]:
        shown = listed(lines, _SHOWN, "; ")
        hint = "" if problems else ". --ignore NAME leaves out what is not needed"
        if not matched[MODEL]:
            known = ", ".join(dict.fromkeys(table.name for table in tables))
            hint = f". {model.family} is known under the names of {known}, and no tensor has one"
        raise CheckpointError(f"the weights in {found.path} are not those of {model_source}: {shown}{hint}")
    return matched, notes


def _not_shown(table: NameTable, rotations: LazyTensor | None, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield settings by which the other framework computes differently although no tensor shows it, such as rope_scaling.

    Yields (name, line): `name` is what `--ignore` must list, or "" where the line is only a note.
    """
    if rotations is not None and not _rotates_as(rotations.read(), model):
        yield table.rotations, f"{table.rotations} is of another model.rope_theta or model.rope_scaling"
    for key, own in table.own.items():
        if (ours := getattr(model, key)) == own or (rotations is not None and key.startswith("rope_")):
            continue
        shown = toml_value(own.model_dump(exclude_unset=True) if isinstance(own, RopeScaling) else own)
        text = f"models of {table.name} itself have {key} = {shown}, which no tensor shows; the run file has"
        if ours is None:
            yield f"model.{key}", f"{text} none: write it under [model]; if that run had none, --ignore model.{key}"
        else:
            yield "", f"{text} {toml_value(ours)}"


def _rotates_as(rotations: Tensor, model: ModelConfig) -> bool:
    """Compare stored rotary rotations with those of the model: at position 1, each pair rotates by its frequency."""
    wanted = model.rope_theta ** -(torch.arange(0, model.head_size, 2) / model.head_size)
    wanted = wanted if model.rope_scaling is None else model.rope_scaling.scaled(wanted, model.rope_theta)
    is_rotation = rotations.is_complex() and len(rotations) > 1 and rotations.shape[1:] == wanted.shape
    return is_rotation and torch.allclose(rotations[1].angle(), wanted, rtol=1e-4, atol=0)


def _label(state_kind: str) -> str:
    return "" if state_kind == MODEL else f"{state_kind} of "


def _best_table(
    states: Sequence[Mapping[str, LazyTensor]],
    tables: Sequence[NameTable],
    shapes: Mapping[str, tuple[int, ...]],
    path: str,
) -> NameTable:
    """Choose the table, with a prefix for its names, that knows most of the tensors of these kinds.

    Raises: CheckpointError: two know all of them, and other ones.
    """
    stored = [name for tensors in states for name in tensors]

    def candidates() -> Iterator[NameTable]:
        for table in tables:
            ends = table.theirs(table.embedding).name, table.head  # a tied model may have either
            prefixes = {name.removesuffix(end): None for name in stored for end in ends if name.endswith(end)}
            valid = [prefix for prefix in prefixes if prefix.endswith(".")]
            yield from (replace(table, prefix=prefix) for prefix in [*valid, ""])

    def named(table: NameTable) -> list[str]:
        return [table.theirs(ours).name for ours in shapes]

    def known(table: NameTable) -> int:
        return sum(name in tensors for name in named(table) for tensors in states)

    best = max(candidates(), key=known)
    if known(best) == len(shapes) * len(states):
        for other in candidates():
            if known(other) == known(best) and named(other) != named(best):
                first, second = (f"{table.name!r} behind the prefix {table.prefix!r}" for table in (best, other))
                raise CheckpointError(f"{path} holds two whole sets of tensors, {first} and {second}: --ignore PATTERN")
    return best


def wanted(tensors: Mapping[str, LazyTensor], ignore: Iterable[str], label: str = "") -> Mapping[str, LazyTensor]:
    """Drop ignored tensors, and strip the names of wrapping modules, unless that would make two names equal.

    Args:
        tensors: tensors by name.
        ignore: patterns of the names to drop.
        label: prefix of a name when it is compared with the patterns, such as "exp_avg of ".
    """
    tensors = {name: tensor for name, tensor in tensors.items() if not is_named(label + name, ignore)}
    plain = {_WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}
    return plain if len(plain) == len(tensors) else tensors


def match(
    tensors: Mapping[str, LazyTensor],
    table: NameTable,
    model: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    label: str = "",
) -> tuple[dict[str, LazyTensor], list[str], dict[str, str]]:
    """Find each tensor of a model among stored tensors.

    Args:
        tensors: stored tensors by their foreign name.
        table: foreign name and layout of each of our tensors.
        model: the resolved model.
        shapes: shapes of our logical tensors by our name; the result has their order.
        label: prefix of names in lines, such as "exp_avg of ".

    Returns: our tensors by our names; lines on problems; and a line on each unknown tensor, by its name.
    """
    found: dict[str, LazyTensor] = {}
    problems: list[str] = []
    places = {ours: table.theirs(ours) for ours in shapes}
    theirs = {ours: place.name for ours, place in places.items()}
    embedding, head = theirs.get(table.embedding, ""), table.prefix + table.head
    if model.tie_embeddings and head in tensors and embedding not in tensors:
        # safetensors' `save_model` keeps one name of a shared tensor
        theirs = {ours: head if name == embedding else name for ours, name in theirs.items()}
    for ours, shape in shapes.items():
        stored, move = tensors.get(theirs[ours]), places[ours].take
        wrong = ["is missing"] if stored is None else _wrong(stored, move, model, shape)
        problems += (f"{label}{theirs[ours]} {line}" for line in wrong)
        if stored is not None:
            read = stored.read if move is unmoved else partial(_moved, stored, move, model)
            found[ours] = LazyTensor(shape, stored.dtype, read)
    rest = tensors.keys() - set(theirs.values())
    if model.tie_embeddings and head in rest and embedding in tensors:
        rest.remove(head)
        if not is_same(tensors[head], tensors[embedding]):
            problems.append(f"{label}{head} differs from {embedding}, but tied weights are one tensor")
    line = f"belongs to no parameter of a {model.family} of this configuration"
    others = [name for name in sorted(rest) if not table.buffers.fullmatch(name.removeprefix(table.prefix))]
    return found, problems, {label + name: f"{label}{name} {line}" for name in others}


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns, as for file names, matches a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_same(a: LazyTensor, b: LazyTensor) -> bool:
    """Return whether two stored tensors are equal."""
    if a.shape != b.shape:
        return False
    chunks = (tensor.read().reshape(-1).split(CHUNK_ELEMENTS) for tensor in (a, b))
    return all(torch.equal(x, y.to(x.dtype)) for x, y in zip(*chunks, strict=True))


def _wrong(stored: LazyTensor, move: Move, model: ModelConfig, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield what is wrong with the dtype or shape of a stored tensor."""
    if stored.dtype not in DTYPE_NAMES:
        yield f"is of {stored.dtype}; float32, bfloat16 and float16 are supported"
        return
    try:
        moved = tuple(move(torch.empty(stored.shape, dtype=stored.dtype, device="meta"), model).shape)
    except (RuntimeError, ValueError, IndexError) as error:
        yield f"has shape {list(stored.shape)}, which no model of this configuration has ({str(error).splitlines()[0]})"
        return
    if moved != shape:
        made = "" if moved == stored.shape else f" (as ours {list(moved)})"
        yield f"has shape {list(stored.shape)}{made}, the configuration makes it {list(shape)}"


def _moved(stored: LazyTensor, move: Move, model: ModelConfig) -> Tensor:
    return move(stored.read(), model)
