"""Which parameters a backward reaches, asked while it runs.

loss <- f(w1) <- g(w0)                      reaches w1 and w0; w2, which this forward has not used, gets no gradient
loss <- CheckpointFunction <- g(w0)         as far as its graph shows, only w0: the function runs a backward within,
                                            of a graph of its own, which reaches w1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

# Modules whose autograd.Functions run no backward of their own; compiled graphs are of the last.
_RUN_NO_BACKWARD = ("megazero.", "torch.nn.", "torch.distributed.", "torch._functorch._aot_autograd.")


class Reach:
    """What autograd's graphs reach of these parameters, all of which train."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._nodes: list[Node] = []  # that add to their gradients: twenty times slower to find than to ask for

    def missing(self) -> Sequence[nn.Parameter]:
        """Those that the graph of the backward under way does not reach; none where it adds to no gradient at all."""
        try:
            if not self._nodes:
                self._nodes = [get_gradient_edge(parameter).node for parameter in self.parameters]
            will_run = torch._C._will_engine_execute_node
            found = [
                parameter for parameter, node in zip(self.parameters, self._nodes, strict=True) if not will_run(node)
            ]
        except RuntimeError:  # torch.autograd.grad of parameters
            return []
        return found if len(found) < len(self.parameters) else []  # torch.autograd.grad


def may_run_backward(root: Node) -> bool:
    """Whether the graph has a function of Python that is not known to run no backward of its own."""
    seen, found = {root}, [root]
    for node in found:  # it grows
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and not function.__module__.startswith(_RUN_NO_BACKWARD):
            return True
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        found += new
    return False
