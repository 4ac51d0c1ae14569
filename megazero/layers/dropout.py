"""Dropout whose mask is a function of (seed, site, sample, position, feature), never of a rank's random state.

So recomputation, another cluster shape and another micro-batch size drop the same elements.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megazero.layers.counter_rng import derive_key, keep_mask


class Dropout(nn.Module):
    """Zero elements with probability p and scale the rest by 1 / (1 - p).

    Args:
        p: in [0, 1).
        site: canonical name of this dropout in the model.
        seed: the run's.
        seq_len: length of the whole sequence.
        seq_part: which part of the sequence this rank holds (0 without sequence parallelism).
        device: where it runs.
    """

    def __init__(self, p: float, site: str, seed: int, seq_len: int, seq_part: int, device: torch.device) -> None:
        super().__init__()
        self.p, self.seq_len, self.seq_part = p, seq_len, seq_part
        # A tensor: compiled code would hold a number as a constant, and every site would be compiled again.
        self.key = torch.tensor(derive_key(seed, f"dropout:{site}"), device=device)

    def forward(self, x: Tensor, sample_ids: Tensor) -> Tensor:
        """[seq, batch, hidden] with sample_ids int64 [batch]: the global index of each sample in the run."""
        if not self.training or self.p == 0:
            return x
        seq, _, hidden = x.shape
        position = torch.arange(seq, device=x.device) + self.seq_part * seq
        row = sample_ids * self.seq_len + position.unsqueeze(1)
        index = row.unsqueeze(-1) * hidden + torch.arange(hidden, device=x.device)
        return torch.where(keep_mask(self.key, index, self.p), x / (1 - self.p), 0.0)
