"""The commands `megazero checkpoint import` and `megazero checkpoint average`."""

from typing import Annotated

import typer

from megazero.cli._common import ProgressBar, load_extensions
from megazero.cli.checkpoint import DtypeOption, ExtensionOption, ShardOption, options_of, user_errors


def import_(
    source: Annotated[str, typer.Argument(help="Directory of a transformers model; directory or file of others.")],
    out: Annotated[str, typer.Argument(help="New directory of the checkpoint, or a URL.")],
    form: Annotated[str | None, typer.Option("--from", help="Its form, such as hf; None: as the files tell.")] = None,
    run_file: Annotated[str | None, typer.Option(help="Run file that has its model section; hf needs none.")] = None,
    dtype: DtypeOption = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a sample, hf; the model's own by default.")] = None,
    step: Annotated[int | None, typer.Option(help="Steps done; what the checkpoint says by default.", min=0)] = None,
    samples: Annotated[int | None, typer.Option(help="Samples consumed; by default as --step.", min=0)] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Name, or pattern, of what may be left out.")] = None,
    max_shard_size: ShardOption = None,
    extension: ExtensionOption = None,
) -> None:
    """Import a checkpoint of another framework, to continue training from it."""
    from megazero.checkpoint.folder import folder_at
    from megazero.formats.hugging_face import MODEL_TOML
    from megazero.formats.importer import import_checkpoint

    with user_errors(), ProgressBar("importing") as bar:
        load_extensions(extension)
        own = {"form": form, "run_file": run_file, "step": step, "samples": samples, "seq_len": seq_len}
        options = options_of("import", import_checkpoint, dtype, max_shard_size, **own)
        made = import_checkpoint(source, folder_at(out).watched(bar.add), ignore=ignore or (), **options)
    print(f"{out}: {made.tensors} tensors in {made.dtype}, {made.bytes / 2**20:,.1f} MiB; for the run file")
    print(f"(the same text is in {out}/{MODEL_TOML}):\n\n{made.toml}", end="")


def average(
    directories: Annotated[list[str], typer.Argument(metavar="STEPS... OUT", help="Step directories; the new one.")],
    extension: ExtensionOption = None,
) -> None:
    """Write the mean of the weights of some steps as a new step, to evaluate, export, or start from."""
    from megazero.formats.averaging import average_steps

    *steps, out = directories
    with user_errors():
        if not steps:
            raise ValueError(f"name the steps to average before the new directory: average STEPS... {out}")
        load_extensions(extension)
        made = average_steps(steps, out)
    print(f"{out}: the mean of {len(steps)} steps, weights in {made.dtype}, {made.bytes / 2**20:,.1f} MiB")
