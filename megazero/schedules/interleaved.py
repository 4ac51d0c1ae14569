"""Interleaved 1F1B (Narayanan et al. 2021, section 2.2)."""

from megazero.schedules.action import Action, Op, Schedule
from megazero.schedules.factory import ScheduleFactory, alternate
from megazero.settings import nearest_multiples


class Interleaved(ScheduleFactory):
    """1F1B over several model chunks per rank, in groups of pp micro-batches.

    Rank s warms up with 2 (pp - s - 1) + (chunks - 1) pp forwards.
    """

    name = "interleaved"
    chunks = None

    def microbatch_multiple(self, pp: int) -> int:
        """Return pp: with a partial group, ranks would wait for each other."""
        return pp

    def build(self, pp: int, microbatches: int, chunks: int) -> Schedule:
        if microbatches % pp:
            nearest = " and ".join(map(str, nearest_multiples(microbatches, pp)))
            hint = f"nearest: {nearest}"
            raise ValueError(f"it needs micro-batches in multiples of pp={pp}, got {microbatches}; {hint}")

        def order(op: Op, order_of_chunks: list[int]) -> list[Action]:
            groups = range(0, microbatches, pp)
            return [Action(op, first + i, chunk) for first in groups for chunk in order_of_chunks for i in range(pp)]

        forwards = order(Op.FORWARD, list(range(chunks)))
        backwards = order(Op.BACKWARD, list(reversed(range(chunks))))
        first = (chunks - 1) * pp + self.has_pairs
        warmups = [min(2 * (pp - rank - 1) + first, len(forwards)) for rank in range(pp)]
        ranks = tuple(alternate(forwards, backwards, warmup) for warmup in warmups)
        paired = [(rank, action) for rank in range(pp) for action in forwards[warmups[rank] :] if self.has_pairs]
        return Schedule(self.name, microbatches, self.placement(pp, chunks), ranks, beside=frozenset(paired))


class InterleavedPairs(Interleaved):
    """Interleaved 1F1B with one more forward in the warm-up, so that each later one runs beside the backward after it.

    On the last rank, that backward would otherwise need the result of the forward before it.
    Source: Megatron-Core, `overlap_moe_expert_parallel_comm`.
    """

    name = "interleaved-pairs"
    has_pairs = True


INTERLEAVED, INTERLEAVED_PAIRS = Interleaved(), InterleavedPairs()
