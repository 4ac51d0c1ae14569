"""Lines for the terminal, which nobody may be reading any more: `| head` has ended, the disk of a log is full.

A line that cannot be written is dropped: it never ends the training.  No line shows a password.
"""

import os
import sys
from contextlib import suppress

from megazero.settings import without_passwords


class Terminal:
    """Prints lines on standard output.  The first one that is dropped is told on standard error, if `tells`."""

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
    """Print on standard error, if that can be written."""
    with suppress(OSError, ValueError):
        print(without_passwords(text), file=sys.stderr, flush=True)


def drain() -> None:
    """Write or drop what the standard streams hold back: the interpreter's end would make a failed exit status of it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (ValueError, AttributeError):
            pass  # it was closed
