"""What follows from the configuration of a run: schedule, optimizer, stages, and their shards on a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from megazero.comm.collectives import gather_objects
from megazero.comm.memory import Arena
from megazero.config import ResolvedRun, RunConfig
from megazero.config.derive import micro_batch_multiple, num_experts
from megazero.engine.micro_batches import BatchSlice
from megazero.layers.linear import WeightGradQueue
from megazero.layers.vocabulary import VocabParallelHead
from megazero.models.activation_config import layer_policies
from megazero.models.build_context import BuildContext
from megazero.models.gpt import GPTStage
from megazero.models.stages import cut, cut_by_rank
from megazero.optim.config import OptimizerConfig
from megazero.optim.optimizers import ADAMW, ElementwiseOptimizer
from megazero.optim.registry import OPTIMIZERS
from megazero.parallel_state import Axis, ParallelState
from megazero.schedules.action import Placement, Schedule, read_schedule
from megazero.schedules.factory import GivenSchedule, ScheduleFactory
from megazero.schedules.proof import check_runnable
from megazero.schedules.registry import SCHEDULES
from megazero.zero.optimizer import MatrixUpdate, OptimizerFactory, factory_of_class
from megazero.zero.sharded_model import ShardedModel
from megazero.zero.sharding import DTYPES, ShardingSettings, expert_placement_of
from megazero.zero.sharding import Placement as ZeroPlacement
from megazero.zero.units import ModelParam, RankModel, describe, units_of

if TYPE_CHECKING:
    from megazero.engine.balance import Routers
    from megazero.engine.qk_clip import QKClip
    from megazero.engine.stage_runner import StageRunner
    from megazero.layers.activation_offload import ActivationStore
    from megazero.layers.context_attention import ContextAttention


def schedule_factory_of(config: RunConfig) -> ScheduleFactory:
    """Return the factory of the run's schedule, by name or from its file."""
    parallel = config.parallel
    if parallel.schedule_file is None:
        return SCHEDULES[parallel.schedule]
    return GivenSchedule(read_schedule(Path(parallel.schedule_file), parallel.schedule_placement))


def read_own_schedule(run: ResolvedRun) -> Schedule | None:
    """Read `parallel.schedule_file` and check that it can run; None if the run has no such file.

    Raises:
        ScheduleError: it cannot run; the message shows where.
        ValueError, OSError: it cannot be read, or does not fit this run's sizes.
    """
    parallel = run.config.parallel
    if parallel.schedule_file is None:
        return None
    schedule = read_schedule(Path(parallel.schedule_file), parallel.schedule_placement)
    check_runnable(schedule)
    return GivenSchedule(schedule).build(parallel.pp, run.accumulation, schedule.chunks)


def schedule_of(run: ResolvedRun) -> Schedule:
    """Return the pipeline schedule of a run, built by name or read from `parallel.schedule_file`."""
    factory = schedule_factory_of(run.config)
    build = factory.build if run.config.parallel.schedule_file else partial(_built, factory)
    return build(run.config.parallel.pp, run.accumulation, factory.chunks_of(run.config.parallel.virtual_stages))


@lru_cache(maxsize=64)
def _built(factory: ScheduleFactory, pp: int, microbatches: int, chunks: int) -> Schedule:
    return factory.build(pp, microbatches, chunks)


def optimizer_of(config: OptimizerConfig, width_ratio: float = 1.0) -> OptimizerFactory:
    """Return the factory of the configured optimizer.

    It has a parameter group with weight decay and one without; with muP, or if the optimizer updates whole matrices, a
    third group holds the matrices.  With muP the learning rate of the matrices falls as the model gets wider, and its
    product with the weight decay stays the same.

    Args:
        width_ratio: the model's width over the width that the learning rate was tuned for; 1 without muP.

    Source: Yang et al. 2022, table 8, and `MuAdam` of their package `mup` (the decay).
    """
    decays, plain = {"weight_decay": config.weight_decay}, {"weight_decay": 0.0}
    optimizer = OPTIMIZERS[config.name]
    if isinstance(optimizer, ElementwiseOptimizer):
        groups = [decays, plain]
        if width_ratio != 1.0:
            groups.append({"weight_decay": config.weight_decay * width_ratio, "lr_ratio": 1.0 / width_ratio})
        return factory_of_class(optimizer.cls, optimizer.settings(config), groups)
    others = {"lr_ratio": (config.adamw_lr or config.lr) / config.lr}
    groups = [decays | others, plain | others, decays]
    factory = factory_of_class(ADAMW.cls, ADAMW.settings(config.model_copy(update={"options": ()})), groups)
    update = partial(optimizer.update, **optimizer.settings(config))
    return replace(factory, matrices=MatrixUpdate(update, optimizer.flops, config.matrix_momentum))


def stages_of(config: RunConfig, count: int = 1, tp: int | None = None) -> list[GPTStage]:
    """Return the model cut into `count` stages on the meta device, as the first tensor-parallel rank builds them.

    Args:
        tp: number of tensor-parallel ranks; None: the run's.
    """
    layouts = cut(config.model, "even" if count == 1 else config.parallel.layout, count)
    device, axis = torch.device("meta"), Axis("tp", tuple(range(tp or config.parallel.tp)))
    cuts, seed = config.parallel.sequence_parallel, config.training.seed
    context = BuildContext(config.model, axis, cuts, seed, device, dtype=DTYPES[config.precision.dtype])
    with device:
        return [GPTStage(context, layout) for layout in layouts]


def may_compile(setting: bool | str, device: torch.device) -> bool:
    """Whether a run compiles its blocks, provided that they can be compiled.

    Args:
        setting: `training.compile`; "auto" compiles on CUDA only.  On a CPU, compiling takes minutes and needs a C++
            compiler.
        device: of this rank.
    """
    return device.type == "cuda" if setting == "auto" else bool(setting)


def elements_in(module: nn.Module) -> int:
    """Return the number of parameters of a stage, or of a module in it."""
    return sum(weight.numel() for weight in module.parameters())


@dataclass(frozen=True)
class RankStages:
    """The virtual stages of one rank, on the meta device.

    Args:
        wgrad_queues: for each stage, the queue of its weight gradients.
        offload: stores activations that layers move off the device or into an arena; None if no layer does.
        heads: the heads of the stages that compute a loss.
    """

    stages: Sequence[GPTStage]
    wgrad_queues: Sequence[WeightGradQueue]
    offload: ActivationStore | None
    heads: Sequence[VocabParallelHead]


def build_stages(config: RunConfig, state: ParallelState, placement: Placement) -> RankStages:
    """Build this rank's stages on the meta device, so that no rank allocates more of the model than its shards and
    buffers.
    """
    layouts = cut_by_rank(config.model, config.parallel.layout, placement)[state.at.pp]
    cuts, seed, dtype = config.parallel.sequence_parallel, config.training.seed, DTYPES[config.precision.dtype]
    whole = Axis("tp") if cuts else state.tp
    layers = [layer for layout in layouts for layer in layout.layers]
    fp8 = config.precision.fp8_of_layers(config.model.num_layers)
    policies = layer_policies(config.activations, layers, state.at.pp, cuts=whole.size > 1, fp8=fp8)
    offload = None
    if any(policy.moves for policy in policies.values()):
        in_arena = any(policy.contiguous for policy in policies.values())
        arena = Arena(state.device, "set activations.contiguous=false") if in_arena else None
        from megazero.layers.activation_offload import ActivationStore  # few runs need it

        offload = ActivationStore(state.device, arena)
    attention, queues, stages = _context_attention(config, state), [WeightGradQueue() for _ in layouts], []
    logits, ep = config.training.logits_chunk_bytes, expert_axis(config, state)
    for layout, queue in zip(layouts, queues, strict=True):
        context = BuildContext(config.model, state.tp, cuts, seed, state.device, queue, dtype, attention, logits, ep)
        with torch.device("meta"):
            stages.append(GPTStage(context, layout))
        for layer, block in zip(layout.layers, stages[-1].blocks, strict=True):
            if (scaling := policies[layer].fp8) is not None:
                from megazero.layers.fp8 import kernels_on, use_fp8  # few runs need it

                use_fp8(block, scaling, kernels_on(state.device, dtype, scaling))
            if (overlap := config.parallel.tp_overlap) != "none":
                from megazero.layers.tp_overlap import hide_exchanges, overlap_of  # few runs need it

                hide_exchanges(block, overlap_of(overlap, state.tp, state.device))
        if offload is not None or any(policy.recompute for policy in policies.values()):
            from megazero.models.wrappers import save_by_policy

            save_by_policy(
                zip(stages[-1].blocks, map(policies.__getitem__, layout.layers), strict=True), whole, offload
            )
    heads = [module for stage in stages for module in stage.modules() if isinstance(module, VocabParallelHead)]
    for head in heads:
        head.z_loss_coef = config.training.z_loss_coef
    return RankStages(stages, queues, offload, heads)


def expert_axis(config: RunConfig, state: ParallelState) -> Axis:
    """Return the axis that a model's experts are spread over.  Every rank must call this, even if its stage has no
    experts.
    """
    return state.ep if num_experts(config) else Axis("ep")


def _context_attention(config: RunConfig, state: ParallelState) -> ContextAttention | None:
    """Return the attention for sequence shards or documents; None if a rank attends to whole samples."""
    if not config.has_shards:
        return None
    from megazero.layers.context_attention import ContextAttention

    return ContextAttention(
        (state.cp_ulysses, state.cp_ring),
        config.model.sliding_window,
        DTYPES[config.precision.reduce_dtype],
        on_cuda=state.device_type == "cuda",
    )


def qk_clip_of(config: RunConfig, state: ParallelState, stages: Sequence[GPTStage]) -> QKClip | None:
    """Return the QK-clip, which rescales query and key weights after a step; None if `optimizer.qk_clip` is unset."""
    if config.optimizer.qk_clip is None:
        return None
    from megazero.engine.qk_clip import QKClip  # few runs need it

    return QKClip(stages, config.optimizer.qk_clip, state.dp)


def paired_runner_of(
    config: RunConfig, state: ParallelState, factory: ScheduleFactory
) -> Callable[..., StageRunner] | None:
    """Return a factory of stage runners in which the passes of a pair take turns; None if the schedule has no pairs, or
    its passes never wait.

    Call it only where no activations are offloaded: an arena returns them in the order of the actions, so the passes of a
    pair could not overlap.
    """
    if not factory.has_pairs or expert_axis(config, state).size == 1:
        return None
    from megazero.engine.turns import PairedStageRunner, Turns

    turns = Turns()
    state.traffic.pass_on = turns.pass_on
    return partial(PairedStageRunner, turns=turns)


def routers_of(config: RunConfig, state: ParallelState, stages: Sequence[GPTStage]) -> Routers | None:
    """Return the routers of a rank; None for a dense model."""
    if not num_experts(config):
        return None
    from megazero.engine.balance import Routers  # not loaded for dense models

    return Routers(config, state, stages)


def batch_slice_of(config: RunConfig, state: ParallelState, stages: Sequence[GPTStage]) -> BatchSlice:
    """Return the slice of each global batch that a rank with these stages needs."""
    return BatchSlice(
        state.dp,
        state.device,
        tokens=any(stage.embedding is not None for stage in stages),
        # routers count the tokens that losses do
        labels=any(stage.head is not None for stage in stages) or num_experts(config) > 0,
        ulysses=state.cp_ulysses,
        ring=state.cp_ring,
        documents=config.data.document_mask,
        multiple=micro_batch_multiple(config.parallel),
    )


def shard(
    config: RunConfig, state: ParallelState, built: RankStages, placement: Placement, *, beside: bool
) -> ShardedModel:
    """Shard a rank's stages according to `[zero]` and `[precision]`.

    Args:
        beside: two stages of this rank may run at the same time.
    """
    modules = nn.ModuleList(built.stages)
    factory = optimizer_of(config.optimizer, config.model.width_ratio)
    experts = expert_placement_of(state, config.zero) if num_experts(config) else None
    params = [_in_its_group(param, factory, experts) for param in describe(modules)]
    queue_of = {
        f"{index}.{name}": queue
        for index, (stage, queue) in enumerate(zip(built.stages, built.wgrad_queues, strict=True))
        for name, _ in stage.named_parameters()
    }
    offload = built.offload
    # a compiled block waits for all its weights: hooks of its layers would break its graph
    compiles = may_compile(config.training.compile, state.device)
    units = units_of(built.stages, by_layer=not compiles, beside=beside)
    arena = None if offload is None or offload.on_host else offload.pool
    sharded = ShardedModel(
        RankModel(units, params, _tied_axes(params, state, placement), queue_of),
        state,
        ShardingSettings(config.zero, config.precision, factory, arena, compiles, config.average.kind != "none"),
    )
    if offload is not None:
        offload.stay(bucket.weights for bucket in sharded.parameters.buckets)
    return sharded


def _in_its_group(param: ModelParam, factory: OptimizerFactory, experts: ZeroPlacement | None) -> ModelParam:
    param = replace(param, placement=experts if param.spec.of_experts else None)
    if factory.groups == 3 and param.spec.matrix:
        return replace(param, group=2, matrix=factory.matrices is not None)
    return replace(param, group=0 if param.spec.decay else 1)


def _tied_axes(params: Sequence[ModelParam], state: ParallelState, placement: Placement) -> Mapping[str, Axis]:
    """Return the pipeline ranks that hold a copy of each tied parameter, by its name.  A collective call over pp."""
    first, last = placement[0][0], placement[-1][0]
    tied = [param.spec.name for param in params if param.spec.tied]
    if first == last or not any(gather_objects(bool(tied), state.pp)):
        return {}
    return dict.fromkeys(tied, state.among_stages([first, last], "embedding"))
