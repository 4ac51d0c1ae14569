"""Reports how well a step uses its time: model FLOP/s utilization, slow ranks, the load of experts; collects garbage.

    MFU = tokens / second * FLOPs per token / (devices * peak FLOP/s)

FLOPs of repeated computation, such as the logits of a chunked head, are not counted.
"""

import gc
import json
import socket
import time
from collections.abc import Callable, Collection, Sequence
from statistics import fmean, median_low
from typing import NamedTuple, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from megazero.comm.agreement import in_thread
from megazero.config import ResolvedRun
from megazero.config.schema import LoggingConfig
from megazero.data.sampler import SampleStream
from megazero.engine import Engine
from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.parallel_state import ParallelState
from megazero.registry import added
from megazero.settings import Log, listed
from megazero.training.callbacks.base import Callback, StepRecord

T = TypeVar("T")

_NOTICEABLE_SECONDS = 0.01
_MOST_RANKS_NAMED = 4
# The store is waited for so long, and after the last step of a run the other ranks.
_LAST_SECONDS, _POLL_SECONDS = 5.0, 0.01


class Utilization(Callback):
    """Sets `record.mfu` if the peak of the devices is known.  Masked tokens count, since they are computed, too.

    Args:
        samples: the training data; if attention stays within documents, the documents of its first samples stand for all.
    """

    def __init__(
        self, run: ResolvedRun, device: torch.device, dtype: torch.dtype, samples: SampleStream | None = None
    ) -> None:
        peak = peak_flops(device, dtype, run.config.logging.peak_flops)
        lengths = None
        if samples is not None and run.config.data.document_mask:
            lengths = [length for each in samples.first_documents() for length in each]
        flops = model_flops_per_token(run.config.model, lengths) * run.config.model.seq_len
        self._seconds_at_peak = None if peak is None else flops / (peak * run.world_size)  # of a sample

    def after_step(self, record: StepRecord) -> None:
        if record.seconds is not None and self._seconds_at_peak is not None:
            record.mfu = self._seconds_at_peak * len(record.samples) / record.seconds


class ExpertLoads(Callback):
    """Reports every so many steps how evenly tokens were routed to experts; see `engine.balance.ExpertLoad`."""

    def __init__(self, engine: Engine, every_steps: int) -> None:
        self._engine, self._every = engine, every_steps

    def after_step(self, record: StepRecord) -> None:
        routers, measured = self._engine.routers, record.statistics
        if routers is not None and measured is not None and record.step % self._every == 0:
            record.metrics |= routers.load(measured.tokens).metrics()


def model_flops_per_token(model: ModelConfig, lengths: Collection[int] | None = None) -> float:
    """Return the FLOPs of the model's forward and backward per token, without repeated computation.

    Args:
        lengths: lengths of the documents that attention stays within; None for whole samples.
    """
    if model.ffn_hidden_size is None:
        raise ValueError("model.ffn_hidden_size is not resolved; count the FLOPs of a resolved config")
    return FAMILIES[model.family].flops_per_token(model, lengths)


def peak_flops(device: torch.device, dtype: torch.dtype, given: float | None) -> float | None:
    """Return the peak FLOP/s of a device: `given` if set, else from the table of known devices; None if unknown."""
    if given is not None or device.type != "cuda":
        return given
    known = (peak(torch.cuda.get_device_name(device), dtype) for peak in added("peak FLOP/s").values())
    return next(filter(None, known), None)


class RankWork(NamedTuple):
    """The seconds per step that a rank computes, without waits for other ranks.  Ranks of a stage have equal work."""

    step: int  # the last of those that it is the mean of
    rank: int
    host: str
    stage: int
    seconds: float


def slow_ranks(works: Sequence[RankWork], ratio: float) -> list[tuple[RankWork, float]]:
    """Return the ranks that take more than `ratio` times the median, each with that median, the slowest first.

    The median is that of the rank's pipeline stage, or of all ranks if the rank is alone in its stage.
    """
    found = []
    for work in works:
        peers = [other.seconds for other in works if other.stage == work.stage]
        median = median_low(peers if len(peers) > 1 else [other.seconds for other in works])
        if work.seconds > ratio * median and work.seconds - median > _NOTICEABLE_SECONDS:
            found.append((work, median))
    return sorted(found, key=lambda pair: -pair[0].seconds)


def spread_of(works: Sequence[RankWork]) -> dict[str, float]:
    """Return the minimum, median and maximum seconds over all ranks, and the slowest rank."""
    seconds = [work.seconds for work in works]
    slowest = max(works, key=lambda work: work.seconds)
    return {"min": min(seconds), "median": median_low(seconds), "max": slowest.seconds, "slowest_rank": slowest.rank}


class Stragglers(Callback):
    """Compares the computing time of all ranks every `logging.straggler_every_steps` steps, and reports slow ranks.

        rank 0    step 50, write | step 51, read all ranks' and report
        rank 1    step 50, write | step 51

    A rank writes its time of step 50 to the store before it takes part in step 51; a missing time is read after later steps.

    Args:
        store: the run's store; None in a world of one rank.
        log: prints a line on the terminal of rank 0.
    """

    def __init__(self, logging: LoggingConfig, state: ParallelState, store: Store | None, log: Log) -> None:
        self._every = 0 if store is None else logging.straggler_every_steps
        self._ratio, self._state, self._log = logging.straggler_ratio, state, log
        self._store = None if store is None else PrefixStore("work", store)
        self._seconds: list[float] = []
        # On rank 0: the step to compare, the ranks that have not written it yet, and the work of the others.
        self._step, self._missing, self._found = 0, list[str](), list[RankWork]()

    def after_step(self, record: StepRecord) -> None:
        """Write this rank's time if due; report slow ranks, and the metric `own_seconds`, of the last comparison."""
        if self._store is None or not self._every:
            return
        self._report(record)
        if record.work_seconds is None:
            return
        self._seconds.append(record.work_seconds)
        if record.step % self._every:
            return
        state, host = self._state, socket.gethostname()
        mine = RankWork(record.step, state.rank, host, state.at.pp, fmean(self._seconds))
        self._seconds = []
        self._ask(lambda store: store.set(str(state.rank), json.dumps(mine)))
        if state.rank == 0:
            self._step, self._missing, self._found = record.step, [str(rank) for rank in range(state.world.size)], []
            end = time.monotonic() + _LAST_SECONDS
            while record.is_last and self._missing and time.monotonic() < end:
                self._report(record)
                time.sleep(_POLL_SECONDS)

    def _report(self, record: StepRecord) -> None:
        if not self._missing or not self._read():
            return
        works = sorted(self._found, key=lambda work: work.rank)
        record.metrics["own_seconds"] = spread_of(works)
        slow = slow_ranks(works, self._ratio)
        lines = [
            f"rank {work.rank} on {work.host} is slow: {work.seconds:.2f} s of its own work per step, the median is "
            f"{median:.2f} s"
            for work, median in slow
        ]
        if lines:
            self._log(listed(lines, _MOST_RANKS_NAMED, "\n"))

    def _read(self) -> bool:
        """Read the times that missing ranks have written.  Returns whether all ranks have written theirs."""
        missing = self._missing
        if texts := self._ask(lambda store: store.multi_get(missing) if store.check(missing) else None):
            works = [RankWork(*json.loads(text)) for text in texts]
            self._found += [work for work in works if work.step >= self._step]
            self._missing = [str(work.rank) for work in works if work.step < self._step]
        return not self._missing

    def _ask(self, call: Callable[[Store], T]) -> T | None:
        """Return the answer of the store; None if it has died or hangs.  A store that hangs is not asked again."""
        if (store := self._store) is None:
            return None
        try:
            return in_thread(lambda: call(store)).result(_LAST_SECONDS)
        except TimeoutError:
            self._log("the store of the run does not answer: slow ranks are not looked for any more")
            self._store = None
        except RuntimeError:  # it has died
            pass
        return None


class GarbageCollection(Callback):
    """Runs Python's garbage collector between steps, at the same step on every rank.

        by default   any allocation may start a collection: one rank pauses inside a step, and the others wait for it
        here         build the engine -> freeze all objects -> | step step ... step | collect | step step ...

    Reference counting frees the objects of a step, including its tensors.  Only cycles need the collector, and no cycle
    of a step holds a tensor.  Objects older than the first step are frozen: no collection visits them again.

    If the program itself has frozen objects, nothing more is frozen, because both could not be told apart afterwards.
    """

    def __init__(self, every_steps: int = 100) -> None:
        self._every_steps = every_steps
        self._was_enabled = self._has_frozen = False

    def on_start(self) -> None:
        self._was_enabled, self._has_frozen = gc.isenabled(), gc.get_freeze_count() == 0
        if self._has_frozen:
            gc.collect()  # otherwise garbage would be frozen too
            gc.freeze()
        gc.disable()

    def after_step(self, record: StepRecord) -> None:
        if record.step % self._every_steps == 0:
            gc.collect()

    def close(self) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
