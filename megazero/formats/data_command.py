"""The command `megazero data`: tokenize text, train a tokenizer, show samples."""

import os
from pathlib import Path
from typing import Annotated

import typer

from megazero.cli._common import ProgressBar, fail
from megazero.cli.checkpoint import user_errors
from megazero.training.signals import EXIT_REFUSED

app = typer.Typer(no_args_is_help=True, help="Prepare data, and look at it.")

JsonlKey = Annotated[
    str, typer.Option(help="Field of a JSON line (a.b reaches into objects), or column, with the text.")
]


@app.command()
def tokenize(
    inputs: Annotated[
        list[str], typer.Argument(help="Text, JSON lines, .parquet or .arrow, directories, URLs; .gz, .zst.")
    ],
    out: Annotated[str, typer.Option(help="Prefix of the .bin and .idx files to write.")],
    tokenizer: Annotated[
        str, typer.Option(help="'byte', a Hugging Face tokenizers file, a SentencePiece .model, or a hub id.")
    ] = "byte",
    workers: Annotated[int, typer.Option(help="Processes; 0 uses every core.")] = 0,
    jsonl_key: JsonlKey = "text",
    eod_token: Annotated[str | None, typer.Option(help="Token that ends a document, if not the tokenizer's.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a pair that exists.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out what cannot be read.")] = False,
) -> None:
    """Tokenize text into the indexed format that training reads.  If it stops or fails, the same command continues."""
    from megazero.formats.tokenize import check_outputs, tokenize_files

    try:
        with user_errors(), ProgressBar("tokenizing") as progress:
            if tokenizer.endswith(".model"):
                from megazero.formats.sentence_piece import convert

                model, tokenizer = Path(tokenizer), f"{out}.tokenizer.json"
                check_outputs(out, overwrite)
                convert(model, Path(tokenizer), inputs, jsonl_key, eod_token, overwrite=overwrite)
            summary = tokenize_files(
                inputs,
                out,
                tokenizer,
                workers=workers or len(os.sched_getaffinity(0)),
                jsonl_key=jsonl_key,
                eod_token=eod_token,
                overwrite=overwrite,
                skip_bad=skip_bad,
                on_progress=lambda done, total: progress.update(progress.task_ids[0], completed=done, total=total),
            )
    except KeyboardInterrupt:
        fail("stopped; the same command goes on with what is not done yet", 130)
    read = f"{summary.bytes:,} bytes in {summary.seconds:.1f} s"
    print(f"{out}.bin and {out}.idx: {summary.documents:,} documents, {summary.tokens:,} tokens from {read}")
    for note in summary.notes:
        print(note)


@app.command()
def tokenizer(
    inputs: Annotated[list[str], typer.Argument(help="Text, as for tokenize.")],
    out: Annotated[Path, typer.Option(help="File to write, such as data/tokenizer.json.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens, at most.")],
    jsonl_key: JsonlKey = "text",
) -> None:
    """Train a byte-level BPE on text."""
    from megazero.formats.train_tokenizer import train_tokenizer

    with user_errors():
        size = train_tokenizer(inputs, out, vocab_size, jsonl_key)
    print(f"{out}: {size:,} tokens; next: megazero data tokenize TEXT --out PREFIX --tokenizer {out}")


@app.command()
def show(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, over what the file says.")] = None,
    first: Annotated[int, typer.Option(min=0, help="Number of the first sample; the run reads them in order.")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
) -> None:
    """Show training samples as text: their source, the borders of documents, and how many tokens count in the loss."""
    from megazero.config.load import read_run_file
    from megazero.formats.samples import describe_samples

    with user_errors(EXIT_REFUSED):
        run = read_run_file(config, overrides or [])
    with user_errors():
        print(*describe_samples(run, first, samples), sep="\n")
