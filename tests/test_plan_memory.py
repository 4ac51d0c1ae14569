"""The plan's memory and traffic against real ranks: state and traffic to the byte, the live peak within 1%."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from tempfile import gettempdir

import pytest
from activation_formula import activations_of_ranks
from harness import run_world

from megazero.config import ResolvedRun, load_config
from megazero.engine import initialize
from megazero.engine.outline import schedule_of
from megazero.layers.counter_rng import normal
from megazero.parallel_state import Links, ParallelState, RankGrid
from megazero.plan import memory, state_trace
from megazero.plan.cluster import Cluster, cluster_of
from megazero.plan.devices import Device, Link
from megazero.plan.memory import RankMemory, memory_of
from megazero.plan.memory_report import STATE_KINDS, live_memory, watched_step
from megazero.plan.speed_probe import random_batches
from megazero.plan.state_trace import trace_state
from megazero.plan.traffic import busiest_links, traffic_of

MODEL = """
    model.hidden_size=256 model.num_layers=4 model.num_heads=4 model.ffn_hidden_size=512 model.vocab_size=1024
    model.seq_len=128 training.micro_batch_size=2 training.compile=false precision.dtype=bf16
"""
FILES = f"zero.offload.nvme_path={gettempdir()} training.accumulation=2"
CASES = [
    (1, "training.accumulation=1 activations.recompute=selective"),
    (
        2,
        "parallel.pp=2 parallel.schedule=zbv data.document_mask=true training.accumulation=4 zero.stage=0 "
        "precision.dtype=fp32",
    ),
    (2, "zero.stage=3 training.accumulation=3 activations.recompute=full model.tie_embeddings=true"),
    (4, "parallel.tp=2 parallel.sequence_parallel=true zero.stage=2 zero.bucket_bytes=1048576 training.accumulation=2"),
    (2, "parallel.cp=2 zero.stage=1 training.accumulation=2 average.kind=ema"),
    (2, "parallel.pp=2 parallel.schedule=zb-h1 training.accumulation=4 zero.stage=1 precision.dtype=fp32"),
    (2, "zero.stage=3 zero.bucket_bytes=1048576 training.accumulation=2 precision.dtype=fp32"),  # gradients in parts
    (
        2,
        "zero.stage=2 zero.reduce=step zero.offload.optimizer=cpu zero.bucket_bytes=1048576 training.accumulation=1 "
        "precision.dtype=fp32 model.ffn_hidden_size=2048 model.vocab_size=128 activations.recompute=full",
    ),
    (2, f"zero.stage=3 zero.offload.optimizer=nvme zero.offload.parameters=nvme {FILES}"),
    (2, "activations.contiguous=true activations.recompute=full zero.stage=2 training.accumulation=2"),
    (2, "activations.contiguous=true parallel.pp=2 training.accumulation=4 zero.stage=1"),
    (1, "activations.offload=host zero.stage=1 model.num_layers=6 model.seq_len=512"),
    (2, "activations.offload=host parallel.pp=2 parallel.schedule=zbv training.accumulation=4"),
    (2, "activations.offload=host activations.offload_layers=2 model.num_layers=8 zero.stage=1"),
    (
        2,
        "activations.offload=host activations.offload_layers=[0,2,3,7] parallel.pp=2 training.accumulation=4 "
        "model.num_layers=8",
    ),
    (2, "activations.contiguous=true data.document_mask=true zero.stage=2 model.seq_len=512"),
    (2, f"zero.stage=1 zero.offload.optimizer=nvme {FILES} average.kind=ema"),
    (2, "precision.fp8=rowwise parallel.tp=2 training.accumulation=2"),
    (1, "precision.fp8=blockwise precision.fp8_layers=all precision.dtype=fp32 activations.recompute=full"),
    (2, "precision.fp8=blockwise precision.fp8_layers=all zero.stage=3"),
    (2, "optimizer.name=muon zero.stage=1"),
    (4, "optimizer.name=muon zero.stage=3 parallel.tp=2 parallel.sequence_parallel=true precision.dtype=fp32"),
    (2, f"zero.stage=3 zero.offload.parameters=nvme zero.offload.nvme_path={gettempdir()}"),
    (
        2,
        "zero.stage=2 zero.reduce=step zero.bucket_bytes=1048576 training.accumulation=1 "
        "activations.recompute=full training.micro_batch_size=4 model.seq_len=512",
    ),
]
WHOLE_KINDS = (*STATE_KINDS, "gather_buffers", "gradient_buffers")


def cluster(ranks: int) -> Cluster:
    cpu = Device("cpu", 2**34, {"fp32": 1e11, "bf16": 1e11}, 1e10, 1e10, Link("memory", 1e10, 1e-6))
    return Cluster(cpu, ranks, ranks, cpu.link, cpu.link, processors=2)


def third_step(rank: int, run: ResolvedRun) -> tuple[int, int, dict, dict]:
    """(pipeline rank, live peak, state by kind, traffic) of a rank; state and traffic of the first of its pipeline rank."""
    parallel = run.config.parallel
    grid = RankGrid(tp=parallel.tp, cp=parallel.cp, dp=run.dp, pp=parallel.pp)
    state = ParallelState(replace(grid, cp_ulysses=parallel.ulysses), rank, Links(local_world_size=run.world_size))
    _first_use()
    with live_memory(state.device) as live:
        engine = initialize(run.config, state)
        batches = random_batches(run, engine.batch_slice)
        for _ in range(3):
            counted, _ = watched_step(engine, batches, live.start)
    if (state.at.tp, state.at.cp, state.at.dp) != (0, 0, 0):
        return state.at.pp, live.peak, {}, {}
    traffic = state.traffic
    keys = [key for key in traffic.calls if key[1] not in ("gather_objects", "from_first")]
    sent = {key: (traffic.sent_bytes[key], traffic.link_bytes[key], traffic.calls[key]) for key in keys}
    return state.at.pp, live.peak, counted, sent


def _first_use() -> None:
    """Make the table of random numbers, which a process makes once and the plan does not count."""
    import torch

    normal(0, torch.zeros(1, dtype=torch.int64))
    gc.collect()


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_a_run_needs_what_its_plan_says(ranks: int, case: str) -> None:
    run = load_config(os.devnull, [*MODEL.split(), *case.split()], ranks)
    planned, traffic = memory_of(run, cluster(ranks)), traffic_of(run, cluster(ranks))
    measured = run_world(ranks, third_step, run)
    for stage, plan in enumerate(planned):
        assert sum(plan.kinds.values()) == plan.peak
        peaks = [peak for at, peak, _, _ in measured if at == stage]
        assert plan.peak == pytest.approx(max(peaks), rel=0.002), plan
        ((state, sent),) = [(state, sent) for at, _, state, sent in measured if at == stage and state]
        assert {kind: plan.state.get(kind, 0) for kind in WHOLE_KINDS} == {
            kind: state.get(kind, 0) for kind in WHOLE_KINDS
        }
        assert {key: tuple(count) for key, count in traffic[stage].items()} == sent
    assert _fullest(planned) == max(measured, key=lambda one: one[1])[0]


def _fullest(planned: tuple[RankMemory, ...]) -> int:
    return max(planned, key=lambda one: one.peak).stage


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_shared_or_gone_over_changes_nothing(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a plan that traces every pipeline rank for itself and looks at every micro-batch."""
    case = "parallel.pp=4 training.accumulation=12 zero.stage=1 precision.dtype=bf16 model.num_layers=8"
    more = ["activations.offload='host'", "activations.recompute='full'", "activations.offload_layers=1"]
    run = load_config(os.devnull, [*MODEL.split(), *case.split(), *(more if offload else [])], 8)
    nodes = cluster_of("h100", 8, 2) if offload else replace(cluster(8), per_node=2)
    short = memory_of(run, nodes), traffic_of(run, nodes)
    monkeypatch.setattr(state_trace, "_alike", lambda run, rank, per_node: rank)
    monkeypatch.setattr(memory, "_filling_the_pipeline", schedule_of)
    assert short == (memory_of(run, nodes), traffic_of(run, nodes))


def test_the_busiest_rank_sends_to_other_nodes_all_that_its_ring_sends() -> None:
    """dp 4 x tp 2 over nodes of 4: rank 3's next on dp is 5, of another node; tp stays within a node."""
    words = "parallel.tp=2 zero.stage=1 training.accumulation=1 precision.dtype=bf16 parallel.sequence_parallel=true"
    run = load_config(os.devnull, [*MODEL.split(), *words.split()], 8)
    (sent,) = [busiest_links(run, nodes, one) for nodes in [cluster_of("h100", 8, 4)] for one in traffic_of(run, nodes)]
    assert {axis for axis, _ in sent} >= {"tp", "dp"}
    for (axis, operation), one in sent.items():
        if axis in ("tp", "dp"):
            assert one.link_bytes == (one.sent_bytes if axis == "dp" else 0), operation


def test_a_plan_makes_no_file_and_does_not_look_at_this_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of N parameters in bf16, 4 N bytes of masters and 8 N of moments are in the file and, part by part, in buffers."""

    def asked(*_: object) -> int:
        raise AssertionError

    monkeypatch.setattr("megazero.zero.offload.free_memory_bytes", asked)
    words = "zero.stage=2 precision.dtype=bf16 zero.offload.nvme_path=/no/such/place zero.offload.optimizer="
    found = {}
    for place in ("nvme", "auto"):
        run = load_config(os.devnull, [*MODEL.split(), *(words + place).split()], 1)
        found[place] = trace_state(run, 0, per_node=1, on_cuda=True)
    count = sum(map(sum, found["nvme"].elements.values()))
    away = {"optimizer on file": 8 * count, "parameters on file": 4 * count, "gradients on host": 4 * count}
    away["optimizer_buffers on host"] = 12 * count  # two parts of one bucket, of which three could be under way
    assert found["nvme"].off_device == pytest.approx(away, rel=1e-3)
    assert found["auto"].off_device == {}


def test_a_plan_locks_no_memory_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def locks(*_: object) -> None:
        raise AssertionError

    run = load_config(os.devnull, [*MODEL.split(), "activations.contiguous=true", "precision.dtype=fp16"], 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)  # torch's Adam asks the driver
    monkeypatch.setattr("megazero.comm.memory.page_lock", locks)
    assert memory_of(run, cluster_of("h100", 1))


def test_activations_on_the_host_are_in_no_peak_of_a_gpu() -> None:
    run = [
        load_config(os.devnull, [*MODEL.split(), f"activations.offload={where}", "precision.dtype=bf16"], 1)
        for where in ("none", "host")
    ]
    (kept,), (moved,) = (memory_of(one, cluster_of("h100", 1)) for one in run)
    layers = moved.off_device["activations on host"]
    (formula,) = activations_of_ranks(run[1], schedule_of(run[1]), on_cuda=True)
    assert layers == pytest.approx(formula.host, rel=0.02)
    assert moved.kinds["activations"] <= kept.kinds["activations"] - layers
    assert moved.peak < kept.peak - 0.4 * layers  # two of four layers are there, on their way
