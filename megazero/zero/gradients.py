"""From gradients of micro-batches to the reduced gradient of the step, bucket by bucket, while the backward runs.

    backward of one micro-batch      accumulate(w1) accumulate(w0)  -> every slot has come: the round is complete
    stages 0, 1                      rounds add up in the whole fp32 buffer; the last one starts the reduction
    stages 2, 3                      each round starts a reduce-scatter; the shards add up; the buffer returns to a pool
                                     (or the whole step adds up in the buffer, and one reduce-scatter follows)

    finish: wait -> sum partial gradients over tp -> sum tied embeddings over first and last stage

Volume per step, in parameters Ψ and rounds G: stage 0 all-reduce 2Ψ, stage 1 reduce-scatter Ψ, stages 2 and 3 ΨG or Ψ
(Rajbhandari et al. 2020, section 7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megazero.comm.collectives import Pending, all_reduce, reduce_scatter
from megazero.layers.linear import WeightGradients
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket, intersect

_REDUCTIONS_IN_FLIGHT = 2  # more would hide no more of the network and hold more buffers
_NORM_BLOCK = 256  # as fast as longer blocks here, and 30 times closer


class _Rounds:
    """What has come for one bucket in this step."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.full = bucket.full_gradient
        self.reset()

    def reset(self) -> None:
        count = len(self.bucket.layout.slots)
        self.contributions = [0] * count
        self.untouched = [True] * count  # since the last reduction
        self.complete_rounds = 0
        self.missing = count  # slots that have not come in the current round
        self.reductions = 0

    def count(self, slot: int, expected: int) -> bool:
        """Note a contribution; True when it completes a round."""
        if self.contributions[slot] == expected:
            name = self.bucket.layout.slots[slot].info.name
            raise RuntimeError(
                f"gradient of {name} came more than {expected} times in a step of {expected} micro-batches"
            )
        self.contributions[slot] += 1
        if self.contributions[slot] != self.complete_rounds + 1:
            return False
        self.missing -= 1
        if self.missing:
            return False
        self.complete_rounds += 1
        self.missing = sum(n == self.complete_rounds for n in self.contributions)
        return True


class _Reduction:
    """One reduction under way, what its result is added to, and the buffers that it keeps busy."""

    def __init__(
        self, pending: Pending, target: Tensor | None = None, result: Tensor | None = None, busy: Sequence[Tensor] = ()
    ) -> None:
        self.pending, self.target, self.result, self.busy = pending, target, result, busy

    def finish(self) -> None:
        self.pending.wait()
        if self.target is not None and self.result is not None:
            self.target.add_(self.result)


class GradientReducer:
    """Accumulates gradients into buckets and reduces them over dp as soon as they are complete.

    Args:
        buckets: this rank's buckets.
        zero_stage: 0 ... 3.
        every_micro_batch: stages 2 and 3 reduce after each micro-batch; otherwise once per step.
        dp, tp, embedding: axes of the reduction, of partial gradients, and of tied embeddings.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        zero_stage: int,
        dp: Axis,
        tp: Axis,
        embedding: Axis,
        *,
        every_micro_batch: bool = True,
    ) -> None:
        self.buckets = buckets
        self._dp, self._tp, self._embedding = dp, tp, embedding
        self._all_reduces = zero_stage == 0
        self._every_round = every_micro_batch
        self._rounds = [_Rounds(bucket) for bucket in buckets]
        self._at = {
            slot.info.name: (rounds, index)
            for rounds in self._rounds
            for index, slot in enumerate(rounds.bucket.layout.slots)
        }
        self._last_round = 1
        self._in_flight: deque[_Reduction] = deque()
        self._free: list[Tensor] = []
        self._lendable = max(bucket.layout.padded_numel for bucket in buckets)

    def attach(self, parameters: Mapping[str, nn.Parameter], waiting: Mapping[str, WeightGradients]) -> None:
        """Take every gradient that autograd computes for these parameters.

        Args:
            parameters: by qualified name.
            waiting: by the same names, where the weight gradients of the parameter's chunk wait when the schedule splits
                backwards.  Vectors wait with them: alone they would keep every bucket of the chunk open until then.
        """
        for name, parameter in parameters.items():
            waits = waiting.get(name) if parameter.dim() == 1 else None
            parameter.register_post_accumulate_grad_hook(partial(self._take, name, waits))

    def _take(self, name: str, waits: WeightGradients | None, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if waits is not None and waits.deferring:
            waits.keep(parameter, gradient)
        else:
            self.accumulate(name, gradient)

    def begin_step(self, micro_batches: int) -> None:
        """Forget the last step.  Each parameter is expected once per micro-batch."""
        self._drain(0)
        for rounds in self._rounds:
            if not rounds.bucket.keeps_gradients and rounds.full is not None:
                self._free.append(rounds.full)
                rounds.full = None
            rounds.reset()
        self._last_round = micro_batches

    def accumulate(self, name: str, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter.

        Args:
            name: qualified name of the parameter.
            gradient: in the parameter's shape and dtype; may be reused by the caller afterwards.
        """
        rounds, index = self._at[name]
        complete = rounds.count(index, self._last_round)
        slot = rounds.bucket.layout.slots[index]
        if rounds.full is None:
            rounds.full = self._lend()
        place = rounds.full[slot.start : slot.stop].view(slot.info.shape)
        if rounds.untouched[index]:
            place.copy_(gradient)
            rounds.untouched[index] = False
        else:
            place.add_(gradient)
        reduces_now = self._every_round and not rounds.bucket.keeps_gradients
        if complete and (reduces_now or rounds.complete_rounds == self._last_round):
            self._reduce(rounds)

    def finish(self) -> None:
        """Make `bucket.gradient` of every bucket the whole step's, including parameters that never came."""
        for rounds in self._rounds:
            if rounds.reductions == 0 or not all(rounds.untouched):
                self._reduce(rounds)
        self._drain(0)
        self._sum_partial_over_tp()
        self._sum_tied()

    def _reduce(self, rounds: _Rounds) -> None:
        bucket = rounds.bucket
        if rounds.full is None:
            rounds.full = self._lend()
        full = rounds.full[: bucket.layout.padded_numel]
        for slot, untouched in zip(bucket.layout.slots, rounds.untouched, strict=True):
            if untouched:
                full[slot.start : slot.stop].zero_()
        full[bucket.layout.numel :].zero_()
        rounds.untouched = [True] * len(rounds.untouched)
        first = rounds.reductions == 0
        rounds.reductions += 1
        self._drain(_REDUCTIONS_IN_FLIGHT - 1)
        self._in_flight.append(self._start(rounds, full, first))

    def _start(self, rounds: _Rounds, full: Tensor, first: bool) -> _Reduction:
        bucket = rounds.bucket
        if self._all_reduces or self._dp.size == 1:
            return _Reduction(all_reduce(full, self._dp))
        scratch = self._lend()
        busy = [scratch]
        if not bucket.keeps_gradients and (lent := rounds.full) is not None:
            busy.append(lent)
            rounds.full = None
        result = bucket.gradient if first else scratch[: bucket.gradient.numel()]
        pending = reduce_scatter(result, full, self._dp, scratch)
        return _Reduction(pending, None if first else bucket.gradient, result, busy)

    def _lend(self) -> Tensor:
        """A buffer as large as the largest bucket, for gradients of one round or for what arrives from other ranks."""
        return self._free.pop() if self._free else torch.empty(self._lendable, device=self.buckets[0].master.device)

    def _drain(self, leave: int) -> None:
        """Finish reductions, oldest first, until `leave` are under way."""
        while len(self._in_flight) > leave:
            reduction = self._in_flight.popleft()
            reduction.finish()
            self._free.extend(reduction.busy)

    def _sum_tied(self) -> None:
        """Sum the gradients of both copies of a tied embedding, here or on the first and the last rank of the pipeline."""
        tied = [bucket.gradient for bucket in self.buckets if bucket.layout.tied]
        if len(tied) == 2:
            tied[0].add_(tied[1])
            tied[1].copy_(tied[0])
        elif tied:
            all_reduce(tied[0], self._embedding).wait()

    def _sum_partial_over_tp(self) -> None:
        parts = [
            bucket.owned_part(bucket.gradient, run)
            for bucket in self.buckets
            for partial, whole in bucket.layout.runs(lambda spec: spec.sum_over_tp)
            if partial and (run := intersect(whole, bucket.owned)) is not None
        ]
        if not parts or self._tp.size == 1:
            return
        flat = torch.cat(parts)
        all_reduce(flat, self._tp).wait()
        for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed)

    def square_sum(self) -> Tensor:
        """fp64 scalar: this rank's share of the squared gradient norm.

        Over all ranks every logical element is counted once: each dp rank its shard, parameters that every TP rank holds on
        the first of them, the first copy of a tied embedding.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.buckets[0].master.device)
        for bucket in self.buckets:
            if bucket.is_second_copy:
                continue
            for replicated, whole in bucket.layout.runs(lambda spec: spec.split is None):
                run = intersect(whole, bucket.counted)
                if run is not None and not (replicated and self._tp.index > 0):
                    total += square_sum(bucket.owned_part(bucket.gradient, run))
        return total

    def working_bytes(self) -> int:
        """Bytes of the bucket-size buffers through which gradients pass on their way to the shards."""
        filling = [r.full for r in self._rounds if r.full is not None and not r.bucket.keeps_gradients]
        busy = [buffer for reduction in self._in_flight for buffer in reduction.busy]
        return sum(buffer.nbytes for buffer in [*self._free, *filling, *busy])


def square_sum(flat: Tensor) -> Tensor:
    """fp64 sum of squares of a flat fp32 tensor, accumulated in blocks: one long fp32 sum would lose digits."""
    blocks = flat[: flat.numel() // _NORM_BLOCK * _NORM_BLOCK].view(-1, _NORM_BLOCK)
    rest = flat[blocks.numel() :].double().square().sum()
    return torch.linalg.vector_norm(blocks, dim=1).double().square().sum() + rest
