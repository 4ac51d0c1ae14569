"""The shapes that a search compares, and the run file of each.

    tp x cp x pp x dp = ranks      dp follows          global batch = dp x micro-batch x accumulation     the latter follows
    cp = Ulysses x ring            all of one of them, or Ulysses within a node
    schedule, virtual stages       where pp > 1        sequence_parallel                                  wherever it can be
    ZeRO stage, gather policy, shard groups            where dp x cp > 1      ep: all that divide experts and ranks
    recomputation, offloading                          `MemoryOption`: less memory, never less time

Model, data, precision, optimizer, global batch and all other keys keep the values of the run file.  The rules of run files
decide whether a choice can run.

A search leaves out the choices that arithmetic shows to be too large or too slow, so that most choices are never traced:

    memory >= state of the average rank         the fullest pipeline rank has at least the average
    time   >= matrix products at the best share of the peak + half of the time in which the pipeline fills
    guess     the same with all of that time, messages and gathers: it gives the order of the search, and decides nothing
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product, starmap
from math import gcd
from typing import Literal

from megazero.config import ResolvedRun, RunConfig
from megazero.config.derive import num_experts
from megazero.config.schema import OffloadConfig, ZeroConfig
from megazero.engine.outline import elements_in, stages_of
from megazero.layers.experts import ExpertLinear
from megazero.models.activation_config import ActivationsConfig
from megazero.models.registry import FAMILIES
from megazero.plan.cluster import Cluster
from megazero.plan.zero_times import moments_of
from megazero.schedules.registry import SCHEDULES
from megazero.settings import divisors
from megazero.zero.sharding import DTYPES

Preset = Literal["none", "selective", "full"]
#: `recompute` and `keep_attention`; each pair saves less for the backward and computes more than the pair before it.
RECOMPUTE: tuple[tuple[Preset, bool], ...] = (("none", False), ("selective", False), ("full", True), ("full", False))
_OFFLOAD_ORDER = {"none": 0, "activations": 1, "optimizer": 1, "both": 2}
OFFLOADS = tuple(_OFFLOAD_ORDER)
_SMALLEST_SHARD = 4096  # tokens of a sample; below, a ring's messages take longer than its products
_LARGEST_PIPELINE = 16


@dataclass(frozen=True, order=True)
class MemoryOption:
    """What frees memory and costs time: recomputation (an index into `RECOMPUTE`) and offloading (one of `OFFLOADS`)."""

    recompute: int = 0
    offload: str = "none"

    @property
    def order(self) -> tuple[int, MemoryOption]:
        """Sort key: the option that frees the least memory comes first."""
        return self.recompute + _OFFLOAD_ORDER[self.offload], self

    def needs_no_more_than(self, other: MemoryOption) -> bool:
        """Whether `other` recomputes and offloads everything that this option does, so that `other` cannot be faster."""
        offloads_no_more = self.offload in ("none", other.offload) or other.offload == "both"
        return self.recompute <= other.recompute and offloads_no_more


@dataclass(frozen=True, order=True)
class ShapeChoice:
    """A value for every searched key."""

    tp: int = 1
    cp: int = 1
    ulysses: int = 1
    pp: int = 1
    micro_batch: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    zero_stage: int = 1
    gather_policy: str = "action"
    shard_group: int = 0
    option: MemoryOption = MemoryOption()
    ep: int = 1

    def __str__(self) -> str:
        """`tp 8 cp 8 (4 x 2) pp 4 interleaved x 2 micro-batch 1 ZeRO 1 selective`, with Ulysses x ring in brackets."""
        words = [f"tp {self.tp}"] if self.tp > 1 else []
        words += [f"cp {self.cp} ({self.ulysses} x {self.cp // self.ulysses})"] if self.cp > 1 else []
        words += [f"ep {self.ep}"] if self.ep > 1 else []
        words += [f"pp {self.pp}"] if self.pp > 1 else []
        if self.pp > 1:
            words.append(self.schedule + (f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""))
        words += [f"micro-batch {self.micro_batch}", f"ZeRO {self.zero_stage}"]
        words += [f"gathered for the {self.gather_policy}"] if self.gather_policy != "action" else []
        words += [f"in groups of {self.shard_group}"] if self.shard_group else []
        return " ".join([*words, *option_words(self.option)])


def option_words(option: MemoryOption) -> list[str]:
    """Describe recomputation and offloading in a few words."""
    name, keeps_attention = RECOMPUTE[option.recompute]
    words = [f"recompute {name}{' but attention' if keeps_attention else ''}"] if name != "none" else []
    return words + ([f"offload {option.offload}"] if option.offload != "none" else [])


@dataclass(frozen=True)
class Space:
    """The values that each searched key takes."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    schedules: tuple[str, ...]
    shard_groups: tuple[int, ...]
    per_node: int
    ep: tuple[int, ...] = (1,)
    micro_batch: tuple[int, ...] = (1, 2, 4)
    virtual_stages: tuple[int, ...] = (2, 3, 4)
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    gather_policies: tuple[str, ...] = ("action", "step")
    options: tuple[MemoryOption, ...] = tuple(starmap(MemoryOption, product(range(len(RECOMPUTE)), OFFLOADS)))

    def ulysses(self, tp: int, cp: int) -> list[int]:
        """Return the Ulysses degrees worth comparing: 1, all of cp, and the largest that stays within a node."""
        within = max((degree for degree in divisors(cp) if degree * tp <= self.per_node), default=1)
        return sorted({1, within, cp})


def space_of(config: RunConfig, ranks: int, per_node: int) -> Space:
    """Return the values worth comparing for a model on a cluster.

    Three things are left out: tp over several nodes, because every layer would wait for the network; sequence shards below
    4,096 tokens; and gpipe, which saves more activations than 1f1b and idles as long.
    """
    model, of_ranks = config.model, divisors(ranks)
    own = config.parallel.schedule
    return Space(
        tp=tuple(size for size in of_ranks if size <= per_node),
        cp=tuple(size for size in of_ranks if size == 1 or model.seq_len // size >= _SMALLEST_SHARD),
        pp=tuple(size for size in of_ranks if size <= min(_LARGEST_PIPELINE, model.num_layers)),
        schedules=tuple(dict.fromkeys(("1f1b", "interleaved", "zb-h1", "zbv", *([own] if own != "gpipe" else [])))),
        shard_groups=(0, per_node),
        per_node=per_node,
        ep=tuple(divisors(gcd(ranks, num_experts(config) or 1))),
    )


def groups_in(space: Space, config: RunConfig, ranks: int) -> Iterator[ShapeChoice]:
    """Yield every distinct choice, each without recomputation and offloading."""
    for tp, cp, pp in product(space.tp, space.cp, space.pp):
        if ranks % (tp * cp * pp) == 0:
            every = product(space.ulysses(tp, cp), _schedules(space, config, pp), space.micro_batch)
            for ulysses, (schedule, chunks), micro_batch in every:
                for sharding in _sharding(space, ranks // (tp * pp), tp):
                    for ep in (size for size in space.ep if ranks // pp % size == 0):
                        yield ShapeChoice(tp, cp, ulysses, pp, micro_batch, schedule, chunks, *sharding, ep=ep)


def _schedules(space: Space, config: RunConfig, pp: int) -> Iterator[tuple[str, int]]:
    """Yield schedules with their numbers of virtual stages: those that divide the layers evenly, if any does."""
    if pp == 1:
        yield "1f1b", 1
        return
    for name in space.schedules:
        if SCHEDULES[name].chunks is not None:
            yield name, 1
            continue
        counts = [count for count in space.virtual_stages if count * pp <= config.model.num_layers]
        even = [count for count in counts if config.model.num_layers % (count * pp) == 0]
        yield from ((name, count) for count in even or counts[:1])


def _sharding(space: Space, shards: int, tp: int) -> Iterator[tuple[int, str, int]]:
    """Yield ZeRO stage, gather policy and shard group.  A node holds per_node / tp consecutive ranks of dp x cp."""
    if shards == 1:
        yield space.zero_stages[min(1, len(space.zero_stages) - 1)], "action", 0
        return
    for stage in space.zero_stages:
        for policy in space.gather_policies if stage == 3 else ("action",):
            for group in dict.fromkeys(group // tp for group in space.shard_groups) if stage == 3 else (0,):
                if group == 0 or (1 < group < shards and shards % group == 0):
                    yield stage, policy, group


def config_of(base: RunConfig, choice: ShapeChoice) -> RunConfig:
    """Return the run file with a choice filled in."""
    recompute, keeps_attention = RECOMPUTE[choice.option.recompute]
    offload = choice.option.offload
    cuts_sequence = choice.tp > 1 and base.model.seq_len % (choice.tp * choice.cp) == 0
    parallel = {name: getattr(choice, name) for name in ("tp", "cp", "pp", "ep", "schedule", "virtual_stages")}
    parallel |= {
        "cp_method": {1: "ring", choice.cp: "ulysses"}.get(choice.ulysses, "hybrid") if choice.cp > 1 else "auto",
        "cp_ulysses": choice.ulysses if 1 < choice.ulysses < choice.cp else None,
        "dp": "auto",
        "sequence_parallel": cuts_sequence,
        "schedule_file": None,
        "schedule_placement": "loop",
        "layout": base.parallel.layout if isinstance(base.parallel.layout, str) else "even",
    }
    activations = ActivationsConfig(
        recompute=recompute,
        keep_attention=keeps_attention,
        offload="host" if offload in ("activations", "both") else "none",
    )
    training = {"micro_batch_size": choice.micro_batch, "accumulation": "auto"}
    return base.model_copy(
        update={
            "parallel": base.parallel.model_copy(update=parallel),
            "zero": _zero_of(base, choice),
            "activations": activations,
            "training": base.training.model_copy(update=training),
        }
    )


#: The lowest ZeRO stage at which a key has an effect.
_ACTS_FROM = {"quantized_gradients": 1, "reduce": 2}
_ACTS_FROM |= dict.fromkeys(("prefetch_bytes", "persistent_elements", "quantized_weights"), 3)


def _zero_of(base: RunConfig, choice: ShapeChoice) -> ZeroConfig:
    """Return [zero] with a choice filled in.  A key without effect at the chosen stage gets its default."""
    own, stage = base.zero.offload, choice.zero_stage
    offload = OffloadConfig()
    if choice.option.offload in ("optimizer", "both"):
        where = "nvme" if own.optimizer == "nvme" else "cpu"
        path = own.nvme_path if where == "nvme" else None
        offload = own.model_copy(update={"optimizer": where, "parameters": "none", "nvme_path": path})
    update = {
        "stage": stage,
        "gather_policy": choice.gather_policy,
        "shard_group_size": choice.shard_group,
        "secondary_shard_size": 0,
        "offload": offload,
        **{key: getattr(ZeroConfig(), key) for key, least in _ACTS_FROM.items() if stage < least},
    }
    return base.zero.model_copy(update=update)


# ---- lower bounds of memory and time


_FP32 = 4
_RECOMPUTED = 1.25  # factor on the guess of a shape that does not fit, since it will have to recompute
_SPLIT_BACKWARD = ("zb-h1", "zbv", "dualpipev")


class Bounds:
    """Lower bounds and estimates for the choices of one model on one cluster.

    Args:
        run: the run, resolved for one rank.
        cluster: the devices and links.
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
        self.gradient_bytes = DTYPES[config.precision.accumulate_dtype].itemsize
        self.moments = int(moments_of(config))  # fewest per parameter

    def state_bytes(self, choice: ShapeChoice) -> float:
        """Return a lower bound of the bytes of model state on an average rank (Rajbhandari et al. 2020, figure 1)."""
        offloads = choice.option.offload in ("optimizer", "both") and self.config.zero.offload.ratio == 1.0
        optimizer = 0 if offloads else _FP32 * (self.moments + (self.weight_bytes < _FP32))
        stage, replicas = choice.zero_stage, self.cluster.ranks // choice.pp

        def bytes_of(elements: int, shards: int) -> float:
            each = self.weight_bytes / (shards if stage == 3 else 1) + self.gradient_bytes * (stage < 2)
            return (each + optimizer / (shards if stage >= 1 else 1)) * (elements // choice.pp)

        dense = bytes_of(self.dense // choice.tp, choice.shard_group or replicas // choice.tp)
        return dense + bytes_of(self.of_experts // choice.ep, replicas // choice.ep)

    def seconds(self, choice: ShapeChoice) -> float:
        """Return a lower bound of the seconds of a step."""
        return self._products() * (1 + self._filling(choice) / 2)

    def guess(self, choice: ShapeChoice) -> float:
        """Return a rough estimate of the seconds of a step.  The search uses it for nothing but its order."""
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
        compute *= 1.03 if choice.schedule in _SPLIT_BACKWARD else 1.0  # a backward in two halves costs a little more
        if self.state_bytes(choice) + self._saved_bytes(choice) > self.cluster.device.memory_bytes:
            compute *= _RECOMPUTED
        sending = sent / link.rate()
        return max(compute, sending) + 0.2 * sending + layers * exchanged / within.rate() + rows_seconds

    def _saved_bytes(self, choice: ShapeChoice) -> float:
        """Return an estimate of the first pipeline rank's activation bytes (Korthikanti et al. 2022: 34 sbh per layer).

        Each expert of a token adds its input row, gate, up, and the product of the two.
        """
        model = self.config.model
        rows = self.weight_bytes * (model.experts_per_token or 0) * (model.hidden_size + 3 * model.expert_size)
        tokens = choice.micro_batch * model.seq_len * model.num_layers
        return tokens * (34 * model.hidden_size + rows) / (choice.tp * choice.cp)

    def _dp(self, choice: ShapeChoice) -> int:
        return self.cluster.ranks // (choice.tp * choice.cp * choice.pp)

    def _count(self, choice: ShapeChoice) -> float:
        """Return the number of micro-batches in a step."""
        return max(1.0, self.samples / (self._dp(choice) * choice.micro_batch))

    def _products(self) -> float:
        device = self.cluster.device
        share = 1.0
        if self.cluster.calibration is None:
            share = max(device.product_share, device.attention_share, device.attention_backward_share)
        precision = self.config.precision
        peak = device.peak_of(precision.dtype if precision.fp8 == "none" else "fp8")
        return self.flops / (self.cluster.ranks * peak * share)

    def _filling(self, choice: ShapeChoice) -> float:
        """Return a pipeline's idle time as a fraction of its work; 0 for schedules that split the backward."""
        if choice.schedule in _SPLIT_BACKWARD:
            return 0.0
        chunks = SCHEDULES[choice.schedule].chunks or choice.virtual_stages
        return (choice.pp - 1) / (self._count(choice) * chunks)
