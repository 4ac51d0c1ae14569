"""The search over shapes, against an enumeration of all of them, with a memory and a time that are plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megazero.config import ConfigError, ResolvedRun, load_config
from megazero.config.document import save_config
from megazero.config.load import resolve
from megazero.models.registry import FAMILIES
from megazero.plan.choices import Bounds, MemoryOption, ShapeChoice, Space, config_of, groups_in, space_of
from megazero.plan.cluster import Cluster, cluster_of
from megazero.plan.search import Judge, Need, SearchResult, base_of, front_of, search

RUN = """
[model]
hidden_size = 64
num_layers = 8
num_heads = 4
num_kv_heads = 2
vocab_size = 128
seq_len = 2048
[training]
global_batch_size = 16
"""


@dataclass(frozen=True)
class PlainJudge(Judge):
    """State and what a micro-batch keeps; FLOPs over the peak with the bubble, and what each key costs."""

    peak_flops: float

    def memory(self, run: ResolvedRun) -> tuple[int, str]:
        config, parallel = run.config, run.config.parallel
        own = 400_000 / (parallel.tp * parallel.pp)
        stage, shards = config.zero.stage, run.shards
        on_device = config.zero.offload.optimizer == "none"
        state = own * (2 / (shards if stage == 3 else 1) + 4 / (shards if stage >= 2 else 1))
        state += own * 12 * on_device / (shards if stage >= 1 else 1)
        kept = {"none": 1.0, "selective": 0.7, "full": 0.2}[str(config.activations.recompute)]
        kept += 0.1 * config.activations.keep_attention
        kept *= 0.1 if config.activations.offload == "host" else 1.0
        tokens = run.micro_batch_size * config.model.seq_len / parallel.cp
        return round(state + kept * tokens * 64 * 40 / parallel.tp), "rank 0"

    def seconds(self, run: ResolvedRun) -> float:
        config, parallel = run.config, run.config.parallel
        flops = FAMILIES[config.model.family].flops_per_token(config.model, None)
        compute = flops * run.global_batch_size * config.model.seq_len / run.world_size / self.peak_flops
        compute *= 1 + {"none": 0.0, "selective": 0.02, "full": 0.33}[str(config.activations.recompute)]
        compute *= 1 + 0.05 * (config.activations.offload == "host") + 0.07 * (config.zero.offload.optimizer != "none")
        compute *= 1 - 0.03 * config.activations.keep_attention
        chunks = max(parallel.virtual_stages, 2 if parallel.schedule == "zbv" else 1)
        bubble = (parallel.pp - 1) / run.accumulation / chunks
        messages = 0.11 * (parallel.tp - 1) + 0.06 * (parallel.cp - 1) + 0.02 * config.zero.stage
        return compute * (1 + bubble) * (1 + messages) + 1e-4 * abs(run.micro_batch_size - 2)


@pytest.fixture
def base(tmp_path: Path) -> ResolvedRun:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return base_of(load_config(path, (), 1).config, 16)


def _cluster(memory_bytes: float, ranks: int = 8) -> Cluster:
    cluster = cluster_of("h100", ranks, 4)
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(memory_bytes)))


_SPACE = Space(
    tp=(1, 2),
    cp=(1, 2),
    pp=(1, 4),
    micro_batch=(1, 2, 4),
    schedules=("1f1b", "interleaved"),
    virtual_stages=(2,),
    zero_stages=(1, 3),
    gather_policies=("action",),
    shard_groups=(0,),
    options=tuple(MemoryOption(recompute, offload) for recompute in (0, 1, 3) for offload in ("none", "both")),
    per_node=4,
)


def _all_runs(base: ResolvedRun, ranks: int) -> Iterator[tuple[ShapeChoice, ResolvedRun]]:
    for shape in groups_in(_SPACE, base.config, ranks):
        for option in _SPACE.options:
            choice = replace(shape, option=option)
            try:
                yield choice, resolve(config_of(base.config, choice), ranks)
            except ConfigError:
                continue


@pytest.mark.parametrize("megabytes", [2.0, 3.5, 30.0])
def test_the_best_is_that_of_all_choices(base: ResolvedRun, megabytes: float) -> None:
    """The ten best, one of each shape, and the least time and memory of the front, against every choice there is."""
    cluster = _cluster(megabytes * 1e6)
    judge = _judge(cluster)
    found = search(base, judge, space=_SPACE)
    fits: dict[ShapeChoice, tuple[float, int]] = {}
    for choice, run in _all_runs(base, 8):
        peak = judge.memory(run)[0]
        if peak <= cluster.device.memory_bytes:
            shape = replace(choice, option=MemoryOption())
            fits[shape] = min(fits.get(shape, (float("inf"), 0)), (judge.seconds(run), peak))
    assert fits
    expected = sorted(seconds for seconds, _ in fits.values())[:10]
    assert [one.seconds for one in found.best] == pytest.approx(expected)
    assert found.counted["left_out"] == 0
    assert found.counted["shapes"] == len(list(groups_in(_SPACE, base.config, 8)))


def test_a_front_is_a_front(base: ResolvedRun) -> None:
    found = _found(base, 3.5)
    every = [one for one in found.computed if one.peak <= 3.5e6]
    for one in found.front:
        assert not [o for o in every if o.seconds < one.seconds and o.peak <= one.peak]
        assert not [o for o in every if o.seconds <= one.seconds and o.peak < one.peak]
    for other in every:
        assert [o for o in found.front if o.seconds <= other.seconds and o.peak <= other.peak]
    assert list(front_of(found.front)) == list(found.front)
    assert found.front[0].seconds == found.best[0].seconds


def _judge(cluster: Cluster) -> PlainJudge:
    return PlainJudge(cluster, cluster.device.peak_flops["bf16"] * cluster.device.product_share)


def _found(base: ResolvedRun, megabytes: float, processes: int = 1) -> SearchResult:
    cluster = _cluster(megabytes * 1e6)
    return search(base, _judge(cluster), space=_SPACE, processes=processes)


def test_processes_find_the_same(base: ResolvedRun) -> None:
    assert _found(base, 3.5, processes=2) == _found(base, 3.5)


def test_every_choice_is_a_run_file(base: ResolvedRun, tmp_path: Path) -> None:
    """Written and read again, it is the same run: sizes of every kind on 16 ranks."""
    space = space_of(base.config, 16, 8)
    shapes = list(groups_in(space, base.config, 16))
    tried, wrong = 0, set[str]()
    for index, shape in enumerate(shapes[:: max(1, len(shapes) // 60)]):
        choice = replace(shape, option=space.options[index % len(space.options)])
        try:
            run = resolve(config_of(base.config, choice), 16)
        except ConfigError as error:
            wrong.update(one.key.partition(".")[0] for one in error.problems)
            continue
        save_config(run, tmp_path / "choice.toml")
        assert load_config(tmp_path / "choice.toml", (), 16) == run
        assert not [line for line in run.notices if "no effect" in line and "activations" not in line]
        tried += 1
    assert tried > 20
    assert wrong <= {"model", "parallel", "training"}  # sharding and options break no rule


def test_no_bound_is_above_what_it_bounds(base: ResolvedRun) -> None:
    cluster = _cluster(1e9)
    judge = _judge(cluster)
    bounds = Bounds(base, cluster)
    for choice, run in _all_runs(base, 8):
        assert bounds.seconds(replace(choice, option=MemoryOption())) <= judge.seconds(run) * (1 + 1e-9), choice


def test_where_nothing_fits_the_least_need_is_told(base: ResolvedRun) -> None:
    """It is that of all choices: the one with the smallest state and all options is among those computed."""
    found, judge = _found(base, 0.2), _judge(_cluster(2e5))
    assert (found.best, found.front) == ((), ())
    assert found.counted["too_large"] == found.counted["shapes"] - sum(found.refused.values())
    assert found.least is not None
    assert found.least.peak == min(judge.memory(run)[0] for _, run in _all_runs(base, 8))


def test_the_files_own_shape_is_told_and_wins_where_it_is_faster(base: ResolvedRun) -> None:
    """A search took another method of context parallelism than the file, and never looked at the file's."""
    cluster = _cluster(30e6)
    judge = _judge(cluster)
    shape = {"cp": 2, "cp_method": "ulysses", "pp": 4, "schedule": "zb-h1"}
    config = base.config.model_copy(update={"parallel": base.config.parallel.model_copy(update=shape)})
    own = resolve(config, 8)
    found = search(base, judge, own=own, space=_SPACE)
    assert found.own == Need(*judge.memory(own), judge.seconds(own))
    assert not found.beats_best(int(30e6))
    best = found.best[0]
    assert replace(found, own=replace(best, seconds=found.best[0].seconds / 2)).beats_best(int(30e6))
    assert not replace(found, own=replace(best, seconds=0.0)).beats_best(best.peak - 1)  # does not fit


def test_every_ulysses_degree_worth_it_is_compared(base: ResolvedRun) -> None:
    space = replace(_SPACE, tp=(1, 2), cp=(4,), pp=(1,), per_node=4)
    degrees = {(one.tp, one.ulysses) for one in groups_in(space, base.config, 8)}
    assert degrees == {(1, 1), (1, 4), (2, 1), (2, 2), (2, 4)}
    methods = {
        one.ulysses: (parallel.cp_method, parallel.cp_ulysses)
        for one in groups_in(space, base.config, 8)
        if one.tp == 2 and (parallel := config_of(base.config, one).parallel)
    }
    assert methods == {1: ("ring", None), 2: ("hybrid", 2), 4: ("ulysses", None)}


def test_experts_are_dealt_to_as_many_ranks_as_divide_them(tmp_path: Path) -> None:
    """And what is left out for its state alone does not fit: the planned peak of a rank is above the bound."""
    path, cluster = tmp_path / "run.toml", _cluster(1e9)
    path.write_text(RUN.replace("seq_len = 2048", 'seq_len = 64\nfamily = "mixtral"\nnum_experts = 12'))
    base = base_of(load_config(path, (), 1).config, 16)
    assert space_of(base.config, 8, 4).ep == (1, 2, 4)
    space = replace(_SPACE, cp=(1,), pp=(1, 8), micro_batch=(1,), schedules=("1f1b",), ep=(1, 2, 4))
    found, bounds = set(), Bounds(base, cluster)
    for choice in groups_in(space, base.config, 8):
        run = resolve(config_of(base.config, choice), 8)
        assert bounds.state_bytes(choice) <= Judge(cluster).memory(run)[0], choice
        found.add((choice.pp, choice.tp, choice.ep))
    assert found == {(1, tp, ep) for tp in (1, 2) for ep in (1, 2, 4)} | {(8, 1, 1)}
