"""`megazero checkpoint average`: the mean of the weights of several steps, as a step.  One tensor is in memory at a time."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from megazero.cli._common import load_extensions
from megazero.cli.checkpoint import ExtensionOption, user_errors
from megazero.settings import toml_value

if TYPE_CHECKING:
    from torch import Tensor

    from megazero.checkpoint.tensor_file import StoredTensor


def average(
    directories: Annotated[list[str], typer.Argument(metavar="STEPS... OUT", help="Step directories; the new one.")],
    extension: ExtensionOption = None,
) -> None:
    """Write the mean of the weights of some steps as a new step, to evaluate, to export, or to start from."""
    import torch

    from megazero.checkpoint.hugging_face.config import logical_shapes
    from megazero.checkpoint.hugging_face.exporter import intact_model
    from megazero.checkpoint.hugging_face.tokenizer import tokenizer_files
    from megazero.checkpoint.index import CheckpointError, kinds_of, read_manifest
    from megazero.checkpoint.retention import reading
    from megazero.checkpoint.shards import new_folder
    from megazero.checkpoint.tensor_file import StoredTensors
    from megazero.formats.foreign import LazyTensor
    from megazero.formats.hugging_face import write_step
    from megazero.zero.state import MASTER, MODEL

    *steps, out = directories
    with user_errors(), ExitStack() as reads:
        if not steps:
            raise ValueError(f"name the steps to average before the new directory: average STEPS... {out}")
        load_extensions(extension)
        target = reads.enter_context(new_folder(out))
        folders = [reads.enter_context(reading(step)) for step in steps]
        found = [intact_model(folder) for folder in folders]
        trainer, model = found[-1]
        shapes = logical_shapes(model)
        stored: list[dict[str, StoredTensor]] = []
        for folder, (_, other) in zip(folders, found, strict=True):
            if logical_shapes(other) != shapes:
                raise CheckpointError(f"{folder} holds another model than {folders[-1]}: their tensors differ")
            kinds = [StoredTensors(folder, kind) for kind in (MODEL, MASTER) if kind in kinds_of(read_manifest(folder))]
            stored.append({name: tensors[name] for tensors in kinds for name in tensors.files})  # masters over weights
        dtype = StoredTensors(folders[-1], MODEL)[next(iter(shapes))].dtype
        means = {name: LazyTensor(shape, dtype, partial(_mean, stored, name)) for name, shape in shapes.items()}
        made = write_step(
            target,
            model,
            {MODEL: means} | ({} if dtype == torch.float32 else {MASTER: means}),
            replace(trainer, optimizer_steps=0, optimizer_scalars={}, loss_scaler=None, val_loss=None, shape={}),
            f"# The mean of {', '.join(steps)}.\n[checkpoint]\nresume = {toml_value(out)}\n",
            tokenizer_files(folders[-1]),
            dtype=None,
            max_shard_bytes=5 * 10**9,
        )
    print(f"{out}: the mean of {len(steps)} steps, weights in {made.dtype}, {made.bytes / 2**20:,.1f} MiB")


def _mean(stored: list[dict[str, StoredTensor]], name: str) -> Tensor:
    total = stored[0][name].whole().float().clone()
    for others in stored[1:]:
        total += others[name].whole()
    return total / len(stored)
