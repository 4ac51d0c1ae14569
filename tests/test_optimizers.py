"""Optimizers by name, and the law that shards change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.deepspeed.script_optimizers import check_elementwise, factory_by_name
from megazero.optim.optimizers import Lion, make_optimizer, state_names

# Options that reach every kind of state, and the names of that state, from the papers' algorithms as torch names them.
ELEMENTWISE: list[tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, ("exp_avg", "exp_avg_sq"), ("step",)),
    ("AdamW", {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("step",)),
    ("FusedAdam", {"weight_decay": 0.1}, ("exp_avg", "exp_avg_sq"), ("step",)),
    ("SGD", {"lr": 0.1}, (), ()),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, ("momentum_buffer",), ()),
    ("Lion", {"weight_decay": 0.1}, ("exp_avg",), ()),
    ("Adagrad", {"lr_decay": 0.1}, ("sum",), ("step",)),
    ("Adadelta", {}, ("acc_delta", "square_avg"), ("step",)),
    ("Adamax", {}, ("exp_avg", "exp_inf"), ("step",)),
    ("ASGD", {"t0": 1}, ("ax",), ("eta", "mu", "step")),
    ("NAdam", {}, ("exp_avg", "exp_avg_sq"), ("mu_product", "step")),
    ("RAdam", {}, ("exp_avg", "exp_avg_sq"), ("step",)),
    ("RMSprop", {"momentum": 0.9, "centered": True}, ("grad_avg", "momentum_buffer", "square_avg"), ("step",)),
    ("Rprop", {}, ("prev", "step_size"), ("step",)),
]


def _parameter(values: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.clone())


def _made(name: str, params: dict[str, Any], weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return factory_by_name(name, params, [{}]).build([weights])


def _stepped(name: str, params: dict[str, Any], tensors: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    """Tensors after one step for each list of gradients."""
    weights = [_parameter(tensor) for tensor in tensors]
    optimizer = _made(name, params, weights)
    for step in gradients:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize(("name", "params"), [(name, params) for name, params, _, _ in ELEMENTWISE])
def test_one_flat_tensor_gives_the_same_as_separate_ones(name: str, params: dict[str, Any]) -> None:
    random = torch.Generator().manual_seed(3)
    shapes = [(3, 5), (7,), (1, 2, 2)]
    tensors = [torch.randn(shape, generator=random) for shape in shapes]
    gradients = [[torch.randn(shape, generator=random) for shape in shapes] for _ in range(4)]
    apart = torch.cat([t.flatten() for t in _stepped(name, params, tensors, gradients)])

    def cut(parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
        return list(torch.cat([part.flatten() for part in parts]).split(sizes))

    for sizes in ([26], [10, 1, 0, 15]):  # shards: one, and four with borders inside parameters
        shards = _stepped(name, params, cut(tensors, sizes), [cut(step, sizes) for step in gradients])
        torch.testing.assert_close(torch.cat(shards), apart, rtol=1e-5, atol=1e-6)
    assert not torch.equal(apart, torch.cat([t.flatten() for t in tensors]))


@pytest.mark.parametrize(("name", "params", "elementwise", "scalar"), ELEMENTWISE)
def test_the_names_of_the_state_are_found(
    name: str, params: dict[str, Any], elementwise: tuple[str, ...], scalar: tuple[str, ...]
) -> None:
    weight = _parameter(torch.ones(3))
    optimizer = _made(name, params, [weight])
    found = state_names(optimizer)
    assert (tuple(sorted(found[0])), tuple(sorted(found[1]))) == (elementwise, scalar)
    assert weight.tolist() == [1, 1, 1]


def test_the_names_of_the_state_are_those_of_all_groups() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [_parameter(torch.ones(3))]},
        {"params": [_parameter(torch.ones(3))], "momentum": 0.9},
    ]
    assert state_names(make_optimizer(torch.optim.SGD, {"lr": torch.tensor(0.1)}, groups)) == (("momentum_buffer",), ())


def test_lion_follows_its_paper() -> None:
    random = torch.Generator().manual_seed(5)
    size = 2**18 + 3  # more than one block
    w, m = torch.randn(size, generator=random, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    gradients = [torch.randn(size, generator=random, dtype=torch.float64) for _ in range(3)]
    params = {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1}
    (stepped,) = _stepped("Lion", params, [w], [[gradient] for gradient in gradients])
    for g in gradients:
        update = torch.sign(0.8 * m + 0.2 * g)
        w = w - 0.01 * (update + 0.1 * w)
        m = 0.95 * m + 0.05 * g
    torch.testing.assert_close(stepped, w)


def test_lion_steps_tensors_of_any_layout_and_leaves_those_without_gradient() -> None:
    weight, idle = _parameter(torch.randn(4, 3).t()), _parameter(torch.ones(2))
    assert not weight.is_contiguous()
    weight.grad = torch.ones(3, 4)
    before = weight.detach().clone()
    loss = Lion([weight, idle], lr=0.5).step(lambda: 2.0)
    torch.testing.assert_close(weight.detach(), before - 0.5)
    assert (loss, idle.tolist()) == (2.0, [1, 1])


@pytest.mark.parametrize(
    ("name", "params", "cls", "weight_decay"),
    [
        ("Adam", {}, torch.optim.AdamW, 0.0),
        ("adam", {"adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, 0.0),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("ADAMW", {"weight_decay": 0.3}, torch.optim.AdamW, 0.3),
        ("DeepSpeedCPUAdam", {"adamw_mode": False, "bias_correction": True}, torch.optim.Adam, 0.0),
        ("FusedLion", {}, Lion, 0.0),
        ("cpuadagrad", {}, torch.optim.Adagrad, 0.0),
        ("NAdam", {}, torch.optim.NAdam, 0.0),
    ],
)
def test_the_names_of_deepspeed_mean_what_they_mean_there(
    name: str, params: dict[str, Any], cls: type[torch.optim.Optimizer], weight_decay: float
) -> None:
    optimizer = _made(name, params, [_parameter(torch.ones(3))])
    assert type(optimizer) is cls
    assert optimizer.param_groups[0]["weight_decay"] == weight_decay


def test_the_fused_kernel_is_taken_where_there_is_one_unless_told_otherwise() -> None:
    def group(name: str, **params: Any) -> dict[str, Any]:
        weight = _parameter(torch.ones(3))
        return _made(name, params, [weight]).param_groups[0]

    assert all(group(name)["fused"] for name in ("Adam", "AdamW", "SGD", "Adagrad"))
    assert group("RMSprop")["foreach"]
    assert not group("AdamW", fused=False)["fused"]
    assert group("AdamW", foreach=True)["foreach"]
    assert not group("AdamW", differentiable=True)["fused"]
    assert make_optimizer(torch.optim.AdamW, {}, [{"params": []}]).param_groups[0]["params"] == []


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("Adma", {}, "unknown optimizer type 'Adma': did you mean .*Adam.*There are"),
        ("Optimizer", {}, "unknown optimizer type"),
        ("AdamW", {"weigth_decay": 0.1}, r"AdamW has no parameter 'weigth_decay' \(did you mean weight_decay\?\)"),
        ("SGD", {"momentun": 0.1, "beta": 1}, "'momentun'.*did you mean momentum.*'beta'"),
        ("Lion", {"eps": 1e-8}, "Its parameters are lr, betas, weight_decay"),
        ("Lion", {"betas": [0.9, 1.0]}, "betas"),
        ("Lion", {"lr": -1.0}, "lr=-1.0"),
        ("AdamW", {"max_grad_norm": 1.0}, "set gradient_clipping instead"),
        ("Adam", {"bias_correction": False}, "bias_correction"),
        ("Adam", {"fp32_optimizer_states": False}, "fp32_optimizer_states"),
        ("Lamb", {}, "'Lamb' is not offered: it acts on more than one element at a time"),
    ],
)
def test_what_can_not_be_meant_is_refused_by_name(name: str, params: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        _made(name, params, [_parameter(torch.ones(3))])


class _Foreign(torch.optim.SGD):
    pass


class Lamb(torch.optim.SGD):
    """Only its name counts here."""


class _OwnMuon(torch.optim.Muon):
    pass


def test_optimizers_that_mix_elements_are_refused_with_the_reason() -> None:
    matrix = [_parameter(torch.ones(2, 2))]
    kinds = torch.optim.Muon, _OwnMuon, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam, Lamb
    for kind in kinds:
        for allow_untested in (False, True):
            with pytest.raises(ValueError, match=f"{kind.__name__} acts on more .* at stage 0, too"):
                check_elementwise(kind(matrix), allow_untested)


def test_unknown_classes_are_taken_only_when_allowed() -> None:
    optimizer = _Foreign([_parameter(torch.ones(2))], momentum=0.9)
    with pytest.raises(ValueError, match=r"_Foreign is unknown.* zero_allow_untested_optimizer"):
        check_elementwise(optimizer, allow_untested=False)
    check_elementwise(optimizer, allow_untested=True)
    assert state_names(optimizer) == (("momentum_buffer",), ())


class _RowSums(torch.optim.Optimizer):
    """Keeps state of a shape of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["row"] = weight.detach().sum(0, keepdim=True)


def test_state_that_no_shard_can_keep_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"_RowSums keeps 'row'.*shape \(1,\)"):
        state_names(_RowSums([_parameter(torch.ones(2))]))
    with pytest.raises(ValueError, match="LBFGS could not be found"):
        state_names(torch.optim.LBFGS([_parameter(torch.ones(2))]))
