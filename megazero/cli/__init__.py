"""The command `megazero`: parse, call, print.  `commands.py` has the list."""

import os


def main() -> None:
    """Entry point."""
    _open_closed_streams()
    from megazero.cli.commands import app

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
