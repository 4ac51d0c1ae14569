"""Starting and ending a run: what keeps a rank from it reaches all hosts, nobody listens, no output ends it, and the last
line says what to do."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from counting_store import CountingStore
from harness import free_port, run_command, run_world
from quickstart import ONE_STAGE, QUICKSTART, TINY
from worlds import LLAMA, engine_on, run_of

from megazero.checkpoint.index import find_newest, read_trainer_state
from megazero.config import RunConfig, resolve
from megazero.config.document import to_toml
from megazero.engine import Position
from megazero.parallel_state import ParallelState, RankGrid
from megazero.settings import without_passwords
from megazero.training.launch import _problem_and_place, _starts_again_in_one_store, train_rank
from megazero.training.signals import StopRequest
from megazero.training.world import LAUNCH_FOLDER, SHARE_DEVICE, MissingRanksError, _met, choices_of, device_index, meet

pytestmark = pytest.mark.slow  # starts whole runs

ONE, TORCHRUN = {"CUDA_VISIBLE_DEVICES": "5"}, {"TORCHELASTIC_RUN_ID": "a"}
TWO_RANKS = [*TINY, *ONE_STAGE, "launch.nproc_per_node=2", "training.steps=3"]


# ---------------------------------------------------------------------------------------------------------------------
# What keeps a rank from starting


def _meet(rank: int, folder: Path, problems: dict[int, str]) -> list[str]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    store = dist.PrefixStore("start", dist.FileStore(str(folder / "meeting"), 3))
    return meet(store, timedelta(seconds=60), problems.get(rank))


def test_every_rank_learns_what_keeps_any_rank_from_starting(tmp_path: Path) -> None:
    host = socket.gethostname()
    for name, problems, wanted in (
        ("none", {}, []),
        ("one", {1: "no such file"}, [f"rank 1 on {host}: no such file"]),
        ("all", dict.fromkeys(range(3), "wrong key"), ["wrong key"]),
    ):
        (tmp_path / name).mkdir()
        assert run_world(3, _meet, tmp_path / name, problems) == [wanted] * 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_device_that_is_not_there_is_refused_like_a_wrong_key(ranks: int, tmp_path: Path) -> None:
    words = [*TINY, *ONE_STAGE, f"launch.nproc_per_node={ranks}", f"training.run_dir={tmp_path / 'run'}"]
    done = run_command("train", QUICKSTART, *words, "launch.device=cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert f"launch.device=cuda needs a CUDA device for each of {ranks} ranks" in done.stderr
    assert "the run ended early" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("devices", "wish", "local", "told"),
    [
        ((2, 2), "auto", "2", None),
        ((2, 2), "cpu", "2", None),
        ((0, 0), "auto", None, None),
        ((2, 1), "auto", "2", "launch.device=auto needs a CUDA device for each of 2 ranks .*, torch finds 1"),
        ((1, 1), "auto", None, r"each of 2 ranks on this machine \(LOCAL_WORLD_SIZE is unset, so all ranks count\)"),
        (
            (1, 0),
            "auto",
            "1",
            "the device is (cuda on rank 0 .* and cpu on rank 1|cpu on rank 1 .* and cuda on rank 0)",
        ),
        ((1, 0), "cpu", "1", None),
    ],
)
def test_a_machine_that_has_lost_devices_is_told_on_every_rank(
    devices: tuple[int, int], wish: str, local: str | None, told: str | None, tmp_path: Path
) -> None:
    """It would train on the CPU, or wait for those that do, until somebody wonders."""
    for found in run_world(2, _places, tmp_path, devices, wish, local):
        assert re.search(told, " ".join(found)) if told else found == []


def test_the_command_itself_computes_on_the_cpu_beside_fewer_devices_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a laptop with one GPU."""
    monkeypatch.setenv(LAUNCH_FOLDER, str(tmp_path))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    run = resolve(RunConfig.model_validate({"launch": {"nproc_per_node": 2}}), 2)
    assert _problem_and_place(run) == (None, {"the device": "cpu"})
    monkeypatch.setattr("megazero.training.launch.train", lambda *_: None)
    train_rank(run, ParallelState(RankGrid(), 0), StopRequest())
    assert "computes on the CPU: launch.device=auto takes CUDA with a device for each rank, torch finds 1" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("environment", "devices", "index"),
    [({}, 8, 3), ({}, 2, None), ({**ONE, "CUDA_VISIBLE_DEVICES": "0,1"}, 1, None),  # devices are lost
     (ONE, 1, 0),  # srun --gpus-per-task=1
     (ONE | TORCHRUN, 1, None), (ONE | {LAUNCH_FOLDER: "/tmp"}, 1, None),  # all ranks see the same device
     (ONE | TORCHRUN | {"LOCAL_RANK": "0"}, 1, 0),  # --virtual-local-rank
     ({SHARE_DEVICE: "1"}, 1, 0), ({SHARE_DEVICE: "1"}, 2, 1), ({SHARE_DEVICE: "1"}, 0, None)],
)  # fmt: skip
def test_a_rank_takes_the_device_of_its_number_or_the_only_one_that_its_launcher_shows_it(
    environment: dict[str, str], devices: int, index: int | None
) -> None:
    assert device_index({"RANK": "11", "LOCAL_RANK": "3"} | environment, devices, 8) == index


def _places(rank: int, folder: Path, devices: tuple[int, int], wish: str, local: str | None) -> list[str]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"} | ({} if local is None else {"LOCAL_WORLD_SIZE": local})
    run = resolve(RunConfig.model_validate({"launch": {"device": wish}}), 2)
    store = dist.PrefixStore("start", dist.FileStore(str(folder / "meeting"), 2))
    with patch.multiple("torch.cuda", device_count=lambda: devices[rank], is_available=lambda: devices[rank] > 0):
        problem, place = _problem_and_place(run)
    return meet(store, timedelta(seconds=60), problem, choices_of(run.config), place)


def test_ranks_of_several_machines_that_do_not_know_their_neighbours_are_told(tmp_path: Path) -> None:
    for found in run_world(2, _on_a_machine_each, tmp_path):
        assert re.search(r"LOCAL_WORLD_SIZE is unset.* is node-(\d) on rank \1 on node-\1 and node-(\d) on", found[0])


def _on_a_machine_each(rank: int, folder: Path) -> list[str]:
    with patch("socket.gethostname", lambda: f"node-{rank}"):
        return _places(rank, folder, (0, 0), "auto", None)


def _meet_with(rank: int, folder: Path, overrides: dict[int, dict[str, Any]]) -> list[str]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    store = dist.PrefixStore("start", dist.FileStore(str(folder / "meeting"), 3))
    config = RunConfig.model_validate(overrides.get(rank, {}))
    return meet(store, timedelta(seconds=60), None, choices_of(config))


def test_ranks_with_different_runs_do_not_start(tmp_path: Path) -> None:
    """Each would wait for the other in another operation; paths and what is printed may differ."""
    alike: dict[int, dict[str, Any]] = {1: {"training": {"run_dir": "/elsewhere"}, "logging": {"tensorboard": False}}}
    other: dict[int, dict[str, Any]] = {2: {"activations": {"partition": True}, "checkpoint": {"save_every_steps": 5}}}
    for name, overrides in (("alike", alike), ("other", other)):
        (tmp_path / name).mkdir()
        told = run_world(3, _meet_with, tmp_path / name, overrides)
        assert told[0] == told[1] == told[2]
        if name == "alike":
            assert told[0] == []
            continue
        (text,) = told[0]
        assert "activations.partition is " in text
        assert "; checkpoint.save_every_steps is " in text
        assert f"5 on rank 2 on {socket.gethostname()}" in text


def test_ranks_that_never_come_are_named_on_every_rank_after_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = CountingStore(dist.HashStore()), []
    store.set(_met(4), "")
    monkeypatch.setenv("WORLD_SIZE", "12")
    for rank in (0, 4):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(
            MissingRanksError, match=r"only 2 of 12 .*within 0\.01 s; missing: ranks 1 to 3, ranks 5 to 11;"
        ):
            meet(store, timedelta(seconds=0.01))
        asked.append(store.counts.checked)
    assert asked[0] == asked[1] > 0


def test_a_file_that_one_host_lacks_is_told_on_every_host_and_ends_all(tmp_path: Path) -> None:
    """Two hosts with a rank each, as torchrun starts them."""
    meeting = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    meeting |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    missing, ended = tmp_path / "missing.toml", {}

    def start(rank: int, config: Path) -> None:
        words = [*TWO_RANKS, f"training.run_dir={tmp_path / 'run'}"]
        ended[rank] = run_command("train", config, *words, env={**meeting, "RANK": str(rank)})

    threads = [threading.Thread(target=start, args=one) for one in ((0, QUICKSTART), (1, missing))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for done in ended.values():
        assert done.returncode == 2, done.stderr
        assert done.stderr.count(f"{missing}: no such file") == 1
    assert "rank 1 on " in ended[0].stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("nodes", "shares", "restarts", "told"),
    [("2", "True", "1", True), ("2", "True", "0", False), ("2", "False", "1", False), ("1", "True", "1", False)],
)
def test_a_store_that_ranks_which_start_again_find_full_is_told(
    nodes: str, shares: str, restarts: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read the addresses of dead ranks there, also where the run is not elastic; on one node each start has its own."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shares)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    assert _starts_again_in_one_store(resolve(RunConfig(), 2)) is told


# ---------------------------------------------------------------------------------------------------------------------
# Nobody listens

LISTENERS = """
import os
from pathlib import Path

from megazero.training.callbacks.base import Callback
from megazero.training.callbacks.registry import CALLBACKS


def addresses(pid):
    own = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(one))
        except OSError:
            pass
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                yield local.split(":")[0]


class Listeners(Callback):
    def __init__(self, context):
        self.rank = context.engine.state.rank

    def after_step(self, record):
        found = [*addresses(os.getpid()), *addresses(os.getppid())]
        Path(f"FOLDER/{self.rank}").write_text(" ".join(found))


CALLBACKS.register("listeners", Listeners)
"""
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def test_ranks_of_one_machine_and_their_launcher_listen_on_loopback_only(tmp_path: Path) -> None:
    """Also where a profile names another interface; none of this name exists."""
    script = tmp_path / "listeners.py"
    script.write_text(LISTENERS.replace("FOLDER", str(tmp_path)))
    words = [*TWO_RANKS, f"training.run_dir={tmp_path / 'run'}", f'launch.extensions=["{script}"]']
    done = run_command(
        "train", QUICKSTART, *words, 'training.callbacks=["listeners"]', env={"GLOO_SOCKET_IFNAME": "outside0"}
    )
    assert done.returncode == 0, done.stderr
    found = {address for rank in "01" for address in (tmp_path / rank).read_text().split()}
    assert found, "gloo listens"
    assert found <= LOOPBACK


# ---------------------------------------------------------------------------------------------------------------------
# Passwords


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:se/cr+et@bucket/run@2", "s3://key:***@bucket/run@2"),
        ('saved sftp://me:p@ss@host:22/a, "x"', 'saved sftp://me:***@host:22/a, "x"'),
        ("https://host/a?v=1&X-Amz-Signature=ab12&sv=2", "https://host/a?v=1&X-Amz-Signature=***&sv=2"),
        ("http://host:9000/a@b and me:x@y", "http://host:9000/a@b and me:x@y"),
        ("error: ftp://u:it's-me@host/d is gone", "error: ftp://u:***@host/d is gone"),
        ("s3://k:s@b?endpoint=http://a:p@h/", "s3://k:***@b?endpoint=http://a:***@h/"),
        ("https://ghp_abc@host/x?code=a&author=b", "https://***@host/x?code=***&author=b"),
        # as pathlib and fsspec leave them
        (
            "no foo:/u:p/w@host/d.bin: a pair foo:/u:p/w@host/d.bin",
            "no foo:/u:***@host/d.bin: a pair foo:/u:***@host/d.bin",
        ),
        (r"C:/u:p@ss and a:/b:c@d", r"C:/u:p@ss and a:/b:c@d"),
    ],
)
def test_the_password_of_a_url_is_not_shown(text: str, shown: str) -> None:
    assert without_passwords(text) == shown


def test_passwords_reach_no_file_and_no_line(tmp_path: Path) -> None:
    """Also where the URL is what is wrong."""
    words = [*TWO_RANKS, f"training.run_dir={tmp_path}", "launch.nproc_per_node=1", "training.steps=1"]
    secret = "checkpoint.resume=memory://me:s3cr3t@host/step-00000001"
    wrong = run_command("train", QUICKSTART, *words, f"training.steps={secret.partition('=')[2]}{'/long' * 20}")
    assert "me:***@host" in wrong.stderr
    assert "s3cr3t" not in wrong.stderr
    refused = run_command("train", QUICKSTART, *words, secret)
    assert refused.returncode == 1
    assert "memory://me:***@host/step-00000001 is not a complete checkpoint" in refused.stderr
    for more in ("http://host/x?token=s3cr3t", "training.run_dir=simplecache::foo://me:s3cr3t@host/x"):
        odd = run_command("train", QUICKSTART, *words, more)
        assert odd.returncode == 2
        assert not [word for word in ("s3cr3t", "Traceback") if word in odd.stdout + odd.stderr]
    run = resolve(RunConfig.model_validate({"checkpoint": {"resume": secret.partition("=")[2]}}), 1)
    assert 'resume = "memory://me:***@host/step-00000001"' in to_toml(run)
    engine = engine_on(0, run_of(1, model=LLAMA, checkpoint={"resume": secret.partition("=")[2]}))
    engine.save(tmp_path / "saved", Position(), "data")
    assert read_trainer_state(tmp_path / "saved").config["checkpoint"]["resume"].endswith("me:***@host/step-00000001")
    written = [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert not written
    assert "s3cr3t" not in refused.stdout + refused.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Output that nobody takes


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reader", ["is gone", "has no space"])
def test_output_that_nobody_takes_does_not_end_a_run(tmp_path: Path, reader: str, ranks: int) -> None:
    pipe = Path("/dev/full")
    if reader == "is gone":
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)

        def read_a_line() -> None:
            with pipe.open() as file:
                file.readline()

        threading.Thread(target=read_a_line, daemon=True).start()
    words = [*TWO_RANKS, f"launch.nproc_per_node={ranks}", f"training.run_dir={tmp_path}", "logging.every_steps=1"]
    done = run_command("train", QUICKSTART, *words, stdout=pipe)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("lines are dropped until it can, the run goes on") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    newest = find_newest(tmp_path / "checkpoints")
    assert newest is not None
    assert read_trainer_state(newest).step == 3


# ---------------------------------------------------------------------------------------------------------------------
# The last line


def test_after_an_error_that_comes_again_the_advice_is_to_mend_it(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "from megazero.training.callbacks.base import Callback\n"
        "from megazero.training.callbacks.registry import CALLBACKS\n"
        "class Broken(Callback):\n"
        "    def on_end(self, position):\n"
        "        1 / 0\n"
        "CALLBACKS.register('broken', lambda context: Broken())\n"
    )
    words = [*TWO_RANKS, f"training.run_dir={tmp_path / 'run'}", "checkpoint.save_every_steps=2"]
    done = run_command("train", QUICKSTART, *words, f'launch.extensions=["{script}"]', 'training.callbacks=["broken"]')
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "the same command" not in done.stderr
    assert "once the cause is mended, the run continues from it" in done.stderr
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3
