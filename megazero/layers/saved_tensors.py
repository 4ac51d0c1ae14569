"""What autograd saves for the backward, on its way there and back.

    op saves x  ->  pack   of the innermost hooks  ->  ... of those beneath  ->  kept
    op needs x  <-  unpack of the same hooks       <-                        <-

Autograd knows only the innermost pair of hooks.  Hooks of this package know those beneath them and pass on what is not
theirs, so a recomputation (`recompute.py`) runs inside a ZeRO-3 unit, which keeps no weights (`zero/saved_weights.py`),
inside whatever a script has put around both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedTensorHooks:
    """A pair of hooks, from `enter` to `leave`; beneath them lie those that were innermost when this was made."""

    def __init__(self) -> None:
        self.beneath = innermost()
        self._hooks: Any = None

    @abstractmethod
    def pack(self, tensor: Tensor) -> Any:
        """What to save for a tensor."""

    @abstractmethod
    def unpack(self, saved: Any) -> Tensor:
        """The tensor of what was saved."""

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """Let what is saved from now on pass through these hooks."""
        self._hooks = saved_tensors_hooks(self.pack, self.unpack)
        self._hooks.__enter__()

    def leave(self) -> None:
        """The last that entered leaves first."""
        self._hooks.__exit__()
        self._hooks = None  # they refer to this object

    def pack_weight(self, tensor: Tensor) -> Any | None:
        """What to save for a weight that will not stay where it lies; None for every other tensor."""
        return self.beneath.pack_weight(tensor)

    def note_weight(self, weight: Any) -> None:
        """A weight was saved that hooks above keep: what a second run has to save again."""
        self.beneath.note_weight(weight)

    def note_leaf(self, leaf: Tensor) -> None:
        """A leaf whose gradient adds up was saved, by these hooks or by some above."""
        self.beneath.note_leaf(leaf)

    def drop(self, source: Any, outputs: Sequence[Tensor]) -> None:
        """Save no copy of these results, which `source` can make again."""

    def shard(self, tensor: Tensor, axis: Any) -> None:
        """Save this rank's shard of a tensor that is equal on all ranks of an axis, where these hooks can."""

    @contextmanager
    def again(self, hooks: SavedTensorHooks) -> Iterator[None]:
        """A context that runs a part of the same forward once more; what it saves passes through `hooks`."""
        with self.beneath.again(hooks):
            yield


class _Outermost(SavedTensorHooks):
    """Beneath all hooks of this package: those of a script, or none."""

    def __init__(self, script: Any) -> None:
        self._script = script
        self._hooks = None

    def pack(self, tensor: Tensor) -> Any:
        if self._script is not None:
            return self._script[0](tensor)
        return keep(tensor)

    def unpack(self, saved: Any) -> Tensor:
        if self._script is not None:
            unpacked: Tensor = self._script[1](saved)
            return unpacked
        return kept_tensor(saved)

    def pack_weight(self, tensor: Tensor) -> None:  # noqa: ARG002
        return None

    def note_weight(self, weight: Any) -> None: ...

    def note_leaf(self, leaf: Tensor) -> None: ...

    @contextmanager
    def again(self, hooks: SavedTensorHooks) -> Iterator[None]:
        with hooks:
            yield


def innermost() -> SavedTensorHooks:
    """The hooks that autograd calls now."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    owner = getattr(found[0], "__self__", None) if found else None
    return owner if isinstance(owner, SavedTensorHooks) else _Outermost(found)


def forget_failed_backward() -> None:
    """Let go of the graph of a backward on the host that has raised, and so of what it saved.

    torch leaves the operations that were to run next in a queue of the thread; its next backward there drops them.
    """
    torch.zeros((), device="cpu", requires_grad=True).backward()


def keep(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor as it is now."""
    return tensor.detach(), tensor._version  # detached: a result that its own node holds would never be freed


def kept_tensor(kept: tuple[Tensor, int]) -> Tensor:
    """The tensor of `keep`.  Raises: RuntimeError: it was changed since."""
    tensor, version = kept
    if tensor._version != version:  # autograd itself does not check what passes through hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
    return tensor
