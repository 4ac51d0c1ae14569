"""The weights of a transformers model directory: safetensors or torch.save, one file or several with an index."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megazero.checkpoint.folder import LocalFolder
from megazero.checkpoint.foreign.pickles import load_tensors
from megazero.checkpoint.foreign.source import ForeignTensor
from megazero.checkpoint.index import CheckpointError
from megazero.data.sealed import parse_json

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def open_weights(folder: LocalFolder) -> tuple[dict[str, ForeignTensor], list[str]]:
    """The tensors of a transformers model directory, in any of its formats, by the names in the files.

    Also the names of what is no tensor.

    Raises:
        CheckpointError: there are no weights, a file is missing or cannot be read, a tensor is in two files, or one that the
            index names is in none of them; which file the index gives it does not matter.
    """
    files, listed = _find(folder)
    tensors: dict[str, ForeignTensor] = {}
    unknown: list[str] = []
    for file in files:
        try:
            if file.endswith(".safetensors"):
                opened = _open_safetensors(folder.path / file)
            else:
                opened, others = _open_pickled(folder.path / file)
                unknown += (f"{name} (in {file})" for name in others)
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder}/{file} is missing") from error
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{folder}/{file} cannot be read ({error})") from error
        if twice := [name for name in opened if name in tensors]:
            raise CheckpointError(f"{folder}/{file} holds {twice[0]}, which another of its files holds too")
        tensors |= opened
    if lost := [name for name in listed if name not in tensors]:
        raise CheckpointError(f"{folder}/{listed[lost[0]]} does not hold {lost[0]}, which its index says it does")
    return tensors, unknown


def _find(folder: LocalFolder) -> tuple[list[str], dict[str, str]]:
    """Files of weights, and their index's map of tensors to files.  One file comes before an index, as in transformers."""
    for name in _WEIGHTS:
        if folder.has(name):
            return [name], {}
        index = f"{name}.index.json"
        if folder.has(index):
            try:
                listed = dict(parse_json(folder.read(index))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{folder}/{index} cannot be read ({error!r})") from error
            for tensor, file in listed.items():
                _check_inside(folder, index, tensor, file)
            return sorted(set(listed.values())), listed
    raise CheckpointError(f"{folder} has no weights: neither {_WEIGHTS[0]} nor {_WEIGHTS[1]}, nor their index")


def _check_inside(folder: LocalFolder, index: str, tensor: str, file: object) -> None:
    """An index from outside must not make us read what is not part of the model; a link in the folder is the owner's."""
    if not isinstance(file, str) or not file or Path(file).is_absolute() or ".." in Path(file).parts:
        raise CheckpointError(f"{folder}/{index} names {file!r} for {tensor}; it must be a file in {folder}")


def _open_safetensors(path: Path) -> dict[str, ForeignTensor]:
    """The tensors of a safetensors file, which may have dtypes that our checkpoints do not have."""
    file = safe_open(path, framework="pt")

    def stored(name: str) -> ForeignTensor:
        part = file.get_slice(name)
        shape = tuple(part.get_shape())
        return ForeignTensor(shape, (part[:0] if shape else part[...]).dtype, partial(file.get_tensor, name))

    return {name: stored(name) for name in file.keys()}  # noqa: SIM118 - it is no dict


def _open_pickled(path: Path) -> tuple[dict[str, ForeignTensor], list[str]]:
    """The tensors of a file of `torch.save`, mapped, and what else is in it; a file older than torch 1.6 is read whole."""
    found, unknown = load_tensors(path)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not tensors by name")
    tensors: dict[str, ForeignTensor] = {}
    for name, one in found.items():
        if isinstance(name, str) and isinstance(one, Tensor):
            tensors[name] = ForeignTensor(tuple(one.shape), one.dtype, one.detach)
        else:
            unknown.append(str(name))
    return tensors, unknown
