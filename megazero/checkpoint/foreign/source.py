"""What a checkpoint of another framework holds, in its own names, and how our tensors are found in it.

    files of theirs --reader--> ForeignCheckpoint --match--> our names, shapes, order --writer--> a step of ours
                                their names, lazy                  still lazy               one tensor at a time

Nothing is skipped: what no table knows is a problem, unless the user says that it is to be ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.folder import LocalFolder
from megazero.checkpoint.foreign.names import NameTable, Theirs
from megazero.checkpoint.index import CheckpointError
from megazero.checkpoint.shards import CHUNK_ELEMENTS
from megazero.data.sealed import LFS_HINT, LFS_POINTER
from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.models.rope_scaling import RopeScaling
from megazero.settings import toml_value
from megazero.zero.bucket import DTYPE_NAMES
from megazero.zero.state import MODEL

_SHOWN = 5  # problems in an error
_FROM_HUB = "a model of the Hugging Face hub is fetched first: hf download NAME --local-dir DIRECTORY"
# Modules that wrap a part of a model, of torch.compile, DDP, FSDP, recomputation and Lightning.
_WRAPPERS = re.compile(r"(?<![^.])(?:module|_orig_mod|_forward_module|_(?:fsdp|checkpoint)_wrapped_module)\.")


@dataclass(frozen=True)
class ForeignTensor:
    """One tensor of a file, read when it is asked for; what `read` returns is not to be written to."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class ForeignCheckpoint:
    """What a checkpoint of another framework says.

    Args:
        path: of it, for messages.
        tensors: by kind ("model", "master", "exp_avg", "exp_avg_sq"), then by their name.
        optimizer_steps: updates of the weights, which AdamW's bias correction counts; 0 without moments.
        step: steps of the run.
        samples: consumed; None where the checkpoint does not say.
        optimizer: what it says of the optimizer, by keys of our [optimizer] section.
        notes: lines about what was understood and is not taken over.
        unknown: names of what was met and not understood.
    """

    path: str
    tensors: Mapping[str, Mapping[str, ForeignTensor]]
    optimizer_steps: int = 0
    step: int = 0
    samples: int | None = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    unknown: Sequence[str] = ()


def local_source(source: str | Path) -> LocalFolder:
    """The directory or file of what is to be imported.  Raises: CheckpointError: it is not there, or not all of it."""
    folder = LocalFolder(Path(source))
    if not folder.path.exists():
        raise CheckpointError(f"{source} does not exist; {_FROM_HUB}")
    for path in folder.path.glob("*.*"):  # of weights a directory may hold forms that are not read
        if path.suffix in (".json", ".txt", ".model", ".jinja", ".distcp") and path.is_file():
            check_whole(path)
    return folder


def check_whole(path: Path) -> None:
    """Raises: CheckpointError: git-lfs has not fetched the file.  OSError."""
    if path.stat().st_size < 1024 and path.read_bytes().startswith(LFS_POINTER):
        raise CheckpointError(f"{path} is {LFS_HINT}")


def tables_of_transformers(family: str) -> tuple[NameTable, ...]:
    """The names that transformers gives a family's tensors; then without the prefix of the whole model, as a model without
    its head has them."""
    if (form := FAMILIES[family].hugging_face) is None:
        return (NameTable("own", ""),)
    whole = NameTable("hugging-face", form.embedding, head=form.head, buffers=form.buffers)
    return whole, replace(whole, dropped=form.prefix)


def match(
    found: ForeignCheckpoint,
    model: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    tables: Sequence[NameTable],
    *,
    described_by: str,
    ignore: Sequence[str] = (),
) -> tuple[dict[str, dict[str, ForeignTensor]], list[str]]:
    """Our tensors by kind and by our name, in the order of `shapes`; and lines for the user.

    Args:
        model: resolved.
        shapes: of our logical tensors.
        tables: of names, of which one must fit.
        described_by: the file that describes the model, for messages.
        ignore: patterns of names that may be left out, as of file names.

    Raises:
        CheckpointError: a tensor is missing, of another shape or dtype, or something is not understood; the message lists
            all of it.
    """
    problems: list[str] = []
    unknown = {name: f"{name} is not understood" for name in found.unknown}
    matched: dict[str, dict[str, ForeignTensor]] = {}
    used = {
        kind: _unwrapped({name: one for name, one in tensors.items() if not is_named(_label(kind) + name, ignore)})
        for kind, tensors in found.tensors.items()
    }
    used = {kind: tensors for kind, tensors in used.items() if tensors or kind == MODEL}  # all of a kind may be ignored
    # A script may keep the model behind a prefix of its own, and the state of the optimizer not.
    others = [tensors for kind, tensors in used.items() if kind != MODEL]
    of_model = _best_table([used[MODEL]], tables, shapes, found.path)
    of_others = _best_table(others, tables, shapes, found.path) if others else of_model
    about = list(_not_shown(of_model[0], used[MODEL].get(of_model[1] + of_model[0].turns), model))
    unknown |= {name: line for name, line in about if name}
    notes = [*found.notes, *(line for name, line in about if not name)]
    for kind, tensors in used.items():
        label = _label(kind)
        table, prefix = of_model if kind == MODEL else of_others
        places = {name: table.theirs(name) for name in shapes}
        names = {ours: prefix + theirs.name for ours, theirs in places.items()}
        head, embedding = prefix + table.head, names.get(table.embedding, "")
        if model.tie_embeddings and head in tensors and embedding not in tensors:
            names[table.embedding] = head  # safetensors' `save_model` keeps one name of a shared tensor
        for ours, shape in shapes.items():
            stored = tensors.get(names[ours])
            wrong = ["is missing"] if stored is None else _wrong(stored, places[ours], model, shape)
            problems += (f"{label}{names[ours]} {line}" for line in wrong)
        rest = tensors.keys() - set(names.values())
        if model.tie_embeddings and head in rest and embedding in tensors:
            rest.remove(head)
            if not _same(tensors[head], tensors[embedding]):
                problems.append(
                    f"{label}{head} differs from {embedding}, though they are tied: tied weights are one tensor"
                )
        elif kind == MODEL and {head, embedding} <= tensors.keys() and _same(tensors[head], tensors[embedding]):
            notes.append(f"{head} equals {embedding}: if they were tied there, set model.tie_embeddings = true")
        for name in sorted(rest):
            if not table.buffers.fullmatch(name.removeprefix(prefix)):
                told = f"belongs to no parameter of a {model.family} of this configuration"
                unknown[label + name] = f"{label}{name} {told}"
        matched[kind] = {
            ours: ForeignTensor(shape, stored.dtype, partial(_moved, stored, places[ours], model))
            for ours, shape in shapes.items()
            if (stored := tensors.get(names[ours])) is not None
        }
    left = [told for name, told in unknown.items() if not is_named(name, ignore)]
    if problems or left:
        lines = [*problems, *left]
        shown = "; ".join(lines[:_SHOWN]) + (f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")
        hint = ". --ignore NAME leaves out what is not needed" if left and not problems else ""
        if not matched.get(MODEL):
            known = ", ".join(dict.fromkeys(table.name for table in tables))
            hint = f". {model.family} is known under the names of {known}, and no tensor has one"
        raise CheckpointError(f"the weights in {found.path} are not those of {described_by}: {shown}{hint}")
    return matched, notes


def _unwrapped(tensors: dict[str, ForeignTensor]) -> dict[str, ForeignTensor]:
    """By names without wrappers; as they are where two names would be one."""
    plain = {_WRAPPERS.sub("", name): one for name, one in tensors.items()}
    return plain if len(plain) == len(tensors) else tensors


def _not_shown(table: NameTable, turns: ForeignTensor | None, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """What the other framework computes differently although no tensor shows it, such as rope_scaling.

    Yields (name, line): `name` is what `--ignore` must list, or "" where the line is only a note.
    """
    if turns is not None and not _turns_as(turns.read(), model):
        yield (
            table.turns,
            f"{table.turns} is of another model.rope_theta or model.rope_scaling: write those of that run",
        )
    for key, own in table.own.items():
        if (ours := getattr(model, key)) == own or (turns is not None and key.startswith("rope_")):
            continue
        shown = toml_value(own.model_dump(exclude_unset=True) if isinstance(own, RopeScaling) else own)
        said = f"models of {table.name} itself have {key} = {shown}, which no tensor shows; the run file has"
        if ours is None:
            yield f"model.{key}", f"{said} none: write it under [model]; if that run had none, --ignore model.{key}"
        else:
            yield "", f"{said} {toml_value(ours)}"


def _turns_as(turns: Tensor, model: ModelConfig) -> bool:
    """Whether stored turns of rotary positions are those of this model: at position 1, a pair turns by its frequency."""
    wanted = model.rope_theta ** -(torch.arange(0, model.head_size, 2) / model.head_size)
    wanted = wanted if model.rope_scaling is None else model.rope_scaling.scaled(wanted, model.rope_theta)
    is_turn = turns.is_complex() and len(turns) > 1 and turns.shape[1:] == wanted.shape
    return is_turn and torch.allclose(turns[1].angle(), wanted, rtol=1e-4, atol=0)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns names it."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _label(kind: str) -> str:
    return "" if kind == MODEL else f"{kind} of "


def _best_table(
    kinds: Sequence[Mapping[str, ForeignTensor]],
    tables: Sequence[NameTable],
    shapes: Mapping[str, tuple[int, ...]],
    path: str,
) -> tuple[NameTable, str]:
    """The table, and the prefix before its names, that know most of the tensors of all these kinds.

    Raises: CheckpointError: two know all of them, and other ones.
    """
    names = [name for one in kinds for name in one]

    def candidates() -> Iterator[tuple[NameTable, str]]:
        for table in tables:
            ends = table.theirs(table.embedding).name, table.head  # of which a tied model may have either
            prefixes = {name.removesuffix(end): None for name in names for end in ends if name.endswith(end)}
            yield from ((table, prefix) for prefix in [*prefixes, ""] if prefix == "" or prefix.endswith("."))

    def named(candidate: tuple[NameTable, str]) -> list[str]:
        table, prefix = candidate
        return [prefix + table.theirs(name).name for name in shapes]

    def known(candidate: tuple[NameTable, str]) -> int:
        return sum(name in tensors for name in named(candidate) for tensors in kinds)

    best = max(candidates(), key=known)
    if known(best) == len(shapes) * len(kinds):
        for other in candidates():
            if known(other) == known(best) and named(other) != named(best):
                one, two = (f"{table.name!r} behind the prefix {prefix!r}" for table, prefix in (best, other))
                raise CheckpointError(
                    f"{path} holds two whole sets of tensors, {one} and {two}: leave one out by --ignore PATTERN"
                )
    return best


def _wrong(stored: ForeignTensor, theirs: Theirs, model: ModelConfig, shape: tuple[int, ...]) -> Iterator[str]:
    """What is wrong with a tensor of theirs, in words."""
    if stored.dtype not in DTYPE_NAMES:
        yield f"is of {stored.dtype}; float32, bfloat16 and float16 are supported"
        return
    try:
        taken = tuple(theirs.take(torch.empty(stored.shape, dtype=stored.dtype, device="meta"), model).shape)
    except (RuntimeError, ValueError, IndexError) as error:
        yield f"has shape {list(stored.shape)}, which no model of this configuration has ({str(error).splitlines()[0]})"
        return
    if taken != shape:
        made = "" if taken == stored.shape else f" (as ours {list(taken)})"
        yield f"has shape {list(stored.shape)}{made}, the configuration makes it {list(shape)}"


def _moved(stored: ForeignTensor, theirs: Theirs, model: ModelConfig) -> Tensor:
    return theirs.take(stored.read(), model)


def _same(one: ForeignTensor, other: ForeignTensor) -> bool:
    if one.shape != other.shape:
        return False
    parts = (tensor.read().reshape(-1).split(CHUNK_ELEMENTS) for tensor in (one, other))
    return all(torch.equal(a, b.to(a.dtype)) for a, b in zip(*parts, strict=True))
