"""Causal attention in triangles and squares: each pair of a row and a key that it sees, once, and few others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megazero.cpu import attention
from megazero.cpu.attention import causal_backward, causal_forward
from megazero.layers.attention_kernels import merge

HEADS, KV_HEADS, SIZE = 4, 2, 8
ROWS = (1, 2, 255, 256, 257, 511, 512, 871, 1024)


def _inputs(batch: int, rows: int) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output, in fp64, with rows first in memory, as a layer has them."""
    generator = torch.Generator().manual_seed(rows)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    drawn = (torch.randn(rows, batch, n, SIZE, dtype=torch.float64, generator=generator) for n in heads)
    return tuple(x.permute(1, 2, 0, 3) for x in drawn)


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.repeat_interleave(HEADS // KV_HEADS, 1).mT * SIZE**-0.5).masked_fill(~seen, -torch.inf)


def _formula(*given: Tensor, before: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, ...]:
    """out, lse and the gradients of q, k and v; `before`: keys and values that every row sees as well."""
    *leaves, grad = given
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    more_k, more_v = before or (k[:, :, :0], v[:, :, :0])
    seen = torch.ones(q.shape[2], more_k.shape[2] + k.shape[2], dtype=torch.bool).tril(more_k.shape[2])
    scores = _scores(q, torch.cat([more_k, k], 2), seen)
    out = scores.softmax(-1) @ torch.cat([more_v, v], 2).repeat_interleave(HEADS // KV_HEADS, 1)
    return out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), grad)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows_gives_plain_attention(rows: int, batch: int) -> None:
    q, k, v, grad = _inputs(batch, rows)
    out, lse = causal_forward(q, k, v)
    assert out.permute(2, 0, 1, 3).is_contiguous()  # as q: else a layer would copy it, and keep both
    got = out, lse, *causal_backward(grad, q, k, v, out, lse)
    torch.testing.assert_close(got, _formula(q, k, v, grad), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rows", [200, 300, 871])
def test_the_backward_takes_the_result_over_further_keys(rows: int) -> None:
    """As a ring has it: these rows see keys of another rank, too."""
    q, k, v, grad = _inputs(2, rows)
    _, *before, _ = _inputs(2, 77)
    out, lse, *wanted = _formula(q, k, v, grad, before=(before[0], before[1]))
    dq, dk, dv = causal_backward(grad, q, k, v, out, lse)
    dq = dq + attention._backward(grad, q, *before, out, lse, 0.0, False)[0]
    torch.testing.assert_close((dq, dk, dv), tuple(wanted), rtol=1e-11, atol=1e-11)
    got = causal_forward(q, k, v)
    more = _scores(q, before[0], torch.ones(rows, 77, dtype=torch.bool))
    merge(*got, more.softmax(-1) @ before[1].repeat_interleave(HEADS // KV_HEADS, 1), more.logsumexp(-1))
    torch.testing.assert_close(got, (out, lse), rtol=1e-11, atol=1e-11)
