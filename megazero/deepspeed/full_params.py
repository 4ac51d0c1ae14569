"""Gathers whole parameters, to read or to edit them, at every ZeRO stage.

gathered_parameters(engine, names)          fp32 master weights, by name
GatheredParameters(parameters)              DeepSpeed's call: the parameters themselves, in the dtype of the module
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from megazero.comm.collectives import all_gather, all_reduce
from megazero.deepspeed.meta_init import MetaParameter
from megazero.deepspeed.script_values import overwrite
from megazero.deepspeed.training_engine import ENGINES, TrainingEngine
from megazero.deepspeed.ungathered_parameter import UngatheredParameter, opened, real
from megazero.zero.bucket import Bucket


@contextmanager
def gathered_parameters(
    engine: TrainingEngine, names: str | Iterable[str] | None = None, *, modifier_rank: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield whole fp32 master weights by name.  Collective: all ranks call this.

    Args:
        engine: the engine that trains the model.
        names: qualified names in the model; None for all parameters of this rank.
        modifier_rank: the data-parallel rank whose edits of the tensors become the parameters' new values on every rank;
            None discards edits.

    Raises:
        KeyError: a name is no parameter; the message lists similar names.
        ValueError: `modifier_rank` is no data-parallel rank.

    Under tensor parallelism, a tensor is this rank's slice of a split parameter.  If several ranks edit a parameter that all
    tensor-parallel ranks replicate, or a weight that is tied over stages, the edit of the first rank counts.  Copies of a
    tied weight on this rank are one tensor under several names.
    """
    bound = engine.bound
    _check_modifier(engine, modifier_rank)
    found = bound.home if names is None else bound.find([names] if isinstance(names, str) else names)
    if modifier_rank is not None and names is not None:
        _check_ties(engine, found)
    masters = _Whole(engine)
    yield {name: masters.of(name) for name in found}
    if modifier_rank is not None:
        masters.overwrite(modifier_rank)


@contextmanager
def GatheredParameters(  # noqa: N802  as DeepSpeed has it
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Gather parameters for a `with` block, and broadcast the changes of `modifier_rank` at its end.

    Collective: all ranks call this.  The fp32 masters of unchanged elements stay as they are.  A module's forward sees the
    changes only after the block.  Parameters without an engine are whole anyway; those built under `zero.Init` record the
    changes.  An inner block sees the changes of the outer block, and its own changes are broadcast at the end of the outer
    block.

    Args:
        params: one or several parameters.
        modifier_rank: the data-parallel rank whose changes count; None to read only.
        fwd_module: no effect, since a module may read any parameter in its forward.
        enabled: with False, the call has no effect.

    Raises:
        ValueError: `modifier_rank` is no data-parallel rank, not 0 before `initialize`, or not that of the outer block.
        RuntimeError: a parameter that stage 3 shards was changed without a `modifier_rank`.
    """
    given: list[nn.Parameter] = [params] if isinstance(params, nn.Parameter) else list(params)
    if modifier_rank and any(isinstance(parameter, MetaParameter) for parameter in given):
        raise ValueError(f"{modifier_rank=} before initialize: under zero.Init rank 0's changes count")
    changes = enabled and modifier_rank is not None
    held = {
        id(real(param)): param for param in given if changes or (enabled and isinstance(param, UngatheredParameter))
    }
    with ExitStack() as contexts:
        for engine in list(ENGINES.values()):
            own = {name: held[key] for key, name in engine.sharded_model.names.items() if key in held}
            if own:
                contexts.enter_context(_changing(engine, own, modifier_rank))
        yield


@contextmanager
def _changing(engine: TrainingEngine, parameters: dict[str, nn.Parameter], modifier: int | None) -> Iterator[None]:
    """Gather sharded parameters, and broadcast the changes at the end.  Buckets without changes are not sent."""
    _check_modifier(engine, modifier)
    bound = engine.bound
    for name in parameters.keys() & bound.modifiers.keys():  # the outer block broadcasts the changes
        if modifier not in (None, bound.modifiers[name]):
            outer = f"GatheredParameters with modifier_rank={bound.modifiers[name]}"
            raise ValueError(f"{name} is already within {outer}; give that one modifier_rank={modifier}, too")
        del parameters[name]
    if modifier is not None:
        _check_ties(engine, parameters)
    cut = {name: parameter for name, parameter in parameters.items() if isinstance(parameter, UngatheredParameter)}
    weights = _Whole(engine, masters=False)
    for name, proxy in cut.items():
        proxy.whole = weights.of(name).clone()
    del weights

    def values() -> dict[str, Tensor]:
        return {name: opened(parameter).detach() for name, parameter in parameters.items()}

    now = values()
    before, versions = {name: value.clone() for name, value in now.items()}, {name: now[name]._version for name in cut}
    bound.modifiers |= dict.fromkeys(parameters, modifier)
    try:
        yield
        now = values()
        if modifier is not None and now:
            _apply(engine, before, now, modifier)
        elif changed := [name for name in cut if now[name]._version != versions[name]]:
            raise RuntimeError(f"{changed[0]} was changed; name the rank whose change counts with modifier_rank=")
    finally:
        for proxy in cut.values():
            proxy.whole = None
        for name in parameters:
            del bound.modifiers[name]


@torch.no_grad()
def _apply(engine: TrainingEngine, before: dict[str, Tensor], now: dict[str, Tensor], modifier: int) -> None:
    """Broadcast the changes of the modifier rank.  Changes of other ranks are undone, since no master has them."""
    state, masters = engine.parallel_state, _Whole(engine)
    differs = [not torch.equal(now[name], before[name]) for name in now]
    changed = torch.tensor(differs, dtype=torch.float32, device=state.device)
    for axis in (state.dp, state.tp):  # the ranks that `overwrite` brings together
        all_reduce(changed, axis, "max").wait()
    new = {name: now[name].clone() for name, is_changed in zip(now, changed.tolist(), strict=True) if is_changed}
    for name in new:
        now[name].copy_(before[name])  # fp32 weights may be the masters themselves
    for name, values in new.items():
        master = masters.of(name)
        torch.where(values == before[name], master, values.float(), out=master)
    if new:
        masters.overwrite(modifier)


class _Whole:
    """Whole parameters: fp32 masters or weights.  A bucket is gathered when one of its parameters is first read."""

    def __init__(self, engine: TrainingEngine, *, masters: bool = True) -> None:
        self._model, self._bound, self._masters = engine.sharded_model, engine.bound, masters
        self._flats: dict[Bucket, Tensor] = {}  # by the first of this rank's copies

    def of(self, name: str) -> Tensor:
        """Return a whole parameter; a master may be changed."""
        bucket, index = self._bound.home[name]
        first = self._bound.copies[bucket][0]
        if first not in self._flats:
            array, dtype = (first.master, torch.float32) if self._masters else (first.weight_shard, first.weights.dtype)
            flat = torch.zeros(first.layout.padded_numel, dtype=dtype, device=first.policy.device)
            mine = flat[first.owned.start : first.owned.stop]
            mine.copy_(first.read(array, first.owned))
            if first.owned != first.layout.interval:
                all_gather(flat, mine, first.placement.shard).wait()
            self._flats[first] = flat
        slot = bucket.layout.slots[index]
        return self._flats[first][slot.start : slot.stop].view(slot.info.shape)

    def overwrite(self, modifier: int) -> None:
        """Broadcast the masters of one data-parallel rank."""
        model, changed = self._model, list[Bucket]()
        for first, copies in self._bound.copies.items():
            if first in self._flats:
                overwrite(model, copies, self._flats[first], model.state.dp, modifier)
                changed += copies
        model.parameters.all_gather_weights(changed=changed)


def _check_modifier(engine: TrainingEngine, modifier: int | None) -> None:
    size = engine.dp_world_size
    if modifier is not None and not 0 <= modifier < size:
        raise ValueError(f"modifier_rank={modifier} must be one of the {size} data-parallel ranks")


def _check_ties(engine: TrainingEngine, names: Iterable[str]) -> None:
    for name, (bucket, _) in ((name, engine.bound.home[name]) for name in names):
        if bucket.layout.tie in engine.sharded_model.ties:
            raise ValueError(f"{name} has a copy on another stage; edit it with names=None, on all ranks")
