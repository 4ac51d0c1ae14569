"""Which memory a tensor lies in, by a number that tensors without memory have too: addresses are all 0 there."""

from __future__ import annotations

from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """A number that all tensors in the same memory share, and no other that lives at the same time has."""
    return int(tensor.untyped_storage()._cdata)


def address_of(tensor: Tensor) -> tuple[int, int]:
    """Its memory, and the byte at which it begins there."""
    return storage_of(tensor), int(tensor.storage_offset()) * tensor.element_size()
