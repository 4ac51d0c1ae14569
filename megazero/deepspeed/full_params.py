"""Whole parameters, to read or to edit, whatever ZeRO has cut them into.

gathered_parameters(engine, names)          fp32 master weights, by name
GatheredParameters(parameters)              DeepSpeed's call: the parameters themselves, in the format of the module
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from megazero.comm.collectives import all_gather
from megazero.deepspeed.meta_init import MetaParameter
from megazero.deepspeed.training_engine import ENGINES, TrainingEngine
from megazero.zero.bucket import Bucket
from megazero.zero.param_proxy import UngatheredParameter


@contextmanager
def gathered_parameters(
    engine: TrainingEngine, names: str | Iterable[str] | None = None, *, modifier_rank: int | None = None
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
    model, parameters = engine.sharded_model, engine.sharded_model.parameters
    dp = model.state.dp
    if modifier_rank is not None and not 0 <= modifier_rank < dp.size:
        raise ValueError(f"modifier_rank={modifier_rank} must be one of the {dp.size} data-parallel ranks")
    found = _find(engine, [names] if isinstance(names, str) else names)
    elsewhere = [name for name, (bucket, _) in found.items() if bucket.layout.tied and bucket.layout.tie in model.ties]
    if modifier_rank is not None and names is not None and elsewhere:
        raise ValueError(f"{elsewhere[0]} has a copy on another stage; edit it with names=None, on all ranks")
    first_of = {bucket: copies[0] for copies in parameters.distinct_buckets() for bucket in copies}
    flats: dict[Bucket, Tensor] = {}  # by the first of this rank's copies
    whole = {}
    for name, (bucket, index) in found.items():
        slot, first = bucket.layout.slots[index], first_of[bucket]
        if first not in flats:
            flats[first] = _whole(bucket)
        whole[name] = flats[first][slot.start : slot.stop].view(slot.info.shape)
    yield whole
    if modifier_rank is None:
        return
    for copies in parameters.distinct_buckets():
        if copies[0] in flats:
            parameters.overwrite(copies, flats[copies[0]], dp, model.state.tp, model.ties, modifier_rank)
    parameters.all_gather_weights()


class GatheredParameters:
    """Within it parameters are whole, and what `modifier_rank` changes in them becomes every rank's.

    A collective call of all ranks.  Only elements that change leave their fp32 master.  A module's own forward does not see
    the changes before the end.  Parameters of no engine are whole anyway; those built under `zero.Init` record changes.

    Args:
        params: a parameter, or several.
        modifier_rank: the data-parallel rank whose changes count; None only reads.
        fwd_module: without effect: a module may read any parameter in its forward.
        enabled: False does nothing.

    Raises:
        ValueError: `modifier_rank` is no data-parallel rank, or is not 0 before `initialize`.
        RuntimeError: a parameter that stage 3 has cut was changed without a `modifier_rank`.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given: list[nn.Parameter] = [params] if isinstance(params, nn.Parameter) else list(params)
        self._given, self._modifier, self._open = given if enabled else [], modifier_rank, ExitStack()
        if modifier_rank and any(isinstance(one, MetaParameter) for one in self._given):
            raise ValueError(
                f"modifier_rank={modifier_rank} before initialize: what rank 0 does to a parameter under zero.Init counts"
            )

    def __enter__(self) -> None:
        for engine in list(ENGINES.values()):
            names = engine.sharded_model.names
            own = {names[id(_real(one))]: one for one in self._given if id(_real(one)) in names}
            if own and (
                self._modifier is not None or any(isinstance(one, UngatheredParameter) for one in own.values())
            ):
                self._open.enter_context(_changing(engine, own, self._modifier))

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


@contextmanager
def _changing(engine: TrainingEngine, parameters: dict[str, nn.Parameter], modifier: int | None) -> Iterator[None]:
    with gathered_parameters(engine, parameters, modifier_rank=modifier) as masters:
        cut = {name: one for name, one in parameters.items() if isinstance(one, UngatheredParameter)}
        before = {name: masters[name].to(one.dtype, copy=True) for name, one in parameters.items()}
        for name, proxy in cut.items():
            proxy.whole = before[name].clone()
        versions = {name: proxy.whole._version for name, proxy in cut.items() if proxy.whole is not None}
        try:
            yield
            with torch.no_grad():
                for name, one in parameters.items():
                    now = one.whole if isinstance(one, UngatheredParameter) and one.whole is not None else one.detach()
                    if modifier is None and name in cut and now._version != versions[name]:
                        raise RuntimeError(f"{name} was changed; say whose change counts with modifier_rank=")
                    torch.where(now == before[name], masters[name], now.float(), out=masters[name])
        finally:
            for proxy in cut.values():
                proxy.whole = None


def _real(parameter: nn.Parameter) -> nn.Parameter:
    return parameter.stands_for if isinstance(parameter, UngatheredParameter) else parameter


def _find(engine: TrainingEngine, names: Iterable[str] | None) -> dict[str, tuple[Bucket, int]]:
    """The bucket of each parameter and its slot there; of a tied parameter by any of its names, if it is asked for."""
    model = engine.sharded_model
    home = {
        slot.info.name: (bucket, index)
        for bucket in model.parameters.buckets
        for index, slot in enumerate(bucket.layout.slots)
    }
    if names is None:
        return home
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if id(_real(parameter)) in model.names:
            home[name] = home[model.names[id(_real(parameter))]]
    found = {}
    for name in names:
        if name not in home:
            close = get_close_matches(name, home, n=3, cutoff=0.4)
            near = f"; near it are {', '.join(close)}" if close else ""
            raise KeyError(f"{name} is no parameter of this rank's model{near}")
        found[name] = home[name]
    return found


def _whole(bucket: Bucket) -> Tensor:
    """fp32 [padded]: every rank's part of the master weights."""
    policy = bucket.policy
    flat = torch.zeros(bucket.layout.padded_numel, device=policy.device)
    mine = flat[bucket.owned.start : bucket.owned.stop]
    mine.copy_(bucket.read(bucket.master, bucket.owned))
    if bucket.owned != bucket.layout.whole:
        all_gather(flat, mine, policy.shard).wait()
    return flat
