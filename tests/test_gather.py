"""Stage 3 on any module: whatever its forward does, gradients and weights are those of plain torch on one process."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_world
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from zero_worlds import (
    CLOSE,
    Sharded,
    assert_same,
    assert_trains_as_plain,
    numbers,
    plain_gradients,
    plain_steps,
    random_batches,
    seeded,
)

from megazero.comm.backend import TorchBackend
from megazero.comm.messages import OrderError
from megazero.deepspeed.script_units import VisitHistory

WIDTH = 8


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class _Chain(nn.Module):
    """Five blocks, one after another."""

    def __init__(self, block: Callable[[], nn.Module] = _Block, count: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class _Twice(_Chain):
    """A block that runs twice in a forward, with others in between."""

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 2, 2, 4, 3, 0):
            x = self.blocks[index](x)
        return x.square().mean()


class _TwoContainers(_Chain):
    """Blocks that a second container holds, each computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(*self.blocks[2:])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks[:2], *self.tail):
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


class _OtherOrder(_Chain):
    """Blocks run in another order than they are registered in, one of them not at all."""

    def forward(self, x: Tensor) -> Tensor:
        for index in (3, 0, 4, 2):
            x = self.blocks[index](x)
        return x.square().mean()


class _Branches(_Chain):
    """Blocks next to one another, two of which share a gather buffer."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.blocks[0](x) * self.blocks[2](x) + self.blocks[4](self.blocks[1](x))).square().mean()


class _TiedProjection(nn.Module):
    """The embedding's weight is read outside the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[..., 0] * 3).long().remainder(11)
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.logits(h), tokens)

    def logits(self, h: Tensor) -> Tensor:
        return F.linear(h, self.embed.weight)


class _SharedParameter(_TiedProjection):
    """The embedding's weight is that of another module too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 11)
        self.head.weight = self.embed.weight

    def logits(self, h: Tensor) -> Tensor:
        return self.head(h)


class _Returns(nn.Module):
    """Gives its parameter, or a view of it."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), how

    def forward(self) -> Tensor:
        return self.how(self.weight)


class _UsesReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hows = [lambda w: w, lambda w: w.t(), lambda w: w[2:5], lambda w: w.view(-1)[:WIDTH], lambda w: w * 2]
        self.givers = nn.ModuleList(_Returns(how) for how in hows)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e = (giver() for giver in self.givers)
        return ((x @ a @ b * d) @ c.t()).square().mean() + (x @ e).square().mean()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
                nn.MultiheadAttention(WIDTH, 2, batch_first=True),
                nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x[None])
        x = x + self.layers[1](x, x, x)[0]
        return self.layers[2](x).square().mean()


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, 2), nn.GRU(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x)[0])[0].square().mean()


class _WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class _RootParameters(_Chain):
    """Parameters of the model itself, in use while its blocks run; one has no dimension, one no elements, one has four."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.randn(WIDTH) / 8)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.volume = nn.Parameter(torch.randn(2, 1, 3, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale + self.shift
        return (x * self.volume.sum((0, 1, 2))).square().mean() + self.nothing.sum()


class _CheckpointedSpan(_Chain):
    """One checkpoint over three units, which do not fit the two buffers together."""

    def _three(self, x: Tensor) -> Tensor:
        for block in self.blocks[1:4]:
            x = block(x)
        return torch.sin(x)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._three, self.blocks[0](x), use_reentrant=False)
        return self.blocks[4](x).square().mean()


class _ChangesItsInput(_Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.b(torch.tanh(self.a(x.clone())))
        return x


class _ChangesInputs(_Chain):
    def __init__(self) -> None:
        super().__init__(_ChangesItsInput)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


class _AsDict(_Block):
    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        return {"x": [super().forward(x["x"][0])], "count": x["count"] + 1, "none": None}


class _Dicts(_Chain):
    def __init__(self) -> None:
        super().__init__(_AsDict)

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": [x], "count": 0}
        for block in self.blocks:
            state = block(state)
        return state["x"][0].square().mean() * state["count"]


class _PassesOn(_Block):
    """Returns, beside its result, what it was given: a time embedding, a skip connection."""

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x) + skip, skip


class _Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([_Block()])
        self.blocks = nn.ModuleList(_PassesOn() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first[0](x)
        for block in self.blocks:
            x, skip = block(x, skip)
        return x.square().mean()


class _Nested(_Chain):
    """Returns what its last block has returned; the blocks that follow one another share a gather buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for index in (1, 3, 0, 2, 4):
            x = self.blocks[index](x)
        return x


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([_Nested()])

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](x).square().mean()


class _PartlyFrozen(_Chain):
    """Frozen parameters between trained ones in every block, and a frozen block."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.a.bias.requires_grad_(False)
            block.b.weight.requires_grad_(False)
        self.blocks[2].requires_grad_(False)


class _FrozenFirst(_Chain):
    """Nothing before the third block trains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)


MODELS = [
    _Chain, _Twice, _OtherOrder, _Branches, _TiedProjection, _SharedParameter, _UsesReturned, _Attention,
    _Recurrent, _WeightNorm, _RootParameters, _CheckpointedSpan,
    _ChangesInputs, _Dicts, _Skips, _Outer, _PartlyFrozen, _FrozenFirst, _TwoContainers,
]  # fmt: skip


def _slow(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-3)


def _train(rank: int, stage: int, cases: Iterable[tuple[Callable[[], nn.Module], dict[str, Any]]]) -> None:
    for make, options in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                assert_trains_as_plain(rank, 2, make, stage, random_batches(3, 2, 2, 4, WIDTH), **options)
            except Exception as error:
                raise AssertionError(f"{make.__name__}, {options}: {error}") from error


def test_stage_3_trains_any_module_as_plain_torch_does() -> None:
    run_world(2, _train, 3, [(make, {}) for make in MODELS])


@pytest.mark.parametrize("policy", ["chunk", "step"])
def test_how_long_a_unit_stays_changes_nothing(policy: str) -> None:
    run_world(2, _train, 3, [(make, {"gather_policy": policy}) for make in (_Twice, _RootParameters, _PartlyFrozen)])


def test_persistent_parameters_change_nothing() -> None:
    cases = [*((_RootParameters, number) for number in (1, 12, 100)), (_PartlyFrozen, 12), (_PartlyFrozen, 10_000)]
    run_world(2, _train, 3, [(make, {"persistent_elements": persistent}) for make, persistent in cases])


@pytest.mark.parametrize(
    ("world", "place", "optimizer"),
    [(1, "cpu", "nvme"), (1, "nvme", "none"), *itertools.product((2,), ("cpu", "nvme"), ("none", "cpu", "nvme"))],
)
def test_offloaded_shards_change_nothing(place: str, world: int, optimizer: str, tmp_path: Any) -> None:
    def law(rank: int) -> None:
        offload = {"parameters": place, "optimizer": optimizer, "nvme_path": str(tmp_path)}
        sharded = assert_trains_as_plain(
            rank,
            world,
            _RootParameters,
            3,
            random_batches(3, world, 2, 4, WIDTH),
            offload=offload,
            persistent_elements=1,
        )
        assert_same(sharded.module.state_dict(), sharded.whole("master"))
        sharded.zero.close()

    run_world(world, law)


# ---- what code outside a unit sees


@pytest.mark.parametrize("make", [_RootParameters, _SharedParameter, _Attention], ids=["Root", "Shared", "Attention"])
def test_a_state_dict_has_whole_tensors_on_every_rank(make: Callable[[], nn.Module]) -> None:
    def law(rank: int) -> None:
        plain = seeded(make)
        sharded = Sharded(copy.deepcopy(plain), 3, rank, 2)
        state = sharded.module.state_dict()
        assert list(state) == list(plain.state_dict())
        for name, values in plain.state_dict().items():
            assert torch.equal(state[name], values), name
            assert type(state[name]) is Tensor
        batches = random_batches(2, 2, 1, 4, WIDTH)
        plain_steps(plain, batches)
        for step in batches:
            sharded.step(step[rank])
        assert_same(sharded.module.state_dict(), plain.state_dict())

    run_world(2, law)


CHANGES: list[Callable[[nn.Parameter], Any]] = [
    lambda w: w.mul_(2),
    lambda w: w.__setitem__(0, 1.0),
    lambda w: w.__iadd__(1.0),
    nn.init.zeros_,
    lambda w: w.copy_(torch.zeros_like(w)),
    lambda w: setattr(w, "data", torch.zeros(w.shape)),
    lambda w: w.data.mul_(2),
    lambda w: w.view(-1).zero_(),
    lambda w: w[0].zero_(),
    lambda w: torch._foreach_mul_([w], 2.0),
    lambda w: torch.mul(torch.ones(w.shape), 2.0, out=w),
]


def test_a_change_of_an_ungathered_parameter_is_refused_by_name() -> None:
    def law(rank: int) -> None:
        sharded = Sharded(seeded(_Chain), 3, rank, 2)
        weight = sharded.module.blocks[1].a.weight
        for change in CHANGES:
            with torch.no_grad(), pytest.raises(RuntimeError, match=r"blocks\.1\.a\.weight"):
                change(weight)

    run_world(2, law)


class _Clamps(_Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class _Renormalizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, WIDTH, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embed(torch.arange(4))


@pytest.mark.parametrize("policy", ["action", "step"])
@pytest.mark.parametrize("block", [_Clamps, _Renormalizes])
def test_a_change_of_a_weight_within_its_forward_is_refused_by_name(
    block: Callable[[], nn.Module], policy: str
) -> None:
    def law(rank: int) -> None:
        sharded = Sharded(seeded(lambda: _Chain(block)), 3, rank, 2, gather_policy=policy)
        with pytest.raises(RuntimeError, match=r"blocks\.0\.(a|embed)\.weight was changed in place within a forward"):
            sharded.accumulate([numbers(4, WIDTH)])

    run_world(2, law)


@dataclass
class _Held:
    x: Tensor


# ---- results and backwards that no hook on a result can follow


class _MakesViews(_Block):
    how: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.b(torch.tanh(self.a(x))))


class _Results(_Chain):
    """Results that the caller changes in place, of blocks that return views."""

    hows: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x.view(-1, WIDTH),
        lambda x: x.transpose(0, 1).transpose(0, 1),
        lambda x: x[:],
        lambda x: x.flatten().view(-1, WIDTH),
        lambda x: x,
    )

    def __init__(self) -> None:
        super().__init__(_MakesViews)
        for block, how in zip(self.blocks, self.hows, strict=True):
            block.how = how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x.square().mean()


class _GradientPenalty(_Chain):
    """Gradients of the input are in the loss (Gulrajani et al. 2017)."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + (slope.norm(dim=1) - 0.1).square().mean()


class _CheckpointedViews(_Results):
    """Recomputation around blocks two at a time, whose results are changed in place."""

    def _two(self, index: int, x: Tensor) -> Tensor:
        for block in self.blocks[index : index + 2]:
            x = block(x)
            x *= 0.7
        return x

    def forward(self, x: Tensor) -> Tensor:
        for index in range(0, 5, 2):
            x = checkpoint(self._two, index, x, use_reentrant=False)
        return x.square().mean()


class _CheckpointedWithin(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(checkpoint(lambda x: torch.tanh(self.a(x)), x, use_reentrant=False))


class _SavedElsewhere(_Chain):
    """What autograd saves goes through hooks of the script's own, around some blocks and within others."""

    def __init__(self) -> None:
        super().__init__(_CheckpointedWithin)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            for block in self.blocks[:3]:
                x = block(x)
        for block in self.blocks[3:]:
            x = block(x)
        return x.square().mean()


class _CallsAnother(_Block):
    """Runs, within its own forward, a block that has the same buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.others: tuple[nn.Module, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        for other in self.others:
            h = h + other(x).repeat(1, 2)[:, :12]
        return x + self.b(h)


class _CallOneAnother(_Chain):
    def __init__(self) -> None:
        super().__init__(_CallsAnother)
        self.blocks[4].others = (self.blocks[2], self.blocks[0])
        self.blocks[1].others = (self.blocks[3],)


def _saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class _CheckpointedInPart(_Chain):
    """Recomputation of all but matrix products."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            contexts = partial(create_selective_checkpoint_contexts, _saves_products)
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()


UNFOLLOWED = [_Results, _GradientPenalty, _CheckpointedViews, _SavedElsewhere, _CallOneAnother, _CheckpointedInPart]


@pytest.mark.parametrize(("stage", "policy"), [(0, "action"), (3, "action"), (3, "step")])
def test_a_backward_finds_the_weights_of_its_own_unit(stage: int, policy: str) -> None:
    run_world(2, _train, stage, [(make, {"gather_policy": policy, "optimizer": _slow}) for make in UNFOLLOWED])


class _ChangesWhatItSaved(_Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        y = self.b(h)
        h.mul_(2)
        return x + y


@pytest.mark.parametrize("stage", [0, 3])
def test_a_change_of_what_autograd_has_saved_is_refused_as_in_plain_torch(stage: int) -> None:
    def law(rank: int) -> None:
        sharded = Sharded(_Chain(_ChangesWhatItSaved), stage, rank, 2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sharded.accumulate([numbers(4, WIDTH)])

    run_world(2, law)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", ["action", "step"])
def test_a_backward_of_a_forward_before_the_last_update_is_refused(stage: int, policy: str) -> None:
    def law(rank: int) -> None:
        sharded = Sharded(seeded(_Chain), stage, rank, 2, gather_policy=policy)
        old = sharded.module(numbers(4, WIDTH).requires_grad_())
        sharded.step([numbers(4, WIDTH, seed=1)])
        with pytest.raises(RuntimeError, match=r"have changed since|modified by an inplace operation"):
            old.backward()

    run_world(2, law)


def test_what_a_forward_has_saved_is_freed_with_its_graph() -> None:
    """Without the garbage collector: nothing that autograd saves refers to the node that holds it."""

    def law(rank: int) -> None:
        sharded = Sharded(seeded(_Chain), 3, rank, 2)
        kept = []

        def activate(module: nn.Module, args: Any, y: Tensor) -> Tensor:
            saved = torch.exp(y)  # autograd saves the result
            kept.append(weakref.ref(saved))
            return saved

        for block in sharded.module.blocks:
            block.a.register_forward_hook(activate)
        gc.disable()
        loss = sharded.module(numbers(4, WIDTH))
        assert len(kept) == 5
        del loss
        assert [one() for one in kept] == [None] * 5
        gc.enable()

    run_world(2, law)


class _KeepsItsWeights(_Block):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.a.weight.t()
        return super().forward(x)


class _UsesKept(_Chain):
    def __init__(self) -> None:
        super().__init__(_KeepsItsWeights)
        self.blocks.append(_UsesAnother())

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[2](self.blocks[0](x))
        return self.blocks[5](x, self.blocks[0].kept).square().mean()


class _UsesAnother(_Block):
    def forward(self, x: Tensor, kept: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + (x @ kept)[:, :WIDTH]


def test_a_view_of_weights_that_are_gone_is_refused_by_name() -> None:
    def law(rank: int) -> None:
        sharded = Sharded(seeded(_UsesKept), 3, rank, 2)
        with pytest.raises(RuntimeError, match=r"bucket of blocks\.0\.a\.weight outlives"):
            sharded.module(numbers(4, WIDTH).requires_grad_())

    run_world(2, law)


class _ReturnsHeldWeights(_Block):
    def forward(self, x: Tensor) -> Any:
        return _Held(self.a.weight.t())


def test_weights_that_leave_in_an_object_are_refused() -> None:
    def law(rank: int) -> None:
        sharded = Sharded(_Chain(_ReturnsHeldWeights, 3), 3, rank, 2)
        with pytest.raises(TypeError, match=r"_ReturnsHeldWeights returns weights in an object"):
            sharded.module.blocks[0](numbers(4, WIDTH))

    run_world(2, law)


# ---- ranks that use different units


class _Routed(_Chain):
    """A batch (order, x) goes through these blocks, one of which is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].a, self.blocks[3].b = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, batch: tuple[tuple[int, ...], Tensor]) -> Tensor:
        order, x = batch
        for index in order:
            x = self.blocks[index](x)
        return x.square().mean()


# By rank, the blocks that it runs; and two that differ, if that must be noticed: where all is gathered ahead or still there,
# every block has its own weights nevertheless.
ORDERS = {
    "an expert of its own": (((0, 1, 4), (0, 3, 4)), (1, 3)),
    "a skipped layer": (((0, 1, 2, 3, 4), (0, 1, 3, 4)), ()),
    "a skipped last layer": (((0, 1, 2), (0, 1)), ()),
    "a skipped first layer": (((0, 1), (1,)), (0, 1)),
    "a layer too many": (((0, 1, 2, 3), (0, 1)), (3,)),
    "another order": (((0, 1, 2, 3), (0, 2, 1, 3)), (1, 2)),
}


@pytest.mark.parametrize("policy", ["action", "step"])
@pytest.mark.parametrize("shares_memory", [True, False], ids=["memory", "gloo"])
@pytest.mark.parametrize(("orders", "differ"), ORDERS.values(), ids=ORDERS)
def test_ranks_that_use_different_units_take_the_plain_step_or_are_told_both_and_no_weight_changes(
    orders: Any, differ: tuple[int, ...], shares_memory: bool, policy: str
) -> None:
    x = numbers(4, WIDTH)
    steps = [[[((0, 1, 2, 3, 4), x)]] * 2, [[(order, x)] for order in orders]]

    def law(rank: int) -> str:
        plain = seeded(_Routed)
        sharded = Sharded(copy.deepcopy(plain), 3, rank, 2, gather_policy=policy, shares_memory=shares_memory)
        plain_steps(plain, steps[:1])
        sharded.step(steps[0][rank])
        before = [bucket.master.read(0, bucket.master.numel).clone() for bucket in sharded.parameters.buckets]
        try:
            sharded.accumulate(steps[1][rank])
            gradients = sharded.whole("gradient")
        except RuntimeError as error:
            after = [bucket.master.read(0, bucket.master.numel) for bucket in sharded.parameters.buckets]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            return f"{type(error).__name__}: {error}"
        assert_same(gradients, plain_gradients(plain, steps[1]))
        return ""

    said = run_world(2, law)
    named = [text for text in said if text.startswith("OrderError")]
    assert named or not any(said)
    assert all(any(f"blocks.{index}.a.weight" in text for text in said) for index in differ), said


def test_where_labels_wait_for_the_end_of_a_pass_wrong_weights_reach_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs: gathers of different units of one size meet, and what they bring is computed with."""
    monkeypatch.setattr("megazero.comm.collectives.choose_backend", lambda *_: TorchBackend())
    orders, x = ((0, 1, 2), (0, 2, 1)), numbers(4, WIDTH)

    def law(rank: int) -> str:
        sharded = Sharded(seeded(_Routed), 3, rank, 2)
        sharded.zero.begin_step(1)
        sharded.module((orders[rank], x)).backward()  # to its end, without an error
        with pytest.raises(OrderError) as caught:
            sharded.reducer.close_pass(0)
        return str(caught.value)

    for text in run_world(2, law):
        assert "blocks.1.a.weight" in text
        assert "blocks.2.a.weight" in text


# ---- between steps


class _Fails(_Chain):
    """Fails on demand in its forward, or in its backward, within a block."""

    fails: str = ""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 2 and self.fails == "forward":
                raise ArithmeticError("on purpose")
            if index == 2 and self.fails == "backward" and x.requires_grad:
                x.register_hook(self._fail)
        return x.square().mean()

    def _fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_step_after_a_failed_one_is_the_plain_one(stage: int, fails: str) -> None:
    def law(rank: int) -> None:
        plain = seeded(_Fails)
        sharded = Sharded(copy.deepcopy(plain), stage, rank, 2)
        for step in random_batches(3, 2, 2, 4, WIDTH):
            sharded.module.fails = fails
            sharded.zero.begin_step(2)
            with pytest.raises(ArithmeticError, match="on purpose"):
                sharded.module(step[rank][0]).backward()
            sharded.module.fails = ""
            sharded.accumulate(step[rank])
            assert_same(sharded.whole("gradient"), plain_gradients(plain, step))

    run_world(2, law)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_changes_nothing_and_sees_the_new_weights(stage: int, context: Any) -> None:
    def law(rank: int) -> None:
        plain = seeded(_RootParameters)
        sharded = Sharded(copy.deepcopy(plain), stage, rank, 2, optimizer=_slow)
        batches = random_batches(3, 2, 2, 4, WIDTH)
        plain_steps(plain, batches, optimizer=_slow)
        x = numbers(4, WIDTH, seed=5)
        for step in batches:
            sharded.module.eval()
            with context():
                sharded.module(x)
            sharded.module.train()
            sharded.step(step[rank])
        with context():
            torch.testing.assert_close(sharded.module(x), plain(x).detach(), **CLOSE)

    run_world(2, law)


# ---- prefetch and traffic


@pytest.mark.parametrize("make", [_Chain, _Twice, _RootParameters, _Skips], ids=["Chain", "Twice", "Root", "Skips"])
def test_prefetching_gathers_nothing_more_than_the_first_step_does(make: Callable[[], nn.Module]) -> None:
    def law(rank: int) -> list[int]:
        sharded = Sharded(seeded(make), 3, rank, 2)
        sent = []
        for step in random_batches(4, 2, 2, 4, WIDTH):
            sharded.state.traffic.reset()
            sharded.step(step[rank])
            sent.append(sharded.state.traffic.sent_bytes["dp", "all_gather"])
        return sent

    for first, *others in run_world(2, law):
        assert first > 0
        assert all(later <= first for later in others)
        assert len(set(others)) == 1


def test_without_a_schedule_the_units_ahead_are_those_of_the_pass_before() -> None:
    history = VisitHistory([0, 0, 0, 1, 1])
    for is_forward, chunk in [
        (True, (0, 1, 2)),
        (False, (2, 1, 0)),
        (True, (0, 1, 2)),
        (False, (2, 1, 0)),
        (True, (0,)),
    ]:
        for unit in chunk:
            history.record(unit, is_forward)
    assert list(history.upcoming()) == [1, 2, 2, 1, 0]
