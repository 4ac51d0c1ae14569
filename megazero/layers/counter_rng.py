"""Random numbers that are a function of (key, element index), so that no shape of the cluster can change them.

    key    = hash(seed, name)                     what is drawn: a parameter, a dropout site
    bits   = mix(key + index * golden)            splitmix64 (Steele, Lea, Flood 2014), one 64-bit word per element
    normal = quantile table at bits               exact table look-up and one multiply-add

Only integer operations, table look-ups and single IEEE multiplications and additions are used: a logarithm or a cosine may
round differently in the vectorised body and the scalar tail of a loop, and then the same element would differ with the
slice it was drawn in.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from megazero.layers.sequence_shard import TokenLayout

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # two's complement of the 64-bit constants, as torch has int64 only
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_KNOTS_LOG2 = 8  # knots per octave of the quantile table
_LOWEST_EXPONENT = -54  # the smallest tail probability is 2^-54
_DOUBLE_MANTISSA_BITS = 52
_DOUBLE_BIAS = 1023


def derive_key(seed: int, name: str) -> int:
    """Return the signed 64-bit key of all random numbers that are drawn under `name`."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def random_bits(key: int | Tensor, index: Tensor) -> Tensor:
    """Return 64 random bits per element: int64 in the shape of `index`, uniform over all 64-bit words.

    Args:
        key: from `derive_key`; a number, or an int64 scalar on the device of `index`.
        index: int64, any shape: the logical position of each element.
    """
    z = index * _GOLDEN + key
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


@lru_cache(maxsize=1)
def _quantiles() -> Tensor:
    """Normal quantiles at probabilities 2^e * (1 + k/knots) for e = -54 ... -2, and at 1/2."""
    knots = 1 << _KNOTS_LOG2
    quantile = NormalDist().inv_cdf
    below = [quantile(2.0**e * (1 + k / knots)) for e in range(_LOWEST_EXPONENT, -1) for k in range(knots)]
    # The table is cached, so a dispatch mode that is active in the first call must not see it.
    with torch._C._DisableTorchDispatch():
        return torch.tensor([*below, 0.0], dtype=torch.float64)


def normal(key: int, index: Tensor) -> Tensor:
    """Return standard normal numbers, fp32.  Arguments as in `random_bits`.

    Source: inversion; the quantile is linear between 256 knots per octave of the tail probability (error below 4e-6).
    """
    bits = random_bits(key, index)
    # 53 bits give the tail probability p in (0, 1/2); one more bit gives the sign.
    p = (_shift_right(bits, 11) | 1).to(torch.float64) * 2.0**_LOWEST_EXPONENT
    pattern = p.view(torch.int64)
    cell = (pattern >> (_DOUBLE_MANTISSA_BITS - _KNOTS_LOG2)) - ((_DOUBLE_BIAS + _LOWEST_EXPONENT) << _KNOTS_LOG2)
    fraction_bits = _DOUBLE_MANTISSA_BITS - _KNOTS_LOG2
    fraction = (pattern & ((1 << fraction_bits) - 1)).to(torch.float64) * 2.0**-fraction_bits
    table = _quantiles().to(index.device)
    low = table[cell]
    quantile = low + (table[cell + 1] - low) * fraction
    return torch.where(bits & 1 == 0, quantile, -quantile).to(torch.float32)


def keep_mask(key: int | Tensor, index: Tensor, drop_probability: float) -> Tensor:
    """Return True where an element survives dropout.

    `drop_probability` is in [0, 1).  Other arguments as in `random_bits`.
    """
    return _shift_right(random_bits(key, index), 11) >= int(drop_probability * 2.0**53)


class _Dropped(torch.autograd.Function):
    """x / (1 - p) where the mask `draw()` is true, else 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, draw: Callable[[], Tensor], remakes_mask: bool) -> Tensor:
        mask = draw()
        ctx.p, ctx.draw = p, draw
        ctx.save_for_backward(None if remakes_mask else mask)
        return torch.where(mask, x / (1 - p), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return torch.where(ctx.draw() if mask is None else mask, grad / (1 - ctx.p), 0.0), None, None, None


def dropout_key(seed: int, site: str, device: torch.device) -> Tensor:
    """Return the random key for the masks of one dropout layer.  `site`: the canonical name of the layer.

    It is a tensor, because compiled code would hold a number as a constant and be compiled again for every site.
    """
    return torch.tensor(derive_key(seed, f"dropout:{site}"), device=device)


class Dropout(nn.Module):
    """Zero elements with probability p and scale the rest by 1 / (1 - p).

    The mask depends only on the key and on the element's sample, position and feature, never on the random state of a
    rank.  So recomputation, another cluster shape and another micro-batch size drop the same elements.  The backward
    reads the saved mask, a byte per element; with `remakes_mask`, nothing is saved and the backward draws it again.

    Args:
        p: in [0, 1).
        key: from `dropout_key`.
        seq_len: tokens of a whole sample.
        seq_shard: index of this rank's shard of the layout's rows (0 without sequence parallelism).
    """

    def __init__(self, p: float, key: Tensor, seq_len: int, seq_shard: int = 0) -> None:
        super().__init__()
        self.p, self.key, self.seq_len, self.seq_shard, self.remakes_mask = p, key, seq_len, seq_shard, False

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Drop elements of x, [seq, batch, hidden], unchanged in shape.  `layout`: says which tokens x holds."""
        if not self.training or self.p == 0:
            return x
        if torch.compiler.is_compiling():
            return torch.where(self._mask(x.shape, layout), x / (1 - self.p), 0.0)
        result: Tensor = _Dropped.apply(x, self.p, partial(self._mask, x.shape, layout), self.remakes_mask)
        return result

    def _mask(self, shape: torch.Size, layout: TokenLayout) -> Tensor:
        seq, _, hidden = shape
        ids = layout.sample_ids
        first = self.seq_shard * seq
        if layout.shard is None:
            place = (torch.arange(seq, device=ids.device) + first).unsqueeze(1)
        else:
            place = layout.shard.rows[first : first + seq]
        row = ids * self.seq_len + place
        index = row.unsqueeze(-1) * hidden + torch.arange(hidden, device=ids.device)
        return keep_mask(self.key, index, self.p)
