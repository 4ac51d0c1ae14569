"""Opens the weights of a model directory: one file, or several files with an index.

transformers          model.safetensors, pytorch_model.bin, or shards and their index
accelerate            the same from `save_state`, or pytorch_model_fsdp.bin
Lightning, scripts    one file of torch.save, *.ckpt

Files of torch.save are pickles; see `pickles`.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from megazero.checkpoint.folder import LocalFolder
from megazero.checkpoint.index import CheckpointError
from megazero.data.sealed import LFS_HINT, LFS_POINTER, parse_json
from megazero.formats.foreign import NOT_RESUMED, ForeignCheckpoint, LazyTensor, foreign_errors
from megazero.formats.pickles import load_tensors
from megazero.zero.state import MODEL

_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")
_FROM_HUB = "a model of the Hugging Face hub is fetched first: hf download NAME --local-dir DIRECTORY"


def local_source(source: str | Path) -> LocalFolder:
    """Return the local folder or file to import from.

    Raises: CheckpointError: it does not exist, or git-lfs has not fetched it.
    """
    folder = LocalFolder(Path(source))
    if not folder.path.exists():
        raise CheckpointError(f"{source} does not exist; {_FROM_HUB}")
    for path in folder.path.glob("*.*"):  # a directory may also hold weights in forms that are not read
        if path.suffix in (".json", ".txt", ".model", ".jinja", ".distcp") and path.is_file():
            _check_fetched(path)
    return folder


def _check_fetched(path: Path) -> None:
    """Check that git-lfs has fetched a file.  Raises: CheckpointError, OSError."""
    if path.stat().st_size < 1024 and path.read_bytes().startswith(LFS_POINTER):
        raise CheckpointError(f"{path} is {LFS_HINT}")


def has_weights(folder: LocalFolder) -> bool:
    """Whether a folder contains files of weights."""
    return any(name.removesuffix(".index.json") in _WEIGHTS or name.endswith(".ckpt") for name in folder.files())


def open_weights(folder: LocalFolder) -> ForeignCheckpoint:
    """Open the tensors of a model directory, or of one file.

    Raises:
        CheckpointError: there are no weights, a file is missing or cannot be read, a tensor is in two files, or a tensor in
            the index is in no file.  (It may be in another file than the index says.)
    """
    folder, (files, listed) = (folder, _find(folder)) if folder.path.is_dir() else (folder.parent, ([folder.name], {}))
    states = [name for name in ("optimizer.bin", "optimizer.pt") if folder.has(name)]
    found = ForeignCheckpoint(str(folder), notes=dict.fromkeys(f"{name}: {NOT_RESUMED}" for name in states))
    tensors = found.tensors[MODEL]
    for file in files:
        path = folder.path / file
        with foreign_errors(str(path)):
            _check_fetched(path)
            opened = _open_safetensors(path) if file.endswith(".safetensors") else _open_pickled(path, found)
        if twice := [name for name in opened if name in tensors]:
            raise CheckpointError(f"{path} holds {twice[0]}, which another of its files holds too")
        tensors.update(opened)
    if lost := [name for name in listed if name not in tensors]:
        raise CheckpointError(f"{folder}/{listed[lost[0]]} does not hold {lost[0]}, which its index says it does")
    return found


def _find(folder: LocalFolder) -> tuple[list[str], dict[str, str]]:
    """Find files of weights, and the map of tensors to files.  A single file comes before an index, as in transformers."""
    for name in _WEIGHTS:
        if folder.has(name):
            return [name], {}
        index = f"{name}.index.json"
        if folder.has(index):
            with foreign_errors(f"{folder}/{index}"):
                listed = dict(parse_json(folder.read(index))["weight_map"])
            # An index from outside must not make us read what is not part of the model; a link in it is the owner's.
            for held, file in listed.items():
                if not isinstance(file, str) or not file or Path(file).is_absolute() or ".." in Path(file).parts:
                    raise CheckpointError(f"{folder}/{index} names {file!r} for {held}; it must be a file in {folder}")
            return sorted(set(listed.values())), listed
    pickles = [name for name in folder.files() if name.endswith(".ckpt")]
    if len(pickles) == 1:
        return pickles, {}
    neither = f"neither {_WEIGHTS[0]} nor {_WEIGHTS[1]}, nor their index, nor one *.ckpt"
    raise CheckpointError(f"{folder} has no weights: {neither}" + "".join(f"; name {file}" for file in pickles[-3:]))


def _open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Open a safetensors file.  Its tensors may have dtypes that our checkpoints do not have."""
    file = safe_open(path, framework="pt")

    def stored(name: str) -> LazyTensor:
        view = file.get_slice(name)
        shape = tuple(view.get_shape())
        return LazyTensor(shape, (view[:0] if shape else view[...]).dtype, partial(file.get_tensor, name))

    return {name: stored(name) for name in file.keys()}  # noqa: SIM118 - it is no dict


def _open_pickled(path: Path, found: ForeignCheckpoint) -> dict[str, LazyTensor]:
    """Map the tensors of a file of `torch.save`.  Entries that are not tensors are added to `found`.

    A file older than torch 1.6 is read whole.  Raises: FileNotFoundError; ValueError: it holds no tensors by name.
    """
    loaded, unknown = load_tensors(path)
    if not isinstance(loaded, dict):
        raise ValueError(f"it holds a {type(loaded).__name__}, not tensors by name: save the state_dict of a module")
    dicts = {key: _tensors_in(value) for key, value in loaded.items() if isinstance(value, dict)}
    only = sum(map(bool, dicts.values())) == 1  # such as {"state_dict": ...}: its key says nothing
    within = {n if only else f"{key}.{n}": tensor for key, held in dicts.items() for n, tensor in held.items()}
    # as {"state_dict": ..., "best_loss": ...}
    if len(within) > len(_tensors_in(loaded)):
        loaded, unknown = within, []
        found.notes[f"all but tensors of {path.name}: {NOT_RESUMED}"] = None
    tensors = _tensors_in(loaded)
    unknown += [name for name in loaded if name not in tensors]
    found.unknown += [f"{name} (in {path.name})" for name in unknown]
    return {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}


def _tensors_in(values: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(name, str) and isinstance(value, Tensor)}
