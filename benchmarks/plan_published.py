"""Predicted step times beside those that papers have published, for run files of ours of the same shapes.

    python -m benchmarks.plan_published [--out]

One number per GPU is fitted, the share of its peak that large products reach, so that most of its rows are within a tenth
and the worst is least off.  Everything else is data sheets, stated shares and the schedules.  What they did and we do not
is added as stated corrections.

Sources: Narayanan et al. 2021 (arXiv 2104.04473), table 1; Korthikanti et al. 2022 (arXiv 2205.05198), tables 3 and 5; Llama
team 2024 (arXiv 2407.21783), table 4.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.report import markdown, write_whole
from megazero.config import ResolvedRun, RunConfig, resolve
from megazero.models.registry import FAMILIES
from megazero.plan.cluster import Cluster, cluster_of
from megazero.plan.collective_times import links_of
from megazero.plan.fake_tensors import Event, Operator, Value
from megazero.plan.operator_times import (
    PassTime,
    UnitTime,
    added,
    attention_flops,
    events_on_cuda,
    pass_time,
    unit_times,
)
from megazero.plan.step_time import StepTime, step_time_of
from megazero.plan.unit_trace import PassTrace, UnitKey, UnitTrace, message_bytes, trace_units

RESULTS = Path(__file__).parent / "results" / "plan_published.md"
MEGATRON_VOCABULARY, MEGATRON_SEQUENCE = 51_200, 2048


PUBLISHED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


@dataclass(frozen=True)
class Row:
    """A published step.

    Args:
        source, name: of the paper and its row.
        run: our run file.
        cluster: their machines.
        seconds: of a step, as published or from the published FLOP/s and the paper's formula.
        shown: the published figure.
        recomputes: what the backward of a Megatron layer repeats: "full", or attention's core.
    """

    source: str
    name: str
    run: ResolvedRun
    cluster: Cluster
    seconds: float
    shown: str
    recomputes: str = "full"


def megatron_flops(batch: int, layers: int, hidden: int) -> float:
    """Narayanan et al. 2021, equation 3: of a whole step with full recomputation."""
    s, v = MEGATRON_SEQUENCE, MEGATRON_VOCABULARY
    return 96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * layers * hidden))


def _run(world: int, document: Mapping[str, Mapping[str, Any]]) -> ResolvedRun:
    return resolve(RunConfig.model_validate(document), world)


def _gpt(shape: Sequence[int], recompute: str, *, sp: bool) -> dict[str, dict[str, Any]]:
    """A run file of heads, hidden size, layers, tp, pp, chunks, samples of a micro-batch, samples of a step."""
    heads, hidden, layers, tp, pp, chunks, micro, batch = shape
    parallel: dict[str, Any] = {"tp": tp, "pp": pp}
    if tp > 1:
        parallel["sequence_parallel"] = sp
    if chunks > 1:
        parallel |= {"schedule": "interleaved", "virtual_stages": chunks}
    return {
        "model": {
            "family": "gpt2", "hidden_size": hidden, "num_heads": heads, "num_layers": layers,
            "vocab_size": MEGATRON_VOCABULARY, "seq_len": MEGATRON_SEQUENCE, "dropout": 0.1,
        },
        "parallel": parallel,
        "activations": {"recompute": recompute},
        "zero": {"stage": 0},
        "precision": {"dtype": "fp16"},
        "training": {"global_batch_size": batch, "micro_batch_size": micro},
    }  # fmt: skip


def weak_scaling() -> Iterator[Row]:
    """Narayanan et al. 2021, table 1, with the script that ran it: full recomputation, InfiniBand of 8 x 200 Gbit/s."""
    for size, heads, hidden, layers, tp, pp, chunks, micro, gpus, batch, tflops in PUBLISHED["weak_scaling"]:
        document = _gpt((heads, hidden, layers, tp, pp, chunks, micro, batch), "full", sp=False)
        flops = megatron_flops(batch, layers, hidden)
        yield Row(
            "Narayanan et al. 2021",
            f"{size}B on {gpus} A100, tp {tp} pp {pp}",
            _run(gpus, document),
            cluster_of("a100-80", gpus, 8, "ib200"),
            flops / (gpus * tflops * 1e12),
            f"{tflops} TFLOP/s",
        )


def recomputation() -> Iterator[Row]:
    """Korthikanti et al. 2022, table 5: full recomputation, and sequence parallelism with selective recomputation."""
    for name, heads, hidden, layers, pp, chunks, gpus, batch, micro, full, present in PUBLISHED["recomputation"]:
        for recompute, sp, seconds, title in (
            ("full", False, full, "full recomputation"),
            ("none", True, present, "present work"),
        ):
            document = _gpt((heads, hidden, layers, 8, pp, chunks, micro, batch), recompute, sp=sp)
            yield Row(
                "Korthikanti et al. 2022",
                f"{name} on {gpus} A100, {title}",
                _run(gpus, document),
                cluster_of("a100-80", gpus, 8, "ib200"),
                seconds,
                f"{seconds} s",
                recomputes="core" if sp else "full",
            )


def llama3() -> Iterator[Row]:
    """Llama team 2024, table 4: 405B, tp 8, pp 16, a layer in each of 8 chunks, RoCE of 400 Gbit/s for each GPU."""
    for gpus, cp, dp, seq, samples, tflops, mfu in PUBLISHED["llama3"]:
        document = {
            "model": {
                "family": "llama", "hidden_size": 16384, "num_heads": 128, "num_kv_heads": 8, "num_layers": 128,
                "ffn_hidden_size": 53248, "vocab_size": 128256, "seq_len": seq,
            },
            "parallel": {
                "tp": 8, "cp": cp, "pp": 16, "sequence_parallel": True, "schedule": "interleaved", "virtual_stages": 8,
            },
            "zero": {"stage": 2, "reduce": "step"},
            "training": {"global_batch_size": samples * dp, "micro_batch_size": 1},
        }  # fmt: skip
        run = _with_ends_alone(_run(gpus, document))
        seconds = model_flops(run) / (gpus * tflops * 1e12)
        yield Row(
            "Llama team 2024",
            f"405B on {gpus} H100, {seq:,} tokens, cp {cp}",
            run,
            cluster_of("h100", gpus, 8, "roce400"),
            seconds,
            f"{tflops} TFLOP/s, {mfu}%",
        )


def _with_ends_alone(run: ResolvedRun) -> ResolvedRun:
    """Two layers fewer: the first and the last stage have an end of the model alone, which our rules do not allow."""
    model = run.config.model.model_copy(update={"num_layers": 126})
    layout = (("embed",), *((1,) for _ in range(126)), ("head",))
    parallel = run.config.parallel.model_copy(update={"layout": layout})
    return replace(run, config=run.config.model_copy(update={"model": model, "parallel": parallel}))


def model_flops(run: ResolvedRun) -> float:
    """Of a step, attention causal."""
    model = run.config.model
    return FAMILIES[model.family].flops_per_token(model) * run.global_batch_size * model.seq_len


def their_units(row: Row) -> dict[UnitKey, UnitTime] | None:
    """Times of units as Megatron ran them: scores in memory, and what was recomputed; None for a run like ours."""
    if row.run.config.model.family != "gpt2":
        return None
    config = row.run.config
    keeps = config.model_copy(update={"activations": config.activations.model_copy(update={"recompute": "none"})})
    run = replace(row.run, config=keeps)
    links = links_of(run, row.cluster)
    traces = {key: with_scores(trace) for key, trace in trace_units(run, on_cuda=True, per_node=8).items()}
    found = unit_times(run, row.cluster, links, traces)
    for key, unit in found.items():
        if isinstance(key, str):
            continue
        again = unit.forward if row.recomputes == "full" else PassTime(core_seconds(traces[key], row.cluster))
        found[key] = replace(unit, backward=added([again, unit.backward]))
    wanted = _policy(row.run)
    return {wanted if not isinstance(key, str) else key: unit for key, unit in found.items()}


def _policy(run: ResolvedRun) -> UnitKey:
    return next(key for key in trace_units(run, on_cuda=True, per_node=8) if not isinstance(key, str))


def with_scores(trace: UnitTrace) -> UnitTrace:
    """A unit whose attention has its scores, [samples, heads, seq, seq], in memory, with dropout, not causal."""
    return replace(
        trace,
        forward=replace(trace.forward, events=tuple(_unfused(trace.forward.events))),
        backward=replace(trace.backward, events=tuple(_unfused(trace.backward.events))),
    )


def _unfused(events: Sequence[Event]) -> Iterator[Event]:
    for event in events_on_cuda(events):
        if isinstance(event, Operator) and attention_flops(event) is not None:
            yield from _scores(event)
        else:
            yield event


def _scores(event: Operator) -> Iterator[Operator]:
    """Attention as products, softmax and dropout: forward 2 products, backward 4."""
    is_backward = "backward" in event.name
    like = event.inputs[1 if is_backward else 0]
    (batch, heads, rows, size), half = like.shape, torch.float16
    squares = [Value(-number, (batch * heads, rows, rows), half) for number in range(1, 5)]
    mask = Value(-5, (batch * heads, rows, rows), torch.uint8)
    long, wide = Value(like.storage, (batch * heads, rows, size), half), Value(-6, (batch * heads, size, rows), half)
    out = tuple(Value(one.storage, (batch * heads, rows, size), half) for one in event.outputs)
    into, outof = ("aten.bmm.default", (long, wide)), "aten.bmm.default"
    if not is_backward:
        yield Operator(*into, (squares[0],))
        yield Operator("aten._softmax.default", (squares[0],), (squares[1],))
        yield Operator("aten.native_dropout.default", (squares[1],), (squares[2], mask))
        yield Operator(outof, (squares[2], long), out[:1])
        return
    turned = Value(-2, (batch * heads, rows, rows), half)
    yield Operator(outof, (turned, long), out[2:])  # dV
    yield Operator(*into, (squares[0],))  # of the output's gradient and V
    yield Operator("aten.native_dropout_backward.default", (squares[0], mask), (squares[2],))
    yield Operator("aten._softmax_backward_data.default", (squares[2], turned), (squares[3],))
    yield Operator(outof, (squares[3], long), out[:1])  # dQ
    yield Operator(outof, (squares[3], long), out[1:2])  # dK


def core_seconds(trace: UnitTrace, cluster: Cluster) -> float:
    """Of the forward of attention's core alone, which selective recomputation repeats."""
    core = [
        one
        for one in trace.forward.events
        if isinstance(one, Operator) and any(v.storage < 0 for v in (*one.inputs, *one.outputs))
    ]
    return pass_time(PassTrace(tuple(core)), cluster, {}, is_compiled=True).compute


def as_they_reduced(row: Row, found: StepTime) -> float:
    """Megatron reduced 16-bit gradients after the backward, not fp32 ones behind it."""
    return found.seconds + (found.hidden.get("dp", 0.0) / 2 if row.run.config.model.family == "gpt2" else 0.0)


def step_of(row: Row) -> StepTime:
    """Our step of a row."""
    link = links_of(row.run, row.cluster)["pp"]
    hop = (
        link.message_seconds(message_bytes(row.run)) / row.run.config.parallel.tp if row.recomputes == "full" else None
    )
    if row.run.config.model.family == "llama":
        hop = 0.0
    return step_time_of(row.run, row.cluster, their_units(row), hop)


def rows() -> list[Row]:
    """All of them."""
    return [*weak_scaling(), *recomputation(), *llama3()]


def main() -> None:
    """Print the table; `--out` writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", action="store_true")
    given = parser.parse_args()
    lines, errors = [], []
    for row in rows():
        found = step_of(row)
        seconds = as_they_reduced(row, found)
        error = seconds / row.seconds - 1
        errors.append(abs(error))
        waits = ", ".join(
            f"{axis} {share / found.seconds:.1%}" for axis, share in found.exposed.items() if share > 1e-3
        )
        lines.append([row.name, row.shown, f"{row.seconds:.2f}", f"{seconds:.2f}", f"{error:+.1%}",
                      f"{mean(own.get('idle', 0.0) for own in found.by_activity) / found.seconds:.1%}", waits] )  # fmt: skip
    heads = ["run", "published", "s", "predicted s", "error", "idle", "exposed"]
    print(table := markdown(heads, lines))
    print(f"median error {median(errors):.1%}, largest {max(errors):.1%}")
    if given.out:
        close = sum(error <= 0.1 for error in errors)
        told = f"Median error {median(errors):.1%}, {close} of {len(errors)} within 10%, largest {max(errors):.1%}."
        write_whole(RESULTS, f"# Published steps, predicted\n\n{told}\n\n{table}\n\n{PUBLISHED['notes']}")


if __name__ == "__main__":
    main()
