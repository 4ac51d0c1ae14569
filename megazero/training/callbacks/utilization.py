"""Model FLOP/s utilization (MFU): the share of the devices' peak that went into the model's own products.

    MFU = tokens / second * FLOPs per token / (devices * peak FLOP/s)

What is computed a second time, such as the logits of a chunked head, is not counted: it is not the model's.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from megazero.annexes import added
from megazero.config import ResolvedRun
from megazero.data.sampler import SampleStream
from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.training.callbacks.base import Callback
from megazero.training.record import StepRecord


class Utilization(Callback):
    """Sets `record.mfu` where the peak of the devices is known.  Masked tokens are computed, too, and count.

    Args:
        samples: what is trained on; where attention stays within documents, those of its first samples stand for all.
    """

    def __init__(
        self, run: ResolvedRun, device: torch.device, dtype: torch.dtype, samples: SampleStream | None = None
    ) -> None:
        peak = peak_flops(device, dtype, run.config.logging.peak_flops)
        lengths = None
        if samples is not None and run.config.data.document_mask:
            lengths = [length for each in samples.first_documents() for length in each]
        flops = model_flops_per_token(run.config.model, lengths) * run.global_batch_size * run.config.model.seq_len
        self._seconds_at_peak = None if peak is None else flops / (peak * run.world_size)

    def after_step(self, record: StepRecord) -> None:
        if record.seconds is not None and self._seconds_at_peak is not None:
            record.mfu = self._seconds_at_peak / record.seconds


def model_flops_per_token(model: ModelConfig, lengths: Collection[int] | None = None) -> float:
    """FLOPs of forward and backward that the model itself asks for, per token.

    `lengths`: of documents within which attention stays; None for whole samples.
    """
    if model.ffn_hidden_size is None:
        raise ValueError("model.ffn_hidden_size is not resolved; count the FLOPs of a resolved config")
    return FAMILIES[model.family].flops_per_token(model, lengths)


def peak_flops(device: torch.device, dtype: torch.dtype, given: float | None) -> float | None:
    """FLOP/s that a device can do at most: as given (`logging.peak_flops`), else by the table; None where unknown."""
    if given is not None or device.type != "cuda":
        return given
    known = (peak(torch.cuda.get_device_name(device), dtype) for peak in added("peak FLOP/s").values())
    return next(filter(None, known), None)
