"""A transformers model directory becomes a checkpoint that a run can resume.

    config.json            ->  [model] section, or a refusal that says why
    model*.safetensors     ->  step 0 of kind `model`, under the names that transformers writes today
    pytorch_model*.bin
    tokenizer.json, ...    ->  the same files
                           +   trainer_state.json, model.toml, manifest.json (last)

One tensor is read, converted and written at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megazero.checkpoint.folder import Folder, Location
from megazero.checkpoint.foreign.source import local_source, match, tables_of_transformers
from megazero.checkpoint.foreign.writer import Imported, write_step
from megazero.checkpoint.hugging_face.config import format_of, logical_shapes, model_section
from megazero.checkpoint.hugging_face.tokenizer import TOKEN_IDS, TOKENIZER, tokenizer_files
from megazero.checkpoint.hugging_face.weights import open_weights
from megazero.checkpoint.index import HF_CONFIG, CheckpointError, TrainerState, foreign_errors, is_complete, versions
from megazero.checkpoint.shards import new_folder
from megazero.data.sealed import parse_json
from megazero.models.config import ModelConfig
from megazero.settings import toml_value
from megazero.zero.state import MODEL


def import_model(
    source: str | Path,
    out: Location,
    *,
    dtype: str | None = None,
    seq_len: int | None = None,
    max_shard_bytes: int = 5 * 10**9,
    ignore: Sequence[str] = (),
) -> Imported:
    """Make a checkpoint of a transformers model.

    Args:
        source: a directory with config.json and the weights.
        out: new or empty.
        dtype: "fp32", "bf16" or "fp16", to store the weights in; as they are when None, the widest where they differ.
        seq_len: tokens in a sample, where positions are rotary; as many as the model's configuration names when None.
        max_shard_bytes: of tensors in one file.
        ignore: patterns of names of tensors that may be left out.

    Raises:
        CheckpointError: our models do not compute what this one does, a tensor is missing, unknown or of another shape,
            or the files cannot be read or written; nothing is left in `out`.
    """
    folder = local_source(source)
    if is_complete(folder):
        raise CheckpointError(f"{folder} is a checkpoint of megazero: set checkpoint.resume to it")
    config = _read_config(folder)
    with foreign_errors(f"{folder}/{HF_CONFIG}"):
        try:
            model = model_section(config, seq_len)
        except ValueError as error:
            raise CheckpointError(f"{folder}/{HF_CONFIG} is not a model that can be imported: {error}") from error
        told = format_of(model.family).told(config, seq_len)
    tokenizer = tokenizer_files(folder)
    found = open_weights(folder)
    if model.num_layers > (count := len(found.tensors[MODEL])):
        raise CheckpointError(f"{folder}/{HF_CONFIG} is of {model.num_layers} layers, there are {count} tensors")
    with foreign_errors(f"{folder}/{HF_CONFIG}"):
        shapes = logical_shapes(model)
    kinds, notes = match(
        found, model, shapes, tables_of_transformers(model.family), described_by=f"its {HF_CONFIG}", ignore=ignore
    )
    # before the first step, on data that is not chosen yet
    told = (*told, *notes)
    trainer = TrainerState(0, 0, 0, 0, "", set_keys(model), {}, {}, versions())
    ids = {key: config[key] for key in TOKEN_IDS if key in config}
    with new_folder(out) as target:
        toml = _toml(model, folder, target, told, has_tokenizer=TOKENIZER in tokenizer)
        sizes: dict[str, Any] = {"dtype": dtype, "max_shard_bytes": max_shard_bytes}
        return write_step(target, model, kinds, trainer, toml, tokenizer, config=ids, told=told, **sizes)


def _read_config(folder: Folder) -> dict[str, Any]:
    try:
        found = parse_json(folder.read(HF_CONFIG))
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
    lines += ["[model]", *(f"{key} = {toml_value(value)}" for key, value in set_keys(model).items()), ""]
    if has_tokenizer:
        lines += ["[data]", f"tokenizer = {toml_value(f'{out}/{TOKENIZER}')}"]
    else:
        lines.append(f"# There is no {TOKENIZER} in {source}: data.tokenizer must name the model's own.")
    return "\n".join([*lines, "", "[checkpoint]", f"resume = {toml_value(str(out))}"]) + "\n"


def set_keys(model: ModelConfig) -> dict[str, Any]:
    """The keys of a [model] section that are set."""
    return {key: value for key, value in model.model_dump().items() if value is not None}
