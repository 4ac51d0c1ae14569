"""Fake tensors that know what made them, so that it can be said which of them live at the peak.

label "layer 3, forward"  ->  storages 17, 18, 19       a log of what came and went, one entry each
                                                        replayed up to the peak: what lived there, by label
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megazero.plan.fake_tensors import FakeTensors

_KERNEL = "what a kernel takes inside"


@dataclass(frozen=True)
class Living:
    """Tensors with one label that are live at the peak."""

    what: str
    nbytes: int
    tensors: int
    micro_batches: int  # in which they were made; 0 where that means nothing


class LabelledTensors(FakeTensors):
    """A `FakeTensors` with labels.

    Attributes:
        label: of the storages that are made from now on: what makes them, and the micro-batch or -1.
        peak_label: what ran when the peak was reached.
    """

    def __init__(self, kernel_bytes: Callable[..., int]) -> None:
        super().__init__(kernel_bytes=kernel_bytes)
        self.label: tuple[str, int] = ("building the engine", -1)
        self._what: dict[int, tuple[tuple[str, int], int]] = {}  # by number of a storage: its label and bytes
        self._log: list[int] = []  # numbers of storages as they come, negative as they go
        self._alive: dict[int, None] = {}
        self._peak_at, self.peak_label, self._in_kernel = 0, self.label, 0

    def begin(self) -> None:
        """Start to look for the peak."""
        self._log = [*self._alive]
        self._what = {number: self._what[number] for number in self._log}
        self.peak, self._peak_at, self.peak_label, self._in_kernel = self.live, len(self._log), self.label, 0

    def at_peak(self, kinds: Mapping[int, str]) -> list[Living]:
        """Return what was live at the peak, largest first.  `kinds`: names of some storages, by number."""
        alive: set[int] = set()
        for number in self._log[: self._peak_at]:
            (alive.add if number > 0 else alive.discard)(abs(number))
        sizes, counts, passes = Counter({_KERNEL: self._in_kernel}), Counter[str](), defaultdict[str, set[int]](set)
        for number in sorted(alive):
            (what, micro_batch), nbytes = self._what[number]
            what = kinds.get(number, what)
            sizes[what] += nbytes
            counts[what] += 1
            if number not in kinds and micro_batch >= 0:
                passes[what].add(micro_batch)
        return [Living(what, nbytes, counts[what], len(passes[what])) for what, nbytes in sizes.most_common() if nbytes]

    def _note(self, number: int, size: int) -> None:
        self._log.append(number)
        if number < 0:
            self._alive.pop(-number)
            return
        self._alive[number], self._what[number] = None, (self.label, size)

    def _reach(self, in_use: int) -> None:
        if in_use > self.peak:
            self.peak, self._peak_at, self.peak_label = in_use, len(self._log), self.label
            self._in_kernel = in_use - self.live
