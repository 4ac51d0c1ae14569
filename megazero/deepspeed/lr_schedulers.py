"""The learning rate schedules that DeepSpeed documents, as pure functions of the step and five thin classes.

    WarmupLR  /‾‾‾‾    WarmupDecayLR  /\\     WarmupCosineLR  /‾\\_    OneCycle  /\\__    LRRangeTest  /
             /                       /  \\                   /                 /                    /

Step 0 is the value after the first call of `step()`; an engine calls it at the end of each optimizer step, so that the
very first optimizer step runs with the value the constructor sets.  Each class maps the step to one learning rate for
each parameter group, writes it into the group, and keeps nothing but the step.

Differences from DeepSpeed 0.19, all deliberate: an unknown warmup_type is an error, there it becomes "log" with a
warning; the constructor and `load_state_dict` write the learning rate of their step into the groups; the differences
of one schedule stand in its docstring.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from inspect import isclass
from math import cos, log, pi
from typing import Any, Protocol

from torch import Tensor
from torch.optim import lr_scheduler

from megazero.optim.keywords import check_keywords, keywords_of, unknown_name

PerGroup = float | Sequence[float]


class HasParamGroups(Protocol):
    """All that a schedule needs of an optimizer."""

    param_groups: list[dict[str, Any]]


def warmup_factor(step: int, num_steps: int, warmup_type: str) -> float:
    """Share of the way from the least to the greatest rate: 0 at step 0 and before, 1 from num_steps on.

    Args:
        step: -1 before the first step.
        num_steps: length of the warm-up, at least 2.
        warmup_type: "linear": step / num_steps; "log": log(step + 1) / log(num_steps), which is 1 a step earlier.
    """
    if step >= num_steps:
        return 1.0
    done = max(step, 0)
    return log(done + 1) / log(num_steps) if warmup_type == "log" else done / num_steps


def linear_decay_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """Share that is left of a linear descent: 1 at warmup_steps, 0 at total_steps and beyond."""
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))


def cosine_decay_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """Share that is left of half a cosine: nearly 1 at warmup_steps, 0 at total_steps - 1 and beyond."""
    done = min(1.0, (step - warmup_steps + 1) / max(1, total_steps - warmup_steps))
    return (1.0 + cos(pi * done)) / 2.0


def cycle_height(step: int, first: int, second: int, first_stairs: int, second_stairs: int) -> float:
    """Height in the triangle of one cycle, 0 at its ends and 1 at its top.

    Args:
        step: below first + second.
        first, second: steps up and steps down.
        first_stairs, second_stairs: the height moves in so many stairs; 0 for every step.
    """
    at = (step + 1) % (first + second)
    done, steps, stairs = (at, first, first_stairs) if at <= first else (first + second - at, second, second_stairs)
    return done * stairs // steps / stairs if stairs else done / steps


def range_test_factor(step: int, step_size: int, step_rate: float, staircase: bool) -> float:
    """Factor on the least rate, 1 before the first step, greater by step_rate every step_size steps."""
    intervals = (step + 1) // step_size if staircase else (step + 1) / step_size
    return 1.0 + step_rate * intervals


class LRSchedule(ABC):
    """A learning rate for each parameter group as a function of the step.

    Args:
        optimizer: anything with `param_groups`; the groups are changed in place.
        last_batch_iteration: steps already done minus 1; -1 starts from the beginning.
    """

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"a schedule needs an optimizer with param_groups, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.last_batch_iteration = _count("last_batch_iteration", last_batch_iteration, least=-1)

    @abstractmethod
    def lr_at(self, step: int) -> list[float]:
        """Learning rate of each group at a step; -1 is before the first one."""

    def get_lr(self) -> list[float]:
        """Learning rate of each group at the current step."""
        return self.lr_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Learning rates as last written into the groups."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next step, or to the one given, and write its learning rates into the groups."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """The step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved step; the schedule's parameters stay as constructed."""
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._write()

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _per_group(self, name: str, value: PerGroup) -> list[float]:
        """One number for each group, of a number or a list."""
        groups = len(self.optimizer.param_groups)
        values: list[Any] = list(value) if isinstance(value, list | tuple) else [value] * groups
        if len(values) != groups:
            raise ValueError(f"{name} has {len(values)} numbers for {groups} parameter groups; give one for each")
        for number in values:
            if isinstance(number, bool) or not isinstance(number, int | float) or number < 0:
                raise ValueError(f"{name}={value!r} must be a number of at least 0, or a list of them")
        return [float(number) for number in values]

    def _own_lrs(self) -> list[float]:
        """The rates that the groups came with, kept in them as torch's schedulers do, so that they outlive a resume."""
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", _plain(group["lr"]))
        return [_plain(group["initial_lr"]) for group in self.optimizer.param_groups]


class WarmupLR(LRSchedule):
    """From warmup_min_lr up to warmup_max_lr over warmup_num_steps steps, then constant.

    Args:
        optimizer: anything with `param_groups`.
        warmup_min_lr: the first rate, one for all groups or one for each.
        warmup_max_lr: the greatest rate, likewise; None takes each group's own.
        warmup_num_steps: at least 1; 1 counts as 2, as in DeepSpeed.
        warmup_type: "log" or "linear".
        last_batch_iteration: -1 starts from the beginning.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._own_lrs() if warmup_max_lr is None else self._per_group("warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps = max(2, _count("warmup_num_steps", warmup_num_steps, least=1))
        self.warmup_type = _warmup_type(warmup_type)
        self._write()

    def factor_at(self, step: int) -> float:
        """Share of the way from the least to the greatest rate."""
        return warmup_factor(step, self.warmup_num_steps, self.warmup_type)

    def lr_at(self, step: int) -> list[float]:
        """Learning rate of each group at a step."""
        factor = self.factor_at(step)
        return [low + (high - low) * factor for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, then linearly down to warmup_min_lr at total_num_steps, where it stays.

    Args:
        optimizer: anything with `param_groups`.
        total_num_steps: steps of the whole run; a warm-up longer than it is warned of.
        warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration: as for WarmupLR.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        warmup_num_steps = _count("warmup_num_steps", warmup_num_steps, least=1)
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def factor_at(self, step: int) -> float:
        """Share of the way from the least to the greatest rate."""
        if step < self.warmup_num_steps:
            return super().factor_at(step)
        return linear_decay_factor(step, self.warmup_num_steps, self.total_num_steps)


class WarmupCosineLR(LRSchedule):
    """Each group's own rate times a ratio: from warmup_min_ratio up to 1, then along a cosine down to cos_min_ratio.

    Args:
        optimizer: anything with `param_groups`.
        total_num_steps: steps of the whole run; a warm-up longer than it is warned of.
        warmup_min_ratio: the first ratio, one for all groups or one for each.
        warmup_num_steps: at least 1; 1 counts as 2, as in DeepSpeed.
        cos_min_ratio: the last ratio, kept from total_num_steps on.
        warmup_type: "log" or "linear".
        last_batch_iteration: -1 starts from the beginning.

    Before the first step the ratio is warmup_min_ratio, as documented; DeepSpeed sets 0 there.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_ratio: PerGroup = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps = max(2, _count("warmup_num_steps", warmup_num_steps, least=1))
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        self.warmup_min_ratios = self._per_group("warmup_min_ratio", warmup_min_ratio)
        self.warmup_type = _warmup_type(warmup_type)
        if not 0 <= cos_min_ratio <= 1:
            raise ValueError(f"cos_min_ratio={cos_min_ratio} must lie between 0 and 1")
        self.cos_min_ratio = cos_min_ratio
        self.base_lrs = self._own_lrs()
        self._write()

    def ratio_at(self, step: int, least: float) -> float:
        """Factor on a group's own rate; `least` is its warmup_min_ratio."""
        if step < self.warmup_num_steps:
            return least + (1.0 - least) * warmup_factor(step, self.warmup_num_steps, self.warmup_type)
        left = cosine_decay_factor(step, self.warmup_num_steps, self.total_num_steps)
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * left

    def lr_at(self, step: int) -> list[float]:
        """Learning rate of each group at a step."""
        return [
            lr * self.ratio_at(step, least) for lr, least in zip(self.base_lrs, self.warmup_min_ratios, strict=True)
        ]


class OneCycle(LRSchedule):
    """One cycle of the learning rate up and down again, momentum the other way, then a slow decay (Smith 2018).

    Args:
        optimizer: anything with `param_groups`.
        cycle_min_lr, cycle_max_lr: the rates at the ends and at the top, one for all groups or one for each.
        decay_lr_rate: after the cycle the rate is cycle_min_lr / (1 + decay_lr_rate * steps / decay_step_size).
        cycle_first_step_size: steps up.
        cycle_second_step_size: steps down; None for as many as up.
        cycle_first_stair_count: stairs on the way up; 0 moves at every step.
        cycle_second_stair_count: stairs on the way down; None for as many as up.
        decay_step_size: steps of one unit of decay; 0 for none.
        cycle_momentum: whether beta1 goes from cycle_max_mom down to cycle_min_mom and back.
        cycle_min_mom, cycle_max_mom: one for all groups or one for each.
        decay_mom_rate: after the cycle beta1 is cycle_max_mom * (1 + decay_mom_rate * steps / decay_step_size).
        last_batch_iteration: -1 starts from the beginning.

    Momentum is beta1 of groups with `betas`; without them it is left alone, with a warning.  Two differences from
    DeepSpeed: beta2 stays the group's own (there it becomes 0.99), and before the first step beta1 is cycle_max_mom,
    as the cycle has it (there cycle_min_mom, for one step).  A decay that takes beta1 out of [0, 1) is an error.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if cycle_second_step_size is None:
            cycle_second_step_size = cycle_first_step_size
        if cycle_second_stair_count is None:
            cycle_second_stair_count = cycle_first_stair_count
        self._shape = (
            _count("cycle_first_step_size", cycle_first_step_size, least=1),
            _count("cycle_second_step_size", cycle_second_step_size, least=0),
            _count("cycle_first_stair_count", cycle_first_stair_count, least=0),
            _count("cycle_second_stair_count", cycle_second_stair_count, least=0),
        )
        self.total_size = self._shape[0] + self._shape[1]
        self.decay_step_size = _count("decay_step_size", decay_step_size, least=0)
        if decay_lr_rate < 0:
            raise ValueError(f"decay_lr_rate={decay_lr_rate} must be at least 0")
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        self.min_moms = self._momenta("cycle_min_mom", cycle_min_mom)
        self.max_moms = self._momenta("cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        if cycle_momentum and not self.cycle_momentum:
            warnings.warn("OneCycle leaves momentum alone: the optimizer's groups have no betas", stacklevel=2)
        self._write()

    def lr_at(self, step: int) -> list[float]:
        """Learning rate of each group at a step."""
        if step >= self.total_size:
            divisor = 1.0 + self.decay_lr_rate * self._decay_units(step)
            return [low / divisor for low in self.min_lrs]
        height = cycle_height(step, *self._shape)
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def mom_at(self, step: int) -> list[float]:
        """beta1 of each group at a step."""
        if step < self.total_size:
            height = cycle_height(step, *self._shape)
            return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        factor = 1.0 + self.decay_mom_rate * self._decay_units(step)
        momenta = [high * factor for high in self.max_moms]
        if not all(0 <= momentum < 1 for momentum in momenta):
            rate = f"decay_mom_rate={self.decay_mom_rate}"
            raise ValueError(f"{rate} takes momentum to {momenta} at step {step}, out of [0, 1); 0 keeps cycle_max_mom")
        return momenta

    def get_mom(self) -> list[float] | None:
        """beta1 of each group at the current step; None where momentum is left alone."""
        return self.mom_at(self.last_batch_iteration) if self.cycle_momentum else None

    def _write(self) -> None:
        super()._write()
        for group, momentum in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = (momentum, *group["betas"][1:])

    def _decay_units(self, step: int) -> float:
        return (step - self.total_size + 1) / self.decay_step_size if self.decay_step_size else 0.0

    def _momenta(self, name: str, value: PerGroup) -> list[float]:
        momenta = self._per_group(name, value)
        if max(momenta, default=0.0) >= 1:
            raise ValueError(f"{name}={value} must be below 1")
        return momenta


class LRRangeTest(LRSchedule):
    """A rate that only grows, to find the greatest one that trains (Smith 2018).

    Args:
        optimizer: anything with `param_groups`.
        lr_range_test_min_lr: the first rate, one for all groups or one for each.
        lr_range_test_step_size: steps of one interval.
        lr_range_test_step_rate: growth in one interval, in units of the first rate.
        lr_range_test_staircase: grow once every interval instead of at every step.
        last_batch_iteration: -1 starts from the beginning.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        step_size = _count("lr_range_test_step_size", lr_range_test_step_size, least=1)
        if lr_range_test_step_rate < 0:
            raise ValueError(f"lr_range_test_step_rate={lr_range_test_step_rate} must be at least 0")
        self.min_lrs = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self._growth = (step_size, lr_range_test_step_rate, lr_range_test_staircase)
        self._write()

    def lr_at(self, step: int) -> list[float]:
        """Learning rate of each group at a step."""
        factor = range_test_factor(step, *self._growth)
        return [low * factor for low in self.min_lrs]


SCHEDULES: dict[str, Callable[..., LRSchedule]] = {
    schedule.__name__: schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def make_lr_scheduler(type: str, params: dict[str, Any], optimizer: HasParamGroups) -> Any:
    """Make a schedule by name.

    Args:
        type: a key of SCHEDULES, or the name of a class in torch.optim.lr_scheduler.
        params: its parameters, without the optimizer.
        optimizer: a torch.optim.Optimizer for torch's schedules, else anything with `param_groups`.

    Returns:
        A schedule with step, get_last_lr, state_dict and load_state_dict.

    Raises:
        ValueError: for a name or a parameter that does not exist, with a guess at what was meant, and for bad values.
    """
    known = SCHEDULES | _torch_schedules()
    if type not in known:
        raise unknown_name("scheduler type", type, known)
    check_keywords(type, params, keywords_of(known[type], positional=1))
    return known[type](optimizer, **params)


def _torch_schedules() -> dict[str, Callable[..., Any]]:
    """Schedules of torch that are made for one optimizer."""
    base = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)
    return {
        name: item
        for name, item in vars(lr_scheduler).items()
        if isclass(item)
        and issubclass(item, base)
        and not name.startswith("_")
        and item is not lr_scheduler.LRScheduler
    }


def _count(name: str, value: int, *, least: int) -> int:
    """A number of steps; 1e3, as JSON files have it, counts as 1000."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    return int(value)


def _total_steps(total_num_steps: int, warmup_num_steps: int) -> int:
    total = _count("total_num_steps", total_num_steps, least=1)
    if total < warmup_num_steps:
        warnings.warn(
            f"total_num_steps={total} is less than warmup_num_steps={warmup_num_steps}: the rate ends before its peak",
            stacklevel=3,
        )
    return total


def _warmup_type(name: str) -> str:
    if name not in ("log", "linear"):
        raise unknown_name("warmup_type", name, ("linear", "log"))
    return name


def _plain(lr: float | Tensor) -> float:
    return float(lr.item() if isinstance(lr, Tensor) else lr)
