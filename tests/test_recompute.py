"""Hooks of saved tensors and recomputation leave nothing behind, and give right gradients in odd company."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import run_world
from torch import Tensor, nn

from megazero.layers.recompute import DroppingOutputs, Recomputed, Tape
from megazero.layers.saved_tensors import SavedTensorHooks
from megazero.parallel_state import ParallelState, RankGrid

Wrap = Callable[..., Callable[..., Any]]


def _x(*shape: int) -> Tensor:
    return torch.linspace(0.1, 1, torch.Size(shape or (3,)).numel()).view(shape or (3,)).requires_grad_()


@pytest.fixture(autouse=True, scope="module")
def _collects_what_is_new() -> Iterator[None]:
    """A collection takes a tenth of a second where it walks all modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_hooks_stay() -> Iterator[None]:
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def _gradients(function: Callable[[Wrap, Tensor], Tensor], *shape: int) -> tuple[Tensor, Tensor]:
    """Of `function(wrap, x)` without recomputation, and with it where results are dropped."""
    xs = _x(*shape), _x(*shape)
    function(lambda region: region, xs[0]).backward()
    with DroppingOutputs():
        y = function(Recomputed, xs[1])
    y.backward()
    assert xs[0].grad is not None
    assert xs[1].grad is not None
    return xs[0].grad, xs[1].grad


# ---- errors, and what stays alive


def test_an_error_in_either_run_or_in_what_was_kept_leaves_no_hooks_and_nothing_alive() -> None:
    class Unpacked(SavedTensorHooks):
        def pack(self, tensor: Tensor) -> Any:
            return self.beneath.pack(tensor)

        def unpack(self, saved: Any) -> Tensor:
            raise ValueError("unpack")

    for bad, nested in ((1, False), (1, True), (2, False), (2, True), (0, False)):
        alive: list[weakref.ref[Tensor]] = []
        runs = []

        def region(x: Tensor, alive: Any = alive, runs: Any = runs, bad: int = bad) -> Tensor:
            inner = x.exp()
            alive.append(weakref.ref(inner))
            y = inner.sin()
            runs.append(1)
            if len(runs) == bad:
                raise ValueError("region")
            return y.cos()

        def step(region: Any = region, bad: int = bad, nested: bool = nested, alive: Any = alive) -> None:
            argument = _x() * 2
            alive.append(weakref.ref(argument))
            hooks = [DroppingOutputs()] if bad else [Unpacked()]
            with hooks[0]:
                called = Recomputed(region)
                y = (Recomputed(lambda x: called(x.exp())) if nested else called)(argument).square().sum()
            y.backward()

        gc.collect()
        gc.disable()  # nothing may wait for it
        try:
            with pytest.raises(ValueError, match="region" if bad else "unpack") as raised:
                step()
            del raised
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        finally:
            gc.enable()
        gc.collect()  # frames of the error
        assert [one() for one in alive] == [None] * len(alive), (bad, nested)


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_alive_after_the_backward_or_without_one(backward: bool) -> None:
    alive: list[weakref.ref[Any]] = []

    def region(x: Tensor, scale: Tensor) -> Tensor:
        inner = x.exp()
        alive.append(weakref.ref(inner))
        return inner.sin() * scale

    def step() -> None:
        argument, scale = _x() * 2, torch.ones(3)
        called = Recomputed(region)
        with DroppingOutputs():
            y = called(argument, scale)
            loss = y.square().sum()
        alive.extend(map(weakref.ref, (argument, scale, y, called)))
        del argument, scale, y
        if backward:
            loss.backward()

    gc.collect()
    gc.disable()
    try:
        step()
        assert [one() for one in alive] == [None] * (6 if backward else 5)
    finally:
        gc.enable()


def test_what_was_made_again_is_freed_by_the_node_that_used_it() -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            alive.append(sum(one() is not None for one in made[4:]))
            return grad

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            saved = x.cos()
            made.append(weakref.ref(saved.untyped_storage()))
            ctx.save_for_backward(saved)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    def region(x: Tensor) -> Tensor:
        for _ in range(4):
            x = Counts.apply(Saves.apply(x))
        return x

    Recomputed(region)(_x()).sum().backward()
    assert len(made) == 8
    assert alive == [0, 3, 2, 1]


def test_a_graph_that_is_retained_makes_it_again_once() -> None:
    runs: list[int] = []
    x = _x()
    y = Recomputed(lambda x: (runs.append(1), x.sin().exp())[1])(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=retain)[0] for retain in (True, False))
    assert torch.equal(first, second)
    assert len(runs) == 2
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


# ---- results that are dropped


def _views(wrap: Wrap, x: Tensor) -> Tensor:
    part, turned, whole = wrap(lambda x: ((h := x.exp())[:, :2], h.t(), h))(x)
    return (part * part).sum() + (turned[1:] * turned[:-1]).sum() + whole.sin().sum()


def _of_an_argument(wrap: Wrap, x: Tensor) -> Tensor:
    part, same, new = wrap(lambda x: (x[1:], x, x.sin()))(x.exp())
    return (part * part).sum() + (same * same).sum() + new.exp().sum()


def _changed_in_place(wrap: Wrap, x: Tensor) -> Tensor:
    y = wrap(lambda x: x.sin() * 1)(x)
    y.mul_(3)
    return (y * y).sum()


def _part_changed_in_place(wrap: Wrap, x: Tensor) -> Tensor:
    y = wrap(lambda x: x.sin() * 1)(x)
    y[1:].mul_(3)
    return y.exp().sum() + (y[:1] * y[:1]).sum()


def _empty(wrap: Wrap, x: Tensor) -> Tensor:
    y, none = wrap(lambda x: (x.sin(), x[:0].exp()))(x)
    return (y * y).sum() + (none * none).sum() + (x[:0] * x[:0]).sum()


def _sparse(wrap: Wrap, x: Tensor) -> Tensor:
    return torch.sparse.sum(wrap(lambda x: x.exp().to_sparse())(x).coalesce()) + wrap(torch.exp)(x).square().sum()


def _nested(wrap: Wrap, x: Tensor) -> Tensor:
    inner = wrap(lambda x: x.exp().sin())
    return wrap(lambda x: inner(x.sin()) * inner(x).exp())(x).square().sum()


@pytest.mark.parametrize(
    "function", [_views, _of_an_argument, _changed_in_place, _part_changed_in_place, _empty, _sparse, _nested]
)
def test_dropped_results_have_the_gradients_of_kept_ones(function: Callable[[Wrap, Tensor], Tensor]) -> None:
    without, with_ = _gradients(function, 3, 4)
    assert torch.equal(without, with_)


def test_memory_of_a_result_that_is_gone_belongs_to_another() -> None:
    def function(wrap: Wrap, x: Tensor) -> Tensor:
        wrap(torch.sin)(x).sum()
        others = [x * factor for factor in range(2, 6)]
        return sum(((one * one).sum() for one in others), torch.zeros(()))

    assert torch.equal(*_gradients(function, 64))


# ---- copies, threads


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.__dict__["forward"] = Recomputed(self.product)

    def product(self, x: Tensor) -> Tensor:
        return self.linear(x).exp()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_of_a_module_recomputes_with_its_own_weights(copied: Callable[[nn.Module], nn.Module]) -> None:
    layer = _Layer()
    other = copied(layer)
    with torch.no_grad():
        other.linear.weight.zero_()  # type: ignore[union-attr, operator]
    layer.linear.requires_grad_(False)
    y = other(_x())
    assert torch.equal(y, other.linear.bias.exp())  # type: ignore[union-attr, operator]
    y.sum().backward()
    assert layer.linear.weight.grad is None
    assert torch.equal(other.linear.bias.grad, y.detach())  # type: ignore[union-attr, arg-type]


def test_threads_recompute_beside_each_other_and_a_backward_runs_on_any() -> None:
    region, wrong = Recomputed(lambda x: (x.sin() * x).exp()), []

    def work(size: int) -> None:
        for _ in range(20):
            x = _x(size)
            with DroppingOutputs():
                y = region(x).square().sum()
            y.backward()
            (wanted,) = torch.autograd.grad((x.sin() * x).exp().square().sum(), x)
            wrong.extend([] if x.grad is not None and torch.equal(x.grad, wanted) else [size])

    x = _x()
    y = region(x).sum()
    threads = [threading.Thread(target=work, args=(size,)) for size in (3, 5)] + [threading.Thread(target=y.backward)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert x.grad is not None


# ---- what is kept


class _Sin(torch.autograd.Function):
    """sin, whose result and cosine are kept; `computed` counts."""

    computed = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tape) -> Tensor:
        def compute() -> tuple[Tensor, ...]:
            _Sin.computed += 1
            return x.sin(), x.cos()

        y, slope = kept.through(compute)
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


def test_a_kept_result_that_is_changed_in_place_is_an_error() -> None:
    """The second run would be given the changed one, and change it again."""

    def region(x: Tensor, weight: Tensor) -> Tensor:
        y = kept.through(lambda: (x.sin(),))[0]
        y *= 2
        return y * weight

    kept, weight = Tape(), torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Recomputed(region, kept)(torch.randn(4), weight).sum().backward()
    (wanted,) = torch.autograd.grad(
        Recomputed(lambda x, w: (x.sin() * w).exp(), kept)(torch.ones(4), weight).sum(), weight
    )
    torch.testing.assert_close(wanted, torch.ones(4).sin() * torch.ones(4).sin().exp())


def test_results_of_several_calls_are_kept_in_order_also_after_errors() -> None:
    kept, fails, _Sin.computed = Tape(), [0], 0

    def region(x: Tensor) -> Tensor:
        y = _Sin.apply(_Sin.apply(x, kept) * 2, kept)
        fails[0] -= 1
        if fails[0] == 0:
            raise ValueError("on purpose")
        return y.exp()

    x, called = _x(), Recomputed(region, kept)
    (wanted,) = torch.autograd.grad(2 * ((x.sin() * 2).sin().exp()).sum(), x)
    for run in range(3):  # the first fails forward, the second when it is made again
        fails[0] = (1, 3, 0)[run]
        if run < 2:
            with pytest.raises(ValueError, match="on purpose"):
                (called(x).sum() + called(x).sum()).backward()
        else:
            _Sin.computed = 0
            (got,) = torch.autograd.grad(called(x).sum() + called(x).sum(), x)
            assert torch.allclose(got, wanted)
            assert _Sin.computed == 4
    _Sin.computed = 0
    region(x)  # outside of a recomputation it computes
    assert _Sin.computed == 2


def test_what_the_ranks_cannot_share_evenly_is_kept_whole() -> None:
    def law(rank: int) -> list[int]:
        state, sent = ParallelState(RankGrid(tp=2), rank), []
        for size in (4, 5, 0):
            x = _x(size)
            state.traffic.reset()
            with DroppingOutputs():
                y = Recomputed(lambda x: x.sin().exp(), shards=state.tp)(x * 1).sum()
            y.backward()
            sent.append(state.traffic.sent_bytes["tp", "all_gather"])
            assert x.grad is not None
            assert torch.allclose(x.grad, x.detach().cos() * x.detach().sin().exp())
        return sent

    assert run_world(2, law) == [[4 * 4 // 2, 0, 0]] * 2
