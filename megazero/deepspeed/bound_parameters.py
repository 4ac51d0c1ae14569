"""Where the parameters of a script's module are, and a proof that it still computes with those that are trained.

A script may freeze a parameter, exchange it or its data, or add one, at any time; its training would end without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from torch import nn

from megazero.comm.memory import address_of, storage_of
from megazero.deepspeed.script_units import ScriptModel
from megazero.deepspeed.ungathered_parameter import real
from megazero.zero.bucket import Bucket


class BoundParameters:
    """The parameters of a module as they were when it was sharded.

    Args:
        model: holds the module's parameters.

    Attributes:
        home: by name, the bucket of a parameter and its slot there.
        copies: by bucket, all copies of it on this rank, in an order that all ranks share.
        modifiers: by name, the `modifier_rank` of the GatheredParameters that a parameter is within.
    """

    def __init__(self, module: nn.Module, model: ScriptModel) -> None:
        self._module, self._model, self._parameters = module, model, model.parameters
        self._held = dict(_held_in(module))
        self.home = {
            slot.info.name: (bucket, index)
            for bucket in model.parameters.buckets
            for index, slot in enumerate(bucket.layout.slots)
        }
        self.copies = {bucket: copies for copies in model.parameters.distinct_buckets() for bucket in copies}
        self.modifiers: dict[str, int | None] = {}

    def find(self, names: Iterable[str]) -> dict[str, tuple[Bucket, int]]:
        """Return the home of each parameter, of a tied one by any of its names.  Raises: KeyError."""
        home, known = self.home, self._model.names
        for name, parameter in self._held.items():
            if name not in home and id(parameter) in known:
                home[name] = home[known[id(parameter)]]
        found = {}
        for name in names:
            if name not in home:
                close = get_close_matches(name, home, n=3, cutoff=0.4)
                near = f"; near it are {', '.join(close)}" if close else ""
                raise KeyError(f"{name} is no parameter of this rank's model{near}")
            found[name] = home[name]
        return found

    def check(self) -> None:
        """Raises: RuntimeError: a parameter was frozen, unfrozen, replaced, tied or added since."""
        now = dict(_held_in(self._module))
        changed = [name for name, parameter in self._held.items() if now.get(name) is not parameter]
        changed += [name for name in now.keys() - self._held.keys() if now[name].requires_grad]
        for bucket in self._parameters.buckets:
            memory, itemsize = storage_of(bucket.weights), bucket.weights.itemsize
            for slot in bucket.layout.slots:
                parameter = self._parameters.by_name[slot.info.name]
                is_here = address_of(parameter) == (memory, slot.start * itemsize)
                if not is_here or parameter.requires_grad != slot.info.trains:
                    changed.append(slot.info.name)
        if changed:
            raise RuntimeError(
                f"parameter {changed[0]} was frozen, unfrozen, tied, added, replaced or given other data since "
                "megazero.initialize, so what is trained is no longer what the module computes with. Do that before. Later "
                "write in place (p.copy_(new) under torch.no_grad(), or load_state_dict without assign=True), weights with "
                "masters of their own, as of bf16, fp16 and an offloaded optimizer, within "
                "zero.GatheredParameters(parameters, modifier_rank=0); a group with lr=0 and weight_decay=0 stands still"
            )


def _held_in(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name of every attribute of a module's parts that holds a parameter, and the parameter itself."""
    for prefix, part in module.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{key}" if prefix else key, real(parameter)
