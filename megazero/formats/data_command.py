"""`megazero data`: prepare data."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from megazero.cli._common import fail

app = typer.Typer(no_args_is_help=True, help="Prepare data.")


@app.command()
def tokenize(
    inputs: Annotated[list[str], typer.Argument(help="Text, JSON lines, .parquet files, or directories; .gz, .zst.")],
    out: Annotated[str, typer.Option(help="Prefix of the .bin and .idx files to write.")],
    tokenizer: Annotated[str, typer.Option(help="'byte', or a Hugging Face tokenizers file.")] = "byte",
    workers: Annotated[int, typer.Option(help="Processes; 0 uses every core.")] = 0,
    jsonl_key: Annotated[str, typer.Option(help="Field of a JSON line, or .parquet column, with the text.")] = "text",
    eod_token: Annotated[str | None, typer.Option(help="Token that ends a document, if not the tokenizer's.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a pair that exists.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out what cannot be read; do not ask.")] = False,
) -> None:
    """Turn text into the indexed format that training reads.  Stopped or failed, the same command goes on where it was."""
    from megazero.formats.tokenize import tokenize_files

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)

    def go_on_without(named: str) -> bool:
        if not skip_bad and not _is_asked():
            return False
        progress.stop()
        print(named, file=sys.stderr)
        if not skip_bad and not typer.confirm("Leave these out and go on?", err=True):
            return False
        progress.start()
        return True

    try:
        with progress:
            task = progress.add_task("tokenizing", total=None)
            summary = tokenize_files(
                inputs,
                out,
                tokenizer,
                workers=workers or len(os.sched_getaffinity(0)),
                jsonl_key=jsonl_key,
                eod_token=eod_token,
                overwrite=overwrite,
                go_on_without=go_on_without,
                on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("stopped; the same command goes on with what is not done yet", 130)
    read = f"{summary.bytes:,} bytes in {summary.seconds:.1f} s"
    print(f"{out}.bin and {out}.idx: {summary.documents:,} documents, {summary.tokens:,} tokens from {read}")
    for note in summary.notes:
        print(note)


def _is_asked() -> bool:
    """Whether somebody is there to answer a question."""
    return sys.stdin.isatty()
