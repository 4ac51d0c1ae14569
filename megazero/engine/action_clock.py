"""When the actions of a pipeline step start and end."""

from __future__ import annotations

import time
from typing import Any

import torch

from megazero.schedules.action import Action


class ActionClock:
    """Starts when it is made; `mark` is called before and after every action.

    On CUDA the marks are events in the stream of the actions, read after the step: a host that waits for the device within a
    step also waits for the messages that it has posted, so that the step would not be the one that it measures.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._start = self._now()
        self._marks: list[tuple[Action, Any]] = []

    def mark(self, action: Action) -> None:
        """Note the time at which an action starts, or ends."""
        self._marks.append((action, self._now()))

    def spans(self) -> list[tuple[Action, tuple[float, float]]]:
        """(start, end) of each action, in seconds from the start of the clock.  Waits for the device."""
        times = [(action, self._seconds_to(moment)) for action, moment in self._marks]
        return [(action, (begin, end)) for (action, begin), (_, end) in zip(times[::2], times[1::2], strict=True)]

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds_to(self, moment: Any) -> float:
        if not self._on_cuda:
            return float(moment - self._start)
        moment.synchronize()
        return float(self._start.elapsed_time(moment)) / 1e3  # it is in milliseconds
