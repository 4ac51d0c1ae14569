"""Turns the allocator's error into one that says what holds the memory and which settings would fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megazero.annexes import added
from megazero.config import ResolvedRun
from megazero.engine import Engine
from megazero.parallel_state import ParallelState


class OutOfMemoryError(RuntimeError):
    """This rank's device, or its host, has no memory left."""


@contextmanager
def explained(run: ResolvedRun, state: ParallelState, engine: Engine | None = None) -> Iterator[None]:
    """A context in which memory may run out; `engine` is None while it is being built.  Raises: OutOfMemoryError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        of_the_host = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        if not (of_the_host or isinstance(error, torch.OutOfMemoryError)):
            raise
        text = str(error)
        for explain in added("out of memory").values():
            try:
                text = explain(text, run, state, engine)
            except Exception as failure:  # what is known must not hide behind it
                text = f"{text} (not explained: {failure!r})"
        raise OutOfMemoryError(text) from error
