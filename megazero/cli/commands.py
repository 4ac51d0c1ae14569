"""The commands of `megazero`, those of annexes included."""

from __future__ import annotations

import typer

from megazero.annexes import added
from megazero.cli import checkpoint
from megazero.cli._common import Local
from megazero.cli.check import check
from megazero.cli.evaluate import evaluate, generate
from megazero.cli.train import train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The command `megazero`: parse, call, print.",
    cls=Local,
)
app.command()(train)
app.command()(check)
app.command()(evaluate)
app.command()(generate)
app.add_typer(checkpoint.app, name="checkpoint")
for _name, _command in added("checkpoint command").items():
    checkpoint.app.command(_name)(_command)
for _name, _command in added("command").items():
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(_name)(_command)
