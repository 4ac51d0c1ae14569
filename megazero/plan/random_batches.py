"""Batches of random tokens, for steps that are measured."""

from __future__ import annotations

import numpy as np
import torch

from megazero.config import ResolvedRun
from megazero.engine import BatchShare
from megazero.models.gpt import MicroBatch


def random_batches(run: ResolvedRun, share: BatchShare) -> list[MicroBatch]:
    """This rank's micro-batches of random tokens, for steps that are measured.

    Sample i is drawn from i alone, so ranks of tp and pp have the same.
    """
    model, size = run.config.model, run.micro_batch_size
    batches = []
    for number in range(run.accumulation):
        ids = np.arange(size) + (share.dp.index * run.accumulation + number) * size
        drawn = [np.random.default_rng(index).integers(model.vocab_size, size=model.seq_len + 1) for index in ids]
        samples = torch.from_numpy(np.stack(drawn)).t().contiguous().to(share.device)  # [seq + 1, batch]
        part = share.part_of([[model.seq_len]] * size if share.documents else None, model.seq_len)
        batches.append(share.cut(torch.from_numpy(ids).to(share.device), samples[:-1], samples[1:], part))
    return batches
