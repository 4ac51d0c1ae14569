"""torch's optimizer over flat fp32 parts of buckets, and its state as checkpoints read and write it.

    bucket      [ group 0      | group 1 |pad]
    owned              [-------+--]                      what this rank updates
    parts              [ part  |pt]                      parameters of the optimizer; state of the same shape
    in a file          [ p | p |pt]                      parts of bounded size

Each group of the user's optimizer stays a group: a bucket is cut into parts that belong to one group each.  No step
enters this file; `stepper` has the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megazero.optim.optimizers import Lion, make_optimizer, state_names
from megazero.zero.bucket import Bucket, in_order_of_use
from megazero.zero.parameters import memory_kind
from megazero.zero.sharding import BucketLayout, Interval, intersect
from megazero.zero.storage import FILE_PART_ELEMENTS, FlatArray, StateMemory

# torch's fused kernels of these classes divide gradients by `grad_scale`; another class that is fused may not.
_SCALE_INSIDE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

# The initial state of these is known, so it can be allocated, and counted, before the first step.
_KNOWN_START = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, Lion)

MOMENTUM = "momentum_buffer"  # the state of matrices


class MatrixRecipe(NamedTuple):
    """How to update matrices; see `megazero.optim.optimizers.MatrixOptimizer`.  `beta` is the momentum's decay rate."""

    update: Callable[[Tensor], Tensor]
    flops: Callable[[int, int], int]
    beta: float


@dataclass(frozen=True)
class OptimizerRecipe:
    """Builds the optimizer after the flat parts of the buckets are known."""

    groups: int  # number of parameter groups
    states: tuple[str, ...]  # names of the element-wise state
    scalars: tuple[str, ...]  # names of the state that is one number
    build: Callable[[list[list[nn.Parameter]]], torch.optim.Optimizer]  # takes the parts of each group
    matrices: MatrixRecipe | None = None  # if not None, updates the last group, matrix by matrix

    @property
    def known_states(self) -> tuple[str, ...]:
        """Names of all element-wise state."""
        return self.states if self.matrices is None else (*self.states, MOMENTUM)


def recipe_of_class(
    cls: type[torch.optim.Optimizer], params: dict[str, Any], groups: Sequence[dict[str, Any]]
) -> OptimizerRecipe:
    """Return the recipe for an optimizer class.  For `cls` and `params` see `make_optimizer`.

    Args:
        groups: settings of each group.
    """

    def build(parts: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
        return make_optimizer(cls, params, [{**own, "params": part} for own, part in zip(groups, parts, strict=True)])

    probe = build([[nn.Parameter(torch.zeros(2))] for _ in groups])
    return OptimizerRecipe(len(groups), *state_names(probe), build)


@dataclass(eq=False)
class Part:
    """The elements of one bucket that belong to one optimizer group, or a slice of them."""

    bucket: Bucket
    run: Interval
    group: int
    parameter: nn.Parameter  # the master weights of these elements, as the optimizer's parameter
    arrays: dict[str, FlatArray] = field(default_factory=dict)  # their state by name, if it is in a file


class ShardedOptimizer:
    """An element-wise optimizer over the elements that this rank owns, and the momentum of matrices; `Stepper` steps it.

    Attributes:
        torch_optimizer: torch's or the user's optimizer, whose parameters are the flat parts.
        groups: the parameter groups of `torch_optimizer`, which holds copies of some of them during an update.
        parts: the parts of every bucket that trains, in the order in which a forward uses the buckets.  A bucket has no
            parts if this rank owns only its padding.
        elementwise: names of the state of elements that the element-wise optimizer updates.
        known_states: names of all element-wise state, even if it does not exist yet.
        scales_inside: the optimizer's kernel divides gradients by `grad_scale`.
        row_factors: by name of a matrix, the factor that multiplies each of its rows after the next update.
        steps_taken: number of steps that changed the weights.
    """

    def __init__(self, buckets: Sequence[Bucket], recipe: OptimizerRecipe, offload: StateMemory) -> None:
        self.elementwise, self._scalars, self.known_states = recipe.states, recipe.scalars, recipe.known_states
        trained = in_order_of_use([bucket for bucket in buckets if bucket.layout.trains])
        self.parts = {bucket: _cut(bucket) for bucket in trained}
        self._every = [part for parts in self.parts.values() for part in parts]
        of_groups: list[list[nn.Parameter]] = [[] for _ in range(recipe.groups)]
        for part in self._every:
            of_groups[part.group].append(part.parameter)
        self.torch_optimizer = recipe.build(of_groups)
        self.groups = self.torch_optimizer.param_groups
        self.steps_taken = 0
        self.row_factors: Mapping[str, Tensor] = {}
        self.scales_inside = type(self.torch_optimizer) in _SCALE_INSIDE and all(g.get("fused") for g in self.groups)
        for part in self._every:
            if part.bucket.master.location == "file":
                names = self.states_of(part.bucket.layout)
                part.arrays = {name: offload.allocate("file", part.run.size, torch.float32) for name in names}
        self._known_start = isinstance(self.torch_optimizer, _KNOWN_START)
        if self._known_start:
            for part in self._every:
                self._start_state(part)

    def _start_state(self, part: Part) -> None:
        """Create the initial state of a part."""
        on_device = self.scales_inside and part.parameter.device.type != "cpu"
        device = part.parameter.device if on_device else torch.device("cpu")
        value = self.groups[part.group].get("initial_accumulator_value", 0.0)  # Adagrad has it
        state = self.torch_optimizer.state[part.parameter]
        state.update({name: torch.full_like(part.parameter, value) for name in self.states_of(part.bucket.layout)})
        if not part.bucket.layout.first.matrix:
            state.update({name: torch.zeros((), device=device) for name in self._scalars})
        for array in part.arrays.values():
            if value:
                array.write(0, torch.full((part.run.size,), value))

    def states_of(self, layout: BucketLayout) -> tuple[str, ...]:
        """Names of the element-wise state of a bucket's parameters."""
        return (MOMENTUM,) if layout.first.matrix else self.elementwise

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the element-wise state that exists now: some optimizers have none before the first step."""
        return self.known_states if self._known_start or self.steps_taken else ()

    def read(self, name: str, bucket: Bucket, run: Interval) -> Tensor:
        """Return elements `run` of a state; this rank must own them.  A copy if they are in a file or in several parts."""
        values = [self._state_of(part, name, held) for part, held in self._covering(bucket, run)]
        return values[0] if len(values) == 1 else torch.cat(values)

    def memory(self, name: str, bucket: Bucket, run: Interval) -> Tensor | None:
        """Return a view of elements `run` of a state, to be overwritten.

        Returns None if the state does not exist yet, is in a file, or is not contiguous.
        """
        (part, held), *others = self._covering(bucket, run)
        if others or part.bucket.master.location == "file" or name not in self.torch_optimizer.state[part.parameter]:
            return None
        return self._state_of(part, name, held)

    def write(self, name: str, bucket: Bucket, run: Interval, values: Tensor) -> None:
        """Overwrite elements `run` of a state.  A state that does not exist yet is created."""
        for part, held in self._covering(bucket, run):
            mine = values[held.start - run.start : held.stop - run.start]
            if part.bucket.master.location == "file":
                part.arrays[name].write(held.start - part.run.start, mine)
                # marks the state as existing
                self.torch_optimizer.state[part.parameter].setdefault(name, torch.empty(0))
                continue
            if name not in self.torch_optimizer.state[part.parameter]:
                self._start_state(part)
            self._state_of(part, name, held).copy_(mine)

    def _covering(self, bucket: Bucket, run: Interval) -> list[tuple[Part, Interval]]:
        """Return the parts that hold elements `run` of a bucket, each with the interval that it holds."""
        found = [(part, held) for part in self.parts.get(bucket, ()) if (held := intersect(part.run, run))]
        if sum(held.size for _, held in found) != run.size:
            raise KeyError(f"elements {run.start}..{run.stop} of {bucket.layout.name} are not owned by this rank")
        return found

    def _state_of(self, part: Part, name: str, held: Interval) -> Tensor:
        start, stop = held.start - part.run.start, held.stop - part.run.start
        if part.bucket.master.location == "file":
            return part.arrays[name].read(start, stop)
        state: Tensor = self.torch_optimizer.state[part.parameter][name]
        return state[start:stop]

    def scalars(self) -> dict[str, dict[str, float]]:
        """Return the optimizer's scalar state (such as Adam's step count) for each group.

        One value per group is enough, because all parameters of a group have taken the same number of steps.
        """
        parts = self._every if self.steps_taken else ()
        states = {str(part.group): self.torch_optimizer.state[part.parameter] for part in parts}
        # The host waits for the device here: once for each group, not for each part.
        return {group: {key: float(its[key]) for key in self._scalars if key in its} for group, its in states.items()}

    def resume(self, steps_taken: int, scalars: dict[str, dict[str, float]]) -> None:
        """Continue as after `steps_taken` steps.  Element-wise state must have been written.

        Args:
            scalars: the merged result of `scalars()` of all ranks.
        """
        self.steps_taken, self.torch_optimizer.param_groups = steps_taken, self.groups
        for part in self._every:
            state = self.torch_optimizer.state[part.parameter]
            if not state and part.bucket.master.location != "file":
                self._start_state(part)
            saved = scalars.get(str(part.group), {})
            for name in () if part.bucket.layout.first.matrix else self._scalars:
                value = saved.get(name, float(steps_taken))
                if isinstance(state.get(name), Tensor):
                    state[name].fill_(value)
                else:
                    state[name] = torch.tensor(value)

    def reset(self) -> None:
        """Discard all state, so that the next step is the first one."""
        self.steps_taken = 0
        self.torch_optimizer.state.clear()
        for part in self._every:
            for array in part.arrays.values():
                array.write(0, torch.zeros(part.run.size))
            if self._known_start:
                self._start_state(part)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the element-wise state, by location."""
        sizes = {"optimizer": 0}
        for part in self._every:
            key = memory_kind("optimizer", part.bucket.master.location)
            if part.bucket.master.location == "file":
                nbytes = 4 * part.run.size * len(self.states_of(part.bucket.layout))
            else:
                state = self.torch_optimizer.state.get(part.parameter, {})
                nbytes = sum(state[name].nbytes for name in self.known_states if name in state)
            sizes[key] = sizes.get(key, 0) + nbytes
        return sizes


def _cut(bucket: Bucket) -> list[Part]:
    """Split the owned elements of a bucket by optimizer group; elements in a file are split further, to a bounded size."""
    parts, in_file = [], bucket.master.location == "file"
    for group, whole in bucket.layout.intervals(lambda info: info.group):
        run = intersect(whole, bucket.owned)
        if run is None:
            continue
        length = FILE_PART_ELEMENTS if in_file else run.stop - run.start
        for start in range(run.start, run.stop, length):
            piece = Interval(start, min(start + length, run.stop))
            values = torch.empty(0) if in_file else bucket.read(bucket.master, piece)
            parts.append(Part(bucket, piece, group, nn.Parameter(values.data, requires_grad=False)))
    return parts
