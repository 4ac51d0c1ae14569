"""What a rank keeps for its backward passes: by the formula of every pipeline rank, and counted on a rank that runs.

RankActivations     tests/activation_formula.py, for each layer's policy, walked through the rank's actions
SavedMemory         hooks around a step: every tensor that autograd saves, each storage once
Alive               every tensor that operators make, each storage once
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from activation_formula import window_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.comm.backend import storage_of
from megazero.engine import Engine
from megazero.layers.attention import Attention, RotaryEmbedding
from megazero.layers.saved_tensors import SavedTensorHooks
from megazero.models.gpt import GPTStage, MicroBatch


def measure_saved(engine: Engine, batches: Sequence[MicroBatch], units: Iterable[str]) -> SavedMemory:
    """Run the forward and backward passes of a step and count what they save.  `units`: the rank's, by name, in order."""
    parts = [unit for stage in engine.chunks if isinstance(stage, GPTStage) for unit in stage.units()]
    known = [
        tensor for batch in batches for tensor in (batch.sample_ids, batch.tokens, batch.labels) if tensor is not None
    ]
    places = [batch.shard for batch in batches if batch.shard is not None]
    known += [tensor for shard in places for tensor in (shard.rows, shard.positions)]
    known += [*engine.chunks.parameters(), *(bucket.weights for bucket in engine.sharded_model.parameters.buckets)]
    for module in engine.chunks.modules():
        if isinstance(module, Attention):
            known += [window.mask] if (window := window_of(module)) is not None else []
            if isinstance(rope := module.core.rope, RotaryEmbedding):
                known += [table for table in (rope.cos, rope.sin) if table is not None]
                known += [table for shard in places for table in rope.tables_of(shard)]
    with SavedMemory(known) as memory, memory.watching(dict(zip(units, parts, strict=True))):
        engine.compute_gradients(batches)
    return memory


class SavedMemory(SavedTensorHooks):
    """Counts the bytes of what autograd saves while this is entered, each storage once, until its backward lets go of it.

    Args:
        ignored: what is there anyway: weights, tables, the batch.

    Attributes:
        live, peak: bytes.
        units: bytes that the last pass of each unit added; see `watching`.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        super().__init__()
        self._ignored = set(map(storage_of, ignored))
        self._users = Counter[int]()
        self._unit = ""
        self.live = self.peak = 0
        self.units: dict[str, int] = {}

    def pack(self, tensor: Tensor) -> Any:
        at = storage_of(tensor)
        if at in self._ignored:
            return self.beneath.pack(tensor)
        return _Counted(self, at, tensor.untyped_storage().nbytes(), self.beneath.pack(tensor))

    def unpack(self, saved: Any) -> Tensor:
        return self.beneath.unpack(saved.saved if isinstance(saved, _Counted) else saved)

    def count(self, at: int, size: int, change: int) -> None:
        """One user more or less of a storage."""
        before = self._users[at]
        self._users[at] += change
        if not (before and self._users[at]):
            self.live += change * size
            self.peak = max(self.peak, self.live)
            if change > 0 and self._unit:
                self.units[self._unit] += size

    @contextmanager
    def watching(self, units: Mapping[str, nn.Module]) -> Iterator[None]:
        """A context in which the passes of these modules tell how much each of them adds."""

        def begin(name: str, *_: object) -> None:
            self._unit, self.units[name] = name, 0

        def end(*_: object) -> None:
            self._unit = ""

        with ExitStack() as stack:
            for name, module in units.items():
                stack.enter_context(module.register_forward_pre_hook(partial(begin, name)))
                stack.enter_context(module.register_forward_hook(end))
            yield


class Alive(TorchDispatchMode):
    """Counts what operators make while this is entered and lives at once: bytes, and storages by type and shape.

    Args:
        least: storages of fewer bytes are left out.

    Attributes:
        largest: elements of the largest tensor that was made.
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self._least, self._known = least, set[int]()
        self._now, self._bytes = Counter[tuple[torch.dtype, torch.Size]](), 0
        self.most, self.most_bytes, self.largest = Counter[tuple[torch.dtype, torch.Size]](), 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {storage_of(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.device.type == "cpu" and storage_of(one) not in self._known | given:
                self._count(one)
        self.most |= self._now
        self.most_bytes = max(self.most_bytes, self._bytes)
        return result

    def _count(self, one: Tensor) -> None:
        self.largest = max(self.largest, one.numel())
        storage, what = one.untyped_storage(), (one.dtype, one.shape)
        if storage.nbytes() >= self._least:
            self._known.add(storage_of(one))
            self._now[what] += 1
            self._bytes += storage.nbytes()
            weakref.finalize(storage, self._gone, storage_of(one), what, storage.nbytes())

    def _gone(self, at: int, what: tuple[torch.dtype, torch.Size], size: int) -> None:
        self._known.remove(at)
        self._now[what] -= 1
        self._bytes -= size


class _Counted:
    """What is saved, counted as long as autograd holds it."""

    __slots__ = ("_at", "_meter", "_size", "saved")

    def __init__(self, meter: SavedMemory, at: int, size: int, saved: Any) -> None:
        self._meter, self._at, self._size, self.saved = meter, at, size, saved
        meter.count(at, size, 1)

    def __del__(self) -> None:
        self._meter.count(self._at, self._size, -1)
