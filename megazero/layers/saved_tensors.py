"""Hooks on the tensors that autograd saves for the backward.

    op saves x  ->  pack   of the innermost hooks  ->  ... of the hooks below  ->  stored
    op needs x  <-  unpack of the same hooks       <-                          <-

Autograd calls only the innermost pair of hooks.  Hooks of this package know the pair below them and pass on what they
do not handle.  So a recomputation (`recompute.py`) works inside a ZeRO-3 unit, which stores references to weights
(`zero/gather.py`), inside any hooks that a script has put around both.
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
    """A pair of autograd's saved-tensor hooks, active from `enter` to `leave`, on top of the hooks that were innermost
    when it was created.
    """

    def __init__(self) -> None:
        self.beneath = innermost()
        self._hooks: Any = None

    @abstractmethod
    def pack(self, tensor: Tensor) -> Any:
        """Return what to save for a tensor."""

    @abstractmethod
    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor that was saved."""

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """Activate these hooks: every tensor that autograd saves from now on passes through them."""
        self._hooks = saved_tensors_hooks(self.pack, self.unpack)
        self._hooks.__enter__()

    def leave(self) -> None:
        """Deactivate these hooks.  The pair that was entered last must leave first."""
        self._hooks.__exit__()
        self._hooks = None  # they refer to this object

    def pack_weight(self, tensor: Tensor) -> Any | None:
        """Return what to save for a weight whose memory will be overwritten; None for any other tensor."""
        return self.beneath.pack_weight(tensor)

    def note_weight(self, weight: Any) -> None:
        """Record that hooks above saved this weight, so that a second run must save it again."""
        self.beneath.note_weight(weight)

    def note_leaf(self, leaf: Tensor) -> None:
        """Record that a leaf with an accumulated gradient was saved, by these hooks or by hooks above."""
        self.beneath.note_leaf(leaf)

    def drop(self, source: Any, outputs: Sequence[Tensor]) -> None:
        """Do not save these results, because `source` can recompute them."""

    def shard(self, tensor: Tensor, axis: Any) -> None:
        """Save only this rank's shard of a tensor that is equal on all ranks of an axis, if these hooks can."""

    @contextmanager
    def again(self, hooks: SavedTensorHooks) -> Iterator[None]:
        """Return a context in which a part of the same forward runs again; tensors that it saves pass through `hooks`."""
        with self.beneath.again(hooks):
            yield


class _Outermost(SavedTensorHooks):
    """The bottom of the stack of this package's hooks: the hooks of a script, or none."""

    def __init__(self, script: Any) -> None:
        self._script = script
        self._hooks = None

    def pack(self, tensor: Tensor) -> Any:
        if self._script is not None:
            return self._script[0](tensor)
        return with_version(tensor)

    def unpack(self, saved: Any) -> Tensor:
        if self._script is not None:
            unpacked: Tensor = self._script[1](saved)
            return unpacked
        return checked_tensor(saved)

    def pack_weight(self, tensor: Tensor) -> None:  # noqa: ARG002
        return None

    def note_weight(self, weight: Any) -> None: ...

    def note_leaf(self, leaf: Tensor) -> None: ...

    @contextmanager
    def again(self, hooks: SavedTensorHooks) -> Iterator[None]:
        with hooks:
            yield


def innermost() -> SavedTensorHooks:
    """Return the hooks that autograd calls now."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    owner = getattr(found[0], "__self__", None) if found else None
    return owner if isinstance(owner, SavedTensorHooks) else _Outermost(found)


def refuse_second_derivative(what: str) -> None:
    """Raise if autograd records the backward pass: it would treat a backward that is written by hand as a constant.

    Raises: RuntimeError.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} has no second derivative: do not use create_graph with it")


def forget_failed_backward() -> None:
    """Free the graph of a failed backward on the host, and with it all tensors that the graph saved.

    torch leaves the operations that were to run next in a queue of the thread; the thread's next backward drops them.
    """
    torch.zeros((), device="cpu", requires_grad=True).backward()


def with_version(tensor: Tensor) -> tuple[Tensor, int]:
    """Save a tensor together with its version."""
    return tensor.detach(), tensor._version  # detached: a result that its own node holds would never be freed


def checked_tensor(saved: tuple[Tensor, int]) -> Tensor:
    """Return the tensor that `with_version` saved.  Raises: RuntimeError: it was modified in between."""
    tensor, version = saved
    if tensor._version != version:  # autograd does not check tensors that pass through hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
    return tensor
