"""The arena gives out memory that nobody else has, and stops asking the allocator for more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megazero.comm.arena import ALIGNMENT, Arena

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64]


def _arena() -> Arena:
    return Arena(torch.device("cpu"))


# Take a tensor of so many elements, or give back one of those that are taken.
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3 * ALIGNMENT), st.sampled_from(DTYPES)),
        st.tuples(st.just(-1), st.integers(0, 20)),
    ),
    max_size=30,
)


def _run(arena: Arena, actions: list[tuple[int, Any]]) -> int:
    """Play the actions and give everything back; every tensor keeps what was written.  Returns: most bytes taken at once."""
    taken: list[tuple[Tensor, int]] = []
    most = 0
    for mark, (numel, what) in enumerate(actions):
        if isinstance(what, torch.dtype):
            tensor = arena.take(numel, what)
            assert (tensor.dtype, tensor.shape) == (what, (numel,))
            assert tensor.data_ptr() % what.itemsize == 0
            taken.append((tensor.fill_(mark), mark))
        elif taken:
            tensor, written = taken.pop(what % len(taken))
            assert (tensor == written).all()
            arena.give_back(tensor)
        most = max(most, sum(-(-max(1, one.nbytes) // ALIGNMENT) * ALIGNMENT for one, _ in taken))
    for tensor, written in taken:
        assert (tensor == written).all()
        arena.give_back(tensor)
    return most


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_tensors_never_overlap_and_all_memory_comes_back(actions: list[tuple[int, Any]]) -> None:
    arena = _arena()
    most = _run(arena, actions)
    assert arena.peak_bytes == most <= arena.nbytes
    if arena.nbytes:  # free neighbours have merged: the whole fits again, in one buffer
        nbytes = arena.nbytes
        whole = arena.take(nbytes, torch.uint8)
        assert (whole.numel(), arena.nbytes) == (nbytes, nbytes)


def test_steps_of_varying_size_ask_for_no_more_once_the_largest_was_there() -> None:
    arena, sizes = _arena(), [[100 * size, 7 * size, 40 * size] for size in (1, 2, 3, 4)]
    seen = []
    for step in range(40):
        tensors = [arena.take(numel, torch.float32) for numel in sizes[step % 4]]
        for tensor in tensors[1:] + tensors[:1]:
            arena.give_back(tensor)
        seen.append(arena.nbytes)
    assert len(set(seen[5:])) == 1
    assert arena.nbytes <= 2 * arena.peak_bytes


def test_what_is_given_back_is_taken_first() -> None:
    arena = _arena()
    first, _second = arena.take(100, torch.float32), arena.take(100, torch.float32)
    address = first.data_ptr()
    arena.give_back(first)
    assert arena.take(90, torch.float32).data_ptr() == address


def test_memory_that_is_given_back_twice_is_refused_even_if_another_has_it_by_then() -> None:
    arena = _arena()
    first = arena.take(4, torch.float32)
    arena.give_back(first)
    second = arena.take(4, torch.float32)
    assert second.data_ptr() == first.data_ptr()
    for wrong in (first, torch.empty(4), second.view(2, 2)):
        with pytest.raises(ValueError, match=r"4 elements in torch\.float32 is not taken from this arena"):
            arena.give_back(wrong)
    arena.give_back(second)
