"""Which sizes of matrices can be multiplied in fp8; without torch, so that a run file is refused before anything starts.

a rank's matrix     [out, in]       kernels need multiples of 16 in both
blockwise, tp > 1   [128 | 128 | ]  tp cuts q, k, v, gate and up between blocks, each on its own
"""

from collections.abc import Sequence

BLOCK = 128
MULTIPLE = 16


def wrong_size(sections: Sequence[int], other: int, tp: int, scaling: str) -> tuple[int, int] | None:
    """The first size of a matrix that cannot be, and of what it must be a multiple.

    Args:
        sections: sizes in the dimension that tp cuts, of all ranks together; one for each matrix that is stored in this one.
        other: size in the other dimension.
    """
    between_blocks = scaling == "blockwise" and tp > 1
    cut = [(size, BLOCK * tp) for size in sections] if between_blocks else [(sum(sections), MULTIPLE * tp)]
    return next(((size, step) for size, step in [*cut, (other, MULTIPLE)] if size % step), None)
