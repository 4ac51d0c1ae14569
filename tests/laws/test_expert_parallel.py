"""Experts over ranks: who meets whom, rows that travel, and runs that equal a plain model on every shape."""

from __future__ import annotations

import itertools
import os
import random
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import run_world
from plain_model import parameter_shapes
from safetensors.torch import load_file
from test_any_shape import _assert_agrees
from test_checkpoint import Part, _do_on, _stored
from test_checkpoint_across import _same_bits
from torch import Tensor
from worlds import (
    DEEPSEEK,
    LLAMA,
    LR,
    MIXTRAL,
    PATTERNS,
    SAMPLES,
    STEPS,
    engine_on,
    micro_batches,
    on_one_state,
    pairwise,
    plain_config,
    run_of,
    state_on,
    train_on,
    train_plainly,
    whole,
)

from megazero.checkpoint.hugging_face.exporter import export_model
from megazero.comm.autograd import exchange_rows
from megazero.comm.collectives import all_to_all_rows
from megazero.config import ResolvedRun
from megazero.cpu.shared_memory import HALF_BYTES, SharedMemoryBackend
from megazero.cpu.sockets import SocketBackend
from megazero.engine import Engine
from megazero.formats.averaging import average_steps
from megazero.layers import experts
from megazero.layers.experts import Router
from megazero.parallel_state import Axis, Links, ParallelState, RankGrid
from megazero.plan.dry_run import dry_run
from megazero.schedules.registry import SCHEDULES
from megazero.settings import ConfigError, divisors
from megazero.training.batches import read_batches

BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
MODEL = MIXTRAL | {"num_layers": 4, "num_experts": 8, "experts_per_token": 3}

# ---------------------------------------------------------------------------------------------------------------------
# Groups


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "dp-pp-tp-cp", "pp-cp-dp-tp"])
def test_a_stage_is_blocks_of_consecutive_ranks_with_all_experts_each(order: str) -> None:
    for tp, cp, dp, pp in itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2)):
        for ep in divisors(tp * cp * dp):
            grid = RankGrid(tp, cp, dp, pp, order, ep)
            for rank in range(grid.world_size):
                stage, table = grid.group_of(rank, "tp", "cp", "dp"), grid.expert_table(rank)
                assert [len(row) for row in table] == [len(stage) // ep] * ep
                blocks = [stage[start : start + ep] for start in range(0, len(stage), ep)]
                assert [tuple(column) for column in zip(*table, strict=True)] == blocks
    with pytest.raises(ValueError, match=r"ep=3 must divide tp\*cp\*dp=4"):
        RankGrid(tp=2, dp=2, ep=3)


# ---------------------------------------------------------------------------------------------------------------------
# Rows that travel

LONG = HALF_BYTES // 8 + 40  # rows of two fp32: several rounds where ranks share memory
TABLES = {  # rows that rank i sends to rank j
    "some": lambda i, j: (3 * i + 5 * j) % 4,
    "all to one, of which one rank has none": lambda i, j: 3 * i * (j == 1),
    "none": lambda i, j: 0,
    "many from one": lambda i, j: LONG * (i == 0) + j,
}


def _rows_arrive(rank: int, world: int, shares: bool) -> None:
    axis = ParallelState(RankGrid(dp=world, ep=world), rank, Links(shares_memory=shares)).ep
    for table in TABLES.values():
        counts = [[table(source, target) for target in range(world)] for source in range(world)]
        sends, receives = counts[rank], [row[rank] for row in counts]
        rows = [torch.arange(2.0 * sum(row)).view(-1, 2) + 1e5 * source for source, row in enumerate(counts)]
        mine = rows[rank].requires_grad_()
        axis.traffic.reset()
        arrived = exchange_rows(mine, sends, receives, axis)
        wanted = [one.detach().split(row)[rank] for one, row in zip(rows, counts, strict=True)]
        assert torch.equal(arrived, torch.cat(wanted))
        arrived.backward(2 * arrived.detach())
        assert mine.grad is not None
        assert torch.equal(mine.grad, 2 * mine.detach())
        kept = sends[rank]
        assert axis.traffic.by_axis() == {"ep": 8 * (sum(sends) + sum(receives) - 2 * kept)}
    assert axis.group is not None
    assert isinstance(axis.group.backends["cpu"], SharedMemoryBackend if shares else SocketBackend)


@pytest.mark.parametrize(("world", "shares"), [(2, True), (3, True), (3, False)])
def test_rows_arrive_in_rank_order_and_gradients_go_back(world: int, shares: bool) -> None:
    run_world(world, _rows_arrive, world, shares)


def test_counts_that_do_not_make_up_the_rows_are_refused_before_anything_is_sent() -> None:
    axis, rows = Axis("ep", (0, 1)), torch.zeros(3, 2)
    for sends, receives in (([1, 1], [1, 2]), ([1, 2], [1, 1]), ([3], [3])):
        with pytest.raises(ValueError, match="over ep of 2 ranks"):
            all_to_all_rows(torch.zeros(3, 2), rows, axis, sends, receives)
    assert not axis.traffic.calls


# ---------------------------------------------------------------------------------------------------------------------
# Law 1: what test_experts.py leaves out

TP = {"tp": 2, "sequence_parallel": True}
SHAPES = {
    "dp4 ep2": (4, {"ep": 2}),
    "tp2 cp2 dp2 ep8": (8, TP | {"cp": 2, "ep": 8}),
    "cp2 pp2 dp2 ep4": (8, {"cp": 2, "pp": 2, "ep": 4, "order": "dp-pp-cp-tp"}),
}
HOST = {"optimizer": "cpu", "parameters": "cpu"}
KINDS: dict[str, dict[str, Any]] = {
    "offloaded in part": {"stage": 1, "offload": {"optimizer": "cpu", "ratio": 0.5}},
    "in groups": {"stage": 2, "shard_group_size": 2, "reduce": "step"},
    "some stay whole": {"stage": 3, "persistent_elements": 600, "gather_policy": "step"},
    "second shards": {"stage": 3, "secondary_shard_size": 2},
    "offloaded": {"stage": 3, "offload": HOST},
}
CASES = pairwise(
    shape=list(SHAPES),
    kind=list(KINDS),
    order=[("1f1b", 1), ("zbv", 2)],  # schedule and accumulation
    pattern=["none", "masked"],
    recompute=["none", "full"],
)


def _run(shape: str, kind: str, order: tuple[str, int], pattern: str, recompute: str) -> ResolvedRun:
    world, parallel = SHAPES[shape]
    return run_of(
        world,
        model=MODEL,
        parallel=parallel | ({"schedule": order[0]} if "pp" in parallel else {}),
        zero=KINDS[kind],
        training={"accumulation": order[1]},
        data={"document_mask": pattern != "none"},
        activations={"recompute": recompute},
    )


def _train_all(rank: int, runs: list[ResolvedRun], patterns: list[str]) -> list[dict[str, Any] | None]:
    state, results = state_on(rank, runs[0]), []
    for run, pattern in zip(runs, patterns, strict=True):
        engine = engine_on(rank, run, state=state)
        results.append(train_on(engine, run, pattern=pattern))
        engine.sharded_model.close()
    return results


@lru_cache(maxsize=16)
def _plain(pattern: str) -> dict[str, Any]:
    return train_plainly(run_of(1, model=MODEL), pattern)


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_are_the_plain_models_wherever_their_state_is(shape: str, in_groups: bool) -> None:
    cases = [case for case in CASES if case["shape"] == shape and (case["kind"] == "in groups") == in_groups]
    runs, patterns = [_run(**case) for case in cases], [case["pattern"] for case in cases]
    for case, got in zip(cases, run_world(SHAPES[shape][0], _train_all, runs, patterns)[0], strict=True):
        _assert_agrees(got, _plain(case["pattern"]), str(case))


RANDOM_RUNS = int(os.environ.get("MEGAZERO_RANDOM_RUNS", "6"))


def _random_run(draw: random.Random) -> tuple[int, ResolvedRun, str, bool]:
    """A world, a run in it, the documents of its samples, and whether its ranks share memory; drawn until it can be."""
    while True:
        world, pattern = draw.choice([1, 2, 4, 8]), draw.choice(PATTERNS)
        tp, cp, pp = draw.choice([1, 1, 2]), draw.choice([1, 1, 2]), draw.choice([1, 1, 2])
        schedule = draw.choice(list(SCHEDULES)) if pp > 1 else draw.choice(["1f1b", "zb-h1"])
        order = "-".join(draw.sample(["tp", "cp", "dp", "pp"], 4))
        zero: dict[str, Any] = {"stage": draw.randrange(4), "bucket_bytes": draw.choice([1024, 8192, "auto"])}
        if zero["stage"]:
            zero["shard_group_size"] = draw.choice([0, 0, 2])
            zero["offload"] = {"optimizer": draw.choice(["none", "none", "cpu"])}
        if zero["stage"] == 3:
            zero["offload"]["parameters"] = draw.choice(["none", "cpu"])
            zero |= {"secondary_shard_size": draw.choice([0, 0, 2]), "gather_policy": draw.choice(["action", "chunk"])}
            zero |= {"persistent_elements": draw.choice([0, 600]), "prefetch_bytes": draw.choice([0, 20000])}
        try:
            run = run_of(
                world,
                model=MODEL,
                parallel={"tp": tp, "cp": cp, "pp": pp, "order": order, "ep": draw.choice([1, 2, 4, 8])}
                | {
                    "sequence_parallel": tp > 1,
                    "schedule": schedule,
                    "virtual_stages": 1 + schedule.startswith("interleaved"),
                },
                zero=zero,
                training={"micro_batch_size": draw.choice([1, 2, 4])},
                data={"document_mask": pattern != "none"},
                activations={"recompute": draw.choice(["none", "selective", "full", ["mlp"], ["mlp", "norms"]])},
            )
        except ConfigError:
            continue
        return world, run, pattern, draw.random() < 0.5


def _train_one(rank: int, run: ResolvedRun, pattern: str, shares_memory: bool) -> dict[str, Any] | None:
    engine = engine_on(rank, run, state=state_on(rank, run, shares_memory=shares_memory))
    return train_on(engine, run, pattern=pattern)


@pytest.mark.slow
def test_random_runs_are_the_plain_models() -> None:
    """MEGAZERO_RANDOM_RUNS says how many, MEGAZERO_RANDOM_SEED which."""
    seed = int(os.environ.get("MEGAZERO_RANDOM_SEED", "0"))
    for number in range(seed, seed + RANDOM_RUNS):
        world, run, pattern, shares_memory = _random_run(random.Random(number))
        got = run_world(world, _train_one, run, pattern, shares_memory)[0]
        case = f"run {number}: {world} ranks, {pattern}, {run.config.parallel}, {run.config.zero}, {run.config.activations}"
        _assert_agrees(got, _plain(pattern), case)


# ---------------------------------------------------------------------------------------------------------------------
# A router's bias

BIASED = pairwise(
    place=["dp2 ep2", "tp2 dp2 ep4", "pp2 dp2 ep2", "cp2 dp2 ep2"],
    stage=[0, 2, 3],
    schedule=["1f1b", "zbv", "dualpipev"],  # without a pipeline the first
    accumulation=[2, 4],
    recompute=["none", "selective", "full"],
)


def _biased(case: dict[str, Any]) -> ResolvedRun:
    sizes = {part[:2]: int(part[2:]) for part in case["place"].split() if not part.startswith("dp")}
    return run_of(
        4 if " dp2" in case["place"] else 2,  # ranks
        model=DEEPSEEK,
        parallel=sizes
        | {"sequence_parallel": "tp" in sizes, "schedule": case["schedule"] if "pp" in sizes else "1f1b"},
        zero={"stage": case["stage"]},
        training={"accumulation": case["accumulation"]},
        activations={"recompute": case["recompute"]},
    )


def _train_biased(engine: Engine, run: ResolvedRun) -> dict[str, Any] | None:
    """As `train_on`; and of one more step the tokens of each layer's experts, and the weights after it.

    On many ranks the last micro-batches of that step are filled up with empty samples.
    """
    got = train_on(engine, run)
    samples = torch.randint(61, (SAMPLES, 17), generator=torch.Generator().manual_seed(STEPS)).numpy()
    stream: Any = SimpleNamespace(seq_len=16, batch=samples.__getitem__)
    size = 1 if engine.state.world.size == 1 else 3
    engine.train_step(read_batches(stream, 0, SAMPLES, size, engine.batch_slice), LR)
    tokens, after = engine.routers.load(1).tokens, whole(engine, "model")
    return got and got | {"tokens": tokens, "after": after}


@lru_cache(maxsize=1)
def _unshared_bias() -> dict[str, Any]:
    """One rank's run."""
    return run_world(1, on_one_state, [run_of(1, model=DEEPSEEK)], _train_biased)[0][0]


@pytest.mark.parametrize("place", dict.fromkeys(case["place"] for case in BIASED))
def test_a_bias_moves_against_the_global_load_by_the_same_bits_on_every_shape(place: str) -> None:
    """All else is what one rank gives; tests/test_families.py compares this model on one rank with transformers'."""
    wanted = _unshared_bias()
    assert wanted["tokens"].sum(1).tolist() == [SAMPLES * 16 * 3] * 3  # one layer has no experts
    cases = [case for case in BIASED if case["place"] == place]
    runs = [_biased(case) for case in cases]
    for case, got in zip(cases, run_world(runs[0].world_size, on_one_state, runs, _train_biased)[0], strict=True):
        _assert_agrees(got, wanted, str(case))
        for layer, tokens in enumerate(got["tokens"].float(), 1):
            name = BIAS.format(layer)
            moved = got["weights"][name] + 0.01 * torch.sign(tokens.mean() - tokens)
            assert torch.equal(got["after"][name], moved), (layer, case)
            assert torch.equal(got["after"][name], wanted["after"][name]), (layer, case)
            assert got["after"][name].any()


def test_in_16_bits_a_bias_stays_in_32_on_the_disk_in_a_mean_and_in_an_export(tmp_path: Path) -> None:
    run = run_of(1, model=DEEPSEEK, precision={"dtype": "bf16"})
    run_world(1, _go_on, [Part(run, range(3), save_to=tmp_path / "saved")], True)
    export_model(tmp_path / "saved", tmp_path / "exported")
    average_steps([str(tmp_path / "saved")], str(tmp_path / "mean"))
    steps = [_stored(tmp_path / name)["model"] for name in ("saved", "mean")]
    for stored in (*steps, load_file(tmp_path / "exported" / "model.safetensors")):
        biases = [stored.pop(BIAS.format(layer)) for layer in range(1, 4)]
        assert all(set((100 * bias).abs().tolist()) <= {0, 1, 2, 3} for bias in biases)
        assert {tensor.dtype for tensor in biases} == {torch.float32}
        assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


# ---------------------------------------------------------------------------------------------------------------------
# Law 2

PLACES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {"stage": 0}),
    (4, TP | {"ep": 4}, {"stage": 0}),
    (4, {"ep": 4}, {"stage": 3}),
    (4, {"pp": 2, "ep": 2}, {"stage": 2, "offload": {"optimizer": "cpu"}}),
]


def _go_on(rank: int, parts: list[Part], on_one_machine: bool) -> list[list[float]]:
    state, losses = state_on(rank, parts[0].run, on_one_machine=on_one_machine), []
    for part in parts:
        engine = engine_on(rank, part.run, init_weights=part.origin is None, state=state)
        losses.append(_do_on(engine, part))
        engine.sharded_model.close()
    return losses


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek_v3"])
def test_any_shape_goes_on_from_the_experts_of_any_other(model: dict[str, Any], tmp_path: Path) -> None:
    runs = [run_of(world, model=model, parallel=given, zero=zero) for world, given, zero in PLACES]
    saved = [tmp_path / f"saved {number}" for number in range(len(runs))]
    wanted = run_world(1, _go_on, [Part(runs[0], range(3))], True)[0][0]
    for number, ((world, _, _), run) in enumerate(zip(PLACES, runs, strict=True)):
        before = saved[number - 1]
        parts = [Part(run, range(1), save_to=saved[number])]
        parts += [Part(run, range(1, 3), before, save_again_to=tmp_path / f"again {number}")] * (number > 0)
        for losses, steps in zip(
            run_world(world, _go_on, parts, number % 2 == 0)[0], (range(1), range(1, 3)), strict=False
        ):
            assert losses == pytest.approx(wanted[steps.start : steps.stop], rel=1e-5), PLACES[number]
        if number > 0:
            _same_bits(before, tmp_path / f"again {number}")
        if model is MIXTRAL:
            assert _stored(saved[number])["model"].keys() == parameter_shapes(plain_config(run)).keys()


# ---------------------------------------------------------------------------------------------------------------------
# Laws 3 and 4


def _measure(engine: Engine, run: ResolvedRun) -> dict[str, Any]:
    """Of a step: memory, elements of buckets without and with experts, bytes over ep, and rows that leave and arrive."""
    chosen: list[Tensor] = []
    for module in engine.chunks.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, result: chosen.append(result[1].experts))
    engine.state.traffic.reset()
    engine.train_step(micro_batches(run, engine.state, 0), LR)
    each, model = engine.state.ep.size, run.config.model
    homes = torch.stack(chosen).flatten() * each // (model.num_experts or 1)
    buckets = engine.sharded_model.parameters.buckets
    layouts = [bucket.layout for bucket in buckets]
    by_kind = [[layout for layout in layouts if layout.first.spec.of_experts is kind] for kind in (False, True)]
    return {
        "memory": engine.memory_bytes(),
        "stored": [sum(layout.padded_numel for layout in of_kind) for of_kind in by_kind],
        "held": [sum(layout.numel for layout in of_kind) for of_kind in by_kind],
        "sent": engine.state.traffic.by_axis().get("ep", 0),
        "rows": homes.bincount(minlength=each).tolist(),
        "index": engine.state.ep.index,
        "routings": len(chosen),
    }


def test_a_row_of_16_bits_takes_8_bytes_an_element_of_a_layers_traffic() -> None:
    """To its expert and back, and their gradients; of T k rows of a rank, (ep - 1) / ep leave it in an even balance."""
    run = run_of(2, model=MIXTRAL, parallel={"ep": 2}, precision={"dtype": "bf16"})
    of_ranks = [measured for (measured,) in run_world(2, on_one_state, [run], _measure)]
    away = sum(measured["rows"][1 - measured["index"]] for measured in of_ranks)
    counts = sum(measured["routings"] * 8 * 4 // 2 for measured in of_ranks)
    assert sum(measured["sent"] for measured in of_ranks) == 8 * away * run.config.model.hidden_size + counts


@pytest.mark.parametrize(("world", "parallel"), [(4, {"ep": 4}), (4, {"ep": 2}), (4, TP | {"ep": 2})], ids=str)
def test_memory_and_bytes_over_ep_equal_the_formulas(world: int, parallel: dict[str, Any]) -> None:
    """A rank holds 1 / ep of the experts, and of their state the replicas 1 / edp each.  A row crosses four times in a step,
    and so 8 T k h (ep - 1) / ep bytes of a layer leave a rank in bf16 if all experts have as many; and counts."""
    runs = [run_of(world, model=MIXTRAL, parallel=parallel, zero={"stage": stage}) for stage in range(4)]
    shapes, ep = parameter_shapes(plain_config(runs[0])), parallel["ep"]
    experts = sum(torch.Size(shape).numel() for name, shape in shapes.items() if ".experts." in name)
    for stage, of_ranks in enumerate(zip(*run_world(world, on_one_state, runs, _measure), strict=True)):
        edp = world // ep
        for measured in of_ranks:
            dense, dealt = measured["stored"]
            assert measured["held"][1] == experts // ep
            weights = [4 * dense // (runs[0].dp if stage == 3 else 1), 4 * dealt // (edp if stage == 3 else 1)]
            assert measured["memory"]["parameters"] == sum(weights)
            moments = 8 * measured["held"][0] // (runs[0].dp if stage else 1) + 8 * experts // ep // (
                edp if stage else 1
            )
            assert abs(measured["memory"]["optimizer"] - moments) <= 8 * 16 * world
        for first in range(0, world, ep):
            block = sorted(of_ranks[first : first + ep], key=lambda measured: measured["index"])
            for me, measured in enumerate(block):
                leaves = sum(measured["rows"]) - measured["rows"][me]
                arrives = sum(other["rows"][me] for other in block) - measured["rows"][me]
                counts = measured["routings"] * 8 * 4 * (ep - 1) // ep
                assert measured["sent"] == 2 * (leaves + arrives) * 4 * runs[0].config.model.hidden_size + counts, stage


def test_a_dry_run_finds_the_ranks_of_experts_in_step() -> None:
    found = dry_run(run_of(2, model=MIXTRAL | {"num_layers": 1}, parallel={"ep": 2}), per_node=2)
    assert not found.problems
    assert len(found.ranks) == 2
    assert experts.row_counts(torch.tensor([3, 0]), 3) == [3, 0]  # what holds numbers still gives them


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be


@pytest.mark.parametrize(
    ("world", "sections", "said"),
    [
        (
            4,
            {"parallel": {"ep": 3}},
            ("parallel.ep = 3: must divide tp*cp*dp=1*1*4=4", "must divide model.num_experts=4"),
        ),
        (8, {"parallel": {"ep": 8}}, ("parallel.ep = 8: must divide model.num_experts=4",)),
        (2, {"parallel": {"ep": 2}, "model": LLAMA}, ("parallel.ep = 2: must be 1 where model.num_experts is unset",)),
        (2, {"parallel": {"tp": 2}}, ("parallel.sequence_parallel = false: must be true where",)),
    ],
)
def test_what_experts_cannot_be_is_one_error_each(world: int, sections: dict[str, Any], said: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        run_of(world, **{"model": MIXTRAL} | sections)
    assert len(caught.value.problems) == len(said), str(caught.value)
    for text in said:
        assert text in str(caught.value)


def test_an_elastic_run_deals_experts_to_as_many_ranks_as_its_world_allows() -> None:
    for world, ep in ((8, 4), (6, 2), (5, 1)):
        run = run_of(world, model=MIXTRAL, parallel={"ep": 4}, elastic={"enabled": True})
        assert (run.grid.ep, run.written.parallel.ep) == (ep, 4)
        assert any("parallel.ep=4" in notice for notice in run.notices) == (ep < 4)
