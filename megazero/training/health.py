"""Is the run well?  What a step's numbers say, and what to do about them.

    loss or norm not a number  -> NonFinitePolicy     stop, leave the update out, or go back and on with new samples
    a step named in the file   -> steps_passed_over   its samples are passed over
    a loss far off the others  -> LossSpikes          said, with the samples to blame
    a rank slower than others  -> Stragglers          said, by rank and host

All ranks see the same losses and norms, so they take the same turn without asking one another.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite, sqrt
from statistics import fmean, median_low

from megazero.comm.collectives import gather_objects
from megazero.config.schema import LoggingConfig, TrainingConfig
from megazero.engine import NonFiniteError, Position, StepStatistics
from megazero.parallel_state import ParallelState


@dataclass(frozen=True)
class Samples:
    """The samples of one step or of several, by global index: first to last.  `str` gives them as a message has them."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"samples {self.first} to {self.last}"


class StepDecision(Enum):
    """How the run goes on after a step."""

    ON = "on"
    SKIP = "not finite"
    BACK = "back"


class NonFinitePolicy:
    """What becomes of a step whose loss or gradient norm is not a number; such a step has not changed the weights.

    Args:
        training: `on_non_finite`, and `non_finite_limit`: so many such steps in a row end the run (skip), or so many
            goings back are allowed (rollback).

    Source: going back and passing over the samples: PaLM, Chowdhery et al. 2022, section 5.1.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._policy, self._limit = training.on_non_finite, training.non_finite_limit
        self._skip_steps = training.skip_steps
        self.in_a_row = self.goings_back = 0

    def judge(self, statistics: StepStatistics, step: int, samples: Samples) -> StepDecision:
        """Decide how to go on after a step.

        Args:
            statistics: what it measured.
            step: its number.
            samples: what it read.

        Raises:
            NonFiniteError: the run is to stop.
        """
        if statistics.finite:
            self.in_a_row = 0
            return StepDecision.ON
        found = (
            f"step {step}, {samples}: loss={statistics.loss} and grad_norm={statistics.grad_norm} must be finite; "
            "the weights were not changed. "
        )
        if self._policy == "stop":
            raise NonFiniteError(
                found + "Resume from the last checkpoint with a lower learning rate, pass these samples over with "
                f"{skipping_also(step, self._skip_steps)}, or let the run do so itself with training.on_non_finite=skip "
                "or rollback"
            )
        self.in_a_row += 1
        self.goings_back += 1
        if self._policy == "skip" and self.in_a_row >= self._limit:
            raise NonFiniteError(
                found
                + f"That makes {self.in_a_row} such steps in a row (training.non_finite_limit={self._limit}): it is "
                "not the samples. Resume from an earlier checkpoint with a lower learning rate"
            )
        if self._policy == "rollback" and self.goings_back > self._limit:
            raise NonFiniteError(
                found + f"The run has already gone back {self._limit} times (training.non_finite_limit). "
                "Resume from an earlier checkpoint with a lower learning rate"
            )
        return StepDecision.SKIP if self._policy == "skip" else StepDecision.BACK


def position_after_going_back(back: Position | None, bad: Position, samples: Samples) -> Position:
    """Where a run goes on that has loaded its newest checkpoint: at its step, behind the samples of the bad step.

    Args:
        back: of the checkpoint; None where there is none.
        bad: after the bad step.
        samples: of the bad step.

    Raises:
        NonFiniteError: there was no checkpoint.
    """
    if back is None:
        raise NonFiniteError(
            f"step {bad.step}, {samples}, is not finite, and there is no checkpoint to go back to yet; set "
            'checkpoint.save_every_steps below that step, or training.on_non_finite = "skip"'
        )
    return Position(back.step, bad.samples, bad.tokens)


def steps_passed_over(step: int, ranges: Sequence[tuple[int, int]]) -> int:
    """How many steps to pass over from `step` on, it included; 0 where it is in none of the (first, last) ranges."""
    last = step - 1
    while inside := [end for begin, end in ranges if begin <= last + 1 <= end]:
        last = max(inside)
    return last - step + 1


def skipping_also(step: int, ranges: Sequence[tuple[int, int]]) -> str:
    """The setting that passes over a step besides those of the (first, last) ranges."""
    listed = [f"{first}" if first == last else f"[{first},{last}]" for first, last in ranges]
    return f"training.skip_steps=[{','.join([*listed, str(step)])}]"


@dataclass(frozen=True)
class Spike:
    """A loss far above those before it.

    Args:
        mean: the weighted mean of the losses before.
        sigmas: how many of their standard deviations the loss lies above it.
    """

    mean: float
    sigmas: float

    def line(self, step: int, loss: float, samples: Samples, skip_steps: Sequence[tuple[int, int]] = ()) -> str:
        """The report; `skip_steps` are those that the run passes over already."""
        return (
            f"step {step}: loss {loss:.4f} is {self.sigmas:.1f} deviations above its recent mean {self.mean:.4f}; "
            f"to go on without {samples}, resume from before with {skipping_also(step, skip_steps)}"
        )


class LossSpikes:
    """Exponentially weighted mean and deviation of the loss, and the losses that stand out.

    A spike counts only as far as the threshold, so that one does not hide the next, while a loss that stays high becomes
    the new normal.

    Args:
        sigmas: deviations above the mean that make a spike; 0 finds none.
        warm_up_steps: losses to see before the first judgement.
        memory_steps: losses back are weighted by 1/e.

    Source: Finch 2009, Incremental calculation of weighted mean and variance, section 9.
    """

    def __init__(self, sigmas: float, *, warm_up_steps: int = 20, memory_steps: int = 50) -> None:
        self._sigmas, self._warm_up, self._weight = sigmas, warm_up_steps, 1 / memory_steps
        self._seen, self._mean, self._variance = 0, 0.0, 0.0

    def look(self, loss: float) -> Spike | None:
        """Take the next loss; a spike, if it is one."""
        if not (self._sigmas and isfinite(loss)):
            return None
        spike = None
        if self._seen >= self._warm_up:
            # a loss that hardly moves must not make a spike of its rounding
            deviation = max(sqrt(self._variance), 1e-3 * abs(self._mean), 1e-12)
            sigmas = (loss - self._mean) / deviation
            if sigmas > self._sigmas:
                spike = Spike(self._mean, sigmas)
                loss = self._mean + self._sigmas * deviation
        self._seen += 1
        weight = max(self._weight, 1 / self._seen)  # a plain mean until the memory is full
        change = loss - self._mean
        self._mean += weight * change
        self._variance = (1 - weight) * (self._variance + weight * change * change)
        return spike


@dataclass(frozen=True)
class RankWork:
    """What a rank's own work took, the waiting for others taken off.

    Args:
        rank: which.
        host: where it runs.
        stage: its pipeline stage: ranks of one stage have the same work.
        seconds: mean of its steps.
    """

    rank: int
    host: str
    stage: int
    seconds: float


_NOTICEABLE_SECONDS = 0.01


def laggards(works: Sequence[RankWork], ratio: float) -> list[tuple[RankWork, float]]:
    """The ranks whose work takes more than `ratio` times the median, the slowest first, each with that median.

    A rank is compared with those of its pipeline stage, or with all where it is the only one there.
    """
    found = []
    for work in works:
        peers = [other.seconds for other in works if other.stage == work.stage]
        median = median_low(peers if len(peers) > 1 else [other.seconds for other in works])
        if work.seconds > ratio * median and work.seconds - median > _NOTICEABLE_SECONDS:
            found.append((work, median))
    return sorted(found, key=lambda one: -one[0].seconds)


def spread_of(works: Sequence[RankWork]) -> dict[str, float]:
    """What the metrics tell of all ranks' work: min, median and max in seconds, and the slowest rank."""
    seconds = [work.seconds for work in works]
    slowest = max(works, key=lambda work: work.seconds)
    return {"min": min(seconds), "median": median_low(seconds), "max": slowest.seconds, "slowest_rank": slowest.rank}


class Stragglers:
    """Every so many steps a look at all ranks' own work.

    Args:
        logging: how often, and what is slow.
        state: this rank's place.
    """

    def __init__(self, logging: LoggingConfig, state: ParallelState) -> None:
        self._every = logging.straggler_every_steps if state.world.size > 1 else 0
        self._ratio, self._state = logging.straggler_ratio, state
        self._seconds: list[float] = []

    def look(self, step: int, own_seconds: float) -> tuple[dict[str, float] | None, list[str]]:
        """Take a step's own work; where a look is due, the spread over the ranks and a line for each that lags.

        A collective call where one is due.
        """
        self._seconds.append(own_seconds)
        if not self._every or step % self._every:
            return None, []
        mine = RankWork(self._state.rank, socket.gethostname(), self._state.at.pp, fmean(self._seconds))
        self._seconds = []
        works = gather_objects(mine, self._state.world)
        slow = laggards(works, self._ratio)
        lines = [
            f"rank {work.rank} on {work.host} lags: {work.seconds:.2f} s of its own work a step, "
            f"the median is {median:.2f} s"
            for work, median in slow[:_LARGEST_NUMBER_NAMED]
        ]
        if len(slow) > _LARGEST_NUMBER_NAMED:
            lines.append(f"... and {len(slow) - _LARGEST_NUMBER_NAMED} more ranks lag")
        return spread_of(works), lines


_LARGEST_NUMBER_NAMED = 4
