"""What is kept and what is computed again changes no bit of a run: losses, gradient norms, weights, beside whatever.

Each run says how often modules were run again, so that a policy that is not applied fails here too:

    layers with the policy x micro-batches x modules of its regions
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from torch import Tensor, nn
from worlds import GPT2, LLAMA, LR, counted, engine_on, micro_batches, on_one_state, pairwise, run_of, state_on

from megazero.config import ResolvedRun
from megazero.engine import Engine, Position, initialize
from megazero.models.build_context import BuildContext
from megazero.models.gpt import Block
from megazero.models.llama.family import LlamaFamily
from megazero.models.registry import FAMILIES as FAMILIES_BY_NAME
from megazero.schedules.action import Action, Op, Schedule, loop

pytestmark = pytest.mark.slow  # starts whole runs

LAYERS = 2
RECOMPUTED: dict[str, dict[str, Any]] = {
    "norms": {"recompute": ["norms"]},
    "activation": {"recompute": ["activation"]},
    "selective": {"recompute": "selective"},
    "attention": {"recompute": ["attention"]},
    "attention and a norm": {"recompute": ["attention", "norms"]},
    "mlp": {"recompute": ["mlp"]},
    "mlp and a norm": {"recompute": ["mlp", "norms"]},
    "attention, mlp": {"recompute": ["attention", "mlp"]},
    "full": {"recompute": "full"},
    "residual": {"recompute": ["residual"]},
    "residual and no product": {"recompute": ["norms", "activation", "residual"]},
    "residual, mlp": {"recompute": ["residual", "mlp"]},
    "one by one": {"recompute": ["attention", "residual", "mlp"], "keep_attention": True},
    "attention is kept": {"recompute": "full", "keep_attention": True},
}
MODULES = {  # of a layer, by region; where norms come after, as in OLMo 2, by the second table; "sum" is with norm 2
    "norms": "norm1 sum",
    "activation": "product",
    "attention": "norm1 qkv core",
    "residual": "out sum",
    "mlp": "sum up product",
    "full": "norm1 qkv core out sum up product",
    "selective": "norm1 sum product",
}
AFTER = MODULES | {
    "norms": "norm1 norm2",
    "selective": "norm1 norm2 product",
    "attention": "qkv core",
    "residual": "out norm1 sum",
    "mlp": "up product",
    "full": "qkv core out norm1 sum up product down norm2",
}


def _again(recompute: str | list[str], model: dict[str, Any] = LLAMA) -> int:
    """Modules that a layer runs again."""
    modules = AFTER if model.get("family") == "olmo2" else MODULES
    regions = [recompute] if isinstance(recompute, str) else recompute
    return len({module for region in regions for module in modules[region].split()})


FAMILIES = {
    "llama": LLAMA,
    "gpt2": GPT2 | {"dropout": 0.2},
    "qwen3": LLAMA | {"family": "qwen3", "tie_embeddings": True},
    "olmo2": LLAMA | {"family": "olmo2", "dropout": 0.2},
    "mistral": LLAMA | {"family": "mistral", "sliding_window": 5},
}


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _bits(engine: Engine, run: ResolvedRun, first: int = 0, steps: int = 2) -> dict[str, Any]:
    """All that a rank can see of some steps with an evaluation after the first; and how often something ran again."""
    numbers: list[Any] = []
    with counted() as ran:
        for step in range(first, first + steps):
            done = engine.train_step(micro_batches(run, engine.state, step), LR, raises_non_finite=False)
            numbers += [done.loss, repr(done.grad_norm), done.skipped]
            if step == first:
                numbers.append(engine.evaluate(micro_batches(run, engine.state, 50)).loss)
    buckets = engine.sharded_model.parameters.buckets
    numbers += [_digest(bucket.read(bucket.master, bucket.owned)) for bucket in buckets]
    return {"bits": numbers, "again": len(ran)}


def _compare(world: int, cases: Sequence[dict[str, Any]], wanted: Sequence[int], names: Sequence[str]) -> None:
    """Run `cases`, sections of run files that differ from a run without [activations] in this section alone."""
    plain = [{key: value for key, value in case.items() if key != "activations"} for case in cases]
    distinct = [case for index, case in enumerate(plain) if case not in plain[:index]]
    runs = [run_of(world, **case) for case in [*distinct, *cases]]
    ranks = run_world(world, on_one_state, runs, _bits, 0, 1)
    for results in ranks:
        assert all(result["again"] == 0 for result in results[: len(distinct)])
        for without, result, name in zip(plain, results[len(distinct) :], names, strict=True):
            assert result["bits"] == results[distinct.index(without)]["bits"], name
    for index, (count, name) in enumerate(zip(wanted, names, strict=True)):
        assert sum(results[len(distinct) + index]["again"] for results in ranks) == count, name


def test_every_policy_in_every_family_and_precision() -> None:
    chosen = pairwise(policy=list(RECOMPUTED), family=list(FAMILIES), dtype=["fp32", "bf16", "fp16"])
    cases = [
        {
            "model": FAMILIES[case["family"]] | {"num_layers": LAYERS},
            "precision": {"dtype": case["dtype"]},
            "activations": RECOMPUTED[case["policy"]],
        }
        for case in chosen
    ]
    again = [LAYERS * _again(RECOMPUTED[case["policy"]]["recompute"], FAMILIES[case["family"]]) for case in chosen]
    _compare(1, cases, again, list(map(str, chosen)))


SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "interleaved", "virtual_stages": 2},
    {"schedule": "zb-h1"},
    {"schedule": "zbv"},
]
ZERO: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "reduce": "step"},
    {"stage": 3, "gather_policy": "action"},
    {"stage": 3, "gather_policy": "chunk", "offload": {"optimizer": "cpu", "parameters": "cpu"}},
    {"stage": 3, "gather_policy": "step"},
]
EVERY_LAYER = ["selective", "attention is kept", "mlp and a norm", "attention, mlp", "residual, mlp", "full"]
SOME_LAYERS: dict[str, tuple[dict[str, Any], int]] = {  # [activations], and modules run again in all 4 layers together
    "first of each rank": ({"recompute": "selective", "layers": 1}, 3 * 2),
    "listed": ({"recompute": ["mlp"], "layers": [0, 3]}, 3 * 2),
    "by stage": ({"recompute": "full", "stages": [{"stage": 1, "recompute": ["norms"], "layers": 1}]}, 7 * 2 + 2),
}


def test_every_schedule_and_zero_stage() -> None:
    """Pipelines of 2 ranks, twice; some policies are of some layers or of some ranks only."""
    every = {name: (RECOMPUTED[name], 4 * _again(RECOMPUTED[name]["recompute"])) for name in EVERY_LAYER}
    policies = every | SOME_LAYERS
    cases, again, names = [], [], []
    for base, zero in enumerate(ZERO):
        for name in [list(policies)[(base + shift) % len(policies)] for shift in (0, 3)]:
            activations, count = policies[name]
            cases.append(
                {
                    "model": FAMILIES["qwen3"] | {"num_layers": 4},  # tied
                    "parallel": {"pp": 2, **SCHEDULES[base % len(SCHEDULES)]},
                    "zero": zero,
                    "precision": {"dtype": "bf16"},
                    "training": {"accumulation": 2},
                    "activations": activations,
                }
            )
            again.append(2 * 2 * count)  # replicas and micro-batches
            names.append(f"{name}, {cases[-1]['parallel']}, {zero}")
    _compare(4, cases, again, names)


TENSOR: list[tuple[dict[str, Any], dict[str, Any], int]] = [  # model, [parallel], ZeRO stage
    (LLAMA | {"dropout": 0.2}, {"tp": 2}, 3),
    (LLAMA, {"tp": 2, "sequence_parallel": True}, 3),
    (GPT2 | {"dropout": 0.2}, {"tp": 2, "sequence_parallel": True}, 1),
    (LLAMA | {"family": "olmo2"}, {"tp": 2}, 2),
    (LLAMA | {"num_kv_heads": 1}, {"tp": 2}, 0),  # more ranks than key and value heads
]


def test_every_shape_over_tp_and_what_is_cut_over_it() -> None:
    policies = ["norms", "attention and a norm", "attention, mlp", "full", "attention is kept"]
    chosen = pairwise(policy=policies, shape=TENSOR, partition=[False, True])
    whole = ["residual and no product", "residual, mlp", "one by one"]
    chosen += [{"policy": whole[number % 3], "shape": shape, "partition": False} for number, shape in enumerate(TENSOR)]
    cases, again = [], []
    for case in chosen:
        model, parallel, stage = case["shape"]
        activations = RECOMPUTED[case["policy"]]
        cases.append(
            {
                "model": model | {"num_layers": LAYERS},
                "parallel": parallel,
                "zero": {"stage": stage},
                "activations": activations | {"partition": case["partition"]},
            }
        )
        again.append(2 * LAYERS * _again(activations["recompute"], model))  # of each rank
    _compare(2, cases, again, list(map(str, chosen)))


def _own_schedule(rank: int, runs: Sequence[ResolvedRun], schedule: Schedule) -> list[dict[str, Any]]:
    state = state_on(rank, runs[0])
    return [_bits(initialize(run.config, state, schedule=schedule), run) for run in runs]


def test_a_schedule_of_the_users_own_whose_weight_gradients_wait_for_the_end() -> None:
    kinds = (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)
    actions = tuple(Action(kind, index) for kind in kinds for index in range(2))
    activations: list[dict[str, Any]] = [{}, RECOMPUTED["selective"], RECOMPUTED["full"]]
    runs = [run_of(1, model=LLAMA, training={"accumulation": 2}, activations=one) for one in activations]
    ((without, *others),) = run_world(1, _own_schedule, runs, Schedule("mine", 2, loop(1), (actions,)))
    assert [one["again"] for one in others] == [2 * 2 * 2 * 3, 2 * 2 * 2 * 7]
    assert all(one["bits"] == without["bits"] for one in others)


def _after_failures(rank: int, runs: Sequence[ResolvedRun]) -> list[tuple[dict[str, Any], object]]:
    """Steps after one that failed in a forward, and one that failed while a part of it was run again."""
    state, found = state_on(rank, runs[0]), []
    for run in runs:
        engine = engine_on(rank, run, state=state)
        for passes in (0, 3):  # of the last layer's projection; the third, where there is one, is in a backward
            left = [passes]

            def fail(*_: Any, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise RuntimeError("on purpose")

            hook = engine.chunks[0].blocks[-1].mlp.up.register_forward_pre_hook(fail)
            for _ in range(1 if passes == 0 else 2):
                with contextlib.suppress(RuntimeError):
                    engine.compute_gradients(micro_batches(run, state, 0))
            hook.remove()
        found.append((_bits(engine, run), torch._C._autograd._top_saved_tensors_default_hooks(True)))
        engine.sharded_model.close()
    return found


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    sections = [
        {"zero": {"stage": stage}, "precision": {"dtype": "fp16", "initial_scale_power": 24}} for stage in (0, 3)
    ]
    for section in sections:
        activations = [{}, RECOMPUTED["selective"], RECOMPUTED["mlp"], RECOMPUTED["attention is kept"]]
        runs = [run_of(1, model=LLAMA, activations=one, training={"accumulation": 2}, **section) for one in activations]
        ((without, *others),) = run_world(1, _after_failures, runs)
        fresh = run_world(1, on_one_state, runs[:1], _bits)[0][0]
        assert fresh["bits"][2] is True  # the first step overflows
        assert without == (fresh, None)
        for result, hooks in others:
            assert result["again"] > 0
            assert (result["bits"], hooks) == (fresh["bits"], None)


def _resumed(rank: int, runs: Sequence[ResolvedRun], folder: Path) -> list[list[Any]]:
    """The bits of the second and third step, of each run without a stop, and after the first step of another."""
    state, found = state_on(rank, runs[0]), []
    for number, run in enumerate(runs):
        engine = engine_on(rank, run, state=state)
        engine.train_step(micro_batches(run, state, 0), LR)
        engine.save(folder / str(number), Position(1, 8, 0), "data")
        found.append(_bits(engine, run, 1)["bits"])
        engine.sharded_model.close()
    for run, origin in zip(runs, (1, 0), strict=True):
        engine = engine_on(rank, run, state=state, init_weights=False)
        engine.load(folder / str(origin), "data")
        found.append(_bits(engine, run, 1)["bits"])
        engine.sharded_model.close()
    return found


def test_a_run_resumes_under_another_policy(tmp_path: Path) -> None:
    runs = [run_of(1, model=LLAMA, zero={"stage": 3}, activations={"recompute": one}) for one in ("none", "full")]
    ((first, *others),) = run_world(1, _resumed, runs, tmp_path)
    assert all(one == first for one in others)


class _TorchsDropout(nn.Module):
    """An MLP as a script may write it: its random numbers are torch's."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(nn.functional.dropout(x, 0.3))


class _OwnFamily(LlamaFamily):
    def blocks(self, context: BuildContext, layers: Sequence[int]) -> list[Block]:
        blocks = super().blocks(context, layers)
        for block in blocks:
            block.mlp = _TorchsDropout(block.mlp)
        return blocks


def _drawn_bits(rank: int, policies: Sequence[dict[str, Any]]) -> list[list[Any]]:
    llama = FAMILIES_BY_NAME["llama"]
    assert isinstance(llama, LlamaFamily)
    FAMILIES_BY_NAME.register("drawing", _OwnFamily(llama.variant, llama.hugging_face))
    model = LLAMA | {"family": "drawing", "num_layers": 2}
    runs = [run_of(1, model=model, activations=policy) for policy in policies]
    found, state = [], state_on(rank, runs[0])
    for run in runs:
        engine = engine_on(rank, run, state=state)
        torch.manual_seed(3)
        found.append(_steps_of(engine, run))
    return found


def _steps_of(engine: Engine, run: ResolvedRun) -> list[Any]:
    numbers: list[Any] = []
    for step in range(2):
        done = engine.train_step(micro_batches(run, engine.state, step), LR, raises_non_finite=False)
        numbers += [done.loss, repr(done.grad_norm)]
    return numbers + [_digest(bucket.gradient) for bucket in engine.sharded_model.reducer.buckets]


def test_a_family_of_a_scripts_own_may_use_torchs_random_numbers() -> None:
    policies: list[dict[str, Any]] = [{}, {"recompute": ["mlp"]}, {"recompute": "full", "contiguous": True}]
    for found in run_world(1, _drawn_bits, policies):
        assert found[1:] == [found[0]] * 2
