"""What a rank keeps for its backward passes: by the formula of every pipeline rank, and counted on a rank that runs.

RankActivations     models/activation_bytes.py, for each layer's policy, walked through the rank's actions
SavedMemory         hooks around a step: every tensor that autograd saves, each storage once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megazero.config import ResolvedRun, RunConfig
from megazero.engine import Engine
from megazero.layers.attention import Attention
from megazero.layers.saved_tensors import SavedTensorHooks
from megazero.models.activation_bytes import (
    MicroBatchSize,
    block_bytes,
    embedding_bytes,
    head_bytes,
    peak_bytes,
    products_again,
    queued_bytes,
    window_of,
)
from megazero.models.activation_config import LayerPolicy, layer_policies
from megazero.models.gpt import BuildContext, GPTStage, MicroBatch
from megazero.models.registry import FAMILIES
from megazero.models.stages import StageLayout, cut
from megazero.parallel_state import Axis
from megazero.schedules.action import Schedule
from megazero.schedules.proof import peak_activations
from megazero.schedules.registry import SCHEDULES
from megazero.schedules.table import read_schedule
from megazero.settings import counted
from megazero.zero.bucket import DTYPES

EMBEDDING, HEAD = "embedding", "head"
_NOTHING = {"none": "nothing recomputed", "none, on the host": "all kept on the host"}


@dataclass(frozen=True)
class RankActivations:
    """What one pipeline rank keeps, by the formula.

    Args:
        rank: of the pipeline.
        policies: of each layer, by its index in the model.
        units: bytes of one micro-batch by "embedding", "layer 3" and "head", by tensor.
        micro_batches: most that are kept at once; a chunk is a part of one.
        saved: most bytes of saved tensors at once, on the device.
        device: the same, what waits for weight gradients, and two offloaded layers on their way with their chunk's input;
            host: most bytes there.
            Storages under 64 KiB, which stay on the device, count as moved.
        again: FLOPs that recomputation adds, over those of the rank's own step without it: a pipeline waits for its slowest.
    """

    rank: int
    policies: Mapping[int, LayerPolicy]
    units: Mapping[str, Mapping[str, int]]
    micro_batches: float
    saved: int
    device: int
    host: int
    again: float

    def __str__(self) -> str:
        """`12.0 MiB: norms+activation of 32 layers, 4 micro-batches`."""
        names = sorted(policy.name for policy in self.policies.values())
        layers = ", ".join(
            f"{_NOTHING.get(name, name)} of {counted(len(list(same)), 'layer')}" for name, same in groupby(names)
        )
        host = f" and {size_text(self.host)} on the host" if self.host else ""
        return f"{size_text(self.device)}{host}: {layers or 'no layer'}, {counted(self.micro_batches, 'micro-batch')}"


def size_text(count: float) -> str:
    """In MiB, or in GiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def micro_batch_size(run: ResolvedRun, *, on_cuda: bool) -> MicroBatchSize:
    """Of a run."""
    config = run.config
    itemsize, tp, cp = DTYPES[config.precision.dtype].itemsize, config.parallel.tp, config.parallel.cp
    return MicroBatchSize(
        run.micro_batch_size,
        config.model.seq_len // cp,
        itemsize,
        tp,
        sequence_parallel=config.parallel.sequence_parallel and tp > 1,
        on_cuda=on_cuda,
        by_parts=cp > 1 or config.data.document_mask,
        ulysses=config.parallel.ulysses,
    )


def schedule_of(run: ResolvedRun) -> Schedule:
    """What a run's pipeline does in a step, or a table of the user's own."""
    parallel, micro_batches = run.config.parallel, run.accumulation
    if parallel.schedule_file is not None:
        return read_schedule(Path(parallel.schedule_file), parallel.schedule_placement)
    kind = SCHEDULES[parallel.schedule]
    return kind.build(parallel.pp, micro_batches, kind.chunks or parallel.virtual_stages)


def stages_of(config: RunConfig, count: int = 1, tp: int | None = None) -> list[GPTStage]:
    """So many stages of the model as the first tensor-parallel rank has them, without memory; `tp` is the run's."""
    layouts = cut(config.model, "even" if count == 1 else config.parallel.layout, count)
    device, axis = torch.device("meta"), Axis("tp", tuple(range(tp or config.parallel.tp)))
    cuts, seed = config.parallel.sequence_parallel, config.training.seed
    context = BuildContext(config.model, axis, cuts, seed, device, dtype=DTYPES[config.precision.dtype])
    with device:
        return [GPTStage(context, layout) for layout in layouts]


def activations_of_ranks(run: ResolvedRun, schedule: Schedule, *, on_cuda: bool) -> list[RankActivations]:
    """What each pipeline rank keeps.  Raises: TypeError: a layer has parts of a script's own, which have no formula."""
    layouts = cut(run.config.model, run.config.parallel.layout, len(schedule.placement))
    chunks = list(zip(layouts, stages_of(run.config, len(layouts)), strict=True))
    size, by_rank = micro_batch_size(run, on_cuda=on_cuda), [rank for rank, _ in schedule.placement]
    return [
        _of_rank(run.config, schedule, rank, [one for one, at in zip(chunks, by_rank, strict=True) if at == rank], size)
        for rank in range(schedule.pp)
    ]


def _of_rank(
    config: RunConfig,
    schedule: Schedule,
    rank: int,
    chunks: Sequence[tuple[StageLayout, GPTStage]],
    size: MicroBatchSize,
) -> RankActivations:
    layers = [layer for layout, _ in chunks for layer in layout.layers]
    cuts = size.tp > 1 and not size.sequence_parallel
    policies = layer_policies(config.activations, layers, rank, cuts=cuts)
    units: dict[str, dict[str, int]] = {}
    on_device, on_host, moving, again = [], [], 0, 0.0
    for layout, stage in chunks:
        found = dict(_of_stage(stage, layout, policies, size, keeps_logits=schedule.waiting_losses <= 1))
        moved = [sum(found[f"layer {layer}"].values()) for layer in layout.layers if policies[layer].offload]
        on_device.append(sum(sum(tensors.values()) for tensors in found.values()) - sum(moved))
        on_host.append(sum(moved))
        received = stage.embedding is None and moved and policies[layout.layers[0]].offload  # held while the chunk runs
        entry = found[f"layer {layout.layers[0]}"].get("input", 0) if received else 0
        moving = max(moving, entry + 2 * max(moved, default=0))
        units |= found
        for layer, block in zip(layout.layers, stage.blocks, strict=True):
            again += 2 * size.tp * products_again(block, policies[layer], config.model.mean_reach)
    heads, model = sum(stage.head is not None for _, stage in chunks), config.model
    part = model.model_copy(update={"num_layers": len(policies), "vocab_size": heads * model.vocab_size})
    splits, nothing = schedule.splits_backward, [0] * len(chunks)
    queued = [queued_bytes(stage, size) for _, stage in chunks] if splits else nothing
    peak = partial(peak_bytes, schedule.ranks[rank], splits=splits)
    host = peak(on_host, nothing)
    return RankActivations(
        rank,
        policies,
        units,
        micro_batches=peak_activations(schedule, rank) / schedule.chunks,
        saved=peak(on_device, nothing),
        device=peak(on_device, queued) + min(moving, host),
        host=host,
        again=again / FAMILIES[model.family].flops_per_token(part),
    )


def _of_stage(
    stage: GPTStage,
    layout: StageLayout,
    policies: Mapping[int, LayerPolicy],
    size: MicroBatchSize,
    *,
    keeps_logits: bool,
) -> Iterator[tuple[str, dict[str, int]]]:
    if stage.embedding is not None:
        yield EMBEDDING, {"rows and mask": embedding_bytes(stage.embedding, size)}
    for layer, block in zip(layout.layers, stage.blocks, strict=True):
        yield f"layer {layer}", block_bytes(block, policies[layer], size)
    if stage.head is not None:
        yield HEAD, {"norm and logits": head_bytes(stage.head, size, keeps_logits=keeps_logits)}


def measure_saved(engine: Engine, batches: Sequence[MicroBatch], units: Iterable[str]) -> SavedMemory:
    """Run the forward and backward passes of a step and count what they save.  `units`: the rank's, by name, in order."""
    parts = [unit for stage in engine.chunks if isinstance(stage, GPTStage) for unit in stage.units()]
    known = [
        tensor for batch in batches for tensor in (batch.sample_ids, batch.tokens, batch.labels) if tensor is not None
    ]
    places = [batch.part for batch in batches if batch.part is not None]
    known += [tensor for part in places for tensor in (part.rows, part.positions)]
    known += engine.chunks.parameters()
    for module in engine.chunks.modules():
        if isinstance(module, Attention):
            known += [window.mask] if (window := window_of(module)) is not None else []
            if module.rope is not None:
                known += [table for table in (module.rope.cos, module.rope.sin) if table is not None]
                known += [table for part in places for table in module.rope.tables_of(part)]
    with SavedMemory(known) as memory, memory.watching(dict(zip(units, parts, strict=True))):
        engine.compute_gradients(batches)
    return memory


class SavedMemory(SavedTensorHooks):
    """Counts the bytes of what autograd saves while this is entered, each storage once, until its backward lets go of it.

    Args:
        ignored: what is there anyway: weights, tables, the batch.

    Attributes:
        live, peak: bytes.
        units: bytes that the last pass of each unit added; see `watching`.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        super().__init__()
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._users = Counter[int]()
        self._unit = ""
        self.live = self.peak = 0
        self.units: dict[str, int] = {}

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at in self._ignored:
            return self.beneath.pack(tensor)
        return _Counted(self, at, storage.nbytes(), self.beneath.pack(tensor))

    def unpack(self, saved: Any) -> Tensor:
        return self.beneath.unpack(saved.saved if isinstance(saved, _Counted) else saved)

    def count(self, at: int, size: int, change: int) -> None:
        """One user more or less of the storage at an address."""
        before = self._users[at]
        self._users[at] += change
        if not (before and self._users[at]):
            self.live += change * size
            self.peak = max(self.peak, self.live)
            if change > 0 and self._unit:
                self.units[self._unit] += size

    @contextmanager
    def watching(self, units: Mapping[str, nn.Module]) -> Iterator[None]:
        """A context in which the passes of these modules tell how much each of them adds."""

        def begin(name: str, *_: object) -> None:
            self._unit, self.units[name] = name, 0

        def end(*_: object) -> None:
            self._unit = ""

        with ExitStack() as stack:
            for name, module in units.items():
                stack.enter_context(module.register_forward_pre_hook(partial(begin, name)))
                stack.enter_context(module.register_forward_hook(end))
            yield


class _Counted:
    """What is saved, counted as long as autograd holds it."""

    __slots__ = ("_at", "_meter", "_size", "saved")

    def __init__(self, meter: SavedMemory, at: int, size: int, saved: Any) -> None:
        self._meter, self._at, self._size, self.saved = meter, at, size, saved
        meter.count(at, size, 1)

    def __del__(self) -> None:
        self._meter.count(self._at, self._size, -1)
