"""The optimizer on shards, wherever they lie: three steps equal those of torch's optimizer on whole tensors."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_worlds
from harness import run_world
from torch import Tensor, nn
from zero_worlds import Sharded, assert_same, assert_trains_as_plain, numbers, plain_steps, random_batches, seeded

import megazero.zero.offload
import megazero.zero.optimizer
import megazero.zero.stepper
from megazero.checkpoint.save import gather_logical
from megazero.comm.collectives import gather_objects
from megazero.comm.memory import StorageError
from megazero.config.schema import PrecisionConfig
from megazero.deepspeed.script_optimizers import factory_of
from megazero.optim.optimizers import Lion
from megazero.zero.optimizer import factory_of_class
from megazero.zero.sharding import Interval
from megazero.zero.weight_gathers import HalfSteppedError

WIDTH = 16  # several buckets of 1024 bytes


class _Model(nn.Module):
    """Weights and biases in several units; the second one's weight is frozen, one parameter never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[1].weight.requires_grad_(False)
        self.never = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - 1).square().sum()


def _two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices with decay and a rate of their own, vectors without; what is frozen is in a group too."""
    matrices = [p for p in module.parameters() if p.dim() == 2]
    vectors = [p for p in module.parameters() if p.dim() != 2]
    return [{"params": matrices, "weight_decay": 0.2, "lr": 0.02}, {"params": vectors, "weight_decay": 0.0}]


Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
# torch's, fused kernels among them, and one of ours
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-5),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-5, fused=True),
    "AdamW amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-5, amsgrad=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, eps=1e-5),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD fused": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, dampening=0.5, fused=True),
    "Lion": lambda groups: Lion(groups, lr=1e-3),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.3),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, eps=1e-5, momentum=0.9, centered=True),
    "ASGD": lambda groups: torch.optim.ASGD(groups, lr=1e-2),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2, eps=1e-5),
}
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"optimizer": "cpu"},
    "file": {"optimizer": "nvme"},
    "half on host": {"optimizer": "cpu", "ratio": 0.5},
    "half in file": {"optimizer": "nvme", "ratio": 0.5},
}


def _steps(rank: int, world: int, name: str, stages: Sequence[int], offload: dict[str, Any], **options: Any) -> None:
    make = OPTIMIZERS[name]
    batches = random_batches(3, world, 2, 4, WIDTH)
    for stage in stages:
        expected = seeded(_Model)
        gradients = plain_steps(expected, batches, optimizer=make, groups=_two_groups(expected), max_norm=1.5)
        norms = [torch.cat([gradient.flatten() for gradient in step.values()]).norm() for step in gradients]
        assert min(norms) > 2 * 1.5  # or clipping would go untested
        module = seeded(_Model)
        sharded = Sharded(
            module, stage, rank, world, optimizer=make, groups=_two_groups(module), offload=offload, **options
        )
        for step in batches:
            assert sharded.step(step[rank], max_norm=1.5)
        got = sharded.whole("master")
        assert set(got) == {key for key, p in expected.named_parameters() if p.requires_grad}
        for key, parameter in expected.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(got[key], parameter.detach(), rtol=2e-5, atol=2e-6, msg=f"{stage} {key}")
        assert_same(sharded.module.state_dict(), expected.state_dict())
        sharded.zero.close()


def _steps_at_every_place(rank: int, name: str, stages: Sequence[int], folder: Path) -> None:
    for place in PLACES.values():
        _steps(rank, 2, name, stages, place | {"nvme_path": str(folder)})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch_on_whole_tensors(name: str, tmp_path: Path) -> None:
    run_world(2, _steps_at_every_place, name, (1,), tmp_path)


def test_steps_are_the_same_on_every_stage(tmp_path: Path) -> None:
    run_world(2, _steps_at_every_place, "AdamW", (0, 2, 3), tmp_path)


@pytest.mark.parametrize("place", PLACES)
def test_steps_without_peers_are_the_same(place: str, tmp_path: Path) -> None:
    for name in ("AdamW fused", "SGD momentum"):
        _steps(0, 1, name, range(4), PLACES[place] | {"nvme_path": str(tmp_path)})


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Adagrad"])
def test_a_file_is_stepped_slice_by_slice(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more slices than buffers, and the last one shorter."""
    monkeypatch.setattr(megazero.zero.optimizer, "FILE_SLICE_ELEMENTS", 7)
    monkeypatch.setattr(megazero.zero.offload, "FILE_SLICE_ELEMENTS", 7)
    run_world(2, lambda rank: _steps(rank, 2, name, (0, 3), {"optimizer": "nvme", "nvme_path": str(tmp_path)}))


@pytest.mark.parametrize("place", ["device", "host", "file"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_weights_are_their_rounded_masters(place: str, dtype: str, tmp_path: Path) -> None:
    def law(rank: int) -> None:
        precision = PrecisionConfig(dtype=dtype, loss_scale=1.0)
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        for stage in range(4):
            sharded = Sharded(
                seeded(_Model),
                stage,
                rank,
                2,
                optimizer=OPTIMIZERS["AdamW"],
                precision=precision,
                offload=PLACES[place] | {"nvme_path": str(tmp_path)},
            )
            before = copy.deepcopy(sharded.module.state_dict())
            for step in random_batches(3, 2, 2, 4, WIDTH):
                sharded.step([batch.to(kind) for batch in step[rank]], max_norm=1.0)
            masters, weights = sharded.whole("master"), sharded.whole("model")
            after = sharded.module.state_dict()
            for name, master in masters.items():
                assert weights[name].dtype == after[name].dtype == kind
                assert torch.equal(weights[name], master.to(kind)), (stage, name)
                assert torch.equal(after[name], weights[name])
                assert name == "never" or not torch.equal(after[name], before[name])
            assert torch.equal(after["layers.1.weight"], before["layers.1.weight"])
            sharded.zero.close()

    run_world(2, law)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Adagrad", "NAdam", "ASGD"])
def test_state_that_is_read_and_written_to_another_run_goes_on_as_if_never_stopped(
    name: str, place: str, tmp_path: Path
) -> None:
    """In any pieces; with the numbers of a group, as NAdam's product of momenta and ASGD's rate, which its settings make."""

    def run(steps: list[list[Tensor]]) -> Sharded:
        module = seeded(_Model)
        first, second = _two_groups(module)
        groups = [first | ({"betas": (0.5, 0.9)} if name == "NAdam" else {}), second | {"lr": 0.3}]
        offload = PLACES[place] | {"nvme_path": str(tmp_path)}
        sharded = Sharded(module, 2, optimizer=OPTIMIZERS[name], groups=groups, offload=offload)
        for step in steps:
            sharded.step(step)
        return sharded

    steps = [step[0] for step in random_batches(6, 1, 1, 4, WIDTH)]
    whole, first, second = run(steps), run(steps[:3]), run([])
    old, new = first.zero.sharded_state, second.zero.sharded_state
    assert set(old.state_kinds) >= {"model"} | set(first.zero.optimizer.known_states)
    for a, b in zip(old.buckets, new.buckets, strict=True):
        for kind in (*old.state_kinds, "master"):
            if old.holds(kind, a):
                for _, run_ in a.layout.intervals(lambda info: info.group):
                    middle = (run_.start + run_.stop) // 2
                    for piece in (Interval(run_.start, middle), Interval(middle, run_.stop)):
                        new.write(kind, b, piece, old.read(kind, a, piece).clone())
    second.zero.optimizer.resume(first.zero.optimizer.steps_taken, first.zero.optimizer_scalars())
    second.zero.load(lambda: None, None)
    for step in steps[3:]:
        second.step(step)
    assert_same(second.whole("master"), whole.whole("master"), rtol=0.0, atol=0.0)
    for sharded in (whole, first, second):
        sharded.zero.close()


class _Counting(torch.optim.Optimizer):
    """Counts its steps in each group, and takes every parameter to have a gradient."""

    def __init__(self, groups: Any, lr: float = 0.05) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.sub_(self.state[p]["sum"], alpha=group["lr"] / group["count"])


@pytest.mark.parametrize(("hides", "elements"), [(False, 0), (True, 0), (True, 300), (True, 2**17)])
@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_sees_one_step_though_buckets_are_stepped_one_after_another(
    place: str, hides: bool, elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it must where their weights travel as soon as they are stepped, each alone or some in one call."""

    monkeypatch.setattr(megazero.zero.stepper, "CALL_ELEMENTS", {"cpu": elements})
    monkeypatch.setattr(zero_worlds, "factory_of", partial(factory_of, allow_untested=True))

    def new(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        trained = [group | {"params": [p for p in group["params"] if p.requires_grad]} for group in groups]
        return _Counting(trained)

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        every = list(module.parameters())
        return [{"params": every[::2]}, {"params": every[1::2], "lr": 0.02}]

    batches, expected, module = random_batches(3, 1, 2, 4, WIDTH), seeded(_Model), seeded(_Model)
    plain_steps(expected, batches, optimizer=new, groups=groups(expected))
    offload = PLACES[place] | {"nvme_path": str(tmp_path)}
    sharded = Sharded(module, 1, optimizer=new, groups=groups(module), offload=offload)
    sharded.parameters.hides_gathers = hides
    own, sizes = sharded.zero.optimizer.torch_optimizer, list[int]()
    own.register_step_pre_hook(lambda *_: sizes.append(sum(p.numel() for of in own.param_groups for p in of["params"])))
    for step in batches:
        sharded.step(step[0])
    assert_same(sharded.module.state_dict(), expected.state_dict())
    assert [group["count"] for group in own.param_groups] == [3, 3]
    if place == "device" and hides:
        assert max(sizes) <= max(elements, WIDTH * (WIDTH + 1))  # a bucket
        assert (len(sizes) == 3) == (elements == 2**17)
    sharded.zero.close()


def test_weights_in_a_file_train_after_an_evaluation_in_inference_mode(tmp_path: Path) -> None:
    """Whose buffers the training uses again."""
    batches, expected = random_batches(2, 1, 1, 4, WIDTH), seeded(_Model)
    plain_steps(expected, batches)
    offload = {"optimizer": "nvme", "parameters": "nvme", "nvme_path": str(tmp_path)}
    sharded = Sharded(seeded(_Model), 3, offload=offload)
    for step in batches:
        with torch.inference_mode():
            sharded.module(step[0][0])
        sharded.step(step[0])
    trained = {name: p for name, p in expected.named_parameters() if p.requires_grad}
    assert_same(sharded.whole("master"), trained)
    sharded.zero.close()


@pytest.mark.parametrize("place", ["device", "file"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD momentum"])
def test_an_optimizer_that_is_reset_steps_as_a_new_one(optimizer: str, place: str, tmp_path: Path) -> None:
    def new() -> Sharded:
        offload = PLACES[place] | {"nvme_path": str(tmp_path)}
        return Sharded(seeded(_Model), 1, optimizer=OPTIMIZERS[optimizer], offload=offload)

    used, fresh = new(), new()
    start = fresh.whole("model")
    used.step([numbers(4, WIDTH, seed=1)])
    for bucket in used.parameters.buckets:
        for slot in bucket.layout.slots:
            bucket.write(bucket.master, slot.interval, start[slot.info.name].reshape(-1))
    used.zero.optimizer.reset()
    used.zero.load(lambda: None, None)
    for sharded in (used, fresh):
        sharded.step([numbers(4, WIDTH, seed=2)])
    assert_same(used.whole("master"), fresh.whole("master"), rtol=0.0, atol=0.0)


# ---- the user's own optimizer


def test_a_users_optimizer_keeps_its_groups() -> None:
    def law(rank: int) -> None:
        module = seeded(_Model)
        groups = _two_groups(module)
        made = torch.optim.AdamW(groups, lr=1e-2)
        dicts, schedule = list(made.param_groups), torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
        sharded = Sharded(module, 2, rank, 2, optimizer=lambda _: made, groups=groups)
        assert sharded.zero.optimizer.torch_optimizer is made
        assert all(a is b for a, b in zip(made.param_groups, dicts, strict=True))
        made.param_groups[1]["lr"] = 0.0  # as a schedule does
        before = sharded.whole("master")
        sharded.step(random_batches(1, 2, 1, 4, WIDTH)[0][rank])
        schedule.step()
        assert made.param_groups[0]["lr"] == 0.01
        for name, after in sharded.whole("master").items():
            assert torch.equal(after, before[name]) == (after.dim() != 2), name

    run_world(2, law)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    made = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    made.step()
    with pytest.raises(ValueError, match="AdamW has stepped already"):
        factory_of(made)


def test_an_optimizer_by_name_takes_what_each_group_says() -> None:
    factory = factory_of_class(torch.optim.AdamW, {"lr": 0.1}, [{"weight_decay": 0.3}, {"lr": 0.2}])
    assert (factory.groups, set(factory.states), factory.scalars) == (2, {"exp_avg", "exp_avg_sq"}, ("step",))
    made = factory.build([[nn.Parameter(numbers(2))], []])
    assert [(group["lr"], group["weight_decay"]) for group in made.param_groups] == [(0.1, 0.3), (0.2, 0.01)]


# ---- a disk that fails


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD momentum"])
def test_a_full_disk_is_one_clear_error(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = seeded(_Model)
    offload = {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    sharded = Sharded(module, 1, optimizer=OPTIMIZERS[optimizer], offload=offload)
    sharded.step([numbers(4, WIDTH)])
    sharded.accumulate([numbers(4, WIDTH)])

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError, match=rf"{tmp_path}.*writing \d+ bytes.*No space left on device"):
        sharded.update()
    monkeypatch.undo()
    with pytest.raises(HalfSteppedError, match="No space left"):  # its state is unknown from then on
        sharded.step([numbers(4, WIDTH)])
    sharded.zero.close()  # told already


def test_a_disk_too_small_is_an_error_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def law(rank: int) -> str:
        if rank == 1:

            def full(*_: Any) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            os.posix_fallocate = full
        with pytest.raises(StorageError) as caught:
            Sharded(seeded(_Model), 1, rank, 2, offload={"optimizer": "nvme", "nvme_path": str(tmp_path)})
        return str(caught.value)

    first, second = run_world(2, law)
    assert first == second
    assert "reserving" in first


def _over_cp(rank: int, world: int, cp: int, size: int) -> None:
    """Trains as the plain module, and gathers its weights whole, each on one rank."""
    batches = random_batches(3, world, 2, WIDTH)
    for stage in range(1 if size else 0, 4):
        sharded = assert_trains_as_plain(rank, world, _Model, stage, batches, cp=cp, shard_group_size=size)
        state, expected = sharded.zero.sharded_state, sharded.whole("model")
        mine = {name: tensor.clone() for name, tensor in gather_logical(state, "model", sharded.state)}
        everyone = [pair for of_rank in gather_objects(mine, sharded.state.world) for pair in of_rank.items()]
        assert len(everyone) == len(dict(everyone))
        for name, tensor in everyone:
            assert torch.equal(tensor, expected[name])
        sharded.zero.close()


@pytest.mark.parametrize(("cp", "size"), [(4, 0), (2, 0), (2, 2), (4, 2)])
def test_the_ranks_of_dp_and_cp_share_the_state(cp: int, size: int) -> None:
    run_world(4, _over_cp, 4, cp, size)
