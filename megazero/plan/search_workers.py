"""Processes that compute shapes for a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_all_start_methods, get_context
from typing import Generic, TypeAlias, TypeVar

from megazero.plan.choices import Choice, Relief

T = TypeVar("T")
Work: TypeAlias = tuple[Choice, Sequence[Relief]]


class Workers(Generic[T]):
    """Processes that compute shapes; shapes with equal stages go to the same process, which caches their traces."""

    def __init__(self, compute: Callable[[Choice, Sequence[Relief], str], T], processes: int) -> None:
        self._compute, self._count = compute, processes
        self._stack, self._pools = ExitStack(), list[Executor]()

    def __enter__(self) -> Workers[T]:
        method = "fork" if "fork" in get_all_start_methods() else "spawn"
        for _ in range(self._count if self._count > 1 else 0):
            self._pools.append(self._stack.enter_context(ProcessPoolExecutor(1, get_context(method))))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def map(self, work: Sequence[Work], mode: str) -> Iterator[T]:
        """Yield the needs of each shape, in order."""
        if not self._pools:
            yield from (self._compute(shape, reliefs, mode) for shape, reliefs in work)
            return
        waiting: list[Future[T]] = []
        loads = [0] * len(self._pools)
        at: dict[object, int] = {}
        for shape, reliefs in work:
            layers = shape.tp, shape.cp, shape.pp, shape.schedule
            index = at.setdefault(layers, loads.index(min(loads)))
            loads[index] += 1
            waiting.append(self._pools[index].submit(self._compute, shape, reliefs, mode))
        yield from (one.result() for one in waiting)
