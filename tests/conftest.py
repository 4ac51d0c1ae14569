"""Test folders that hold shared modules, and how processes of the tests share the cores."""

import os
import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parent / "laws"),
    str(Path(__file__).parent / "extending"),
]

# Worlds have more ranks than there are cores.  While a rank sends, gloo's loop thread spins on a lock that the sending
# thread holds; a receiver that it wakes must not take the core from it, or the spinning lasts a time slice.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# OpenMP's threads must not spin either while they wait for one that has no core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
