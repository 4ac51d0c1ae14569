"""Context parallelism over torch: its own ring, gathered keys and values, and the floors that send nothing.

Both take zigzag shards.  A rank's queries are two chunks; each sees all keys before its chunk and, causally, its own:

    keys        0 .......... i .......... j ..........        j = 2 * ranks - 1 - i
    chunk i     [ every key ][ \\ ]
    chunk j     [        every key       ][ \\ ]
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from benchmarks.attention_work import AttentionRank, AttentionWork, contiguous, zigzag

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# torch 2.13 renamed both; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ---------------------------------------------------------------------------------------------------------------------
# torch's ring


class _TorchRing(torch.autograd.Function):
    """torch's templated ring around the CPU's flash operator, as `context_parallel` has it around CUDA's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = torch_ring._templated_ring_attention(
            dist.group.WORLD, 2, _flash, q, k, v, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        return torch_ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, _flash_backward, slope, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
        )


class TorchRing(AttentionRank):
    """torch's ring.

    Args:
        rotation: how keys and values travel: "ALL_GATHER", its default, or "ALL_TO_ALL".
    """

    def __init__(self, work: AttentionWork, rank: int, *, rotation: str) -> None:
        super().__init__(work, rank, zigzag(work, rank))
        torch_ring._cp_options.rotate_method = torch_ring._RotateMethod[rotation]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = _TorchRing.apply(q, k, v)
        return result


torch_ring_gathered, torch_ring_rotated = (
    partial(TorchRing, rotation="ALL_GATHER"),
    partial(TorchRing, rotation="ALL_TO_ALL"),
)


# ---------------------------------------------------------------------------------------------------------------------
# Gathered keys and values


class _Tile(NamedTuple):
    """Rows of a rank's queries, and the keys that they see; causal: row i sees key j where j <= i."""

    queries: slice
    keys: slice
    causal: bool


def _tiles(rank: int, ranks: int, chunk: int) -> list[list[_Tile]]:
    """Of each of a rank's two chunks."""
    found = []
    for number, place in enumerate((rank, 2 * ranks - 1 - rank)):
        queries = slice(number * chunk, (number + 1) * chunk)
        own = _Tile(queries, slice(place * chunk, (place + 1) * chunk), True)
        found.append([own, _Tile(queries, slice(0, place * chunk), False)] if place else [own])
    return found


class _AttendTiles(torch.autograd.Function):
    """Attention of a rank's zigzag queries to keys and values of the whole sequence, tile by tile; merged in fp32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rank: int, ranks: int) -> Tensor:
        ctx.tiles = _tiles(rank, ranks, q.shape[2] // 2)
        outs, lses = [], []
        for chunk in ctx.tiles:
            parts = [_flash(q[:, :, t.queries], k[:, :, t.keys], v[:, :, t.keys], 0.0, t.causal) for t in chunk]
            out, lse = parts[0]
            for other, its_lse in parts[1:]:
                share = torch.sigmoid(its_lse - lse).unsqueeze(-1)
                out = torch.lerp(out.float(), other.float(), share).to(q.dtype)
                lse = lse - F.logsigmoid(lse - its_lse)
            outs.append(out)
            lses.append(lse)
        ctx.save_for_backward(q, k, v, *outs, *lses)
        return torch.cat(outs, dim=2)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, *rest = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for chunk, out, lse in zip(ctx.tiles, rest[:2], rest[2:], strict=True):
            for t in chunk:
                its_q, its_k, its_v = q[:, :, t.queries], k[:, :, t.keys], v[:, :, t.keys]
                found = _flash_backward(slope[:, :, t.queries], its_q, its_k, its_v, out, lse, 0.0, t.causal)
                for whole, rows, gradient in zip((dq, dk, dv), (t.queries, t.keys, t.keys), found, strict=True):
                    whole[:, :, rows] += gradient
        return dq, dk, dv, None, None


class _Gather(torch.autograd.Function):
    """Zigzag shards [b, heads, 2c, d] -> the whole sequence in order.  Backward sums over ranks, in the shards' dtype."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        shard = torch.stack([k, v]).unsqueeze(0)
        ctx.ranks = dist.get_world_size()
        whole = shard.new_empty(ctx.ranks, *shard.shape[1:])
        _all_gather(whole, shard)
        firsts, lasts = whole.chunk(2, dim=-2)
        kv = torch.cat([*firsts.unbind(0), *reversed(lasts.unbind(0))], dim=-2)
        return kv[0], kv[1]

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        chunks = torch.stack([dk, dv]).chunk(2 * ctx.ranks, dim=-2)
        whole = torch.stack([torch.cat([chunks[rank], chunks[-1 - rank]], dim=-2) for rank in range(ctx.ranks)])
        shard = torch.empty_like(whole[:1])
        _reduce_scatter(shard, whole)
        return shard[0, 0], shard[0, 1]


class GatheredKeys(AttentionRank):
    """Keys and values are gathered, their gradients summed and scattered, as Megatron's and Llama 3's do it."""

    def __init__(self, work: AttentionWork, rank: int) -> None:
        super().__init__(work, rank, zigzag(work, rank))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = _AttendTiles.apply(q, *_Gather.apply(k, v), self.rank, self.work.world)
        return result


# ---------------------------------------------------------------------------------------------------------------------
# Floors


class TileFloor(AttentionRank):
    """A rank's share of the work as a ring or a gather has it, with keys and values that are there already."""

    def __init__(self, work: AttentionWork, rank: int) -> None:
        super().__init__(work, rank, zigzag(work, rank))
        self._leaves[1:] = [leaf.requires_grad_() for leaf in work.inputs()[1:3]]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = _AttendTiles.apply(q, k, v, self.rank, self.work.world)
        return result


class HeadFloor(AttentionRank):
    """A rank's share of the work as Ulysses has it: some of the heads, of the whole sequence, in one call."""

    def __init__(self, work: AttentionWork, rank: int) -> None:
        super().__init__(work, rank, contiguous(work, rank))
        q, k, v, slope = work.inputs()
        groups = max(work.world // work.kv_heads, 1)  # ranks that share a head of keys and values
        k, v = (whole.chunk(work.world // groups, dim=1)[rank // groups].contiguous() for whole in (k, v))
        q, self._slope = (whole.chunk(work.world, dim=1)[rank].contiguous() for whole in (q, slope))
        self._leaves = [leaf.requires_grad_() for leaf in (q, k, v)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
