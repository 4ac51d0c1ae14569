"""Every family computes what transformers does, on one rank and on every shape, and goes in and out unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from torch import Tensor
from worlds import LR, difference, engine_on, global_batch, micro_batches, run_of, state_on, whole

from megazero.checkpoint.hugging_face.config import family_of, format_of, logical_shapes
from megazero.checkpoint.hugging_face.exporter import export_model
from megazero.checkpoint.index import HF_CONFIG
from megazero.config import ConfigError, ResolvedRun, RunConfig, load_config, resolve
from megazero.engine import Engine
from megazero.engine.phases import Position
from megazero.formats.hugging_face import import_model, model_section
from megazero.models.build_context import BuildContext
from megazero.models.config import ModelConfig, RopeScaling
from megazero.models.gpt import MicroBatch
from megazero.models.registry import FAMILIES, PRESETS
from megazero.parallel_state import Axis

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]  # starts whole runs

TOLERANCE = 1e-5
ORIGINAL = 8  # positions before scaling; the samples have 32
LLAMA_3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": ORIGINAL}
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
PHI = {"partial_rotary_factor": 1.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
LATENT |= {"first_k_dense_replace": 1}
# What transformers is told beside the sizes: each family, and each option of all of them, at least once.
CASES: dict[str, dict[str, Any]] = {
    "llama3": {
        "model_type": "llama",
        "rope_parameters": LLAMA_3 | {"rope_theta": 5e5, "original_max_position_embeddings": ORIGINAL},
    },
    "llama yarn": {
        "model_type": "llama",
        "head_dim": 16,
        "rms_norm_eps": 3e-4,
        "rope_parameters": YARN | {"rope_theta": 1e4},
    },
    "llama linear": {
        "model_type": "llama",
        "head_dim": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 700.0},
    },
    "olmo2": {
        "model_type": "olmo2",
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": YARN | {"rope_theta": 1e6}},
    # a window that does not divide the samples, and none
    "mistral": {"model_type": "mistral", "sliding_window": 7, "head_dim": 16, "rope_parameters": DEFAULT},
    "mistral no window": {"model_type": "mistral", "sliding_window": None, "rope_parameters": DEFAULT},
    "llama biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_parameters": DEFAULT},
    "phi3": {"model_type": "phi3", "sliding_window": 7, "pad_token_id": None, "rope_parameters": PHI | DEFAULT},
    "smollm3": {
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "rope_parameters": YARN | {"rope_theta": 2e6},
    },
    "granite": {
        "model_type": "granite",
        "attention_bias": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.11,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
        "rope_parameters": DEFAULT,
    },
    "glm4": {
        "model_type": "glm4",
        "head_dim": 12,
        "attention_bias": True,
        "pad_token_id": None,
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
    },
    "olmo3": {
        "model_type": "olmo3",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
        "pad_token_id": None,
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 5e5},
            "sliding_attention": DEFAULT | {"rope_theta": 5e5},
        },
    },
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 7,
        "attention_bias": True,
        "pad_token_id": None,
        "tie_word_embeddings": True,
        "rope_parameters": YARN | {"rope_theta": 1e4},
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
        "pad_token_id": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": DEFAULT,
        },
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "head_dim": 16, "rope_parameters": DEFAULT},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "head_dim": 16,
        "rope_parameters": YARN | {"rope_theta": 1e6},
    },
    "olmoe": {
        "model_type": "olmoe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "pad_token_id": None,
        "tie_word_embeddings": True,
        "rope_parameters": DEFAULT,
    },
    "deepseek_v2": LATENT
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "pad_token_id": None,
        "rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v2 groups": LATENT
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": 8,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "rope_parameters": DEFAULT,
    },
    "deepseek_v3": LATENT
    | {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 4,
        "n_routed_experts": 16,
        "q_lora_rank": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_mtp_layers": 0,
        "rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.8},
    },
}
# (ranks, [parallel], [zero])
SHAPES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {"stage": 0}),
    "pp2 zb-h1": (2, {"pp": 2, "schedule": "zb-h1"}, {"stage": 2}),
    "tp4, more than kv heads": (4, {"tp": 4, "sequence_parallel": False}, {"stage": 1}),
    "cp2": (2, {"cp": 2}, {"stage": 0}),
    "tp2 sp pp2 dp2 zero3": (8, {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True}, {"stage": 3}),
}


# ---------------------------------------------------------------------------------------------------------------------
# Theirs


@dataclass(frozen=True)
class Result:
    """One batch through one model."""

    loss: float
    logits: Tensor  # [samples, seq, vocab]
    gradients: Mapping[str, Tensor]


def save_theirs(name: str, directory: Path) -> None:
    """A small model of transformers whose every weight is random: at init norms are 1 and biases 0, which hides mistakes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES | CASES[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.ndim == 1) + 0.15 * torch.randn_like(parameter))
    model.save_pretrained(directory)


def theirs(directory: Path, run: ResolvedRun, step: int) -> Result:
    """What transformers computes with the weights of a directory."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    model, about = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens, labels = global_batch(run, step)
    logits = model.eval()(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    gradients = revert_weight_conversion(model, gradients)  # stacked experts are one tensor each on the disk
    return Result(loss.item(), logits.detach(), gradients)


@lru_cache(maxsize=len(CASES))
def _first_step_of_theirs(folder: Path, name: str) -> Result:
    """Of the model that ours imports, on every shape."""
    return theirs(folder / name / "hub", run_on("one rank", model_section(_config(folder / name / "hub"))), 0)


# ---------------------------------------------------------------------------------------------------------------------
# Ours


def ours(rank: int, runs: Mapping[str, ResolvedRun], folder: Path, shape: str) -> dict[str, Any]:
    """Two steps of every imported model, on one rank of a shape; after the first the model is saved."""
    results, state = {}, state_on(rank, next(iter(runs.values())))
    for name, run in runs.items():
        engine = engine_on(rank, run, init_weights=False, state=state)
        engine.load(folder / name / "imported", "any data")
        out: dict[str, Any] = {"dp": state.dp.index, "logits": [], "loss": [], "gradients": []}
        for step in range(2):
            out["logits"].append(logits_of(engine, run, step))
            out["loss"].append(engine.compute_gradients(micro_batches(run, state, step)).loss)
            out["gradients"].append(whole(engine, "gradient"))
            if step == 0:
                engine.update(LR)
                engine.save(folder / name / shape, Position(1, 8, 8), "any data")
        results[name] = out
        engine.sharded_model.close()
    return results


def logits_of(engine: Engine, run: ResolvedRun, step: int) -> Tensor | None:
    """Logits of this rank's samples, [samples, seq, vocab]; None where another rank of tp, or a later stage, has them."""
    found: list[Tensor] = []
    for head in (stage.head for stage in engine._stages if stage.head is not None):
        plain = head.forward

        def also_logits(x: Tensor, labels: Tensor | None, plain: Any = plain) -> Any:
            found.append(plain(x, None))
            return plain(x, labels)

        head.forward = also_logits  # type: ignore[method-assign]
    engine.evaluate(micro_batches(run, engine.state, step))
    for stage in engine._stages:
        if stage.head is not None:
            del stage.head.forward
    return torch.cat(found, dim=1).transpose(0, 1).contiguous() if found and engine.state.tp.index == 0 else None


def run_on(shape: str, model: ModelConfig) -> ResolvedRun:
    world, parallel, zero = SHAPES[shape]
    sizes = model.model_dump(exclude_none=True)
    if model.num_experts and "tp" in parallel:
        parallel = parallel | {"sequence_parallel": True}
    if model.num_experts:
        parallel = parallel | {"ep": {"cp2": 2, "tp2 sp pp2 dp2 zero3": 4}.get(shape, 1)}
    return run_of(world, model=sizes, parallel=parallel, zero=zero, training={"accumulation": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model as transformers saves it, and as it is imported."""
    folder = tmp_path_factory.mktemp("families")
    for name in CASES:
        save_theirs(name, folder / name / "hub")
        import_model(folder / name / "hub", folder / name / "imported")
    return folder


@pytest.fixture(scope="module", params=SHAPES)
def shape_and_results(request: pytest.FixtureRequest, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """All models on a shape, one after the other in one world; results of its ranks."""
    models = {name: model_section(_config(folder / name / "hub")) for name in CASES}
    fits = {name: model for name, model in models.items() if not (request.param == "cp2" and _is_capped(model))}
    runs = {name: run_on(request.param, model) for name, model in fits.items()}
    return request.param, run_world(SHAPES[request.param][0], ours, runs, folder, request.param)


def _is_capped(model: ModelConfig) -> bool:
    return model.attn_logit_softcapping is not None


def _config(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / HF_CONFIG).read_text()))


@pytest.mark.parametrize("name", CASES)
def test_logits_losses_and_gradients_are_those_of_transformers(
    name: str, folder: Path, shape_and_results: tuple[str, list[dict[str, Any]]]
) -> None:
    """In: the imported model's.  Out: after an update, those of the weights that were saved, and transformers loads."""
    shape, results = shape_and_results
    if name not in results[0]:
        with pytest.raises(ConfigError, match=r"parallel.cp = 2: must be 1 where model.attn_logit_softcapping"):
            run_on(shape, model_section(_config(folder / name / "hub")))
        return
    run = run_on(shape, model_section(_config(folder / name / "hub")))
    wanted = [_first_step_of_theirs(folder, name), theirs(folder / name / shape, run, 1)]
    got = results[0][name]
    for step, expected in enumerate(wanted):
        parts = {one[name]["dp"]: one[name]["logits"][step] for one in results if one[name]["logits"][step] is not None}
        if shape != "cp2":  # where ranks hold sequence shards
            assert difference(torch.cat([parts[index] for index in sorted(parts)]), expected.logits) < TOLERANCE
        assert got["loss"][step] == pytest.approx(expected.loss, rel=TOLERANCE)
        assert set(got["gradients"][step]) == set(expected.gradients)
        for key, gradient in expected.gradients.items():
            norm = float(gradient.norm())
            # a gradient that is zero in exact arithmetic (a key's bias) is rounding noise in both
            if norm < 1e-6 * max(float(one.norm()) for one in expected.gradients.values()):
                assert float(got["gradients"][step][key].norm()) < 1e-5, key
            else:
                assert difference(got["gradients"][step][key], gradient) < TOLERANCE, key


def test_a_gemma_rounds_norms_and_embeddings_as_transformers_does() -> None:
    """In bf16, bit by bit: the sum 1 + weight is in fp32, the embeddings' factor is not."""
    from transformers.models.gemma3 import modeling_gemma3

    tokens, width, x = torch.arange(7), 48, torch.randn(7, 1, 48).bfloat16()
    context = BuildContext(
        ModelConfig(family="gemma3", hidden_size=width, vocab_size=7), Axis("tp"), False, 0, x.device, dtype=x.dtype
    )
    norm, embedding = context.rms_norm("norm", offset=True), FAMILIES["gemma3"].embedding(context)
    of_norm = modeling_gemma3.Gemma3RMSNorm(width, context.model.norm_eps)
    of_embedding = modeling_gemma3.Gemma3TextScaledWordEmbedding(7, width, None, width**0.5)
    for ours, theirs in ((norm, of_norm), (embedding.tokens, of_embedding)):
        ours.weight.data = theirs.weight.data = (0.1 * torch.randn_like(theirs.weight)).bfloat16()
    assert torch.equal(norm(x), of_norm(x))
    assert torch.equal(embedding(tokens[:, None], MicroBatch(tokens[:1]).layout)[:, 0], of_embedding(tokens))


# ---------------------------------------------------------------------------------------------------------------------
# Configurations


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_goes_in_and_out_unchanged(name: str, folder: Path) -> None:
    """Ours -> theirs -> ours, and theirs -> ours -> theirs, which transformers reads as the same."""
    from transformers import AutoConfig

    given = _config(folder / name / "hub")
    model = model_section(given)
    form = FAMILIES[model.family].hugging_face
    assert form is not None
    assert form.dropped_settings(given) == ()  # nothing of it is lost
    written = form.config(model, "fp32")
    assert model_section(written) == model
    assert load_config(folder / name / "imported" / "model.toml", ["precision.dtype=fp32"], 1).config.model == model
    out = folder / name / "exported"
    export_model(folder / name / "imported", out)
    ids = {"bos_token_id", "eos_token_id", "pad_token_id"}
    before, after = (AutoConfig.from_pretrained(folder / name / which).to_dict() for which in ("hub", "exported"))
    assert {key for key in before if before[key] != after.get(key)} <= ids | {"_name_or_path"}
    older = {key: value for key, value in given.items() if key != "rope_parameters"}
    rope = given["rope_parameters"]
    scaling = dict(rope.get("full_attention", rope))
    if "sliding_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    older |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling | {"type": scaling.pop("rope_type")}}
    assert model_section(older) == model  # as transformers 4 spells it


@pytest.mark.parametrize("name", CASES)
def test_a_key_that_is_left_out_means_what_transformers_takes_for_it(name: str, folder: Path) -> None:
    from transformers import AutoConfig

    given = _config(folder / name / "hub")
    form = format_of(family_of(given["model_type"]))
    for key in (*form.defaults, *form.constants, *form.assumed, "rope_parameters", "sliding_window"):
        left = {other: value for other, value in given.items() if other != key}
        filled = AutoConfig.for_model(**json.loads(json.dumps(left))).to_dict()
        assert model_section(left) == model_section(filled), key


@pytest.mark.parametrize("name", [name for name in CASES if name != "mistral no window"])  # it gets no mask
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_layer_types_mean_what_transformers_computes_with_them(name: str, kind: str, folder: Path) -> None:
    """Or are refused.  The last token's weights say to how many positions transformers lets it attend."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given, hub = _config(folder / name / "hub"), folder / f"{name} {kind}"
    given |= {"layer_types": [kind] * given["num_hidden_layers"]}
    if kind == "sliding_attention" and name not in ("mistral", "olmo3", "gemma2", "gemma3"):
        with pytest.raises(ValueError, match="layer_types has 'sliding_attention'"):
            model_section(given)
        return
    hub.mkdir(exist_ok=True)
    (hub / "config.json").write_text(json.dumps(given))
    wanted = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(hub), attn_implementation="eager").model
    tokens = torch.zeros(1, 16, dtype=torch.long)
    attention = wanted.eval()(tokens, output_attentions=True, use_cache=False).attentions[0]
    model = model_section(given)
    assert int((attention[0, 0, -1] != 0).sum()) == min(model.sliding_window or 16, 16)


def published(**keys: Any) -> dict[str, Any]:
    """A `config.json` of the hub, as transformers 4 wrote it; what most of them say is here once."""
    common = {"hidden_act": "silu", "attention_dropout": 0.0, "use_cache": True, "torch_dtype": "bfloat16"}
    return common | {"initializer_range": 0.02, "tie_word_embeddings": False, "rope_scaling": None} | keys


QWEN = {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28, "rms_norm_eps": 1e-6}
DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}
DEEPSEEK |= {"max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False}
DEEPSEEK |= {"ep_size": 1}
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
PUBLISHED = {
    "llama3_8b_64gpu": published(
        model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
        attention_bias=False, mlp_bias=False, pretraining_tp=1,
        rope_scaling=LLAMA_3 | {"factor": 8.0, "original_max_position_embeddings": 8192},
    ),
    "qwen2_7b_64gpu": published(
        model_type="qwen2", hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        intermediate_size=18944, vocab_size=152064, max_position_embeddings=131072, rope_theta=1000000.0, **QWEN,
    ),
    "qwen3_4b_8gpu": published(
        model_type="qwen3", hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, intermediate_size=9728, vocab_size=151936, max_position_embeddings=40960, rope_theta=1000000,
        attention_bias=False, **QWEN | {"sliding_window": None, "max_window_layers": 36}, tie_word_embeddings=True,
    ),
    "olmo2_7b_64gpu": published(
        model_type="olmo2", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
        intermediate_size=11008, vocab_size=100352, max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=500000,
        attention_bias=False, pad_token_id=100277,
    ),
    "mistral_7b_64gpu": published(
        model_type="mistral", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=32000, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=10000.0,
        sliding_window=4096,
    ),
    "mixtral_8x7b_64gpu": published(
        model_type="mixtral", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=32000, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1000000.0,
        sliding_window=None, num_local_experts=8, num_experts_per_tok=2, output_router_logits=False,
        router_aux_loss_coef=0.02,
    ),
    "qwen3_30b_a3b_64gpu": published(
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, intermediate_size=6144, moe_intermediate_size=768, vocab_size=151936, max_position_embeddings=40960,
        rope_theta=1000000.0, attention_bias=False, **QWEN | {"sliding_window": None, "max_window_layers": 48},
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        output_router_logits=False, router_aux_loss_coef=0.001,
    ),
    "olmoe_1b_7b_8gpu": published(
        model_type="olmoe", hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=1024, vocab_size=50304, max_position_embeddings=4096, rms_norm_eps=1e-5, rope_theta=10000.0,
        attention_bias=False, clip_qkv=None, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False,
        output_router_logits=False, router_aux_loss_coef=0.01, pad_token_id=1,
    ),
    "smollm3_3b_8gpu": published(
        model_type="smollm3", hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=4,
        intermediate_size=11008, vocab_size=128256, max_position_embeddings=65536, rms_norm_eps=1e-6, rope_theta=5000000.0,
        attention_bias=False, mlp_bias=False, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9,
        layer_types=["full_attention"] * 36, use_sliding_window=False, sliding_window=None, max_window_layers=28,
    ) | {"tie_word_embeddings": True},
    "deepseek_v2_lite_8gpu": published(
        model_type="deepseek_v2", hidden_size=2048, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        q_lora_rank=None, n_group=1, topk_group=1, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False,
        routed_scaling_factor=1.0, first_k_dense_replace=1, vocab_size=102400, **DEEPSEEK | {"seq_aux": True},
    ) | {"rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek_v3_2048gpu": published(
        model_type="deepseek_v3", hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
        intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
        q_lora_rank=1536, n_group=8, topk_group=4, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True,
        routed_scaling_factor=2.5, first_k_dense_replace=3, vocab_size=129280, **DEEPSEEK,
    ) | {"rope_scaling": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_the_model_of_its_run_file(name: str) -> None:
    """Llama 3.1 8B, Qwen2.5 7B, Qwen3 4B, OLMo 2 7B, Mistral 7B v0.1; Mixtral 8x7B v0.1, Qwen3 30B A3B, OLMoE 1B 7B;
    DeepSeek-V2-Lite and V3, the latter without what says that it predicts a second token and comes in fp8."""
    example = Path(__file__).parent.parent / "examples" / f"{name}.toml"
    model = load_config(example, [], int(name.rpartition("_")[2].removesuffix("gpu"))).config.model
    assert model_section(PUBLISHED[name], model.seq_len) == model
    presets = [
        RunConfig(model=ModelConfig(preset=preset)) for preset in PRESETS if PRESETS[preset]["family"] == model.family
    ]
    assert model_section(PUBLISHED[name]) in [resolve(preset, 1).config.model for preset in presets]
    form = FAMILIES[model.family].hugging_face
    assert form is not None
    assert form.dropped_settings(PUBLISHED[name], model.seq_len) == ()  # nothing of it is lost


GEMMA = {"rms_norm_eps": 1e-6, "head_dim": 256, "query_pre_attn_scalar": 256, "attention_bias": False}
GEMMA |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}
GEMMAS = {
    "gemma-2-2b": published(
        model_type="gemma2", hidden_size=2304, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=9216, vocab_size=256000, max_position_embeddings=8192, rope_theta=10000.0, sliding_window=4096,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, **GEMMA,
    ),
    "gemma-3-1b": published(
        model_type="gemma3_text", hidden_size=1152, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1,
        intermediate_size=6912, vocab_size=262144, max_position_embeddings=32768, rope_theta=1000000, sliding_window=512,
        rope_local_base_freq=10000, sliding_window_pattern=6, attn_logit_softcapping=None, final_logit_softcapping=None,
        **GEMMA,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GEMMAS)
def test_a_gemma_of_the_hub_is_its_preset(name: str) -> None:
    given = {key: value for key, value in GEMMAS[name].items() if key != "tie_word_embeddings"}
    model = model_section(given)
    assert model == resolve(RunConfig(model=ModelConfig(preset=name)), 1).config.model
    assert format_of(model.family).dropped_settings(given) == ()


# What a configuration says that we do not compute: (case, changed keys, the reason).
REFUSED = [
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "'full_attention' and 'sliding_attention'"),
    ("mistral", {"layer_types": ["sliding_attention", "chunked"]}, "layer_types has 'chunked'"),
    ("mistral no window", {"layer_types": ["sliding_attention"] * 2}, "needs a sliding_window, and that is null"),
    ("mistral", {"num_key_value_heads": None}, "num_key_value_heads is missing"),
    ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1 is not supported in a phi3"),
    ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "the rope_type must be 'default'"),
    ("smollm3", {"no_rope_layers": [0, 1]}, "no_rope_layers is not supported where another layer than every n-th"),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window=True is not supported in a smollm3"),
    ("glm4", {"rope_parameters": DEFAULT | PHI}, "partial_rotary_factor=1.0 is not supported; it must be 0.5"),
    ("glm4", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "this family does not read it"),
    ("olmo3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is not supported where"),
    ("olmo3", {"layer_types": ["sliding_attention", "chunked"]}, "layer_types has 'chunked'"),
    ("olmo3", {"sliding_window": None}, "sliding_window is null, and layers need one"),
    ("olmo3", {"rope_parameters": {"sliding_attention": YARN}}, "sliding_attention is scaled"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported in a gemma2"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported in a gemma2"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported in a gemma3"),
    ("gemma3", {"rope_parameters": {"sliding_attention": YARN}}, "sliding_attention is scaled"),
    ("gemma3", {"model_type": "gemma3"}, "model_type='gemma3' is not supported; llama"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types has 'sliding_attention'"),
    ("qwen2", {"num_key_value_heads": None}, "num_key_value_heads is missing"),
    ("olmo2", {"attention_bias": True}, "attention_bias=True is not supported in a olmo2"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True is not supported in a qwen3"),
    ("mixtral", {"sliding_window": 4096}, "sliding_window=4096 is not supported in a mixtral"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported in a mixtral"),
    ("mixtral", {"num_experts_per_tok": 5}, "model.experts_per_token = 5"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers=[1] is not supported in a qwen3_moe"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported in a qwen3_moe"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported in a olmoe"),
    ("olmoe", {"head_dim": 16}, "head_dim=16 is not supported in an olmoe"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported in a deepseek_v2"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported in a deepseek_v2"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "is not supported in a deepseek_v3"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False is not supported in a deepseek_v3"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "model.num_kv_heads = 2: must be num_heads=4"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED)
def test_what_a_family_does_not_compute_is_refused_with_its_key(
    name: str, changes: dict[str, Any], reason: str, folder: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        model_section(_config(folder / name / "hub") | changes)


def test_a_window_of_a_qwen_is_refused_where_transformers_gives_a_layer_one() -> None:
    from transformers import AutoConfig

    full = ["full_attention"] * 2
    keys = "model_type", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"
    for values in product(["qwen2", "qwen3"], [True, False], [4, None], [0, 1, 2, 28], [None, full]):
        given = SIZES | dict(zip(keys, values, strict=True))
        wrong = "".join(FAMILIES[values[0]].hugging_face.problems(given, None))
        has_window = AutoConfig.for_model(**given).layer_types != full
        assert (f"use_sliding_window=True is not supported in a {values[0]}" in wrong) == has_window, values


@pytest.mark.parametrize(("name", "key"), [("gpt2", "activation_function"), ("llama", "hidden_act")])
def test_every_name_of_the_activation_that_we_compute_is_taken_and_no_other(name: str, key: str) -> None:
    from transformers.activations import ACT2CLS, get_activation

    form, x = FAMILIES[name].hugging_face, torch.linspace(-9, 9, 999, dtype=torch.float64)
    given, wanted = dict.fromkeys(form.sizes, 32), get_activation(form.constants[key])(x)
    for other in ACT2CLS.keys() - {"prelu", "xielu"}:  # which have weights
        is_same = bool((get_activation(other)(x) - wanted).abs().max() < 1e-9)
        with nullcontext() if is_same else pytest.raises(ValueError, match=f"{key}='{other}' is not supported"):
            form.section(name, given | {key: other})


def test_what_the_check_lets_through_loads_in_transformers(tmp_path: Path) -> None:
    """Of a llama nothing else is refused that a mistral may be, which has the same sizes and no such rules there."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    def fits(sizes: dict[str, Any]) -> ModelConfig | None:
        with suppress(ConfigError):
            return resolve(RunConfig.model_validate({"model": sizes}), 1).config.model
        return None

    for family, hidden, heads, size, std in product(FAMILIES, [48, 7], [1, 3, 5], [None, 8, 10], [0.02, 1.5]):
        sizes = {"hidden_size": hidden, "num_heads": heads, "init_std": std, "num_layers": 1, "vocab_size": 9}
        sizes |= {"seq_len": 8, "family": family} | ({"head_dim": size} if size and family != "gpt2" else {})
        if (like := fits(sizes | {"family": "mistral"} if family == "llama" else sizes)) is None:
            continue
        written = FAMILIES[family].hugging_face_config(like, "fp32")
        written |= {"model_type": FAMILIES[family].hugging_face.model_type or family}
        (tmp_path / HF_CONFIG).write_text(json.dumps(written))
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
            biases = {name: one for name, one in model.named_buffers() if "bias" in name}  # of routers
            stored = revert_weight_conversion(model, dict(model.named_parameters()) | biases)
            found = {name: tuple(one.shape) for name, one in stored.items()}
        except Exception:  # of several classes
            found = None
        assert found == (logical_shapes(like) if fits(sizes) else None), sizes


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        (LLAMA_3 | {"factor": 8.0}, RopeScaling(type="llama3", factor=8.0, original_seq_len=8192)),
        (
            LLAMA_3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
            RopeScaling(type="llama3", factor=32.0, original_seq_len=8192, low_freq_factor=2.0, high_freq_factor=3.0),
        ),
        ({"rope_type": "linear", "factor": 2.5}, RopeScaling(type="linear", factor=2.5)),
        ({"rope_type": "yarn", "factor": 4.0}, RopeScaling(type="yarn", factor=4.0, original_seq_len=8192)),
        (
            {"rope_type": "yarn", "factor": 16.0, "beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 1.5},
            RopeScaling(
                type="yarn", factor=16.0, original_seq_len=8192, beta_fast=24.0, beta_slow=2.0, attention_factor=1.5
            ),
        ),
    ],
)
@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 64), (5e5, 128)])
def test_scaled_frequencies_are_those_of_transformers(
    rope: dict[str, Any], scaling: RopeScaling, theta: float, head_dim: int
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope | {"rope_theta": theta}
    if rope["rope_type"] != "linear":
        rope["original_max_position_embeddings"] = 8192
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope)
    wanted, amplitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    assert torch.allclose(scaling.scaled(plain, theta), wanted.double(), rtol=1e-5, atol=0)
    assert scaling.amplitude == pytest.approx(amplitude)
    assert not torch.allclose(wanted.double(), plain, rtol=1e-3)
