"""Loggers that send the numbers of metrics.jsonl, the configuration and the commit to W&B, MLflow or trackio.

    step     1     2     3     4     ...          training continues, see `registry.SafeLogger`
    thread   open  1 2 3       4                  a slow or missing service delays no step

`run_dir/loggers/NAME.id` holds the id of the run at a service, so that a resumed run continues there, too.  Steps that are
repeated after a rollback are logged again.  The package of a logger is imported when the logger is requested.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from megazero.checkpoint.index import versions
from megazero.engine import Position
from megazero.engine.phases import values_by_key
from megazero.settings import hide_passwords, write_text
from megazero.training.callbacks.base import Callback, RunContext, StepRecord
from megazero.training.callbacks.metrics import numbers_of

_INIT_SECONDS = 30.0  # W&B is tried so long before its files are written offline
_MOST_PARAMS = 100  # in a request to MLflow

Numbers = dict[str, float]


class Service(NamedTuple):
    """A run that is open at a service: its id, a function that logs the numbers of a step, and one that ends the run."""

    id: str
    log: Callable[[int, Numbers], object]
    finish: Callable[[bool], object]


class ServiceLogger(Callback):
    """Sends the numbers of every step to a service.

    Attributes:
        known: the id of the run at the service; None for a new run.
        name: the run's name.
        folder: directory for the logger's files.
        config: every key of the run, the commit and the versions.
    """

    def __init__(self, service: str, open_run: Callable[[ServiceLogger], Service], context: RunContext) -> None:
        config, run_dir = context.run.config, Path(context.run.config.training.run_dir)
        self.folder, self.name, self.log = run_dir / "loggers", run_dir.resolve().name, context.log
        self.folder.mkdir(parents=True, exist_ok=True)
        id_file = self.folder / f"{service}.id"
        self.known = (id_file.read_text().strip() or None) if context.start.step and id_file.exists() else None
        self.config: dict[str, Any] = hide_passwords(json.loads(config.model_dump_json()))
        self.config |= {"commit": commit_of(Path()), "versions": versions(), "world_size": context.run.world_size}
        self.project = config.logging.project
        self._service, self._is_well = open_run(self), False
        write_text(id_file, self._service.id)

    @property
    def id(self) -> str:
        """The known id of the run, or a new one."""
        return self.known or f"{self.name}-{uuid4().hex[:8]}"

    def after_step(self, record: StepRecord) -> None:
        numbers = {key: value for key, value in numbers_of(record) if isfinite(value)}
        self._service.log(record.step, numbers)

    def on_end(self, position: Position) -> None:  # noqa: ARG002
        self._is_well = True

    def close(self) -> None:
        self._service.finish(self._is_well)


def commit_of(folder: Path) -> str:
    """Return the checked-out commit, with -dirty if files differ from it; empty outside of a repository."""
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return ""


def open_wandb(run: ServiceLogger) -> Service:
    """Open a run at W&B.  Without credentials or network, it is logged offline, to be sent by `wandb sync`."""
    import wandb

    given: dict[str, Any] = {"id": run.id, "project": run.project, "name": run.name, "config": run.config}
    given |= {"dir": str(run.folder), "resume": "allow"}
    given["settings"] = wandb.Settings(console="off", silent=True, init_timeout=_INIT_SECONDS)
    try:
        may_send = "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False)
        opened = wandb.init(mode=None if may_send else "offline", **given)
    except wandb.Error as error:
        run.log(f"W&B does not answer ({error}): it is logged offline")
        wandb.teardown()  # its service still holds the id
        opened = wandb.init(mode="offline", **given)
    if opened.offline:
        run.log(f"W&B is logged offline; to send it: wandb sync --append {run.folder}/wandb/offline-run-*")
    opened.define_metric("*", step_metric="step")  # W&B's own step never goes back
    return Service(
        opened.id,
        lambda step, numbers: opened.log({"step": step, **numbers}),
        lambda is_well: opened.finish(exit_code=int(not is_well)),
    )


def open_mlflow(run: ServiceLogger) -> Service:
    """Open a run at the MLflow server in MLFLOW_TRACKING_URI; without a server that answers, log it to files."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    files = (run.folder / "mlruns").resolve().as_uri()
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        try:
            return _mlflow_at(uri, run)
        except Exception as error:  # of the network, too
            run.log(f"MLflow at {uri} does not answer ({error}): it is logged in {files}")
            opened = _mlflow_at(files, run)
            return opened._replace(id=run.known or opened.id)  # of the run that goes on where the server answers again
    return _mlflow_at(files, run)


def _mlflow_at(uri: str, run: ServiceLogger) -> Service:
    from mlflow import MlflowClient, MlflowException
    from mlflow.entities import Metric, Param

    client, id_ = MlflowClient(uri), None
    try:
        id_ = run.known and client.get_run(run.known).info.run_id
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # else the run was logged elsewhere
            raise
    if id_ is None:
        found = client.get_experiment_by_name(run.project)
        experiment = client.create_experiment(run.project) if found is None else found.experiment_id
        tags = {"mlflow.source.git.commit": run.config["commit"]}
        id_ = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        params = [Param(key, str(value)) for key, value in values_by_key(run.config).items()]
        for start in range(0, len(params), _MOST_PARAMS):
            client.log_batch(id_, params=params[start : start + _MOST_PARAMS])

    def log(step: int, numbers: Numbers) -> None:
        now = time.time_ns() // 10**6
        # keys with a source's path must be relative paths of few signs to MLflow
        names = {key: re.sub(r"[^\w.\- /:]", "_", re.sub(r"/(\.*/)+", "/", key)) for key in numbers}
        client.log_batch(id_, metrics=[Metric(names[key], value, now, step) for key, value in numbers.items()])

    client.update_run(id_, status="RUNNING")
    return Service(id_, log, lambda is_well: client.set_terminated(id_, "FINISHED" if is_well else "FAILED"))


def open_trackio(run: ServiceLogger) -> Service:
    """Open a run of trackio, on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names another place."""
    import trackio

    own: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    opened = trackio.init(run.project, run.id, config=run.config, resume="allow", **own)
    return Service(opened.name, lambda step, numbers: opened.log(numbers, step=step), lambda _: opened.finish())


WANDB = partial(ServiceLogger, "wandb", open_wandb)
MLFLOW = partial(ServiceLogger, "mlflow", open_mlflow)
TRACKIO = partial(ServiceLogger, "trackio", open_trackio)
