"""Shared by the commands: print errors, tables and progress bars; load and check a run file."""

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
    """The commands of megazero.  Only those of checkpoints, and inputs of data, may be URLs; the others take local files."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, as click does; but end with an error for a URL or for a run-file key written with dashes.

        Without this, pathlib would make a directory of the URL.
        """
        for word, after in zip(args, [*args[1:], "VALUE"], strict=True):
            if key := re.fullmatch(r"--(\w+(?:\.\w+)+)(=.*)?", word):
                value = key[2] or f"={'VALUE' if after.startswith('--') else after}"
                fail(f"{word} is no option: keys of the run file have no dashes; write {key[1]}{value}", EXIT_REFUSED)
        urls = [(before, arg) for before, arg in pairwise(args) if re.match(r"(--\w+=)?\w[\w+.-]*:/", arg)]
        if args[0] == "data":  # its inputs may be URLs
            urls = [(before, arg) for before, arg in urls if before in ("--out", "--tokenizer") or arg.startswith("--")]
        if args[0] != "checkpoint" and urls:
            takes = f"megazero {args[0]} takes files of this machine"
            fail(f"{urls[0][1]} is a URL, and {takes}: copy it here", EXIT_REFUSED)
        return super().resolve_command(ctx, args)


def fail(message: str, status: int) -> NoReturn:
    """Print one line on stderr, and end the command with this exit code."""
    print(f"error: {without_passwords(message)}", file=sys.stderr)
    raise SystemExit(status)


def started_ranks() -> int | None:
    """Return the number of ranks that the launcher started; None without a launcher.

    Ends the command if the launcher's variables contradict each other.
    """
    if problem := start_problem(os.environ):
        fail(problem, EXIT_REFUSED)
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def load_run(path: Path, overrides: list[str] | None, *rules: Rule) -> ResolvedRun:
    """Load a run file for the ranks that are or will be started.  Ends the command if the file is wrong.

    Args:
        path: the run file.
        overrides: settings from the command line, `key.sub=value`.
        rules: checks in addition to those of every run file.
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
    """Check the names of callbacks and loggers.  Loads torch only if the run has any."""
    if not (config.training.callbacks or config.logging.loggers):
        return []
    from megazero.training.callbacks.registry import name_problems

    return name_problems(config)


def schedule_problems(config: RunConfig) -> Iterable[Problem]:
    """Check the file in `parallel.schedule_file`.  Loads torch only if the run has one."""
    if config.parallel.schedule_file is None:
        return []
    from megazero.training.check import schedule_problems

    return schedule_problems(config)


class ProgressBar(bars.Progress):
    """A progress bar on stderr with the rate and the remaining time.  It shows nothing if stderr is no terminal.

    Args:
        what: the activity, such as "exporting".
        of_bytes: count bytes, instead of items.
        is_shown: False for a bar that shows nothing, on all ranks but one.
    """

    def __init__(self, what: str, *, of_bytes: bool = True, is_shown: bool = True) -> None:
        counted = [bars.DownloadColumn(), bars.TransferSpeedColumn()] if of_bytes else [bars.MofNCompleteColumn()]
        columns = ["{task.description}", bars.BarColumn(16), *counted, bars.TimeRemainingColumn()]
        is_shown = is_shown and sys.stderr.isatty()
        own: dict[str, Any] = {"auto_refresh": of_bytes, "transient": True, "disable": not is_shown}
        super().__init__(*columns, console=Console(stderr=True), **own)  # items: no thread, which would disturb timings
        self.add_task(what, total=None)

    def add(self, more: int, done: int) -> None:
        """Add `more` to the total, and `done` to the completed work."""
        total = (self.tasks[0].total or 0) + more
        self.update(self.task_ids[0], total=total, advance=done, refresh=not self.live.auto_refresh)


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal, or 200 columns wide in a pipe or a file."""
    Console(width=None if sys.stdout.isatty() else 200).print(table)
