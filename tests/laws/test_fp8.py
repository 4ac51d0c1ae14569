"""Products in fp8 on any shape: the bytes of a plain rounding, and the run of a plain model that multiplies them."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import plain_model
import pytest
import torch
import worlds
from harness import run_world
from plain_model import PlainConfig, causal_attention, expert_shares, rms_norm, rope, split_heads
from torch import Tensor
from worlds import (
    LLAMA,
    MIXTRAL,
    STEPS,
    difference,
    engine_on,
    micro_batches,
    on_one_state,
    plain_steps,
    run_of,
    state_on,
    train,
    train_on,
    whole,
)

from megazero.config import ResolvedRun
from megazero.engine import Engine
from megazero.engine.phases import Position
from megazero.layers.fp8 import BLOCK, EMULATED, Quantised, dequantise, emulated, quantise_alone, use_fp8
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.spec import LinearSpec, NamedRows

TOLERANCE = 1e-5  # as without fp8
SMALL = LLAMA | {"num_layers": 3, "seq_len": 8, "tie_embeddings": False}
BLOCKS = {"hidden_size": 144, "ffn_hidden_size": 48}  # a row is a block and a part of one
EXPERTS = MIXTRAL | {"num_layers": 3, "seq_len": 8}
MODELS = {"rowwise": SMALL, "blockwise": SMALL | BLOCKS}
WITH_EXPERTS = {"rowwise": EXPERTS | {"ffn_hidden_size": 32}, "blockwise": EXPERTS | BLOCKS}
# All of e4m3 from 0 on, but for the last code, which is no number.
VALUES = [m / 8 * 2.0**-6 for m in range(8)]
VALUES += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]


def rounded(x: Tensor, block: int) -> Tensor:
    """Each element to the nearest of e4m3 times a power of two, which the rows' blocks have."""
    table, parts = torch.tensor(VALUES, dtype=torch.float64), []
    for part in x.detach().double().split(block or x.shape[-1], -1):
        mantissa, exponent = torch.frexp(part.abs().amax(-1, keepdim=True) / 448)
        scale = 2.0 ** (exponent - (mantissa == 0.5).int()).clamp(min=-126).double()
        sizes = (part / scale).abs()
        above = torch.bucketize(sizes, table).clamp(max=len(VALUES) - 1)
        below = (above - 1).clamp(min=0)
        low, high = sizes - table[below], table[above] - sizes
        nearest = torch.where((low < high) | ((low == high) & (below % 2 == 0)), below, above)
        parts.append(table[nearest] * scale * part.sign())
    return torch.cat(parts, -1).to(x.dtype)


def rounded_weight(weight: Tensor, block: int) -> Tensor:
    """As `rounded`, but all elements of a square of blocks have one scale."""
    if not block:
        return rounded(weight, block)
    squares = [rows.split(block, 1) for rows in weight.split(block)]
    return torch.cat([torch.cat([rounded(one.reshape(1, -1), 0).view_as(one) for one in row], 1) for row in squares])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, block: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.block = block
        return rounded(x, block) @ rounded_weight(weight, block).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dx = rounded(dy, ctx.block) @ rounded_weight(weight.T, ctx.block).T
        return dx, dy.flatten(0, -2).T @ x.flatten(0, -2), None


def _logits(
    block: int, layers: tuple[int, ...], weights: dict[str, Tensor], config: PlainConfig, tokens: Tensor, *_: Any
) -> Tensor:
    """Llama or Mixtral in plain formulas; some layers multiply in fp8; q, k and v are one product, as are gate and
    up."""

    def linear(x: Tensor, *names: str) -> Tensor:
        weight = torch.cat([weights[f"model.layers.{i}.{name}.weight"] for name in names])
        return _Linear.apply(x, weight, block) if i in layers else x @ weight.T

    x, kv = weights["model.embed_tokens.weight"][tokens], config.num_kv_heads * config.head_dim
    for i in range(config.num_layers):
        normed = rms_norm(x, weights[f"model.layers.{i}.input_layernorm.weight"], config.norm_eps)
        qkv = linear(normed, *(f"self_attn.{key}_proj" for key in "qkv")).split((config.hidden_size, kv, kv), -1)
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = map(split_heads, qkv, heads)
        mixed = causal_attention(rope(q, config.rope_theta), rope(k, config.rope_theta), v)
        x = x + linear(mixed, "self_attn.o_proj")
        normed = rms_norm(x, weights[f"model.layers.{i}.post_attention_layernorm.weight"], config.norm_eps)
        shares, mlps = torch.ones_like(x[..., :1]), [("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
        if config.num_experts:
            moe = "block_sparse_moe"
            router = weights[f"model.layers.{i}.{moe}.gate.weight"]
            shares = expert_shares(normed @ router.T, config.experts_per_token)
            names = [f"{moe}.experts.{expert}" for expert in range(config.num_experts)]
            mlps = [(f"{name}.w1", f"{name}.w3", f"{name}.w2") for name in names]
        for number, (of_gate, of_up, of_down) in enumerate(mlps):
            gate, up = linear(normed, of_gate, of_up).chunk(2, -1)
            x = x + shares[..., number, None] * linear(gate * torch.sigmoid(gate) * up, of_down)
    return rms_norm(x, weights["model.norm.weight"], config.norm_eps) @ weights["lm_head.weight"].T


def _run(world: int, scaling: str, fp8: dict[str, Any] | None = None, **sections: Any) -> ResolvedRun:
    return run_of(world, **{"model": MODELS[scaling]} | sections, precision={"fp8": scaling} | (fp8 or {}))


@lru_cache(maxsize=16)
def _plain(scaling: str, layers: tuple[int, ...], seed: int, has_experts: bool) -> dict[str, Any]:
    model = (WITH_EXPERTS if has_experts else MODELS)[scaling]

    def steps(_: int) -> dict[str, Any]:
        plain_model.logits = partial(_logits, 0 if scaling == "rowwise" else BLOCK, layers)
        return plain_steps(_run(1, scaling, model=model, training={"seed": seed}))

    return run_world(1, steps)[0]


def _assert_is_plain(world: int, scaling: str, fp8: dict[str, Any], layers: tuple[int, ...], **sections: Any) -> None:
    """To rounding in the first step, with one seed of three: a sum in another order may move an element to the next number
    of e4m3, a sixteenth away; as it does after a step."""
    for seed in (7, 8, 9):
        training = sections.get("training", {}) | {"seed": seed}
        got = run_world(world, train, _run(world, scaling, fp8, **sections | {"training": training}))[0]
        wanted = _plain(scaling, layers, seed, "model" in sections)
        assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
        assert all(difference(got["weights"][name], one) < 0.01 for name, one in wanted["weights"].items())
        near = [got[kind][0] == pytest.approx(wanted[kind][0], rel=TOLERANCE) for kind in ("loss", "norm")]
        near += [difference(got["gradients"][name], one) < TOLERANCE for name, one in wanted["gradients"].items()]
        if all(near):
            return
    pytest.fail("no seed gives the plain model's run")


@pytest.mark.parametrize("block", [0, BLOCK])
@pytest.mark.parametrize("shape", [(64, 512), (64, 200), (3, 48), (0, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_round_as_a_table_of_e4m3_says(block: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows from the smallest to large numbers, of zeros, of ties; blocks that rows do not fill; no rows."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x = (x * torch.logspace(-38, 30, shape[0])[:, None]).to(dtype)
    x[1:2], x[2:3] = 0, torch.arange(shape[1]) / 16
    size = block or shape[1]
    found = dequantise(quantise_alone(x, size), size, dtype)
    assert torch.equal(found, rounded(x, block))


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 3": (2, {"zero": {"stage": 3}}),
    "dp4, stage 2": (4, {"zero": {"stage": 2}}),
    "micro-batches": (1, {"training": {"accumulation": 4}}),
    "tp2": (2, {"parallel": {"tp": 2}, "zero": {"stage": 0}}),
    "tp2 sp dp2": (4, {"parallel": {"tp": 2, "sequence_parallel": True}, "zero": {"stage": 3}}),
    "cp2": (2, {"parallel": {"cp": 2}}),
    "zb-h1": (2, {"parallel": {"pp": 2, "schedule": "zb-h1"}, "training": {"accumulation": 2}}),
}


@pytest.mark.parametrize("case", CASES)
def test_any_shape_is_the_plain_models_run(case: str) -> None:
    world, sections = CASES[case]
    for scaling in MODELS if "tp" not in case else ["rowwise"]:
        _assert_is_plain(world, scaling, {}, (1,), **sections)


OF_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"activations": {"recompute": ["mlp"]}}),
    "ep2, stage 3": (2, {"parallel": {"ep": 2}, "zero": {"stage": 3}}),
    "dp2 ep2 zb-h1": (4, {"parallel": {"pp": 2, "ep": 2, "schedule": "zb-h1"}, "training": {"accumulation": 2}}),
    "tp2 sp ep2": (2, {"parallel": {"tp": 2, "sequence_parallel": True, "ep": 2}}),
}


@pytest.mark.parametrize("case", OF_EXPERTS)
def test_experts_are_the_plain_models_on_any_shape(case: str) -> None:
    world, sections = OF_EXPERTS[case]
    for scaling in WITH_EXPERTS if "tp" not in case else ["rowwise"]:
        _assert_is_plain(world, scaling, {}, (1,), model=WITH_EXPERTS[scaling], **sections)


def test_a_list_says_which_layers() -> None:
    for layers, wanted in (("all", (0, 1, 2)), ([0, 2], (0, 2))):
        _assert_is_plain(1, "rowwise", {"fp8_layers": layers}, wanted)


def _factors(rank: int, tp: int, scaling: str) -> list[Quantised]:
    """Of a column- and of a row-parallel layer, both passes; the same whole tensors for every tp."""
    found: list[Quantised] = []

    def multiply(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
        found.extend((a, b))
        return emulated(a, b, dtype)

    axis = state_on(rank, run_of(tp, model={"num_kv_heads": 4}, parallel={"tp": tp})).tp
    spread = torch.logspace(0, -6, 512)  # one rank's elements are too small for the scale of another's
    x, dy = torch.randn(2, 8, 4, 512, generator=torch.Generator().manual_seed(1)) * spread
    column = ColumnParallelLinear(LinearSpec((NamedRows("q", 512),), 512), axis)
    row = RowParallelLinear(LinearSpec((NamedRows("o", 512),), 512), axis)
    for layer in (column, row):
        use_fp8(layer, scaling, EMULATED._replace(multiply=multiply))  # type: ignore[arg-type]
    column.weight.data *= spread.chunk(tp)[rank][:, None]
    row.weight.data *= spread.chunk(tp)[rank]
    column(x.clone().requires_grad_()).backward(dy.chunk(tp, -1)[rank])
    row(x.chunk(tp, -1)[rank].clone().requires_grad_()).backward(dy)
    return found


def _part(whole: Tensor, part: Tensor, rank: int) -> Tensor:
    """What a rank has of a matrix that is cut evenly in at most one dimension."""
    for dim, size in enumerate(part.shape):
        whole = whole.split(size, dim)[rank if size < whole.shape[dim] else 0]
    return whole


@pytest.mark.parametrize("scaling", MODELS)
def test_a_rank_of_tp_has_its_part_of_the_same_bytes(scaling: str) -> None:
    (wanted,) = run_world(1, _factors, 1, scaling)
    assert len(wanted) == 8
    for tp in (2, 4):
        for rank, found in enumerate(run_world(tp, _factors, tp, scaling)):
            for every, own in zip(wanted, found, strict=True):
                assert torch.equal(own.values.float(), _part(every.values, own.values, rank).float())
                assert torch.equal(own.scales, _part(every.scales, own.scales, rank))


@pytest.mark.parametrize(("fp8", "tp"), [({"dtype": "bf16"}, 1), ({}, 2)])
def test_recomputation_repeats_the_bytes(fp8: dict[str, Any], tp: int) -> None:
    kinds: list[Any] = ["none", "full", ["mlp", "attention"]]
    runs = [_run(2, "rowwise", fp8, parallel={"tp": tp}, activations={"recompute": kind}) for kind in kinds]
    first, *others = run_world(2, on_one_state, runs, train_on)[0]
    for got in others:
        assert got["loss"] == first["loss"]
        assert all(torch.equal(got["weights"][name], value) for name, value in first["weights"].items())


def _gathering(engine: Engine, run: ResolvedRun) -> Any:
    engine.state.traffic.reset()
    found = train_on(engine, run, evaluates=True)
    return found, engine.state.traffic.sent_bytes["dp", "all_gather"]


@pytest.mark.parametrize(("dtype", "size", "in_memory"), [("fp32", 4, False), ("bf16", 2, True)])
@pytest.mark.parametrize("world", [2, 4])
def test_stage_3_gathers_the_weights_of_squares_in_fp8_bit_by_bit(
    world: int, dtype: str, size: int, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards begin anywhere in a square; an update is followed by one gather. Of a matrix 1 byte per element travels.
    Through memory gathers begin with a forward, over sockets with the update."""
    monkeypatch.setattr(worlds, "state_on", partial(worlds.state_on, shares_memory=in_memory))
    stages = [{"stage": 1}, {"stage": 3, "gather_policy": "step"}]
    of_all = {"optimizer": {"grad_clip": 0.0}}  # the norm adds up in another order
    runs = [_run(world, "blockwise", {"dtype": dtype}, zero=zero, **of_all) for zero in stages]
    runs.append(_run(world, "blockwise", {"dtype": dtype, "fp8": "none"}, zero=stages[1], **of_all))
    (kept, _), (gathered, sent), (_, whole_sent) = run_world(world, on_one_state, runs, _gathering)[0]
    assert gathered["loss"] == kept["loss"]
    assert all(torch.equal(gathered["weights"][name], value) for name, value in kept["weights"].items())
    elements = sum(one.numel() for name, one in kept["weights"].items() if "layers.1." in name and one.ndim == 2)
    saved = elements * (size - 1) * (world - 1) / world
    assert whole_sent - sent == pytest.approx(STEPS * saved, rel=0.01)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("scaling", MODELS)
def test_what_is_not_finite_stays_so_in_its_row_alone(scaling: str, value: float) -> None:
    x, block = torch.randn(4, 256), BLOCK if scaling == "blockwise" else 256
    x[2, 3] = value
    found = dequantise(quantise_alone(x, block), block, torch.float32).sum(-1)
    assert found.isfinite().tolist() == [True, True, False, True]


def _turned_on(rank: int, run: ResolvedRun, path: str, saves: bool) -> Any:
    engine = engine_on(rank, run, init_weights=saves)
    if saves:
        engine.train_step(micro_batches(run, engine.state, 0), 0.01)
        engine.save(path, Position(step=1, samples=8), "data")
    else:
        engine.load(path, "data")
    found = [whole(engine, kind) or {} for kind in engine.sharded_model.sharded_state.state_kinds]
    return found, engine.compute_gradients(micro_batches(run, engine.state, 1)).loss


def test_a_run_turns_fp8_on_or_off_at_a_resume(tmp_path: Any) -> None:
    for first, then in (("rowwise", "none"), ("none", "rowwise")):
        path = str(tmp_path / first)
        saved, loss = run_world(2, _turned_on, _run(2, "rowwise", {"fp8": first}), path, True)[0]
        other = _run(4, "rowwise", {"fp8": then}, parallel={"tp": 2}, zero={"stage": 3})
        found, now = run_world(4, _turned_on, other, path, False)[0]
        for kind, same in zip(saved, found, strict=True):
            assert all(torch.equal(same[name], one) for name, one in kind.items())
        assert 1e-3 > abs(now - loss) > 1e-6


@pytest.mark.parametrize(
    ("world", "model", "precision", "parallel", "says"),
    [
        (2, {"hidden_size": 64}, {"fp8": "blockwise"}, {"tp": 2}, "multiples of 256"),
        (1, {"ffn_hidden_size": 72}, {"fp8": "rowwise"}, {}, "multiples of 16"),
        (1, {"hidden_size": 40, "head_dim": 16}, {"fp8": "rowwise"}, {}, "hidden_size = 40: must give multiples of 16"),
        (1, {"num_kv_heads": 1, "head_dim": 4}, {"fp8": "rowwise"}, {}, "num_kv_heads = 1: .*8; the nearest is 16"),
        (1, {"head_dim": 10}, {"fp8": "rowwise"}, {}, "model.head_dim = 10: must give multiples of 16"),
        (1, {}, {"fp8": "rowwise", "dtype": "fp16"}, {}, "must be"),
        (1, {}, {"fp8": "rowwise", "fp8_layers": [3]}, {}, "below model.num_layers=3"),
        (1, {}, {"fp8": "tensorwise"}, {}, "precision.fp8"),
        (1, EXPERTS | {"ffn_hidden_size": 24}, {"fp8": "rowwise"}, {}, "model.ffn_hidden_size = 24: .*multiples of 16"),
    ],
)
def test_what_cannot_be_is_refused(world: int, model: Any, precision: Any, parallel: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run_of(world, model=SMALL | model, precision=precision, parallel=parallel)
