"""Labels of operations: ranks that meet in a collective compare what each of them believes it is doing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megazero.comm.messages import LABEL_TAG, wait_for
from megazero.parallel_state import Axis
from megazero.parallel_state.groups import Wait

LABEL_BYTES = 256


class OrderError(RuntimeError):
    """Ranks have started different operations where each should have started the same one."""


def encoded(label: str) -> bytes:
    """A label as ranks compare it, `LABEL_BYTES` long; what identifies it comes first."""
    return label.encode()[:LABEL_BYTES].ljust(LABEL_BYTES)


def check_labels(labels: Mapping[int, bytes], expected: bytes) -> None:
    """Raises: OrderError: a rank, by its number in the group, is in an operation with another label."""
    for index, found in labels.items():
        if found != expected:
            theirs, mine = (label.decode(errors="replace").strip() for label in (found, expected))
            raise OrderError(
                f"ranks differ in the order of their operations: number {index} of the group is in {theirs}, this one in "
                f"{mine}; every rank must run the same modules in the same order"
            )


def start_comparing(
    label: str, axis: Axis, step: int = 1, wait_for: Callable[[Sequence[Any]], object] = wait_for
) -> Wait:
    """Tell the rank `step` places ahead what this one starts; the wait compares it with what the one behind has told.

    One message over host memory, however many ranks there are.  Without a label there is none.
    """
    if not label:
        return lambda: None
    mine, theirs = encoded(label), torch.empty(LABEL_BYTES, dtype=torch.uint8)
    told, before = torch.frombuffer(bytearray(mine), dtype=torch.uint8), (axis.index - step) % axis.size
    works: list[Any] = [
        dist.irecv(theirs, axis.ranks[before], axis.host_group, LABEL_TAG),
        dist.isend(told, axis.ranks[(axis.index + step) % axis.size], axis.host_group, LABEL_TAG),
    ]

    def wait() -> None:
        wait_for(works)
        check_labels({before: bytes(theirs.numpy())}, mine)

    return wait
