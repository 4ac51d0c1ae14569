"""Two passes of a rank that take turns: while one waits for an exchange, the other computes.

    backward   start | pass on         wait, experts, start | pass on                 wait, attention ...
    forward          attention, start | pass on             wait, experts, start | pass on

Exactly one of them runs at any time, and it passes on only where it would wait for an exchange, so every rank starts
its work in the same order.  Each pass has its own thread, since torch cannot suspend a backward.  On CUDA the host
queues the passes' kernels in this order, on one stream.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from threading import Semaphore
from typing import TypeVar

import torch

from megazero.engine.stage_runner import ChunkRunner, LossGradient, StageRunner
from megazero.schedules.action import Action
from megazero.schedules.executor import Message
from megazero.zero.sharded_model import ShardedModel

A = TypeVar("A")
B = TypeVar("B")


class AbandonedError(RuntimeError):
    """Raised in a pass when the other pass of its pair has failed."""


class Turns:
    """Runs two functions alternately: each calls `pass_on` where it would otherwise wait."""

    def __init__(self) -> None:
        self._gates = (Semaphore(0), Semaphore(0))
        self._running = 0  # index of the function whose turn it is
        self._both = False  # neither has ended
        self._failed = False

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        """The thread for `aside`.  It is permanent, because every new thread would start its own threads for matrix
        products.
        """
        return ThreadPoolExecutor(1, "turns")

    def pass_on(self) -> None:
        """Let the other function run until it passes on or ends.  No-op if no other function runs.  Raises:
        AbandonedError.
        """
        if self._failed:
            raise AbandonedError("the pass beside this one has failed")
        if self._both:
            own = self._running
            self._running = 1 - own
            self._gates[1 - own].release()
            self._gates[own].acquire()
            if self._failed:
                raise AbandonedError("the pass beside this one has failed")

    def run(self, aside: Callable[[], A], here: Callable[[], B]) -> tuple[A, B]:
        """Run both functions and return their results.  `aside` runs in another thread and begins.

        Raises: the error of the function that fails first; the other one is stopped at its next `pass_on`.
        """
        self._gates = (Semaphore(0), Semaphore(0))
        self._running, self._both, self._failed = 0, True, False
        found: Future[A] = self._thread.submit(self._until_end, aside)
        try:
            self._gates[1].acquire()
            mine = self._until_end(here)
            return found.result(), mine
        except AbandonedError:
            found.result()
            raise
        except BaseException:
            self._end(failed=True)
            found.exception()  # wait until it has ended
            raise
        finally:
            self._failed = False

    def _until_end(self, function: Callable[[], A]) -> A:
        try:
            result = function()
        except BaseException:
            self._end(failed=True)
            raise
        self._end(failed=False)
        return result

    def _end(self, *, failed: bool) -> None:
        """Record that the running function has ended, and let the other one run."""
        self._both, self._failed = False, self._failed or failed
        for gate in self._gates:
            gate.release()


class PairedStageRunner(StageRunner):
    """A stage runner that alternates between the forward and the backward of a pair: one computes while the other waits
    for an exchange.
    """

    def __init__(
        self, chunks: Sequence[ChunkRunner], model: ShardedModel, loss_gradient: LossGradient | None, turns: Turns
    ) -> None:
        super().__init__(chunks, model, loss_gradient)
        self._turns = turns

    def interleaves(self, pair: Sequence[Action]) -> bool:
        """Whether the passes of a pair take turns.  Stage 3 shows the weights of a chunk to one pass at a time."""
        return pair[0].chunk != pair[1].chunk or self._model.parameters.gatherer is None

    def beside(self, pair: Sequence[Action], x: Message | None, grad: Message | None) -> Sequence[Message | None]:
        forward, backward, *weight = pair
        queue = self._chunks[backward.chunk].wgrad_queue
        device = torch.get_device_module(self._model.policy.device)
        stream, defers = device.current_stream(), queue.defers

        def run_backward() -> Message | None:
            with device.stream(stream):  # the current stream is per thread, and this is another thread
                return self.backward(backward.chunk, backward.microbatch, grad)

        queue.defers = defers and not weight
        try:
            result, y = self._turns.run(run_backward, partial(self.forward, forward.chunk, forward.microbatch, x))
        finally:
            queue.defers = defers
        return y, result
