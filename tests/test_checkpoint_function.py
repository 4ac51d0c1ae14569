"""`megazero.checkpoint`: a recomputed call has the gradients of the call itself, to the bit, whatever the function does."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_world
from test_activation_offload import LateCopier
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from zero_worlds import CLOSE, Sharded, assert_same, numbers, plain_steps, random_batches, seeded

import megazero
from megazero import deepspeed
from megazero.comm.memory import rounded_up
from megazero.deepspeed import recompute

WIDTH = 8
Checkpoint = Callable[..., Any]
PLAIN: Checkpoint = lambda function, *args, **kwargs: function(*args, **kwargs)  # noqa: E731
INNER = partial(torch_checkpoint, use_reentrant=False)
REENTRANT = partial(torch_checkpoint, use_reentrant=True)


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))


# ---- the laws of one process: (checkpoint, block, x) -> loss


def _two_levels(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    return ck(lambda y: ck(block, torch.sin(y)).exp(), x).square().mean()


def _three_levels(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    return ck(lambda y: ck(lambda z: ck(block, F.dropout(z, 0.3)).tanh() * z, torch.sin(y)).exp(), x).square().mean()


def _torch_around(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    return INNER(lambda y: ck(block, torch.sin(y)).exp(), x).square().mean()


def _reentrant_around(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    return REENTRANT(lambda y: ck(block, torch.sin(y)).exp(), x).square().mean()


def _random(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    y = ck(lambda y: F.dropout(block(F.dropout(y, 0.3)), 0.5), x)
    return y.square().mean() + ck(lambda y: torch.rand_like(y) * block(y), x).sum()


def _structures(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    def function(given: dict[str, Any], *, scale: float) -> dict[str, Any]:
        (x,) = given["x"]
        y = block(x) * scale
        return {"y": y, "more": (y.view(-1), x, x[1:], None), "scale": scale}

    found = ck(function, {"x": [x.sin()], "name": "x"}, scale=0.5)
    assert found["scale"] == 0.5
    whole, same, part, nothing = found["more"]
    assert nothing is None
    return found["y"].sum() + whole.square().sum() + same.exp().sum() + part.cos().sum()


def _frozen(ck: Checkpoint, block: Any, x: Tensor) -> Tensor:
    block[0].weight.requires_grad_(False)
    return ck(block, x).square().mean()


def _autocast(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return block(y)

    with torch.autocast("cpu", torch.bfloat16):
        y = ck(block, x)
    return y.float().square().mean() + ck(inner, x).float().sum()


def _second_derivatives(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    y = ck(lambda z: ck(block, z).tanh() * z.exp(), x).square().mean()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return y + slope.square().sum()


def _twice_backward(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    y = ck(block, x).square().mean()
    y.backward(retain_graph=True)
    return y


def _backward_within(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    def function(x: Tensor) -> Tensor:
        energy = F.dropout(block(x), 0.4).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return block(x) + force

    return ck(function, x).square().mean()


def _shared(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    return ck(lambda y: ck(block, y) + block(y), x).square().mean()


def _other_weights(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    weights = {name: 0.5 * weight for name, weight in block.named_parameters()}
    return ck(lambda weights, y: functional_call(block, weights, (y,)), weights, x).square().mean()


def _weight_as_argument(ck: Checkpoint, block: Any, x: Tensor) -> Tensor:
    return ck(lambda weight, y: F.linear(y, weight).tanh(), block[0].weight, x).square().mean()


def _batch_norm(ck: Checkpoint, block: nn.Module, x: Tensor) -> Tensor:
    norm = nn.BatchNorm1d(WIDTH)
    return ck(lambda y: norm(block(y)), x).square().mean() + ck(lambda y: norm(y).exp(), x).mean()


FUNCTIONS = [
    *(_two_levels, _three_levels, _torch_around, _reentrant_around, _random, _structures, _frozen, _autocast),
    *(
        _second_derivatives,
        _twice_backward,
        _shared,
        _backward_within,
        _other_weights,
        _weight_as_argument,
        _batch_norm,
    ),
]


def _trained(function: Callable[..., Tensor], ck: Checkpoint) -> list[Tensor | None]:
    """The loss, every gradient, and a random number drawn afterwards."""
    block, x = seeded(_block), numbers(4, WIDTH).requires_grad_()
    torch.manual_seed(5)
    loss = function(ck, block, x)
    loss.backward()
    return [loss.detach(), torch.rand(1), x.grad, *(one.grad for one in block.parameters())]


def _assert_same(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        assert (one is None) == (other is None), number
        assert one is None or other is None or torch.equal(one, other), number


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")  # of re-entrant checkpointing, and of a compiler
def test_a_recomputed_call_has_the_gradients_of_the_call(function: Callable[..., Tensor]) -> None:
    wanted = _trained(function, PLAIN)
    assert wanted[3] is not None or wanted[4] is not None
    _assert_same(_trained(function, megazero.checkpoint), wanted)


def test_only_the_arguments_are_kept() -> None:
    saved: list[Tensor] = []
    block, x = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)), numbers(4, WIDTH).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (saved.append(one), one)[1], lambda one: one):
        megazero.checkpoint(block, x)
    assert [one.data_ptr() for one in saved] == [x.data_ptr()]


def test_weights_that_change_between_forward_and_backward_are_an_error() -> None:
    block, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), numbers(4, WIDTH)
    y = megazero.checkpoint(block, x.requires_grad_())
    with torch.no_grad():
        block[0].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="or they have changed since"):
        y.sum().backward()


def test_a_function_that_does_something_else_the_second_time_is_named() -> None:
    calls: list[int] = []

    def forgetful(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin() if len(calls) == 1 else x[:2].sin()

    y = megazero.checkpoint(forgetful, numbers(3).requires_grad_())
    with pytest.raises(RuntimeError, match=r"recomputing .*forgetful saved \[2\] of torch.float32 as tensor 0"):
        y.sum().backward()


def test_an_argument_that_was_changed_is_refused_as_by_autograd() -> None:
    x = numbers(4, WIDTH)
    y = megazero.checkpoint(seeded(_block), x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("within", [PLAIN, megazero.checkpoint])
@pytest.mark.parametrize("inputs", [None, "weight"])
def test_a_function_that_calls_backward_is_refused(inputs: str | None, within: Checkpoint) -> None:
    """Its second run would add the same gradients once more; a function that asks for gradients is all right, see above."""
    layer = nn.Linear(WIDTH, WIDTH)

    def function(x: Tensor) -> Tensor:
        y = within(lambda x: layer(x).sin(), x)
        y.sum().backward(inputs=None if inputs is None else [layer.weight])
        return y.detach() * x

    with pytest.raises(RuntimeError, match="the function calls backward"):
        megazero.checkpoint(function, numbers(3, WIDTH).requires_grad_())
    assert layer.weight.grad is None


# ---- ZeRO-3


class _Unit(nn.Module):
    def __init__(self, within: Checkpoint = PLAIN) -> None:
        super().__init__()
        self.a, self.b, self.within = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), within

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.within(lambda y: torch.tanh(self.a(y)), x))


class _Wrapper(nn.Module):
    """As torch's `checkpoint_wrapper`: the unit is the wrapper, and the module in it is called."""

    def __init__(self, ck: Checkpoint) -> None:
        super().__init__()
        self.inner, self.ck = _Unit(), ck

    def forward(self, x: Tensor) -> Tensor:
        return self.ck(self.inner, x)


class _Model(nn.Module):
    """Six units; `ck` around each, or around `span` of them."""

    def __init__(self, unit: Callable[[], nn.Module], ck: Checkpoint = PLAIN, span: int = 1) -> None:
        super().__init__()
        self.blocks, self.ck, self.span = nn.ModuleList(unit() for _ in range(6)), ck, span

    def _some(self, start: int, x: Tensor) -> Tensor:
        for block in self.blocks[start : start + self.span]:
            x = block(x)
        return torch.sin(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for start in range(0, 6, self.span):
            x = self.ck(self.blocks[start], x) if self.span == 1 else self.ck(self._some, start, x)
        return x.square().mean()


SHAPES: dict[str, Callable[[Checkpoint], nn.Module]] = {
    "around a unit": lambda ck: _Model(_Unit, ck),
    "within a unit": lambda ck: _Model(partial(_Unit, ck)),
    "a wrapper": lambda ck: _Model(partial(_Wrapper, ck)),
    "around two": lambda ck: _Model(_Unit, ck, 2),
    "around three": lambda ck: _Model(_Unit, ck, 3),
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("action", {}),
    ("chunk", {}),
    ("step", {}),
    ("action", {"offload": {"parameters": "cpu", "optimizer": "cpu"}}),
]


def test_a_unit_is_gathered_once_for_recomputation_and_backward() -> None:
    """Forward and backward gather every unit once, but two that the buffers still hold: 2 N - 2 for N units, or, where all
    have buffers of their own, N.  With three units in a call, the recomputation of the first finds another one in its
    buffer, and so does its backward: one more for the call that is recomputed first, and two for the other.
    """

    def law(rank: int) -> dict[tuple[str, int, str], int]:
        torch.set_num_threads(1)
        sent = {}
        batches = random_batches(3, 2, 1, 4, WIDTH)
        for shape, make in SHAPES.items():
            plain = seeded(lambda make=make: make(PLAIN))
            plain_steps(plain, batches)
            wanted = {name: one.detach() for name, one in plain.named_parameters()}
            for case, (policy, options) in enumerate(
                OPTIONS if shape in ("around a unit", "around three") else OPTIONS[:1]
            ):
                for ck in (megazero.checkpoint, INNER, REENTRANT) if case == 0 else (megazero.checkpoint,):
                    sharded = Sharded(
                        seeded(lambda make=make, ck=ck: make(ck)), 3, rank, 2, gather_policy=policy, **options
                    )
                    seen = []
                    for step in batches:
                        sharded.state.traffic.reset()
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore" if ck is REENTRANT else "error")
                            sharded.step(step[rank])
                        seen.append(sharded.state.traffic.sent_bytes["dp", "all_gather"])
                    assert len(set(seen)) == 1, (shape, policy, seen)  # the history is that of the first step
                    assert_same(sharded.whole("model"), wanted, **CLOSE)
                    name = {megazero.checkpoint: "", INNER: "torch", REENTRANT: "re-entrant"}[ck]
                    sent[shape, case, name] = seen[0]
        return sent

    found = run_world(2, law)
    shard = -(-sum(one.numel() for one in _Unit().parameters()) // 32) * 16 * 4
    units = {key: one / shard for key, one in found[0].items()}
    again = {"around three": 12 - 2 + 3}
    for (shape, case, name), gathers in units.items():
        wanted = 6 if OPTIONS[case][0] in ("chunk", "step") else again.get(shape, 12 - 2)
        assert gathers == wanted, (shape, OPTIONS[case], name, gathers)
    assert found[0] == found[1]


# ---- deepspeed.checkpointing


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "_NOW", recompute._Configured())


def _configure(**options: Any) -> Any:
    """The store, which takes arguments of every size."""
    deepspeed.checkpointing.configure(None, **options)
    store = recompute._NOW.store
    if store is not None:
        store.smallest_bytes = 0
    return store


STORED_IN: list[dict[str, Any]] = [{}, {"checkpoint_in_cpu": True}, {"contiguous_checkpointing": True}]


@pytest.mark.parametrize("after", STORED_IN)
@pytest.mark.parametrize("before", STORED_IN)
def test_wherever_arguments_are_stored_the_gradients_are_the_same(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Also if another place is chosen between forward and backward."""
    block, x = seeded(_block), numbers(4, WIDTH).requires_grad_()
    (wanted,) = torch.autograd.grad(_two_levels(PLAIN, block, x), x)
    store = _configure(**before)
    y = _two_levels(deepspeed.checkpointing.checkpoint, block, x)
    assert store is None or store.pool.nbytes_in_use == rounded_up(4 * 4 * WIDTH)  # not of the inner call
    _configure(**after)
    assert torch.equal(torch.autograd.grad(y, x)[0], wanted)


@pytest.mark.parametrize("options", STORED_IN[1:])
@pytest.mark.parametrize("function", [_three_levels, _twice_backward, _second_derivatives, _weight_as_argument])
def test_stored_arguments_serve_nested_calls_and_several_backwards(
    function: Callable[..., Tensor], options: dict[str, Any]
) -> None:
    _configure(**options)
    _assert_same(_trained(function, deepspeed.checkpointing.checkpoint), _trained(function, PLAIN))


def test_contiguous_arguments_lie_in_one_buffer_that_has_its_size_after_the_first_pass() -> None:
    store = _configure(contiguous_checkpointing=True)
    sizes = []
    for _ in range(3):
        y = numbers(100, WIDTH).requires_grad_()
        for size in (100, 90, 60):
            y = deepspeed.checkpointing.checkpoint(lambda y, z: y * z, y[:size].clone(), numbers(size, 1))
        taken = [4 * WIDTH * 100, 4 * 100, 4 * WIDTH * 90, 4 * 90, 4 * WIDTH * 60, 4 * 60]
        assert store.pool.nbytes_in_use == sum(map(rounded_up, taken))
        y.sum().backward()
        del y
        assert store.pool.nbytes_in_use == 0
        sizes.append(store.pool.nbytes)
    assert sizes[1:] == [sum(map(rounded_up, taken))] * 2
    deepspeed.checkpointing.reset()
    assert recompute._NOW.store is not store


def test_what_lies_in_contiguous_memory_is_safe_from_changes_and_from_other_calls() -> None:
    _configure(contiguous_checkpointing=True)
    xs = [numbers(6, seed=seed).requires_grad_() for seed in range(3)]
    copies = [x.detach().clone().requires_grad_() for x in xs]
    results = [deepspeed.checkpointing.checkpoint(torch.sin, x) for x in xs]
    for x in xs:
        x.data.zero_()
    for index in (1, 0, 2):
        results[index].sum().backward()
        assert torch.equal(xs[index].grad, copies[index].detach().cos())  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(2))
def test_arguments_go_to_the_host_and_come_back_whenever_their_copies_end(seed: int) -> None:
    """The arguments of two calls are on the device; those of the call before come back when a backward begins."""
    copier, calls = LateCopier(seed), 6
    store = _configure(checkpoint_in_cpu=True)
    store.copier = copier
    block, x = seeded(_block), numbers(4, WIDTH).requires_grad_()
    for _ in range(2):
        y, x.grad, began, before = x.detach().requires_grad_(), None, list[int](), copier.started
        first = y
        for _ in range(calls):
            y = deepspeed.checkpointing.checkpoint(lambda x: block(x).sin(), y)
            y.register_hook(lambda _, began=began: began.append(copier.started))
        forward = copier.started
        assert forward - before == calls
        block.zero_grad()
        y.square().mean().backward()
        # Calls 6 and 5 have not left; the copy of 4 starts with the backward of 5, and so on.
        assert [at - forward for at in began] == [0, 0, 1, 2, 3, 4]
        assert store.pool.nbytes_in_use == 0
    found = [first.grad, *(parameter.grad for parameter in block.parameters())]
    block.zero_grad()
    x = y = numbers(4, WIDTH).requires_grad_()
    for _ in range(calls):
        y = block(y).sin()
    y.square().mean().backward()
    wanted = [x.grad, *(parameter.grad for parameter in block.parameters())]
    _assert_same(found, wanted)
    assert not copier.wrong


@pytest.mark.filterwarnings("ignore")  # of a compiler
def test_a_configured_call_within_a_compiled_function_runs_as_it_is() -> None:
    block, x = seeded(_block), numbers(4, WIDTH).requires_grad_()
    compiled = torch.compile(lambda x: deepspeed.checkpointing.checkpoint(block, x.sin()).exp(), backend="aot_eager")
    (slope,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(slope, torch.autograd.grad(block(x.sin()).exp().sum(), x)[0])


def test_results_come_as_from_deepspeed() -> None:
    x, checkpoint = numbers(3).requires_grad_(), deepspeed.checkpointing.checkpoint
    assert isinstance(checkpoint(lambda x: (x.sin(),), x), Tensor)
    assert isinstance(checkpoint(lambda x: [x.sin(), x.cos()], x), tuple)
    assert set(checkpoint(lambda x, y: {"z": x * y}, x, y=2.0)) == {"z"}


def test_a_configuration_is_read_and_options_overrule_it() -> None:
    block = {"cpu_checkpointing": True, "contiguous_memory_optimization": True, "number_checkpoints": 7}
    config = {"train_batch_size": 2, "activation_checkpointing": block}
    deepspeed.checkpointing.configure(None, config, contiguous_checkpointing=False, partition_activations=True)
    found = recompute._NOW.options
    assert (found.cpu_checkpointing, found.contiguous_memory_optimization) == (True, False)
    recompute.configure_by_block(recompute.CheckpointingBlock(), tp=1)  # as `initialize` does
    assert recompute._NOW.options == found
    with pytest.raises(ValueError, match="partition_activations is not supported with tp=2"):
        recompute.configure_by_block(recompute.CheckpointingBlock(), tp=2)
    with pytest.raises(ValueError, match="cpu_checkpointing"):
        deepspeed.checkpointing.configure(None, checkpoint_in_cpu="no")


def test_initialize_configures_what_no_call_has() -> None:
    block = {"cpu_checkpointing": True}
    config = {"train_batch_size": 2, "activation_checkpointing": block, "optimizer": {"type": "AdamW"}}
    engine, *_ = megazero.initialize(model=_block(), config=config)
    with contextlib.closing(engine):
        assert recompute._NOW.options.cpu_checkpointing
        assert not deepspeed.checkpointing.is_configured()
