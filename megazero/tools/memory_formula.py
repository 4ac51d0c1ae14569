"""What the ZeRO papers say that a rank keeps and sends, as terms that can be evaluated and printed.

    N parameters over d ranks, 16-bit weights, fp32 gradients and Adam        (Rajbhandari et al. 2020, figure 1, section 7)

    stage   bytes kept              elements sent, each (d - 1)/d times
        0   (2 + 4 + 12) N          2 N
        1   (2 + 4 + 12/d) N        2 N
        2   (2 + (4 + 12)/d) N      (G + 1) N      after each of G micro-batches
        3   18/d N                  3 G N          at most

Offloading the optimizer takes masters, moments and the gradient that steps them off the device (Ren et al. 2021). Where the
device needs gradients whole, or weights in fp32, it keeps its own beside them, and the sum is larger than the above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MASTER_BYTES, MOMENT_BYTES, FP32_BYTES = 4, 4, 4


@dataclass(frozen=True)
class Keeping:
    """What the formulas ask about a run.

    Args:
        stage: of ZeRO.
        shards: d, the ranks that share one copy of the state.
        weight_bytes, accumulate_bytes, reduce_bytes: of an element of the weights, of gradients that add up, of
            gradients on their way.
        moments: numbers that the optimizer keeps for each parameter.
        micro_batches: G, of a step on each rank.
        reduces_each: stages 2 and 3 reduce after each micro-batch, and not once.
        gathers_each: stage 3 gathers for each pass, and not once.
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


@dataclass(frozen=True)
class Term:
    """Bytes of each parameter.

    Args:
        count: how many.
        is_sharded: a rank keeps those of a d-th of the parameters.
        on_device: where the rank computes, and not where state is offloaded to.
    """

    count: int
    is_sharded: bool
    on_device: bool = True


def state_terms(keeping: Keeping, *, offloads: bool) -> list[Term]:
    """Bytes of model state.

    Args:
        keeping: the run.
        offloads: the optimizer's state is off the device.
    """
    owns_part = keeping.stage >= 1
    weights = Term(keeping.weight_bytes, keeping.stage == 3)
    own_masters = offloads or keeping.weight_bytes < FP32_BYTES  # weights in fp32 are their own masters
    masters = Term(MASTER_BYTES if own_masters else 0, owns_part, not offloads)
    moments = Term(MOMENT_BYTES * keeping.moments, owns_part, not offloads)
    return [weights, *_gradient_terms(keeping, offloads), masters, moments]


def _gradient_terms(keeping: Keeping, offloads: bool) -> list[Term]:
    steps = Term(FP32_BYTES, keeping.stage >= 1, not offloads)  # what the optimizer reads
    if keeping.stage >= 2 and (keeping.shards > 1 or offloads):
        return [steps]
    whole = Term(keeping.accumulate_bytes, is_sharded=False)
    in_place = keeping.accumulate_bytes == FP32_BYTES and not offloads
    return [whole] if in_place else [whole, steps]


def state_bytes(terms: Sequence[Term], elements: int, shards: int, *, on_device: bool) -> float:
    """Bytes that the terms give on the device, or off it, for so many parameters."""
    chosen = [term for term in terms if term.on_device == on_device]
    return sum(term.count * elements / (shards if term.is_sharded else 1) for term in chosen)


def state_text(terms: Sequence[Term], shards: int) -> str:
    """As a sum, `6N + 12N/4`; what is off the device in brackets."""
    parts = []
    for on_device, form in ((True, "{}"), (False, "[{}]")):
        whole, part = (
            sum(term.count for term in terms if (term.on_device, term.is_sharded) == (on_device, is_sharded))
            for is_sharded in (False, True)
        )
        if shards == 1:
            whole, part = whole + part, 0
        written = [f"{whole}N"] if whole else []
        written += [f"{part}N/{shards}"] if part else []
        parts += [form.format(" + ".join(written))] if written else []
    return " + ".join(parts)


def sent_terms(keeping: Keeping) -> dict[str, int]:
    """Bytes of each parameter that pass through each collective in a step; (d - 1)/d of them are sent.

    Those of stage 3's all-gather are an upper bound: what is still in a buffer is not gathered again.
    """
    if keeping.shards == 1:
        return {}
    rounds = keeping.micro_batches if keeping.reduces_each and keeping.stage >= 2 else 1
    if keeping.stage == 0:
        return {"all_reduce": 2 * keeping.reduce_bytes}
    gathers = 1
    if keeping.stage == 3 and keeping.gathers_each:
        gathers = 2 * keeping.micro_batches
    return {"all_gather": gathers * keeping.weight_bytes, "reduce_scatter": rounds * keeping.reduce_bytes}


def sent_bytes(keeping: Keeping, elements: int) -> float:
    """Bytes that a rank sends in a step for so many parameters."""
    return sum(sent_terms(keeping).values()) * elements * (keeping.shards - 1) / keeping.shards
