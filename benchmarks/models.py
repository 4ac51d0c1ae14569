"""The peers' model: a Llama in plain torch modules, [batch, seq, hidden], with q|k|v and gate|up as one matrix each.

Under tensor parallelism each of the two is stored part by part, rank 0's q|k|v before rank 1's, so that a cut by rows gives
every rank whole heads; a peer then cuts nothing but rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.setting import LR
from megazero.models.config import ModelConfig
from megazero.models.stages import StageLayout, cut_evenly


class PlainBlock(nn.Module):
    """One Llama layer.  [batch, seq, hidden], unchanged in shape.

    Args:
        model: sizes.
        layer: which one.
        weights: whole logical tensors by name.
        rope: cos and sin, [seq, head size].
        tp: ranks that the fused matrices are laid out for.
    """

    def __init__(
        self, model: ModelConfig, layer: int, weights: Mapping[str, Tensor], rope: tuple[Tensor, Tensor], tp: int
    ) -> None:
        super().__init__()

        def linear(*names: str) -> nn.Linear:
            wholes = [weights[f"model.layers.{layer}.{name}.weight"] for name in names]
            value = torch.cat([whole.chunk(tp)[part] for part in range(tp) for whole in wholes])
            made = nn.Linear(value.shape[1], value.shape[0], bias=False, device="meta")
            made.weight = nn.Parameter(value.clone())
            return made

        def gain(name: str) -> nn.RMSNorm:
            made = nn.RMSNorm(model.hidden_size, model.norm_eps)
            made.weight.data.copy_(weights[f"model.layers.{layer}.{name}.weight"])
            return made

        self.head_size, self.rope = model.hidden_size // model.num_heads, rope
        self.kv_share = (model.num_kv_heads or model.num_heads) / model.num_heads
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = linear("self_attn.o_proj")
        self.build_mlp(model, linear)
        self.attention_norm, self.mlp_norm = gain("input_layernorm"), gain("post_attention_layernorm")

    def build_mlp(self, _: ModelConfig, linear: Callable[..., nn.Linear]) -> None:
        """Make the layers of `mlp`; `linear` gives that of the fused matrices of some names."""
        self.gate_up, self.down = linear("mlp.gate_proj", "mlp.up_proj"), linear("mlp.down_proj")

    def mlp(self, x: Tensor) -> Tensor:
        """The second branch."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result

    def _rotate(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return (x * self.rope[0] + torch.cat([-high, low], dim=-1) * self.rope[1]).to(x.dtype)

    def mix(self, qkv: Tensor) -> Tensor:
        """Attention of the heads in a fused projection.  [batch, seq, 3 * heads * size] -> [batch, seq, heads * size]."""
        batch, seq, width = qkv.shape
        heads = width // self.head_size
        queries = round(heads / (1 + 2 * self.kv_share))
        keys = (heads - queries) // 2
        q, k, v = qkv.view(batch, seq, heads, self.head_size).transpose(1, 2).split([queries, keys, keys], dim=1)
        q, k = self._rotate(q), self._rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=keys < queries)
        return mixed.transpose(1, 2).reshape(batch, seq, queries * self.head_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.mix(self.qkv(self.attention_norm(x))))
        return x + self.mlp(self.mlp_norm(x))


class PlainExpertBlock(PlainBlock):
    """A layer of Mixtral: a loop over experts, each of which takes its tokens' rows out and adds its results to them."""

    def build_mlp(self, model: ModelConfig, linear: Callable[..., nn.Linear]) -> None:
        self.k, own = model.experts_per_token or 1, "block_sparse_moe"
        self.router = linear(f"{own}.gate")
        experts = [f"{own}.experts.{expert}" for expert in range(model.num_experts or 0)]
        self.gate_ups = nn.ModuleList(linear(f"{name}.w1", f"{name}.w3") for name in experts)
        self.downs = nn.ModuleList(linear(f"{name}.w2") for name in experts)

    def mlp(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        gates, chosen = self.router(rows).float().softmax(-1).topk(self.k)
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(rows)
        for expert, (gate_up, down) in enumerate(zip(self.gate_ups, self.downs, strict=True)):
            token, choice = torch.where(chosen == expert)
            gate, up = gate_up(rows[token]).chunk(2, dim=-1)
            out = out.index_add(0, token, down(F.silu(gate) * up) * gates[token, choice, None])
        return out.view_as(x)


class PlainStage(nn.Module):
    """The layers of one pipeline stage: int64 [batch, seq] or hidden states -> hidden states or logits.

    Args:
        model: sizes.
        layout: what the stage holds; the whole model by default.
        weights: whole logical tensors by name.
        tp: see `PlainBlock`.
    """

    def __init__(
        self, model: ModelConfig, weights: Mapping[str, Tensor], layout: StageLayout | None = None, tp: int = 1
    ) -> None:
        super().__init__()
        layout = layout or cut_evenly(model.num_layers, 1)[0]
        size = model.hidden_size // model.num_heads
        frequency = model.rope_theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.outer(torch.arange(model.seq_len, dtype=torch.float64), frequency).repeat(1, 2)
        rope = angle.cos().float(), angle.sin().float()
        self.embedding: nn.Embedding | None = None
        self.norm: nn.RMSNorm | None = None
        self.head: nn.Linear | None = None
        if layout.has_embedding:
            self.embedding = nn.Embedding.from_pretrained(weights["model.embed_tokens.weight"].clone(), freeze=False)
        block = PlainExpertBlock if model.num_experts else PlainBlock
        self.blocks = nn.ModuleList(block(model, layer, weights, rope, tp) for layer in layout.layers)
        if layout.has_head:
            self.norm = nn.RMSNorm(model.hidden_size, model.norm_eps)
            self.norm.weight.data.copy_(weights["model.norm.weight"])
            self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False, device="meta")
            self.head.weight = nn.Parameter(weights["lm_head.weight"].clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean nats per token.  [batch, seq, vocab], int64 [batch, seq] -> scalar."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def groups_of(parameters: Sequence[nn.Parameter], decay: float) -> list[dict[str, object]]:
    """Optimizer groups: matrices decay, vectors do not."""
    groups: list[dict[str, object]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


ADAMW = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
DECAY = 0.1


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """Fused AdamW with megazero's defaults."""
    return torch.optim.AdamW(groups_of(parameters, DECAY), **ADAMW)  # type: ignore[arg-type]
