"""Law 1 between hosts: ranks that reduce and gather in two levels give the run of an independent plain model.

Each block of ranks believes that it is alone on its host; see tests/test_two_level.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from harness import run_world
from worlds import LLAMA, difference, engine_on, run_of, train_on, train_plainly

from megazero.comm.collectives import gather_objects
from megazero.config import ResolvedRun
from megazero.cpu.two_level import TwoLevelBackend
from megazero.parallel_state import Links, ParallelState, RankGrid

MODEL = LLAMA | {"tie_embeddings": True}
TOLERANCE = 1e-5


@lru_cache(maxsize=1)
def _plain() -> dict[str, Any]:
    return train_plainly(run_of(1, model=MODEL))


def _train(
    rank: int, runs: list[ResolvedRun], local_world_size: int, two_levels: list[str]
) -> list[dict[str, Any] | None]:
    parallel = runs[0].config.parallel
    grid = RankGrid(tp=parallel.tp, pp=parallel.pp, dp=runs[0].dp, order=parallel.order)
    state = ParallelState(grid, rank, Links(timeout_seconds=60, local_world_size=local_world_size))
    results = []
    for run in runs:
        engine = engine_on(rank, run, state=state)
        results.append(train_on(engine, run))
        if run.config.zero.stage < 3:  # what each rank of tp has whole is the same on each, bit for bit
            held = [
                bucket.weights[slot.start : slot.stop].clone()
                for bucket in engine.sharded_model.parameters.buckets
                for slot in bucket.layout.slots
                if slot.info.spec.split is None
            ]
            for others in gather_objects(held, state.tp):
                assert all(map(torch.equal, others, held))
        engine.sharded_model.close()
    for name in two_levels:
        axis = getattr(state, name)
        assert isinstance(axis.group.backends["cpu"], TwoLevelBackend), name
        assert any(sent for (over, _), sent in state.traffic.link_bytes.items() if over == name), name
    state.leave()
    return results


@pytest.mark.parametrize(
    ("world", "local_world_size", "parallel", "stages", "two_levels"),
    [
        (4, 2, {}, (0, 1, 2, 3), ["dp"]),
        (8, 4, {"tp": 2, "pp": 2}, (1, 3), ["world"]),
        (8, 4, {"tp": 2}, (2,), ["dp", "world"]),
    ],
    ids=["dp4", "tp2 pp2 dp2", "tp2 dp4"],
)
def test_a_run_on_two_hosts_is_the_same_run(
    world: int, local_world_size: int, parallel: dict[str, Any], stages: tuple[int, ...], two_levels: list[str]
) -> None:
    runs = [run_of(world, model=MODEL, parallel=parallel, zero={"stage": stage}) for stage in stages]
    wanted = _plain()
    for stage, got in zip(stages, run_world(world, _train, runs, local_world_size, two_levels)[0], strict=True):
        assert got["loss"] == pytest.approx(wanted["loss"], rel=TOLERANCE), stage
        assert got["norm"] == pytest.approx(wanted["norm"], rel=TOLERANCE), stage
        for name, tensor in wanted["weights"].items():
            assert difference(got["weights"][name], tensor) < TOLERANCE, (stage, name)


def test_where_some_groups_lie_within_a_host_and_others_cross_all_are_the_same_run() -> None:
    """Of the data-parallel groups, two ranks each, the first and the last share memory, that between them spans the hosts.

    Gradients of norms are summed over tp: all its ranks must have whole sums, or all of them a shard.
    """
    model = {"num_heads": 3, "num_kv_heads": 3, "hidden_size": 24, "ffn_hidden_size": 48, "seq_len": 18}
    model |= {"tie_embeddings": False}
    parallel = {"tp": 3, "sequence_parallel": True, "order": "dp-tp-cp-pp"}
    runs = [
        run_of(6, model=model, parallel=parallel, zero={"stage": stage, "bucket_bytes": 4096}) for stage in (0, 1, 3)
    ]
    wanted = train_plainly(runs[0])
    for got in run_world(6, _train, runs, 3, [])[0]:
        assert got["loss"] == pytest.approx(wanted["loss"], rel=TOLERANCE)
        assert got["norm"] == pytest.approx(wanted["norm"], rel=TOLERANCE)
        for name, tensor in wanted["weights"].items():
            assert difference(got["weights"][name], tensor) < TOLERANCE, name
