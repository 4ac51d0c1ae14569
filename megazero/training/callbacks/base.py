"""Callbacks: their base class, the run that they receive, and the record of a step.

trainer   computes the step      -> StepRecord(position, loss, ...)
callback  after_step(record)     -> adds to record.metrics; returns a StepDecision, or None to let the run continue
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from megazero.config import ResolvedRun
from megazero.data import Corpus
from megazero.engine import Engine, Position, StepStatistics
from megazero.settings import Log

Metric = float | str | Mapping[str, float] | Mapping[str, list[int]]


class StepDecision(Enum):
    """The decision of a callback about a step.  All ranks must make the same decision."""

    SKIP = auto()  # this step changes no weight; its samples are consumed
    ROLL_BACK = auto()  # load the newest checkpoint and continue with the samples after this step's
    STOP = auto()  # save this step and end the run


@dataclass(frozen=True)
class SampleRange:
    """Global sample indices from `first` to `last`, both included."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last + 1 - self.first

    def __str__(self) -> str:
        return f"samples {self.first} to {self.last}"


@dataclass
class StepRecord:
    """The results of a step over the whole global batch."""

    position: Position  # where the run stands after the step
    samples: SampleRange  # what the step read
    statistics: StepStatistics | None = None  # None for a step that was skipped before it was computed
    lr: float | None = None  # learning rate of the step
    seconds: float | None = None  # duration of the step
    work_seconds: float | None = None  # the same without the time in which this rank waited for others
    memory_bytes: int | None = None  # see `peak_memory_bytes`
    sent_bytes: dict[str, int] = field(default_factory=dict)  # by axis; not those of evaluations and checkpoints
    skipped_steps: int | None = None  # left without an update by an overflow, so far in the run; None but under fp16
    is_last: bool = False  # the run ends after this step
    val_loss: float | None = None  # mean nats per token of the validation samples, where the run was evaluated
    val_losses: dict[str, float] = field(default_factory=dict)  # the same of each of `data.validation_sources`, by name
    mfu: float | None = None  # model FLOP/s as a share of the devices' peak, where that is known
    metrics: dict[str, Metric] = field(default_factory=dict)  # what callbacks report in addition, by key

    @property
    def step(self) -> int:
        """Number of steps done, including this one."""
        return self.position.step

    @property
    def loss(self) -> float | None:
        """Mean nats per counted token before the step; None for a step that was not computed."""
        return None if self.statistics is None else self.statistics.loss

    @property
    def skipped(self) -> str | None:
        """Why the step changed no weight: "overflow" (fp16), "not finite", "passed over"; None if it changed them."""
        if self.statistics is None:
            return "passed over"
        if not self.statistics.skipped:
            return None
        return "overflow" if self.statistics.finite else "not finite"

    @property
    def tokens_per_second(self) -> float | None:
        """Counted tokens per second of all ranks together."""
        return None if self.statistics is None or self.seconds is None else self.statistics.tokens / self.seconds

    def reported(self) -> dict[str, Metric]:
        """All metrics of this step, by key."""
        measured = self.statistics
        found = {
            "step": self.step,
            "loss": self.loss,
            "z_loss": None if measured is None else measured.z_loss or None,
            "grad_norm": None if measured is None else measured.grad_norm,
            "lr": self.lr,
            "tokens": self.position.tokens,
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.seconds,
            "memory_bytes": self.memory_bytes,
            "val_loss": self.val_loss,
            "val_losses": self.val_losses or None,
            "sent_bytes": self.sent_bytes,
            "loss_scale": None if measured is None or self.skipped_steps is None else measured.loss_scale,
            "skipped_steps": self.skipped_steps,
            "skipped": self.skipped,
            "mfu": self.mfu,
            "phase": len(self.position.phases) + 1 if self.position.phases else None,
            **self.metrics,
        }
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class RunContext:
    """What a callback can use of its run: configuration, engine, data, and the terminal."""

    run: ResolvedRun
    engine: Engine  # the model (`engine.chunks`, asked for anew after every step), its optimizer, and `engine.state`
    corpus: Corpus  # training and validation samples
    start: Position  # where the run starts, or resumes
    log: Log  # prints a line on the terminal, on rank 0 only


class Callback:
    """Base class of the callbacks of a run, which act between its steps.  A hook does nothing unless a subclass overrides
    it.

    All ranks call the same hooks in the same order, so a hook may call collectives if it does so on every rank; a
    constructor must not.  A decision must be the same on all ranks.  If a single rank wants the run to end, it sets
    `context.engine.wants_stop`, and the next step stops all ranks.

    A class that a script registers is constructed with the run's `RunContext`: `__init__(self, context)`.
    """

    def on_start(self) -> None:
        """Called once, before the first step."""

    def before_step(self, position: Position) -> StepDecision | None:
        """Called before each step with the position of the run so far.  Return SKIP to leave the step out."""

    def after_step(self, record: StepRecord) -> StepDecision | None:
        """Called after each step.  Return STOP, ROLL_BACK, or None to continue; any other value is an error.

        After ROLL_BACK, the remaining callbacks do not see the step.
        """

    def on_rollback(self, position: Position) -> None:
        """Called when the run has gone back to a checkpoint.  The steps after `position` will be repeated."""

    def on_end(self, position: Position) -> None:
        """Called once, after the last step.  Not called if the run fails."""

    def close(self) -> None:
        """Release resources.  Called once, at the very end, also if the run fails."""


@dataclass(frozen=True)
class RunSummary:
    """A summary of a run that has ended."""

    step: int
    loss: float | None  # of the last step, mean nats per token; None where there was none
    val_loss: float | None  # of the last evaluation
    checkpoint: str | None  # the newest complete step directory
    seconds: float  # duration of its steps
    sent_bytes: dict[str, int]  # by this rank, per axis
    skipped_steps: int  # that an overflow left without an update, since the start of the run
    stopped: bool  # the run was asked to stop before its last step; it was saved


def bytes_beside_torch(device: torch.device) -> int:
    """Return the bytes in use on a CUDA device outside of torch's allocator: of NCCL, CUDA itself and other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
