"""The connections of a pipeline, made before its first step."""

from __future__ import annotations

from itertools import pairwise

import torch

from megazero.comm.collectives import exchange
from megazero.parallel_state import Axis
from megazero.schedules.action import Placement


def connect(placement: Placement, down: Axis, up: Axis) -> None:
    """Send a number between every two ranks that will exchange messages.  All ranks of the pipeline call it.

    NCCL connects two ranks at their first message, and their hosts wait for each other: in a step, one of them may have to
    post something else first.

    Args:
        placement: of the stages; messages pass between those that follow each other.
        down, up: as for `Executor`.

    Raises: LostPeerError.
    """
    forwards = {(one, other) for (one, _), (other, _) in pairwise(placement) if one != other}
    pairs = sorted(forwards | {(other, one) for one, other in forwards})
    for axis, goes_down in ((down, True), (up, False)):
        device = None if axis.group is None else axis.group.device
        along = [(sender, receiver) for sender, receiver in pairs if (sender < receiver) is goes_down]
        sends = [(torch.zeros(1, device=device), axis.ranks[to]) for sender, to in along if sender == axis.index]
        receives = [(torch.zeros(1, device=device), axis.ranks[sender]) for sender, to in along if to == axis.index]
        for pending in exchange(sends, receives, axis):
            pending.wait()
