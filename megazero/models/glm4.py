"""GLM-4 of 2025: norms around attention and MLP; half of each head rotates, in pairs of neighbours (GLM Team 2024)."""

from functools import partial

from megazero.models.llama.family import LlamaFamily, Variant, llama_problems
from megazero.models.qwen import QWEN2_FORMAT

_ROTATED = 0.5  # of a head
_NORMS = "input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"
GLM4_FORMAT = QWEN2_FORMAT.variant(
    "glm4",
    extra=lambda model: {
        "head_dim": model.head_size,
        "rope_theta": model.rope_theta,
        "partial_rotary_factor": _ROTATED,
    },
    problems=partial(llama_problems, rotated=_ROTATED),
)
GLM4 = LlamaFamily(
    Variant(out_bias=False, norm_place="around", norms=_NORMS, fused=("gate_up",), rotates_adjacent=True),
    GLM4_FORMAT,
    ("rope_theta", "head_dim", "attention_bias"),
)
