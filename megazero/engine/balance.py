"""Routers of a rank: the scale of their balance losses in a step, and statistics of a step over all ranks.

forward of a router     tally of its layer: tokens of each expert, entropy, losses     (layers/experts.py, `Balance`)
end of a step           summed over all ranks, on request; biases of routers move by the sums
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.comm.collectives import all_reduce
from megazero.config import RunConfig
from megazero.layers.experts import Balance, Router, SigmoidRouter
from megazero.models.gpt import GPTStage
from megazero.parallel_state import ParallelState


@dataclass(frozen=True)
class ExpertLoad:
    """The distribution of a step's tokens over the experts.

    Args:
        tokens: int64 [layers, experts], number of counted tokens that each expert received.
        entropy: [layers], entropy of the router's scores, in nats, mean over tokens.
        aux, z: the two losses, summed over layers, per counted token.
        first_layer: the first layer that has experts.
    """

    tokens: Tensor
    entropy: Tensor
    aux: float
    z: float
    first_layer: int = 0

    def metrics(self) -> dict[str, float | Mapping[str, float] | Mapping[str, list[int]]]:
        """Return values for metrics.jsonl: for each layer the tokens of each expert, the largest and smallest load (1 if
        even) and the entropy; and both losses.
        """
        load = self.tokens / self.tokens.double().mean(1, keepdim=True)
        by_layer = {"expert_load_max": load.amax(1), "expert_load_min": load.amin(1), "router_entropy": self.entropy}
        named = {
            key: {str(layer): value for layer, value in enumerate(row.tolist(), self.first_layer)}
            for key, row in {**by_layer, "expert_tokens": self.tokens}.items()
        }
        return {**named, "router_aux_loss": self.aux, "router_z_loss": self.z}


class Routers:
    """The routers of this rank's stages.

    Args:
        config: configuration of the run.
        state: this rank's groups and device.
        stages: its model chunks.
    """

    def __init__(self, config: RunConfig, state: ParallelState, stages: Sequence[GPTStage]) -> None:
        self._state, model = state, config.model
        self._per_token = model.experts_per_token or 1
        self._tallies = torch.zeros(model.num_layers, (model.num_experts or 0) + 3, device=state.device)
        across = [axis for axis in (state.tp, state.cp_ulysses, state.cp_ring) if axis.size > 1]
        self._balances, self._first_layer = [], model.first_dense_layers
        self._biased, self._bias_rate = dict[int, SigmoidRouter](), model.router_bias_rate or 0.0
        for stage in stages:
            for layer, block in zip(stage.layers, stage.blocks, strict=True):
                for router in (module for module in block.modules() if isinstance(module, Router)):
                    coefficients = model.router_aux_coef, model.router_z_coef
                    router.balance = Balance(*coefficients, across, state.tp, self._tallies[layer])
                    self._balances.append(router.balance)
                    if isinstance(router, SigmoidRouter):
                        self._biased[layer] = router

    def begin_step(self) -> None:
        """Clear the tallies of the last step."""
        self._tallies.zero_()

    def set_grad_scale(self, grad_scale: Callable[[], Tensor]) -> None:
        """Set the function that returns the gradient of the step's scaled loss with respect to a sum over tokens."""
        for balance in self._balances:
            balance.grad_scale = grad_scale

    def update_biases(self) -> None:
        """Adjust the biases of the routers to the load of the last step.  A collective call of the world."""
        if not self._bias_rate:
            return
        counts = self._tallies[:, :-3].double()
        all_reduce(counts, self._state.world).wait()
        for layer, router in self._biased.items():
            router.update_bias(counts[layer], self._bias_rate)

    def load(self, tokens: int) -> ExpertLoad:
        """Sum the tallies of the last step over all ranks.  A collective call of the world.

        Args:
            tokens: number of tokens that the step counted, over all ranks.
        """
        sums = self._tallies.double()
        all_reduce(sums, self._state.world).wait()
        sums = sums.cpu()[self._first_layer :]
        counts, (entropy, aux, z) = sums[:, :-3], sums[:, -3:].t()
        routed = counts.sum(1) / self._per_token
        aux_loss, z_loss = (float(loss.sum()) / tokens for loss in (aux, z))
        return ExpertLoad(counts.long(), entropy / routed, aux_loss, z_loss, self._first_layer)
