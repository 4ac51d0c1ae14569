"""Pipelines of arbitrary layers under every schedule and every ZeRO stage: `engine.train_batch(data_iter)`.

What passes between stages is found once, by a forward in evaluation mode on zeros, stage after stage, with the loss of the
first micro-batch's labels at its end; from then on every micro-batch must have the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megazero.comm.collectives import all_reduce, gather_objects
from megazero.deepspeed.config import DeepSpeedConfig
from megazero.deepspeed.pipeline_module import LayerChunk, PipelineModule
from megazero.deepspeed.training_engine import TrainingEngine
from megazero.engine.stage_runner import ChunkRunner, StageRunner
from megazero.schedules.action import Action, ActionKind
from megazero.schedules.executor import Executor, Message
from megazero.schedules.kind import forward_only
from megazero.zero.sharded_model import ShardedModel

Shapes: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class PipelineEngine(TrainingEngine):
    """Training of a `PipelineModule`.

    Args:
        module: the pipeline; its chunks' parameters are bound to `model`.
        model: their state under ZeRO.
        config: the resolved configuration.
        show: takes lines for the terminal, on rank 0.
    """

    def __init__(
        self, module: PipelineModule, model: ShardedModel, config: DeepSpeedConfig, show: Callable[[str], None]
    ) -> None:
        names = {
            f"chunks.{index}.{qualified}": canonical
            for index, chunk in enumerate(module.chunks)
            if isinstance(chunk, LayerChunk)
            for qualified, canonical in chunk.canonical_names.items()
        }
        super().__init__(module, model, config, lambda name: names[name], show)
        self._pipeline = module
        self._chunks = [chunk for chunk in module.chunks if isinstance(chunk, LayerChunk)]
        self._dtype = model.policy.dtype
        self._shapes: dict[bool, list[Shapes]] = {}  # by trains: what enters each virtual stage
        self._executors: dict[bool, Executor] = {}
        if module.loss_fn is None:
            raise ValueError("the PipelineModule has no loss_fn; train_batch needs one")

    @property
    def _has_first(self) -> bool:
        return any(chunk.is_first for chunk in self._chunks)

    @property
    def _has_last(self) -> bool:
        return any(chunk.is_last for chunk in self._chunks)

    def is_first_stage(self) -> bool:
        """Whether this rank reads inputs."""
        return self._has_first

    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self._has_last

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Refused: a stage alone has no output.  Raises: RuntimeError."""
        raise RuntimeError(
            "a pipeline runs whole steps; call engine.train_batch(data_iter) or engine.eval_batch(data_iter)"
        )

    backward = step = forward

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """A whole step.

        Args:
            data_iter: gives micro-batches (inputs, labels); read on ranks of the first and of the last stage, which must see
                the same.  `training_data`'s when None.

        Returns: the mean loss over all micro-batches and ranks, a scalar.

        Raises:
            StopIteration: on every rank, the data ended within the step.
            ValueError: on every rank, a micro-batch is no pair, or has other shapes than those before.
        """
        self.train()
        batches = self._read(data_iter, trains=True)
        self.sharded_model.begin_step(self.config.accumulation)
        with self._timed("forward and backward"):
            loss_sum = self._run(batches, trains=True)
        loss = self._finish_step(loss_sum, self.config.accumulation * self.dp_world_size)
        self.micro_steps += self.config.accumulation
        return torch.tensor(loss, device=self.device)

    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """The mean loss of as many micro-batches as a step has, without gradients.  Arguments as `train_batch`."""
        batches = self._read(data_iter, trains=False)
        with self._evaluating():
            loss_sum = self._run(batches, trains=False)
        all_reduce(loss_sum, self.parallel_state.world).wait()
        return loss_sum.float() / (self.config.accumulation * self.dp_world_size)

    def reset_activation_shape(self) -> None:
        """Find the shapes between stages anew, for micro-batches of another shape.  Called on every rank."""
        self._shapes.clear()
        self._executors.clear()

    def _read(self, data_iter: Iterator[Any] | None, *, trains: bool) -> list[tuple[Message, Any]]:
        """This rank's micro-batches of a step; where they do not fit on one rank, all raise."""

        def read() -> list[tuple[Message, Any]]:
            batches = self._take(data_iter, trains)
            self._check_shapes(batches, trains)
            return batches

        return self._on_every_rank(read)

    def _check_shapes(self, batches: Sequence[tuple[Message, Any]], trains: bool) -> None:
        if not (batches and self._has_first):
            return
        expected = self._shapes[trains][0] if trains in self._shapes else _shapes_of(batches[0][0])
        for inputs, _ in batches:
            if _shapes_of(inputs) != expected:
                raise ValueError(
                    f"a micro-batch has inputs {_shapes_of(inputs)}, those before had {expected}; stages exchange "
                    "tensors of fixed shapes. Call engine.reset_activation_shape() on every rank, or pad the batch"
                )

    def _take(self, data_iter: Iterator[Any] | None, trains: bool) -> list[tuple[Message, Any]]:
        if not (self._has_first or self._has_last):
            return []
        if data_iter is None and not trains:
            raise ValueError("eval_batch needs data_iter on ranks of the first and of the last stage")
        source = self._batches(data_iter)
        return [self._split(next(source)) for _ in range(self.config.accumulation)]

    def _split(self, batch: Any) -> tuple[Message, Any]:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError("a pipeline's micro-batch is a pair (inputs, labels)")
        inputs, labels = batch
        tensors = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        casts = self.config.casts_inputs is not False
        moved = (
            x.to(self.device, self._dtype if casts and x.is_floating_point() else None, non_blocking=True)
            for x in tensors
        )
        labels = tree_map(lambda x: x.to(self.device) if isinstance(x, Tensor) else x, labels)
        return tuple(moved), labels

    def _run(self, batches: Sequence[tuple[Message, Any]], *, trains: bool) -> Tensor:
        """Run the schedule; the sum of this rank's losses."""
        model = self.sharded_model
        if trains not in self._shapes:
            self._shapes[trains] = self._find_shapes(batches)
        count = self.config.accumulation * self.dp_world_size
        weight = torch.tensor(model.scale / count, device=self.device)
        chunks = [ChunkRunner(partial(self._forward, chunk, batches), chunk.is_last) for chunk in self._chunks]
        runner = StageRunner(chunks, model, trains=trains, loss_gradient=lambda: weight)
        self._executor(trains).run(runner)
        if self.parallel_state.at.tp:
            runner.loss_sum.zero_()
        return runner.loss_sum

    def _forward(
        self, chunk: LayerChunk, batches: Sequence[tuple[Message, Any]], microbatch: int, x: Message | None
    ) -> Message:
        y = chunk(batches[microbatch][0] if x is None else x)
        if not chunk.is_last:
            return tuple(y)
        return (self._loss_of(y, batches[microbatch][1]),)

    def _loss_of(self, y: Message, labels: Any) -> Tensor:
        loss_fn = self._pipeline.loss_fn
        assert loss_fn is not None
        loss = loss_fn(y[0] if len(y) == 1 else y, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TypeError(f"loss_fn returned {got}; it must be a scalar, the mean over the micro-batch")
        return loss.reshape(()).float()

    def _executor(self, trains: bool) -> Executor:
        if trains not in self._executors:
            pipeline = self._pipeline
            chunks = len(pipeline.placement) // self.parallel_state.pp.size
            schedule = pipeline.schedule_kind.build(self.parallel_state.pp.size, self.config.accumulation, chunks)
            self._executors[trains] = Executor(
                schedule if trains else forward_only(schedule),
                self.parallel_state.pp,
                self.parallel_state.pp_up,
                partial(self._new_message, trains),
                lambda _: None,
            )
        return self._executors[trains]

    def _new_message(self, trains: bool, action: Action) -> Message:
        """What a forward receives is what enters its stage; what a backward receives, gradients of what leaves it."""
        stage = self._pipeline.placement.index((self.parallel_state.at.pp, action.chunk))
        shapes = self._shapes[trains][stage if action.kind is ActionKind.FORWARD else stage + 1]
        if action.kind is not ActionKind.FORWARD:
            shapes = tuple((shape, dtype) for shape, dtype in shapes if dtype.is_floating_point)
        return tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes)

    def _find_shapes(self, batches: Sequence[tuple[Message, Any]]) -> list[Shapes]:
        """What enters each virtual stage: every stage runs once on zeros, in evaluation mode, in turn; then the loss."""
        pp = self.parallel_state.pp
        entering = [_shapes_of(batches[0][0]) if self._has_first else ()]
        entering[0] = next(shapes for shapes in gather_objects(entering[0], pp) if shapes)
        with self._evaluating(), torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            last = len(self._pipeline.placement) - 1
            for stage in range(last + 1):  # the last one too, so that an error in it is told to all
                chunk = next((chunk for chunk in self._chunks if chunk.stage == stage), None)
                found: Shapes = ()
                failure: Exception | None = None
                if chunk is not None:
                    zeros = tuple(torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in entering[-1])
                    try:
                        y = chunk(zeros)
                        found = _shapes_of(y)
                        if chunk.is_last:
                            self._loss_of(y, batches[0][1])
                    except Exception as error:
                        failure = error
                answers = gather_objects((found, "" if failure is None else str(failure) or repr(failure)), pp)
                if failure is not None:
                    raise failure
                for text in (text for _, text in answers if text):
                    raise RuntimeError(f"virtual stage {stage} failed on inputs {entering[-1]}: {text}")
                passed = next(shapes for shapes, _ in answers if shapes)
                if stage == last:
                    break
                if not any(dtype.is_floating_point for _, dtype in passed):
                    raise ValueError(
                        f"virtual stage {stage} passes on {passed}, in which nothing has a gradient, so no stage up to it "
                        "would train; cut the layers elsewhere (partition_method)"
                    )
                entering.append(passed)
        return entering


def _shapes_of(message: Message) -> Shapes:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in message)
