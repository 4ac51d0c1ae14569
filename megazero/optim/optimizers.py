"""Optimizers that act element by element, so that they may run on flat shards of parameters.

    parameters   | w0      | w1   | b1 |
    shards       |   rank 0    | rank 1 |     the update of an element reads only its weight, gradient and state, and
                                              numbers of the whole group, so it does not matter where shards begin

An optimizer that reads a whole matrix, or the norm of a parameter, would compute something else on a shard, without an
error.  `OPTIMIZERS` holds the optimizers that a run file may name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megazero.optim.config import OptimizerConfig
from megazero.optim.registry import BUILT_IN_KEYS
from megazero.registry import check_keywords, keywords_of


class Lion(torch.optim.Optimizer):
    """Lion: the update is the sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, alg. 2).

        w <- w - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w)
        m <- beta2 * m + (1 - beta2) * g

    The momentum is its only state.  Use about a third to a tenth of AdamW's lr, and three to ten times its
    weight_decay.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        if lr < 0:
            raise ValueError(f"Lion: lr={lr} must be at least 0")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Lion: betas={betas} must be two numbers in [0, 1)")
        if weight_decay < 0:
            raise ValueError(f"Lion: weight_decay={weight_decay} must be at least 0")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.  `closure` computes the loss again, with gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                for weight, gradient, momentum in _blocks(param, param.grad, state["exp_avg"]):
                    weight.mul_(1.0 - lr * group["weight_decay"])
                    weight.add_(torch.lerp(momentum, gradient, 1.0 - beta1).sign_(), alpha=-lr)
                    momentum.lerp_(gradient, 1.0 - beta2)
        return loss


@dataclass(frozen=True)
class ElementwiseOptimizer:
    """An optimizer for `OPTIMIZERS`, and how it is constructed from the section [optimizer].

    Args:
        cls: called as `cls(groups, lr=..., **keywords)`; each group has its own weight_decay.
        elementwise: must be True, which declares that the update of an element reads only that element's weight,
            gradient and state, so that it may run on shards.  Nothing checks this.
        keys: keys of the section, besides lr and weight_decay, that are keywords of the class under the same names.
        keywords: further keywords, which are always the same.

    Raises:
        ValueError: elementwise is not True.
    """

    cls: type[torch.optim.Optimizer]
    _: KW_ONLY
    elementwise: bool
    keys: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.elementwise is not True:
            hint = "if it does, pass elementwise=True"
            raise ValueError(f"{self.cls.__name__} must act element by element to run on shards; {hint}")

    def settings(self, section: OptimizerConfig) -> dict[str, Any]:
        """Return the keywords of the class, for all groups."""
        of_section = {key: getattr(section, key) for key in ("lr", *self.keys)}
        return of_section | dict(self.keywords) | dict(section.options)


@dataclass(frozen=True)
class MatrixOptimizer:
    """An optimizer for `OPTIMIZERS` that updates each matrix of a block as a whole, from its momentum.  AdamW updates
    the rest.

    Args:
        update: maps Nesterov's momentum of a whole matrix, [rows, columns], to the update before the learning rate; the
            section's `options` are its keywords.  It is called once for each matrix, on one rank, however the state is
            sharded.
        flops: the FLOPs of `update` from rows and columns, by which matrices are divided among ranks.
    """

    update: Callable[[Tensor], Tensor]
    flops: Callable[[int, int], int]
    keys: tuple[str, ...] = BUILT_IN_KEYS["muon"]

    @property
    def cls(self) -> Callable[[Tensor], Tensor]:
        """The function that takes the options as keywords."""
        return self.update

    def settings(self, section: OptimizerConfig) -> dict[str, Any]:
        """Return the keywords of `update`."""
        return dict(section.options)


RegisteredOptimizer = ElementwiseOptimizer | MatrixOptimizer

ADAMW = ElementwiseOptimizer(torch.optim.AdamW, elementwise=True, keys=BUILT_IN_KEYS["adamw"])
ADAM = ElementwiseOptimizer(torch.optim.Adam, elementwise=True, keys=BUILT_IN_KEYS["adam"])
SGD = ElementwiseOptimizer(torch.optim.SGD, elementwise=True, keys=BUILT_IN_KEYS["sgd"])
LION = ElementwiseOptimizer(Lion, elementwise=True, keys=BUILT_IN_KEYS["lion"])
ADAGRAD = ElementwiseOptimizer(torch.optim.Adagrad, elementwise=True, keys=BUILT_IN_KEYS["adagrad"])


def _blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split tensors into blocks of the same elements: on a CPU, as many as stay in the cache over the passes of one
    update (2.4 to 0.7 ns per parameter); on other devices, few enough to bound the temporary memory.
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    size = 2**18 if tensors[0].is_cpu else 2**26
    return zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True)


def make_optimizer(
    cls: type[torch.optim.Optimizer], params: dict[str, Any], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Construct an optimizer of a class.

    Args:
        params: keywords of the class; "fused" and "foreach" choose the kernel, otherwise it is the fastest.
        groups: these dicts become the optimizer's `param_groups`.

    Raises: ValueError, a keyword does not exist; the message suggests a similar one.
    """
    check_keywords(cls.__name__, params, keywords_of(cls, positional=1))
    if not {"fused", "foreach"} & params.keys():
        params = params | _kernel(cls, params, [tensor for group in groups for tensor in group["params"]])
    return cls(groups, **params)


def state_names(optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of an optimizer's element-wise state, and of its scalar state.

    The optimizer itself is not stepped.  Instead, a twin with the same options steps two elements for each group.

    Raises:
        ValueError: some state is neither, or the class cannot be constructed from the options of its groups.
    """
    elementwise: dict[str, None] = {}  # in order, each once
    scalar: dict[str, None] = {}
    for group in optimizer.param_groups:
        for name, value in _state_of_twin(type(optimizer), group).items():
            if isinstance(value, Tensor) and value.shape == (2,):
                elementwise[name] = None
            elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0):
                scalar[name] = None
            elif value is not None:
                what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {name!r}, for a parameter of two elements {what}; on shards only "
                    f"state of the parameter's shape and scalars can be kept"
                )
    return tuple(elementwise), tuple(scalar)


def _kernel(cls: type[torch.optim.Optimizer], params: dict[str, Any], tensors: list[Tensor]) -> dict[str, bool]:
    """Return the option for the fastest kernel that works for these tensors, found by trying each on one element."""
    used = {(tensor.device, tensor.dtype) for tensor in tensors}
    dummies = [torch.zeros(1, device=device, dtype=dtype, requires_grad=True) for device, dtype in used]
    for dummy in dummies:
        dummy.grad = torch.zeros_like(dummy)
    for option in ("fused", "foreach"):
        if dummies and option in keywords_of(cls, positional=1):
            try:
                cls(dummies, **(params | {option: True})).step()
            except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError):
                continue
            return {option: True}
    return {}


def _state_of_twin(cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> dict[str, Any]:
    """Return the state after one step of a two-element parameter on the CPU, with a group's options and the plainest
    kernel.
    """
    plain = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}
    options = {key: plain.get(key, group[key]) for key in keywords_of(cls, positional=1) if key in group}
    options |= {key: value.item() for key, value in options.items() if isinstance(value, Tensor)}
    dummy = torch.nn.Parameter(torch.ones(2))
    dummy.grad = torch.ones(2)
    try:
        twin = cls([dummy], **options)
        twin.step()
    except Exception as error:
        raise ValueError(f"the state of {cls.__name__} could not be found by stepping a twin of it: {error}") from error
    return dict(twin.state[dummy])
