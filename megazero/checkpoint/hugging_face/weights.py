"""The weights of a transformers model directory: safetensors or torch.save, one file or several with an index."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megazero.checkpoint.folder import LocalFolder
from megazero.checkpoint.index import CheckpointError

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class HubWeights:
    """The tensors of a transformers model directory, in any of its formats; `names` as they are stored.

    Raises:
        CheckpointError: there are no weights, a file is missing or cannot be read, or does not hold what the index says.
    """

    def __init__(self, folder: LocalFolder) -> None:
        self.folder = folder
        self._tensors: dict[str, _Stored] = {}
        listed: dict[str, str] = {}
        for file in self._find(listed):
            try:
                opened = (_open_safetensors if file.endswith(".safetensors") else _open_pickled)(folder.path / file)
            except FileNotFoundError as error:
                raise CheckpointError(f"{folder}/{file} is missing") from error
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                raise CheckpointError(f"{folder}/{file} cannot be read ({error})") from error
            for name in (name for name in opened if name in self._tensors):
                raise CheckpointError(f"{folder}/{file} holds {name}, which another of its files holds too")
            self._tensors |= opened
        for name in (name for name in listed if name not in self._tensors):
            raise CheckpointError(f"{folder}/{listed[name]} does not hold {name}, which its index says it does")
        self.names = list(self._tensors)

    def _find(self, listed: dict[str, str]) -> list[str]:
        """Files of weights; an index's map of tensors to files goes into `listed`."""
        for name in _WEIGHTS:
            index = f"{name}.index.json"
            if self.folder.has(index):
                try:
                    listed |= json.loads(self.folder.read(index))["weight_map"]
                except (ValueError, KeyError, TypeError) as error:
                    raise CheckpointError(f"{self.folder}/{index} cannot be read ({error!r})") from error
                return sorted(set(listed.values()))
            if self.folder.has(name):
                return [name]
        raise CheckpointError(f"{self.folder} has no weights: neither {_WEIGHTS[0]} nor {_WEIGHTS[1]}, nor their index")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        """A tensor; not to be written to."""
        return self._tensors[name].read()


@dataclass(frozen=True)
class _Stored:
    """One tensor of a file, read when it is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def _open_safetensors(path: Path) -> dict[str, _Stored]:
    """The tensors of a safetensors file, which may have dtypes that our checkpoints do not have."""
    file = safe_open(path, framework="pt")

    def stored(name: str) -> _Stored:
        part = file.get_slice(name)
        shape = tuple(part.get_shape())
        return _Stored(shape, (part[:0] if shape else part[...]).dtype, partial(file.get_tensor, name))

    return {name: stored(name) for name in file.keys()}  # noqa: SIM118 - it is no dict


def _open_pickled(path: Path) -> dict[str, _Stored]:
    """The tensors of a file of `torch.save`, mapped; a file older than torch 1.6 is read whole."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError:
        raise
    except Exception as error:  # of pickle, of zip, of torch: anything can be in the file
        raise ValueError(str(error).splitlines()[0]) from error
    tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
    return {name: _Stored(tuple(one.shape), one.dtype, one.detach) for name, one in tensors.items()}
