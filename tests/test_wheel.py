"""What `python -m build` makes: a wheel that trains where nothing of the checkout can be seen."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import metrics_of, without_launcher
from quickstart import ONE_STAGE, QUICKSTART, ROOT, TINY


@pytest.mark.slow
def test_the_wheel_trains_in_a_fresh_environment(tmp_path: Path) -> None:
    """With the tested versions of what it needs: a .pth shows their folder, and none of the .pth files in it is read."""
    source, environment, python = tmp_path / "source", tmp_path / "env", tmp_path / "env" / "bin" / "python"
    shutil.copytree(ROOT / "megazero", source / "megazero", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    def run(*words: str | Path) -> str:
        given = {key: value for key, value in without_launcher().items() if key != "PYTHONPATH"}
        done = subprocess.run(words, env=given, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source)
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    (wheel,) = tmp_path.glob("megazero-*.whl")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    shipped = {path.relative_to(source) for path in source.glob("megazero/**/*.*")}
    assert not [path for path in shipped if not (packages / path).exists()]
    (packages / "tested.pth").write_text(str(Path(torch.__file__).parents[1]))
    shutil.rmtree(source)
    small = [*TINY, *ONE_STAGE, "training.steps=3", "launch.nproc_per_node=2", "launch.device=cpu"]
    run(environment / "bin" / "megazero", "train", shutil.copy(QUICKSTART, tmp_path), *small)
    assert len(metrics_of(tmp_path / "runs" / "quickstart")) == 3
    found = run(python, "-c", "import megazero, os; print(os.path.dirname(megazero.__file__))")
    assert Path(found.strip()) == packages / "megazero"
