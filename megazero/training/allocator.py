"""The environment of torch's CUDA allocator."""

from __future__ import annotations

from collections.abc import MutableMapping

_SETTINGS = "PYTORCH_ALLOC_CONF"
_OLDER_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # torch reads them, too


def prefer_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Let the allocator grow its segments instead of adding new ones, unless the user has chosen settings of any kind.

    Buckets, activations and compiled kernels ask for blocks of many sizes; segments of fixed size would keep gaps between
    them that nothing fits into.

    Args:
        environment: of a process before it has touched a CUDA device, for torch reads the settings then; or of one that
            starts ranks, which inherit it.
    """
    if not any(name in environment for name in (_SETTINGS, *_OLDER_NAMES)):
        environment[_SETTINGS] = "expandable_segments:True"
