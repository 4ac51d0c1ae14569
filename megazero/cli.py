"""The command `megazero`: parse, call, print."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from megazero.config import ResolvedRun
    from megazero.training.loop import RunSummary

EXIT_CONFIG = 2

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
data_app = typer.Typer(no_args_is_help=True, help="Prepare data.")
checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints.")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")


def main() -> None:
    """Entry point."""
    app()


def _fail(message: str, status: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, over what the file says.")] = None,
) -> None:
    """Train a GPT.  Joins torchrun where it started this process; otherwise starts launch.nproc_per_node ranks itself."""
    from megazero.config import ConfigError, load_config

    world = os.environ.get("WORLD_SIZE")
    try:
        run = load_config(config, overrides or [], int(world) if world else None)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        raise SystemExit(EXIT_CONFIG) from None
    from megazero.training.launch import launch, launched_by_torchrun, leave_at_once, run_rank

    summary = run_rank(run) if launched_by_torchrun() else launch(run)
    speaks = os.environ.get("RANK", "0") == "0"
    if summary is None:
        if speaks:
            _report_failure(run)
        leave_at_once()
    if speaks:
        _report(run, summary, config, overrides or [])


def _report(run: ResolvedRun, summary: RunSummary, config: Path, overrides: list[str]) -> None:
    from megazero.training.metrics import readable_seconds

    run_dir = Path(run.config.training.run_dir)
    losses = [] if summary.loss is None else [f"loss {summary.loss:.4f}"]
    losses += [] if summary.val_loss is None else [f"validation loss {summary.val_loss:.4f}"]
    traffic = ", ".join(f"{axis} {sent / 2**20:,.1f} MiB" for axis, sent in sorted(summary.sent_bytes.items()))
    command = "megazero" if shutil.which("megazero") else os.path.relpath(sys.argv[0])
    more = [f"training.steps={summary.step + run.config.training.steps}"]
    kept = [override for override in overrides if not override.startswith(("training.steps=", "checkpoint.resume="))]
    print(
        f"\ndone: step {summary.step} in {readable_seconds(summary.seconds)}"
        + (f", {', '.join(losses)} nats per token" if losses else "; there was nothing left to do")
        + (f"\n  checkpoint   {summary.checkpoint}" if summary.checkpoint else "")
        + f"\n  metrics      {run_dir / 'metrics.jsonl'}"
        + (f"\n  tensorboard  tensorboard --logdir {run_dir}" if run.config.logging.tensorboard else "")
        + (f"\n  sent by rank 0: {traffic}" if traffic else "")
        + "\n  go on, on this or any other shape (for example parallel.tp=1 zero.stage=3):"
        + f"\n    {command} train {shlex.join([str(config), *kept, *more])}"
    )


def _report_failure(run: ResolvedRun) -> None:
    from megazero.checkpoint.index import find_newest

    newest = find_newest(Path(run.config.training.run_dir) / "checkpoints")
    state = "no checkpoint had been written yet"
    if newest:
        state = (
            f"the newest complete checkpoint is {newest}; with checkpoint.resume=auto the same command goes on from it"
        )
    print(f"the run ended early; {state}", file=sys.stderr)


@data_app.command()
def tokenize(
    inputs: Annotated[list[str], typer.Argument(help="Text files, .jsonl files, or directories of them.")],
    out: Annotated[str, typer.Option(help="Prefix of the .bin and .idx files to write.")],
    tokenizer: Annotated[str, typer.Option(help="'byte', or a Hugging Face tokenizers file.")] = "byte",
    workers: Annotated[int, typer.Option(help="Processes; 0 uses every core.")] = 0,
    jsonl_key: Annotated[str, typer.Option(help="Field of a .jsonl line that holds the text.")] = "text",
    eod_token: Annotated[str | None, typer.Option(help="Token that ends a document, if it cannot be guessed.")] = None,
) -> None:
    """Turn text into the indexed format that training reads."""
    from megazero.data import tokenize_files

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("tokenizing", total=None)
            summary = tokenize_files(
                inputs,
                out,
                tokenizer,
                workers=workers or os.cpu_count() or 1,
                jsonl_key=jsonl_key,
                eod_token=eod_token,
                on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
    except (ValueError, OSError, RuntimeError) as error:
        _fail(str(error), 1)
    print(
        f"{out}.bin and {out}.idx: {summary.documents:,} documents, {summary.tokens:,} tokens "
        f"from {summary.bytes:,} bytes in {summary.seconds:.1f} s"
    )


@checkpoint_app.command()
def inspect(directory: Annotated[Path, typer.Argument(help="A step directory.")]) -> None:
    """List a checkpoint's tensors, their shapes and dtypes, its step, and the shape of the cluster that wrote it."""
    from megazero.checkpoint.index import CheckpointError, StoredTensors, kinds_of, read_manifest, read_trainer_state

    try:
        files, trainer = read_manifest(directory), read_trainer_state(directory)
        kinds = {kind: StoredTensors(directory, kind) for kind in kinds_of(files)}
        table = Table("tensor", "shape", "dtype", *kinds, box=None)
        for name in sorted(kinds["model"].files):
            tensor = kinds["model"].slice(name)
            shape = " x ".join(map(str, tensor.get_shape()))
            marks = ["yes" if name in stored.files else "-" for stored in kinds.values()]
            table.add_row(name, shape, str(tensor.get_dtype()), *marks)
    except CheckpointError as error:
        _fail(str(error), 1)
    shape = ", ".join(f"{key} {value}" for key, value in trainer.shape.items())
    size = sum(record.bytes for record in files.values())
    print(f"{directory}: step {trainer.step}, {trainer.consumed_samples:,} samples, {trainer.consumed_tokens:,} tokens")
    print(f"written by {shape} (any shape reads it); {len(files)} files, {size / 2**20:,.1f} MiB")
    Console(width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    main()
