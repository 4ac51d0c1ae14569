"""Who is missing when a collective does not finish: first as values, then with ranks that die and ranks that hang."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from counting_store import CountingStore
from harness import run_world
from worlds import LLAMA, LR, engine_on, micro_batches, run_of

from megazero.comm.collectives import all_reduce, from_first, gather_objects
from megazero.comm.messages import LostPeerError
from megazero.config import ResolvedRun
from megazero.parallel_state import Axis, Links, ParallelState, RankGrid
from megazero.parallel_state.axis import Traffic
from megazero.training.heartbeat import (
    BETWEEN,
    EVALUATING,
    SAVING,
    STARTING,
    TRAINING,
    Heartbeat,
    HeartbeatStore,
    explain_missing_ranks,
)
from megazero.training.watchdog import FLIGHT_RECORDS, Watchdog, _within

MINE = Heartbeat(7, 17, TRAINING, "all_reduce", "dp", False, 0.0, {"dp": 40}, at=106.0)
WAITING = Heartbeat(9, 17, TRAINING, "all_reduce", "dp", True, 60.0, {"dp": 40})
STUCK = Heartbeat(5, 17, TRAINING, "all_gather", "tp", False, 62.0, {"dp": 39}, at=100.0)


def _next(beat: Heartbeat) -> Heartbeat:
    return replace(beat, count=beat.count + 1)


def _explained(
    first: dict[int, Heartbeat], second: dict[int, Heartbeat], *, axis: str = "dp", ranks: tuple[int, ...] = (1, 3)
) -> str:
    return explain_missing_ranks(axis, ranks, MINE, first, second)


def test_a_rank_whose_counter_stands_still_does_not_respond() -> None:
    text = _explained({1: WAITING, 3: STUCK}, {1: _next(WAITING), 3: STUCK})
    assert text == "rank 3 does not respond (at its last heartbeat, 6 s ago, it was in step 17)"
    assert _explained({1: WAITING}, {1: _next(WAITING)}) == "rank 3 does not respond (it has sent no heartbeat)"


def test_a_living_rank_that_did_not_come_is_named_with_what_it_does() -> None:
    text = _explained({1: WAITING, 3: STUCK}, {1: _next(WAITING), 3: _next(STUCK)})
    assert text == "rank 3 is alive, in step 17, outside any collective for 62 s, the last was all_gather over tp"
    said = {
        SAVING: "saving step 17",
        STARTING: "starting",
        EVALUATING: "evaluating after step 17",
        BETWEEN: "after step 17",
    }
    for phase, words in said.items():
        other = replace(STUCK, phase=phase)
        assert f"alive, {words}," in _explained({1: WAITING, 3: other}, {1: _next(WAITING), 3: _next(other)})
        assert f"ago, it was {words})" in _explained({1: WAITING, 3: other}, {1: _next(WAITING), 3: other})


def test_the_cause_is_looked_for_behind_ranks_that_wait_themselves() -> None:
    elsewhere = replace(WAITING, axis="pp", operation="send_recv", begun={"dp": 39})
    beats = {1: WAITING, 3: elsewhere, 5: STUCK}
    text = _explained(beats, {rank: _next(beat) for rank, beat in beats.items()})
    assert text.startswith("rank 5 is alive, in step 17, outside any collective")
    del beats[5]
    text = _explained(beats, {rank: _next(beat) for rank, beat in beats.items()})
    assert text == "rank 3 is alive, in step 17, in send_recv over pp for 60 s"


def test_a_rank_that_ended_is_named_with_its_reason_and_one_that_lost_a_peer_is_no_cause() -> None:
    ended = replace(STUCK, ended="OSError: No space left on device")
    assert _explained({1: WAITING, 3: ended}, {1: _next(WAITING), 3: ended}) == (
        "rank 3 ended in step 17: OSError: No space left on device"
    )
    also = replace(STUCK, ended="all_reduce over tp did not finish", lost=True)
    text = _explained({1: also, 3: STUCK}, {1: also, 3: STUCK})
    assert text == "rank 3 does not respond (at its last heartbeat, 6 s ago, it was in step 17)"
    assert _explained({1: WAITING, 3: also}, {1: _next(WAITING), 3: also}) == (
        "rank 3 has lost a peer itself: all_reduce over tp did not finish"
    )


def test_where_all_take_part_it_is_the_network() -> None:
    assert "network" in _explained({1: WAITING, 3: WAITING}, {1: _next(WAITING), 3: _next(WAITING)})


@pytest.mark.parametrize("dead", [(), (5,), (5, 40)])
def test_a_search_reads_the_whole_world_twice_and_then_who_is_silent(dead: tuple[int, ...], tmp_path: Path) -> None:
    """Every rank searches at the same time, in one store."""
    counting = CountingStore(dist.HashStore())
    place = SimpleNamespace(size=64, ranks=range(64))
    state: Any = SimpleNamespace(device=torch.device("cpu"), rank=0, world=place, traffic=Traffic())
    watchdog = Watchdog(state, 60, tmp_path, tick_seconds=0.01)
    watchdog._store, watchdog._patience = (store := HeartbeatStore(counting, "run")), 0.05
    others = range(1, 64)
    for rank in others:
        store.write(rank, WAITING)

    def answer(**_: bool) -> None:
        for rank in others:
            if rank not in dead:
                store.write(rank, _next(WAITING))

    with patch.object(store, "request", answer):
        text = watchdog._compare("dp", others, MINE, is_over=True)
    assert [f"rank {rank} does not respond" in text for rank in others] == [rank in dead for rank in others]
    reads = counting.counts.checked - 1  # is it known already?
    assert counting.counts.read_keys == 2 * 63 + (reads - 2) * len(dead)
    assert dead or reads == 2
    if dead:  # a rank that looks later reads what the first has found, and no heartbeat
        before = counting.counts.copy()
        assert watchdog._compare("tp", (7,), MINE, is_over=True) == text
        assert counting.counts.read_keys == before.read_keys + 1


def test_an_explanation_that_hangs_or_fails_is_given_up() -> None:
    assert _within(0.05, lambda: time.sleep(60)) is None
    assert _within(5, lambda: 1 / 0) is None
    assert _within(5, lambda: 3) == 3


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that die


def _lose_a_rank(rank: int, run: ResolvedRun, victim: int, folder: Path) -> str:
    engine = engine_on(rank, run)
    try:
        with Watchdog(engine.state, 60, folder, tick_seconds=0.2) as watchdog:
            for step in range(1, 100):
                watchdog.at(step, TRAINING)
                if rank == victim and step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.train_step(micro_batches(run, engine.state, step), LR)
    except LostPeerError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize(("world", "parallel", "victim"), [(2, {}, 1), (4, {"pp": 2}, 3), (4, {"tp": 2}, 0)])
def test_every_survivor_names_axis_operation_step_and_the_dead_rank(
    tmp_path: Path, world: int, parallel: dict[str, Any], victim: int
) -> None:
    run = run_of(world, model=LLAMA, parallel=parallel)
    errors = run_world(world, _lose_a_rank, run, victim, tmp_path, may_die=(victim,))
    for rank, error in enumerate(errors):
        if rank == victim:
            continue
        assert f"as rank {rank} of (" in error
        assert any(f" over {axis}, " in error for axis in ("dp", "pp", "tp", "world"))
        assert "in step 3 did not finish" in error
        assert f"rank {victim} does not respond" in error
        record = tmp_path / FLIGHT_RECORDS / f"rank-{rank}.json"
        if hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"):
            assert str(record) in error
            assert "entries" in json.loads(record.read_text())


def _end_with_an_error(rank: int, folder: Path) -> str:
    state = ParallelState(RankGrid(dp=2), rank)
    try:
        with Watchdog(state, 60, folder, tick_seconds=0.2) as watchdog:
            watchdog.at(4, TRAINING)
            if rank == 1:
                raise OSError("No space left on device\nand more")
            all_reduce(torch.ones(1), state.world).wait()
    except (LostPeerError, OSError) as error:
        return str(error)
    return "nothing was noticed"


def test_a_rank_that_ends_with_an_error_lets_the_others_know(tmp_path: Path) -> None:
    survivor, _ = run_world(2, _end_with_an_error, tmp_path)
    assert "all_reduce over dp, as rank 0 of (0, 1), in step 4 did not finish" in survivor or "over world" in survivor
    assert "rank 1 ended in step 4: OSError: No space left on device" in survivor


class _DeadStore:
    def write(self, rank: int, beat: Heartbeat) -> None:
        raise RuntimeError("connection refused")

    def read(self, ranks: object) -> dict[int, Heartbeat]:
        raise RuntimeError("connection refused")


def _lose_the_store_too(rank: int, folder: Path) -> str:
    state = ParallelState(RankGrid(dp=2), rank)
    try:
        with Watchdog(state, 60, folder, tick_seconds=60) as watchdog:
            watchdog.at(4, TRAINING)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            watchdog._store = _DeadStore()  # type: ignore[assignment]
            all_reduce(torch.ones(1), state.world).wait()
    except LostPeerError as error:
        return str(error)
    return "nothing was noticed"


def test_without_the_store_nothing_is_known_and_that_is_said(tmp_path: Path) -> None:
    survivor, _ = run_world(2, _lose_the_store_too, tmp_path, may_die=(1,))
    assert "in step 4 did not finish: nothing is known of the other ranks" in survivor


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that hang


def _one_hangs(rank: int, run: ResolvedRun, stuck: int, folder: Path) -> str:
    grid = RankGrid(pp=run.config.parallel.pp, cp=run.config.parallel.cp, dp=run.dp)
    engine = engine_on(rank, run, state=ParallelState(grid, rank, Links(timeout_seconds=3)))
    sys.stderr = io.StringIO()
    ended = threading.Event()
    # the tick is so slow that a heartbeat is due only after the others' patience has ended: they have to request one
    watched = Watchdog(engine.state, 3, folder, tick_seconds=0.6)
    watched.margin_seconds, watched.end = 1.0, ended.set  # type: ignore[method-assign]
    try:
        with watched as watchdog:
            for step in range(1, 100):
                watchdog.at(step, TRAINING)
                if rank == stuck and step == 3:
                    ended.wait()  # as in a read from a disk that does not answer
                    return sys.stderr.getvalue()
                engine.train_step(micro_batches(run, engine.state, step), LR)
    except LostPeerError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"pp": 2}, {"cp": 2, "cp_method": "ring"}], ids=["pipeline", "ring"])
def test_a_rank_that_hangs_is_named_as_alive_and_is_ended_once_the_others_gave_up(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    """Pairs of ranks have groups of their own, with a short limit; the whole world's is that of the test."""
    run = run_of(4, model=LLAMA, parallel=parallel)
    errors = run_world(4, _one_hangs, run, 3, tmp_path)
    named = ["rank 3 is alive, in step 3, outside any collective for " in error for error in errors[:3]]
    assert all(named) if "cp" in parallel else any(named)
    for rank, error in enumerate(errors[:3]):
        assert f"as rank {rank} of (" in error
        assert "in step 3 did not finish" in error
    assert errors[3].startswith("rank 3: no progress for ")
    assert "this rank ends itself" in errors[3]


def _blocked_by_a_device(rank: int, folder: Path) -> tuple[bool, float, str]:
    """Rank 2 is silent in step 2, as where it is dead.  Rank 0 keeps the others waiting first: a callback, then its data."""
    state, ended = ParallelState(RankGrid(dp=3), rank), threading.Event()
    sys.stderr = io.StringIO()
    watched = Watchdog(state, 600, folder, tick_seconds=0.1)
    watched._is_on_cuda, watched.silence_seconds, watched.margin_seconds = True, 2.0, 2.0
    watched.end = ended.set  # type: ignore[method-assign]
    with watched as watchdog:
        for step in (1, 2):
            watchdog.at(step, TRAINING)
            state.traffic.advance()
            all_reduce(torch.ones(1), state.world).wait()
        if rank == 2:
            watchdog._over.set()  # its thread
            while len(list(folder.glob("ended-*"))) < 2:
                time.sleep(0.02)
            return False, 0.0, ""
        if rank == 0:
            watchdog.at(2, BETWEEN)
        was_early = ended.wait(5.0)
        watchdog.at(3, TRAINING)
        if rank == 1:
            state.traffic.advance()
        was_early |= ended.wait(5.0)
        state.traffic.advance()
        start = time.monotonic()
        ended.wait(100)  # a wait that no signal ends, as for a device
        watchdog._over.set()
        (folder / f"ended-{rank}").touch()
        return was_early, time.monotonic() - start, sys.stderr.getvalue()


@pytest.mark.slow
def test_ranks_that_a_device_holds_end_where_a_peer_is_silent_and_not_where_a_living_one_keeps_them(
    tmp_path: Path,
) -> None:
    """Long before the time limit of a collective; rank 0 learns it from rank 1, which watches rank 2."""
    for was_early, seconds, said in run_world(3, _blocked_by_a_device, tmp_path)[:2]:
        assert not was_early
        assert seconds < 60
        assert "rank 2 does not respond (at its last heartbeat, " in said
        assert "this rank ends itself" in said


def _both_look(rank: int, folder: Path) -> str:
    state = ParallelState(RankGrid(dp=2), rank)
    with Watchdog(state, 60, folder, tick_seconds=0.2) as watchdog:
        watchdog._over.set()  # as where the thread that writes heartbeats is the caller
        watchdog._thread.join()
        gather_objects(None, state.world)
        found = watchdog._explain("world", (0, 1), is_over=False)
        gather_objects(None, state.world)
        return found


def test_two_ranks_that_look_at_the_same_time_see_each_other(tmp_path: Path) -> None:
    for found in run_world(2, _both_look, tmp_path):
        assert "all ranks of the axis are alive" in found


def _long_stretches(rank: int, run: ResolvedRun, folder: Path) -> list[int]:
    """Progress marks within a step and within an evaluation of so many passes, as a device's host makes them."""
    engine = engine_on(rank, run)
    state, marks = engine.state, []
    watchdog = Watchdog(state, 60, folder)
    watchdog._is_on_cuda = True
    first = [(1, TRAINING), (1, EVALUATING)]
    for step, phase in [*first, (2, BETWEEN), (2, SAVING), (2, TRAINING), (2, EVALUATING)]:
        watchdog.at(step, phase)
        all_reduce(torch.ones(1), state.world).wait()
        assert watchdog._waits_for_others() is (step == 2 and phase in (TRAINING, EVALUATING)), (step, phase)
        watchdog._at = (step, phase, -1e9)
        state.traffic.last = state.traffic.last._replace(since=-1e9)
        state.traffic.advanced = -1e9
        assert watchdog._seconds_without_progress() > 1e8
        state.traffic.advance()
        assert watchdog._seconds_without_progress() < 1e8
    intact = state.traffic.advance
    state.traffic.advance = lambda: (marks.append(1), intact())[1]  # type: ignore[method-assign]
    engine.train_step(micro_batches(run, state, 0), LR)
    in_step = len(marks)
    engine.evaluate(micro_batches(run, state, 0))
    return [in_step, len(marks) - in_step]


def test_every_pass_of_a_step_and_of_an_evaluation_is_progress_and_what_lies_between_may_take_its_time(
    tmp_path: Path,
) -> None:
    run = run_of(2, model=LLAMA, training={"micro_batch_size": 1, "accumulation": 4})
    assert (
        run_world(2, _long_stretches, run, tmp_path) == [[2 * 2 * 4, 2 * 4]] * 2
    )  # before and after each of 4 + 4, of 4


def _healthy(rank: int, folder: Path) -> tuple[int, list[str]]:
    state = ParallelState(RankGrid(dp=2), rank)
    with Watchdog(state, 60, folder, tick_seconds=0.01) as watchdog:
        for step in range(1, 6):
            watchdog.at(step, TRAINING)
            all_reduce(torch.ones(1), state.world).wait()
            time.sleep(0.1)
        store = watchdog._store
        assert isinstance(store, HeartbeatStore)
        gather_objects(None, state.world)
        beats, end = store.read((0, 1)), time.monotonic() + 60
        while min(beat.step for beat in beats.values()) < 5 and time.monotonic() < end:
            time.sleep(0.02)
            beats = store.read((0, 1))
        gather_objects(None, state.world)
    return min(beat.step for beat in beats.values()), [thread.name for thread in threading.enumerate()]


def test_a_healthy_run_leaves_heartbeats_and_no_thread(tmp_path: Path) -> None:
    for step, threads in run_world(2, _healthy, tmp_path):
        assert step == 5
        assert "watchdog" not in threads
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# Where waiting is counted


def _waited(rank: int, entered: Path) -> tuple[float, float]:
    state = ParallelState(RankGrid(dp=2), rank)
    gather_objects(None, state.world)
    before = state.traffic.waited_seconds
    if rank == 1:
        while not entered.exists():
            time.sleep(0.02)
        time.sleep(0.5)
    else:
        _touch_on_entering(state, entered)
    all_reduce(torch.ones(1), state.world).wait()
    last = state.traffic.last
    assert last is not None
    assert (last.operation, last.ranks, last.is_inside) == ("all_reduce", (0, 1), False)
    return state.traffic.waited_seconds - before, last.since


def _touch_on_entering(state: ParallelState, entered: Path) -> None:
    intact = state.traffic.enter

    def enter(*args: Any) -> Any:
        call = intact(*args)
        entered.touch()
        return call

    state.traffic.enter = enter  # type: ignore[method-assign]


def test_the_time_spent_waiting_is_that_of_the_rank_that_came_first(tmp_path: Path) -> None:
    (first, _), (late, _) = run_world(2, _waited, tmp_path / "entered")
    assert first > 0.3
    assert late < first


def test_errors_of_the_device_are_not_blamed_on_a_peer() -> None:
    from megazero.comm.collectives import _guarded

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def nothing_to_say() -> None:
        raise RuntimeError("")

    axis = Axis("dp", (0, 1), 0)
    with pytest.raises(torch.OutOfMemoryError):
        _guarded("all_reduce", axis, out_of_memory)
    with pytest.raises(LostPeerError, match="all_reduce over dp, as rank 0 of"):
        _guarded("all_reduce", axis, nothing_to_say)


def _tell(rank: int) -> tuple[object, object, str]:
    """What the first rank has, over all ranks and over the last two; then the first one is lost."""
    state = ParallelState(RankGrid(pp=3), rank, Links(timeout_seconds=5))
    told = from_first({"of": "x" * 5000} if rank == 0 else lambda: None, state.world)  # a lambda cannot be sent
    group = dist.new_group([1, 2])
    pair = replace(state.world, ranks=(1, 2), index=rank - 1, group=replace(state.world.group, process_group=group))
    told_by_1 = from_first(rank, pair) if rank else None
    gather_objects(None, state.world)
    if rank == 0:
        os._exit(0)
    with pytest.raises(LostPeerError, match=f"from_first over world, as rank {rank} of") as lost:
        from_first(None, state.world)
    return told, told_by_1, lost.value.operation


def test_the_first_rank_alone_sends_what_all_are_told() -> None:
    first, *others = run_world(3, _tell, may_die=(0,))
    assert first is None
    assert others == [({"of": "x" * 5000}, 1, "from_first")] * 2
