"""The optimizer step on flat fp32 shards, wherever they lie, with one factor for clipping and loss scaling.

    location of a bucket's state   stepped at once
    device                         all of them: torch's fused kernel sees a few long tensors
    host                           a bucket, followed by the copy of its new weights to the device
    file                           a part of a bucket (`FileStepper`); the next is read and the last written meanwhile

Where the weights of a bucket travel as soon as it is stepped, buckets on the device are stepped one after the other, too, in
the order in which a forward uses them, and those in a file last.  Small ones next to each other share a call.

Each group of the user's optimizer stays its own: a bucket is stepped run by run, and a run belongs to one group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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

# torch's fused kernels of these divide gradients by `grad_scale`; another class may only say that it is fused.
_SCALE_INSIDE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

# Their state at the start is known, so it can exist, and be counted, before the first step.
_KNOWN_START = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, Lion)

# Most elements of buckets on the device that are stepped in one call: about as much work as the call takes the host, 0.1 ms.
CALL_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}


@dataclass(frozen=True)
class OptimizerRecipe:
    """How to make an optimizer once its flat parts are known."""

    groups: int  # number of parameter groups
    states: tuple[str, ...]  # names of the state that has an element for each parameter's
    scalars: tuple[str, ...]  # names of the state that is one number
    build: Callable[[list[list[nn.Parameter]]], torch.optim.Optimizer]  # from the parts of each group
    matrices: MatrixRecipe | None = None  # steps the last group, matrix by matrix

    @property
    def known_states(self) -> tuple[str, ...]:
        """Names of all state that has an element for each parameter's."""
        return self.states if self.matrices is None else (*self.states, MOMENTUM)


def recipe_of_class(
    cls: type[torch.optim.Optimizer], params: dict[str, Any], groups: Sequence[dict[str, Any]]
) -> OptimizerRecipe:
    """Recipe for an optimizer of a class, as `make_optimizer` takes it; `groups`: what each sets for itself."""

    def build(parts: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
        return make_optimizer(cls, params, [{**own, "params": part} for own, part in zip(groups, parts, strict=True)])

    probe = build([[nn.Parameter(torch.zeros(2))] for _ in groups])
    return OptimizerRecipe(len(groups), *state_names(probe), build)


Stepped: TypeAlias = Callable[[Bucket, Callable[[], None] | None], None]
"""(bucket, what is still to be called to step it; None if it has been stepped)."""


class ShardedOptimizer:
    """Any element-wise optimizer over the owned elements of every bucket, but for those that `matrices` steps.

    Attributes:
        torch_optimizer: torch's own, or the user's, with the flat parts as its parameters.
        steps_taken: steps that changed the weights.
        known_states: names of all element-wise state, whether it exists already or not.
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
        # This rank may own nothing of a bucket but padding.
        trained = in_order_of_use([one for one in buckets if one.layout.trains])
        self._parts = _cut(trained)
        self._of_bucket: dict[Bucket, list[Part]] = {bucket: [] for bucket in trained}
        parts: list[list[nn.Parameter]] = [[] for _ in range(recipe.groups)]
        for part in self._parts:
            self._of_bucket[part.bucket].append(part)
            parts[part.group].append(part.parameter)
        self.torch_optimizer = recipe.build(parts)
        self.steps_taken = 0
        self._groups = self.torch_optimizer.param_groups
        self._before_step: list[dict[str, Any]] = []  # they as they were
        is_fused = all(group.get("fused") for group in self.torch_optimizer.param_groups)
        self._scales_inside = type(self.torch_optimizer) in _SCALE_INSIDE and is_fused
        for part in self._parts:
            if part.location == "file":
                part.arrays = {name: offload.moment(part.numel) for name in self.states_of(part.bucket.layout)}
        self._stepped_alone = {b: parts for b, parts in self._of_bucket.items() if not b.layout.matrices}
        elementwise = [part for parts in self._stepped_alone.values() for part in parts]
        self._file = FileStepper(elementwise, self._elementwise)
        self._known_start = isinstance(self.torch_optimizer, _KNOWN_START)
        if self._known_start:
            for part in self._parts:
                self._start_state(part)
        self._on_device = [part for part in elementwise if part.location == "device"]

    def step(self, factor: float, stepped: Stepped | None = None) -> None:
        """Step every owned element with `factor` times its gradient, and copy the new values to the weight shards.

        `stepped`: called with each bucket as soon as its weight shard is complete, in the same order on all ranks that
        share buckets; with one of which it has a part of the gradients, and with what steps it when it has them all.
        """
        self.steps_taken += 1
        self._before_step = [dict(group) for group in self._groups]
        for bucket in self._of_bucket:
            if bucket.master.location == "host":  # where it is stepped in place
                bucket.master.flush()
        if self._matrices is not None:
            self._matrices.begin(self, factor)
        if factor != 1.0 and not self._scales_inside:  # inside, clipping and unscaling cost no pass of their own
            for bucket in self._stepped_alone:
                bucket.gradient.mul_(factor)
        step = partial(self._step_parts, None if factor == 1.0 else 1.0 / factor)
        if self._on_device and stepped is None:
            step(self._on_device)
        copying: deque[tuple[Bucket, Callable[[], object]]] = deque()  # with what waits for its weight shard

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
            finish_all_but(1 if on_host else 0)  # the next is stepped meanwhile
        self._file.step(step, self.torch_optimizer)
        copying.extend((bucket, lambda: None) for bucket in self._stepped_alone if bucket.master.location == "file")
        if self._matrices is not None:
            group = self._groups[-1]
            for bucket in self._matrices.finish(self, group["lr"], group["weight_decay"]):
                copying.append((bucket, _start_copy(bucket)))
                finish_all_but(1 if bucket.master.location == "host" else 0)
        finish_all_but(0)

    @cached_property
    def _calls(self) -> dict[Bucket, list[Part]]:
        """By bucket, what is stepped before its weights travel: its parts and those of the buckets that share its call."""
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
        """Step a bucket whose gradients have come as in the step that began last; what was set in the groups since stays."""
        found, nothing = [dict(group) for group in self._groups], object()
        with torch.inference_mode(False):  # an evaluation may be who waits: what it made could not be stepped again
            step(parts)
        for group, values, before in zip(self._groups, found, self._before_step, strict=True):
            group.update({key: value for key, value in values.items() if value is not before.get(key, nothing)})
        _start_copy(bucket)()

    def _step_parts(self, scale: float | None, parts: Sequence[Part]) -> None:
        """Step some parts; a fused kernel divides their gradients by `scale`.

        The optimizer sees these parts alone, as it would all parameters of a step: it need not expect one without gradient,
        and what it counts in a group it counts once a step.
        """
        optimizer: Any = self.torch_optimizer
        of_groups: dict[int, list[nn.Parameter]] = {}
        for part in parts:
            part.parameter.grad = part.bucket.owned_part(part.bucket.gradient, part.run)
            of_groups.setdefault(part.group, []).append(part.parameter)
        if self._scales_inside:
            # Made where it is used: a copy from the device would not wait for the host's kernel to read it.
            device = parts[0].parameter.device
            optimizer.grad_scale = None if scale is None else torch.full((), scale, device=device)
        groups = {number: {**self._before_step[number], "params": of_groups[number]} for number in sorted(of_groups)}
        optimizer.param_groups = list(groups.values())  # copies: an interrupt leaves the groups themselves whole
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = self._groups
            for part in parts:
                part.parameter.grad = None
        for number, group in groups.items():
            self._groups[number].update(group, params=self._groups[number]["params"])

    def _start_state(self, part: Part) -> None:
        """Give a part the state it has before its first step."""
        on_device = self._scales_inside and part.parameter.device.type != "cpu"
        device = part.parameter.device if on_device else torch.device("cpu")
        value = self.torch_optimizer.param_groups[part.group].get("initial_accumulator_value", 0.0)  # of Adagrad
        state = self.torch_optimizer.state[part.parameter]
        state.update({name: torch.full_like(part.parameter, value) for name in self.states_of(part.bucket.layout)})
        if not part.bucket.layout.matrices:
            state.update({name: torch.zeros((), device=device) for name in self._scalars})
        for array in part.arrays.values():
            if value:
                array.write(0, torch.full((part.numel,), value))

    def states_of(self, layout: BucketLayout) -> tuple[str, ...]:
        """Names of the element-wise state of a bucket's parameters."""
        return (MOMENTUM,) if layout.matrices else self._elementwise

    def intervals_of(self, bucket: Bucket) -> list[Interval]:
        """The owned elements of a bucket, in pieces whose state can be read at once."""
        return [part.run for part in self._of_bucket.get(bucket, ())]

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the element-wise state that exists now: before the first step not every optimizer has any."""
        return self.known_states if self._known_start or self.steps_taken else ()

    def read(self, name: str, bucket: Bucket, run: Interval) -> Tensor:
        """Elements `run` of one state, owned by this rank; a copy where they lie in a file or in several parts."""
        pieces = [self._state_of(part, name, piece) for part, piece in self._covering(bucket, run)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def memory(self, name: str, bucket: Bucket, run: Interval) -> Tensor | None:
        """Elements `run` of one state, to be overwritten; None where they do not exist, or not in one piece of memory."""
        (part, piece), *others = self._covering(bucket, run)
        if others or part.location == "file" or name not in self.torch_optimizer.state[part.parameter]:
            return None
        return self._state_of(part, name, piece)

    def write(self, name: str, bucket: Bucket, run: Interval, values: Tensor) -> None:
        """Overwrite elements `run` of one state; state that does not exist yet begins to."""
        for part, piece in self._covering(bucket, run):
            mine = values[piece.start - run.start : piece.stop - run.start]
            if part.location == "file":
                part.arrays[name].write(piece.start - part.run.start, mine)
                self.torch_optimizer.state[part.parameter].setdefault(name, torch.empty(0))  # it exists from now on
                continue
            if name not in self.torch_optimizer.state[part.parameter]:
                self._start_state(part)
            self._state_of(part, name, piece).copy_(mine)

    def _covering(self, bucket: Bucket, run: Interval) -> list[tuple[Part, Interval]]:
        """The parts that hold elements `run` of a bucket, and which of the elements each holds."""
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
        """State that is one number, by optimizer group: all parameters of a group step together."""
        parts = self._parts if self.steps_taken else ()
        states = {str(part.group): self.torch_optimizer.state[part.parameter] for part in parts}
        # The host waits for the device here: once a group, not once a part.
        return {group: {key: float(its[key]) for key in self._scalars if key in its} for group, its in states.items()}

    def resume(self, steps_taken: int, scalars: dict[str, dict[str, float]]) -> None:
        """Go on as after so many steps, with element-wise state that has been written and the `scalars` of all ranks."""
        self.steps_taken, self.torch_optimizer.param_groups = steps_taken, self._groups
        for part in self._parts:
            state = self.torch_optimizer.state[part.parameter]
            if not state and part.location != "file":
                self._start_state(part)
            saved = scalars.get(str(part.group), {})
            for name in () if part.bucket.layout.matrices else self._scalars:
                value = saved.get(name, float(steps_taken))
                if isinstance(state.get(name), Tensor):
                    state[name].fill_(value)
                else:
                    state[name] = torch.tensor(value)

    def reset(self) -> None:
        """Forget all state: what follows is the first step."""
        self.steps_taken = 0
        self.torch_optimizer.state.clear()
        for part in self._parts:
            for array in part.arrays.values():
                array.write(0, torch.zeros(part.numel))
            if self._known_start:
                self._start_state(part)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the element-wise state, by location, and of the buffers through which a file is stepped."""
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
    """Start to copy new master weights to the weight shard, unless they are one; what waits for it."""
    tensor, weights, copier = bucket.master.tensor, bucket.weight_shard, bucket.policy.copier
    if bucket.master is weights or tensor is None:
        return lambda: None
    start = partial(weights.start_write, 0, tensor)
    if bucket.master.location == weights.location:
        return start().wait
    mark = copier.run(start, to_host=weights.location != "device")
    return lambda: copier.wait(mark).wait()


def _cut(buckets: Sequence[Bucket]) -> list[Part]:
    """The owned elements of every bucket, by optimizer group; what lies in a file is cut to bounded sizes."""
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
