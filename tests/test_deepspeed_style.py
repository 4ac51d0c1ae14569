"""The examples in DeepSpeed's style: the JSON alone changes what a run costs, and nothing changes what it learns."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world

pytestmark = pytest.mark.slow  # starts whole runs

FOLDER = Path(__file__).parent.parent / "examples" / "deepspeed_style"


def _losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", said, re.MULTILINE)]


def _script(rank: int, name: str, options: list[Any]) -> str:
    """What a script says in this process, which has its place among the ranks already."""
    torch.cuda.is_available = lambda: False
    sys.argv = [name, *map(str, options)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    return said.getvalue()


def test_the_json_alone_changes_the_stage_and_the_ranks_see_one_run() -> None:
    """fp16 has 11 bits, and 100 steps follow each other's rounding: losses agree to a few thousandths."""
    found = []
    for world, stage in ((2, 2), (4, 3)):
        options = ["--deepspeed_config", FOLDER / f"ds_config_zero{stage}.json"]
        said, *others = run_world(world, _script, "train_zero.py", options)
        assert not any(others)
        found.append(_losses(said))
    two, four = found
    assert len(two) == 6
    assert two[-1] < 0.2 * two[0]
    assert four == pytest.approx(two, rel=5e-3, abs=5e-3)


def _pipeline(rank: int, stages: int, stage: int, schedule: str, folder: Path) -> str:
    config = json.loads((FOLDER / "ds_config_pipeline.json").read_text())
    config["zero_optimization"]["stage"] = stage
    path = folder / f"{stages}-{stage}-{rank}.json"
    path.write_text(json.dumps(config))
    return _script(rank, "train_pipeline.py", ["--stages", stages, "--schedule", schedule, "--deepspeed_config", path])


def test_a_pipeline_gives_one_run_on_one_rank_and_cut_in_four(tmp_path: Path) -> None:
    expected = _losses(run_world(1, _pipeline, 1, 0, "1f1b", tmp_path)[0])
    assert len(expected) == 5
    assert expected[-1] < 0.7 * expected[0]
    said, *others = run_world(4, _pipeline, 2, 3, "1f1b", tmp_path)
    assert _losses(said) == pytest.approx(expected, rel=1e-3)
    assert not any(others)
