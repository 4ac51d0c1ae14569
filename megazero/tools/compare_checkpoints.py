"""What two checkpoints do not have in common: tensors by kind and name, and where their runs stood.

Rows of two tensors are read side by side, a few million elements at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, prod
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.folder import Folder, Place
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
from megazero.checkpoint.tensor_file import StoredTensors

_FOR_READING_ONLY = ("config", "shape", "versions", "val_loss")  # fields of the trainer state that no run goes on from


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that is not the same in both.

    Args:
        kind, name: which.
        kept: shape and dtype of each, as one text where they agree.
        elements: of the tensor; 0 where the shapes differ and nothing was compared.
        differing: elements whose bits differ, after both were widened to fp32.
        max_abs: the largest |a - b|; infinite where one is not a number.
        relative: the same as a share of the largest |b|.
        is_close: within the tolerances.
    """

    kind: str
    name: str
    kept: str
    elements: int
    differing: int
    max_abs: float
    relative: float
    is_close: bool


@dataclass
class Comparison:
    """What was found.

    Args:
        tensors: those that differ in bits, dtype or shape, the largest relative difference first.
        only: what one of the two does not have: kinds, tensors, files of a script.
        fields: of the trainer state, with both values.
        notes: what differs and belongs to no state: the configuration, the shape of the cluster, releases, other files.
        compared: tensors that both have.
    """

    tensors: list[TensorDifference] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    fields: list[tuple[str, Any, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether a run would go on from either in the same way, within the tolerances."""
        return not self.only and not self.fields and all(one.is_close for one in self.tensors)


def compare(a: Place, b: Place, *, rtol: float = 0.0, atol: float = 0.0) -> Comparison:
    """Compare two complete step directories.

    Args:
        a, b: step directories, or URLs of them.
        rtol, atol: elements are close where |a - b| <= atol + rtol * |b|.  With either, dtypes may differ; with neither,
            every bit counts.

    Raises:
        CheckpointError: one is not complete or cannot be read.
    """
    with reading(a) as one, reading(b) as other:
        return _compare((one, other), rtol, atol)


def _compare(folders: tuple[Folder, Folder], rtol: float, atol: float) -> Comparison:
    manifests = read_manifest(folders[0]), read_manifest(folders[1])
    states = read_trainer_state(folders[0]), read_trainer_state(folders[1])
    found = Comparison()
    stored = [
        {kind: StoredTensors(folder, kind) for kind in kinds_of(manifest)}
        for folder, manifest in zip(folders, manifests, strict=True)
    ]
    found.only += _only("kind", set(stored[0]), set(stored[1]))
    for kind, of_a in stored[0].items():
        if kind in stored[1]:
            _compare_tensors(kind, of_a, stored[1][kind], (rtol, atol), found)
    found.tensors.sort(key=lambda one: (one.is_close, -one.relative, -one.max_abs, one.kind, one.name))
    _compare_states(*states, found)
    others = [
        {name: record for name, record in manifest.items() if name not in ours}
        for manifest, ours in zip(manifests, map(_files_of, stored), strict=True)
    ]
    told = found.only if states[0].script or states[1].script else found.notes
    told += _only("file", set(others[0]), set(others[1]))
    both = sorted(set(others[0]) & set(others[1]))
    told += [f"file {name} differs" for name in both if others[0][name] != others[1][name]]
    return found


def _files_of(kinds: Mapping[str, StoredTensors]) -> set[str]:
    """Files whose contents are compared as tensors or fields."""
    return {TRAINER_STATE, *map(index_name, kinds), *(file for one in kinds.values() for file in one.files.values())}


def _compare_tensors(
    kind: str, a: StoredTensors, b: StoredTensors, tolerances: tuple[float, float], found: Comparison
) -> None:
    found.only += _only(kind, set(a.files), set(b.files))
    for name in sorted(set(a.files) & set(b.files)):
        difference = _difference(kind, name, a, b, *tolerances)
        found.compared += 1
        found.tensors += [] if difference is None else [difference]


def _only(what: str, a: set[str], b: set[str]) -> Iterator[str]:
    yield from (f"{what} {name} is only in A" for name in sorted(a - b))
    yield from (f"{what} {name} is only in B" for name in sorted(b - a))


def _compare_states(a: TrainerState, b: TrainerState, found: Comparison) -> None:
    flat = _flat(asdict(a)), _flat(asdict(b))
    for key in sorted(flat[0].keys() | flat[1].keys()):
        values = flat[0].get(key), flat[1].get(key)
        if values[0] == values[1]:
            continue
        if key.split(".")[0] not in _FOR_READING_ONLY:
            found.fields.append((key, *values))
        elif key in flat[0] and key in flat[1]:
            found.notes.append(f"{key}: {values[0]!r}, {values[1]!r}")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model.seq_len": 16} for {"model": {"seq_len": 16}}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _difference(
    kind: str, name: str, a: StoredTensors, b: StoredTensors, rtol: float, atol: float
) -> TensorDifference | None:
    """What two tensors of one name do not have in common; None where that is nothing."""
    shapes, dtypes = (a.shape(name), b.shape(name)), (a.dtype(name), b.dtype(name))
    kept = [f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in zip(shapes, dtypes, strict=True)]
    shown = kept[0] if kept[0] == kept[1] else " and ".join(kept)
    if shapes[0] != shapes[1]:
        return TensorDifference(kind, name, shown, 0, 0, inf, inf, False)
    differing, largest, scale, is_close = 0, 0.0, 0.0, True
    for one, other in _parts(name, a, b):
        scale = max(scale, float(other.abs().max().nan_to_num(inf)))
        apart = one.view(torch.int32) != other.view(torch.int32)
        count = int(apart.sum())
        if not count:
            continue
        differing += count
        x, y = one[apart].double(), other[apart].double()
        gap = (x - y).abs().nan_to_num(nan=inf)
        largest = max(largest, float(gap.max()))
        is_close &= bool((gap <= atol + rtol * y.abs()).all())
    has_tolerance = rtol > 0 or atol > 0
    if dtypes[0] == dtypes[1] and not differing:
        return None
    is_close = has_tolerance and is_close
    relative = largest / scale if largest and scale and isfinite(scale) else (inf if largest else 0.0)
    return TensorDifference(kind, name, shown, prod(shapes[0]), differing, largest, relative, is_close)


def _parts(name: str, a: StoredTensors, b: StoredTensors) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors, some rows at a time, flat and in fp32, which holds every stored number exactly."""
    shape = a.shape(name)
    if not shape or not prod(shape):
        if not shape:
            yield a.whole(name).float().view(1), b.whole(name).float().view(1)
        return
    rows = max(1, CHUNK_ELEMENTS // prod(shape[1:]))
    for first in range(0, shape[0], rows):
        last = min(first + rows, shape[0])
        yield tuple(one.rows(name, first, last).float().view(-1) for one in (a, b))  # type: ignore[misc]
