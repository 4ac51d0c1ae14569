"""A GPU as plans take it: its data sheet, with the shares of it that the operators of large Llamas reached.

    [4096, 4096] x [4096, 11008]     FLOPs / (seconds - writing) of full waves / peak     product_share
    attention of 4,096 tokens        FLOPs / seconds / peak                               attention_share, backward
    add, mul, copy                   bytes / seconds / bandwidth                          memory_share
    the step of a small model        the host's seconds for an operator                   launch_seconds

Of a GPU without a data sheet the fastest product and copy are the peaks, of fp32 too, and PCIe is taken for its link.
"""

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

import torch

from megazero.plan.calibration import OperatorTable
from megazero.plan.devices import LINKS, Device, device_of
from megazero.plan.operator_times import ProductShape, wave_share, writing_seconds

_LARGE = 4  # times smaller than the largest, an operator still shows the device and not its own start
_MOVES = ("aten.add.", "aten.add_.", "aten.mul.", "aten._to_copy.", "aten.clone.")  # copy_ reads less than is counted


def gpu_here(_: int) -> Device | None:
    """Return CUDA's first device, without peaks if it has no data sheet; None without CUDA.  Call it in a forked process."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    link = LINKS["pcie4"]
    bare = Device(found.name, 0, {}, 0.0, link.bytes_per_second, link, found.multi_processor_count)
    return replace(device_of(found.name) or bare, memory_bytes=found.total_memory)


def fitted(device: Device, table: OperatorTable) -> Device:
    """Return the device with the fractions of its peaks that large bf16 operators reached; what was not measured stays."""
    operators = [(name, one) for name, samples in table.operators.items() for one in samples]
    moves = _rates(one for name, one in operators if name.startswith(_MOVES))
    bandwidth = device.memory_bandwidth or max(moves)
    device = replace(device, memory_bandwidth=bandwidth, memory_share=_share(moves, bandwidth, device.memory_share))
    timed = [(ProductShape(torch.bfloat16, p.m, p.n, p.k), p.seconds) for p in table.products if p.dtype == "bf16"]
    products = _rates((a.flops, (seconds - writing_seconds(a, device)) * wave_share(a, device)) for a, seconds in timed)
    peaks = device.peak_flops or dict.fromkeys(("bf16", "fp16", "fp32"), max(products))
    forward = _rates(one for name, one in operators if "_attention" in name and "backward" not in name)
    backward = _rates(one for name, one in operators if "_attention" in name and "backward" in name)
    device = replace(device, peak_flops=peaks, launch_seconds=table.host_seconds or device.launch_seconds)
    return replace(
        device,
        product_share=_share(products, peaks["bf16"], device.product_share),
        attention_share=_share(forward, peaks["bf16"], device.attention_share),
        attention_backward_share=_share(backward, peaks["bf16"], device.attention_backward_share),
    )


def _rates(samples: Iterable[tuple[float, float]]) -> list[float]:
    """Return size / seconds of the large samples."""
    found = [(size, seconds) for size, seconds in samples if seconds > 0]
    largest = max((size for size, _ in found), default=0.0)
    return [size / seconds for size, seconds in found if size * _LARGE >= largest]


def _share(rates: list[float], peak: float, otherwise: float) -> float:
    return min(1.0, median(rates) / peak) if rates else otherwise
