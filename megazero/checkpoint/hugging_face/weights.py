"""The weights of a transformers model directory: safetensors or torch.save, one file or several with an index."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megazero.checkpoint.folder import LocalFolder
from megazero.checkpoint.index import CheckpointError

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class HubWeights:
    """The tensors of a transformers model directory, in any of its formats.

    Args:
        folder: the directory.

    Attributes:
        names: of the tensors, as they are stored.

    Raises:
        CheckpointError: there are no weights, a file is missing or cannot be read, or does not hold what the index says.
    """

    def __init__(self, folder: LocalFolder) -> None:
        self.folder = folder
        self._files: dict[str, _Safetensors | _Pickled] = {}
        listed: dict[str, str] = {}
        for file in self._find(listed):
            try:
                opened = (_Safetensors if file.endswith(".safetensors") else _Pickled)(folder.path / file)
            except FileNotFoundError as error:
                raise CheckpointError(f"{folder}/{file} is missing") from error
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                raise CheckpointError(f"{folder}/{file} cannot be read ({error})") from error
            twice = next((name for name in opened.names() if name in self._files), None)
            if twice is not None:
                raise CheckpointError(f"{folder}/{file} holds {twice}, which another of its files holds too")
            self._files |= dict.fromkeys(opened.names(), opened)
        lost = next((name for name in listed if name not in self._files), None)
        if lost is not None:
            raise CheckpointError(f"{folder}/{listed[lost]} does not hold {lost}, which its index says it does")
        self.names = list(self._files)

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
        """Shape of a tensor."""
        return self._files[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._files[name].dtype(name)

    def read(self, name: str) -> Tensor:
        """A tensor; not to be written to."""
        return self._files[name].read(name)


class _Safetensors:
    """A safetensors file, which may hold dtypes that checkpoints of ours do not."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        kept = self._file.get_slice(name)
        return (kept[:0] if kept.get_shape() else kept[...]).dtype

    def read(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


class _Pickled:
    """A file of `torch.save`, mapped; one older than torch 1.6 is read whole."""

    def __init__(self, path: Path) -> None:
        maps = zipfile.is_zipfile(path)
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=maps)
        except FileNotFoundError:
            raise
        except Exception as error:  # of pickle, of zip, of torch: anything can be in the file
            raise ValueError(str(error).splitlines()[0]) from error
        self._tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()
