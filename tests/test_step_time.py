"""Step times: what follows from the schedule, the links and the operators by hand; no clock is read."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
import torch

from benchmarks import plan_published
from megazero.config import ResolvedRun, RunConfig, resolve
from megazero.engine.outline import elements_in, stages_of
from megazero.plan.cluster import Cluster, cluster_of
from megazero.plan.collective_times import GroupLink, links_of
from megazero.plan.devices import Link
from megazero.plan.fake_tensors import Message, Operator, Value
from megazero.plan.operator_times import (
    PassTime,
    ProductShape,
    UnitTime,
    attention_flops,
    fused_bytes,
    pass_time,
    product_of,
    wave_share,
)
from megazero.plan.step_time import StepTime, reduced_behind, step_time_of, taking_turns
from megazero.plan.unit_trace import EMBEDDING, HEAD, PassTrace, UnitKey, trace_units
from megazero.plan.zero_times import matrix_seconds, moments_of
from megazero.schedules.proof import Costs, simulate
from megazero.schedules.registry import SCHEDULES

MODEL = {"family": "llama", "hidden_size": 256, "num_layers": 8, "num_heads": 4, "vocab_size": 512, "seq_len": 128}
BARE = Link("bare", 1e9, 0.0)


def run_of(world: int, micro_batches: int = 8, **sections: Mapping[str, Any]) -> ResolvedRun:
    training = {"micro_batch_size": 1, "accumulation": micro_batches}
    document = {"model": MODEL, "training": training, **sections}
    return resolve(RunConfig.model_validate(document), world)


def bare(world: int, per_node: int = 8, within: Link = BARE, between: Link = BARE) -> Cluster:
    """An H100 whose links have no latency."""
    return Cluster(cluster_of("h100").device, world, min(world, per_node), within, between)


def uniform(run: ResolvedRun, forward: float, backward: float) -> dict[UnitKey, UnitTime]:
    """Layers that take so long, and ends that take no time."""
    times = dict.fromkeys((EMBEDDING, HEAD), UnitTime(PassTime(), PassTime(), PassTime()))
    layers = (key for key in trace_units(run, on_cuda=True) if not isinstance(key, str))
    return times | dict.fromkeys(layers, UnitTime(PassTime(forward), PassTime(backward), PassTime()))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_equal_stages_idle_as_the_papers_say(schedule: str, chunks: int) -> None:
    """(p - 1) (F + B) / v, of a rank's F and B on a micro-batch (Narayanan et al. 2021, section 2.2)."""
    parallel = {"pp": 4, "schedule": schedule} | ({"virtual_stages": chunks} if chunks > 1 else {})
    run = run_of(4, parallel=parallel)
    found = step_time_of(run, bare(4), uniform(run, 1.0, 2.0), 0.0)
    assert mean(kinds["idle"] for kinds in found.by_activity) == pytest.approx(3 * 2 * 3 / chunks, rel=1e-4)
    assert found.seconds == pytest.approx(8 * 2 * 3 + 3 * 2 * 3 / chunks, rel=1e-4)


def test_the_longest_stage_sets_the_pace() -> None:
    run = run_of(2, 16, parallel={"pp": 2, "layout": [["embed", 6], [2, "head"]]})
    found = step_time_of(run, bare(2), uniform(run, 1.0, 2.0), 0.0)
    assert found.seconds == pytest.approx(16 * 6 * 3, rel=1e-4)  # the other one's passes all lie beside them


def test_two_buckets_behind_a_backward_leave_what_the_last_one_takes() -> None:
    """A backward from 0 to 10 completes them at 5 and 10; in 4 each the second ends at 14, in 6 each at 5 + 6 + 6."""
    assert reduced_behind(0.0, 10.0, 8.0, 2, 0.0) == 14.0
    assert reduced_behind(0.0, 10.0, 12.0, 2, 0.0) == 17.0
    assert reduced_behind(0.0, 10.0, 8.0, 2, 20.0) == 28.0


def wire_seconds(found: StepTime, axis: str) -> float:
    return found.exposed.get(axis, 0.0) + found.hidden.get(axis, 0.0)


@pytest.mark.parametrize(("stage", "gathers"), [(0, 0), (1, 1), (2, 1), (3, 2), (3, 1)])
def test_hidden_and_exposed_time_is_that_of_the_bytes_that_zero_sends(stage: int, gathers: int) -> None:
    """Elements of Rajbhandari et al. 2020, section 7; gradients in fp32, weights in bf16.

    Stage 3 gathers twice, but once what its two buffers still hold when the backward begins, or hold at any time.
    """
    ahead = {"prefetch_bytes": (1 << 25) * (2 - gathers)} if stage == 3 else {}
    run = run_of(4, 1, zero={"stage": stage, "bucket_bytes": 1 << 24, **ahead})
    found = step_time_of(run, bare(4), uniform(run, 1e-3, 2e-3))
    (model,) = stages_of(run.config)
    assert model.head is not None
    elements, held = elements_in(model), elements_in(model.blocks[-1]) + elements_in(model.head)
    sent = elements * (4 + 2 * gathers) - 2 * held * (gathers - 1) * (stage == 3) if stage else elements * 2 * 4
    assert wire_seconds(found, "dp") == pytest.approx(sent * 3 / 4 / 1e9, rel=1e-3)


@pytest.mark.parametrize("shards", [4, 2])
def test_whole_matrices_add_their_iterations_and_two_trips(shards: int) -> None:
    """5 (4 m^2 n + 2 m^3) FLOPs of each, shared by d ranks; N/d elements to the other s - 1 of s shards and back to all
    copies."""
    zero = {"stage": 1, "shard_group_size": shards % 4}
    run = run_of(4, 16, optimizer={"name": "muon"}, precision={"dtype": "fp32"}, zero=zero)
    model, fast = run.config.model, bare(4)
    hidden, ffn = model.hidden_size, model.ffn_hidden_size or 0
    kv = hidden * (model.num_kv_heads or model.num_heads) // model.num_heads
    shapes = [(hidden, hidden), (hidden, hidden), (kv, hidden), (kv, hidden), *[(ffn, hidden)] * 3] * model.num_layers
    flops = sum(5 * (4 * min(one) ** 2 * max(one) + 2 * min(one) ** 3) for one in shapes)
    elements, links = sum(rows * columns for rows, columns in shapes), links_of(run, fast)
    took = flops / 4 / (fast.device.peak_flops["fp32"] * fast.device.product_share)
    took += 2 * links["shard"].seconds("send_recv", elements * (shards - 1) / shards)  # 4 bytes over 4 ranks
    took += links["replica"].seconds("send_recv", elements * (4 // shards - 1))
    assert matrix_seconds(run, fast, links) == pytest.approx(took)
    assert moments_of(run.config) == pytest.approx(2 - elements / elements_in(stages_of(run.config)[0]))


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_ranks_that_own_as_much_state_step_it_as_long_whatever_ep_and_tp(offload: str) -> None:
    model = MODEL | {"family": "mixtral", "num_layers": 2, "num_experts": 8, "ffn_hidden_size": 2048}
    shapes = {"ep": 1}, {"ep": 8}, {"ep": 2, "tp": 4, "sequence_parallel": True}
    runs = [
        run_of(8, 1, model=model, parallel=one, zero={"stage": 1, "offload": {"optimizer": offload}}) for one in shapes
    ]
    took = [step_time_of(run, bare(8)).by_activity[0]["optimizer"] for run in runs]
    assert took == pytest.approx([took[0]] * 3, rel=0.02)


def test_a_group_across_nodes_uses_the_cards_of_all_its_ranks_of_a_node() -> None:
    """8 ranks in 2 nodes: tp within one, dp over 4 x 2 ranks: a card for each of the 4; or the one that all share."""
    run, fast = run_of(8, parallel={"tp": 2}), replace(BARE, bytes_per_second=1e12)
    cards = replace(BARE, bytes_per_second=1e9)
    links = links_of(run, bare(8, 4, fast, cards))
    assert (links["tp"].crosses, links["shard"].crosses) == (False, True)
    assert links["tp"].bytes_per_second == 1e12
    assert links["shard"].bytes_per_second == 2 * 1e9  # two of its ranks on a node
    shared = links_of(run, bare(8, 4, fast, replace(cards, is_shared=True)))
    assert shared["shard"].bytes_per_second == 1e9 / 2  # beside the other tp rank's group


def test_a_shift_between_nodes_goes_over_one_card_however_many_of_the_ring_are_on_a_node() -> None:
    """A ring of 8 over two nodes of 4: one rank of a node sends to the other node, and all wait for it."""
    fast, card = replace(BARE, bytes_per_second=1e12), replace(BARE, bytes_per_second=1e9)
    link = links_of(run_of(8, parallel={"cp": 8, "cp_method": "ring"}), bare(8, 4, fast, card))["cp_ring"]
    assert link.seconds("ring_shift", 1e9) == pytest.approx(1.0)
    assert link.seconds("all_gather", 1e9) == pytest.approx(0.25)
    shared = replace(card, is_shared=True)
    two = links_of(run_of(8, parallel={"tp": 2, "cp": 4, "cp_method": "ring"}), bare(8, 4, fast, shared))["cp_ring"]
    assert two.seconds("ring_shift", 1e9) == pytest.approx(2.0)  # beside that of the other tp rank


@pytest.mark.parametrize(
    ("parallel", "ranks", "per_node", "axis", "counts"),
    [
        ({"tp": 2}, 6, 3, "tp", [(1, 1)]),  # ranks 2 and 3 are on two nodes
        ({"tp": 2, "pp": 2}, 8, 4, "pp", [(1, 1)]),
        ({"tp": 4}, 12, 6, "tp", [(2, 2)]),  # ranks 4 to 7
        ({"cp": 4, "cp_method": "hybrid", "cp_ulysses": 2}, 12, 6, "cp", [(2, 2)]),
        ({"tp": 3}, 12, 4, "tp", [(2, 1)]),
    ],
)
def test_of_an_axis_the_slowest_group_counts(
    parallel: dict[str, Any], ranks: int, per_node: int, axis: str, counts: list[tuple[int, int]]
) -> None:
    """Those of rank 0 lie within a node: the others waited for no network."""
    model = MODEL | {"num_heads": 12, "hidden_size": 768, "ffn_hidden_size": 1536, "vocab_size": 768}
    training = {"micro_batch_size": 1, "accumulation": 2}
    run = resolve(RunConfig.model_validate({"model": model, "training": training, "parallel": parallel}), ranks)
    link = links_of(run, bare(ranks, per_node))[axis]
    assert [(link.per_node, link.fewest)] == counts
    assert link.crosses == (link.ranks > link.per_node)


def test_a_collective_is_exposed_until_the_first_operator_that_reads_it() -> None:
    """1 ms on the wire beside a product that takes less and does not need it, before one that does."""
    cluster = bare(2)
    value = {storage: Value(storage, (4096, 4096), torch.bfloat16) for storage in range(6)}

    def product(a: int, b: int, out: int) -> Operator:
        return Operator("aten.mm.default", (value[a], value[b]), (value[out],))

    taken = Operator("aten.new_empty.default", (value[0],), (value[1],))
    gather = Message("all_gather", "tp", 1_000_000, fills=frozenset([1]))
    events = (taken, gather, product(0, 2, 3), product(1, 2, 4))
    links = {"tp": GroupLink(cluster, 2, 2, 1)}
    found = pass_time(PassTrace(events), cluster, links, is_compiled=True)
    beside = found.compute / 2
    assert found.hidden["tp"] == pytest.approx(beside)
    assert found.exposed["tp"] == pytest.approx(1e-3 - beside)


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"cp": 2, "cp_method": "ulysses"}, {"cp": 2, "cp_method": "ring"}])
def test_a_layers_operators_have_the_flops_of_the_model(parallel: dict[str, Any]) -> None:
    """2 for each weight and token, and causal attention's half of 4 s^2 h; backward twice that, of attention 2.5 times."""
    run = run_of(2, parallel=parallel) if parallel else run_of(1)
    model, cut = run.config.model, run.world_size
    layer = next(one for key, one in trace_units(run, on_cuda=True).items() if not isinstance(key, str))
    weights = 4 * 256 * 256 + 3 * 256 * model.ffn_hidden_size
    for trace, products, scores in ((layer.forward, 2, 4), (layer.backward, 4, 10)):
        operators = [one for one in trace.events if isinstance(one, Operator)]
        found = sum(shape.flops for one in operators if (shape := product_of(one)))
        assert found == products * weights * 128 / cut
        assert sum(attention_flops(one) or 0 for one in operators) == scores * 128**2 / 2 * 256 / cut


def test_a_fused_chain_moves_what_it_reads_and_what_is_read_later() -> None:
    """silu(a) * b of 16-bit [100]: reads a and b, writes the product; unfused it also writes and reads silu(a)."""
    a, b, silu, out = (Value(storage, (100,), torch.bfloat16) for storage in range(4))
    chain = [Operator("aten.silu.default", (a,), (silu,)), Operator("aten.mul.Tensor", (silu, b), (out,))]
    assert fused_bytes(chain, {3}) == 3 * 200
    assert fused_bytes(chain, {2, 3}) == 4 * 200  # its backward reads silu(a)


def test_the_last_wave_of_tiles_leaves_multiprocessors_without_work() -> None:
    """2,048 x 12,288 are 768 tiles of 128 x 256: 8 waves of 108, the last of 12."""
    device = cluster_of("a100").device
    assert wave_share(ProductShape(torch.float16, 2048, 12288, 1024), device) == pytest.approx(768 / (8 * 108))
    assert wave_share(ProductShape(torch.float16, 128 * 108, 256, 64), device) == 1.0


def test_ranks_that_share_a_processor_take_the_sum_of_their_work() -> None:
    schedule, costs = SCHEDULES["1f1b"].build(2, 4, 1), Costs(1.0, 2.0, 0.0)
    timeline = simulate(schedule, costs)
    assert taking_turns(timeline, costs, 1, [0, 0], 1).makespan == pytest.approx(2 * 4 * 3)
    for processors, node_of in ((2, [0, 0]), (1, [0, 1])):  # one for each rank
        assert taking_turns(timeline, costs, processors, node_of, 1).makespan == timeline.makespan
    assert taking_turns(timeline, costs, 2, [0, 0], 4).makespan > 4 * 4 * 3


def test_timelines_have_no_gap_and_end_with_the_step() -> None:
    run = run_of(8, parallel={"tp": 2, "pp": 2, "sequence_parallel": True}, zero={"stage": 2})
    found = step_time_of(run, cluster_of("h100", 8))
    for spans in found.timelines:
        assert spans[0].start == 0.0
        assert spans[-1].end == pytest.approx(found.seconds)
        assert all(before.end == pytest.approx(after.start) for before, after in pairwise(spans))


@pytest.mark.parametrize("name", ["145.6B on", "175B on 64 A100, present", "405B on 8192"])
def test_published_steps_are_within_a_tenth(name: str) -> None:
    row = next(one for one in plan_published.rows() if one.name.startswith(name))
    seconds = plan_published.as_they_reduced(row, plan_published.step_of(row))
    assert seconds == pytest.approx(row.seconds, rel=0.1)
