"""Whole parameters, to read or to edit, whatever ZeRO has cut them into.

gathered_parameters(engine, names)          fp32 master weights, by name
GatheredParameters(parameters)              DeepSpeed's call: the parameters themselves, in the format of the module
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megazero.comm.collectives import all_gather, all_reduce
from megazero.deepspeed.meta_init import MetaParameter
from megazero.deepspeed.training_engine import ENGINES, TrainingEngine
from megazero.zero.bucket import Bucket
from megazero.zero.param_proxy import UngatheredParameter, real
from megazero.zero.sharded_model import ShardedModel
from megazero.zero.storage import FlatArray


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
    model = engine.sharded_model
    _check_modifier(engine, modifier_rank)
    found = _find(engine, [names] if isinstance(names, str) else names)
    if modifier_rank is not None and names is not None:
        _check_ties(engine, found)
    copies_of = _Places.of(engine).copies
    flats: dict[Bucket, Tensor] = {}  # by the first of this rank's copies
    whole = {}
    for name, (bucket, index) in found.items():
        slot, first = bucket.layout.slots[index], copies_of[bucket][0]
        if first not in flats:
            flats[first] = _whole(bucket, bucket.master, torch.float32)
        whole[name] = flats[first][slot.start : slot.stop].view(slot.info.shape)
    yield whole
    if modifier_rank is not None:
        _overwrite(model, flats, copies_of, modifier_rank)


class GatheredParameters:
    """Within it parameters are whole, and what `modifier_rank` changes in them becomes every rank's.

    A collective call of all ranks.  Only elements that change leave their fp32 master.  A module's own forward does not see
    the changes before the end.  Parameters of no engine are whole anyway; those built under `zero.Init` record changes.
    Within another one it sees the outer one's changes, and its own become every rank's at the end of the outer one.

    Args:
        params: a parameter, or several.
        modifier_rank: the data-parallel rank whose changes count; None only reads.
        fwd_module: without effect: a module may read any parameter in its forward.
        enabled: False does nothing.

    Raises:
        ValueError: `modifier_rank` is no data-parallel rank, or is not 0 before `initialize`, or an outer one has another.
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
        with ExitStack() as opened:
            for engine in list(ENGINES.values()):
                names = engine.sharded_model.names
                own = {names[id(real(one))]: one for one in self._given if id(real(one)) in names}
                if self._modifier is None:
                    own = {name: one for name, one in own.items() if isinstance(one, UngatheredParameter)}
                if own:
                    opened.enter_context(_changing(engine, own, self._modifier))
            self._open = opened.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


@contextmanager
def _changing(engine: TrainingEngine, parameters: dict[str, nn.Parameter], modifier: int | None) -> Iterator[None]:
    """Cut parameters are whole, and changes are every rank's at the end: buckets without changes are not sent again."""
    _check_modifier(engine, modifier)
    modifiers = _Places.of(engine).modifiers
    for name in list(parameters):
        if name in modifiers:  # an outer one makes the changes every rank's
            if modifier not in (None, modifiers[name]):
                raise ValueError(
                    f"{name} is already within GatheredParameters with modifier_rank={modifiers[name]}; give that one "
                    f"modifier_rank={modifier}, too"
                )
            del parameters[name]
    found = _find(engine, parameters)
    if modifier is not None:
        _check_ties(engine, found)
    cut = {name: one for name, one in parameters.items() if isinstance(one, UngatheredParameter)}
    before, flats = {}, dict[Bucket, Tensor]()
    for name, one in parameters.items():
        bucket, index = found[name]
        slot = bucket.layout.slots[index]
        if name in cut and bucket not in flats:
            flats[bucket] = _whole(bucket, bucket.weight_shard, one.dtype)
        values = flats[bucket][slot.start : slot.stop].view(slot.info.shape) if name in cut else one.detach()
        before[name] = values.clone()
    flats.clear()
    for name, proxy in cut.items():
        proxy.whole = before[name].clone()
    modifiers |= dict.fromkeys(parameters, modifier)
    versions = {name: proxy.whole._version for name, proxy in cut.items() if proxy.whole is not None}
    try:
        yield
        now = {
            name: one.whole if isinstance(one, UngatheredParameter) and one.whole is not None else one.detach()
            for name, one in parameters.items()
        }
        if modifier is not None and now:
            _apply(engine, found, before, now, modifier)
        elif changed := [name for name in cut if now[name]._version != versions[name]]:
            raise RuntimeError(f"{changed[0]} was changed; say whose change counts with modifier_rank=")
    finally:
        for proxy in cut.values():
            proxy.whole = None
        for name in parameters:
            del modifiers[name]


@torch.no_grad()
def _apply(
    engine: TrainingEngine,
    found: Mapping[str, tuple[Bucket, int]],
    before: Mapping[str, Tensor],
    now: Mapping[str, Tensor],
    modifier: int,
) -> None:
    """Make the modifier's changes every rank's.  Another rank's own changes are undone, as they are in no master."""
    model = engine.sharded_model
    state, copies_of = model.state, _Places.of(engine).copies
    differs = [not torch.equal(now[name], before[name]) for name in now]
    changed = torch.tensor(differs, dtype=torch.float32, device=state.device)
    for axis in (state.dp, state.tp):  # the ranks that `overwrite` brings together
        all_reduce(changed, axis, "max").wait()
    flats: dict[Bucket, Tensor] = {}
    new = {name: now[name].clone() for name, is_changed in zip(now, changed.tolist(), strict=True) if is_changed}
    for name in new:
        now[name].copy_(before[name])  # of fp32 weights these may be the masters
    for name, values in new.items():
        bucket, index = found[name]
        slot, first = bucket.layout.slots[index], copies_of[bucket][0]
        if first not in flats:
            flats[first] = _whole(bucket, bucket.master, torch.float32)
        master = flats[first][slot.start : slot.stop].view(slot.info.shape)
        torch.where(values == before[name], master, values.float(), out=master)
    if flats:
        _overwrite(model, flats, copies_of, modifier)


def _overwrite(
    model: ShardedModel, flats: Mapping[Bucket, Tensor], copies_of: Mapping[Bucket, list[Bucket]], modifier: int
) -> None:
    """Make whole masters, by the first of the copies of a bucket, every rank's."""
    changed = []
    for first, copies in copies_of.items():
        if first in flats:
            model.parameters.overwrite(copies, flats[first], model.state.dp, model.state.tp, model.ties, modifier)
            changed += copies
    model.parameters.all_gather_weights(changed=changed)


def _check_modifier(engine: TrainingEngine, modifier: int | None) -> None:
    size = engine.sharded_model.state.dp.size
    if modifier is not None and not 0 <= modifier < size:
        raise ValueError(f"modifier_rank={modifier} must be one of the {size} data-parallel ranks")


def _check_ties(engine: TrainingEngine, found: Mapping[str, tuple[Bucket, int]]) -> None:
    for name, (bucket, _) in found.items():
        if bucket.layout.tied and bucket.layout.tie in engine.sharded_model.ties:
            raise ValueError(f"{name} has a copy on another stage; edit it with names=None, on all ranks")


class _Places:
    """Where an engine's parameters are; made once for each engine.

    Attributes:
        home: by name, the bucket and the slot in it.
        copies: by bucket, all copies of it on this rank, in an order that all ranks share.
        modifiers: by name, the `modifier_rank` of the GatheredParameters in which a cut parameter is whole.
    """

    _made: ClassVar[WeakKeyDictionary[TrainingEngine, _Places]] = WeakKeyDictionary()

    def __init__(self, engine: TrainingEngine) -> None:
        parameters = engine.sharded_model.parameters
        self.home = {
            slot.info.name: (bucket, index)
            for bucket in parameters.buckets
            for index, slot in enumerate(bucket.layout.slots)
        }
        self.copies = {bucket: copies for copies in parameters.distinct_buckets() for bucket in copies}
        self.modifiers: dict[str, int | None] = {}

    @classmethod
    def of(cls, engine: TrainingEngine) -> _Places:
        if engine not in cls._made:
            cls._made[engine] = cls(engine)
        return cls._made[engine]


def bucket_of(engine: TrainingEngine, name: str) -> Bucket | None:
    """The bucket of a parameter by its first name; None of what has none."""
    return _Places.of(engine).home.get(name, (None, 0))[0]


def _find(engine: TrainingEngine, names: Iterable[str] | None) -> dict[str, tuple[Bucket, int]]:
    """The bucket of each parameter and its slot there; of a tied parameter by any of its names, if it is asked for."""
    model, home = engine.sharded_model, _Places.of(engine).home
    if names is None:
        return dict(home)
    wanted = list(names)
    if any(name not in home for name in wanted):
        home = dict(home)
        for name, parameter in engine.module.named_parameters(remove_duplicate=False):
            if id(real(parameter)) in model.names:
                home[name] = home[model.names[id(real(parameter))]]
    found = {}
    for name in wanted:
        if name not in home:
            close = get_close_matches(name, home, n=3, cutoff=0.4)
            near = f"; near it are {', '.join(close)}" if close else ""
            raise KeyError(f"{name} is no parameter of this rank's model{near}")
        found[name] = home[name]
    return found


def _whole(bucket: Bucket, array: FlatArray, dtype: torch.dtype) -> Tensor:
    """[padded]: every rank's part of the masters or of the weight shards."""
    policy = bucket.policy
    flat = torch.zeros(bucket.layout.padded_numel, dtype=dtype, device=policy.device)
    mine = flat[bucket.owned.start : bucket.owned.stop]
    mine.copy_(bucket.read(array, bucket.owned))
    if bucket.owned != bucket.layout.interval:
        all_gather(flat, mine, policy.shard).wait()
    return flat
