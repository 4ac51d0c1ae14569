"""Which sizes of matrices can be multiplied in fp8; without torch, so that a run file is refused before anything starts.

a rank's matrix     [out, in]       kernels need multiples of 16 in both
blockwise, tp > 1   [128 | 128 | ]  tp cuts q, k, v, gate and up between blocks, each on its own
"""

from collections.abc import Sequence

BLOCK = 128
MULTIPLE = 16


def wrong_size(sizes: Sequence[int], other: int, tp: int, scaling: str) -> tuple[int, int] | None:
    """Return the first unsupported size of a matrix, and the number that it must be a multiple of.

    Args:
        sizes: sizes along the dimension that tp splits, over all ranks; one for each matrix that is fused into this
            one.
        other: size of the other dimension.
    """
    between_blocks = scaling == "blockwise" and tp > 1
    cut = [(size, BLOCK * tp) for size in sizes] if between_blocks else [(sum(sizes), MULTIPLE * tp)]
    return next(((size, step) for size, step in [*cut, (other, MULTIPLE)] if size % step), None)
