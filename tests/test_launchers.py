"""Launchers of examples/launch: each fits its engine's published schema, and ends as docs/clusters.md says."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Program, free_port, metrics_of, start_program, wait_until, without_launcher
from jsonschema import Draft202012Validator
from quickstart import ONE_STAGE, QUICKSTART, ROOT, TINY

LAUNCH = ROOT / "examples" / "launch"
SCHEMAS = json.loads((Path(__file__).parent / "launch_schemas.json").read_text())
DOCUMENTS = {
    document.get("kind", "SkyPilot"): document
    for path in sorted(LAUNCH.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}


@pytest.mark.parametrize("kind", ["JobSet", "SkyPilot", "TrainJob", "TrainingRuntime"])
def test_a_file_fits_the_published_schema_and_a_wrong_key_does_not(kind: str) -> None:
    validator, document = Draft202012Validator(SCHEMAS[kind]["schema"]), DOCUMENTS[kind]
    assert not [error.message for error in validator.iter_errors(document)]
    wrong = document | {"num_node": 2, "spec": {"suspended": False}}
    assert not validator.is_valid(wrong)


def _job_set(kind: str) -> tuple[Any, Any, Any]:
    """Its failure policy, its job and its container."""
    spec = DOCUMENTS[kind]["spec"]
    spec = spec if kind == "JobSet" else spec["template"]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    return spec["failurePolicy"], job, job["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("kind", ["JobSet", "TrainingRuntime"])
@pytest.mark.parametrize(
    ("message", "action"),
    [
        ("Container node for pod a/b failed with exit code 75 matching FailJob", "RestartJobSetAndIgnoreMaxRestarts"),
        ("Container node for pod a/b failed with exit code 2 matching FailJob", "FailJobSet"),
        ("Pod a/b has condition DisruptionTarget matching FailJob", "RestartJobSetAndIgnoreMaxRestarts"),
    ],
)
def test_what_a_pod_ended_with_decides_what_the_jobset_does(kind: str, message: str, action: str) -> None:
    """The messages are those of Kubernetes' job controller (pkg/controller/job/pod_failure_policy.go)."""
    policy, job, container = _job_set(kind)
    text = f"{message} rule at index 0"
    matched = [
        rule["action"]
        for rule in policy["rules"]
        if any(re.search(pattern, text) for pattern in rule["onJobFailureMessagePatterns"])
    ]
    assert matched == [action]
    codes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert (codes["values"], codes["containerName"]) == ([2, 75], container["name"])
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # Kubernetes refuses a podFailurePolicy beside another
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]


@pytest.mark.slow
def test_pods_end_with_the_code_of_their_ranks(tmp_path: Path) -> None:
    """Two pods of one rank: one is told to stop, then the run goes on to its end; a wrong key; data that are not there."""
    command = _job_set("JobSet")[2]["command"]
    assert DOCUMENTS["TrainJob"]["spec"]["trainer"]["command"] == command
    words = [*TINY, *ONE_STAGE, "launch.device=cpu", f"training.run_dir={tmp_path}"]

    def pods(*more: str) -> list[Program]:
        environment = without_launcher() | {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
        train = [sys.executable, *command[1:-1], QUICKSTART, *words, *more]
        return [start_program(*train, env=environment | {"PET_NODE_RANK": str(node)}, cwd=ROOT) for node in (0, 1)]

    def ends(running: list[Program]) -> list[int]:
        for pod in running:
            pod.communicate()
        return [pod.wait() for pod in running]

    running = pods("training.steps=100000")
    wait_until(lambda: len(metrics_of(tmp_path)) > 2, running[1])
    os.kill(running[1].pid, signal.SIGTERM)
    assert ends(running) == [75, 75]
    steps = len(metrics_of(tmp_path)) + 2
    assert ends(pods(f"training.steps={steps}")) == [0, 0]
    assert len(metrics_of(tmp_path)) == steps
    assert ends(pods("training.step=1")) == [2, 2]
    assert ends(pods(f"training.steps={steps + 1}", "data.sources=['no-such-corpus']")) == [2, 2]


def test_skypilot_gives_torchrun_its_nodes(tmp_path: Path) -> None:
    """Its commands run in bash with the variables of SkyPilot, and `python` prints what it was given."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nenv | grep ^PET_ | sort\necho "$@"\n')
    python.chmod(0o755)
    task = DOCUMENTS["SkyPilot"]
    given = {"NUM_NODES": "3", "NODE_RANK": "1", "NUM_GPUS_PER_NODE": "8", "NODE_IPS": "10.0.0.7\n10.0.0.8\n10.0.0.9"}
    environment = {f"SKYPILOT_{name}": value for name, value in given.items()} | task["envs"]
    environment |= {"SKYPILOT_TASK_ID": "task", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euc", task["run"]], env=environment, capture_output=True, text=True, check=True)
    *variables, words = done.stdout.splitlines()
    assert variables == [
        "PET_MASTER_ADDR=10.0.0.7", "PET_MASTER_PORT=29500", "PET_NNODES=3", "PET_NODE_RANK=1", "PET_NPROC_PER_NODE=8"
    ]  # fmt: skip
    assert words.startswith("-m megazero.torchrun -m megazero.cli train examples/llama_7b_64gpu.toml checkpoint.dir")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]


def test_the_dockerfile_copies_what_there_is() -> None:
    lines = re.sub(r"\\\n", " ", (LAUNCH / "Dockerfile").read_text()).splitlines()
    instructions = [shlex.split(line) for line in lines if line and not line.startswith("#")]
    assert {words[0] for words in instructions} <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    copied = [word for words in instructions if words[0] == "COPY" for word in words[1:-1]]
    assert "megazero" in copied
    assert all((ROOT / word).exists() for word in copied)
