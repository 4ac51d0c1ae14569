"""The machines of a plan: the device, the number of devices, and the links between them.

    node 0  [0 1 2 3 4 5 6 7] --within--   node 1  [8 9 ...]          rank // per_node numbers the nodes
                  \\____________between____________/

Ranks are numbered as `RankGrid` numbers them, so which axis crosses nodes is arithmetic.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megazero.config import ResolvedRun
from megazero.plan.calibration import Calibration, OperatorTable, read_calibration
from megazero.plan.devices import ALIASES, DEVICES, NETWORKS, Device, Link, device_of
from megazero.registry import unknown_name

__all__ = ["Cluster", "Device", "Link", "cluster_of", "known_peak_flops"]


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes.

    Args:
        device: every rank has one such device.
        ranks: number of ranks, and so of devices.
        per_node: ranks of a node; the last node may have fewer.
        within: the link between ranks of one node.
        between: the link between nodes.
        processors: cores that the ranks of a node share; 0 if every rank has a device of its own.
        calibration: measured times of a CPU host, used in place of the device's data sheet; None without any.
    """

    device: Device
    ranks: int
    per_node: int
    within: Link
    between: Link
    processors: int = 0
    calibration: Calibration | None = field(default=None, hash=False, compare=False)

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return -(-self.ranks // self.per_node)

    @property
    def table(self) -> OperatorTable | None:
        """The measured operator times; None without a calibration."""
        return None if self.calibration is None else self.calibration.table

    def __str__(self) -> str:
        links = self.within.name + (f", {self.between.name} between nodes" if self.nodes > 1 else "")
        return f"{self.ranks} x {self.device.name}, {self.per_node} to a node, {links}"


def cluster_of(
    gpu: str = "h200",
    gpus: int = 1,
    per_node: int = 8,
    network: str = "ib400",
    options: tuple[str, str] = ("--gpus", "--per-node"),
) -> Cluster:
    """Return the cluster that these names and numbers describe.

    Args:
        gpu: a name in `DEVICES`, or the path of a file that `megazero calibrate` wrote, ending in ".json".
        gpus: number of ranks.
        per_node: devices of a node.
        network: the link between nodes, a name in `NETWORKS`.
        options: how errors call `gpus` and `per_node`.

    Raises:
        ValueError: a number is below 1, a node would not be full, or a name is unknown; the message lists the known names.
        OSError: the file cannot be read.
    """
    for name, value in zip(options, (gpus, per_node), strict=True):
        if value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 1")
    if gpus > per_node and gpus % per_node:
        full = gpus - gpus % per_node
        near = f"the nearest are {full} and {full + per_node}"
        each, node = options
        raise ValueError(f"{each} {gpus} must be divisible by {node} {per_node}, since all nodes are alike; {near}")
    if network.lower() not in NETWORKS:
        raise unknown_name("network", network, NETWORKS)
    between = NETWORKS[network.lower()]
    if gpu.endswith(".json"):
        if not Path(gpu).exists():
            raise ValueError(f"--gpu {gpu}: there is no such file; megazero calibrate --out {gpu} writes one")
        found = read_calibration(Path(gpu))
        shared = found if found.processors else None
        return Cluster(found.device, gpus, min(per_node, gpus), found.within, between, found.processors, shared)
    short = ALIASES.get(gpu.lower(), gpu.lower())
    if short not in DEVICES:
        error = unknown_name("GPU", gpu, [*DEVICES, *ALIASES])
        raise ValueError(f"{error}. A CPU or another device: megazero calibrate --out FILE.json, then --gpu FILE.json")
    device = DEVICES[short]
    return Cluster(device, gpus, min(per_node, gpus), device.link, between)


def some_cluster(run: ResolvedRun, per_node: int, *, on_cuda: bool) -> Cluster:
    """Return a cluster to plan a run's memory on unknown devices.  That memory depends on nothing but the ranks per node."""
    device, ethernet = DEVICES["h200"], NETWORKS["100gbit"]
    each = min(per_node, run.world_size)
    return Cluster(device, run.world_size, each, device.link, ethernet, 0 if on_cuda else each)


def with_memory(cluster: Cluster, gib: float, *, on_cuda: bool = True) -> Cluster:
    """Return the cluster with `gib` GiB of memory for each rank.

    Raises: ValueError: no device has so much.
    """
    if gib > 2**30:
        raise ValueError(f"--device-gib {gib:g} is more than any device has")
    name = f"a device of {gib:g} GiB"
    device = replace(cluster.device, name=name, memory_bytes=int(gib * 2**30))
    return replace(cluster, device=device, processors=cluster.processors if on_cuda else max(cluster.processors, 1))


def known_peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of dense bf16 or fp16 products; None for another dtype or an unknown device.

    Args:
        device_name: torch's name of the device, such as "NVIDIA H200".
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    device = device_of(device_name)
    return None if device is None else device.peak_flops["bf16"]
