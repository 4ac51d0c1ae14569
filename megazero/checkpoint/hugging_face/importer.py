"""A transformers model directory becomes a checkpoint that a run can resume.

    config.json            ->  [model] section, or a refusal that says why
    model*.safetensors     ->  step 0 of kind `model`, under the names that transformers writes today
    pytorch_model*.bin
    tokenizer.json, ...    ->  the same files
                           +   trainer_state.json, model.toml, manifest.json (last)

One tensor is read, converted and written at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.folder import Folder, LocalFolder, Location
from megazero.checkpoint.hugging_face.config import format_of, logical_shapes, model_section
from megazero.checkpoint.hugging_face.tokenizer import TOKEN_IDS, TOKENIZER, tokenizer_files
from megazero.checkpoint.hugging_face.weights import StoredTensor, open_weights
from megazero.checkpoint.index import (
    HF_CONFIG,
    TRAINER_STATE,
    CheckpointError,
    TrainerState,
    index_name,
    to_json,
    versions,
    write_manifest,
)
from megazero.checkpoint.shards import CHUNK_ELEMENTS, DTYPE_NAMES, DTYPES, Layout, new_folder, write_shards
from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.settings import toml_value

MODEL_TOML = "model.toml"


@dataclass(frozen=True)
class Imported:
    """What an import has made: the resolved model, the text of `model.toml`, and the dtype, number and bytes of tensors.

    `told` are lines on what the model's configuration says and ours does not keep; `model.toml` begins with them.
    """

    model: ModelConfig
    toml: str
    dtype: str
    tensors: int
    bytes: int
    told: tuple[str, ...]


def import_model(
    source: str | Path,
    out: Location,
    *,
    dtype: str | None = None,
    seq_len: int | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Imported:
    """Make a checkpoint of a transformers model.

    Args:
        source: a directory with config.json and the weights.
        out: new or empty.
        dtype: "fp32", "bf16" or "fp16", to store the weights in; as they are when None, the widest where they differ.
        seq_len: tokens in a sample, where positions are rotary; as many as the model's configuration names when None.
        max_shard_bytes: of tensors in one file.

    Raises:
        CheckpointError: our models do not compute what this one does, a tensor is missing, unknown or of another shape,
            or the files cannot be read or written; nothing is left in `out`.
    """
    folder = LocalFolder(Path(source))
    config = _read_config(folder)
    try:
        model = model_section(config, seq_len)
    except ValueError as error:
        raise CheckpointError(f"{folder}/{HF_CONFIG} is not a model that can be imported: {error}") from error
    told = format_of(model.family).told(config, seq_len)
    tokenizer = tokenizer_files(folder)
    weights = _match(folder, open_weights(folder), model)
    kept = DTYPES[dtype] if dtype else reduce(torch.promote_types, [one.dtype for one in weights.values()])
    tensors: Layout = {name: (kept, one.shape) for name, one in weights.items()}

    def read(name: str) -> Tensor:
        return weights[name].read()

    with new_folder(out) as target:
        written = write_shards(target, tensors, read, max_shard_bytes, metadata={"kind": "model", "step": "0"})
        ids = {key: config[key] for key in TOKEN_IDS if key in config}
        toml = _toml(model, folder, target, told, has_tokenizer=TOKENIZER in tokenizer)
        files = tokenizer | {
            index_name("model"): written.index,
            HF_CONFIG: to_json(FAMILIES[model.family].hugging_face_config(model, DTYPE_NAMES[kept]) | ids),
            # before the first step, on data that is not chosen yet
            TRAINER_STATE: to_json(asdict(TrainerState(0, 0, 0, 0, "", _set_keys(model), {}, {}, versions()))),
            MODEL_TOML: toml.encode(),
        }
        records = {name: target.write(name, data) for name, data in files.items()}
        write_manifest(target, written.records | records)
    return Imported(model, toml, DTYPE_NAMES[kept], len(tensors), written.tensor_bytes, told)


def _read_config(folder: Folder) -> dict[str, Any]:
    try:
        found = json.loads(folder.read(HF_CONFIG))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a transformers model directory: it has no {HF_CONFIG}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}/{HF_CONFIG} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder}/{HF_CONFIG} must hold an object, it holds a {type(found).__name__}")
    return found


def _toml(model: ModelConfig, source: Folder, out: Folder, told: Iterable[str], *, has_tokenizer: bool) -> str:
    """The sections of a run file that resumes an imported model."""
    lines = [f"# {line}" for line in (f"The model of {source}, imported into {out}.", *told)]
    lines += ["[model]", *(f"{key} = {toml_value(value)}" for key, value in _set_keys(model).items()), ""]
    if has_tokenizer:
        lines += ["[data]", f"tokenizer = {toml_value(f'{out}/{TOKENIZER}')}"]
    else:
        lines.append(f"# There is no {TOKENIZER} in {source}: data.tokenizer must name the model's own.")
    return "\n".join([*lines, "", "[checkpoint]", f"resume = {toml_value(str(out))}"]) + "\n"


def _set_keys(model: ModelConfig) -> dict[str, Any]:
    """The keys of a [model] section that are set."""
    return {key: value for key, value in model.model_dump().items() if value is not None}


def _match(folder: Folder, stored: dict[str, StoredTensor], model: ModelConfig) -> dict[str, StoredTensor]:
    """The stored form of each logical tensor.  Raises: CheckpointError naming what is missing, unknown or misshapen."""
    wanted, form = logical_shapes(model), format_of(model.family)
    names: dict[str, str] = {}
    problems = []
    for name in stored:
        ours = name if name in wanted else form.prefix + name
        if ours in names:
            problems.append(f"{names[ours]} and {name} are the same tensor")
        elif ours in wanted:
            names[ours] = name
        elif not (form.buffers.fullmatch(name) or (name == form.head and model.tie_embeddings)):
            problems.append(f"{name} belongs to no parameter of a {model.family} of this configuration")
    problems += [f"{name} is missing" for name in wanted if name not in names]
    for ours, theirs in names.items():
        shape, dtype = stored[theirs].shape, stored[theirs].dtype
        if shape != wanted[ours]:
            problems.append(f"{theirs} has shape {list(shape)}, the configuration makes it {list(wanted[ours])}")
        elif dtype not in DTYPE_NAMES:
            problems.append(f"{theirs} is of {dtype}; float32, bfloat16 and float16 are supported")
    if not problems and model.tie_embeddings and form.head in stored:
        embedding = names[form.embedding]
        if not _are_equal(stored[form.head].read(), stored[embedding].read()):
            problems.append(
                f"{form.head} differs from {embedding}, though tie_word_embeddings is true: tied weights are one tensor"
            )
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"the weights in {folder} are not those of its {HF_CONFIG}: {shown}")
    return {name: stored[names[name]] for name in wanted}


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    parts = (tensor.reshape(-1).split(CHUNK_ELEMENTS) for tensor in (one, other))
    return all(torch.equal(a, b.to(a.dtype)) for a, b in zip(*parts, strict=True))
