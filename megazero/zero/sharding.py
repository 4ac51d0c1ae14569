"""Over which ranks, in which formats and on which device a model is sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from megazero.comm.collectives import gather_objects
from megazero.comm.memory import Arena, Copier, copier_on
from megazero.config.schema import PrecisionConfig, ZeroConfig
from megazero.parallel_state import Axis, ParallelState
from megazero.parallel_state.grid import hosts_of
from megazero.settings import divisors

if TYPE_CHECKING:
    from megazero.zero.optimizer import OptimizerRecipe

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
ALIGN_ELEMENTS = 16  # a shard begins at a multiple of 64 bytes in fp32
BLOCK = 256  # elements that share one scale when they are quantized: see `quantized`, [Note: blocks]


@dataclass(frozen=True)
class Placement:
    """The ranks that share a parameter, seen from this rank."""

    shard: Axis  # ranks that hold different shards
    replica: Axis  # ranks that hold the same shard; gradients are summed over `shard` and `replica`
    gather: Axis | None = None  # `shard` with a communicator of its own for stage 3's gathers; None: use `shard`
    # ranks of `shard` that share a secondary shard of stage 3's weights; None: no such shard
    secondary: Axis | None = None
    # `shard` within a host and between hosts: gradients are quantized only between hosts
    levels: tuple[Axis, Axis] | None = None

    @property
    def sends(self) -> bool:
        """Whether gradients are sent to other ranks."""
        return self.shard.size > 1 or self.replica.size > 1


ALONE = Placement(Axis("shard"), Axis("replica"))

_AT_ONCE: Final = Copier()


@dataclass(frozen=True)
class ShardingPolicy:
    """Settings that all buckets of a model share.

    Attributes:
        placement: of every parameter that has none of its own.
        dtype: of the weights that modules compute with.
        device: where modules compute.
        accumulate_dtype: in which a step's gradients add up.
        reduce_dtype: in which gradients are sent.
        on_cpu: whether the run's modules compute on a CPU.
        copier: moves offloaded state between host and device.
        arena: holds the working buffers of gradients; None: each buffer has its own memory.
        quantizes_weights: stage 3 gathers weights in blocks of 8 bits.
        gradient_bits: bits per gradient when they are reduced over the shard axis in blocks; 0: not quantized.
        compiles: whether quantization is compiled.
    """

    zero_stage: int
    dtype: torch.dtype
    placement: Placement
    device: torch.device
    accumulate_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    on_cpu: bool = True
    copier: Copier = _AT_ONCE
    arena: Arena | None = None
    quantizes_weights: bool = False
    gradient_bits: int = 0
    compiles: bool = False

    @property
    def align(self) -> int:
        """Shards are a multiple of this."""
        return BLOCK if self.quantizes_weights or self.gradient_bits else ALIGN_ELEMENTS


@dataclass(frozen=True)
class ShardingSettings:
    """How a model is sharded and updated.  `arena`, `compiles`: see `ShardingPolicy`; `averages`: keep a `WeightAverage`."""

    zero: ZeroConfig
    precision: PrecisionConfig
    recipe: OptimizerRecipe
    arena: Arena | None = None
    compiles: bool = False
    averages: bool = False


def sharding_policy(state: ParallelState, settings: ShardingSettings) -> ShardingPolicy:
    """Return the settings that all buckets share.  A collective call.  Raises: ValueError."""
    zero, precision = settings.zero, settings.precision
    return ShardingPolicy(
        zero.stage,
        DTYPES[precision.dtype],
        placement_of(state, zero),
        state.device,
        DTYPES[precision.accumulate_dtype],
        DTYPES[precision.reduce_dtype],
        on_cpu=state.device_type == "cpu",
        copier=copier_on(state.device),
        arena=settings.arena,
        quantizes_weights=zero.quantized_weights,
        gradient_bits=zero.quantized_gradients,
        compiles=settings.compiles,
    )


def placement_of(state: ParallelState, zero: ZeroConfig) -> Placement:
    """Return the placement of a model's parameters.  A collective call.

    Raises:
        ValueError: the size of the secondary axis does not divide the number of ranks that share the state.
    """
    levels = _levels(state) if zero.quantized_gradients else None
    if zero.stage < 3:
        return Placement(state.shard, state.replica, levels=levels)
    size, shards = zero.secondary_shard_size, state.shard.size
    if size and (size in (1, shards) or shards % size):
        raise ValueError(
            f"zero.secondary_shard_size={size} must divide the {shards} ranks that share the state into two groups or more, "
            f"of 2 or more: choose among {', '.join(map(str, [0, *divisors(shards)[1:-1]]))}"
        )
    # NCCL runs operations of one communicator in order: without its own, a gather would wait for earlier reductions.
    gather = state.with_own_group(state.shard, "gathers") if state.device.type == "cuda" else None
    secondary = state.block_on(state.shard, size, "secondary", "gathers") if size else None
    return Placement(state.shard, state.replica, gather, secondary, levels)


def expert_placement_of(state: ParallelState, zero: ZeroConfig) -> Placement | None:
    """Return the placement of experts, the state of which is shared by all ranks with the same experts.  A collective
    call.

    Returns:
        None if these are the ranks that share all other parameters.
    """
    if state.grid.ep == state.grid.tp == 1:
        return None
    gather = state.with_own_group(state.edp, "gathers") if zero.stage == 3 and state.device.type == "cuda" else None
    return Placement(state.edp, Axis("replica", (state.rank,), traffic=state.traffic), gather)


def _levels(state: ParallelState) -> tuple[Axis, Axis] | None:
    """Return `shard` within a host and between hosts if several hosts have equally many of its ranks, otherwise None."""
    hosts = hosts_of([str(rank // state.local_world_size) for rank in state.shard.ranks], state.shard.index)
    size = hosts.size if hosts is not None and hosts.count > 1 else 1
    if set(gather_objects(size, state.world)) != {size} or size == 1:
        return None
    return state.cut(state.shard, size, "host", "hosts", "reductions")
