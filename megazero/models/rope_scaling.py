"""Rotary frequencies for more positions than a model was first trained on: `model.rope_scaling`.

    wavelength     short                                            longer than the original positions
    linear         / factor .......................................................... / factor
    llama3, yarn   as it was ........... a blend of both ........... / factor

Position p turns the i-th pair of a head's elements by p * frequency[i], of wavelength 2 pi / frequency[i].

Source: Chen et al. 2023 (linear); Peng et al. 2023, sections 3.2 to 3.4 (YaRN); Grattafiori et al. 2024, and Meta's code of
Llama 3.1 (llama3).  Numbers are named as in transformers' `modeling_rope_utils`, positions as `model.seq_len`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, log, pi
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from megazero.settings import Count, Positive, Section, toml_value

if TYPE_CHECKING:
    from torch import Tensor

# The keys that each type reads, beside `type` and `factor`.
READS: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("original_seq_len", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_seq_len", "beta_fast", "beta_slow", "attention_factor"),
}


class RopeScaling(Section):
    """How rotary frequencies are scaled for longer samples."""

    type: Literal["linear", "yarn", "llama3"]
    """The formula."""
    factor: Annotated[float, Field(ge=1)]
    """Times as many positions as before."""
    original_seq_len: Count | None = None
    """Positions that the model was first trained on (yarn, llama3)."""
    low_freq_factor: Positive = 1.0
    """Wavelengths above original_seq_len / low_freq_factor are stretched in full (llama3)."""
    high_freq_factor: Positive = 4.0
    """Wavelengths below original_seq_len / high_freq_factor stay (llama3)."""
    beta_fast: Positive = 32.0
    """Pairs that turn so often or more within original_seq_len stay (yarn)."""
    beta_slow: Positive = 1.0
    """Pairs that turn so often or less are stretched in full (yarn)."""
    attention_factor: Positive | None = None
    """Multiplies rotated queries and keys. Unset: 0.1 ln(factor) + 1 (yarn)."""

    @model_validator(mode="after")
    def _has_what_its_type_reads(self) -> RopeScaling:
        reads = READS[self.type]
        for name, field in type(self).model_fields.items():
            if name not in ("type", "factor", *reads) and getattr(self, name) != field.default:
                raise PydanticCustomError("idle", f'not have {name}, which type = "{self.type}" does not read')
        if "original_seq_len" in reads and self.original_seq_len is None:
            raise PydanticCustomError("unset", f'have original_seq_len where type = "{self.type}"')
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise PydanticCustomError("order", f"have {low} < {high} = {toml_value(getattr(self, high))}")
        return self

    @property
    def amplitude(self) -> float:
        """What rotated queries and keys are multiplied by (Peng et al. 2023, equation 22, takes it for both)."""
        if self.type != "yarn":
            return 1.0
        return 0.1 * log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """The stretched frequencies.  [head size / 2] -> [head size / 2]; `theta` is the base they were made with."""
        if self.type == "linear":
            return frequencies / self.factor
        kept = self._kept_by_turns(frequencies, theta) if self.type == "yarn" else self._kept_by_length(frequencies)
        return frequencies * (kept + (1 - kept) / self.factor)

    def _kept_by_length(self, frequencies: Tensor) -> Tensor:
        """Llama 3.1: the share of each frequency that stays falls linearly with the turns in the original positions."""
        turns = (self.original_seq_len or 0) * frequencies / (2 * pi)
        return ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)

    def _kept_by_turns(self, frequencies: Tensor, theta: float) -> Tensor:
        """YaRN: as above, but the share falls linearly with the index of the pair, between two whole indices."""

        def pair_with(turns: float) -> float:
            return len(frequencies) * log((self.original_seq_len or 0) / (turns * 2 * pi)) / log(theta)

        first = max(floor(pair_with(self.beta_fast)), 0)
        last = min(ceil(pair_with(self.beta_slow)), 2 * len(frequencies) - 1)
        pairs = frequencies.new_tensor(range(len(frequencies)))
        return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)


# transformers' names of the same numbers.
_THEIRS = {"type": "rope_type", "original_seq_len": "original_max_position_embeddings"}


def rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """All keys about rotary positions of a `config.json`; transformers 5 nests what its predecessors kept apart."""
    flat = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    return flat | dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def rope_problems(config: Mapping[str, Any]) -> list[str]:
    """What a `config.json` says about rotary positions that we do not compute."""
    rope, problems = rope_keys(config), []
    kind, key = _kind(rope), "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    if kind != "default" and kind not in READS:
        known = ", ".join(map(repr, ("default", *READS)))
        problems.append(f"{key}={config[key]!r} is not supported; the rope_type must be {known}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported; it must be 1.0")
    known_keys = {_THEIRS.get(name, name) for name in RopeScaling.model_fields}
    known_keys |= {"type", "rope_theta", "partial_rotary_factor"}
    if kind in READS and rope.get("factor") is None:
        return [*problems, f"{key} has no factor"]
    for name in (name for name in rope if name not in known_keys):
        if mend := _mend_of(name, rope, is_yarn=kind == "yarn"):
            problems.append(f"{key}: {name}={rope[name]!r} is not supported; {mend}")
    return problems


def _mend_of(name: str, rope: Mapping[str, Any], *, is_yarn: bool) -> str | None:
    """How to write the same model without a key that we do not read; None where the key changes nothing.

    Source: `_compute_yarn_parameters` of transformers' `modeling_rope_utils`.
    """
    if name == "truncate" and (is_yarn or rope[name]):  # null is false there
        return None if rope[name] else "it must be true: here the stretched pairs begin and end at whole numbers"
    if rope[name] is None:
        return None
    scales = [rope.get(scale) or 0.0 for scale in ("mscale", "mscale_all_dim")]
    if is_yarn and name in ("mscale", "mscale_all_dim") and all(scales) and rope.get("attention_factor") is None:
        own, all_dim = (0.1 * scale * log(rope["factor"]) + 1.0 for scale in scales)
        return (
            f"write attention_factor={own / all_dim!r} in place of mscale and mscale_all_dim, which computes the same"
        )
    return "leave it out: it changes nothing in this rope_type"


def read_rope(config: Mapping[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """The keys of [model] about rotary positions, from a `config.json`; `theta` is the family's own base."""
    rope = rope_keys(config)
    found: dict[str, Any] = {"rope_theta": rope.get("rope_theta", theta)}
    if (kind := _kind(rope)) == "default":
        return found
    original = _THEIRS["original_seq_len"]
    # As transformers does: a number outside the table counts more, and without any the model was trained on all positions.
    rope[original] = config.get(original) or rope.get(original) or config.get("max_position_embeddings")
    names = {name: rope.get(_THEIRS.get(name, name)) for name in ("factor", *READS[kind])}
    return found | {"rope_scaling": {"type": kind} | {name: one for name, one in names.items() if one is not None}}


def written_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Keys of a `config.json`, in the spelling that transformers 4 and 5 both read."""
    if scaling is None:
        return {"rope_theta": theta}
    values = {name: getattr(scaling, name) for name in ("type", "factor", *READS[scaling.type])}
    kept = {_THEIRS.get(name, name): value for name, value in values.items() if value is not None}
    return {"rope_theta": theta, "rope_scaling": kept}


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")) or "default")
