"""What transformers calls a family of ours, and the tensors that a model has."""

import torch

from megazero.models.build_context import BuildContext
from megazero.models.config import ModelConfig
from megazero.models.family import HuggingFaceFormat
from megazero.models.gpt import GPTStage
from megazero.models.registry import FAMILIES
from megazero.models.stages import cut_evenly
from megazero.parallel_state import Axis
from megazero.zero.units import describe


def family_of(model_type: object) -> str:
    """Return the family that has this `model_type` in transformers.  Raises: ValueError: this package has no such family."""
    known = {form.model_type or name: name for name in FAMILIES if (form := FAMILIES[name].hugging_face) is not None}
    if not isinstance(model_type, str) or model_type not in known:
        is_own = model_type in [*FAMILIES] and FAMILIES[str(model_type)].hugging_face is None
        own = "; give your family's ModelFamily a `hugging_face` format (docs/extending.md)" * is_own
        raise ValueError(f"model_type={model_type!r} is not supported; {' and '.join(known)} are{own}")
    return known[model_type]


def format_of(family: str) -> HuggingFaceFormat:
    """Return the format of a family in transformers.  Raises: ValueError: transformers does not have the family."""
    return FAMILIES[family].hugging_face or format_of(family_of(family))


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a resolved model's logical tensors by name, in the order of the layers."""
    return {name: shape for param in describe(_whole(model)) for name, shape in param.spec.logical_shapes().items()}


def buffers(model: ModelConfig) -> set[str]:
    """Return the names of the tensors that layers themselves change, which every checkpoint holds in fp32."""
    return {param.spec.name for param in describe(_whole(model)) if param.spec.buffer}


def folded(model: ModelConfig) -> tuple[ModelConfig, dict[str, float]]:
    """A model without muP that computes the same if these tensors, of the final norm, take the factor of its logits."""
    head = None if model.mup_base_width is None else _whole(model).head
    names = [] if head is None else [param.spec.name for param in describe(head.norm)]
    return model.model_copy(update={"mup_base_width": None}), dict.fromkeys(names, 1.0 / model.width_ratio)


def _whole(model: ModelConfig) -> GPTStage:
    context = BuildContext(model, Axis("tp"), False, 0, torch.device("meta"))
    with torch.device("meta"):
        return GPTStage(context, cut_evenly(model.num_layers, 1)[0])
