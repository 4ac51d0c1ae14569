"""The command `megazero checkpoint`: inspect, verify, compare and export checkpoints.  An annex adds `import`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from megazero.cli._common import ProgressBar, fail, load_extensions, print_table
from megazero.registry import added
from megazero.settings import listed

if TYPE_CHECKING:
    from megazero.checkpoint.compare import Comparison
    from megazero.checkpoint.folder import FileRecord, Folder

ROWS = 20  # differing tensors that are shown
DIFFERENT, NOT_COMPARED = 1, 2

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, bring weights in and take them out.")

Step = Annotated[str, typer.Argument(help="A step directory, or its URL.")]
ExtensionOption = Annotated[
    list[str] | None, typer.Option("--extension", help="A Python file or module that registers the model's family.")
]
DtypeOption = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; as they are by default.")]
ShardOption = Annotated[str | None, typer.Option(help="Largest file of weights, such as 500MB; 5GB by default.")]


@contextmanager
def user_errors(status: int = 1) -> Iterator[None]:
    """Within a `with` block, turn errors that a user can act on into one line and this exit code."""
    from megazero.checkpoint.index import CheckpointError

    try:
        yield
    except (CheckpointError, ValueError, OSError, ImportError) as error:
        fail(str(error), status)


def options_of(
    what: str, function: Callable[..., Any], dtype: str | None, max_shard_size: str | None, **given: Any
) -> dict[str, Any]:
    """Return the options that the user gave, as arguments of `function`.

    Raises: ValueError: `function` does not take one of them; `what` names it in the message.
    """
    from megazero.checkpoint.shards import parse_size
    from megazero.zero.sharding import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype} must be {', '.join(DTYPES)}")
    given |= {"dtype": dtype, "max_shard_bytes": None if max_shard_size is None else parse_size(max_shard_size)}
    given = {name: value for name, value in given.items() if value is not None}
    if idle := given.keys() - signature(function).parameters.keys():
        shown = ", ".join(f"--{name.replace('_', '-').replace('shard-bytes', 'shard-size')}" for name in sorted(idle))
        raise ValueError(f"{what} does not take {shown} here")
    return given


@app.command()
def inspect(directory: Annotated[str, typer.Argument(help="A step directory, or one of them, or a URL.")]) -> None:
    """List a checkpoint's tensors, shapes and dtypes, its step, and the cluster that wrote it; or the steps of a run."""
    from megazero.checkpoint.index import is_complete, read_manifest, read_trainer_state, state_kinds_of, step_folders
    from megazero.checkpoint.tensor_file import StoredTensors

    with user_errors():
        if not is_complete(directory) and (steps := step_folders(directory)):
            _list_steps(steps)
            return
        files, trainer = read_manifest(directory), read_trainer_state(directory)
        state_kinds = {state_kind: StoredTensors(directory, state_kind) for state_kind in state_kinds_of(files)}
        table = Table("tensor", "shape", "dtype", *state_kinds, box=None)
        weights = state_kinds["model"]
        for name in sorted(weights.files):
            marks = ["yes" if name in stored.files else "-" for stored in state_kinds.values()]
            dtype = str(weights[name].dtype).removeprefix("torch.").replace("float", "f").upper()
            table.add_row(name, " x ".join(map(str, weights[name].shape)), dtype, *marks)
        parameters = sum(prod(weights[name].shape) for name in weights.files)
    shape = ", ".join(f"{key} {value}" for key, value in trainer.shape.items())
    print(f"{directory}: step {trainer.step}, {trainer.consumed_samples:,} samples, {trainer.consumed_tokens:,} tokens")
    origin = f"written by {shape}" if shape else "imported"
    print(f"{origin} (any shape reads it); {parameters:,} parameters, {_size(files)}")
    for number, phase in enumerate(trainer.phases, start=2):
        print(f"phase {number}, after step {phase['step']}: {', '.join(phase['changed'])} changed")
    print_table(table)


def _list_steps(steps: Sequence[Folder]) -> None:
    """Print a line for each step of a run."""
    from megazero.checkpoint import index

    table = Table("checkpoint", "samples", "tokens", "validation loss", "", box=None)
    for step in steps:
        try:
            if not index.is_complete(step):
                table.add_row(step.name, *"---", "incomplete")
                continue
            trainer, size = index.read_trainer_state(step), _size(index.read_manifest(step))
        except index.CheckpointError as error:
            table.add_row(step.name, *"---", str(error))
            continue
        try:
            loss = "-" if (found := index.val_loss_of(step)) is None else f"{found:.4f}"
        except index.CheckpointError:
            loss = f"unknown: {index.EVALUATION} is damaged"
        table.add_row(step.name, f"{trainer.consumed_samples:,}", f"{trainer.consumed_tokens:,}", loss, size)
    print_table(table)


@app.command()
def verify(directory: Annotated[str, typer.Argument(help="A step directory, or one of them, or a URL.")]) -> None:
    """Compare the size and hash of every file with the manifest.  Prints a line for each step; exit code 1 for damage.

    A directory that was never finished gets a line, too, but does not count as damage.
    """
    from megazero.checkpoint.folder import folder_at, partial_of
    from megazero.checkpoint.index import is_complete

    def was_begun(folder: Folder) -> bool:  # a checkpoint that was not finished has no manifest
        return is_complete(folder) or any(partial_of(name).endswith(".safetensors") for name in folder.files())

    with user_errors():
        folder = folder_at(directory)
        steps = [folder] if was_begun(folder) else list(filter(was_begun, map(folder.child, folder.folders())))
        if not steps:
            hint = "name the directory of a step, or of a run's checkpoints"
            fail(f"{directory} is no checkpoint and holds none: {hint}", 1)
        results = [_verify(step) for step in steps]
    if False in results or True not in results:
        raise typer.Exit(1)


def _verify(folder: Folder) -> bool | None:
    """Print a step's line.  Returns: True: intact, False: damaged, None: never finished."""
    from megazero.checkpoint import index
    from megazero.checkpoint.load import reading

    if not index.is_complete(folder):
        print(f"{folder}: incomplete (no {index.MANIFEST}): not finished, or marked as damaged")
        return None
    try:
        with ProgressBar("verifying") as bar, reading(folder):
            folder = folder.watched(bar.add)
            files, damage = index.read_manifest(folder), index.find_damage(folder)
            try:
                index.val_loss_of(folder)
            except index.DamagedError as error:  # a note that no manifest names; a damaged trainer state is named above
                damage = damage or [str(error)]
    except index.CheckpointError as error:
        print(f"{folder}: DAMAGED\n  {error}")
        return False
    print(f"{folder}: {'DAMAGED' if damage else 'intact'}, {_size(files)}", *damage, sep="\n  ")
    return not damage


def _size(files: Mapping[str, FileRecord]) -> str:
    return f"{len(files)} files, {sum(record.bytes for record in files.values()) / 2**20:,.1f} MiB"


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="A step directory, or its URL.")],
    b: Annotated[str, typer.Argument(help="Another.")],
    rtol: Annotated[float, typer.Option(help="Elements are close where |a - b| <= atol + rtol * |b|.")] = 0.0,
    atol: Annotated[float, typer.Option(help="See --rtol.")] = 0.0,
    all_: Annotated[bool, typer.Option("--all", help=f"Every tensor that differs, not the first {ROWS}.")] = False,
) -> None:
    """Compare two checkpoints, from any clusters.  Exit code 0: equal, 1: different, 2: not compared."""
    from megazero.checkpoint.compare import compare

    with user_errors(NOT_COMPARED):
        if not (rtol >= 0 and atol >= 0):
            raise ValueError(f"--rtol {rtol} and --atol {atol} must not be below 0")
        found = compare(a, b, rtol=rtol, atol=atol)
    print(f"A {a}\nB {b}")
    _print_differences(found, None if all_ else ROWS)
    if not found.is_equal:
        raise typer.Exit(DIFFERENT)


def _print_differences(found: Comparison, rows: int | None) -> None:
    for line in (*found.only, *(f"{key}: {a!r}, {b!r}" for key, a, b in found.fields)):
        print(line)
    if found.tensors:
        right = (Column(name, justify="right") for name in ("max |a-b|", "of max |b|"))
        table = Table("tensor", "kind", "shape and dtype", "elements that differ", *right, "", box=None)
        for tensor in found.tensors[:rows]:
            count = f"{tensor.differing:,} of {tensor.elements:,}" if tensor.elements else "not compared"
            gaps = f"{tensor.max_abs:.3g}", f"{tensor.relative:.3g}"
            close = "close" if tensor.is_close else ""
            table.add_row(tensor.name, tensor.state_kind, tensor.shapes, count, *gaps, close)
        print_table(table)
        if rows is not None and len(found.tensors) > rows:
            print(f"... {listed((), total=len(found.tensors) - rows)}; --all shows them")
    for line in found.notes:
        print(f"not part of the state: {line}")
    different = sum(not tensor.is_close for tensor in found.tensors)
    equal = found.compared - len(found.tensors)
    close = f", {len(found.tensors) - different} close" if len(found.tensors) > different else ""
    print(f"{found.compared} tensors compared: {equal} equal{close}, {different} different")
    print("the states are equal" if found.is_equal else "the states differ")


@app.command()
def export(
    directory: Step,
    out: Annotated[str, typer.Argument(help="New directory of the model, or a URL.")],
    to: Annotated[str, typer.Option(help="hf: a transformers model; dcp: of torch.distributed, with moments.")] = "hf",
    names: Annotated[str | None, typer.Option(help="Table of names, dcp; torchtitan's by default, if any.")] = None,
    dtype: DtypeOption = None,
    max_shard_size: ShardOption = None,
    averaged: Annotated[bool, typer.Option("--averaged", help="The weights' averages, which [average] kept.")] = False,
    extension: ExtensionOption = None,
) -> None:
    """Export a checkpoint: the model and its tokenizer for transformers, or the whole state for torch.distributed."""
    from megazero.checkpoint.folder import folder_at
    from megazero.checkpoint.hugging_face.exporter import export_model

    with user_errors(), ProgressBar("exporting") as bar:
        load_extensions(extension)
        writers = {"hf": export_model} | added("export")
        if to not in writers:
            raise ValueError(f"--to {to} must be {' or '.join(writers)}")
        given = {"names": names, "averaged": averaged or None}
        options = options_of(f"--to {to}", writers[to], dtype=dtype, max_shard_size=max_shard_size, **given)
        made = writers[to](*(folder_at(place).watched(bar.add) for place in (directory, out)), **options)
    files = "1 file" if made.files == 1 else f"{made.files} files"
    print(f"{out}: weights in {made.dtype}, {files}, {made.bytes / 2**20:,.1f} MiB; {made.about}")
