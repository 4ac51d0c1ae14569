"""The arena gives out memory that nobody else has, and stops asking the allocator for more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megazero.comm import memory as memory_module
from megazero.comm.memory import ALIGNMENT, Arena, StorageError


def _arena() -> Arena:
    return Arena(torch.device("cpu"))


# Take a tensor of so many elements, or give back one of those that are taken.
ACTIONS = st.lists(
    st.one_of(st.tuples(st.integers(0, 6 * ALIGNMENT), st.just(0)), st.tuples(st.just(-1), st.integers(0, 20))),
    max_size=30,
)


def _run(arena: Arena, actions: list[tuple[int, int]], line: int = 0) -> int:
    """Play the actions and give everything back; every tensor keeps what was written.  Returns: most bytes taken at once."""
    taken: list[tuple[Tensor, int]] = []
    most = 0
    for mark, (numel, what) in enumerate(actions):
        if numel >= 0:
            memory = arena.acquire(numel, line=line * mark % 2)
            assert (memory.dtype, memory.shape) == (torch.uint8, (numel,))
            assert memory.storage_offset() % ALIGNMENT == 0
            taken.append((memory.fill_(mark), mark))
        elif taken:
            tensor, written = taken.pop(what % len(taken))
            assert (tensor == written).all()
            arena.release(tensor)
        most = max(most, sum(-(-max(1, one.nbytes) // ALIGNMENT) * ALIGNMENT for one, _ in taken))
    for tensor, written in taken:
        assert (tensor == written).all()
        arena.release(tensor)
    return most


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.integers(0, 1))
def test_tensors_never_overlap_and_a_step_that_was_before_fits(actions: list[tuple[int, int]], line: int) -> None:
    arena = _arena()
    most = _run(arena, actions, line)
    assert most <= arena.nbytes
    arena.reserve()
    nbytes = arena.nbytes
    assert most <= nbytes
    for _ in range(3):  # not one byte more, and no second buffer
        _run(arena, actions, line)
        arena.reserve()
        assert (arena.nbytes, arena.nbytes_in_use) == (nbytes, 0)
    if nbytes and not line:  # free neighbours have merged: the whole fits
        assert (arena.acquire(nbytes).numel(), arena.nbytes) == (nbytes, nbytes)


def test_what_stays_leaves_no_gap_among_what_comes_and_goes() -> None:
    """Three tensors, a buffer after the first has gone, and three tensors again: as much as both lines at their fullest."""
    arena = _arena()
    for step in range(3):
        arena.reserve()
        tensors, buffers = [arena.acquire(size * ALIGNMENT) for size in (2, 3, 4)], []
        for _ in range(2):
            buffers.append(arena.acquire(ALIGNMENT, line=1))
            for tensor in reversed(tensors):
                arena.release(tensor)
            tensors = [arena.acquire(size * ALIGNMENT) for size in (2, 3, 4)]
        for memory in tensors + buffers:
            arena.release(memory)
        assert arena.nbytes == 11 * ALIGNMENT, step


def test_what_could_not_be_had_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, make = _arena(), memory_module.host_tensor

    def host_tensor(numel: int, *args: Any, **more: Any) -> Tensor:
        if numel > 4 * ALIGNMENT:
            raise StorageError("too much")
        return make(numel, *args, **more)

    monkeypatch.setattr(memory_module, "host_tensor", host_tensor)
    with pytest.raises(StorageError):
        arena.acquire(1 << 40)
    for _ in range(3):
        arena.reserve()
        for memory in [arena.acquire(ALIGNMENT), arena.acquire(2 * ALIGNMENT)]:
            arena.release(memory)
        assert arena.nbytes == 3 * ALIGNMENT
    first, *others = [arena.acquire(2 * ALIGNMENT) for _ in range(3)]  # a buffer for all is more than can be had
    for memory in (first, *others):
        arena.release(memory)
    for _ in range(3):
        arena.reserve()
        for memory in [arena.acquire(2 * ALIGNMENT) for _ in range(3)]:
            arena.release(memory)


def test_memory_that_is_not_taken_is_refused() -> None:
    arena = _arena()
    memory = arena.acquire(16)
    arena.release(memory)
    for wrong in (memory, torch.empty(16, dtype=torch.uint8)):
        with pytest.raises(KeyError):
            arena.release(wrong)


def test_memory_that_is_written_does_not_change_the_version_of_other_memory() -> None:
    arena = _arena()
    first, second = arena.acquire(16), arena.acquire(16)
    version = first._version
    second.fill_(1)
    assert first._version == version


def test_pages_are_locked_only_while_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []
    make = memory_module.host_tensor
    monkeypatch.setattr(
        memory_module, "host_tensor", lambda *args, pin, remedy: (locked.append(pin), make(*args, pin=pin))[1]
    )
    for arena in (Arena(torch.device("cpu"), pins=True), _arena()):
        for _ in range(3):
            arena.reserve()
            taken = [arena.acquire(ALIGNMENT) for _ in range(3)]
            arena.reserve()
            for memory in taken:
                arena.release(memory)
    # Three, and then one in their place, which is locked where the arena is a GPU's window to the host.
    assert locked == [False, False, False, True, False, False, False, False]


def test_a_size_that_was_given_back_is_found_again() -> None:
    """Whatever else is free: in the first step, too, memory is not more than was taken at once."""
    arena = _arena()
    for sizes in ((3, 1, 2), (1, 2, 3), (2, 1, 3)):
        for memory in [arena.acquire(size * ALIGNMENT) for size in sizes]:
            arena.release(memory)
    assert arena.nbytes == 6 * ALIGNMENT
