"""A run on whatever ranks there are: its shape, the samples it is filled up with, and launchers that lose ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Program, children_of, free_port, metrics_of, run_world, start_program, wait_until, without_launcher
from key_page import to_markdown
from numpy.typing import NDArray
from quickstart import ONE_STAGE, QUICKSTART
from quickstart import TINY as SMALL
from worlds import state_on

from megazero.config import ConfigError, ResolvedRun, RunConfig, load_config, resolve
from megazero.config.derive import complete_batch, padded_batch
from megazero.config.document import to_toml
from megazero.engine import BatchSlice, Position, initialize
from megazero.engine.micro_batches import samples_per_rank
from megazero.layers.vocabulary import IGNORED_LABEL
from megazero.parallel_state import Axis
from megazero.training.batches import read_batches
from megazero.training.trainer import train

pytestmark = pytest.mark.slow  # starts whole runs

STEPS = 16
TINY = [
    *SMALL,
    *ONE_STAGE,
    "training.micro_batch_size=1",
    "parallel.timeout_seconds=60",
    f"training.steps={STEPS}",
    "checkpoint.save_every_steps=4",
    "elastic.enabled=true",
]
# Short waits, so that a lost node is given up within seconds.
RENDEZVOUS = "join_timeout=60,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=6"


# ---------------------------------------------------------------------------------------------------------------------
# The shape


def elastic(world: int, shapes: list[dict[str, int]] | None = None, **sections: dict[str, Any]) -> ResolvedRun:
    tables = {"elastic": {"enabled": True, "shapes": shapes or []}, **sections}
    tables["training"] = {"global_batch_size": 16, "micro_batch_size": 1, **sections.get("training", {})}
    return resolve(RunConfig.model_validate(tables), world)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_every_rank_trains_or_is_spare_and_no_more_are_spare_than_must_be(tp: int, pp: int) -> None:
    for world in range(tp * pp, 40):
        run = elastic(world, parallel={"tp": tp, "pp": pp})
        assert run.world_size + run.spare_ranks == world
        assert run.world_size == tp * pp * run.dp
        assert run.spare_ranks < tp * pp
        assert bool(run.spare_ranks) == any("do not train" in notice for notice in run.notices)
        assert run.global_batch_size == 16


def test_a_listed_world_has_its_shape_and_the_others_that_of_the_file() -> None:
    shapes = [{"world_size": 6, "tp": 1, "pp": 3}, {"world_size": 5, "tp": 4}]
    for world, expected in {4: (2, 1, 2, 0), 5: (4, 1, 1, 1), 6: (1, 3, 2, 0), 7: (2, 1, 3, 1)}.items():
        run = elastic(world, shapes, parallel={"tp": 2, "dp": 2})
        parallel = run.config.parallel
        assert (parallel.tp, parallel.pp, run.dp, run.spare_ranks) == expected


def test_a_run_resolves_to_itself_and_the_file_it_writes_fits_other_worlds() -> None:
    sections = {"parallel": {"tp": 2}, "training": {"micro_batch_size": "auto"}}
    run = elastic(6, **sections)
    assert resolve(run.config, 6) == run
    assert 'dp = "auto"' in to_toml(run)
    assert resolve(run.config, 4) == elastic(4, **sections)


def test_the_file_of_a_run_keeps_the_shape_it_was_written_with_for_other_worlds() -> None:
    shapes, sections = [{"world_size": 4, "tp": 2}], {"zero": {"shard_group_size": 4}, "parallel": {"dp": 8}}
    file = tomllib.loads(to_toml(elastic(4, shapes, **sections)))
    for world in range(1, 9):
        assert resolve(RunConfig.model_validate(file), world) == elastic(world, shapes, **sections)


def test_a_secondary_shard_that_the_ranks_cannot_form_is_given_up_with_a_notice() -> None:
    zero = {"stage": 3, "secondary_shard_size": 2}
    assert elastic(4, zero=zero).config.zero.secondary_shard_size == 2
    for world in (2, 3):
        run = elastic(world, zero=zero)
        assert run.config.zero.secondary_shard_size == 0
        told = f"zero.secondary_shard_size=2 does not divide {world} ranks into groups: weights have no secondary shard"
        assert told in run.notices


@pytest.mark.parametrize(
    ("parallel", "shapes", "world", "told"),
    [
        ({"tp": 4, "pp": 2}, [], 7, "world_size = 7: must be at least tp*pp=4*2=8; start 8, or add { world_size = 7"),
        ({"tp": 4}, [{"world_size": 1}], 2, "world_size = 2: must be at least tp*pp=4*1=4; start 4, or add"),
        ({}, [{"world_size": 3, "tp": 4}], 2, "elastic.shapes[0].world_size = 3: must be at least tp*pp=4*1=4"),
        ({}, [{"world_size": 3}] * 2, 2, "elastic.shapes: has 2 shapes for world_size = 3; keep one"),
        ({}, [{"world_size": 30, "pp": 25}], 2, "elastic.shapes[0] = { world_size = 30, tp = 1, cp = 1, pp = 25 }"),
    ],
)
def test_what_an_elastic_run_cannot_be_is_told(parallel: Any, shapes: Any, world: int, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        elastic(world, shapes, parallel=parallel)
    (problem,) = raised.value.problems
    assert str(problem).startswith(told)


def test_a_shape_with_wrong_keys_is_told_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[elastic]\nenabled = true\nshapes = [{ world_size = 4, tpp = 2 }, { tp = 2 }]")
    with pytest.raises(ConfigError) as raised:
        load_config(path, ["training.global_batch_size=8"])
    assert [str(problem) for problem in raised.value.problems] == [
        "elastic.shapes[0].tpp = 2: unknown key; did you mean tp?",
        "elastic.shapes[1] = { tp = 2 }: must have a world_size",
    ]
    assert "| `shapes` | list of { world_size, tp, cp, pp } |" in to_markdown()
    assert "| `sources` | list of string or { path, weight } |" in to_markdown()


# ---------------------------------------------------------------------------------------------------------------------
# The samples


def test_batches_are_filled_up_by_less_than_a_step_of_micro_batches_and_not_at_all_where_they_divide() -> None:
    for samples in range(1, 40):
        for dp in range(1, 8):
            for pp, multiple in ((1, 1), (3, 1), (2, 2), (3, 3)):
                for micro in (1, 2, 3, "auto"):
                    batch = padded_batch(samples, micro, dp=dp, pp=pp, multiple=multiple)
                    size, count = batch.micro_batch_size, batch.accumulation
                    assert count % multiple == 0
                    assert size * count * dp >= samples > size * (count - multiple) * dp
                    assert samples_per_rank(samples, size, _batch_slice(dp, 0, multiple)) == size * count
                    if multiple == 1 and samples % (dp * (1 if micro == "auto" else micro)) == 0:
                        assert batch == complete_batch(samples, micro, "auto", dp=dp, pp=pp)


def test_a_step_that_is_filled_up_says_so() -> None:
    told = "2 of 18 samples of each step are empty: global_batch_size=16 is not divisible by dp 3 x micro_batch_size 1"
    assert elastic(3).notices == (told,)
    assert elastic(4).notices == ()
    two_chunks = {"schedule": "interleaved", "virtual_stages": 2, "pp": 4}
    run = elastic(8, parallel=two_chunks, training={"global_batch_size": 12})
    told = (
        "4 of 16 samples of each step are empty: global_batch_size=12 is not divisible by dp 2 x micro_batch_size 1 x 8"
    )
    assert run.accumulation == 8
    assert run.notices == (told + " micro-batches",)


class _Counting:
    """Sample i is the numbers from 100 i on."""

    seq_len = 4

    def batch(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices[:, None] * 100 + np.arange(5)


def _batch_slice(dp: int, index: int, multiple: int) -> BatchSlice:
    axis = Axis("dp", tuple(range(dp)), index)
    return BatchSlice(axis, torch.device("cpu"), tokens=True, labels=True, multiple=multiple)


def test_each_sample_is_read_once_and_what_fills_up_is_masked() -> None:
    for count in range(1, 14):
        for dp in range(1, 6):
            for micro, multiple in ((1, 1), (2, 1), (1, 2), (3, 2)):
                seen, lengths = [], set()
                for index in range(dp):
                    batches = read_batches(_Counting(), 16, count, micro, _batch_slice(dp, index, multiple))
                    lengths.add(len(batches))
                    for batch in batches:
                        assert batch.tokens.shape == (4, micro)
                        real = batch.sample_ids < 16 + count
                        assert (batch.tokens[0][real] == batch.sample_ids[real] * 100).all()
                        assert (batch.labels[:, real] == batch.tokens[:, real] + 1).all()
                        assert (batch.labels[:, ~real] == IGNORED_LABEL).all()
                        seen += batch.sample_ids[real].tolist()
                assert seen == list(range(16, 16 + count))
                assert len(lengths) == 1
                assert lengths.pop() % multiple == 0


class _Random:
    """Random tokens by sample index."""

    seq_len = 16

    def batch(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = [np.random.default_rng(int(index)).integers(0, 64, 17) for index in indices]
        return np.stack(rows).astype(np.int64)


SMALL = {"hidden_size": 32, "num_heads": 4, "num_layers": 4, "vocab_size": 64, "seq_len": 16, "dropout": 0.1}


def _three_steps(rank: int, run: ResolvedRun) -> list[tuple[float, float, int]]:
    engine = initialize(run.config, state_on(rank, run))
    measured, position = [], Position()
    for _ in range(3):
        count = run.global_batch_size
        batches = read_batches(_Random(), position.samples, count, run.micro_batch_size, engine.batch_slice)
        assert len(batches) == run.accumulation
        statistics = engine.train_step(batches, 1e-2)
        measured.append((statistics.loss, statistics.grad_norm, statistics.tokens))
        position = Position(position.step + 1, position.samples + count)
    return measured


@pytest.mark.parametrize(
    ("world", "parallel", "zero_stage"),
    [(3, {}, 1), (3, {}, 3), (4, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, 2)],
)
def test_a_global_batch_that_dp_does_not_divide_gives_the_same_run(
    world: int, parallel: dict[str, Any], zero_stage: int
) -> None:
    sections: dict[str, Any] = {"model": SMALL, "precision": {"dtype": "fp32"}, "optimizer": {"lr": 1e-2}}
    batch = {"global_batch_size": 7 if parallel else 8, "micro_batch_size": 1}
    one = elastic(1, training=batch, **sections)
    more = elastic(world, training=batch, parallel=parallel, zero={"stage": zero_stage}, **sections)
    assert more.notices
    expected = run_world(1, _three_steps, one)[0]
    for measured in run_world(world, _three_steps, more):
        for mine, theirs in zip(measured, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# torchrun


@contextmanager
def _agent(
    run_dir: Path,
    ranks: int,
    *words: str,
    nodes: str = "1",
    endpoint: str = "0",
    hosts: bool = True,
    restarts: int = 1,
    **environment: str,
) -> Iterator[Program]:
    """One torchrun, as one node runs it; it and its ranks have ended afterwards."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", str(ranks)]
    launcher += ["--max-restarts", str(restarts), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{endpoint}"]
    launcher += ["--rdzv-id", "test", "--local-addr", "127.0.0.1", "--rdzv-conf", f"{RENDEZVOUS},is_host={int(hosts)}"]
    train = ["-m", "megazero.cli", "train", str(QUICKSTART), *TINY, f"training.run_dir={run_dir}", *words]
    with (run_dir.parent / f"{run_dir.name}-{time.monotonic_ns()}.log").open("w+") as log:
        agent = start_program(
            *launcher,
            *train,
            stdout=log,
            env=without_launcher() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | environment,
        )
        agent.log = log  # type: ignore[attr-defined]
        try:
            yield agent
        finally:
            for pid in [*children_of(agent.pid), agent.pid]:
                _kill(pid)
            agent.wait()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _log(agent: Program) -> str:
    log = agent.log  # type: ignore[attr-defined]
    log.seek(0)
    return str(log.read())


def _is_asked_to_end(pid: int) -> bool:
    """Whether a process that is stopped will find a SIGTERM when it goes on."""
    pending = re.search(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return pending is not None and bool(int(pending[1], 16) >> (signal.SIGTERM - 1) & 1)


def _wait_until(agent: Program, is_so: Callable[[], bool]) -> None:
    wait_until(is_so, agent, lambda: _log(agent))


def _wait_for(agent: Program, run_dir: Path, step: int) -> None:
    _wait_until(agent, lambda: any(line["step"] >= step for line in metrics_of(run_dir)))


def _end(agent: Program, seconds: float = 300) -> str:
    try:
        status = agent.wait(seconds)
    except subprocess.TimeoutExpired:
        pytest.fail(_log(agent))
    assert status == 0, _log(agent)
    return _log(agent)


def _train_alone(rank: int, run: ResolvedRun) -> None:
    train(run, state_on(rank, run), lambda line: None)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses by step of the same run on one rank."""
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    run_world(1, _train_alone, load_config(QUICKSTART, [*TINY, f"training.run_dir={run_dir}"], 1))
    return _losses(run_dir)


def _losses(run_dir: Path) -> list[float]:
    lines = metrics_of(run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


def test_a_killed_rank_is_replaced_and_the_run_is_the_uninterrupted_one(
    tmp_path: Path, uninterrupted: list[float]
) -> None:
    run_dir = tmp_path / "run"
    # as torchrun is by default: it keeps one store over its restarts
    with _agent(run_dir, 2, "parallel.tp=2", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0") as agent:
        _wait_for(agent, run_dir, 6)
        _kill(children_of(agent.pid)[1])
        log = _end(agent)
    assert "resumed" in log
    assert _losses(run_dir) == pytest.approx(uninterrupted, rel=1e-4)


def test_a_spare_rank_waits_and_ends_as_the_others_do(tmp_path: Path, uninterrupted: list[float]) -> None:
    run_dir = tmp_path / "run"
    with _agent(run_dir, 3, "parallel.tp=2", restarts=0) as agent:
        log = _end(agent)
    assert "1 of 3 ranks do not train: tp 2 x pp 1 x dp 1 = 2" in log
    assert _losses(run_dir) == pytest.approx(uninterrupted, rel=1e-4)


# Two ranks stop after step 6, one after step 8: so steps are left when a node is lost, and when another comes.
STOPS = """
import os
import signal

from megazero.training.callbacks.base import Callback, RunContext, StepRecord
from megazero.training.callbacks.registry import CALLBACKS


class Stops(Callback):
    def __init__(self, context: RunContext) -> None:
        self.step = {2: 6, 1: 8}[context.run.world_size]

    def after_step(self, record: StepRecord) -> None:
        if record.step == self.step:
            os.kill(os.getpid(), signal.SIGSTOP)


CALLBACKS.register("stops", Stops)
"""


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_run_goes_on_with_the_nodes_that_are_left_and_takes_in_a_new_one(
    tmp_path: Path, uninterrupted: list[float]
) -> None:
    run_dir, node = tmp_path / "run", {"nodes": "1:2", "endpoint": str(free_port()), "LOGLEVEL": "INFO"}
    (script := tmp_path / "stops.py").write_text(STOPS)
    words = f'launch.extensions=["{script}"]', 'training.callbacks=["stops"]'
    with _agent(run_dir, 1, *words, **node) as first:
        with _agent(run_dir, 1, *words, **node, hosts=False) as second:
            _wait_until(first, lambda: all(any(map(_is_stopped, children_of(agent.pid))) for agent in (first, second)))
            for pid in (second.pid, *children_of(second.pid)):
                _kill(pid)
            (rank,) = children_of(first.pid)
            os.kill(rank, signal.SIGCONT)
        _wait_until(first, lambda: any(map(_is_stopped, set(children_of(first.pid)) - {rank})))
        (rank,) = children_of(first.pid)
        with _agent(run_dir, 1, *words, **node, hosts=False) as third:
            _wait_until(first, lambda: "Detected 1 new nodes" in _log(first) and _is_asked_to_end(rank))
            os.kill(rank, signal.SIGCONT)
            log = _end(first)
            _end(third)
    assert [line.split(" dp ")[1][0] for line in log.splitlines() if line.startswith("tp 1, pp 1")] == ["2", "1", "2"]
    assert "SIGTERM: finishing this step" in log
    assert "stopped, and saved" in log
    assert _losses(run_dir) == pytest.approx(uninterrupted, rel=1e-4)
