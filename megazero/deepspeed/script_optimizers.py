"""Optimizers under the names of DeepSpeed's scripts and configurations, and a check that they can run on shards.

The engine runs torch's fused kernels on the device or, offloaded, on the host, so DeepSpeed's Adam classes are one function.
"""

from collections.abc import Iterable, Sequence
from inspect import Parameter, isclass
from typing import Any

import torch
from torch import Tensor, nn

from megazero.deepspeed.names import NAMES
from megazero.optim.optimizers import Lion, MatrixOptimizer, make_optimizer, state_names
from megazero.optim.registry import OPTIMIZERS
from megazero.registry import check_keywords, keywords_of, unknown_name
from megazero.zero.optimizer import OptimizerFactory, factory_of_class

# The names of a DeepSpeed configuration, in any case, and what they mean there without further parameters.
_DEEPSPEED_ADAM = NAMES["optimizers"]["adam"].split()
_DEEPSPEED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    **dict.fromkeys(_DEEPSPEED_ADAM, (torch.optim.AdamW, {"weight_decay": 0.0})),
    **dict.fromkeys(("lion", "fusedlion", "cpulion", "deepspeedcpulion"), (Lion, {"lr": 1e-3, "betas": (0.9, 0.999)})),
    **dict.fromkeys(("adagrad", "cpuadagrad", "deepspeedcpuadagrad"), (torch.optim.Adagrad, {})),
    "sgd": (torch.optim.SGD, {}),
}

# Of torch.optim; `OPTIMIZERS` has the others.
_ELEMENTWISE = NAMES["optimizers"]["elementwise"].split()

# Whole matrices, norms of whole parameters, quantised blocks, second derivatives or sparse gradients, or gradients that the
# optimizer itself reduces over whole replicas.
_NOT_ELEMENTWISE = frozenset(NAMES["optimizers"]["mixing"].split())
_WHY = "acts on more than one element at a time (a matrix, a norm, a block): on shards it would compute something else"


def factory_by_name(name: str, params: dict[str, Any], groups: Sequence[dict[str, Any]]) -> OptimizerFactory:
    """Return the factory of the optimizer that a configuration names.

    Args:
        name: Adam, AdamW, Lion, Adagrad, SGD or DeepSpeed's class names for them (FusedAdam, DeepSpeedCPUAdam, FusedLion,
            ...), in any case; a name that a script has added to `OPTIMIZERS`; or the name of a class in torch.optim.
        params: parameters as DeepSpeed or torch documents them.  "fused" and "foreach" choose the kernel, by default the
            fastest.
        groups: settings of each parameter group.

    Raises: ValueError: the name or a parameter does not exist (the message has a suggestion), or the optimizer cannot run on
        shards.

    As in DeepSpeed: "Adam" is AdamW unless params has "adam_w_mode": false, which "AdamW" ignores; weight_decay is 0 unless
    given, for AdamW too, but torch's own 0.01 with "torch_adam": true; Lion starts from lr 1e-3 and betas (0.9, 0.999), not
    from those of its paper; "max_grad_norm" is refused.  Other than in DeepSpeed, amsgrad works.
    """
    if "max_grad_norm" in params:
        raise ValueError("max_grad_norm is no parameter of an optimizer; set gradient_clipping instead")
    params = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    cls, defaults = _class_of(name)
    known = keywords_of(cls, positional=1)
    if name.lower() in _DEEPSPEED_ADAM:
        # torch's Adam instead of DeepSpeed's: here only torch's default weight_decay
        torch_adam = Parameter("torch_adam", Parameter.KEYWORD_ONLY, default=False)
        theirs = {key: option for key, option in keywords_of(adam, positional=1).items() if key not in known}
        theirs["torch_adam"] = torch_adam
        check_keywords(name, params, known | theirs)
        own = {key: params.pop(key, option.default) for key, option in theirs.items()}
        decoupled = name.lower() == "adamw" or (own["adam_w_mode"] and own["adamw_mode"])
        cls = _adam_class(name, own["bias_correction"], own["fp32_optimizer_states"], decoupled)
        defaults = {} if own["torch_adam"] else defaults
    else:
        check_keywords(name, params, known)
    params = defaults | params
    check_elementwise(make_optimizer(cls, params, [{"params": [nn.Parameter(torch.zeros(2))]}]), allow_untested=False)
    return factory_of_class(cls, params, groups)


def factory_of(optimizer: torch.optim.Optimizer, *, allow_untested: bool = False) -> OptimizerFactory:
    """Return a factory that gives the flat shards to a user's optimizer, which keeps its own group objects.

    Args:
        allow_untested: accept a class that is not known to act element by element.

    Raises: ValueError: the optimizer has stepped already, or cannot run on shards.
    """
    check_elementwise(optimizer, allow_untested)
    if any(state.get("step", 1) for state in optimizer.state.values()):  # Adagrad's exists before its first step
        raise ValueError(f"the {type(optimizer).__name__} has stepped already; hand it over before its first step")

    def build(shards: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer.state.clear()
        for group, params in zip(optimizer.param_groups, shards, strict=True):
            group["params"] = params
        return optimizer

    return OptimizerFactory(len(optimizer.param_groups), *state_names(optimizer), build)


def check_elementwise(optimizer: torch.optim.Optimizer, allow_untested: bool) -> None:
    """Refuse an optimizer that cannot run on shards.

    Args:
        allow_untested: accept unknown classes; classes that are known to mix elements are refused nevertheless.

    Raises: ValueError: it cannot; the message has the reason.
    """
    cls = type(optimizer)
    if any(base.__name__.lower() in _NOT_ELEMENTWISE for base in cls.__mro__):
        raise ValueError(f"{cls.__name__} {_WHY}, at stage 0, too; use AdamW or Lion")
    known = {*(getattr(torch.optim, name) for name in _ELEMENTWISE), *(OPTIMIZERS[name].cls for name in OPTIMIZERS)}
    if cls not in known and not allow_untested:
        raise ValueError(f"{cls.__name__} is unknown; if it acts element by element, set zero_allow_untested_optimizer")


def _class_of(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the optimizer class of a name in a configuration, and DeepSpeed's defaults that differ from the class's."""
    base = torch.optim.Optimizer
    of_torch = {key: it for key, it in vars(torch.optim).items() if isclass(it) and issubclass(it, base) and it != base}
    if name in OPTIMIZERS and not OPTIMIZERS.is_built_in(name):
        if isinstance(registered := OPTIMIZERS[name], MatrixOptimizer):
            raise ValueError(f"optimizer type {name!r} steps whole matrices: it is for run files, not for scripts")
        return registered.cls, {}
    if name.lower() in _DEEPSPEED:
        return _DEEPSPEED[name.lower()]
    if name in of_torch:
        return of_torch[name], {}
    if name.lower().removeprefix("deepspeed") in _NOT_ELEMENTWISE:
        raise ValueError(f"optimizer type {name!r} is not offered: it {_WHY}. Use AdamW or Lion")
    raise unknown_name("optimizer type", name, of_torch.keys() | {"Lion", "FusedAdam", "DeepSpeedCPUAdam", "FusedLion"})


def _adam_class(name: str, bias_correction: bool, fp32_states: bool, decoupled: bool) -> type[torch.optim.Adam]:
    if not bias_correction:
        raise ValueError(f"{name}: bias_correction=false is not offered; torch's kernels always correct")
    if not fp32_states:
        raise ValueError(f"{name}: fp32_optimizer_states=false is not offered; state has the dtype of what is stepped")
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def adam(
    params: Iterable[Tensor] | Iterable[dict[str, Any]],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    *,  # FusedAdam and DeepSpeedCPUAdam have the rest in different orders
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adam_w_mode: bool = True,
    adamw_mode: bool = True,
    set_grad_none: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """Build torch's AdamW; torch's Adam if `adam_w_mode` or `adamw_mode` is False.

    Raises: ValueError: an argument asks for another update rule.
    """
    cls = _adam_class("Adam", bias_correction, fp32_optimizer_states, adam_w_mode and adamw_mode)
    return cls(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


class _CompatibleOps(dict[Any, bool]):
    """Which of DeepSpeed's extensions a script may count on, by the NAME of their builders: those of Adam."""

    def __missing__(self, name: Any) -> bool:
        return "adam" in str(name).lower()


compatible_ops = _CompatibleOps()


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[Any]:
    """Return the groups unchanged, in a list: without experts, there is nothing to split off."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
