"""The schedules that `parallel.schedule` may name; a script may register its own, see `ScheduleKind`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazero.registry import Registry

if TYPE_CHECKING:
    from megazero.schedules.kind import ScheduleKind

_BUILT_IN = {
    "gpipe": "GPIPE",
    "1f1b": "ONE_F_ONE_B",
    "interleaved": "INTERLEAVED",
    "zb-h1": "ZERO_BUBBLE_H1",
    "zbv": "ZERO_BUBBLE_V",
}
SCHEDULES: Registry[ScheduleKind] = Registry(
    "schedule", {name: f"megazero.schedules.built_in:{value}" for name, value in _BUILT_IN.items()}
)
