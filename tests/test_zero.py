"""ZeRO on modules that are not a GPT: unused parameters, odd shapes, exceptions, evaluation between steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import run_world
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_worlds import Sharded, assert_same, assert_trains_as_plain, numbers, plain_gradients, random_batches, seeded

from megazero.comm import collectives
from megazero.config.schema import PrecisionConfig, ZeroConfig
from megazero.deepspeed.script_units import script_units_of as units_of
from megazero.layers.spec import whole_spec
from megazero.zero.bucket_plan import param_infos
from megazero.zero.reductions import ReductionQueue, ReductionTask, square_sum
from megazero.zero.sharding import ALONE, ShardingPolicy
from megazero.zero.units import ModelParam, RankModel, UnitModule, describe

STAGES = [0, 1, 2, 3]
ZERO = ZeroConfig(bucket_bytes=1024, prefetch_bytes=0)


def _policy() -> ShardingPolicy:
    return ShardingPolicy(0, torch.float32, ALONE, torch.device("cpu"))


def test_a_parameter_outside_every_unit_is_refused() -> None:
    layer, stray = nn.Linear(3, 3), nn.Parameter(torch.empty(3))
    unit = UnitModule(layer, tuple((layer, key) for key in layer._parameters), 0)
    with pytest.raises(ValueError, match="stray belongs to no unit"):
        param_infos(RankModel([unit], [ModelParam("stray", stray, whole_spec("stray", (3,)))]), _policy(), ZERO)


def test_a_parameter_that_is_no_floating_point_is_refused() -> None:
    layer = nn.Module()
    layer.mask = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
    with pytest.raises(ValueError, match=r"mask is torch\.int32"):
        param_infos(RankModel(units_of([layer]), list(describe(layer))), _policy(), ZERO)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        Sharded(nn.Linear(3, 3).requires_grad_(False), 1)


def test_the_square_sum_of_a_long_tensor_keeps_its_digits() -> None:
    """torch's own norm of one long fp32 tensor loses digits; ours must not."""
    flat = torch.full((5_000_003,), 0.1)
    exact = float(flat[0].double() ** 2) * flat.numel()
    here = torch.device("cpu")
    assert float(square_sum([flat], here)) == pytest.approx(exact, rel=1e-6)
    pieces = list(flat.split([0, 5, 256, 1_000_000, 3_999_742]))
    assert float(square_sum(pieces, here)) == pytest.approx(exact, rel=1e-6)
    assert float(square_sum([], here)) == 0


# ---- parameters that some micro-batches of some ranks do not use


class _Router(nn.Module):
    """A batch (experts, x) goes through these experts only."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 8)) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(8) / 8)

    def forward(self, chosen: tuple[int, ...], x: Tensor) -> Tensor:
        for index in chosen:
            x = x + self.experts[index](x)
        return x + self.bias if 3 in chosen else x


class _Experts(nn.Module):
    """Under ZeRO-3 all ranks must run the same units, so the experts of a layer are one; a list chooses for each layer."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(_Router() for _ in range(depth))

    def units(self) -> list[nn.Module]:
        return [self.first, *self.layers]

    def forward(self, batch: tuple[tuple[int, ...] | list[tuple[int, ...]], Tensor]) -> Tensor:
        chosen, x = batch
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(chosen[number] if isinstance(chosen, list) else chosen, x)
        return x.square().mean()


# which experts a rank's micro-batches use; nobody ever uses expert 2
CHOSEN = [[[(0,), (1, 3)], [(1,), ()]], [[(), ()], [(3,), (3,)]], [[(0, 1, 3), (0,)], [(), (1, 0)]]]
EXPERT_BATCHES = [
    [
        [(chosen, numbers(4, 8, seed=100 * step + 10 * rank + index)) for index, chosen in enumerate(of_rank)]
        for rank, of_rank in enumerate(of_step)
    ]
    for step, of_step in enumerate(CHOSEN)
]


@pytest.mark.parametrize("reduce", ["micro_batch", "step"])
@pytest.mark.parametrize("zero_stage", STAGES)
def test_parameters_that_only_one_rank_uses_get_the_sum_of_all_ranks(zero_stage: int, reduce: str) -> None:
    def law(rank: int) -> None:
        assert_trains_as_plain(rank, 2, _Experts, zero_stage, EXPERT_BATCHES, reduce=reduce)

    run_world(2, law, timeout=30)


@pytest.mark.parametrize("over_gloo", [False, True], ids=["shared memory", "gloo"])
def test_no_rank_waits_for_a_reduction_that_another_starts_after_it_has_gathered_more(over_gloo: bool) -> None:
    """With memory for two buckets, a rank waits for the reduction of its last block within its backward."""
    depth, every = 5, (0, 1, 2, 3)
    used = [
        [[every] * depth, [*[every] * (depth - 1), (0,)]],  # the second rank lacks some of the last layer,
        [[every] * depth, [every, *[()] * (depth - 1)]],  # all of several last layers,
        [[every if (layer + rank) % 2 else () for layer in range(depth)] for rank in range(2)],  # every other one
    ]
    batches = [
        [[(chosen, numbers(4, 8, seed=10 * rank + index)) for index in range(2)] for rank, chosen in enumerate(ranks)]
        for ranks in used
    ]

    def law(rank: int) -> None:
        assert_trains_as_plain(rank, 2, lambda: _Experts(depth), 3, batches, shares_memory=not over_gloo)

    run_world(2, law, timeout=30)


@pytest.mark.parametrize("zero_stage", STAGES)
def test_reductions_start_in_one_order_whichever_parameters_are_used(zero_stage: int) -> None:
    def law(rank: int) -> list[tuple[str, int]]:
        sharded = Sharded(seeded(_Experts), zero_stage, rank, 2)
        assert len(sharded.parameters.buckets) > 3
        launched = []
        plain = ReductionQueue.start

        def spy(self: ReductionQueue, task: ReductionTask) -> None:
            launched.append((task.bucket.layout.name, task.elements.start))
            plain(self, task)

        ReductionQueue.start = spy
        for step in EXPERT_BATCHES:
            sharded.step(step[rank])
        rounds = 2 if zero_stage >= 2 else 1
        parts = sum(len(bucket.gradient_chunks) for bucket in sharded.reducer.buckets)
        assert len(launched) == len(EXPERT_BATCHES) * rounds * parts
        return launched

    first, second = run_world(2, law, timeout=30)
    assert first == second


# ---- several micro-batches


class _Deep(nn.Module):
    """More than one bucket of 1024 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def test_a_forward_without_gradients_to_add_to_has_their_memory() -> None:
    def exist() -> set[bool]:
        return {bucket.full_gradient is not None for bucket in sharded.parameters.buckets}

    sharded, inputs = Sharded(seeded(_Deep), 0), [numbers(4, 16, seed=seed) for seed in range(2)]
    assert exist() == {False}
    for micro_batches in (1, 2):
        sharded.accumulate(inputs[:micro_batches])
        assert exist() == {True}
    sharded.zero.begin_step(2)
    assert exist() == {True}  # the second forward would find them there anyway
    sharded.zero.begin_step(1)
    assert exist() == {False}


def _reduced_bytes(sharded: Sharded) -> int:
    sent = sharded.state.traffic.sent_bytes
    return sent["dp", "all_reduce"] + sent["dp", "reduce_scatter"]


@pytest.mark.parametrize("reduce", ["micro_batch", "step"])
@pytest.mark.parametrize("zero_stage", STAGES)
def test_what_is_held_adds_up_without_traffic_and_goes_with_the_next_reduction(zero_stage: int, reduce: str) -> None:
    def law(rank: int) -> None:
        plain = seeded(_Experts)
        sharded = Sharded(seeded(_Experts), zero_stage, rank, 2, reduce=reduce)
        padded = 4 * sum(bucket.layout.padded_numel for bucket in sharded.reducer.buckets)
        for step in EXPERT_BATCHES:
            mine = [*step[rank], *step[rank]]  # four, of which the last alone is reduced
            sharded.zero.begin_step(len(mine))
            sharded.state.traffic.reset()
            with sharded.reducer.accumulating():
                for batch in mine[:-1]:
                    sharded.module(batch).backward()
                    sharded.reducer.close_pass(0)
            assert _reduced_bytes(sharded) == 0
            sharded.module(mine[-1]).backward()
            sharded.reducer.close_pass(0)
            sharded.zero.finish_gradients()
            assert _reduced_bytes(sharded) == (padded if zero_stage == 0 else padded // 2)
            assert_same(sharded.whole("gradient"), plain_gradients(plain, [of * 2 for of in step]))

    run_world(2, law, timeout=30)


@pytest.mark.parametrize("zero_stage", STAGES)
def test_what_is_held_to_the_end_is_reduced_at_the_end(zero_stage: int) -> None:
    """Also where the ranks have used different parameters, and reductions have come before."""

    def law(rank: int) -> None:
        for held_from in (0, 1):
            plain = seeded(_Experts)
            sharded = Sharded(seeded(_Experts), zero_stage, rank, 2)
            for step in EXPERT_BATCHES:
                sharded.zero.begin_step(2)
                for index, batch in enumerate(step[rank]):
                    with sharded.reducer.accumulating() if index >= held_from else nullcontext():
                        sharded.module(batch).backward()
                        sharded.reducer.close_pass(0)
                sharded.zero.finish_gradients()
                assert_same(sharded.whole("gradient"), plain_gradients(plain, step))

    run_world(2, law, timeout=20)


@pytest.mark.parametrize("zero_stage", STAGES)
@pytest.mark.parametrize("narrow", ["reduce_dtype", "accumulate_dtype"])
def test_bf16_gradients_are_within_its_rounding_and_travel_as_half_the_bytes(zero_stage: int, narrow: str) -> None:
    def law(rank: int) -> None:
        sent = {}
        expected: dict[str, Tensor] = {}
        for dtype in ("fp32", "bf16"):
            precision = PrecisionConfig(dtype="fp32", **{"reduce_dtype": dtype, narrow: dtype})
            sharded = Sharded(seeded(_Deep), zero_stage, rank, 2, precision=precision)
            step = random_batches(1, 2, 2, 4, 16)[0]
            sharded.state.traffic.reset()
            sharded.accumulate(step[rank])
            sent[dtype] = _reduced_bytes(sharded)
            expected = plain_gradients(seeded(_Deep), step)
            for name, gradient in sharded.whole("gradient").items():
                # four numbers added; each of them and each sum rounded to 8 bits
                bound = 8 * 2**-9 * expected[name].abs().max() if dtype == "bf16" else 1e-6
                assert (gradient - expected[name]).abs().max() < bound, name
                assert gradient.dtype == torch.float32
        assert 2 * sent["bf16"] == sent["fp32"]

    run_world(2, law)


# ---- frozen parameters, numbers of other formats


class _PartlyFrozen(_Deep):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("zero_stage", STAGES)
def test_frozen_parameters_are_kept_and_saved_and_never_stepped(zero_stage: int) -> None:
    def law(rank: int) -> None:
        before = {name: p.clone() for name, p in seeded(_PartlyFrozen).named_parameters() if not p.requires_grad}
        sharded = assert_trains_as_plain(
            rank,
            2,
            _PartlyFrozen,
            zero_stage,
            random_batches(3, 2, 2, 4, 16),
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, weight_decay=0.5),
        )
        state = sharded.module.state_dict()
        assert len(before) == 4
        for name, values in before.items():
            assert torch.equal(state[name], values), name
        kept = sum(bucket.weight_shard.numel for bucket in sharded.parameters.buckets if not bucket.layout.trains)
        frozen = sum(values.numel() for values in before.values())
        assert kept < frozen * (0.6 if zero_stage else 1.1) + 64 * 4  # padding

    run_world(2, law)


def _assert_gradients_are_plain(make: Callable[[], nn.Module], zero_stage: int, dtype: str) -> None:
    """Plain torch with weights of the same format, gradients of micro-batches added in fp32."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]

    def law(rank: int) -> None:
        plain = seeded(make).to(kind)
        sharded = Sharded(seeded(make), zero_stage, rank, 2, precision=PrecisionConfig(dtype=dtype, loss_scale=1.0))
        step = [[batch.to(kind) for batch in of_rank] for of_rank in random_batches(1, 2, 2, 4, 16)[0]]
        sharded.accumulate(step[rank])
        expected: dict[str, Tensor] = {}
        for of_rank in step:
            for batch in of_rank:
                for name, gradient in plain_gradients(plain, [[batch]]).items():
                    expected[name] = expected.get(name, 0) + gradient.float()
        assert_same(sharded.whole("gradient"), expected, rtol=1e-6, atol=1e-7)

    run_world(2, law)


@pytest.mark.parametrize("zero_stage", STAGES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_of_half_precision_weights_are_those_of_plain_ones(zero_stage: int, dtype: str) -> None:
    _assert_gradients_are_plain(_Deep, zero_stage, dtype)


class _Twice(_Deep):
    """Its layers run for the loss, and again for an auxiliary loss, which is computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        auxiliary: Tensor = checkpoint(super().forward, x.flip(-1), use_reentrant=False)
        return super().forward(x) + auxiliary.sin()


@pytest.mark.parametrize("zero_stage", STAGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_module_that_runs_twice_in_a_step_gets_the_gradients_of_both_runs(zero_stage: int, dtype: str) -> None:
    _assert_gradients_are_plain(_Twice, zero_stage, dtype)


# ---- what a rank keeps


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_groups_of_shards_train_as_without_and_each_rank_holds_a_part_of_its_group(zero_stage: int) -> None:
    def law(rank: int) -> None:
        batches = random_batches(3, 4, 2, 4, 16)
        held = {}
        for size in (0, 2, 1):
            sharded = assert_trains_as_plain(rank, 4, _Deep, zero_stage, batches, shard_group_size=size, max_norm=0.3)
            held[size] = sum(bucket.master.numel for bucket in sharded.parameters.buckets)
            state = sharded.module.state_dict()
            for others in collectives.gather_objects(state, sharded.state.world):
                assert all(torch.equal(others[name], values) for name, values in state.items())
        elements = 4 * (16 * 16 + 16)
        assert held[1] == elements
        assert elements / 2 <= held[2] < elements / 2 + 16 * 4
        assert elements / 4 <= held[0] < elements / 4 + 16 * 4

    run_world(4, law)


def test_the_gradient_norm_counts_every_element_once() -> None:
    def law(rank: int) -> list[float]:
        found = []
        for zero_stage, size in itertools.product(STAGES, (0, 2)):
            sharded = Sharded(seeded(_Deep), zero_stage, rank, 4, shard_group_size=size)
            sharded.accumulate(random_batches(1, 4, 1, 4, 16)[0][rank])
            found.append(sharded.zero.square_sum().item())
        return found

    expected = plain_gradients(seeded(_Deep), random_batches(1, 4, 1, 4, 16)[0])
    exact = sum(gradient.double().square().sum().item() for gradient in expected.values())
    for shares in zip(*run_world(4, law), strict=True):
        assert sum(shares) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("persistent", [16, 1000])
def test_persistent_parameters_are_whole_on_every_rank_and_no_traffic_of_a_pass(persistent: int) -> None:
    def law(rank: int) -> None:
        batches = random_batches(3, 2, 2, 4, 16)
        sharded = assert_trains_as_plain(rank, 2, _Deep, 3, batches, persistent_elements=persistent)
        for bucket in sharded.parameters.buckets:
            for slot in bucket.layout.slots:
                assert bucket.holds_weights == (slot.stop - slot.start <= persistent)
        sharded.state.traffic.reset()
        with torch.no_grad():
            sharded.module(numbers(4, 16))
        assert bool(sharded.state.traffic.by_axis()) == (persistent < 256)

    run_world(2, law)


@pytest.mark.parametrize("zero_stage", STAGES)
def test_values_that_rank_0_was_built_with_count(zero_stage: int) -> None:
    def law(rank: int) -> None:
        sharded = Sharded(seeded(_PartlyFrozen, seed=rank), zero_stage, rank, 2)
        assert_same(sharded.module.state_dict(), seeded(_PartlyFrozen, seed=0).state_dict(), rtol=0.0, atol=0.0)

    run_world(2, law)


def test_a_parameter_without_values_is_refused_by_name() -> None:
    with torch.device("meta"):
        module = _PartlyFrozen()
    with pytest.raises(ValueError, match=r"parameter layers\.\d\.(weight|bias) is on the meta device, without values"):
        Sharded(module, 1)


# ---- two placements in one model


@pytest.mark.parametrize(
    "options", [{}, {"offload": {"optimizer": "cpu"}}, {"reduce": "step"}], ids=["", "offload", "step"]
)
@pytest.mark.parametrize("zero_stage", STAGES)
def test_half_of_the_layers_over_all_ranks_and_half_over_pairs_train_as_plain(zero_stage: int, options: Any) -> None:
    def law(rank: int) -> None:
        batches, odd = random_batches(2, 4, 2, 3, 16), ("layers.1.", "layers.3.")
        options_ = options if zero_stage >= 2 else {key: one for key, one in options.items() if key != "reduce"}
        sharded = assert_trains_as_plain(
            rank, 4, _Deep, zero_stage, batches, in_pairs=lambda name: name.startswith(odd), max_norm=0.3, **options_
        )
        for bucket in sharded.parameters.buckets:
            shards = 2 if bucket.layout.slots[0].info.name.startswith(odd) else 4
            assert {slot.info.name.startswith(odd) for slot in bucket.layout.slots} == {shards == 2}
            assert bucket.layout.shards == shards
            held = 1 if zero_stage == 0 else shards
            assert bucket.master.numel == bucket.layout.padded_numel // held
            assert bucket.placement.replica.size * shards == 4

    run_world(4, law, timeout=60)
