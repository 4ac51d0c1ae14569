"""Trains pipelines of arbitrary layers, under every schedule and ZeRO stage: `engine.train_batch(data_iter)`.

The shapes that pass between stages are found once: a forward in evaluation mode runs on zeros, stage after stage, and then
the loss on the first micro-batch's labels.  From then on, every micro-batch must have these shapes.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megazero.comm.agreement import agree
from megazero.comm.collectives import all_reduce, gather_objects
from megazero.deepspeed.layer_specs import LayerChunk
from megazero.deepspeed.pipeline_module import PipelineModule
from megazero.deepspeed.recompute import pipeline_step
from megazero.deepspeed.script_checkpoints import refuses
from megazero.deepspeed.training_engine import TrainingEngine
from megazero.engine.stage_runner import ChunkRunner, StageRunner, executors
from megazero.schedules.action import Action, Op
from megazero.schedules.executor import Message

Shapes: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]
Inputs: TypeAlias = tuple[Shapes, ...]  # of each virtual stage
Batches: TypeAlias = Sequence[tuple[Message, Any]]  # (inputs, labels) of each micro-batch


class PipelineEngine(TrainingEngine):
    """Trains a `PipelineModule`.  Args: see `TrainingEngine`."""

    module: PipelineModule

    def _prepare(self) -> None:
        super()._prepare()
        module = self.module
        self._names = {
            f"chunks.{index}.{qualified}": canonical
            for index, chunk in enumerate(module.layer_chunks)
            for qualified, canonical in chunk.canonical_names.items()
        }
        if module.loss_fn is None:
            raise ValueError("the PipelineModule has no loss_fn; train_batch needs one")
        self._chunks, self._loss_fn = module.layer_chunks, module.loss_fn
        self._inputs: dict[bool, Inputs] = {}  # by trains
        chunks_per_rank = len(module.placement) // self.parallel_state.pp.size
        self._executor = executors(module.schedule_factory, chunks_per_rank, self.parallel_state, self._new_message)

    def is_first_stage(self) -> bool:
        """Return whether this rank reads inputs."""
        return any(chunk.is_first for chunk in self._chunks)

    def is_last_stage(self) -> bool:
        """Return whether this rank computes the loss."""
        return any(chunk.is_last for chunk in self._chunks)

    _WHOLE_STEPS = refuses("a pipeline runs whole steps; call engine.train_batch(data_iter) or eval_batch(data_iter)")
    forward = backward = step = scale = no_sync = _WHOLE_STEPS  # a stage alone has no output
    is_gradient_accumulation_boundary = set_gradient_accumulation_boundary = _WHOLE_STEPS
    save_16bit_model = save_fp16_model = refuses("call engine.save_checkpoint(dir); it writes tensors of all stages")

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train one step; return the mean loss over all micro-batches and ranks, a scalar tensor.

        Args:
            data_iter: yields micro-batches (inputs, labels).  It is read on ranks of the first and of the last stage, where
                it must be the same.  None for `training_data`.

        Raises:
            StopIteration: on every rank: the data has too few micro-batches.
            ValueError: on every rank: a micro-batch is no pair, or its shapes differ from earlier ones.
        """
        self.train()
        batches = self._on_every_rank(lambda: self._read(data_iter, trains=True))
        self.sharded_model.begin_step(self.config.accumulation)
        with self._report.timed("forward and backward"), pipeline_step():
            loss_sum = self._run(batches, trains=True)
        loss = self._finish_step(loss_sum, self.config.accumulation * self.dp_world_size)
        self.micro_steps += self.config.accumulation
        return torch.tensor(loss, device=self.device)

    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """Return the mean loss of as many micro-batches as a step has, without gradients.  Arguments as `train_batch`."""
        batches = self._on_every_rank(lambda: self._read(data_iter, trains=False))
        with self._evaluating():
            loss_sum = self._run(batches, trains=False)
        if self.parallel_state.at.tp:
            loss_sum.zero_()  # all tensor-parallel ranks have the same losses
        all_reduce(loss_sum, self.parallel_state.world).wait()
        return loss_sum.float() / (self.config.accumulation * self.dp_world_size)

    def reset_activation_shape(self) -> None:
        """Forget the shapes of the activations that stages send; the next batch sets them.  Every rank calls this."""
        self._inputs.clear()

    def _read(self, data_iter: Iterator[Any] | None, *, trains: bool) -> Batches:
        """Return this rank's micro-batches of a step; none on a rank between the first and the last stage."""
        if not (self.is_first_stage() or self.is_last_stage()):
            return []
        if data_iter is None and not trains:
            raise ValueError("eval_batch needs data_iter on ranks of the first and of the last stage")
        source = self._batches(data_iter)
        batches = [self._split(next(source)) for _ in range(self.config.accumulation)]
        if self.is_first_stage():
            expected = self._inputs[trains][0] if trains in self._inputs else _shapes_of(batches[0][0])
            for inputs, _ in batches:
                if _shapes_of(inputs) != expected:
                    raise ValueError(f"a micro-batch has inputs {_shapes_of(inputs)}: call reset_activation_shape()")
        return batches

    def _split(self, batch: Any) -> tuple[Message, Any]:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError("a pipeline's micro-batch is a pair (inputs, labels)")
        inputs, labels = batch
        tensors = (inputs,) if isinstance(inputs, Tensor) else inputs
        dtype = None if self.config.casts_inputs is False else self.sharded_model.policy.dtype
        moved = tuple(x.to(self.device, dtype if x.is_floating_point() else None, non_blocking=True) for x in tensors)
        return moved, tree_map(lambda x: x.to(self.device) if isinstance(x, Tensor) else x, labels)

    def _run(self, batches: Batches, *, trains: bool) -> Tensor:
        """Run the schedule; return the sum of this rank's losses."""
        self.sharded_model.parameters.gathers.check()
        if trains not in self._inputs:
            self._inputs[trains] = self._find_inputs(batches)
        losses = self.config.accumulation * self.dp_world_size
        weight = torch.tensor(self.sharded_model.scale / losses, device=self.device)
        chunks = [ChunkRunner(partial(self._forward, chunk, batches), chunk.is_last) for chunk in self._chunks]
        runner = StageRunner(chunks, self.sharded_model, (lambda: weight) if trains else None)
        self._executor(self.config.accumulation, self._inputs[trains], trains).run(runner)
        return runner.loss_sum

    def _forward(self, chunk: LayerChunk, batches: Batches, microbatch: int, x: Message | None) -> Message:
        inputs, labels = batches[microbatch] if batches else ((), None)
        y = chunk(inputs if x is None else x)
        return (self._loss_of(y, labels),) if chunk.is_last else tuple(y)

    def _loss_of(self, y: Message, labels: Any) -> Tensor:
        loss = self._loss_fn(y[0] if len(y) == 1 else y, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TypeError(f"loss_fn returned {got}; it must be a scalar, the mean over the micro-batch")
        return loss.reshape(()).float()

    def _new_message(self, inputs: Inputs, action: Action) -> Message:
        """Allocate what an action receives: inputs of its stage in a forward, gradients of its outputs in a backward."""
        stage, is_forward = self._chunks[action.chunk].stage, action.op is Op.FORWARD
        return tuple(
            torch.empty(shape, dtype=dtype, device=self.device)
            for shape, dtype in inputs[stage if is_forward else stage + 1]
            if is_forward or dtype.is_floating_point
        )

    def _find_inputs(self, batches: Batches) -> Inputs:
        """Return the inputs of each virtual stage: every stage runs once on zeros, in evaluation mode, one after another."""
        pp, last = self.parallel_state.pp, len(self.module.placement) - 1
        first = _shapes_of(batches[0][0]) if self.is_first_stage() else ()
        found = [next(shapes for shapes in gather_objects(first, pp) if shapes)]
        with self._evaluating(), torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            for stage in range(last + 1):  # the last one too, so that all ranks hear of an error in it
                outputs = agree(partial(self._try_stage, stage, found[-1], batches), pp, RuntimeError)
                passed = next(shapes for shapes in gather_objects(outputs, pp) if shapes)
                if stage < last and not any(dtype.is_floating_point for _, dtype in passed):
                    raise ValueError(f"virtual stage {stage} passes on {passed}, without a gradient: cut elsewhere")
                found.append(passed)
        return tuple(found[:-1])

    def _try_stage(self, stage: int, shapes: Shapes, batches: Batches) -> Shapes:
        """Run a virtual stage of this rank on zeros; return the shapes of its outputs.  Raises: RuntimeError."""
        y: Message = ()
        try:
            for chunk in (chunk for chunk in self._chunks if chunk.stage == stage):
                y = chunk(tuple(torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in shapes))
                if chunk.is_last:
                    self._loss_of(y, batches[0][1])
        except Exception as error:
            raise RuntimeError(f"virtual stage {stage} failed on inputs {shapes}: {error!r}") from error
        return _shapes_of(y)


def _shapes_of(message: Message) -> Shapes:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in message)
