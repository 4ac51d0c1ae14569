"""Scripts that catch an interrupt and go on, or read weights outside of their module: the numbers of plain torch."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import pytest
import torch
from harness import run_world
from torch import Tensor, nn

import megazero
from megazero.comm.collectives import Pending
from megazero.deepspeed.full_params import gathered_parameters


class _Net(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def _nets(stage: int, net: nn.Module, accumulation: int = 1) -> tuple[Any, nn.Module]:
    """An engine of a module, and the module in plain torch."""
    plain = copy.deepcopy(net)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
    }
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.5}}
    return megazero.initialize(model=net, model_parameters=net.parameters(), config=config)[0], plain


def _stack() -> _Net:
    torch.manual_seed(3)
    return _Net(*(nn.Linear(16, 16) for _ in range(4)))


def _batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 4, 16, generator=torch.Generator().manual_seed(9)))


def _weights_after(rank: int) -> None:
    engine, plain = _nets(3, _stack())
    (x,) = _batches(1)
    engine.backward(engine(x))
    real, raised = Pending.wait, []

    def wait(self: Pending) -> None:
        if not raised and any(frame.name == "forget" for frame in traceback.extract_stack()):
            raised.append(True)
            raise KeyboardInterrupt
        real(self)

    Pending.wait = wait  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    finally:
        Pending.wait = real  # type: ignore[method-assign]
    with gathered_parameters(engine) as whole:  # nothing was stepped yet
        assert all(torch.equal(whole[name], one) for name, one in plain.state_dict().items())
    assert torch.allclose(engine(x), plain(x))


def test_an_interrupt_where_old_weights_are_forgotten_keeps_none_of_them() -> None:
    run_world(2, _weights_after, timeout=60)


def _step_after(rank: int, stage: int) -> None:
    engine, plain = _nets(stage, _stack(), accumulation=2)
    first, *batches = _batches(3)
    forward, calls = engine.module.forward, []

    def interrupted(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return forward(x)

    engine.module.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.train_batch(iter([first, first]))
    engine.train_batch(iter(batches))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    torch.stack([plain(x) for x in batches]).mean().backward()
    optimizer.step()
    with gathered_parameters(engine) as whole:
        for name, one in plain.state_dict().items():
            assert torch.allclose(whole[name], one, atol=1e-6), name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_batch_after_an_interrupted_one_is_a_whole_one(stage: int) -> None:
    run_world(2, _step_after, stage, timeout=60)


class _Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(self.b(x), self.a.weight.t(), self.b.bias)
        return (y + self.a.weight[0] + self.b.bias).square().mean()


def _gradients_outside(rank: int) -> None:
    torch.manual_seed(3)
    engine, plain = _nets(3, _Outside())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    loss, expected = engine(x), plain(x)
    assert torch.allclose(loss, expected)
    engine.backward(loss)
    engine.step()
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    with gathered_parameters(engine) as whole:
        for name, one in plain.state_dict().items():
            assert torch.allclose(whole[name], one, atol=1e-6), name


def test_a_view_of_one_weight_beside_another_weight_outside_of_their_modules() -> None:
    run_world(2, _gradients_outside, timeout=60)
