"""The differences between two checkpoints: tensors by state kind and name, and the states of their runs.

Two tensors are read side by side, a few million elements at a time.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, prod
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.folder import Folder, Location
from megazero.checkpoint.index import TRAINER_STATE, index_name, read_manifest, read_trainer_state, state_kinds_of
from megazero.checkpoint.load import reading
from megazero.checkpoint.shards import CHUNK_ELEMENTS
from megazero.checkpoint.tensor_file import StoredTensor, StoredTensors

_INFORMATION = ("config", "shape", "versions", "val_loss")  # fields of the trainer state that a resumed run ignores


@dataclass(frozen=True)
class TensorDifference:
    """The difference of one tensor between two checkpoints."""

    state_kind: str
    name: str
    shapes: str  # shape and dtype of each, as one text if they agree
    elements: int = 0  # 0 if the shapes differ and nothing was compared
    differing: int = 0  # elements whose bits differ after both were converted to fp32
    max_abs: float = inf  # the largest |a - b|; infinite if one is not a number
    relative: float = inf  # max_abs / the largest |b|
    is_close: bool = False  # within the tolerances


@dataclass
class Comparison:
    """The result of `compare`."""

    tensors: list[TensorDifference] = field(default_factory=list)  # the largest relative difference first
    only: list[str] = field(default_factory=list)  # state kinds, tensors and a script's files that one of the two lacks
    fields: list[tuple[str, Any, Any]] = field(default_factory=list)  # of the trainer state, with both values
    notes: list[str] = field(default_factory=list)  # what belongs to no state: configuration, cluster shape, releases
    compared: int = 0  # tensors that both have

    @property
    def is_equal(self) -> bool:
        """Whether a run would continue in the same way from either checkpoint, within the tolerances."""
        return not self.only and not self.fields and all(tensor.is_close for tensor in self.tensors)


def compare(a: Location, b: Location, *, rtol: float = 0.0, atol: float = 0.0) -> Comparison:
    """Compare two complete step directories.  Raises: CheckpointError for one that cannot be read.

    Elements are close if |a - b| <= atol + rtol * |b|.  With either, dtypes may differ; with neither, every bit counts.
    """
    with reading(a) as folder_a, reading(b) as folder_b:
        return _compare((folder_a, folder_b), rtol, atol)


def _compare(folders: tuple[Folder, Folder], rtol: float, atol: float) -> Comparison:
    result = Comparison()
    states = [read_trainer_state(folder) for folder in folders]
    _compare_states(result, *(_flat(asdict(state)) for state in states))
    stored, others = [], []
    for folder in folders:
        manifest = read_manifest(folder)
        held = {state_kind: StoredTensors(folder, state_kind) for state_kind in state_kinds_of(manifest)}
        tensor_files = {file for tensors in held.values() for file in tensors.files.values()}
        compared = {TRAINER_STATE, *map(index_name, held), *tensor_files}
        stored.append(held)
        others.append({name: record for name, record in manifest.items() if name not in compared})
    result.only += _only("kind", *stored)
    for state_kind in filter(stored[1].__contains__, stored[0]):
        pair = stored[0][state_kind], stored[1][state_kind]
        result.only += _only(state_kind, pair[0].files, pair[1].files)
        names = pair[0].files.keys() & pair[1].files.keys()
        result.compared += len(names)
        differences = (_difference(state_kind, name, pair[0][name], pair[1][name], rtol, atol) for name in names)
        result.tensors += filter(None, differences)
    result.tensors.sort(key=lambda diff: (diff.is_close, -diff.relative, -diff.max_abs, diff.state_kind, diff.name))
    lines = result.only if any(state.script for state in states) else result.notes
    lines += _only("file", *others)
    both = sorted(others[0].keys() & others[1].keys())
    lines += [f"file {name} differs" for name in both if others[0][name] != others[1][name]]
    return result


def _only(what: str, a: Collection[str], b: Collection[str]) -> list[str]:
    sides = (("A", set(a) - set(b)), ("B", set(b) - set(a)))
    return [f"{what} {name} is only in {side}" for side, names in sides for name in sorted(names)]


def _compare_states(result: Comparison, a: dict[str, Any], b: dict[str, Any]) -> None:
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) == b.get(key):
            continue
        if key.split(".")[0] not in _INFORMATION:
            result.fields.append((key, a.get(key), b.get(key)))
        elif key in a and key in b:
            result.notes.append(f"{key}: {a[key]!r}, {b[key]!r}")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: {"model": {"seq_len": 16}} -> {"model.seq_len": 16}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _difference(
    state_kind: str, name: str, a: StoredTensor, b: StoredTensor, rtol: float, atol: float
) -> TensorDifference | None:
    """Return the difference of two tensors with the same name; None if they are equal."""
    texts = [f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in (a, b)]
    shapes = " and ".join(dict.fromkeys(texts))
    if a.shape != b.shape:
        return TensorDifference(state_kind, name, shapes)
    differing, largest, scale, is_close = 0, 0.0, 0.0, rtol > 0 or atol > 0
    for rows_a, rows_b in _rows(a, b):
        scale = max(scale, float(rows_b.abs().max().nan_to_num(inf)))
        differ = rows_a.view(torch.int32) != rows_b.view(torch.int32)
        if not differ.any():
            continue
        differing += int(differ.sum())
        x, y = rows_a[differ].double(), rows_b[differ].double()
        gap = (x - y).abs().nan_to_num(nan=inf)
        largest = max(largest, float(gap.max()))
        is_close &= bool((gap <= atol + rtol * y.abs()).all())
    if a.dtype == b.dtype and not differing:
        return None
    relative = largest / scale if largest and scale and isfinite(scale) else (inf if largest else 0.0)
    return TensorDifference(state_kind, name, shapes, prod(a.shape), differing, largest, relative, is_close)


def _rows(a: StoredTensor, b: StoredTensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of both tensors, a few at a time, flat and in fp32, which represents every stored dtype exactly."""
    shape = a.shape
    if not shape:
        yield a.whole().float().view(1), b.whole().float().view(1)
    elif prod(shape):
        rows = max(1, CHUNK_ELEMENTS // prod(shape[1:]))
        for first in range(0, shape[0], rows):
            last = min(first + rows, shape[0])
            yield a.rows(first, last).float().view(-1), b.rows(first, last).float().view(-1)
