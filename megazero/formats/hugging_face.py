"""Imports a transformers model directory as a checkpoint that a run can resume.

    config.json            ->  [model] section, or an error with the reasons
    model*.safetensors     ->  step 0 of state kind `model`, under the names that transformers writes today
    pytorch_model*.bin
    tokenizer.json, ...    ->  the same files
                           +   trainer_state.json, model.toml, manifest.json (last)

One tensor is read, converted and written at a time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megazero.checkpoint import index
from megazero.checkpoint.folder import FileRecord, Folder, Location
from megazero.checkpoint.hugging_face.config import buffers, family_of, format_of, logical_shapes
from megazero.checkpoint.hugging_face.tokenizer import TOKEN_IDS, TOKENIZER, tokenizer_files
from megazero.checkpoint.index import HF_CONFIG, CheckpointError, TrainerState
from megazero.checkpoint.shards import CHUNK_ELEMENTS, Layout, new_folder, write_shards
from megazero.config import ConfigError, RunConfig, resolve
from megazero.data.sealed import parse_json
from megazero.formats.foreign import LazyTensor, foreign_errors, match_state
from megazero.formats.tables import names_of_transformers
from megazero.formats.weights import local_source, open_weights
from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.settings import toml_value
from megazero.zero.sharding import DTYPE_NAMES, DTYPES
from megazero.zero.state import MODEL

MODEL_TOML = "model.toml"


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Args:
        model: the resolved model.
        toml: the text of `model.toml`: sections of a run file that continues from the checkpoint.
        dtype: dtype of the weights.
        tensors: number of tensors, of all kinds.
        bytes: bytes of all tensors.
        trainer: the state from which the run continues.
        notes: lines for the user.
    """

    model: ModelConfig
    toml: str
    dtype: str
    tensors: int
    bytes: int
    trainer: TrainerState
    notes: tuple[str, ...] = ()


def import_model(
    source: str | Path,
    out: Location,
    *,
    dtype: str | None = None,
    seq_len: int | None = None,
    max_shard_bytes: int = 5 * 10**9,
    ignore: Sequence[str] = (),
) -> Imported:
    """Import a transformers model as a checkpoint.

    Args:
        source: a directory with config.json and the weights.
        out: a new or empty directory.
        dtype: dtype for the weights: "fp32", "bf16" or "fp16"; None keeps theirs, the widest if they differ.
        seq_len: tokens in a sample, for rotary positions; None for the number in the model's configuration.
        max_shard_bytes: most bytes of tensors in one file.
        ignore: patterns of names of tensors that may be left out.

    Raises:
        CheckpointError: our models do not compute what this model does; a tensor is missing, unknown or of another shape;
            or files cannot be read or written.  Nothing is left in `out`.
    """
    folder = local_source(source)
    if index.is_complete(folder):
        raise CheckpointError(f"{folder} is a checkpoint of megazero: set checkpoint.resume to it")
    config = _read_config(folder)
    with foreign_errors(f"{folder}/{HF_CONFIG}, as a model of ours,"):
        model = model_section(config, seq_len)
        form = format_of(model.family)
        notes = form.dropped_settings(config, seq_len)
    tokenizer = tokenizer_files(folder)
    found = open_weights(folder)
    if model.num_layers > (count := len(found.tensors[MODEL])):
        raise CheckpointError(f"{folder}/{HF_CONFIG} is of {model.num_layers} layers, there are {count} tensors")
    with foreign_errors(f"{folder}/{HF_CONFIG}"):
        shapes = logical_shapes(model)
    tables = names_of_transformers(form)
    states, more = match_state(found, model, shapes, tables, model_source=f"its {HF_CONFIG}", ignore=ignore)
    notes = (*notes, *more)
    # before the first step, on data that is not chosen yet
    trainer = TrainerState(0, 0, 0, 0, "", set_keys(model), {}, {}, index.versions())
    ids = {key: config[key] for key in TOKEN_IDS if key in config}
    with new_folder(out) as target:
        toml = _toml(model, folder, target, notes, has_tokenizer=TOKENIZER in tokenizer)
        sizes: dict[str, Any] = {"dtype": dtype, "max_shard_bytes": max_shard_bytes}
        return write_step(target, model, states, trainer, toml, tokenizer, config=ids, notes=notes, **sizes)


def model_section(config: Mapping[str, Any], seq_len: int | None = None) -> ModelConfig:
    """Convert a `config.json` to a resolved [model] section.

    Args:
        seq_len: tokens in a sample; None for the number of positions in the `config.json`.

    Raises:
        ValueError: our models do not compute what this model does; the message lists all reasons.
    """
    family = family_of(config.get("model_type"))
    section = format_of(family).section(family, config, seq_len)
    try:
        return resolve(RunConfig.model_validate({"model": section}), 1).config.model
    except ConfigError as error:
        raise ValueError("; ".join(map(str, error.problems))) from error
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, key['loc']))}={key['input']!r}: {key['msg']}" for key in error.errors()]
        raise ValueError("; ".join(wrong)) from error


def _read_config(folder: Folder) -> dict[str, Any]:
    if not folder.has(HF_CONFIG):
        raise CheckpointError(f"{folder} is not a transformers model directory: it has no {HF_CONFIG}")
    with foreign_errors(f"{folder}/{HF_CONFIG}"):
        return dict(parse_json(folder.read(HF_CONFIG)))


def _toml(model: ModelConfig, source: Folder, out: Folder, notes: Iterable[str], *, has_tokenizer: bool) -> str:
    """Write the sections of a run file that resumes an imported model."""
    lines = [f"# {line}" for line in (f"The model of {source}, imported into {out}.", *notes)]
    lines += ["[model]", *(f"{key} = {toml_value(value)}" for key, value in set_keys(model).items()), ""]
    if has_tokenizer:
        lines += ["[data]", f"tokenizer = {toml_value(f'{out}/{TOKENIZER}')}"]
    else:
        lines.append(f"# There is no {TOKENIZER} in {source}: data.tokenizer must name the model's own.")
    return "\n".join([*lines, "", "[checkpoint]", f"resume = {toml_value(str(out))}"]) + "\n"


def set_keys(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of a [model] section that are set."""
    return {key: value for key, value in model.model_dump().items() if value is not None}


def write_step(
    target: Folder,
    model: ModelConfig,
    states: Mapping[str, Mapping[str, LazyTensor]],
    trainer: TrainerState,
    toml: str,
    files: Mapping[str, bytes],
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    config: Mapping[str, object] | None = None,
    notes: tuple[str, ...] = (),
) -> Imported:
    """Write a step that any run can resume into an empty folder.  The manifest is written last.

    Args:
        target: the folder.
        model: the resolved model.
        states: tensors by state kind and by our name.  Weights are stored in `dtype`, buffers and everything else in fp32.
        trainer: the state from which a run continues.
        toml: the text of `model.toml`.
        files: further small files by name.
        dtype: "fp32", "bf16" or "fp16"; None keeps that of the weights, the widest if they differ.
        max_shard_bytes: most bytes of tensors in one file.
        config: further keys of config.json.
        notes: lines for the user.

    Raises: as `write_shards`.
    """
    in_fp32 = buffers(model)
    found = [tensor.dtype for name, tensor in states[MODEL].items() if name not in in_fp32]
    weights_dtype = DTYPES[dtype] if dtype else reduce(torch.promote_types, found)
    records: dict[str, FileRecord] = {}
    small, tensor_bytes = dict(files), 0
    for state_kind, tensors in states.items():
        stored = weights_dtype if state_kind == MODEL else torch.float32
        layout: Layout = {name: (stored, tensor.shape) for name, tensor in tensors.items()}
        layout |= {name: (torch.float32, layout[name][1]) for name in in_fp32 & layout.keys()}
        metadata = {"kind": state_kind, "step": str(trainer.step)}
        read = partial(_read, tensors, state_kind)
        written = write_shards(target, layout, read, max_shard_bytes, state_kind=state_kind, metadata=metadata)
        records |= written.records
        small[index.index_name(state_kind)] = written.index
        tensor_bytes += written.tensor_bytes
    dtype_name = DTYPE_NAMES[weights_dtype]
    small |= {
        HF_CONFIG: index.to_json(FAMILIES[model.family].hugging_face_config(model, dtype_name) | dict(config or {})),
        index.TRAINER_STATE: index.to_json(asdict(trainer)),
        MODEL_TOML: toml.encode(),
    }
    index.write_manifest(target, records | {name: target.write(name, data) for name, data in small.items()})
    count = sum(map(len, states.values()))
    return Imported(model, toml, dtype_name, count, tensor_bytes, trainer, notes)


def _read(tensors: Mapping[str, LazyTensor], kind: str, name: str) -> Tensor:
    tensor = tensors[name].read()
    chunks = tensor.reshape(-1).split(CHUNK_ELEMENTS)
    if kind == "exp_avg_sq" and any(bool((chunk < 0).any()) for chunk in chunks):
        raise CheckpointError(f"{name}: exp_avg_sq, a mean of squares, has negative values; the checkpoint is damaged")
    return tensor
