"""What every pipeline rank keeps for its backward passes, by the formula of plan/activation_bytes.py, and its parameters.

Each layer keeps what its policy says; the bytes of all layers are walked through the actions of the rank's schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch

from megazero.config import ResolvedRun, RunConfig
from megazero.engine.outline import stages_of
from megazero.models.activation_config import LayerPolicy, layer_policies
from megazero.models.gpt import GPTStage
from megazero.models.registry import FAMILIES
from megazero.models.stages import StageLayout, by_rank, cut
from megazero.plan.activation_bytes import (
    MicroBatchSize,
    block_bytes,
    embedding_bytes,
    head_bytes,
    peak_bytes,
    products_again,
    queued_bytes,
)
from megazero.schedules.action import ActionKind, Schedule
from megazero.schedules.proof import peak_activations
from megazero.settings import counted
from megazero.zero.bucket import DTYPES

EMBEDDING, HEAD = "embedding", "head"
PASS_NAMES = {ActionKind.FORWARD: "forward", ActionKind.BACKWARD: "backward", ActionKind.WEIGHT: "weight gradients"}


@dataclass(frozen=True)
class RankActivations:
    """What one pipeline rank keeps, by the formula.

    Args:
        rank: of the pipeline.
        policies: of each layer, by its index in the model.
        units: bytes of one micro-batch by "embedding", "layer 3" and "head", by tensor.
        micro_batches: most that are kept at once; a chunk is a part of one.
        saved: most bytes of saved tensors at once, on the device.
        device: most bytes on the device: `saved`, what waits for weight gradients, and of offloading two layers on their
            way and their chunk's input.
        host: most bytes there. Storages under 64 KiB, which stay on the device, count as moved.
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
        """`12.0 MiB, 4 micro-batches; 32 layers: norms+activation recomputed`."""
        names = sorted(policy.name for policy in self.policies.values())
        layers = "".join(f"; {counted(len(list(same)), 'layer')}: {_in_words(name)}" for name, same in groupby(names))
        host = f" and {size_text(self.host)} on the host" if self.host else ""
        return f"{size_text(self.device)}{host}, {counted(self.micro_batches, 'micro-batch')}{layers or '; no layer'}"


def _in_words(name: str) -> str:
    """Of a policy: `nothing recomputed, on the host`."""
    regions, comma, rest = name.partition(", ")
    return f"{'nothing' if regions == 'none' else regions} recomputed{comma}{rest}"


def size_text(count: float) -> str:
    """In MiB, or in GiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def micro_batch_size(run: ResolvedRun, *, on_cuda: bool) -> MicroBatchSize:
    """Size of one micro-batch of a run."""
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


def message_bytes(run: ResolvedRun, *, on_cuda: bool) -> int:
    """Of what a pipeline rank sends to another of one micro-batch: the hidden states of a rank's own tokens."""
    size = micro_batch_size(run, on_cuda=on_cuda)
    return size.own_tokens * run.config.model.hidden_size * size.itemsize


def activations_of_ranks(run: ResolvedRun, schedule: Schedule, *, on_cuda: bool) -> list[RankActivations]:
    """What each pipeline rank keeps.  Raises: TypeError: a layer has parts of a script's own, which have no formula."""
    layouts = cut(run.config.model, run.config.parallel.layout, len(schedule.placement))
    chunks = list(zip(layouts, stages_of(run.config, len(layouts)), strict=True))
    size = micro_batch_size(run, on_cuda=on_cuda)
    own = by_rank(chunks, schedule.placement)
    return [_of_rank(run.config, schedule, rank, own[rank], size) for rank in range(schedule.pp)]


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
        again=again
        and again / FAMILIES[model.family].flops_per_token(part),  # a rank with the embedding alone has none
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


def start_line(run: ResolvedRun, schedule: Schedule, device: torch.device) -> str:
    """What the pipeline rank that keeps most keeps for its backward passes."""
    try:
        ranks = activations_of_ranks(run, schedule, on_cuda=device.type == "cuda")
    except TypeError as error:  # layers of a script's own
        return f"activations: {error}"
    fullest = max(ranks, key=lambda one: one.device)
    return f"activations on {f'pipeline rank {fullest.rank}' if len(ranks) > 1 else 'a rank'}, at most {fullest}"
