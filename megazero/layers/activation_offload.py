"""Store what the forward saves in an arena until the backward: in host memory, or on the device in one contiguous
block.

    forward     layer i saves     copies of its tensors to the host start      layer i - 2 leaves the device
    backward    layer i begins    copies of layer i - 1 to the device start    layer i + 1 leaves the device

Two layers are on the device in both directions: the current one and a neighbour.  "Leaves" means that the compute
stream waits for that layer's copies, which started long before, and then its memory is freed: see `comm/memory.py`.

With an arena on the device, a saved tensor is copied into it at once and its own memory is freed.  The backward of a
layer copies it out again.  Nothing is prefetched: each copy runs on the compute stream when its tensor is needed.

[Note: once]  A storage is stored once, however many views of it are saved, by whichever layers of a pass.  It is
identified by the address of torch's storage object; a weak reference to that object keeps the address from being
reused.

[Note: the first step]  What does not fit into the previous steps' arena gets memory that is not page-locked, and copies
to it block the host.  Before the next step the arena is reallocated as one page-locked buffer of the new size: see
`comm/memory.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from megazero.comm.memory import Arena, Copier, copier_on
from megazero.layers.saved_tensors import SavedTensorHooks, checked_tensor, with_version

PLAIN_TENSORS = (Tensor, FakeTensor)
NEAR = 2  # layers on the device if the arena is on the host
_REMEDY = "offload fewer layers (activations.offload_layers), or recompute more of them"


class ArenaStorage:
    """One storage in an arena, usually on the host, until no saved tensor refers to it."""

    def __init__(self, tensor: Tensor, pool: Arena, copier: Copier) -> None:
        self._device, self._pool, self._copier = tensor.device, pool, copier
        whole = (tensor.untyped_storage().nbytes() // tensor.itemsize,)
        memory = tensor.data.as_strided(whole, (1,), 0).view(torch.uint8)
        self._memory: Tensor | None = memory  # all its bytes on the device
        self._original: tuple[Tensor, int] | None = with_version(tensor)  # None after it has left the device
        self._error: str | None = None  # no traceback, which would hold this object
        self._mark: Any | None = None  # mark of the copy that reads or writes the memory
        self._host = pool.acquire(memory.numel())
        self._mark = copier.start(self._host, memory)

    def bring(self) -> None:
        """Start the copy to the device, unless the storage is on the device."""
        if self._memory is None:
            memory = torch.empty_like(self._host, device=self._device)
            self._mark = self._copier.start(memory, self._host)
            self._memory = memory  # not set if the copy fails

    def on_device(self) -> Tensor:
        """Return the storage's bytes on the device.

        Raises: RuntimeError: they were changed after the forward saved them and before they were copied.
        """
        self._check()
        if self._error is not None:
            raise RuntimeError(self._error)
        self.bring()
        if self._original is None:
            self._wait()
        assert self._memory is not None
        return self._memory

    def leave(self) -> None:
        """Free the storage's memory on the device."""
        self._check()
        self._wait()
        self._memory = self._original = None

    def _wait(self) -> None:
        if self._mark is not None:
            self._copier.wait(self._mark)
            self._mark = None

    def _check(self) -> None:
        if self._original is not None:
            try:
                checked_tensor(self._original)
            except RuntimeError as error:
                self._error = str(error)

    def __del__(self) -> None:
        if hasattr(self, "_host"):  # otherwise there was no buffer for it
            self._wait()
            self._pool.drop(self._host)


class ArenaView(NamedTuple):
    """A saved tensor as a view of an `ArenaStorage`."""

    storage: ArenaStorage
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor on the device."""
        elements = self.storage.on_device().view(self.dtype)
        view = elements.as_strided(self.size, self.stride, self.offset)
        return view.data  # with a version counter of its own


def is_its_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a plain strided view of its storage, so that copying the bytes copies the tensor."""
    if type(tensor) not in (*PLAIN_TENSORS, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.untyped_storage().nbytes() % tensor.itemsize:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())


class OffloadedLayer(SavedTensorHooks):
    """The saved-tensor hooks for one forward of a layer.  With `offloads`, its saved tensors are stored in the arena."""

    def __init__(self, offload: ActivationStore, before: OffloadedLayer | None, *, offloads: bool) -> None:
        super().__init__()
        self.before, self._offload, self._offloads = before, offload, offloads
        self._saved: list[weakref.ref[ArenaStorage]] = []

    def pack(self, tensor: Tensor) -> Any:
        weight = self.pack_weight(tensor)
        if weight is not None:
            return weight
        if not self._offloads or not self._offload.takes(tensor):
            return self.beneath.pack(tensor)
        storage = self._offload.store(tensor)
        self._saved.append(weakref.ref(storage))
        return ArenaView(storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Any) -> Tensor:
        self._offload.begin_backward(self)
        return saved.tensor() if isinstance(saved, ArenaView) else self.beneath.unpack(saved)

    @property
    def saved(self) -> list[ArenaStorage]:
        """The storages that the layer saved and still needs, in the order of the forward."""
        return list(dict.fromkeys(storage for reference in self._saved if (storage := reference()) is not None))


class ActivationStore:
    """Stores the saved tensors of one rank's layers in an arena.

    Args:
        device: the device of the activations.
        arena: an arena on that device; None: create one on the host.

    Attributes:
        pool: the arena.
        on_host: whether the arena is on the host.
        copier: copies storages between device and arena.
        smallest_bytes: storages with fewer bytes are not offloaded.
        shared: sets of storages, by id(), that all layers of a micro-batch share; they are not offloaded either.
    """

    def __init__(self, device: torch.device, arena: Arena | None = None) -> None:
        self.on_host = arena is None
        self.copier = copier_on(device) if self.on_host else Copier()
        self.smallest_bytes = 1 << 16
        self.pool, self._device = arena or Arena(torch.device("cpu"), _REMEDY, pins=True), device
        self._most_near = NEAR if self.on_host else 1
        self._stay: set[int] = set()
        self.shared: dict[int, set[int]] = {}
        self._near: list[OffloadedLayer] = []  # layers on the device or on their way there, the current one last
        self._last: OffloadedLayer | None = None  # in the running forward
        self._in_backward: OffloadedLayer | None = None
        self._pass: Hashable = None
        self._expected: Hashable = None
        self._passes: weakref.WeakValueDictionary[Hashable, OffloadedLayer] = weakref.WeakValueDictionary()
        self._storages: dict[tuple[int, int], tuple[weakref.ref[ArenaStorage], StorageWeakRef]] = {}

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """Never offload these tensors, nor others in their memory, such as weights and tables.  They outlive this object."""
        self._stay.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def begin_step(self) -> None:
        """Begin a step.  No messages may be in flight; see [Note: the first step].  Raises: StorageError."""
        self.pool.reserve()
        self._expected = self._in_backward = None
        self._near.clear()

    def begin_pass(self, name: Hashable) -> None:
        """Begin the forward of one model chunk on one micro-batch."""
        self._pass, self._last = name, None
        self._storages.clear()

    def expect(self, name: Hashable) -> None:
        """Name the pass whose backward follows the next action; None if a forward follows."""
        self._expected = name

    def layer(self, *, offloads: bool = True, is_last: bool = False) -> OffloadedLayer:
        """Return the hooks for one forward of a layer.  Must be called for every layer of a pass, in order.

        Args:
            offloads: the tensors that the layer saves are stored in the arena.
            is_last: the layer is the last of its pass.
        """
        layer = OffloadedLayer(self, self._last, offloads=offloads)
        self._last = self._passes[self._pass] = layer
        self._work_on(layer)
        if is_last and self.on_host:
            self._bring(self._passes.get(self._expected))
        return layer

    def begin_backward(self, layer: OffloadedLayer) -> None:
        """Wait for a layer's tensors, and start to prefetch the tensors of the layer whose backward is next."""
        if layer is not self._in_backward:
            self._in_backward = layer
            if self.on_host:
                self._bring(layer)
                self._bring(layer.before or self._passes.get(self._expected))
            else:
                self._work_on(layer)

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is stored in the arena when it is saved."""
        if tensor.device.type != self._device.type or not is_its_memory(tensor):
            return False
        storage = tensor.untyped_storage()
        stays = storage._cdata in self._stay or any(storage._cdata in held for held in self.shared.values())
        return storage.nbytes() >= self.smallest_bytes and not stays

    def store(self, tensor: Tensor) -> ArenaStorage:
        """Store a tensor's storage in the arena, or return the stored one if it was saved before and has not changed."""
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        known, _ = self._storages.get(key, (None, None))
        arena_storage = None if known is None else known()
        if arena_storage is None:
            arena_storage = ArenaStorage(tensor, self.pool, self.copier)
            if not self.on_host:
                arena_storage.leave()
            self._storages[key] = weakref.ref(arena_storage), StorageWeakRef(storage)
        return arena_storage

    def _bring(self, layer: OffloadedLayer | None) -> None:
        if layer is not None:
            self._work_on(layer)
            for storage in reversed(layer.saved):
                storage.bring()

    def _work_on(self, layer: OffloadedLayer) -> None:
        """Free the device memory of all layers except this one and its neighbours."""
        near = [other for other in self._near if other is not layer] + [layer]
        gone, self._near = near[: -self._most_near], near[-self._most_near :]
        stay = {storage for other in self._near for storage in other.saved}
        for storage in (storage for other in gone for storage in other.saved if storage not in stay):
            storage.leave()
