"""From the `config.json` of a transformers model to a [model] section, and from that to the tensors it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from megazero.config import ConfigError, RunConfig, resolve
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


def model_section(config: Mapping[str, Any], seq_len: int | None = None) -> ModelConfig:
    """The resolved [model] section of a `config.json`, with `seq_len` or as many positions as it names.

    Raises:
        ValueError: our models do not compute what this one does; the message lists every reason.
    """
    family = config.get("model_type")
    section = format_of(family).section(str(family), config, seq_len)
    try:
        return resolve(RunConfig.model_validate({"model": section}), 1).config.model
    except ConfigError as error:
        raise ValueError("; ".join(map(str, error.problems))) from error
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg']}" for one in error.errors()]
        raise ValueError("; ".join(wrong)) from error


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a resolved model's logical tensors by name, in the order of the layers."""
    context = BuildContext(model, Axis("tp"), False, 0, torch.device("meta"))
    with torch.device("meta"):
        stage = GPTStage(context, cut_evenly(model.num_layers, 1)[0])
    return {name: shape for one in describe(stage) for name, shape in one.spec.logical_shapes().items()}
