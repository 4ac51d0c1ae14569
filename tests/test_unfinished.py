"""What nobody waits for any more, after an interrupt or an error: it ends before the group's next operation, once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import run_world
from torch import Tensor, nn
from zero_worlds import Sharded, numbers, seeded

from megazero.comm.collectives import Pending, all_gather, all_reduce, all_to_all, exchange, reduce_scatter, ring_shift
from megazero.comm.messages import LostPeerError, OrderError
from megazero.cpu.rendezvous import Poller
from megazero.cpu.shared_memory import Channel, Rounds
from megazero.parallel_state import Axis, Links, ParallelState, RankGrid

_NUMEL = 1024


def _axis(rank: int, local_world_size: int = 1, timeout_seconds: float = 30) -> Axis:
    world = 2 * local_world_size
    state = ParallelState(
        RankGrid(dp=world), rank, Links(None, timeout_seconds, local_world_size, local_world_size > 1)
    )
    axis = state.with_own_group(state.dp, "own")
    all_reduce(torch.zeros(1), axis).wait()
    return axis


def _on_one_host(rank: int) -> ParallelState:
    return ParallelState(RankGrid(dp=2), rank, Links(timeout_seconds=30, local_world_size=2, shares_memory=True))


def _exchanged(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Both sides of a message to the next rank as one."""
    after, before = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[axis.index - 1]
    both = exchange([(x, after)], [(out, before)], axis)
    return Pending(both[0].wait, both[1].wait, axis.group)


def _operations(axis: Axis, value: float) -> dict[str, Callable[[], tuple[Pending, Tensor, float]]]:
    """By name: starts one and gives what is pending, a number that arrives, and what this must be.

    `value`: that ranks send `value` and their number.
    """
    size, mine, before = axis.size, value + axis.index, value + (axis.index - 1) % axis.size
    total = size * value + size * (size - 1) / 2

    def whole(number: float) -> Tensor:
        return torch.full((size, _NUMEL), number)

    def reduced() -> tuple[Pending, Tensor, float]:
        x = whole(mine)
        return all_reduce(x, axis), x, total

    def started(start: Callable[[Tensor], Pending], out: Tensor, wanted: float) -> tuple[Pending, Tensor, float]:
        return start(out), out, wanted

    def own(out: Tensor) -> Tensor:
        return out[:1]

    return {
        "all_reduce": reduced,
        "all_gather": lambda: started(lambda o: all_gather(o, own(whole(mine)), axis), whole(-1.0), value + size - 1),
        "reduce_scatter": lambda: started(lambda o: reduce_scatter(o, whole(mine), axis), own(whole(-1.0)), total),
        "all_to_all": lambda: started(lambda o: all_to_all(o, whole(mine), axis), whole(-1.0), value + size - 1),
        "ring_shift": lambda: started(lambda o: ring_shift(o, whole(mine), axis), whole(-1.0), before),
        "exchange": lambda: started(lambda o: _exchanged(o, whole(mine), axis), whole(-1.0), before),
    }


def _interrupted(call: Callable[[], Any], *, after: bool) -> None:
    """An interrupt that comes as a wait begins, or when its message has arrived and nobody has noted it."""
    if after:
        call()
    raise KeyboardInterrupt


def _interrupt_each(rank: int, local_world_size: int) -> None:
    axis = _axis(rank, local_world_size)
    for name, start in _operations(axis, 10.0).items():
        for after in (False, True):
            pending, _, _ = start()
            wait = pending._wait
            assert wait is not None
            pending._wait = partial(_interrupted, wait, after=after)
            with pytest.raises(KeyboardInterrupt):
                pending.wait()
            pending._wait = wait
            del pending
            gc.collect()
            for begin in (start, _operations(axis, 20.0)[name]):
                again, arrived, wanted = begin()
                again.wait()
                assert arrived.view(-1)[-1] == wanted, (name, after)
            assert axis.group is not None
            assert not axis.group.unfinished


@pytest.mark.parametrize("local_world_size", [1, 2], ids=["gloo", "two levels"])
def test_after_an_interrupted_wait_the_next_operation_has_its_own_result(local_world_size: int) -> None:
    run_world(2 * local_world_size, _interrupt_each, local_world_size)


def _interrupt_in_the_middle(rank: int) -> list[list[str]]:
    """On rank 0, as it reads what the other has written.  Returns: what each operation and the next two ended with."""
    state = _on_one_host(rank)
    start, found = Channel.start, list[list[str]]()

    def interrupted(rounds: Rounds) -> Rounds:
        yield next(rounds)
        raise KeyboardInterrupt

    for name in [name for name in _operations(state.dp, 0.0) if name != "exchange"]:
        axis, ends = state.with_own_group(state.dp, name), list[str]()
        all_reduce(torch.zeros(1), axis).wait()
        for number in range(3):
            breaks = rank == 0 and number == 0
            with pytest.MonkeyPatch.context() as patch:
                if breaks:
                    patch.setattr(Channel, "start", lambda self, label, rounds: start(self, label, interrupted(rounds)))
                try:
                    pending, arrived, wanted = _operations(axis, 10.0 * number)[name]()
                    pending.wait()
                    ends.append("right" if arrived.view(-1)[-1] == wanted else "wrong")
                except (KeyboardInterrupt, LostPeerError) as error:
                    ends.append(type(error).__name__)
        found.append(ends)
    return found


def test_an_interrupt_in_the_middle_of_shared_memory_ends_all_later_operations_on_both_ranks() -> None:
    """The interrupted rank would take the other's next signal, and data, for those that it missed."""
    mine, other = run_world(2, _interrupt_in_the_middle)
    assert mine == [["KeyboardInterrupt", "LostPeerError", "LostPeerError"]] * 5
    assert other == [["right", "LostPeerError", "LostPeerError"]] * 5


def _late(rank: int) -> list[str]:
    """Rank 1 comes after rank 0's time-out; rank 0 fills its tensor anew.  Returns: what each operation ended with."""
    state, ends = _on_one_host(rank), list[str]()
    tensor, other = torch.empty(4), state.with_own_group(state.dp, "other")
    for axis in (state.dp, other):
        all_reduce(torch.zeros(1), axis).wait()
    for number in range(3):
        if rank == 1 and number == 0:
            all_reduce(torch.zeros(1), other).wait()  # until rank 0 has given up
        tensor.fill_(10.0 * number + rank)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0 and number == 0:
                patch.setattr(Poller, "poll", lambda self, seconds: False)  # nothing comes within the limit
            try:
                all_reduce(tensor, state.dp).wait()
                ends.append("right" if tensor[0] == 20.0 * number + 1 else "wrong")
            except LostPeerError as error:
                ends.append("late" if "Timed out" in str(error) else "lost")
        if rank == 0 and number == 0:
            all_reduce(torch.zeros(1), other).wait()
    return ends


def test_a_time_out_in_shared_memory_ends_all_later_operations_on_both_ranks() -> None:
    """The one that nobody waits for any more would be finished in a tensor that the next one has filled."""
    mine, other = run_world(2, _late)
    assert mine == ["late"] * 3
    assert other[1:] == ["lost"] * 2


def _out_of_order(rank: int) -> list[str]:
    """Ranks start different operations, and then the same.  Returns: what each ended with."""
    state, ends = _on_one_host(rank), list[str]()
    all_reduce(torch.zeros(1), state.dp).wait()

    def wait_for_peers(*_: object) -> bool:
        raise AssertionError("it waits for operations that cannot end")

    for lengths in ((4, 5), (4, 4)):
        with pytest.MonkeyPatch.context() as patch:
            if ends:
                patch.setattr(Poller, "poll", wait_for_peers)
            with pytest.raises((OrderError, LostPeerError)) as caught:
                all_reduce(torch.zeros(lengths[rank]), state.dp).wait()
        ends.append(caught.type.__name__)
    return ends


def test_after_operations_in_different_orders_no_later_one_waits() -> None:
    assert run_world(2, _out_of_order) == [["OrderError", "LostPeerError"]] * 2


class _Squares(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum()


def _given_up(rank: int, stage: int, local_world_size: int) -> list[bool]:
    """Whether a step's gradients are those of an undisturbed one, after one that was interrupted at each of its waits."""
    real, calls, at = Pending.wait, [0], [-1]

    def fresh() -> Sharded:
        module = seeded(lambda: _Squares(*(nn.Linear(32, 32) for _ in range(3))))
        shares = {"shares_memory": local_world_size > 1, "local_world_size": local_world_size}
        return Sharded(module, stage, rank, 2, bucket_bytes=8192, reduce="micro_batch", **shares)

    def gradients(sharded: Sharded, seed: int) -> list[Tensor]:
        sharded.accumulate([numbers(4, 32, seed=seed + 10 * rank + number) for number in range(2)])
        return [bucket.gradient.clone() for bucket in sharded.reducer.buckets]

    def wait(self: Pending) -> None:
        if self._wait is not None:
            calls[0] += 1
            if calls[0] == at[0]:
                raise KeyboardInterrupt
        real(self)

    wanted, found = gradients(fresh(), 500), list[bool]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "wait", wait)
        sharded = fresh()
        calls[0] = 0
        gradients(sharded, 500)
        for number in range(1, calls[0] + 1):
            sharded = fresh()
            calls[0], at[0] = 0, number
            with pytest.raises(KeyboardInterrupt):
                gradients(sharded, 900)
            at[0] = -1
            gc.collect()
            found.append(all(map(torch.equal, gradients(sharded, 500), wanted)))
    return found


@pytest.mark.parametrize("local_world_size", [1, 2], ids=["gloo", "memory"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_after_a_step_that_was_given_up_the_next_one_has_its_own_gradients(stage: int, local_world_size: int) -> None:
    """A reduction whose wait was interrupted would end in a buffer that holds the next step's gradients."""
    for found in run_world(2, _given_up, stage, local_world_size):
        assert found
        assert all(found)
