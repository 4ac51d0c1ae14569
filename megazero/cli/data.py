"""`megazero data`: prepare data."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from megazero.cli._common import fail

app = typer.Typer(no_args_is_help=True, help="Prepare data.")


@app.command()
def tokenize(
    inputs: Annotated[list[str], typer.Argument(help="Text files, .jsonl files, or directories of them.")],
    out: Annotated[str, typer.Option(help="Prefix of the .bin and .idx files to write.")],
    tokenizer: Annotated[str, typer.Option(help="'byte', or a Hugging Face tokenizers file.")] = "byte",
    workers: Annotated[int, typer.Option(help="Processes; 0 uses every core.")] = 0,
    jsonl_key: Annotated[str, typer.Option(help="Field of a .jsonl line that holds the text.")] = "text",
    eod_token: Annotated[str | None, typer.Option(help="Token that ends a document, if it cannot be guessed.")] = None,
) -> None:
    """Turn text into the indexed format that training reads."""
    from megazero.data.tokenize import tokenize_files

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
        fail(str(error), 1)
    print(
        f"{out}.bin and {out}.idx: {summary.documents:,} documents, {summary.tokens:,} tokens "
        f"from {summary.bytes:,} bytes in {summary.seconds:.1f} s"
    )
