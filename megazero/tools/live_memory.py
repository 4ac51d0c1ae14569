"""Bytes of live tensors at points of a step, as the allocator counts them.

    start ... pass ... pass ... backward ... step        marks of one step; a new start forgets the step before
             |---- the largest of them --|

CUDA's allocator knows how much is allocated.  The CPU's does not, but it reports every allocation and release to torch's
profiler: their sum up to a mark is what was live there.  Only what the measuring thread allocates inside the context is
counted, so enter it before the engine is built.
"""

from __future__ import annotations

import json
import os
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

START = "start"
_MARK = "megazero: "
_QUIET = "9"  # above every level of the profiler's own messages


class LiveMemory(ABC):
    """Use as a context; read the results after it.

    Attributes:
        live: bytes at each point of the last step; the largest if it was marked more than once.
        peak: most bytes at any time since the last start.
    """

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.peak = 0

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def mark(self, point: str) -> None:
        """Note what is live now."""

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def _note(self, point: str, now: int) -> None:
        self.live[point] = max(self.live.get(point, 0), now)


def live_memory(device: torch.device) -> LiveMemory:
    """The meter for tensors on a device."""
    return _CudaMemory(device) if device.type == "cuda" else _ProfiledMemory()


class _CudaMemory(LiveMemory):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._before = device, 0

    def __enter__(self) -> Self:
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def mark(self, point: str) -> None:
        if point == START:
            torch.cuda.reset_peak_memory_stats(self._device)
            self.live.clear()
        self._note(point, torch.cuda.memory_allocated(self._device) - self._before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.peak = torch.cuda.max_memory_allocated(self._device) - self._before


class _ProfiledMemory(LiveMemory):
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
        found = [event for event in events if event["name"].startswith(_MARK) and event.get("ph") == "X"]
        marks = [(event["ts"], event["name"].removeprefix(_MARK), 0) for event in found]
        now = 0
        for _, point, change in sorted(changes + marks):
            now += change
            if point == START:
                self.live, self.peak = {}, now
            if point:
                self._note(point, now)
            self.peak = max(self.peak, now)
