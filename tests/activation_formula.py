"""What a stage keeps of a micro-batch from its forward to its backward, in bytes: the formula.

    Llama, tp 1, 16 bits, for each token of a layer: h hidden, k width of the key/value heads, f inner width, a heads

    x 2h | 1/rms 4 | norm 2h | q 2h, k v 4k | out 2h | lse 4a || x 2h | 1/rms 4 | norm 2h | gate, up 4f | product 2f
    [------------------------- attention -------------------]    [---------------------- mlp -----------------------]
    together 12h + 4k + 6f + 4a + 8;  a policy leaves out what it computes again

Heads and inner width divide by tp; what lies between the tensor-parallel regions divides by it under sequence parallelism
(Korthikanti et al. 2022, section 4).  Context parallelism divides the tokens, and so all of it; under Ulysses the output is
kept before and after its exchange, and there are at least as many key heads as ranks.  These are the tensors that our
layers save where they run without torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from megazero.config import ResolvedRun, RunConfig
from megazero.engine.outline import stages_of
from megazero.layers.attention import Attention, RotaryEmbedding
from megazero.layers.attention_kernels import SlidingWindow
from megazero.layers.counter_rng import Dropout
from megazero.layers.heads import HeadNorm, WidthNorm
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.norm import RMSNorm
from megazero.models.activation_config import LayerPolicy, layer_policies
from megazero.models.blocks import PostNormBlock
from megazero.models.gpt import Block, Embedding, GPTStage, Head
from megazero.models.stages import StageLayout, by_rank, cut
from megazero.plan.unit_trace import EMBEDDING, HEAD
from megazero.schedules.action import Action, Op, Schedule
from megazero.zero.sharding import DTYPES

_FP32, _INT64, _BOOL = 4, 8, 1
ATTENDED = "attention's output", "log-sum-exp"
"""What `keep_attention` keeps."""


@dataclass(frozen=True)
class MicroBatchSize:
    """Sizes of one micro-batch on a rank, in tokens.

    Args:
        samples, seq_len: of the whole micro-batch; under context parallelism a sample's tokens of this rank.
        itemsize: bytes of an element.
        tp: ranks of the tensor-parallel axis.
        sequence_parallel: norms, residual stream and dropout are cut over them.
        on_cuda: attention's kernels there want as many keys as queries in fp32; in 16 bits they take a window.
        has_shards: samples are cut over ranks or hold documents, so that attention is a `ContextAttention`.
        ulysses: ranks that exchange heads for tokens.
    """

    samples: int
    seq_len: int
    itemsize: int
    tp: int = 1
    sequence_parallel: bool = False
    on_cuda: bool = False
    has_shards: bool = False
    ulysses: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of the whole micro-batch, or of the rank's part of it."""
        return self.samples * self.seq_len

    @property
    def own_tokens(self) -> int:
        """Tokens that a rank holds outside the tensor-parallel regions."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


@dataclass(frozen=True)
class _Saved:
    """A tensor that a block's forward saves: its name and bytes.

    It is not kept where one of the parts named in `unless` is recomputed.  Recomputing a part named in `starts` reads it,
    so `partition` may cut it.
    """

    what: str
    size: int
    unless: str
    starts: str = ""


def block_bytes(block: Block, policy: LayerPolicy, size: MicroBatchSize) -> dict[str, int]:
    """What a layer keeps of one micro-batch, by tensor.

    Args:
        block: as a rank has it, on any device: only its sizes are read.
        policy: of the layer.
        size: of the micro-batch.
    """
    parts = policy.recompute
    cut = size.tp if policy.partition and not size.sequence_parallel else 1
    kept = {}
    for one in _saved_by(block, size):
        if not parts & {*one.unless.split()} or (policy.keep_attention and one.what in ATTENDED):
            divides = one.size // size.itemsize % cut == 0  # what does not stays whole
            kept[one.what] = one.size // (cut if divides and parts & {*one.starts.split()} else 1)
    return {what: count for what, count in kept.items() if count}


def _saved_by(block: Block, size: MicroBatchSize) -> Iterator[_Saved]:
    """Every tensor that a block saves where nothing is recomputed, in the order of the forward."""
    hidden, inner = block.mlp.down.weight.shape
    stream, whole = size.own_tokens * hidden * size.itemsize, size.tokens * size.itemsize
    norms = [norm_bytes(norm, size) for norm in (block.attention_norm, block.mlp_norm)]
    residuals = block.attention_residual, block.mlp_residual
    masks = [size.own_tokens * hidden * (each.dropout is not None) for each in residuals]
    heads, output, lse, joined = _attention_bytes(block.attention, size)
    sums = block.mlp.up.weight.shape[0]
    after = isinstance(block, PostNormBlock)

    yield _Saved("input", stream, "", "block attention" + ("" if after else " norms"))
    if not after:
        yield _Saved("1 / rms before attention", norms[0], "norms attention block")
        yield _Saved("normed input of attention", stream, "norms attention block")
    yield _Saved("queries, keys, values", heads, "attention block")
    yield _Saved(ATTENDED[0], output, "attention block")
    yield _Saved(ATTENDED[1], lse, "attention block")
    yield _Saved("output that the projection reads", joined, "attention block")
    if after:
        yield _Saved("result of attention", stream, "residual block", "norms")
        yield _Saved("1 / rms after attention", norms[0], "norms residual block")
    yield _Saved("dropout mask of attention", masks[0], "residual block" + ("" if after else " norms mlp"))
    yield _Saved("input of the MLP", stream, "residual block", "mlp" + ("" if after else " norms"))
    if not after:
        yield _Saved("1 / rms before the MLP", norms[1], "norms residual mlp block")
        yield _Saved("normed input of the MLP", stream, "norms residual mlp block")
    yield _Saved("input of the activation", whole * sums, "mlp block")
    yield _Saved("product of the activation", whole * inner, "activation mlp block")
    if after:
        yield _Saved("result of the MLP", stream, "block", "norms")
        yield _Saved("1 / rms after the MLP", norms[1], "norms block")
    yield _Saved("dropout mask of the MLP", masks[1], "block")


def norm_bytes(norm: nn.Module, size: MicroBatchSize) -> int:
    """What a norm keeps beside its input: 1 / rms in fp32; mean and 1 / std, on the CPU as wide as its input."""
    numbers = _FP32 if isinstance(norm, RMSNorm) else 2 * (_FP32 if size.on_cuda else size.itemsize)
    return size.own_tokens * numbers


def window_of(attention: Attention) -> SlidingWindow | None:
    """The window that attention sees through; None where it sees all positions up to its own."""
    kernel = attention.core.kernel
    return kernel if isinstance(kernel, SlidingWindow) else None


def _attention_bytes(attention: Attention, size: MicroBatchSize) -> tuple[int, int, int, int]:
    """Bytes of four tensors: q, k and v with what their norm keeps; the output; the log-sum-exp; the output as the
    projection reads it, 0 where that is the same tensor.  With several windows or with Ulysses it is another one."""
    core, heads = attention.core, attention.core.heads
    q, k, shares = heads.queries * heads.size, heads.keys * heads.size, heads.sharing > 1
    by_width, by_head = isinstance(core.width_norm, WidthNorm), isinstance(core.head_norm, HeadNorm)
    in_kernel = size.has_shards or (size.on_cuda and size.itemsize < _FP32)
    window, tokens = None if in_kernel else window_of(attention), size.tokens
    exchanges = size.ulysses > 1
    # The projection's result q | k | v is one tensor: who keeps a view of it keeps all.
    keeps_all = by_width or (not shares and by_head)
    attends_to_view = not core.copies_v and window is None and not exchanges
    of_norm = (q + 2 * heads.v_features) * (keeps_all or attends_to_view)
    of_norm += (q + k) * (shares and by_head)
    numbers = heads.queries + heads.keys if by_head else 2 * by_width
    per_token = of_norm * size.itemsize + numbers * _FP32
    output, lse = tokens * q * size.itemsize, tokens * heads.queries * _FP32
    if exchanges:  # a share of the heads for more of the tokens; key heads fewer than ranks are replicated
        read = q + 2 * max(k, size.ulysses * heads.size)
        return tokens * (per_token + read * size.itemsize), output, lse, output
    repeats = size.on_cuda and k < q and not size.has_shards
    if window is None or size.seq_len <= window.size:
        read = q + k if isinstance(core.rope, RotaryEmbedding) else 0
        read += k if core.copies_v else 0
        if repeats and size.itemsize == _FP32:
            read += 2 * q - (k if core.copies_v else 0)
        return tokens * (per_token + read * size.itemsize), output, lse, 0
    # Blocks of queries that attend to two blocks of keys each, all but the first, which is copied.
    padded = -(-size.seq_len // window.size) * window.size
    rest = padded - window.size
    queries = padded if size.samples == 1 or rest == window.size else rest  # of one sample, or one block, it is a view
    read = window.size * (q + 2 * k) + queries * q + 4 * rest * (q if repeats else k)
    lse = size.samples * padded * heads.queries * _FP32
    samples = size.samples * size.itemsize
    return tokens * per_token + samples * read, samples * padded * q, lse, output


def embedding_bytes(embedding: Embedding, size: MicroBatchSize) -> int:
    """What the embedding keeps of one micro-batch beside its tokens: which rows are its own, and dropout's mask."""
    hidden = embedding.tokens.weight.shape[1]
    own = size.tokens * (_INT64 + _BOOL) if size.tp > 1 else 0
    return own + size.own_tokens * hidden * isinstance(embedding.dropout, Dropout)


def head_bytes(head: Head, size: MicroBatchSize, *, saves_logits: bool) -> int:
    """What the head keeps of one micro-batch: input of the norm and of the logits, five numbers a token, and the logits
    where they are of one chunk and `saves_logits` says so."""
    rows, hidden = head.output.weight.shape
    of_norm = size.own_tokens * hidden * size.itemsize + norm_bytes(head.norm, size)
    numbers = size.tokens * (_INT64 + 2 * _BOOL + 2 * _FP32)
    chunk = max(1, head.output.logits.most_bytes // (rows * size.itemsize))
    logits = size.tokens * rows * size.itemsize if saves_logits and chunk >= size.tokens else 0
    return of_norm + size.tokens * hidden * size.itemsize + numbers + logits


def queued_bytes(stage: nn.Module, size: MicroBatchSize) -> int:
    """What waits for its weight gradients, of one micro-batch of a chunk, where a schedule computes them apart: both
    factors of each layer's product (of a gathered input the rank's own part), and gradients of norms and biases."""
    count = sum(weight.numel() for weight in stage.parameters() if weight.dim() == 1)  # others are added at once
    for module in stage.modules():
        if isinstance(module, ColumnParallelLinear):
            count += size.tokens * module.weight.shape[0] + size.own_tokens * module.weight.shape[1]
        elif isinstance(module, RowParallelLinear):
            count += size.tokens * sum(module.weight.shape)
    return count * size.itemsize


def peak_bytes(actions: Sequence[Action], kept: Sequence[int], queued: Sequence[int], *, splits: bool) -> int:
    """The most that one rank keeps at once while it runs its actions.

    Args:
        actions: of the rank, in order.
        kept: of one micro-batch from its forward to its backward, by chunk.
        queued: from its backward to its weight gradient, by chunk.
        splits: the schedule computes weight gradients apart.
    """
    now = most = 0
    for action in actions:
        chunk = action.chunk
        if action.op is Op.FORWARD:
            now += kept[chunk]
        elif action.op is Op.BACKWARD:
            now += (queued[chunk] if splits else 0) - kept[chunk]
        elif action.op is Op.WEIGHT:
            now -= queued[chunk]
        most = max(most, now)
    return most


@dataclass(frozen=True)
class RankActivations:
    """What one pipeline rank keeps, by the formula.

    Args:
        units: bytes of one micro-batch by "embedding", "layer 3" and "head", by tensor.
        saved: most bytes of saved tensors at once, on the device.
        device: most bytes on the device: `saved`, what waits for weight gradients, and of offloading two layers on their
            way and their chunk's input.
        host: most bytes there. Storages under 64 KiB, which stay on the device, count as moved.
    """

    units: Mapping[str, Mapping[str, int]]
    saved: int
    device: int
    host: int


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
        has_shards=config.has_shards,
        ulysses=config.parallel.ulysses,
    )


def activations_of_ranks(run: ResolvedRun, schedule: Schedule, *, on_cuda: bool) -> list[RankActivations]:
    """What each pipeline rank keeps."""
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
    on_device, on_host, moving = [], [], 0
    for layout, stage in chunks:
        found = dict(_of_stage(stage, layout, policies, size, saves_logits=schedule.waiting_losses <= 1))
        moved = [sum(found[f"layer {layer}"].values()) for layer in layout.layers if policies[layer].offload]
        on_device.append(sum(sum(tensors.values()) for tensors in found.values()) - sum(moved))
        on_host.append(sum(moved))
        received = stage.embedding is None and moved and policies[layout.layers[0]].offload  # held while the chunk runs
        entry = found[f"layer {layout.layers[0]}"].get("input", 0) if received else 0
        moving = max(moving, entry + 2 * max(moved, default=0))
        units |= found
    splits, nothing = schedule.splits_backward, [0] * len(chunks)
    queued = [queued_bytes(stage, size) for _, stage in chunks] if splits else nothing
    peak = partial(peak_bytes, schedule.ranks[rank], splits=splits)
    host = peak(on_host, nothing)
    return RankActivations(units, peak(on_device, nothing), peak(on_device, queued) + min(moving, host), host)


def _of_stage(
    stage: GPTStage,
    layout: StageLayout,
    policies: Mapping[int, LayerPolicy],
    size: MicroBatchSize,
    *,
    saves_logits: bool,
) -> Iterator[tuple[str, dict[str, int]]]:
    if stage.embedding is not None:
        yield EMBEDDING, {"rows and mask": embedding_bytes(stage.embedding, size)}
    for layer, block in zip(layout.layers, stage.blocks, strict=True):
        yield f"layer {layer}", block_bytes(block, policies[layer], size)
    if stage.head is not None:
        yield HEAD, {"norm and logits": head_bytes(stage.head, size, saves_logits=saves_logits)}
