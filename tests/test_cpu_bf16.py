"""The backward of attention in bf16 on a CPU: each pair of a query and a key in one call, and plain attention's numbers."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megazero.cpu import attention
from megazero.cpu.attention import full_backward, kernel_calls
from megazero.layers.context_attention import ContextAttention
from megazero.layers.sequence_shard import sequence_shard
from megazero.layers.token_layout import Tile
from megazero.parallel_state import Axis

WHOLE = Axis("whole")
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _inputs(batch: int, rows: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, 4 heads of queries and 2 of keys, rows first in memory."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, batch, 4, 16), (keys, batch, 2, 16), (keys, batch, 2, 16), (rows, batch, 4, 16))
    q, k, v, grad = (torch.randn(shape, generator=generator).to(dtype).permute(1, 2, 0, 3) for shape in shapes)
    return q, k, v, grad


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 6), (4, 1)])
@pytest.mark.parametrize("rows", [511, 1023, 1024, 2051])
def test_kernel_calls_compute_each_pair_once(rows: int, heads: int, kv_heads: int, threads: int) -> None:
    tile, each = Tile(3, 3 + rows, 5, 5 + rows, 0), heads // kv_heads
    seen = torch.zeros(kv_heads, rows, rows, dtype=torch.int8)
    with patch.object(torch, "get_num_threads", return_value=threads):
        calls = list(kernel_calls(tile, None, heads, kv_heads))
    for sub_tile, group in calls:
        chosen = range(kv_heads)[group.keys]
        assert [head // each for head in range(heads)[group.queries]] == [head for head in chosen for _ in range(each)]
        assert len(chosen) >= min(threads, kv_heads)
        where = seen[group.keys, sub_tile.q_start - 3 : sub_tile.q_stop - 3, sub_tile.k_start - 5 : sub_tile.k_stop - 5]
        where += torch.ones_like(where) if sub_tile.offset is None else torch.ones_like(where).tril()
        assert sub_tile.offset is None or sub_tile.q_stop - sub_tile.q_start < 1024
    assert seen.equal(torch.ones_like(seen).tril())
    assert len(calls) == 1 or rows > 511


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_heads_that_share_keys_may_be_rows_of_one(batch: int, threads: int) -> None:
    """For each head's own result; `out` and `lse` are of more keys than these."""
    q, k, v, grad = _inputs(batch, 37, 50, torch.float64)
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    lse = scores.logsumexp(-1) + 0.5
    out = torch.randn_like(q)
    with patch.object(torch, "get_num_threads", return_value=threads):
        assert attention._sharing(q, k) == (1 if threads > 2 * batch else 2)
        got = full_backward(grad, q, k, v, out, lse)
    wanted = _backward(grad, q, *(x.repeat_interleave(2, 1) for x in (k, v)), out, lse, 0.0, False)
    in_pairs = [x.unflatten(1, (2, 2)).sum(2) for x in wanted[1:]]
    torch.testing.assert_close(got, (wanted[0], *in_pairs), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("window", [None, 1500])
def test_attention_in_bf16_is_plain_attention_and_large_tiles_take_it(window: int | None, multiplies: bool) -> None:
    shard = sequence_shard([[1100, 924], [2024]], 2024, WHOLE, WHOLE, torch.device("cpu"))
    assert shard is not None
    given, results = _inputs(2, 2024, 2024, torch.bfloat16), []
    calls: list[tuple[int, ...]] = []

    def counting(*tensors: Tensor) -> tuple[Tensor, ...]:
        calls.append(tuple(tensors[1].shape))
        return full_backward(*tensors)

    for dtype in (torch.bfloat16, torch.float32):
        q, k, v, grad = (x.to(dtype) for x in given)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with (
            patch.object(torch.cpu, "_is_avx512_bf16_supported", return_value=multiplies),
            patch.object(attention, "full_backward", counting),
        ):
            out = ContextAttention((WHOLE, WHOLE), window, torch.float32).attend(*leaves, shard)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
        assert {x.dtype for x in results[-1]} == {dtype}
    if window is None:
        assert bool(calls) == multiplies
    assert all(rows * heads >= 768 for _, heads, rows, _ in calls)
    for got, wanted in zip(*results, strict=True):
        error = (got.double() - wanted.double()).abs().max() / wanted.abs().max()
        assert error < 1e-2
