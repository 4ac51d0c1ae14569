"""One training step: model, schedule, ZeRO and precision bound together on one rank.

micro-batches -> executor(schedule, stage) -> gradients reduced as they become ready
              -> one collective: squared norm, loss, tokens -> clip -> sharded AdamW -> weights published
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite

import torch
from torch import Tensor, nn

from megazero.checkpoint.folder import Place, folder_at
from megazero.checkpoint.index import HF_CONFIG, CheckpointError, TrainerState, to_json, versions
from megazero.checkpoint.load import fills_weights, load_checkpoint
from megazero.checkpoint.save import save_checkpoint
from megazero.checkpoint.saver import Saver
from megazero.comm.collectives import Pending, agree, all_reduce, gather_objects, numbers_of
from megazero.config import RunConfig
from megazero.engine.stage_runner import ChunkRunner, StageRunner
from megazero.layers.cross_entropy import IGNORED_LABEL
from megazero.layers.linear import WeightGradQueue
from megazero.models.compiled import compile_blocks, wants_compiling
from megazero.models.gpt import BuildContext, GPTStage, MicroBatch
from megazero.models.registry import FAMILIES
from megazero.models.stages import cut
from megazero.optim.config import OptimizerConfig
from megazero.optim.registry import OPTIMIZERS
from megazero.parallel_state import Axis, ParallelState
from megazero.schedules.action import Action, Placement, Schedule
from megazero.schedules.executor import Executor, Message
from megazero.schedules.kind import GivenSchedule, ScheduleKind, forward_only
from megazero.schedules.proof import Timeline
from megazero.schedules.registry import SCHEDULES
from megazero.zero.optimizer import OptimizerRecipe, recipe_by_name
from megazero.zero.sharded_model import ShardedModel
from megazero.zero.units import describe, units_of


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is not a number; nothing was stepped."""


@dataclass(frozen=True)
class StepStatistics:
    """What a step measured over the whole global batch.

    Args:
        loss: mean nats per counted token.
        grad_norm: global L2 norm before clipping; 0 in evaluation, not finite after an overflow under fp16.
        tokens: counted (unmasked) tokens.
        loss_scale: what the loss was multiplied by, under fp16.
        skipped: an overflow left the weights as they were.
        finite: loss and norm are numbers; also after an overflow under fp16, which the loss scale takes care of.
        stop: a rank wants the run to end after this step; the same on all ranks.
    """

    loss: float
    grad_norm: float
    tokens: int
    loss_scale: float = 1.0
    skipped: bool = False
    finite: bool = True
    stop: bool = False


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Args:
        step: optimizer steps done.
        samples: samples consumed; the next sample's global index.
        tokens: counted tokens consumed.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class BatchShare:
    """What a rank needs of each global batch.

    Args:
        dp: its place among those that share the batch.
        device: where it computes.
        tokens: whether it embeds them.
        labels: whether it computes the loss.
    """

    dp: Axis
    device: torch.device
    tokens: bool
    labels: bool


class _TokenCount:
    """Counted tokens of this rank's micro-batches, and of the whole global batch.

    The global count arrives while the first forwards run.
    """

    def __init__(self, batches: Sequence[MicroBatch], has_head: bool, dp: Axis, device: torch.device) -> None:
        self.mine = torch.zeros((), dtype=torch.float64, device=device)
        self._everyone, self._counting = self.mine, Pending()
        if has_head:
            for batch in batches:
                if batch.labels is not None:
                    self.mine += (batch.labels != IGNORED_LABEL).sum()
            self._everyone = self.mine.clone()
            self._counting = all_reduce(self._everyone, dp)

    def reciprocal(self) -> Tensor:
        """1 / tokens of the global batch, fp32: what makes the gradient of a sum that of the global mean."""
        self._counting.wait()
        return self._everyone.clamp(min=1).reciprocal().float()

    def finish(self) -> None:
        """Leave no collective behind."""
        self._counting.wait()


class Engine:
    """One rank of a training run.

    Args:
        chunks: this rank's part of the model; parameters may be on the meta device.
        wgrad_queues: per chunk, takes its weight gradients to the buckets, and keeps them where the
            schedule splits backwards.
        schedule_kind: the pipeline schedule.
        placement: which pipeline rank holds each stage.
        config: the resolved run.
        state: the rank's place and groups.

    Every method is called on every rank, in the same order.
    """

    def __init__(
        self,
        chunks: Sequence[GPTStage],
        wgrad_queues: Sequence[WeightGradQueue],
        schedule_kind: ScheduleKind,
        placement: Placement,
        config: RunConfig,
        state: ParallelState,
    ) -> None:
        self.chunks, self.config, self.state = nn.ModuleList(chunks), config, state
        described = [replace(one, group=0 if one.spec.decay else 1) for one in describe(self.chunks)]
        queue_of = {
            f"{index}.{name}": queue for index, queue in enumerate(wgrad_queues) for name in _names(chunks[index])
        }
        ties = {}
        if placement[0][0] != placement[-1][0]:
            ties = {one.spec.sections[0].name: state.embedding for one in described if one.spec.tied}
        self.sharded_model = ShardedModel(
            units_of(list(chunks)),
            described,
            state,
            config.zero,
            config.precision,
            _optimizer_of(config.optimizer),
            ties=ties,
            wgrad_queues=queue_of,
        )
        self.dtype = self.sharded_model.policy.dtype
        self.share = BatchShare(
            state.dp,
            state.device,
            tokens=any(chunk.embedding is not None for chunk in chunks),
            labels=any(chunk.head is not None for chunk in chunks),
        )
        self._stages, self._wgrad_queues = list(chunks), wgrad_queues
        self._schedule_kind, self._chunks_per_rank = schedule_kind, len(placement) // state.pp.size
        self.watch: Callable[[Action], None] | None = None  # called before and after every computed action
        self.wants_stop: Callable[[], bool] = lambda: False  # asked at the end of every step; see `StepStatistics.stop`
        self._executors: dict[tuple[bool, int, int], Executor] = {}
        self._grad_norm = 0.0

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> StepStatistics:
        """One optimizer step on this rank's micro-batches.

        Args:
            batches: this dp rank's share of the global batch, as micro-batches of equal size.
            lr: learning rate of this step.

        Raises:
            NonFiniteError: on every rank, before any weight has changed; under fp16 such a step is skipped instead.
            LossScaleError: an overflow at the smallest loss scale.
            LostPeerError: a rank is gone.
        """
        statistics = self.try_step(batches, lr)
        _check_finite(statistics)
        return statistics

    def try_step(self, batches: Sequence[MicroBatch], lr: float) -> StepStatistics:
        """A `train_step` that leaves the update out where loss or norm is not finite, and says so in its statistics."""
        statistics = self._compute_gradients(batches)
        return replace(statistics, skipped=not (statistics.finite and self.update(lr)))

    def compute_gradients(self, batches: Sequence[MicroBatch]) -> StepStatistics:
        """Forward and backward of all micro-batches; afterwards every bucket holds the global batch's mean gradient.

        Args:
            batches: this dp rank's share of the global batch, as micro-batches of equal size.

        Raises: as `train_step`.
        """
        statistics = self._compute_gradients(batches)
        _check_finite(statistics)
        return statistics

    def _compute_gradients(self, batches: Sequence[MicroBatch]) -> StepStatistics:
        if not self.chunks.training:  # it walks all modules
            self.chunks.train()
        self.sharded_model.begin_step(len(batches))
        for queue in self._wgrad_queues:
            queue.clear()
        loss_sum, tokens = self._run(batches, trains=True)
        self.sharded_model.finish_gradients()
        statistics = self._agree(loss_sum, tokens, self.sharded_model.square_sum())
        self._grad_norm = statistics.grad_norm
        return statistics

    def traced_step(self, batches: Sequence[MicroBatch], lr: float) -> tuple[StepStatistics, Timeline]:
        """A `try_step` that measures when each action ran, on the pipeline of this rank.

        Returns: the statistics, and the timeline in seconds from the moment at which all its ranks were ready.
        """
        marks: list[tuple[Action, float]] = []

        def note(action: Action) -> None:
            if self.state.device.type == "cuda":
                torch.cuda.synchronize(self.state.device)  # this one step gives its overlap away to be measured
            marks.append((action, time.perf_counter()))

        self.watch = note
        try:
            gather_objects(None, self.state.pp)  # clocks of different machines are compared from here on
            start = time.perf_counter()
            statistics = self.try_step(batches, lr)
        finally:
            self.watch = None
        mine = [
            (action, begin - start, end - start)
            for (action, begin), (_, end) in zip(marks[::2], marks[1::2], strict=True)
        ]
        spans = {
            (rank, action): (begin, end)
            for rank, actions in enumerate(gather_objects(mine, self.state.pp))
            for action, begin, end in actions
        }
        return statistics, Timeline(self._executor(batches, trains=True).schedule, spans)

    def update(self, lr: float) -> bool:
        """Clip by the last computed norm, step the optimizer, publish the weights.

        Returns: False where an overflow under fp16 left the weights as they were.
        """
        for group in self.sharded_model.optimizer.torch_optimizer.param_groups:
            group["lr"] = lr
        return self.sharded_model.update(self._grad_norm, self.config.optimizer.grad_clip)

    def evaluate(self, batches: Sequence[MicroBatch]) -> StepStatistics:
        """Mean loss of micro-batches over all ranks, without gradients and without dropout.  Raises: NonFiniteError."""
        self.chunks.eval()
        with torch.no_grad():
            loss_sum, tokens = self._run(batches, trains=False)
        statistics = self._agree(loss_sum, tokens, torch.zeros((), dtype=torch.float64, device=self.state.device))
        _check_finite(replace(statistics, finite=isfinite(statistics.loss)))  # no loss scale takes care of this one
        return statistics

    def _check_weights(self) -> None:
        """Make sure that every weight is a number.  Raises: NonFiniteError."""
        wrong = torch.zeros((), device=self.state.device)
        for bucket in self.sharded_model.parameters.buckets:
            values = bucket.read(bucket.master, bucket.owned)
            if values.numel():  # one pass; isfinite() makes a tensor as long as the weights and takes 60 times as long
                wrong += torch.isfinite(torch.stack(torch.aminmax(values))).all().logical_not().to(wrong.device)
        all_reduce(wrong, self.state.world).wait()
        if wrong.item():
            raise NonFiniteError(
                f"weights in {int(wrong.item())} buckets are not finite after the last update; they were not saved. "
                "Resume from the last checkpoint with a lower learning rate or other data"
            )

    def save(
        self,
        place: Place,
        position: Position,
        data_fingerprint: str,
        *,
        val_loss: float | None = None,
        saver: Saver | None = None,
    ) -> None:
        """Write the whole state into a new step directory.

        Args:
            place: the step directory, which all ranks share: a path or a URL.
            position: how far the run has come.
            data_fingerprint: of the data that the samples came from.
            val_loss: of this very step, where it was evaluated.
            saver: writes behind the training; None to wait until everything is durable.

        Raises:
            NonFiniteError: a weight is not a number; nothing was written.
            CheckpointError: see `save_checkpoint`.
        """
        self._check_weights()
        grid, config = self.state.grid, self.config
        trainer = TrainerState(
            step=position.step,
            consumed_samples=position.samples,
            consumed_tokens=position.tokens,
            optimizer_steps=self.sharded_model.optimizer.steps_taken,
            data_fingerprint=data_fingerprint,
            model=config.model.model_dump(),
            config=config.model_dump(mode="json"),
            shape={"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp, "zero_stage": config.zero.stage},
            versions=versions(),
            optimizer_scalars=self.sharded_model.optimizer_scalars(),
            loss_scaler=None if self.sharded_model.scaler is None else self.sharded_model.scaler.state_dict(),
            val_loss=val_loss,
        )
        files = {
            HF_CONFIG: to_json(FAMILIES[config.model.family].hugging_face_config(config.model, config.precision.dtype))
        }
        if saver is None:
            save_checkpoint(place, self.sharded_model.sharded_state, self.state, trainer, files)
        else:
            saver.save(folder_at(place), trainer, files)

    def load(self, place: Place, data_fingerprint: str) -> Position:
        """Take over the state that a run of any shape saved, and say how far it had come.

        Args:
            place: a complete step directory.
            data_fingerprint: of the data that the samples will come from.

        Raises:
            DamagedError: on every rank, and nothing has changed: a file is not what was written.
            CheckpointError: on every rank, and nothing has changed: it is of another model or other data.
        """
        trainer = load_checkpoint(
            place,
            self.sharded_model.sharded_state,
            self.state,
            check=partial(_check_origin, place, self.config, data_fingerprint),
            by_hash=self.config.checkpoint.verify == "hash",
        )
        self.sharded_model.loaded(trainer.loss_scaler, gathers=not fills_weights(place, self.state))
        return Position(trainer.step, trainer.consumed_samples, trainer.consumed_tokens)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of model state on this rank and of ZeRO's working buffers, by kind; what is off the device says where."""
        return self.sharded_model.memory_bytes()

    def _agree(self, loss_sum: Tensor, tokens: Tensor, square_sum: Tensor) -> StepStatistics:
        """The one collective at the end of a step: every rank learns norm, loss, tokens and whether one wants to stop."""
        counts = self.share.labels and self.state.at.tp == 0
        share = torch.stack([square_sum, loss_sum, tokens, torch.full_like(tokens, self.wants_stop())])
        if not counts:
            share[1:3].zero_()
        all_reduce(share, self.state.world).wait()
        squared, loss_sum_, tokens_, stops = numbers_of(share, self.state.world)
        if tokens_ == 0:
            raise ValueError("every token of the global batch is masked: there is no loss to compute")
        norm = self.sharded_model.norm_of(squared)
        return StepStatistics(
            loss_sum_ / tokens_,
            norm,
            int(tokens_),
            loss_scale=self.sharded_model.scale,
            finite=self.sharded_model.scaler is not None or (isfinite(loss_sum_) and isfinite(norm)),
            stop=stops > 0,
        )

    def _run(self, batches: Sequence[MicroBatch], *, trains: bool) -> tuple[Tensor, Tensor]:
        """Run the schedule; this rank's sums of losses and of counted tokens."""
        count = _TokenCount(batches, self.share.labels, self.state.dp, self.state.device)
        chunks = [
            ChunkRunner(partial(_forward, stage, batches), stage.head is not None, wgrad_queue)
            for stage, wgrad_queue in zip(self._stages, self._wgrad_queues, strict=True)
        ]
        runner = StageRunner(
            chunks,
            self.sharded_model,
            trains=trains,
            loss_gradient=lambda: count.reciprocal() * self.sharded_model.scale,
        )
        self._executor(batches, trains=trains).run(runner)
        count.finish()
        return runner.loss_sum, count.mine

    def _executor(self, batches: Sequence[MicroBatch], *, trains: bool) -> Executor:
        """The executor of the run's schedule for these micro-batches, made and proved once."""
        sizes = {batch.sample_ids.numel() for batch in batches}
        if len(sizes) != 1:
            raise ValueError(f"micro-batches of a step must have one size; these have {sorted(sizes)} samples")
        samples = sizes.pop()
        key = (trains, len(batches), samples)
        if key not in self._executors:
            schedule = self._schedule_kind.build(self.state.pp.size, len(batches), self._chunks_per_rank)
            for wgrad_queue in self._wgrad_queues:
                wgrad_queue.defers = schedule.splits_backward
            self._executors[key] = Executor(
                schedule if trains else forward_only(schedule),
                self.state.pp,
                self.state.pp_up,
                lambda _: (self._new_activation(samples),),
                self._on_action,
            )
        return self._executors[key]

    def _on_action(self, action: Action) -> None:
        if self.watch is not None:
            self.watch(action)

    def _new_activation(self, samples: int) -> Tensor:
        """What passes between stages: [seq or seq / tp, micro-batch, hidden]."""
        model = self.config.model
        seq = model.seq_len // (self.state.tp.size if self.config.parallel.sequence_parallel else 1)
        return torch.empty(seq, samples, model.hidden_size, dtype=self.dtype, device=self.state.device)


def _check_finite(statistics: StepStatistics) -> None:
    if not statistics.finite:
        raise NonFiniteError(
            f"loss={statistics.loss} and grad_norm={statistics.grad_norm} must be finite; the weights were not changed. "
            "Resume from the last checkpoint with a lower learning rate or other data"
        )


def _forward(stage: GPTStage, batches: Sequence[MicroBatch], microbatch: int, x: Message | None) -> Message:
    return (stage(None if x is None else x[0], batches[microbatch]),)


def _optimizer_of(config: OptimizerConfig) -> OptimizerRecipe:
    """The configured optimizer, with a group that decays and one that does not."""
    groups = [{"weight_decay": config.weight_decay}, {"weight_decay": 0.0}]
    return recipe_by_name(config.name, OPTIMIZERS[config.name].settings(config), groups)


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


_FREE_TO_CHANGE = {"dropout", "init_std"}  # model keys that a resumed run may set anew


def _check_origin(origin: Place, config: RunConfig, data_fingerprint: str, trainer: TrainerState) -> None:
    """Make sure that a checkpoint is of this model and this data, before anything is loaded."""
    wanted = config.model.model_dump()
    changed = [
        f"model.{key} is {wanted[key]!r}, the checkpoint has {trainer.model.get(key)!r}"
        for key in wanted
        if key not in _FREE_TO_CHANGE and trainer.model.get(key) != wanted[key]
    ]
    if changed:
        raise CheckpointError(f"{origin} is of another model: " + "; ".join(changed))
    if trainer.data_fingerprint not in ("", data_fingerprint):  # "" where no data has been read yet: it was imported
        raise CheckpointError(
            f"{origin} was trained on other data (fingerprint {trainer.data_fingerprint}, now {data_fingerprint}): "
            "the sources, their weights, data.tokenizer, data.validation_fraction, model.seq_len and training.seed "
            "must be those of the run"
        )


def initialize(
    config: RunConfig, state: ParallelState, *, init_weights: bool = True, schedule: Schedule | None = None
) -> Engine:
    """Build this rank's part of the model and bind it to its schedule, its ZeRO stage and its precision.

    Args:
        config: a resolved run.
        state: the rank's place and groups.
        init_weights: give the parameters their initial values; False where a checkpoint follows at once.
        schedule: the user's own, instead of what `parallel.schedule` names; proved before the first step like any other.

    Raises:
        ScheduleError, ValueError: the schedule cannot run, or not with these numbers.
    """
    kind = SCHEDULES[config.parallel.schedule] if schedule is None else GivenSchedule(schedule)
    placement = kind.placement(state.pp.size, kind.chunks or config.parallel.virtual_stages)
    layouts = cut(config.model, config.parallel.layout, len(placement))
    chunks, wgrad_queues = [], []
    for layout, (rank, _) in zip(layouts, placement, strict=True):  # a rank's chunks come in order
        if rank != state.at.pp:
            continue
        wgrad_queue = WeightGradQueue()
        context = BuildContext(
            config.model,
            state.tp,
            config.parallel.sequence_parallel,
            config.training.seed,
            state.device,
            wgrad_queue,
        )
        with torch.device("meta"):  # no rank ever holds more of the model than its shards and its working buffers
            chunks.append(GPTStage(context, layout))
        wgrad_queues.append(wgrad_queue)
    engine = Engine(chunks, wgrad_queues, kind, placement, config, state)
    weights = engine.sharded_model.parameters.by_name.values()
    if agree(lambda: wants_compiling(config.training.compile, state.device, weights), state.world, ValueError):
        for stage in chunks:
            compile_blocks(stage)
    if init_weights:
        engine.sharded_model.parameters.init_weights(config.training.seed, state.tp)
    return engine
