"""The contract of `megazero.initialize`, each part against plain torch on one process.

Every rank computes the plain run too, on the whole batch, and compares: nothing is expected from our own code.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import run_program, run_world
from saved_memory import Alive
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.data import TensorDataset

import megazero
from megazero.checkpoint.index import CheckpointError, DamagedError
from megazero.deepspeed.full_params import gathered_parameters
from megazero.engine import NonFiniteError
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.spec import LinearSpec, NamedRows
from megazero.parallel_state import ParallelState, RankGrid
from megazero.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from megazero.zero.buffer_pool import BufferPool

WIDTH, HIDDEN, OUT, BATCH = 6, 10, 3, 8
STAGES = (0, 1, 2, 3)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
Make = Callable[[], nn.Module]


# ---------------------------------------------------------------------------------------------------------------------
# What the tests share


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds here are of gloo ranks; one rank alone computes where they do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Net(nn.Module):
    """Two layers; the second stands in a container, so that stage 3 has several units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(HIDDEN, OUT))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x))


class Loss(nn.Module):
    """A model that returns its loss, as `train_batch` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)


def settings(stage: int = 0, dtype: str = "fp32", accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """A configuration of SGD without clipping, whose stage 3 keeps nothing whole."""
    config: dict[str, Any] = {
        "train_batch_size": BATCH * accumulation,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
    }
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    return config | more


def test_the_top_of_the_package_has_its_public_names_alone() -> None:
    stub = Path(megazero.__file__).with_suffix(".pyi").read_text("utf-8")
    declared = re.findall(r"^(?:from .* as |def |(?=__version__))(\w+)", stub, re.MULTILINE)
    assert dir(megazero) == sorted(set(declared))
    assert all(hasattr(megazero, name) for name in dir(megazero))


def seeded(make: Make, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def bring(make: Make, config: dict[str, Any], **arguments: Any) -> Any:
    """An engine around a model that starts equal to `seeded(make)` on every rank, though the others build another."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return megazero.initialize(model=seeded(make, 5 + 100 * rank), config=config, **arguments)[0]


def batch(index: int) -> tuple[Tensor, Tensor]:
    """The global micro-batch of this number."""
    draw = torch.Generator().manual_seed(index)
    return torch.randn(BATCH, WIDTH, generator=draw), torch.randn(BATCH, OUT, generator=draw)


def part(engine: Any, *tensors: Tensor) -> list[Tensor]:
    dp = engine.parallel_state.dp
    return [tensor.chunk(dp.size)[dp.index] for tensor in tensors]


def train(engine: Any, steps: Sequence[int]) -> None:
    """Steps with the contract's three calls."""
    for step in steps:
        for index in range(engine.gradient_accumulation_steps()):
            x, y = part(engine, *batch(step * engine.gradient_accumulation_steps() + index))
            engine.backward(F.mse_loss(engine(x).float(), y))
            engine.step()


def train_plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[int],
    *,
    accumulation: int = 1,
    scheduler: Any = None,
    max_norm: float = 0.0,
) -> list[float]:
    """The same steps in plain torch; their gradient norms."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        for index in range(accumulation):
            x, y = batch(step * accumulation + index)
            (F.mse_loss(model(x), y) / accumulation).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or 1e9)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return norms


def weights(engine: Any) -> dict[str, Tensor]:
    with gathered_parameters(engine) as whole:
        return {name: value.clone() for name, value in whole.items()}


def assert_equal(engine: Any, plain: nn.Module | dict[str, Tensor], note: object = "", **tolerance: float) -> None:
    """The engine's weights are those of a plain model."""
    expected = dict(plain.named_parameters()) if isinstance(plain, nn.Module) else plain
    got = weights(engine)
    assert got.keys() == expected.keys()
    for name, value in got.items():
        torch.testing.assert_close(
            value, expected[name].detach(), **(tolerance or CLOSE), msg=lambda text, at=(note, name): f"{at}: {text}"
        )


EXACT = {"rtol": 0.0, "atol": 0.0}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def refuses(error: type[BaseException], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=text):
        call()


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers and schedules


def _every_way_to_give_an_optimizer(rank: int) -> None:
    plain = seeded(Net)
    optimizer = sgd(plain.parameters())
    schedule = lr_scheduler.StepLR(optimizer, 2, 0.5)
    norms = train_plain(plain, optimizer, range(4), accumulation=2, scheduler=schedule, max_norm=0.3)
    assert max(norms) > 0.3  # clipping clips
    by_config = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    for stage in STAGES:
        for way in ("object", "callable", "config"):
            model = seeded(Net, 5 + rank)
            config = settings(stage, accumulation=2, gradient_clipping=0.3, optimizer=by_config)
            own = sgd(model.parameters()) if way == "object" else None
            given = {"object": own, "callable": sgd, "config": None}[way]
            scheduled = lr_scheduler.StepLR(own, 2, 0.5) if own else lambda it: lr_scheduler.StepLR(it, 2, 0.5)
            engine, made, loader, _ = megazero.initialize(
                model=model, optimizer=given, lr_scheduler=scheduled, config=config
            )
            assert loader is None
            assert made is engine.optimizer
            for step, norm in enumerate(norms):
                train(engine, [step])
                assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-4), (stage, way)
            assert engine.get_lr() == [0.1 * 0.5**2]
            assert engine.get_mom() == [0.9]
            assert_equal(engine, plain, (stage, way))
            if own is not None:
                assert made.param_groups[0] is own.param_groups[0]
            assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (4, 8, 4 * 2 * BATCH)


@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_may_be_an_object_a_callable_or_an_entry_of_the_configuration(world: int) -> None:
    run_world(world, _every_way_to_give_an_optimizer)


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": decayed, "lr": 0.05, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]


def _groups_stay_apart(rank: int, world: int, folder: Path, ways: Sequence[str], loads: bool) -> None:
    plain = seeded(Net)
    optimizer = torch.optim.AdamW(_two_groups(plain), lr=0.02)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    train_plain(plain, optimizer, range(2), scheduler=schedule)
    at_two = copy.deepcopy(dict(plain.named_parameters()))
    train_plain(plain, optimizer, range(2, 4), scheduler=schedule)
    for stage in STAGES:
        for way in ways:
            model = seeded(Net)
            config = settings(stage, optimizer={"type": "AdamW", "params": {"lr": 0.02}})
            own = torch.optim.AdamW(_two_groups(model), lr=0.02) if way == "object" else None
            engine, _, _, _ = megazero.initialize(
                model=model,
                optimizer=own,
                model_parameters=None if own else _two_groups(model),
                lr_scheduler=lambda it: lr_scheduler.ExponentialLR(it, 0.9),
                config=config,
            )
            if loads:
                found, _ = engine.load_checkpoint(folder, f"{way}{stage}")
                assert found is not None
            else:
                train(engine, range(2))
                engine.save_checkpoint(folder, f"{way}{stage}")
            assert_equal(engine, at_two, (stage, way))
            assert engine.get_lr() == pytest.approx([0.05 * 0.81, 0.02 * 0.81])
            train(engine, range(2, 4))
            assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.3, 0.0]
            assert_equal(engine, plain, (stage, way))


@pytest.mark.slow
def test_groups_keep_their_settings_through_training_saving_and_another_number_of_ranks(tmp_path: Path) -> None:
    run_world(2, _groups_stay_apart, 2, tmp_path, ("object", "config"), False)
    run_world(1, _groups_stay_apart, 1, tmp_path, ("object", "config"), True)


def test_a_schedule_of_another_optimizer_is_an_error() -> None:
    """It would change the groups of an optimizer that nobody steps."""
    model = Net()
    stranger = lr_scheduler.StepLR(sgd(model.parameters()), 1)
    refuses(ValueError, "optimizer", lambda: megazero.initialize(model=model, lr_scheduler=stranger, config=settings()))


def test_a_schedule_that_watches_the_loss_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def plateau(optimizer: Any) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9, factor=0.5)

    def run(engine: Any, steps: Sequence[int]) -> list[float]:
        rates = []
        for step in steps:
            train(engine, [step])
            rates += engine.get_lr()
        return rates

    straight = run(bring(Net, settings(), lr_scheduler=plateau), range(6))
    engine = bring(Net, settings(), lr_scheduler=plateau)
    first = run(engine, range(2))
    engine.save_checkpoint(tmp_path)
    resumed = bring(Net, settings(), lr_scheduler=plateau)
    resumed.load_checkpoint(tmp_path)
    assert first + run(resumed, range(2, 6)) == pytest.approx(straight)
    assert len(set(straight)) > 1


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches


def _accumulates(rank: int) -> None:
    plain = seeded(Net)
    train_plain(plain, sgd(plain.parameters()), range(2), accumulation=3)
    for stage in STAGES:
        for way in ("counted", "said", "no_sync"):
            engine = bring(Net, settings(stage, accumulation=3))
            engine.parallel_state.traffic.reset()  # of the start
            sent = engine.parallel_state.traffic.sent_bytes
            for index in range(6):
                x, y = part(engine, *batch(index))
                is_last = index % 3 == 2
                assert way == "said" or engine.is_gradient_accumulation_boundary() is is_last
                if way == "said":
                    engine.set_gradient_accumulation_boundary(is_last)
                if way != "no_sync" or is_last:
                    engine.backward(F.mse_loss(engine(x), y))
                    engine.step()
                    assert engine.was_step_applied() is is_last
                    continue
                with engine.no_sync():
                    out = engine(x)
                    before = sum(sent.values())
                    engine.backward(F.mse_loss(out, y))
                    # stage 3 still gathers weights, with all_gather; no gradient travels
                    after = sum(sent.values())
                    assert stage == 3 or after == before
                    assert not any("reduce" in operation for _, operation in sent if engine.global_steps == 0)
                engine.step()
                assert not engine.was_step_applied()
            assert engine.global_steps == 2
            assert_equal(engine, plain, (stage, way))


@pytest.mark.parametrize("world", [1, 2])
def test_every_way_to_accumulate_gives_the_plain_weights(world: int) -> None:
    run_world(world, _accumulates)


class Leaky(nn.Module):
    """Twelve weights of 1 KiB, three in a block, and a head; a batch says which of them it leaves out.

    `order`: of the blocks.  `wraps`: a forward of a block.
    """

    def __init__(self, order: Sequence[int] = range(4), wraps: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LeakyBlock() for _ in range(4))
        self.head = nn.Linear(16, 16, bias=False)
        self.order, self.wraps = order, wraps

    def forward(self, x: Tensor, left_out: Sequence[int] = ()) -> Tensor:
        for index in self.order:
            args = x, [one - 3 * index for one in left_out]
            x = self.wraps(self.blocks[index], *args) if self.wraps else self.blocks[index](*args)
        return self.head(x).square().mean()


class LeakyBlock(nn.Module):
    """See `Leaky`."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(3))

    def forward(self, x: Tensor, left_out: Sequence[int]) -> Tensor:
        for index, weight in enumerate(self.weights):
            x = x if index in left_out else x + torch.tanh(x @ weight)
        return x


# by rank, what its two micro-batches leave out
LEFT_OUT = {
    "nothing": [[(), ()], [(), ()]],
    "what comes first": [[(11,), (11, 10, 9)], [(11,), ()]],
    "what comes last": [[(), (0, 1, 2)], [(0,), (0,)]],
    "one of two ranks": [[(), ()], [(4, 10), (5,)]],
    "almost all": [[range(1, 12), range(11)], [range(3, 12), (8, 7, 6, 5)]],
}


def leaky_x(step: int, rank: int, index: int) -> Tensor:
    """It requires a gradient, so that a block that leaves all its weights out is still part of the backward."""
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(100 * step + 10 * rank + index)).requires_grad_()


def _leaky(make: Callable[[], Leaky], stage: int, left_out: list[Any], steps: int = 3) -> list[int]:
    """Two ranks' steps are the plain ones; of each, the bytes of the gradient buffers beyond their limit."""
    zero = {"stage": stage, "reduce_bucket_size": 512, "stage3_prefetch_bucket_size": 0}
    zero |= {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    momentum = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
    engine = bring(make, settings(stage, accumulation=2, zero_optimization=zero, train_batch_size=8) | momentum)
    plain, reducer, beyond = seeded(make), engine.sharded_model.reducer, [0] * steps
    optimizer, rank = sgd(plain.parameters()), dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        acquire = BufferPool.acquire
        for step in range(steps):

            def note(self: BufferPool, *args: Any, step: int = step, **rest: Any) -> Tensor:
                buffer = acquire(self, *args, **rest)
                beyond[step] = max(beyond[step], reducer.reductions.buffer_bytes - reducer.reductions.most_buffer_bytes)
                return buffer

            patch.setattr(BufferPool, "acquire", note)
            optimizer.zero_grad()
            for index in range(2):
                for of_rank in range(2):
                    (plain(leaky_x(step, of_rank, index), left_out[of_rank][index]) / 4).backward()
                engine.backward(engine(leaky_x(step, rank, index), left_out[rank][index]))
                engine.step()
            optimizer.step()
    assert_equal(engine, plain, (stage, left_out))
    return beyond


def test_under_stage_3_gradient_buffers_stay_within_two_buckets_whichever_parameters_a_micro_batch_leaves_out() -> None:
    def law(rank: int) -> None:
        for left_out in LEFT_OUT.values():
            assert max(_leaky(Leaky, 3, left_out)) <= 0, left_out
            _leaky(Leaky, 2, left_out)  # trains as plain torch does

    run_world(2, law)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_buffers_stay_within_two_buckets_from_the_second_step_in_any_order_of_use(stage: int) -> None:
    def law(rank: int) -> None:
        for order in ((3, 2, 1, 0), (2, 0, 3, 1)):
            first, *others = _leaky(partial(Leaky, order), stage, LEFT_OUT["nothing"])
            assert first > 0 >= max(others), order

    run_world(2, law)


def test_a_module_may_be_compiled_before_stage_3_gathers_it() -> None:
    def law(rank: int) -> None:
        _leaky(lambda: torch.compile(Leaky(), backend="eager"), 3, LEFT_OUT["nothing"], 2)  # type: ignore[return-value]

    run_world(2, law)


class TwiceThenNever(nn.Module):
    """Uses a weight in two re-entrant checkpoints in one micro-batch, and not at all in another."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = torch_checkpoint(self.one, x, use_reentrant=True)
        return self.two(x).square().mean()


def test_a_gradient_that_comes_twice_in_a_pass_is_refused() -> None:
    """Ranks would start different numbers of reductions: wrong gradients at stage 1, a hang at stages 2 and 3."""

    def law(rank: int) -> None:
        for stage in (1, 2, 3):
            engine = bring(TwiceThenNever, settings(stage, accumulation=2, train_batch_size=8))
            with pytest.raises(RuntimeError, match=r"one.weight came more than 1 times in 1 backward passes"):
                engine.backward(engine(leaky_x(0, rank, 0), 2))

    run_world(2, law, timeout=60)


def test_a_backward_that_the_engine_cannot_count_is_refused() -> None:
    """Its gradients were wrong: reduced a micro-batch too early at stages 0 and 1, and divided twice."""

    def law(rank: int) -> None:
        runs = partial(torch_checkpoint, use_reentrant=True)
        for stage in (0, 1):
            engine = bring(partial(Leaky, wraps=runs), settings(stage, accumulation=2, train_batch_size=8))
            with pytest.raises(RuntimeError, match=r"call engine.backward\(loss\), or use megazero.checkpoint"):
                engine(leaky_x(0, rank, 0)).backward()
        engine = bring(Leaky, settings(2, accumulation=1, train_batch_size=4))
        y = engine.module.blocks[0](leaky_x(0, rank, 0), ())
        y.register_hook(lambda _: engine.backward(engine(leaky_x(1, rank, 0))))
        with pytest.raises(RuntimeError, match=r"engine.backward within a backward"):
            engine.backward(y.sum())

    run_world(2, law, timeout=60)


def test_what_only_a_backward_within_the_backward_reaches_is_not_left_out() -> None:
    runs = partial(torch_checkpoint, use_reentrant=True)

    def law(rank: int) -> None:
        for stage, name in itertools.product(STAGES, ("what comes first", "one of two ranks")):
            first, second = LEFT_OUT[name]  # at stage 3 other ranks would wait for what this one leaves out
            _leaky(partial(Leaky, wraps=runs), stage, [second, second] if stage == 3 else [first, second], 2)

    run_world(2, law)


def test_calls_in_the_wrong_order_are_errors_and_leave_the_engine_usable() -> None:
    plain = seeded(Net)
    train_plain(plain, sgd(plain.parameters()), [0], accumulation=2)
    for stage in STAGES:
        engine = bring(Net, settings(stage, accumulation=2))

        def back(index: int, engine: Any = engine) -> None:
            x, y = batch(index)
            engine.backward(F.mse_loss(engine(x), y))

        refuses(ValueError, r"shape \[8, 3\].*scalar", lambda: engine.backward(engine(batch(0)[0])))  # noqa: B023
        back(7)
        engine.step()
        engine.zero_grad()
        engine.set_gradient_accumulation_boundary(True)
        refuses(RuntimeError, "without engine.backward", engine.step)
        engine.set_gradient_accumulation_boundary(False)
        back(0)
        engine.step()
        engine.set_gradient_accumulation_boundary(True)
        with engine.no_sync():
            refuses(RuntimeError, "no_sync", engine.step)
        back(1)
        refuses(RuntimeError, "engine.step", engine.optimizer.step)
        engine.step()
        assert_equal(engine, plain, stage)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers that are not finite, and loss scaling


def _fp16(rank: int, world: int) -> None:
    for stage in STAGES:
        scaling = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 1}
        engine = bring(Net, settings(stage, fp16=scaling), lr_scheduler=lambda it: lr_scheduler.ExponentialLR(it, 0.5))
        before, scale = weights(engine), engine.loss_scale
        x, y = part(engine, *batch(9))
        loss = F.mse_loss(engine(x).float(), y)
        engine.backward(loss * float("inf") if rank == world - 1 else loss)
        engine.step()
        assert not engine.was_step_applied()
        assert_equal(engine, before, stage, **EXACT)
        assert (engine.skipped_steps, engine.global_steps, engine.get_lr()) == (1, 1, [0.1])
        assert engine.loss_scale == scale / 2
        plain = seeded(Net).half().float()
        optimizer = sgd(plain.parameters())
        for step in range(4):  # the scale doubles after each
            train(engine, [step])
            train_plain(plain, optimizer, [step])
            for group in optimizer.param_groups:
                group["lr"] /= 2
        assert engine.was_step_applied()
        assert engine.loss_scale == scale / 2 * 2**4
        assert engine.get_lr() == [0.1 / 2**4]
        assert engine.skipped_steps == 1
        assert_equal(engine, plain, stage, rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fp16_skips_on_all_ranks_what_overflows_on_one_and_unscales_what_it_scaled(world: int) -> None:
    run_world(world, _fp16, world)


def _not_finite(rank: int, dtype: str) -> None:
    for stage in STAGES:
        engine = bring(Net, settings(stage, dtype, accumulation=2))
        train(engine, [0])
        before = weights(engine)
        for index in range(2):
            x, y = part(engine, *batch(index))
            loss = F.mse_loss(engine(x).float(), y)
            engine.backward(loss * float("nan") if rank == 1 else loss)
            if index:
                refuses(NonFiniteError, "weights were not changed", engine.step)
            else:
                engine.step()
        assert_equal(engine, before, stage, **EXACT)
        # whoever goes on all the same begins a whole step
        assert not engine.is_gradient_accumulation_boundary()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_without_loss_scaling_a_gradient_that_is_not_finite_is_an_error_on_every_rank(dtype: str) -> None:
    run_world(2, _not_finite, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


class Normed(nn.Module):
    """With running statistics, and features that are drawn once and never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(WIDTH, WIDTH))
        self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, OUT))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.cos(x @ self.features))


ADAM = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}}


def _plain_after(steps: int) -> nn.Module:
    plain = seeded(Net)
    train_plain(plain, torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.01), range(steps))
    return plain


def _saves(rank: int, folder: Path, stages: Sequence[int]) -> None:
    for stage in stages:
        engine = bring(Net, settings(stage, optimizer=ADAM))
        train(engine, range(2))
        client = {"epoch": 3, "rng": torch.arange(4), "nested": [{"best": 0.5}, "text", None]}
        assert engine.save_checkpoint(folder / str(stage), client_state=client)


def _goes_on(
    rank: int, folder: Path, stages: Sequence[tuple[int, int]], dtype: str, first: int, last: int, saves: str
) -> None:
    """From step `first` to step `last`, of what another number of ranks at another stage has written."""
    for wrote, stage in stages:
        engine = bring(Net, settings(stage, dtype, optimizer=ADAM))
        found, client = engine.load_checkpoint(folder / str(wrote))
        assert found == str(folder / str(wrote) / f"global_step{first}")
        if first == 2:
            assert client["epoch"] == 3
            assert torch.equal(client["rng"], torch.arange(4))
            assert client["nested"] == [{"best": 0.5}, "text", None]
        assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (first, first * BATCH, first)
        if dtype == "fp32":
            assert_equal(engine, _plain_after(first), (wrote, stage))
        train(engine, range(first, last))
        tolerance = CLOSE if dtype == "fp32" else {"rtol": 2e-2, "atol": 2e-2}
        assert_equal(engine, _plain_after(last), (wrote, stage), **tolerance)
        if saves:
            engine.save_checkpoint(folder / saves / str(stage))


@pytest.mark.slow
def test_two_ranks_save_one_goes_on_and_then_four(tmp_path: Path) -> None:
    same = [(stage, stage) for stage in STAGES]
    run_world(2, _saves, tmp_path, STAGES)
    run_world(1, _goes_on, tmp_path, same, "fp32", 2, 3, "then")
    run_world(4, _goes_on, tmp_path / "then", same, "fp32", 3, 5, "")
    run_world(2, _goes_on, tmp_path, [(1, 3), (3, 0), (0, 2)], "fp32", 2, 4, "")
    run_world(2, _goes_on, tmp_path, [(1, 3), (3, 1)], "bf16", 2, 4, "half")
    run_world(1, _goes_on, tmp_path / "half", [(1, 2)], "fp16", 4, 4, "")


def _buffers(rank: int, world: int, folder: Path, loads: bool) -> dict[str, Tensor]:
    engine = bring(Normed, settings(3 if loads else 1))
    assert torch.equal(engine.module.features, seeded(Normed).features), "buffers start equal, like the weights"
    if loads:
        engine.load_checkpoint(folder)
    else:
        train(engine, range(2))
        engine.save_checkpoint(folder)
    return {name: buffer.numpy() for name, buffer in engine.module.named_buffers()}


def test_buffers_come_back_on_every_rank(tmp_path: Path) -> None:
    """Each rank has its own running statistics, as in torch's DDP without broadcasts; rank 0's are saved."""
    saved = run_world(2, _buffers, 2, tmp_path, False)[0]
    assert saved["net.1.num_batches_tracked"] == 2
    for loaded in run_world(4, _buffers, 4, tmp_path, True):
        for name, value in saved.items():
            assert (loaded[name] == value).all(), name


def test_what_is_loaded_can_be_chosen(tmp_path: Path) -> None:
    for stage in STAGES:
        folder = tmp_path / str(stage)
        config = settings(stage, optimizer=ADAM)
        halving: dict[str, Any] = {"lr_scheduler": lambda it: lr_scheduler.ExponentialLR(it, 0.5)}
        engine = bring(Net, config, **halving)
        train(engine, range(2))
        engine.save_checkpoint(folder)
        saved = weights(engine)

        def fresh(config: Any = config, halving: Any = halving) -> Any:
            return bring(Net, config, **halving)

        without = fresh()
        without.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
        assert_equal(without, saved, stage, **EXACT)
        assert (without.global_steps, without.get_lr()) == (2, [0.02])
        module_only = fresh()
        module_only.load_checkpoint(folder, load_module_only=True)
        assert_equal(module_only, saved, stage, **EXACT)
        assert (module_only.global_steps, module_only.get_lr()) == (0, [0.02])
        plain = Net()
        plain.load_state_dict(saved)
        train_plain(plain, torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.01), [5])
        for anew in (without, module_only):  # the moments start from nothing
            train(anew, [5])
            assert_equal(anew, plain, stage)


def _names(rank: int, folder: Path) -> None:
    engine = bring(Net, settings(2))
    assert engine.load_checkpoint(folder / "none") == (None, {})
    refuses(CheckpointError, "one tag", lambda: engine.save_checkpoint(folder, f"mine{rank}"))
    engine.save_checkpoint(folder, "first", {"n": 1})
    train(engine, [0])
    engine.save_checkpoint(folder, "second", {"n": 2}, save_latest=False)
    assert engine.load_checkpoint(folder)[1] == {"n": 1}
    assert engine.load_checkpoint(folder, "second")[1] == {"n": 2}
    refuses(CheckpointError, "tag=", lambda: engine.save_checkpoint(folder, "a/b"))
    refuses(CheckpointError, "third", lambda: engine.load_checkpoint(folder, "third"))
    refuses(CheckpointError, "first already holds", lambda: engine.save_checkpoint(folder, "first"))
    assert engine.load_checkpoint(folder, "first")[1] == {"n": 1}
    engine.save_checkpoint(folder)
    assert (folder / "latest").read_text() == "global_step0\n"


def test_tags_name_checkpoints_and_none_is_overwritten(tmp_path: Path) -> None:
    run_world(2, _names, tmp_path)


def _frozen_again(rank: int, folder: Path) -> None:
    def make() -> nn.Module:
        model = Net()
        model.first.requires_grad_(False)
        return model

    for stage in STAGES:
        bring(make, settings(stage)).save_checkpoint(folder / str(stage))
        engine = megazero.initialize(model=seeded(make, 6), config=settings(stage))[0]
        engine.load_checkpoint(folder / str(stage))
        assert_equal(engine, seeded(make), stage, **EXACT)


def test_frozen_weights_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    run_world(2, _frozen_again, tmp_path)


def _other_vector(module: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, module.parameters())


# what parts a module from what is trained; the first and the last but one need data at hand
REPLACEMENTS: tuple[Callable[[nn.Module], Any], ...] = (
    lambda module: setattr(module.first.weight, "data", module.first.weight.data.clamp(-0.1, 0.1)),
    lambda module: setattr(module.first, "weight", nn.Parameter(module.first.weight.detach().clone())),
    lambda module: module.load_state_dict(seeded(Net, 7).state_dict(), assign=True),
    lambda module: setattr(module, "first", seeded(Net, 7).first),
    lambda module: module.first.requires_grad_(False),
    lambda module: setattr(module, "later", nn.Linear(2, 2)),
    lambda module: setattr(module.rest[1], "weight", module.first.weight),
    _other_vector,
    lambda module: parametrize.register_parametrization(module.first, "weight", nn.Identity()),
)


def _replaced(rank: int, folder: Path) -> None:
    for stage, kept in ((0, 0), (2, 0), (3, 0), (3, 1000)):
        for number, replace in enumerate(REPLACEMENTS[: 8 if stage == 3 else None]):
            zero = {"stage": stage, "stage3_param_persistence_threshold": kept}
            engine = bring(Net, settings(zero_optimization=zero))
            if stage == 3 and not kept and number in (0, 7):  # there is nothing to give other data to
                refuses(RuntimeError, "__set__ on first.weight", lambda engine=engine, it=replace: it(engine.module))
                continue
            if number == 4:  # undone in time
                engine.module.first.requires_grad_(False)
                engine.module.first.requires_grad_(True)
                train(engine, [0])
            replace(engine.module)
            text = r"parameter (first|rest\.1|later)\.(weight|bias) was frozen, unfrozen, tied, added, replaced"
            refuses(CheckpointError, text, lambda engine=engine: engine.save_checkpoint(folder))
            if number < 5:  # whose forward still runs
                refuses(RuntimeError, text, lambda engine=engine: train(engine, [0]))


def test_weights_that_are_no_longer_what_is_trained_are_refused_by_name(tmp_path: Path) -> None:
    run_world(2, _replaced, tmp_path)


@pytest.mark.parametrize("file", ["client_state.pt", "lr_scheduler.pt", "buffers.safetensors"])
def test_a_damaged_file_of_a_script_is_refused_by_its_name(tmp_path: Path, file: str) -> None:
    engine = bring(Normed, settings(1, optimizer=ADAM), lr_scheduler=partial(lr_scheduler.ConstantLR, factor=0.5))
    engine.save_checkpoint(tmp_path, "a", client_state={"epoch": 3})
    path = tmp_path / "a" / file
    path.write_bytes(path.read_bytes()[:-7])
    refuses(DamagedError, rf"a/{file} has \d+ bytes, \d+ were written", lambda: engine.load_checkpoint(tmp_path, "a"))


LAST_SAVE_FAILS = """
import sys
from pathlib import Path

import torch

import megazero

root = Path(sys.argv[1])
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
engine, *_ = megazero.initialize(model=torch.nn.Linear(2, 2), config=config)
engine.save_checkpoint(root, tag="a", asynchronous=True)
if sys.argv[2] == "fails":
    engine.finish_saving()
    (root / "b").mkdir()
    (root / "b" / "notes.txt").write_text("mine")
    engine.save_checkpoint(root, tag="b", asynchronous=True)
print("the script is done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "status"), [("well", 0), ("fails", 1)])
def test_a_script_whose_last_checkpoint_fails_behind_its_back_fails(tmp_path: Path, ends: str, status: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAST_SAVE_FAILS)
    words = [sys.executable, str(script), str(tmp_path / "saved"), ends]
    done = run_program(*words)
    assert (done.returncode, "the script is done" in done.stdout) == (status, True), done.stderr
    assert ("the last checkpoint was not saved" in done.stderr) is (ends == "fails")
    assert ("holds notes.txt" in done.stderr) is (ends == "fails")


def test_what_does_not_fit_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    engine = bring(Net, settings())
    train(engine, [0])
    engine.save_checkpoint(tmp_path)
    wider = bring(lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, OUT)), settings())
    refuses(CheckpointError, "of another model", lambda: wider.load_checkpoint(tmp_path))
    model = seeded(Net)
    grouped, *_ = megazero.initialize(model=model, optimizer=sgd(_two_groups(model)), config=settings())
    before = weights(grouped)
    refuses(CheckpointError, "groups", lambda: grouped.load_checkpoint(tmp_path))
    assert_equal(grouped, before, **EXACT)
    assert grouped.global_steps == 0


def _saves_within_a_step(rank: int, folder: Path) -> None:
    engine = bring(Net, settings(2, accumulation=2))
    x, y = part(engine, *batch(0))
    engine.backward(F.mse_loss(engine(x), y))
    engine.step()
    refuses(CheckpointError, "1 of 2 micro-batches", lambda: engine.save_checkpoint(folder, "within"))
    engine.backward(F.mse_loss(engine(x), y))
    engine.step()
    engine.save_checkpoint(folder, "between")


def test_a_checkpoint_within_a_step_is_refused(tmp_path: Path) -> None:
    run_world(2, _saves_within_a_step, tmp_path)
    assert not (tmp_path / "within").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Models


class OwnInit(nn.Module):
    """Initialised the usual ways: by torch, through self.apply, by .data, and by a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(0.5 * torch.ones(WIDTH))
        self.apply(self._start)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=3.0)
            module.bias.data.fill_(0.25)
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.5)
            module.weight.data[0].zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (self.norm(self.recurrent(x)[0]) * self.scale).square().mean()


def _inits(rank: int) -> list[dict[str, Any]]:
    found = []
    for stage in STAGES:
        torch.manual_seed(rank)  # the script's own seed does not matter
        with megazero.zero.Init():
            model = OwnInit()
        engine = megazero.initialize(model=model, config=settings(stage))[0]
        start = weights(engine)
        engine.backward(engine(torch.arange(8).view(2, 4) % 11))
        engine.step()
        moved = weights(engine)
        for name in ("embed.weight", "recurrent.weight_hh_l0", "scale"):
            assert not torch.equal(start[name], moved[name]), (stage, name)
        found.append({name: value.numpy() for name, value in start.items()})
    return found


def test_a_model_built_under_init_starts_equal_on_every_shape() -> None:
    every = [start for world in (1, 2, 4) for of_rank in run_world(world, _inits) for start in of_rank]
    for start in every[1:]:
        for name, value in every[0].items():
            assert (start[name] == value).all(), name
    start = every[0]
    assert start["blocks.1.weight"].std() == pytest.approx(3.0, rel=0.4)
    assert (start["blocks.0.weight"] != start["blocks.1.weight"]).all()
    assert (start["blocks.2.bias"] == 0.25).all()
    assert (start["embed.weight"][0] == 0).all()
    assert start["embed.weight"][1:].std() == pytest.approx(0.5, rel=0.3)
    assert abs(start["recurrent.weight_ih_l0"]).max() <= WIDTH**-0.5
    assert (start["norm.weight"] == 1).all()
    assert (start["scale"] == 0.5).all()


def _copied() -> nn.Module:
    layer = nn.Linear(3, 3)
    nn.init.constant_(layer.bias, 1.0)
    copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
    nn.init.constant_(layer.bias, 2.0)  # the copies are drawn by then
    nn.init.constant_(copies[1].weight, 3.0)
    copies[2].weight.data.add_(torch.randn_like(copies[2].weight))
    twice = copy.deepcopy(copies[2])
    nn.init.constant_(copies[2].bias, 4.0)
    return nn.ModuleList([*copies, twice, layer])


def test_a_copy_of_a_module_goes_on_by_itself_under_init() -> None:
    with megazero.zero.Init():
        model = _copied()
    found = weights(bring(lambda: model, settings()))
    assert [found[f"{at}.bias"].unique().tolist() for at in range(5)] == [[1.0], [1.0], [4.0], [1.0], [2.0]]
    assert torch.equal(found["0.weight"], found["4.weight"])  # as a copy in memory is
    assert found["1.weight"].eq(3.0).all()
    assert torch.equal(found["2.weight"], found["3.weight"])
    assert not torch.isclose(found["2.weight"], found["0.weight"]).any()


def _whole_within_whole(rank: int) -> None:
    gathered = megazero.zero.GatheredParameters
    for stage in STAGES:
        layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        engine = megazero.initialize(model=layers, config=settings(stage))[0]
        weight, traffic = engine.module[0].weight, engine.parallel_state.traffic
        with torch.no_grad(), gathered(list(engine.module.parameters()), modifier_rank=0):
            if rank == 0:
                weight.fill_(2.0)
            with gathered(weight):  # DeepSpeed's scripts read what a caller may have gathered
                assert stage < 3 or rank > 0 or weight.eq(2.0).all()
            with pytest.raises(ValueError, match=r"weight is already within .*modifier_rank=0"):
                gathered(weight, modifier_rank=1).__enter__()
        assert weights(engine)["0.weight"].eq(2.0).all(), stage
        sent = []
        for change in (0.0, 1.0):
            traffic.reset()
            with torch.no_grad(), gathered(engine.module[1].weight, modifier_rank=0):
                engine.module[1].weight.add_(change)
            sent.append(sum(traffic.sent_bytes.values()))
        assert sent[0] <= (100 if stage == 3 else 8), stage  # 20 elements of a unit, and who has changed what
        assert stage < 3 or sent[1] - sent[0] <= 600, (stage, sent)  # of 8 units one
        engine.close()


def test_whole_parameters_may_be_asked_for_within_each_other_and_send_what_changed() -> None:
    run_world(2, _whole_within_whole)


def _wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(200, 200) for _ in range(12)))


def test_under_init_no_two_parameters_are_whole_at_once() -> None:
    weight = 4 * 200 * 200
    with Alive(weight) as plain:
        _wide()
    with Alive(weight) as live, megazero.zero.Init():
        _wide()
    assert plain.most_bytes >= 12 * weight
    assert live.most_bytes <= weight


class ParallelMlp(nn.Module):
    """A dense MLP of layers cut over tp; see `Net` for the plain one."""

    def __init__(self, state: ParallelState, values: nn.Module) -> None:
        super().__init__()
        tp = state.tp
        up = LinearSpec((NamedRows("up.weight", HIDDEN),), WIDTH, (NamedRows("up.bias", HIDDEN),))
        down = LinearSpec((NamedRows("down.weight", OUT),), HIDDEN, (NamedRows("down.bias", OUT),))
        self.up, self.down = ColumnParallelLinear(up, tp), RowParallelLinear(down, tp)
        with torch.no_grad():  # a script fills its part: the layers have no values of their own
            self.up.weight.copy_(values.first.weight.chunk(tp.size)[tp.index])
            self.up.bias.copy_(values.first.bias.chunk(tp.size)[tp.index])
            self.down.weight.copy_(values.rest[1].weight.chunk(tp.size, 1)[tp.index])
            self.down.bias.copy_(values.rest[1].bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x[None])))[0]


def _tensor_parallel(rank: int, folder: Path) -> None:
    plain = seeded(Net)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.01)
    norms = train_plain(plain, optimizer, range(3), max_norm=0.5)
    state = ParallelState(RankGrid(tp=2, dp=2), rank)
    for stage in STAGES:
        model = ParallelMlp(state, seeded(Net))
        engine, *_ = megazero.initialize(
            model=model, mpu=state, config=settings(stage, optimizer=ADAM, gradient_clipping=0.5)
        )
        for step, norm in enumerate(norms):
            train(engine, [step])
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-4)
        tp = state.tp
        expected = {
            "up.weight": plain.first.weight.chunk(2)[tp.index],
            "up.bias": plain.first.bias.chunk(2)[tp.index],
            "down.weight": plain.rest[1].weight.chunk(2, 1)[tp.index],
            "down.bias": plain.rest[1].bias,
        }
        assert_equal(engine, expected, stage)
        engine.save_checkpoint(folder / str(stage))


def _dense_again(rank: int, folder: Path) -> None:
    """One rank reads what two tensor-parallel ones have written."""
    plain = seeded(Net)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.01)
    train_plain(plain, optimizer, range(4), max_norm=0.5)
    state = ParallelState(RankGrid(), rank)
    engine, *_ = megazero.initialize(
        model=ParallelMlp(state, Net()), mpu=state, config=settings(1, optimizer=ADAM, gradient_clipping=0.5)
    )
    engine.load_checkpoint(folder / "3")
    train(engine, [3])
    names = {"up": plain.first, "down": plain.rest[1]}
    assert_equal(engine, {f"{at}.{key}": value for at, of in names.items() for key, value in of.named_parameters()})


def test_a_model_of_parallel_layers_equals_the_dense_one_at_every_stage(tmp_path: Path) -> None:
    run_world(4, _tensor_parallel, tmp_path)
    run_world(1, _dense_again, tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Whole parameters


def _edits(rank: int, dtype: str) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    for stage in STAGES:
        engine = bring(Net, settings(stage, dtype, optimizer={"type": "SGD", "params": {"lr": 0.1}}))
        with gathered_parameters(engine, "first.weight") as whole:
            assert list(whole) == ["first.weight"]
            whole["first.weight"].zero_()  # without modifier_rank nothing comes of it
        assert_equal(engine, seeded(Net), (stage, dtype), **EXACT)
        plain = seeded(Net)
        with torch.no_grad():
            plain.first.weight.fill_(0.3 + 2**-12)
            plain.rest[1].bias[1] = 2.0
        with gathered_parameters(engine, ["first.weight", "rest.1.bias"], modifier_rank=world - 1) as whole:
            if rank == world - 1:
                whole["first.weight"].fill_(0.3 + 2**-12)
                whole["rest.1.bias"][1] = 2.0
            else:
                whole["first.weight"].fill_(-1.0)
        assert_equal(engine, plain, (stage, dtype), **EXACT)
        x, _ = batch(0)
        same = {"rtol": 2e-2, "atol": 2e-2} if dtype == "bf16" else CLOSE
        torch.testing.assert_close(engine(x).float(), plain(x), **same)
        train(engine, [0])
        train_plain(plain, torch.optim.SGD(plain.parameters(), lr=0.1), [0])
        assert_equal(engine, plain, (stage, dtype), **(CLOSE if dtype == "fp32" else {"rtol": 5e-3, "atol": 3e-3}))
        with pytest.raises(KeyError, match=r"first\.weight"), gathered_parameters(engine, "first.wieght"):
            pass
        with pytest.raises(ValueError, match="modifier_rank"), gathered_parameters(engine, modifier_rank=world):
            pass


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_whole_parameters_can_be_read_and_edited(world: int, dtype: str) -> None:
    run_world(world, _edits, dtype)


def _as_logits(embedding: nn.Module, x: Tensor) -> Tensor:
    return x @ embedding.weight.t()


def _edits_tied(rank: int) -> dict[str, list[float]]:
    layers = [
        TiedLayerSpec("embedding", nn.Embedding, 7, 4),
        LayerSpec(nn.Linear, 4, 4),
        TiedLayerSpec("embedding", nn.Embedding, 7, 4, forward_fn=_as_logits),
    ]
    module = PipelineModule(layers, num_stages=2, loss_fn=F.cross_entropy)
    engine = megazero.initialize(model=module, config=settings(1))[0]
    with gathered_parameters(engine, modifier_rank=0) as whole:
        if engine.is_first_stage():
            whole["chunks.0.layers.0.weight"].fill_(0.5)
    with gathered_parameters(engine) as whole:
        return {name: value.unique().tolist() for name, value in whole.items() if value.shape == (7, 4)}


def test_an_edit_of_a_tied_weight_reaches_its_copy_on_another_stage() -> None:
    found = {name: values for of_rank in run_world(2, _edits_tied) for name, values in of_rank.items()}
    assert len(found) == 2
    assert all(values == [0.5] for values in found.values())


# ---------------------------------------------------------------------------------------------------------------------
# Data


def _loads(rank: int, world: int) -> list[list[int]]:
    data = TensorDataset(torch.arange(43))
    config = settings(1, dataloader_drop_last=True)
    loader = megazero.initialize(model=Net(), training_data=data, config=config)[2]
    assert all(len(rows) == BATCH // world for (rows,) in loader)
    return [rows.tolist() for (rows,) in loader]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_rank_loads_its_part_of_the_same_batches(world: int) -> None:
    alone = run_world(1, _loads, 1)[0]
    parts = run_world(world, _loads, world)
    seen = [row for of_rank in parts for rows in of_rank for row in rows]
    assert len(set(seen)) == len(seen) == 43 // BATCH * BATCH
    together = [sorted(row for rows in micro for row in rows) for micro in zip(*parts, strict=True)]
    assert together == [sorted(rows) for rows in alone]


def _whole_steps(rank: int) -> None:
    for stage in (0, 3):
        data = TensorDataset(*(torch.cat([batch(i)[j] for i in range(3)]) for j in range(2)))
        engine = bring(Loss, settings(stage, accumulation=2), training_data=data)
        plain = seeded(Loss)
        optimizer = sgd(plain.parameters())
        order = iter(megazero.RepeatingLoader(megazero.initialize(
            model=Loss(), config=settings(stage, accumulation=2), training_data=data
        )[2]))  # fmt: skip
        for _ in range(4):  # 8 micro-batches of 3 in an epoch
            mine = [next(order) for _ in range(2)]
            everyone: list[Any] = [mine]
            if dist.is_initialized():
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, mine)
            optimizer.zero_grad()
            loss = sum(plain(*micro) for of_rank in everyone for micro in of_rank) / (2 * len(everyone))
            loss.backward()
            optimizer.step()
            assert float(engine.train_batch()) == pytest.approx(loss.item(), rel=1e-4)
        assert_equal(engine, plain, stage)
        evaluated = engine.eval_batch(iter([part(engine, *batch(0)), part(engine, *batch(1))]))
        expected = (plain(*batch(0)) + plain(*batch(1))).item() / 2
        assert float(evaluated) == pytest.approx(expected, rel=1e-4)
        assert engine.training
        assert_equal(engine, plain, stage)


@pytest.mark.parametrize("world", [1, 2])
def test_train_batch_takes_its_own_data_and_eval_batch_changes_nothing(world: int) -> None:
    run_world(world, _whole_steps)


def _data_that_ends(rank: int) -> None:
    plain = seeded(Loss)
    optimizer = sgd(plain.parameters())
    for index in range(2):
        (plain(*batch(index)) / 2).backward()
    optimizer.step()
    for stage in (0, 3):
        engine = bring(Loss, settings(stage, accumulation=2))
        parts = [part(engine, *batch(index)) for index in range(2)]
        refuses(StopIteration, "", lambda: engine.train_batch(iter(parts[: 2 - rank])))  # noqa: B023
        refuses(StopIteration, "", lambda: engine.eval_batch(iter(parts[: 1 + rank])))  # noqa: B023
        engine.train_batch(iter(parts))
        assert (engine.global_steps, engine.micro_steps) == (1, 2)
        assert_equal(engine, plain, stage)


def test_data_that_ends_on_one_rank_stops_all_before_the_step() -> None:
    run_world(2, _data_that_ends, timeout=30)


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def _reports(rank: int, folder: Path) -> str:
    config = settings(
        2, steps_per_print=2, tensorboard={"enabled": True, "output_path": str(folder), "job_name": "job"}
    )
    with contextlib.redirect_stdout(io.StringIO()) as said:
        engine = bring(Net, config)
        train(engine, range(4))
        engine.close()
    return said.getvalue()


def test_rank_0_alone_reports(tmp_path: Path) -> None:
    said, nothing = run_world(2, _reports, tmp_path)
    assert nothing == ""
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == ["step 2", "step 4"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"Train/Samples/train_loss", "Train/Samples/lr", "sent_bytes/dp"} <= set(tags)
    assert [one.step for one in events.Scalars("Train/Samples/lr")] == [BATCH * step for step in range(1, 5)]
    x, y = batch(3)
    plain = seeded(Net)
    train_plain(plain, sgd(plain.parameters()), range(3))
    shown = events.Scalars("Train/Samples/train_loss")[-1].value
    assert shown == pytest.approx(F.mse_loss(plain(x), y).item(), rel=1e-4)
    assert events.Scalars("sent_bytes/dp")[-1].value > 0


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def _config_by_path(folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / "config.json"
    path.write_text(json.dumps(settings(1)))
    parser = megazero.add_config_arguments(argparse.ArgumentParser())
    yield {"config": str(path)}
    yield {"config": path}
    yield {"config_params": settings(1)}
    yield {"args": parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])}


def test_a_configuration_comes_in_four_ways_and_only_one_at_a_time(tmp_path: Path) -> None:
    for way in _config_by_path(tmp_path):
        engine = megazero.initialize(model=Net(), **way)[0]
        assert engine.zero_optimization_stage() == 1
        assert engine.get_batch_info() == (BATCH, BATCH, 1)
    refuses(ValueError, "initialize needs one of config", lambda: megazero.initialize(model=Net()))
    refuses(
        ValueError,
        "one of config.* got 2",
        lambda: megazero.initialize(model=Net(), config=settings(), config_params=settings()),
    )
    refuses(ValueError, "needs a model", lambda: megazero.initialize(config=settings()))


def test_parameters_of_another_model_are_an_error_and_those_of_no_group_do_not_train() -> None:
    refuses(
        ValueError,
        "not parameters of the model",
        lambda: megazero.initialize(model=Net(), model_parameters=Net().parameters(), config=settings()),
    )
    for stage in STAGES:
        model = seeded(Net)
        engine = megazero.initialize(model=model, model_parameters=model.rest.parameters(), config=settings(stage))[0]
        train(engine, range(2))
        plain = seeded(Net)
        train_plain(plain, sgd(plain.rest.parameters()), range(2))
        assert_equal(engine, plain, stage)
