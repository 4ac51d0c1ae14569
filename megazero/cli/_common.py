"""What the commands share: exit codes, and how an error or a table is printed."""

from __future__ import annotations

import sys
from typing import NoReturn

from rich.console import Console
from rich.table import Table

EXIT_CONFIG = 2


def fail(message: str, status: int) -> NoReturn:
    """End the command with one line on stderr."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


def print_table(table: Table) -> None:
    """As wide as the terminal, and wide enough for long names in a pipe or a file."""
    Console(width=None if sys.stdout.isatty() else 200).print(table)
