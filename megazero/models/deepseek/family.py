"""DeepSeek-V2 and V3: multi-head latent attention, shared experts, first layers without experts (DeepSeek-AI 2024).

deepseek_v2    a softmax chooses experts; groups are ranked by their best expert
deepseek_v3    sigmoids and a balancing bias choose experts; groups are ranked by their two best experts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megazero.models.config import ModelConfig
from megazero.models.family import HuggingFaceFormat, ModelFamily, ModelRule
from megazero.models.llama.family import LLAMA_2, LLAMA_FORMAT, read_rope, written_rope
from megazero.models.mixtral import ExpertFamily
from megazero.settings import Problem

if TYPE_CHECKING:
    from megazero.models.build_context import BuildContext
    from megazero.models.gpt import Block

_LATENT_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_GROUPS = "expert_groups", "groups_per_token"
_READS = """
    rope_theta rope_scaling expert_hidden_size expert_groups groups_per_token routed_scaling_factor router_aux_coef
    router_z_coef first_dense_layers q_lora_rank
"""


class DeepseekFamily(ExpertFamily):
    """The family DeepSeek-V2 or V3.

    Args:
        hugging_face, unset: see `ExpertFamily`.  If `unset` has `router_bias_rate`, sigmoids and a bias choose the experts.
    """

    def __init__(self, hugging_face: HuggingFaceFormat, unset: Mapping[str, Any]) -> None:
        unset = {**_LATENT_SIZES, **unset}
        super().__init__(LLAMA_2, hugging_face, unset, (*_READS.split(), *unset))

    hidden_size_divisor = ModelFamily.hidden_size_divisor  # the size of heads has keys of its own

    def rules(self) -> tuple[ModelRule, ...]:
        """The rules of families with experts, and those of latent attention, dense layers and groups of experts."""
        keys = *_LATENT_SIZES, *_GROUPS, "num_heads", "num_kv_heads", "num_layers", "first_dense_layers", "num_experts"
        return (*super().rules(), ModelRule((*(f"model.{key}" for key in keys), "parallel.tp"), self.check_sizes))

    def check_kv_heads(self, _: ModelConfig, __: int) -> Iterator[Problem]:
        """Accept any number: `check_sizes` checks it."""
        return iter(())

    def check_ffn(self, model: ModelConfig, tp: int) -> Iterator[Problem]:
        """Check that tp divides the MLPs of dense layers.  `check_sizes` checks shared experts; tp splits no others."""
        return super(ExpertFamily, self).check_ffn(model, tp) if model.first_dense_layers else iter(())

    def check_sizes(self, model: ModelConfig, tp: int) -> Iterator[Problem]:
        """Check the relations between the keys of these families."""
        model = self.complete(model)
        heads, size, layers, groups = model.num_heads, model.head_size, model.num_layers, model.expert_groups
        count, k, each = model.num_experts or 1, model.experts_per_token or 1, (model.num_experts or 1) // groups
        least = 2 if model.router_bias_rate is not None and groups > 1 else 1  # what ranks a group
        equal = f"must make equal groups of {least} or more of num_experts={count}; 1 makes one group of all"
        held, shared = model.groups_per_token * each, (model.shared_experts or 0) * model.expert_size
        enough = f"must hold experts_per_token={k}: {-(-k // max(each, 1))} groups or more; these hold {held}"
        relations = (
            ("num_kv_heads", model.num_kv_heads == heads, f"must be num_heads={heads}: each head has its own keys"),
            ("qk_rope_head_dim", (model.qk_rope_head_dim or 0) % 2 == 0, "must be even: rotary positions turn pairs"),
            ("v_head_dim", (model.v_head_dim or 0) <= size, f"must be at most {size}, the size of a key"),
            ("first_dense_layers", model.first_dense_layers < layers, f"must be below num_layers={layers}"),
            ("expert_groups", each * groups == count and each >= least, equal),
            ("groups_per_token", model.groups_per_token <= groups, f"must be at most expert_groups={groups}"),
            ("groups_per_token", k <= held, enough),
            ("expert_hidden_size", shared % tp == 0, f"must be divisible by parallel.tp={tp} in shared experts"),
        )
        yield from (Problem(f"model.{key}", getattr(model, key), rule) for key, holds, rule in relations if not holds)

    def layer_weights(self, model: ModelConfig) -> float:
        """Count the elements of a layer's matrices: latents, q, keys and values, out; an MLP, or router and experts."""
        hidden, layers, kv_rank = model.hidden_size, model.num_layers, model.kv_lora_rank or 0
        q_rank, v_size = model.q_lora_rank or 0, model.num_heads * (model.v_head_dim or 0)
        attention = hidden * (q_rank + kv_rank + (model.qk_rope_head_dim or 0) + v_size)
        attention += (q_rank or hidden) * model.attention_size
        attention += kv_rank * (model.num_heads * (model.qk_nope_head_dim or 0) + v_size)
        dense = 3 * hidden * (model.ffn_hidden_size or 0)
        chosen = (model.experts_per_token or 0) + (model.shared_experts or 0)
        experts = hidden * ((model.num_experts or 0) + 3 * chosen * model.expert_size)
        return attention + experts + (dense - experts) * model.first_dense_layers / layers

    def blocks(self, context: BuildContext, layers: Sequence[int]) -> list[Block]:
        from megazero.models.deepseek.block import deepseek_blocks

        return deepseek_blocks(layers, context)


def _extra(model: ModelConfig, **further: object) -> dict[str, Any]:
    rope = written_rope(model.rope_theta, model.rope_scaling)
    return rope | {"q_lora_rank": model.q_lora_rank} | further


def _read_extra(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return further keys of [model].  A null q_lora_rank means no query latents; a missing one is 1536."""
    return read_rope(config) | {"q_lora_rank": config.get("q_lora_rank", 1536)}


def _extra_of_v2(model: ModelConfig) -> dict[str, Any]:
    method = "group_limited_greedy" if model.expert_groups > 1 else "greedy"
    return _extra(model, n_group=model.expert_groups, topk_group=model.groups_per_token, topk_method=method)


def _read_extra_of_v2(config: Mapping[str, Any]) -> dict[str, Any]:
    limited = config.get("topk_method") == "group_limited_greedy"
    groups = [config.get(key) or 1 if limited else 1 for key in ("n_group", "topk_group")]
    return _read_extra(config) | dict(zip(_GROUPS, groups, strict=True))


def _problems_of_v2(config: Mapping[str, Any], seq_len: int | None) -> Iterator[str]:
    if (method := config.get("topk_method", "greedy")) not in ("greedy", "group_limited_greedy"):
        yield f"topk_method={method!r} is not supported in a deepseek_v2; it must be 'greedy' or 'group_limited_greedy'"
    yield from LLAMA_FORMAT.problems(config, seq_len)


def _lost(config: Mapping[str, Any]) -> Iterator[str]:
    yield from LLAMA_FORMAT.lost(config)
    if layers := config.get("num_nextn_predict_layers"):
        yield f"num_nextn_predict_layers = {layers!r}: layers that predict further tokens are left out, as in transformers"


_FORMAT = LLAMA_FORMAT.variant("deepseek", lost=_lost)
V2_FORMAT = _FORMAT.variant("deepseek_v2", extra=_extra_of_v2, read_extra=_read_extra_of_v2, problems=_problems_of_v2)
# Its buffers are those of DeepSeek-V3's MTP, as in transformers.
V3_FORMAT = _FORMAT.variant("deepseek_v3", extra=partial(_extra, num_nextn_predict_layers=0), read_extra=_read_extra)
_V2 = {"num_experts": 64, "experts_per_token": 6, "shared_experts": 2}
_V3 = {"num_experts": 256, "experts_per_token": 8, "shared_experts": 1}
DEEPSEEK_V2 = DeepseekFamily(V2_FORMAT, _V2)
DEEPSEEK_V3 = DeepseekFamily(V3_FORMAT, _V3 | {"renormalize_gates": True, "router_bias_rate": 0.001})
