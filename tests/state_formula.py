"""Model state and ZeRO's traffic on a rank: the formulas of the papers, for any formats and optimizer.

    N parameters over d ranks, 16-bit weights, fp32 gradients and Adam        (Rajbhandari et al. 2020, figure 1, section 7)

    stage   bytes of model state    elements sent, each (d - 1)/d times
        0   (2 + 4 + 12) N          2 N
        1   (2 + 4 + 12/d) N        2 N
        2   (2 + (4 + 12)/d) N      (G + 1) N      reduced after each of G micro-batches
        3   18/d N                  3 G N          at most

Offloading the optimizer takes masters, moments and the gradient that steps them off the device (Ren et al. 2021). If the
device needs whole gradients, or weights in fp32, it holds its own copies, and the sum is larger than the above.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

FP32_BYTES = 4


@dataclass(frozen=True)
class StateFormula:
    """The formulas for one run."""

    stage: int
    shards: int  # d, the ranks that share one copy of the state
    weight_bytes: int  # of an element, as the next two
    accumulate_bytes: int  # of gradients while they add up
    reduce_bytes: int  # of gradients while they are reduced
    moments: int  # numbers that the optimizer holds for each parameter
    micro_batches: int  # G, on each rank in a step
    reduces_each: bool  # stages 2 and 3 reduce after each micro-batch, not once per step
    gathers_each: bool  # stage 3 gathers for each pass, not once per step
    second_copy: int = 0  # ranks that share a second copy of stage 3's weights; 0: there is none
    gather_bytes: float = 0.0  # of weights while stage 3 gathers them, where these are quantized; as the next
    block_bytes: float = 0.0  # of gradients while they are scattered; 0: they are not quantized

    def _bytes_per_parameter(self, offloads: bool) -> Counter[tuple[bool, bool]]:
        """Bytes by (is on the device, is sharded)."""
        optimizer_state = (not offloads, self.stage >= 1)
        count = Counter({(True, self.stage == 3): self.weight_bytes})
        if offloads or self.weight_bytes < FP32_BYTES:  # weights in fp32 are their own masters
            count[optimizer_state] += FP32_BYTES
        count[optimizer_state] += FP32_BYTES * self.moments
        has_whole_gradients = self.stage < 2 or (self.shards == 1 and not offloads)
        if has_whole_gradients:
            count[True, False] += self.accumulate_bytes
        if not has_whole_gradients or offloads or self.accumulate_bytes != FP32_BYTES:
            count[optimizer_state] += FP32_BYTES  # the gradient that the optimizer reads
        return count

    def state_bytes(self, elements: int, *, offloads: bool) -> float:
        """Model state of so many parameters; `offloads` says that the optimizer's state is off the device."""
        counts = self._bytes_per_parameter(offloads).items()
        whole = sum(count * elements / (self.shards if is_sharded else 1) for (_, is_sharded), count in counts)
        return whole + self._second_copy_bytes(elements)

    def _second_copy_bytes(self, elements: int) -> float:
        return self.weight_bytes * elements / self.second_copy if self.second_copy else 0

    def device_bytes(self, elements: int, *, offloads: bool) -> float:
        """The part of `state_bytes` on the device."""
        counts = self._bytes_per_parameter(offloads).items()
        here = sum(
            count * elements / (self.shards if is_sharded else 1) for (is_here, is_sharded), count in counts if is_here
        )
        return here + self._second_copy_bytes(elements)

    @property
    def gathered_bytes(self) -> float:
        """Of a weight in the gathers over all ranks that share the state."""
        return self.gather_bytes or self.weight_bytes

    def sent_per_parameter(self) -> dict[str, float]:
        """Bytes per parameter that pass through each collective of the sharding axis in a step; (d - 1)/d of them are sent.

        Stage 3's all-gather is an upper bound: weights that are still in a buffer are not gathered again.  Quantized
        gradients are those of one host, or of hosts of one rank.
        """
        if self.shards == 1:
            return {}
        if self.stage == 0:
            return {"all_reduce": 2 * self.reduce_bytes}
        reductions = self.micro_batches if self.reduces_each and self.stage >= 2 else 1
        gathers = 2 * self.micro_batches if self.gathers_each and not self.second_copy and self.stage == 3 else 1
        found: dict[str, float] = {"all_gather": gathers * self.gathered_bytes}
        if self.block_bytes:
            return found | {"all_to_all": reductions * self.block_bytes}
        return found | {"reduce_scatter": reductions * self.reduce_bytes}

    def sent_bytes(self, elements: int) -> float:
        """Bytes that a rank sends in a step for so many parameters."""
        return sum(self.sent_per_parameter().values()) * elements * (self.shards - 1) / self.shards
