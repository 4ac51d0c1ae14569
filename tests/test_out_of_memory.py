"""Where memory runs out, the error says what was wanted, what is free, what holds most, and which settings would fit."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, run_world
from worlds import LLAMA, engine_on, run_of, state_on

from megazero.comm.collectives import _guarded
from megazero.comm.messages import LostPeerError, lacks_memory
from megazero.config import ResolvedRun, load_config
from megazero.engine import Engine
from megazero.parallel_state import Axis, ParallelState, RankGrid
from megazero.plan import advice
from megazero.plan.advice import fitting_changes, wanted_bytes
from megazero.plan.cluster import some_cluster
from megazero.plan.memory import RankMemory, fullest_of, memory_of
from megazero.training.trainer import OutOfMemoryError, explained, train

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.toml"
OF_CUDA = (
    "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 3.12 GiB is free. "
    "Process 1 has 76.00 GiB memory in use."
)
OF_THE_CPU = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)


OF_NCCL = (
    "[Rank 1] NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
OF_A_LOST_PEER = OF_NCCL.replace("ncclUnhandledCudaError: Call to CUDA function failed.", "ncclRemoteError: ...")


def test_what_was_wanted_is_read_from_the_allocators_text() -> None:
    assert wanted_bytes(OF_CUDA) == int(20.5 * 2**30)
    assert wanted_bytes(OF_THE_CPU) == 2**42
    assert wanted_bytes("HIP out of memory. Tried to allocate 512.00 MiB") == 2**29
    for call in ("calloc async", "host alloc", "malloc"):
        assert wanted_bytes(OF_NCCL + f"Failed to CUDA {call} 6291456 bytes") == 6291456
    assert wanted_bytes("out of memory") == 0


def _offered(run: ResolvedRun, *, on_cuda: bool) -> list[str]:
    cluster = some_cluster(run, 8, on_cuda=on_cuda)
    return [change.settings for change in fitting_changes(run, cluster, fullest_of(run, cluster), 1)]


def test_on_a_cpu_nothing_is_offloaded_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is the host's: what is offloaded takes as much, and the copies on their way come on top."""
    monkeypatch.setattr(advice, "_SHOWN", 100)
    run = run_of(2, model=LLAMA, training={"micro_batch_size": 2})
    for on_cuda in (True, False):
        said = " ".join(_offered(run, on_cuda=on_cuda))
        assert ("offload=host" in said, "offload.optimizer=cpu" in said) == (on_cuda, on_cuda), said


@pytest.mark.parametrize(
    "own",
    [
        "activations.recompute=selective activations.layers=1",
        "activations.keep_attention=true activations.offload=host",
        "activations.recompute=full activations.stages=[{stage=0,layers=1,keep_attention=true}]",
        "parallel.cp=2 training.micro_batch_size=1",
        "zero.stage=0",
    ],
)
def test_a_change_frees_what_it_is_said_to_free_where_it_is_typed_behind_the_runs_own(own: str) -> None:
    words = [*own.split(), "model.num_layers=4", "parallel.pp=2", "parallel.tp=1", "parallel.sequence_parallel=false"]
    words += ["parallel.dp=auto", "training.accumulation=auto"]

    def planned(*more: str) -> tuple[ResolvedRun, RankMemory]:
        run = load_config(QUICKSTART, [*words, *more], 8)
        return run, memory_of(run, some_cluster(run, 8, on_cuda=True), {0})[0]

    run, now = planned()
    found = fitting_changes(run, some_cluster(run, 8, on_cuda=True), now, 1)
    assert found
    for change in found:
        if "parallel.pp" not in change.settings:
            assert now.peak - planned(*shlex.split(change.settings))[1].peak == change.frees, change


def _run_out(rank: int, run: ResolvedRun, free: int) -> str:
    """Rank 1 runs out of memory in its second step."""
    advice.free_memory_bytes = lambda *_: free  # type: ignore[assignment]
    intact, steps = Engine._run, []

    def fail(self: Engine, *given: Any, **named: Any) -> Any:
        steps.append(1)
        if rank == 1 and len(steps) == 2:
            raise torch.OutOfMemoryError(OF_CUDA.replace("20.50 GiB", "0.25 MiB"))
        return intact(self, *given, **named)

    Engine._run = fail  # type: ignore[method-assign]
    try:
        train(run, state_on(rank, run), lambda _: None)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_the_rank_without_memory_says_which_settings_would_fit_and_the_others_name_it(tmp_path: Any) -> None:
    training = {"run_dir": str(tmp_path), "steps": 4, "global_batch_size": 8, "micro_batch_size": 2}
    run = run_of(2, model=LLAMA | {"vocab_size": 257}, zero={"stage": 0}, training=training)
    other, said = run_world(2, _run_out, run, 2**18 - 1)
    assert re.match(
        r"OutOfMemoryError: out of memory on cpu of rank 1 \(.*\): wanted 0\.2 MiB, free 0\.2 MiB\n", said
    ), said
    assert re.search(r"it holds: (parameters|optimizer|gradients) \d", said)
    assert "would fit, by the plan: " in said
    assert "rank 1 ended in step 2: OutOfMemoryError: out of memory on cpu of rank 1" in other


@pytest.mark.parametrize(
    "last",
    [
        "Cuda failure 2 'out of memory'",
        "Failed to CUDA calloc async 6291456 bytes",
        "Failed to CUDA host alloc 6291456 bytes",
        "Cuda failure 1 'invalid argument'",
    ],
)
def test_what_nccl_lacks_is_memory_and_no_peer_and_its_last_error_is_kept(last: str, monkeypatch: Any) -> None:
    run, axis = run_of(2, model=LLAMA), Axis("tp", (0, 1))

    def fail(text: str) -> None:
        raise dist.DistBackendError(text)

    with pytest.raises(LostPeerError), explained(run, ParallelState(RankGrid())):
        _guarded("all_reduce", axis, lambda: fail(OF_A_LOST_PEER + "socketPollConnect: connection refused"))
    monkeypatch.setattr(advice, "free_memory_bytes", lambda *_: 2**20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**36))
    wanted = rf"wanted 144\.0 MiB, free 1\.0 MiB(.|\n)*{last}\n(.|\n)*no one setting frees"
    with pytest.raises(OutOfMemoryError, match=wanted), explained(run, ParallelState(RankGrid())):
        _guarded("all_reduce", axis, lambda: fail(OF_NCCL + last))


def test_where_no_setting_helps_that_is_said_and_other_errors_stay_what_they_are(monkeypatch: Any) -> None:
    run = run_of(1, model=LLAMA)
    engine = engine_on(0, run)
    monkeypatch.setattr(advice, "free_memory_bytes", lambda *_: 2**30)
    whole = r"wanted 4,194,304\.00 GiB, free 1\.00 GiB(.|\n)*no one setting frees"
    with pytest.raises(OutOfMemoryError, match=whole), explained(run, engine.state, engine):
        torch.empty(2**50)
    monkeypatch.setattr(advice, "free_memory_bytes", lambda *_: 0)
    with pytest.raises(OutOfMemoryError, match=r"more ranks for parallel\.tp"), explained(run, engine.state):
        raise MemoryError
    with pytest.raises(RuntimeError, match=r"^size mismatch$"), explained(run, engine.state, engine):
        raise RuntimeError("size mismatch")


def _without_room_for_nccl(rank: int, run: ResolvedRun) -> tuple[bool, str]:
    taken = torch.zeros(1, device=DEVICE)
    dist.all_reduce(torch.zeros(1))  # over gloo; each rank has its context now
    if rank == 0:
        taken = torch.empty(torch.cuda.mem_get_info()[0] - 2**26, dtype=torch.uint8, device=DEVICE)
    dist.all_reduce(torch.zeros(1))
    try:
        state_on(rank, run)
    except RuntimeError as error:
        return lacks_memory(error), str(error)
    finally:
        del taken
        torch.cuda.empty_cache()
    return False, "NCCL needed less than was left"


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a device whose memory ends")
def test_a_communicator_that_finds_no_memory_says_so() -> None:
    found = run_world(2, _without_room_for_nccl, run_of(2, model=LLAMA))
    assert any(lacks for lacks, _ in found), found
