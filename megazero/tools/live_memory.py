"""Bytes of live tensors at the points of a step, measured by the allocator and not by adding up what should be there.

    start ... pass ... pass ... backward ... step        marks of one step; a new start forgets the step before
             |--------- most of them -----|

CUDA's allocator knows what is allocated.  The CPU's does not, but tells torch's profiler of every allocation and every
release: their sum up to a mark is what was live there.  Only what the thread that measures has allocated since it began is
counted, which is all there is if it begins before the engine is built.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

START = "start"
_MARK = "megazero: "
_QUIET = "9"  # above every level of the profiler's own messages


class LiveMemory(Protocol):
    """Use as a context; read when it is left."""

    live: dict[str, int]
    """Bytes at each point of the last step: the most, where it was marked more than once."""
    peak: int
    """Most bytes at any time since the last start."""

    def mark(self, point: str) -> None:
        """Note what is live now."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def live_memory(device: torch.device) -> LiveMemory:
    """A measure for tensors on a device."""
    return _AllocatorsCount(device) if device.type == "cuda" else _ProfiledEvents()


class _AllocatorsCount:
    def __init__(self, device: torch.device) -> None:
        self.live: dict[str, int] = {}
        self.peak = 0
        self._device, self._before = device, 0

    def __enter__(self) -> Self:
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def mark(self, point: str) -> None:
        if point == START:
            torch.cuda.reset_peak_memory_stats(self._device)
            self.live.clear()
        now = torch.cuda.memory_allocated(self._device) - self._before
        self.live[point] = max(self.live.get(point, 0), now)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.peak = torch.cuda.max_memory_allocated(self._device) - self._before


class _ProfiledEvents:
    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.peak = 0

    def __enter__(self) -> Self:
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profile.start()
        return self

    def mark(self, point: str) -> None:
        with torch.profiler.record_function(_MARK + point):
            pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.stop()
        if error is not None:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        changes = [(event["ts"], "", event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
        marks = [
            (event["ts"], event["name"].removeprefix(_MARK), 0)
            for event in events
            if event["name"].startswith(_MARK) and event.get("ph") == "X"
        ]
        self._add_up(sorted(changes + marks))

    def _add_up(self, events: list[tuple[float, str, int]]) -> None:
        """Events are (time, point or "", change in bytes), in order of time."""
        now = 0
        for _, point, change in events:
            now += change
            if point == START:
                self.live, self.peak = {}, now
            if point:
                self.live[point] = max(self.live.get(point, 0), now)
            self.peak = max(self.peak, now)
