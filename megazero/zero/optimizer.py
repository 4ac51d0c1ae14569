"""The optimizer step on flat fp32 shards in any location, with one factor for clipping and loss scaling.

    location of a bucket's state   updated in one call
    device                         all buckets: torch's fused kernel sees a few long tensors
    host                           one bucket, followed by the copy of its new weights to the device
    file                           part of a bucket (`FileStepper`); the next is read and the last written meanwhile

If the weights of a bucket are gathered as soon as it is updated, buckets on the device are also updated one after the
other, in the order in which a forward uses them, and those in a file last.  Small adjacent buckets share a call.

Each group of the user's optimizer stays a group: a bucket is updated interval by interval, and an interval belongs to
one group.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megazero.optim.optimizers import Lion, make_optimizer, state_names
from megazero.zero.bucket import Bucket, BucketLayout, Interval, in_order_of_use, intersect
from megazero.zero.file_stepper import FileStepper, Part
from megazero.zero.matrices import MOMENTUM, MatrixRecipe, MatrixStepper
from megazero.zero.offload import FILE_PART_ELEMENTS, Offload
from megazero.zero.parameters import memory_kind

# torch's fused kernels of these classes divide gradients by `grad_scale`; another class that is fused may not.
_SCALE_INSIDE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

# The initial state of these is known, so it can be allocated, and counted, before the first step.
_KNOWN_START = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, Lion)

# Update at most this many elements on the device in one call: that takes about as long as the call itself on the host,
# 0.1 ms.
CALL_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}


@dataclass(frozen=True)
class OptimizerRecipe:
    """Builds an optimizer when its flat parts are known."""

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


#: Called as (bucket, step): the bucket is updated if `step` is None, otherwise `step` has yet to update it.
Stepped: TypeAlias = Callable[[Bucket, Callable[[], None] | None], None]


class ShardedOptimizer:
    """Any element-wise optimizer over the owned elements of every bucket.  `matrices` updates the buckets of matrices.

    Attributes:
        torch_optimizer: torch's or the user's optimizer, whose parameters are the flat parts.
        row_factors: by name of a matrix, what multiplies each of its rows after the next update.
        steps_taken: number of steps that changed the weights.
        known_states: names of all element-wise state, even if it does not exist yet.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        recipe: OptimizerRecipe,
        offload: Offload,
        matrices: MatrixStepper | None = None,
    ) -> None:
        self._elementwise, self._scalars, self._matrices = recipe.states, recipe.scalars, matrices
        self.known_states = recipe.known_states
        # A bucket can be without parts: if this rank owns only padding of it.
        trained = in_order_of_use([one for one in buckets if one.layout.trains])
        self._parts = _cut(trained)
        self._of_bucket: dict[Bucket, list[Part]] = {bucket: [] for bucket in trained}
        parts: list[list[nn.Parameter]] = [[] for _ in range(recipe.groups)]
        for part in self._parts:
            self._of_bucket[part.bucket].append(part)
            parts[part.group].append(part.parameter)
        self.torch_optimizer = recipe.build(parts)
        self.steps_taken = 0
        self.row_factors: Mapping[str, Tensor] = {}
        self._groups = self.torch_optimizer.param_groups
        self._before_step: list[dict[str, Any]] = []  # the groups before the step
        is_fused = all(group.get("fused") for group in self.torch_optimizer.param_groups)
        self._scales_inside = type(self.torch_optimizer) in _SCALE_INSIDE and is_fused
        for part in self._parts:
            if part.location == "file":
                part.arrays = {
                    name: offload.allocate("file", part.numel, torch.float32)
                    for name in self.states_of(part.bucket.layout)
                }
        self._stepped_alone = {b: parts for b, parts in self._of_bucket.items() if not b.layout.first.matrix}
        elementwise = [part for parts in self._stepped_alone.values() for part in parts]
        self._file = FileStepper(elementwise, self._elementwise)
        self._known_start = isinstance(self.torch_optimizer, _KNOWN_START)
        if self._known_start:
            for part in self._parts:
                self._start_state(part)
        self._on_device = [part for part in elementwise if part.location == "device"]

    def step(self, factor: float, stepped: Stepped | None = None) -> None:
        """Update every owned element with `factor` times its gradient, and copy the new values to the weight shards.

        Args:
            stepped: called with each bucket when its weight shard is complete, in the same order on all ranks that
                share buckets.  A bucket of which this rank has only some of the gradients is passed together with the
                function that updates it when they are complete.
        """
        self.steps_taken += 1
        self._before_step = [dict(group) for group in self._groups]
        for bucket in self._of_bucket:
            if bucket.master.location == "host":  # because it is updated in place
                bucket.master.flush()
        if self._matrices is not None:
            self._matrices.begin(self, factor)
        # Inside the kernel, clipping and unscaling need no pass of their own.
        if factor != 1.0 and not self._scales_inside:
            for bucket in self._stepped_alone:
                bucket.gradient.mul_(factor)
        step = partial(self._step_parts, None if factor == 1.0 else 1.0 / factor)
        if self._on_device and stepped is None:
            step(self._on_device)
        copying: deque[tuple[Bucket, Callable[[], object]]] = deque()  # each with the wait for its weight shard

        def finish_all_but(count: int) -> None:
            while len(copying) > count:
                bucket, wait = copying.popleft()
                wait()
                if stepped is not None:
                    stepped(bucket, None)

        for bucket, parts in (self._stepped_alone if stepped is None else self._calls).items():
            location, on_host = bucket.master.location, "host" in (bucket.master.location, bucket.weight_shard.location)
            if bucket.summed != bucket.owned and stepped is not None:
                finish_all_but(0)
                stepped(bucket, partial(self._step_deferred, step, bucket, parts))
                continue
            if parts and (location == "host" or (location == "device" and stepped is not None)):
                step(parts)
            if location != "file":
                copying.append((bucket, _start_copy(bucket)))
            finish_all_but(1 if on_host else 0)  # the next bucket is updated while the last is copied
        self._file.step(step, self.torch_optimizer)
        copying.extend((bucket, lambda: None) for bucket in self._stepped_alone if bucket.master.location == "file")
        if self._matrices is not None:
            group = self._groups[-1]
            for bucket in self._matrices.finish(self, group["lr"], group["weight_decay"], self.row_factors):
                copying.append((bucket, _start_copy(bucket)))
                finish_all_but(1 if bucket.master.location == "host" else 0)
        finish_all_but(0)

    @cached_property
    def _calls(self) -> dict[Bucket, list[Part]]:
        """The parts to update before the weights of a bucket are sent: its own and those of the buckets that share its
        call.
        """
        most = CALL_ELEMENTS["cuda" if any(part.parameter.is_cuda for part in self._parts) else "cpu"]
        calls, call, room = dict[Bucket, list[Part]](), list[Part](), 0
        for bucket, parts in self._stepped_alone.items():
            elements = sum(part.numel for part in parts)
            is_shared = bucket.master.location == "device" and bucket.summed == bucket.owned
            if not is_shared or elements > room:
                call, room = [], most * is_shared
                calls[bucket] = call
            else:
                calls[bucket] = []
            call += parts
            room -= elements
        return calls

    def _step_deferred(self, step: Callable[[Sequence[Part]], None], bucket: Bucket, parts: Sequence[Part]) -> None:
        """Update a bucket whose gradients arrived late, with the groups' settings at the start of the last step.
        Settings that have changed since then stay.
        """
        found, nothing = [dict(group) for group in self._groups], object()
        # An evaluation may be waiting: tensors created in its inference mode could not be updated later.
        with torch.inference_mode(False):
            step(parts)
        for group, values, before in zip(self._groups, found, self._before_step, strict=True):
            group.update({key: value for key, value in values.items() if value is not before.get(key, nothing)})
        _start_copy(bucket)()

    def _step_parts(self, scale: float | None, parts: Sequence[Part]) -> None:
        """Update some parts.  A fused kernel divides their gradients by `scale`.

        The optimizer sees only these parts, with gradients, as if they were all its parameters.  Values that it counts
        in a group are counted once per step.
        """
        optimizer: Any = self.torch_optimizer
        of_groups: dict[int, list[nn.Parameter]] = {}
        for part in parts:
            part.parameter.grad = part.bucket.owned_part(part.bucket.gradient, part.run)
            of_groups.setdefault(part.group, []).append(part.parameter)
        if self._scales_inside:
            # Create it on the parts' device: the host's kernel would not wait for a copy from a GPU.
            device = parts[0].parameter.device
            optimizer.grad_scale = None if scale is None else torch.full((), scale, device=device)
        groups = {number: {**self._before_step[number], "params": of_groups[number]} for number in sorted(of_groups)}
        optimizer.param_groups = list(groups.values())  # copies: an interrupt leaves the groups themselves intact
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = self._groups
            for part in parts:
                part.parameter.grad = None
        for number, group in groups.items():
            self._groups[number].update(group, params=self._groups[number]["params"])

    def _start_state(self, part: Part) -> None:
        """Give a part its state before the first step."""
        on_device = self._scales_inside and part.parameter.device.type != "cpu"
        device = part.parameter.device if on_device else torch.device("cpu")
        value = self.torch_optimizer.param_groups[part.group].get("initial_accumulator_value", 0.0)  # Adagrad has it
        state = self.torch_optimizer.state[part.parameter]
        state.update({name: torch.full_like(part.parameter, value) for name in self.states_of(part.bucket.layout)})
        if not part.bucket.layout.first.matrix:
            state.update({name: torch.zeros((), device=device) for name in self._scalars})
        for array in part.arrays.values():
            if value:
                array.write(0, torch.full((part.numel,), value))

    def states_of(self, layout: BucketLayout) -> tuple[str, ...]:
        """Names of the element-wise state of a bucket's parameters."""
        return (MOMENTUM,) if layout.first.matrix else self._elementwise

    def intervals_of(self, bucket: Bucket) -> list[Interval]:
        """Return the owned elements of a bucket, in intervals whose state can be read at once."""
        return [part.run for part in self._of_bucket.get(bucket, ())]

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the element-wise state that exists now: some optimizers have none before the first step."""
        return self.known_states if self._known_start or self.steps_taken else ()

    def read(self, name: str, bucket: Bucket, run: Interval) -> Tensor:
        """Return elements `run` of a state, which this rank must own: a copy if they are in a file or in several parts."""
        pieces = [self._state_of(part, name, piece) for part, piece in self._covering(bucket, run)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def memory(self, name: str, bucket: Bucket, run: Interval) -> Tensor | None:
        """Return elements `run` of a state as memory to overwrite; None if they do not exist or are not contiguous in
        memory.
        """
        (part, piece), *others = self._covering(bucket, run)
        if others or part.location == "file" or name not in self.torch_optimizer.state[part.parameter]:
            return None
        return self._state_of(part, name, piece)

    def write(self, name: str, bucket: Bucket, run: Interval, values: Tensor) -> None:
        """Overwrite elements `run` of a state, which is created if it does not exist yet."""
        for part, piece in self._covering(bucket, run):
            mine = values[piece.start - run.start : piece.stop - run.start]
            if part.location == "file":
                part.arrays[name].write(piece.start - part.run.start, mine)
                # marks the state as existing
                self.torch_optimizer.state[part.parameter].setdefault(name, torch.empty(0))
                continue
            if name not in self.torch_optimizer.state[part.parameter]:
                self._start_state(part)
            self._state_of(part, name, piece).copy_(mine)

    def _covering(self, bucket: Bucket, run: Interval) -> list[tuple[Part, Interval]]:
        """Return the parts that hold elements `run` of a bucket, each with the interval that it holds."""
        found = [(part, piece) for part in self._of_bucket.get(bucket, ()) if (piece := intersect(part.run, run))]
        if sum(piece.stop - piece.start for _, piece in found) != run.stop - run.start:
            raise KeyError(f"elements {run.start}..{run.stop} of {bucket.layout.name} are not owned by this rank")
        return found

    def _state_of(self, part: Part, name: str, piece: Interval) -> Tensor:
        start, stop = piece.start - part.run.start, piece.stop - part.run.start
        if part.location == "file":
            return part.arrays[name].read(start, stop)
        state: Tensor = self.torch_optimizer.state[part.parameter][name]
        return state[start:stop]

    def scalars(self) -> dict[str, dict[str, float]]:
        """Return state that is one number, by optimizer group: all parameters of a group have the same number of steps."""
        parts = self._parts if self.steps_taken else ()
        states = {str(part.group): self.torch_optimizer.state[part.parameter] for part in parts}
        # The host waits for the device here: once for each group, not for each part.
        return {group: {key: float(its[key]) for key in self._scalars if key in its} for group, its in states.items()}

    def resume(self, steps_taken: int, scalars: dict[str, dict[str, float]]) -> None:
        """Continue as after `steps_taken` steps.  Element-wise state must have been written.

        Args:
            scalars: `scalars()` of all ranks, joined.
        """
        self.steps_taken, self.torch_optimizer.param_groups = steps_taken, self._groups
        for part in self._parts:
            state = self.torch_optimizer.state[part.parameter]
            if not state and part.location != "file":
                self._start_state(part)
            saved = scalars.get(str(part.group), {})
            for name in () if part.bucket.layout.first.matrix else self._scalars:
                value = saved.get(name, float(steps_taken))
                if isinstance(state.get(name), Tensor):
                    state[name].fill_(value)
                else:
                    state[name] = torch.tensor(value)

    def reset(self) -> None:
        """Forget all state: the next step is the first."""
        self.steps_taken = 0
        self.torch_optimizer.state.clear()
        for part in self._parts:
            for array in part.arrays.values():
                array.write(0, torch.zeros(part.numel))
            if self._known_start:
                self._start_state(part)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the element-wise state, by location, and of the buffers for state in a file and for matrices."""
        sizes = {"optimizer": 0}
        for part in self._parts:
            key = memory_kind("optimizer", part.location)
            if part.location == "file":
                nbytes = 4 * part.numel * len(self.states_of(part.bucket.layout))
            else:
                state = self.torch_optimizer.state.get(part.parameter, {})
                nbytes = sum(state[name].nbytes for name in self.known_states if name in state)
            sizes[key] = sizes.get(key, 0) + nbytes
        if self._file.nbytes:
            sizes["optimizer_buffers on host"] = self._file.nbytes
        if self._matrices is not None:
            sizes["matrix_buffers"] = self._matrices.buffer_bytes
        return sizes


def _start_copy(bucket: Bucket) -> Callable[[], object]:
    """Start to copy new master weights to the weight shard, unless they are the same memory.  Returns the wait for the
    copy.
    """
    tensor, weights, copier = bucket.master.tensor, bucket.weight_shard, bucket.policy.copier
    if bucket.master is weights or tensor is None:
        return lambda: None
    start = partial(weights.start_write, 0, tensor)
    if bucket.master.location == weights.location:
        return start().wait
    mark = copier.run(start, to_host=weights.location != "device")
    return lambda: copier.wait(mark).wait()


def _cut(buckets: Sequence[Bucket]) -> list[Part]:
    """Cut the owned elements of every bucket by optimizer group, and elements in a file into parts of bounded size."""
    parts = []
    for bucket in buckets:
        in_file = bucket.master.location == "file"
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
