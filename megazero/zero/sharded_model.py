"""A model's parameters, gradients and optimizer under ZeRO, and the order in which a step ends.

begin_step -> backward passes, gradients reduced as they become ready -> finish_gradients
           -> square_sum (each rank's contribution; the engine sums it over the world together with other values)
           -> update: overflow? skip : unscale, clip, update each bucket and start to gather its weights -> adapt the
           loss scale
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import Tensor

from megazero.comm.agreement import agree
from megazero.comm.collectives import LostPeerError, gather_objects
from megazero.comm.memory import Arena, copier_on
from megazero.config.schema import PrecisionConfig, ZeroConfig
from megazero.layers.linear import WeightGradQueue
from megazero.parallel_state import Axis, ParallelState
from megazero.parallel_state.grid import hosts_of
from megazero.settings import divisors
from megazero.zero.bucket import DTYPES, Placement, ShardingPolicy
from megazero.zero.gather import UnitGatherer
from megazero.zero.gradients import GradientReducer
from megazero.zero.loss_scaler import LossScaler
from megazero.zero.offload import give_cores, without_auto
from megazero.zero.optimizer import OptimizerRecipe, ShardedOptimizer
from megazero.zero.parameters import ShardedParameters
from megazero.zero.reductions import gradient_square_sum, sum_partial_over_tp, sum_tied
from megazero.zero.state import ShardedState
from megazero.zero.stepper import Stepper
from megazero.zero.units import ModelParam, UnitModule
from megazero.zero.weight_gathers import HalfSteppedError

if TYPE_CHECKING:
    from megazero.zero.average import WeightAverage

#: Rows of logical tensors: the tensor's name, first row, end row, and the parameter that holds them.
Rows: TypeAlias = list[tuple[str, int, int, str]]


@dataclass(frozen=True)
class ModelParts:
    """This rank's part of a model, before sharding.

    Args:
        units: see `ShardedParameters`.
        described: every parameter once, in forward order, with its optimizer group.
        ties: the ranks that hold a copy of a tied parameter, by its logical name.
        wgrad_queues: the queue that takes a parameter's weight gradients past autograd, by the parameter's name.
    """

    units: Sequence[UnitModule]
    described: Sequence[ModelParam]
    ties: Mapping[str, Axis] = field(default_factory=dict)
    wgrad_queues: Mapping[str, WeightGradQueue] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardingSettings:
    """How a model is sharded and updated.  `arena`, `compiles`: see `ShardingPolicy`; `averages`: keep a `WeightAverage`."""

    zero: ZeroConfig
    precision: PrecisionConfig
    recipe: OptimizerRecipe
    arena: Arena | None = None
    compiles: bool = False
    averages: bool = False


class ShardedModel:
    """One rank's share of a model, with its gradients and optimizer.

    Attributes:
        scale: factor on the losses of this step.
        average: of the weights; None where the run keeps none.
        hides_gathers: see `ShardedParameters`.
        gatherer_type: class that gathers the units of stage 3.
        reducer_type: class that reduces gradients.

    Raises:
        ValueError, StorageError: on every rank: the configuration does not fit this machine.
    """

    hides_gathers: ClassVar[bool] = True
    gatherer_type: ClassVar[type[UnitGatherer]] = UnitGatherer
    reducer_type: ClassVar[type[GradientReducer]] = GradientReducer

    def __init__(self, parts: ModelParts, state: ParallelState, settings: ShardingSettings) -> None:
        self.state, self.ties = state, parts.ties
        described, zero, precision, recipe = parts.described, settings.zero, settings.precision, settings.recipe
        held = gather_objects((state.at.pp, logical_rows(described, parts.ties)), state.pp)
        agree(lambda: check_parameters(described, state.at.pp, dict(held)), state.world, ValueError)
        self.policy = _sharding_policy(state, settings)
        elements, moments = sum(param.parameter.numel() for param in described), len(recipe.states)
        moments += settings.averages  # which needs as much space as another one
        offload = without_auto(zero.offload, self.policy, elements, moments, state.world, state.local_world_size)
        give_cores(offload, state.device, state.local_world_size)
        self.parameters = ShardedParameters(
            parts.units,
            described,
            self.policy,
            zero.model_copy(update={"offload": offload}),
            parts.ties,
            moments,
            state.rank,
            state.world,
            gatherer_type=self.gatherer_type,
            hides_gathers=self.hides_gathers,
        )
        buckets = self.parameters.buckets
        every_micro_batch = zero.reduce == "micro_batch"
        self.reducer = self.reducer_type(self.policy, buckets, every_micro_batch, self.parameters.sizes.bucket_bytes)
        self.reducer.attach(self.parameters.by_name, parts.wgrad_queues)
        self.optimizer, matrices = ShardedOptimizer(buckets, recipe, self.parameters.offload), None
        if recipe.matrices is not None:
            from megazero.zero.matrices import matrix_stepper  # which other runs do not load

            matrices = matrix_stepper(self.policy, buckets, recipe.matrices, state)
        self.stepper = Stepper(self.optimizer, matrices)
        wait = self.parameters.gathers.wait
        self.average: WeightAverage | None = None
        if settings.averages:
            from megazero.zero.average import WeightAverage  # which other runs do not load

            self.average = WeightAverage(buckets, self.parameters.offload, wait)
        self.sharded_state = ShardedState(self.policy, buckets, self.optimizer, self.average, wait)
        self.scaler = LossScaler(precision) if precision.dtype == "fp16" else None
        self.scale = 1.0
        self.begin_step(1)

    @property
    def skipped_steps(self) -> int:
        """Number of updates skipped because of an overflow."""
        return 0 if self.scaler is None else self.scaler.skipped_steps

    def begin_step(self, micro_batches: int) -> None:
        """Discard the last step's gradients.  Every parameter is expected once per micro-batch."""
        # Both counts include the steps before a resume.
        self.reducer.begin_step(micro_batches, self.optimizer.steps_taken + self.skipped_steps)
        if self.parameters.gatherer is not None:
            self.parameters.gatherer.begin_step()
        self.scale = 1.0 if self.scaler is None else self.scaler.scale

    def finish_gradients(self) -> None:
        """Complete the step's gradients, times `scale`, in the buckets (of each bucket, the elements `summed`)."""
        buckets = self.reducer.buckets
        self.reducer.finish()
        sum_partial_over_tp(buckets, self.state.tp, self.policy.device)
        sum_tied(buckets, self.ties, self.policy.device)

    def square_sum(self) -> Tensor:
        """Return this rank's contribution to the squared norm of gradients times `scale`, an fp64 scalar; see
        `gradient_square_sum`.
        """
        return gradient_square_sum(self.reducer.buckets, self.state.tp, self.policy.device)

    def norm_of(self, square_sum: float) -> float:
        """Return the gradient norm from the squared norm of scaled gradients over all ranks.  Not finite after an
        overflow.
        """
        return sqrt(square_sum) / self.scale if isfinite(square_sum) else square_sum

    def update(self, norm: float, max_norm: float) -> bool:
        """Unscale, clip to `max_norm` unless it is 0, update the weights and gather them.  Returns False if `norm` is
        not finite.

        With `hides_gathers`, gathers are still running afterwards, and buckets of stage 0 may not be updated yet: see
        `WeightGathers`.

        Raises:
            LossScaleError: on every rank: an overflow at the smallest loss scale.
            StorageError: offloaded state could not be read or written.
            LostPeerError, HalfSteppedError: the previous update was not completed.  After any error during an update,
                the weights cannot be read until a checkpoint is loaded.
        """
        overflowed = not isfinite(norm)
        if not overflowed:
            clip = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
            # Unscale by the scale that the losses had; it changes only afterwards.
            parameters, trained = self.parameters, self.reducer.buckets
            parameters.gathers.wait()  # gathers that no forward has used
            parameters.note_change(trained)
            with parameters.gathers.changing():
                if parameters.hides_gathers:
                    self.stepper.step(clip / self.scale, parameters.start_gather)
                else:
                    self.stepper.step(clip / self.scale)
                    parameters.gathers.gather(trained)
        if self.scaler is not None:
            self.scaler.update(overflowed)
        return not overflowed

    def load(self, read: Callable[[], object], loss_scaler: dict[str, Any] | None) -> None:
        """Continue from a checkpoint, which `read` writes into the state.  For `loss_scaler` see `loaded`.

        After any error the weights cannot be read until another checkpoint is loaded: some of them are the old ones.
        """
        with self.parameters.gathers.renewing():
            self.parameters.note_change(self.parameters.buckets)
            read()
            self.loaded(loss_scaler)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model has its averaged weights; afterwards it has its own again, bit for bit."""
        assert self.average is not None
        self.parameters.gathers.wait()  # buckets may be unstepped
        self.load(self.average.swap, None)
        try:
            yield
        finally:
            self.load(self.average.swap, None)

    def loaded(self, loss_scaler: dict[str, Any] | None) -> None:
        """Continue from a checkpoint that was read: update the modules' weights from the master weights, and restore
        the loss scale.

        Args:
            loss_scaler: a scaler's `state_dict`, or None.
        """
        if self.scaler is not None and loss_scaler is not None:
            self.scaler.load_state_dict(loss_scaler)
        self.parameters.sync_from_master()
        self.begin_step(1)

    def optimizer_scalars(self) -> dict[str, dict[str, float]]:
        """Return the scalar state of the optimizer by group, over all ranks.  A collective call."""
        self.parameters.gathers.wait()  # buckets may not be updated yet
        merged: dict[str, dict[str, float]] = {}
        for one in gather_objects(self.optimizer.scalars(), self.state.world):
            merged |= one
        return merged

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of model state and of ZeRO's working buffers, by kind; kinds off the device have the
        location in their name.
        """
        return {
            **self.parameters.memory_bytes(),
            **self.optimizer.memory_bytes(),
            **self.stepper.memory_bytes(),
            **({} if self.average is None else self.average.memory_bytes()),
            "gradient_buffers": self.reducer.buffer_bytes,
        }

    def detach(self) -> None:
        """Remove all hooks from the module and its parameters."""
        self.reducer.detach()
        with suppress(HalfSteppedError):
            self.parameters.gathers.wait()
        self.parameters.gathers.detach()
        if self.parameters.gatherer is not None:
            self.parameters.gatherer.detach()

    def close(self) -> None:
        """Wait for running gathers of ranks that are still alive, and release files and other state outside memory."""
        with suppress(LostPeerError, HalfSteppedError):  # whoever noticed it first has raised it
            self.parameters.gathers.wait()
        if self.parameters.hides_gathers and self.parameters.gatherer is not None:
            with suppress(LostPeerError):
                self.parameters.gatherer.forget()  # waits for the gathers of the last update
        self.parameters.offload.close()


def logical_rows(described: Sequence[ModelParam], ties: Mapping[str, Axis]) -> Rows:
    """Yield the rows of logical tensors that parameters hold, except for tensors that several stages share."""
    return [
        (rows.name, rows.offset, rows.offset + rows.rows, param.name)
        for param in described
        if not param.spec.tied
        for rows in param.spec.names.rows
        if rows.name not in ties
    ]


def check_parameters(described: Sequence[ModelParam], stage: int, held: Mapping[int, Rows]) -> None:
    """Check that something trains and that no two parameters have one name in a checkpoint.

    Args:
        held: the rows that each pipeline stage holds.

    Raises:
        ValueError: nothing trains on this rank, or two parameters would be one tensor in a checkpoint.
    """
    if not any(param.parameter.requires_grad for param in described):
        hint = "there is nothing to train there"
        raise ValueError(f"pipeline stage {stage} has no parameter that requires a gradient: {hint}")
    every = sorted((name, first, end, at, param) for at, rows in held.items() for name, first, end, param in rows)
    for (name, _, end, at, param), (other, first, _, other_at, other_param) in pairwise(every):
        if name == other and first < end:
            raise ValueError(
                f"two parameters have the logical name {name!r}: {param!r} of pipeline stage {at} and {other_param!r} of "
                f"stage {other_at}. A checkpoint would keep one of them, and both would begin with equal values: give "
                "each its own name"
            )


def _sharding_policy(state: ParallelState, settings: ShardingSettings) -> ShardingPolicy:
    """Return the settings that all buckets share.  A collective call.  Raises: ValueError."""
    zero, precision = settings.zero, settings.precision
    return ShardingPolicy(
        zero.stage,
        DTYPES[precision.dtype],
        placement_of(state, zero),
        state.device,
        DTYPES[precision.accumulate_dtype],
        DTYPES[precision.reduce_dtype],
        on_cpu=state.device_type == "cpu",
        pins_memory=zero.offload.pin_memory,
        copier=copier_on(state.device),
        arena=settings.arena,
        quantizes_weights=zero.quantized_weights,
        gradient_bits=zero.quantized_gradients,
        compiles=settings.compiles,
    )


def placement_of(state: ParallelState, zero: ZeroConfig) -> Placement:
    """Return the placement of a model's parameters.  A collective call.

    Raises:
        ValueError: the size of the secondary axis does not divide the number of ranks that share the state.
    """
    levels = _levels(state) if zero.quantized_gradients else None
    if zero.stage < 3:
        return Placement(state.shard, state.replica, levels=levels)
    size, shards = zero.secondary_shard_size, state.shard.size
    if size and (size in (1, shards) or shards % size):
        raise ValueError(
            f"zero.secondary_shard_size={size} must divide the {shards} ranks that share the state into two groups or more, "
            f"of 2 or more: choose among {', '.join(map(str, [0, *divisors(shards)[1:-1]]))}"
        )
    # NCCL runs operations of one communicator in order: without its own, a gather would wait for earlier reductions.
    gather = state.with_own_group(state.shard, "gathers") if state.device.type == "cuda" else None
    secondary = state.block_on(state.shard, size, "secondary", "gathers") if size else None
    return Placement(state.shard, state.replica, gather, secondary, levels)


def expert_placement_of(state: ParallelState, zero: ZeroConfig) -> Placement | None:
    """Return the placement of experts, the state of which is shared by all ranks with the same experts.  A collective
    call.

    Returns:
        None if these are the ranks that share all other parameters.
    """
    if state.grid.ep == state.grid.tp == 1:
        return None
    gather = state.with_own_group(state.edp, "gathers") if zero.stage == 3 and state.device.type == "cuda" else None
    return Placement(state.edp, Axis("replica", (state.rank,), traffic=state.traffic), gather)


def _levels(state: ParallelState) -> tuple[Axis, Axis] | None:
    """Return `shard` within a host and between hosts if several hosts have equally many of its ranks, otherwise None."""
    hosts = hosts_of([str(rank // state.local_world_size) for rank in state.shard.ranks], state.shard.index)
    size = hosts.size if hosts is not None and hosts.count > 1 else 1
    if set(gather_objects(size, state.world)) != {size} or size == 1:
        return None
    return state.cut(state.shard, size, "host", "hosts", "reductions")
