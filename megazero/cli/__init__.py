"""The command `megazero`: parse, call, print."""

from __future__ import annotations

import os

import typer

from megazero.cli import checkpoint, data, schedule
from megazero.cli._common import Local
from megazero.cli.calibrate import calibrate
from megazero.cli.check import check
from megazero.cli.memory import memory_report
from megazero.cli.plan import plan
from megazero.cli.train import train as _train

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__, cls=Local)
app.command()(_train)
app.command()(check)
app.command()(plan)
app.command()(memory_report)
app.command()(calibrate)
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(schedule.app, name="schedule")


def main() -> None:
    """Entry point."""
    _open_closed_streams()
    app()


def _open_closed_streams() -> None:
    """Open /dev/null where this process was started without standard streams.

    Otherwise the next file gets such a number, and with it whatever a library prints.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free, so this one


__all__ = ["app", "main", "memory_report"]
