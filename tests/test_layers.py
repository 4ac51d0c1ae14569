"""Layers cut over TP give what the whole layer gives, in values and in gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_world
from saved_memory import Alive
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megazero.layers import capped_attention, vocabulary
from megazero.layers.attention_kernels import SlidingWindow, attention
from megazero.layers.capped_attention import CappedAttention
from megazero.layers.context_attention import KernelWindow
from megazero.layers.counter_rng import Dropout, dropout_key
from megazero.layers.linear import BY_AUTOGRAD, ColumnParallelLinear, RowParallelLinear, WeightGradQueue, add_product
from megazero.layers.mlp import GELU_TANH, SILU, gated
from megazero.layers.norm import rms_norm
from megazero.layers.sequence_shard import SequenceShard, TokenLayout, sequence_shard
from megazero.layers.spec import Initializer, LinearSpec, NamedRows, ParamSpec, rows_spec
from megazero.layers.tp_overlap import Overlap, Piecewise, Symmetric, hide_exchanges, overlap_of
from megazero.layers.vocabulary import (
    IGNORED_LABEL,
    Logits,
    VocabParallelEmbedding,
    VocabParallelHead,
    grad_logits_of,
    statistics_of,
    token_chunks,
)
from megazero.parallel_state import Axis, ParallelState, RankGrid
from megazero.parallel_state.state import Group

SEQ, BATCH, HIDDEN, OUT = 8, 2, 6, 12


def _fill(module: torch.nn.Module, tp: Axis) -> None:
    for name, spec in module.specs.items():
        parameter = getattr(module, name)
        flat = torch.empty(parameter.numel())
        ParamSpec.init_weights(spec, flat, 0, tp.index, tp.size, seed=3)
        parameter.data = flat.view(parameter.shape) if name == "weight" else torch.ones(parameter.shape)


def _given(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class _InGrad:
    """Gradients add up in `weight.grad`."""

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def add_products(self, weight: Tensor, factors: Iterable[tuple[Tensor, Tensor]]) -> None:
        for a, b in factors:
            is_first = weight.grad is None
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
            add_product(weight.grad, a, b, is_first=is_first)


OVERLAPS: dict[str, Overlap] = {"pieces": Piecewise(3), "symmetric": Symmetric()}
# torch's operators have no implementation for a CPU, but one over its collectives, by which torch tests them.
for fused in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
    torch.library.impl(f"symm_mem::{fused}", "CPU")(getattr(_symmetric_memory, f"_{fused}_fallback"))


def _part(x: Tensor, tp: Axis, cut: bool, dim: int = 0) -> Tensor:
    return x.chunk(tp.size, dim)[tp.index].clone() if cut else x.clone()


def _linear_pair(rank: int, world: int, exchange: str, wgrad_queue: bool) -> dict[str, Any]:
    """column -> gelu -> row, forward and backward; whole tensors of what each rank saw."""
    tp = ParallelState(RankGrid(tp=world), rank).tp
    waiting, sequence_parallel = WeightGradQueue() if wgrad_queue else BY_AUTOGRAD, exchange != "replicated"
    init = Initializer("normal", 0.3)
    into = LinearSpec((NamedRows("column", OUT),), HIDDEN, (NamedRows("column.bias", OUT),), init)
    onto = LinearSpec((NamedRows("row", HIDDEN),), OUT, (NamedRows("row.bias", HIDDEN),), init)
    column = ColumnParallelLinear(into, tp, sequence_parallel=sequence_parallel, wgrad_queue=waiting)
    row = RowParallelLinear(onto, tp, sequence_parallel=sequence_parallel, wgrad_queue=waiting)
    for module in (column, row):
        _fill(module, tp)
        if exchange in OVERLAPS:
            hide_exchanges(module, OVERLAPS[exchange])
    x = _part(_given((SEQ, BATCH, HIDDEN)), tp, sequence_parallel).requires_grad_()
    if wgrad_queue:
        waiting.accumulator, waiting.defers = _InGrad(), True
        waiting.begin_pass()
    y = row(F.gelu(column(x)))
    y.backward(_part(_given((SEQ, BATCH, HIDDEN)).cos(), tp, sequence_parallel))
    if wgrad_queue:
        assert column.weight.grad is None
        assert row.weight.grad is None
        waiting.run_oldest()
    grads = {"x": x.grad, "column": column.weight.grad, "row": row.weight.grad, "bias": column.bias.grad}
    sent = {operation: count for (_, operation), count in tp.traffic.sent_bytes.items() if count}
    return {"y": y.detach().numpy(), "sent": sent, **{name: grad.numpy() for name, grad in grads.items()}}


@pytest.mark.parametrize("wgrad_queue", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("exchange", ["replicated", "sequence", *OVERLAPS])
@pytest.mark.parametrize("world", [1, 2])
def test_a_column_and_a_row_layer_equal_plain_linear_layers(world: int, exchange: str, wgrad_queue: bool) -> None:
    results = run_world(world, _linear_pair, world, exchange, wgrad_queue)
    sequence_parallel = exchange != "replicated"
    weights = {}
    for name, rows, columns in (("column", OUT, HIDDEN), ("row", HIDDEN, OUT)):
        flat = torch.empty(rows * columns)
        rows_spec((NamedRows(name, rows),), columns, init=Initializer("normal", 0.3)).init_weights(
            flat, 0, 0, 1, seed=3
        )
        weights[name] = flat.view(rows, columns).requires_grad_()
    x = _given((SEQ, BATCH, HIDDEN)).requires_grad_()
    bias = torch.ones(OUT, requires_grad=True)
    y = F.gelu(x @ weights["column"].t() + bias) @ weights["row"].t() + 1
    y.backward(_given((SEQ, BATCH, HIDDEN)).cos())

    def joined(key: str, dim: int, cut: bool) -> Tensor:
        parts = [torch.tensor(result[key]) for result in results]
        return torch.cat(parts, dim) if cut else parts[0]

    torch.testing.assert_close(joined("y", 0, sequence_parallel), y.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined("x", 0, sequence_parallel), x.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined("column", 0, True), weights["column"].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined("row", 1, True), weights["row"].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined("bias", 0, True), bias.grad, rtol=1e-5, atol=1e-5)
    if world > 1 and sequence_parallel:
        half = 4 * SEQ * BATCH * HIDDEN // 2  # an exchange's bytes: three gathers, of which two are the backward's
        assert results[0]["sent"] == {"all_gather": 3 * half, "reduce_scatter": 2 * half}


def test_symmetric_memory_is_for_the_gpus_of_one_host_and_pieces_are_for_all_others() -> None:
    def on(device: str, local_world_size: int) -> Overlap:
        group = Group(None, torch.device("cpu"), 1, False, local_world_size, ())
        return overlap_of("symmetric", Axis("tp", (2, 3), group=group), torch.device(device))

    assert isinstance(on("cuda", 4), Symmetric)
    assert isinstance(on("cuda", 1), Piecewise)
    assert isinstance(on("cpu", 4), Piecewise)


def _untied_head(
    vocab: int, chunk: int, tp: Axis, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32
) -> VocabParallelHead:
    """A head that takes `chunk` tokens at a time."""
    rows = -(-vocab // tp.size)
    spec = rows_spec((NamedRows("head", vocab),), hidden, 0, Initializer("normal", 1.0))
    logits = Logits(spec, tp, most_bytes=chunk * rows * dtype.itemsize)
    head = VocabParallelHead(logits, sequence_parallel=False)
    _fill(head, tp)
    return head.to(dtype)


def _head(rank: int, world: int, vocab: int, chunk: int) -> dict[str, Any]:
    tp = ParallelState(RankGrid(tp=world), rank).tp
    head = _untied_head(vocab, chunk, tp)
    x = (_given((SEQ, BATCH, HIDDEN)) * 3).requires_grad_()
    loss = head(x, _labels(vocab))
    (loss * 0.5).backward()
    return {
        "loss": loss.item(),
        "x": x.grad.numpy(),
        "weight": head.weight.grad.numpy(),
        "logits": head(x, None).detach().numpy(),
    }


def _outside(rank: int, world: int) -> list[str]:
    """What is said of ids below, at and far above a vocabulary of 11, which is padded to 12 rows on two ranks."""
    tp, said = ParallelState(RankGrid(tp=world), rank).tp, []
    spec = rows_spec((NamedRows("embedding", 11),), HIDDEN, 0, Initializer("normal", 1.0))
    embedding = VocabParallelEmbedding(spec, tp, sequence_parallel=False)
    _fill(embedding, tp)
    head, x = _untied_head(11, 100, tp), _given((SEQ, BATCH, HIDDEN))
    good = torch.full((SEQ, BATCH), 10)
    head(x, good.index_fill(0, torch.tensor(3), IGNORED_LABEL)), embedding(good), embedding(good[:0])
    for wrong in (-1, 11, 12, 70_000, IGNORED_LABEL):
        ids = good.clone()
        ids[2, 1] = wrong
        for run in (lambda ids=ids: embedding(ids), lambda ids=ids: head(x, ids)):
            try:
                run()
            except IndexError as error:
                said.append(str(error))
            else:
                said.append("")
    return said


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ids_outside_of_the_vocabulary_are_refused_on_every_rank(world: int) -> None:
    for said in run_world(world, _outside, world):
        assert said.pop() == ""  # the label of a token that does not count
        wrong = [-1, -1, 11, 11, 12, 12, 70_000, 70_000, IGNORED_LABEL]
        for text, value, what in zip(said, wrong, ["token", "label"] * 5, strict=False):
            assert text.startswith(f"{what} id {value} is outside of the vocabulary of 11")


def _labels(vocab: int) -> Tensor:
    labels = torch.randint(0, vocab, (SEQ, BATCH), generator=torch.Generator().manual_seed(2))
    labels[0, 1] = labels[5] = IGNORED_LABEL
    return labels


@pytest.mark.parametrize("chunk", [3, 16, 2048], ids=["many chunks", "one exact chunk", "one chunk"])
@pytest.mark.parametrize(("world", "vocab"), [(1, 11), (2, 11), (4, 5)])
def test_the_head_equals_torchs_cross_entropy(world: int, vocab: int, chunk: int) -> None:
    """Vocabularies that tp does not divide, one of them with a rank that holds padding only."""
    results = run_world(world, _head, world, vocab, chunk)
    flat = torch.empty(vocab * HIDDEN)
    rows_spec((NamedRows("head", vocab),), HIDDEN, init=Initializer("normal", 1.0)).init_weights(flat, 0, 0, 1, seed=3)
    weight = flat.view(vocab, HIDDEN).requires_grad_()
    x = (_given((SEQ, BATCH, HIDDEN)) * 3).requires_grad_()
    logits = x @ weight.t()
    loss = F.cross_entropy(logits.flatten(0, 1), _labels(vocab).flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    (loss * 0.5).backward()
    got = torch.cat([torch.tensor(result["weight"]) for result in results])
    torch.testing.assert_close(got[:vocab], weight.grad, rtol=1e-4, atol=1e-5)
    assert not got[vocab:].any()
    for result in results:
        assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(torch.tensor(result["x"]), x.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.tensor(result["logits"]), logits.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [3, 16])
def test_a_confident_bf16_head_rounds_its_logits_and_no_more(chunk: int) -> None:
    """Where the label's probability is near 1, 1 minus a rounded one would be off by the size of the gradient itself."""
    vocab, u = 11, 2.0**-8
    head = _untied_head(vocab, chunk, Axis("tp"), dtype=torch.bfloat16)
    labels = _labels(vocab)
    weight = _given((vocab, HIDDEN)).bfloat16()
    head.weight.data = weight
    x = (2 * weight[labels.clamp(min=0)] + 0.1 * _given((SEQ, BATCH, HIDDEN)).bfloat16()).requires_grad_()
    loss = head(x, labels)
    loss.backward()
    logits = (x.detach() @ weight.t()).float().requires_grad_()
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    wanted.backward()
    of_label = logits.grad.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert (of_label.abs()[labels != IGNORED_LABEL] < 0.05).any()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4)
    slope = logits.grad.flatten(0, 1).double()
    for got, exact in (
        (x.grad.flatten(0, 1), slope @ weight.double()),
        (head.weight.grad, slope.T @ x.detach().flatten(0, 1).double()),
    ):
        assert float((got.double() - exact).norm() / exact.norm()) < 2 * u


@pytest.mark.parametrize("chunk", [3, 16])
def test_a_head_may_be_recomputed(chunk: int) -> None:
    """torch's checkpointing hands out what was saved once and no more."""
    vocab = 11
    head = _untied_head(vocab, chunk, Axis("tp"))
    found = []
    for recomputes in (False, True):
        x, head.weight.grad = _given((SEQ, BATCH, HIDDEN)).requires_grad_(), None
        loss = checkpoint(head, x, _labels(vocab), use_reentrant=False) if recomputes else head(x, _labels(vocab))
        loss.backward()
        found.append((x.grad, head.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_logits_of_a_long_sequence_never_exist_whole() -> None:
    """Peak size of any tensor made on the way, forward and backward, is that of a chunk."""
    vocab, tokens, chunk = 512, 64, 8
    head = _untied_head(vocab, chunk, Axis("tp"), hidden=4)
    x = torch.randn(tokens, 1, 4, requires_grad=True)
    with Alive() as alive:
        head(x, torch.zeros(tokens, 1, dtype=torch.int64)).backward()
    assert alive.largest == chunk * vocab


def test_chunks_of_the_loss_are_equal_tiles_that_cover_all_tokens_within_the_bound() -> None:
    cases = torch.randint(1, 3000, (500, 2), generator=torch.Generator().manual_seed(0)).tolist()
    for tokens, most in [(1, 1), (128, 128), (150, 200), (8192, 4185), (300, 127), *cases]:
        sizes = [part.stop - part.start for part in token_chunks(tokens, 10, 10 * most + 9)]
        joined = [index for part in token_chunks(tokens, 10, 10 * most + 9) for index in range(tokens)[part]]
        assert joined == list(range(tokens))
        assert max(sizes) <= most
        assert max(sizes) - min(sizes) <= (128 if most >= 128 else 1)
        assert most < 128 or not any(size % 128 for size in sizes[:-1])
        tile = 128 if most >= 128 else 1
        assert len(sizes) == 1 if tokens <= most else len(sizes) == -(-tokens // (most // tile * tile))
    assert token_chunks(3, 10, 1) == [slice(0, 1), slice(1, 2), slice(2, 3)]  # a bound below one token
    assert token_chunks(8192, 128256 * 2, 2**30) == [slice(0, 4096), slice(4096, 8192)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_head_gives_the_same_bits_with_kept_logits_and_without_and_in_blocks(
    dtype: torch.dtype, blocks: int, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with passes over all logits at once."""
    vocab, found = 11, []
    monkeypatch.setattr(vocabulary, "_CPU_BLOCK_BYTES", 4 * vocab * -(-SEQ * BATCH // blocks))
    for keeps in (None, True, False):
        head = _untied_head(vocab, 2048, Axis("tp"), dtype=dtype)
        head.logits = replace(head.logits, cap=cap)
        head.saves_logits, head.z_loss_coef = keeps is not False, 0.1 * bool(cap)
        if keeps is None:
            head.statistics_of, head.grad_logits_of = statistics_of, grad_logits_of
        x = _given((SEQ, BATCH, HIDDEN)).to(dtype).requires_grad_()
        loss = head(x, _labels(vocab))
        (loss * 0.37).backward()
        found.append((loss, x.grad, head.weight.grad))
    for one in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(one, found[0], strict=True))


def test_dropout_keeps_the_expected_share_and_scale() -> None:
    dropout = Dropout(0.25, dropout_key(1, "site", torch.device("cpu")), seq_len=64)
    y = dropout(torch.ones(64, 8, 32), TokenLayout(torch.arange(8)))
    assert float((y == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert torch.equal(dropout.eval()(torch.ones(4, 1, 2), TokenLayout(torch.arange(1))), torch.ones(4, 1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_a_byte_for_each_element_or_draws_its_mask_again(dtype: torch.dtype) -> None:
    dropout = Dropout(0.3, dropout_key(1, "site", torch.device("cpu")), seq_len=64, seq_shard=1)
    given, slope = _given((8, 3, 5)).to(dtype), _given((8, 3, 5)).cos().to(dtype)
    layout = TokenLayout(torch.tensor([4, 0, 7]))
    mask = dropout(torch.ones(8, 3, 5), layout) != 0
    wanted = [torch.where(mask, x / (1 - 0.3), 0.0) for x in (given, slope)]
    for dropout.remakes_mask, kept_bytes in ((False, 8 * 3 * 5), (True, 0)):
        x, kept = given.clone().requires_grad_(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t), t)[1], lambda t: t):
            y = dropout(x, layout)
        y.backward(slope)
        assert torch.equal(y, wanted[0])
        assert torch.equal(x.grad, wanted[1])
        assert sum(t.nbytes for t in kept) == kept_bytes


class _Keeps:
    """Remembers the outputs of kernels; once it replays, it returns them in order."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, ...]] = []
        self.replays = False

    def through(self, compute: Any) -> tuple[Tensor, ...]:
        if self.replays:
            return self.kept.pop(0)
        self.kept.append(compute())
        return self.kept[-1]


class _Kernels(TorchDispatchMode):
    """Which operators of attention run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [str(func)] if "attention" in str(func) else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "size"), [((4, 4), 8), ((4, 2), 24), ((6, 2), 64)])
@pytest.mark.parametrize("window", [None, 5], ids=["causal", "window"])
def test_kept_outputs_of_attention_give_the_same_bits_and_no_kernel_runs_again(
    dtype: torch.dtype, heads: tuple[int, int], size: int, window: int | None
) -> None:
    attend = SlidingWindow(window, dtype, torch.device("cpu")).attend if window else attention
    leaves = [_given((17, 2, n, size)).to(dtype).permute(1, 2, 0, 3).requires_grad_() for n in (*heads, heads[1])]
    slope, calls = _given((2, heads[0], 17, size)).to(dtype), 2 if window else 1

    def run(kept: _Keeps | None) -> tuple[list[Tensor], list[int], list[str]]:
        saved: list[int] = []
        with (
            _Kernels() as kernels,
            torch.autograd.graph.saved_tensors_hooks(
                lambda x: (saved.append(x.untyped_storage().nbytes()), x)[1], lambda x: x
            ),
        ):
            out = attend(*(leaf * 1 for leaf in leaves), tape=kept)
        return [out.detach(), *torch.autograd.grad(out, leaves, slope)], saved, kernels.seen

    wanted, saved, kernels = run(None)
    keeps = _Keeps()
    with torch.no_grad(), _Kernels() as first:
        out = attend(*leaves, tape=keeps)
    assert torch.equal(out, wanted[0])
    assert out.stride() == wanted[0].stride()
    assert len(keeps.kept) == len(kernels) == len(first.seen) == calls
    for remembered in (keeps.kept[:], keeps.kept):
        assert not any(x.requires_grad or x.grad_fn for outputs in remembered for x in outputs)
        keeps.replays, keeps.kept = True, list(remembered)
        got, saved_again, kernels_again = run(keeps)
        assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
        assert sorted(saved_again) == sorted(saved)
        assert kernels_again == []


def test_what_no_kernel_takes_is_not_kept() -> None:
    q, keeps = torch.randn(1, 2, 3, 8)[..., ::2], _Keeps()  # the last dimension is not contiguous
    out = attention(q, q, q, tape=keeps)
    assert torch.equal(out, attention(q, q, q))
    assert keeps.kept == []


def _seen(seq: int, window: int) -> Tensor:
    """Query t sees key j where t - window < j <= t."""
    t, j = torch.arange(seq)[:, None], torch.arange(seq)
    return (j <= t) & (j > t - window)


@pytest.mark.parametrize("seq", [1, 7, 12, 13])
@pytest.mark.parametrize("window", [1, 3, 4, 6, 12, 40])
def test_a_window_equals_a_masked_softmax_in_values_and_gradients(window: int, seq: int) -> None:
    generator = torch.Generator().manual_seed(seq)
    q, k, v = (torch.randn(2, heads, seq, 4, generator=generator, dtype=torch.float64) for heads in (6, 2, 2))
    slope = torch.randn(q.shape, generator=generator, dtype=torch.float64)

    def plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1)
        scores = (q @ k.transpose(-1, -2) / 2.0).masked_fill(~_seen(seq, window), -torch.inf)
        return scores.softmax(dim=-1) @ v

    results = []
    cpu = torch.device("cpu")
    windows = SlidingWindow(window, torch.float64, cpu), KernelWindow(window, cpu)
    for attend in (*(one.attend for one in windows), plainly):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        out.backward(slope)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for by_blocks, in_kernel, wanted in zip(*results, strict=True):
        torch.testing.assert_close(by_blocks, wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(in_kernel, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_takes_memory_by_its_size_and_not_by_the_square_of_the_sequence(dtype: torch.dtype) -> None:
    """Forward and backward: twice the sequence is twice the largest tensor, and none has seq * seq elements."""
    window, largest = SlidingWindow(16, dtype, torch.device("cpu")), []
    for seq in (512, 1024):
        q, k, v = (torch.randn(1, heads, seq, 8, dtype=dtype, requires_grad=True) for heads in (2, 1, 1))
        with Alive() as seen:
            window.attend(q, k, v).sum().backward()
        assert seen.largest < seq * seq // 8
        largest.append(seen.largest)
    assert largest[1] <= 2 * largest[0]


@pytest.mark.parametrize("window", [5, 64])
def test_capped_attention_stays_in_its_documents_and_is_flex_attention(window: int, monkeypatch: Any) -> None:
    """A document among others gives what it gives alone, forward and backward.  FlexAttention has no backward on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    monkeypatch.setattr(capped_attention, "_flex_attention", lambda: (flex_attention, create_block_mask))
    plain, flex = (CappedAttention(2.0, window, torch.device(device)) for device in ("cpu", "cuda"))
    q, k, v = _given((8, 2, 56, 16)).mul(3).transpose(0, 1).split([4, 2, 2], dim=1)
    shard = sequence_shard([[16, 40], [56]], 56, Axis("cp"), Axis("cp"), torch.device("cpu"))

    def run(shard: SequenceShard | None, *tensors: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = plain.attend(*leaves, shard)
        out.square().sum().backward()
        torch.testing.assert_close(flex.attend(*tensors, shard), out.detach(), rtol=1e-4, atol=1e-5)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    found = run(shard, q, k, v)
    for row, span in ((0, slice(0, 16)), (0, slice(16, 56)), (1, slice(0, 56))):
        wanted = run(None, *(x[row : row + 1, :, span] for x in (q, k, v)))
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours[row : row + 1, :, span], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [SILU, GELU_TANH], ids=["silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gated_unit_equals_its_formula_bit_by_bit_and_keeps_its_input_only(dtype: torch.dtype, kind: Any) -> None:
    given, slope = _given((5, 3, 2 * 9)).to(dtype), _given((5, 3, 9)).to(dtype)
    ours, plain = given.clone().requires_grad_(), given.clone().requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = gated(ours, kind)
    gate, up = plain.chunk(2, dim=-1)
    wanted = (F.silu(gate) if kind is SILU else F.gelu(gate, approximate="tanh")) * up
    assert torch.equal(y, wanted)
    y.backward(slope)
    wanted.backward(slope)
    assert torch.equal(ours.grad, plain.grad)
    assert [one.data_ptr() for one in kept] == [ours.data_ptr()]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gated(ours, kind).sum(), ours, create_graph=True)


_PARTS = [((3, 2, 9), (), -1), ((3, 2, 5, 4), (3, 2), 2), ((3, 2, 9), (6, 3), -1)]


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "sizes", "dim"), _PARTS, ids=["whole", "heads", "widths"])
def test_a_norm_of_slices_equals_its_formula_and_keeps_its_input_and_a_number(
    shape: tuple[int, ...], sizes: tuple[int, ...], dim: int, dtype: torch.dtype, traced: bool, monkeypatch: Any
) -> None:
    """The input is a view of something larger.  Each slice is rounded once, as torch's operator does in 16 bits."""
    whole = _given((*shape[:2], 2 * shape[2], *shape[3:])).to(dtype)
    lengths = [part.shape[-1] for part in whole[:, :, : shape[2]].split(sizes or shape[2], dim)]
    weight, slope = 1 + _given((sum(lengths),)).to(dtype) / 4, _given(shape).cos().to(dtype)

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        parts = zip(x.split(sizes or shape[2], dim), weight.split(lengths), strict=True)
        return torch.cat([part / (part.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w for part, w in parts], dim)

    found, kept = [], []
    for compute, exact in ((lambda x, w: rms_norm(x, w, 1e-3, sizes, dim), dtype), (formula, torch.float64)):
        x, w = whole.detach().to(exact).requires_grad_(), weight.detach().to(exact).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
            part = x[:, :, : shape[2]]
            kept.clear()
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: traced)
            y = compute(part, w)
            monkeypatch.undo()
        if exact == dtype and not traced and not found:
            numbers = sum(part.numel() // part.shape[-1] for part in part.split(sizes or shape[2], dim))
            inputs = {x.untyped_storage().data_ptr(), w.untyped_storage().data_ptr()}
            assert sum(t.numel() for t in kept if t.untyped_storage().data_ptr() not in inputs) == numbers
        y.backward(slope.to(exact))
        found.append([y.detach().double(), x.grad.double(), w.grad.double()])
    slack = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 16)
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=slack, atol=slack)


def test_a_norm_has_no_second_derivative() -> None:
    x = _given((3, 8)).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(rms_norm(x, torch.ones(8), 1e-5).sum(), x, create_graph=True)
