"""The `[activations]` section of a run file, and the policy of each layer that follows from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megazero.registry import closest
from megazero.settings import ActsWhere, CountOrZero, Section, Spelling

#: What of a layer is recomputed.
#:
#: norms        the outputs of both norms                   mlp       norm and MLP, up to the down projection
#: activation   the product before the down projection      block     all but the down projection
#: attention    norm and attention, up to the projection
#: residual     the residual stream after attention: its output projection, the sum, and the norm that follows it
Region = Literal["norms", "activation", "residual", "attention", "mlp", "block"]

REGIONS: tuple[Region, ...] = get_args(Region)
#: Regions whose inputs `partition` does not shard: tp splits them already, or other operations save them, too.
UNCUT: frozenset[Region] = frozenset({"activation", "residual"})
_TAKES = '"none", "selective", "full" or a list of norms, activation, residual, attention, mlp, block'
PRESETS: Mapping[str, tuple[Region, ...]] = MappingProxyType(
    {"none": (), "selective": ("norms", "activation"), "full": ("block",)}
)


def _recompute(value: object) -> object:
    """Take a preset, or a list of regions."""
    if isinstance(value, tuple) or (isinstance(value, str) and value in PRESETS):
        return value
    if not isinstance(value, list):  # the name in a log line, or a list without quotes, is a list of regions
        words = [word.strip() for word in re.split(r"[+,]", value.strip("[] "))] if isinstance(value, str) else []
        raise PydanticCustomError("recompute", f"be {_TAKES}", {"choices": [*PRESETS], "listed": words})
    if wrong := [word for word in value if word not in REGIONS]:
        presets = [word for word in wrong if isinstance(word, str) and word in PRESETS]
        given = {"regions": ", ".join(REGIONS), "text": "".join(f"; {word} is a preset" for word in presets)}
        listed = (
            presets[0] if presets == value else [*dict.fromkeys(near for word in value for near in _regions_near(word))]
        )
        raise PydanticCustomError(
            "regions", "list regions of a layer, which are {regions}{text}", given | {"listed": listed}
        )
    if len(set(value)) < len(value):
        raise PydanticCustomError("regions", "name each region once", {"listed": [*dict.fromkeys(value)]})
    return tuple(value)


def _regions_near(word: object) -> Sequence[str]:
    """The regions that a word in a list was meant for: those of a preset, or the most similar one."""
    if not isinstance(word, str):
        return ()
    return (word,) if word in REGIONS else PRESETS.get(word) or closest(word, REGIONS)


def _layers(value: object) -> object:
    """Take "all", a number of layers, or a list of layers."""
    listed = tuple(value) if isinstance(value, list | tuple) else ()
    numbers = listed if value == listed or isinstance(value, list) else (value,)
    if value != "all" and not (numbers and all(type(number) is int and number >= 0 for number in numbers)):
        raise PydanticCustomError("layers", 'be "all", a number of layers from 0 or a list of layers such as [0, 1, 5]')
    return listed if isinstance(value, list) else value


Recompute = Annotated[
    Literal["none", "selective", "full"] | tuple[Region, ...], BeforeValidator(_recompute), Spelling(_TAKES)
]
Layers = Annotated[
    Literal["all"] | int | tuple[int, ...],
    BeforeValidator(_layers),
    Spelling('"all", a number of layers or a list of layers'),
]


def _where(test: Callable[[ActivationsConfig], bool], keys: str, why: str) -> ActsWhere:
    """A key acts where [activations] passes a test, for all pipeline ranks or for one."""

    def values(run: Any) -> tuple[object, ...]:
        own = run.activations
        passes = any(test(own.of_stage(rank)) for rank in (-1, *(table.stage for table in own.stages)))
        return (own.recompute, own.offload, own.stages) if passes else ()

    return ActsWhere(f"{keys} activations.stages", values, why, is_noted=True)


_RECOMPUTES = _where(lambda own: bool(own.regions), "activations.recompute", "nothing is recomputed")
_CUTS = _where(
    lambda own: bool({*own.regions} - {"activation"}),
    "activations.recompute",
    "no norm, MLP, attention or block is recomputed",
)
_ATTENDS = _where(
    lambda own: bool({*own.regions} & {"attention", "block"}), "activations.recompute", "attention is not recomputed"
)
_OFFLOADS = _where(lambda own: own.offload == "host", "activations.offload", "nothing is offloaded")


def _offload_where_some_stay(run: Any) -> tuple[object, ...]:
    """The value of activations.offload, if some pipeline rank does not offload."""
    own = run.activations
    stay = any(own.of_stage(rank).offload == "none" for rank in (-1, *(table.stage for table in own.stages)))
    return (own.offload,) if stay else ()


_STAYS = ActsWhere(
    "activations.offload",
    _offload_where_some_stay,
    "a pipeline rank that offloads has the arena on the host alone",
    is_noted=True,
)
_WHOLE = ActsWhere("parallel.sequence_parallel", (False,), "sequence parallelism splits it already", is_noted=True)
_OVER_TP = ActsWhere("parallel.tp", (), "one rank saves everything", above=1)


class StageActivations(Section):
    """Other choices for one pipeline rank. An unset key has its value in [activations]."""

    #: The pipeline rank, from 0: the first ranks hold the activations of most micro-batches.
    stage: CountOrZero
    #: As in [activations].
    recompute: Recompute | None = None
    #: As in [activations].
    keep_attention: bool | None = None
    #: As in [activations].
    layers: Layers | None = None
    #: As in [activations].
    offload: Literal["none", "host"] | None = None
    #: As in [activations].
    offload_layers: Layers | None = None


class ActivationsConfig(Section):
    """What the forward saves for the backward. No choice changes the results of the run. See docs/activations.md."""

    #: What the backward computes again: "none", "selective" (norms and activation), "full" (block), or a list of regions.
    recompute: Recompute = "none"
    #: Save attention's output and log-sum-exp where attention or block is recomputed, so that its kernel runs once.
    keep_attention: Annotated[bool, _ATTENDS] = False
    #: Which layers are recomputed: "all", how many of the first on each pipeline rank, or a list of layers from 0.
    layers: Annotated[Layers, _RECOMPUTES] = "all"
    #: Each tensor-parallel rank saves only its shard of the inputs of recomputed regions; the backward gathers them.
    partition: Annotated[bool, _OVER_TP, _WHOLE, _CUTS] = False
    #: Where saved tensors are stored until the backward: on the device, or in page-locked memory of the host.
    offload: Literal["none", "host"] = "none"
    #: Which layers are offloaded, as for `layers`.
    offload_layers: Annotated[Layers, _OFFLOADS] = "all"
    #: Saved tensors that stay on the device share one arena, allocated once, with the buffers of gradients in transit.
    contiguous: Annotated[bool, _STAYS] = False
    #: Other choices for some pipeline ranks: { stage, recompute, keep_attention, layers, offload, offload_layers }.
    stages: Annotated[tuple[StageActivations, ...], Field(strict=False)] = ()

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions to recompute, in the order of the run file."""
        return PRESETS[self.recompute] if isinstance(self.recompute, str) else self.recompute

    def of_stage(self, stage: int) -> ActivationsConfig:
        """Return the section with the choices of a pipeline rank filled in."""
        own = next((table for table in self.stages if table.stage == stage), None)
        written = {} if own is None else own.model_dump(exclude_none=True, exclude={"stage"})
        return self.model_copy(update=written)


@dataclass(frozen=True)
class LayerPolicy:
    """What a layer saves for its backward, where it saves it, and whether it multiplies in fp8.

    Args:
        recompute: the regions to recompute; a region within another one is not listed.
        keep_attention: save attention's output and log-sum-exp.
        partition: shard the saved inputs of regions over tp.
        offload: move saved tensors to the host.
        contiguous: copy saved tensors into one arena of the device's memory.
        fp8: how the factors of products are scaled; None for products that are not in fp8.
    """

    recompute: frozenset[Region] = frozenset()
    keep_attention: bool = False
    partition: bool = False
    offload: bool = False
    contiguous: bool = False
    fp8: Literal["rowwise", "blockwise"] | None = None

    @property
    def moves(self) -> bool:
        """Whether saved tensors are copied, to the host or into an arena."""
        return self.offload or self.contiguous

    @property
    def name(self) -> str:
        """A description for log lines: `norms+activation`, `block but attention, cut over tp, on the host`."""
        regions = "+".join(region for region in REGIONS if region in self.recompute) or "none"
        words = [regions + (" but attention" if self.keep_attention else "")]
        words += ["cut over tp"] if self.partition else []
        words += ["on the host"] if self.offload else ["in one arena"] if self.contiguous else []
        words += [f"products in {self.fp8} fp8"] if self.fp8 else []
        return ", ".join(words)


def layer_policies(
    activations: ActivationsConfig,
    layers: Sequence[int],
    stage: int,
    *,
    cuts: bool = True,
    fp8: Mapping[int, Literal["rowwise", "blockwise"]] = MappingProxyType({}),
) -> dict[int, LayerPolicy]:
    """Return the policy of each layer of a pipeline rank.

    Args:
        activations: the section of the run.
        layers: the layers of all chunks of the rank, as indices in the whole model.
        stage: the pipeline rank.
        cuts: whether `partition` has an effect: tp is above 1, and sequence parallelism has not sharded the tensors.
        fp8: how the layers that multiply in fp8 are scaled, by layer; see `LayerPolicy`.
    """
    own = activations.of_stage(stage)
    regions = frozenset(own.regions)
    recomputed, offloaded = _chosen(own.layers, layers), _chosen(own.offload_layers, layers)
    policies = {}
    for layer in layers:
        here = regions if layer in recomputed else frozenset[Region]()
        policies[layer] = LayerPolicy(
            here,
            keep_attention=own.keep_attention and bool(here & {"attention", "block"}),
            partition=own.partition and cuts and bool(here - UNCUT),
            offload=own.offload == "host" and layer in offloaded,
            contiguous=own.offload == "none" and own.contiguous,
            fp8=fp8.get(layer),
        )
    return policies


def _chosen(choice: str | int | tuple[int, ...], layers: Sequence[int]) -> set[int]:
    if isinstance(choice, int):
        return set(sorted(layers)[:choice])
    return set(layers) if isinstance(choice, str) else set(choice)
