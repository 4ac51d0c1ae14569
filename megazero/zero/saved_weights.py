"""What autograd saves in the forward of a unit whose weights will make room for others.

    forward     op(x, w)        saves x as it is, and of w only its bucket and its place there
    backward    op needs w      the bucket is gathered again, unless it is there, and w is a view of it

A view of a gather buffer would not do: it does not say whose weights it will show.  What a backward computes with
`create_graph` is saved outside of any unit's forward, so it gets copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megazero.layers.saved_tensors import SavedTensorHooks
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


class SavingForward(SavedTensorHooks):
    """One forward of a unit: the hooks through which all that autograd saves passes.

    Args:
        gatherer: of the unit's buckets.
        owner: the bucket of each parameter, by its identity.
        shares: another unit may take a buffer of this one.
        bring: gathers the unit for its backward, and what probably follows it.
        shown: a context in which the unit's modules have its weights.
    """

    def __init__(
        self,
        gatherer: BucketGatherer,
        owner: Mapping[int, Bucket],
        shares: bool,
        bring: Callable[[], object],
        shown: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self._unit = gatherer, owner, shares, bring, shown
        self._gatherer, self._owner, self._shares, self._bring, self._shown = self._unit

    def pack(self, tensor: Tensor) -> Any:
        weight = self.pack_weight(tensor)
        if weight is None:
            return self.beneath.pack(tensor)
        self.beneath.note_weight(weight)
        return weight

    def pack_weight(self, tensor: Tensor) -> _SavedWeight | None:
        bucket = self._gatherer.bucket_at(tensor) if self._shares else None
        return None if bucket is None else self._identify(tensor, bucket)

    def unpack(self, saved: Any) -> Tensor:
        return self._weight_of(saved) if isinstance(saved, _SavedWeight) else self.beneath.unpack(saved)

    @contextmanager
    def again(self, hooks: SavedTensorHooks) -> Iterator[None]:
        with self.beneath.again(hooks), self._shown(), SavingForward(*self._unit):
            yield

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
