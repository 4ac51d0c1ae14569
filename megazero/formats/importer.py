"""Imports a checkpoint of another framework, with its moments, as a step from which a run can continue.

    source/.metadata + run.toml [model]   ->   step: weights, moments, masters; trainer_state.json; manifest.json (last)

The format is recognised by the files in the folder.  A run file gives the model, since these checkpoints do not describe it.
One tensor is read, rearranged and written at a time; no pickle is executed.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.checkpoint.folder import LocalFolder, Location
from megazero.checkpoint.hugging_face.config import logical_shapes
from megazero.checkpoint.index import HF_CONFIG, CheckpointError, TrainerState, versions
from megazero.checkpoint.shards import new_folder
from megazero.config import RunConfig
from megazero.config.load import read_run_file
from megazero.engine.outline import optimizer_of
from megazero.formats.dcp import dcp_folders, read_dcp
from megazero.formats.deepspeed import find_deepspeed, read_deepspeed
from megazero.formats.foreign import ADAM, ForeignCheckpoint, foreign_errors, match_state
from megazero.formats.hugging_face import Imported, import_model, set_keys, write_step
from megazero.formats.megatron import read_megatron, read_nemo
from megazero.formats.tables import tables_of
from megazero.formats.weights import has_weights, local_source, open_weights
from megazero.models.config import ModelConfig
from megazero.settings import hide_passwords, toml_value


@dataclass(frozen=True)
class Form:
    """A checkpoint format of another framework.

    Args:
        about: a description, for messages.
        recognises: folder -> a true value if it holds a checkpoint of this format.
        read: (folder, resolved model) -> the contents; None for transformers, which describes itself.
    """

    about: str
    recognises: Callable[[LocalFolder], object]
    read: Callable[[LocalFolder, ModelConfig], ForeignCheckpoint] | None


def _is_megatron(folder: LocalFolder) -> bool:
    return folder.has(".metadata") and folder.has("common.pt")


FORMS = {  # the first that recognises a folder
    "megatron": Form("Megatron-Core (torch_dist)", _is_megatron, read_megatron),
    "nemo": Form("NeMo 2", lambda folder: _is_megatron(folder.child("weights")), read_nemo),
    "dcp": Form("torch.distributed.checkpoint", dcp_folders, read_dcp),
    "deepspeed": Form("DeepSpeed", find_deepspeed, read_deepspeed),
    "hf": Form("transformers", lambda folder: folder.has(HF_CONFIG), None),
    "weights": Form("weights alone", has_weights, lambda folder, _: open_weights(folder).finished()),
}


def import_checkpoint(
    source: str | Path,
    out: Location,
    *,
    form: str | None = None,
    run_file: str | Path | None = None,
    dtype: str | None = None,
    seq_len: int | None = None,
    step: int | None = None,
    samples: int | None = None,
    ignore: Sequence[str] = (),
    max_shard_bytes: int = 5 * 10**9,
) -> Imported:
    """Import a checkpoint of another framework.

    Args:
        source: directory of the checkpoint.
        out: a new or empty directory.
        form: a name in FORMS; None to recognise the format by the files.
        run_file: the run file with the [model]; None for a transformers model, which describes itself.
        dtype: dtype for the weights: "fp32", "bf16" or "fp16"; None keeps theirs.
        seq_len: for a transformers model, see `import_model`.
        step: steps done; None for the number in the checkpoint.
        samples: samples consumed; None for the number in the checkpoint, or `step` global batches of the run file.
        ignore: patterns of names that may be left out.
        max_shard_bytes: most bytes of tensors in one file.

    Raises:
        CheckpointError: a tensor is missing or of another shape, an entry is not recognised, or files cannot be read or
            written.  Nothing is left in `out`.
        ConfigError: the run file is wrong.
    """
    folder = local_source(source)
    form = form or (_recognised(folder) if folder.path.is_dir() else "weights")
    if form not in FORMS:
        raise ValueError(f"--from {form} must be one of {', '.join(FORMS)}")
    read, sizes = FORMS[form].read, dict[str, Any](dtype=dtype, max_shard_bytes=max_shard_bytes)
    if read is None:
        given = {"--run-file": run_file, "--step": step, "--samples": samples}
        if idle := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"a transformers model begins at step 0 and describes itself; leave out {', '.join(idle)}")
        return import_model(folder.path, out, seq_len=seq_len, ignore=ignore, **sizes)
    if run_file is None:
        raise ValueError(f"a checkpoint of {FORMS[form].about} does not describe its model: give --run-file RUN.toml")
    if seq_len is not None:
        raise ValueError("--seq-len is for transformers models; the run file has it (model.seq_len)")
    config = read_run_file(run_file)
    with foreign_errors(str(folder)):
        found = read(folder, config.model)
    model_source = f"the [model] of {run_file}"
    shapes, tables = logical_shapes(config.model), tables_of(config.model.family)
    states, notes = match_state(found, config.model, shapes, tables, model_source=model_source, ignore=ignore)
    has_moments = _check_moments(found, states, config, run_file)
    trainer, more = _trainer_state(found, config, step, samples, has_moments=has_moments)
    with new_folder(out) as target:
        lines = [f"# {line}" for line in (f"Goes on from {folder}.", *notes, *more)]
        toml = "\n".join([*lines, "[checkpoint]", f"resume = {toml_value(str(target))}"]) + "\n"
        return write_step(target, config.model, states, trainer, toml, {}, notes=(*notes, *more), **sizes)


def _recognised(folder: LocalFolder) -> str:
    for name, form in FORMS.items():
        if form.recognises(folder):
            return name
    below = [name for name in folder.folders() if any(form.recognises(folder.child(name)) for form in FORMS.values())]
    if below:
        raise CheckpointError(f"{folder} holds several checkpoints; name one of them: {', '.join(below[-3:])}")
    forms = ", ".join(f"{name} ({form.about})" for name, form in FORMS.items())
    raise CheckpointError(f"{folder} is no checkpoint of a known form. Known: {forms}; --from says which")


def _check_moments(found: ForeignCheckpoint, states: Iterable[str], config: RunConfig, run_file: str | Path) -> bool:
    """Return whether the checkpoint has AdamW's moments.

    Raises: CheckpointError: it has only some of them, or the run file's optimizer has other state.
    """
    moments = [state_kind for state_kind in ADAM if state_kind in set(states)]
    if not moments:
        return False
    both, some = " and ".join(ADAM), " and ".join(moments)
    if some != both or found.optimizer_steps < 1:
        counted = f"{found.optimizer_steps} updates: AdamW needs {both} and the number of its updates"
        raise CheckpointError(f"{found.path} has {some} after {counted}")
    if set(states := optimizer_of(config.optimizer).known_states) != set(ADAM):
        ours = f"optimizer.name={config.optimizer.name} of {run_file} keeps {' and '.join(states) or 'no state'}"
        raise CheckpointError(f"the checkpoint has AdamW's {both}, and {ours}: write 'adamw' or 'adam' there")
    return True


def _trainer_state(
    found: ForeignCheckpoint, config: RunConfig, step: int | None, samples: int | None, *, has_moments: bool
) -> tuple[TrainerState, list[str]]:
    """Return the trainer state to resume from, and lines for the user.  Without moments, the step is 0 unless given."""
    if step is None:
        step = found.step or 0 if has_moments else 0
    if samples is None and step == found.step:
        samples = found.samples
    if samples is None:
        batch = config.training.global_batch_size
        if step and not isinstance(batch, int):
            raise ValueError(f"{found.path} does not say how many samples its {step} steps took: give --samples N")
        samples = step * batch if isinstance(batch, int) else 0
    moments = f"AdamW's moments after {found.optimizer_steps} updates" if has_moments else "moments that begin anew"
    lines = [f"goes on after step {step} and sample {samples:,} of the run file's data, with {moments}"]
    written: dict[str, Any] = hide_passwords(json.loads(config.model_dump_json()))
    theirs = {"name": "adamw"} | dict(found.optimizer)
    written["optimizer"] |= theirs if has_moments else found.optimizer
    if has_moments and theirs["name"] != (ours := config.optimizer.name):
        decay = "adam adds the weight decay to the gradient, adamw does not"
        lines.insert(0, f"the moments are those of {theirs['name']}, the run file has {ours}: {decay}")
    updates = found.optimizer_steps if has_moments else 0
    tokens = samples * config.model.seq_len
    state = TrainerState(step, samples, tokens, updates, "", set_keys(config.model), written, {}, versions())
    return state, lines
