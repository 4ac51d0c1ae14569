"""The trunk without its annexes: a copy of the package in which their folders are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from harness import run_world
from quickstart import QUICKSTART, TINY
from test_house import ANNEXES, PACKAGE
from worlds import LLAMA, run_of, state_on

from megazero import registry
from megazero.config import ResolvedRun
from megazero.training.trainer import train

_ARGUMENTS = [*TINY, "launch.nproc_per_node=2", "parallel.tp=1", "parallel.pp=2", "training.steps=2"]


def _package_without(folder: Path, annexes: Iterable[str]) -> Path:
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for annex in annexes:
        shutil.rmtree(folder / PACKAGE.name / annex)
    return folder


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the package without its annexes."""
    return _package_without(tmp_path_factory.mktemp("trunk"), ANNEXES)


def _megazero(folder: Path, *words: str) -> str:
    program = [sys.executable, "-m", "megazero.cli", *words]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_trunk_checks_trains_resumes_and_exports_without_its_annexes(trunk: Path) -> None:
    described = _megazero(trunk, "check", str(QUICKSTART), *_ARGUMENTS, "--world-size", "2")
    assert "schedule" in described
    assert "memory" not in described
    _megazero(trunk, "train", str(QUICKSTART), *_ARGUMENTS)
    resumed = _megazero(
        trunk, "train", str(QUICKSTART), *_ARGUMENTS, "training.steps=4", "zero.stage=3", "parallel.pp=1"
    )
    assert "step 4" in resumed
    steps = sorted((trunk / "runs").rglob("step-*"))
    _megazero(trunk, "checkpoint", "export", str(steps[-1]), str(trunk / "model"))
    assert (trunk / "model" / "model.safetensors").is_file()


def test_a_command_of_an_annex_that_is_not_there_is_no_command(trunk: Path) -> None:
    assert " plan " not in _megazero(trunk, "--help")


def test_a_plan_for_gpus_needs_no_annex_for_cpus(tmp_path: Path) -> None:
    folder = _package_without(tmp_path, ["cpu"])
    planned = _megazero(folder, "plan", str(QUICKSTART), *_ARGUMENTS, "launch.device=cuda", "--gpu", "h200")
    assert "cluster  2 x h200" in planned


@pytest.fixture
def _all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all annexes, as users have them: `warm` leaves a line out."""
    monkeypatch.setattr(registry, "_tables", registry._tables.__wrapped__)


@pytest.mark.usefixtures("_all_tables")
def test_annexes_add_what_exists_at_seams_that_the_table_names() -> None:
    seams = {line[4:].split("  ")[0] for line in (registry.__doc__ or "").splitlines() if line.startswith("    ")}
    for table in registry._tables():
        assert {*table} <= seams
        for seam in table:
            assert registry.added(seam).keys() >= table[seam].keys()


def _said(rank: int, run: ResolvedRun) -> list[str]:
    said: list[str] = []
    train(run, state_on(rank, run), said.append)
    return said


@pytest.mark.usefixtures("_all_tables")
def test_a_start_says_what_its_fullest_rank_keeps_of_activations(tmp_path: Path) -> None:
    run = run_of(1, model=LLAMA | {"vocab_size": 257}, training={"run_dir": str(tmp_path), "steps": 1})
    assert any(line.startswith("activations on ") for line in run_world(1, _said, run)[0])
