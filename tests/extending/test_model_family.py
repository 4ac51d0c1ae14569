"""The model family of docs/extending.md: Llama with an ungated GELU in its MLP, and LayerNorm at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from eight_ranks import registered, run_with, steps_of
from harness import run_world
from plain_model import causal_attention, gelu_tanh, layer_norm, rms_norm, rope, split_heads
from test_any_shape import _assert_agrees
from torch import Tensor, nn
from worlds import LR, STEPS, global_batch

from megazero.config import ConfigError, ResolvedRun
from megazero.layers.counter_rng import derive_key, normal
from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES

pytestmark = pytest.mark.slow  # starts whole runs


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with registered(FAMILIES, "gelu-llama"):
        yield


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, kv, ffn = model.hidden_size, model.hidden_size // 2, model.ffn_hidden_size or 0
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (model.vocab_size, d), "norm.weight": (d,), "norm.bias": (d,)}
    for layer in (f"layers.{index}" for index in range(model.num_layers)):
        rows = {"q": d, "k": kv, "v": kv, "o": d}
        shapes |= {f"{layer}.self_attn.{key}_proj.weight": (rows[key], d) for key in rows}
        shapes |= {f"{layer}.up.weight": (ffn, d), f"{layer}.down_proj.weight": (d, ffn)}
        shapes |= {f"{layer}.norm_1.weight": (d,), f"{layer}.norm_2.weight": (d,)}
    return shapes if model.tie_embeddings else shapes | {"head.weight": (model.vocab_size, d)}


def _initial(run: ResolvedRun) -> dict[str, Tensor]:
    model, weights = run.config.model, {}
    for name, shape in _shapes(model).items():
        if len(shape) == 1:
            weights[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            continue
        onto_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = model.init_std / (math.sqrt(2 * model.num_layers) if onto_residual else 1.0)
        numbers = normal(derive_key(run.config.training.seed, name), torch.arange(shape[0] * shape[1]))
        weights[name] = (numbers * std).view(shape)
    return weights


def _logits(w: dict[str, Tensor], model: ModelConfig, tokens: Tensor) -> Tensor:
    x = w["embed.weight"][tokens]
    for layer in (f"layers.{index}" for index in range(model.num_layers)):
        normed = rms_norm(x, w[f"{layer}.norm_1.weight"], model.norm_eps)
        q, k, v = (
            split_heads(normed @ w[f"{layer}.self_attn.{key}_proj.weight"].T, heads)
            for key, heads in (("q", 4), ("k", 2), ("v", 2))
        )
        mixed = causal_attention(rope(q, model.rope_theta), rope(k, model.rope_theta), v)
        x = x + mixed @ w[f"{layer}.self_attn.o_proj.weight"].T
        normed = rms_norm(x, w[f"{layer}.norm_2.weight"], model.norm_eps)
        x = x + gelu_tanh(normed @ w[f"{layer}.up.weight"].T) @ w[f"{layer}.down_proj.weight"].T
    x = layer_norm(x, w["norm.weight"], w["norm.bias"], model.norm_eps)
    return x @ w["embed.weight" if model.tie_embeddings else "head.weight"].T


def _plainly(run: ResolvedRun) -> dict[str, Any]:
    """Three steps of the formula above with torch's AdamW."""
    model, given, initial = run.config.model, run.config.optimizer, _initial(run)
    weights = {name: tensor.clone().requires_grad_() for name, tensor in initial.items()}
    groups = [
        {"params": [w for w in weights.values() if w.ndim == 2], "weight_decay": given.weight_decay},
        {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, LR, given.betas, given.eps)
    out: dict[str, Any] = {"initial": initial, "loss": [], "norm": []}
    for step in range(STEPS):
        tokens, labels = global_batch(run, step)
        loss = nn.functional.cross_entropy(_logits(weights, model, tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        out.setdefault("gradients", {name: w.grad.clone() for name, w in weights.items() if w.grad is not None})
        out["loss"].append(loss.item())
        out["norm"].append(float(nn.utils.clip_grad_norm_(weights.values(), given.grad_clip)))
        optimizer.step()
    return out | {"weights": {name: w.detach() for name, w in weights.items()}}


@pytest.mark.parametrize("tied", [False, True])
def test_a_registered_family_gives_the_plain_models_run(tied: bool, tmp_path: Path) -> None:
    run = run_with(tmp_path, model={"family": "gelu-llama", "tie_embeddings": tied})
    _assert_agrees(steps_of(run), run_world(1, lambda _: _plainly(run))[0])


def test_its_sizes_are_checked_and_its_name_is_known(tmp_path: Path) -> None:
    assert run_with(tmp_path, model={"family": "gelu-llama", "rope_theta": 500.0}).config.model.rope_theta == 500.0
    with pytest.raises(ConfigError, match=r"model\.ffn_hidden_size = 63: must be divisible by parallel\.tp=2"):
        run_with(tmp_path, model={"family": "gelu-llama", "ffn_hidden_size": 63})
    with pytest.raises(ConfigError, match=r'must be "llama", .* or "gelu-llama"; write "gelu-llama"'):
        run_with(tmp_path, model={"family": "gelu-lama"})
