"""The optimizer as a script sees it: its groups and its state, stepped by the engine."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


def _refuses(text: str) -> Any:
    """A method that cannot be called.  Raises: RuntimeError."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(text)

    return refuse


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

    step = _refuses("call engine.step(): it reduces, unscales and clips the gradients before the optimizer steps")
    state_dict = _refuses(
        "the optimizer's state is cut over the ranks; engine.save_checkpoint(dir) writes it whole, with the weights"
    )
    load_state_dict = _refuses(
        "the optimizer's state is cut over the ranks; engine.load_checkpoint(dir) reads it, on any number of ranks"
    )
    add_param_group = _refuses(
        "the parameters are in buckets already; give every group to megazero.initialize (model_parameters=, or an "
        "optimizer that has it)"
    )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears gradients when a step ends."""

    def count_step(self) -> None:
        """Record that the engine has stepped; torch's schedules check it."""
        self._opt_called = True

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.inner!r})"
