"""Devices and networks: the peaks of their data sheets, and the shares of the peaks that programs reach.

    peak FLOP/s x share     matrix products                              `product_share`, the one number that is fitted
    bytes/s x share         operators that only move data                `memory_share`
    link x share            large collectives                            `Link.share`

Peaks are dense (half of the figures "with sparsity"), links are one direction, memory is what the driver reports.  The
numbers and their sources are in `devices.toml`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

MIB = 2**20
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


def size_text(count: float) -> str:
    """Format bytes in MiB or GiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / MIB:,.1f} MiB"


@dataclass(frozen=True)
class Link:
    """A link between ranks.

    Args:
        bytes_per_second: data sheet rate in one direction, of each rank; of the whole node if `is_shared`.
        latency_seconds: latency of a message, or of one hop of a collective.
        share: the fraction of `bytes_per_second` that a large collective reaches.
        is_shared: the ranks of a node share one network card.
    """

    name: str
    bytes_per_second: Positive
    latency_seconds: float
    share: Share = 1.0
    is_shared: bool = False

    def rate(self, senders: int = 1) -> float:
        """Return the bytes per second of each rank while `senders` ranks of its node send at once."""
        return self.bytes_per_second * self.share / (senders if self.is_shared else 1)


@dataclass(frozen=True)
class Device:
    """A GPU, or the processors of a host.

    Args:
        name: the name for `--gpu`.
        memory_bytes: as the driver reports them.
        peak_flops: dense FLOP/s of matrix products by dtype: "bf16", "fp16", "fp32", and "fp8" where it has kernels.
        memory_bandwidth: bytes/s of its own memory.
        host_bandwidth: bytes/s to the host's memory, in one direction.
        link: the link to other devices of the node.
        multiprocessors: number of units that compute the tiles of a product; 0 if not known.
        product_share: the fraction of the peak that large products reach.
        attention_share, attention_backward_share: the fraction of the peak that fused attention reaches.
        memory_share: the fraction of `memory_bandwidth` that operators reach which only move data.
        launch_seconds: host time to launch an operator that is not compiled.
    """

    name: str
    memory_bytes: Annotated[int, Field(gt=0)]
    peak_flops: Mapping[str, Positive] = field(hash=False)
    memory_bandwidth: Positive
    host_bandwidth: float
    link: Link
    multiprocessors: int = 0
    product_share: Share = 0.7
    attention_share: Share = 0.5
    attention_backward_share: Share = 0.45
    memory_share: Share = 0.88
    launch_seconds: Positive = 6e-6

    def peak_of(self, dtype: str) -> float:
        """Return the peak FLOP/s for a dtype.  A device without fp8 kernels emulates fp8 in bf16 and has that peak."""
        return self.peak_flops.get(dtype) or self.peak_flops["bf16"]


_TABLES = tomllib.loads((Path(__file__).parent / "devices.toml").read_text(encoding="utf-8"))


LINKS: Mapping[str, Link] = {name: Link(**values) for name, values in _TABLES["links"].items()}
#: The networks of `--network`.  InfiniBand and RoCE have a card for each GPU, Ethernet has one for the node.
NETWORKS: Mapping[str, Link] = {name: link for name, link in LINKS.items() if link.name == name}


def _device(
    name: str, generation: str, units: int, mib: int, half: float, fp32: float, memory: float, host: float, link: str
) -> Device:
    peaks = {"bf16": half * 1e12, "fp16": half * 1e12, "fp32": fp32 * 1e12}
    peaks |= {"fp8": 2 * peaks["bf16"]} if generation == "hopper" else {}
    shares = _TABLES["generations"][generation]
    return Device(name, mib * MIB, peaks, memory * 1e9, host * 1e9, LINKS[link], units, **shares)


#: The devices of `--gpu`.
DEVICES: Mapping[str, Device] = {name: _device(name, **values) for name, values in _TABLES["devices"].items()}
#: Short names for `--gpu`.
ALIASES: Mapping[str, str] = _TABLES["aliases"]


def device_of(cuda_name: str) -> Device | None:
    """Return the device that torch calls, for example, "NVIDIA A100-SXM4-80GB"; None if it is unknown.

    A device matches if torch's name has all words of its name ("a100-80": "a100" and "80").  Of several matches, the one
    with the most words is returned.
    """
    words = set(re.findall(r"\w+", cuda_name.upper()))
    needed = {name: [word + "GB" * word.isdigit() for word in name.upper().split("-")] for name in (*ALIASES, *DEVICES)}
    found = sorted((name for name in needed if words.issuperset(needed[name])), key=lambda name: len(needed[name]))
    return DEVICES[ALIASES.get(found[-1], found[-1])] if found else None
