"""How fast the pairs of a head's elements rotate with the position of a token (Su et al. 2021).

position p turns pair i by p * theta^(-2 i / rotated), which a `FrequencyScaling` changes for longer samples
"""

from dataclasses import dataclass
from math import sqrt
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class FrequencyScaling(Protocol):
    """Scales rotary frequencies for longer samples.  `amplitude` multiplies rotated queries and keys."""

    @property
    def amplitude(self) -> float: ...

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """Scale the frequencies, [head size / 2], unchanged in shape."""


@dataclass(frozen=True)
class RotaryFrequencies:
    """The frequencies of a head.

    Args:
        radians: fp64 [head size / 2], the angle of each pair per position; 0 for pairs that do not rotate.
        amplitude: factor on rotated queries and on rotated keys.
    """

    radians: Tensor
    amplitude: float = 1.0


def rotary_frequencies(
    head_size: int,
    theta: float,
    scaling: FrequencyScaling | None = None,
    *,
    rotated: int | None = None,
    score_scale: float = 1.0,
) -> RotaryFrequencies:
    """Compute the frequencies of a head, on the host, so that every device gets the same bits.

    Args:
        head_size: even.
        theta: the base of the wavelengths.
        scaling: see `FrequencyScaling`.
        rotated: number of elements of a head that are rotated; None for all.
        score_scale: a factor on all products of queries and keys.
    """
    rotated = head_size if rotated is None else rotated
    even = torch.arange(0, rotated, 2, dtype=torch.float64, device="cpu")
    frequency = theta ** -(even / rotated)
    frequency = frequency if scaling is None else scaling.scaled(frequency, theta)
    amplitude = (1.0 if scaling is None else scaling.amplitude) * sqrt(score_scale)
    return RotaryFrequencies(F.pad(frequency, (0, head_size // 2 - len(even))), amplitude)
