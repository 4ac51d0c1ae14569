"""torch's optimizer over flat fp32 parameters, and its state as checkpoints read and write it.

    bucket      [ group 0      | group 1 |pad]
    owned              [-------+--]                      what this rank updates
    flat parameters    [   0   | 1]                      parameters of the optimizer; state of the same shape
    in a file          [ 0 | 1 | 2]                      slices of bounded size

Each group of the user's optimizer stays a group: every flat parameter belongs to one group.  The step itself is in
`stepper`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megazero.optim.optimizers import Lion, make_optimizer, state_names
from megazero.zero.bucket import Bucket, in_order_of_use
from megazero.zero.parameters import memory_key
from megazero.zero.sharding import BucketLayout, Interval, intersect
from megazero.zero.storage import FILE_SLICE_ELEMENTS, FlatArray, StateMemory

# torch's fused kernels of these classes divide gradients by `grad_scale`; another class that is fused may not.
_SCALE_INSIDE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

# The initial state of these is known, so it can be allocated, and counted, before the first step.
_KNOWN_START = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, Lion)

MOMENTUM = "momentum_buffer"  # the state of matrices


class MatrixUpdate(NamedTuple):
    """How to update matrices; see `megazero.optim.optimizers.MatrixOptimizer`.  `beta` is the momentum's decay rate."""

    update: Callable[[Tensor], Tensor]
    flops: Callable[[int, int], int]
    beta: float


@dataclass(frozen=True)
class OptimizerFactory:
    """Builds the optimizer when the flat parameters of the buckets are known."""

    groups: int  # number of parameter groups
    states: tuple[str, ...]  # names of the element-wise state
    scalars: tuple[str, ...]  # names of the state that is one number
    build: Callable[[list[list[nn.Parameter]]], torch.optim.Optimizer]  # takes the flat parameters of each group
    matrices: MatrixUpdate | None = None  # if not None, updates the last group, matrix by matrix

    @property
    def known_states(self) -> tuple[str, ...]:
        """Names of all element-wise state."""
        return self.states if self.matrices is None else (*self.states, MOMENTUM)


def factory_of_class(
    cls: type[torch.optim.Optimizer], params: dict[str, Any], groups: Sequence[dict[str, Any]]
) -> OptimizerFactory:
    """Return the factory for an optimizer class.  For `cls` and `params` see `make_optimizer`.

    Args:
        groups: settings of each group.
    """

    def build(of_groups: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
        return make_optimizer(cls, params, [{**own, "params": of} for own, of in zip(groups, of_groups, strict=True)])

    probe = build([[nn.Parameter(torch.zeros(2))] for _ in groups])
    return OptimizerFactory(len(groups), *state_names(probe), build)


@dataclass(eq=False)
class FlatParam:
    """A parameter of torch's optimizer: the elements of one bucket that belong to one group and that this rank owns, or a
    slice of them.
    """

    bucket: Bucket
    interval: Interval
    group: int
    parameter: nn.Parameter  # the master weights of these elements, as the optimizer's parameter
    arrays: dict[str, FlatArray] = field(default_factory=dict)  # their state by name, if it is in a file


class ShardedOptimizer:
    """An element-wise optimizer over the elements that this rank owns, and the momentum of matrices; `Stepper` steps it.

    Attributes:
        torch_optimizer: torch's or the user's optimizer; it sees the flat parameters.
        groups: the parameter groups of `torch_optimizer`, which holds copies of some of them during an update.
        flat_params: those of every bucket that trains, in the order in which a forward uses the buckets.  A bucket has
            none if this rank owns only its padding.
        elementwise: names of the state of elements that the element-wise optimizer updates.
        known_states: names of all element-wise state, even if it does not exist yet.
        scales_inside: the optimizer's kernel divides gradients by `grad_scale`.
        row_factors: by name of a matrix, the factor that multiplies each of its rows after the next update.
        steps_taken: number of steps that changed the weights.
    """

    def __init__(self, buckets: Sequence[Bucket], factory: OptimizerFactory, offload: StateMemory) -> None:
        self.elementwise, self._scalars, self.known_states = factory.states, factory.scalars, factory.known_states
        trained = in_order_of_use([bucket for bucket in buckets if bucket.layout.trains])
        self.flat_params = {bucket: _flat_params_of(bucket) for bucket in trained}
        self._all = [param for params in self.flat_params.values() for param in params]
        of_groups: list[list[nn.Parameter]] = [[] for _ in range(factory.groups)]
        for param in self._all:
            of_groups[param.group].append(param.parameter)
        self.torch_optimizer = factory.build(of_groups)
        self.groups = self.torch_optimizer.param_groups
        self.steps_taken = 0
        self.row_factors: Mapping[str, Tensor] = {}
        self.scales_inside = type(self.torch_optimizer) in _SCALE_INSIDE and all(g.get("fused") for g in self.groups)
        for param in self._all:
            if param.bucket.master.location == "file":
                names = self.states_of(param.bucket.layout)
                param.arrays = {name: offload.allocate("file", param.interval.size, torch.float32) for name in names}
        self._known_start = isinstance(self.torch_optimizer, _KNOWN_START)
        if self._known_start:
            for param in self._all:
                self._start_state(param)

    def _start_state(self, param: FlatParam) -> None:
        """Create the initial state of a flat parameter."""
        on_device = self.scales_inside and param.parameter.device.type != "cpu"
        device = param.parameter.device if on_device else torch.device("cpu")
        value = self.groups[param.group].get("initial_accumulator_value", 0.0)  # Adagrad has it
        state = self.torch_optimizer.state[param.parameter]
        state.update({name: torch.full_like(param.parameter, value) for name in self.states_of(param.bucket.layout)})
        if not param.bucket.layout.first.matrix:
            state.update({name: torch.zeros((), device=device) for name in self._scalars})
        for array in param.arrays.values():
            if value:
                array.write(0, torch.full((param.interval.size,), value))

    def states_of(self, layout: BucketLayout) -> tuple[str, ...]:
        """Names of the element-wise state of a bucket's parameters."""
        return (MOMENTUM,) if layout.first.matrix else self.elementwise

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the element-wise state that exists now: some optimizers have none before the first step."""
        return self.known_states if self._known_start or self.steps_taken else ()

    def read(self, name: str, bucket: Bucket, interval: Interval) -> Tensor:
        """Return elements `interval` of a state; this rank must own them.  A copy if they are in a file or in several
        flat parameters.
        """
        values = [self._state_of(param, name, held) for param, held in self._covering(bucket, interval)]
        return values[0] if len(values) == 1 else torch.cat(values)

    def memory(self, name: str, bucket: Bucket, interval: Interval) -> Tensor | None:
        """Return a view of elements `interval` of a state, to be overwritten.

        Returns None if the state does not exist yet, is in a file, or is not contiguous.
        """
        (param, held), *others = self._covering(bucket, interval)
        if others or param.bucket.master.location == "file" or name not in self.torch_optimizer.state[param.parameter]:
            return None
        return self._state_of(param, name, held)

    def write(self, name: str, bucket: Bucket, interval: Interval, values: Tensor) -> None:
        """Overwrite elements `interval` of a state.  A state that does not exist yet is created."""
        for param, held in self._covering(bucket, interval):
            mine = values[held.start - interval.start : held.stop - interval.start]
            if param.bucket.master.location == "file":
                param.arrays[name].write(held.start - param.interval.start, mine)
                # marks the state as existing
                self.torch_optimizer.state[param.parameter].setdefault(name, torch.empty(0))
                continue
            if name not in self.torch_optimizer.state[param.parameter]:
                self._start_state(param)
            self._state_of(param, name, held).copy_(mine)

    def _covering(self, bucket: Bucket, interval: Interval) -> list[tuple[FlatParam, Interval]]:
        """Return the flat parameters that hold elements `interval` of a bucket, each with the interval that it holds."""
        every = self.flat_params.get(bucket, ())
        found = [(param, held) for param in every if (held := intersect(param.interval, interval))]
        if sum(held.size for _, held in found) != interval.size:
            raise KeyError(f"elements {interval.start}..{interval.stop} of {bucket.layout.name} belong to another rank")
        return found

    def _state_of(self, param: FlatParam, name: str, held: Interval) -> Tensor:
        start, stop = held.start - param.interval.start, held.stop - param.interval.start
        if param.bucket.master.location == "file":
            return param.arrays[name].read(start, stop)
        state: Tensor = self.torch_optimizer.state[param.parameter][name]
        return state[start:stop]

    def scalars(self) -> dict[str, dict[str, float]]:
        """Return the optimizer's scalar state (such as Adam's step count) for each group.

        One value per group is enough, because all parameters of a group have taken the same number of steps.
        """
        params = self._all if self.steps_taken else ()
        states = {str(param.group): self.torch_optimizer.state[param.parameter] for param in params}
        # The host waits for the device here: once for each group, not for each flat parameter.
        return {group: {key: float(its[key]) for key in self._scalars if key in its} for group, its in states.items()}

    def resume(self, steps_taken: int, scalars: dict[str, dict[str, float]]) -> None:
        """Continue as after `steps_taken` steps.  Element-wise state must have been written.

        Args:
            scalars: the merged result of `scalars()` of all ranks.
        """
        self.steps_taken, self.torch_optimizer.param_groups = steps_taken, self.groups
        for param in self._all:
            state = self.torch_optimizer.state[param.parameter]
            if not state and param.bucket.master.location != "file":
                self._start_state(param)
            saved = scalars.get(str(param.group), {})
            for name in () if param.bucket.layout.first.matrix else self._scalars:
                value = saved.get(name, float(steps_taken))
                if isinstance(state.get(name), Tensor):
                    state[name].fill_(value)
                else:
                    state[name] = torch.tensor(value)

    def reset(self) -> None:
        """Discard all state, so that the next step is the first one."""
        self.steps_taken = 0
        self.torch_optimizer.state.clear()
        for param in self._all:
            for array in param.arrays.values():
                array.write(0, torch.zeros(param.interval.size))
            if self._known_start:
                self._start_state(param)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the element-wise state, by location."""
        sizes = {"optimizer": 0}
        for param in self._all:
            key = memory_key("optimizer", param.bucket.master.location)
            if param.bucket.master.location == "file":
                nbytes = 4 * param.interval.size * len(self.states_of(param.bucket.layout))
            else:
                state = self.torch_optimizer.state.get(param.parameter, {})
                nbytes = sum(state[name].nbytes for name in self.known_states if name in state)
            sizes[key] = sizes.get(key, 0) + nbytes
        return sizes


def _flat_params_of(bucket: Bucket) -> list[FlatParam]:
    """Split the owned elements of a bucket by optimizer group; elements in a file are split further, to a bounded size."""
    params, in_file = [], bucket.master.location == "file"
    for group, interval in bucket.layout.intervals(lambda info: info.group):
        owned = intersect(interval, bucket.owned)
        if owned is None:
            continue
        length = FILE_SLICE_ELEMENTS if in_file else owned.size
        for start in range(owned.start, owned.stop, length):
            own = Interval(start, min(start + length, owned.stop))
            values = torch.empty(0) if in_file else bucket.read(bucket.master, own)
            params.append(FlatParam(bucket, own, group, nn.Parameter(values.data, requires_grad=False)))
    return params
