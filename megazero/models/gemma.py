"""Gemma 2 and the text part of Gemma 3: embeddings times sqrt(width), norms around, GeGLU, windows in most layers.

Source: Gemma Team 2024, "Gemma 2", section 2; Gemma Team 2025, "Gemma 3", section 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megazero.models.llama.family import ROTARY_READS, CheckedFamily, Variant
from megazero.models.olmo import OLMO3_FORMAT, WINDOWS, read_ropes, read_windows, window_problems, written_windows
from megazero.models.qwen import QWEN2_FORMAT

_CAPS = "attn_logit_softcapping", "final_logit_softcapping"


def _read_2(config: Mapping[str, Any]) -> dict[str, Any]:
    return read_windows(config, 2) | {key: config[key] for key in _CAPS if key in config}  # null is no cap


def _read_3(config: Mapping[str, Any]) -> dict[str, Any]:
    return read_windows(config, config.get("sliding_window_pattern", 6)) | read_ropes(config, 1e6, 1e4)


GEMMA2_FORMAT = QWEN2_FORMAT.variant("gemma2", extra=written_windows, read_extra=_read_2, problems=window_problems)
GEMMA3_FORMAT = GEMMA2_FORMAT.variant(
    "gemma3", extra=OLMO3_FORMAT.extra, read_extra=_read_3, problems=OLMO3_FORMAT.problems
)
_NORMS = "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
_VARIANT = Variant(norm_place="around", norms=_NORMS, offset_norms=True, gates_by_gelu=True, scales_embeddings=True)
_READS = *ROTARY_READS, "attention_bias", "query_pre_attn_scalar", *WINDOWS
GEMMA2 = CheckedFamily(_VARIANT, GEMMA2_FORMAT, (*_READS, "attn_logit_softcapping"))
GEMMA3 = CheckedFamily(replace(_VARIANT, qk_norm="head"), GEMMA3_FORMAT, (*_READS, "rope_local_theta"))
