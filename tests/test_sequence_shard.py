"""Parts of samples: what does not fit them is refused, and what is kept for them neither outlives the model nor its mode."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isnan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, run_world
from torch import Tensor, nn
from worlds import LLAMA, engine_on, micro_batches, run_of

from megazero.config import ResolvedRun
from megazero.engine import NonFiniteError
from megazero.layers.attention import Attention, RotaryEmbedding
from megazero.layers.attention_kernels import SlidingWindow
from megazero.layers.context_attention import ContextAttention
from megazero.layers.recompute import WHOLE
from megazero.layers.rotary_frequencies import rotary_frequencies
from megazero.layers.sequence_shard import SequenceShard, TokenLayout, sequence_shard
from megazero.layers.vocabulary import IGNORED_LABEL
from megazero.models.build_context import BuildContext
from megazero.models.gpt import Block
from megazero.models.llama.family import LlamaFamily
from megazero.models.registry import FAMILIES
from megazero.parallel_state import Axis
from megazero.training.check import layer_problems

RING = Axis("cp_ring", (0, 1), 0)


def _half(seq: int) -> SequenceShard:
    shard = sequence_shard(None, seq, WHOLE, RING, DEVICE)
    assert shard is not None
    return shard


class _OwnAttention(nn.Module):
    """As people write it."""

    def __init__(self, like: Attention) -> None:
        super().__init__()
        heads = like.core.heads
        self.qkv, self.out, self.sizes = like.qkv, like.out, [heads.queries, heads.keys, heads.keys]

    def forward(self, x: Tensor, _: TokenLayout) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (sum(self.sizes), -1)).permute(1, 2, 0, 3).split(self.sizes, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.permute(2, 0, 1, 3).flatten(2))


class _KnowingAttention(_OwnAttention):
    supports_shards = True


class _OwnFamily(LlamaFamily):
    kind: type[_OwnAttention] = _OwnAttention

    def blocks(self, context: BuildContext, layers: Sequence[int]) -> list[Block]:
        found = super().blocks(context, layers)
        for block in found:
            block.attention = self.kind(block.attention)  # type: ignore[assignment]
        return found


class _KnowingFamily(_OwnFamily):
    kind = _KnowingAttention


class _Holding(_OwnAttention):
    """Has an attention that knows, and attends without it."""

    def __init__(self, like: Attention) -> None:
        super().__init__(like)
        self.like = like


class _OtherForward(Attention):
    """Inherits all but its forward."""

    def __init__(self, like: Attention) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(like.__dict__)

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return super().forward(x, replace(layout, shard=None))


class _OwnKernel:
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def _other_kernel(attention: Attention) -> Attention:
    attention.core.kernel = _OwnKernel()
    return attention


class _HoldingFamily(_OwnFamily):
    kind = _Holding


class _InheritingFamily(_OwnFamily):
    kind = _OtherForward  # type: ignore[assignment]


class _ReplacedFamily(_OwnFamily):
    kind = staticmethod(_other_kernel)  # type: ignore[assignment]


KINDS = {
    "own": _OwnFamily,
    "holding": _HoldingFamily,
    "inheriting": _InheritingFamily,
    "replaced": _ReplacedFamily,
    "knowing": _KnowingFamily,
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    llama = FAMILIES["llama"]
    assert isinstance(llama, LlamaFamily)
    for name, kind in KINDS.items():
        family = object.__new__(kind)
        family.__dict__.update(vars(llama))
        FAMILIES.register(name, family)
    yield
    for name in KINDS:
        FAMILIES._registered.pop(name)


def _run(world: int, parallel: dict[str, Any], documents: bool, **model: Any) -> ResolvedRun:
    training = {"micro_batch_size": 2, "accumulation": 4}
    return run_of(world, model=LLAMA | model, parallel=parallel, data={"document_mask": documents}, training=training)


CUT: dict[str, tuple[int, dict[str, Any], bool]] = {
    "ring 2": (2, {"cp": 2, "cp_method": "ring"}, False),
    "ulysses 2": (2, {"cp": 2, "cp_method": "ulysses"}, False),
    "documents": (1, {}, True),
}


def _without_shard(rank: int, run: ResolvedRun) -> None:
    engine = engine_on(rank, run)
    batches = micro_batches(run, engine.state, 0, "random" if run.config.data.document_mask else "none")
    assert engine.compute_gradients(batches).finite
    with pytest.raises(ValueError, match=r"micro-batch without `shard`"):
        engine.compute_gradients([replace(one, shard=None) for one in batches])
    for wrong in (
        {"labels": batches[0].labels.t().contiguous()},
        {"tokens": batches[0].tokens.t().contiguous(), "labels": batches[0].labels.t().contiguous()},  # [batch, seq]
        {"labels": torch.cat([batches[0].labels] * 2)},  # not cut
        {"labels": batches[0].labels[1:]},
        {"sample_ids": batches[0].sample_ids[:1]},
    ):
        with pytest.raises(ValueError, match=r"of a micro-batch are \[.*must be \[\d+, \d+\], this rank's shard"):
            engine.compute_gradients([replace(one, **wrong) for one in batches])
    seq_len, documents = run.config.model.seq_len, run.config.data.document_mask
    with pytest.raises(ValueError, match=r"given where data\.document_mask = true, and only there"):
        engine.batch_slice.sequence_shard(None if documents else [[seq_len]] * 2, seq_len)


@pytest.mark.parametrize("shape", CUT)
def test_a_micro_batch_without_its_part_is_refused(shape: str) -> None:
    """It had a loss, of tokens that saw those of this rank alone, or those of other documents."""
    world, parallel, documents = CUT[shape]
    run_world(world, _without_shard, _run(world, parallel, documents))


def test_equal_documents_have_equal_numbers_on_every_rank_and_other_documents_have_others() -> None:
    """Ranks compare this number once a step; it is computed with the shard, not again from all documents in each step."""
    given = [[[16], [16]], [[8, 8], [16]], [[16], [8, 8]], [[8, 8], [8, 8]], [[7, 9], [16]], [[9, 7], [16]], [[16]]]
    numbers = []
    for lengths in given:
        axes = [(Axis("u", (0, 1), u), Axis("r", (0, 1), r)) for u in range(2) for r in range(2)]
        shards = [sequence_shard(lengths, 16, *pair, torch.device("cpu")) for pair in axes]
        one_rank = sequence_shard(lengths, 16, Axis("u"), Axis("r"), torch.device("cpu"))
        (number,) = {shard.plan.documents for shard in (*shards, one_rank)}
        numbers.append(number)
    assert len(set(numbers)) == len(given)


def _with_other_documents(rank: int, run: ResolvedRun) -> None:
    """The last rank's second micro-batch has other documents, in the first step of the engine."""
    engine = engine_on(rank, run)
    batches = micro_batches(run, engine.state, 0, "random")
    if rank == engine.state.world.size - 1:
        shard = engine.batch_slice.sequence_shard([[5, 11]] * batches[1].sample_ids.numel(), run.config.model.seq_len)
        batches[1] = replace(batches[1], shard=shard)
    weights = [bucket.master.read(0, bucket.master.numel).clone() for bucket in engine.sharded_model.parameters.buckets]
    for act in (engine.evaluate, lambda given: engine.train_step(given, 1.0)):
        with pytest.raises(ValueError, match="were given different documents"):
            act(batches)
    for before, bucket in zip(weights, engine.sharded_model.parameters.buckets, strict=True):
        assert torch.equal(before, bucket.master.read(0, bucket.master.numel))


@pytest.mark.parametrize(
    "parallel",
    [{"tp": 2}, {"pp": 2}, {"cp": 2, "cp_method": "ring"}, {"cp": 2, "cp_method": "ulysses"}],
    ids=["tp", "pp", "ring", "ulysses"],
)
def test_ranks_that_share_samples_must_have_the_same_documents(parallel: dict[str, Any]) -> None:
    """They trained on attention of the one with labels or losses of the other.  Ranks of dp have documents of their own."""
    run = run_of(4, model=LLAMA, parallel=parallel, data={"document_mask": True}, training={"accumulation": 2})
    run_world(4, _with_other_documents, run)


def _is_refused(rank: int, run: ResolvedRun) -> None:
    with pytest.raises(ValueError, match=r"Block sets `supports_shards = True`"):
        engine_on(rank, run)


@pytest.mark.parametrize("shape", CUT)
def test_an_attention_that_does_not_know_parts_is_refused_where_there_are_any(shape: str) -> None:
    """It attended to the rank's tokens as if these were the sample, without a word."""
    world, parallel, documents = CUT[shape]
    for name in set(KINDS) - {"knowing"}:
        run_world(world, _is_refused, _run(world, parallel, documents, family=name))
    run_world(world, _builds, _run(world, parallel, documents, family="knowing"))


def test_check_tells_of_such_an_attention() -> None:
    """A run file that `megazero check` accepts must not end in the engine."""
    for name, count in [(name, int(name != "knowing")) for name in KINDS]:
        problems = list(layer_problems(_run(1, {}, True, family=name).config))
        assert [(one.key, "supports_shards" in one.rule) for one in problems] == [("model.family", True)] * count


def test_where_samples_are_whole_any_attention_runs() -> None:
    run_world(1, _builds, _run(1, {}, False, family="own"))


def _builds(rank: int, run: ResolvedRun) -> None:
    engine_on(rank, run)


def test_documents_of_another_length_than_the_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.seq_len=16 tokens together: got 11"):
        sequence_shard([[16], [5, 6]], 16, WHOLE, WHOLE, DEVICE)


@pytest.mark.parametrize("shape", [(3, 2, 16, 8), (2, 2, 20, 8)], ids=["more samples", "longer samples"])
def test_attention_refuses_the_part_of_other_samples(shape: tuple[int, ...]) -> None:
    """The result of what the shard does not have was zeros."""
    shard, q = sequence_shard([[5, 11], [16]], 16, WHOLE, WHOLE, DEVICE), torch.randn(shape, device=DEVICE)
    assert shard is not None
    with pytest.raises(ValueError, match=r"`shard` must belong to its samples"):
        ContextAttention((WHOLE, WHOLE), None, torch.float32).attend(q, q, q, shard)


def test_what_was_first_asked_for_in_inference_trains_later() -> None:
    """The shard of whole samples and what is derived from it are made once."""
    rope = RotaryEmbedding(rotary_frequencies(8, 1e4), 48, DEVICE)
    x = torch.randn(1, 2, 24, 8, device=DEVICE, requires_grad=True)
    with torch.inference_mode():
        rope.rotate(x.detach(), _half(48))
    rope.rotate(x, _half(48)).sum().backward()
    weight = torch.randn(48, 4, device=DEVICE, requires_grad=True)
    F.embedding(_half(48).positions, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None


def test_rotary_tables_of_a_part_end_with_the_model() -> None:
    """The shard of whole samples stays, and kept those of every model that was made."""
    rope = RotaryEmbedding(rotary_frequencies(8, 1e4), 40, DEVICE)
    gone = [weakref.ref(table) for table in (*rope.tables_of(_half(40)), rope.cos)]
    assert rope.tables_of(_half(40))[0] is gone[0]()
    del rope
    gc.collect()
    assert not any(one() is not None for one in gone)


def _windows(rank: int, run: ResolvedRun) -> int:
    engine = engine_on(rank, run)
    assert engine.chunks is not None
    gc.collect()
    return sum(isinstance(one, SlidingWindow) for one in gc.get_objects())


def test_a_windows_mask_is_made_only_where_it_is_read() -> None:
    """Of 4096 positions it is 64 MiB in bf16, for each chunk of layers."""
    keys = {"family": "mistral", "sliding_window": 5}
    assert run_world(1, _windows, _run(1, {}, False, **keys)) == [1]
    for world, parallel, documents in CUT.values():
        assert run_world(world, _windows, _run(world, parallel, documents, **keys)) == [0] * world


def test_documents_of_one_sample_are_not_those_of_two() -> None:
    """They held for all samples of the micro-batch, without a word."""
    shard = sequence_shard([[3, 5]], 8, Axis("u"), Axis("r"), DEVICE)
    assert shard is not None
    q = torch.randn(2, 1, 8, 4, device=DEVICE)
    attention = ContextAttention((Axis("u"), Axis("r")), None, torch.float32)
    with pytest.raises(ValueError, match="got 2 samples of 8"):
        attention.attend(q, q, q, shard)
    with pytest.raises(ValueError, match="documents of 1 samples were given for 2"):
        shard.cut(torch.zeros(8, 2, dtype=torch.long))
    assert _half(8).cut(torch.zeros(8, 2, dtype=torch.long)).shape == (4, 2)  # whole samples: of any


def _without_a_counted_token(rank: int, run: ResolvedRun) -> None:
    engine = engine_on(rank, run)
    batches = micro_batches(run, engine.state, 0, "random")
    masked = [
        replace(one, labels=None if one.labels is None else torch.full_like(one.labels, IGNORED_LABEL))
        for one in batches
    ]
    assert engine.train_step(batches, 1e-2).finite
    weights = [bucket.master.read(0, bucket.master.numel) for bucket in engine.sharded_model.parameters.buckets]
    statistics = engine.train_step(masked, 1e-2, raises_non_finite=False)
    assert (statistics.tokens, statistics.finite, statistics.skipped, isnan(statistics.loss)) == (0, False, True, True)
    assert engine.evaluate(masked).tokens == 0
    with pytest.raises(NonFiniteError, match="no token is counted"):
        engine.train_step(masked, 1e-2)
    for before, bucket in zip(weights, engine.sharded_model.parameters.buckets, strict=True):
        assert torch.equal(before, bucket.master.read(0, bucket.master.numel))
    assert engine.train_step(batches, 1e-2).finite


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_step_without_a_counted_token_changes_no_weight_and_a_run_goes_on(dtype: str) -> None:
    run = run_of(2, model=LLAMA, parallel={"cp": 2}, data={"document_mask": True}, precision={"dtype": dtype})
    run_world(2, _without_a_counted_token, run)
