"""How a model is split over ranks: layers over pipeline stages, and heads over the ranks of context parallelism.

    cp = u (Ulysses) x r (ring); a rank has S / cp of the S tokens of a sample

    u ranks exchange heads for tokens     q, k, v and back the output; in the backward the same again
    r ranks pass keys and values on       forward K, V; backward K, V and the sums of dK, dV; r - 1 hops each

With h and k' elements of all query and key/value heads, b samples and 16 bits, a rank sends per layer

    8 (h + k') b (S / cp) (u - 1) / u  +  12 (k' / u) b S (r - 1) / r        16 instead of 12 with fp32 gradients

Fewer key/value heads than u are replicated, so k' = head size x max(key/value heads, u).
Source: Jacobs et al. 2023, section 3.2 (Ulysses); Liu et al. 2023 (ring); Fang and Zhao 2024 (both).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.settings import divisors

T = TypeVar("T")


@dataclass(frozen=True)
class StageLayout:
    """The layers of one virtual stage, by their indices in the whole model.  The first and last stages also hold the
    ends.
    """

    layers: range
    has_embedding: bool
    has_head: bool


def cut_evenly(num_layers: int, stages: int) -> tuple[StageLayout, ...]:
    """Split layers into stages that differ by at most one layer.  Earlier stages get the surplus.

    Raises:
        ValueError: there are more stages than layers.
    """
    return cut_by_cost(num_layers, stages, 0.0)


def cut_by_cost(num_layers: int, stages: int, head_layers: float) -> tuple[StageLayout, ...]:
    """Split layers so that the most expensive stage is as cheap as possible.  Every stage has at least one layer.

    Args:
        num_layers: number of layers of the model.
        stages: number of chunks of all ranks.
        head_layers: cost of the head and its loss, in units of a layer.

    Raises:
        ValueError: there are more stages than layers.
    """
    if not 1 <= stages <= num_layers:
        raise ValueError(f"{stages} pipeline stages must be at least 1 and at most num_layers={num_layers}")
    counts, costs = [1] * stages, [1.0] * stages
    costs[-1] += head_layers
    for _ in range(num_layers - stages):
        cheapest = costs.index(min(costs))
        counts[cheapest] += 1
        costs[cheapest] += 1
    return _cut_by_counts(counts)


def _cut_by_counts(counts: Sequence[int]) -> tuple[StageLayout, ...]:
    """Give each stage its number of layers, in order.  A stage that holds only an end of the model may have none."""
    spans = [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
    return tuple(StageLayout(span, stage == 0, stage == len(spans) - 1) for stage, span in enumerate(spans))


def head_cost_in_layers(model: ModelConfig) -> float:
    """Compute the multiplications per token of the output head, divided by those of one layer of a resolved model.

    A layer multiplies by its matrices, and each token attends to `mean_reach` positions, in scores and in values.
    """
    layer = FAMILIES[model.family].layer_weights(model) + 2 * model.mean_attention_size * model.mean_reach
    return model.vocab_size * model.hidden_size / layer


def cut(model: ModelConfig, layout: str | tuple[tuple[int | str, ...], ...], stages: int) -> tuple[StageLayout, ...]:
    """Split a resolved model into stages as configured.

    Args:
        model: resolved.
        layout: "even", "cost", or for each stage its layers and the words "embed" and "head".
        stages: number of chunks of all ranks.

    Raises:
        ValueError: there are more stages than layers, or the layout is for another model or number of stages.
    """
    if layout == "even":
        return cut_evenly(model.num_layers, stages)
    if layout == "cost":
        return cut_by_cost(model.num_layers, stages, head_cost_in_layers(model))
    counts = layer_counts(layout)
    if len(counts) != stages or sum(counts) != model.num_layers:
        hint = f"the model has num_layers={model.num_layers} and the schedule {stages} stages"
        raise ValueError(f"parallel.layout has {sum(counts)} layers in {len(counts)} stages; {hint}")
    return _cut_by_counts(counts)


def cut_by_rank(
    model: ModelConfig, layout: str | tuple[tuple[int | str, ...], ...], placement: Sequence[tuple[int, int]]
) -> tuple[tuple[StageLayout, ...], ...]:
    """Return the stages of `cut`, grouped by pipeline rank.  `placement`: the rank and the chunk of every virtual
    stage.
    """
    return by_rank(cut(model, layout, len(placement)), placement)


def by_rank(stages: Sequence[T], placement: Sequence[tuple[int, int]]) -> tuple[tuple[T, ...], ...]:
    """Group values of virtual stages by pipeline rank, in the order of the rank's chunks."""
    found: list[list[T]] = [[] for _ in range(1 + max(rank for rank, _ in placement))]
    for value, (rank, _) in zip(stages, placement, strict=True):
        found[rank].append(value)
    return tuple(map(tuple, found))


def layer_counts(layout: str | tuple[tuple[int | str, ...], ...]) -> list[int]:
    """Count the transformer layers of each stage of a configured layout.  The words "embed" and "head" count as none."""
    return [sum(count for count in stage if isinstance(count, int)) for stage in layout]


def context_bytes(
    seq_len: int,
    batch: int,
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    ulysses: int,
    ring: int,
    itemsize: int = 2,
    gradient_itemsize: int = 4,
) -> dict[str, int]:
    """Compute the bytes that a rank sends in a layer's forward and backward, by collective operation.

    Args:
        seq_len: tokens of a whole sample.
        batch: samples of the micro-batch.
        heads, kv_heads: query and key/value heads of a tensor-parallel rank, see `heads_of_rank`.
        head_size: elements of a head.
        ulysses, ring: the two degrees; their product is cp.
        itemsize: bytes of an element of q, k, v and of the output.
        gradient_itemsize: bytes of an element of dK and dV on the ring.
    """
    replicated = max(kv_heads, ulysses)
    exchanged = 4 * (heads + replicated) * head_size * batch * (seq_len // (ulysses * ring)) * itemsize
    passed = 2 * replicated // ulysses * head_size * batch * (seq_len // ring) * (2 * itemsize + gradient_itemsize)
    return {"all_to_all": exchanged * (ulysses - 1) // ulysses, "ring_shift": passed * (ring - 1)}


def heads_of_rank(num_heads: int, num_kv_heads: int | None, tp: int) -> tuple[int, int]:
    """Return the query heads and kv heads of a tensor-parallel rank.  If tp exceeds the number of kv heads, ranks share
    one.
    """
    return num_heads // tp, max(1, (num_kv_heads or num_heads) // tp)


def ulysses_degrees(heads: int, kv_heads: int) -> list[int]:
    """Return the degrees that split a rank's heads evenly.  The kv heads are also split, or each is replicated equally
    often.
    """
    return [u for u in divisors(heads) if u % kv_heads == 0 or kv_heads % u == 0]
