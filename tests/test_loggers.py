"""W&B, MLflow and trackio, offline: what each has kept, read with its own library, beside metrics.jsonl."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from harness import metrics_of, run_command, run_world
from quickstart import ONE_STAGE, QUICKSTART, TINY
from test_training import _record
from worlds import LLAMA, loop_of, run_of, state_on

from megazero.config import ResolvedRun
from megazero.engine import Position
from megazero.training.callbacks import loggers
from megazero.training.callbacks.base import Callback, RunContext, StepRecord
from megazero.training.callbacks.metrics import as_json
from megazero.training.callbacks.registry import LOGGERS
from megazero.training.trainer import train

Numbers = dict[str, list[tuple[int, float]]]  # (step, value) of each metric, in the order in which they were logged
SERVICES = ["wandb", "mlflow", "trackio"]


def _wandb_records(path: Path) -> Iterator[Any]:
    """A file of an offline run: 7 bytes, then blocks of 32 KiB of (crc, length, type) and a record, or a piece of one."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, piece = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(piece)
            piece = b""


def _of_wandb(folder: Path, id_: str) -> tuple[Numbers, dict[str, Any]]:
    import wandb

    wandb.teardown()  # its process writes behind
    found, config = Numbers(), {}
    for path in sorted(folder.glob(f"wandb/offline-run-*/run-{id_}.wandb")):
        for record in _wandb_records(path):
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            row = {item.nested_key[0] or item.key: json.loads(item.value_json) for item in record.history.item}
            for key, value in row.items():
                found.setdefault(key, []).append((row["step"], value))
    return found, config


def _of_mlflow(folder: Path, id_: str) -> tuple[Numbers, dict[str, Any]]:
    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlruns").as_uri())
    run = client.get_run(id_)
    found = {key: [(one.step, one.value) for one in client.get_metric_history(id_, key)] for key in run.data.metrics}
    params: dict[str, Any] = {"model": {"hidden_size": int(run.data.params["model.hidden_size"])}}
    assert run.data.tags["mlflow.source.git.commit"] == run.data.params["commit"]
    return found, params | {"commit": run.data.params["commit"]}


def _of_trackio(_: Path, id_: str) -> tuple[Numbers, dict[str, Any]]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    found = Numbers()
    for row in SQLiteStorage.get_logs("megazero", id_):
        for key, value in row.items():
            found.setdefault(key, []).append((row["step"], value))
    (config,) = [run.config for run in trackio.Api().runs("megazero") if run.name == id_]
    return found, config


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_the_numbers_of_metrics_jsonl_under_one_id_after_a_rollback_and_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "trackio":
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "first"]
    subprocess.run(["git", "-C", tmp_path, *author], check=True)
    monkeypatch.chdir(tmp_path)
    run, lines, ids = run_of(1, model=LLAMA, training={"run_dir": str(tmp_path / "run")}), [], []
    for start, rolled_back in ((0, 4), (4, None)):
        context: Any = SimpleNamespace(run=run, start=Position(start), log=print)
        logger = LOGGERS[name](context)
        for step in range(start + 1, start + 5):
            record = replace(_record(step, val_loss=step / 8), sent_bytes={"dp": 48 * step})
            lines.append(json.loads(as_json(record)))
            logger.after_step(record)
            if step == rolled_back:
                logger.on_rollback(Position(2))
                for again in (3, 4):
                    logger.after_step(replace(_record(again), seconds=2.0))
                    lines.append(json.loads(as_json(replace(_record(again), seconds=2.0))))
        logger.on_end(Position(start + 4))
        logger.close()
        for folder in (tmp_path / "run/loggers/wandb").glob("offline-run-*_*"):  # W&B names it by the second
            folder.rename(folder.with_name(f"offline-run-of-step-{start}"))
        ids.append((tmp_path / "run" / "loggers" / f"{name}.id").read_text())
    assert ids[0] == ids[1]
    read = {"wandb": _of_wandb, "mlflow": _of_mlflow, "trackio": _of_trackio}[name]
    found, config = read(tmp_path / "run" / "loggers", ids[0])
    for key in ("loss", "lr", "tokens", "step_seconds", "val_loss"):
        wanted = [(line["step"], line[key]) for line in lines if key in line]
        assert sorted(found[key]) == sorted(wanted), key
    wanted = [(line["step"], line["sent_bytes"]["dp"]) for line in lines if line["sent_bytes"]]
    assert sorted(found["sent_bytes/dp"]) == wanted
    assert config["model"]["hidden_size"] == run.config.model.hidden_size
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert config["commit"].removesuffix("-dirty") == head


def test_a_run_that_begins_at_step_0_has_a_new_id_and_what_a_service_raises_is_raised(tmp_path: Path) -> None:
    run = run_of(1, model=LLAMA, training={"run_dir": str(tmp_path)})
    known: list[str | None] = []
    for start in (0, 0, 4, 8):
        context: Any = SimpleNamespace(run=run, start=Position(start), log=print)
        logger = loggers.ServiceLogger(
            "some", lambda own: loggers.Service(own.id, lambda step, _: 1 / 0, print), context
        )
        known.append(logger.known)
        with pytest.raises(ZeroDivisionError):
            logger.after_step(_record(start + 1))
        if start == 4:  # as a crash of the machine may leave it
            known.append((tmp_path / "loggers" / "some.id").read_text())
            (tmp_path / "loggers" / "some.id").write_text("")
    assert known[:2] == [known[4], None] == [None, None]
    assert known[2] == known[3]


def test_a_run_goes_on_at_mlflow_under_its_id_after_a_resume_at_which_it_did_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient, MlflowException
    from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = run_of(1, model=LLAMA, training={"run_dir": str(tmp_path / "run")})
    server, absent = (tmp_path / "server").as_uri(), MlflowException("absent", RESOURCE_DOES_NOT_EXIST)

    def go_on(start: int, uri: str = server) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        logger: Any = LOGGERS["mlflow"](SimpleNamespace(run=run, start=Position(start), log=print))  # type: ignore[arg-type]
        logger.after_step(_record(start + 1))
        logger.close()

    go_on(0)
    go_on(1, "http://127.0.0.1:9")
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "get_run", Mock(side_effect=[MlflowException("busy"), absent]))
        go_on(2)
    go_on(3)
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("megazero")
    (only,) = client.search_runs([experiment.experiment_id])
    assert [one.step for one in client.get_metric_history(only.info.run_id, "loss")] == [1, 4]


def test_where_mlflow_does_not_answer_a_run_is_logged_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}.items():
        monkeypatch.setenv(name, value)
    run = run_of(1, model=LLAMA, training={"run_dir": str(tmp_path)})
    for start in (0, 1):
        logger: Any = LOGGERS["mlflow"](SimpleNamespace(run=run, start=Position(start), log=print))  # type: ignore[arg-type]
        logger.after_step(_record(start + 1))
        logger.close()
    assert capsys.readouterr().out.count("does not answer") == 2
    found, _ = _of_mlflow(tmp_path / "loggers", (tmp_path / "loggers" / "mlflow.id").read_text())
    assert [step for step, _ in found["loss"]] == [1, 2]


FAILING = """
from megazero.training.callbacks.base import Callback
from megazero.training.callbacks.registry import LOGGERS

class Failing(Callback):
    def __init__(self, context):
        if context.engine.state.rank: raise AssertionError("a logger is on rank 0 alone")
    def after_step(self, record):
        raise OSError("no service")

LOGGERS.register("failing", Failing)
"""


@pytest.mark.slow
def test_a_logger_that_fails_is_one_line_and_the_run_goes_on_with_the_others(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "failing.py", tmp_path / "run"
    script.write_text(FAILING)
    words = [*TINY, *ONE_STAGE, "launch.nproc_per_node=2", f"training.run_dir={run_dir}", "training.steps=3"]
    words += [f'launch.extensions=["{script}"]', 'logging.loggers=["failing", "wandb"]']
    done = run_command("train", QUICKSTART, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("logger 'failing' failed (OSError('no service')): the run goes on without it") == 1
    lines = metrics_of(run_dir)
    folder = run_dir / "loggers"
    found, _ = _of_wandb(folder, (folder / "wandb.id").read_text())
    assert found["loss"] == [(line["step"], line["loss"]) for line in lines]
    assert len(lines) == 3


class _Hanging(Callback):
    def __init__(self, _: RunContext) -> None:
        pass

    def after_step(self, _: StepRecord) -> None:
        Event().wait()


def _train_with_a_hanging_logger(rank: int, run: ResolvedRun) -> list[str]:
    shown: list[str] = []
    LOGGERS.register("hanging", _Hanging)
    train(run, state_on(rank, run), shown.append)
    return shown


def test_a_logger_that_hangs_is_one_line_and_the_other_ranks_do_not_lose_rank_0(tmp_path: Path) -> None:
    sections = {"logging": {"loggers": ["hanging"]}, "parallel": {"timeout_seconds": 4}, "training": {"steps": 3}}
    shown = run_world(2, _train_with_a_hanging_logger, loop_of(tmp_path, 2, **sections))[0]
    assert shown.count("logger 'hanging' was not done within 1 s: its last steps may be missing") == 1
    assert len(metrics_of(tmp_path)) == 3


def test_a_logger_that_is_not_there_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megazero.training.callbacks.registry.find_spec", lambda name: None)
    from typer.testing import CliRunner

    from megazero.cli.commands import app

    said = CliRunner().invoke(app, ["train", str(QUICKSTART), 'logging.loggers=["wandb","mflow"]'])
    assert said.exit_code == 2
    assert "pip install 'megazero[wandb]'" in said.output
    assert "registered are tensorboard, wandb, mlflow, trackio" in said.output
