"""`megazero.initialize`: builds an engine from a script's model, optimizer and DeepSpeed configuration.

config --> batch sizes, ZeRO, precision        model --> every parameter described, its optimizer group found
    \\--> optimizer, schedule, unless the script gives its own
"""

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from megazero.comm.agreement import agree
from megazero.comm.collectives import broadcast, gather_objects
from megazero.comm.meeting import of_this_start, open_meeting, prepare_rank
from megazero.deepspeed.config import DeepSpeedConfig, load_deepspeed_config
from megazero.deepspeed.lr_schedulers import make_lr_scheduler
from megazero.deepspeed.meta_init import deferred_values
from megazero.deepspeed.module_engine import ModuleEngine
from megazero.deepspeed.pipeline_engine import PipelineEngine
from megazero.deepspeed.pipeline_module import PipelineModule
from megazero.deepspeed.recompute import configure_by_block
from megazero.deepspeed.script_optimizers import factory_by_name, factory_of
from megazero.deepspeed.script_units import ScriptModel, ScriptModule, script_units_of
from megazero.deepspeed.script_values import load_values
from megazero.deepspeed.topology import PipelineParallelGrid
from megazero.deepspeed.training_engine import ENGINES, TrainingEngine
from megazero.deepspeed.ungathered_parameter import UngatheredParameter, real
from megazero.launchers import start_problem
from megazero.layers.spec import whole_spec
from megazero.parallel_state import Axis, ParallelState, parallel_state_of
from megazero.parallel_state.state import TIMEOUT, Groups, local_device
from megazero.terminal import Terminal
from megazero.zero.optimizer import OptimizerFactory
from megazero.zero.sharding import DTYPES, ShardingSettings
from megazero.zero.units import ModelParam, RankModel, describe

OptimizerLike: TypeAlias = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
_SEED = 1234


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: ParallelState | PipelineParallelGrid | None = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    config_params: Mapping[str, Any] | None = None,
) -> tuple[TrainingEngine, Any, Any, Any]:
    """Build an engine from a script's model, optimizer and DeepSpeed configuration.

    Args:
        args: may have `deepspeed_config`, the path of the configuration, in place of `config`.
        model: any module, or a `PipelineModule`.  Its parameters may have been built under `zero.Init`.
        optimizer: an optimizer that has not stepped, or a callable (parameters or groups) -> optimizer; None for that of the
            configuration.  Without any, the engine only evaluates, and parameters are frozen until it is closed.
        model_parameters: the parameters to train, or groups of them; None for all that require a gradient.  With an
            optimizer object, its own parameters are trained.
        training_data: dataset for `training_dataloader`, which is split over the data-parallel ranks.
        lr_scheduler: a schedule of the optimizer, or a callable (optimizer) -> schedule; None for that of the configuration.
        distributed_port: no effect; the launcher knows the port.
        mpu: this rank's groups and device, from `parallel_state_of` or in a `PipelineParallelGrid`, if the model contains
            tensor-parallel layers.
        dist_init_required: False if the script has initialised torch.distributed itself.
        collate_fn: collates samples of `training_data`.
        config, config_params: a DeepSpeed configuration: the path of its JSON, or its contents.

    Returns: (engine, optimizer or None, dataloader or None, schedule or None).

    Raises:
        ConfigError: the configuration is wrong; the error lists all problems.
        ValueError, TypeError: the arguments do not fit together, the optimizer cannot run on shards, or another engine
            holds a parameter.
        StorageError: offloaded state does not fit.
    """
    if model is None:
        raise ValueError("initialize needs a model; megazero.initialize(config, state) builds that of a run file")
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    places = config, config_params, getattr(args, "deepspeed_config", None)
    settings, state = _configured(model, mpu, [source for source in places if source is not None])
    if dist.is_initialized():
        _GROUPS[id(state.groups)] = state.groups
    _take_from_other_engines(model, state)
    show = Terminal()
    if state.rank == 0:
        _show_notes(settings, {"optimizer": optimizer, "scheduler": lr_scheduler}, show)
    only_evaluates = optimizer is None and not settings.json.optimizer.type
    requires_grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    sharded = _shard(model, state, settings, optimizer, model_parameters)
    engine_type: Any = PipelineEngine if isinstance(model, PipelineModule) else ModuleEngine
    engine: TrainingEngine = engine_type(model, sharded, settings, show)
    engine.lr_scheduler = _schedule(lr_scheduler, engine)
    if only_evaluates:
        engine.only_evaluate(requires_grad)
    if training_data is not None:
        engine.training_dataloader = _loader(training_data, model, state, settings, collate_fn)
    return engine, None if only_evaluates else engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _configured(
    model: nn.Module,
    mpu: ParallelState | PipelineParallelGrid | None,
    sources: Sequence[str | Path | Mapping[str, Any]],
) -> tuple[DeepSpeedConfig, ParallelState]:
    """Read the configuration, which must have one source, and return it with this rank's groups and device."""
    if len(sources) != 1:
        raise ValueError(f"initialize needs one of config, config_params and args.deepspeed_config, got {len(sources)}")
    state = _parallel_state(model, mpu)
    settings = load_deepspeed_config(sources[0], state.dp.size)
    size = settings.zero.shard_group_size
    if size not in (0, state.shard.size):
        if mpu is not None or isinstance(model, PipelineModule):
            raise ValueError(f"state in groups of {size} ranks: make the parallel state with shard_group_size={size}")
        state = parallel_state_of(shard_group_size=size)
    configure_by_block(settings.json.activation_checkpointing, state.tp.size)
    return settings, state


def _show_notes(settings: DeepSpeedConfig, given: Mapping[str, object], show: Callable[[str], None]) -> None:
    """Show which keys have no effect, and the whole configuration if it asks for that.  `given`: what the script gives."""
    unread = [name for name, value in given.items() if value is not None and getattr(settings.json, name).type]
    notes = [f"{name} has no effect: the script gives its own to initialize" for name in unread]
    for note in (*settings.notes, *notes):
        show(f"note: {note}")
    if settings.json.dump_state:
        show(str(settings))


def _shard(
    model: nn.Module,
    state: ParallelState,
    settings: DeepSpeedConfig,
    optimizer: OptimizerLike | None,
    model_parameters: Iterable[Any] | None,
) -> ScriptModel:
    """Shard the model's parameters and optimizer state over the ranks.  Collective."""
    params, ties = _describe(model, state)
    params, factory = _optimizer(model, params, optimizer, model_parameters, settings)
    _check_ties(params, state)
    chunks = list(model.chunks) if isinstance(model, PipelineModule) else [model]
    _move_buffers(model, settings, state)
    values = {param.name: param.parameter.data for param in params if not param.parameter.is_meta}
    rank_model = RankModel(script_units_of(chunks), params, ties)
    how = ShardingSettings(settings.zero, settings.precision, factory)
    sharded = (ScriptModel if isinstance(model, PipelineModule) else ScriptModule)(rank_model, state, how)
    seed = _SEED if settings.seed is None else settings.seed
    load_values(sharded, values, state.dp, deferred_values(params, seed))
    return sharded


def _loader(
    training_data: Dataset[Any], model: nn.Module, state: ParallelState, settings: DeepSpeedConfig, collate_fn: Any
) -> DataLoader[Any]:
    # An iterable dataset cuts itself.  Of another, every dp-th sample of the order belongs to this rank.
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(training_data, IterableDataset):
        shuffles = not isinstance(model, PipelineModule)  # as DeepSpeed
        sampler = DistributedSampler(training_data, state.dp.size, state.dp.index, shuffles, settings.seed or 0)
    size, drop_last = settings.micro_batch_size, settings.json.dataloader_drop_last
    return DataLoader(training_data, size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta = TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the ranks that a launcher such as torchrun has started.  No-op without a launcher, or when called again.

    Args:
        dist_backend: backend of torch.distributed; None, "gloo" and "nccl" use gloo for the CPU, and nccl for CUDA.
        timeout: longest time for which a collective may wait for a peer.
        init_method, rank, world_size: see torch; for processes without a launcher's variables.
        dist_init_required: False if the script initialises torch.distributed itself.
        auto_mpi_discovery, distributed_port, verbose, config: no effect; the launcher knows the ranks and the port.

    Raises:
        ValueError: a launcher has started this process, but variables that torchrun sets are missing or wrong.
        MeetingError: this rank cannot reach the others.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    store = None
    if init_method is None:
        if problem := start_problem(os.environ):
            raise ValueError(problem)
        if not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
            return
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = of_this_start(open_meeting(rank, world_size, timeout, waits=True))
    device = local_device()
    prepare_rank(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if dist_backend not in (None, "nccl", "gloo"):
        backend = str(dist_backend)
    dist.init_process_group(backend, init_method, timeout, world_size, rank, store)


#: The process groups of all engines of this process, by identity, to be released when the interpreter exits.
_GROUPS: dict[int, Groups] = {}


@atexit.register
def _leave() -> None:
    """Destroy the process groups before the interpreter ends gloo's threads, which would abort the process.

    After a failure nothing is done: NCCL would wait for peers that may have died.
    """
    if hasattr(sys, "last_value") or not _GROUPS:
        return
    for groups in _GROUPS.values():
        groups.close()
    _GROUPS.clear()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config to a script's argument parser."""
    group = parser.add_argument_group("megazero", "the configuration, under DeepSpeed's names")
    group.add_argument("--deepspeed", action="store_true", help="accepted for scripts; it is always on")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON configuration")
    return parser


def _parallel_state(model: nn.Module, mpu: ParallelState | PipelineParallelGrid | None) -> ParallelState:
    """Return this rank's groups and device, as the script made them or made here.  Raises: TypeError, ValueError."""
    if isinstance(mpu, PipelineParallelGrid):
        mpu = mpu.parallel_state
    if mpu is not None and not isinstance(mpu, ParallelState):
        raise TypeError(f"mpu must be a megazero ParallelState, got {type(mpu).__name__}")
    if isinstance(model, PipelineModule):
        if mpu is not None and mpu is not model.parallel_state:
            raise ValueError("the PipelineModule has a parallel state of its own; give mpu to it instead")
        mpu = model.parallel_state
    return mpu or parallel_state_of()


def _take_from_other_engines(model: nn.Module, state: ParallelState) -> None:
    """Make sure that no other engine holds a parameter, and gather weights that a closed engine has left sharded.

    Raises: ValueError, on every rank, a live engine holds a parameter.
    """
    if _held(model) or any(isinstance(parameter, UngatheredParameter) for parameter in model.parameters()):
        gc.collect()  # an engine that nobody refers to is not live

    def check() -> None:
        if name := _held(model):
            raise ValueError(f"parameter {name}: another engine holds it; close that engine first, or use one for both")

    agree(check, state.world, ValueError)
    for submodule in model.modules():
        for key, parameter in submodule._parameters.items():
            if isinstance(parameter, UngatheredParameter):
                submodule._parameters[key] = parameter.restore()


def _held(model: nn.Module) -> str:
    """Return the name of a parameter that a live engine trains already, or ""."""
    held = {key for engine in list(ENGINES.values()) for key in engine.sharded_model.names}
    return next((name for name, parameter in model.named_parameters() if id(real(parameter)) in held), "")


def _describe(model: nn.Module, state: ParallelState) -> tuple[list[ModelParam], dict[str, Axis]]:
    """Describe every parameter of this rank, and find the ranks that hold a copy of the tied ones."""
    if not isinstance(model, PipelineModule):
        return list(describe(model)), {}
    params = []
    for index, chunk in enumerate(model.layer_chunks):
        for info in describe(chunk):
            canonical = chunk.canonical_names[info.name]
            spec, tied = info.spec, canonical in model.tied_copies
            if tied or spec.name == info.name:  # a tensor-parallel layer names its parameters itself
                spec = whole_spec(canonical, spec.shape, tied=tied)
            params.append(replace(info, name=f"chunks.{index}.{info.name}", spec=spec))
    # A collective call: every rank makes the axis of every tie.
    axes = {name: state.among_stages(model.holders(name)) for name in sorted(model.tied_copies)}
    return params, {name: axis for name, axis in axes.items() if axis.size > 1}


def _check_ties(params: list[ModelParam], state: ParallelState) -> None:
    """Make sure that the optimizer treats all copies of a tied parameter alike.  Raises: ValueError, on every rank."""
    own = [(info.spec.name, info.group, info.parameter.requires_grad) for info in params if info.spec.tied]
    treatment: dict[str, tuple[int, bool]] = {}
    for name, group, trains in (entry for entries in gather_objects(own, state.pp) for entry in entries):
        if treatment.setdefault(name, (group, trains)) != (group, trains):
            raise ValueError(f"copies of the tied parameter {name} must be in one optimizer group, or all frozen")


def _optimizer(
    model: nn.Module,
    params: list[ModelParam],
    optimizer: OptimizerLike | None,
    model_parameters: Iterable[Any] | None,
    settings: DeepSpeedConfig,
) -> tuple[list[ModelParam], OptimizerFactory]:
    """Return the parameters, each with its optimizer group, and the optimizer's factory."""
    allow_untested = settings.json.zero_allow_untested_optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        owner = type(optimizer).__name__
        return _grouped(params, optimizer.param_groups, owner), factory_of(optimizer, allow_untested=allow_untested)
    trained = (p for p in model.parameters() if p.requires_grad)
    given: list[Any] = list(trained if model_parameters is None else model_parameters)
    groups = [{"params": given}]
    if given and all(isinstance(group, dict) for group in given):
        groups = [{**group, "params": list(group["params"])} for group in given]
    if optimizer is not None:
        if not callable(optimizer):
            raise TypeError(f"optimizer must be a torch optimizer or a callable, got {type(optimizer).__name__}")
        made = optimizer(groups)
        return _grouped(params, made.param_groups, "optimizer"), factory_of(made, allow_untested=allow_untested)
    entry = settings.json.optimizer
    if not entry.type:
        smallest = min(model.parameters(), key=Tensor.numel).requires_grad_()  # a model has something to train
        return _grouped(params, [{"params": [smallest]}], "optimizer"), factory_by_name("SGD", {}, [{}])
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    factory = factory_by_name(entry.type, dict(entry.params or {}), options)
    return _grouped(params, groups, "model_parameters"), factory


def _grouped(params: list[ModelParam], groups: Iterable[Mapping[str, Any]], owner: str) -> list[ModelParam]:
    """Set the group number of each parameter, and freeze those in no group.  Raises: ValueError."""
    group_of: dict[int, int] = {}
    known = {id(info.parameter): info.name for info in params}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            first = group_of.setdefault(id(parameter), number)
            if first != number:
                name = known.get(id(parameter), "(of another model)")
                raise ValueError(f"parameter {name} is in groups {first} and {number} of the {owner}; give it to one")
    if foreign := group_of.keys() - known.keys():
        raise ValueError(f"{len(foreign)} parameters of the {owner} are not parameters of the model")
    for info in params:
        if id(info.parameter) not in group_of:
            info.parameter.requires_grad_(False)
    return [replace(info, group=group_of.get(id(info.parameter), 0)) for info in params]


def _move_buffers(model: nn.Module, settings: DeepSpeedConfig, state: ParallelState) -> None:
    """Move buffers to the device with the values of the first dp rank, in the format that they have, as DeepSpeed does.

    In bf16 a rotary frequency would lose its positions.  Running statistics get the weights' dtype, since torch's batch norm
    takes one for both.  A shared buffer stays shared.
    """
    dtype = DTYPES[settings.precision.dtype]
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the old one, kept so that its id stays taken, and the new one
    for path, old in list(model.named_buffers(remove_duplicate=False)):
        if old.is_meta:
            raise ValueError(f"buffer {path} is on the meta device, without values; build the model under zero.Init()")
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        if id(old) not in moved:
            is_statistic = isinstance(module, nn.modules.batchnorm._NormBase) and old.is_floating_point()
            casts = is_statistic and dtype != torch.float32
            new = old.detach().to(state.device, dtype if casts else None).contiguous()
            broadcast(new.view(-1).view(torch.uint8), state.dp).wait()
            moved[id(old)] = old, new
        module._buffers[name] = moved[id(old)][1]


def _schedule(given: Any, engine: TrainingEngine) -> Any:
    if given is None:
        entry = engine.config.json.scheduler
        return make_lr_scheduler(entry.type, entry.params or {}, engine.optimizer) if entry.type else None
    if not hasattr(given, "step"):
        return given(engine.optimizer)
    of = getattr(given, "optimizer", None)
    if of is not None and of.param_groups is not engine.optimizer.param_groups:
        raise ValueError("the lr_scheduler is of another optimizer; give that too, or a callable that makes a schedule")
    return given
