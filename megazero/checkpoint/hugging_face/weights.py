"""The weights of a model directory, without its optimizer: safetensors or torch.save, one file or several with an index.

transformers          model.safetensors, pytorch_model.bin, or shards and their index
accelerate            the same from `save_state`, or pytorch_model_fsdp.bin; optimizer.bin numbers its state
Lightning, scripts    one file of torch.save, *.ckpt, with the weights as {"state_dict": ...}
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megazero.checkpoint.folder import LocalFolder
from megazero.checkpoint.foreign.pickles import load_tensors
from megazero.checkpoint.foreign.source import ForeignCheckpoint, ForeignTensor, check_whole
from megazero.checkpoint.index import CheckpointError
from megazero.data.sealed import parse_json
from megazero.models.config import ModelConfig
from megazero.zero.state import MODEL

_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")
_ANEW = "not taken over: weights alone are read, and moments begin anew"


def has_weights(folder: LocalFolder) -> bool:
    """Whether it holds files of weights."""
    return any(name.removesuffix(".index.json") in _WEIGHTS or name.endswith(".ckpt") for name in folder.files())


def open_weights(folder: LocalFolder, _: ModelConfig | None = None) -> ForeignCheckpoint:
    """The tensors of a model directory, or of one file, by the names in the files; and the names of what is no tensor.

    Raises:
        CheckpointError: there are no weights, a file is missing or cannot be read, a tensor is in two files, or one that the
            index names is in none of them; which file the index gives it does not matter.
    """
    folder, (files, listed) = (folder, _find(folder)) if folder.path.is_dir() else (folder.parent, ([folder.name], {}))
    tensors: dict[str, ForeignTensor] = {}
    unknown: list[str] = []
    notes = [f"{name}: {_ANEW}" for name in ("optimizer.bin", "optimizer.pt") if folder.has(name)]
    for file in files:
        try:
            check_whole(folder.path / file)
            if file.endswith(".safetensors"):
                opened = _open_safetensors(folder.path / file)
            else:
                opened, others = _open_pickled(folder.path / file, notes)
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
    return ForeignCheckpoint(str(folder), {MODEL: tensors}, notes=notes, unknown=unknown)


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
    pickles = [name for name in folder.files() if name.endswith(".ckpt")]
    if len(pickles) == 1:
        return pickles, {}
    neither = f"neither {_WEIGHTS[0]} nor {_WEIGHTS[1]}, nor their index, nor one *.ckpt"
    raise CheckpointError(f"{folder} has no weights: {neither}" + "".join(f"; name {one}" for one in pickles[-3:]))


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


def _open_pickled(path: Path, notes: list[str]) -> tuple[dict[str, ForeignTensor], list[str]]:
    """The tensors of a file of `torch.save`, mapped, and what else is in it; a file older than torch 1.6 is read whole."""
    found, unknown = load_tensors(path)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not tensors by name: save the state_dict of a module")
    held = ((key, name, one) for key, part in found.items() if isinstance(part, dict) for name, one in part.items())
    within = {f"{key}.{name}": one for key, name, one in held if isinstance(one, Tensor)}
    if len(within) > sum(isinstance(one, Tensor) for one in found.values()):  # as {"state_dict": ..., "best_loss": ...}
        found, unknown = within, []
        notes.append(f"all but tensors of {path.name}: {_ANEW}")
    tensors: dict[str, ForeignTensor] = {}
    for name, one in found.items():
        if isinstance(name, str) and isinstance(one, Tensor):
            tensors[name] = ForeignTensor(tuple(one.shape), one.dtype, one.detach)
        else:
            unknown.append(str(name))
    return tensors, unknown
