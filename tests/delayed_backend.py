"""A test double: collectives whose results are delayed at random, and never before they are waited for.

Until its wait, what an operation writes to holds NaN, and what it reads from must not change.  So whoever reads too soon, or
writes too soon, is found out, whatever the timing of the machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megazero.comm import collectives
from megazero.parallel_state import Axis
from megazero.parallel_state.axis import Counts, Wait
from megazero.parallel_state.state import Backend

_LONGEST_DELAY = 1e-3


class DelayedBackend:
    """Wraps a backend; its operations work on copies."""

    def __init__(self, inner: Backend, seed: int) -> None:
        self._inner, self._random = inner, random.Random(seed)
        self.needs_scratch, self.runs_by_itself = inner.needs_scratch, inner.runs_by_itself

    def _delayed(self, wait: Wait, arrived: Tensor, out: Tensor, given: Tensor | None) -> Wait:
        before = None if given is None else given.clone()
        # a place in `out` that is read, too, is not written before the end
        if given is None or given.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
            out.data.fill_(torch.nan)

        def finish() -> None:
            time.sleep(self._random.uniform(0, _LONGEST_DELAY))
            wait()
            if given is not None and before is not None:
                assert torch.equal(given, before), "what is sent has changed before the wait"
            out.data.copy_(arrived)

        return finish

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait:
        arrived = tensor.detach().clone()
        return self._delayed(self._inner.all_reduce(arrived, axis, op), arrived, tensor, None)

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait:
        arrived = torch.empty_like(out)
        return self._delayed(self._inner.all_gather(arrived, shard.clone(), axis, label), arrived, out, shard)

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis) -> Wait:
        arrived = torch.empty_like(out)
        return self._delayed(self._inner.reduce_scatter(arrived, full.clone(), axis), arrived, out, full)

    def all_to_all(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        arrived = torch.empty_like(out)
        return self._delayed(self._inner.all_to_all(arrived, x.clone(), axis), arrived, out, x)

    def all_to_all_rows(self, out: Tensor, x: Tensor, axis: Axis, sends: Counts, receives: Counts) -> Wait:
        arrived = torch.empty_like(out)
        wait = self._inner.all_to_all_rows(arrived, x.clone(), axis, sends, receives)
        return self._delayed(wait, arrived, out, x)

    def ring_shift(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        arrived = torch.empty_like(out)
        return self._delayed(self._inner.ring_shift(arrived, x.clone(), axis), arrived, out, x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def delayed_collectives(rank: int) -> Iterator[None]:
    """Groups that choose their backends within it have delayed ones."""
    choose = collectives.choose_backend
    collectives.choose_backend = lambda *args: DelayedBackend(choose(*args), rank)  # type: ignore[assignment]
    try:
        yield
    finally:
        collectives.choose_backend = choose
