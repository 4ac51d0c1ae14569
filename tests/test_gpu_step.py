"""The benchmark of a GPU's step runs, on a CPU, on both contenders, and reports what it can know there."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import gpu_step, trace


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_both_contenders_train_the_same_model(dtype: str) -> None:
    setting = gpu_step.Setting("tiny", dtype, micro_batch_size=1, accumulation=2, compile=False)
    lines = gpu_step.measure(setting, torch.device("cpu"), rounds=1, steps=1, profile=None)
    assert [line.name for line in lines] == ["megazero", "plain PyTorch"]
    for line in lines:
        assert line.tokens_per_second == pytest.approx(2 * 64 / line.median_ms * 1e3)
        assert line.mfu is None
        assert line.peak_bytes is None
        assert len(line.losses) == gpu_step.CHECKED_STEPS
    assert gpu_step.table(lines).count("\n") == 3


def test_without_a_device_it_says_how_to_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_step"])
    with pytest.raises(SystemExit, match="--model tiny --device cpu"):
        gpu_step.main()


def test_the_default_model_has_a_billion_parameters_and_more() -> None:
    model = gpu_step.Setting("1.3b", "bf16", 1, 1, True).config().model
    hidden, ffn, layers = model.hidden_size, model.ffn_hidden_size or 0, model.num_layers
    assert 1.3e9 < layers * (4 * hidden**2 + 3 * hidden * ffn) + 2 * model.vocab_size * hidden < 1.4e9


def _event(start: float, length: float, name: str, kind: str = "kernel") -> dict[str, object]:
    return {"cat": kind, "ts": start, "dur": length, "name": name}


def test_a_trace_tells_when_the_device_waited() -> None:
    events = [
        _event(120, 5, "c"),
        _event(100, 10, "a"),
        _event(105, 8, "b", "gpu_memcpy"),
        _event(90, 99, "host", "cpu_op"),
    ]
    found = trace.business_of([*events, _event(205, 10, "d")])
    assert (found.span_ms, found.busy_ms, found.pieces) == pytest.approx((0.115, 0.028, 4))
    assert found.waits == [trace.Wait(7.0, pytest.approx(0.013), "c"), trace.Wait(80.0, pytest.approx(0.025), "d")]
    assert "1 waits above 10 us took 0.1 ms" in str(found)
    assert "80 us at     0.0 ms, before d" in str(found)
    with pytest.raises(ValueError, match="no work on a device"):
        trace.business_of([_event(0, 1, "host", "cpu_op")])
