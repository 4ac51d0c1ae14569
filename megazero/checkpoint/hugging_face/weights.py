"""The weights of a transformers model directory: safetensors or torch.save, one file or several with an index."""

from __future__ import annotations

import json
import zipfile
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megazero.checkpoint.folder import LocalFolder
from megazero.checkpoint.foreign.source import ForeignTensor
from megazero.checkpoint.index import CheckpointError

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def open_weights(folder: LocalFolder) -> dict[str, ForeignTensor]:
    """The tensors of a transformers model directory, in any of its formats, by the names in the files.

    Raises:
        CheckpointError: there are no weights, a file is missing or cannot be read, or does not hold what the index says.
    """
    files, listed = _find(folder)
    tensors: dict[str, ForeignTensor] = {}
    for file in files:
        try:
            opened = (_open_safetensors if file.endswith(".safetensors") else _open_pickled)(folder.path / file)
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder}/{file} is missing") from error
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{folder}/{file} cannot be read ({error})") from error
        if twice := [name for name in opened if name in tensors]:
            raise CheckpointError(f"{folder}/{file} holds {twice[0]}, which another of its files holds too")
        tensors |= opened
    if lost := [name for name in listed if name not in tensors]:
        raise CheckpointError(f"{folder}/{listed[lost[0]]} does not hold {lost[0]}, which its index says it does")
    return tensors


def _find(folder: LocalFolder) -> tuple[list[str], dict[str, str]]:
    """Files of weights, and their index's map of tensors to files."""
    for name in _WEIGHTS:
        index = f"{name}.index.json"
        if folder.has(index):
            try:
                listed = dict(json.loads(folder.read(index))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{folder}/{index} cannot be read ({error!r})") from error
            for tensor, file in listed.items():
                _check_inside(folder, index, tensor, file)
            return sorted(set(listed.values())), listed
        if folder.has(name):
            return [name], {}
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


def _open_pickled(path: Path) -> dict[str, ForeignTensor]:
    """The tensors of a file of `torch.save`, mapped; a file older than torch 1.6 is read whole."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError:
        raise
    except Exception as error:  # of pickle, of zip, of torch: anything can be in the file
        raise ValueError(str(error).splitlines()[0]) from error
    tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
    return {name: ForeignTensor(tuple(one.shape), one.dtype, one.detach) for name, one in tensors.items()}
