"""Recomputation: drop the tensors that a function would save for its backward, and run the function again to get them
back.

    forward     y  = f(x)     saves x (and what `tape` records); drops what the operations of f save, and y if asked to
    backward    y' = f(x)     once, when the first dropped tensor is needed; then the backward of f continues

    x --[norm]--> n --[linear]-->      norm is recomputed: the linear layer saves n, which norm can compute again from x

Recomputed functions form chains: if f's argument is the dropped result of g, f does not save the argument, and its
second run first runs g again.  The graph of a second run only collects what it saves; the backward runs on the first
graph.

Source: Chen et al. 2016; Korthikanti et al. 2022, section 5, for recomputing parts of a layer; the saved-tensor hooks
work like those of torch.utils.checkpoint without re-entrance.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_flatten, tree_unflatten

from megazero.comm.backend import address_of
from megazero.comm.collectives import all_gather
from megazero.layers.saved_tensors import SavedTensorHooks, checked_tensor, innermost, with_version
from megazero.parallel_state import Axis

#: An axis of one rank: tensors are saved whole.
WHOLE = Axis("none")


class _Dropped:
    """A dropped tensor.  After the second run it holds the recomputed tensor."""

    __slots__ = ("__weakref__", "remade", "source")

    def __init__(self, source: Recomputation | _Shard) -> None:
        self.source = source
        self.remade: tuple[Tensor, int] | None = None

    def tensor(self) -> Tensor:
        """Return the tensor.  The first call recomputes everything that the source has dropped."""
        if self.remade is None:
            self.source.run_again()
        assert self.remade is not None
        return checked_tensor(self.remade)


class _View(NamedTuple):
    """A view of a dropped tensor."""

    base: _Dropped
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


class _Saved(NamedTuple):
    """Properties of a saved tensor that both runs must agree on.  Those of a parameter include address and version."""

    shape: torch.Size
    dtype: torch.dtype
    parameter: tuple[tuple[int, int], int] | None

    @staticmethod
    def of(tensor: Tensor) -> _Saved:
        base = tensor if tensor._base is None else tensor._base
        found = (address_of(base), base._version) if isinstance(base, nn.Parameter) else None
        return _Saved(tensor.shape, tensor.dtype, found)

    def is_again(self, now: _Saved) -> bool:
        """Whether the second run saved the same tensor.  There a parameter among the arguments is a plain tensor."""
        return self[:2] == now[:2] and now.parameter in (None, self.parameter)


class Recomputation(SavedTensorHooks):
    """One call of a function whose saved tensors are dropped and recomputed in the backward.

    Args:
        function: must compute the same again when it is called with the same arguments.
        tape: records intermediate results of the function, which the second run replays.
        draws: the function may use torch's default generators; if it does, their states are saved.
    """

    def __init__(self, function: Callable[..., Any], tape: Tape | None = None, *, draws: bool = False) -> None:
        super().__init__()
        self._function, self._tape = function, tape or Tape()
        self._generators = _default_generators() if draws else []
        # the generators that were used, with their states before
        self._drawn: list[tuple[torch.Generator, Tensor]] = []
        self._dropped: list[weakref.ref[_Dropped]] = []
        self._signature: list[_Saved] = []
        self._weights: list[Any] = []  # saved weights, which are stored elsewhere
        self._leaves: list[Tensor] = []  # saved leaves, until the function ends
        self._has_ended = False
        self._outputs: dict[int, weakref.ref[_Dropped]] = {}
        self._recorded: list[list[Any]] = []

    def run(self, *args: Any) -> Any:
        """Return the function's result.  Arguments may be nested in any way; their tensors are saved."""
        leaves, self._structure = tree_flatten(args)
        # A tensor that is passed twice is one tensor in both runs, and is saved once.
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        saved = {key: _Argument(self.beneath.pack(tensor), tensor.requires_grad) for key, tensor in tensors.items()}
        self._args = [saved.get(id(leaf), leaf) for leaf in leaves]
        # a backward within the function may need these states before the function ends
        self._drawn = [(rng, rng.get_state()) for rng in self._generators]
        self.enter()
        try:
            self._tape.record()
            result = self._function(*args)
            self._drawn = [(rng, state) for rng, state in self._drawn if not torch.equal(rng.get_state(), state)]
        finally:
            recorded = self._tape.stop()
            self._leaves.clear()
            self.leave()
        self._has_ended = True
        self._recorded = [[self.beneath.pack(checked_tensor(tensor)) for tensor in results] for results in recorded]
        self.beneath.drop(self, [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)])
        return result

    def pack(self, tensor: Tensor) -> Any:
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:
            self.note_leaf(base)
        weight = self.pack_weight(tensor)
        if weight is not None:
            self._weights.append(weight)
            return weight
        dropped = _Dropped(self)
        self._dropped.append(weakref.ref(dropped))
        self._signature.append(_Saved.of(tensor))
        return dropped

    def unpack(self, saved: Any) -> Tensor:
        if any(map(_accumulates, self._leaves)):
            found = (
                "would accumulate gradients twice, because the function calls backward; use torch.autograd.grad in it"
            )
            raise RuntimeError(_failure(self._function, found))
        return saved.tensor() if isinstance(saved, _Dropped) else self.beneath.unpack(saved)

    def note_weight(self, weight: Any) -> None:
        self._weights.append(weight)

    def note_leaf(self, leaf: Tensor) -> None:
        if not self._has_ended:
            self._leaves.append(leaf)
        self.beneath.note_leaf(leaf)

    def output(self, number: int) -> _Dropped:
        """Return a result of the function as a dropped tensor."""
        dropped = _Dropped(self)
        self._outputs[number] = weakref.ref(dropped)
        return dropped

    def run_again(self) -> None:
        """Run the function again and fill in the dropped tensors.  Raises: RuntimeError: the second run was different."""
        arguments = dict.fromkeys(arg for arg in self._args if isinstance(arg, _Argument))
        tensors = {arg: self.beneath.unpack(arg.saved).detach().requires_grad_(arg.requires_grad) for arg in arguments}
        given = [tensors[arg] if isinstance(arg, _Argument) else arg for arg in self._args]
        args = tree_unflatten(given, self._structure)
        collected = _Collection()
        with self.beneath.again(collected), torch.enable_grad(), _random_states(self._drawn):
            try:
                self._tape.replay([[self.beneath.unpack(saved) for saved in results] for results in self._recorded])
                result = self._function(*args)
            finally:
                self._tape.stop()
        if self._has_ended:
            self._args, self._recorded = [], []  # a chain of calls would hold every result until its backward ends
        else:  # a backward within the function needs the beginning of the second run
            del collected.signature[len(self._signature) :], collected.weights[len(self._weights) :]
        same_number = len(collected.signature) == len(self._signature)
        if not same_number or not all(map(_Saved.is_again, self._signature, collected.signature)):
            raise RuntimeError(_describe_difference(self._function, self._signature, collected.signature))
        if collected.weights != self._weights:
            found = "used other weights than the forward did, or they have changed since"
            raise RuntimeError(_failure(self._function, found))
        for reference, saved in zip(self._dropped, collected.saved, strict=self._has_ended):
            if (dropped := reference()) is not None:
                dropped.remade = saved
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        for number, reference in self._outputs.items():
            if (dropped := reference()) is not None:
                dropped.remade = with_version(outputs[number])


def _default_generators() -> list[torch.Generator]:
    """Return torch's own generators: the CPU's and the current device's."""
    on_device = [torch.cuda.default_generators[torch.cuda.current_device()]] if torch.cuda.is_initialized() else []
    return [torch.default_generator, *on_device]


@contextmanager
def _random_states(states: Sequence[tuple[torch.Generator, Tensor]]) -> Iterator[None]:
    """Return a context in which the generators have these states.  At its end their own states are restored."""
    before = [(generator, generator.get_state()) for generator, _ in states]
    for generator, state in states:
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def _accumulates(leaf: Tensor) -> bool:
    """Whether the running backward adds to the leaf's `grad`.  In `torch.autograd.grad` no leaf's `grad` changes."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:  # torch.autograd.grad was asked for this leaf's gradient
        return False


class _Argument:
    """A tensor argument of a call, as it was saved."""

    __slots__ = ("requires_grad", "saved")

    def __init__(self, saved: Any, requires_grad: bool) -> None:
        self.saved, self.requires_grad = saved, requires_grad


class _Shard:
    """This rank's shard of a tensor that is equal on all ranks of an axis."""

    def __init__(self, tensor: Tensor, axis: Axis, beneath: SavedTensorHooks) -> None:
        shard = tensor.detach().reshape(-1).chunk(axis.size)[axis.index].clone()
        self._saved, self._shape, self._axis, self._beneath = beneath.pack(shard), tensor.shape, axis, beneath
        self._dropped: weakref.ref[_Dropped] | None = None

    def dropped(self) -> _Dropped:
        """Return the full tensor as a dropped tensor."""
        dropped = _Dropped(self)
        self._dropped = weakref.ref(dropped)
        return dropped

    def run_again(self) -> None:
        """Gather the tensor."""
        shard = self._beneath.unpack(self._saved)
        whole = shard.new_empty(self._shape)
        all_gather(whole.view(-1), shard, self._axis).wait()
        if self._dropped is not None and (dropped := self._dropped()) is not None:
            dropped.remade = with_version(whole)


class _Collection(SavedTensorHooks):
    """Collects the tensors that the second run saves."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[Any] = []
        self.signature: list[_Saved] = []
        self.weights: list[Any] = []

    def pack(self, tensor: Tensor) -> Any:
        self.signature.append(_Saved.of(tensor))
        self.saved.append(with_version(tensor))
        return self.saved[-1]

    def unpack(self, saved: Any) -> Tensor:
        return checked_tensor(saved)

    def note_weight(self, weight: Any) -> None:
        self.weights.append(weight)


class Tape:
    """Intermediate results of a recomputed function: recorded in the first run, replayed in the second."""

    def __init__(self) -> None:
        self._recorded: list[list[tuple[Tensor, int]]] | None = None
        self._replayed: list[Sequence[Tensor]] = []

    def record(self) -> None:
        """Start to record results."""
        self._recorded = []

    def replay(self, results: Sequence[Sequence[Tensor]]) -> None:
        """Return these results in order instead of computing them."""
        self._recorded, self._replayed = None, list(results)

    def stop(self) -> list[list[tuple[Tensor, int]]]:
        """Stop, and return the recorded tensors in the form of `checked_tensor`, since a caller may change them."""
        recorded, self._recorded, self._replayed = self._recorded or [], None, []
        return recorded

    def through(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the result of `compute`, or in a second run the next recorded result."""
        if self._replayed:
            return tuple(tensor.detach() for tensor in self._replayed.pop(0))
        results = compute()
        if self._recorded is not None:
            self._recorded.append([with_version(tensor) for tensor in results])
        return results


class DroppingOutputs(SavedTensorHooks):
    """Saved-tensor hooks that do not save the results of recomputed functions."""

    def __init__(self) -> None:
        super().__init__()
        # By address of torch's storage object, which tensors without memory have, too (empty tensors, meta tensors).
        # Holding the tensor keeps the address from being reused by another storage; the version shows later changes.
        self._outputs: dict[int, tuple[_Dropped, Tensor, int]] = {}

    def leave(self) -> None:
        super().leave()
        self._outputs.clear()

    def drop(self, source: Recomputation, outputs: Sequence[Tensor]) -> None:
        for number, tensor in enumerate(outputs):
            if tensor.layout is torch.strided:  # other layouts have no storage
                self._outputs[tensor.untyped_storage()._cdata] = source.output(number), tensor, tensor._version

    def shard(self, tensor: Tensor, axis: Axis) -> None:
        """Save only this rank's shard of a tensor that is equal on all ranks of the axis, for every operation that
        saves it.
        """
        key = tensor.untyped_storage()._cdata
        if tensor.numel() % axis.size == 0 and tensor.is_contiguous() and key not in self._outputs:
            self._outputs[key] = _Shard(tensor, axis, self.beneath).dropped(), tensor, tensor._version

    def pack(self, tensor: Tensor) -> Any:
        weight = self.pack_weight(tensor)
        if weight is not None:
            return weight
        found = self._outputs.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        # A view shows an output's first values in its dtype; an output changed in place cannot be recomputed.
        if found is None or tensor.dtype != found[1].dtype or found[1]._version != found[2]:
            return self.beneath.pack(tensor)
        return _View(found[0], tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _View):
            return saved.base.tensor().as_strided(saved.size, saved.stride, saved.offset)
        return self.beneath.unpack(saved)


class Recomputed:
    """A function of tensors that is recomputed in each backward; see `Recomputation`.

    Args:
        function: the function to recompute; `compile_blocks` compiles it.
        tape: see `Recomputation`.
        shards: each rank of this axis saves its shard of the last tensor argument, which is equal on all of them.
        draws: see `Recomputation`.
    """

    def __init__(
        self, function: Callable[..., Any], tape: Tape | None = None, shards: Axis = WHOLE, *, draws: bool = False
    ) -> None:
        self.function, self._tape, self._shards, self._draws = function, tape, shards, draws

    @_disable_dynamo  # like torch.compiler.disable, but imports the compiler only at the first call
    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*args)
        if self._shards.size > 1:
            # The x of a residual sum belongs to an earlier module, and is saved or sharded there.
            *_, last = filter(torch.is_tensor, args)
            innermost().shard(last, self._shards)
        return Recomputation(self.function, self._tape, draws=self._draws).run(*args)


def _describe_difference(function: object, first: Sequence[_Saved], second: Sequence[_Saved]) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    number, was, now = next(((at, was, now) for at, (was, now) in pairs if not was.is_again(now)), (-1, None, None))
    if was is None or now is None:
        found = f"saved {len(second)} tensors where the forward saved {len(first)}"
    elif was[:2] == now[:2]:
        found = (
            f"used other weights as tensor {number}, of shape {list(now.shape)}, than the forward did, or they have changed "
            "since"
        )
    else:
        found = (
            f"saved {list(now.shape)} of {now.dtype} as tensor {number} where the forward saved {list(was.shape)} of "
            f"{was.dtype}"
        )
    return _failure(function, found)


def _failure(function: object, found: str) -> str:
    name = getattr(function, "__qualname__", repr(function))
    return (
        f"recomputing {name} {found}; a recomputed function must do the same in both runs: no global state, the same "
        "autocast, random numbers of torch's default generators only, the forward's weights unchanged (call functional_call "
        "within the function, not around it)"
    )
