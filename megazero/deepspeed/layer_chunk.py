"""The layers of one virtual stage as a module: their names on any cut, their recomputation, how they pass tensors on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megazero.deepspeed.layer_specs import AppliedLayer, describe_value, name_of

Tensors: TypeAlias = tuple[Tensor, ...]


class _Writable(torch.autograd.Function):
    """The identity, as a non-leaf: layers may write in place to what another stage sent, although it needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class LayerChunk(nn.Module):
    """The layers of one virtual stage.

    Args:
        stage, stages: number of the virtual stage, and how many there are.
        layers: (index in the whole pipeline, layer), in order.
        tied: canonical names of the tied parameters, by id of the parameter.
        checkpoint_interval: layers that are recomputed together in the backward; 0 recomputes none.

    Attributes:
        canonical_names: qualified name of each parameter and buffer -> its name on any cut, "layers.{index}.<name in the
            layer>"; of a tied parameter that in the first layer of its key.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        layers: Sequence[tuple[int, Callable[[Any], Any]]],
        tied: Mapping[int, str],
        checkpoint_interval: int,
    ) -> None:
        super().__init__()
        self.stage, self.is_first, self.is_last = stage, stage == 0, stage == stages - 1
        self._checkpoint_interval = checkpoint_interval
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers if isinstance(layer, nn.Module)})
        self._functions = {index: layer for index, layer in layers if not isinstance(layer, nn.Module)}
        self._indices = range(layers[0][0], layers[-1][0] + 1)
        self.canonical_names = dict(self._name_tensors(tied))

    def _name_tensors(self, tied: Mapping[int, str]) -> Iterator[tuple[str, str]]:
        """Found once: engines may swap the tensors, the names stay."""
        for index, layer in self.layers.items():
            added = "module." if isinstance(layer, AppliedLayer) else ""
            tensors = chain(layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False))
            for name, tensor in tensors:
                canonical = tied.get(id(tensor), f"layers.{index}.{name.removeprefix(added)}")
                yield f"layers.{index}.{name}", canonical

    def units(self) -> list[nn.Module]:
        """The modules that ZeRO-3 gathers one at a time, in forward order: the layers that have parameters."""
        return [layer for layer in self.layers.values() if next(layer.parameters(), None) is not None]

    def forward(self, x: Tensors) -> Tensors:
        """Apply the layers in order to what the stage before returned, or to the inputs of a micro-batch.

        Raises:
            TypeError: a layer returned something that cannot pass between stages.
        """
        if not self.is_first:
            x = tuple(_Writable.apply(tensor) if tensor.requires_grad else tensor for tensor in x)
        indices, interval = self._indices, self._checkpoint_interval
        if not (interval and torch.is_grad_enabled()):
            return self._run(indices, *x)
        for start in range(0, len(indices), interval):
            x = checkpoint(self._recomputable, indices[start : start + interval], *x, use_reentrant=False)
        return x

    def _recomputable(self, indices: range, *x: Tensor) -> Tensors:
        """Run layers that the recomputation will run again from `x`, so that they must not write to it."""
        parts = chain.from_iterable(self.layers[str(i)].modules() for i in indices if i not in self._functions)
        if any(getattr(part, "inplace", False) for part in parts):
            x = tuple(tensor.clone() for tensor in x)
        return self._run(indices, *x)

    def _run(self, indices: range, *x: Tensor) -> Tensors:
        for index in indices:
            layer = self._functions[index] if index in self._functions else self.layers[str(index)]
            y = layer(x[0] if len(x) == 1 else x)
            x = (y,) if isinstance(y, Tensor) else tuple(y) if isinstance(y, tuple | list) else ()
            if not x or not all(isinstance(part, Tensor) for part in x):
                raise TypeError(
                    f"layer {index} ({name_of(layer)}) returned {describe_value(y)}; every layer of a pipeline returns a "
                    "tensor or a tuple of tensors, since any two may be on different ranks"
                )
        return x
