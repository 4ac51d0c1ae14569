"""Blocks other than the pre-norm `Block`: norms after the branches or around them, and a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megazero.layers.sequence_shard import TokenLayout
from megazero.models.activation_config import Region
from megazero.models.build_context import BuildContext
from megazero.models.gpt import Block, body_and_projection

if TYPE_CHECKING:
    from megazero.layers.experts import MixtureOfExperts


class PostNormBlock(Block):
    """Like `Block`, but with norms after attention and after the MLP, before each residual sum (OLMo 2)."""

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        x = self.attention_residual(x, self.attention_norm(self.attention(x, layout)), layout)
        return self.mlp_residual(x, self.mlp_norm(self.mlp(x)), layout)

    def regions(self) -> dict[Region, list[nn.Module]]:
        (attention, out), (mlp, down) = body_and_projection(self.attention), body_and_projection(self.mlp)
        residual = [*out, self.attention_norm, self.attention_residual]
        return self._regions(attention, residual, mlp, *down, self.mlp_norm)


class AroundNormBlock(Block):
    """Like `Block`, with additional norms after attention and after the MLP, before each residual sum (Gemma 2, GLM-4).

    `norms`: before attention and before the MLP, then after attention and after the MLP.
    """

    def __init__(
        self, context: BuildContext, sites: tuple[str, str], norms: tuple[nn.Module, ...], *branches: nn.Module
    ) -> None:
        super().__init__(context, sites, norms, *branches)
        self.attention_out_norm, self.mlp_out_norm = norms[2:]

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        branch = self.attention(self.attention_norm(x), layout)
        x = self.attention_residual(x, self.attention_out_norm(branch), layout)
        return self.mlp_residual(x, self.mlp_out_norm(self.mlp(self.mlp_norm(x))), layout)

    def regions(self) -> dict[Region, list[nn.Module]]:
        (attention, out), (mlp, down) = body_and_projection(self.attention), body_and_projection(self.mlp)
        residual = [*out, self.attention_out_norm, self.attention_residual, self.mlp_norm]
        return self._regions([self.attention_norm, *attention], residual, mlp, *down, self.mlp_out_norm)


class ExpertBlock(Block):
    """A `Block` with a `MixtureOfExperts` in place of the MLP."""

    mlp: MixtureOfExperts

    def run_mlp(self, normed: Tensor, layout: TokenLayout) -> Tensor:
        return self.mlp(normed, layout)
