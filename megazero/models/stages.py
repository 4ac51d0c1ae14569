"""Cutting a model into pipeline stages: which layers, and which ends, a stage holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES

T = TypeVar("T")


@dataclass(frozen=True)
class StageLayout:
    """What one virtual stage holds: `layers` are indices in the whole model; the first and last stage have the ends."""

    layers: range
    has_embedding: bool
    has_head: bool


def cut_evenly(num_layers: int, stages: int) -> tuple[StageLayout, ...]:
    """Cut layers into stages that differ by at most one layer; the surplus goes to the earlier stages.

    Raises:
        ValueError: more stages than layers.
    """
    return cut_by_cost(num_layers, stages, 0.0)


def cut_by_cost(num_layers: int, stages: int, head_layers: float) -> tuple[StageLayout, ...]:
    """Cut layers so that the costliest stage costs least; every stage has a layer.

    Args:
        num_layers, stages: of the model; all chunks of all ranks.
        head_layers: cost of the head and its loss, in layers.

    Raises:
        ValueError: more stages than layers.
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
    """Give every stage its number of layers, in order; a stage that is only an end of the model may have none."""
    spans = [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
    return tuple(StageLayout(span, stage == 0, stage == len(spans) - 1) for stage, span in enumerate(spans))


def head_cost_in_layers(model: ModelConfig) -> float:
    """Multiplications of the output head per token over those of one layer of a resolved model.

    A layer multiplies by its matrices and, per token, attends to `mean_reach` positions, in scores and in values.
    """
    layer = FAMILIES[model.family].layer_weights(model) + 2 * model.attention_size * model.mean_reach
    return model.vocab_size * model.hidden_size / layer


def cut(model: ModelConfig, layout: str | tuple[tuple[int | str, ...], ...], stages: int) -> tuple[StageLayout, ...]:
    """Cut a resolved model as the configuration says.

    Args:
        layout: "even", "cost", or per stage its layers and the words "embed" and "head".
        stages: all chunks of all ranks.

    Raises:
        ValueError: more stages than layers, or a layout of another model or another number of stages.
    """
    if layout == "even":
        return cut_evenly(model.num_layers, stages)
    if layout == "cost":
        return cut_by_cost(model.num_layers, stages, head_cost_in_layers(model))
    counts = layer_counts(layout)
    if len(counts) != stages or sum(counts) != model.num_layers:
        raise ValueError(
            f"parallel.layout has {sum(counts)} layers in {len(counts)} stages; "
            f"the model has num_layers={model.num_layers} and the schedule {stages} stages"
        )
    return _cut_by_counts(counts)


def cut_by_rank(
    model: ModelConfig, layout: str | tuple[tuple[int | str, ...], ...], placement: Sequence[tuple[int, int]]
) -> tuple[tuple[StageLayout, ...], ...]:
    """As `cut`, the chunks of each pipeline rank; `placement` has the rank and the chunk of every virtual stage."""
    return by_rank(cut(model, layout, len(placement)), placement)


def by_rank(stages: Sequence[T], placement: Sequence[tuple[int, int]]) -> tuple[tuple[T, ...], ...]:
    """Something of every virtual stage, for each pipeline rank in the order of its chunks."""
    found: list[list[T]] = [[] for _ in range(1 + max(rank for rank, _ in placement))]
    for one, (rank, _) in zip(stages, placement, strict=True):
        found[rank].append(one)
    return tuple(map(tuple, found))


def layer_counts(layout: str | tuple[tuple[int | str, ...], ...]) -> list[int]:
    """Transformer layers of each stage of a written layout; the words "embed" and "head" stand for none."""
    return [sum(part for part in stage if isinstance(part, int)) for stage in layout]
