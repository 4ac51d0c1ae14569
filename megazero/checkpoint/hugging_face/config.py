"""What transformers calls a family of ours, and the tensors that a model has."""

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
        own = "; give your family's ModelFamily a `hugging_face` format (docs/extending.md)" * (family in [*FAMILIES])
        raise ValueError(f"model_type={family!r} is not supported; {' and '.join(known)} are{own}")
    return known[family]


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a resolved model's logical tensors by name, in the order of the layers."""
    return {name: shape for one in describe(_whole(model)) for name, shape in one.spec.logical_shapes().items()}


def folded(model: ModelConfig) -> tuple[ModelConfig, dict[str, float]]:
    """A model without muP that computes the same if these tensors, of the final norm, take the factor of its logits."""
    head = None if model.mup_base_width is None else _whole(model).head
    names = [] if head is None else [one.spec.name for one in describe(head.norm)]
    return model.model_copy(update={"mup_base_width": None}), dict.fromkeys(names, 1.0 / model.width_ratio)


def _whole(model: ModelConfig) -> GPTStage:
    context = BuildContext(model, Axis("tp"), False, 0, torch.device("meta"))
    with torch.device("meta"):
        return GPTStage(context, cut_evenly(model.num_layers, 1)[0])
