"""A checkpoint becomes a plain transformers model directory: weights alone, in the dtype and file size of choice.

    step-00000010/                          out/
      model-..., master-...      ->           model.safetensors, or shards and their index
      data.tokenizer of the run  ->           tokenizer.json, tokenizer_config.json
                                              generation_config.json
      trainer_state.json         ->           config.json (last: without it nothing loads the directory)

One tensor is read, converted and written at a time.
"""

import json
from dataclasses import dataclass

import torch
from pydantic import ValidationError
from torch import Tensor

from megazero.checkpoint import index
from megazero.checkpoint.folder import Folder, Location
from megazero.checkpoint.hugging_face.config import buffers, folded, format_of, logical_shapes
from megazero.checkpoint.hugging_face.tokenizer import GENERATION, token_ids, tokenizer_of
from megazero.checkpoint.load import reading
from megazero.checkpoint.shards import Layout, new_folder, write_shards
from megazero.checkpoint.tensor_file import StoredTensors
from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.zero.sharding import DTYPE_NAMES, DTYPES
from megazero.zero.state import AVERAGE, MASTER, MODEL

_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Exported:
    """What an export has made: files of weights, bytes of tensors, and what came with them."""

    dtype: str
    files: int
    bytes: int
    about: str


def export_model(
    path: Location, out: Location, *, dtype: str | None = None, max_shard_bytes: int = 5 * 10**9, averaged: bool = False
) -> Exported:
    """Write the model of a checkpoint for transformers.

    Args:
        path: the step directory.
        out: the directory to write, new or empty.
        dtype: "fp32", "bf16" or "fp16"; None: the dtype of the run's weights.  Weights of another dtype are made from the
            fp32 masters, if there are any.
        max_shard_bytes: most bytes of tensors in one file.
        averaged: the averages of the weights, where the run kept them.

    Raises:
        CheckpointError: the checkpoint is damaged or is not of our models, a value does not fit the dtype, or the files
            cannot be read or written; nothing is left in `out`.
    """
    with reading(path) as folder:
        return _export(folder, out, dtype, max_shard_bytes, averaged)


def _export(folder: Folder, out: Location, dtype: str | None, max_shard_bytes: int, averaged: bool) -> Exported:
    trainer, model = intact_model(folder)
    model, factors = folded(model)
    if options := format_of(model.family).not_computed(model):
        raise index.CheckpointError(
            f"{folder} was trained with {' and '.join(options)}, which transformers does not compute in a {model.family}: "
            "it cannot be exported, and goes on in megazero"
        )
    state_kinds = index.state_kinds_of(index.read_manifest(folder))
    if averaged and AVERAGE not in state_kinds:
        raise index.CheckpointError(f"{folder} holds no averages of the weights: [average] of the run was none")
    weights = StoredTensors(folder, MODEL)
    shapes, in_fp32 = logical_shapes(model), buffers(model)
    stored = weights[next(iter(shapes.keys() - in_fp32))].dtype
    wanted = DTYPES[dtype] if dtype else stored
    wide = AVERAGE if averaged else MASTER  # fp32
    masters = StoredTensors(folder, wide) if averaged or (wanted != stored and MASTER in state_kinds) else None
    tensors: Layout = {name: (torch.float32 if name in in_fp32 else wanted, shape) for name, shape in shapes.items()}

    def read(name: str) -> Tensor:
        source = masters if masters is not None and name in masters.files else weights
        values = source[name].whole()
        return values * factors[name] if name in factors else values

    with new_folder(out) as target:
        written = write_shards(target, tensors, read, max_shard_bytes, single=_SINGLE)
        files, about = tokenizer_of(folder, trainer)
        ids = token_ids(folder, trainer, files, model.vocab_size)
        files |= {GENERATION: index.to_json(json.loads(files.get(GENERATION, b"{}")) | ids)} if ids else {}
        if set(written.records) != {_SINGLE}:
            files[index.index_name(MODEL)] = written.index
        files[index.HF_CONFIG] = index.to_json(format_of(model.family).config(model, DTYPE_NAMES[wanted]) | ids)
        for name, data in files.items():
            target.write(name, data)
    return Exported(DTYPE_NAMES[wanted], len(written.records), written.tensor_bytes, about)


def intact_model(folder: Folder) -> tuple[index.TrainerState, ModelConfig]:
    """Return the trainer state and the resolved model of a checkpoint to export.

    Raises: CheckpointError: the checkpoint is damaged, or its model is not one of this package.
    """
    if damage := index.find_damage(folder):
        raise index.CheckpointError("\n".join(damage) + f"\n{folder} is damaged and was not exported")
    trainer = index.read_trainer_state(folder)
    model, weights = _model_of(folder, trainer), StoredTensors(folder, MODEL)
    if logical_shapes(model) != {name: weights[name].shape for name in weights.files}:
        raise index.CheckpointError(
            f"{folder} does not hold the tensors of the model that its {index.TRAINER_STATE} describes"
        )
    return trainer, model


def _model_of(folder: Folder, trainer: index.TrainerState) -> ModelConfig:
    if "module" in trainer.model:
        raise index.CheckpointError(
            f"{folder} holds a script's own module, {trainer.model['module']}, which transformers does not "
            "have: its tensors are named as the module names them. Load them with the script"
        )
    if (family := trainer.model.get("family")) not in FAMILIES:
        script = next(iter(trainer.config.get("launch", {}).get("extensions", [])), "SCRIPT.py")
        raise index.CheckpointError(
            f"{folder} is of the family {family!r} of a script: name it with --extension {script}"
        )
    try:
        return ModelConfig.model_validate(trainer.model)
    except ValidationError as error:
        raise index.CheckpointError(
            f"{folder} has a [model] section that this release cannot read ({error})"
        ) from error
