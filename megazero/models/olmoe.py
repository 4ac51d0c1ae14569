"""OLMoE: Llama with RMSNorm over all queries and all keys, and a mixture of experts (Muennighoff et al. 2024)."""

from collections.abc import Iterator, Mapping
from typing import Any

from megazero.models.config import ModelConfig
from megazero.models.llama.family import LLAMA_FORMAT, Variant, read_rope, written_rope
from megazero.models.mixtral import EXPERT_KEYS, ExpertFamily, lost_balance


def _extra(model: ModelConfig) -> dict[str, Any]:
    return written_rope(model.rope_theta, model.rope_scaling)


def _unsupported(config: Mapping[str, Any], seq_len: int | None) -> Iterator[str]:
    heads, size = config.get("num_attention_heads"), config.get("head_dim")
    if size is not None and heads and size * heads != config.get("hidden_size"):
        yield f"head_dim={size!r} is not supported in an olmoe; it must be hidden_size / num_attention_heads"
    yield from LLAMA_FORMAT.problems(config, seq_len)


OLMOE_FORMAT = LLAMA_FORMAT.variant(
    "olmoe", extra=_extra, read_extra=read_rope, problems=_unsupported, lost=lost_balance
)
OLMOE = ExpertFamily(
    Variant(qk_norm="width", experts=("mlp", ("gate_proj", "up_proj", "down_proj"))),
    OLMOE_FORMAT,
    {"num_experts": 64, "experts_per_token": 8, "renormalize_gates": False},
    ("rope_theta", "rope_scaling", *EXPERT_KEYS),
)
