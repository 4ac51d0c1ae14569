"""The command `megazero schedule`: prove, draw and compare pipeline schedules."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megazero.cli._common import fail, load_extensions, print_table
from megazero.training.signals import EXIT_REFUSED

if TYPE_CHECKING:
    from megazero.schedules.action import Schedule
    from megazero.schedules.proof import Costs

app = typer.Typer(no_args_is_help=True, help="Look at pipeline schedules.")


@app.command()
def show(
    schedule: Annotated[str | None, typer.Option(help="As parallel.schedule, such as zb-h1; 1f1b by default.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Micro-batches of one step.")] = None,
    virtual_stages: Annotated[int | None, typer.Option(help="Model chunks on each rank, for interleaved.")] = None,
    costs: Annotated[str, typer.Option(help="Times of forward, input's and weights' gradient, message.")] = "1,1,1,0",
    file: Annotated[Path | None, typer.Option(help="Your own schedule: CSV, a line per rank, cells as F0.")] = None,
    placement: Annotated[str | None, typer.Option(help="Of the file's stages: loop (the default) or v.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev; one unit is 1 ms.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Table of all schedules for these numbers.")] = False,
    extension: Annotated[
        list[str] | None, typer.Option("--extension", help="A Python file or module that registers a schedule.")
    ] = None,
) -> None:
    """Prove a pipeline schedule, draw it, and show its idle time and memory."""
    from megazero.plan.schedule_drawing import MIN_WIDTH, comparison, draw_svg, draw_text, trace_text
    from megazero.schedules.proof import check_runnable, simulate
    from megazero.settings import write_text

    files = {option: path for option, path in (("--svg", svg), ("--trace", trace)) if path is not None}
    try:
        load_extensions(extension)
        times = _parse_costs(costs)
        is_drawn = bool(schedule or file or files or not compare)
        shown = None
        if file is not None:
            given = {"pp": pp, "microbatches": microbatches, "virtual_stages": virtual_stages}
            shown = _read_own(file, placement, schedule, given)
            pp, microbatches = shown.pp, shown.microbatches
        if pp is None or microbatches is None:
            raise ValueError("a named schedule needs --pp and --microbatches, such as --pp 4 --microbatches 8")
        if placement is not None and file is None:
            raise ValueError(f"placement={placement} is for the schedule of a --file; a named one has its own")
        if is_drawn:
            shown = shown or _named_schedule(schedule or "1f1b", pp, microbatches, virtual_stages, compare)
            check_runnable(shown)
            timeline = simulate(shown, times)
            width = max(shutil.get_terminal_size(fallback=(100, 24)).columns, MIN_WIDTH)
            Console(width=width, highlight=False).print(draw_text(timeline, width))
    except (ValueError, OSError) as error:
        fail(str(error), EXIT_REFUSED)
    if compare:
        chunks = 2 if virtual_stages is None else virtual_stages
        print(f"\npp {pp}, {microbatches} micro-batches; idle and peak activations of the rank that has most")
        print_table(comparison(pp, microbatches, chunks, times, [shown] if shown and file else []))
    for option, path in files.items():
        try:
            write_text(path, draw_svg(timeline) if option == "--svg" else trace_text(timeline))
        except (OSError, ValueError) as error:  # pathlib's own for a name that is none
            fail(f"{path} cannot be written: {error}", 1)


def _parse_costs(text: str) -> Costs:
    from megazero.schedules.proof import Costs

    try:
        forward, _, _, _ = times = [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"costs={text} must be four numbers F,B,W,hop, such as 1,1,1,0") from None
    if not all(math.isfinite(time) and time >= 0 for time in times) or not forward:
        raise ValueError(f"costs={text} must be finite, F above 0 and B, W and hop not below 0, such as 1,1,1,0")
    return Costs(*times)


def _read_own(file: Path, placement: str | None, schedule: str | None, given: Mapping[str, int | None]) -> Schedule:
    """Read the schedule of a file.  Raises: ValueError: an option contradicts the file; OSError."""
    from megazero.schedules.action import read_schedule

    if schedule is not None:
        raise ValueError(f"--schedule {schedule} and --file {file} are two schedules; give one")
    own = read_schedule(file, placement or "loop")
    for name, found in (("pp", own.pp), ("microbatches", own.microbatches), ("virtual_stages", own.chunks)):
        if given[name] not in (None, found):
            raise ValueError(f"{name}={given[name]}, but the schedule {own.name} has {found}; leave it out")
    return own


def _named_schedule(name: str, pp: int, microbatches: int, virtual_stages: int | None, compares: bool) -> Schedule:
    from megazero.schedules.registry import SCHEDULES

    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name}; {SCHEDULES.hint(name)}")
    factory = SCHEDULES[name]
    if compares and factory.chunks is not None:  # the number of virtual stages is for another row of the table
        virtual_stages = None
    return factory.build(pp, microbatches, factory.chunks_of(1 if virtual_stages is None else virtual_stages))
