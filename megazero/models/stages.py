"""Cutting a model into pipeline stages: which layers, and which ends, a stage holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageLayout:
    """What one virtual stage holds.

    Args:
        layers: indices of its transformer layers in the whole model.
        has_embedding: it is the first stage.
        has_head: it is the last stage.
    """

    layers: range
    has_embedding: bool
    has_head: bool


def cut_evenly(num_layers: int, stages: int) -> tuple[StageLayout, ...]:
    """Cut layers into stages that differ by at most one layer; the earlier stages take the surplus.

    Args:
        num_layers: transformer layers of the model.
        stages: pipeline stages, all chunks of all ranks.

    Raises:
        ValueError: more stages than layers.
    """
    if not 1 <= stages <= num_layers:
        raise ValueError(f"{stages} pipeline stages must be at least 1 and at most num_layers={num_layers}")
    short, surplus = divmod(num_layers, stages)
    starts = [stage * short + min(stage, surplus) for stage in range(stages + 1)]
    return tuple(
        StageLayout(range(starts[stage], starts[stage + 1]), stage == 0, stage == stages - 1) for stage in range(stages)
    )
