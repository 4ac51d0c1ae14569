"""Asking a run to stop: it ends after the step under way with everything saved, or at once when asked again."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import Program, children_of, free_port, metrics_of, start_program, wait_until, without_launcher
from quickstart import ONE_STAGE, QUICKSTART, ROOT
from quickstart import TINY as SMALL

from megazero.checkpoint.index import find_damage, find_newest
from megazero.training.signals import EXIT_STOPPED, SAME_REQUEST_SECONDS, StopRequest

pytestmark = pytest.mark.slow  # starts whole runs

TINY = [*SMALL, *ONE_STAGE, "lr_schedule.name=constant"]


# ---------------------------------------------------------------------------------------------------------------------
# The request


class _Recorded(StopRequest):
    def __init__(self) -> None:
        self.now, self.ended = 100.0, False
        super().__init__(lambda: self.now)

    def _end_at_once(self) -> None:
        self.ended = True


def test_a_signal_soon_after_the_first_is_the_same_request_and_a_later_one_ends_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = _Recorded()
    assert not stop.wanted()
    stop.take(signal.SIGINT)
    assert stop.wanted()
    stop.now += SAME_REQUEST_SECONDS
    stop.take(signal.SIGTERM)
    assert not stop.ended
    stop.now += 0.1
    stop.take(signal.SIGTERM)
    assert stop.ended
    assert capsys.readouterr().err.splitlines() == [
        "SIGINT: finishing this step, then saving; a second signal ends at once",
        "SIGTERM again: ended at once, nothing more is saved",
    ]


def test_a_request_reaches_ranks_that_start_before_and_after_it(tmp_path: Path) -> None:
    launcher, rank, later_rank = (_Recorded() for _ in range(3))
    launcher.spread(tmp_path)
    rank.mark = launcher.mark
    launcher.take(signal.SIGUSR1)
    assert rank.wanted()
    (tmp_path / "again").mkdir()
    launcher.spread(tmp_path / "again")
    later_rank.mark = launcher.mark
    assert later_rank.wanted()


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def _start(run_dir: Path, ranks: int, *words: str) -> Program:
    """Start a run in a process group of its own, as a shell does."""
    words = (*TINY, f"training.run_dir={run_dir}", f"launch.nproc_per_node={ranks}", *words)
    return start_program("megazero", "train", QUICKSTART, *words, env=without_launcher())


ENDLESS = ["training.steps=1000000", "logging.every_steps=1000000"]


def _losses(run_dir: Path) -> list[float]:
    lines = metrics_of(run_dir)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def _newest_step(run_dir: Path) -> int:
    newest = find_newest(run_dir / "checkpoints")
    assert newest is not None
    assert find_damage(newest) == []
    return int(newest.name.removeprefix("step-"))


def _to_all(pid: int, number: int) -> None:
    os.killpg(pid, number)


def test_every_signal_saves_and_the_same_command_goes_on_to_the_uninterrupted_run(tmp_path: Path) -> None:
    run_dir, steps = tmp_path / "run", 0
    for ranks, number, send in (
        (2, signal.SIGTERM, os.kill),
        (1, signal.SIGUSR1, os.kill),
        (4, signal.SIGINT, _to_all),  # Ctrl-C reaches the whole process group
    ):
        run = _start(run_dir, ranks, *ENDLESS)
        wait_until(lambda least=steps + 3: len(metrics_of(run_dir)) >= least, run)
        send(run.pid, number)
        output, _ = run.communicate(timeout=300)
        assert run.returncode == EXIT_STOPPED, output
        name = signal.Signals(number).name
        assert output.count(f"{name}: finishing this step, then saving; a second signal ends at once") == 1
        steps = _newest_step(run_dir)
        assert len(metrics_of(run_dir)) == steps
        assert f"stopped, and saved: step {steps}" in output
        command = next(line for line in output.splitlines() if " train " in line and "training.run_dir" in line)
        assert "training.steps=1000000" in shlex.split(command)
        assert "Traceback" not in output
    steps += 2
    for folder in (run_dir, tmp_path / "whole"):
        run = _start(folder, 1, f"training.steps={steps}")
        output, _ = run.communicate(timeout=300)
        assert run.returncode == 0, output
    assert _losses(run_dir) == pytest.approx(_losses(tmp_path / "whole"), rel=1e-4)


def test_a_second_signal_ends_a_run_that_hangs_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    run = _start(tmp_path, 2, *ENDLESS, "checkpoint.save_every_steps=2")
    wait_until(lambda: find_newest(tmp_path / "checkpoints") is not None, run)
    children = children_of(run.pid)
    os.kill(children[1], signal.SIGSTOP)  # the other rank waits for it inside a collective
    os.kill(run.pid, signal.SIGTERM)
    assert run.stdout is not None
    assert any("SIGTERM: finishing this step" in line for line in run.stdout)  # reads until the request is handled
    time.sleep(SAME_REQUEST_SECONDS + 0.5)
    assert run.poll() is None
    os.kill(run.pid, signal.SIGTERM)
    output, _ = run.communicate(timeout=300)  # far below parallel.timeout_seconds
    assert run.returncode == 1
    assert "SIGTERM again: ended at once" in output
    assert not any(map(_is_running, children))  # the launcher has waited for them
    _newest_step(tmp_path)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ranks_of_a_launcher_that_dies_save_and_end(tmp_path: Path) -> None:
    run = _start(tmp_path, 2, *ENDLESS)
    wait_until(lambda: len(metrics_of(tmp_path)) >= 3, run)
    children = children_of(run.pid)
    run.kill()
    run.communicate(timeout=300)  # ends when the last rank has let go of the pipe, just before it ends
    wait_until(lambda: not any(map(_is_running, children)))
    assert _newest_step(tmp_path) == len(metrics_of(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "sleeps"])
def test_a_run_that_loses_a_rank_names_it_and_the_same_command_goes_on(tmp_path: Path, number: int) -> None:
    """Long before the default limit of ten minutes, on a GPU too, whose host waits where no signal reaches it."""
    # The next save is far: a rank that sleeps within one is waited for, for checkpoint.timeout_seconds.
    run = _start(tmp_path, 2, *ENDLESS, "checkpoint.save_every_steps=100", "parallel.timeout_seconds=10")
    wait_until(lambda: find_newest(tmp_path / "checkpoints") is not None, run)
    os.kill(children_of(run.pid)[1], number)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 1, output
    assert "rank 1" in output
    steps = _newest_step(tmp_path) + 2
    run = _start(tmp_path, 2, f"training.steps={steps}")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    assert _newest_step(tmp_path) == steps


def test_under_torchrun_a_warning_to_every_process_is_for_the_ranks_which_end_with_75(tmp_path: Path) -> None:
    words = [*TINY, *ENDLESS, f"training.run_dir={tmp_path / 'run'}"]
    given = {"NPROC_PER_NODE": "1", "HEAD": "127.0.0.1", "PORT": str(free_port()), "PET_LOCAL_ADDR": "127.0.0.1"}
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = subprocess.Popen(
        [ROOT / "examples" / "launch_torchrun.sh", str(QUICKSTART), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=without_launcher() | given | path,
    )
    wait_until(lambda: len(metrics_of(tmp_path / "run")) >= 3, run)
    for pid in (run.pid, *children_of(run.pid)):
        os.kill(pid, signal.SIGUSR1)
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 75, output
    assert "exitcode  : 75" in output
    assert output.count("SIGUSR1: finishing this step") == 1
    assert _newest_step(tmp_path / "run") == len(metrics_of(tmp_path / "run"))


def test_a_rank_that_waits_to_tell_others_of_a_wrong_run_file_ends_at_the_first_signal() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        run = subprocess.Popen(
            [sys.executable, "-m", "megazero.cli", "train", str(QUICKSTART), "training.stepz=3"],
            stderr=subprocess.PIPE,
            text=True,
            env=without_launcher() | address | {"RANK": "1", "WORLD_SIZE": "2"},
        )
        assert run.stderr is not None
        assert any("training.steps" in line for line in run.stderr)
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=300) == -signal.SIGTERM
        run.stderr.close()


# ---------------------------------------------------------------------------------------------------------------------
# Slurm

_STUBS = {
    # a step that ends as torchrun does after its ranks have saved, or by itself with a status
    "srun": """
trap 'sleep 0.3; echo saved >> "$LOG"; exit "$STATUS"' USR1
echo $BASHPID > "$LOG.step"
if [[ -n ${ENDS:-} ]]; then exit "$STATUS"; fi
while :; do sleep 0.05; done
""",
    "scancel": 'echo "scancel $*" >> "$LOG"; kill -USR1 "$(cat "$LOG.step")"\n',
    "scontrol": 'if [[ $1 == show ]]; then echo node-0; else echo "scontrol $*" >> "$LOG"; fi\n',
}


def _submit(folder: Path, status: int, **environment: str) -> subprocess.Popen[str]:
    for name, text in _STUBS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (folder / name).chmod(0o755)
    given = {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(folder / "log"), "STATUS": str(status)}
    given |= {"SLURM_NNODES": "2", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node-[0-1]"}
    return subprocess.Popen(["bash", str(ROOT / "examples" / "pretrain.slurm"), "a.toml"], env=given | environment)


def _warn(job: subprocess.Popen[str], folder: Path) -> None:
    wait_until((folder / "log.step").exists)
    time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)


def test_a_warned_slurm_job_saves_before_it_goes_back_into_the_queue(tmp_path: Path) -> None:
    job = _submit(tmp_path, 1)
    _warn(job, tmp_path)
    assert job.wait(300) == 1
    told = ["scancel --signal=USR1 77", "saved", "scontrol requeue 77"]
    assert (tmp_path / "log").read_text().splitlines() == told


def test_a_slurm_job_that_is_done_or_fails_stays_out_of_the_queue(tmp_path: Path) -> None:
    job = _submit(tmp_path, 0)
    _warn(job, tmp_path)
    assert job.wait(300) == 0
    assert "requeue" not in (tmp_path / "log").read_text()
    for status in (0, 1):
        (tmp_path / "log").write_text("")
        assert _submit(tmp_path, status, ENDS="1").wait(300) == status
        assert (tmp_path / "log").read_text() == ""


def test_the_slurm_script_asks_for_the_warning_and_for_a_place_in_the_queue() -> None:
    text = (ROOT / "examples" / "pretrain.slurm").read_text()
    for option in ("--requeue", "--signal=B:USR1@300", "--open-mode=append"):
        assert f"\n#SBATCH {option}\n" in text
