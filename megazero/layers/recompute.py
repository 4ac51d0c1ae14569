"""Recomputation: what a function would save for its backward is dropped, and made again by a second run of the function.

    forward     y = f(x)         keeps x (and what `kept` names), drops what the operations of f save, and y if asked
    backward    y' = f(x)        once, when the first of the dropped tensors is needed; then the backward of f goes on

    x --[norm]--> n --[linear]-->      norm is recomputed: the linear layer saves n, which norm can make again from x

The graph of the second run serves only to collect what it saves; the backward runs on the first graph.

Source: Chen et al. 2016; Korthikanti et al. 2022, section 5, for recomputing parts of a layer; the mechanism of saved-tensor
hooks is that of torch.utils.checkpoint without re-entrance.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from megazero.comm.collectives import all_gather
from megazero.comm.memory import address_of
from megazero.layers.saved_tensors import SavedTensorHooks, keep, kept_tensor
from megazero.parallel_state import Axis

WHOLE = Axis("none")
"""An axis of one rank: what is kept is not cut."""


class _Dropped:
    """A tensor that was dropped; after the second run it holds what takes its place."""

    __slots__ = ("__weakref__", "kept", "source")

    def __init__(self, source: Recomputation) -> None:
        self.source = source
        self.kept: Any = None

    def tensor(self) -> Tensor:
        """The tensor; the first that is asked for makes all."""
        if self.kept is None:
            self.source.run_again()
        return kept_tensor(self.kept)


class _View(NamedTuple):
    """A tensor in the memory of a dropped one."""

    base: _Dropped
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


class _Saved(NamedTuple):
    """What both runs must save alike: shape and dtype; of a parameter also its address and how often it was changed."""

    shape: torch.Size
    dtype: torch.dtype
    parameter: tuple[tuple[int, int], int] | None

    @staticmethod
    def of(tensor: Tensor) -> _Saved:
        base = tensor if tensor._base is None else tensor._base
        found = (address_of(base), base._version) if isinstance(base, nn.Parameter) else None
        return _Saved(tensor.shape, tensor.dtype, found)

    def is_again(self, now: _Saved) -> bool:
        """Whether the second run saved the same; a parameter among the arguments is a plain tensor there."""
        return self[:2] == now[:2] and now.parameter in (None, self.parameter)


class Recomputation(SavedTensorHooks):
    """One run of a function whose saved tensors are dropped and made again in the backward.

    Args:
        function: with the same arguments it must do the same again.
        args: its arguments, nested in any way; their tensors are kept.
        kept: results within the function that are kept instead of computed twice.
        cut: the tensors among `args` are equal on all ranks of this axis, and each keeps its part only.
        draws: it may use torch's default generators, whose states are kept where it did.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Any,
        kept: KeptResults | None = None,
        cut: Axis = WHOLE,
        *,
        draws: bool = False,
    ) -> None:
        super().__init__()
        self._function, self._kept, self._cut = function, kept, cut
        self._generators = _default_generators() if draws else []
        self._drawn: list[tuple[torch.Generator, Tensor]] = []  # where it drew: state before
        leaves, self._structure = tree_flatten(args)
        # One that is passed twice is one tensor in both runs, and kept once.
        tensors = {id(one): one for one in leaves if isinstance(one, Tensor)}
        packed = {key: self._pack_argument(one) for key, one in tensors.items()}
        self._args = [packed.get(id(one), one) for one in leaves]
        self._dropped: list[weakref.ref[_Dropped]] = []
        self._signature: list[_Saved] = []
        self._weights: list[Any] = []  # that were saved and are kept elsewhere
        self._leaves: list[Tensor] = []  # that were saved, until the function has ended
        self._has_ended = False
        self._outputs: dict[int, weakref.ref[_Dropped]] = {}
        self._kept_results: list[list[Any]] = []

    def run(self) -> Any:
        """The function's result."""
        args = tree_unflatten([one.given if isinstance(one, _Argument) else one for one in self._args], self._structure)
        for one in self._args:
            if isinstance(one, _Argument):
                one.given = None
        self._drawn = [(one, one.get_state()) for one in self._generators]  # a backward within may need them already
        self.enter()
        try:
            if self._kept is not None:
                self._kept.record()
            result = self._function(*args)
            self._drawn = [(one, state) for one, state in self._drawn if not torch.equal(one.get_state(), state)]
        finally:
            results = self._kept.stop() if self._kept is not None else []
            self._leaves.clear()
            self.leave()
        self._has_ended = True
        self._kept_results = [[self.beneath.pack(kept_tensor(one)) for one in those] for those in results]
        self.beneath.drop(self, [one for one in tree_flatten(result)[0] if isinstance(one, Tensor)])
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
            found = "would add up gradients twice, since the function calls backward; torch.autograd.grad adds up none"
            raise RuntimeError(_failure(self._function, found))
        return saved.tensor() if isinstance(saved, _Dropped) else self.beneath.unpack(saved)

    def note_weight(self, weight: Any) -> None:
        self._weights.append(weight)

    def note_leaf(self, leaf: Tensor) -> None:
        if not self._has_ended:
            self._leaves.append(leaf)
        self.beneath.note_leaf(leaf)

    def output(self, number: int) -> _Dropped:
        """A result of the function, to be dropped."""
        reference = self._outputs.get(number)
        dropped = reference() if reference is not None else None
        if dropped is None:
            dropped = _Dropped(self)
            self._outputs[number] = weakref.ref(dropped)
        return dropped

    def run_again(self) -> None:
        """Make what was dropped.  Raises: RuntimeError: the function did not do the same again."""
        arguments = dict.fromkeys(one for one in self._args if isinstance(one, _Argument))
        given = {one: self._unpack_argument(one) for one in arguments}
        args = [given[one] if isinstance(one, _Argument) else one for one in self._args]
        collected = _Collection()
        with self.beneath.again(collected), torch.enable_grad(), _random_states(self._drawn):
            try:
                if self._kept is not None:
                    self._kept.replay([[self.beneath.unpack(one) for one in results] for results in self._kept_results])
                result = self._function(*tree_unflatten(args, self._structure))
            finally:
                if self._kept is not None:
                    self._kept.stop()
        if not self._has_ended:  # a backward within the function: of its second run the beginning is asked for
            del collected.signature[len(self._signature) :], collected.weights[len(self._weights) :]
        same_number = len(collected.signature) == len(self._signature)
        if not same_number or not all(map(_Saved.is_again, self._signature, collected.signature)):
            raise RuntimeError(_describe_difference(self._function, self._signature, collected.signature))
        if collected.weights != self._weights:
            found = "used other weights than the forward did, or they have changed since"
            raise RuntimeError(_failure(self._function, found))
        for reference, kept in zip(self._dropped, collected.kept, strict=self._has_ended):
            if (dropped := reference()) is not None:
                dropped.kept = kept
        outputs = [one for one in tree_flatten(result)[0] if isinstance(one, Tensor)]
        for number, reference in self._outputs.items():
            if (dropped := reference()) is not None:
                dropped.kept = keep(outputs[number])

    def _pack_argument(self, tensor: Tensor) -> _Argument:
        part = tensor
        divides = self._cut.size > 1 and tensor.numel() % self._cut.size == 0
        is_activation = tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
        is_cut = divides and is_activation and tensor.is_contiguous()
        if is_cut:
            part = tensor.detach().reshape(-1).chunk(self._cut.size)[self._cut.index].clone()
        return _Argument(self.beneath.pack(part), tensor.requires_grad, tensor.shape if is_cut else None, tensor)

    def _unpack_argument(self, argument: _Argument) -> Tensor:
        tensor = self.beneath.unpack(argument.saved)
        if argument.whole_shape is not None:
            whole = tensor.new_empty(argument.whole_shape)
            all_gather(whole.view(-1), tensor, self._cut).wait()
            tensor = whole
        return tensor.detach().requires_grad_(argument.requires_grad)


def _default_generators() -> list[torch.Generator]:
    """torch's own: the CPU's, and that of the current device."""
    on_device = [torch.cuda.default_generators[torch.cuda.current_device()]] if torch.cuda.is_initialized() else []
    return [torch.default_generator, *on_device]


@contextmanager
def _random_states(states: Sequence[tuple[torch.Generator, Tensor]]) -> Iterator[None]:
    """A context in which generators begin with these states; afterwards they are as they were."""
    before = [(generator, generator.get_state()) for generator, _ in states]
    for generator, state in states:
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def _accumulates(leaf: Tensor) -> bool:
    """Whether the backward that runs now adds to the gradient of a leaf; `torch.autograd.grad` adds to none."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:  # it is the leaf's gradient that is asked for
        return False


class _Argument:
    """A tensor argument; `given` until the function has run."""

    __slots__ = ("given", "requires_grad", "saved", "whole_shape")

    def __init__(self, saved: Any, requires_grad: bool, whole_shape: torch.Size | None, given: Tensor) -> None:
        self.saved, self.requires_grad, self.whole_shape = saved, requires_grad, whole_shape
        self.given: Tensor | None = given


class _Collection(SavedTensorHooks):
    """Collects what the second run saves."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.signature: list[_Saved] = []
        self.weights: list[Any] = []

    def pack(self, tensor: Tensor) -> Any:
        self.signature.append(_Saved.of(tensor))
        self.kept.append(keep(tensor))
        return self.kept[-1]

    def unpack(self, saved: Any) -> Tensor:
        return kept_tensor(saved)

    def note_weight(self, weight: Any) -> None:
        self.weights.append(weight)


class KeptResults:
    """Results within a recomputed function that are kept: the second run gets those of the first."""

    def __init__(self) -> None:
        self._recorded: list[list[tuple[Tensor, int]]] | None = None
        self._replayed: list[Sequence[Tensor]] = []

    def record(self) -> None:
        """Remember the results that come now."""
        self._recorded = []

    def replay(self, results: Sequence[Sequence[Tensor]]) -> None:
        """Give these results, first to last, instead of computing them."""
        self._recorded, self._replayed = None, list(results)

    def stop(self) -> list[list[tuple[Tensor, int]]]:
        """Stop recording or replaying, and return what was recorded, for `kept_tensor`: a caller may have changed it."""
        recorded, self._recorded, self._replayed = self._recorded or [], None, []
        return recorded

    def through(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Call `compute`; in the second run return its first result instead."""
        if self._replayed:
            return tuple(tensor.detach() for tensor in self._replayed.pop(0))
        results = compute()
        if self._recorded is not None:
            self._recorded.append([keep(tensor) for tensor in results])
        return results


class DroppingOutputs(SavedTensorHooks):
    """Within it the results of recomputed functions are not kept by those who save them."""

    def __init__(self) -> None:
        super().__init__()
        # By address of torch's object for the storage, which exists for tensors without memory too (empty ones, meta).
        # With the tensor, so that no other storage gets the address as long as it is looked for here, and its version.
        self._outputs: dict[int, tuple[_Dropped, Tensor, int]] = {}

    def leave(self) -> None:
        super().leave()
        self._outputs.clear()

    def drop(self, source: Recomputation, outputs: Sequence[Tensor]) -> None:
        for number, tensor in enumerate(outputs):
            if tensor.layout is torch.strided:  # others have no storage
                self._outputs[tensor.untyped_storage()._cdata] = source.output(number), tensor, tensor._version

    def pack(self, tensor: Tensor) -> Any:
        weight = self.pack_weight(tensor)
        if weight is not None:
            return weight
        found = self._outputs.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        if found is None or not _shows(tensor, *found[1:]):
            return self.beneath.pack(tensor)
        return _View(found[0], tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _View):
            return saved.base.tensor().as_strided(saved.size, saved.stride, saved.offset)
        return self.beneath.unpack(saved)


def _shows(tensor: Tensor, output: Tensor, version: int) -> bool:
    """Whether a view of an output still has its dtype and first values: what was changed in place cannot be made again."""
    return tensor.dtype == output.dtype and output._version == version


class Recomputed:
    """A function of tensors that is recomputed in each backward; see `Recomputation`.

    Attributes:
        function: what runs; `models/compiled.py` compiles it.
    """

    def __init__(
        self, function: Callable[..., Any], kept: KeptResults | None = None, cut: Axis = WHOLE, *, draws: bool = False
    ) -> None:
        self.function, self._kept, self._cut, self._draws = function, kept, cut, draws

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*args)
        return Recomputation(self.function, args, self._kept, self._cut, draws=self._draws).run()


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
        f"recomputing {name} {found}; a recomputed function must do the same again: no global state, the same autocast, no "
        "random numbers but those of torch's default generators, and in the backward the weights of the forward, unchanged "
        "(call functional_call within the function, not around it)"
    )
