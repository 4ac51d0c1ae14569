"""How the gradients of one bucket add up within a step: which have come, and where they lie.

slots     w0    w1    b1                    a round is one micro-batch
counts     2     1     1                    round 1 is complete, of round 2 two gradients are missing
memory   [ sum | sum | sum |pad]            the first gradient overwrites, the next ones are added
"""

from __future__ import annotations

from torch import Tensor

from megazero.zero.bucket import Bucket
from megazero.zero.buffer_pool import BufferPool


class BucketGradients:
    """The gradients of one bucket in this step, until they are reduced.

    Args:
        bucket: its own `full_gradient` is used where it keeps one; otherwise the memory comes from the pool.
        pool: of working buffers.
        shared_numel: size of a buffer that can serve any bucket.

    Attributes:
        complete: rounds of which all gradients have come; a round is one micro-batch.
        launched: rounds whose reduction was started, or left for a later one.
        reduced: rounds that are in `bucket.gradient`, or on their way there.
    """

    def __init__(self, bucket: Bucket, pool: BufferPool, shared_numel: int) -> None:
        self.bucket, self._pool, self._shared_numel = bucket, pool, shared_numel
        self._use(None)
        self.begin_step(frees=False)

    def begin_step(self, *, frees: bool) -> None:
        """Forget all gradients; `frees` lets the bucket free its memory until the first one comes."""
        if not self.bucket.keeps_gradients and self._memory is not None:
            self._pool.release(self._memory)
        if frees:
            self.bucket.free_gradient()
        if self._memory is not self.bucket.full_gradient:
            self._use(self.bucket.full_gradient)
        count = len(self.bucket.layout.slots)
        self._is_empty, self._counts = [True] * count, [0] * count
        self.launched = self.reduced = 0
        self._advance_to(0)

    def _use(self, memory: Tensor | None) -> None:
        slots, self._memory = self.bucket.layout.slots, memory
        self._parts = [] if memory is None else [memory[at.start : at.stop].view(at.info.shape) for at in slots]
        self._is_empty = [True] * len(slots)

    def _advance_to(self, rounds: int) -> None:
        self.complete = rounds
        self._missing = self._counts.count(rounds)  # gradients that have not come in the next round

    def count(self, slot: int, expected: int) -> None:
        """Count a gradient.  Raises: RuntimeError, it came more than `expected` times."""
        if self._counts[slot] == expected:
            raise RuntimeError(
                f"gradient of {self.bucket.layout.slots[slot].info.name} came more than {expected} times in a step of "
                f"{expected} micro-batches: backward ran more often than that, or within itself (checkpointing needs "
                "use_reentrant=False)"
            )
        self._counts[slot] += 1
        if self._counts[slot] == self.complete + 1:
            self._missing -= 1
            if self._missing == 0:
                self._advance_to(self.complete + 1)

    def close(self, rounds: int) -> None:
        """Count what has not come in the first `rounds` rounds as zero."""
        if self.complete < rounds:
            self._counts = [max(count, rounds) for count in self._counts]
            self._advance_to(rounds)

    def open(self, *, is_reduced_soon: bool) -> None:
        """Have memory; what is reduced only at the end of the step gets memory of the bucket's own size."""
        if self._memory is not None:
            return
        if self.bucket.keeps_gradients:
            self._use(self.bucket.allocate_gradient())
        else:
            numel = self._shared_numel if is_reduced_soon else self.bucket.layout.padded_numel
            self._use(self._pool.acquire(numel, self.bucket.policy.accumulate_dtype, reusable=is_reduced_soon))

    def part(self, slot: int) -> tuple[Tensor, bool]:
        """A parameter's part, in its shape, and whether it is empty: to be overwritten, not added to."""
        is_empty, self._is_empty[slot] = self._is_empty[slot], False
        return self._parts[slot], is_empty

    def take(self) -> Tensor:
        """The memory, with zeros in the padding and where no gradient has come; the next gradients overwrite it."""
        memory, layout = self._memory, self.bucket.layout
        assert memory is not None
        for part, is_empty in zip(self._parts, self._is_empty, strict=True):
            if is_empty:
                part.zero_()
        memory[layout.numel : layout.padded_numel].zero_()
        self._is_empty = [True] * len(self._is_empty)
        if not self.bucket.keeps_gradients:  # whoever has taken it releases it
            self._use(None)
        return memory
