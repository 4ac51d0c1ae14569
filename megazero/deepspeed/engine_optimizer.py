"""The optimizer as a script sees it: its groups and its state, stepped by the engine."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class EngineOptimizer(torch.optim.Optimizer):
    """The optimizer that steps the flat shards, for learning-rate schedules and for reading.

    Args:
        inner: the torch optimizer; groups and state are shared with it, not copied.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.__dict__.update(
            {key: value for key, value in vars(inner).items() if key not in ("step", "profile_hook_step")}
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Refused: the engine reduces, unscales and clips before it steps.  Raises: RuntimeError."""
        raise RuntimeError(
            "call engine.step(): it reduces, unscales and clips the gradients before the optimizer steps"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears gradients when a step ends."""

    def state_dict(self) -> NoReturn:
        """Refused: it would be this rank's shards of flat buckets.  Raises: RuntimeError."""
        raise RuntimeError(
            "the optimizer's state is cut over the ranks; engine.save_checkpoint(dir) writes it whole, with the weights"
        )

    def load_state_dict(self, state_dict: Any) -> NoReturn:  # noqa: ARG002
        """Refused: it would replace the state that the engine steps.  Raises: RuntimeError."""
        raise RuntimeError(
            "the optimizer's state is cut over the ranks; engine.load_checkpoint(dir) reads it, on any number of ranks"
        )

    def add_param_group(self, param_group: Any) -> NoReturn:  # noqa: ARG002
        """Refused: no bucket would have the parameters.  Raises: RuntimeError."""
        raise RuntimeError(
            "the parameters are in buckets already; give every group to megazero.initialize (model_parameters=, or an "
            "optimizer that has it)"
        )

    def count_step(self) -> None:
        """Record that the engine has stepped; torch's schedules check it."""
        self._opt_called = True

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.inner!r})"
