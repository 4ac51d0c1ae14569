"""Averages the weights of several steps into a new step.  One tensor is in memory at a time."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megazero.checkpoint.hugging_face.config import logical_shapes
from megazero.checkpoint.hugging_face.exporter import intact_model
from megazero.checkpoint.hugging_face.tokenizer import tokenizer_files
from megazero.checkpoint.index import CheckpointError, read_manifest, state_kinds_of
from megazero.checkpoint.load import reading
from megazero.checkpoint.shards import new_folder
from megazero.checkpoint.tensor_file import StoredTensor, StoredTensors
from megazero.formats.foreign import LazyTensor
from megazero.formats.hugging_face import Imported, write_step
from megazero.settings import toml_value
from megazero.zero.state import MASTER, MODEL


def average_steps(steps: Sequence[str], out: str) -> Imported:
    """Write the mean of the weights of some steps as a new step, with the trainer state of the last one.

    Args:
        steps: paths or URLs of step directories.
        out: path or URL of the new directory.

    Raises: CheckpointError: a step is damaged or of another model, or files cannot be read or written.
    """
    with ExitStack() as reads:
        target = reads.enter_context(new_folder(out))
        folders = [reads.enter_context(reading(step)) for step in steps]
        found = [intact_model(folder) for folder in folders]
        trainer, model = found[-1]
        shapes = logical_shapes(model)
        stored: list[dict[str, StoredTensor]] = []
        for folder, (_, other) in zip(folders, found, strict=True):
            if logical_shapes(other) != shapes:
                raise CheckpointError(f"{folder} holds another model than {folders[-1]}: their tensors differ")
            held = [name for name in (MODEL, MASTER) if name in state_kinds_of(read_manifest(folder))]
            opened = [StoredTensors(folder, state_kind) for state_kind in held]
            stored.append({name: tensors[name] for tensors in opened for name in tensors.files})  # masters over weights
        dtype = StoredTensors(folders[-1], MODEL)[next(iter(shapes))].dtype
        means = {name: LazyTensor(shape, dtype, partial(_mean, stored, name)) for name, shape in shapes.items()}
        both = {MODEL: means} | ({} if dtype == torch.float32 else {MASTER: means})
        anew = replace(trainer, optimizer_steps=0, optimizer_scalars={}, loss_scaler=None, val_loss=None, shape={})
        toml = f"# The mean of {', '.join(steps)}.\n[checkpoint]\nresume = {toml_value(out)}\n"
        return write_step(target, model, both, anew, toml, tokenizer_files(folders[-1]))


def _mean(stored: list[dict[str, StoredTensor]], name: str) -> Tensor:
    total = stored[0][name].whole().float().clone()
    for others in stored[1:]:
        total += others[name].whole()
    return total / len(stored)
