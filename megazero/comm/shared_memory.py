"""Memory that the ranks of one machine all see, and how they take turns in it to reduce and to gather.

    rank 0's area   [ half 0 | half 1 ]     every rank writes its own area and reads the others'
    rank 1's area   [ half 0 | half 1 ]
    round k         write half k % 2 | signal everyone | hear everyone | read the others' half k % 2

[Note: two halves]  Whoever has signalled round k + 1 has read round k to its end.  So once all have been heard in round
k + 1, half k % 2 may be written again, and one signal a round is enough.

[Note: one order]  What ranks begin in one room pairs up by its order, so every half says what it belongs to, and a rank that
finds something else there stops.  Ranks may differ in when they gather and when they reduce, so the two have rooms of their
own; and who waits in one room goes on in all others, or two ranks could wait for one another.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Generator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.comm.rendezvous import Listening, Meeting, Peer

HALF_BYTES = 1 << 19
_LABEL_BYTES = 64
_AREA_HALF_BYTES = HALF_BYTES + _LABEL_BYTES
AREA_BYTES = 2 * _AREA_HALF_BYTES

Rounds: TypeAlias = Generator[None, None, None]
"""An operation: it writes its area, yields, reads the others' areas, says `turn`, and so on."""


class Operation:
    """One operation under way; equal ones have equal labels on all ranks."""

    def __init__(self, label: str, rounds: Rounds) -> None:
        self.label = label.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES)
        self.rounds, self.has_begun, self.is_done = rounds, False, False


class SharedMemory:
    """One rank's view of the areas of all ranks that meet in it.  Operations run in the order in which they are begun.

    Args:
        meeting: with the ranks that share it; their areas have AREA_BYTES each.
        timeout_seconds: how long an operation may take.
        listening: shared by all rooms of this rank.
    """

    def __init__(self, meeting: Meeting, timeout_seconds: float, listening: Listening) -> None:
        self.place, self.size = meeting.place, len(meeting.areas)
        self._peers: Sequence[Peer] = meeting.peers
        self._timeout, self._listening = timeout_seconds, listening
        self._mapped = [mmap.mmap(area, AREA_BYTES) for area in meeting.areas]
        meeting.close_areas()
        wholes = [torch.frombuffer(mapped, dtype=torch.uint8) for mapped in self._mapped]
        self._halves = [[whole[half * _AREA_HALF_BYTES :][:HALF_BYTES] for whole in wholes] for half in range(2)]
        self._half = 0
        self._begun: deque[Operation] = deque()
        listening.add(self, self._peers)

    def areas(self, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's half of this round, 1-D."""
        return [half.view(dtype) for half in self._halves[self._half]]

    def turn(self) -> None:
        """What was written in this round has been read; the next one begins."""
        self._half = 1 - self._half

    def begin(self, label: str, rounds: Rounds) -> Operation:
        """Start an operation; where none is under way its first round is written at once.

        Args:
            label: the same on all ranks; at most 64 characters count.
            rounds: what it does.

        Raises:
            RuntimeError: the ranks do not begin the same operations in one order.
        """
        operation = Operation(label, rounds)
        self._begun.append(operation)
        self.go_on()
        return operation

    def finish(self, operation: Operation) -> None:
        """Run everything up to this operation to its end.

        Raises:
            RuntimeError: a peer is lost, or late, or does something else.
        """
        self.go_on()
        if not operation.is_done and not self._peers:
            raise RuntimeError("this rank has left the memory that it shared")
        self._listening.hear_until(lambda: operation.is_done, self._lacks_someone, self._timeout)

    def go_on(self) -> None:
        """Run the operations under way as far as the peers' signals allow."""
        while self._begun:
            first = self._begun[0]
            if first.has_begun:
                if not all(peer.signals for peer in self._peers):
                    return
                for peer in self._peers:
                    peer.signals -= 1
                self._check_labels(first)
            first.has_begun = True
            try:
                next(first.rounds)
            except StopIteration:
                first.is_done = True
                self._begun.popleft()
                continue
            self._mapped[self.place][self._label] = first.label
            for peer in self._peers:
                peer.signal()

    def close(self) -> None:
        """Leave: nothing is heard or said from here any more."""
        if self._peers:
            self._listening.remove(self, self._peers)
        for peer in self._peers:
            peer.close()
        self._peers = ()
        self._begun.clear()

    def _lacks_someone(self) -> bool:
        return any(peer.is_gone and not peer.signals for peer in self._peers)

    @property
    def _label(self) -> slice:
        """Where an area's half of this round says what it belongs to."""
        return slice(self._half * _AREA_HALF_BYTES + HALF_BYTES, (self._half + 1) * _AREA_HALF_BYTES)

    def _check_labels(self, mine: Operation) -> None:
        for place, mapped in enumerate(self._mapped):
            its = mapped[self._label]
            if its != mine.label:
                raise RuntimeError(
                    f"ranks differ in the order of their operations: number {place} of the group is in "
                    f"{its.decode().strip()}, this one in {mine.label.decode().strip()}"
                )
