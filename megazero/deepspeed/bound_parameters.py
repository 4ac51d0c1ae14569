"""Proof, at the end of a step, that a script's module still computes with the parameters that are trained.

A script may freeze a parameter, exchange it or its data, or add one, at any time; its training would end without a word.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megazero.comm.memory import address_of, storage_of
from megazero.zero.param_proxy import real
from megazero.zero.sharded_model import ShardedModel


class BoundParameters:
    """The parameters of a module as they were when it was sharded.

    Args:
        model: holds the module's parameters.
    """

    def __init__(self, module: nn.Module, model: ShardedModel) -> None:
        self._module, self._parameters = module, model.parameters
        self._held = dict(_held_in(module))

    def check(self) -> None:
        """Raises: RuntimeError: a parameter was frozen, unfrozen, replaced or added since."""
        self._check_trains()
        self.check_bound()

    def _check_trains(self) -> None:
        for bucket in self._parameters.buckets:
            for slot in bucket.layout.slots:
                if self._parameters.by_name[slot.info.name].requires_grad != slot.info.trains:
                    was, now = ("trained", "frozen") if slot.info.trains else ("frozen", "to be trained")
                    raise RuntimeError(
                        f"parameter {slot.info.name} was {was} when the model was sharded and is {now} at the end of a "
                        "step: its gradient has no place to go, or its momentum would still move it. Set requires_grad "
                        "before megazero.initialize; later, a group with lr=0 and weight_decay=0 stands still"
                    )

    def check_bound(self) -> None:
        """Raises: RuntimeError: the module computes with another tensor than the one that its bucket holds."""
        bound = {id(parameter): name for name, parameter in self._parameters.by_name.items()}
        replaced = list[str]()
        for bucket in self._parameters.buckets:
            memory, itemsize = storage_of(bucket.weights), bucket.weights.itemsize
            for slot in bucket.layout.slots:
                if address_of(self._parameters.by_name[slot.info.name]) != (memory, slot.start * itemsize):
                    replaced.append(slot.info.name)
        for name, parameter in _held_in(self._module):
            first, has_moved = self._held.get(name), id(parameter) in bound
            if first is not None and first is not parameter:
                replaced.append(bound[id(first)])
            elif first is None and not has_moved and parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was added since megazero.initialize: nothing trains it. Add it before, or freeze it "
                    "(requires_grad_(False))"
                )
        if replaced:
            raise RuntimeError(
                f"parameter {replaced[0]} has got other data, or is another Parameter, since megazero.initialize: what is "
                "trained is no longer what the module computes with. Write in place (p.copy_(new) under torch.no_grad(), or "
                "load_state_dict without assign=True); tie weights and exchange modules before; weights with masters of "
                "their own, as of bf16, fp16 and an offloaded optimizer, within "
                "zero.GatheredParameters(parameters, modifier_rank=0)"
            )


def _held_in(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every attribute of a module's parts that holds a parameter: its qualified name, the parameter itself."""
    for prefix, part in module.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{key}" if prefix else key, real(parameter)
