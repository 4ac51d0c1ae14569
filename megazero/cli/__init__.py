"""The command `megazero`: parse, call, print.  `commands.py` has the list."""

import os


def main() -> None:
    """Entry point."""
    # Without standard streams, the next file opened would get number 0, 1 or 2, and receive what libraries print.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    from megazero.cli.commands import app

    app()
