"""Updates optimizer state in a file, part by part, through three sets of buffers.

set 0   read part 0 | step 0  | write 0 | read 3  ...
set 1               | read 1  | step 1  | write 1 ...      one set is read, one updated, one written
set 2                         | read 2  | step 2  ...
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, wait_all
from megazero.zero.optimizer import Part

_SETS = 3


class FileStepper:
    """Updates optimizer parts that are stored in a file: reads each into memory, steps it and writes it back.

    Args:
        parts: the parts; all of them are stored in a file.
        states: names of the element-wise state.

    Attributes:
        nbytes: bytes of the buffers.
    """

    def __init__(self, parts: Sequence[Part], states: Sequence[str]) -> None:
        # Largest first: each set has the size of its first part, and later parts must fit.
        self._parts = sorted(parts, key=lambda part: -part.run.size)
        self._states = tuple(states)
        names = "master", *states
        self._sets = [{name: torch.zeros(part.run.size) for name in names} for part in self._parts[:_SETS]]
        self.nbytes = sum(buffer.nbytes for buffers in self._sets for buffer in buffers.values())

    def step(self, step_parts: Callable[[Sequence[Part]], None], optimizer: torch.optim.Optimizer) -> None:
        """Update every part by a call of `step_parts`.  During that call the part's parameter and its state in
        `optimizer` are views of buffers in memory.

        Raises: StorageError: the file could not be read or written.
        """
        reading = [self._read(0)]
        writing: list[list[Pending]] = []
        for index, part in enumerate(self._parts):
            if len(writing) > 1:  # the next part is read into the same set
                wait_all(writing.pop(0))
            if index + 1 < len(self._parts):
                reading.append(self._read(index + 1))
            wait_all(reading.pop(0))
            buffers = self._buffers(index)
            part.parameter.data = buffers["master"]
            state = optimizer.state[part.parameter]
            is_new = not state
            if not is_new:
                state.update({name: buffers[name] for name in self._states})
            step_parts([part])
            for name in self._states:
                if is_new:  # the optimizer created its state itself
                    buffers[name].copy_(state[name])
                state[name] = torch.empty(0)
            part.parameter.data = torch.empty(0)
            writing.append(self._write(part, buffers))
        for copies in writing:
            wait_all(copies)

    def _buffers(self, index: int) -> dict[str, Tensor]:
        numel = self._parts[index].run.size
        return {name: buffer[:numel] for name, buffer in self._sets[index % _SETS].items()}

    def _read(self, index: int) -> list[Pending]:
        part, buffers = self._parts[index], self._buffers(index)
        copies = [part.bucket.master.start_read(buffers["master"], part.run.start - part.bucket.owned.start)]
        return copies + [part.arrays[name].start_read(buffers[name], 0) for name in self._states]

    def _write(self, part: Part, buffers: dict[str, Tensor]) -> list[Pending]:
        start = part.run.start - part.bucket.owned.start
        copies = [part.bucket.master.start_write(start, buffers["master"])]
        copies += [part.arrays[name].start_write(0, buffers[name]) for name in self._states]
        if part.bucket.weight_shard is not part.bucket.master:
            copies.append(part.bucket.weight_shard.start_write(start, buffers["master"]))
        return copies
