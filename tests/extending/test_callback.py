"""A script adds a callback: it adds a metric to every step and leaves one step out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import run_command, run_world
from quickstart import ONE_STAGE, QUICKSTART, TINY
from worlds import state_on

from megazero.config import ResolvedRun, load_config
from megazero.training.callbacks.registry import CALLBACKS
from megazero.training.trainer import train

pytestmark = pytest.mark.slow  # starts whole runs

SCRIPT = """
from megazero.comm.collectives import gather_objects
from megazero.training.callbacks.base import Callback
from megazero.training.callbacks.registry import CALLBACKS
from megazero.training.callbacks.base import StepDecision


class Seen(Callback):
    def __init__(self, context):
        self.state, self.seen = context.engine.state, 0

    def before_step(self, position):
        return StepDecision.SKIP if position.step + 1 == 3 else None

    def after_step(self, record):
        self.seen += 1
        everywhere = gather_objects(self.seen, self.state.world)
        record.metrics["seen_by_all_ranks"] = float(sum(everywhere))


CALLBACKS.register("seen", Seen)
"""
RUN = """
[model]
hidden_size = 32
num_layers = 2
num_heads = 4
ffn_hidden_size = 64
vocab_size = 257
seq_len = 16
[parallel]
tp = 2
pp = 2
dp = 2
[zero]
stage = 3
[precision]
dtype = "fp32"
[checkpoint]
asynchronous = false
[logging]
tensorboard = false
[launch]
extensions = ["{script}"]
[training]
run_dir = "{run_dir}"
steps = 5
global_batch_size = 8
compile = false
"""


@pytest.fixture(autouse=True, scope="module")
def _unregister() -> Iterator[None]:
    yield
    CALLBACKS._registered.pop("seen", None)


def _run(folder: Path, name: str, line: str) -> ResolvedRun:
    """The run file with one more line in its last section, for eight ranks."""
    (folder / "seen.py").write_text(SCRIPT)
    path = folder / f"{name}.toml"
    path.write_text(RUN.format(script=folder / "seen.py", run_dir=folder / name) + line)
    return load_config(path, world_size=8)


def _steps(run: ResolvedRun) -> list[dict[str, Any]]:
    run_world(8, lambda rank: train(run, state_on(rank, run), lambda _: None).step)
    return [json.loads(line) for line in (Path(run.config.training.run_dir) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_callback_measures_every_step_and_decides_while_the_other_steps_stay_the_same(tmp_path: Path) -> None:
    with_callback = _steps(_run(tmp_path, "with", 'callbacks = ["seen"]'))
    without = _steps(_run(tmp_path, "without", "skip_steps = [3]"))
    assert [line["seen_by_all_ranks"] for line in with_callback] == [8.0, 16.0, 24.0, 32.0, 40.0]
    assert [line.get("skipped") for line in with_callback] == [None, None, "passed over", None, None]
    for key in ("step", "loss", "grad_norm", "lr", "tokens", "skipped"):
        assert [line.get(key) for line in with_callback] == [line.get(key) for line in without], key
    assert len({line["loss"] for line in without if "loss" in line}) == 4


FAILING = """
from megazero.training.callbacks.base import Callback
from megazero.training.callbacks.registry import CALLBACKS


class Failing(Callback):
    def __init__(self, context):
        self.rank = context.engine.state.rank
        self.open("{factory}")

    def after_step(self, record):
        self.open("{hook}")

    def open(self, path):
        if path and self.rank == 1:
            open(path)


CALLBACKS.register("failing", Failing)
"""


CLOSING = """
from pathlib import Path

from megazero.training.callbacks.base import Callback
from megazero.training.callbacks.registry import CALLBACKS


class Closing(Callback):
    def close(self):
        Path("{closed}").touch()
        raise ValueError("not to be closed")


CALLBACKS.register("closing", lambda context: Closing())
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["factory", "hook"])
def test_an_error_of_a_callback_has_its_name_and_a_traceback_and_all_are_closed(tmp_path: Path, where: str) -> None:
    """Also an OSError, which has no traceback where the package itself meets it; an error while closing does not hide it."""
    closing, failing, closed = tmp_path / "closing.py", tmp_path / "failing.py", tmp_path / "closed"
    closing.write_text(CLOSING.format(closed=closed))
    failing.write_text(FAILING.format(**{"factory": "", "hook": "", where: "/no/such/file"}))
    words = [*TINY, *ONE_STAGE, "launch.nproc_per_node=2", f"training.run_dir={tmp_path / 'run'}", "training.steps=3"]
    words += [f'launch.extensions=["{closing}", "{failing}"]', 'training.callbacks=["closing", "failing"]']
    done = run_command("train", QUICKSTART, *words)
    assert done.returncode == 1
    assert "callback 'failing' (training.callbacks) failed: FileNotFoundError" in done.stderr
    assert f'File "{failing}", line ' in done.stderr
    assert "open(path)" in done.stderr
    assert "not to be closed" not in done.stderr
    assert closed.exists()
