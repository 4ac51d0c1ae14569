"""Attention over ranks whose messages travel while they compute: its numbers, and what each message hides behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from delayed_backend import delayed_collectives
from einops import rearrange
from harness import run_world
from torch import Tensor
from worlds import LLAMA, run_of

from megazero.comm import head_exchange
from megazero.comm.collectives import Pending
from megazero.cpu.attention import CpuTiles
from megazero.layers import context_attention
from megazero.layers.context_attention import ContextAttention
from megazero.layers.sequence_shard import sequence_shard
from megazero.layers.token_layout import head_groups
from megazero.parallel_state import Axis, Links, ParallelState, RankGrid
from megazero.plan.dry_run import dry_run
from megazero.plan.fake_tensors import Message, Operator
from megazero.plan.unit_trace import trace_units

SIZE, SEQ, CPU, WHOLE = 4, 24, torch.device("cpu"), Axis("whole")
HEADS = ((8, 8), (8, 2), (4, 1), (12, 6), (16, 4), (20, 10))  # of queries and of keys
DOCUMENTS: list[list[list[int]] | None] = [None, [[24], [5, 1, 18]]]
SHAPES = {"ulysses 2": (2, 2), "ring 2": (2, 1), "ring 3": (3, 1), "2 x 2": (4, 2)}  # ranks, of which Ulysses


@pytest.mark.parametrize("shares_keys", [True, False])
def test_groups_have_every_head_once_with_the_key_head_that_it_reads(shares_keys: bool) -> None:
    for kv_heads, each, most in product(range(1, 9), range(1, 6), range(1, 6)):
        groups = head_groups(kv_heads * each, kv_heads, most, shares_keys=shares_keys)
        assert [head for group in groups for head in range(kv_heads * each)[group.queries]] == [*range(kv_heads * each)]
        for group in groups:
            assert {head // each for head in range(kv_heads * each)[group.queries]} == {*range(kv_heads)[group.keys]}
        assert min(most, kv_heads) <= len(groups) <= most
        assert shares_keys or len({group.keys.start for group in groups}) == len(groups)
        if shares_keys and kv_heads == 1:
            assert len(groups) == min(most, each)


def _inputs(heads: int, kv_heads: int, batch: int) -> list[Tensor]:
    """q, k, v and the gradient of the output, as a layer has them: [batch, heads, seq, size], seq first in memory."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(SEQ, batch, n, SIZE, dtype=torch.float64, generator=generator) for n in (heads, kv_heads) * 2)
    q, k, grad, v = (x.permute(1, 2, 0, 3) for x in drawn)
    return [q, k, v, grad]


def _formula(heads: int, kv_heads: int, lengths: list[list[int]], window: int | None) -> list[Tensor]:
    """out, dq, dk and dv of softmax(q k^T / sqrt(size)) v in one piece, with a mask."""
    q, k, v, grad = _inputs(heads, kv_heads, len(lengths))
    document = torch.stack([torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in lengths])
    behind = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    seen = (document[:, :, None] == document[:, None]) & (behind >= 0) & (behind < (window or SEQ))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    of_heads = (x.repeat_interleave(heads // kv_heads, dim=1) for x in leaves[1:])
    k, v = of_heads
    scores = (q @ k.transpose(2, 3) * SIZE**-0.5).masked_fill(~seen[:, None], -torch.inf)
    out = scores.softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _state(rank: int, world: int, ulysses: int, local_world_size: int = 0) -> ParallelState:
    """local_world_size: ranks of a host, which share memory; none does without."""
    grid, shares = RankGrid(cp=world), local_world_size > 0
    return ParallelState(
        replace(grid, cp_ulysses=ulysses),
        rank,
        Links(timeout_seconds=60, local_world_size=local_world_size or 1, shares_memory=shares),
    )


def _attend(
    state: ParallelState, heads: int, kv_heads: int, lengths: list[list[int]] | None, window: int | None
) -> tuple[Tensor, list[Tensor]]:
    """Which tokens this rank has, and their rows of `_formula`."""
    shard = sequence_shard(lengths, SEQ, state.cp_ulysses, state.cp_ring, CPU)
    assert shard is not None
    rows = shard.rows.t()[:, None, :, None]
    q, k, v, grad = (x.take_along_dim(rows, 2) for x in _inputs(heads, kv_heads, len(lengths or [0])))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ContextAttention((state.cp_ulysses, state.cp_ring), window, torch.float32).attend(*leaves, shard)
    return rows, [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _compare(rank: int, world: int, ulysses: int, local_world_size: int = 0) -> None:
    state = _state(rank, world, ulysses, local_world_size)
    with delayed_collectives(rank):
        for (heads, kv_heads), lengths, window in product(HEADS[:: local_world_size or 1], DOCUMENTS, (None, 7)):
            rows, found = _attend(state, heads, kv_heads, lengths, window)
            wanted = _formula(heads, kv_heads, lengths or [[SEQ]], window)
            for name, got, whole in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
                worst = float((got - whole.take_along_dim(rows, 2)).abs().max())
                assert worst < 1e-12, (name, heads, kv_heads, lengths, window)


@pytest.mark.parametrize("shape", SHAPES)
def test_messages_that_arrive_late_give_the_numbers_of_the_formula(shape: str) -> None:
    """Keys that each, some or all query heads of a rank share, in as many groups as there may be."""
    run_world(SHAPES[shape][0], _compare, *SHAPES[shape])


def test_hosts_that_cut_some_groups_of_ulysses_and_not_others_agree_on_the_groups() -> None:
    """Two hosts of three ranks: 0 and 1 share memory, 2 and 3 do not, and both send keys round the same ring."""
    run_world(6, _compare, 6, 2, 3)


def test_a_dry_run_finds_all_ranks_of_such_hosts_with_the_same_messages() -> None:
    model = LLAMA | {"num_layers": 1, "num_heads": 8, "num_kv_heads": 8, "hidden_size": 64, "seq_len": 48}
    run = run_of(6, model=model, parallel={"cp": 6, "cp_ulysses": 2, "cp_method": "hybrid"})
    assert not dry_run(run, per_node=3, on_cuda=False).problems


@pytest.mark.parametrize("seq_len", [1024, 4096])
def test_a_plan_has_the_head_groups_of_the_device_that_it_is_for(seq_len: int) -> None:
    """On CUDA a group has 2^15 rows of queries at least: of 8 samples and 4 heads 1,024 tokens are one, 4,096 make four."""
    model = LLAMA | {"num_heads": 8, "num_kv_heads": 8, "hidden_size": 64, "seq_len": seq_len}
    run = run_of(2, model=model, parallel={"cp": 2, "cp_method": "ulysses"})
    assert run.micro_batch_size == 8
    for on_cuda, per_node, groups in ((True, 2, seq_len // 1024), (False, 2, 1), (False, 1, 4)):
        layer = next(
            one for key, one in trace_units(run, on_cuda=on_cuda, per_node=per_node).items() if not isinstance(key, str)
        )
        exchanges = [one for one in layer.forward.events if isinstance(one, Message) and one.operation == "all_to_all"]
        assert len(exchanges) == 4 * groups


@contextmanager
def _events(into: list[str]) -> Any:
    """Notes when messages start, when they are waited for, and when a kernel runs, each by the name of what it is for."""

    def noted(name: str, start: Callable[..., Pending]) -> Callable[..., Pending]:
        def begin(*args: Any) -> Pending:
            into.append(f"{name} starts")
            return Pending(start(*args).wait, lambda: into.append(f"{name} waits"))

        return begin

    def kernel(run: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **keys: Any) -> Any:
            into.append("kernel")
            return run(*args, **keys)

        return compute

    exchanged, passed = noted("exchange", head_exchange.all_to_all), noted("shift", context_attention.ring_shift)
    with (
        patch.object(head_exchange, "all_to_all", exchanged),
        patch.object(context_attention, "ring_shift", passed),
        patch.object(CpuTiles, "forward", kernel(CpuTiles.forward)),
        patch.object(CpuTiles, "backward", kernel(CpuTiles.backward)),
    ):
        yield


def _order(rank: int, world: int, ulysses: int, heads: int, kv_heads: int) -> list[str]:
    state, found = _state(rank, world, ulysses), list[str]()
    with _events(found):
        _attend(state, heads, kv_heads, None, None)
    return found


def test_a_plan_for_a_gpu_has_one_kernel_for_a_long_document() -> None:
    """On a CPU it is cut into triangles and squares, which no GPU computes."""
    run = run_of(1, model=LLAMA | {"seq_len": 512}, data={"document_mask": True}, training={"micro_batch_size": 1})
    calls = {}
    for on_cuda in (True, False):
        layer = next(one for key, one in trace_units(run, on_cuda=on_cuda).items() if not isinstance(key, str))
        names = [event.name for event in layer.forward.events if isinstance(event, Operator)]
        calls[on_cuda] = sum("flash_attention" in name for name in names)
    assert calls == {True: 1, False: 4}  # triangles of 64, and squares of 64, 128 and 256


_LAYOUTS = ("s b (n h d) -> n b h s d", "s b (h d n) -> n b h s d", "s b (h n d) -> n b h s d")


def _attend_layouts(rank: int, world: int, ulysses: int) -> None:
    state = _state(rank, world, ulysses)
    shard = sequence_shard([[48]], 48, state.cp_ulysses, state.cp_ring, CPU)
    assert shard is not None
    attention = ContextAttention((state.cp_ulysses, state.cp_ring), None, torch.float32)
    for layout in _LAYOUTS:
        fused = torch.randn(48, 1, 3 * 4 * 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        whole = fused.clone().requires_grad_()
        q, k, v = rearrange(whole, layout, n=3, h=4)
        F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
        own = shard.rows[:, 0]
        mine = fused[own].requires_grad_()
        attention.attend(*rearrange(mine, layout, n=3, h=4), shard).square().sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(mine.grad, whole.grad[own], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("world", "ulysses"), [(1, 1), (2, 1), (2, 2)])
def test_any_order_of_a_fused_projection_gives_its_gradient(world: int, ulysses: int) -> None:
    """The kernels read local_world_size in the last dimension, whatever its stride."""
    run_world(world, _attend_layouts, world, ulysses)


@pytest.mark.parametrize(
    "shape", [(1, 3, SEQ, SIZE), (1, 0, SEQ, SIZE), (1, 2, SEQ + 1, SIZE), (2, 2, SEQ, SIZE), (1, 2, SEQ, 2)]
)
def test_keys_that_do_not_fit_the_queries_are_refused(shape: tuple[int, ...]) -> None:
    """A kernel would read the memory behind them, or leave some out."""
    shard = sequence_shard([[SEQ]], SEQ, WHOLE, WHOLE, CPU)
    assert shard is not None
    attention, q, keys = (
        ContextAttention((WHOLE, WHOLE), None, torch.float32),
        torch.ones(1, 4, SEQ, SIZE),
        torch.ones(shape),
    )
    with pytest.raises(ValueError, match="keys and values must have the queries' dtype, batch, seq and size"):
        attention.attend(q, keys, keys, shard)
    with pytest.raises(ValueError, match="keys and values must have"):
        attention.attend(q, q, keys, shard)


@pytest.mark.parametrize("wider", [1, 2])
def test_queries_keys_and_values_of_several_types_are_refused(wider: int) -> None:
    """Some lengths would compute, others not, and on a ring the gradient of one would travel in the type of another."""
    shard = sequence_shard([[SEQ]], SEQ, WHOLE, WHOLE, CPU)
    assert shard is not None
    given = [torch.ones(1, 4, SEQ, SIZE, dtype=torch.bfloat16) for _ in range(3)]
    given[wider] = given[wider].float()
    with pytest.raises(ValueError, match=r"must have the queries' dtype.* of torch\.bfloat16; k"):
        ContextAttention((WHOLE, WHOLE), None, torch.float32).attend(*given, shard)


def test_attention_waits_for_the_first_heads_and_computes_while_the_others_travel() -> None:
    for order in run_world(2, _order, 2, 2, 8, 2):  # on a rank 4 heads that share one of keys
        kernel, (starts, waits) = "kernel", ("exchange starts", "exchange waits")
        forward = [starts] * 6 + [waits] * 3 + [kernel, starts] + [waits, kernel, starts] * 3 + [waits] * 4
        backward = [starts] * 4 + [waits, kernel, starts] * 4 + [starts] * 2 + [waits] * 6
        assert order == forward + backward


def test_the_last_gradients_of_a_ring_travel_while_its_own_keys_are_used() -> None:
    for order in run_world(2, _order, 2, 1, 4, 2):
        starts = [number for number, event in enumerate(order) if event == "shift starts"]
        waits = [number for number, event in enumerate(order) if event == "shift waits"]
        assert len(starts) == len(waits) == 3  # keys forward and backward, and their gradients
        for start, wait in zip(starts, waits, strict=True):
            assert "kernel" in order[start:wait]


def test_ranks_that_exchange_when_they_wait_do_so_once() -> None:
    """In the memory of one host nothing travels by itself: groups would only wait more often."""
    assert context_attention._MOST_GROUPS > 1
    found = run_world(2, _calls_in_shared_memory)
    assert found == [8] * 2  # q, k, v and out, forward and backward


def _calls_in_shared_memory(rank: int) -> int:
    state = ParallelState(RankGrid(cp=2, cp_ulysses=2), rank, Links(timeout_seconds=60))
    _attend(state, 8, 2, None, None)
    return state.traffic.calls["cp", "all_to_all"]


def _fails_and_goes_on(rank: int, ulysses: int, failing: str, calls: Sequence[int]) -> None:
    state, kernel = _state(rank, 2, ulysses), getattr(CpuTiles, failing)
    _, wanted = _attend(state, 8, 2, None, None)
    for last in calls:
        count = 0

        def fails(*args: Any, last: int = last, **keys: Any) -> Any:
            nonlocal count
            count += 1
            if count == last:
                raise torch.OutOfMemoryError("planned")
            return kernel(*args, **keys)

        with patch.object(CpuTiles, failing, fails), pytest.raises(torch.OutOfMemoryError):
            _attend(state, 8, 2, None, None)
        _, found = _attend(state, 8, 2, None, None)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("failing", ["forward", "backward"])
@pytest.mark.parametrize("ulysses", [2, 1])
def test_a_step_after_one_that_failed_on_all_ranks_has_its_messages(ulysses: int, failing: str) -> None:
    """What the failed one has left travels to its end; gloo would lose the peer."""
    run_world(2, _fails_and_goes_on, ulysses, failing, (1, 2, 1, 2))


def _second_derivative(rank: int, ulysses: int) -> None:
    state = _state(rank, 2, ulysses)
    shard = sequence_shard(None, SEQ, state.cp_ulysses, state.cp_ring, CPU)
    assert shard is not None
    q, k, v = (x[:, :, :12].clone().requires_grad_() for x in _inputs(4, 2, 1)[:3])
    out = ContextAttention((state.cp_ulysses, state.cp_ring), None, torch.float32).attend(q, k, v, shard)
    with pytest.raises(RuntimeError, match="has no second derivative: do not use create_graph with it"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("ulysses", [2, 1])
def test_a_second_derivative_is_refused(ulysses: int) -> None:
    run_world(2, _second_derivative, ulysses)
