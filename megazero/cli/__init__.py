"""The command `megazero`: parse, call, print.  `commands.py` has the list."""

import os


def main() -> None:
    """Entry point."""
    # Where this process has no standard streams, the next file would get such a number, and what a library prints.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    from megazero.cli.commands import app

    app()
