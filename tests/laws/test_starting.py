"""Starting a rank does not take longer in a larger world: what it writes into the store and reads there, and its groups.

Whole runs of 4, 8 and 16 ranks count what they do before their first step; one rank of up to 16,384 makes its real groups of
gloo against a counting store.  Nothing is counted in a model of the start.

No task of a launcher trains alone beside the others, and no rank waits without limit for an address.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from math import log2
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting_store import CountingStore, Counts
from harness import free_port, run_world
from worlds import loop_of

from megazero.cli._common import started_ranks
from megazero.comm.meeting import name_hint, open_meeting
from megazero.config import ResolvedRun
from megazero.deepspeed.script_setup import init_distributed
from megazero.engine import Engine
from megazero.launchers import MeetingError, start_problem
from megazero.parallel_state import Links, ParallelState, RankGrid, parallel_state_of
from megazero.parallel_state.state import connect_on_demand
from megazero.training import launch
from megazero.training.trainer import train

# (grid, cp_ulysses, shard_group_size)
GRIDS = {
    64: (RankGrid(tp=4, dp=4, pp=4), 1, 0),
    512: (RankGrid(tp=8, cp=2, dp=8, pp=4), 2, 8),
    16384: (RankGrid(tp=8, cp=2, dp=64, pp=16), 1, 64),
}


# ---- Groups, and what each rank keeps in the store for them


def _groups(rank: int, world: int) -> tuple[int, Counts]:
    """How many groups one rank of a large world makes, and its use of the store; the other ranks do not exist."""
    grid, ulysses, shards = GRIDS[world]
    store = CountingStore(dist.HashStore())
    connect_on_demand(os.environ)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    state = ParallelState(replace(grid, cp_ulysses=ulysses, shard_group_size=shards), rank)
    state.among_stages([0, grid.pp - 1])
    state.saving_axes(60)
    made = len(dist.distributed_c10d._world.pg_map)  # with the default one
    state.leave()
    dist.destroy_process_group()
    return made, store.counts


def _groups_of_all(_: int) -> dict[int, list[tuple[int, Counts]]]:
    return {world: [_groups(rank, world) for rank in (0, world // 2 + 1, world - 1)] for world in GRIDS}


def test_groups_keys_and_bytes_of_a_rank_do_not_grow_with_the_world() -> None:
    (found,) = run_world(1, _groups_of_all)
    for ranks in found.values():
        for made, counts in ranks:
            assert made <= 11, (
                "the world, tp, pp in both directions, first and last, 2 of cp, dp_cp, shard, replica, saving"
            )
            assert counts.written_keys == made, "each group writes where this rank listens"
            assert counts.written_bytes < 200 * made
            assert (counts.read_keys, counts.added, counts.waited) == (0, 0, 0), (
                "nobody is met before the first message"
            )


# ---- A whole start


def _resolved(world: int, folder: Path) -> ResolvedRun:
    training = {"steps": 1, "global_batch_size": world // 2}
    return loop_of(folder, world, parallel={"tp": 2, "pp": 2}, training=training)


def _start(rank: int, run: ResolvedRun, port: int) -> tuple[Counts, Counts, int]:
    """What a rank that torchrun has started does: counts before its first step and at its end, and its groups."""
    dist.destroy_process_group()  # that of the test
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.world_size, "LOCAL_WORLD_SIZE": run.world_size}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    open_store, train_step, stores = launch.world.open_store, Engine.train_step, []
    found: list[Any] = []

    def counting(timeout: timedelta) -> CountingStore:
        stores.append(CountingStore(open_store(timeout)))
        return stores[0]

    def first_step(engine: Engine, *args: Any, **options: Any) -> Any:
        found.append(stores[0].counts.copy())
        found.append(len(dist.distributed_c10d._world.pg_map))
        return train_step(engine, *args, **options)

    launch.world.open_store, Engine.train_step = counting, first_step  # type: ignore[assignment, method-assign]
    answer = launch.run_rank(run, lambda run, state: train(run, state, lambda _: None).step)
    assert answer == 1
    return found[0], stores[0].counts, found[1]


@pytest.mark.slow
def test_a_run_writes_and_reads_as_much_per_rank_in_a_world_four_times_as_large(tmp_path: Path) -> None:
    most, least, more = dict[int, Counts](), dict[int, Counts](), dict[int, Counts]()
    for world in (4, 16):
        ranks = run_world(world, _start, _resolved(world, tmp_path / str(world)), free_port())
        values = {name: [getattr(before, name) for before, _, _ in ranks] for name in vars(Counts())}
        most[world] = Counts(**{name: max(counts) for name, counts in values.items()})
        least[world] = Counts(**{name: min(counts) for name, counts in values.items()})
        more[world] = Counts(**{name: sum(counts) - world * min(counts) for name, counts in values.items()})
        assert max(groups for _, _, groups in ranks) <= 6, (
            "the world, tp, pp in both directions, dp where it is not 1, saving"
        )
        # A rank looks up those to whom it has a message: its children in the tree, and its parent.
        assert most[world].read_keys <= 2 * log2(world) + 1
        assert more[world].written_keys == 3, "of the first with its choices, and its place, and of the last who comes"
        assert least[world].added == 6, "come, problems, and of its choices and its place: alike, and kinds"
        assert more[world].added == 2, "the first of a kind"
    small, large = least[4], least[16]
    assert large.written_keys - small.written_keys <= 1, "that of dp"
    assert large.written_bytes - small.written_bytes < 200
    assert more[16].written_bytes - more[4].written_bytes < 200
    assert most[16].read_bytes < 200 * most[16].read_keys
    assert most[16].waited <= most[4].waited + 2 * log2(16 / 4)


# ---- What a GPU's rank asks NCCL for


def test_no_communicator_of_gpus_spans_the_world_and_none_has_gloo_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[int, ...], str | None]] = []

    def record(
        _: Any, ranks: tuple[int, ...], device: torch.device, seconds: float, backend: str | None, *__: int
    ) -> Any:
        asked.append((ranks, backend))
        return SimpleNamespace()

    monkeypatch.setattr(ParallelState, "_process_group", record)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 512)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    grid, ulysses, shards = GRIDS[512]
    state = ParallelState(
        replace(grid, cp_ulysses=ulysses, shard_group_size=shards), 300, Links(torch.device("cuda", 0))
    )
    state.saving_axes(60)
    *groups, saving = asked
    assert saving == (tuple(range(512)), "gloo"), "it connects on demand"
    assert {backend for _, backend in groups} == {"nccl"}
    assert max(len(ranks) for ranks, _ in groups) == 16
    assert len(groups) == 7, "tp, pp in both directions, Ulysses, dp_cp, shard, replica"
    assert [axis.size for axis in state.world.factors] == [8, 16, 4]


def test_each_communicator_takes_as_many_cores_as_its_axis_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of a stand-in for NCCL; nothing is asked of gloo, nor of NCCL where the number is 0."""
    asked: dict[tuple[int, ...], list[int | None]] = {}

    def record(ranks: list[int], *, pg_options: Any, **_: Any) -> Any:
        assert pg_options.high_priority
        asked.setdefault(tuple(ranks), []).append(getattr(pg_options.config, "max_ctas", None))
        return SimpleNamespace()

    def options(*, is_high_priority_stream: bool) -> Any:
        return SimpleNamespace(high_priority=is_high_priority_stream, config=SimpleNamespace())

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "new_group", record)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 48)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    limits = {"tp": 3, "cp": 0, "dp": 7, "pp": 2, "ep": 5}
    grid, device = RankGrid(tp=2, cp=2, dp=4, pp=3, ep=8), torch.device("cuda", 0)
    state = ParallelState(replace(grid, cp_ulysses=2, shard_group_size=4), 0, Links(device, max_ctas=limits))
    state.with_own_group(state.shard, "gathers")
    tied = state.among_stages([0, 2], "embedding")
    of = {
        axis: asked[getattr(state, axis).ranks]
        for axis in ("tp", "pp", "cp_ulysses", "dp_cp", "shard", "replica", "ep")
    }
    assert of == {
        "tp": [3],
        "pp": [2, 2],
        "cp_ulysses": [None],
        "dp_cp": [7],
        "shard": [7, 7],
        "replica": [7],
        "ep": [5],
    }
    assert asked[tied.ranks] == [7], "a sum of gradients"
    asked.clear()
    ParallelState(grid, 0, Links(device))
    assert {value for values in asked.values() for value in values} == {None}


# ---- Who has started this process

RANKED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}  # as in a batch script
TASKS = [
    ("srun", {**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}),
    ("srun", {**SLURM, "SLURM_STEP_ID": "12"}),
    ("srun", {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}),
    ("mpirun", {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}),
    ("mpiexec", {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"}),
    ("mpiexec", {"PMI_SIZE": "16", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}),
    ("mpiexec", {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "3"}),
    ("aprun", {"ALPS_APP_PE": "1"}),
    ("prterun", {"PMIX_RANK": "1"}),
    ("flux", {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "0", "PMI_SIZE": "4", "PMI_RANK": "0"}),
    ("horovodrun", {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}),
    ("Kubeflow", {"PET_NNODES": "3", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "job-node-0"}),
    ("Kubeflow", {"PET_NNODES": "1:4"}),
]
ALONE: list[dict[str, str]] = [
    *({}, SLURM, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"MASTER_PORT": "tcp://10.0.0.1:80"}),
    {**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1", "PMI_RANK": "0", "PMIX_RANK": "0"},
    {**SLURM, "SLURM_STEP_ID": "4294967290"},  # a shell of salloc
    *(  # srun --pty bash, also where pmi2 is the default
        {**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "40000", **pmi}
        for pmi in ({}, {"PMI_SIZE": "8", "PMI_RANK": "0"})
    ),
    *({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, {"FLUX_JOB_SIZE": "1"}, {"PET_NNODES": "1"}),
]


@pytest.mark.parametrize(("launcher", "task"), TASKS)
def test_a_task_without_rank_learns_what_to_type_instead_of_training_alone(
    launcher: str, task: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (start_problem(task) or "").startswith(f"{launcher} has started several tasks (")
    assert start_problem({**task, **RANKED}) is None
    monkeypatch.setattr(os, "environ", task)
    for join in (parallel_state_of, init_distributed):
        with pytest.raises(ValueError, match="started several tasks"):
            join()


@pytest.mark.parametrize("environment", ALONE)
def test_one_task_a_batch_script_or_a_shell_starts_as_ever(environment: dict[str, str]) -> None:
    assert start_problem(environment) is None
    assert start_problem({**environment, **RANKED}) is None


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        *(({name: ""}, f"{name} is not set") for name in ("MASTER_ADDR", "MASTER_PORT")),
        *(({"MASTER_PORT": port}, "is no port") for port in ("http", "0", "65536", "tcp://a:1")),
        *(({"RANK": rank}, "WORLD_SIZE=2 is not larger") for rank in ("2", "3")),
    ],
)
def test_a_rank_that_cannot_meet_the_others_is_told_at_once(wrong: dict[str, str], found: str) -> None:
    assert found in (start_problem(RANKED | wrong) or "")


def test_a_command_ends_with_one_line_where_a_launcher_has_set_too_little(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(SystemExit) as end:
        started_ranks()
    assert (end.value.code, capsys.readouterr().err.count("\n")) == (2, 1)


@pytest.mark.parametrize("address", ["no-such-host.invalid", "127.0.0.1"])
def test_an_address_that_does_not_answer_ends_a_bounded_wait(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes the call and is silent, too: torch would wait for it without limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr(os, "environ", {"MASTER_ADDR": address, "MASTER_PORT": str(port)})
        with pytest.raises(MeetingError, match=rf"MASTER_ADDR={address}, MASTER_PORT={port}, .* from rank 1 on .*: "):
            open_meeting(1, 2, timedelta(seconds=0.5))
    for thread in [one for one in threading.enumerate() if "(connect)" in one.name]:
        thread.join(10)


@pytest.mark.parametrize("address", ["127.0.1.1", "10.0.0.7"])
@pytest.mark.parametrize(("local", "more"), [("8", {}), ("4", {"GLOO_SOCKET_IFNAME": "eth0"}), ("4", {})])
def test_a_host_whose_name_leads_to_itself_alone_is_told_which_variables_to_set(
    local: str, more: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: address)
    found = name_hint({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": local, **more})
    is_told = local == "4" and not more and address == "127.0.1.1"
    assert all((name in found) is is_told for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", address))
