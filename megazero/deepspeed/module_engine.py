"""Trains any nn.Module under ZeRO: `engine(x)`, `engine.backward(loss)`, `engine.step()`.

micro-batch 1 ... n-1     forward, backward: gradients add up         step() only counts
micro-batch n             forward, backward: reductions start         step() clips, updates, gathers

A gradient counts if it comes from this engine's `backward`, or from a script's own `loss.backward()`.  Gradients from
another engine's backward are dropped, such as those of a generator's loss for a discriminator.
"""

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.utils._pytree import tree_map

from megazero.checkpoint.folder import folder_at
from megazero.checkpoint.index import CheckpointError
from megazero.comm.agreement import agree
from megazero.deepspeed.full_params import GatheredParameters
from megazero.deepspeed.script_reducer import ModuleReducer
from megazero.deepspeed.training_engine import ENGINES, TrainingEngine
from megazero.layers.saved_tensors import forget_failed_backward
from megazero.zero.gather import in_backward


def _is_within_backward() -> bool:
    """Return whether the backward under way was called within another one, by this thread's frames."""
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        count += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    own_thread = isinstance(threading.current_thread(), threading._DummyThread)  # autograd's, of a device
    return count > (0 if own_thread else 1)


class ModuleEngine(TrainingEngine):
    """Data-parallel training of a module, which may contain tensor-parallel layers.

    Args: see `TrainingEngine`.
    """

    def _prepare(self) -> None:
        super()._prepare()
        model, config = self.sharded_model, self.config
        self._casts = config.precision.dtype != "fp32" if config.casts_inputs is None else config.casts_inputs
        self._boundary: bool | None = None  # set by the script in place of the count
        self._passes = 0  # backward passes of this step
        self._ended = 0  # micro-batches of this step that step() has ended
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._wants_step = False
        self._graph_task: int | None = None  # of the script's own last backward
        self._is_scaled = False  # `scale` has multiplied the loss of the next backward
        assert isinstance(model.reducer, ModuleReducer)
        self.reducer = model.reducer
        self.reducer.serve(self)
        model.begin_step(config.accumulation)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward.  Floating-point inputs are cast to the dtype of the weights."""
        self.sharded_model.parameters.gathers.check()
        if self._casts:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        with self._report.timed("forward"):
            return self.module(*args, **kwargs)

    def _cast(self, x: Any) -> Any:
        return x.to(self.sharded_model.policy.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run the backward of one micro-batch; return its contribution to the loss of the step.

        Args:
            loss: scalar, the mean over this rank's micro-batch.
            retain_graph: see torch's `backward`.
            scale_wrt_gas: divide by the number of micro-batches, so that the step's gradient is their mean.

        A second backward before `step()` adds to the step's gradient, as for the two losses of a discriminator.

        Raises:
            ValueError: the loss is no scalar.
            RuntimeError: a backward is running already.
        """
        if loss.numel() != 1:
            raise ValueError(f"loss has shape {list(loss.shape)}; backward takes a scalar, such as loss.mean()")
        if in_backward():
            raise RuntimeError("engine.backward within a backward, as in a hook: call it after the one that runs")
        loss = loss.reshape(())
        counted = loss / self.config.accumulation if scale_wrt_gas else loss
        self._begin_pass()
        self.runs_backward = True
        try:
            with self._report.timed("backward"):
                # Divided by dp before the backward: the sum over ranks is the mean.
                scale = self.sharded_model.scale / self.parallel_state.dp.size
                (counted.float() * scale).backward(retain_graph=retain_graph)
                self._end_pass()
        except BaseException:
            forget_failed_backward()
            raise
        finally:
            self.runs_backward = False
        self._loss_sum += counted.detach()
        return counted

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale.  Under fp16, call `.backward()` on the result."""
        if loss.numel() != 1:
            raise ValueError(f"loss has shape {list(loss.shape)}; scale takes a scalar, such as loss.mean()")
        self._loss_sum += loss.detach().reshape(()) / self.config.accumulation
        self._is_scaled = True
        return loss * self.sharded_model.scale

    def _begin_pass(self) -> None:
        reducer = self.reducer
        if self._wants_step:
            reducer.reopen()
        # A reduction of stages 0 and 1 starts in the last round; before it there is always one more to come.
        self._wants_step = self.is_gradient_accumulation_boundary() and not reducer.accumulates
        reducer.rounds = self._passes + (1 if self._wants_step else 2)

    def _end_pass(self) -> None:
        self._passes += 1
        self.reducer.close_pass(0)

    def admits(self, gradient: Tensor) -> bool:
        """Whether a gradient belongs to this step.  The first gradient of a script's own backward begins a micro-batch."""
        if self.runs_backward:
            return True
        if any(engine.runs_backward for engine in ENGINES.values()):
            return False
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            if self.sharded_model.scaler is not None and not self._is_scaled:
                raise RuntimeError("under fp16 call engine.backward(loss), or engine.scale(loss).backward()")
            if self.config.accumulation > 1 and self.sharded_model.policy.zero_stage < 2 and _is_within_backward():
                raise RuntimeError("a backward within one: call engine.backward(loss), or use megazero.checkpoint")
            if not self._is_scaled:
                self._loss_sum += torch.nan  # the engine has not seen the loss
            self._graph_task, self._is_scaled = task, False
            self._begin_pass()
            Variable._execution_engine.queue_callback(self._end_pass)
        gradient.div_(self.config.accumulation * self.parallel_state.dp.size)
        return True

    def is_in_pass(self) -> bool:
        """Whether the running backward is this engine's, or a script's own backward that has produced a gradient."""
        return self.runs_backward or torch._C._current_graph_task_id() == self._graph_task

    def step(self) -> None:
        """End a micro-batch, and at the end of a step update the weights.

        Raises:
            RuntimeError: there was no backward before, or the call is within `no_sync`.
            NonFiniteError, LossScaleError, StorageError: see `TrainingEngine`.
        """
        if self.reducer.accumulates:
            raise RuntimeError("engine.step() inside no_sync(): leave it for the last micro-batch of a step")
        if not self.is_gradient_accumulation_boundary():
            self.micro_steps += 1
            self._ended += 1
            self._step_applied = False
            return
        if not self._passes:
            raise RuntimeError("engine.step() without engine.backward(loss): there are no gradients")
        loss_sum, self._loss_sum = self._loss_sum, torch.zeros_like(self._loss_sum)
        self._passes, self._ended, self._wants_step = 0, 0, False
        self.micro_steps += 1  # also if the step fails: training then goes on with a new step
        self._finish_step(loss_sum, self.dp_world_size)
        self.reducer.learn_order(self.parallel_state.dp_cp)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step."""
        return self._ended + 1 >= self.config.accumulation if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the current micro-batch is the last of its step, until the next call, in place of the count."""
        self._boundary = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate micro-batches without communication in a `with` block.  Stages 2 and 3 then use unsharded buffers."""
        return self.reducer.accumulating()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the micro-batches since the last step.  The next one is the first of a step."""
        super().zero_grad(set_to_none)
        self._passes, self._ended, self._wants_step = 0, 0, False
        self._loss_sum.zero_()

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return whole weights and buffers in host memory on rank 0, and None on other ranks.  Collective.

        They are gathered bucket by bucket.  Trainer and accelerate save them at stage 3.
        """
        state = self.module.state_dict(keep_vars=True)
        if exclude_frozen_parameters:
            frozen = {name for name, held in state.items() if isinstance(held, nn.Parameter) and not held.requires_grad}
            state = {name: held for name, held in state.items() if name not in frozen}
        buckets: dict[object, list[Tensor]] = {}
        for name, value in state.items():
            buckets.setdefault(self.bound.home.get(name, (None, 0))[0], []).append(value)
        copies: dict[int, Tensor] = {}  # by identity: tied weights stay one tensor
        for values in buckets.values():
            new = {id(value): value for value in values if id(value) not in copies}
            with GatheredParameters(value for value in new.values() if isinstance(value, nn.Parameter)):
                for key, value in new.items():
                    copies[key] = value.detach().to("cpu", copy=True) if self.global_rank == 0 else value
        return {name: copies[id(value)] for name, value in state.items()} if self.global_rank == 0 else None

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the module's whole weights and buffers, in the dtype in which it computes, with torch.save on rank 0.

        Every rank calls this.  Raises: CheckpointError, on every rank: the file cannot be written.
        """
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

        def write() -> None:
            if state is not None:
                folder, file = folder_at(save_dir), io.BytesIO()
                torch.save(state, file)
                folder.make()
                folder.write(save_filename, file.getvalue())

        agree(write, self.parallel_state.world, CheckpointError)
        return True

    save_fp16_model = save_16bit_model

    def _begun(self) -> str:
        if not self._passes:
            return ""
        return f"{self._passes} of {self.config.accumulation} micro-batches of step {self.global_steps + 1} have run"

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train one step of a module that returns its loss, or a tuple that begins with it; return the mean over all ranks.

        Args:
            data_iter: yields micro-batches: a tensor, a tuple of arguments, or a dict of them; None for `training_data`.

        Raises:
            StopIteration: on every rank, before the step: one rank's data has too few micro-batches.
        """
        batches = self._on_every_rank(lambda: self._take(self._batches(data_iter)))
        self.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        try:
            for batch in batches:
                total += self.backward(self._loss_of(batch)).detach()
                self.step()
        except BaseException:  # an interrupt, too
            self.zero_grad()
            raise
        return self._mean_over_ranks(total)

    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """Return the mean loss of as many micro-batches as a step has, without gradients.  Arguments as `train_batch`."""
        batches = self._on_every_rank(lambda: self._take(data_iter))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._evaluating():
            for batch in batches:
                total += self._loss_of(batch) / self.config.accumulation
        return self._mean_over_ranks(total)

    def _take(self, data_iter: Iterator[Any]) -> list[Any]:
        return [next(data_iter) for _ in range(self.config.accumulation)]

    def _loss_of(self, batch: Any) -> Tensor:
        batch = tree_map(lambda x: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x, batch)
        if isinstance(batch, dict):
            output = self(**batch)
        else:
            output = self(*batch) if isinstance(batch, tuple | list) else self(batch)
        loss = output[0] if isinstance(output, tuple | list) else getattr(output, "loss", output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"train_batch needs a module that returns a scalar loss, not a {type(output).__name__}")
        return loss.reshape(())
