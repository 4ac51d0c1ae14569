"""The yardstick: Llama, GPT-2 and AdamW in plain formulas, on one process, in any floating dtype.

A parallel run is right when it computes what this file computes. So nothing here comes from the package under test:
a model is a dict of tensors under the Hugging Face names, and a forward pass is a function of that dict.

    weights, tokens -> logits -> loss_sum / count -> gradients -> clip -> AdamW
                       `-- labels: the token that follows each position, -100 where none is to be learned

    tokens       t t t t t | t t t        several documents in one row: none sees another, and each begins at position 0
    documents    0 0 0 0 0 | 1 1 1        the number of each token's document; left out, a row is one document
    positions    0 1 2 3 4 | 0 1 2

Letters in shapes: b batch, s sequence, d hidden, h heads, k key-value heads, e head dimension, v vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # the label of a position that carries no loss


@dataclass(frozen=True)
class PlainConfig:
    """The shape of one model.

    Raises: ValueError for a shape that neither family has.
    """

    family: str  # "llama" | "gpt2"
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    vocab_size: int
    seq_len: int  # the rows of GPT-2's position table; Llama has none
    tie_embeddings: bool
    norm_eps: float
    rope_theta: float  # Llama only
    sliding_window: int | None = None  # Llama only: how many positions a token sees, its own among them (Mistral)
    num_experts: int = 0  # Llama only: MLPs of a layer, of which each token takes some (Mixtral); 0 for one MLP
    experts_per_token: int = 0
    router_aux_coef: float = 0.0  # of the two losses of `balance_sum`
    router_z_coef: float = 0.0
    final_logit_softcapping: float | None = None  # of the scores of the next token (Gemma 2)
    width_ratio: float = 1.0  # muP: times as wide as the model whose rates and initial values are given
    base_head_dim: int | None = None  # muP: that model's head size; None for the same
    z_loss_coef: float = 0.0  # of the loss on the scores' logsumexp (PaLM)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


# ---------------------------------------------------------------------------------------------------------------------
# Names and shapes


def parameter_shapes(config: PlainConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's Hugging Face name and shape, in the order of `named_parameters()`."""
    return _llama_shapes(config) if config.family == "llama" else _gpt2_shapes(config)


def _llama_shapes(config: PlainConfig) -> dict[str, tuple[int, ...]]:
    """Matrices lie as in `torch.nn.Linear`: [out, in]."""
    d, f, kv = config.hidden_size, config.ffn_hidden_size, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (d, d),
            f"{layer}.self_attn.k_proj.weight": (kv, d),
            f"{layer}.self_attn.v_proj.weight": (kv, d),
            f"{layer}.self_attn.o_proj.weight": (d, d),
        }
        if config.num_experts:
            shapes[f"{layer}.block_sparse_moe.gate.weight"] = (config.num_experts, d)
        for mlp, (gate, up, down) in _mlps(layer, config):
            shapes |= {f"{mlp}.{gate}.weight": (f, d), f"{mlp}.{up}.weight": (f, d), f"{mlp}.{down}.weight": (d, f)}
        shapes |= {f"{layer}.input_layernorm.weight": (d,), f"{layer}.post_attention_layernorm.weight": (d,)}
    shapes["model.norm.weight"] = (d,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes


def _mlps(layer: str, config: PlainConfig) -> list[tuple[str, tuple[str, str, str]]]:
    """The prefix of each MLP of a layer, and what its gate, up and down projections are called."""
    if not config.num_experts:
        return [(f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj"))]
    return [(f"{layer}.block_sparse_moe.experts.{e}", ("w1", "w3", "w2")) for e in range(config.num_experts)]


def _gpt2_shapes(config: PlainConfig) -> dict[str, tuple[int, ...]]:
    """Matrices lie as in Hugging Face's `Conv1D`: [in, out]."""
    d, f = config.hidden_size, config.ffn_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config.vocab_size, d),
        "transformer.wpe.weight": (config.seq_len, d),
    }
    for i in range(config.num_layers):
        layer = f"transformer.h.{i}"
        shapes |= {
            f"{layer}.ln_1.weight": (d,),
            f"{layer}.ln_1.bias": (d,),
            f"{layer}.attn.c_attn.weight": (d, 3 * d),
            f"{layer}.attn.c_attn.bias": (3 * d,),
            f"{layer}.attn.c_proj.weight": (d, d),
            f"{layer}.attn.c_proj.bias": (d,),
            f"{layer}.ln_2.weight": (d,),
            f"{layer}.ln_2.bias": (d,),
            f"{layer}.mlp.c_fc.weight": (d, f),
            f"{layer}.mlp.c_fc.bias": (f,),
            f"{layer}.mlp.c_proj.weight": (f, d),
            f"{layer}.mlp.c_proj.bias": (d,),
        }
    return shapes | {"transformer.ln_f.weight": (d,), "transformer.ln_f.bias": (d,)}


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Weight decay falls on matrices, embeddings among them; never on biases and norms."""
    return len(shape) >= 2


def is_hidden(name: str, shape: tuple[int, ...]) -> bool:
    """Whether both dimensions of a weight grow with the width: those of the blocks' matrices."""
    return len(shape) == 2 and not any(key in name for key in ("embed", "wte", "wpe", "lm_head"))


# ---------------------------------------------------------------------------------------------------------------------
# Model


def logits(
    weights: Mapping[str, Tensor],
    config: PlainConfig,
    tokens: Tensor,
    documents: Tensor | None = None,
    routed: list[Tensor] | None = None,
) -> Tensor:
    """Scores of the next token.  tokens, documents: [b, s] -> [b, s, v], in the dtype of the weights.  `routed` gets the
    scores of each layer's router, [b, s, experts]."""
    documents = torch.zeros_like(tokens) if documents is None else documents
    if config.family == "gpt2":
        scores = _gpt2_logits(weights, config, tokens, documents)
    else:
        scores = _llama_logits(weights, config, tokens, documents, [] if routed is None else routed)
    scores, cap = scores / config.width_ratio, config.final_logit_softcapping
    return scores if cap is None else cap * torch.tanh(scores / cap)


def _llama_logits(
    weights: Mapping[str, Tensor], config: PlainConfig, tokens: Tensor, documents: Tensor, routed: list[Tensor]
) -> Tensor:
    """Touvron et al. 2023: RMSNorm before each block, RoPE, SwiGLU, no biases."""
    embedding = weights["model.embed_tokens.weight"]
    unseen, positions = unseen_keys(documents, config.sliding_window), positions_in(documents)
    x = embedding[tokens]
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"

        normed = rms_norm(x, weights[f"{layer}.input_layernorm.weight"], config.norm_eps)
        q = split_heads(normed @ weights[f"{layer}.self_attn.q_proj.weight"].T, config.num_heads)
        k = split_heads(normed @ weights[f"{layer}.self_attn.k_proj.weight"].T, config.num_kv_heads)
        v = split_heads(normed @ weights[f"{layer}.self_attn.v_proj.weight"].T, config.num_kv_heads)
        q, k = rope(q, config.rope_theta, positions), rope(k, config.rope_theta, positions)
        mixed = causal_attention(q * attention_factor(config), k, v, unseen)
        x = x + mixed @ weights[f"{layer}.self_attn.o_proj.weight"].T

        normed = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], config.norm_eps)
        shares = torch.ones_like(x[..., :1])
        if config.num_experts:
            routed.append(normed @ weights[f"{layer}.block_sparse_moe.gate.weight"].T)
            shares = expert_shares(routed[-1], config.experts_per_token)
        for e, (mlp, keys) in enumerate(_mlps(layer, config)):
            gate, up, down = (weights[f"{mlp}.{key}.weight"].T for key in keys)
            x = x + shares[..., e, None] * ((swish(normed @ gate) * (normed @ up)) @ down)

    x = rms_norm(x, weights["model.norm.weight"], config.norm_eps)
    head = embedding if config.tie_embeddings else weights["lm_head.weight"]
    return x @ head.T


def _gpt2_logits(weights: Mapping[str, Tensor], config: PlainConfig, tokens: Tensor, documents: Tensor) -> Tensor:
    """Radford et al. 2019: LayerNorm before each block, learned positions, biases everywhere, tied head."""

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], config.norm_eps)

    embedding = weights["transformer.wte.weight"]
    unseen = unseen_keys(documents)
    x = embedding[tokens] + weights["transformer.wpe.weight"][positions_in(documents)]
    for i in range(config.num_layers):
        layer = f"transformer.h.{i}"
        qkv = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn")
        q, k, v = (split_heads(part, config.num_heads) for part in qkv.split(config.hidden_size, dim=-1))
        x = x + linear(causal_attention(q, k, v, unseen), f"{layer}.attn.c_proj")
        up = linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc")
        x = x + linear(gelu_tanh(up), f"{layer}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ embedding.T


def expert_shares(scores: Tensor, k: int) -> Tensor:
    """How much of each expert's output a token takes: the softmax of its scores over its k best experts, 0 for all others.
    [b, s, experts], unchanged in shape.
    Source: Jiang et al. 2024, section 2.1."""
    return scores.masked_fill(~best_experts(scores, k), -math.inf).softmax(dim=-1)


def best_experts(scores: Tensor, k: int) -> Tensor:
    """Whether a token goes to an expert.  Of equal scores the first expert's is the better one.  [b, s, experts] -> bool."""
    expert = torch.arange(scores.shape[-1])
    one, other = scores[..., :, None], scores[..., None, :]
    before = (one > other) | ((one == other) & (expert[:, None] < expert))  # [b, s, one, other]
    return before.sum(dim=-2) < k


def attention_factor(config: PlainConfig) -> float:
    """muP: scores of attention fall with the size of a head, not with its root: sqrt(base) / d in place of 1 / sqrt(d).
    Source: Yang et al. 2022, definition 4.1."""
    return 1.0 if config.base_head_dim is None else math.sqrt(config.base_head_dim / config.head_dim)


def swish(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x * torch.sigmoid(x)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[b, s, heads * e] -> [b, heads, s, e]."""
    b, s, width = x.shape
    return x.view(b, s, heads, width // heads).transpose(1, 2)


def positions_in(documents: Tensor) -> Tensor:
    """How many tokens of the same document come before each.  [b, s], unchanged in shape."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril(diagonal=-1).sum(dim=-1)


def unseen_keys(documents: Tensor, window: int | None = None) -> Tensor:
    """Whether a query (row) must not see a key (column): a later one, one of another document, or one that is `window` or
    more positions before.  [b, s] -> bool [b, 1, s, s]."""
    s = documents.shape[1]
    query, key = torch.arange(s, device=documents.device)[:, None], torch.arange(s, device=documents.device)
    unseen = (documents[:, :, None] != documents[:, None, :]) | (key > query)
    return (unseen if window is None else unseen | (query - key >= window)).unsqueeze(1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, unseen: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(e)) v, each position looking at itself and those before it.

    q: [b, h, s, e]; k, v: [b, k, s, e], each serving h / k query heads in a row -> [b, s, h * e].
    unseen: of `unseen_keys`; left out, each row is one document.
    Source: Vaswani et al. 2017; grouped heads, Ainslie et al. 2023.
    """
    b, h, s, e = q.shape
    k = k.repeat_interleave(h // k.shape[1], dim=1)
    v = v.repeat_interleave(h // v.shape[1], dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(e)
    if unseen is None:
        unseen = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(diagonal=1)
    probabilities = scores.masked_fill(unseen, -math.inf).softmax(dim=-1)
    return (probabilities @ v).transpose(1, 2).reshape(b, s, h * e)


def rope(x: Tensor, theta: float, positions: Tensor | None = None) -> Tensor:
    """Turn the pair (x[i], x[i + e/2]) at position p by the angle p * theta^(-2i/e).  x: [b, h, s, e]; positions: [b, s],
    0 ... s - 1 if left out.
    Source: Su et al. 2021, with Hugging Face's pairing of the two halves."""
    s, e = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, e, 2, dtype=x.dtype, device=x.device) / e)
    if positions is None:
        positions = torch.arange(s, device=x.device).unsqueeze(0)
    angles = (positions.to(x.dtype)[:, :, None] * frequencies).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019)."""
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / std * weight + bias over the last axis (Ba et al. 2016)."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(dim=-1, keepdim=True) + eps) * weight + bias


def gelu_tanh(x: Tensor) -> Tensor:
    """GPT-2's GELU (Hendrycks & Gimpel 2016, the tanh approximation; `gelu_new` at Hugging Face)."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# ---------------------------------------------------------------------------------------------------------------------
# Loss


def loss_sum(
    weights: Mapping[str, Tensor],
    config: PlainConfig,
    tokens: Tensor,
    labels: Tensor,
    documents: Tensor | None = None,
    routed: list[Tensor] | None = None,
) -> Tensor:
    """Sum of -log p(label) over the positions whose label is not -100; a scalar, in nats.

    Args:
        tokens: [b, s].
        labels: [b, s], already shifted: labels[:, t] is what position t should predict.  The caller masks those across a
            document's border.
        documents: [b, s]; left out, each row is one document.
        routed: see `logits`.
    """
    return _loss_of(logits(weights, config, tokens, documents, routed), labels)


def _loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    kept = labels != IGNORED
    of_label = scores[kept].gather(-1, labels[kept].unsqueeze(-1)).squeeze(-1)
    return (scores[kept].logsumexp(dim=-1) - of_label).sum()


def balance_sum(config: PlainConfig, routed: list[Tensor], labels: Tensor) -> Tensor:
    """Losses on the routers' scores [b, s, experts] of each layer, over positions whose label is not -100; a scalar.

    Of each sample with n such positions: n * aux * sum over experts of f * P, where P is the mean probability of an expert,
    and f is how many of the positions go to it, over how many would if all experts had as many.  And of each position
    z * logsumexp^2.
    Source: DeepSeek-AI 2024, equations 17 to 20; Zoph et al. 2022, equation 5.
    """
    total, k = torch.zeros(()), config.experts_per_token
    for scores in routed:
        for sample, kept in zip(scores, labels != IGNORED, strict=True):
            chosen, n = best_experts(sample[kept], k), int(kept.sum())
            frequency = chosen.sum(0) * config.num_experts / (k * n) if n else torch.zeros(())
            probability = sample[kept].softmax(dim=-1).sum(0)  # n times the mean
            total = total + config.router_aux_coef * (frequency * probability).sum()
            total = total + config.router_z_coef * sample[kept].logsumexp(dim=-1).square().sum()
    return total


def count(labels: Tensor) -> int:
    """How many positions carry loss."""
    return int((labels != IGNORED).sum())


# ---------------------------------------------------------------------------------------------------------------------
# Training


@dataclass(frozen=True)
class PlainStep:
    """What one step saw, before it changed the weights."""

    loss: float  # nats per unmasked token
    grad_norm: float  # before clipping
    gradients: dict[str, Tensor]  # before clipping


class PlainTrainer:
    """AdamW with global-norm clipping on whole batches.

    Args:
        weights: exactly the names and shapes of `parameter_shapes(config)`; copied, so the caller's stay as they are.
        lr: used by every step that brings none of its own.
        grad_clip: the largest gradient norm let through; 0 turns clipping off.
        dtype: of the weights, the moments and all arithmetic.

    Raises: ValueError when a weight is missing, left over or of the wrong shape.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: PlainConfig,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        grad_clip: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = config
        self.lr, self.betas, self.eps = lr, betas, eps
        self.weight_decay, self.grad_clip = weight_decay, grad_clip
        self.weights = {
            name: weights[name].detach().to(dtype, copy=True).requires_grad_() for name in parameter_shapes(config)
        }
        self.first_moment = {name: torch.zeros_like(w, requires_grad=False) for name, w in self.weights.items()}
        self.second_moment = {name: torch.zeros_like(w, requires_grad=False) for name, w in self.weights.items()}
        self.steps_taken = 0

    def gradients(
        self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None
    ) -> tuple[float, dict[str, Tensor]]:
        """The mean loss over all unmasked tokens of the batch, and by name its gradient, with that of the routers' losses.
        As `loss_sum` otherwise.
        """
        routed: list[Tensor] = []
        unmasked = count(labels)
        scores = logits(self.weights, self.config, tokens, documents, routed)
        loss = _loss_of(scores, labels) / unmasked
        balanced = loss + balance_sum(self.config, routed, labels) / unmasked
        # Chowdhery et al. 2022, section 5: z * log^2 Z
        balanced = (
            balanced + self.config.z_loss_coef * scores[labels != IGNORED].logsumexp(-1).square().sum() / unmasked
        )
        by_weight = torch.autograd.grad(balanced, list(self.weights.values()))
        return loss.item(), dict(zip(self.weights, by_weight, strict=True))

    @staticmethod
    def gradient_norm(gradients: Mapping[str, Tensor]) -> float:
        """The length of all gradients laid end to end, summed in fp64."""
        return math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))

    def step(
        self, tokens: Tensor, labels: Tensor, lr: float | None = None, documents: Tensor | None = None
    ) -> PlainStep:
        """Train on one global batch; `lr` takes the place of the trainer's own for this step only."""
        loss, gradients = self.gradients(tokens, labels, documents)
        norm = self.gradient_norm(gradients)
        scale = min(1.0, self.grad_clip / (norm + 1e-6)) if self.grad_clip > 0 else 1.0
        clipped = {name: g * scale for name, g in gradients.items()}
        self._adamw(clipped, self.lr if lr is None else lr)
        return PlainStep(loss, norm, gradients)

    @torch.no_grad()
    def _adamw(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Loshchilov & Hutter 2019, algorithm 2, with the decay scaled by the learning rate as in PyTorch:

        p <- p (1 - lr wd);   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
        p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        """
        self.steps_taken += 1
        t, (b1, b2) = self.steps_taken, self.betas
        for name, p in self.weights.items():
            g, m, v = gradients[name], self.first_moment[name], self.second_moment[name]
            # muP: Yang et al. 2022, table 8, row "Adam LR"; lr * decay stays, as in their package's MuAdam
            rate = lr / self.config.width_ratio if is_hidden(name, tuple(p.shape)) else lr
            if decays(name, tuple(p.shape)):
                p.copy_(p * (1 - lr * self.weight_decay))
            m.copy_(b1 * m + (1 - b1) * g)
            v.copy_(b2 * v + (1 - b2) * g * g)
            m_hat = m / (1 - b1**t)
            v_hat = v / (1 - b2**t)
            p.copy_(p - rate * m_hat / (v_hat.sqrt() + self.eps))
