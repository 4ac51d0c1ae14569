"""A step directory of ours from the tensors of another framework: any run reads it, with moments where there are any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from megazero.checkpoint.folder import FileRecord, Folder
from megazero.checkpoint.foreign.source import ForeignTensor
from megazero.checkpoint.index import (
    HF_CONFIG,
    TRAINER_STATE,
    CheckpointError,
    TrainerState,
    index_name,
    to_json,
    write_manifest,
)
from megazero.checkpoint.shards import CHUNK_ELEMENTS, Layout, write_shards
from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.zero.bucket import DTYPE_NAMES, DTYPES
from megazero.zero.state import MODEL

MODEL_TOML = "model.toml"


@dataclass(frozen=True)
class Imported:
    """What an import has made.

    Args:
        model: resolved.
        toml: the text of `model.toml`, sections of a run file that goes on from it.
        dtype: of the weights.
        tensors: how many, of all kinds.
        bytes: of all tensors.
        trainer: where the run goes on.
        told: lines for the user.
    """

    model: ModelConfig
    toml: str
    dtype: str
    tensors: int
    bytes: int
    trainer: TrainerState
    told: tuple[str, ...] = ()


def write_step(
    target: Folder,
    model: ModelConfig,
    kinds: Mapping[str, Mapping[str, ForeignTensor]],
    trainer: TrainerState,
    toml: str,
    files: Mapping[str, bytes],
    *,
    dtype: str | None,
    max_shard_bytes: int,
    config: Mapping[str, object] | None = None,
    told: tuple[str, ...] = (),
) -> Imported:
    """Fill an empty folder; the manifest comes last.

    Args:
        model: resolved.
        kinds: tensors by kind and by our name; weights are stored in `dtype`, everything else in fp32.
        files: further small files by name.
        dtype: "fp32", "bf16" or "fp16"; None for that of the weights, the widest where they differ.
        config: further keys of config.json.

    Raises: as `write_shards`.
    """
    kept = DTYPES[dtype] if dtype else reduce(torch.promote_types, [one.dtype for one in kinds[MODEL].values()])
    records: dict[str, FileRecord] = {}
    small, tensor_bytes = dict(files), 0
    for kind, tensors in kinds.items():
        stored = kept if kind == MODEL else torch.float32
        layout: Layout = {name: (stored, one.shape) for name, one in tensors.items()}
        described = {"kind": kind, "step": str(trainer.step)}
        read = partial(_read, tensors, kind)
        written = write_shards(target, layout, read, max_shard_bytes, kind=kind, metadata=described)
        records |= written.records
        small[index_name(kind)] = written.index
        tensor_bytes += written.tensor_bytes
    small |= {
        HF_CONFIG: to_json(FAMILIES[model.family].hugging_face_config(model, DTYPE_NAMES[kept]) | dict(config or {})),
        TRAINER_STATE: to_json(asdict(trainer)),
        MODEL_TOML: toml.encode(),
    }
    write_manifest(target, records | {name: target.write(name, data) for name, data in small.items()})
    count = sum(map(len, kinds.values()))
    return Imported(model, toml, DTYPE_NAMES[kept], count, tensor_bytes, trainer, told)


def _read(tensors: Mapping[str, ForeignTensor], kind: str, name: str) -> Tensor:
    tensor = tensors[name].read()
    if kind == "exp_avg_sq" and any(bool((part < 0).any()) for part in tensor.reshape(-1).split(CHUNK_ELEMENTS)):
        raise CheckpointError(f"{name}: exp_avg_sq, a mean of squares, has negative values; the checkpoint is damaged")
    return tensor
