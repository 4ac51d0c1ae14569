"""Rotary position embedding (Su et al. 2021), in the half-rotation form that Hugging Face's Llama uses."""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryEmbedding:
    """cos and sin tables for positions 0 ... seq_len - 1, shared by the layers of a stage.

    Args:
        head_size: size of one attention head; even.
        seq_len: number of positions.
        theta: base of the wavelengths.
        device: of the tables.
    """

    def __init__(self, head_size: int, seq_len: int, theta: float, device: torch.device) -> None:
        at = "meta" if device.type == "meta" else "cpu"  # the same bits for every device
        even = torch.arange(0, head_size, 2, dtype=torch.float64, device=at)
        position = torch.arange(seq_len, dtype=torch.float64, device=at)
        angle = torch.outer(position, theta ** -(even / head_size))
        angle = torch.cat([angle, angle], dim=-1)
        self.cos = angle.cos().to(device, torch.float32)
        self.sin = angle.sin().to(device, torch.float32)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries or keys by their position, in fp32.  [batch, heads, seq, head_size], unchanged in shape."""
        low, high = x.chunk(2, dim=-1)
        rotated = torch.cat([-high, low], dim=-1)
        seq = x.shape[-2]
        cos, sin = (self.cos, self.sin) if seq == len(self.cos) else (self.cos[:seq], self.sin[:seq])
        return (x * cos + rotated * sin).to(x.dtype)
