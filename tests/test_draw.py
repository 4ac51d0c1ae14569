"""Pictures, traces and tables say what the timeline says, and the command that shows them refuses what cannot be."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from megazero.cli.commands import app
from megazero.plan.schedule_drawing import Figures, compare_table
from megazero.schedules.action import Schedule, read_schedule
from megazero.schedules.factory import forward_only
from megazero.schedules.proof import Costs
from megazero.schedules.registry import SCHEDULES

PAGE = Path(__file__).parent.parent / "docs" / "schedules.md"


# ---- comparison


def test_the_comparison_has_a_row_for_every_schedule_whose_figures_agree() -> None:
    """`test_schedules.py` holds idle time and activations to the papers."""
    for pp, m, v in ((2, 4, 2), (4, 8, 4), (3, 9, 3)):
        rows = {name: figures for name, _, figures in compare_table(pp, m, v, Costs(1, 2, 1))}
        assert list(rows) == list(SCHEDULES)
        for figures in rows.values():
            assert isinstance(figures, Figures)
            assert figures.makespan == pytest.approx(4 * m + figures.idle)
            assert figures.bubble_fraction == pytest.approx(figures.idle / figures.makespan)


def test_the_comparison_says_why_a_schedule_is_impossible_and_takes_ones_own() -> None:
    own = replace(SCHEDULES["1f1b"].build(4, 6, 1), name="mine")
    rows = {name: figures for name, _, figures in compare_table(4, 6, 2, own=[own])}
    rows.pop("interleaved-pairs")
    why = rows.pop("interleaved")
    assert isinstance(why, str)
    assert "multiples of pp=4, got 6" in why
    assert rows["mine"] == rows["1f1b"]
    assert all(isinstance(figures, Figures) for figures in rows.values())


# ---- tables


def write_schedule(schedule: Schedule, path: Path) -> None:
    rows = []
    for rank, actions in enumerate(schedule.ranks):
        cells = dict.fromkeys("&".join(map(str, schedule.together(rank, action))) for action in actions)
        rows.append(",".join(cells) + "\n")
    path.write_text("".join(rows), encoding="utf-8")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 6), st.integers(1, 12), st.integers(2, 4))
def test_a_table_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, name: str, pp: int, m: int, v: int
) -> None:
    kind = SCHEDULES[name]
    schedule = kind.build(pp, m if kind.chunks else m * pp, kind.chunks or v)
    for whole in (schedule, forward_only(schedule)):
        path = tmp_path_factory.getbasetemp() / f"{whole.name}.csv"
        write_schedule(whole, path)
        assert read_schedule(path, "v" if name in ("zbv", "dualpipev") else "loop") == whole


def table(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "placement", "told"),
    [
        ("F0,B0\nF0,X0\n", "loop", r"line 2, cell 2: got 'X0'; expected F, B or W"),
        ("F0,F2,B0,B2\n", "loop", r"line 1, cell 4: got B2, but micro-batch 1 is nowhere"),
        ("F0,B0\n", "ring", r"placement=ring must be loop or v"),
        (",\n\n", "loop", r"holds no action"),
    ],
)
def test_a_table_that_is_none_is_refused_by_line_and_cell(tmp_path: Path, text: str, placement: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_schedule(table(tmp_path / "mine.csv", text), placement)


# ---- the command


def show(*words: str | Path, columns: int = 100) -> Result:
    return CliRunner().invoke(app, ["schedule", "show", *map(str, words)], env={"COLUMNS": str(columns)})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--schedule interleved --pp 4 --microbatches 8", "unknown schedule interleved; did you mean interleaved?"),
        ("--pp 4", "needs --pp and --microbatches"),
        ("--pp 4 --microbatches 8 --costs 1,2", "costs=1,2 must be four numbers F,B,W,hop"),
        ("--pp 4 --microbatches 8 --placement v", "placement=v is for the schedule of a --file"),
        ("--file none.csv", "none.csv"),
    ],
)
def test_a_bad_value_is_one_error_and_exit_code_2(words: str, told: str) -> None:
    done = show(*words.split())
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert told in done.stderr


def test_a_broken_file_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    broken = table(tmp_path / "mine.csv", "F0,B0,F1,B1\nF1,B1,F0,B0\n")
    done = show("--file", broken, "--svg", tmp_path / "mine.svg")
    assert done.exit_code == 2
    assert "mine: deadlock; rank 0 stops at B0" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]
    whole = table(tmp_path / "mine.csv", "F0,B0\n,F0,B0\n")
    disagrees = show("--file", whole, "--pp", "3")
    assert (disagrees.exit_code, "pp=3, but the schedule mine has 2" in disagrees.stderr) == (2, True)


def test_the_command_writes_whole_files_and_compares_ones_own(tmp_path: Path) -> None:
    write_schedule(SCHEDULES["zbv"].build(2, 4, 2), tmp_path / "mine.csv")
    words = ["--file", tmp_path / "mine.csv", "--placement", "v", "--compare"]
    done = show(*words, "--svg", tmp_path / "a.svg", "--trace", tmp_path / "a.json")
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"mine.csv", "a.svg", "a.json"}
    ET.parse(tmp_path / "a.svg")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 4 * 2 * 3
    rows = [line.split() for line in done.stdout.splitlines()]
    assert next(row for row in rows if row[:1] == ["mine"])[1:] == next(row for row in rows if row[:1] == ["zbv"])[1:]
    for wrong in (tmp_path / "mine.csv" / "a.svg", "."):  # a folder that is missing is made
        failed = show(*words, "--svg", wrong)
        assert (failed.exit_code, failed.stderr.count("\n")) == (1, 1)
        assert f"{wrong} cannot be written" in failed.stderr


def test_the_command_starts_without_torch_and_without_colour_in_a_pipe() -> None:
    code = (
        "import sys; sys.argv[1:] = 'schedule show --pp 2 --microbatches 2 --compare'.split()\n"
        "from megazero.cli.commands import app\napp(standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout


def test_the_page_shows_what_its_commands_print() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"```sh\nmegazero schedule show ([^\n]+)\n```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 1 + len(list(SCHEDULES))
    for words, text in shown:
        done = show(*shlex.split(words))
        assert done.exit_code == 0, done.stderr
        assert text == "".join(line.rstrip() + "\n" for line in done.stdout.strip("\n").split("\n")), words
