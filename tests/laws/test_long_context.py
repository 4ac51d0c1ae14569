"""Context parallelism and documents change nothing: any shape, one run, one traffic, and an error that does not grow.

    a sample    [ A A A A A A | B B B | C C ]      documents do not see each other, and each begins at position 0
    its ranks     0 0 1 1 1 0   0 1 1   0 1        whatever the cut, the run is that of the plain model

Bugs that other systems shipped have a test each, below their own line.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, run_world
from plain_model import causal_attention, unseen_keys
from test_any_shape import _assert_agrees, train_offloading
from torch import Tensor
from worlds import (
    GPT2,
    LLAMA,
    LR,
    PATTERNS,
    SAMPLES,
    STEPS,
    engine_on,
    global_batch,
    micro_batch,
    micro_batches,
    on_one_state,
    outcome,
    pairwise,
    plain_steps,
    plain_trainer,
    rows_of,
    run_of,
    state_on,
    whole,
)

from megazero.config import ResolvedRun
from megazero.engine import Engine
from megazero.layers.context_attention import ContextAttention
from megazero.layers.sequence_shard import sequence_shard
from megazero.parallel_state import Axis, ParallelState

pytestmark = pytest.mark.slow  # starts whole runs

UNTIED, TIED = LLAMA | {"tie_embeddings": False}, LLAMA | {"tie_embeddings": True}
WINDOW = UNTIED | {"family": "mistral", "sliding_window": 5}
MODELS = {"untied": UNTIED, "tied": TIED, "gpt2": GPT2, "window": WINDOW}


# Samples of short documents have few labels, and more elements whose gradient is rounding noise than `worlds.EPS` is for.
OPTIMIZER = {"grad_clip": 0.5, "eps": 1e-4}


def _ring(cp: int) -> dict[str, Any]:
    return {"cp": cp, "cp_method": "ring"}


def _ulysses(cp: int) -> dict[str, Any]:
    return {"cp": cp, "cp_method": "ulysses"}


TWO_BY_TWO: dict[str, Any] = {"cp": 4, "cp_method": "hybrid", "cp_ulysses": 2}
SEQUENCE: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "ring 2, pp 2": (4, _ring(2) | {"pp": 2}),
    "ring 2, tp 2 sp": (4, _ring(2) | SEQUENCE | {"order": "pp-dp-cp-tp"}),
    "ulysses 2, dp 2": (4, _ulysses(2)),
    "2 x 2": (4, TWO_BY_TWO),
    "2 x 2, tp 2 sp": (8, TWO_BY_TWO | SEQUENCE),
    "ulysses 2, tp 2, pp 2": (8, _ulysses(2) | {"tp": 2, "pp": 2}),
}
ONE_METHOD: dict[str, tuple[int, dict[str, Any]]] = {
    "ring 2": (2, _ring(2)),
    "ring 4": (4, _ring(4)),
    "ulysses 2": (2, _ulysses(2)),
    "ulysses 4": (4, _ulysses(4)),
}
OVER_SOCKETS = ("ulysses 2, dp 2", "2 x 2", "ring 2, pp 2")  # messages travel while ranks compute, heads in pieces
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "attention is kept": {"recompute": "full", "keep_attention": True},
    "full, on the host": {"recompute": "full", "offload": "host"},
}
POLICIES = [name for name in ACTIVATIONS if name != "full"]  # the last one is that too
ORDERS = [("1f1b", 1), ("gpipe", 2), ("zb-h1", 2)]  # schedule and accumulation; the schedule is that of a pipeline
CASES = pairwise(
    shape=[name for name, (world, _) in SHAPES.items() if world == 4],
    pattern=["none", "random", "cuts", "masked"],  # "masked" is "whole" with fewer labels
    zero_stage=(0, 2, 3),  # the other tests here run stage 1
    order=ORDERS,
    name=["untied", "gpt2", "window"],  # GPT-2's ends are tied
    activations=POLICIES,
)
CASES += [
    dict(zip(CASES[0], values, strict=True))
    for values in (
        ("2 x 2, tp 2 sp", "random", 3, ("1f1b", 1), "tied", "full, on the host"),
        ("2 x 2, tp 2 sp", "cuts", 2, ("gpipe", 2), "gpt2", "none"),
        ("ulysses 2, tp 2, pp 2", "random", 3, ("zb-h1", 2), "tied", "selective"),
    )
]


@lru_cache(maxsize=8)
def _plain_of(name: str) -> dict[str, dict[str, Any]]:
    """The plain model's runs, by the pattern of documents."""
    run = run_of(1, model=MODELS[name], optimizer=OPTIMIZER)
    return dict(run_world(1, lambda _: {pattern: plain_steps(run, pattern=pattern) for pattern in PATTERNS})[0])


def _plain(name: str, pattern: str) -> dict[str, Any]:
    return _plain_of(name)[pattern]


def _run(world: int, model: dict[str, Any], parallel: dict[str, Any], pattern: str, **sections: Any) -> ResolvedRun:
    data = {"document_mask": pattern != "none"}
    return run_of(world, model=model, parallel=parallel, data=data, **{"optimizer": OPTIMIZER} | sections)


def _train(rank: int, cases: Sequence[tuple[ResolvedRun, str]], shares_memory: bool = True) -> list[Any]:
    """Runs of one shape, each with a pattern of documents, in one world."""
    state, results = state_on(rank, cases[0][0], shares_memory=shares_memory), []
    for run, pattern in cases:
        engine = engine_on(rank, run, state=state)
        results.append(train_offloading(engine, run, False, False, pattern))
        engine.sharded_model.close()
    return results


def _check(shape: tuple[int, dict[str, Any]], cases: Sequence[tuple[str, str]], **sections: Any) -> None:
    """Runs of (model, pattern) on a shape are those of the plain model."""
    world, parallel = shape
    runs = [(_run(world, MODELS[name], parallel, pattern, **sections), pattern) for name, pattern in cases]
    for (name, pattern), got in zip(cases, run_world(world, _train, runs)[0], strict=True):
        _assert_agrees(got, _plain(name, pattern), f"{name}, {pattern}")


# ---------------------------------------------------------------------------------------------------------------------
# One run


@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_and_any_documents_give_the_plain_models_run(shape: str) -> None:
    world, parallel = SHAPES[shape]
    cases = [case for case in CASES if case["shape"] == shape]
    runs = []
    for case in cases:
        schedule, accumulation = case["order"]
        given = _run(
            world,
            MODELS[case["name"]],
            parallel | ({"schedule": schedule} if "pp" in parallel else {}),
            case["pattern"],
            zero={"stage": case["zero_stage"]},
            training={"accumulation": accumulation},
            activations=ACTIVATIONS[case["activations"]],
        )
        runs.append((given, case["pattern"]))
    for case, got in zip(cases, run_world(world, _train, runs, shape not in OVER_SOCKETS)[0], strict=True):
        _assert_agrees(got, _plain(case["name"], case["pattern"]), str(case))


def _evaluate_first(engine: Engine, run: ResolvedRun) -> Any:
    with torch.inference_mode():
        engine.evaluate(micro_batches(run, engine.state, 50))
    return train_offloading(engine, run, False, False, "none")


@pytest.mark.parametrize("shape", ["ring 2", "ulysses 2"])
def test_an_evaluation_in_inference_mode_leaves_training_as_it_was(shape: str) -> None:
    """It is the first to ask for what layers share: positions, rotary tables, tiles."""
    world, parallel = ONE_METHOD[shape]
    names = ("untied", "gpt2")
    runs = [_run(world, MODELS[name], parallel, "none") for name in names]
    for name, got in zip(names, run_world(world, on_one_state, runs, _evaluate_first)[0], strict=True):
        _assert_agrees(got, _plain(name, "none"), name)


def test_documents_on_one_rank_give_the_plain_models_run() -> None:
    _check((1, {}), [(name, pattern) for name in MODELS for pattern in ("random", "ones")])


@pytest.mark.parametrize("shape", [(1, {}), SHAPES["2 x 2"]], ids=["one rank", "2 x 2"])
def test_a_packed_sample_equals_its_documents_trained_apart(shape: tuple[int, dict[str, Any]]) -> None:
    """Two documents of half a sample are two samples of half the length."""
    world, parallel = shape
    names = ("untied", "gpt2")
    runs = [(_run(world, MODELS[name], parallel, "halves"), "halves") for name in names]
    results = run_world(world, _train, runs)[0]
    for name, (run, pattern), got in zip(names, runs, results, strict=True):
        _assert_agrees(got, run_world(1, _train_apart, run, pattern)[0], name)


def _train_apart(_: int, run: ResolvedRun, pattern: str) -> dict[str, Any]:
    plain = plain_trainer(run)
    half = run.config.model.seq_len // 2
    steps = [plain.step(*(x.reshape(-1, half) for x in global_batch(run, step, pattern))) for step in range(STEPS)]
    return outcome(run, plain, steps)


def test_dropout_drops_the_same_elements_on_every_shape() -> None:
    model = GPT2 | {"dropout": 0.1}
    alone = run_world(1, _train, [(_run(1, model, {}, "random"), "random")])[0][0]
    for shape in ("ring 2, pp 2", "ulysses 2, dp 2"):
        world, parallel = SHAPES[shape]
        got = run_world(world, _train, [(_run(world, model, parallel, "random"), "random")])[0][0]
        _assert_agrees(got, alone, shape)


def _of_whole_samples(engine: Engine, run: ResolvedRun) -> list[tuple[int, ...]]:
    """Shapes of the matrices of fractions that a rank holds for all positions of a sample, in the last layer of a step."""
    found: list[tuple[int, ...]] = []
    batches = micro_batches(run, engine.state, 0)

    def look(*_: object) -> None:
        tensors = [one for one in gc.get_objects() if isinstance(one, Tensor) and one.is_floating_point()]
        shapes = [tuple(one.shape) for one in tensors if one.dim() > 1]
        found.extend(shape for shape in shapes if max(shape) >= run.config.model.seq_len)

    engine.chunks[-1].blocks[-1].register_forward_hook(look)
    engine.train_step(batches, LR)
    return found


@pytest.mark.parametrize("shape", ["ring 2", "2 x 2"])
def test_a_rank_holds_nothing_for_every_position_of_a_sample(shape: str) -> None:
    """The rotary tables of all of a million positions would be a gigabyte."""
    world, parallel = (ONE_METHOD | SHAPES)[shape]
    long = {"seq_len": 256, "vocab_size": 61}
    run = _run(world, UNTIED | long, parallel, "none", training={"global_batch_size": 2})
    assert run_world(world, on_one_state, [run], _of_whole_samples) == [[[]]] * world


# ---------------------------------------------------------------------------------------------------------------------
# Isolation

DOCUMENTS = [[5, 8, 3]] * SAMPLES


def _with_others_changed(engine: Engine, run: ResolvedRun, masked: bool) -> dict[str, Any]:
    """Loss and gradients of the middle document, beside the first and the last as they are, and changed."""
    tokens, labels = global_batch(run, 0)
    middle = torch.zeros(tokens.shape, dtype=torch.bool)
    middle[:, 5:13] = True
    labels = labels.where(middle, -100)
    labels[:, 12] = -100
    out: dict[str, Any] = {"loss": [], "gradients": []}
    for given in (tokens, ((tokens + 1) % run.config.model.vocab_size).where(~middle, tokens)):
        batch = micro_batch(run, engine.state, torch.arange(SAMPLES), given, labels, DOCUMENTS if masked else None)
        out["loss"].append(engine.compute_gradients([batch]).loss)
        out["gradients"].append(whole(engine, "gradient"))
    return out


def _bit_equal(result: dict[str, Any]) -> bool:
    (first, second), losses = result["gradients"], result["loss"]
    return losses[0] == losses[1] and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("shape", ["one rank", "ring 2", "ulysses 2", "2 x 2"])
def test_changing_a_document_changes_loss_and_gradients_of_another_by_exactly_0(shape: str) -> None:
    world, parallel = ({"one rank": (1, {})} | ONE_METHOD | SHAPES)[shape]
    packed = [_run(world, model, parallel, "random") for model in (UNTIED, GPT2)]
    assert all(map(_bit_equal, run_world(world, on_one_state, packed, _with_others_changed, True)[0]))
    if world <= 2:  # the measurement is able to fail
        alone = _run(world, UNTIED, parallel, "none")
        assert not _bit_equal(run_world(world, on_one_state, [alone], _with_others_changed, False)[0][0])


# ---------------------------------------------------------------------------------------------------------------------
# Traffic


def _sent(rank: int, cases: Sequence[tuple[ResolvedRun, str]], shares_memory: bool) -> list[dict[str, int]]:
    """Bytes that attention sends in a step, by operation."""
    state, results = state_on(rank, cases[0][0], shares_memory=shares_memory), []
    for run, pattern in cases:
        engine = engine_on(rank, run, state=state)
        state.traffic.reset()
        engine.train_step(micro_batches(run, state, 0, pattern), LR)
        sent = state.traffic.sent_bytes
        results.append({operation: count for (axis, operation), count in sent.items() if axis == "cp" and count})
        engine.sharded_model.close()
    return results


def _formula(run: ResolvedRun, samples: int, reduce_dtype: str, *, forwards: int = 1) -> dict[str, int]:
    """Bytes of a rank in 16 bits for all layers: u ranks exchange heads, r ranks pass keys and values round.

    Of the 12 of a ring are 4 the keys and values forward, 4 again in the backward, and 4 their gradients, 8 in fp32.
    """
    model, parallel = run.config.model, run.config.parallel
    u = parallel.cp_ulysses or 1
    r, length = parallel.cp // u, samples * model.seq_len
    size = model.hidden_size // model.num_heads
    h, kv_heads = model.hidden_size // parallel.tp, max((model.num_kv_heads or model.num_heads) // parallel.tp, 1)
    k = size * max(kv_heads, u)
    round_trip = 4 * (forwards + 1) + (4 if reduce_dtype == "bf16" else 8)
    found = {
        "all_to_all": 4 * (forwards + 1) * (h + k) * length * (u - 1) // (u * r * u),
        "ring_shift": round_trip * k * length * (r - 1) // (r * u),
    }
    return {operation: model.num_layers * count for operation, count in found.items() if count}


def test_the_formulas_are_those_of_the_papers() -> None:
    """Ring 12 k b S (c - 1) / c, Ulysses 8 (h + k') b S (c - 1) / c^2, both 8 (h + k') b (S / u r) (u - 1) / u +
    12 (k' / u) b S (r - 1) / r; k' for as many key heads as u, at least."""
    h, kv, size, tokens, layers = 32, 16, 8, SAMPLES * 16, 2
    ring, ulysses, both = (_run(4, UNTIED, parallel, "none") for parallel in (_ring(4), _ulysses(4), TWO_BY_TWO))
    assert _formula(ring, SAMPLES, "bf16") == {"ring_shift": layers * 12 * kv * tokens * 3 // 4}
    assert _formula(ring, SAMPLES, "fp32") == {"ring_shift": layers * 16 * kv * tokens * 3 // 4}
    assert _formula(ulysses, SAMPLES, "fp32") == {"all_to_all": layers * 8 * (h + size * 4) * tokens * 3 // 16}
    assert _formula(both, SAMPLES, "bf16") == {
        "all_to_all": layers * 8 * (h + kv) * (tokens // 4) // 2,
        "ring_shift": layers * 12 * (kv // 2) * tokens // 2,
    }


@pytest.mark.parametrize("shape", ["ring 4", "ulysses 4", "2 x 2", "ring 2, tp 2 sp"])
def test_attention_sends_the_bytes_of_the_formula(shape: str) -> None:
    """Whatever the documents, the accumulation and what is kept; one more forward where attention is computed again."""
    world, parallel = (ONE_METHOD | SHAPES)[shape]
    cases: list[tuple[str, str, int, str]] = [
        ("bf16", "none", 1, "none"),
        ("fp32", "random", 4, "selective"),
        ("fp32", "none", 1, "full"),
    ]
    if parallel["cp_method"] == "ring":
        cases.append(("bf16", "none", 1, "attention is kept"))
    runs = [
        (
            _run(
                world,
                UNTIED,
                parallel,
                pattern,
                precision={"dtype": "bf16", "reduce_dtype": reduce_dtype},
                training={"accumulation": accumulation},
                activations=ACTIVATIONS[activations],
            ),
            pattern,
        )
        for reduce_dtype, pattern, accumulation, activations in cases
    ]
    for results in run_world(world, _sent, runs, shape not in OVER_SOCKETS):
        for case, (run, _), sent in zip(cases, runs, results, strict=True):
            forwards = 2 if case[3] == "full" else 1
            assert sent == _formula(run, SAMPLES // run.dp, case[0], forwards=forwards), case


# ---------------------------------------------------------------------------------------------------------------------
# Precision


def _inputs(seq: int) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, bf16 [1, heads, seq, 64]: 4 heads, 2 of keys."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, seq, 64, generator=generator).bfloat16() for heads in (4, 2, 2, 4)]


def _attend_on(
    rank: int, cp: int, ulysses: int, seq: int, lengths: list[list[int]] | None
) -> tuple[Tensor, list[Tensor]]:
    parallel = _ring(cp) if ulysses == 1 else TWO_BY_TWO
    return _attend(state_on(rank, run_of(cp, model=UNTIED, parallel=parallel)), _inputs(seq), lengths)


def _attend(
    state: ParallelState, given: Sequence[Tensor], lengths: list[list[int]] | None
) -> tuple[Tensor, list[Tensor]]:
    """Places of this rank's tokens, and their output, dq, dk and dv."""
    shard = sequence_shard(lengths, given[0].shape[2], state.cp_ulysses, state.cp_ring, DEVICE)
    rows = shard.rows[:, 0].cpu()
    q, k, v, grad = (x[:, :, rows].to(DEVICE) for x in given)
    for x in (q, k, v):
        x.requires_grad_()
    axes, on_cuda = (state.cp_ulysses, state.cp_ring), DEVICE.type == "cuda"
    attention = ContextAttention(axes, None, torch.float32, on_cuda=on_cuda)
    return rows, _derived(attention.attend(q, k, v, shard), q, k, v, grad)


def _errors(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[tuple[float, float]]:
    """(max, root mean square) of each difference."""
    return [
        (float((a.double() - b).abs().max()), float((a.double() - b).square().mean().sqrt()))
        for a, b in zip(got, wanted, strict=True)
    ]


def _derived(out: Tensor, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


@pytest.mark.parametrize(
    ("cp", "ulysses", "seq", "lengths"),
    [
        (2, 1, 512, [[100, 1, 155, 256]]),
        (8, 1, 512, [[100, 1, 155, 256]]),
        (4, 2, 512, None),
        (2, 1, 2048, None),  # tiles whose backward is in bf16 on a CPU that multiplies in it
        (4, 2, 2048, [[2047, 1]]),
    ],
)
def test_in_bf16_the_error_is_not_above_that_of_one_flash_call(
    cp: int, ulysses: int, seq: int, lengths: list[list[int]] | None
) -> None:
    """Against attention in fp64, next to one flash call in bf16.  Partial results are merged in fp32 and rounded once.

    A kernel on CUDA rounds each partial result too.  Over n keys a result has a standard deviation of 1 / sqrt(n), so c
    parts of n / c keys with weights of 1 / c bring as much rounding error as the final one: sqrt(2) times in all.
    """
    most = 1 if DEVICE.type == "cpu" else 2**0.5
    given = _inputs(seq)
    got = _in_order(run_world(cp, _attend_on, cp, ulysses, seq, lengths))
    wanted = _exact(given, lengths or [[seq]])
    sizes = [seq] if lengths is None else lengths[0]
    calls = [_one_call(*pieces) for pieces in zip(*(x.split(sizes, dim=2) for x in given), strict=True)]
    flash = [torch.cat(parts, dim=2) for parts in zip(*calls, strict=True)]
    for name, mine, theirs in zip(("out", "dq", "dk", "dv"), _errors(got, wanted), _errors(flash, wanted), strict=True):
        assert mine[0] <= most * theirs[0], f"largest error of {name}"
        assert mine[1] <= most * theirs[1], f"root mean square of the error of {name}"


def _in_order(results: Sequence[tuple[Tensor, list[Tensor]]]) -> list[Tensor]:
    """What the ranks have, by the places of its tokens in the sample."""
    rows = torch.cat([places for places, _ in results])
    assert rows.sort().values.equal(torch.arange(len(rows)))
    by_kind = zip(*(found for _, found in results), strict=True)
    return [torch.cat(parts, dim=2)[:, :, rows.argsort()] for parts in by_kind]


def _exact(given: Sequence[Tensor], lengths: list[list[int]]) -> list[Tensor]:
    """Output, dq, dk and dv of the plain formula in fp64."""
    q, k, v = (x.double().requires_grad_() for x in given[:3])
    sizes = torch.tensor(lengths[0])
    unseen = unseen_keys(torch.arange(len(sizes)).repeat_interleave(sizes)[None])
    out = causal_attention(q, k, v, unseen).unflatten(-1, (q.shape[1], -1)).transpose(1, 2)
    return _derived(out, q, k, v, given[3].double())


def _one_call(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    q, k, v = (x.clone().to(DEVICE).requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return [x.cpu() for x in _derived(out, q, k, v, grad.to(DEVICE))]


# ---------------------------------------------------------------------------------------------------------------------
# Bugs that other systems shipped


def test_a_ring_over_packed_documents_has_the_loss_of_the_documents() -> None:
    """A ring without the documents' borders gave 1.83 times the loss; a mask that is not causal became causal elsewhere."""
    _check(ONE_METHOD["ring 2"], [("untied", pattern) for pattern in ("random", "edges")])
    packed, one = _plain("untied", "random"), _plain("untied", "whole")
    assert packed["loss"] != pytest.approx(one["loss"], rel=1e-3)  # so a mask that became causal would show


def _masked_rank(engine: Engine, run: ResolvedRun) -> tuple[int, dict[str, Any] | None]:
    """Tokens that this rank counts in the first step, and the run."""
    counted = sum(int((batch.labels != -100).sum()) for batch in micro_batches(run, engine.state, 0, "masked"))
    return counted, train_offloading(engine, run, False, False, "masked")


@pytest.mark.parametrize("shape", ["ring 2", "ulysses 4", "2 x 2"])
def test_a_rank_whose_tokens_are_all_masked_is_fine(shape: str) -> None:
    """Others had NaN there, or divided by the rank's own count."""
    world, parallel = (ONE_METHOD | SHAPES)[shape]
    results = run_world(world, on_one_state, [_run(world, UNTIED, parallel, "masked")], _masked_rank)
    counts = [result[0][0] for result in results]
    assert min(counts) == 0 < max(counts)
    _assert_agrees(results[0][0][1], _plain("untied", "masked"))


@pytest.mark.parametrize("shape", ["ring 4", "ulysses 4"])
def test_gradients_are_divided_by_the_global_count_and_not_by_cp_nor_the_ulysses_degree(shape: str) -> None:
    """They were 1/4 at cp 4 where ranks divided by their own counts, and u times as large where heads were exchanged; fewer
    key heads than ranks had them once for each copy."""
    one_kv_head = UNTIED | {"num_kv_heads": 1}
    world, parallel = (ONE_METHOD | SHAPES)[shape]
    runs = [(_run(world, one_kv_head, parallel, "none", optimizer=OPTIMIZER | {"grad_clip": 0.0}), "none")]
    plain = run_world(1, lambda _: plain_steps(run_of(1, model=one_kv_head, optimizer=OPTIMIZER | {"grad_clip": 0.0})))[
        0
    ]
    _assert_agrees(run_world(world, _train, runs)[0][0], plain)


def test_places_and_positions_of_packed_zigzag() -> None:
    """Two documents of 4 tokens on 2 ranks: 0, 3, 4, 7 and 1, 2, 5, 6, which begin at 0 in each document."""
    for index, (rows, positions) in enumerate((([0, 3, 4, 7], [0, 3, 0, 3]), ([1, 2, 5, 6], [1, 2, 1, 2]))):
        shard = sequence_shard([[4, 4]], 8, Axis("cp_ulysses"), Axis("cp_ring", (0, 1), index), DEVICE)
        assert shard is not None
        assert shard.rows.flatten().tolist() == rows
        assert shard.positions.flatten().tolist() == positions
        assert rows_of(shard, torch.arange(10, 18)[:, None]).flatten().tolist() == [10 + row for row in rows]


def _padded_gradients(rank: int, lengths: list[list[int]], given: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """As `_attend_on` over a ring of 2."""
    return _attend(state_on(rank, run_of(2, model=UNTIED, parallel=_ring(2))), given, lengths)


def test_padding_at_the_tail_has_no_gradient_and_changes_no_other() -> None:
    """Elsewhere dq and dk were wrong there, without a word."""
    lengths, given = [[6, 5, 5]], [x[:, :, :16].float() for x in _inputs(64)]
    given[3][:, :, 11:] = 0
    got, wanted = _in_order(run_world(2, _padded_gradients, lengths, given)), _exact(given, lengths)
    for mine, plain in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), plain, atol=1e-6, rtol=1e-5)
    assert not any(mine[:, :, 11:].any() for mine in got[1:])
    _check(ONE_METHOD["ring 2"], [("untied", "padded"), ("gpt2", "padded")])


def test_full_recomputation_gives_numbers_under_context_parallelism() -> None:
    """Elsewhere the result was NaN."""
    cases = [("untied", pattern) for pattern in ("none", "masked")]
    _check(SHAPES["2 x 2"], cases, activations=ACTIVATIONS["full"])
    _check(ONE_METHOD["ring 2"], cases[1:], activations=ACTIVATIONS["attention is kept"])


@pytest.mark.parametrize("parallel", [_ring(2) | {"tp": 2}, _ulysses(2) | SEQUENCE], ids=["ring tp2", "ulysses tp2 sp"])
def test_norms_of_queries_and_keys_have_their_gradients_under_tp_and_cp(parallel: dict[str, Any]) -> None:
    """Qwen3's; the run on one rank is that of transformers (`test_families`)."""
    model = LLAMA | {"family": "qwen3", "tie_embeddings": True}
    wanted, got = (
        run_world(world, _train, [(_run(world, model, given, "random"), "random")])[0][0]
        for world, given in ((1, {}), (4, parallel))
    )
    assert any("q_norm" in name for name in wanted["gradients"])
    _assert_agrees(got, wanted)
