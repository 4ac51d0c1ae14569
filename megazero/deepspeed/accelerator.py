"""The device of this process, with the calls of DeepSpeed's abstract accelerator: `get_accelerator().current_device_name()`.

On CUDA, a call of a name that torch.cuda has is torch.cuda's.  On the CPU it is torch's own, or refers to the memory of the
process, or has no effect.
"""

import os
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megazero.deepspeed.names import NAMES

__path__: list[str] = []  # modules of DeepSpeed below this file are the mirror's
_OF_TORCH = NAMES["accelerator"].split()
_ANSWERS, _OLD_NAMES = NAMES["answers"], NAMES["old_names"]


class Accelerator:
    """DeepSpeed's accelerator calls for "cuda" or "cpu"."""

    def __init__(self, device_type: str) -> None:
        self._name, self._is_cuda = device_type, device_type == "cuda"

    def __getattr__(self, name: str) -> Any:
        if name in _ANSWERS:
            return lambda: _ANSWERS[name][not self._is_cuda]
        name = _OLD_NAMES.get(name, name)
        if name not in _OF_TORCH:
            raise AttributeError(f"megazero's accelerator has no {name!r}; docs/deepspeed.md lists what it has")
        if not self._is_cuda:
            return _of_host(name)
        found = getattr(torch.cuda.nvtx if name.startswith("range_") else torch.cuda, name)
        if name[0].isupper():
            return found
        theirs = {"device_index": "device"}  # DeepSpeed's name of an argument
        return lambda *args, **kwargs: found(*args, **{theirs.get(key, key): value for key, value in kwargs.items()})

    def random(self) -> Any:
        """Return the torch module with the random functions of the device."""
        return torch.random

    def device_name(self, device_index: int | None = None) -> str:
        """Return the name for `Tensor.to`: "cuda", "cuda:1", "cpu"."""
        return f"cuda:{device_index}" if self._is_cuda and device_index is not None else self._name

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """Return a context manager that makes the device the current one."""
        return torch.cuda.device(device_index) if self._is_cuda else nullcontext()

    def current_device(self) -> int:
        """Return the index of the current device; LOCAL_RANK on the CPU."""
        return torch.cuda.current_device() if self._is_cuda else int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        """Return the name of the current device, with its index."""
        return self.device_name(self.current_device())

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a device of this type."""
        return tensor.device.type == self._name

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes in which the device can train."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of memory of the device, or of the host."""
        return self._memory(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free bytes of the device, or of the host."""
        return self._memory(device_index)[0]

    def _memory(self, device_index: int | None) -> tuple[int, int]:
        if self._is_cuda:
            return torch.cuda.mem_get_info(device_index)
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True, **_: Any) -> Tensor:
        """Return a copy of the tensor in page-locked memory, if that speeds up copies to the device.

        Args:
            make_copy: copy the values; without it, they are undefined.  `align_bytes`, in the same place in older releases,
                has no effect, since torch aligns to at least 64 bytes.
            match_shape: with False, and without `make_copy`, the result is flat.
        """
        if not make_copy and not match_shape:
            tensor = tensor.reshape(-1)
        return tensor.pin_memory() if self._is_cuda else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in page-locked memory."""
        return self._is_cuda and tensor.is_pinned()

    def is_triton_supported(self) -> bool:
        """Whether Triton's kernels run on the device."""
        return self._is_cuda and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the default generator of random numbers of a device."""
        return torch.cuda.default_generators[device_index] if self._is_cuda else torch.default_generator

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Run `callback` once the device is initialised."""
        return torch.cuda._lazy_call(callback) if self._is_cuda else callback()


@cache
def get_accelerator() -> Accelerator:
    """Return the accelerator of this process: CUDA if available, else the CPU."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


def is_current_accelerator_supported() -> bool:
    """Return True: scripts may train on CUDA and on the CPU."""
    return True


def _of_host(name: str) -> Any:
    """Return the CPU's counterpart of a function or class of torch.cuda."""
    of_cpu: dict[str, Callable[[], Any]] = {
        "memory_stats": lambda: {f"allocated_bytes.all.{which}": _resident_bytes() for which in ("current", "peak")},
        **dict.fromkeys(("current_stream", "default_stream"), torch.cpu.current_stream),
        "synchronize": torch.cpu.synchronize,
        "get_rng_state": torch.get_rng_state,
        "initial_seed": torch.initial_seed,
        "is_bf16_supported": lambda: True,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1"))),
    }
    if name in of_cpu:  # which know no index of a device
        return lambda *_, **__: of_cpu[name]()
    if name == "set_rng_state":
        return lambda new_state, *_, **__: torch.set_rng_state(new_state)
    if name.startswith(("reset_", "empty_", "range_", "set_device")):
        return lambda *_, **__: None
    if "memory" in name:
        return _resident_bytes
    return getattr(torch.cpu if hasattr(torch.cpu, name) else torch, name.removesuffix("_all"))


def _resident_bytes(*_: Any, **__: Any) -> int:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
