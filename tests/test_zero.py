"""ZeRO on modules that are not a GPT: unused parameters, odd shapes, exceptions, evaluation between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_world
from torch import Tensor, nn

from megazero.layers.spec import Init, ParamSpec, Section
from megazero.parallel_state import Axis, ParallelState, RankGrid
from megazero.zero.gradients import GradientReducer, square_sum
from megazero.zero.optimizer import ShardedAdamW
from megazero.zero.parameters import ShardedParameters


class _Layer(nn.Module):
    """Two weights, of which `extra` is used only when asked for; a prime number of elements, and one of none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, 7))
        self.extra = nn.Parameter(torch.empty(13))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor, uses_extra: bool, fails: bool = False) -> Tensor:
        if fails:
            raise RuntimeError("on purpose")
        x = torch.tanh(x @ self.weight)
        return x * self.extra.sum() if uses_extra else x


class _Model:
    """Three layers under ZeRO, and what a step needs."""

    def __init__(self, rank: int, world: int, zero_stage: int) -> None:
        self.state = ParallelState(RankGrid(dp=world), rank)
        self.layers = [_Layer() for _ in range(3)]
        described = []
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                section = Section(f"{index}.{name}", parameter.shape[0])
                columns = parameter.shape[1] if parameter.dim() == 2 else None
                described.append(
                    (f"{index}.{name}", parameter, ParamSpec((section,), columns, init=Init("normal", 0.5)))
                )
        self.parameters = ShardedParameters(
            [self.layers],
            described,
            zero_stage=zero_stage,
            dtype=torch.float32,
            bucket_bytes=1024,
            dp=self.state.dp,
            embedding=self.state.embedding,
            device=torch.device("cpu"),
        )
        buckets = self.parameters.buckets
        self.reducer = GradientReducer(buckets, zero_stage, self.state.dp, self.state.tp, self.state.embedding)
        self.reducer.attach(self.parameters.by_name, {})
        self.optimizer = ShardedAdamW(buckets, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
        self.parameters.draw(5, self.state.tp)

    def forward(self, x: Tensor, uses_extra: bool = True, fails_at: int | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, uses_extra, index == fails_at)
        return x.square().sum()

    def step(self, inputs: list[Tensor], uses_extra: bool = True) -> None:
        self.reducer.begin_step(len(inputs))
        for x in inputs:
            self.forward(x, uses_extra).backward()
        self.reducer.finish()

    def gradients(self) -> dict[str, list[float]]:
        """This rank's shard of every gradient, by name, as (first element, values)."""
        found = {}
        for bucket in self.parameters.buckets:
            for slot in bucket.layout.slots:
                start, stop = max(slot.start, bucket.owned.start), min(slot.stop, bucket.owned.stop)
                shard = bucket.gradient[start - bucket.owned.start : max(start, stop) - bucket.owned.start]
                found[slot.info.name] = shard.tolist()
        return found

    def weights(self) -> list[Tensor]:
        """All master shards of this rank."""
        return [bucket.master.clone() for bucket in self.parameters.buckets]


def _input(rank: int, index: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * rank + index))


def _unused(rank: int, world: int, zero_stage: int) -> dict[str, list[float]]:
    model = _Model(rank, world, zero_stage)
    model.step([_input(rank, 0), _input(rank, 1)])
    model.step([_input(rank, 2), _input(rank, 3)], uses_extra=False)
    return model.gradients()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_parameter_unused_in_a_step_gets_no_gradient_of_an_earlier_one(zero_stage: int) -> None:
    for gradients in run_world(2, _unused, 2, zero_stage):
        for name, values in gradients.items():
            assert any(values) == (name.endswith("weight") and bool(values)), name


def _three_steps(rank: int, world: int, zero_stage: int, disturbed: bool) -> tuple[list[Any], list[Any]]:
    """Weights after three steps; in between evaluation and a failing forward, when disturbed."""
    model = _Model(rank, world, zero_stage)
    for step in range(3):
        if disturbed:
            with torch.no_grad():
                model.forward(_input(rank, 50))
            model.reducer.begin_step(1)
            with pytest.raises(RuntimeError, match="on purpose"):
                model.forward(_input(rank, 60), fails_at=step)
        model.step([_input(rank, 2 * step), _input(rank, 2 * step + 1)])
        norm = model.reducer.square_sum()
        model.optimizer.step(1e-2, 1.0)
        model.parameters.publish()
    layouts = [(bucket.owned.start, bucket.layout.numel) for bucket in model.parameters.buckets]
    return [weight.numpy() for weight in model.weights()], [*layouts, norm.item()]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_evaluation_and_a_failed_forward_change_no_bit_of_a_run(zero_stage: int) -> None:
    plain = run_world(2, _three_steps, 2, zero_stage, False)
    disturbed = run_world(2, _three_steps, 2, zero_stage, True)
    for (a, _), (b, _) in zip(plain, disturbed, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x == y).all()


@pytest.mark.parametrize("world", [2, 4])
def test_every_stage_takes_the_same_steps_on_any_module(world: int) -> None:
    """fp32 sums of 2 and 4 numbers in rank order are equal on all stages; buckets may differ, elements may not."""
    norms = {
        stage: sum(extra[-1] for _, extra in run_world(world, _three_steps, world, stage, False)) for stage in range(4)
    }
    for stage in (1, 2, 3):
        assert norms[stage] == pytest.approx(norms[0], rel=1e-6)


def test_a_gradient_that_comes_too_often_is_refused() -> None:
    model = _Model(0, 1, 1)
    model.reducer.begin_step(1)
    model.forward(_input(0, 0)).backward()
    with pytest.raises(RuntimeError, match="came more than 1 times in a step of 1 micro-batches"):
        model.forward(_input(0, 1)).backward()


def test_a_parameter_outside_every_unit_is_refused() -> None:
    layer, stray = _Layer(), nn.Parameter(torch.empty(3))
    with pytest.raises(ValueError, match="stray belongs to no unit"):
        ShardedParameters(
            [[layer]],
            [("stray", stray, ParamSpec((Section("stray", 3),)))],
            zero_stage=0,
            dtype=torch.float32,
            bucket_bytes=1024,
            dp=Axis("dp"),
            embedding=Axis("embedding"),
            device=torch.device("cpu"),
        )


def test_the_square_sum_of_a_long_tensor_keeps_its_digits() -> None:
    """torch's own norm of one long fp32 tensor loses digits; ours must not."""
    flat = torch.full((5_000_003,), 0.1)
    exact = float(flat[0].double() ** 2) * flat.numel()
    assert float(square_sum(flat)) == pytest.approx(exact, rel=1e-6)
