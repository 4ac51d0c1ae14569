"""The commands of `megazero`, those of annexes included."""

from __future__ import annotations

import typer

from megazero.annexes import added
from megazero.cli import checkpoint, data, schedule
from megazero.cli._common import Local
from megazero.cli.check import check
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
for _name, _command in added("command").items():
    app.command(_name)(_command)
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(schedule.app, name="schedule")
