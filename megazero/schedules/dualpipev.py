"""DualPipeV: a V of two chunks on each rank, in which forwards run beside backwards (DeepSeek-AI 2024, cut in half)."""

from itertools import pairwise

from megazero.schedules.action import Action, Placement, Schedule, v_shape
from megazero.schedules.factory import ScheduleFactory, Words


class DualPipeV(ScheduleFactory):
    """Pairs of a forward on one chunk and a backward on the other; the products of each hide the exchanges of the
    other.

    Rank s of the published order (github.com/deepseek-ai/DualPipe, `dualpipev.py`), for at least 2 pp micro-batches;
    with fewer, actions of missing micro-batches are left out:

        2 (pp - s - 1) x F0             warm-up of chunk 0
               (s + 1) x F0 F1          and of both chunks
          (pp - s - 1) x B1 W1 F1       the backward comes back up the V
    (m - 2 pp + s + 1) x F0&B1 F1&B0    the steady state, all of it pairs
          (pp - s - 1) x B1 F1&B0       the forwards end
               (s + 1) x B1 B0          cool-down; from its second half on weight gradients are deferred,
          (pp - s - 1) x W B0           and fill idle time
               (s + 1) x W              until the end

    If a published backward does not defer its weight gradient, it is B and then W here: the previous rank need not wait
    for W.  In a pair the weight gradient is a third action.
    """

    name = "dualpipev"
    chunks = 2
    has_pairs = True

    def placement(self, pp: int, chunks: int) -> Placement:
        """Return the V: the first and last stage are on rank 0."""
        return v_shape(pp)

    def build(self, pp: int, microbatches: int, chunks: int = 2) -> Schedule:
        ranks, beside = [], set[tuple[int, Action]]()
        for rank in range(pp):
            actions, pairs = _rank_of(rank, pp, max(2 * pp, microbatches))
            for action, following in pairwise(actions):
                if action in pairs and max(action.microbatch, following.microbatch) < microbatches:
                    beside.add((rank, action))
            ranks.append(tuple(action for action in actions if action.microbatch < microbatches))
        return Schedule(self.name, microbatches, self.placement(pp, 2), tuple(ranks), beside=frozenset(beside))


def _rank_of(rank: int, pp: int, microbatches: int) -> tuple[list[Action], set[Action]]:
    """Return the actions of a rank, and the forwards that run beside the backward after them."""
    words, pairs = Words(), set[Action]()
    after = pp - rank - 1  # number of later ranks

    def pair(forward: int, backward: int) -> None:
        words.run(f"F{forward}")
        pairs.add(words.actions[-1])
        words.run(f"B{backward} W{backward}")

    words.run("F0", 2 * after)
    words.run("F0 F1", rank + 1)
    words.run("B1 W1 F1", after)
    for index in range(microbatches - 2 * pp + rank + 1):
        if index == 0 and after == 0:
            words.run("F0 B1 W1")  # the chunk's first backward: the previous rank waits only for F0
        else:
            pair(0, 1)
        pair(1, 0)
    for _ in range(after):
        words.run("B1 W1")
        pair(1, 0)
    last = [1, 0] * (rank + 1)
    for number, chunk in enumerate(last):
        words.run(f"B{chunk}" if number > rank else f"B{chunk} W{chunk}")
    waiting = [*last[rank + 1 :], *[0] * after]  # chunks of the deferred weight gradients, in order
    for chunk in waiting[:after]:
        words.run(f"W{chunk} B0")
    words.run(" ".join(f"W{chunk}" for chunk in waiting[after:]))
    return words.actions, pairs


DUAL_PIPE_V = DualPipeV()
