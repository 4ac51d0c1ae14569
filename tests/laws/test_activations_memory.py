"""Law 3 for activations: autograd saves the bytes of the formula, and not one more, whatever is recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from activation_formula import MicroBatchSize, activations_of_ranks, block_bytes, micro_batch_size, queued_bytes
from harness import run_world
from saved_memory import Alive, measure_saved
from test_activation_offload import LateCopier
from torch import Tensor, nn
from worlds import engine_on, micro_batches, run_of, state_on

from megazero.comm.collectives import ring_shift
from megazero.comm.memory import Arena
from megazero.config import ResolvedRun
from megazero.engine.outline import schedule_of, stages_of
from megazero.layers.context_attention import ContextAttention
from megazero.layers.linear import WeightGradQueue
from megazero.layers.sequence_shard import sequence_shard
from megazero.models.activation_config import LayerPolicy

POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "norms": {"recompute": ["norms"]},
    "attention": {"recompute": ["attention"]},
    "mlp": {"recompute": ["mlp"]},
    "mlp and norms": {"recompute": ["mlp", "norms"]},
    "residual": {"recompute": ["residual"]},
    "residual and what has no product": {"recompute": ["norms", "activation", "residual"]},
    "residual, mlp": {"recompute": ["residual", "mlp"]},
    "residual, attention but its output": {"recompute": ["residual", "attention", "norms"], "keep_attention": True},
    "all one by one": {"recompute": ["attention", "residual", "mlp"]},
    "attention but its output": {"recompute": ["attention", "mlp"], "keep_attention": True},
    "full": {"recompute": "full"},
    "full but attention": {"recompute": "full", "keep_attention": True},
    "full of the first layer": {"recompute": "full", "layers": 1},
    "full of rank 0": {"stages": [{"stage": 0, "recompute": "full"}]},
}
CUT = {
    "full, cut": {"recompute": "full", "partition": True},
    "mlp and norms, cut": {"recompute": ["mlp", "norms"], "partition": True},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "olmo2": {},
    "mistral": {"sliding_window": 8},
    "gpt2": {"num_kv_heads": 4},
}


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (LayerPolicy(), "12 * h + 4 * k + 6 * f + 4 * a + 8"),
        (LayerPolicy(frozenset({"norms", "activation"})), "8 * h + 4 * k + 4 * f + 4 * a"),
        (LayerPolicy(frozenset({"norms", "activation", "residual"})), "6 * h + 4 * k + 4 * f + 4 * a"),
        (LayerPolicy(frozenset({"norms", "residual", "mlp"})), "6 * h + 4 * k + 4 * a"),
        (LayerPolicy(frozenset({"attention", "residual", "mlp"}), keep_attention=True), "4 * h + 4 * a"),
        (LayerPolicy(frozenset({"mlp"})), "10 * h + 4 * k + 4 * a + 4"),
        (LayerPolicy(frozenset({"mlp", "norms"})), "8 * h + 4 * k + 4 * a"),
        (LayerPolicy(frozenset({"block"}), keep_attention=True), "4 * h + 4 * a"),
        (LayerPolicy(frozenset({"block"})), "2 * h"),
    ],
)
def test_a_llama_of_8b_keeps_the_bytes_of_the_table(policy: LayerPolicy, wanted: str) -> None:
    """Llama 3 8B, a token of one layer, in 16 bits."""
    sizes = {"hidden_size": 4096, "num_layers": 1, "num_heads": 32, "num_kv_heads": 8, "ffn_hidden_size": 14336}
    run = run_of(1, model={"family": "llama", "seq_len": 128} | sizes, precision={"dtype": "bf16"})
    (stage,) = stages_of(run.config)
    kept = block_bytes(stage.blocks[0], policy, MicroBatchSize(2, 128, 2))
    assert sum(kept.values()) == 2 * 128 * eval(wanted, {"h": 4096, "k": 1024, "f": 14336, "a": 32})


def _differences(rank: int, runs: dict[str, ResolvedRun]) -> dict[str, Any]:
    """By run, where counted and formula differ: at the peak, in one micro-batch of a layer, or what was never let go."""
    state, found = state_on(rank, next(iter(runs.values()))), {}
    for name, run in runs.items():
        engine = engine_on(rank, run, state=state)
        formula = activations_of_ranks(run, schedule_of(run), on_cuda=False)[state.at.pp]
        pattern = "random" if run.config.data.document_mask else "none"
        memory = measure_saved(engine, micro_batches(run, state, 0, pattern), formula.units)
        wanted = {unit: sum(tensors.values()) for unit, tensors in formula.units.items()}
        if (memory.peak, memory.live, memory.units) != (formula.saved, 0, wanted):
            found[name] = {"counted": (memory.peak, memory.live, memory.units), "formula": (formula.saved, 0, wanted)}
        engine.sharded_model.close()
    return found


def _llama(**keys: Any) -> dict[str, Any]:
    return {"family": "llama", "num_layers": 2, "num_kv_heads": 2, **keys}


def test_every_family_keeps_its_bytes_under_every_policy() -> None:
    pairs = product(FAMILIES.items(), POLICIES.items())
    runs = {}
    for number, ((family, keys), (policy, activations)) in enumerate(pairs):
        is_wide, drops = number % 2 == 0, number % 3 == 0
        runs[f"{family}, {policy}"] = run_of(
            1,
            model=_llama(family=family, dropout=0.1 * drops, **{"num_layers": 1, **keys}),
            activations=activations,
            precision={"dtype": "fp32" if is_wide else "bf16"},
            training={"micro_batch_size": 8},
        )
    assert run_world(1, _differences, runs) == [{}]


def test_every_schedule_keeps_its_bytes_cut_over_tp_or_not() -> None:
    schedules = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
    chunks = {"interleaved": {"virtual_stages": 2}}
    runs = {}
    names = ("none", "selective", "mlp and norms", "residual, attention but its output", "attention but its output")
    names += ("full", "full but attention", "full of the first layer", "full of rank 0", *CUT)
    policies = {name: (POLICIES | CUT)[name] for name in names}
    for number, (policy, activations) in enumerate(policies.items()):
        schedule, cuts = schedules[number % 5], policy not in CUT and number % 2 == 0
        runs[f"{schedule}, {policy}"] = run_of(
            4,
            model=_llama(num_layers=4 if schedule in ("interleaved", "zbv") else 2),
            parallel={"pp": 2, "tp": 2, "schedule": schedule, "sequence_parallel": cuts, **chunks.get(schedule, {})},
            activations=activations,
            training={"micro_batch_size": 2},
        )
    runs["norms that come after, cut"] = run_of(
        4,
        model=_llama(family="olmo2"),
        parallel={"pp": 2, "tp": 2},
        activations={"recompute": ["norms"], "partition": True},
    )
    runs["an input that cannot be cut"] = run_of(
        4,
        model=_llama(family="mistral", hidden_size=33, head_dim=8, seq_len=15),
        parallel={"tp": 2, "pp": 2},
        activations={"recompute": "full", "partition": True},
        training={"micro_batch_size": 1},
    )
    assert run_world(4, _differences, runs) == [{}] * 4


def test_every_zero_stage_keeps_its_bytes_and_no_weight() -> None:
    runs = {
        f"{policy}, ZeRO {stage}": run_of(
            2, model=_llama(), zero={"stage": stage}, activations=POLICIES[policy], precision={"dtype": "bf16"}
        )
        for stage, policy in ((1, "mlp"), (2, "full"), (3, "none"), (3, "selective"), (3, "full"))
    }
    assert run_world(2, _differences, runs) == [{}] * 2


def test_weights_that_a_unit_need_not_share_are_no_activations() -> None:
    """At stage 3 a unit whose buffer no other takes saves its weights as they are."""
    policies = product(("action", "chunk", "step"), ("1f1b", "gpipe"), ("none", "full"))
    runs = {
        f"{gather}, {schedule}, {policy}": run_of(
            4,
            model=_llama(num_layers=4),
            parallel={"pp": 2, "schedule": schedule},
            zero={"stage": 3, "gather_policy": gather},
            activations=POLICIES[policy],
            precision={"dtype": "bf16"},
        )
        for gather, schedule, policy in policies
    }
    assert run_world(4, _differences, runs) == [{}] * 4


def test_a_window_over_one_sample_and_one_key_head_keeps_its_bytes() -> None:
    """Which of the blocks' copies are views depends on both, and on whether blocks fill the sample."""
    runs = {
        f"{heads} of {kv}, {seq} by {window}, {samples}": run_of(
            1,
            model=_llama(family="mistral", num_layers=1, num_heads=heads)
            | {"num_kv_heads": kv, "seq_len": seq, "sliding_window": window},
            precision={"dtype": "bf16"},
            training={"micro_batch_size": samples},
        )
        for (heads, kv), (seq, window), samples in product(
            ((4, 1), (4, 2), (1, 1)), ((24, 8), (24, 5), (12, 8), (16, 11)), (1, 2)
        )
    }
    assert run_world(1, _differences, runs) == [{}]


def test_ranks_that_share_a_key_head_keep_it_whole() -> None:
    families = ("llama", "qwen3", "olmo2")
    runs = {family: run_of(4, model=_llama(family=family), parallel={"tp": 4}) for family in families}
    assert run_world(4, _differences, runs) == [{}] * 4


CONTEXT: dict[str, dict[str, Any]] = {
    "ring 2": {"cp": 2, "cp_method": "ring"},
    "ulysses 4": {"cp": 4, "cp_method": "ulysses"},
    "2 x 2": {"cp": 4, "cp_method": "hybrid", "cp_ulysses": 2},
    "ring 2, tp 2": {"cp": 2, "cp_method": "ring", "tp": 2},
    "ulysses 2, tp 2, cut": {"cp": 2, "cp_method": "ulysses", "tp": 2, "sequence_parallel": True},
}
KEEPING = ("none", "selective", "attention but its output", "full but attention", "full", "mlp and norms", "attention")


@pytest.mark.parametrize("shape", CONTEXT)
def test_context_parallelism_divides_the_bytes(shape: str) -> None:
    """Two key heads: Ulysses over 4 ranks, and over 2 beside tp 2, has each of them several times."""
    shift, world = list(CONTEXT).index(shape), 2 if shape == "ring 2" else 4
    runs = {}
    for number, policy in enumerate((KEEPING * 2)[shift : shift + (7 if world == 2 else 4)]):
        family = list(FAMILIES)[(number + 2 * shift) % len(FAMILIES)]
        runs[f"{family}, {policy}"] = run_of(
            world,
            model=_llama(**{"family": family, "num_layers": 1, **FAMILIES[family]}),
            parallel=CONTEXT[shape],
            activations=POLICIES[policy],
            precision={"dtype": "bf16" if number % 2 else "fp32"},
            training={"micro_batch_size": 2},
            data={"document_mask": (number + shift) % 3 > 0},
        )
    assert run_world(world, _differences, runs) == [{}] * world


def test_documents_on_one_rank_keep_what_one_document_does() -> None:
    """A window has no blocks of its own then: its layers keep what those without one do."""
    runs = {
        f"{family}, {policy}": run_of(
            1,
            model=_llama(**{"family": family, "num_layers": 1, **keys}),
            activations=POLICIES[policy],
            precision={"dtype": "bf16"},
            training={"micro_batch_size": 8},
            data={"document_mask": True},
        )
        for (family, keys), policy in product(FAMILIES.items(), KEEPING)
    }
    assert run_world(1, _differences, runs) == [{}]


def _buffers_of_ring(rank: int, cp: int, rows: int, shares_memory: bool) -> list[tuple[int, int, int]]:
    """Of the forward and of the backward: chunks of keys and values, the same of gradients, most bytes."""
    run = run_of(cp, model=_llama(seq_len=cp * rows), parallel={"cp": cp, "cp_method": "ring"})
    state = state_on(rank, run, shares_memory=shares_memory)
    shard = sequence_shard(None, cp * rows, state.cp_ulysses, state.cp_ring, state.device)
    assert shard is not None
    q, k, v = (torch.randn(1, heads, rows, 16).bfloat16().requires_grad_() for heads in (6, 2, 2))
    grad, attention = torch.randn_like(q), ContextAttention((state.cp_ulysses, state.cp_ring), None, torch.float32)
    chunk, found = torch.Size([2, *k.shape]), []
    number = torch.zeros(1)
    ring_shift(number.clone(), number, state.cp_ring).wait()  # maps the memory that the ranks share
    with Alive() as forward:
        out = attention.attend(q, k, v, shard)
    with Alive() as backward:
        out.backward(grad)
    for one in (forward, backward):
        found.append((one.most[torch.bfloat16, chunk], one.most[torch.float32, chunk], one.most_bytes))
    return found


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared memory", "gloo"])
def test_a_ring_of_any_size_has_two_chunks_of_keys_and_values_and_two_of_gradients(shares_memory: bool) -> None:
    """Beside q, k, v and out; of a chunk as long, a ring of 5 takes no byte more than one of 4."""
    by_ring = [run_world(cp, _buffers_of_ring, cp, 64, shares_memory) for cp in (4, 5)]
    for ranks in by_ring:
        for forward, backward in ranks:
            assert (forward[:2], backward[:2]) == ((2, 0), (2, 2))
    most = [[max(of_rank[direction][2] for of_rank in ranks) for direction in (0, 1)] for ranks in by_ring]
    assert most[0] == most[1]


def _held(by: Any) -> Iterator[Tensor]:
    """The tensors that a queued function holds, but for weights."""
    if isinstance(by, Tensor):
        yield from () if isinstance(by, nn.Parameter) else (by,)
    elif isinstance(by, partial):
        for one in (by.func, *by.args):
            yield from _held(one)
    else:
        for cell in getattr(by, "__closure__", None) or ():
            yield from _held(cell.cell_contents)


def _queued(rank: int, runs: dict[str, ResolvedRun]) -> dict[str, Any]:
    """By run, where the bytes that wait for a weight pass differ from the formula; of each pass of each chunk."""
    state, found, run_oldest = state_on(rank, next(iter(runs.values()))), {}, WeightGradQueue.run_oldest
    passes: list[tuple[WeightGradQueue, int]] = []

    def counting(queue: WeightGradQueue) -> None:
        storages = {one.untyped_storage() for entry in queue._passes[0] for one in _held(entry)}
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        passes.append((queue, sum(sizes.values())))
        run_oldest(queue)

    WeightGradQueue.run_oldest = counting  # type: ignore[method-assign]
    for name, run in runs.items():
        engine, size = engine_on(rank, run, state=state), micro_batch_size(run, on_cuda=False)
        passes.clear()
        engine.compute_gradients(micro_batches(run, state, 0))
        wanted = dict(zip(engine._wgrad_queues, (queued_bytes(stage, size) for stage in engine.chunks), strict=True))
        counts = {(counted, wanted[queue]) for queue, counted in passes}
        if not counts or any(counted != formula for counted, formula in counts):
            found[name] = counts
        engine.sharded_model.close()
    WeightGradQueue.run_oldest = run_oldest  # type: ignore[method-assign]
    return found


def test_what_waits_for_weight_gradients_is_the_formulas() -> None:
    families, policies = ("llama", "gpt2", "olmo2", "qwen2"), ("none", "residual, mlp", "full", "selective")
    runs = {}
    for number, (family, policy) in enumerate(zip(families, policies, strict=True)):
        runs[f"{family}, {policy}"] = run_of(
            4,
            model=_llama(num_layers=4, **{"family": family, **FAMILIES[family], "dropout": 0.1 * (number % 2)}),
            parallel={"pp": 2, "tp": 2, "schedule": ("zb-h1", "zbv")[number % 2], "sequence_parallel": number > 1},
            activations=POLICIES[policy],
            training={"micro_batch_size": 2},
            precision={"dtype": "bf16"},
        )
    assert run_world(4, _queued, runs) == [{}] * 4


class _CountingArena(Arena):
    """Knows the most bytes that were asked for at once; the arena itself rounds parts up, and may have gaps."""

    now = most = 0

    def acquire(self, nbytes: int, *, line: int = 0) -> Tensor:
        memory = super().acquire(nbytes, line=line)  # which takes back what was dropped
        self.now += nbytes
        self.most = max(self.most, self.now)
        return memory

    def release(self, memory: Tensor) -> None:
        self.now -= memory.numel()
        super().release(memory)


def _moved(rank: int, runs: Sequence[ResolvedRun]) -> list[dict[str, int]]:
    """Of runs that offload all layers: the most on the device and on the host, counted and by the formula."""
    state, found = state_on(rank, runs[0]), []
    for number, run in enumerate(runs):
        engine, copier = engine_on(rank, run, state=state), LateCopier(number)
        assert engine.offload is not None
        engine.offload.copier, engine.offload.smallest_bytes = copier, 64  # more than the ids of samples
        engine.offload.pool = pool = _CountingArena(torch.device("cpu"))
        engine.compute_gradients(micro_batches(run, state, 0))
        formula = activations_of_ranks(run, schedule_of(run), on_cuda=False)[state.at.pp]
        layers = [tensors for unit, tensors in formula.units.items() if unit.startswith("layer")]
        found.append(
            {
                "counted": copier.most_on_device,
                "two layers": 2 * max(sum(tensors.values()) for tensors in layers),
                "input": layers[0]["input"],
                "formula": formula.device,
                "on the host": pool.most,
                "arena": pool.nbytes,
                "formula of the host": formula.host,
            }
        )
        engine.sharded_model.close()
    return found


def test_two_layers_are_on_the_device_and_the_rest_on_the_host() -> None:
    schedules: tuple[dict[str, Any], ...] = (
        {"schedule": "1f1b"},
        {"schedule": "gpipe"},
        {"schedule": "interleaved", "virtual_stages": 2},
        {"schedule": "zb-h1"},
        {"schedule": "zbv"},
    )
    policies: tuple[Any, ...] = ("none", "selective", ["residual", "mlp"], "full", "none")
    runs = [
        run_of(
            2,
            model=_llama(num_layers=8),
            parallel={"pp": 2, **parallel},
            activations={"recompute": policy, "offload": "host"},
            training={"accumulation": 4},
        )
        for parallel, policy in zip(schedules, policies, strict=True)
    ]
    for rank in run_world(2, _moved, runs):
        for said, parallel in zip(rank, schedules, strict=True):
            case = f"{parallel}: {said}"
            assert said["on the host"] == said["formula of the host"], case
            assert said["arena"] <= 1.05 * said["on the host"], case
            assert said["two layers"] / 2 < said["counted"] <= said["formula"], case
            most = said["two layers"] + said["input"]  # the input of a chunk is held while it runs
            assert parallel["schedule"].startswith("zb") or said["counted"] <= most, case
