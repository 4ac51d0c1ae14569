"""torch.compile per block changes no number, on any shape, and compiles once for all blocks."""

from typing import Any

import pytest
import torch
from harness import run_world
from torch import Tensor
from torch._dynamo.utils import counters
from worlds import GPT2, LLAMA, counted, engine_on, micro_batches, run_of, state_on

from megazero.config import ResolvedRun
from megazero.engine import Engine
from megazero.engine.outline import may_compile
from megazero.layers.attention_kernels import attention
from megazero.models.gpt import MicroBatch
from megazero.models.wrappers import can_compile, compile_blocks

pytestmark = pytest.mark.slow  # starts whole runs

LR = 1e-2
GEMMA = LLAMA | {"family": "gemma2", "sliding_window": 5, "full_attention_every": 2, "attn_logit_softcapping": 2.0}
WINDOW = {"family": "mistral", "num_kv_heads": 1, "sliding_window": 5}


@pytest.fixture(scope="module", autouse=True)
def _compiler_is_imported() -> None:
    """Once, and not in each rank: compiling for the first time imports 800 modules."""
    torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1)).backward()
    torch.compiler.reset()
    counters.clear()


def _compile(engine: Engine, backend: str) -> None:
    for stage in engine.chunks:
        compile_blocks(stage, backend)


def _losses(engine: Engine, run: ResolvedRun, evaluates: bool) -> list[float]:
    pattern = "random" if run.config.data.document_mask else "none"

    def batches(step: int) -> list[MicroBatch]:
        return micro_batches(run, engine.state, step, pattern)

    losses = [engine.train_step(batches(step), LR).loss for step in range(2)]
    return [*losses, engine.evaluate(batches(50)).loss] if evaluates else losses


def _runs(world: int, **sections: Any) -> tuple[ResolvedRun, ResolvedRun]:
    """The same run without and with compiled blocks."""
    without, with_ = (run_of(world, **sections, training={"compile": compile_}) for compile_ in (False, True))
    return without, with_


def _with_and_without(
    rank: int, pairs_of_runs: list[tuple[ResolvedRun, ResolvedRun]], backend: str, evaluates: bool
) -> tuple[Any, ...]:
    state, pairs = state_on(rank, pairs_of_runs[0][0]), []
    for runs in pairs_of_runs:
        engines = [engine_on(rank, run, state=state) for run in runs]
        for engine in engines:
            if engine.offload is not None:
                engine.offload.smallest_bytes = 64
        _compile(engines[1], backend)  # anew: what a run takes, "inductor", needs minutes on a CPU
        pairs.append([_losses(engine, run, evaluates) for engine, run in zip(engines, runs, strict=True)])
    return pairs, counters["stats"]["unique_graphs"]


def _check(pairs: list[list[list[float]]]) -> None:
    for without, with_ in pairs:
        assert with_ == pytest.approx(without, abs=1e-5)
        assert with_[1] != with_[0]


@pytest.mark.slow
def test_all_blocks_of_all_stages_share_their_pieces() -> None:
    """Norm, attention, sum and norm, activation and residual sum, once more for evaluation; the loss has two passes."""
    policy, model = {"recompute": "selective", "offload": "host"}, LLAMA | {"dropout": 0.1}
    runs = [_runs(2, model=model, zero={"stage": stage}, activations=policy) for stage in (0, 3)]
    for pairs, graphs in run_world(2, _with_and_without, runs, "aot_eager", True):
        _check(pairs)
        assert graphs == (5 + 2) + 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "model", "dtype", "graphs"),
    [
        ({"tp": 2, "sequence_parallel": True}, WINDOW, "bf16", [8, 8]),
        ({"pp": 2, "schedule": "zb-h1"}, {}, "fp32", [5, 7]),
    ],
    ids=["tensor", "pipeline"],
)
def test_every_shape_compiles(parallel: dict[str, Any], model: dict[str, Any], dtype: str, graphs: list[int]) -> None:
    """A block has five pieces, the loss two.  Tracing stops where a shared key head is exchanged over
    tp; a window is traced."""
    runs = _runs(2, model=LLAMA | {"dropout": 0.1} | model, parallel=parallel, precision={"dtype": dtype})
    backend = "aot_eager" if "pp" in parallel else "eager"  # a split backward runs its part of what autograd compiled
    results = run_world(2, _with_and_without, [runs], backend, False)
    for pairs, _ in results:
        _check(pairs)
    assert [count for _, count in results] == graphs


@pytest.mark.parametrize(("model", "graphs"), [(GPT2 | {"num_layers": 2}, 5), (GEMMA, 5)], ids=["gpt2", "gemma2"])
def test_blocks_of_other_families_compile(model: dict[str, Any], graphs: int) -> None:
    """Of a Gemma norms and residual sums are pieces of their own, and tracing of attention stops where scores are capped."""
    runs = _runs(1, model=model)
    ((pairs, count),) = run_world(1, _with_and_without, [runs], "eager", False)
    _check(pairs)
    assert count == graphs + 2


def test_each_layer_has_codes_of_its_own_for_what_it_rounds_to_fp8() -> None:
    """For x, W, dy and W.T of four layers: torch compiles no code as often.  Blocks share them."""
    fp8 = {"fp8": "rowwise", "fp8_layers": "all", "dtype": "bf16"}
    runs = _runs(1, model=LLAMA | {"ffn_hidden_size": 80}, precision=fp8)
    ((pairs, graphs),) = run_world(1, _with_and_without, [runs], "eager", False)
    _check(pairs)
    assert graphs == 4 + 2 + 4 * 4


def test_a_norm_over_all_heads_compiles() -> None:
    """It communicates over tp, so tracing of attention stops there."""
    runs = _runs(2, model=LLAMA | {"num_layers": 1, "family": "olmo2"}, parallel={"tp": 2})
    for pairs, graphs in run_world(2, _with_and_without, [runs], "eager", False):
        _check(pairs)
        assert graphs == 5 + 2


def _steps_of_shards(
    rank: int, runs: tuple[ResolvedRun, ResolvedRun], patterns: list[str], backend: str
) -> tuple[Any, ...]:
    """Numbers of each step without and with compiled blocks, and the pieces after each step."""
    state, found, graphs = state_on(rank, runs[0]), [], []
    for run in runs:
        engine = engine_on(rank, run, state=state)
        if run is runs[1]:
            _compile(engine, backend)
        found.append([])
        for step, pattern in enumerate(patterns):
            statistics = engine.train_step(micro_batches(run, state, step, pattern), LR)
            found[-1].append((statistics.loss, statistics.grad_norm))
            graphs.append(counters["stats"]["unique_graphs"])
    return *found, graphs[len(patterns) :]


@pytest.mark.parametrize(
    ("world", "patterns", "model", "graphs"),
    [(1, ["random", "ones"], GPT2 | {"num_layers": 2}, 6 + 2), (2, ["random", "whole", "edges"], LLAMA, 9 + 2)],
    ids=["documents", "shards of documents"],
)
def test_shards_of_samples_compile_once(world: int, patterns: list[str], model: dict[str, Any], graphs: int) -> None:
    """Not for each micro-batch nor each block, whatever the documents; tracing stops before attention, and before the tables
    of positions."""
    runs = _runs(
        world,
        model=model | {"dropout": 0.1},
        parallel={"cp": world, "cp_method": "ring"} if world > 1 else {},
        data={"document_mask": patterns[0] != "none"},
    )
    backend = "aot_eager" if world == 1 else "eager"  # what is cut off where is found before a backend sees it
    for without, with_, pieces in run_world(world, _steps_of_shards, runs, patterns, backend):
        assert [loss for loss, _ in with_] == pytest.approx([loss for loss, _ in without], abs=1e-6)
        assert [norm for _, norm in with_] == pytest.approx([norm for _, norm in without], rel=1e-6)
        assert pieces == [graphs] * len(patterns)


def _pieces(rank: int, runs: list[ResolvedRun]) -> list[tuple[list[str], list[float], int]]:
    """Of each run what is compiled, the numbers of a step, and how often something ran again."""
    state, found = state_on(rank, runs[0]), []
    for run in runs:
        torch.compiler.reset()
        codes: list[str] = []

        def backend(graph: Any, _: Any, codes: list[str] = codes) -> Any:
            calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
            codes.append(" ".join(str(node.target) for node in calls))
            return graph.forward

        engine = engine_on(rank, run, state=state)
        if engine.offload is not None:
            engine.offload.smallest_bytes = 64
        for stage in engine.chunks:
            compile_blocks(stage, backend)
        with counted() as ran:
            losses = _losses(engine, run, evaluates=False)
        norm = engine.compute_gradients(micro_batches(run, state, 2)).grad_norm
        found.append((sorted(codes), [*losses, norm], len(ran)))
    return found


@pytest.mark.parametrize(
    ("family", "policies"),
    [
        ("llama", [{"recompute": "selective", "offload": "host"}, {"recompute": "full"}]),
        ("olmo2", [{"recompute": ["mlp", "norms"]}]),
    ],
)
def test_the_pieces_and_the_bits_are_the_same_whatever_is_recomputed(
    family: str, policies: list[dict[str, Any]]
) -> None:
    """Other pieces would be fused otherwise, so that their numbers are rounded at other places."""
    model = LLAMA | {"family": family, "dropout": 0.1}
    runs = [run_of(1, model=model, precision={"dtype": "bf16"}, activations=one) for one in ({}, *policies)]
    ((without, *others),) = run_world(1, _pieces, runs)
    assert len(without[0]) == 5 + 2
    assert without[2] == 0
    for policy, (codes, numbers, again) in zip(policies, others, strict=True):
        assert codes == without[0], policy
        assert numbers == without[1], policy
        assert again > 0, policy


def test_tracing_stops_where_outputs_of_attention_are_kept() -> None:
    class Keeps:
        def through(self, compute: Any) -> tuple[Tensor, ...]:
            self.kept = getattr(self, "kept", None) or compute()
            return self.kept

    x, keeps, found = torch.randn(2, 2, 9, 8, requires_grad=True), Keeps(), []
    compiled = torch.compile(lambda x, tape: attention(x * 2, x, x, tape=tape).sin(), dynamic=False, backend="eager")
    for kept in (None, keeps, keeps):  # the third forward has the outputs of the second
        found.append(torch.autograd.grad(compiled(x, kept).sum(), x)[0])
    assert all(torch.equal(one, found[0]) for one in found)
    assert len(keeps.kept) == 2


def _ahead(rank: int, run: ResolvedRun) -> list[tuple[Any, ...]]:
    """The numbers of a run without and with what is compiled ahead, and how many graphs there are before and after."""
    state, found = state_on(rank, run), []
    for is_ahead in (False, True):
        torch.compiler.reset()
        counters.clear()
        engine = engine_on(rank, run, state=state)
        if engine.offload is not None:
            engine.offload.smallest_bytes = 64
        _compile(engine, "aot_eager")
        engine.compiles, calls, random = is_ahead, dict(state.traffic.calls), torch.get_rng_state()
        evaluates = state.cp.size == 1
        engine.compile_ahead(run.micro_batch_size, run.accumulation, evaluates=evaluates)
        assert dict(state.traffic.calls) == calls
        assert torch.equal(torch.get_rng_state(), random)
        graphs = counters["stats"]["unique_graphs"]
        found.append((_losses(engine, run, evaluates), graphs, counters["stats"]["unique_graphs"]))
    return found


@pytest.mark.parametrize("sections", [
    {"parallel": {"pp": 2, "schedule": "zbv"}, "model": {"num_layers": 4}},
    {"parallel": {"tp": 2}, "activations": {"recompute": "selective", "offload": "host"}, "zero": {"stage": 3}},
    {"parallel": {"cp": 2, "cp_method": "ring"}, "data": {"document_mask": True}, "zero": {"stage": 2}},
])  # fmt: skip
def test_what_is_compiled_ahead_is_all_and_changes_no_bit(sections: dict[str, Any]) -> None:
    """On every stage at the same time: no message of the pipeline is sent meanwhile."""
    run = run_of(2, **sections | {"model": LLAMA | {"dropout": 0.1} | sections.get("model", {})})
    for (without, none, later), (with_, ahead, after) in run_world(2, _ahead, run):
        assert with_ == without
        assert (none, ahead, after) == (0, later, later)


def test_names_of_parameters_stay() -> None:
    engine = engine_on(0, run_of(1, model=LLAMA))
    before = [name for name, _ in engine.chunks.named_parameters()]
    _compile(engine, "eager")
    assert [name for name, _ in engine.chunks.named_parameters()] == before


def _offset(elements: int) -> Tensor:
    return torch.empty(64, dtype=torch.bfloat16)[elements:]


@pytest.mark.parametrize(
    ("wish", "device", "elements", "compiles"),
    [("auto", "cpu", 0, False), ("auto", "cuda", 8, True), ("auto", "cuda", 9, False), (False, "cuda", 0, False),
     (True, "cuda", 8, True), (True, "cpu", 1, True)],
)  # fmt: skip
def test_auto_compiles_on_cuda_where_weights_are_aligned(wish: Any, device: str, elements: int, compiles: bool) -> None:
    weights, on = [_offset(0), _offset(elements)], torch.device(device)
    assert (may_compile(wish, on) and can_compile(wish, on, weights)) is compiles


def test_weights_that_are_not_aligned_are_refused_where_compiling_is_asked_for() -> None:
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        can_compile(True, torch.device("cuda"), [_offset(0), _offset(1)])


def test_the_configured_engine_has_its_blocks_replaced_and_no_others() -> None:
    def own_forwards(compile_: bool) -> set[str]:
        engine = engine_on(0, run_of(1, model=LLAMA, training={"compile": compile_}))
        return {type(module).__name__ for module in engine.chunks.modules() if "forward" in vars(module)}

    assert own_forwards(False) == set()
    assert own_forwards(True) == {"RMSNorm", "AttentionCore", "Residual", "Gated"}
