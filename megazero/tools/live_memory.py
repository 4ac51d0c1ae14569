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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

START = "start"
_MARK = "megazero: "
_QUIET = "9"  # above every level of the profiler's own messages


@dataclass
class LiveMemory:
    """What `live_memory` measures.

    Args:
        mark: notes what is live at a point of the step.
        live: bytes at each point of the last step, the largest if it was marked more than once; complete after the context.
        peak: most bytes at any time since the last start; known after the context.
    """

    mark: Callable[[str], None]
    live: dict[str, int] = field(default_factory=dict)
    peak: int = 0

    def note(self, point: str, now: int) -> None:
        """Enter the live bytes of a point; a start begins a new step."""
        if point == START:
            self.live, self.peak = {}, now
        self.live[point] = max(self.live.get(point, 0), now)


def live_memory(device: torch.device) -> AbstractContextManager[LiveMemory]:
    """Measure the tensors on a device."""
    return _cuda_memory(device) if device.type == "cuda" else _profiled_memory()


@contextmanager
def _cuda_memory(device: torch.device) -> Iterator[LiveMemory]:
    before = torch.cuda.memory_allocated(device)

    def mark(point: str) -> None:
        if point == START:
            torch.cuda.reset_peak_memory_stats(device)
        memory.note(point, torch.cuda.memory_allocated(device) - before)

    memory = LiveMemory(mark)
    yield memory
    memory.peak = torch.cuda.max_memory_allocated(device) - before


@contextmanager
def _profiled_memory() -> Iterator[LiveMemory]:
    def mark(point: str) -> None:
        with torch.profiler.record_function(_MARK + point):
            pass

    memory = LiveMemory(mark)
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        yield memory
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [(event["ts"], "", event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
    found = [event for event in events if event["name"].startswith(_MARK) and event.get("ph") == "X"]
    now = 0
    for _, point, change in sorted(changes + [(e["ts"], e["name"].removeprefix(_MARK), 0) for e in found]):
        now += change
        if point:
            memory.note(point, now)
        memory.peak = max(memory.peak, now)
