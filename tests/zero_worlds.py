"""What the tests of ZeRO share: any module under `ShardedModel`, and the same steps in plain torch on one process.

batches[step][rank]      the micro-batches of a rank; a module is called with one and returns the micro-batch's loss
plain_steps              the sum of all losses of all ranks, torch.optim, no code of ours
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megazero.comm.collectives import all_reduce, gather_objects
from megazero.config.schema import PrecisionConfig, ZeroConfig
from megazero.deepspeed.script_optimizers import factory_of
from megazero.deepspeed.script_units import BoundParameters, ScriptModel, script_units_of
from megazero.deepspeed.script_values import load_values
from megazero.parallel_state import Links, ParallelState, RankGrid
from megazero.zero.sharding import Placement, ShardingSettings, intersect
from megazero.zero.units import RankModel, describe

Batches = Sequence[Sequence[Sequence[Any]]]
NewOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

FP32 = PrecisionConfig(dtype="fp32")
CLOSE = {"rtol": 2e-5, "atol": 2e-6}  # sums of fp32 numbers in another order


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer where none is asked for."""
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def one_group(module: nn.Module) -> list[dict[str, Any]]:
    """All parameters, as one group."""
    return [{"params": list(module.parameters())}]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_batches(steps: int, ranks: int, micro_batches: int, *shape: int) -> list[list[list[Tensor]]]:
    """A tensor for every micro-batch of every rank and step."""
    return [
        [
            [numbers(*shape, seed=1000 * step + 100 * rank + index) for index in range(micro_batches)]
            for rank in range(ranks)
        ]
        for step in range(steps)
    ]


def seeded(make: Callable[[], nn.Module], seed: int = 7) -> nn.Module:
    """A module with the same values on every rank."""
    torch.manual_seed(seed)
    return make()


class Sharded:
    """A module under ZeRO on one rank, stepped as an engine steps it.

    Args:
        module: becomes ZeRO's; all ranks start with rank 0's values.
        stage: 0 ... 3.
        rank, world: this rank and their number; all ranks are data-parallel, a `cp`-th of them over cp.
        optimizer: made from parameter groups.
        groups: parameter groups of the module; by default one.
        in_pairs: of a parameter's name, whether it is sharded over two consecutive ranks, and replicated over such pairs.
        precision, shard_group_size, local_world_size, zero: what differs from the plain case.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        rank: int = 0,
        world: int = 1,
        *,
        optimizer: NewOptimizer = sgd,
        groups: list[dict[str, Any]] | None = None,
        precision: PrecisionConfig = FP32,
        in_pairs: Callable[[str], bool] | None = None,
        shard_group_size: int = 0,
        cp: int = 1,
        shares_memory: bool = True,
        local_world_size: int = 1,
        **zero: Any,
    ) -> None:
        self.module = module
        grid = RankGrid(dp=world // cp, cp=cp)
        self.state = ParallelState(
            replace(grid, shard_group_size=shard_group_size),
            rank,
            Links(local_world_size=local_world_size, shares_memory=shares_memory),
        )
        groups = groups or one_group(module)
        group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        described = list(describe(module))
        for one in described:
            object.__setattr__(one, "group", group_of.get(id(one.parameter), 0))
        if in_pairs is not None:
            pairs = Placement(*self.state.cut(self.state.dp_cp, 2, "pair", "pairs"))
            described = [replace(one, placement=pairs) if in_pairs(one.name) else one for one in described]
        self.optimizer = optimizer(groups)
        zero_config = ZeroConfig(**{"stage": stage, "bucket_bytes": 1024, "prefetch_bytes": 0} | zero)
        values = {param.name: param.parameter.data for param in described if not param.parameter.is_meta}
        self.zero = ScriptModel(
            RankModel(script_units_of([module]), described),
            self.state,
            ShardingSettings(zero_config, precision, factory_of(self.optimizer)),
        )
        self.parameters, self.reducer = self.zero.parameters, self.zero.reducer
        load_values(self.zero, values, self.state.dp_cp)
        self.bound = BoundParameters(module, self.zero)

    def accumulate(self, batches: Sequence[Any]) -> None:
        """Gradients of one step."""
        self.zero.begin_step(len(batches))
        for batch in batches:
            (self.module(batch) * self.zero.scale).backward()
            self.reducer.close_pass(0)
        self.bound.check()
        self.zero.finish_gradients()

    def update(self, max_norm: float = 0.0) -> bool:
        """Step with the gradients that have come."""
        square_sum = self.zero.square_sum()
        all_reduce(square_sum, self.state.world).wait()
        return self.zero.update(self.zero.norm_of(square_sum.item()), max_norm)

    def step(self, batches: Sequence[Any], max_norm: float = 0.0) -> bool:
        """One step."""
        self.accumulate(batches)
        return self.update(max_norm)

    def whole(self, kind: str) -> dict[str, Tensor]:
        """Whole tensors of a kind of state ("model", "master", "gradient", ...) by name, from every rank's shards."""
        pieces = []
        for bucket in self.parameters.buckets:
            for slot in bucket.layout.slots:
                run = intersect(slot.interval, bucket.counted)
                if run is not None and self.zero.sharded_state.holds(kind, bucket):
                    values = self.zero.sharded_state.read(kind, bucket, run).clone()
                    pieces.append((slot.info.name, run.start - slot.start, values))
        shapes = {slot.info.name: slot.info.shape for b in self.parameters.buckets for slot in b.layout.slots}
        found: dict[str, list[tuple[int, Tensor]]] = {}
        everyone = [piece for of_rank in gather_objects(pieces, self.state.world) for piece in of_rank]
        for name, start, values in sorted(everyone, key=lambda one: one[:2]):
            found.setdefault(name, []).append((start, values))
        whole = {}
        for name, parts in found.items():
            assert [start for start, _ in parts] == [
                sum(len(values) for _, values in parts[:index]) for index in range(len(parts))
            ]
            whole[name] = torch.cat([values for _, values in parts]).view(shapes[name])
        return whole


def plain_gradients(module: nn.Module, step: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
    """Gradients of the sum of all losses of all ranks, by name, left in `grad`; zeros for what no loss depends on."""
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for batches in step:
        for batch in batches:
            module(batch).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def plain_steps(
    module: nn.Module,
    batches: Batches,
    *,
    optimizer: NewOptimizer = sgd,
    groups: list[dict[str, Any]] | None = None,
    max_norm: float = 0.0,
) -> list[dict[str, Tensor]]:
    """Step `module` and return the gradients of each step, before clipping."""
    made = optimizer(groups or one_group(module))
    gradients = []
    for step in batches:
        gradients.append(plain_gradients(module, step))
        if max_norm:
            torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        made.step()
    return gradients


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    """Equal by name; what one side does not have is zero or has no elements."""
    for name in sorted(got.keys() | expected.keys()):
        a, b = got.get(name), expected.get(name)
        if a is None or b is None:
            present = b if a is None else a
            assert present is not None
            assert not present.any(), name
            continue
        torch.testing.assert_close(
            a.float(), b.detach().float(), **(tolerance or CLOSE), msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_trains_as_plain(
    rank: int,
    world: int,
    make: Callable[[], nn.Module],
    stage: int,
    batches: Batches,
    *,
    optimizer: NewOptimizer = sgd,
    groups: Callable[[nn.Module], list[dict[str, Any]]] = one_group,
    max_norm: float = 0.0,
    **options: Any,
) -> Sharded:
    """Gradients of every step and the weights at the end are those of the plain steps."""
    plain = seeded(make)
    ours = copy.deepcopy(plain)
    gradients = plain_steps(plain, batches, optimizer=optimizer, groups=groups(plain), max_norm=max_norm)
    sharded = Sharded(ours, stage, rank, world, optimizer=optimizer, groups=groups(ours), **options)
    for step, expected in zip(batches, gradients, strict=True):
        sharded.accumulate(step[rank])
        assert_same(sharded.whole("gradient"), expected)
        assert sharded.update(max_norm)
    assert_same(sharded.whole("master"), {name: p for name, p in plain.named_parameters() if p.requires_grad})
    frozen = {name: p for name, p in plain.named_parameters() if not p.requires_grad}
    weights = sharded.whole("model")
    assert_same({name: weights[name] for name in frozen}, frozen, rtol=0.0, atol=0.0)
    return sharded
