"""Mixtral: Mistral with a mixture of experts in place of each MLP (Jiang et al. 2024), and the class of such families."""

from collections.abc import Iterator, Mapping
from typing import Any

from megazero.models.config import ModelConfig
from megazero.models.family import HuggingFaceFormat, ModelRule, attention_weights
from megazero.models.llama.family import LLAMA_FORMAT, ROTARY_READS, LlamaFamily, Variant, read_rope
from megazero.settings import Problem, nearest_text

EXPERT_KEYS = "num_experts", "experts_per_token", "renormalize_gates", "router_aux_coef", "router_z_coef"


class ExpertFamily(LlamaFamily):
    """A family like Llama with a mixture of experts in every layer.

    Args:
        variant, hugging_face: see `LlamaFamily`.
        unset: defaults of the keys that a run file leaves out, equal to those of transformers.
        reads: see `ModelFamily`.
    """

    def __init__(
        self, variant: Variant, hugging_face: HuggingFaceFormat, unset: Mapping[str, Any], reads: tuple[str, ...]
    ) -> None:
        super().__init__(variant, hugging_face, reads)
        self.unset = unset

    def complete(self, model: ModelConfig) -> ModelConfig:
        model = super().complete(model)
        per_token = min(self.unset["experts_per_token"], model.num_experts or self.unset["num_experts"])
        unset = {**self.unset, "experts_per_token": per_token, "expert_hidden_size": model.ffn_hidden_size}
        update = {key: value for key, value in unset.items() if key in self.reads and getattr(model, key) is None}
        return model.model_copy(update=update)

    def rules(self) -> tuple[ModelRule, ...]:
        """The rules of families like Llama, and those of experts."""
        per_token = ModelRule(("model.num_experts", "model.experts_per_token"), self.check_per_token)
        return (*super().rules(), per_token)

    def check_ffn(self, _: ModelConfig, __: int) -> Iterator[Problem]:
        """Accept any inner size, because tp does not split experts."""
        return iter(())

    def check_per_token(self, model: ModelConfig, _: int) -> Iterator[Problem]:
        """Check that experts_per_token is at most num_experts."""
        count = model.num_experts or self.unset["num_experts"]
        if model.experts_per_token is not None and model.experts_per_token > count:
            rule = f"must be at most num_experts={count}"
            yield Problem("model.experts_per_token", model.experts_per_token, rule, nearest_text([count]))

    def layer_weights(self, model: ModelConfig) -> float:
        """Count the elements of a layer's matrices: q, k, v, out; the router; gate, up, down of a token's experts."""
        experts, per_token = model.num_experts or 0, model.experts_per_token or 0
        return attention_weights(model) + model.hidden_size * (experts + 3 * per_token * model.expert_size)


def lost_balance(config: Mapping[str, Any]) -> Iterator[str]:
    """Return lines on losses that an import drops: transformers computes its auxiliary loss over all layers and a batch."""
    yield from LLAMA_FORMAT.lost(config)
    if config.get("output_router_logits"):
        coefficient = config.get("router_aux_loss_coef")
        yield f"router_aux_loss_coef = {coefficient!r}: transformers adds this loss over a whole batch; here none is added"


def _read_extra(config: Mapping[str, Any]) -> dict[str, Any]:
    return LLAMA_FORMAT.read_extra(config) | read_rope(config, theta=1e6)


MIXTRAL_FORMAT = LLAMA_FORMAT.variant("mixtral", read_extra=_read_extra, lost=lost_balance)


class MixtralFamily(ExpertFamily):
    """Mixtral.  Its gates are always renormalized."""

    def rules(self) -> tuple[ModelRule, ...]:
        """Return the rules of families with experts, and that gates are renormalized."""
        return (*super().rules(), ModelRule(("model.renormalize_gates",), self.check_gates))

    def check_gates(self, model: ModelConfig, _: int) -> Iterator[Problem]:
        """Check that renormalize_gates is not false."""
        if model.renormalize_gates is False:
            rule = f"must be true for {model.family}, which has no other form"
            yield Problem("model.renormalize_gates", False, rule, "leave it out")


MIXTRAL = MixtralFamily(
    Variant(experts=("block_sparse_moe", ("w1", "w3", "w2"))),
    MIXTRAL_FORMAT,
    {"num_experts": 8, "experts_per_token": 2, "renormalize_gates": True},
    (*ROTARY_READS, *EXPERT_KEYS),
)
