"""Model FLOP/s utilization, against FLOPs that torch counts in the plain model and against data sheets."""

from dataclasses import replace
from typing import Any

import numpy as np
import plain_model
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from worlds import GPT2, LLAMA, plain_config, run_of

from megazero.config.schema import LoggingConfig
from megazero.data.indexed import DocumentBorders
from megazero.data.sampler import SampleStream, Windows
from megazero.engine import Position
from megazero.plan.cluster import known_peak_flops
from megazero.training.callbacks.base import SampleRange, StepRecord
from megazero.training.callbacks.speed import Utilization, model_flops_per_token, peak_flops

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize("model", [LLAMA, LLAMA | {"tie_embeddings": True}, GPT2])
def test_flops_of_a_token_are_those_that_torch_counts(model: dict[str, Any]) -> None:
    run = run_of(1, model=model)
    config, samples = plain_config(run), 2
    shapes = plain_model.parameter_shapes(config)
    weights = {name: torch.ones(shape, requires_grad=True) for name, shape in shapes.items()}
    # Whether the first product of a backward can be left out depends on the embedding, which trains.
    tokens = torch.zeros(samples, config.seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        plain_model.loss_sum(weights, config, tokens, tokens).backward()
    counts = {operation.__name__: flops for operation, flops in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("bmm")  # of whole sequences
    assert model_flops_per_token(run.config.model) == (sum(counts.values()) + attention / 2) / (
        samples * config.seq_len
    )


@pytest.mark.parametrize("window", [1, 5, 16, 99])
def test_flops_of_attention_are_those_of_the_positions_that_a_window_shows(window: int) -> None:
    """2 products of 2 FLOPs forward and twice that backward, for each pair of tokens that is no longer seen."""
    runs = [run_of(1, model={"family": "mistral", "sliding_window": size}) for size in (window, None)]
    (cut, model), seq = (run.config.model for run in runs), runs[0].config.model.seq_len
    t, j = torch.arange(seq)[:, None], torch.arange(seq)
    unseen = int((j <= t - window).sum())
    saved = model_flops_per_token(model) - model_flops_per_token(cut)
    diagonal = max(
        seq - window, 0
    )  # of the triangle that is cut off; the formula counts half of it, as of the whole one
    assert saved * seq == 12 * model.num_layers * model.hidden_size * (unseen - diagonal / 2)


def test_flops_of_attention_are_those_of_the_documents_it_stays_in() -> None:
    """As of so many samples of their lengths, with a window and without."""
    lengths = [9, 1, 4, 2]
    for keys in ({}, {"family": "mistral", "sliding_window": 5}):
        model = run_of(1, model=LLAMA | keys).config.model
        alone = [model.model_copy(update={"seq_len": length}) for length in lengths]
        wanted = sum(model_flops_per_token(one) * one.seq_len for one in alone) / sum(lengths)
        assert model_flops_per_token(model, lengths) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA L40S", 362),
    ],
)
def test_known_devices_have_the_dense_peak_of_their_data_sheet(name: str, tflops: float) -> None:
    assert known_peak_flops(name, BF16) == known_peak_flops(name, torch.float16) == tflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA RTX A4000", "NVIDIA A10G", "Tesla V100-SXM2-16GB", ""])
def test_a_device_of_a_similar_name_is_not_known(name: str) -> None:
    assert known_peak_flops(name, BF16) is None


def test_a_cpu_has_no_peak_unless_one_is_given() -> None:
    assert peak_flops(CPU, BF16, None) is None
    assert peak_flops(CPU, BF16, 1e12) == 1e12


def test_utilization_is_the_time_at_peak_over_the_time_taken() -> None:
    run = run_of(2, model=LLAMA)
    at_peak = run.global_batch_size * run.config.model.seq_len * model_flops_per_token(run.config.model) / 2e9
    for peak, wanted in ((1e9, pytest.approx(0.25)), (None, None)):
        given = run.config.model_copy(update={"logging": LoggingConfig(peak_flops=peak)})
        record = StepRecord(Position(1), SampleRange(0, 7), seconds=4 * at_peak)
        Utilization(replace(run, config=given), CPU, BF16).after_step(record)
        assert record.mfu == wanted


def test_utilization_counts_what_the_first_samples_documents_see() -> None:
    run = run_of(1, model=LLAMA, data={"document_mask": True})
    given = replace(run, config=run.config.model_copy(update={"logging": LoggingConfig(peak_flops=1e9)}))
    lengths, tokens = [5, 11, 3, 13], np.arange(99)  # two samples, read again and again
    borders = DocumentBorders(np.cumsum([0, *lengths]), np.arange(6), 1, 99)
    windows = Windows.over(tokens, 16, borders=borders)
    samples = SampleStream([replace(windows, count=2)], [1.0], 0)
    record = StepRecord(Position(1), SampleRange(0, 7), seconds=1.0)
    Utilization(given, CPU, BF16, samples).after_step(record)
    wanted = run.global_batch_size * 16 * model_flops_per_token(run.config.model, lengths) / 1e9
    assert record.mfu == pytest.approx(wanted)
