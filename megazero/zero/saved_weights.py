"""What autograd saves in the forward of a unit whose weights will be overwritten.

    forward     op(x, w)        saves x unchanged, and w as a reference to its bucket
    backward    op needs w      the bucket is gathered again if necessary: to the same address, so w has its values

What a backward with `create_graph` computes is saved outside any unit's forward, so it saves copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megazero.layers.saved_tensors import SavedTensorHooks
from megazero.zero.bucket import Bucket

if TYPE_CHECKING:
    from megazero.zero.gather import Unit


@dataclass(frozen=True)
class SavedWeight:
    """A weight, or a view of it, in its bucket's buffer.  Two are equal if they show the same elements in the same way."""

    bucket: Bucket
    version: int  # every change of the weights increases it
    shape: torch.Size
    offset: int
    tensor: Tensor = field(compare=False)


class SavingForward(SavedTensorHooks):
    """The hooks for all tensors that autograd saves in one forward of a unit."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.unit = unit

    def pack(self, tensor: Tensor) -> Any:
        weight = self.pack_weight(tensor)
        if weight is None:
            return self.beneath.pack(tensor)
        self.beneath.note_weight(weight)
        return weight

    def pack_weight(self, tensor: Tensor) -> SavedWeight | None:
        bucket = self.unit.buffers.bucket_at(tensor)
        if bucket is None:
            return None
        return SavedWeight(bucket, tensor._version, tensor.shape, int(tensor.storage_offset()), tensor.detach())

    def unpack(self, saved: Any) -> Tensor:
        return self._weight_of(saved) if isinstance(saved, SavedWeight) else self.beneath.unpack(saved)

    @contextmanager
    def again(self, hooks: SavedTensorHooks) -> Iterator[None]:
        with self.beneath.again(hooks), self.unit.shown(), type(self)(self.unit):
            yield

    def _weight_of(self, saved: SavedWeight) -> Tensor:
        """Return the saved weight, gathered again if necessary.  Raises: RuntimeError: it has changed since."""
        bucket, buffers = saved.bucket, self.unit.buffers
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                f"weights in {bucket.layout.name} have changed since the forward that this backward belongs to; run the "
                "forward again"
            )
        if not buffers.holds(bucket):
            self.unit.pre_backward()
            buffers.unshard(bucket)  # it belongs to a unit around this one
        buffers.wait(bucket)
        return saved.tensor.clone() if torch.is_grad_enabled() else saved.tensor  # autograd may save it once more
