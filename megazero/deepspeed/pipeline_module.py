"""Pipelines of arbitrary layers, in the form that DeepSpeed users know.  A rank builds only its own layers.

    layers            0    1    2   |   3    4   |   5    6   |   7        a list of specs, modules and callables
    virtual stage        stage 0    |  stage 1   |  stage 2   | stage 3    cut by `partition_method`
    rank, chunk           (0, 0)    |   (1, 0)   |   (0, 1)   |  (1, 1)    placed by the schedule: here interleaved, pp = 2

Any shape gives the same model: layer i is initialized under the seed `base_seed + i`, whichever rank builds it, and its
parameters are `layers.{i}.<name>` wherever it runs.  Several tensors pass between layers as one tuple.

[Note: tied layers]  The layers of a key share the parameters in `tied_weight_attr`, and nothing else.  Within a stage, a
shared parameter is one Parameter.  A stage without the first layer holds a copy with the same initial values, and the engine
sums the gradients of all copies.  (DeepSpeed shares the whole module if one stage holds both layers, so its model depends on
the partition.)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megazero.deepspeed import layer_specs
from megazero.deepspeed.layer_specs import AppliedLayer, Layer, LayerChunk, LayerSpec, Tensors, TiedLayerSpec
from megazero.deepspeed.recompute import checkpoint_as_deepspeed
from megazero.deepspeed.topology import PipelineParallelGrid, ProcessTopology
from megazero.launchers import joined_world
from megazero.parallel_state import ParallelState, RankGrid, parallel_state_of
from megazero.schedules.action import Schedule
from megazero.schedules.factory import GivenSchedule
from megazero.schedules.registry import SCHEDULES
from megazero.settings import divisors, nearest_of, nearest_text


class PipelineModule(nn.Module):
    """This rank's chunks of a pipeline of layers.

    Args:
        layers: specs, modules and callables in order, or an nn.Sequential.  A `LayerSpec` is built on the ranks that run it;
            prefer it.  A ready-made nn.Module, which the script must build equally on all ranks, is dropped where it does
            not run.  A callable has no parameters.
        num_stages: pipeline ranks; they must divide the ranks of the world, and the rest is data parallelism.
        topology: the rank grid, or DeepSpeed's `ProcessTopology`, instead of `num_stages`, for other axes too.
        loss_fn: (outputs, labels) -> loss, of one element; applied by the engine after the last stage, not by the chunk.
        seed_layers: only True: drawn from one running generator, the weights would depend on the number of stages.
        base_seed: layer i is initialized under seed `base_seed + i`, on the CPU; the global generators do not change.
        partition_method: what stages are balanced by: "parameters" (trainable ones), "uniform" (layers), or "type:regex"
            (layers whose class or function name has a match, in any case of letters).
        activation_checkpoint_interval: layers that are recomputed together in the backward; 0 recomputes none.
        checkpointable_layers: without effect: every layer is recomputed, or none.
        seed_fn, activation_checkpoint_func, dynamic_shape: only DeepSpeed's defaults.
        schedule: name of a schedule, or a schedule of the user's own; it says which rank runs which virtual stage.
        virtual_stages: chunks per rank, for "interleaved"; other schedules have their own number.
        parallel_state: this rank's groups and device, if they exist already; made here otherwise.
        device: where this rank computes; by default cuda:LOCAL_RANK if there is CUDA, else the CPU.

    Attributes:
        layer_chunks, chunks: this rank's chunks in order, as a list and as a submodule.
        partition: the range of layers of each virtual stage.
        placement: virtual stage -> (pipeline rank, chunk).
        tied_copies: canonical name of every tied parameter -> the virtual stages that hold it, the first copy first.

    Raises:
        ValueError: numbers do not fit, a name is unknown, or layers share parameters without a key.
        TypeError: an entry of `layers` is no layer.
    """

    def __init__(
        self,
        layers: Iterable[Layer] | nn.Sequential,
        num_stages: int | None = None,
        topology: RankGrid | ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = True,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,  # noqa: ARG002  as DeepSpeed has it
        dynamic_shape: bool = False,
        *,
        schedule: str | Schedule = "1f1b",
        virtual_stages: int = 1,
        parallel_state: ParallelState | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not seed_layers:
            raise ValueError(f"seed_layers=False is not supported; vary {base_seed=} for other initial weights")
        if activation_checkpoint_interval < 0:
            raise ValueError(f"{activation_checkpoint_interval=} must be 0 or more layers")
        func = None if activation_checkpoint_func is checkpoint_as_deepspeed else activation_checkpoint_func
        if seed_fn or func or dynamic_shape:
            raise ValueError("seed_fn, activation_checkpoint_func and dynamic_shape have only DeepSpeed's defaults")
        all_layers = layer_specs.check_layers(layers)
        for index, layer in enumerate(all_layers):
            if isinstance(layer, PipelineModule | LayerChunk):
                raise TypeError(f"layer {index} is a pipeline itself; give its layers instead")
        self.loss_fn, self.base_seed = loss_fn, base_seed
        if not isinstance(schedule, Schedule) and schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r} is unknown; {SCHEDULES.hint(schedule)}")
        self.schedule_factory = GivenSchedule(schedule) if isinstance(schedule, Schedule) else SCHEDULES[schedule]
        chunks = self.schedule_factory.chunks_of(virtual_stages)
        self.parallel_state = state = _find_parallel_state(num_stages, topology, device, parallel_state)
        self.placement = self.schedule_factory.placement(state.pp.size, chunks)
        if len({rank for rank, _ in self.placement}) != state.pp.size:
            raise ValueError(f"the schedule is for another number of stages than num_stages={state.pp.size}")
        if len(all_layers) < (stages := len(self.placement)):
            raise ValueError(f"{len(all_layers)} layers are too few for {stages} virtual stages")
        self.partition = layer_specs.partition_layers(all_layers, stages, partition_method, self._trainable)
        self._ties: dict[str, list[tuple[int, TiedLayerSpec]]] = {}  # the layers of each key
        for index, layer in enumerate(all_layers):
            if isinstance(layer, TiedLayerSpec):
                self._ties.setdefault(layer.key, []).append((index, layer))
        stage_of = [stage for stage, indices in enumerate(self.partition) for _ in indices]
        self._tied_names = {key: self._names_of_tied(key) for key in self._ties}
        self.tied_copies = {
            name: tuple(sorted({stage_of[index] for index, _ in self._ties[key]}))
            for key, names in self._tied_names.items()
            for name in names
        }
        self.layer_chunks = [
            self._build_chunk(stage, all_layers, activation_checkpoint_interval)
            for stage, (rank, _) in enumerate(self.placement)  # a rank's chunks come in order
            if rank == state.at.pp
        ]
        self.chunks = nn.ModuleList(self.layer_chunks)

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the pipeline ranks that hold a tied parameter, in order."""
        return tuple(sorted({self.placement[stage][0] for stage in self.tied_copies[name]}))

    def mpu(self) -> PipelineParallelGrid:
        """Return this rank's place in the grid, with DeepSpeed's calls."""
        return PipelineParallelGrid(state=self.parallel_state)

    def topology(self) -> ProcessTopology:
        """Return the grid of ranks, with DeepSpeed's calls."""
        return self.mpu().topology()

    def num_pipeline_stages(self) -> int:
        """Return the number of pipeline ranks."""
        return self.parallel_state.pp.size

    def forward(self, x: Tensor | Tensors) -> Tensor | Tensors:
        """Run the whole model if this rank holds all of it.  (Otherwise, an engine runs the chunks by the schedule.)"""
        if len(self.layer_chunks) < len(self.placement):
            raise RuntimeError("this rank has not all stages and cannot run the model alone; give it to an engine")
        passed: Tensors = (x,) if isinstance(x, Tensor) else x
        for chunk in self.layer_chunks:
            passed = chunk(passed)
        return passed[0] if len(passed) == 1 else passed

    def _trainable(self, index: int, layer: Layer) -> int:
        if not isinstance(layer, LayerSpec | nn.Module):
            return 0
        module = self._skeleton(index, layer) if isinstance(layer, LayerSpec) else layer
        return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)

    def _skeleton(self, index: int, spec: LayerSpec) -> nn.Module:
        """Build a layer on the meta device, for its shapes; on the CPU if that fails."""
        try:
            with _seeded(0, self.parallel_state.device), torch.device("meta"):
                return spec.build()
        except Exception:  # a constructor may read its values in any way
            return self._build(index, spec)

    def _build(self, index: int, spec: LayerSpec) -> nn.Module:
        """Build a layer under its own seed, on the CPU."""
        try:
            with _seeded(self.base_seed + index, self.parallel_state.device):
                return spec.build()
        except Exception as error:
            error.add_note(f"while building layer {index}, {spec!r}")
            raise

    def _names_of_tied(self, key: str) -> list[str]:
        """Return the canonical names of the parameters that the layers of a key share."""
        first, spec = self._ties[key][0]
        for index, other in self._ties[key]:
            if len(other.tied_weight_attr) != len(spec.tied_weight_attr) or not spec.tied_weight_attr:
                raise ValueError(f"layers {first} and {index} of key {key!r} must tie as many parameters, at least one")
        module = self._skeleton(first, spec)
        name_of = {id(parameter): name for name, parameter in module.named_parameters()}
        shared = [_parameter_at(module, attribute, first) for attribute in spec.tied_weight_attr]
        return [f"layers.{first}.{name_of[id(parameter)]}" for parameter in shared]

    def _build_chunk(self, stage: int, layers: Sequence[Layer], checkpoint_interval: int) -> LayerChunk:
        shared: dict[str, list[nn.Parameter]] = {}  # key -> this stage's copy of what the layers of that key share
        built: list[tuple[int, Callable[[Any], Any]]] = []
        for index in self.partition[stage]:
            layer = layers[index]
            if isinstance(layer, TiedLayerSpec):
                module = self._build_tied(index, layer, shared)
                layer = module if layer.forward_fn is None else AppliedLayer(module, layer.forward_fn)
            elif isinstance(layer, LayerSpec):
                layer = self._build(index, layer)
            if isinstance(layer, nn.Module):
                layer.to(self.parallel_state.device)
            built.append((index, layer))
        tied = {
            id(parameter): name
            for key, parameters in shared.items()
            for parameter, name in zip(parameters, self._tied_names[key], strict=True)
        }
        return LayerChunk(stage, len(self.placement), built, tied, checkpoint_interval)

    def _build_tied(self, index: int, spec: TiedLayerSpec, shared: dict[str, list[nn.Parameter]]) -> nn.Module:
        """Build a layer with the shared parameters of its key, which the stage's first layer of that key builds."""
        module = self._build(index, spec)
        own = [_parameter_at(module, attribute, index) for attribute in spec.tied_weight_attr]
        first, first_spec = self._ties[spec.key][0]
        if spec.key not in shared:
            source = module if index == first else self._build(first, first_spec)
            shared[spec.key] = [_parameter_at(source, attribute, first) for attribute in first_spec.tied_weight_attr]
        for attribute, mine, theirs in zip(spec.tied_weight_attr, own, shared[spec.key], strict=True):
            if mine.shape != theirs.shape:
                raise ValueError(f"layers {first} and {index} of key {spec.key!r} tie {attribute!r} of other shapes")
            for submodule in module.modules():
                for name, parameter in submodule._parameters.items():
                    if parameter is mine:
                        submodule._parameters[name] = theirs
        return module


def _parameter_at(module: nn.Module, attribute: str, index: int) -> nn.Parameter:
    """Return the parameter at a dotted path of attributes."""
    found: Any = module
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not any(found is parameter for parameter in module.parameters()):
        names = ", ".join(name for name, _ in module.named_parameters())
        raise ValueError(f"layer {index} ({type(module).__name__}) has no parameter {attribute!r} to tie, but {names}")
    return found


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from `seed`, on the CPU unless a layer asks for its device, and leave torch's generators as they were."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _find_parallel_state(
    num_stages: int | None,
    topology: RankGrid | ProcessTopology | None,
    device: torch.device | None,
    state: ParallelState | None,
) -> ParallelState:
    """Return the given state, if it agrees with the rest; else make one over the ranks of torch.distributed."""
    grid = topology.grid if isinstance(topology, ProcessTopology) else topology
    if grid is not None and not isinstance(grid, RankGrid):
        raise TypeError(f"topology must be a RankGrid, got {layer_specs.describe_value(grid)}; or leave it out")
    own, source = (grid, "topology") if state is None else (state.grid, "parallel_state")
    if own is None:
        world, _ = joined_world()
        if num_stages is None:
            raise ValueError("num_stages, topology or parallel_state must say how many pipeline stages there are")
        if num_stages < 1 or world % num_stages:
            nearest = nearest_text(nearest_of(num_stages, divisors(world)))
            raise ValueError(f"num_stages={num_stages} must divide the world of {world} ranks; {nearest}")
        own = RankGrid(pp=num_stages, dp=world // num_stages)
    known: dict[str, tuple[object, object]] = {"topology": (grid, own), "num_stages": (num_stages, own.pp)}
    known |= {} if state is None else {"device": (device, state.device)}
    for name, (value, actual) in known.items():
        if value not in (None, actual):
            raise ValueError(f"{name}={value}, but the {source} has {actual}; leave {name} out")
    return parallel_state_of(own, device) if state is None else state
