"""Sets `record.mfu`: the share of the devices' peak FLOP/s that the step used for the model."""

from __future__ import annotations

import torch

from megazero.config import ResolvedRun
from megazero.training.callbacks.base import Callback
from megazero.training.record import StepRecord
from megazero.training.utilization import model_flops_per_token, peak_flops


class Utilization(Callback):
    """Model FLOP/s of all devices over their peak, where that is known.  Masked tokens are computed, too, and count."""

    def __init__(self, run: ResolvedRun, device: torch.device, dtype: torch.dtype) -> None:
        peak = peak_flops(device, dtype, run.config.logging.peak_flops)
        flops = model_flops_per_token(run.config.model) * run.global_batch_size * run.config.model.seq_len
        self._seconds_at_peak = None if peak is None else flops / (peak * run.world_size)

    def after_step(self, record: StepRecord) -> None:
        if record.seconds is not None and self._seconds_at_peak is not None:
            record.mfu = self._seconds_at_peak / record.seconds
