"""The values of a script's parameters on their way into buckets: those of its modules, and later edits.

modules --load_values--> the first data-parallel rank's values --overwrite--> the master weights of every rank
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.comm.collectives import broadcast
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket
from megazero.zero.sharded_model import ShardedModel

#: Returns the initial values of a parameter that has no memory yet, by its name; None if they are not known.  It is
#: called once for each.
DeferredValues: TypeAlias = Callable[[str], Tensor | None]


def load_values(
    model: ShardedModel, values: dict[str, Tensor], dp: Axis, deferred: DeferredValues = lambda _: None
) -> None:
    """Copy the values that a model was built with into its buckets.  A collective call: all ranks get the values of the
    first data-parallel rank.

    Args:
        values: of each parameter that was not on the meta device, by name; emptied.
        deferred: returns the values of a parameter on the meta device.

    Raises:
        ValueError: a parameter has no values.
    """
    for copies in copies_of_buckets(model.parameters.buckets):
        layout = copies[0].layout
        flat = torch.zeros(layout.padded_numel, device=model.policy.device)
        for slot, *tied in zip(*(bucket.layout.slots for bucket in copies), strict=True):
            name = slot.info.name
            own, *_ = [values.pop(copy.info.name, None) for copy in (slot, *tied)]
            if dp.index == 0:
                own = deferred(name) if own is None else own
                if own is None:
                    hint = "build the model under zero.Init()"
                    raise ValueError(f"parameter {name} is on the meta device, without values; {hint}")
                flat[slot.start : slot.stop].copy_(own.detach().reshape(-1))
        overwrite(model, copies, flat, dp)
    model.parameters.all_gather_weights()


def copies_of_buckets(buckets: Iterable[Bucket]) -> list[list[Bucket]]:
    """Group the buckets of this rank by value: each list holds all copies of one bucket, in an order that is the same on
    all ranks.
    """
    found: dict[str, list[Bucket]] = {}
    # Ranks have tied parameters at different places; sorted by name, the order is the same on all.
    for bucket in sorted(buckets, key=lambda bucket: bucket.layout.tie or ""):
        key = bucket.layout.name if bucket.layout.tie is None else f"tied {bucket.layout.tie}"
        found.setdefault(key, []).append(bucket)
    return list(found.values())


def overwrite(model: ShardedModel, copies: Sequence[Bucket], flat: Tensor, dp: Axis, source: int = 0) -> None:
    """Broadcast one data-parallel rank's values to the master weights and weight shards of every rank.  A collective call.

    Parameters that tp does not split are made equal over tp, tied ones over the stages that hold them.

    Args:
        copies: all copies of one bucket on this rank, as `copies_of_buckets` lists them.
        flat: full values of the bucket, fp32 [padded].
        source: index of the rank in `dp` that sends its values.
    """
    model.parameters.gathers.wait()
    layout = copies[0].layout
    broadcast(flat, dp, source).wait()
    for replicated, interval in layout.intervals(lambda info: info.spec.split is None):
        if replicated:
            broadcast(flat[interval.start : interval.stop], model.state.tp).wait()
    if layout.tie is not None and layout.tie in model.ties:
        broadcast(flat, model.ties[layout.tie]).wait()
    for bucket in copies:
        mine = flat[bucket.owned.start : bucket.owned.stop]
        bucket.write(bucket.master, bucket.owned, mine)
        if bucket.master is not bucket.weight_shard:
            bucket.write(bucket.weight_shard, bucket.owned, mine)
