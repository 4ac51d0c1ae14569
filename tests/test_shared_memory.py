"""Collectives of ranks that share memory: their results, in any order of waiting, and how they report a lost rank."""

from __future__ import annotations

import os
import socket
import time
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from collective_law import assert_exact, leave, values
from harness import run_world

from megazero.comm import backend
from megazero.comm.backend import HostBackend, TorchBackend
from megazero.comm.collectives import (
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    arriving_elements,
    broadcast,
    check_order,
    exchange,
    gather_objects,
    reduce_scatter,
    ring_shift,
)
from megazero.comm.messages import LostPeerError, OrderError
from megazero.cpu import rendezvous, transport
from megazero.cpu.shared_memory import HALF_BYTES, SharedMemoryBackend
from megazero.cpu.sockets import SocketBackend
from megazero.parallel_state import Axis, Links, ParallelState, RankGrid

LONG = 3 * HALF_BYTES // 4 + 40  # fp32 elements: several rounds, and the last one short
LENGTHS = (0, 1, 7, 16_385, LONG)
CASES = [*product((torch.float32,), LENGTHS), (torch.bfloat16, 7), (torch.bfloat16, LONG), (torch.int64, 16_385)]


def _axis(rank: int, world: int, timeout_seconds: float = 60, shares: bool = True, device: str = "cpu") -> Axis:
    grid, of = RankGrid(dp=world), torch.device(device)
    return ParallelState(grid, rank, Links(of, timeout_seconds=timeout_seconds, shares_memory=shares)).dp


def _collectives(rank: int, world: int, shares: bool) -> None:
    axis = _axis(rank, world, shares=shares)
    assert arriving_elements(64, axis) == (0 if shares else 64)
    assert_exact(axis, CASES)
    assert isinstance(axis.group.backends["cpu"], SharedMemoryBackend if shares else SocketBackend)


def _without_the_annex(rank: int, world: int) -> None:
    with patch("megazero.comm.backend.added", lambda _: {}), patch("megazero.comm.collectives.added", lambda _: {}):
        axis = _axis(rank, world)
        assert_exact(axis, CASES)
        assert type(axis.group.backends["cpu"]) is TorchBackend


def _on_the_host(rank: int, world: int) -> None:
    axis = _axis(rank, world, device="meta")  # a device that needs no options of its own
    assert_exact(axis, CASES)
    assert type(axis.group.backends["cpu"]) is HostBackend


@pytest.mark.parametrize(("world", "shares"), [(2, True), (3, True), (4, True), (2, False), (4, False)])
def test_collectives_are_exact_in_memory_and_over_gloo(world: int, shares: bool) -> None:
    run_world(world, _collectives, world, shares)


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_are_exact_over_plain_gloo(world: int) -> None:
    run_world(world, _without_the_annex, world)


@pytest.mark.parametrize("world", [2, 3])
def test_host_tensors_of_a_run_on_devices_take_messages(world: int) -> None:
    run_world(world, _on_the_host, world)


def _everyone_to_everyone(rank: int, world: int) -> None:
    axis = _axis(rank, world)
    others = [other for other in range(world) if other != rank]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for index, shape in enumerate(((), (0,), (3,), (2, 5), (64, 33), (3, 1 << 17))):
            sends = [(torch.full(shape, rank * 5 + index + to).to(dtype), to) for to in others]
            receives = [(torch.empty(shape, dtype=dtype), source) for source in others]
            before = axis.traffic.sent_bytes["dp", "send_recv"]
            for pending in exchange(sends, receives, axis):
                pending.wait()
            assert axis.traffic.sent_bytes["dp", "send_recv"] - before == sum(one.nbytes for one, _ in sends)
            for got, source in receives:
                assert torch.equal(got, torch.full(shape, source * 5 + index + rank).to(dtype)), (dtype, shape, source)


@pytest.mark.parametrize("world", [2, 4])
def test_every_message_arrives_as_it_was_sent(world: int) -> None:
    run_world(world, _everyone_to_everyone, world)


def _many_under_way(rank: int, world: int) -> None:
    axis = _axis(rank, world)
    for first_waited in range(4):
        sums = [values(rank + index, LONG if index % 2 else 5, torch.float32) for index in range(4)]
        gathered = torch.empty(world * LONG)
        pendings: list[Pending] = [all_reduce(one, axis) for one in sums]
        pendings.append(all_gather(gathered, values(rank, LONG, torch.float32), axis))
        shifted = torch.empty(LONG)
        pendings.append(ring_shift(shifted, values(rank, LONG, torch.float32), axis))
        turned = torch.empty(world, 7)
        pendings.append(
            all_to_all(turned, torch.stack([values(rank + to, 7, torch.float32) for to in range(world)]), axis)
        )
        # ranks wait in different orders, and one of them comes late
        if rank == first_waited % world:
            time.sleep(0.01)
        for index in range(7):
            pendings[(index + first_waited + rank) % 7].wait()
            pendings[(index + first_waited + rank) % 7].wait()
        for index, one in enumerate(sums):
            wanted = sum(values(other + index, len(one), torch.float32) for other in range(world))
            assert torch.equal(one, wanted)
        assert torch.equal(gathered, torch.cat([values(one, LONG, torch.float32) for one in range(world)]))
        assert torch.equal(shifted, values((rank - 1) % world, LONG, torch.float32))
        assert torch.equal(turned, torch.stack([values(rank + source, 7, torch.float32) for source in range(world)]))


@pytest.mark.parametrize("world", [2, 4])
def test_operations_under_way_end_in_any_order_of_waiting(world: int) -> None:
    run_world(world, _many_under_way, world)


def _lose(rank: int, dies: bool) -> str:
    axis = _axis(rank, 2, timeout_seconds=60 if dies else 0.2)
    all_reduce(torch.zeros(4), axis).wait()
    if rank == 1:
        if dies:
            axis.group.backends["cpu"].reduce.peers[0].connection.close()  # as the system does when it has died
        time.sleep(1.0)
        return ""
    with pytest.raises(LostPeerError) as caught:
        all_reduce(torch.zeros(4), axis).wait()
    return str(caught.value)


@pytest.mark.parametrize(("dies", "reason"), [(True, "Connection closed"), (False, "Timed out waiting 0.2 s")])
def test_a_lost_rank_is_named(dies: bool, reason: str) -> None:
    said = run_world(2, _lose, dies)[0]
    assert "all_reduce over dp, as rank 0 of (0, 1)" in said
    assert reason in said


def _assert_sums_over(rank: int, wanted: type) -> None:
    """Two ranks sum over a new axis, whose backend is of this kind."""
    axis = _axis(rank, 2)
    got = torch.full((3,), rank + 1.0)
    all_reduce(got, axis).wait()
    assert got.tolist() == [3.0] * 3
    assert isinstance(axis.group.backends["cpu"], wanted)


def _apart(rank: int, breaks: str) -> None:
    if breaks == "other machine":
        listen = rendezvous._listen

        def elsewhere() -> tuple:
            listener, (boot, name) = listen()
            return listener, (f"{boot} {rank}", name)

        rendezvous._listen = elsewhere
    elif breaks == "no such system" and rank == 1:
        rendezvous._listen = lambda: (None, None)
    elif breaks == "no connection":
        rendezvous._CONNECT_SECONDS = 0.1

        def refused(*_: object) -> None:
            raise ConnectionRefusedError

        rendezvous._connections = refused
    _assert_sums_over(rank, SocketBackend)


@pytest.mark.parametrize("breaks", ["other machine", "no such system", "no connection"])
def test_ranks_that_cannot_share_memory_take_gloo(breaks: str) -> None:
    run_world(2, _apart, breaks)


def _with_a_stranger(rank: int) -> bool:
    """Another user's process calls rank 0 by its name before rank 1 does, and offers an area of its own."""
    gathered = rendezvous.rendezvous

    def call_first(index: int, size: int, area_bytes: int, gather: Any) -> Any:
        def after_the_stranger(offer: Any) -> Any:
            offers = gather(offer)
            if rank == 1 and offer is not None and not called:
                called.append(_call_as_nobody(offers[0][1]))
            gather(None)  # rank 0 waits, too
            return offers

        return gathered(index, size, area_bytes, after_the_stranger)

    called: list[int] = []
    transport.rendezvous = call_first
    _assert_sums_over(rank, SharedMemoryBackend)
    return called == [0] if rank == 1 else True


def _call_as_nobody(name: str) -> int:
    """0 if the call was answered by nothing but its end."""
    child = os.fork()
    if not child:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(name)
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_process_of_another_user_gets_no_part_of_the_memory() -> None:
    assert run_world(2, _with_a_stranger) == [True, True]


def _in_other_orders(rank: int) -> str:
    axis = _axis(rank, 2)
    total, whole = torch.full((LONG,), rank + 1.0), torch.empty(2 * LONG)
    begun = [lambda: all_reduce(total, axis), lambda: all_gather(whole, torch.full((LONG,), float(rank)), axis)]
    pendings = [begin() for begin in (begun if rank else begun[::-1])]
    pendings[0].wait()  # each waits for what the other waits for last
    pendings[1].wait()
    assert total.unique().tolist() == [3.0]
    assert whole.view(2, -1).unique(dim=1).flatten().tolist() == [0.0, 1.0]
    with pytest.raises(OrderError) as caught:
        all_reduce(torch.zeros(4 + rank), axis).wait()
    return str(caught.value)


def test_gathers_and_reductions_pair_up_separately_and_a_mismatch_is_an_error() -> None:
    said = run_world(2, _in_other_orders)
    assert "number 1 of the group is in all_reduce of 5 torch.float32 over dp, this one in all_reduce of 4" in said[0]


def _gathers_of_different_things(rank: int, shares: bool) -> list[str]:
    axis, said = _axis(rank, 3, shares=shares), []
    for label in ("weights of a", "x" * 500, "weights of b" if rank == 1 else "weights of c"):
        whole = torch.empty(12)
        try:
            all_gather(whole, torch.full((4,), float(rank)), axis, label).wait()
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            assert whole.view(3, 4).unique(dim=1).flatten().tolist() == [0.0, 1.0, 2.0]
    return said


@pytest.mark.parametrize("shares", [True, False], ids=["memory", "gloo"])
def test_gathers_of_the_same_length_that_are_of_different_things_are_an_error_that_names_both(shares: bool) -> None:
    """At least the rank that differs, or the one after it, notices; nobody gets what is not meant."""
    said = run_world(3, _gathers_of_different_things, shares)
    found = [text for of_rank in said for text in of_rank if text.startswith("OrderError")]
    assert found
    assert all("weights of b" in text and "weights of c" in text for text in found)
    assert said[1][0].startswith("OrderError")


def _gathers_whose_hosts_run_apart(rank: int) -> list[str]:
    """NCCL's gathers on the host: they start, and their waits return at once; others start when rank 0 has waited."""
    axis, shard = _axis(rank, 3, shares=False), torch.zeros(4)
    assert axis.group is not None
    axis.group.backends["cpu"] = of_a_gpu = TorchBackend()
    backend._MOST_UNCHECKED = 9
    backend._all_gather = lambda *_, **__: SimpleNamespace(wait=lambda: None)
    others = [1, 2] if rank == 0 else [0]
    said = []
    for step in range(2):
        if rank > 0:
            exchange([], [(torch.empty(1), 0)], axis)[0].wait()
        for at in range(9):
            label = f"weights {at}{' of another' if (step, at, rank) == (1, 4, 1) else ''}"
            all_gather(torch.empty(12), shard, axis, label).wait()
        if rank == 0:
            for pending in exchange([(torch.zeros(1), other) for other in others], [], axis):
                pending.wait()
        for _ in range(20):  # an evaluation, at whose end nothing is compared
            if step == 0:
                all_gather(torch.empty(12), shard, axis, "the same").wait()
        assert len(of_a_gpu._unchecked) == 9
        try:
            check_order(axis)
        except OrderError as error:
            said.append(f"{step}: {error}")
    gather_objects(None, axis)
    return said


def test_labels_of_gathers_on_a_gpu_hold_no_host_and_are_compared_when_asked_for() -> None:
    said = run_world(3, _gathers_whose_hosts_run_apart)
    assert said[0] == []
    for text in (*said[1], *said[2]):
        assert text.startswith("1: ")
        assert "weights 4 of another" in text
    assert len(said[1]) == len(said[2]) == 1


def _strided(rank: int) -> None:
    for shares in (True, False):
        axis, strided = _axis(rank, 2, shares=shares), torch.zeros(2**15, 2)[:, 0]  # more than what gloo sums itself
        for call in (
            lambda x, axis=axis: all_reduce(x, axis),
            lambda x, axis=axis: broadcast(x, axis),
            lambda x, axis=axis: ring_shift(torch.zeros(2**15), x, axis),
            lambda x, axis=axis: all_gather(x, torch.zeros(2**14), axis),
            lambda x, axis=axis: reduce_scatter(torch.zeros(2**14), x, axis),
        ):
            with pytest.raises(ValueError, match="contiguous"):
                call(strided)


def test_memory_with_gaps_is_refused_before_anything_is_sent() -> None:
    run_world(2, _strided)


def _save_beside_training(rank: int) -> None:
    state = ParallelState(RankGrid(dp=2), rank, Links(timeout_seconds=60))
    all_reduce(torch.zeros(3), state.dp).wait()
    saving = state.saving_axes(60).world
    got = torch.zeros(1)

    def polled(_: float) -> bool:
        raise AssertionError("the saving thread polls the channels of the training thread")

    state.dp.group.backends["cpu"].poller.poll = polled
    for pending in exchange([(torch.ones(1), 1 - rank)], [(got, 1 - rank)], saving):
        pending.wait()
    assert got.item() == 1


def test_messages_of_the_saving_thread_leave_the_channels_of_the_training_alone() -> None:
    run_world(2, _save_beside_training)


@pytest.mark.parametrize("under_way", [False, True])
def test_leaving_closes_everything(under_way: bool) -> None:
    run_world(2, leave, 1, under_way)
