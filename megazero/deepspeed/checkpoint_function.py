"""`megazero.checkpoint`: a call of a script's function that is recomputed in the backward; see `layers/recompute.py`.

A script's function depends on more than its arguments: on torch's random numbers and on autocast.  The second run finds
both as the first did.  States of generators are kept only where the function drew from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from megazero.layers.recompute import Recomputation


@torch.compiler.disable  # type: ignore[untyped-decorator]
def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, and save only the arguments for its backward.

    The function runs once more in the backward, so it must do the same again, with random numbers of torch's default
    generators; what it does beside its result, such as the running averages of a batch norm, it does twice.  Calls may be
    nested, and modules that ZeRO-3 gathers may be called.

    Args:
        function: a module, or any other callable.
        args, kwargs: nested in tuples, lists and dicts; tensors in other objects are saved as well, but a change of
            theirs before the backward is not detected.
        use_reentrant: only False, as for torch.utils.checkpoint.

    Raises:
        ValueError: `use_reentrant` is true.
        RuntimeError: in the backward, the function did not do the same again, or an argument was changed in place; in the
            function, it calls `backward`; `torch.autograd.grad` is all right.
    """
    if use_reentrant:
        raise ValueError(
            "megazero.checkpoint runs no backward within a backward, so it takes no use_reentrant=True; leave it out"
        )
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return CheckpointedCall(function).run(args, kwargs)


class CheckpointedCall(Recomputation):
    """One call of a script's function, to be run with its arguments as a tuple and its keywords as a dict."""

    def __init__(self, function: Callable[..., Any]) -> None:
        def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return function(*args, **kwargs)

        call.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
        self._autocast = _autocast_states()
        super().__init__(call, draws=True)

    def run_again(self) -> None:
        with ExitStack() as contexts:
            for (device, enabled, dtype), now in zip(self._autocast, _autocast_states(), strict=True):
                if (device, enabled, dtype) != now:
                    contexts.enter_context(torch.autocast(device, dtype, enabled))
            super().run_again()


def _autocast_states() -> list[tuple[str, bool, torch.dtype]]:
    """(device, whether autocast is on, its format)."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
