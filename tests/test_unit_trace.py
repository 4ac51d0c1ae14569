"""Traces of units, made on tensors that hold nothing, against the formulas of what layers keep."""

from __future__ import annotations

import os

import pytest
import torch
from activation_formula import activations_of_ranks

from megazero.comm.collectives import reduce_scatter
from megazero.config import ResolvedRun, load_config
from megazero.cpu.shared_memory import SharedMemoryBackend
from megazero.engine.outline import schedule_of
from megazero.parallel_state import Axis
from megazero.parallel_state.state import Group
from megazero.plan.fake_ranks import FakeBackend, make_fake
from megazero.plan.fake_tensors import FakeTensors, Message, Operator
from megazero.plan.operator_times import flops_of, product_of
from megazero.plan.simulated_world import Alone
from megazero.plan.unit_trace import DY, EMBEDDING, HEAD, UnitKey, UnitTrace, trace_units

MODEL = """
    model.hidden_size=64 model.num_layers=2 model.num_heads=4 model.num_kv_heads=2 model.ffn_hidden_size=96
    model.vocab_size=256 model.seq_len=32 training.micro_batch_size=2 training.accumulation=4
"""
CASES = [
    "",
    "precision.dtype=bf16 activations.recompute=selective",
    "parallel.tp=2 activations.recompute=full activations.partition=true",
    'parallel.tp=2 parallel.sequence_parallel=true activations.recompute=["attention"] activations.keep_attention=true',
    "parallel.cp=2 parallel.cp_method=ring",
    "precision.fp8=rowwise precision.fp8_layers=all",
    "parallel.pp=2 parallel.schedule=zb-h1 model.family=gpt2 model.num_kv_heads=4 model.dropout=0.1",
]


def run_of(case: str, ranks: int = 2) -> ResolvedRun:
    return load_config(os.devnull, [*MODEL.split(), *case.split()], ranks)


def layer_of(run: ResolvedRun) -> UnitTrace:
    (layer,) = (trace for key, trace in trace_units(run, on_cuda=False).items() if not isinstance(key, str))
    return layer


def own_bytes(run: ResolvedRun, key: UnitKey, by_formula: int, scalar: int = 4) -> int:
    """What a unit adds: a layer gives as large a stream as it takes, the embedding makes one, and the head keeps one."""
    model, parallel = run.config.model, run.config.parallel
    cut = parallel.tp if parallel.sequence_parallel else 1
    itemsize = 4 if run.config.precision.dtype == "fp32" else 2
    stream = model.seq_len // parallel.cp // cut * run.micro_batch_size * model.hidden_size * itemsize
    return by_formula + {EMBEDDING: stream, HEAD: scalar - stream}.get(str(key), 0)


@pytest.mark.parametrize("case", CASES)
def test_a_unit_keeps_what_the_formula_says_and_its_backward_frees_it(case: str) -> None:
    run = run_of(case)
    traces = trace_units(run, on_cuda=False)
    units = {name: sum(own.values()) for rank in _ranks(run) for name, own in rank.units.items()}
    for key, trace in traces.items():
        name = key if isinstance(key, str) else f"layer {run.config.model.num_layers - 1}"
        assert trace.forward.net_bytes == own_bytes(run, key, units[name])
        assert abs(_left(trace)) <= 4  # the gradient of the scalar with which a backward starts
        for passed in (trace.forward, trace.backward):
            assert max(span.peak for span in passed.spans) >= passed.net_bytes


def _ranks(run: ResolvedRun) -> list:
    return activations_of_ranks(run, schedule_of(run), on_cuda=False)


def _left(trace: UnitTrace) -> int:
    """What is live after all passes of a unit, and was not before: dx is as large as dy but at the ends."""
    passes = filter(None, (trace.forward, trace.backward, trace.weight))
    return sum(passed.net_bytes for passed in passes)


def test_a_tensor_parallel_layer_sums_its_stream_twice_in_each_direction() -> None:
    """Shoeybi et al. 2019, section 3: f and g of attention and of the MLP."""
    run = run_of("parallel.tp=2")
    layer = layer_of(run)
    stream = run.config.model.seq_len * run.micro_batch_size * run.config.model.hidden_size * 2  # bf16
    for passed in (layer.forward, layer.backward):
        sent = [event for event in passed.events if isinstance(event, Message)]
        assert [(one.operation, one.axis, one.sent_bytes) for one in sent] == [("all_reduce", "tp", stream)] * 2


def test_fp8_has_the_products_of_bf16_and_sends_the_largest_of_each_row() -> None:
    """Four of a layer's eight products are cut over tp: fp32 for each token and row or column of the hidden size.  On CUDA
    these take four kernels, the others two, one for each factor."""
    found = {}
    for fp8 in ("none", "rowwise"):
        run = run_of(f"parallel.tp=2 precision.fp8={fp8} precision.fp8_layers=all")
        (layer,) = (trace for key, trace in trace_units(run, on_cuda=True).items() if not isinstance(key, str))
        events = [*layer.forward.events, *layer.backward.events]
        sent = sum(event.sent_bytes for event in events if isinstance(event, Message))
        names = [event.name for event in events if isinstance(event, Operator)]
        found[fp8] = flops_of(layer), sent, names.count("aten._scaled_mm.default"), names.count("fp8.round")
    rows = run.micro_batch_size * run.config.model.seq_len + run.config.model.hidden_size
    flops, sent, *_ = found["none"]
    assert found == {"none": (flops, sent, 0, 0), "rowwise": (flops, sent + 4 * 4 * rows, 8, 4 * 4 + 4 * 2)}


def test_layers_with_and_without_a_window_are_traced_as_in_models_of_one_kind() -> None:
    def layers(period: int) -> list[tuple[float, int]]:
        run = run_of(f"model.family=olmo3 model.sliding_window=8 model.full_attention_every={period}")
        traces = [trace for key, trace in trace_units(run, on_cuda=False).items() if not isinstance(key, str)]
        return [(flops_of(trace), trace.forward.net_bytes) for trace in traces]

    (full,), (local,) = layers(1), layers(3)  # of two layers
    assert layers(2) == [local, full]
    assert local[0] != full[0]


def test_a_weight_pass_needs_the_gradient_that_came_unless_the_backward_has_gathered_it() -> None:
    """dW = dy.T x (Qi et al. 2024, section 2)."""
    split = "parallel.pp=2 parallel.schedule=zb-h1"
    gathers = f"{split} parallel.tp=2 parallel.sequence_parallel=true"
    for case, ranks, frees in ((split, 2, False), (gathers, 4, True), ("parallel.pp=2", 2, True)):
        assert (DY in [span.parameter for span in layer_of(run_of(case, ranks)).backward.spans]) == frees


def test_what_is_sent_lives_until_the_wait() -> None:
    group = Group(None, torch.device("cpu"), 0.0, False, 2, ())
    make_fake(group, FakeBackend(SharedMemoryBackend, None, Alone()))
    with FakeTensors() as fake:
        out, full = torch.zeros(100), torch.zeros(200)
        pending = reduce_scatter(out, full, Axis("tp", (0, 1), 0, group))
        del full
        assert fake.live == 1200
        pending.wait()
        assert fake.live == 400


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_layer_of_experts_sends_and_multiplies_the_formulas_where_all_get_equally_many_rows(ep: int) -> None:
    run = run_of(
        f"model.family=mixtral model.num_experts=8 model.experts_per_token=2 parallel.ep={ep} precision.dtype=bf16", 4
    )
    for on_cuda in (False, True):
        (trace,) = (one for key, one in trace_units(run, on_cuda=on_cuda).items() if not isinstance(key, str))
        events = [event for one in (trace.forward, trace.backward) for event in one.events]
        tokens, rows = run.config.model.seq_len * run.micro_batch_size, 2
        counts = 8 * 8 * (ep - 1) // ep  # int64 for each expert
        sent = sum(event.sent_bytes for event in events if isinstance(event, Message) and event.axis == "ep")
        assert sent == 8 * tokens * rows * 64 * (ep - 1) // ep + counts
        shapes = [product_of(event) for event in events if isinstance(event, Operator)]
        flops = sum(shape.flops for shape in shapes if shape and {96, 192} & {shape.m, shape.n, shape.k})
        assert flops == 18 * tokens * rows * 64 * 96
