"""What a run costs: numbers done by hand, and those of the papers."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest

from megazero.plan.cost import (
    FAILURES_PER_DEVICE_HOUR,
    HOUR,
    Checkpoint,
    best_interval,
    checkpoint_cost,
    failures,
    lost_share,
    run_cost,
    throughput,
)


def test_use_of_the_devices_is_the_models_work_over_their_peak() -> None:
    """Megatron's 1T on 3,072 A100 (Narayanan et al. 2021, table 1): 163 TFLOP/s each, 52% of 312."""
    found = throughput(2.0, 4_000, 2.0 * 3_072 * 163e12, 3_072, 312e12)
    assert found.tokens_per_second == 2_000
    assert found.flops_per_device == pytest.approx(163e12)
    assert found.mfu == pytest.approx(0.5224, abs=1e-4)
    assert throughput(2.0, 4_000, 1e12, 1, None).mfu is None


def test_days_and_dollars() -> None:
    """8.64e9 tokens at 100,000 a second are a day; 4 devices for 24 hours at 2.5 dollars are 240."""
    cost = run_cost(8.64e9, 1e5, 4, dollars_per_hour=2.5)
    assert (cost.days_without, cost.days, cost.device_hours, cost.dollars) == (1, 1, 96, 240)
    lossy = run_cost(8.64e9, 1e5, 4, lost=0.2, dollars_per_hour=2.5)
    assert (lossy.days_without, lossy.days, lossy.dollars) == (1, 1.25, 300)
    assert run_cost(8.64e9, 1e5, 4).dollars is None


def test_a_checkpoint_has_weights_masters_and_moments_once() -> None:
    """1e9 parameters in bf16 with Adam: 2 + 4 + 8 bytes each; 14 GB over 2 nodes at 1 GB/s each is 7 s."""
    found = checkpoint_cost(
        10**9, weight_bytes=2, moments=2, ranks=14, nodes=2, host_bandwidth=10e9, storage_bandwidth=1e9
    )
    assert (found.nbytes, found.write_seconds, found.wait_seconds) == (14 * 10**9, 7.1, 0.1)
    waits = checkpoint_cost(
        10**9, weight_bytes=4, moments=1, ranks=1, nodes=1, host_bandwidth=0, storage_bandwidth=1e9, asynchronous=False
    )
    assert (waits.nbytes, waits.write_seconds, waits.wait_seconds) == (8 * 10**9, 8, 8)


def test_llama_3_was_interrupted_every_three_hours() -> None:
    """419 times in 54 days of 16,384 GPUs: 1,296 hours / 419 = 3.093."""
    found = failures(FAILURES_PER_DEVICE_HOUR, 16_384, Checkpoint(0, 60, 60), 0)
    assert found is not None
    assert found.mean_seconds / HOUR == pytest.approx(3.0931, abs=1e-4)
    assert failures(0, 16_384, Checkpoint(0, 60, 60), 0) is None


def test_the_interval_is_youngs_to_first_order() -> None:
    """wait 5 minutes, failures every 24 hours (Daly 2006, section 3): sqrt(2 * 300 * 86,400) = 7,200 s."""
    assert best_interval(300, 86_400) == pytest.approx(7_200 * (1 + (1 / 24) / 3 + (1 / 576) / 9) - 300)
    assert best_interval(1_000, 400) == 400


@pytest.mark.parametrize(("wait", "mean", "restart"), [(10, 10_000, 60), (300, 86_400, 600), (5, 900, 0)])
def test_no_other_interval_loses_less(wait: float, mean: float, restart: float) -> None:
    """Against a search over intervals, on the expected time of a run of exponential failures."""
    best = best_interval(wait, mean)
    least = min(lost_share(best * 1.001**step, wait, mean, restart) for step in range(-2_000, 2_000))
    assert lost_share(best, wait, mean, restart) == pytest.approx(least, abs=2e-4)


def test_what_is_lost_is_checkpoints_work_again_and_restarts() -> None:
    """To first order wait / interval + (interval / 2 + restart) / mean; a cluster that cannot finish loses all."""
    assert lost_share(1_000, 1, 1e6, 20) == pytest.approx(1 / 1_000 + (500 + 20) / 1e6, rel=0.01)
    assert lost_share(1, 0, 1, 0) == pytest.approx(1 - 1 / (exp(1) - 1))
    assert lost_share(10_000, 10, 10, 10) == 1.0


def test_a_checkpoint_ends_before_the_next_begins() -> None:
    quick = failures(1e-5, 1_000, Checkpoint(0, 10, 0.01), 60)
    slow = failures(1e-5, 1_000, replace(Checkpoint(0, 10, 0.01), write_seconds=9_999), 60)
    assert quick is not None
    assert slow is not None
    assert quick.interval_seconds < slow.interval_seconds == 9_999
    assert quick.lost_share < slow.lost_share
