"""What the makers say of their devices and networks, and which share of it a program reaches: the one table.

    peak FLOP/s x share     of matrix products, the larger the better    `product_share`, the one number that is fitted
    bytes/s x share         of what only moves data                      `memory_share`
    link x share            of a large collective                        `Link.share`

Peaks are dense (what is given "with sparsity" halved), links are one direction, memory is what the driver reports.

Sources: data sheets of NVIDIA (A100 2021, H100 2023, H200, B200, GB200 2024; A800, H800, GH200, L4, L40S, A10, A40) and AMD
(MI300X 2023).  Shares: attention as Dao 2023 (FlashAttention-2, figures 4 to 7: A100 to 73% forward, 63% backward; H100 to
35 to 50%); memory as BabelStream's triad reaches on them, 85 to 92%; collectives as nccl-tests' bus bandwidth (A100 NVLink
230 to 240 of 300 GB/s, H100 360 to 370 of 450, InfiniBand 90 to 95% of the line).  Product shares are fitted to one row of a
published table each, see benchmarks/results/plan_published.md; where there is none they are those of the generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megazero.plan.calibration import Calibration

MIB = 2**20


def size_text(count: float) -> str:
    """Format bytes in MiB or GiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / MIB:,.1f} MiB"


@dataclass(frozen=True)
class Link:
    """A link between ranks.

    Args:
        bytes_per_second: one direction, as the maker says: of each rank, or of a node's one card if `is_shared`.
        latency_seconds: of a message, or of one hop of a collective.
        share: of `bytes_per_second` that a large collective reaches.
        is_shared: the ranks of a node share one card.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float
    share: float = 1.0
    is_shared: bool = False

    def rate(self, senders: int = 1) -> float:
        """Return the bytes per second of each rank while `senders` ranks of its node send at once."""
        return self.bytes_per_second * self.share / (senders if self.is_shared else 1)


@dataclass(frozen=True)
class Device:
    """A GPU, or the processors of a host.

    Args:
        name: as `--gpu` has it.
        memory_bytes: as the driver reports it.
        peak_flops: dense FLOP/s of matrix products by dtype: "bf16", "fp16", "fp32", and "fp8" where it has kernels.
        memory_bandwidth, host_bandwidth: bytes/s of its own memory; to the host's, one direction.
        link: within a node.
        multiprocessors: that products are dealt to in tiles; 0: not known.
        product_share, attention_share, attention_backward_share: of the peak, of large products and of fused attention.
        memory_share: of the bandwidth, of operators that only move data.
        launch_seconds: host time of an operator that is not compiled.
        calibration: of a host whose processors its ranks share: it goes before the shares.  None: nothing.
    """

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    host_bandwidth: float
    link: Link
    multiprocessors: int = 0
    product_share: float = 0.7
    attention_share: float = 0.5
    attention_backward_share: float = 0.45
    memory_share: float = 0.88
    launch_seconds: float = 6e-6
    calibration: Calibration | None = field(default=None, hash=False, compare=False)

    def peak_of(self, dtype: str) -> float:
        """Return the peak for a dtype; for "fp8" without kernels that of bf16, in which it is emulated."""
        return self.peak_flops.get(dtype) or self.peak_flops["bf16"]


def _nvlink(gigabytes: float, share: float = 0.8) -> Link:
    return Link(f"nvlink, {gigabytes:g} GB/s", gigabytes * 1e9, 4e-6, share)


def _pcie(gigabytes: float) -> Link:
    return Link(f"pcie, {gigabytes:g} GB/s", gigabytes * 1e9, 6e-6, 0.75)


class _Maker(NamedTuple):
    """Fractions of the peak that a generation of devices reaches."""

    product_share: float = 0.7
    attention_share: float = 0.5
    attention_backward_share: float = 0.45

    def gpu(
        self,
        name: str,
        units: int,
        mib: int,
        half_tflops: float,
        fp32_tflops: float,
        bandwidth: float,
        host: float,
        link: Link,
    ) -> Device:
        """`bandwidth` and `host` in GB/s."""
        peaks = {"bf16": half_tflops * 1e12, "fp16": half_tflops * 1e12, "fp32": fp32_tflops * 1e12}
        peaks |= {"fp8": 2 * peaks["bf16"]} if self == _HOPPER else {}
        return Device(name, mib * MIB, peaks, bandwidth * 1e9, host * 1e9, link, units, *self)


_AMPERE, _HOPPER, _OTHER, _AMD = _Maker(0.71, 0.65, 0.58), _Maker(0.59, 0.45, 0.42), _Maker(), _Maker(0.5)
_FABRIC = Link("infinity fabric, 448 GB/s", 448e9, 5e-6, 0.7)
_NVLINK3, _NVLINK4, _NVLINK5, PCIE4, _PCIE5 = _nvlink(300, 0.78), _nvlink(450), _nvlink(900), _pcie(32), _pcie(64)

DEVICES: Mapping[str, Device] = {
    one.name: one
    for one in (
        _AMPERE.gpu("a100-80", 108, 81_920, 312, 19.5, 2_039, 32, _NVLINK3),
        _AMPERE.gpu("a100-pcie", 108, 81_920, 312, 19.5, 1_935, 32, PCIE4),
        _AMPERE.gpu("a100-40", 108, 40_536, 312, 19.5, 1_555, 32, _NVLINK3),
        _AMPERE.gpu("a800", 108, 81_920, 312, 19.5, 2_039, 32, _nvlink(200, 0.78)),
        _HOPPER.gpu("h100", 132, 81_559, 989, 67, 3_350, 64, _NVLINK4),
        _HOPPER.gpu("h100-pcie", 114, 81_559, 756, 51, 2_000, 64, _PCIE5),
        _HOPPER.gpu("h100-nvl", 132, 95_830, 835, 60, 3_900, 64, _PCIE5),
        _HOPPER.gpu("h800", 132, 81_559, 989, 67, 3_350, 64, _nvlink(200)),
        _HOPPER.gpu("h800-pcie", 114, 81_559, 756, 51, 2_000, 64, _PCIE5),
        _HOPPER.gpu("h200", 132, 143_771, 989, 67, 4_800, 64, _NVLINK4),
        _HOPPER.gpu("h200-nvl", 132, 143_771, 835, 60, 4_800, 64, _NVLINK4),
        _HOPPER.gpu("gh200", 132, 97_871, 989, 67, 4_000, 450, _NVLINK4),
        _HOPPER.gpu("b200", 148, 183_359, 2_250, 80, 8_000, 64, _NVLINK5),
        _HOPPER.gpu("gb200", 152, 189_471, 2_500, 80, 8_000, 450, _NVLINK5),
        _OTHER.gpu("l40s", 142, 46_068, 362, 91.6, 864, 32, PCIE4),
        _OTHER.gpu("l4", 58, 23_034, 121, 30.3, 300, 32, PCIE4),
        _OTHER.gpu("a40", 84, 46_068, 150, 37.4, 696, 32, PCIE4),
        _OTHER.gpu("a10", 72, 23_028, 125, 31.2, 600, 32, PCIE4),
        _AMD.gpu("mi300x", 304, 196_592, 1_307, 163.4, 5_300, 64, _FABRIC),
    )
}
"""By the names of `--gpu`."""

ALIASES: Mapping[str, str] = {"a100": "a100-80", "a100-sxm": "a100-80", "h100-sxm": "h100", "h200-sxm": "h200"}
"""What is said for short."""


def device_of(cuda_name: str) -> Device | None:
    """Return the device that torch calls so, such as "NVIDIA A100-SXM4-80GB"; None if it is unknown.

    All parts of one of its names above are words there; the name with most parts counts, of equals the last.
    """
    words = set(re.findall(r"\w+", cuda_name.upper()))
    parts = {name: [part + "GB" * part.isdigit() for part in name.upper().split("-")] for name in (*ALIASES, *DEVICES)}
    found = sorted((name for name in parts if words.issuperset(parts[name])), key=lambda name: len(parts[name]))
    return DEVICES[ALIASES.get(found[-1], found[-1])] if found else None


_NETWORKS = {  # gigabits per second, latency, share, whether a node has one card
    "ib{}": ((100, 200, 400, 800), 8e-6, 0.92, False),
    "roce{}": ((100, 200, 400, 800), 12e-6, 0.85, False),
    "{}gbit": ((1, 10, 25, 100), 60e-6, 0.94, True),  # sockets: TCP carries 94% of the line in frames of 1,500 bytes
}
NETWORKS: Mapping[str, Link] = {
    name.format(gigabits): Link(name.format(gigabits), gigabits / 8 * 1e9, latency, share, is_shared)
    for name, (speeds, latency, share, is_shared) in _NETWORKS.items()
    for gigabits in speeds
}
"""By the names of `--network`: ib and roce have a card for each GPU, Ethernet one for the node."""
