"""Qwen 3 with experts: Qwen 3 with a mixture of experts in place of each MLP (Yang et al. 2025, section 2)."""

from collections.abc import Iterator, Mapping
from typing import Any

from megazero.models.llama.family import ROTARY_READS, Variant
from megazero.models.mixtral import EXPERT_KEYS, ExpertFamily, lost_balance
from megazero.models.qwen3 import QWEN3_FORMAT


def _unsupported(config: Mapping[str, Any], seq_len: int | None) -> Iterator[str]:
    if layers := config.get("mlp_only_layers"):
        yield f"mlp_only_layers={layers!r} is not supported in a qwen3_moe; every layer must have experts"
    yield from QWEN3_FORMAT.problems(config, seq_len)


QWEN3_MOE_FORMAT = QWEN3_FORMAT.variant("qwen3_moe", problems=_unsupported, lost=lost_balance)
QWEN3_MOE = ExpertFamily(
    Variant(qk_norm="head", experts=("mlp", ("gate_proj", "up_proj", "down_proj"))),
    QWEN3_MOE_FORMAT,
    {"num_experts": 128, "experts_per_token": 8, "renormalize_gates": False},
    (*ROTARY_READS, *EXPERT_KEYS, "expert_hidden_size"),
)
