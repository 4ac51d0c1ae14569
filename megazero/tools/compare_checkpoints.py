"""The differences between two checkpoints: tensors by kind and name, and the states of their runs.

Two tensors are read side by side, a few million elements at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, prod
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.folder import Folder, Location
from megazero.checkpoint.index import (
    TRAINER_STATE,
    TrainerState,
    index_name,
    kinds_of,
    read_manifest,
    read_trainer_state,
)
from megazero.checkpoint.retention import reading
from megazero.checkpoint.shards import CHUNK_ELEMENTS
from megazero.checkpoint.tensor_file import StoredTensor, StoredTensors

_INFORMATION = ("config", "shape", "versions", "val_loss")  # fields of the trainer state that a resumed run ignores


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that differs.

    Args:
        kind, name: which tensor.
        described: shape and dtype of each, as one text if they agree.
        elements: of the tensor; 0 if the shapes differ and nothing was compared.
        differing: elements whose bits differ after both were converted to fp32.
        max_abs: the largest |a - b|; infinite if one is not a number.
        relative: max_abs as a share of the largest |b|.
        is_close: within the tolerances.
    """

    kind: str
    name: str
    described: str
    elements: int
    differing: int
    max_abs: float
    relative: float
    is_close: bool


@dataclass
class Comparison:
    """The result of `compare`.

    Args:
        tensors: those that differ in bits, dtype or shape, the largest relative difference first.
        only: kinds, tensors and a script's files that one of the two lacks.
        fields: of the trainer state that differ, with both values.
        notes: differences that belong to no state: the configuration, the shape of the cluster, releases, other files.
        compared: number of tensors that both have.
    """

    tensors: list[TensorDifference] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    fields: list[tuple[str, Any, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether a run resumed from either would go on in the same way, within the tolerances."""
        return not self.only and not self.fields and all(one.is_close for one in self.tensors)


def compare(a: Location, b: Location, *, rtol: float = 0.0, atol: float = 0.0) -> Comparison:
    """Compare two complete step directories.

    Args:
        a, b: step directories, or their URLs.
        rtol, atol: elements are close if |a - b| <= atol + rtol * |b|.  With either, dtypes may differ; with neither,
            every bit counts.

    Raises:
        CheckpointError: one is not complete or cannot be read.
    """
    with reading(a) as one, reading(b) as other:
        return _compare((one, other), rtol, atol)


def _compare(folders: tuple[Folder, Folder], rtol: float, atol: float) -> Comparison:
    manifests = [read_manifest(folder) for folder in folders]
    a, b = (read_trainer_state(folder) for folder in folders)
    result = Comparison()
    stored = [
        {kind: StoredTensors(folder, kind) for kind in kinds_of(manifest)}
        for folder, manifest in zip(folders, manifests, strict=True)
    ]
    result.only += _only("kind", *map(set, stored))
    for kind in filter(stored[1].__contains__, stored[0]):
        pair = stored[0][kind], stored[1][kind]
        names = [set(one.files) for one in pair]
        result.only += _only(kind, *names)
        differences = [
            _difference(kind, name, pair[0][name], pair[1][name], rtol, atol) for name in names[0] & names[1]
        ]
        result.tensors += [one for one in differences if one is not None]
        result.compared += len(differences)
    result.tensors.sort(key=lambda one: (one.is_close, -one.relative, -one.max_abs, one.kind, one.name))
    _compare_states(a, b, result)
    others = [
        {name: record for name, record in manifest.items() if name not in _compared_files(kinds)}
        for manifest, kinds in zip(manifests, stored, strict=True)
    ]
    lines = result.only if a.script or b.script else result.notes
    lines += _only("file", *map(set, others))
    both = sorted(others[0].keys() & others[1].keys())
    lines += [f"file {name} differs" for name in both if others[0][name] != others[1][name]]
    return result


def _compared_files(kinds: Mapping[str, StoredTensors]) -> set[str]:
    """Files whose contents are compared as tensors or fields."""
    return {TRAINER_STATE, *map(index_name, kinds), *(file for one in kinds.values() for file in one.files.values())}


def _only(what: str, a: set[str], b: set[str]) -> Iterator[str]:
    yield from (f"{what} {name} is only in A" for name in sorted(a - b))
    yield from (f"{what} {name} is only in B" for name in sorted(b - a))


def _compare_states(a: TrainerState, b: TrainerState, result: Comparison) -> None:
    flat = _flat(asdict(a)), _flat(asdict(b))
    for key in sorted(flat[0].keys() | flat[1].keys()):
        values = flat[0].get(key), flat[1].get(key)
        if values[0] == values[1]:
            continue
        if key.split(".")[0] not in _INFORMATION:
            result.fields.append((key, *values))
        elif key in flat[0] and key in flat[1]:
            result.notes.append(f"{key}: {values[0]!r}, {values[1]!r}")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model.seq_len": 16} for {"model": {"seq_len": 16}}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _difference(
    kind: str, name: str, a: StoredTensor, b: StoredTensor, rtol: float, atol: float
) -> TensorDifference | None:
    """The difference of two tensors with one name; None if they are equal."""
    shapes, dtypes = (a.shape, b.shape), (a.dtype, b.dtype)
    texts = [f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in zip(shapes, dtypes, strict=True)]
    described = " and ".join(dict.fromkeys(texts))
    if shapes[0] != shapes[1]:
        return TensorDifference(kind, name, described, 0, 0, inf, inf, False)
    differing, largest, scale, is_close = 0, 0.0, 0.0, rtol > 0 or atol > 0
    for one, other in _parts(a, b):
        scale = max(scale, float(other.abs().max().nan_to_num(inf)))
        apart = one.view(torch.int32) != other.view(torch.int32)
        if not apart.any():
            continue
        differing += int(apart.sum())
        x, y = one[apart].double(), other[apart].double()
        gap = (x - y).abs().nan_to_num(nan=inf)
        largest = max(largest, float(gap.max()))
        is_close &= bool((gap <= atol + rtol * y.abs()).all())
    if dtypes[0] == dtypes[1] and not differing:
        return None
    relative = largest / scale if largest and scale and isfinite(scale) else (inf if largest else 0.0)
    return TensorDifference(kind, name, described, prod(shapes[0]), differing, largest, relative, is_close)


def _parts(a: StoredTensor, b: StoredTensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors, some rows at a time, flat and in fp32, which holds every stored number exactly."""
    shape = a.shape
    if not shape:
        yield a.whole().float().view(1), b.whole().float().view(1)
    elif prod(shape):
        rows = max(1, CHUNK_ELEMENTS // prod(shape[1:]))
        for first in range(0, shape[0], rows):
            last = min(first + rows, shape[0])
            yield a.rows(first, last).float().view(-1), b.rows(first, last).float().view(-1)
