"""The command `megazero check`: everything about a run file, without starting the run."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megazero.cli._common import callback_problems, fail
from megazero.registry import added
from megazero.settings import counted
from megazero.training.signals import EXIT_REFUSED

if TYPE_CHECKING:
    from megazero.schedules.action import Schedule
    from megazero.training.check import Lines


def check(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, over what the file says.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks; launch.nproc_per_node by default.")] = None,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Ranks of a machine.")] = 8,
    device_gib: Annotated[float | None, typer.Option(min=0, help="Memory of a rank, to see whether it fits.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Device of a rank, such as h200, to see when it is fullest.")] = None,
) -> None:
    """Check a run file and show its shape, memory and data, without starting it.  Exit code 2: it cannot run."""
    from megazero.checkpoint.index import CheckpointError
    from megazero.config import ConfigError, load_config
    from megazero.training.batches import fingerprint_of
    from megazero.training.check import FILE_RULES, describe, layer_problems
    from megazero.training.named_files import not_here
    from megazero.training.resuming import foresee

    try:
        rules = (callback_problems, *FILE_RULES)
        run = load_config(config, overrides or [], world_size, rules=rules, asks="--world-size")
        if found := list(layer_problems(run.config)):
            raise ConfigError(found, os.fspath(config))
        resumes = foresee(run.config, None if not_here(run.config) else partial(fingerprint_of, run.config))
    except (ConfigError, CheckpointError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None
    of_device = []
    try:
        for lines in added("check").values():
            of_device.append(lines(run, gpu, device_gib, nproc_per_node))
    except (ValueError, OSError) as error:
        fail(str(error), EXIT_REFUSED)
    fits: list[bool] = []

    def on_device(schedule: Schedule) -> Lines:
        for needs_of in of_device:
            needs = needs_of(schedule)
            fits.append(needs.fits)
            yield from needs.lines

    for subject, text in describe(run, min(nproc_per_node, run.world_size), on_device):
        print(f"{subject:<9} {text}")
    for line in resumes:
        print(f"resume    {line}")
    condition = ", if what was not checked is there" if not_here(run.config) else ""
    ranks = counted(run.world_size, "rank")
    if not all(fits):
        print(f"{os.fspath(config)} is right for {ranks}{condition}, but does not fit the device")
        raise SystemExit(EXIT_REFUSED)
    print(f"{os.fspath(config)} can run on {ranks}{condition}")
