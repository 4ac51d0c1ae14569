"""The memory report: its figures are the paper's, its files can be read, its errors say what is wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from harness import run_program, run_world
from typer.testing import CliRunner
from worlds import run_of, state_on

from megazero.cli.commands import app
from megazero.config import ResolvedRun
from megazero.plan.measured_step import START, ActivationFigures, live_memory, measure_activations
from megazero.plan.memory_report import not_measured, plan

pytestmark = pytest.mark.slow  # starts whole runs

EXAMPLE = Path(__file__).parent.parent / "examples" / "zero_memory_report.py"
ODD_HIDDEN, ODD_FFN = 24, 40
FIRST = {"stages": "0", "precision": ["bf16"], "offload": ["none"]}
ODD = ["model.hidden_size=24", "model.num_layers=2", "model.num_heads=2", "model.ffn_hidden_size=40"]
ODD += ["model.vocab_size=61", "model.seq_len=16", "zero.bucket_bytes=8192", "launch.device=cpu"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The example on two ranks, for every stage."""
    out = tmp_path_factory.mktemp("report")
    options = [
        "--ranks",
        "2",
        "--precision",
        "bf16",
        "--iterations",
        "1",
        "--activations",
        "none,mlp+norms,full",
        "--out",
        out,
        *ODD,
    ]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, EXAMPLE, *options]
    ran = run_program(*command, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, out


@pytest.fixture(scope="module")
def rows(measured: tuple[str, Path]) -> list[dict[str, Any]]:
    return json.loads((measured[1] / "memory.json").read_text())["rows"]


def _kept(rank: dict[str, Any]) -> int:
    counted = rank["counted"]["step"]
    return sum(
        size for kind, size in counted.items() if kind.split(" on ")[0] in ("parameters", "gradients", "optimizer")
    )


def test_every_stage_with_and_without_offload_is_measured(rows: list[dict[str, Any]]) -> None:
    assert [(row["stage"], row["offload"]) for row in rows] == [(s, o) for s in range(4) for o in ("none", "cpu")]


def test_a_rank_keeps_the_papers_bytes_within_padding(rows: list[dict[str, Any]]) -> None:
    """Rajbhandari et al. 2020, figure 1, with fp32 gradients."""
    per_parameter = {0: 2 + 4 + 12, 1: 2 + 4 + 12 / 2, 2: 2 + (4 + 12) / 2, 3: 18 / 2}
    for row in rows:
        if row["offload"] != "none":
            continue
        first, last = row["ranks"]
        elements, padding = first["elements"], first["padding"]
        assert 0 < padding < 0.02 * elements
        paper = per_parameter[row["stage"]] * elements
        assert _kept(first) + _kept(last) >= 2 * paper
        assert paper <= _kept(first) <= paper + 18 * padding
        assert row["state_over_plan"] == 1


def test_offload_moves_masters_moments_and_the_gradient_that_steps_them(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        counted = row["ranks"][0]["counted"]["step"]
        away = sum(size for kind, size in counted.items() if " on " in kind)
        owned = row["ranks"][0]["elements"] / (2 if row["stage"] else 1)
        if row["offload"] == "none":
            assert away == 0
        else:
            assert 16 * owned <= away <= 16 * (owned + row["ranks"][0]["padding"])


def test_the_buffers_are_at_most_what_the_formula_allows(rows: list[dict[str, Any]]) -> None:
    """bf16 weights, fp32 gradients, buckets of 8 KiB that every block is larger than; see docs/shapes.md."""
    h, f = ODD_HIDDEN, ODD_FFN
    block = 4 * h * h + 3 * h * f + 2 * h
    for row in rows:
        assert row["measured"]["buffer_bytes"] <= row["planned"]["most_buffer_bytes"]
        for rank in row["ranks"]:
            counted = rank["counted"]["step"]
            assert 0 <= counted["gradient_buffers"] <= rank["most_gradient_buffers"]
            if row["stage"] == 3:
                sizes = [2 * (block + -block % 32)] * 2  # two blocks, the embedding and the head take turns
                assert row["planned"]["gather_buffers"] == sizes
                assert counted["gather_buffers"] == sum(sizes)
                assert 2 * 4 * block <= rank["most_gradient_buffers"] <= 2 * 4 * (block + 31)
            elif row["stage"] == 2:
                assert rank["most_gradient_buffers"] == 2 * 8192


def test_live_tensors_are_what_is_counted_and_activations(rows: list[dict[str, Any]]) -> None:
    """What is measured holds what is counted; after a step hardly more than the batch is left beside it."""
    for row in rows:
        for rank in row["ranks"]:
            counted = {point: sum(kinds.values()) for point, kinds in rank["counted"].items()}
            assert all(rank["live"][point] >= counted[point] for point in counted)
            assert rank["live"]["step"] < counted["step"] + 16384
            assert rank["live"]["forward"] - counted["forward"] > rank["live"]["step"] - counted["step"]
            assert rank["peak"] >= max(rank["live"].values())


def test_a_step_sends_the_papers_bytes_within_padding(rows: list[dict[str, Any]]) -> None:
    """Section 7, for gradients of 4 bytes, weights of 2, one micro-batch and 2 ranks; stage 3 may send less."""
    per_parameter = {0: 2 * 4, 1: 4 + 2, 2: 4 + 2, 3: 4 + 2 * 2}
    for row in rows:
        rank = row["ranks"][0]
        paper = per_parameter[row["stage"]] * rank["elements"] / 2
        sent = sum(rank["sent"]["dp"].values())
        assert sent <= paper + 8 * rank["padding"] + 16
        assert sent >= (0.6 if row["stage"] == 3 else 1) * paper
        assert row["sent_over_plan"] == 1


def test_what_each_policy_keeps_is_planned_and_drawn(measured: tuple[str, Path]) -> None:
    """The policies' bytes a token of one layer; docs/activations.md has the formulas."""
    h, k, f, a, tokens = 24, 24, 40, 2, 16
    wanted = {"none": 12 * h + 4 * k + 6 * f + 4 * a + 8, "mlp+norms": 8 * h + 4 * k + 4 * a, "full": 2 * h}
    policies = json.loads((measured[1] / "memory.json").read_text())["policies"]
    assert [row["policy"] for row in policies] == list(wanted)
    for row in policies:
        for rank in row["ranks"]:
            assert rank["layer"] == tokens * wanted[row["policy"]]
            assert rank["planned"] <= rank["live"]
            assert max(count for _, count in rank["course"]) == rank["live"]
    picture = (measured[1] / "activations.svg").read_text()
    lines = list(ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == len(wanted)
    assert "mlp+norms" in measured[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stages", "0,7"], "zero.stage"),
        (["--precision", "bf61"], 'write "bf16"'),
        (["--activations", "mpl"], 'write ["mlp"]'),
        (["activations.recompute=full"], "use --activations"),
        (["--ranks", "0"], "--ranks 0 must be at least 1"),
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
    found = {name: run.config.activations for name, run in policies.items()}
    assert {name: (own.offload, own.stages) for name, own in found.items()} == dict.fromkeys(found, ("none", ()))
    assert [own.recompute for own in found.values()] == ["none", ("mlp",)]


def test_a_row_is_named_by_what_acts_on_its_policy_and_what_is_not_measured_is_told() -> None:
    words = ["activations.contiguous=true", "activations.stages=[{stage=0,layers=1}]"]
    runs, policies = plan(FIRST, ["activations.keep_attention=true", *words], policies=["mlp", "full"])
    assert [*policies] == ["mlp", "block but attention"]
    assert not_measured(next(iter(runs.values()))) == ["activations.contiguous", "activations.stages"]


def _activations_of(rank: int, run: ResolvedRun) -> ActivationFigures:
    return measure_activations(run, state_on(rank, run))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_a_step_allocates_holds_what_it_keeps(accumulation: int) -> None:
    """One micro-batch alone lets the step begin with the memory of the last gradients freed: they are allocated anew."""
    model = {
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 2,
        "ffn_hidden_size": 256,
        "vocab_size": 61,
        "seq_len": 16,
    }
    run = run_of(1, model=model, training={"micro_batch_size": 1, "global_batch_size": accumulation})
    (figures,) = run_world(1, _activations_of, run)
    assert 0 < figures.planned <= figures.live
    assert min(count for _, count in figures.course) >= -4096  # nothing of before is freed


def test_what_cannot_be_written_is_told_before_measuring_and_behind_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.json").mkdir()
    done = CliRunner().invoke(app, ["memory-report", "--out", str(tmp_path)])
    assert (done.exit_code, done.stderr) == (
        2,
        f"error: {tmp_path}/memory.json is a directory; remove it, or name another --out\n",
    )

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megazero.training.launch.run_ranks", lambda *_: SimpleNamespace(as_json=dict))
    monkeypatch.setattr("megazero.plan.memory_chart.draw_text", lambda _: "the tables")
    monkeypatch.setattr("megazero.schedules.action.write_text", full)
    done = CliRunner().invoke(app, ["memory-report", "--out", str(tmp_path / "other"), *ODD])
    assert (done.exit_code, done.stdout) == (2, "the tables\n")
    assert done.stderr.endswith("error: [Errno 28] No space left on device\n")


def test_live_memory_is_that_of_the_last_step() -> None:
    kept = []
    with live_memory(torch.device("cpu")) as measure:
        kept.append(torch.zeros(1000))
        for size in (500, 100):
            measure.mark(START)
            temporary = torch.zeros(size)
            measure.mark("pass")
            del temporary
            measure.mark("pass")
            measure.mark("step")
    assert measure.live == {START: 4000, "pass": 4400, "step": 4000}
    assert measure.peak == 4400
