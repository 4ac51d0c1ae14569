"""The optimizer step on flat fp32 shards in any location, with one factor for clipping and loss scaling.

    location of a bucket's state   updated in one call
    device                         all buckets: torch's fused kernel sees a few long tensors
    host                           one bucket, followed by the copy of its new weights to the device
    file                           slice of a bucket (`FileStepper`); the next is read and the last written meanwhile

If the caller gathers each bucket as soon as it is updated, buckets on the device, too, are updated one after the other,
in the order in which a forward uses them, and those in a file last.  Small adjacent buckets share a call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from megazero.zero.bucket import Bucket
from megazero.zero.optimizer import FlatParam, ShardedOptimizer

if TYPE_CHECKING:
    from megazero.zero.file_stepper import FileStepper
    from megazero.zero.matrices import MatrixStepper

# Update at most this many elements on the device in one call: that takes about as long as the call itself on the host,
# 0.1 ms.
CALL_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}

#: Called with a bucket when its weight shard is complete.
Stepped: TypeAlias = Callable[[Bucket], None]


class Stepper:
    """Updates the owned elements of every bucket.

    Args:
        matrices: updates the buckets of matrices; None: the optimizer updates all buckets element by element.
    """

    def __init__(self, optimizer: ShardedOptimizer, matrices: MatrixStepper | None) -> None:
        self._optimizer, self._matrices = optimizer, matrices
        self._groups_before: list[dict[str, Any]] = []  # settings of the groups before the step
        self._elementwise = {b: params for b, params in optimizer.flat_params.items() if not b.layout.first.matrix}
        self._in_file = [bucket for bucket in self._elementwise if bucket.master.location == "file"]
        self._file: FileStepper | None = None
        if in_file := [param for bucket in self._in_file for param in self._elementwise[bucket]]:
            from megazero.zero.file_stepper import FileStepper  # few runs need it

            self._file = FileStepper(in_file, optimizer.elementwise)
        on_cuda = any(param.parameter.is_cuda for params in optimizer.flat_params.values() for param in params)
        self._one_call = plan_calls(self._elementwise, inf)
        self._calls = plan_calls(self._elementwise, CALL_ELEMENTS["cuda" if on_cuda else "cpu"])

    def step(self, factor: float, stepped: Stepped | None = None) -> None:
        """Update every owned element with `factor` times its gradient, and copy the new values to the weight shards.

        Args:
            stepped: called with each bucket when its weight shard is complete, in the same order on all ranks that
                share buckets.
        """
        optimizer = self._optimizer
        optimizer.steps_taken += 1
        self._groups_before = [dict(group) for group in optimizer.groups]
        self._prepare(factor)
        update = partial(self._update, None if factor == 1.0 else 1.0 / factor)
        copies = _WeightCopies(stepped or (lambda _: None))
        for bucket, params in (self._one_call if stepped is None else self._calls).items():
            if params:
                update(params)
            copies.start(bucket)
        if self._file is not None:
            self._file.step(update, optimizer.torch_optimizer)
            for bucket in self._in_file:
                copies.start(bucket)
        if self._matrices is not None:
            for bucket in self._matrices.finish(optimizer):
                copies.start(bucket)
        copies.finish_all_but(0)

    def _prepare(self, factor: float) -> None:
        """Finish earlier copies from the host, start to send matrices to their owners, and scale the gradients unless
        the optimizer's kernel will.
        """
        optimizer = self._optimizer
        for bucket in optimizer.flat_params:
            if bucket.master.location == "host":  # because it is updated in place
                bucket.master.flush()
        if self._matrices is not None:
            self._matrices.begin(optimizer, factor)
        # Inside the kernel, clipping and unscaling need no pass of their own.
        if factor != 1.0 and not optimizer.scales_inside:
            for bucket in self._elementwise:
                bucket.gradient.mul_(factor)

    def _update(self, scale: float | None, params: Sequence[FlatParam]) -> None:
        """Update some flat parameters.  A fused kernel divides their gradients by `scale`.

        torch's optimizer sees only these, with gradients, as if they were all its parameters.  A counter that it
        has in a group advances once per step.
        """
        groups, torch_optimizer = self._optimizer.groups, self._optimizer.torch_optimizer
        of_groups: dict[int, list[nn.Parameter]] = {}
        for param in params:
            param.parameter.grad = param.bucket.owned_slice(param.bucket.gradient, param.interval)
            of_groups.setdefault(param.group, []).append(param.parameter)
        if self._optimizer.scales_inside:
            # Create it on the parameters' device: the host's kernel would not wait for a copy from a GPU.
            scale_on_device = None if scale is None else torch.full((), scale, device=params[0].parameter.device)
            torch_optimizer.grad_scale = scale_on_device  # type: ignore[attr-defined]
        # Copies: an interrupt leaves the groups themselves intact.
        own = {number: {**self._groups_before[number], "params": of_groups[number]} for number in sorted(of_groups)}
        torch_optimizer.param_groups = list(own.values())
        try:
            torch_optimizer.step()
        finally:
            torch_optimizer.param_groups = groups
            for param in params:
                param.parameter.grad = None
        for number, group in own.items():
            groups[number].update(group, params=groups[number]["params"])

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the buffers for state in a file and for matrices."""
        sizes = {} if self._file is None else {"optimizer_buffers on host": self._file.nbytes}
        return sizes if self._matrices is None else sizes | {"matrix_buffers": self._matrices.buffer_bytes}


def plan_calls(params: Mapping[Bucket, Sequence[FlatParam]], most: float) -> dict[Bucket, list[FlatParam]]:
    """Return which flat parameters to update at the turn of each bucket that is not in a file.

    Adjacent buckets on the device share calls of at most `most` elements, at the turn of the first of them.
    """
    calls, call, room = dict[Bucket, list[FlatParam]](), list[FlatParam](), 0.0
    for bucket, own in params.items():
        if bucket.master.location == "file":
            continue
        elements = sum(param.interval.size for param in own)
        is_shared = bucket.master.location == "device"
        if not is_shared or elements > room:
            call, room = [], most if is_shared else 0.0
            calls[bucket] = call
        else:
            calls[bucket] = []
        call += own
        room -= elements
    return calls


class _WeightCopies:
    """Copies of new master weights to the weight shards.  While the host takes part in one, the next bucket is updated.

    Args:
        stepped: called with each bucket when its copy has ended.
    """

    def __init__(self, stepped: Stepped) -> None:
        self._stepped, self._running = stepped, deque[tuple[Bucket, Callable[[], object]]]()  # each with its wait

    def start(self, bucket: Bucket) -> None:
        """Start the copy of an updated bucket, and finish the copies before it."""
        self._running.append((bucket, _start_copy(bucket)))
        self.finish_all_but(1 if "host" in (bucket.master.location, bucket.weight_shard.location) else 0)

    def finish_all_but(self, count: int) -> None:
        """Wait for the oldest copies until at most `count` are running."""
        while len(self._running) > count:
            bucket, wait = self._running.popleft()
            wait()
            self._stepped(bucket)


def _start_copy(bucket: Bucket) -> Callable[[], object]:
    """Start to copy a bucket's master weights to its weight shard, and return the wait for the copy.  No-op if they are the
    same memory, or in a file, where `FileStepper` has written both.
    """
    tensor, weights, copier = bucket.master.tensor, bucket.weight_shard, bucket.policy.copier
    if bucket.master is weights or tensor is None:
        return lambda: None
    start = partial(weights.start_write, 0, tensor)
    if bucket.master.location == weights.location:
        return start().wait
    mark = copier.run(start, to_host=weights.location != "device")
    return lambda: copier.wait(mark).wait()
