"""A transformer layer with a mixture of experts in place of its MLP."""

from torch import Tensor

from megazero.layers.experts import MixtureOfExperts
from megazero.layers.sample_part import TokenLayout
from megazero.models.gpt import Block


class ExpertBlock(Block):
    """As `Block`, with a `MixtureOfExperts`."""

    reads_weights = False  # see `GPTStage.readers`
    mlp: MixtureOfExperts

    def run_mlp(self, normed: Tensor, layout: TokenLayout) -> Tensor:
        return self.mlp(normed, layout)
