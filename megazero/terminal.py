"""Prints lines for the terminal, even if that may fail: `| head` has ended, or the disk of a log is full.

A line that cannot be written is dropped, and never ends training.  Passwords are hidden in every line.
"""

import os
import sys
from contextlib import suppress

from megazero.settings import without_passwords


class Terminal:
    """Prints lines on standard output.  With `tells`, the first dropped line is reported on standard error."""

    def __init__(self, *, tells: bool = True) -> None:
        self._tells, self._drops = tells, False

    def __call__(self, line: str) -> None:
        try:
            print(without_passwords(line), flush=True)
            if self._drops:
                self._drops = False
                print("standard output can be written again; lines before this one are missing", flush=True)
        except (OSError, ValueError) as error:  # ValueError: it was closed
            if self._tells and not self._drops:
                warn(f"standard output cannot be written ({error}): lines are dropped until it can, the run goes on")
            self._drops = True


def warn(text: str) -> None:
    """Print a text on standard error, if possible."""
    with suppress(OSError, ValueError):
        print(without_passwords(text), file=sys.stderr, flush=True)


def drain() -> None:
    """Write or drop the buffered output of the standard streams.

    Otherwise, a failure to write it would change the interpreter's exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (ValueError, AttributeError):
            pass  # it was closed
