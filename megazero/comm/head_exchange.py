"""Exchanges of Ulysses (Jacobs et al. 2023, section 3): all heads of a shard of the sequence for some heads of all of it.

                     rank 0's sequence | rank 1's             rank 0's sequence | rank 1's
             rank 0:  all heads        |             rank 0:  its heads         | its heads
             rank 1:                   | all heads   rank 1:  its heads         | its heads

Heads may be exchanged a few at a time, so that attention to the first ones hides the exchange of the others.  `heads`
are indices among a rank's heads after the exchange.  The sequence is dimension 0 in memory: attention's [batch, heads,
seq, size] is a view of [seq, batch, heads, size], before and after.
"""

from torch import Tensor

from megazero.comm.collectives import Pending, all_to_all, wait_all
from megazero.parallel_state import Axis


def start_heads_for_sequence(x: Tensor, axis: Axis, heads: slice) -> tuple[Tensor, Pending]:
    """Start to exchange [batch, heads, seq, size] for some heads of [batch, heads / n, seq * n, size].

    Args:
        x: with any strides; rank i has the i-th shard of the sequence, and gets the i-th group of heads.
        axis: n ranks.
        heads: a slice of a rank's group, with a start and a stop; ignored if the axis has one rank.

    Returns: the result, a view of [seq * n, batch, chosen heads, size], and the wait after which it may be used.
    """
    if axis.size == 1:
        return x, Pending()
    chosen = x.unflatten(1, (axis.size, x.shape[1] // axis.size))[:, :, heads]
    by_rank = chosen.permute(1, 3, 0, 2, 4)  # [n, seq, batch, chosen heads, size]
    whole = x.new_empty(by_rank.shape)
    return whole.flatten(0, 1).permute(1, 2, 0, 3), all_to_all(whole, by_rank, axis)


class SequenceForHeads:
    """Exchanges [batch, heads / n, seq * n, size] back to [batch, heads, seq, size], some heads at a time.

    Args:
        axis: n ranks.
        heads: number of heads of a rank, heads / n.
    """

    def __init__(self, axis: Axis, heads: int) -> None:
        self._axis, self._heads = axis, heads
        self._whole: Tensor | None = None
        self._under_way: list[Pending] = []

    def start(self, x: Tensor, heads: slice) -> None:
        """Start to exchange some heads; all of them if the axis has one rank.

        Args:
            x: [batch, chosen heads, seq * n, size], with any strides.
            heads: the slice of these heads among those of a rank, with a start and a stop.
        """
        ranks = self._axis.size
        if ranks == 1:
            self._whole = x
            return
        by_rank = x.unflatten(2, (ranks, x.shape[2] // ranks)).permute(2, 3, 0, 1, 4)  # [n, seq, batch, chosen, size]
        if self._whole is None:
            self._whole = x.new_empty((*by_rank.shape[1:3], ranks, self._heads, x.shape[3]))
        self._under_way.append(all_to_all(self._whole[:, :, :, heads].movedim(2, 0), by_rank, self._axis))

    def result(self) -> Tensor:
        """Wait for all heads and return them as a view of [seq, batch, heads, size].  Raises: LostPeerError."""
        assert self._whole is not None, "no heads have been exchanged"
        wait_all(self._under_way)
        return self._whole if self._axis.size == 1 else self._whole.flatten(2, 3).permute(1, 2, 0, 3)
