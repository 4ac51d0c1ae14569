"""One training step of a GPT on one rank, on one page: see `StepEngine.train_step`.

micro-batches -> executor(schedule, stages)   forward and backward; each complete bucket of gradients is reduced
              -> one all-reduce               over the world: (squared norm, loss, tokens, z-loss, stop)
                 -> not finite, no loss scale:     no update; NonFiniteError, or `StepStatistics.finite` is False
                 -> overflow under a loss scale:   no update, a smaller scale
              -> clip, sharded optimizer      the weights are gathered behind the next forward (zero/weight_gathers.py)

Every rank takes the same branch, because every rank decides by the same reduced numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, nan

import torch
from torch import Tensor, nn

from megazero.comm.collectives import Pending, all_reduce, numbers_of
from megazero.config import RunConfig
from megazero.engine import outline
from megazero.engine.micro_batches import check_same_documents, check_shapes
from megazero.engine.stage_runner import ChunkRunner, LossGradient, StageRunner, executors
from megazero.layers.vocabulary import IGNORED_LABEL
from megazero.models.gpt import GPTStage, MicroBatch
from megazero.parallel_state import ParallelState
from megazero.schedules.action import Action, Schedule
from megazero.schedules.executor import Executor, Message
from megazero.schedules.factory import ScheduleFactory
from megazero.zero.sharded_model import ShardedModel


class StepEngine:
    """Runs the steps and evaluations of one rank.  Call every method on every rank, in the same order.

    Attributes:
        offload: stores activations that layers move off the device or into an arena; None if no layer does.
        batch_slice: the slice of each global batch that this rank needs.
        routers: routers of this rank; None if the model has no experts.
        on_action: called before and after every computed action, for traces.
        wants_stop: called at the end of every step and evaluation; see `StepStatistics.stop`.
    """

    def __init__(self, config: RunConfig, state: ParallelState, factory: ScheduleFactory) -> None:
        self.config, self.state = config, state
        chunks = factory.chunks_of(config.parallel.virtual_stages)
        placement = factory.placement(state.pp.size, chunks)
        built = outline.build_stages(config, state, placement)
        self._stages, self._wgrad_queues, self.offload = built.stages, built.wgrad_queues, built.offload
        self._chunks = nn.ModuleList(self._stages)
        self._heads, self._has_head = built.heads, any(stage.head is not None for stage in built.stages)
        self.qk_clip = outline.qk_clip_of(config, state, built.stages)
        paired = outline.paired_runner_of(config, state, factory) if built.offload is None else None
        self.sharded_model = outline.shard(config, state, built, placement, beside=paired is not None)
        self.dtype = self.sharded_model.policy.dtype
        self.routers = outline.routers_of(config, state, built.stages)
        self.batch_slice = outline.batch_slice_of(config, state, built.stages)
        self.on_action: Callable[[Action], None] = lambda _: None
        self.wants_stop: Callable[[], bool] = lambda: False
        self._executor = executors(factory, chunks, state, self._new_activation, lambda action: self.on_action(action))  # noqa: PLW0108  it may change
        self._new_runner = paired or partial(StageRunner, offload=built.offload)
        self._grad_norm = 0.0  # norm of the gradients in the buckets
        self._documents_are_compared = not config.data.document_mask

    @property
    def chunks(self) -> nn.ModuleList:
        """This rank's part of the model, after a wait for the gathers of the last step's weights.

        Access it again after every step: with a reference from before the step, weights may still be arriving.
        """
        self.sharded_model.parameters.gathers.wait()
        return self._chunks

    def train_step(
        self, batches: Sequence[MicroBatch], lr: float | None, *, raises_non_finite: bool = True
    ) -> StepStatistics:
        """Run one optimizer step on this rank's micro-batches.

        Args:
            batches: this dp rank's slice of the global batch, as micro-batches of equal size.
            lr: learning rate of this step; None: stop before the update (see `update`).
            raises_non_finite: False: if loss or norm is not finite, skip the update and return.

        Raises:
            NonFiniteError: loss or norm is not finite; on every rank, before any weight has changed.  Under fp16 such a
                step is skipped instead.
            RuntimeError: gradients are disabled.
            LossScaleError: an overflow at the smallest loss scale.
            LostPeerError: a rank has died.
        """
        model = self.sharded_model
        self._begin_step(batches)
        # Forward and backward; complete buckets are reduced meanwhile.
        loss_sum, tokens = self._run(batches, trains=True)
        model.finish_gradients()  # the last reductions; sums over tp and over copies of tied weights
        z_sum = sum((head.z_sum for head in self._heads), 0.0)
        statistics = sum_over_ranks(model, model.square_sum(), loss_sum, tokens, z_sum, stop=self.wants_stop())
        if raises_non_finite:
            check_finite(statistics)
        self._grad_norm = statistics.grad_norm
        if lr is None:
            return statistics
        updated = statistics.finite and self.update(lr)  # clip, step, start of the weights' all-gather
        return replace(statistics, skipped=not updated)

    def compute_gradients(self, batches: Sequence[MicroBatch]) -> StepStatistics:
        """Run a `train_step` without the update.  Each rank's buckets then hold its shard of the global batch's mean
        gradient.
        """
        return self.train_step(batches, None)

    def update(self, lr: float) -> bool:
        """Clip by the norm of the computed gradients and update the weights.  Returns False after an overflow under
        fp16.

        Gathers of weights, and reductions of gradients at stage 0, may run until the next forward; `chunks` waits for
        them.
        """
        for group in self.sharded_model.optimizer.torch_optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        if self.qk_clip is not None:
            self.sharded_model.optimizer.row_factors = self.qk_clip.row_factors()
        updated = self.sharded_model.update(self._grad_norm, self.config.optimizer.grad_clip)
        if updated and self.routers is not None:
            self.routers.update_biases()
        return updated

    def evaluate(self, batches: Sequence[MicroBatch]) -> StepStatistics:
        """Evaluate micro-batches, without gradients or dropout.  The loss is the mean over the counted tokens of all
        ranks, nan if there are none.

        The statistics also report a `stop`, since an evaluation may take long.

        Raises:
            NonFiniteError: the loss is not finite.
        """
        self._chunks.eval()
        with torch.no_grad():
            loss_sum, tokens = self._run(batches, trains=False)
        statistics = sum_over_ranks(
            self.sharded_model, torch.zeros_like(loss_sum), loss_sum, tokens, stop=self.wants_stop()
        )
        # In an evaluation, the loss scale does not handle a loss that is not finite.
        return check_finite(replace(statistics, finite=isfinite(statistics.loss))) if statistics.tokens else statistics

    def _begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """Discard the gradients of the last step, even if it failed."""
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "a training step within torch.no_grad or inference_mode has no gradients; use evaluate there"
            )
        if not self._chunks.training:  # because it walks all modules
            self._chunks.train()
        self.sharded_model.begin_step(len(batches))
        if self.offload is not None:
            self.offload.begin_step()  # before any message of the step, since it may wait for the device
        for head in self._heads:
            head.z_sum = 0.0
        for queue in self._wgrad_queues:
            queue.clear()
        if self.routers is not None:
            self.routers.begin_step()
        if self.qk_clip is not None:
            self.qk_clip.begin_step()

    def _run(self, batches: Sequence[MicroBatch], *, trains: bool) -> tuple[Tensor, Tensor]:
        """Run the schedule.  Returns this rank's sum of losses and its counted tokens, fp64; 0 unless it has the last
        stage.
        """
        model, executor = self.sharded_model, self._executor_of(batches, trains=trains)
        if not self._documents_are_compared:
            check_same_documents(batches, self.state)
            self._documents_are_compared = True
        model.parameters.gathers.check()
        tokens = torch.zeros((), dtype=torch.float64, device=self.state.device)
        for batch in batches:
            if self.batch_slice.labels and batch.labels is not None:
                tokens += (batch.labels != IGNORED_LABEL).sum()
        # The global count arrives during the first forwards.  They wait for weights anyway, and it is queued behind those.
        global_tokens = tokens.clone()
        counting = all_reduce(global_tokens, self.state.dp_cp) if self.batch_slice.labels else Pending()

        def loss_gradient() -> Tensor:
            """Return scale / tokens of the global batch, fp32, which turns the gradient of a sum into that of the
            global mean.
            """
            counting.wait()
            return global_tokens.clamp(min=1).reciprocal().float() * model.scale

        runner = self._runner(batches, executor.schedule, loss_gradient if trains else None)
        executor.run(runner)
        counting.wait()
        return runner.loss_sum, tokens * self._has_head

    def _runner(self, batches: Sequence[MicroBatch], schedule: Schedule, gradient: LossGradient | None) -> StageRunner:
        for queue in self._wgrad_queues:
            queue.defers = schedule.splits_backward
        if self.routers is not None and gradient is not None:
            self.routers.set_grad_scale(gradient)
        for head in self._heads:
            head.saves_logits = schedule.waiting_losses <= 1
        chunks = [
            ChunkRunner(partial(_forward, stage, batches), stage.head is not None, queue)
            for stage, queue in zip(self._stages, self._wgrad_queues, strict=True)
        ]
        return self._new_runner(chunks, self.sharded_model, gradient)

    def _executor_of(self, batches: Sequence[MicroBatch], *, trains: bool) -> Executor:
        samples = check_shapes(batches, self.config.model.seq_len // self.state.cp.size)
        return self._executor(len(batches), samples, trains)

    def _new_activation(self, samples: int, _: Action | None) -> Message:
        """Allocate the activation that stages exchange: [seq / cp (/ tp if sequence-parallel), micro-batch, hidden]."""
        model, seq = self.config.model, self.config.model.seq_len // self.state.cp.size
        seq //= self.state.tp.size if self.config.parallel.sequence_parallel else 1
        return (torch.empty(seq, samples, model.hidden_size, dtype=self.dtype, device=self.state.device),)


def _forward(stage: GPTStage, batches: Sequence[MicroBatch], microbatch: int, x: Message | None) -> Message:
    return (stage(None if x is None else x[0], batches[microbatch]),)


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is not finite, or there is no loss.  No weight has changed."""


@dataclass(frozen=True)
class StepStatistics:
    """Results of a step over the whole global batch.

    Args:
        loss: mean nats per counted token, nan if none is counted; for a script's own module, its mean loss.
        grad_norm: global L2 norm before clipping; 0 in evaluation, not finite after an overflow under fp16.
        tokens: counted (unmasked) tokens; for a script's own module, the number of losses.
        loss_scale: factor on the loss, under fp16.
        skipped: the weights did not change, because of an overflow or a number that is not finite.
        finite: there is a loss, and loss and norm are finite.  Under fp16 it is True whenever there is a loss, since
            the loss scale handles overflows.
        stop: a rank wants the run to end after this step; the same on all ranks.
        z_loss: mean z-loss over counted tokens, times its coefficient; not part of `loss`.
    """

    loss: float
    grad_norm: float
    tokens: int
    loss_scale: float = 1.0
    skipped: bool = False
    finite: bool = True
    stop: bool = False
    z_loss: float = 0.0

    @property
    def problem(self) -> str:
        """A sentence that explains why the step is not finite."""
        if not self.tokens:
            return (
                "no token is counted, so there is no loss (with data.document_mask a document of one token has none); the "
                "weights were not changed. "
            )
        return f"loss={self.loss} and grad_norm={self.grad_norm} must be finite; the weights were not changed. "


def sum_over_ranks(
    model: ShardedModel,
    square_sum: Tensor,
    loss_sum: Tensor,
    count: Tensor,
    z_sum: float | Tensor = 0.0,
    *,
    stop: bool = False,
) -> StepStatistics:
    """Run the one collective at the end of a step.

    Args:
        square_sum: this rank's part of the squared norm of the scaled gradients, fp64 scalar.
        loss_sum: sum of this rank's losses, fp64 scalar; 0 if another stage computes the loss.
        count: this rank's counted tokens, fp64 scalar.
        z_sum: sum of this rank's z-losses; 0 if there are none.
        stop: this rank wants the run to end.
    """
    total = torch.stack([square_sum, loss_sum, count, z_sum + torch.zeros_like(count), torch.full_like(count, stop)])
    if model.state.at.tp:  # all tp ranks have the same losses and tokens, so only the first one counts
        total[1:4].zero_()
    all_reduce(total, model.state.world).wait()
    squared, loss, tokens, z_sum, stops = numbers_of(total, model.state.world)
    loss, norm = loss / tokens if tokens else nan, model.norm_of(squared)
    finite = tokens > 0 and (model.scaler is not None or (isfinite(loss) and isfinite(norm)))
    return StepStatistics(
        loss, norm, int(tokens), model.scale, finite=finite, stop=stops > 0, z_loss=z_sum / max(tokens, 1)
    )


def check_finite(statistics: StepStatistics) -> StepStatistics:
    """Return the statistics unchanged.  Raises: NonFiniteError, they are not finite."""
    if not statistics.finite:
        raise NonFiniteError(
            f"{statistics.problem}Resume from the last checkpoint with "
            f"{'a lower learning rate or ' if statistics.tokens else ''}other data"
        )
    return statistics
