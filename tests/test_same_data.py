"""Ranks that read different data end before the first step, each with the hosts and files in its error."""

from __future__ import annotations

import os
import re
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from harness import run_world
from quickstart import QUICKSTART, TINY
from tokenizer_files import write_tokenizer

from megazero.checkpoint.index import CheckpointError
from megazero.comm import agreement
from megazero.comm.agreement import agree_in_time
from megazero.config import load_config
from megazero.data.writer import IndexedWriter
from megazero.parallel_state import Links, ParallelState, RankGrid
from megazero.training.batches import DataError, open_same_corpus
from megazero.training.trainer import train


def host_with(folder: Path, **sources: np.ndarray) -> Path:
    for name, ids in sources.items():
        with IndexedWriter(folder / name, np.uint16) as writer:
            writer.add_documents(ids.astype(np.uint16), [len(ids)])
    return folder


def _train_on_hosts(rank: int, hosts: list[Path], pp: int) -> str:
    """Each rank is alone on its host: what a relative path names there is that host's."""
    os.chdir(hosts[rank])
    socket.gethostname = lambda: hosts[rank].name
    words = [*TINY, f"parallel.pp={pp}", "parallel.tp=1", "training.steps=1", 'data.sources=["one", "two"]']
    words += [f"training.run_dir={hosts[0]}/run", "data.cache_dir=cache"]
    run = load_config(QUICKSTART, words, len(hosts))
    shown: list[str] = []
    try:
        train(run, ParallelState(RankGrid(pp=pp, dp=len(hosts) // pp), rank, Links(timeout_seconds=60)), shown.append)
    except DataError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("pp", [2, 1])
def test_different_files_on_the_hosts_end_the_run_before_its_first_step(tmp_path: Path, pp: int) -> None:
    ids = np.arange(200_000) % 250
    other = ids.copy()
    other[123_456] ^= 1
    a = host_with(tmp_path / "node-a", one=ids, two=ids)
    b = host_with(tmp_path / "node-b", one=ids, two=other)
    first, second = run_world(2, _train_on_hosts, [a, b], pp)
    assert first == second
    assert re.fullmatch(
        r"the ranks do not read the same data:\n"
        r"  two\n"
        r"    [0-9a-f]{32} on node-a \(rank 0\)\n"
        r"    [0-9a-f]{32} on node-b \(rank 1\)\n"
        r"copy the same files to every host, or put them on a file system that all hosts share",
        first,
    )
    assert not (a / "run").exists()
    host_with(b, two=ids)
    assert run_world(2, _train_on_hosts, [a, b], pp) == ["trained"] * 2


def _open(rank: int, hosts: list[Path], tokenizer: bool) -> str:
    os.chdir(hosts[rank])
    words = [
        *TINY,
        "parallel.tp=1",
        "parallel.pp=1",
        'data.sources=["one"]',
        f"training.seed={7 + (rank and not tokenizer)}",
    ]
    run = load_config(
        QUICKSTART, [*words, "data.cache_dir=cache", *(["data.tokenizer=t.json"] if tokenizer else [])], 2
    )
    state = ParallelState(RankGrid(dp=2), rank, Links(timeout_seconds=60))
    with pytest.raises(DataError, match="do not read the same data") as caught:
        open_same_corpus(run.config, state.world)
    return str(caught.value)


@pytest.mark.parametrize("tokenizer", [True, False])
def test_another_tokenizer_or_order_on_a_rank_is_named(tmp_path: Path, tokenizer: bool) -> None:
    hosts = [host_with(tmp_path / name, one=np.arange(9_999) % 3) for name in ("node-a", "node-b")]
    for host, words in zip(hosts, ("a b </s>", "b a </s>"), strict=True):
        write_tokenizer(host / "t.json", words)
    found = run_world(2, _open, hosts, tokenizer)
    assert found[0] == found[1]
    assert ("the tokenizer (data.tokenizer" in found[0]) == tokenizer
    assert ("the order of the samples" in found[0]) != tokenizer


def _train_with(rank: int, folder: Path, steps: int, tokenizer: str) -> str:
    words = [*TINY, "parallel.pp=1", "parallel.tp=1", f"training.steps={steps}", f"training.run_dir={folder}/run"]
    words += [
        f'data.sources=["{folder}/one"]',
        f"data.tokenizer={folder}/{tokenizer}",
        f"data.cache_dir={folder}/cache",
    ]
    try:
        train(load_config(QUICKSTART, words, 1), ParallelState(RankGrid()), lambda _: None)
    except CheckpointError as error:
        return str(error)
    return "trained"


def test_a_run_resumes_with_its_own_tokenizer_only(tmp_path: Path) -> None:
    host_with(tmp_path, one=np.arange(9_999) % 3)
    for name, words in {"mine.json": "a b </s>", "other.json": "b a </s>"}.items():
        write_tokenizer(tmp_path / name, words)
    assert run_world(1, _train_with, tmp_path, 1, "mine.json") == ["trained"]
    (refused,) = run_world(1, _train_with, tmp_path, 2, "other.json")
    assert "was trained on other data. What differs: the tokenizer (data.tokenizer, data.eod_token)" in refused
    assert run_world(1, _train_with, tmp_path, 2, "mine.json") == ["trained"]
    host_with(tmp_path, one=np.arange(9_999) % 2)
    (refused,) = run_world(1, _train_with, tmp_path, 3, "mine.json")
    assert "What differs: the tokens (data.sources). Its data.sources were [" in refused
    assert f"; other tokens are in {tmp_path}/one. If" in refused


def _wait_for_a_slow_rank(rank: int, fails: bool) -> str:
    met, inner = threading.Event(), agreement.gather_objects
    meetings = [0]

    def gather(value, axis):
        meetings[0] += 1
        if meetings[0] == 5:
            met.set()
        return inner(value, axis)

    agreement.gather_objects = gather

    def action() -> str:
        if rank == 0 and fails:
            raise ValueError("no such file")
        # the slow one is done after five meetings only; with a failure elsewhere it never is
        assert rank == 0 or (threading.Event() if fails else met).wait(60)
        return "done"

    state = ParallelState(RankGrid(dp=2), rank, Links(timeout_seconds=60))
    try:
        return agree_in_time(action, state.world, DataError, 0.01)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_meet_while_one_is_slow_and_leave_at_once_when_one_fails(fails: bool) -> None:
    assert run_world(2, _wait_for_a_slow_rank, fails) == [("no such file" if fails else "done")] * 2


class _Panic(BaseException):
    pass


def _panic_on_rank_1(rank: int) -> str:
    def action() -> str:
        if rank == 1:
            raise _Panic("at src/lib.rs")
        return "done"

    state = ParallelState(RankGrid(dp=2), rank, Links(timeout_seconds=60))
    with pytest.raises(DataError) as caught:
        agree_in_time(action, state.world, DataError, 0.01)
    return str(caught.value)


def test_a_panic_of_a_library_on_one_rank_ends_all() -> None:
    assert run_world(2, _panic_on_rank_1) == ["_Panic('at src/lib.rs')"] * 2
