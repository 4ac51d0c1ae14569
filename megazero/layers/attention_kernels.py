"""The one place that chooses a kernel for attention.

    no `kept`      torch's scaled_dot_product_attention chooses, and has its own derivative
    `kept`         the kernel that torch would choose, called by its name.  It gives `out` and for each query `lse`, the log
                   of the sum of exponentials; the backward needs q, k, v, out and lse, wherever these come from.

So a block that is computed again can keep `out` and `lse` of its first forward, and the second one runs no kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from megazero.layers.recompute import KeptResults

_aten = torch.ops.aten


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, kept: KeptResults | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(size)) v.  q: [batch, heads, seq, size], k and v: [batch, kv heads, seq, size] -> as q.

    On CUDA torch uses flash attention (or cuDNN's, where that is faster) in bf16 and fp16; it needs only the last dimension
    contiguous, and takes fewer kv heads than heads.  In fp32, or with a mask, the one kernel that stores no [seq, seq]
    matrix needs as many.  The output has the order of q in memory.

    Args:
        mask: added to the scores, [seq of q, seq of k]; attention is causal without one.
        kept: gives the outputs of the kernel; without it the kernel runs.  Tensors that no kernel takes without storing a
            [seq, seq] matrix go through torch's formula, and nothing is kept.
    """
    if mask is not None or q.dtype == torch.float32:
        k, v = _one_for_each_head(q, k, v)
    if kept is not None:
        through = torch.compiler.disable(_through) if torch.compiler.is_compiling() else _through
        if (out := through(q, k, v, mask, kept)) is not None:
            return out
    fewer = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=fewer)


def _one_for_each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as many as queries, on CUDA; elsewhere every kernel takes fewer."""
    groups = q.shape[1] // k.shape[1]
    if groups == 1 or q.device.type != "cuda":
        return k, v
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def _through(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: KeptResults) -> Tensor | None:
    """By the kernel that torch takes where a backward follows, so that two forwards take the same; None for its formula."""
    with torch.enable_grad():
        like, fewer = q.detach().requires_grad_(), q.shape[1] != k.shape[1]
        kernel = SDPBackend(torch._fused_sdp_choice(like, k, v, mask, 0.0, mask is None, enable_gqa=fewer))
    odd = kernel == SDPBackend.FLASH_ATTENTION and q.is_cuda and q.shape[-1] % 8  # torch pads such heads
    if odd or kernel not in _KERNELS:
        return None
    result: Tensor = _KeptAttention.apply(q, k, v, mask, kernel, kept)
    return result


class _KeptAttention(torch.autograd.Function):
    """Attention whose kernel's outputs come through `kept`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: SDPBackend, kept: KeptResults
    ) -> Tensor:
        outputs = kept.through(lambda: _forward(kernel, q, k, v, mask))
        ctx.save_for_backward(q, k, v, mask, *outputs)
        ctx.kernel = kernel
        return outputs[0].detach()  # the graph holds this one, and what is kept holds no graph

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx.kernel, grad, *ctx.saved_tensors), None, None, None


# The operators, called as torch's attention.cpp and derivatives.yaml do.  Nothing is dropped out, so the state of random
# numbers is not used; samples are of one length, so lengths are not cumulated.
_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def _forward(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """out, lse, and on CUDA the state of random numbers."""
    causal = mask is None
    if q.is_cpu:
        return tuple(_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask))
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        mask = _of_each_head(mask, q)
        return tuple(_aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal))
    if kernel == SDPBackend.CUDNN_ATTENTION:
        out, lse, *_, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, 0.0, causal)
    else:
        out, lse, *_, seed, offset, _ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse, seed, offset


def _backward(
    kernel: SDPBackend, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *outputs: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v."""
    tensors, out_lse, random, causal = (grad, q, k, v), outputs[:2], outputs[2:], mask is None
    lengths = None, None, q.shape[2], k.shape[2], 0.0, causal
    if q.is_cpu:
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(backward(*tensors, *out_lse, 0.0, causal, attn_mask=mask))
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        backward, wanted = _aten._scaled_dot_product_efficient_attention_backward, [True, True, True, False]
        return tuple(backward(*tensors, _of_each_head(mask, q), *out_lse, *random, 0.0, wanted, causal))[:3]
    if kernel == SDPBackend.CUDNN_ATTENTION:
        backward = _aten._scaled_dot_product_cudnn_attention_backward
        return tuple(backward(*tensors, *out_lse, *random, mask, *lengths))
    return tuple(_aten._scaled_dot_product_flash_attention_backward(*tensors, *out_lse, *lengths, *random))


def _of_each_head(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """[seq, seq of k] -> [batch, heads, seq, seq of k], a view whose rows begin at multiples of 16 elements."""
    size = 0 if mask is None else mask.shape[-1]
    return None if mask is None else F.pad(mask, (0, -size % 16))[..., :size].expand(*q.shape[:3], size)
