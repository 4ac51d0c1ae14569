"""Updates optimizer state in a file, slice by slice, through three sets of buffers.

set 0   read 0      | step 0  | write 0 | read 3  ...
set 1               | read 1  | step 1  | write 1 ...      one set is read, one updated, one written
set 2                         | read 2  | step 2  ...
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, wait_all
from megazero.zero.optimizer import FlatParam

_SETS = 3


class FileStepper:
    """Updates flat parameters that are stored in a file: reads each into memory, steps it and writes it back.

    Args:
        params: the flat parameters; all of them are stored in a file.
        states: names of the element-wise state.

    Attributes:
        nbytes: bytes of the buffers.
    """

    def __init__(self, params: Sequence[FlatParam], states: Sequence[str]) -> None:
        # Largest first: each set has the size of its first parameter, and later ones must fit.
        self._params = sorted(params, key=lambda param: -param.interval.size)
        self._states = tuple(states)
        names = "master", *states
        self._sets = [{name: torch.zeros(param.interval.size) for name in names} for param in self._params[:_SETS]]
        self.nbytes = sum(buffer.nbytes for buffers in self._sets for buffer in buffers.values())

    def step(self, update: Callable[[Sequence[FlatParam]], None], optimizer: torch.optim.Optimizer) -> None:
        """Update every flat parameter by a call of `update`.  During that call the parameter and its state in `optimizer`
        are views of buffers in memory.

        Raises: StorageError: the file could not be read or written.
        """
        reading = [self._read(0)]
        writing: list[list[Pending]] = []
        for index, param in enumerate(self._params):
            if len(writing) > 1:  # the next parameter is read into the same set
                wait_all(writing.pop(0))
            if index + 1 < len(self._params):
                reading.append(self._read(index + 1))
            wait_all(reading.pop(0))
            buffers = self._buffers(index)
            param.parameter.data = buffers["master"]
            state = optimizer.state[param.parameter]
            is_new = not state
            if not is_new:
                state.update({name: buffers[name] for name in self._states})
            update([param])
            for name in self._states:
                if is_new:  # the optimizer created its state itself
                    buffers[name].copy_(state[name])
                state[name] = torch.empty(0)
            param.parameter.data = torch.empty(0)
            writing.append(self._write(param, buffers))
        for copies in writing:
            wait_all(copies)

    def _buffers(self, index: int) -> dict[str, Tensor]:
        numel = self._params[index].interval.size
        return {name: buffer[:numel] for name, buffer in self._sets[index % _SETS].items()}

    def _read(self, index: int) -> list[Pending]:
        param, buffers = self._params[index], self._buffers(index)
        copies = [param.bucket.master.start_read(buffers["master"], param.interval.start - param.bucket.owned.start)]
        return copies + [param.arrays[name].start_read(buffers[name], 0) for name in self._states]

    def _write(self, param: FlatParam, buffers: dict[str, Tensor]) -> list[Pending]:
        start = param.interval.start - param.bucket.owned.start
        copies = [param.bucket.master.start_write(start, buffers["master"])]
        copies += [param.arrays[name].start_write(0, buffers[name]) for name in self._states]
        if param.bucket.weight_shard is not param.bucket.master:
            copies.append(param.bucket.weight_shard.start_write(start, buffers["master"]))
        return copies
