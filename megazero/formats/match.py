"""The tensors of a model, found in what somebody else has written.

    files --open_weights--> Weights, by their names --match--> the same, by ours --write_step--> a step directory

Nothing is skipped: what belongs to no parameter is an error, unless the user says that it may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor

from megazero.checkpoint.index import CheckpointError
from megazero.checkpoint.shards import CHUNK_ELEMENTS
from megazero.formats.tables import Move, NameTable, unmoved
from megazero.models.config import ModelConfig
from megazero.zero.bucket import DTYPE_NAMES

NOT_RESUMED = "not taken over: weights alone are read, and moments begin anew"
# Modules that torch.compile, DDP, FSDP, recomputation and Lightning wrap around parts of a model.
_WRAPPERS = re.compile(r"(?<![^.])(?:module|_orig_mod|_forward_module|_(?:fsdp|checkpoint)_wrapped_module)\.")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in a file, read on demand.  `read` may return a view of the file, which must not be written to."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@contextmanager
def foreign_errors(path: str) -> Iterator[None]:
    """Turn errors of parsing a file of another program, which may hold anything, into a CheckpointError that names it."""
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


def wanted(tensors: Mapping[str, LazyTensor], ignore: Iterable[str], label: str = "") -> Mapping[str, LazyTensor]:
    """Tensors that no pattern of `ignore` names, without wrapping modules in their names unless two would become one.

    Args:
        label: stands before a name when it is compared with the patterns, as "exp_avg of ".
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
    """Find each tensor of a model among stored ones.

    Args:
        tensors: by their name.
        table: says which name and layout a tensor of ours has there.
        model: resolved.
        shapes: of our logical tensors, by our name; the result has their order.
        label: stands before names in lines, as "exp_avg of ".

    Returns: our tensors by our names; lines about what is wrong; and about what is unknown, by its name.
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
    """Whether one of the patterns, as of file names, matches a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_same(a: LazyTensor, b: LazyTensor) -> bool:
    """Whether two stored tensors are equal."""
    if a.shape != b.shape:
        return False
    chunks = (tensor.read().reshape(-1).split(CHUNK_ELEMENTS) for tensor in (a, b))
    return all(torch.equal(x, y.to(x.dtype)) for x, y in zip(*chunks, strict=True))


def _wrong(stored: LazyTensor, move: Move, model: ModelConfig, shape: tuple[int, ...]) -> Iterator[str]:
    """What is wrong with a stored tensor, in words."""
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
