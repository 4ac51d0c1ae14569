"""Memory of the host that a GPU can read and write beside the computation."""

from __future__ import annotations

import weakref
from typing import Final

import torch
from torch import Tensor


class StorageError(RuntimeError):
    """State does not fit, or cannot be read or written, where the configuration wants it."""


_LESS_OFFLOADING: Final = "lower zero.offload.ratio or set zero.offload.optimizer and zero.offload.parameters to nvme"


def host_tensor(numel: int, dtype: torch.dtype, *, pin: bool, remedy: str | None = None) -> Tensor:
    """Zeros in host memory, [numel], page-locked if `pin` and there is a CUDA device.

    Raises:
        StorageError: the memory cannot be allocated or locked; the message ends with `remedy`, or one for offloading.
    """
    try:
        tensor = torch.zeros(numel, dtype=dtype)
    except RuntimeError as error:  # torch's allocator has no error type of its own
        raise StorageError(
            f"host memory: no {numel * dtype.itemsize} bytes ({error}); {remedy or _LESS_OFFLOADING}"
        ) from error
    if pin and numel and torch.cuda.is_available():
        page_lock(tensor, remedy or "set zero.offload.pin_memory=false")
    return tensor


def page_lock(tensor: Tensor, remedy: str) -> None:
    """Lock the pages of a tensor's memory for as long as it lives.  Raises: StorageError.

    torch's own allocator of pinned memory rounds a request up to a power of two, so that 5 GiB take 8; locking pages
    that are already there takes no more (as torch.distributed._state_dict_utils does).
    """
    runtime, address, nbytes = torch.cuda.cudart(), tensor.data_ptr(), tensor.nbytes
    code = int(runtime.cudaHostRegister(address, nbytes, 1))  # 1: for every device
    if code != 0:
        raise StorageError(
            f"host memory: locking {nbytes} bytes failed with CUDA error {code}; raise `ulimit -l` or {remedy}"
        )

    def unpin() -> None:
        torch.cuda.synchronize()  # a copy may still read or write here
        runtime.cudaHostUnregister(address)

    weakref.finalize(tensor, unpin).atexit = False
