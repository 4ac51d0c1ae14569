"""A calibrated GPU: its shares come back from the times that they make, and a plan takes them as it takes a data sheet's."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megazero.config import ResolvedRun, RunConfig, resolve
from megazero.plan.calibrate import Record, fitted, gpu_here, medians_of, note_step, sizes, table_of
from megazero.plan.calibration import Calibration, OperatorTable, write_calibration
from megazero.plan.cluster import Cluster, cluster_of
from megazero.plan.devices import DEVICES, LINKS, NETWORKS, Device
from megazero.plan.fake_tensors import Operator, Value
from megazero.plan.operator_times import operator_seconds
from megazero.plan.step_time import step_time_of

WAITED, LAUNCH = 3e-5, 1e-5
SHARES = ("product_share", "attention_share", "attention_backward_share", "memory_share")


def _operator(
    name: str, inputs: list[tuple[int, ...]], output: tuple[int, ...], *, is_causal: bool = False
) -> Operator:
    values = tuple(Value(0, shape, torch.bfloat16) for shape in inputs)
    return Operator(f"aten.{name}", values, (Value(0, output, torch.bfloat16),), is_causal)


def test_an_operator_that_not_every_step_calls_has_no_time() -> None:
    add, copy = (_operator(name, [(8,)], (8,)) for name in ("add.Tensor", "copy_.default"))
    steps = [[(add, 1.0), (add, 5.0)], [(add, 3.0), (copy, 9.0), (add, 4.0)], [(add, 2.0), (add, 6.0)]]
    assert medians_of(steps) == [(add, 2.0), (add, 5.0)]


def _operators_of(run: ResolvedRun) -> Iterator[Operator]:
    """Products forward and backward of a Llama's layer, its attention, and some of what only moves data."""
    model = run.config.model
    tokens, hidden, ffn = model.seq_len, model.hidden_size, model.ffn_hidden_size or 0
    for m, n, k in {
        (a, b, c) for width in (hidden, ffn) for a, b, c in ((tokens, width, hidden), (width, hidden, tokens))
    }:
        yield _operator("mm.default", [(m, k), (k, n)], (m, n))
    heads = (1, model.num_heads, tokens, 128)
    yield _operator("_scaled_dot_product_flash_attention.default", [heads] * 3, heads, is_causal=True)
    yield _operator("_scaled_dot_product_flash_attention_backward.default", [heads] * 5, heads, is_causal=True)
    for name, width in product(("mul.Tensor", "add.Tensor"), (hidden, ffn)):
        yield _operator(name, [(tokens, width)] * 2, (tokens, width))
    yield _operator("_to_copy.default", [(tokens, hidden)], (tokens, hidden))
    yield _operator("_fused_adamw_.default", [(hidden, ffn)] * 3, (hidden, ffn))
    yield _operator("add.Tensor", [(1,), (1,)], (1,))  # nothing but a launch and a wait


def _record_of(device: Device, runs: list[ResolvedRun]) -> Record:
    """As if the steps of these runs had been timed on a device; a host that is faster than it waits for it.

    Of the small first run only the host's time is true: what its operators seem to take may be less than any device needs.
    """
    record: Record = defaultdict(list, {("probe",): [1.0]})
    for run in runs:
        part = 0.1 if run is runs[0] else 1.0
        timed = [(one, part * operator_seconds(one, device) + WAITED) for one in _operators_of(run)]
        computing = sum(seconds - WAITED for _, seconds in timed)
        note_step(record, run, timed, max(computing, len(timed) * LAUNCH), on_gpu=True)
    return record


def _table_of(device: Device) -> OperatorTable:
    return table_of(_record_of(device, sizes(on_gpu=True)), on_gpu=True)


@pytest.mark.parametrize("name", ["h100", "l4"])
@pytest.mark.parametrize("shares", [(0.83, 0.71, 0.6, 0.95), (0.3, 0.2, 0.1, 0.5)])
def test_shares_come_back_from_the_times_that_they_make(name: str, shares: tuple[float, ...]) -> None:
    device = replace(DEVICES[name], **dict(zip(SHARES, shares, strict=True)))  # type: ignore[arg-type]
    found = fitted(DEVICES[name], _table_of(device))
    assert [getattr(found, share) for share in SHARES] == pytest.approx(shares, rel=0.02)
    assert found.launch_seconds == pytest.approx(LAUNCH, rel=0.02)
    same = {**dict.fromkeys(SHARES, 1.0), "launch_seconds": 1.0}
    assert replace(found, **same) == replace(device, **same)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", ["a100-80", "l40s"])
def test_operators_of_a_device_without_a_data_sheet_take_what_they_took(
    monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    device = replace(DEVICES[base], attention_share=0.4, attention_backward_share=0.3)
    here = SimpleNamespace(name="NVIDIA Another 1", total_memory=7 << 30, multi_processor_count=device.multiprocessors)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: here)
    bare = gpu_here(0)
    assert bare is not None
    found = fitted(bare, _table_of(device))
    assert (found.name, found.memory_bytes, found.link) == ("NVIDIA Another 1", 7 << 30, LINKS["pcie4"])
    assert all(0 < getattr(found, share) <= 1 for share in SHARES)
    assert found.peak_flops["bf16"] == pytest.approx(device.peak_flops["bf16"] * device.product_share, rel=0.02)
    for operator in _operators_of(sizes(on_gpu=True)[-3]):  # the largest
        assert operator_seconds(operator, found) == pytest.approx(operator_seconds(operator, device), rel=0.02)


def test_no_share_is_above_one_and_what_was_not_measured_stays() -> None:
    device = DEVICES["h200"]
    fast = fitted(device, _table_of(device).scaled(0.3))
    assert [getattr(fast, share) for share in SHARES] == [1.0] * 4
    assert fitted(device, OperatorTable((), {}, 0.0)) == device


def _calibration(device: Device) -> Calibration:
    table = _table_of(device)
    return Calibration(device, 0, device.link, table)


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_plan_takes_a_calibrated_gpu_as_a_data_sheet_of_its_shares(
    tmp_path: Path, stage: int, compiles: bool
) -> None:
    device = replace(DEVICES["h100"], product_share=0.5, memory_share=0.7, launch_seconds=4e-6)
    write_calibration(_calibration(device), tmp_path / "gpu.json")
    cluster = cluster_of(str(tmp_path / "gpu.json"), 4, 8)
    assert cluster == Cluster(device, 4, 4, device.link, NETWORKS["ib400"])
    assert cluster.calibration is None
    model = {"family": "llama", "hidden_size": 1024, "num_layers": 2, "num_heads": 8, "vocab_size": 512, "seq_len": 512}
    training = {"micro_batch_size": 1, "accumulation": 2, "compile": compiles}
    document = {"model": model, "parallel": {"tp": 2}, "zero": {"stage": stage}, "training": training}
    run = resolve(RunConfig.model_validate(document), 4)
    found = step_time_of(run, cluster)
    assert found == step_time_of(run, Cluster(device, 4, 4, device.link, NETWORKS["ib400"]))
    assert found.exposed["tp"] > 0
    assert found.hidden["dp"] > 0
