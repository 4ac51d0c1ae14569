"""What transformers calls a family of ours, and the tensors that a model has."""

from __future__ import annotations

import torch

from megazero.models.config import ModelConfig
from megazero.models.family import HuggingFaceFormat
from megazero.models.gpt import BuildContext, GPTStage
from megazero.models.registry import FAMILIES
from megazero.models.stages import cut_evenly
from megazero.parallel_state import Axis
from megazero.zero.units import describe


def format_of(family: object) -> HuggingFaceFormat:
    """The form of a family in transformers.  Raises: ValueError for a family that transformers does not have."""
    known = {name: form for name in FAMILIES if (form := FAMILIES[name].hugging_face) is not None}
    if not isinstance(family, str) or family not in known:
        raise ValueError(f"model_type={family!r} is not supported; {' and '.join(known)} are")
    return known[family]


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a resolved model's logical tensors by name, in the order of the layers."""
    context = BuildContext(model, Axis("tp"), False, 0, torch.device("meta"))
    with torch.device("meta"):
        stage = GPTStage(context, cut_evenly(model.num_layers, 1)[0])
    return {name: shape for one in describe(stage) for name, shape in one.spec.logical_shapes().items()}
