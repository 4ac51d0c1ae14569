"""The learning-rate schedules that DeepSpeed documents: pure functions of the step, in five thin classes.

    WarmupLR  /‾‾‾‾    WarmupDecayLR  /\\     WarmupCosineLR  /‾\\_    OneCycle  /\\__    LRRangeTest  /
             /                       /  \\                   /                 /                    /

Step 0 is the value after the first call of `step()`.  An engine calls it at the end of each optimizer step, so the first
optimizer step uses the value that the constructor sets.

Differences from DeepSpeed 0.19: an unknown warmup_type is an error (there it becomes "log"); the constructor and
`load_state_dict` write the learning rate of their step into the groups; see also each schedule's docstring.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import cos, log, pi
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.optim import lr_scheduler

from megazero.registry import check_keywords, keywords_of, unknown_name

Rate = Annotated[float, Field(ge=0)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
#: One number for all parameter groups, or one for each.
PerGroup = Rate | list[Rate]
Steps = Annotated[int, Field(ge=1)]
StepsOrNone = Annotated[int, Field(ge=0)]
LastStep = Annotated[int, Field(ge=-1)]
Warmup = Literal["log", "linear"]


def cycle_height(step: int, first: int, second: int, first_stairs: int, second_stairs: int) -> float:
    """Return the height of a step in a cycle: 0 at its ends, 1 at its top.

    Args:
        first, second: steps on the way up, and on the way down.
        first_stairs, second_stairs: stairs on the way up and down; 0 for a straight line.
    """
    at = (step + 1) % (first + second)
    done, steps, stairs = (at, first, first_stairs) if at <= first else (first + second - at, second, second_stairs)
    return done * stairs // steps / stairs if stairs else done / steps


class LRSchedule(ABC):
    """Base class: a learning rate for each parameter group as a function of the step, which is its only state.

    Each schedule is a dataclass whose fields have DeepSpeed's order.

    Args:
        optimizer: anything with `param_groups`; the groups are changed in place.
        last_batch_iteration: steps already done minus 1; -1 starts from the beginning.
    """

    optimizer: Any
    last_batch_iteration: int

    def __post_init__(self) -> None:
        if not hasattr(self.optimizer, "param_groups"):
            raise TypeError(f"a schedule needs an optimizer with param_groups, got {type(self.optimizer).__name__}")
        groups = self.optimizer.param_groups
        for name, value in vars(self).items():
            if isinstance(value, list) and len(value) != len(groups):
                raise ValueError(
                    f"{name} has {len(value)} numbers for {len(groups)} parameter groups; give one for each"
                )
        for group in groups:  # as torch's schedulers do, so that a group's own rate survives a resume
            group.setdefault("initial_lr", float(group["lr"]))
        self._write()

    @abstractmethod
    def rate(self, step: int, group: int) -> float:
        """Return the learning rate of a group at a step; -1 is before the first one."""

    def of_group(self, name: str, group: int) -> float:
        """Return a parameter of the schedule for a group; if the parameter is None, the group's own learning rate."""
        value = getattr(self, name)
        if value is None:
            return float(self.optimizer.param_groups[group]["initial_lr"])
        return float(value[group] if isinstance(value, list) else value)

    def lr_at(self, step: int) -> list[float]:
        """Return the learning rate of each group at a step."""
        return [self.rate(step, group) for group in range(len(self.optimizer.param_groups))]

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the current step."""
        return self.lr_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates as last written into the groups."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next step, or to the given one, and write its learning rates into the groups."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Return the step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved step.  The schedule's parameters stay as constructed."""
        self.step(int(state["last_batch_iteration"]))

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


class _WarmupSchedule(LRSchedule):
    warmup_num_steps: int
    warmup_type: str

    def __post_init__(self) -> None:
        total = getattr(self, "total_num_steps", self.warmup_num_steps)
        if total < self.warmup_num_steps:
            warnings.warn(f"total_num_steps={total} ends the rate before its peak", stacklevel=4)
        self.warmup_num_steps = max(2, self.warmup_num_steps)
        super().__post_init__()

    def warmed_up(self, step: int) -> float:
        """Return the progress of the warm-up: 0 until step 0, 1 from its end on; "log" reaches 1 a step earlier."""
        done, steps = min(max(step, 0), self.warmup_num_steps), self.warmup_num_steps
        return min(1.0, log(done + 1) / log(steps)) if self.warmup_type == "log" else done / steps


@dataclass(eq=False, repr=False)
class WarmupLR(_WarmupSchedule):
    """Grows from warmup_min_lr to warmup_max_lr over warmup_num_steps steps, then stays constant.

    Args:
        warmup_max_lr: None takes each group's own rate.
        warmup_num_steps: at least 1; 1 counts as 2, as in DeepSpeed.
        warmup_type: "log" or "linear".
    """

    optimizer: Any
    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None
    warmup_num_steps: Steps = 1000
    warmup_type: Warmup = "log"
    last_batch_iteration: LastStep = -1

    def rate(self, step: int, group: int) -> float:
        share = self.warmed_up(step)
        return _between(self.of_group("warmup_min_lr", group), self.of_group("warmup_max_lr", group), share)


@dataclass(eq=False, repr=False)
class WarmupDecayLR(_WarmupSchedule):
    """Warms up like WarmupLR, then falls linearly to warmup_min_lr at total_num_steps, and stays there."""

    optimizer: Any
    total_num_steps: Steps
    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = 0.001
    warmup_num_steps: Steps = 1000
    warmup_type: Warmup = "log"
    last_batch_iteration: LastStep = -1

    def rate(self, step: int, group: int) -> float:
        share = self.warmed_up(step)
        if step >= self.warmup_num_steps:
            share = max(0.0, (self.total_num_steps - step) / max(1, self.total_num_steps - self.warmup_num_steps))
        return _between(self.of_group("warmup_min_lr", group), self.of_group("warmup_max_lr", group), share)


@dataclass(eq=False, repr=False)
class WarmupCosineLR(_WarmupSchedule):
    """Multiplies each group's rate by a ratio: from warmup_min_ratio up to 1, then along a cosine down to cos_min_ratio.

    The last ratio stays from total_num_steps on.  Before the first step the ratio is warmup_min_ratio, as documented;
    DeepSpeed sets 0 there.
    """

    optimizer: Any
    total_num_steps: Steps
    warmup_min_ratio: PerGroup = 0.0
    warmup_num_steps: Steps = 1000
    cos_min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0001
    warmup_type: Warmup = "log"
    last_batch_iteration: LastStep = -1

    def rate(self, step: int, group: int) -> float:
        low, share = self.of_group("warmup_min_ratio", group), self.warmed_up(step)
        if step >= self.warmup_num_steps:
            done, steps = step - self.warmup_num_steps + 1, self.total_num_steps - self.warmup_num_steps
            low, share = self.cos_min_ratio, (1.0 + cos(pi * min(1.0, done / max(1, steps)))) / 2.0
        return float(self.optimizer.param_groups[group]["initial_lr"]) * _between(low, 1.0, share)


@dataclass(eq=False, repr=False)
class OneCycle(LRSchedule):
    """One cycle of the learning rate up and down again, momentum the other way, then a slow decay (Smith 2018).

    Args:
        decay_lr_rate: after the cycle the rate is cycle_min_lr / (1 + decay_lr_rate * steps / decay_step_size).
        cycle_second_step_size, cycle_second_stair_count: of the way down; None for as on the way up.
        cycle_first_stair_count: stairs on the way up; 0 moves at every step.
        decay_step_size: steps of one unit of decay; 0 for none.
        cycle_momentum: whether beta1 goes from cycle_max_mom down to cycle_min_mom and back.
        decay_mom_rate: after the cycle beta1 is cycle_max_mom * (1 + decay_mom_rate * steps / decay_step_size).

    Momentum is beta1 of groups with `betas`; without them it stays as it is, with a warning.  Differences from DeepSpeed:
    beta2 stays the group's own (there 0.99), and before the first step beta1 is cycle_max_mom (there cycle_min_mom).
    """

    optimizer: Any
    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: Rate = 0.0
    cycle_first_step_size: Steps = 2000
    cycle_second_step_size: StepsOrNone | None = None
    cycle_first_stair_count: StepsOrNone = 0
    cycle_second_stair_count: StepsOrNone | None = None
    decay_step_size: StepsOrNone = 0
    cycle_momentum: bool = True
    cycle_min_mom: Momentum | list[Momentum] = 0.8
    cycle_max_mom: Momentum | list[Momentum] = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: LastStep = -1

    def __post_init__(self) -> None:
        groups = getattr(self.optimizer, "param_groups", ())
        if self.cycle_momentum and not all("betas" in group for group in groups):
            warnings.warn("OneCycle leaves momentum alone: the optimizer's groups have no betas", stacklevel=3)
            self.cycle_momentum = False
        super().__post_init__()

    def rate(self, step: int, group: int) -> float:
        height, decay = self._position(step)
        rate = _between(self.of_group("cycle_min_lr", group), self.of_group("cycle_max_lr", group), height)
        return rate / (1.0 + self.decay_lr_rate * decay)

    def get_mom(self) -> list[Any] | None:
        """Return the betas of each group at the current step; None where momentum stays as it is."""
        return [group["betas"] for group in self.optimizer.param_groups] if self.cycle_momentum else None

    def _position(self, step: int) -> tuple[float, float]:
        """Return the height in the cycle, and the units of decay after it."""
        up, stairs_up = self.cycle_first_step_size, self.cycle_first_stair_count
        down = up if self.cycle_second_step_size is None else self.cycle_second_step_size
        stairs_down = stairs_up if self.cycle_second_stair_count is None else self.cycle_second_stair_count
        if (after := step + 1 - up - down) < 1:
            return cycle_height(step, up, down, stairs_up, stairs_down), 0.0
        return 0.0, after / self.decay_step_size if self.decay_step_size else 0.0

    def _write(self) -> None:
        super()._write()
        height, decay = self._position(self.last_batch_iteration)
        for number, group in enumerate(self.optimizer.param_groups if self.cycle_momentum else ()):
            momentum = _between(self.of_group("cycle_max_mom", number), self.of_group("cycle_min_mom", number), height)
            momentum *= 1.0 + self.decay_mom_rate * decay
            if not 0 <= momentum < 1:
                takes = f"decay_mom_rate={self.decay_mom_rate} takes momentum to {momentum}"
                raise ValueError(f"{takes} at step {self.last_batch_iteration}, out of [0, 1); 0 keeps cycle_max_mom")
            group["betas"] = (momentum, *group["betas"][1:])


@dataclass(eq=False, repr=False)
class LRRangeTest(LRSchedule):
    """A learning rate that only grows, to find the largest one that trains (Smith 2018).

    Args:
        lr_range_test_step_rate: growth in one interval of lr_range_test_step_size steps, in units of the first rate.
        lr_range_test_staircase: grow once every interval instead of at every step.
    """

    optimizer: Any
    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: Steps = 2000
    lr_range_test_step_rate: Rate = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: LastStep = -1

    def rate(self, step: int, group: int) -> float:
        size = self.lr_range_test_step_size
        intervals = (step + 1) // size if self.lr_range_test_staircase else (step + 1) / size
        return self.of_group("lr_range_test_min_lr", group) * (1.0 + self.lr_range_test_step_rate * intervals)


SCHEDULES: dict[str, Callable[..., LRSchedule]] = {
    schedule.__name__: schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
VALID_LR_SCHEDULES = list(SCHEDULES)


def make_lr_scheduler(type: str, params: dict[str, Any], optimizer: Any) -> Any:
    """Build a schedule by name.

    Args:
        type: a key of SCHEDULES, or a class of torch.optim.lr_scheduler.
        params: keyword arguments of its constructor.

    Raises: ValueError: the name or a parameter does not exist.
    """
    of_torch = {name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__ if name != "LRScheduler"}
    known: dict[str, Callable[..., Any]] = SCHEDULES | of_torch
    if type not in known:
        raise unknown_name("scheduler type", type, known)
    check_keywords(type, params, keywords_of(known[type], positional=1))
    return known[type](optimizer, **params)


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


def __getattr__(name: str) -> str:
    """Return a constant of DeepSpeed, such as `WARMUP_LR == "WarmupLR"` or `CYCLE_MIN_LR == "cycle_min_lr"`."""
    if not name.isupper():
        raise AttributeError(f"megazero.deepspeed.lr_schedulers has no {name!r}")
    schedule = name.title().replace("_", "").replace("Lr", "LR")
    types = {"WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear"}
    return schedule if schedule in SCHEDULES else types.get(name, name.lower())
