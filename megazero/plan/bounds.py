"""What any choice needs at least, by arithmetic: so that most choices are never traced.

    memory >= state of the mean rank            the fullest pipeline rank has no less than the mean
    time   >= products at the best share + half of a pipeline's filling
    guess     the same with the whole filling, tensor-parallel messages and stage 3's gathers: the order of looking

A bound only leaves out what cannot win; a guess decides nothing.
"""

from megazero.config import ResolvedRun
from megazero.engine.outline import elements_in, stages_of
from megazero.layers.experts import ExpertLinear
from megazero.models.registry import FAMILIES
from megazero.plan.choices import Choice
from megazero.plan.cluster import Cluster
from megazero.plan.zero_times import moments_of
from megazero.schedules.registry import SCHEDULES
from megazero.zero.bucket import DTYPES

_FP32 = 4
_RECOMPUTED = 1.25  # of a guess: what does not fit computes much again
_FILLS = {"zb-h1": 1 / 3, "zbv": 1 / 6, "dualpipev": 1 / 3}  # of 1F1B's idle time, where all passes take as long


class Bounds:
    """Lower bounds and guesses for every choice of one model on one cluster.

    Args:
        run: on one rank.
    """

    def __init__(self, run: ResolvedRun, cluster: Cluster) -> None:
        config = self.config = run.config
        self.cluster, self.samples = cluster, run.global_batch_size
        (model,) = stages_of(config, tp=1)
        layers = [module for module in model.modules() if isinstance(module, ExpertLinear)]
        self.of_experts = sum(map(elements_in, layers))
        self.dense = elements_in(model) - self.of_experts
        per_token = FAMILIES[config.model.family].flops_per_token(config.model, None)
        self.flops = per_token * self.samples * config.model.seq_len
        self.weight_bytes = DTYPES[config.precision.dtype].itemsize
        self.gradient_bytes = DTYPES[config.precision.accumulate_dtype].itemsize  # as gradients are summed up
        self.moments = int(moments_of(config))  # for each parameter, at least

    def state_bytes(self, choice: Choice) -> float:
        """Lower bound of the model state on the mean rank's device (Rajbhandari et al. 2020, figure 1)."""
        offloads = choice.relief.offload in ("optimizer", "both") and self.config.zero.offload.ratio == 1.0
        optimizer = 0 if offloads else _FP32 * (self.moments + (self.weight_bytes < _FP32))
        stage, replicas = choice.zero_stage, self.cluster.ranks // choice.pp

        def bytes_of(elements: int, shards: int) -> float:
            each = self.weight_bytes / (shards if stage == 3 else 1) + self.gradient_bytes * (stage < 2)
            return (each + optimizer / (shards if stage >= 1 else 1)) * (elements // choice.pp)

        dense = bytes_of(self.dense // choice.tp, choice.shard_group or replicas // choice.tp)
        return dense + bytes_of(self.of_experts // choice.ep, replicas // choice.ep)

    def seconds(self, choice: Choice) -> float:
        """Lower bound of a step's seconds."""
        return self._products() * (1 + self._filling(choice) / 2)

    def guess(self, choice: Choice) -> float:
        """Estimate a step's seconds, for the order of looking only."""
        within, between = self.cluster.within, self.cluster.between
        model, ranks_of_dp = self.config.model, self._dp(choice)
        tokens = self.samples * model.seq_len / (ranks_of_dp * choice.cp)
        exchanged = 8 * tokens * model.hidden_size * self.weight_bytes * (choice.tp - 1) / choice.tp
        layers = model.num_layers / choice.pp
        weights = (self.dense / choice.tp + self.of_experts / choice.ep) * self.weight_bytes / choice.pp
        rows = 8 * tokens / choice.tp * (model.experts_per_token or 0) * model.hidden_size * (1 - 1 / choice.ep)
        rows_seconds = layers * rows / (within if choice.ep <= self.cluster.per_node else between).rate()
        gathers = 2 * self._count(choice) if choice.zero_stage == 3 and choice.gather_policy == "action" else 1
        reduces = self._count(choice) if choice.zero_stage >= 2 else 1
        link = within if choice.shard_group else between
        sent = weights * (gathers + 2 * reduces) * (ranks_of_dp > 1)
        compute = self._products() * (1 + self._filling(choice)) * (1 + 0.02 * choice.zero_stage)
        compute *= 1.03 if choice.schedule in _FILLS else 1.0  # passes in two halves
        if self.state_bytes(choice) + self._kept(choice) > self.cluster.device.memory_bytes:
            compute *= _RECOMPUTED
        return (
            max(compute, sent / link.rate())
            + 0.2 * sent / link.rate()
            + layers * exchanged / within.rate()
            + rows_seconds
        )

    def _kept(self, choice: Choice) -> float:
        """Estimate the activations of the first pipeline rank (Korthikanti et al. 2022: 34 sbh for each layer)."""
        model = self.config.model
        return 34 * choice.micro_batch * model.seq_len * model.hidden_size * model.num_layers / (choice.tp * choice.cp)

    def _dp(self, choice: Choice) -> int:
        return self.cluster.ranks // (choice.tp * choice.cp * choice.pp)

    def _count(self, choice: Choice) -> float:
        """Return the micro-batches of a step."""
        return max(1.0, self.samples / (self._dp(choice) * choice.micro_batch))

    def _products(self) -> float:
        device = self.cluster.device
        share = 1.0
        if self.cluster.calibration is None:
            share = max(device.product_share, device.attention_share, device.attention_backward_share)
        precision = self.config.precision
        peak = device.peak_of(precision.dtype if precision.fp8 == "none" else "fp8")
        return self.flops / (self.cluster.ranks * peak * share)

    def _filling(self, choice: Choice) -> float:
        """Return a pipeline's idle time as a fraction of its work; 0 for schedules that split the backward."""
        if choice.schedule in _FILLS:
            return 0.0
        chunks = SCHEDULES[choice.schedule].chunks or choice.virtual_stages
        return (choice.pp - 1) / (self._count(choice) * chunks)
