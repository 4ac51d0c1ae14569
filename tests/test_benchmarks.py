"""Each benchmark runs, its contenders do the same work, and its figures follow from what was measured."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from harness import start_program

from benchmarks import activations, gpu, gpu_step
from benchmarks.all import Case, exposed_share, lines_of, run
from benchmarks.attention_work import AttentionWork
from benchmarks.context import BUILDERS, FLOORS, peaks_of
from benchmarks.context import measure as measure_attention
from benchmarks.hosts_net import NoHostsError
from benchmarks.rows import FLOOR, KINDS, OURS, SHIPPED, measure, setting_of

pytestmark = pytest.mark.slow  # starts whole runs


def test_contenders_that_do_the_same_work_are_measured_side_by_side() -> None:
    setting = setting_of(KINDS["dp"], "smoke", 2)
    lines = measure(setting, [SHIPPED, "ddp"], rounds=1, steps=1)
    assert [line.name for line in lines] == [OURS, SHIPPED, "ddp", FLOOR]
    ours, _, peer, floor = (json.loads(json.dumps(asdict(line))) for line in lines)
    assert peer["loss_difference"] < 1e-5
    assert peer["ratio"][0] == pytest.approx(ours["ms"][0] / peer["ms"][0])
    assert peer["over_floor"] == pytest.approx(peer["ms"][0] / floor["ms"][0])
    assert min(ours["state_bytes"], peer["state_bytes"], peer["loopback_bytes"], ours["metered_bytes"]) > 0


def test_contenders_of_two_hosts_are_measured_side_by_side() -> None:
    case = Case("dp", "smoke", 2, 2, 1000)
    try:
        row = run(case, rounds=1, steps=1, variants=["zero.stage=1"])
    except NoHostsError as error:
        pytest.skip(str(error))
    lines = lines_of(row)
    assert list(lines) == [OURS, "megazero with zero.stage=1", "ddp", FLOOR]
    gradients = lines[OURS].metered_bytes  # of two ranks, each sends half the gradients twice
    assert gradients is not None
    for name in (OURS, "megazero with zero.stage=1", "ddp"):
        assert lines[name].busiest_bytes > 0.95 * gradients  # type: ignore[operator]
        assert exposed_share(lines[name], lines[FLOOR], 1000) is not None
    assert lines[FLOOR].busiest_bytes < 0.05 * gradients  # type: ignore[operator]


def test_every_way_computes_attention_of_the_whole_sequence() -> None:
    work = AttentionWork(64, 4, "bf16", 8, 2, 16)
    names = [name for name in BUILDERS if name != "DeepSpeed Ulysses"]
    measured, _ = measure_attention(work, peaks_of(work, names), seconds=0)
    lines = {line.name: line for line in measured}
    assert not [line for line in measured if line.failure]
    assert all(line.error is not None for name, line in lines.items() if name not in FLOORS)
    # keys and values twice, and their gradients in fp32 once, to all other ranks: 64 tokens, 2 heads of 16
    assert lines["megazero ring"].metered_bytes == 2 * (2 * 2 + 4) * (2 * 16) * 64 * 3 / 4


def test_activation_policies_give_the_same_gradients() -> None:
    x, slope = torch.randn(2, 8, 1, 512, generator=torch.Generator().manual_seed(0))
    kept = activations.check_same(activations.contenders(8, "fp32", 1), x, slope, "fp32")
    assert kept["block"] == 8 * 512 * 4  # the result


def test_the_queue_of_a_gpu_rehearses(tmp_path: Path) -> None:
    """Every check of it runs in small on a CPU, and is not run again for the same code."""
    run = start_program(sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--folder", tmp_path, cwd=gpu.ROOT)
    output, _ = run.communicate()
    assert run.returncode == 0, output
    found = gpu.read_outcomes(tmp_path)
    assert {check.name for check in gpu.QUEUE} == set(found)
    assert all(name in (tmp_path / "README.md").read_text() for name in found)
    planned = found["plan"].report
    assert planned is not None
    assert any(line["name"].startswith("policies: ") and line["planned_ms"] > 0 for line in planned["planned"])
    where, small = gpu.where_measured(), [replace(check, command=check.rehearsal) for check in gpu.QUEUE]
    assert not gpu.queue_of(small, found, where, 2)
    assert gpu.queue_of(gpu.QUEUE, found, where, 2) == list(gpu.QUEUE)  # what is small stands for nothing else
    assert [check.name for check in gpu.QUEUE if check not in gpu.queue_of(gpu.QUEUE, {}, where, 1)] == ["tp"]
    found["laws"].ended = "failed (1)"
    again = gpu.queue_of([small[0], replace(small[1], command="new")], found, where, 2)
    assert [check.name for check in again] == ["train", "laws"], "what has failed with this code is tried again last"


def test_every_test_that_the_queue_names_is_there() -> None:
    for command in (one for check in gpu.QUEUE for one in (check.command, check.rehearsal) if " pytest " in one):
        words = shlex.split(command)
        files = [(gpu.ROOT / word).read_text() for word in words if word.startswith("tests/")]
        wanted = words[words.index("-k") + 1].split(" or ") if "-k" in words else []
        assert all(any(re.search(rf"def test_\w*{word}", text) for text in files) for word in wanted), command


def test_contenders_of_a_gpus_step_train_the_same_model_on_a_cpu() -> None:
    setting = gpu_step.Setting("tiny", "bf16", 1, 2, compile=False, options=("model.num_kv_heads=2",))
    variant = replace(setting, options=(*setting.options, "activations.recompute=full"))
    settings = {"megazero": setting, "megazero, recompute": variant, "plain PyTorch": setting}
    lines = gpu_step.measure(settings, torch.device("cpu"), rounds=1, steps=1, apart=True, profile=None)
    assert [line.name for line in lines] == list(settings)
    for line in lines:
        assert line.tokens_per_second == pytest.approx(2 * 64 / line.median_ms * 1e3)
        assert len(line.losses) == gpu_step.CHECKED_STEPS
