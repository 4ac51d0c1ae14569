"""`megazero plan` as it is typed, and what a run says of its plan at step 10."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from harness import run_command
from typer.testing import CliRunner

from megazero.cli.commands import app
from megazero.config import load_config
from megazero.plan.cluster import cluster_of
from megazero.plan.correction import SavedPlan, add_measured, ratio_in, read_plan, shape_of
from megazero.plan.report import Assumptions, plan_of
from megazero.plan.search import Judge
from megazero.plan.step_time import step_time_of

RUN = """
[model]
hidden_size = 64
num_layers = 4
num_heads = 4
num_kv_heads = 2
vocab_size = 257
seq_len = 64
[precision]
dtype = "fp32"
[training]
global_batch_size = 16
micro_batch_size = 2
steps = 10
[data]
cache_dir = "{cache}"
[logging]
tensorboard = false
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace("{cache}", str(tmp_path / "cache")))
    return path


def _plan(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["plan", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


def test_a_plan_says_memory_step_traffic_and_run(file: Path, tmp_path: Path) -> None:
    page, numbers = tmp_path / "plan.html", tmp_path / "plan.json"
    words = ["--gpu", "h100", "--gpus", 8, "parallel.tp=2", "parallel.pp=2", "--dollars-per-hour", 2, "--tokens", 1e9]
    status, out, err = _plan(file, *words, "--html", page, "--json", numbers)
    assert status == 0, err
    for begin in ("model", "cluster", "shape", "memory", "step", "traffic", "run", "saving", "failures"):
        assert f"\n{begin} " in f"\n{out}", begin
    assert "tp 2 x pp 2 x dp 2, ZeRO 1, 1f1b, 4 micro-batches of 2" in out
    written = json.loads(numbers.read_text())
    assert written["fits"]
    assert sum(written["step"]["breakdown"].values()) == pytest.approx(written["step"]["seconds"])
    assert written["throughput"]["tokens_per_second"] == pytest.approx(16 * 64 / written["step"]["seconds"])
    assert written["cost"]["dollars"] == pytest.approx(2 * written["cost"]["device_hours"])
    for one in written["memory"]:
        assert sum(one["kinds"].values()) == one["peak"]
    words = ["--gpu", "h100", "--gpus", 4, "parallel.tp=1", "zero.stage=2", "--html", page]
    out = _plan(Path(__file__).parents[1] / "examples" / "quickstart.toml", *words)[1]
    assert re.search("^memory .* gradient buffers  ", out, re.MULTILINE), out
    assert "gradient_buffers" not in page.read_text()
    samples = re.findall(
        r'width="14.00" height="14.00" fill="(#\w+)"', page.read_text().partition("<h1>")[2].partition("</svg>")[0]
    )
    assert len(samples) == len({*samples}) >= 5  # of the legend of memory: no two kinds share a colour


@pytest.mark.slow
def test_the_page_shows_what_its_command_prints() -> None:
    page = (Path(__file__).parents[1] / "docs" / "plan.md").read_text(encoding="utf-8")
    command, _, shown = page.partition("\n$ megazero plan ")[2].partition("```")[0].partition("\n")
    file, *words = command.split()
    status, out, err = _plan(Path(__file__).parents[1] / file, *words)
    assert status == 0, err
    assert out.strip() == shown.strip()


def test_a_search_writes_a_run_file_that_check_accepts(file: Path, tmp_path: Path) -> None:
    best = tmp_path / "best.toml"
    words = ["--gpu", "h100", "--gpus", 2, "--per-node", 1, "--network", "ib200"]
    words += ["elastic.enabled=true", "elastic.shapes=[{world_size=2,tp=1,pp=1}]"]
    words += ["activations.contiguous=true"]
    status, out, err = _plan(file, *words, "--search", "--write", best, "--html", tmp_path / "page.html")
    assert status == 0, err
    assert "why 1" in out
    run = load_config(best, (), 2)
    assert run.global_batch_size == 16
    changed = next(line for line in out.splitlines() if line.startswith("changed  "))
    assert "elastic.enabled true -> false" in changed
    assert "activations.contiguous true -> false" in changed
    assert best.read_text().splitlines()[2] == "# changed: " + changed.removeprefix("changed  ")
    assert CliRunner().invoke(app, ["check", str(best), "--world-size", "2"]).exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h10", "--gpus", 8], "did you mean"),
        (["--gpu", "h100", "--gpus", 6, "parallel.tp=4"], "world_size = 6: must be divisible by tp*pp=4"),
        (["--gpu", "h100", "--write", "x.toml"], "--write is for a --search"),
        (["--gpu", "h100", "--corrected-by", "/none.json"], "/none.json is not there: megazero plan --keep"),
        (["--dry-run", "--gpus", 2, "--rank", 2], "--rank 2 must be from 0 to 1"),
        (
            ["--gpu", "h100", "parallel.tp=16", "model.num_heads=16", "model.num_kv_heads=16"],
            "for more ranks write --gpus",
        ),
        (["--gpu", "h100", "--tokens", "nan"], "Invalid value for '--tokens'"),
        (["--gpu", "h100", "--json", "/no/such/plan.json"], "cannot be written"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(file: Path, words: list[object], said: str) -> None:
    status, _, err = _plan(file, *words)
    assert status == 2
    assert said in err


def test_a_search_overwrites_only_what_a_search_wrote(file: Path) -> None:
    before = file.read_bytes()
    status, _, err = _plan(file, "--gpu", "h100", "--gpus", 2, "--search", "--write", file)
    assert (status, file.read_bytes()) == (2, before)
    assert "no search has written it" in err


def test_what_does_not_fit_is_refused_with_what_would(file: Path) -> None:
    """ZeRO 1 on two: (2 + 4 + 12/2) bytes of 4.0e9 parameters are 48 GB of 42.5.  Cut in two by tp they are 36."""
    big = ["model.hidden_size=8192", "model.num_layers=5", "model.num_heads=64", "model.num_kv_heads=64"]
    big += [f"zero.bucket_bytes={2**28}"]  # few buckets are traced sooner
    status, out, _ = _plan(file, "--gpu", "a100-40", "--gpus", 2, *big, "precision.dtype=bf16")
    assert status == 2
    assert "does not fit" in out
    assert "\nadvice " in out
    assert "parallel.tp=2" in out


def test_the_parts_of_every_ranks_time_are_the_step(file: Path) -> None:
    run = load_config(file, ("parallel.pp=4", "zero.stage=2"), 8)
    plan = plan_of(run, cluster_of("h100", 8, 4), Assumptions())
    for kinds in plan.time.by_activity:
        assert sum(kinds.values()) == pytest.approx(plan.time.seconds)
    slower = plan_of(run, cluster_of("h100", 8, 4), Assumptions(step_ratio=1.25))
    assert slower.time.seconds == pytest.approx(1.25 * plan.time.seconds)
    assert slower.time.timelines[0][-1].end == pytest.approx(1.25 * plan.time.timelines[0][-1].end)


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.pp=4", "training.micro_batch_size=1", "zero.stage=3"),
        ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2"),
        ("parallel.pp=4", "parallel.schedule=zbv", "training.micro_batch_size=1", "model.num_layers=8"),
    ],
)
def test_a_search_plays_some_micro_batches_for_all(file: Path, words: tuple[str, ...]) -> None:
    """The time of many is that of some and the same again for the others, to a half percent of playing all."""
    cluster = cluster_of("h100", 8, 4)
    run = load_config(file, ("training.global_batch_size=128", *words), 8)
    assert run.accumulation >= 16
    assert Judge(cluster).seconds(run) == pytest.approx(step_time_of(run, cluster).seconds, rel=0.005)


# ---- step 10


def _kept(run_shape: Mapping[str, object], device: str = "h100") -> SavedPlan:
    return SavedPlan(run_shape, device, seconds=2.0, peak=4 * 2**30, sent={"dp": 100})


def test_a_plan_of_the_same_shape_is_compared(file: Path) -> None:
    run = load_config(file, (), 2)
    line, found = _kept(shape_of(run)).compared(run, "h100", 2.5, 5 * 2**30, {"dp": 100})
    assert line == (
        "plan: step 2.000 s planned, 2.500 s measured (+25.0%) | memory 4.00 GiB planned, 5.00 GiB measured (+25.0%)"
        " | bytes sent: as planned"
    )
    assert (found["seconds_ratio"], found["peak_ratio"]) == (1.25, 1.25)
    line, found = _kept(shape_of(run)).compared(run, "a100-80", 2.5, None, {"dp": 90})
    assert line == "plan: bytes sent: dp 100 planned, 90 sent"
    assert "seconds_ratio" not in found
    assert _kept(shape_of(load_config(file, (), 4))).compared(run, "h100", 1, 1, {}) == ("", {})


def test_the_measured_ratio_corrects_plans_of_that_device(file: Path, tmp_path: Path) -> None:
    kept = tmp_path / "plan.json"
    assert _plan(file, "--gpu", "h100", "--gpus", 2, "--json", kept)[0] == 0
    with pytest.raises(ValueError, match="no measured step"):
        ratio_in(kept, "h100")
    add_measured(kept, {"seconds_ratio": 1.5})
    assert ratio_in(kept, "h100") == 1.5
    with pytest.raises(ValueError, match="the plan is for a10"):
        ratio_in(kept, "a10")
    written = json.loads(kept.read_text())
    for ratio in (float("nan"), "1"):
        (damaged := tmp_path / "damaged.json").write_text(json.dumps(written | {"measured": {"seconds_ratio": ratio}}))
        with pytest.raises(ValueError, match="is no plan"):
            read_plan(damaged)
    again = tmp_path / "again.json"
    assert _plan(file, "--gpu", "h100", "--gpus", 2, "--json", again, "--corrected-by", kept)[0] == 0
    before = read_plan(kept)
    assert before.ratio == 1.5
    assert read_plan(again) == replace(before, seconds=pytest.approx(1.5 * before.seconds), ratio=None)


@pytest.mark.parametrize("text", ["garbage", "[" * 100_000, '{"cluster": [], "measured": []}'])
def test_a_damaged_plan_is_an_error_of_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json is no plan"):
        read_plan(path)


def test_a_run_says_at_step_10_that_it_sent_what_was_planned(file: Path, tmp_path: Path) -> None:
    """Two real ranks over gloo: bytes equal on every axis.  The time is not compared: the plan is for another device."""
    words = (f"training.run_dir={tmp_path / 'run'}", "parallel.tp=2", "launch.device=cpu")
    assert _plan(file, *words, "--gpu", "h100", "--gpus", 2, "--keep")[0] == 0
    done = run_command("train", file, *words, "launch.nproc_per_node=2")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "plan: " in line] == ["plan: bytes sent: as planned"]
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["measured"]["sent"]
