"""Reading the pipeline schedule that a run file names as a CSV file."""

from __future__ import annotations

from pathlib import Path

from megazero.config import ResolvedRun
from megazero.schedules.action import Schedule
from megazero.schedules.kind import GivenSchedule
from megazero.schedules.proof import ScheduleError, program
from megazero.schedules.table import read_schedule


def read_own_schedule(run: ResolvedRun) -> Schedule | None:
    """Read and prove `parallel.schedule_file`; None where the run has none.  Raises: ScheduleError."""
    parallel = run.config.parallel
    if parallel.schedule_file is None:
        return None
    schedule = read_schedule(Path(parallel.schedule_file), parallel.schedule_placement)
    GivenSchedule(schedule).build(parallel.pp, run.accumulation, schedule.chunks)
    try:
        program(schedule)
    except ScheduleError as error:
        from megazero.tools.draw import draw_refused

        raise ScheduleError(f"{error}\n{draw_refused(schedule, error)}") from error
    return schedule
