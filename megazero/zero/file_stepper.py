"""Steps optimizer state that lies in a file, part by part, through three sets of buffers.

set 0   read part 0 | step 0  | write 0 | read 3  ...
set 1               | read 1  | step 1  | write 1 ...      one set is read, one stepped, one written
set 2                         | read 2  | step 2  ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megazero.zero.bucket import Bucket, Interval
from megazero.zero.storage import FlatArray, Location, PendingCopy

_SETS = 3


@dataclass(eq=False)
class Part:
    """Elements of one bucket that one optimizer group steps."""

    bucket: Bucket
    run: Interval
    group: int
    parameter: nn.Parameter  # their master weights, as the optimizer sees them
    arrays: dict[str, FlatArray] = field(default_factory=dict)  # their state by name, where it lies in a file

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.run.stop - self.run.start

    @property
    def location(self) -> Location:
        """Where the master weights and the state lie."""
        return self.bucket.master.location


class FileStepper:
    """Reads those of the parts that lie in a file, has them stepped, and writes them back.  `states`: element-wise ones."""

    def __init__(self, parts: Sequence[Part], states: Sequence[str]) -> None:
        # Large ones first: a part that a group's border cuts off a shard then needs little beside the rest of it.
        self._parts = sorted((part for part in parts if part.location == "file"), key=lambda part: -part.numel)
        self._states = tuple(states)
        names = "master", *states
        self._sets = [{name: torch.zeros(part.numel) for name in names} for part in self._parts[:_SETS]]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffers in self._sets for buffer in buffers.values())

    def step(self, step_parts: Callable[[Sequence[Part]], None], optimizer: torch.optim.Optimizer) -> None:
        """Step every part with `step_parts`, while its parameter and its state in `optimizer` are bound to buffers.

        Raises: StorageError, the file could not be read or written.
        """
        reading = [self._read(0)] if self._parts else []
        writing: list[list[PendingCopy]] = []
        for index, part in enumerate(self._parts):
            if len(writing) > 1:  # the set that the next part is read into
                _wait(writing.pop(0))
            if index + 1 < len(self._parts):
                reading.append(self._read(index + 1))
            _wait(reading.pop(0))
            buffers = self._buffers(index)
            part.parameter.data = buffers["master"]
            state = optimizer.state[part.parameter]
            is_new = not state
            if not is_new:
                state.update({name: buffers[name] for name in self._states})
            step_parts([part])
            for name in self._states:
                if is_new:  # the optimizer has made its state itself
                    buffers[name].copy_(state[name])
                state[name] = torch.empty(0)
            part.parameter.data = torch.empty(0)
            writing.append(self._write(part, buffers))
        for copies in writing:
            _wait(copies)

    def _buffers(self, index: int) -> dict[str, Tensor]:
        numel = self._parts[index].numel
        return {name: buffer[:numel] for name, buffer in self._sets[index % _SETS].items()}

    def _read(self, index: int) -> list[PendingCopy]:
        part, buffers = self._parts[index], self._buffers(index)
        copies = [part.bucket.master.start_read(buffers["master"], part.run.start - part.bucket.owned.start)]
        return copies + [part.arrays[name].start_read(buffers[name], 0) for name in self._states]

    def _write(self, part: Part, buffers: dict[str, Tensor]) -> list[PendingCopy]:
        start = part.run.start - part.bucket.owned.start
        copies = [part.bucket.master.start_write(start, buffers["master"])]
        copies += [part.arrays[name].start_write(0, buffers[name]) for name in self._states]
        if part.bucket.weight_shard is not part.bucket.master:
            copies.append(part.bucket.weight_shard.start_write(start, buffers["master"]))
        return copies


def _wait(copies: Sequence[PendingCopy]) -> None:
    for copy in copies:
        copy.wait()
