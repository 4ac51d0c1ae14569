"""Memory and traffic of a rank by the ZeRO papers, as terms that can be evaluated and printed.

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

from collections.abc import Sequence
from dataclasses import dataclass

MASTER_BYTES, MOMENT_BYTES, FP32_BYTES = 4, 4, 4


@dataclass(frozen=True)
class Term:
    """Bytes per parameter: how many, whether divided by the shards, and whether on the device or offloaded."""

    count: int
    is_sharded: bool
    on_device: bool = True


@dataclass(frozen=True)
class StateFormula:
    """The formulas for one run.

    Args:
        stage: of ZeRO.
        shards: d, the ranks that share one copy of the state.
        weight_bytes, accumulate_bytes, reduce_bytes: per element of weights, accumulated gradients, reduced gradients.
        moments: numbers that the optimizer holds for each parameter.
        micro_batches: G, on each rank in a step.
        reduces_each: stages 2 and 3 reduce after each micro-batch, not once per step.
        gathers_each: stage 3 gathers for each pass, not once per step.
    """

    stage: int
    shards: int
    weight_bytes: int
    accumulate_bytes: int
    reduce_bytes: int
    moments: int
    micro_batches: int
    reduces_each: bool
    gathers_each: bool

    def state_terms(self, *, offloads: bool) -> list[Term]:
        """Bytes of model state; `offloads` says that the optimizer's state is off the device."""
        owns_part = self.stage >= 1
        weights = Term(self.weight_bytes, self.stage == 3)
        own_masters = offloads or self.weight_bytes < FP32_BYTES  # weights in fp32 are their own masters
        masters = Term(MASTER_BYTES if own_masters else 0, owns_part, not offloads)
        moments = Term(MOMENT_BYTES * self.moments, owns_part, not offloads)
        return [weights, *self._gradient_terms(offloads), masters, moments]

    def _gradient_terms(self, offloads: bool) -> list[Term]:
        stepped = Term(FP32_BYTES, self.stage >= 1, not offloads)  # what the optimizer reads
        if self.stage >= 2 and (self.shards > 1 or offloads):
            return [stepped]
        whole = Term(self.accumulate_bytes, is_sharded=False)
        is_same = self.accumulate_bytes == FP32_BYTES and not offloads
        return [whole] if is_same else [whole, stepped]

    def sent_terms(self) -> dict[str, int]:
        """Bytes per parameter that pass through each collective in a step; (d - 1)/d of them are sent.

        Stage 3's all-gather is an upper bound: weights that are still in a buffer are not gathered again.
        """
        if self.shards == 1:
            return {}
        if self.stage == 0:
            return {"all_reduce": 2 * self.reduce_bytes}
        reductions = self.micro_batches if self.reduces_each and self.stage >= 2 else 1
        gathers = 2 * self.micro_batches if self.gathers_each and self.stage == 3 else 1
        return {"all_gather": gathers * self.weight_bytes, "reduce_scatter": reductions * self.reduce_bytes}

    def sent_bytes(self, elements: int) -> float:
        """Bytes that a rank sends in a step for so many parameters."""
        return sum(self.sent_terms().values()) * elements * (self.shards - 1) / self.shards


def state_bytes(terms: Sequence[Term], elements: int, shards: int, *, on_device: bool) -> float:
    """Bytes of so many parameters on the device, or off it."""
    chosen = [term for term in terms if term.on_device == on_device]
    return sum(term.count * elements / (shards if term.is_sharded else 1) for term in chosen)


def state_text(terms: Sequence[Term], shards: int) -> str:
    """The terms as a sum, `6N + 12N/4`; what is off the device stands in brackets."""
    parts = []
    for on_device, form in ((True, "{}"), (False, "[{}]")):
        chosen = [term for term in terms if term.on_device == on_device]
        part = sum(term.count for term in chosen if term.is_sharded and shards > 1)
        whole = sum(term.count for term in chosen) - part
        written = [f"{whole}N"] if whole else []
        written += [f"{part}N/{shards}"] if part else []
        parts += [form.format(" + ".join(written))] if written else []
    return " + ".join(parts)
