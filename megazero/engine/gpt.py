"""One training step: model, schedule, ZeRO and precision bound together on one rank.

micro-batches -> executor(schedule, stage) -> gradients reduced as they become ready
              -> one collective: squared norm, loss, tokens -> clip -> sharded AdamW -> weights published
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, sqrt
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.checkpoint.index import CheckpointError, TrainerState, read_trainer_state
from megazero.checkpoint.load import load_checkpoint
from megazero.checkpoint.save import save_checkpoint
from megazero.comm.collectives import Pending, agree, all_reduce, gather_objects
from megazero.config import RunConfig
from megazero.layers.cross_entropy import IGNORED_LABEL
from megazero.layers.linear import WeightGradients
from megazero.models.gpt import BuildContext, GPTStage, MicroBatch, collect_specs
from megazero.models.hf_names import hugging_face_config
from megazero.models.stages import cut
from megazero.parallel_state import Axis, ParallelState
from megazero.schedules.action import Action, Schedule
from megazero.schedules.executor import Executor
from megazero.schedules.generators import FAMILIES, Family, family_of, forward_only
from megazero.schedules.simulate import Timeline
from megazero.zero.gradients import GradientReducer
from megazero.zero.optimizer import ShardedAdamW
from megazero.zero.parameters import ShardedParameters, UnitGatherer
from megazero.zero.state import ShardedState

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is not a number; nothing was stepped."""


@dataclass(frozen=True)
class StepStatistics:
    """What a step measured over the whole global batch.

    Args:
        loss: mean nats per counted token.
        grad_norm: global L2 norm before clipping; 0 in evaluation.
        tokens: counted (unmasked) tokens.
    """

    loss: float
    grad_norm: float
    tokens: int


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


class _StageRunner:
    """Runs this rank's chunks on the micro-batches of one step, for the executor.

    Args:
        chunks: this rank's part of the model.
        later: per chunk, where its weight gradients wait.
        deliver: takes each weight gradient that has waited.
        gatherer: brings the weights under ZeRO-3.
        batches: this rank's micro-batches.
        trains: keep what the backward needs.
        state: the rank's place.
    """

    def __init__(
        self,
        chunks: Sequence[GPTStage],
        later: Sequence[WeightGradients],
        deliver: Callable[[Tensor, Tensor], None],
        gatherer: UnitGatherer | None,
        batches: Sequence[MicroBatch],
        trains: bool,
        state: ParallelState,
    ) -> None:
        self._chunks, self._later, self._deliver, self._gatherer = chunks, later, deliver, gatherer
        self._batches, self._trains = batches, trains
        self._saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=state.device)
        self.tokens = torch.zeros((), dtype=torch.float64, device=state.device)
        self._global_tokens, self._counting = self.tokens, Pending()
        if any(chunk.head is not None for chunk in chunks):
            for batch in batches:
                if batch.labels is not None:
                    self.tokens += (batch.labels != IGNORED_LABEL).sum()
            # The count of the whole global batch arrives while the first forwards run.
            self._global_tokens = self.tokens.clone()
            self._counting = all_reduce(self._global_tokens, state.dp)

    def forward(self, chunk: int, microbatch: int, x: Tensor | None) -> Tensor | None:
        if x is not None and self._trains:
            x.requires_grad_()
        y = self._chunks[chunk](x, self._batches[microbatch])
        if self._trains:
            # The graph is kept, not the output: once it is sent nothing needs its values.
            self._saved[chunk, microbatch] = (x, get_gradient_edge(y))
        if self._chunks[chunk].head is None:
            return y
        self.loss_sum += y.detach()
        return None

    def backward(self, chunk: int, microbatch: int, grad: Tensor | None) -> Tensor | None:
        x, edge = self._saved.pop((chunk, microbatch))
        if grad is None:
            self._counting.wait()
            # Losses are sums; dividing by the global count here makes every gradient that of the global mean.
            grad = self._global_tokens.clamp(min=1).reciprocal().float()
        self._later[chunk].begin_pass()
        torch.autograd.backward(edge, grad)
        return None if x is None else x.grad

    def backward_weight(self, chunk: int, microbatch: int) -> None:  # noqa: ARG002  they come in order
        self._later[chunk].run_oldest(self._deliver)

    def expect(self, chunk: int, is_forward: bool) -> None:
        if self._gatherer is not None:
            self._gatherer.expect(chunk, is_forward)

    def finish(self) -> None:
        """Leave no collective behind."""
        self._counting.wait()


class Engine:
    """One rank of a training run.

    Args:
        chunks: this rank's part of the model; parameters may be on the meta device.
        later: per chunk, where its weight gradients wait when the schedule splits the backward.
        family: the pipeline schedule.
        config: the resolved run.
        state: the rank's place and groups.

    Every method is called on every rank, in the same order.
    """

    def __init__(
        self,
        chunks: Sequence[GPTStage],
        later: Sequence[WeightGradients],
        family: Family,
        config: RunConfig,
        state: ParallelState,
    ) -> None:
        self.chunks, self.config, self.state = nn.ModuleList(chunks), config, state
        self.dtype = DTYPES[config.precision.dtype]
        self.parameters = ShardedParameters(
            [chunk.units() for chunk in chunks],
            list(collect_specs(self.chunks)),
            zero_stage=config.zero.stage,
            dtype=self.dtype,
            bucket_bytes=config.zero.bucket_bytes,
            dp=state.dp,
            embedding=state.embedding,
            device=state.device,
            gather_policy=config.zero.gather_policy,
        )
        self.reducer = GradientReducer(
            self.parameters.buckets,
            config.zero.stage,
            state.dp,
            state.tp,
            state.embedding,
            every_micro_batch=config.zero.reduce == "micro_batch",
        )
        waiting = {f"{index}.{name}": waits for index, waits in enumerate(later) for name in _names(chunks[index])}
        self.reducer.attach(self.parameters.by_name, waiting)
        self.optimizer = ShardedAdamW(
            self.parameters.buckets,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
        )
        self.sharded_state = ShardedState(self.parameters.buckets, self.optimizer)
        self.share = BatchShare(
            state.dp,
            state.device,
            tokens=any(chunk.embedding is not None for chunk in chunks),
            labels=any(chunk.head is not None for chunk in chunks),
        )
        self._stages, self._later, self._family = list(chunks), later, family
        self._names = {id(parameter): name for name, parameter in self.parameters.by_name.items()}
        self.watch: Callable[[Action], None] | None = None  # called before and after every computed action
        self._executors: dict[tuple[bool, int, int], Executor] = {}
        self._grad_norm = 0.0

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> StepStatistics:
        """One optimizer step on this rank's micro-batches.

        Args:
            batches: this dp rank's share of the global batch, as micro-batches of equal size.
            lr: learning rate of this step.

        Raises:
            NonFiniteError: on every rank, before any weight has changed.
            LostPeerError: a rank is gone.
        """
        statistics = self.compute_gradients(batches)
        self.update(lr)
        return statistics

    def compute_gradients(self, batches: Sequence[MicroBatch]) -> StepStatistics:
        """Forward and backward of all micro-batches; afterwards every bucket holds the global batch's mean gradient.

        Args:
            batches: this dp rank's share of the global batch, as micro-batches of equal size.

        Raises: as `train_step`.
        """
        self.chunks.train()
        self.reducer.begin_step(len(batches))
        for waits in self._later:
            waits.clear()
        runner = self._runner(batches, trains=True)
        self._executor(batches, trains=True).run(runner)
        runner.finish()
        self.reducer.finish()
        statistics = self._agree(runner, self.reducer.square_sum())
        self._grad_norm = statistics.grad_norm
        return statistics

    def traced_step(self, batches: Sequence[MicroBatch], lr: float) -> tuple[StepStatistics, Timeline]:
        """A `train_step` that measures when each action ran, on the pipeline of this rank.

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
            statistics = self.train_step(batches, lr)
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

    def update(self, lr: float) -> None:
        """Clip by the last computed norm, step the optimizer, publish the weights."""
        limit = self.config.optimizer.grad_clip
        coefficient = min(1.0, limit / (self._grad_norm + 1e-6)) if limit else 1.0
        self.optimizer.step(lr, coefficient)
        self.parameters.publish()

    def evaluate(self, batches: Sequence[MicroBatch]) -> StepStatistics:
        """Mean loss of micro-batches over all ranks, without gradients and without dropout.  Raises: NonFiniteError."""
        self.chunks.eval()
        with torch.no_grad():
            runner = self._runner(batches, trains=False)
            self._executor(batches, trains=False).run(runner)
            runner.finish()
        return self._agree(runner, torch.zeros((), dtype=torch.float64, device=self.state.device))

    def _check_weights(self) -> None:
        """Make sure that every weight is a number.  Raises: NonFiniteError."""
        wrong = torch.zeros((), device=self.state.device)
        for bucket in self.parameters.buckets:
            wrong += torch.isfinite(bucket.master).logical_not().sum()
        all_reduce(wrong, self.state.world).wait()
        if wrong.item():
            raise NonFiniteError(
                f"{int(wrong.item())} weights are not finite after the last update; they were not saved. "
                "Resume from the last checkpoint with a lower learning rate or other data"
            )

    def save(self, directory: Path, position: Position, data_fingerprint: str) -> None:
        """Write the whole state into a new step directory.

        Args:
            directory: the step directory, on a file system that all ranks share.
            position: how far the run has come.
            data_fingerprint: of the data that the samples came from.

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
            optimizer_steps=self.optimizer.steps_taken,
            data_fingerprint=data_fingerprint,
            model=config.model.model_dump(),
            config=config.model_dump(mode="json"),
            shape={"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp, "zero_stage": config.zero.stage},
            versions={"megazero": importlib.metadata.version("megazero"), "torch": str(torch.__version__)},
        )
        about = hugging_face_config(config.model, config.precision.dtype)
        save_checkpoint(directory, self.sharded_state, self.state, trainer, about)

    def load(self, directory: Path, data_fingerprint: str) -> Position:
        """Take over the state that a run of any shape saved, and say how far it had come.

        Args:
            directory: a complete step directory.
            data_fingerprint: of the data that the samples will come from.

        Raises:
            CheckpointError: on every rank, and nothing has changed: it is of another model or other data, or damaged.
        """
        check = partial(_check_origin, directory, self.config, data_fingerprint)
        trainer = agree(check, self.state.world, CheckpointError)
        load_checkpoint(directory, self.sharded_state, self.state)
        self.parameters.publish()
        return Position(trainer.step, trainer.consumed_samples, trainer.consumed_tokens)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of model state on this rank: parameters, gradients, optimizer, and the working buffers of ZeRO-2/3."""
        return {
            **self.parameters.memory_bytes(),
            "optimizer": self.optimizer.memory_bytes(),
            "gradient_buffers": self.reducer.working_bytes(),
        }

    def _agree(self, runner: _StageRunner, square_sum: Tensor) -> StepStatistics:
        """The one collective at the end of a step: every rank learns norm, loss and tokens."""
        counts = self.share.labels and self.state.at.tp == 0
        share = torch.stack([square_sum, runner.loss_sum, runner.tokens])
        if not counts:
            share[1:] = 0
        all_reduce(share, self.state.world).wait()
        squared, loss_sum, tokens = share.tolist()
        if tokens == 0:
            raise ValueError("every token of the global batch is masked: there is no loss to compute")
        if not (isfinite(loss_sum) and isfinite(squared)):
            raise NonFiniteError(
                f"loss={loss_sum / tokens} and grad_norm={squared**0.5} must be finite; the weights were not changed. "
                "Resume from the last checkpoint with a lower learning rate or other data"
            )
        return StepStatistics(loss_sum / tokens, sqrt(squared), int(tokens))

    def _runner(self, batches: Sequence[MicroBatch], *, trains: bool) -> _StageRunner:
        gatherer = self.parameters.gatherer
        return _StageRunner(self._stages, self._later, self._take_waited, gatherer, batches, trains, self.state)

    def _take_waited(self, weight: Tensor, gradient: Tensor) -> None:
        self.reducer.accumulate(self._names[id(weight)], gradient)

    def _executor(self, batches: Sequence[MicroBatch], *, trains: bool) -> Executor:
        """The executor of the run's schedule for these micro-batches, made and proved once."""
        sizes = {batch.sample_ids.numel() for batch in batches}
        if len(sizes) != 1:
            raise ValueError(f"micro-batches of a step must have one size; these have {sorted(sizes)} samples")
        samples = sizes.pop()
        key = (trains, len(batches), samples)
        if key not in self._executors:
            chunks = self._family.chunks or self.config.parallel.virtual_stages
            schedule = self._family.generate(self.state.pp.size, len(batches), chunks)
            for waits in self._later:
                waits.deferring = schedule.splits_backward
            self._executors[key] = Executor(
                schedule if trains else forward_only(schedule),
                self.state.pp,
                self.state.pp_up,
                lambda: self._new_activation(samples),
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


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


_FREE_TO_CHANGE = {"dropout", "init_std"}  # model keys that a resumed run may set anew


def _check_origin(origin: Path, config: RunConfig, data_fingerprint: str) -> TrainerState:
    """Make sure that a checkpoint is of this model and this data, before anything is loaded."""
    trainer = read_trainer_state(origin)
    wanted = config.model.model_dump()
    changed = [
        f"model.{key} is {wanted[key]!r}, the checkpoint has {trainer.model.get(key)!r}"
        for key in wanted
        if key not in _FREE_TO_CHANGE and trainer.model.get(key) != wanted[key]
    ]
    if changed:
        raise CheckpointError(f"{origin} is of another model: " + "; ".join(changed))
    if trainer.data_fingerprint != data_fingerprint:
        raise CheckpointError(
            f"{origin} was trained on other data (fingerprint {trainer.data_fingerprint}, now {data_fingerprint}): "
            "the sources, their weights, data.tokenizer, data.validation_fraction, model.seq_len and training.seed "
            "must be those of the run"
        )
    return trainer


def initialize(
    config: RunConfig, state: ParallelState, *, draw: bool = True, schedule: Schedule | None = None
) -> Engine:
    """Build this rank's part of the model and bind it to its schedule, its ZeRO stage and its precision.

    Args:
        config: a resolved run.
        state: the rank's place and groups.
        draw: give the parameters their initial values; False where a checkpoint follows at once.
        schedule: the user's own, instead of what `parallel.schedule` names; proved before the first step like any other.

    Raises:
        ScheduleError, ValueError: the schedule cannot run, or not with these numbers.
    """
    family = FAMILIES[config.parallel.schedule] if schedule is None else family_of(schedule)
    placement = family.placement(state.pp.size, family.chunks or config.parallel.virtual_stages)
    layouts = cut(config.model, config.parallel.layout, len(placement))
    chunks, waiting = [], []
    for layout, (rank, _) in zip(layouts, placement, strict=True):  # a rank's chunks come in order
        if rank != state.at.pp:
            continue
        later = WeightGradients()
        context = BuildContext(
            config.model,
            state.tp,
            config.parallel.sequence_parallel,
            config.training.seed,
            state.device,
            later if len(placement) > 1 else None,
        )
        with torch.device("meta"):  # no rank ever holds more of the model than its shards and its working buffers
            chunks.append(GPTStage(context, layout))
        waiting.append(later)
    engine = Engine(chunks, waiting, family, config, state)
    if draw:
        engine.parameters.draw(config.training.seed, state.tp)
    return engine
