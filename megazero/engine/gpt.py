"""One training step of a GPT on one rank: model, schedule, ZeRO and precision together.

micro-batches -> executor(schedule, stages)   forward and backward; each complete bucket of gradients is reduced
              -> sum_over_ranks (step.py)     one all-reduce: norm, loss, tokens, stop
              -> clip, sharded optimizer      the weights are gathered behind the next forward (zero/weight_gathers.py)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megazero.checkpoint.folder import Location, folder_at
from megazero.checkpoint.index import HF_CONFIG, to_json
from megazero.checkpoint.load import open_checkpoint
from megazero.checkpoint.save import save_checkpoint
from megazero.checkpoint.saver import Saver
from megazero.comm.agreement import agree
from megazero.comm.collectives import Pending, all_reduce, gather_objects
from megazero.config import RunConfig
from megazero.config.derive import micro_batch_multiple, num_experts
from megazero.engine.outline import RankStages, build_stages, chunks_of, expert_axis, may_compile, optimizer_of
from megazero.engine.phases import Position, check_same_run, position_after, trainer_state
from megazero.engine.stage_runner import ChunkRunner, StageRunner, executors
from megazero.engine.step import (
    BatchShare,
    NonFiniteError,
    StepStatistics,
    check_finite,
    check_same_documents,
    check_shapes,
    sum_over_ranks,
)
from megazero.layers.vocabulary import IGNORED_LABEL, VocabParallelHead
from megazero.models.gpt import GPTStage, MicroBatch
from megazero.models.registry import FAMILIES
from megazero.parallel_state import Axis, ParallelState
from megazero.schedules.action import Action, Placement, Schedule
from megazero.schedules.executor import Executor, Message
from megazero.schedules.kind import GivenSchedule, ScheduleKind
from megazero.schedules.registry import SCHEDULES
from megazero.settings import hide_passwords
from megazero.zero.optimizer import OptimizerRecipe
from megazero.zero.sharded_model import ShardedModel
from megazero.zero.sharding import Placement as ZeroPlacement
from megazero.zero.sharding import ShardingSettings, expert_placement_of
from megazero.zero.units import ModelParam, ModelParts, describe, units_of

if TYPE_CHECKING:
    from megazero.engine.balance import Routers
    from megazero.engine.qk_clip import QKClip


class Engine:
    """One rank of a training run; see `initialize`.  Call every method on every rank, in the same order.

    Attributes:
        offload: stores activations that layers move off the device or into an arena; None if no layer does.
        share: the part of each global batch that this rank needs.
        routers: routers of this rank; None if the model has no experts.
        compiles: whether blocks are compiled.
        on_action: called before and after every computed action, for traces.
        wants_stop: called at the end of every step and evaluation; see `StepStatistics.stop`.
    """

    def __init__(self, config: RunConfig, state: ParallelState, kind: ScheduleKind) -> None:
        self.config, self.state = config, state
        chunks = chunks_of(config, kind)
        placement = kind.placement(state.pp.size, chunks)
        built = build_stages(config, state, placement)
        self._stages, self._wgrad_queues, self.offload = built.stages, built.wgrad_queues, built.offload
        self.qk_clip: QKClip | None = None
        if config.optimizer.qk_clip is not None:
            from megazero.engine.qk_clip import QKClip  # few runs need it

            self.qk_clip = QKClip(self._stages, config.optimizer.qk_clip, state.dp)
        self._chunks = nn.ModuleList(self._stages)
        self._heads = [module for module in self._chunks.modules() if isinstance(module, VocabParallelHead)]
        for head in self._heads:
            head.z_loss_coef = config.training.z_loss_coef
        # An arena returns activations in the order of the actions, so with one the two passes of a pair cannot overlap.
        beside = kind.has_pairs and expert_axis(config, state).size > 1 and self.offload is None
        self._turns: Turns | None = None
        if beside:
            from megazero.engine.turns import Turns

            self._turns = Turns()
            state.traffic.pass_on = self._turns.pass_on
        self.sharded_model = _shard(config, state, built, placement, beside=beside)
        self.dtype = self.sharded_model.policy.dtype
        self.routers: Routers | None = None
        if num_experts(config):
            from megazero.engine.balance import Routers  # not loaded for dense models

            self.routers = Routers(config, state, self._stages)
        self._has_head = any(stage.head is not None for stage in self._stages)
        self.share = BatchShare(
            state.dp,
            state.device,
            tokens=any(stage.embedding is not None for stage in self._stages),
            labels=self._has_head or self.routers is not None,  # routers count the tokens that losses do
            ulysses=state.cp_ulysses,
            ring=state.cp_ring,
            documents=config.data.document_mask,
            multiple=micro_batch_multiple(config.parallel),
        )
        self.compiles = False
        self.on_action: Callable[[Action], None] = lambda _: None
        self.wants_stop: Callable[[], bool] = lambda: False
        self._executor = executors(kind, chunks, state, self._new_activation, lambda action: self.on_action(action))  # noqa: PLW0108  it may change
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
        """Run a `train_step` without the update.  The buckets then hold the global batch's mean gradient, each rank its
        shard.
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
        """Evaluate micro-batches without gradients and dropout.  The loss is the mean over all ranks, nan if no token
        is counted.

        The statistics also report a `stop`, since an evaluation may take long.

        Raises:
            NonFiniteError: the loss is not finite.
        """
        self._chunks.eval()
        with torch.no_grad():
            loss_sum, tokens = self._run(batches, trains=False)
        square_sum = torch.zeros_like(loss_sum)
        statistics = sum_over_ranks(self.sharded_model, square_sum, loss_sum, tokens, stop=self.wants_stop())
        # In an evaluation, the loss scale does not handle a loss that is not finite.
        return check_finite(replace(statistics, finite=isfinite(statistics.loss))) if statistics.tokens else statistics

    def read_logits(self, batches: Sequence[MicroBatch], read: Callable[[MicroBatch, Tensor], object]) -> None:
        """Run a forward.  Where the head is, `read` takes each micro-batch and its logits, [seq / cp, batch, vocab]."""

        def forward(stage: GPTStage, microbatch: int, x: Message | None) -> Message:
            batch, given = batches[microbatch], None if x is None else x[0]
            if stage.head is None:
                return (stage(given, batch),)
            read(batch, stage(given, replace(batch, labels=None)))
            return (torch.zeros((), device=self.state.device),)

        self._chunks.eval()
        executor = self._executor_of(batches, trains=False)
        self.sharded_model.parameters.gathers.check()
        chunks = [ChunkRunner(partial(forward, stage), stage.head is not None) for stage in self._stages]
        with torch.no_grad():
            executor.run(StageRunner(chunks, self.sharded_model, None))

    def _begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """Discard the gradients of the last step, even if it failed."""
        if not torch.is_grad_enabled():
            hint = "use evaluate there"
            raise RuntimeError(f"a training step within torch.no_grad or inference_mode has no gradients; {hint}")
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
            if self.share.labels and batch.labels is not None:
                tokens += (batch.labels != IGNORED_LABEL).sum()
        # The global count arrives during the first forwards.  They wait for weights anyway, and it is queued behind those.
        global_tokens = tokens.clone()
        counting = all_reduce(global_tokens, self.state.dp_cp) if self.share.labels else Pending()

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

    def _runner(
        self, batches: Sequence[MicroBatch], schedule: Schedule, loss_gradient: Callable[[], Tensor] | None
    ) -> StageRunner:
        for queue in self._wgrad_queues:
            queue.defers = schedule.splits_backward
        if self.routers is not None and loss_gradient is not None:
            self.routers.set_grad_scale(loss_gradient)
        for head in self._heads:
            head.keeps_logits = schedule.waiting_losses <= 1
        chunks = [
            ChunkRunner(partial(_forward, stage, batches), stage.head is not None, queue)
            for stage, queue in zip(self._stages, self._wgrad_queues, strict=True)
        ]
        return StageRunner(chunks, self.sharded_model, loss_gradient, self.offload, self._turns)

    def compile_ahead(self, samples: int, count: int, *, evaluates: bool) -> None:
        """Compile all stages at the same time, before the first step.  No-op if nothing is compiled.

        Otherwise, in the first step, each stage would compile while the next ones wait for its message, under the time
        limit of collectives.  A micro-batch of zeros passes through every chunk, without messages, and its results are
        discarded like those of a failed step.

        Args:
            samples, count: samples of a micro-batch and number of micro-batches in a step.
            evaluates: whether the run evaluates, which compiles once more.
        """
        if not self.compiles:
            return
        seq_len, device = self.config.model.seq_len, self.state.device
        tokens = torch.zeros(seq_len, samples, dtype=torch.int64, device=device)
        part = self.share.part_of([[seq_len]] * samples if self.share.documents else None, seq_len)
        batches = [self.share.cut(torch.arange(samples, device=device), tokens, tokens, part)] * count
        schedule, one = self._executor_of(batches, trains=True).schedule, torch.ones((), device=device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []), self.state.traffic.uncounted():
            for trains in (True, False) if evaluates else (True,):
                self._begin_step(batches)
                self._chunks.train(trains)
                runner = self._runner(batches, schedule, (lambda: one) if trains else None)
                for chunk, stage in enumerate(self._stages):
                    x = None if stage.embedding is not None else self._new_activation(samples, None)
                    with torch.set_grad_enabled(trains):
                        y = runner.forward(chunk, 0, x and (x[0].zero_(),))
                    if trains:
                        runner.backward(chunk, 0, y and tuple(map(torch.zeros_like, y)))
                        runner.backward_weight(chunk, 0)
            self._begin_step(batches)

    def _executor_of(self, batches: Sequence[MicroBatch], *, trains: bool) -> Executor:
        samples = check_shapes(batches, self.config.model.seq_len // self.state.cp.size)
        return self._executor(len(batches), samples, trains)

    def _new_activation(self, samples: int, _: Action | None) -> Message:
        """Allocate the activation that stages exchange: [seq / cp (/ tp if sequence-parallel), micro-batch, hidden]."""
        model, seq = self.config.model, self.config.model.seq_len // self.state.cp.size
        seq //= self.state.tp.size if self.config.parallel.sequence_parallel else 1
        return (torch.empty(seq, samples, model.hidden_size, dtype=self.dtype, device=self.state.device),)

    # Checkpoints

    def save(
        self,
        path: Location,
        position: Position,
        data_fingerprint: str,
        *,
        val_loss: float | None = None,
        saver: Saver | None = None,
    ) -> None:
        """Write the whole state into a new step directory.

        Args:
            path: the step directory, which all ranks share: a path or a URL.
            data_fingerprint: identifies the data that the samples came from.
            val_loss: this step's validation loss, if it was evaluated.
            saver: writes in the background; None: wait until everything is durable.

        Raises:
            NonFiniteError: a weight is not finite; nothing was written.
            CheckpointError: see `save_checkpoint`.
        """
        self.sharded_model.parameters.gathers.wait()
        self._check_weights()
        config = self.config
        trainer = trainer_state(
            self.sharded_model,
            position,
            data_fingerprint=data_fingerprint,
            model=config.model.model_dump(),
            config=hide_passwords(json.loads(config.model_dump_json())),
            val_loss=val_loss,
        )
        files = {
            HF_CONFIG: to_json(FAMILIES[config.model.family].hugging_face_config(config.model, config.precision.dtype))
        }
        if saver is None:
            save_checkpoint(path, self.sharded_model.sharded_state, self.state, trainer, files)
        else:
            saver.save(folder_at(path), trainer, files)

    def load(
        self,
        path: Location,
        data_fingerprint: str,
        *,
        fingerprint_at: Callable[[int], str] | None = None,
        with_optimizer: bool = True,
    ) -> Position:
        """Load the state that a run of any shape saved, and return that run's position.

        Args:
            path: a complete step directory.
            data_fingerprint: identifies the data that the samples will come from.
            fingerprint_at: returns the fingerprint of the same data with another `seq_len`; used to accept a change of
                `seq_len` only.
            with_optimizer: load the optimizer's state too; otherwise it starts anew.

        Raises:
            DamagedError: a file is not as it was written; on every rank, and nothing has changed.
            CheckpointError: the checkpoint has another model or other data, and `checkpoint.accept_changes` does not
                allow it; on every rank, and nothing has changed.  Or the storage fails during the read: any later use
                of the weights raises HalfSteppedError until a checkpoint is loaded.
        """
        found = open_checkpoint(
            path,
            self.sharded_model.sharded_state,
            self.state,
            check=partial(check_same_run, path, self.config, data_fingerprint, fingerprint_at=fingerprint_at),
            with_optimizer=with_optimizer,
            by_hash=self.config.checkpoint.verify == "hash",
        )
        self.sharded_model.load(found.read, found.trainer.loss_scaler)
        self._documents_are_compared = not self.config.data.document_mask  # a new phase may begin here
        return position_after(found.trainer, self.config, data_fingerprint)

    def _check_weights(self) -> None:
        """Check that every weight is finite.  Raises: NonFiniteError."""
        wrong = torch.zeros((), device=self.state.device)
        for bucket in self.sharded_model.parameters.buckets:
            values = bucket.read(bucket.master, bucket.owned)
            if values.numel():  # aminmax: one pass; isfinite() would allocate a second tensor, 60 times slower
                wrong += torch.isfinite(torch.stack(torch.aminmax(values))).all().logical_not().to(wrong.device)
        all_reduce(wrong, self.state.world).wait()
        if wrong.item():
            hint = "they were not saved. Resume from the last checkpoint with a lower learning rate or other data"
            raise NonFiniteError(f"weights in {int(wrong.item())} buckets are not finite after the last update; {hint}")

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of this rank's model state and working buffers, by kind; on host or disk, the key names the location."""
        found = self.sharded_model.memory_bytes()
        if self.offload is not None and self.offload.on_host:
            found["activations on host"] = self.offload.pool.nbytes
        elif self.offload is not None:  # the buffers are already counted
            found["activation_arena"] = self.offload.pool.nbytes - self.sharded_model.reducer.reductions.buffer_bytes
        return found


def _forward(stage: GPTStage, batches: Sequence[MicroBatch], microbatch: int, x: Message | None) -> Message:
    return (stage(None if x is None else x[0], batches[microbatch]),)


def _shard(
    config: RunConfig, state: ParallelState, built: RankStages, placement: Placement, *, beside: bool
) -> ShardedModel:
    """Shard a rank's stages according to `[zero]` and `[precision]`.

    Args:
        beside: two stages run at the same time.
    """
    modules = nn.ModuleList(built.stages)
    recipe = optimizer_of(config.optimizer, config.model.width_ratio)
    experts = expert_placement_of(state, config.zero) if num_experts(config) else None
    described = [_in_its_group(param, recipe, experts) for param in describe(modules)]
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
        ModelParts(units, described, _tied_axes(described, state, placement), queue_of),
        state,
        ShardingSettings(config.zero, config.precision, recipe, arena, compiles, config.average.kind != "none"),
    )
    if offload is not None:
        offload.stay(bucket.weights for bucket in sharded.parameters.buckets)
    return sharded


def _in_its_group(param: ModelParam, recipe: OptimizerRecipe, experts: ZeroPlacement | None) -> ModelParam:
    param = replace(param, placement=experts if param.spec.of_experts else None)
    if recipe.groups == 3 and param.spec.matrix:
        return replace(param, group=2, matrix=recipe.matrices is not None)
    return replace(param, group=0 if param.spec.decay else 1)


def _tied_axes(described: Sequence[ModelParam], state: ParallelState, placement: Placement) -> Mapping[str, Axis]:
    """Return the pipeline ranks that hold a copy of each tied parameter, by its name.  A collective call over pp."""
    first, last = placement[0][0], placement[-1][0]
    tied = [param.spec.name for param in described if param.spec.tied]
    if first == last or not any(gather_objects(bool(tied), state.pp)):
        return {}
    return dict.fromkeys(tied, state.among_stages([first, last], "embedding"))


def initialize(
    config: RunConfig, state: ParallelState, *, init_weights: bool = True, schedule: Schedule | None = None
) -> Engine:
    """Build this rank's part of the model with its schedule, ZeRO stage and precision.

    Args:
        config: a resolved run.
        state: this rank's groups and device.
        init_weights: give the parameters their initial values; False if a checkpoint is loaded next.
        schedule: the user's own schedule instead of `parallel.schedule`; checked before the first step like any other.

    Raises:
        ScheduleError, ValueError: the schedule cannot run, or does not fit these sizes.
    """
    engine = Engine(config, state, SCHEDULES[config.parallel.schedule] if schedule is None else GivenSchedule(schedule))
    parameters = engine.sharded_model.parameters
    weights = parameters.by_name.values()
    if may_compile(config.training.compile, state.device):
        from megazero.models.wrappers import can_compile, compile_blocks

        engine.compiles = agree(
            lambda: can_compile(config.training.compile, state.device, weights), state.world, ValueError
        )
        for stage in engine._stages if engine.compiles else ():
            compile_blocks(stage)
    if init_weights:
        parameters.init_weights(config.training.seed, state)
    return engine
