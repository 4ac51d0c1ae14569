"""Messages between ranks that share memory: what arrives, what a sender keeps, and what is said of a lost rank."""

from __future__ import annotations

import gc
import os
import time
from itertools import pairwise

import pytest
import torch

from megazero.comm import collectives, messages
from megazero.comm.collectives import LostPeerError, all_reduce, exchange, share_messages
from megazero.parallel_state import Axis, ParallelState, RankGrid
from tests.harness import run_world

SHAPES = ((), (0,), (3,), (2, 5), (64, 33), (3, 1 << 17))
MANY = 3 * messages._LETTERS + 1


def _axis(rank: int, world: int, shares: bool = True, timeout_seconds: float = 60) -> Axis:
    state = ParallelState(RankGrid(pp=world), rank, timeout_seconds=timeout_seconds, shares_memory=shares)
    share_messages(state.pp)
    return state.pp


def _value(rank: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, (rank * 5 + index) % 7).to(dtype)


def _everyone_to_everyone(rank: int, world: int, shares: bool) -> None:
    axis = _axis(rank, world, shares)
    assert ((axis.ranks, "messages") in axis.shared.rooms) if shares else axis.shared is None
    others = [other for other in range(world) if other != rank]
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for index, shape in enumerate(SHAPES):
            if dtype is torch.bool and not shares:
                continue  # gloo has no such messages
            sends = [(_value(rank, index + to, shape, dtype), to) for to in others]
            receives = [(torch.empty(shape, dtype=dtype), source) for source in others]
            before = axis.traffic.sent_bytes["pp", "send_recv"]
            for pending in exchange(sends, receives, axis):
                pending.wait()
            assert axis.traffic.sent_bytes["pp", "send_recv"] - before == sum(one.nbytes for one, _ in sends)
            for got, source in receives:
                assert torch.equal(got, _value(source, index + rank, shape, dtype)), (dtype, shape, source)


@pytest.mark.parametrize(("world", "shares"), [(2, True), (4, True), (2, False)])
def test_every_message_arrives_as_it_was_sent(world: int, shares: bool) -> None:
    run_world(world, _everyone_to_everyone, world, shares)


def _far_ahead(rank: int) -> list[int]:
    axis = _axis(rank, 2)
    ends = []
    for _ in range(3):
        if rank == 0:
            tensors = [torch.full((2000,), float(index)) for index in range(MANY)]
            posted = [exchange([(tensor, 1)], [], axis)[0] for tensor in tensors]
            done = [pending.is_done for pending in posted]
            assert all(earlier >= wgrad_queue for earlier, wgrad_queue in pairwise(done))
            for tensor, is_done in zip(tensors, done, strict=True):
                if is_done:
                    tensor.fill_(-1.0)  # the sender's own again
            for pending in posted:
                pending.wait()
        else:
            time.sleep(0.05)
            buffers = [torch.empty(2000) for _ in range(MANY)]
            coming = [exchange([], [(buffer, 0)], axis)[0] for buffer in buffers]
            coming[-1].wait()  # those before it have come, then
            assert [int(buffer[0]) for buffer in buffers] == list(range(MANY))
            assert all(buffer.unique().numel() == 1 for buffer in buffers)
        all_reduce(torch.zeros(1), axis).wait()
        ends.append(axis.shared.rooms[axis.ranks, "messages"]._with[1 - rank]._slots._end)
    return ends


def test_a_sender_far_ahead_keeps_what_does_not_fit_and_uses_its_slots_again() -> None:
    first, *wgrad_queue = run_world(2, _far_ahead)[0]
    assert first <= messages._SEGMENT + messages._LETTERS * 8192
    assert wgrad_queue == [first, first]


def _in_another_order(rank: int) -> str:
    axis = _axis(rank, 2)
    if rank == 0:
        exchange([(torch.zeros(4), 1), (torch.zeros(5), 1)], [], axis)
        return ""
    with pytest.raises(LostPeerError) as caught:
        exchange([], [(torch.zeros(5), 0)], axis)[0].wait()
    return str(caught.value)


def test_another_message_than_was_awaited_is_told() -> None:
    said = run_world(2, _in_another_order)[1]
    assert "send_recv over pp, as rank 1 of (0, 1)" in said
    assert "number 0 of the group has sent one of 4 torch.float32, this one awaits one of 5 torch.float32" in said


def _die(axis: Axis) -> None:
    axis.shared.rooms[axis.ranks, "messages"]._with[0].peer.connection.close()  # as the system does when it has died


def _lose(rank: int, dies: bool) -> str:
    axis = _axis(rank, 2, timeout_seconds=60 if dies else 0.2)
    if rank == 1:
        exchange([(torch.ones(3), 0)], [], axis)
        if dies:
            _die(axis)
        time.sleep(1.0)
        return ""
    last = torch.zeros(3)
    exchange([], [(last, 1)], axis)[0].wait()
    assert last.tolist() == [1.0] * 3  # what it sent before still counts
    with pytest.raises(LostPeerError) as caught:
        exchange([], [(torch.zeros(3), 1)], axis)[0].wait()
    return str(caught.value)


@pytest.mark.parametrize(("dies", "reason"), [(True, "Connection closed"), (False, "Timed out waiting 0.2 s")])
def test_a_lost_rank_is_told_of(dies: bool, reason: str) -> None:
    said = run_world(2, _lose, dies)[0]
    assert "send_recv over pp, as rank 0 of (0, 1)" in said
    assert reason in said


def _gone_with_an_answer_owed(rank: int) -> str:
    axis = _axis(rank, 2)
    if rank == 1:
        exchange([(torch.ones(3), 0)], [], axis)
        _die(axis)
        time.sleep(1.0)
        return ""
    sent = [exchange([(torch.zeros(4), 1)], [], axis)[0] for _ in range(messages._LETTERS + 1)]
    for _ in range(2):  # a second wait must not say that it was done
        with pytest.raises(LostPeerError) as caught:
            sent[-1].wait()
    return str(caught.value)


def test_what_a_dead_rank_has_sent_does_not_hide_its_death() -> None:
    assert "Connection closed" in run_world(2, _gone_with_an_answer_owed)[0]


def _while_evaluating(rank: int) -> None:
    axis = _axis(rank, 2)
    for evaluates in (True, False, True):
        with torch.inference_mode(evaluates):
            got = torch.zeros(5)
            for pending in exchange([(torch.full((5,), rank + 1.0), 1 - rank)], [(got, 1 - rank)], axis):
                pending.wait()
            assert got.tolist() == [2.0 - rank] * 5


def test_memory_of_an_evaluation_serves_training_too() -> None:
    run_world(2, _while_evaluating)


def _in_segments(rank: int) -> None:
    axis = _axis(rank, 2)
    descriptors = None
    for length in (1, 9_000, 70_000, 200_000, 130_000, 1):  # some need a segment of their own here
        sends = [(torch.full((length,), float(index)), 1 - rank) for index in range(5)]
        receives = [(torch.empty(length), 1 - rank) for _ in range(5)]
        for pending in exchange(sends, receives, axis):
            pending.wait()
        assert [got.unique().tolist() for got, _ in receives] == [[float(index)] for index in range(5)]
        descriptors = descriptors or len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) - descriptors < 30


def test_slots_lie_in_segments_and_long_ones_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_SEGMENT", 1 << 18)
    run_world(2, _in_segments)


def test_what_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match=r"messages are contiguous, got \[3, 2\] with strides \[1, 3\]"):
        messages.Parcel(torch.zeros(2, 3).t())


def _apart(rank: int) -> None:
    collectives.meet = lambda *_: None  # type: ignore[assignment]
    axis = _axis(rank, 2)
    assert axis.shared.rooms == {((0, 1), "messages"): None}
    got = torch.zeros(3)
    for pending in exchange([(torch.full((3,), rank + 1.0), 1 - rank)], [(got, 1 - rank)], axis):
        pending.wait()
    assert got.tolist() == [2.0 - rank] * 3


def test_ranks_that_cannot_share_memory_take_gloo() -> None:
    run_world(2, _apart)


def _after_leaving(rank: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    state = ParallelState(RankGrid(pp=2), rank, timeout_seconds=5)
    opened = len(os.listdir("/proc/self/fd"))
    share_messages(state.pp)
    waiting = exchange([(torch.ones(9), 1 - rank)], [(torch.zeros(9), 1 - rank)], state.pp)[1]
    waiting.wait()
    late = exchange([], [(torch.zeros(9), 1 - rank)], state.pp)[0]
    state.leave()
    with pytest.raises(LostPeerError, match="has left"):
        late.wait()
    del waiting, late
    gc.collect()
    assert before <= len(os.listdir("/proc/self/fd")) <= opened


def test_leaving_closes_everything() -> None:
    run_world(2, _after_leaving)
