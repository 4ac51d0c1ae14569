"""torch's process groups carry broadcasts, messages between two ranks, and small values: see `parallel_state.Messages`."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megazero.comm import objects
from megazero.comm.messages import group_of
from megazero.parallel_state import Axis, Transfers, Wait


class ProcessGroups:
    """Sends over the process groups of the axis that is given."""

    gather = staticmethod(objects.gather)
    from_first = staticmethod(objects.from_first)
    largest = staticmethod(objects.largest)

    def broadcast(self, tensor: Tensor, axis: Axis, source: int) -> Wait:
        wait: Wait = dist.broadcast(tensor, src=axis.ranks[source], group=axis.process_group, async_op=True).wait
        return wait

    def exchange(self, sends: Transfers, receives: Transfers, axis: Axis) -> list[Wait]:
        group = group_of((*sends, *receives)[0][0], axis)
        operations = [dist.P2POp(dist.isend, tensor, peer, group=group) for tensor, peer in sends]
        operations += [dist.P2POp(dist.irecv, buffer, peer, group=group) for buffer, peer in receives]
        waits: list[Wait] = [work.wait for work in dist.batch_isend_irecv(operations)]
        return waits if len(waits) == len(operations) else waits * len(operations)  # NCCL has one for the whole batch
