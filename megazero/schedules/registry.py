"""The schedules that `parallel.schedule` may name.  A script may register its own; see `ScheduleFactory`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazero.registry import Registry

if TYPE_CHECKING:
    from megazero.schedules.factory import ScheduleFactory

SCHEDULES: Registry[ScheduleFactory] = Registry(
    "schedule",
    {
        "gpipe": "megazero.schedules.gpipe:GPIPE",
        "1f1b": "megazero.schedules.one_f_one_b:ONE_F_ONE_B",
        "interleaved": "megazero.schedules.interleaved:INTERLEAVED",
        "interleaved-pairs": "megazero.schedules.interleaved:INTERLEAVED_PAIRS",
        "zb-h1": "megazero.schedules.zero_bubble:ZERO_BUBBLE_H1",
        "zbv": "megazero.schedules.zero_bubble:ZERO_BUBBLE_V",
        "dualpipev": "megazero.schedules.dualpipev:DUAL_PIPE_V",
    },
    "megazero.schedules.factory:ScheduleFactory",
)
