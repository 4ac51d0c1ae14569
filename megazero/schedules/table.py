"""A user's own schedule as a table: comma-separated values, one line per pipeline rank, in the order in which it computes.

    F0,F1,B0,W0,B1,W1        F0 = forward of micro-batch 0, B0 = its backward, W0 = its weight gradient
    ,F0,B0,W0,F1,B1,W1       F0.1 = on the rank's second model chunk; empty cells and lines are skipped

Ranks, micro-batches and chunks are counted from the cells.  A file with forwards alone is for evaluation.  A schedule that
was read is not proved yet: `program` does that, as for every schedule.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from megazero.schedules.action import Action, ActionKind, Placement, Schedule, loop, v_shape

_CELL = re.compile(r"([FBW])([0-9]{1,7})(?:\.([0-9]{1,3}))?")
_EXPECTED = "expected F, B or W with a micro-batch, as F0, and after a dot the chunk where it is not 0, as F0.1"
_PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {"loop": loop, "v": lambda pp, _: v_shape(pp)}


def read_schedule(path: Path, placement: str = "loop") -> Schedule:
    """Read a table; the schedule's name is the file's, without its suffix.

    Args:
        path: of the file.
        placement: of the stages: "loop" deals them to the ranks once per chunk, "v" goes down the ranks and back up.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a table; the message names line and cell.
    """
    if placement not in _PLACEMENTS:
        raise ValueError(f"placement={placement} must be {' or '.join(_PLACEMENTS)}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            rows = [row for texts in reader if (row := _row(f"{path}, line {reader.line_num}", texts))]
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no UTF-8 text; expected lines such as F0,F1,B0,B1") from None
    except csv.Error as error:
        raise ValueError(f"{path} is no table of comma-separated values: {error}") from None
    cells = [cell for row in rows for cell in row]
    if not cells:
        raise ValueError(f"{path} holds no action; a line is a rank, such as F0,F1,B0,B1")
    microbatches = _count("micro-batch", ((action.microbatch, at, action) for at, action in cells))
    chunks = _count("chunk", ((action.chunk, at, action) for at, action in cells))
    if placement == "v" and chunks != 2:
        raise ValueError(f"{path}: placement v has two chunks on each rank, 0 and 1; the file has {chunks}")
    return Schedule(
        name=path.stem,
        microbatches=microbatches,
        placement=_PLACEMENTS[placement](len(rows), chunks),
        ranks=tuple(tuple(action for _, action in row) for row in rows),
        has_backward=any(action.kind is not ActionKind.FORWARD for _, action in cells),
    )


def _row(line: str, texts: list[str]) -> list[tuple[str, Action]]:
    """The actions of a line, each with its position in words."""
    row = []
    for number, text in enumerate(map(str.strip, texts), 1):
        at = f"{line}, cell {number}"
        if found := _CELL.fullmatch(text):
            kind, microbatch, chunk = found.groups()
            row.append((at, Action(ActionKind(kind), int(microbatch), int(chunk or 0))))
        elif text:
            raise ValueError(f"{at}: got {text[:40]!r}; {_EXPECTED}")
    return row


def _count(what: str, cells: Iterable[tuple[int, str, Action]]) -> int:
    """How many micro-batches or chunks (index, position, action) there are; every index below the highest is used."""
    found = {index: (at, action) for index, at, action in cells}
    highest = max(found)
    if len(found) <= highest:
        at, action = found[highest]
        missing = next(index for index in range(highest) if index not in found)
        raise ValueError(
            f"{at}: got {action}, but {what} {missing} is nowhere; expected numbers from 0 on without a gap"
        )
    return highest + 1


def write_text(path: Path, text: str) -> None:
    """Write a temporary file, then rename it to `path`, so that a reader never sees half a file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
