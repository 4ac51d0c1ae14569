"""What autograd saves in the forward of a unit whose weights will make room for others.

    forward     op(x, w)        saves x as it is, and of w only its bucket and its place there
    backward    op needs w      the bucket is gathered again, unless it is there, and w is a view of it

A view of a gather buffer would not do: it does not say whose weights it will show.  What a backward computes with
`create_graph` is saved outside of any unit's forward, so it gets copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megazero.zero.bucket import Bucket

if TYPE_CHECKING:
    from megazero.zero.gather import BucketGatherer


class _SavedWeight(NamedTuple):
    bucket: Bucket
    generation: int  # of the weights
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    conjugated: bool  # what torch notes beside the numbers in memory
    negated: bool


class SavingForward:
    """One forward of a unit, from when it is made until `leave`: the hooks through which all that autograd saves passes.

    Hooks of whoever runs the unit, such as a recomputation, get what is no weight.

    Args:
        gatherer: of the unit's buckets.
        owner: the bucket of each parameter, by its identity.
        bring: gathers the unit for its backward, and what probably follows it.
    """

    def __init__(self, gatherer: BucketGatherer, owner: Mapping[int, Bucket], bring: Callable[[], object]) -> None:
        self._gatherer, self._owner, self._bring = gatherer, owner, bring
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        within = outer and getattr(outer[0], "__self__", None)
        self._outer: Any = within._outer if isinstance(within, SavingForward) else outer
        self._hooks: Any = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def leave(self) -> None:
        """The forward has ended."""
        self._hooks.__exit__()
        self._hooks = None  # they refer to this object

    def _pack(self, tensor: Tensor) -> Any:
        bucket = self._gatherer.bucket_at(tensor)
        if bucket is not None:
            return self._identify(tensor, bucket)
        if self._outer is not None:
            return self._outer[0](tensor)
        return tensor.detach(), tensor._version  # detached: a result that its own node holds would never be freed

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _SavedWeight):
            return self._weight_of(saved)
        if self._outer is not None:
            unpacked: Tensor = self._outer[1](saved)
            return unpacked
        tensor, version = saved
        if tensor._version != version:  # autograd itself does not check what passes through hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
                f"of shape {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
            )
        return tensor

    def _identify(self, tensor: Tensor, bucket: Bucket) -> _SavedWeight:
        """What to save for a tensor that lies where the weights of `bucket` are.

        Raises: RuntimeError: it was made in the forward of another unit, whose weights are no longer there.
        """
        owner = self._owner.get(id(tensor if tensor._base is None else tensor._base), bucket)
        if owner is not bucket:
            raise RuntimeError(
                f"a view of weights in {owner.layout.name} is used where their memory holds {bucket.layout.name}: under "
                "ZeRO stage 3 a module's weights are there only within its forward; keep a copy (weight.clone()) instead"
            )
        offset = int(tensor.storage_offset())
        lies = tensor.size(), tensor.stride(), offset
        return _SavedWeight(
            bucket, self._gatherer.generation, tensor.dtype, *lies, conjugated=tensor.is_conj(), negated=tensor.is_neg()
        )

    def _weight_of(self, saved: _SavedWeight) -> Tensor:
        """The weights that were saved, gathered again if necessary.  Raises: RuntimeError: they have changed."""
        bucket = saved.bucket
        if saved.generation != self._gatherer.generation:
            raise RuntimeError(
                f"weights in {bucket.layout.name} have changed since the forward that this backward belongs to; run the "
                "forward again"
            )
        if not self._gatherer.is_unsharded(bucket):
            self._bring()
            self._gatherer.unshard(bucket)  # of a unit around this one
        self._gatherer.wait_for_unshard(bucket)
        weight = bucket.weights.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
        weight = torch._conj(weight) if saved.conjugated else weight
        weight = torch._neg_view(weight) if saved.negated else weight
        return weight.clone() if torch.is_grad_enabled() else weight  # autograd saves it once more if it may
