"""Registers the commands of `megazero`, including those of the annexes."""

from typing import Annotated

import typer

import megazero
from megazero.cli import checkpoint
from megazero.cli._common import Local
from megazero.cli.check import check
from megazero.cli.evaluate import evaluate, generate
from megazero.cli.reference import config, models
from megazero.cli.train import train
from megazero.registry import added

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, cls=Local)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"megazero {megazero.__version__}")
        raise typer.Exit


_Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]


@app.callback()
def _megazero(version: _Version = False) -> None:
    """Pretrain GPTs on any shape of cluster.  One TOML file is one run; `megazero config` prints all its keys."""


for _function in (train, check, evaluate, generate, config, models):
    app.command()(_function)
app.add_typer(checkpoint.app, name="checkpoint")
for _name, _command in added("checkpoint command").items():
    checkpoint.app.command(_name)(_command)
for _name, _command in added("command").items():
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(_name)(_command)
