"""The memory report: its figures are the paper's, its files can be read, its errors say what is wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_program
from typer.testing import CliRunner

from megazero.cli.commands import app
from megazero.plan.memory_report import live_memory, not_measured, plan

pytestmark = pytest.mark.slow  # starts whole runs

EXAMPLE = Path(__file__).parent.parent / "examples" / "zero_memory_report.py"
FIRST = {"stages": "0", "precision": ["bf16"], "offload": ["none"]}
ODD = ["model.hidden_size=24", "model.num_layers=2", "model.num_heads=2", "model.ffn_hidden_size=40"]
ODD += ["model.vocab_size=61", "model.seq_len=16", "zero.bucket_bytes=8192", "launch.device=cpu"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The example on two ranks, for every stage."""
    out = tmp_path_factory.mktemp("report")
    words = "--ranks 2 --precision bf16 --iterations 1 --activations none,mlp+norms,full"
    options = [*words.split(), "--out", out, *ODD]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, EXAMPLE, *options]
    ran = run_program(*command, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, out


@pytest.fixture(scope="module")
def rows(measured: tuple[str, Path]) -> list[dict[str, Any]]:
    return json.loads((measured[1] / "memory.json").read_text())["rows"]


def test_every_stage_with_and_without_offload_is_measured(rows: list[dict[str, Any]]) -> None:
    """The formulas are laws of tests/laws/test_memory.py and test_traffic.py; here the plan's figures are those measured."""
    assert [(row["stage"], row["offload"]) for row in rows] == [(s, o) for s in range(4) for o in ("none", "cpu")]
    for row in rows:
        assert row["state_over_plan"] == row["sent_over_plan"] == 1
        assert row["measured"]["buffer_bytes"] == row["planned"]["buffer_bytes"]
        for rank in row["ranks"]:
            assert any(" on " in kind for kind in rank["counted"]) == (row["offload"] != "none")


def test_what_each_policy_keeps_is_planned_and_printed(measured: tuple[str, Path]) -> None:
    """The policies' bytes a token of one layer; docs/activations.md has the formulas."""
    h, k, f, a, tokens = 24, 24, 40, 2, 16
    wanted = {"none": 12 * h + 4 * k + 6 * f + 4 * a + 8, "mlp+norms": 8 * h + 4 * k + 4 * a, "full": 2 * h}
    policies = json.loads((measured[1] / "memory.json").read_text())["policies"]
    assert [row["policy"] for row in policies] == list(wanted)
    for row in policies:
        for rank in row["ranks"]:
            assert rank["layer"] == tokens * wanted[row["policy"]]
            assert rank["planned"]["kept"] <= rank["allocated"]
    assert "mlp+norms" in measured[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stages", "0,7"], "zero.stage"),
        (["--precision", "bf61"], 'write "bf16"'),
        (["--activations", "mlpp"], 'write ["mlp"]'),
        (["activations.recompute=full"], "use --activations"),
        (["--ranks", "3", "parallel.tp=2"], "launch.nproc_per_node = 3: must be divisible by tp*pp=2"),
    ],
)
def test_a_bad_option_is_told_with_exit_code_2(options: list[str], said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["memory-report", "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 2
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_every_policy_has_a_row_of_its_own_and_is_counted_on_the_device() -> None:
    """Whatever the run file says of offloading and of single pipeline ranks."""
    words = ["activations.offload=host", "activations.stages=[{stage=0,recompute='full'}]"]
    _, policies = plan(FIRST, words, policies=["none", "mlp"])
    found = {about["policy"]: run.config.activations for about, run in policies}
    assert {name: (own.offload, own.stages) for name, own in found.items()} == dict.fromkeys(found, ("none", ()))
    assert [own.recompute for own in found.values()] == ["none", ("mlp",)]


def test_keys_that_rows_are_measured_without_are_told() -> None:
    runs, _ = plan(FIRST, ["activations.contiguous=true", "activations.stages=[{stage=0,layers=1}]"])
    assert not_measured(runs[0][1]) == ["activations.contiguous", "activations.stages"]


def test_what_cannot_be_written_is_told_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "memory.json").mkdir()
    done = CliRunner().invoke(app, ["memory-report", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr == f"error: {tmp_path}/memory.json is a directory; remove it, or name another --out\n"


def test_live_memory_is_that_of_the_last_step() -> None:
    saved = []
    with live_memory(torch.device("cpu")) as measure:
        saved.append(torch.zeros(1000))
        for size in (500, 100):
            measure.start()
            torch.zeros(size)
    assert (measure.before, measure.peak) == (4000, 4400)
