"""Bucket sizes: large enough for the network, small enough that the backward hides all reductions but the last.

    backward     | w3 w2 | w1 | w0 |
    network              [ bucket 1  ][ bucket 0  ]        exposed: the time of the last bucket
    with more buckets
    backward     | w3 | w2 | w1 | w0 |
    network           [ 3 ][ 2 ][ 1 ][ 0 ]

`zero.bucket_bytes = "auto"` is computed from the number of ranks, the size of the model and the transport, never from a
measured time: the gradient norm is rounded bucket by bucket, so a run with a measured layout could not be repeated.

If the network sends without the rank's help, a bucket is no larger than it needs to be.  In the memory of one host
ranks copy the data themselves while they wait: nothing is hidden, and large buckets cost least.
"""

from dataclasses import dataclass
from typing import Literal

from megazero.zero.bucket import ShardingPolicy

_FP32_BYTES = 4
DEFAULT_BYTES = 40 * 2**20
# What one rank sends another of a bucket.  Over sockets, with half a megabyte, links of 0.3 and 1 Gbit/s stay busy beside a
# computation; a sixteenth more, so that matrices of a power of two fit with their vectors.  NCCL's rings want more
# (Megatron-LM's buckets grow by 4 MB with each rank).
_SOCKET_PIECE, _DEVICE_PIECE = 2**19 + 2**15, 2**20
_MOST_BUCKETS = 64  # each costs the host about 0.1 ms
# Pieces for many ranks give way to this: one bucket hides nothing, and at stage 2 the buffers would hold whole gradients.
_FEWEST_BUCKETS = 8
# A CPU finds memory for gradients up to this size where the backward has freed activations; larger blocks are mapped anew.
_UNSENT_BYTES = 4 * 2**20
# From stage 2 on gradients pass through two buckets' worth of buffers: one that fills, two that are sent, and over gloo two
# for what arrives.
_BUFFERS = 5
# A larger part costs less: the product of a matrix that is cut in many parts is slower by more than smaller parts hide.
_PART_BUCKETS = 4


@dataclass(frozen=True)
class BucketSizes:
    """Bucket sizes, and the size of the working buffers.

    Args:
        elements: most elements of a bucket; a larger parameter has a bucket of its own, with small ones beside it.
        part_elements: most elements of a part in which such a parameter is reduced, if it can be cut; None: `elements`.
        bucket_bytes: `zero.bucket_bytes`, or the choice of "auto"; working buffers take at most twice as much.
        cuts_units: stage 3's units have buckets of this size, too.
    """

    elements: int
    bucket_bytes: int
    part_elements: int | None = None
    cuts_units: bool = False


def bucket_sizes(
    setting: int | Literal["auto"], policy: ShardingPolicy, numel: int, *, cuts: bool, hides: bool
) -> BucketSizes:
    """Return the sizes for buckets that together hold `numel` parameters.  All ranks must pass the same `numel` and
    `hides`.

    Args:
        cuts: large buckets pass through working buffers in parts.
        hides: the network sends messages without this rank's help.
    """
    ranks, on_cpu = policy.placement.shard.size * policy.placement.replica.size, policy.on_cpu
    if setting != "auto":
        bucket_bytes = setting
    else:
        piece = _DEVICE_PIECE if not on_cpu else _SOCKET_PIECE if hides else 0
        most = numel * _FP32_BYTES // _FEWEST_BUCKETS
        bucket_bytes = max(DEFAULT_BYTES, min(_with_buffers(piece * ranks, cuts), most))
    if on_cpu and not policy.placement.sends:
        bucket_bytes = min(bucket_bytes, _UNSENT_BYTES)
    elements = bucket_bytes // _FP32_BYTES
    elements = elements * 2 // _BUFFERS if cuts else elements
    smallest = policy.align * policy.placement.shard.size if cuts else 1
    part = max(elements // smallest, 1) * smallest
    if setting != "auto" or not on_cpu or not hides:
        return BucketSizes(part, bucket_bytes)
    elements = min(elements, max(_SOCKET_PIECE * ranks // _FP32_BYTES, numel // _MOST_BUCKETS))
    elements = max(elements // smallest, 1) * smallest
    return BucketSizes(elements, bucket_bytes, min(part, _PART_BUCKETS * elements), cuts_units=True)


def _with_buffers(nbytes: int, cuts: bool) -> int:
    """Return the bucket size at which `nbytes` are sent at once."""
    return nbytes * _BUFFERS // 2 if cuts else nbytes
