"""A transformer layer with a mixture of experts in place of its MLP, in parts that a schedule may interleave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megazero.layers.experts import MixtureOfExperts
from megazero.layers.sample_part import TokenLayout
from megazero.models.gpt import Block, Stage


class ExpertBlock(Block):
    """As `Block`, with a `MixtureOfExperts`; its `stages` in a row are its forward."""

    reads_weights = False  # see `GPTStage.readers`
    mlp: MixtureOfExperts

    def run_mlp(self, normed: Tensor, layout: TokenLayout) -> Tensor:
        return self.mlp(normed, layout)

    def stages(self) -> Sequence[Stage]:
        """Between them only tokens travel: before "experts" to the ranks of their experts, after it back.

        attention  x -> x, normed, gates, routing       experts  rows -> rows       join  x, out -> x
        dispatch   normed -> rows                       combine  rows, gates -> out
        """
        mlp = self.mlp

        def attend(held: tuple[Any, ...], layout: TokenLayout) -> tuple[Any, ...]:
            (x,) = held
            x, normed = self.join_attention(x, self.attention(self.attention_norm(x), layout), layout)
            return (x, normed, *mlp.router(normed, layout))

        return (
            Stage("attention", attend),
            Stage("dispatch", lambda held, _: (held[0], mlp.dispatch(held[1], held[3]), *held[2:])),
            Stage("experts", lambda held, _: (held[0], mlp.experts(held[1], held[3]), *held[2:])),
            Stage("combine", lambda held, _: (held[0], mlp.combine(*held[1:]).view_as(held[0]))),
            Stage("join", lambda held, layout: (self.mlp_residual(*held, layout),)),
        )
