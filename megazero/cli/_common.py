"""What the commands share: how an error or a table is printed, and what a run file is checked for."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

from rich import progress as bars
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from megazero.launchers import start_problem
from megazero.settings import Problem, without_passwords
from megazero.training.signals import EXIT_REFUSED

if TYPE_CHECKING:
    from pathlib import Path

    from megazero.config import ResolvedRun, RunConfig
    from megazero.config.rules import Rule


class Local(TyperGroup):
    """Commands that read and write files of this machine; those of checkpoints, and inputs of data, may be URLs, too."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As in click.  Ends the command for a URL, of which pathlib would make a directory, and for a key with dashes."""
        for word, after in zip(args, [*args[1:], "VALUE"], strict=True):
            if key := re.fullmatch(r"--(\w+(?:\.\w+)+)(=.*)?", word):
                value = key[2] or f"={'VALUE' if after.startswith('--') else after}"
                fail(f"{word} is no option: keys of the run file have no dashes; write {key[1]}{value}", EXIT_REFUSED)
        urls = [(before, arg) for before, arg in pairwise(args) if re.match(r"(--\w+=)?\w[\w+.-]*:/", arg)]
        if args[0] == "data":  # of which inputs may be URLs
            urls = [(before, arg) for before, arg in urls if before in ("--out", "--tokenizer") or arg.startswith("--")]
        if args[0] != "checkpoint" and urls:
            takes = f"megazero {args[0]} takes files of this machine"
            fail(f"{urls[0][1]} is a URL, and {takes}: copy it here", EXIT_REFUSED)
        return super().resolve_command(ctx, args)


def fail(message: str, status: int) -> NoReturn:
    """End the command with one line on stderr."""
    print(f"error: {without_passwords(message)}", file=sys.stderr)
    raise SystemExit(status)


def started_ranks() -> int | None:
    """How many ranks the launcher says that it has started; None without one.  Ends the command where this cannot be."""
    if problem := start_problem(os.environ):
        fail(problem, EXIT_REFUSED)
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def load_run(path: Path, overrides: list[str] | None, *rules: Rule) -> ResolvedRun:
    """The run of a file on the ranks that there are, or that will be started.  Ends the command where it is wrong.

    rules: further ones than those of every run file.
    """
    from megazero.config import ConfigError, load_config
    from megazero.terminal import warn

    world = started_ranks()
    try:
        return load_config(path, overrides or [], world, rules=[callback_problems, schedule_problems, *rules])
    except ConfigError as error:
        if world is None:  # torch is not loaded yet
            warn(str(error))
            raise SystemExit(EXIT_REFUSED) from None
        from megazero.training.launch import tell_others

        raise SystemExit(tell_others(str(error)).status) from None


def load_extensions(names: list[str] | None) -> None:
    """Import the files or modules of --extension.  Raises: ConfigError."""
    from megazero.config import ConfigError
    from megazero.config.load import import_extensions

    if problems := import_extensions(names):
        raise ConfigError([replace(problem, key="--extension") for problem in problems], "the command")


def callback_problems(config: RunConfig) -> Iterable[Problem]:
    """What is wrong with the names of callbacks and loggers; torch is loaded only where there are some."""
    if not (config.training.callbacks or config.logging.loggers):
        return []
    from megazero.training.callbacks.registry import name_problems

    return name_problems(config)


def schedule_problems(config: RunConfig) -> Iterable[Problem]:
    """What is wrong with the file of `parallel.schedule_file`; torch is loaded only where there is one."""
    if config.parallel.schedule_file is None:
        return []
    from megazero.training.check import schedule_problems

    return schedule_problems(config)


class Bar(bars.Progress):
    """A bar on stderr with the rate and the time that is left; silent where that is no terminal.

    Args:
        what: what is done, as in "exporting".
        of_bytes: whether bytes are counted, or things.
        is_shown: False on ranks that show none.
    """

    def __init__(self, what: str, *, of_bytes: bool = True, is_shown: bool = True) -> None:
        counted = [bars.DownloadColumn(), bars.TransferSpeedColumn()] if of_bytes else [bars.MofNCompleteColumn()]
        columns = ["{task.description}", bars.BarColumn(16), *counted, bars.TimeRemainingColumn()]
        is_shown = is_shown and sys.stderr.isatty()
        own: dict[str, Any] = {"auto_refresh": of_bytes, "transient": True, "disable": not is_shown}
        super().__init__(*columns, console=Console(stderr=True), **own)  # things have no thread: they may be measured
        self.add_task(what, total=None)

    def add(self, more: int, done: int) -> None:
        """Count so much more work, and so much of it as done."""
        total = (self.tasks[0].total or 0) + more
        self.update(self.task_ids[0], total=total, advance=done, refresh=not self.live.auto_refresh)


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal; in a pipe or a file, wide enough for long names."""
    Console(width=None if sys.stdout.isatty() else 200).print(table)
