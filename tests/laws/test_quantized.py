"""Weights and gradients that travel in blocks of 8 or 4 bits: what is lost is what the format says, and nothing else.

The plain format here rounds one number after another, in Python's floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from torch import Tensor, nn
from torch._dynamo.utils import counters
from worlds import (
    LLAMA,
    LR,
    engine_on,
    micro_batches,
    run_of,
    state_on,
    traffic_and_memory,
    train_on,
    train_plainly,
    whole,
)
from zero_worlds import Sharded, assert_same, numbers, plain_gradients, random_batches, seeded

from megazero.comm.collectives import gather_objects
from megazero.config import ResolvedRun
from megazero.config.schema import PrecisionConfig
from megazero.deepspeed.script_units import ScriptGatherer
from megazero.engine import Position
from megazero.parallel_state import Axis
from megazero.zero.quantized import BlockFormat, Noise, QuantizedScatter, noise_of
from megazero.zero.sharding import BLOCK, Placement, ShardingPolicy

UNTIED = LLAMA | {"tie_embeddings": False, "vocab_size": 64}
BOTH = {"quantized_weights": True, "quantized_gradients": 8}


def _there_and_back(x: Tensor, bits: int, noise: Noise | None = None) -> Tensor:
    blocks, back = BlockFormat(bits), torch.empty(x.numel())
    packed = torch.full((1, blocks.nbytes(x.numel())), 77, dtype=torch.uint8)
    blocks.quantize(x.view(1, -1), packed, noise)
    blocks.dequantize(packed, back.view(1, -1))
    return back


def _noise(step: int, first: int = 0) -> Noise:
    return noise_of(step, 0, 1, "a", first, 0)


def _plainly(x: Tensor, bits: int = 8) -> Tensor:
    """To the nearest, number by number; of a tie either."""
    found = []
    for block in x.float().split(BLOCK):
        scale = max(map(abs, block.tolist())) / (2 ** (bits - 1) - 1)
        found += [scale * round(value / scale) if scale else 0.0 for value in block.tolist()]
    return torch.tensor(found)


# ---------------------------------------------------------------------------------------------------------------------
# The format


@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_is_its_scale_and_bits_a_number_and_rounds_as_the_plain_format(bits: int) -> None:
    x = numbers(9 * BLOCK) * torch.logspace(-30, 30, 9).repeat_interleave(BLOCK)
    x[BLOCK : 2 * BLOCK] = 0.0
    x[2 * BLOCK : 3 * BLOCK] = 1e-44  # which no scale could divide
    assert BlockFormat(bits).nbytes(x.numel()) == 9 * (BLOCK * bits // 8 + 4)
    for given in (x, x.bfloat16()):
        got, most = _there_and_back(given, bits), given.float().view(9, BLOCK).abs().amax(1)
        scale = (most / (2 ** (bits - 1) - 1)).repeat_interleave(BLOCK)
        assert ((got - given.float()).abs() <= scale / 2 * 1.0001 + 1e-38).all()
        assert ((got - _plainly(given, bits)).abs() <= scale * 1.0001 + 1e-38).all()
        differ = (got - _plainly(given, bits)).abs() > scale * 1e-3 + 1e-38
        assert differ.float().mean() < 1e-2  # ties
        assert not got[BLOCK : 2 * BLOCK].any()


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_at_random_is_unbiased_and_a_function_of_the_element_alone(bits: int) -> None:
    """The mean of n roundings is within 6 standard deviations, each at most scale / 2 / sqrt(n), of the number."""
    x, times = numbers(2 * BLOCK), 150
    scale = (x.view(2, BLOCK).abs().amax(1) / (2 ** (bits - 1) - 1)).repeat_interleave(BLOCK)
    total = torch.zeros(2 * BLOCK, dtype=torch.float64)
    for step in range(times):
        got = _there_and_back(x, bits, _noise(step))
        assert ((got - x).abs() <= scale * 1.0001).all()
        total += got
    assert ((total / times - x).abs() <= 6 * scale / 2 / times**0.5).all()
    assert abs(((total / times - x) / scale).mean()) < 6 / 2 / (times * 2 * BLOCK) ** 0.5
    noises = [_noise(3), _noise(4), noise_of(3, 1, 1, "a", 0, 0), noise_of(3, 0, 0, "a", 0, 0)]
    first, *others = (_there_and_back(x, bits, noise) for noise in noises)
    assert torch.equal(first[BLOCK:], _there_and_back(x[BLOCK:], bits, _noise(3, BLOCK)))
    assert not any(torch.equal(first, other) for other in others)
    long = numbers(5 * 2**18 // 4)  # rounded in several pieces
    pieces = [_there_and_back(part, bits, _noise(3, at * 2**16)) for at, part in enumerate(long.split(2**16))]
    assert torch.equal(_there_and_back(long, bits, noises[0]), torch.cat(pieces))
    blocks, rows = BlockFormat(bits), torch.stack(long.split(2**16))
    packed, total = torch.empty(5, blocks.nbytes(2**16), dtype=torch.uint8), torch.empty(2**16)
    blocks.quantize(rows, packed, noise_of(3, 0, 1, "a", 0, 2**16))
    blocks.sum(packed, total)
    torch.testing.assert_close(total, torch.stack(pieces).sum(0))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("wrong", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden_and_stays_in_its_block(bits: int, wrong: float) -> None:
    x = numbers(3 * BLOCK)
    x[BLOCK + 5] = wrong
    for noise in (None, _noise(1)):
        finite = _there_and_back(x, bits, noise).isfinite()
        assert not finite[BLOCK : 2 * BLOCK].any()
        assert finite[:BLOCK].all()
        assert finite[2 * BLOCK :].all()


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "rows", "dtype"), [(8, 1, torch.bfloat16), (4, 3, torch.float32)])
def test_compiled_functions_give_the_same_bytes_and_one_code_serves_all_sizes(
    bits: int, rows: int, dtype: torch.dtype
) -> None:
    axis = Axis("dp", (0, 1))
    policy = ShardingPolicy(3, dtype, Placement(axis, Axis("replica")), torch.device("cpu"), compiles=True)
    plain, compiled = BlockFormat(bits), BlockFormat.on(policy, bits)
    torch.compiler.reset()
    counters.clear()
    for size in (BLOCK * 5, BLOCK * 9, BLOCK * 2000):
        x, noise, found = numbers(rows * size).view(rows, size).to(dtype), noise_of(3, 0, 1, "a", 512, size), []
        for blocks in (plain, compiled):
            packed = torch.full((rows, blocks.nbytes(size)), 77, dtype=torch.uint8)
            back, total = torch.empty(rows, size, dtype=dtype), torch.empty(size)
            blocks.quantize(x, packed, noise if rows > 1 else None)
            blocks.dequantize(packed, back)
            blocks.sum(packed, total)
            found.append((packed, back.view(torch.uint8), total.view(torch.uint8)))
        assert all(map(torch.equal, *found))
    x[0, BLOCK + 5] = torch.nan
    compiled.quantize(x, packed, noise if rows > 1 else None)
    compiled.dequantize(packed, back)
    finite = back[0].isfinite()
    assert not finite[BLOCK : 2 * BLOCK].any()
    assert finite.sum() == size - BLOCK
    assert counters["stats"]["unique_graphs"] == 3


# ---------------------------------------------------------------------------------------------------------------------
# Any module


class _Mixed(nn.Module):
    """Layers smaller and larger than a block, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 48), nn.Linear(48, 16), nn.Linear(16, 3), nn.Linear(3, 16)])
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _weights(sharded: Sharded) -> dict[str, Tensor]:
    """What modules compute with, by bucket, and the exact values beside."""
    gatherer = sharded.parameters.gatherer
    assert isinstance(gatherer, ScriptGatherer)
    found, buffers = {}, gatherer.buffers
    for bucket in gatherer.buckets:
        buffers.unshard(bucket)
        buffers.wait(bucket)
        found[bucket.layout.name] = bucket.weights.clone().detach()
        exact = buffers.whole_bucket(bucket, bucket.layout.name)
        found[f"{bucket.layout.name}, exact"] = exact
    return found


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared memory", "gloo"])
def test_every_rank_computes_with_the_same_quantized_weights_and_masters_stay_exact(
    shares_memory: bool, tmp_path: Path
) -> None:
    """Its own shard included; a copy for a script has the exact weights, also where a secondary shard holds others."""
    disk = {"optimizer": "nvme", "parameters": "nvme", "nvme_path": str(tmp_path)}

    def law(rank: int) -> dict[str, Tensor]:
        x, found = numbers(3, 16), dict[str, Tensor]()
        for dtype, second, offload in ((torch.float32, 0, {}), (torch.bfloat16, 2, {}), (torch.bfloat16, 2, disk)):
            plain, name = seeded(_Mixed).to(dtype), {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
            sharded = Sharded(
                seeded(_Mixed).to(dtype),
                3,
                rank,
                4,
                precision=PrecisionConfig(dtype=name),
                quantized_weights=True,
                secondary_shard_size=second,
                offload=offload,
                shares_memory=shares_memory,
            )
            name += " on disk" if offload else ""
            given = {name: p.detach().clone() for name, p in plain.named_parameters() if p.requires_grad}
            found |= {f"{name} {bucket}": one for bucket, one in _weights(sharded).items()}
            for bucket in sharded.parameters.buckets:
                for slot in bucket.layout.slots:
                    values = found[f"{name} {bucket.layout.name}"][slot.start : slot.stop]
                    plain.get_parameter(slot.info.name).data.copy_(values.view(slot.info.shape))
            for _ in range(2):  # from the secondary shard, too
                assert sharded.module(x.to(dtype)) == plain(x.to(dtype))
            assert_same(sharded.whole("master"), given, rtol=0.0, atol=0.0)
            sharded.step([x.to(dtype)])
            assert torch.isfinite(sharded.module(x.to(dtype)))
            sharded.zero.close()
        return found

    first, *others = run_world(4, law)
    for other in others:
        assert_same(other, first, rtol=0.0, atol=0.0)
    for name in [name for name in first if "exact" not in name]:
        exact, got = first[f"{name}, exact"], first[name]
        bound = exact.float().view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK) / 127
        assert (
            (got.float() - exact.float()).abs() <= bound * 0.501 + got.float().abs() * 2**-8 * ("bf16" in name)
        ).all()
        assert name.startswith("bf16") or (got.float() - _plainly(exact)).abs().max() <= bound.max() * 1.001
        assert not torch.equal(got, exact)


GRADIENTS = [(1, 8, {}), (2, 4, {}), (3, 8, {}), (2, 4, {"shard_group_size": 2}), (3, 4, {"reduce": "step"})]


WHERE = [(True, 4), (False, 4), (True, 2), (False, 2)]


@pytest.mark.parametrize(
    ("shares_memory", "local_world_size"), WHERE, ids=["a host", "gloo", "two hosts", "two over gloo"]
)
def test_quantized_gradients_are_the_plain_sum_up_to_a_step_of_each_senders_blocks(
    shares_memory: bool, local_world_size: int
) -> None:
    """Two micro-batches of four ranks; the same step again has the same bits, another step has others.

    A sender's step is at most the largest number over the most of an integer: of two ranks' sums twice that, from half as
    many senders.
    """

    def law(rank: int) -> None:
        step = random_batches(1, 4, 2, 3, 16)[0]
        exact = plain_gradients(seeded(_Mixed), step)
        for stage, bits, zero in GRADIENTS:
            given = {"quantized_gradients": bits} | zero
            shards = int(zero.get("shard_group_size", 0))
            sharded = Sharded(
                seeded(_Mixed),
                stage,
                rank,
                4,
                shard_group_size=shards,
                shares_memory=shares_memory,
                local_world_size=local_world_size,
                **{key: value for key, value in given.items() if key != "shard_group_size"},
            )
            found, layouts = [], [bucket.layout for bucket in sharded.reducer.buckets]
            psi = sum(layout.padded_numel for layout in layouts) * (1 if stage == 1 or "reduce" in zero else 2)
            sharded.state.traffic.reset()
            for number in (3, 3, 4):
                sharded.zero.optimizer.steps_taken = number
                sharded.accumulate(step[rank])
                found.append(sharded.whole("gradient"))
            largest = max(
                max(one.abs().max() for one in plain_gradients(seeded(_Mixed), [[batch]]).values() if one.numel())
                for of_rank in step
                for batch in of_rank
            )
            for name, one in exact.items():
                if name in found[0]:
                    assert (found[0][name] - one).abs().max() <= 8 * largest / (2 ** (bits - 1) - 1), (stage, name)
            sent, block = sharded.state.traffic.sent_bytes, BLOCK * bits // 8 + 4
            if local_world_size == 2 and not shards:
                assert sent["host", "reduce_scatter"] == 3 * psi * 4 // 2
                assert sent["hosts", "all_to_all"] == 3 * psi // 2 * block // BLOCK // 2
                assert sharded.state.traffic.link_bytes["hosts", "all_to_all"] == sent["hosts", "all_to_all"]
            else:
                axis, ranks = ("shard", shards) if shards else ("dp", 4)
                assert sent[axis, "all_to_all"] == 3 * psi * block // BLOCK * (ranks - 1) // ranks
            assert_same(found[1], found[0], rtol=0.0, atol=0.0)
            assert any(not torch.equal(found[2][name], one) for name, one in found[0].items())
            assert sharded.reducer.reductions.buffer_bytes <= sharded.reducer.reductions.most_buffer_bytes

    run_world(4, law)


def test_an_overflow_on_one_rank_is_seen_by_all() -> None:
    def law(rank: int) -> None:
        for stage, bits in ((1, 8), (2, 4), (3, 8)):
            sharded = Sharded(
                seeded(_Mixed).half(),
                stage,
                rank,
                2,
                precision=PrecisionConfig(dtype="fp16", initial_scale_power=4, hysteresis=1),
                quantized_gradients=bits,
                quantized_weights=stage == 3,
            )
            before = sharded.whole("master")
            x = numbers(3, 16).half()
            assert not sharded.step([x * float("inf") if rank else x])
            assert_same(sharded.whole("master"), before, rtol=0.0, atol=0.0)
            assert sharded.zero.skipped_steps == 1
            assert sharded.step([x])

    run_world(2, law)


# ---------------------------------------------------------------------------------------------------------------------
# The project's engine


def _replicated(rank: int, runs: Sequence[ResolvedRun]) -> list[Any]:
    """Results; whether all ranks of tp hold the same of what each holds whole, as masters and as gathered weights."""
    state, found = state_on(rank, runs[0]), []
    for run in runs:
        engine = engine_on(rank, run, state=state)
        results = train_on(engine, run, masters=True)
        held = []
        for bucket in engine.sharded_model.parameters.buckets:
            gatherer = engine.sharded_model.parameters.gatherer
            if gatherer is not None:
                gatherer.buffers.unshard(bucket)
                gatherer.buffers.wait(bucket)
            kinds: dict[int, set[tuple[bool, bool]]] = {}
            for slot in bucket.layout.slots:
                for block in range(slot.start // BLOCK, -(-slot.stop // BLOCK)):
                    kinds.setdefault(block, set()).add((slot.info.spec.split is None, slot.info.spec.sum_over_tp))
                if slot.info.spec.split is None:
                    held.append(bucket.weights[slot.start : slot.stop].clone())
            assert all(len(both) == 1 for both in kinds.values()), "a block holds what is split, whole or summed"
            assert bucket.layout.shard_numel % BLOCK == 0
        same = gather_objects(held, state.tp)
        assert held
        assert all(torch.equal(a, b) for of_rank in same for a, b in zip(of_rank, held, strict=True)), run.config.zero
        engine.sharded_model.close()
        found.append(results)
    return found


SHAPES = [
    ({}, [({"stage": 1, "quantized_gradients": 8}, {}), ({"stage": 3, **BOTH}, {"dtype": "bf16"})]),
    ({"tp": 2}, [({"stage": 2, "quantized_gradients": 8}, {}), ({"stage": 3, **BOTH}, {})]),
    ({"tp": 2, "sequence_parallel": True}, [({"stage": 3, **BOTH}, {})]),
    ({"pp": 2}, [({"stage": 3, **BOTH}, {}), ({"stage": 2, "quantized_gradients": 8}, {})]),
]


@pytest.mark.parametrize(("parallel", "cases"), SHAPES, ids=["dp 4", "tp 2", "sequence parallel", "pp 2"])
def test_every_shape_trains_near_the_plain_model_and_ranks_of_tp_stay_equal(
    parallel: dict[str, Any], cases: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    """Tied embeddings, a vocabulary that no tp divides, biases and norms among what is split; two micro-batches."""
    model = LLAMA | {"family": "gpt2", "num_kv_heads": 4} if parallel == {"tp": 2} else LLAMA
    runs = [
        run_of(4, model=model, parallel=parallel, zero=zero, precision=precision, training={"accumulation": 2})
        for zero, precision in cases
    ]
    plain = train_plainly(runs[0])
    for found in run_world(4, _replicated, runs)[0]:
        for got, wanted in zip(found["loss"], plain["loss"], strict=True):
            assert got == pytest.approx(wanted, rel=5e-3)
        assert found["norm"][0] == pytest.approx(plain["norm"][0], rel=3e-2)


def test_norms_of_queries_and_keys_whose_gradients_tp_sums_share_no_block_with_what_each_rank_has_whole() -> None:
    zeros = ({"stage": 1, "quantized_gradients": 8}, {"stage": 3, **BOTH})
    run_world(
        4, _replicated, [run_of(4, model=LLAMA | {"family": "qwen3"}, parallel={"tp": 2}, zero=zero) for zero in zeros]
    )


def _sender(rank: int) -> int:
    run = run_of(4, model=LLAMA, zero={"stage": 2, "quantized_gradients": 4, "shard_group_size": 2})
    (way,) = set(engine_on(rank, run).sharded_model.reducer.reductions.plan.ways.values())
    assert isinstance(way, QuantizedScatter)
    return way.sender


def test_groups_that_hold_the_same_shards_round_on_their_own() -> None:
    """With the same random numbers the errors of groups would add up in their sum."""
    assert sorted(run_world(4, _sender)) == [0, 1, 2, 3]


def test_a_secondary_shard_and_the_same_command_give_the_same_bits() -> None:
    zeros = [BOTH, BOTH, BOTH | {"secondary_shard_size": 2}]
    runs = [run_of(4, model=UNTIED, zero={"stage": 3} | zero, training={"accumulation": 2}) for zero in zeros]
    first, *others = run_world(4, _replicated, runs)[0]
    for other in others:
        assert other["loss"] == first["loss"]
        assert_same(other["masters"], first["masters"], rtol=0.0, atol=0.0)


def _resumed(rank: int, run: ResolvedRun, path: Path) -> list[Any]:
    """Three steps at once, and with a checkpoint after two: the masters at the end, on rank 0."""
    state, found = state_on(rank, run), []
    whole_run, first, second = (engine_on(rank, run, state=state) for _ in range(3))
    for engine, steps in ((whole_run, (0, 1, 2)), (first, (0, 1)), (second, (2,))):
        if engine is second:
            first.save(path, Position(3, 2 * 8), "data")  # one step was passed over
            second.load(path, "data")
        for step in steps:
            engine.train_step(micro_batches(run, state, step), LR)
        found.append(whole(engine, "master"))
    return found


def test_a_resumed_run_rounds_with_the_same_random_numbers(tmp_path: Path) -> None:
    run = run_of(2, model=UNTIED, zero={"stage": 3, "quantized_weights": True, "quantized_gradients": 4})
    whole_run, _, resumed = run_world(2, _resumed, run, tmp_path / "step-00000002")[0]
    assert_same(resumed, whole_run, rtol=0.0, atol=0.0)


def test_bytes_are_those_of_the_blocks() -> None:
    """Of Ψ numbers (n - 1)/n: Ψ (bits / 8 + 4 / 256) for each reduction, Ψ (1 + 4 / 256) for each gather, less the units
    that are still in their buffers; beside each gather buffer there is at most one for what arrives."""
    given = {"model": UNTIED, "precision": {"dtype": "bf16"}, "training": {"accumulation": 2}}
    runs = [
        run_of(4, zero={"stage": 1, "quantized_gradients": 8}, **given),
        run_of(4, zero={"stage": 2, "quantized_gradients": 4}, **given),
        run_of(4, zero={"stage": 3, "quantized_weights": True, "quantized_gradients": 4}, **given),
    ]
    for results in run_world(4, traffic_and_memory, runs):
        for run, found in zip(runs, results, strict=True):
            units, rounds, bits = found["units"], 1, run.config.zero.quantized_gradients
            rounds += run.config.zero.stage > 1
            reduced = rounds * sum(units) * (BLOCK * bits // 8 + 4) // BLOCK * 3 // 4
            assert found["sent"].pop(("dp", "all_to_all")) == reduced
            assert ("dp", "reduce_scatter") not in found["sent"]
            assert found["memory"]["gradient_buffers"] <= found["most"]
            gathered, weight = sum(units), 2.0
            if run.config.zero.stage == 3:
                buffers: dict[int, int] = {}
                gathered, weight = 0, (BLOCK + 4) / BLOCK
                for unit in [*range(len(units)), *reversed(range(len(units)))] * 2:
                    gathered += units[unit] if buffers.get(unit % 2) != unit else 0
                    buffers[unit % 2] = unit
                two = 2 * (max(units[::2]) + max(units[1::2]))
                arriving = max(units) * (BLOCK + 4) // BLOCK
                assert found["memory"]["gather_buffers"] - two in (arriving, 2 * arriving)
            assert found["sent"]["dp", "all_gather"] == gathered * weight * 3 // 4
