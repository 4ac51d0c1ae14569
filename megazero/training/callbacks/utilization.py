"""Sets `record.mfu`: the share of the devices' peak FLOP/s that the step used for the model."""

from __future__ import annotations

from megazero.models.config import ModelConfig
from megazero.training.callbacks.base import Callback, RunContext
from megazero.training.record import StepRecord
from megazero.training.utilization import model_flops_per_token, peak_flops


class Utilization(Callback):
    """The MFU of a run's steps.

    Args:
        model: resolved.
        tokens: of a step, on all ranks; masked ones are computed, too, and count.
        peak: FLOP/s of all devices together; None where it is not known.
    """

    def __init__(self, model: ModelConfig, tokens: int, peak: float | None) -> None:
        self._seconds_at_peak = None if peak is None else model_flops_per_token(model) * tokens / peak

    @staticmethod
    def of_run(context: RunContext) -> Utilization:
        """For the devices of a run."""
        run, state = context.run, context.engine.state
        peak = peak_flops(state.device, context.engine.dtype, run.config.logging.peak_flops)
        tokens = run.global_batch_size * run.config.model.seq_len
        return Utilization(run.config.model, tokens, None if peak is None else peak * state.world.size)

    def after_step(self, record: StepRecord) -> None:
        """Set the MFU of a step that was computed."""
        record.mfu = None if record.seconds is None else self.share_of_peak(record.seconds)

    def share_of_peak(self, step_seconds: float) -> float | None:
        """From 0 to 1, for a step of this duration; None where the peak is not known."""
        return None if self._seconds_at_peak is None else self._seconds_at_peak / step_seconds
