"""In what the families that are like Llama differ from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Variant:
    """The layers of one family.

    Args:
        qkv_bias: q, k and v have biases.
        qk_norm: RMSNorm of queries and keys before they are rotated: of each "head", or over the "width" of all heads.
        norms_after: attention and MLP are normed after instead of before.
        norms: names of a layer's two norms, of attention and of the MLP.
    """

    qkv_bias: bool = False
    qk_norm: Literal["none", "head", "width"] = "none"
    norms_after: bool = False
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")


LLAMA_2 = Variant()
