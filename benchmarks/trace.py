"""How busy a device was during a step, from a trace of torch's profiler, and where it waited."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONG_US = 10.0  # between two kernels that are queued already a device takes one to three

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass(frozen=True)
class Wait:
    """The device had nothing to do.

    Args:
        us: for how long.
        at_ms: since the step's first work.
        before: what it did next.
    """

    us: float
    at_ms: float
    before: str


@dataclass(frozen=True)
class Business:
    """A step on the device.

    Args:
        span_ms: from its first work to the end of its last.
        pieces: kernels, copies and fills.
        waits: between them, in order.
    """

    span_ms: float
    pieces: int
    waits: list[Wait]

    @property
    def busy_ms(self) -> float:
        """Of the span, with something running."""
        return self.span_ms - sum(wait.us for wait in self.waits) / 1e3

    def __str__(self) -> str:
        long = [wait for wait in self.waits if wait.us > LONG_US]
        long_ms = sum(wait.us for wait in long) / 1e3
        lines = [
            f"the device was busy for {self.busy_ms:.1f} of {self.span_ms:.1f} ms; between its {self.pieces} pieces of work "
            f"{self.span_ms - self.busy_ms - long_ms:.1f} ms passed, and {len(long)} waits above {LONG_US:g} us took "
            f"{long_ms:.1f} ms"
        ]
        longest = sorted(long, key=lambda wait: -wait.us)[:5]
        lines += [f"  {wait.us:6.0f} us at {wait.at_ms:7.1f} ms, before {wait.before[:80]}" for wait in longest]
        return "\n".join(lines)


def business_of(events: Iterable[Mapping[str, Any]]) -> Business:
    """Sum the events of a trace up, times in us.

    Raises:
        ValueError: nothing ran on a device.
    """
    work = sorted((one for one in events if one.get("cat") in _ON_DEVICE), key=lambda one: float(one["ts"]))
    if not work:
        raise ValueError("the trace has no work on a device")
    first = end = float(work[0]["ts"])
    waits = []
    for one in work:
        start = float(one["ts"])
        if start > end:
            waits.append(Wait(start - end, (end - first) / 1e3, str(one["name"])))
        end = max(end, start + float(one["dur"]))
    return Business((end - first) / 1e3, len(work), waits)


def read_business(path: Path) -> Business:
    """As `business_of`, of a file that `export_chrome_trace` wrote, packed or not."""
    return business_of(_events(path))


def hidden_share(path: Path) -> float:
    """The share of the time of copies between host and device during which a kernel computes, of such a file.

    Raises:
        ValueError: nothing was copied.
    """
    changes = list[tuple[float, int, int]]()  # when, and how many kernels and copies more run then
    for one in _events(path):
        name, start = str(one.get("name")), float(one.get("ts", 0))
        computes = one.get("cat") == "kernel" and not name.startswith("nccl")
        copies = one.get("cat") == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name)
        if computes or copies:
            changes += [(start, computes, copies), (start + float(one["dur"]), -computes, -copies)]
    hidden = total = before = 0.0
    kernels = copying = 0
    for at, computes, copies in sorted(changes):
        total += copying * (at - before)
        hidden += copying * (at - before) * (kernels > 0)
        before, kernels, copying = at, kernels + computes, copying + copies
    if not total:
        raise ValueError("the trace has no copies between host and device")
    return hidden / total


def _events(path: Path) -> Any:
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
