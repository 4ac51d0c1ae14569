"""Plan against measured, in one line at step 10, where the run's directory has a plan."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import torch

from megazero.plan.correction import PLAN_FILE, Kept, Measured, add_measured, read_kept
from megazero.plan.devices import DEVICES, device_of
from megazero.training.callbacks.base import Callback, RunContext, StepRecord

_FIRST, _LAST = 6, 10  # before, kernels are compiled and chosen


class PlanCheck(Callback):
    """Compares steps 6 to 10 of rank 0 with the `plan.json` that `megazero plan --keep` wrote, and adds what it measured.

    Without a plan, for another shape, or in a run that begins after step 6, it says nothing.
    """

    def __init__(self, context: RunContext) -> None:
        self._run, self._device, self._say = context.run, context.engine.state.device, context.say
        self._is_first = context.engine.state.rank == 0
        self._path = Path(self._run.config.training.run_dir) / PLAN_FILE
        self._plan: Kept | None = None
        self._seconds: list[float] = []

    def on_start(self) -> None:
        self._plan = read_kept(self._path) if self._is_first else None

    def after_step(self, record: StepRecord) -> None:
        if self._plan is None or not _FIRST <= record.step <= _LAST or record.seconds is None:
            return
        self._seconds.append(record.seconds)
        if record.step == _LAST and len(self._seconds) == _LAST - _FIRST + 1:
            self._compare(self._plan, record)

    def _compare(self, plan: Kept, record: StepRecord) -> None:
        on_cuda = self._device.type == "cuda"
        sent = {axis: count for axis, count in record.sent_bytes.items() if count}
        found = Measured(median(self._seconds), record.memory_bytes if on_cuda else None, sent)
        if on_cuda:
            device = device_of(set(re.findall(r"\w+", torch.cuda.get_device_name(self._device))))
            name = device.name if device else ""
        else:  # a CPU that was calibrated, this one as far as can be known
            name = "" if plan.device in DEVICES else plan.device
        line, kept = plan.compared(self._run, name, found)
        if not line:
            return
        self._say(line)
        try:
            add_measured(self._path, kept)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            self._say(f"{self._path} did not take what was measured ({error}); the run goes on")
