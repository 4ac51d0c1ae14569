"""Whole parameters, to read or to edit, whatever ZeRO has cut them into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Protocol

import torch
from torch import Tensor

from megazero.comm.collectives import all_gather, broadcast
from megazero.zero.bucket import Bucket
from megazero.zero.param_proxy import UngatheredParameter
from megazero.zero.sharded_model import ShardedModel


class HasModel(Protocol):
    """An engine."""

    @property
    def sharded_model(self) -> ShardedModel: ...


@contextmanager
def gathered_parameters(
    engine: HasModel, names: str | Iterable[str] | None = None, *, modifier_rank: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """Whole parameters by name, in the precision of the master weights.  A collective call of all ranks.

    Args:
        engine: whose model it is.
        names: qualified names in the model, or None for all of this rank's.
        modifier_rank: the data-parallel rank whose edits of the tensors become the parameters' new values on every rank;
            None only reads.

    Raises:
        KeyError: a name is no parameter, with those that are similar.
        ValueError: `modifier_rank` is no data-parallel rank.

    Under tensor parallelism a tensor is whole as this rank's module has it: its part of a split parameter.  Of what every
    tensor-parallel rank holds, and of a weight that stages tie, the edit on the first of them counts.  Copies of a tied
    weight on this rank are one tensor under several names.
    """
    model = engine.sharded_model
    dp = model.state.dp
    if modifier_rank is not None and not 0 <= modifier_rank < dp.size:
        raise ValueError(f"modifier_rank={modifier_rank} must be one of the {dp.size} data-parallel ranks")
    asked = [names] if isinstance(names, str) else names
    found = dict(_find(model, _aliases(engine), asked))
    elsewhere = [name for name, (bucket, _) in found.items() if bucket.layout.tied and bucket.layout.tie in model.ties]
    if modifier_rank is not None and names is not None and elsewhere:
        raise ValueError(f"{elsewhere[0]} has a copy on another stage; edit it with names=None, on all ranks")
    flats: dict[str, Tensor] = {}
    whole = {}
    for name, (bucket, index) in found.items():
        slot, key = bucket.layout.slots[index], _key(bucket)
        if key not in flats:
            flats[key] = _whole(bucket)
        whole[name] = flats[key][slot.start : slot.stop].view(slot.info.shape)
    yield whole
    if modifier_rank is None:
        return
    copies: dict[str, list[Bucket]] = {}
    for bucket in model.parameters.buckets:
        copies.setdefault(_key(bucket), []).append(bucket)
    # Holders of tied parameters meet them in different orders of their own; names are one order for all.
    for key in sorted(flats, key=lambda key: copies[key][0].layout.tie if copies[key][0].layout.tied else ""):
        flat, bucket = flats[key], copies[key][0]
        broadcast(flat, dp, modifier_rank).wait()
        for is_whole, run in bucket.layout.runs(lambda info: info.spec.split is None):
            if is_whole:  # every rank of tp holds a copy
                broadcast(flat[run.start : run.stop], model.state.tp).wait()
        if bucket.layout.tied and bucket.layout.tie in model.ties:
            broadcast(flat, model.ties[bucket.layout.tie]).wait()
        for one in copies[key]:
            model.parameters.overwrite(one, flat)
    model.parameters.all_gather_weights()


def _aliases(engine: HasModel) -> dict[str, str]:
    """Every name of a parameter in the module, a tied one's others too, with the name it is kept under."""
    module, kept = getattr(engine, "module", None), engine.sharded_model.names
    if module is None:
        return {}
    real = {
        name: one.stands_for if isinstance(one, UngatheredParameter) else one
        for name, one in module.named_parameters(remove_duplicate=False)
    }
    return {name: kept[id(one)] for name, one in real.items() if id(one) in kept}


def _find(
    model: ShardedModel, aliases: dict[str, str], names: Iterable[str] | None
) -> Iterator[tuple[str, tuple[Bucket, int]]]:
    home = {
        slot.info.name: (bucket, index)
        for bucket in model.parameters.buckets
        for index, slot in enumerate(bucket.layout.slots)
    }
    home |= {alias: home[name] for alias, name in aliases.items() if names is not None}
    for name in list(home) if names is None else names:
        if name not in home:
            close = get_close_matches(name, home, n=3, cutoff=0.4)
            raise KeyError(
                f"{name} is no parameter of this rank's model" + f"; near it are {', '.join(close)}" * bool(close)
            )
        yield name, home[name]


def _key(bucket: Bucket) -> str:
    """What this rank's copies of a tied weight have in common; any other bucket's own name."""
    return f"tied {bucket.layout.tie}" if bucket.layout.tied else bucket.layout.name


def _whole(bucket: Bucket) -> Tensor:
    """fp32 [padded]: every rank's part of the master weights."""
    policy = bucket.policy
    flat = torch.zeros(bucket.layout.padded_numel, device=policy.device)
    mine = flat[bucket.owned.start : bucket.owned.stop]
    mine.copy_(bucket.read(bucket.master, bucket.owned))
    if bucket.owned != bucket.layout.whole:
        all_gather(flat, mine, policy.shard).wait()
    return flat
