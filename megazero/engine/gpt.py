"""A GPT on one rank as a run trains it: built, compiled, saved and loaded.  Its step is in `step.py`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megazero.checkpoint.folder import Location, folder_at
from megazero.checkpoint.index import HF_CONFIG, to_json
from megazero.checkpoint.load import open_checkpoint
from megazero.checkpoint.save import save_checkpoint
from megazero.checkpoint.saver import Saver
from megazero.comm.agreement import agree
from megazero.comm.collectives import all_reduce
from megazero.config import RunConfig
from megazero.engine.outline import may_compile
from megazero.engine.phases import Position, check_same_run, position_after, trainer_state
from megazero.engine.stage_runner import ChunkRunner, StageRunner
from megazero.engine.step import NonFiniteError, StepEngine
from megazero.models.gpt import GPTStage, MicroBatch
from megazero.models.registry import FAMILIES
from megazero.parallel_state import ParallelState
from megazero.schedules.action import Schedule
from megazero.schedules.executor import Message
from megazero.schedules.factory import GivenSchedule
from megazero.schedules.registry import SCHEDULES
from megazero.settings import hide_passwords


class Engine(StepEngine):
    """One rank of a training run; see `initialize`.  Call every method on every rank, in the same order.

    Attributes:
        compiles: whether blocks are compiled.
    """

    compiles = False

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

    def compile_ahead(self, samples: int, count: int, *, evaluates: bool) -> None:
        """Compile all stages at the same time, before the first step.  No-op if nothing is compiled.

        Otherwise, in the first step, each stage would compile while the next ones wait for its message, under the time
        limit of collectives.  A micro-batch of zeros passes through every chunk, without messages, and its results are
        discarded like those of a failed step.

        Args:
            samples, count: number of samples in a micro-batch, and of micro-batches in a step.
            evaluates: whether the run evaluates, which compiles once more.
        """
        if not self.compiles:
            return
        seq_len, device = self.config.model.seq_len, self.state.device
        tokens = torch.zeros(seq_len, samples, dtype=torch.int64, device=device)
        shard = self.batch_slice.sequence_shard([[seq_len]] * samples if self.batch_slice.documents else None, seq_len)
        batches = [self.batch_slice.cut(torch.arange(samples, device=device), tokens, tokens, shard)] * count
        schedule, unit_gradient = self._executor_of(batches, trains=True).schedule, torch.ones((), device=device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []), self.state.traffic.uncounted():
            for trains in (True, False) if evaluates else (True,):
                self._begin_step(batches)
                self._chunks.train(trains)
                runner = self._runner(batches, schedule, (lambda: unit_gradient) if trains else None)
                for chunk, stage in enumerate(self._stages):
                    x = None if stage.embedding is not None else self._new_activation(samples, None)
                    with torch.set_grad_enabled(trains):
                        y = runner.forward(chunk, 0, x and (x[0].zero_(),))
                    if trains:
                        runner.backward(chunk, 0, y and tuple(map(torch.zeros_like, y)))
                        runner.backward_weight(chunk, 0)
            self._begin_step(batches)

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
