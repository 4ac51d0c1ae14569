"""A model's parameters, gradients and optimizer under ZeRO, and the order in which a step ends.

begin_step -> backward passes, gradients reduced as they become ready -> finish_gradients
           -> square_sum (each rank's contribution; the engine sums it over the world together with other values)
           -> update: overflow? skip : unscale, clip, update each bucket and start to gather its weights -> adapt the
           loss scale
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from megazero.comm.collectives import gather_objects
from megazero.comm.messages import LostPeerError
from megazero.parallel_state import ParallelState
from megazero.zero.bucket_plan import ShardingPlan, plan_sharding
from megazero.zero.gather import UnitGatherer
from megazero.zero.gradients import Accumulation, GradientReducer
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.parameters import ShardedParameters
from megazero.zero.reduction_plan import plan_last_sums, plan_square_sum
from megazero.zero.reductions import square_sum
from megazero.zero.sharding import ShardingSettings
from megazero.zero.state import ShardedState
from megazero.zero.stepper import Stepper
from megazero.zero.units import RankModel
from megazero.zero.weight_gathers import HalfSteppedError

if TYPE_CHECKING:
    from megazero.zero.average import WeightAverage
    from megazero.zero.loss_scaler import LossScaler


class ShardedModel:
    """One rank's shards of a model, with their gradients and optimizer.

    Attributes:
        scale: factor on the losses of this step.
        average: of the weights; None where the run keeps none.
        gatherer_type: class that gathers the units of stage 3.
        reducer_type: class that reduces gradients.

    Raises:
        ValueError, StorageError: on every rank: the configuration does not fit this machine.
    """

    gatherer_type: ClassVar[type[UnitGatherer]] = UnitGatherer
    reducer_type: ClassVar[type[GradientReducer]] = GradientReducer

    def __init__(self, model: RankModel, state: ParallelState, settings: ShardingSettings) -> None:
        self.state, self.ties, factory = state, model.ties, settings.factory
        plan = self.plan(model, settings)
        self.policy, self.parameters = plan.policy, ShardedParameters(model, plan, state, self.gatherer_type)
        buckets, memory = self.parameters.buckets, self.parameters.memory
        accumulation, bucket_bytes = Accumulation(settings.zero.reduce), plan.sizes.bucket_bytes
        self.reducer = self.reducer_type(self.policy, buckets, accumulation, bucket_bytes)
        self.reducer.attach(self.parameters.by_name, model.wgrad_queues)
        self._last_sums = plan_last_sums(self.reducer.buckets, state.tp, model.ties, self.policy.device)
        self._counted = plan_square_sum(self.reducer.buckets, state.tp)
        self.optimizer, matrices = ShardedOptimizer(buckets, factory, memory), None
        if factory.matrices is not None:
            from megazero.zero.matrices import matrix_stepper  # which other runs do not load

            matrices = matrix_stepper(self.policy, buckets, factory.matrices, state)
        self.stepper = Stepper(self.optimizer, matrices)
        self.average: WeightAverage | None = None
        if settings.averages:
            from megazero.zero.average import WeightAverage  # which other runs do not load

            self.average = WeightAverage(buckets, memory)
        self.sharded_state = ShardedState(self.parameters, self.optimizer, self.average)
        self.scaler: LossScaler | None = None
        if settings.precision.dtype == "fp16":
            from megazero.zero.loss_scaler import LossScaler  # bf16 and fp32 need none

            self.scaler = LossScaler(settings.precision)
        self.scale = 1.0
        self.begin_step(1)

    def plan(self, model: RankModel, settings: ShardingSettings) -> ShardingPlan:
        """Plan the buckets of the model.  A collective call."""
        return plan_sharding(model, self.state, settings)

    @property
    def skipped_steps(self) -> int:
        """Number of updates skipped because of an overflow."""
        return 0 if self.scaler is None else self.scaler.skipped_steps

    def begin_step(self, micro_batches: int) -> None:
        """Discard the last step's gradients, and expect one gradient of every parameter per micro-batch."""
        # Both counts include the steps before a resume.
        self.reducer.begin_step(micro_batches, self.optimizer.steps_taken + self.skipped_steps)
        if self.parameters.gatherer is not None:
            self.parameters.gatherer.begin_step()
        self.scale = 1.0 if self.scaler is None else self.scaler.scale

    def finish_gradients(self) -> None:
        """Finish all reductions.

        Afterwards `bucket.gradient` holds the gradients of the bucket's owned elements for this step, times `scale`.
        """
        self.reducer.finish()
        for add_up in self._last_sums:
            add_up()

    def square_sum(self) -> Tensor:
        """Return this rank's contribution to the squared norm of gradients times `scale`, an fp64 scalar."""
        gradients = [bucket.owned_slice(bucket.gradient, interval) for bucket, interval in self._counted]
        return square_sum(gradients, self.policy.device)

    def norm_of(self, square_sum: float) -> float:
        """Return the gradient norm from the squared norm of scaled gradients over all ranks.  Not finite after an
        overflow.
        """
        return sqrt(square_sum) / self.scale if isfinite(square_sum) else square_sum

    def update(self, norm: float, max_norm: float) -> bool:
        """Unscale, clip to `max_norm` unless it is 0, update the weights and gather them.  Returns False if `norm` is
        not finite.

        With `hides_gathers`, gathers are still running afterwards: see `WeightGathers`.

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
            parameters.gathers.invalidate(trained)
            with parameters.gathers.changing():
                if parameters.hides_gathers:
                    self.stepper.step(clip / self.scale, parameters.gathers.start_behind_forward)
                else:
                    self.stepper.step(clip / self.scale)
                    parameters.gathers.gather(trained)
        if self.scaler is not None:
            self.scaler.update(overflowed)
        return not overflowed

    def load(self, read: Callable[[], object], loss_scaler: dict[str, Any] | None) -> None:
        """Continue from a checkpoint: read the state, then update the modules' weights from the master weights.

        After any error the weights cannot be read until another checkpoint is loaded: some of them are the old ones.

        Args:
            read: writes the checkpoint into the state.
            loss_scaler: a scaler's `state_dict`, or None.
        """
        with self.parameters.gathers.renewing():
            self.parameters.gathers.invalidate(self.parameters.buckets)
            read()
            if self.scaler is not None and loss_scaler is not None:
                self.scaler.load_state_dict(loss_scaler)
            self.parameters.sync_from_master()
            self.begin_step(1)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model has its averaged weights; afterwards it has its own again, bit for bit."""
        assert self.average is not None
        self.parameters.gathers.wait()  # refuses a half-finished update, which `load` would not
        self.load(self.average.swap, None)
        try:
            yield
        finally:
            self.load(self.average.swap, None)

    def optimizer_scalars(self) -> dict[str, dict[str, float]]:
        """Return the optimizer's scalar state for each group, merged from all ranks.  A collective call."""
        self.parameters.gathers.check()
        merged: dict[str, dict[str, float]] = {}
        for scalars in gather_objects(self.optimizer.scalars(), self.state.world):
            merged |= scalars
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
            "gradient_buffers": self.reducer.reductions.buffer_bytes,
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
        self.parameters.memory.close()
