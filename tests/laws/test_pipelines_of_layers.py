"""Pipelines of arbitrary layers train as the plain layers do, on every shape, schedule and ZeRO stage.

    table of layers --- LayerSpecs --> PipelineModule --> megazero.initialize --> engine.train_batch
                    \\-- each layer built under its own seed, torch's clip and Adam, one process        the two agree

The plain side takes nothing from the package; the initial weights are compared as well.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from harness import run_world
from safetensors import safe_open
from torch import Tensor, nn
from worlds import pairwise

import megazero
from megazero.checkpoint.save import gather_logical
from megazero.comm.collectives import gather_objects
from megazero.parallel_state import Links, ParallelState, RankGrid
from megazero.pipe import LayerSpec, PipelineModule, TiedLayerSpec

pytestmark = pytest.mark.slow  # starts whole runs

SEED, STEPS, MICRO_BATCHES, MICRO = 77, 2, 4, 3  # micro-batches of all replicas, and samples in each
LR, EPS, CLIP = 1e-2, 1e-5, 0.5  # Adam's usual eps would make a step of rounding noise, here and in the plain model
WIDTH, VOCAB = 6, 11
EVALUATION = 50  # a step whose data no training sees

# ---- layers


class Enter(nn.Module):
    """(x, mask) -> (hidden, mask, bias): the bias is floating-point and has no gradient."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, width)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        x, mask = given
        return self.linear(x), mask, x.detach().mean(1, keepdim=True)


class Mix(nn.Module):
    """A residual step on masked places, to another width if need be."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, mask, bias = given
        return F.pad(hidden, (0, self.linear.out_features - hidden.shape[1])) + self.linear(hidden) * mask, mask, bias


class InPlace(nn.Module):
    """Writes to what it is given, and is not the same when done twice."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.LeakyReLU(0.5, inplace=True)

    def forward(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            return self.activation(given)
        return self.activation(given[0]), *given[1:]


class PartlyFrozen(nn.Module):
    """A weight that is not trained beside a gain that is; its bias is a new one, again without a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5, requires_grad=False)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, mask, bias = given
        return hidden + self.gain * (hidden @ self.weight), mask, (2 * bias).detach()


class AddsInPlace(nn.Module):
    """x += b, which autograd does not allow on its leaves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        x += self.bias
        return x


def mean_of_masked(given: tuple[Tensor, ...]) -> Tensor:
    """Uses no bias: on a cut before it the bias is a floating-point input whose gradient is None."""
    return given[0] * given[1].to(given[0].dtype)


def square_error(y: Tensor, labels: Tensor) -> Tensor:
    return (y.float() - labels).square().mean()


def cross_entropy(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y.float().flatten(0, -2), labels.flatten())


def as_logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.T


def bent(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.tanh(linear(x))


def soft_lookup(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ embedding.weight.T) @ embedding.weight


# ---- tables of layers, and what is made of them


@dataclass(frozen=True)
class Row:
    """A layer of a table.

    Args:
        make: the class, or a callable that is a layer itself.
        args: of the class.
        key: of a tied layer, whose `weight` is shared.
        use: how a tied layer is used.
    """

    make: Any
    args: tuple[Any, ...] = ()
    key: str = ""
    use: Callable[[Any, Any], Any] | None = None

    @property
    def is_class(self) -> bool:
        return isinstance(self.make, type)

    def spec(self) -> Any:
        if not self.is_class:
            return self.make
        if self.key:
            return TiedLayerSpec(self.key, self.make, *self.args, forward_fn=self.use)
        return LayerSpec(self.make, *self.args)


Table: TypeAlias = tuple[Row, ...]

TUPLES = (
    Row(Enter, (5, WIDTH)),
    Row(Mix, (WIDTH, WIDTH)),
    Row(Mix, (WIDTH, 10)),
    Row(InPlace),
    Row(PartlyFrozen, (10,)),
    Row(mean_of_masked),
    Row(nn.Linear, (10, 4)),
    Row(torch.tanh),
    Row(nn.Linear, (4, 4)),
    Row(nn.Linear, (4, 3)),
)
FIRST, SQUARE, LAST = Row(nn.Linear, (5, WIDTH)), Row(nn.Linear, (WIDTH, WIDTH)), Row(nn.Linear, (WIDTH, 3))
WRITING = (FIRST, SQUARE, Row(AddsInPlace, (WIDTH,)), SQUARE, Row(torch.relu_), SQUARE, Row(nn.ReLU, (True,)), LAST)
NORMED = (FIRST, Row(nn.BatchNorm1d, (WIDTH,)), Row(torch.tanh), SQUARE, Row(nn.BatchNorm1d, (WIDTH,)), LAST)
BARE_SECOND = (FIRST, SQUARE, Row(torch.tanh), Row(torch.sin), SQUARE, Row(torch.tanh), SQUARE, LAST)
BARE_THIRD = (FIRST, SQUARE, SQUARE, Row(torch.tanh), Row(torch.tanh), Row(torch.sin), SQUARE, LAST)
BARE_LAST = (FIRST, SQUARE, SQUARE, SQUARE, Row(nn.Linear, (WIDTH, 3)), Row(torch.sin), Row(torch.tanh), Row(torch.sin))

EMBED = Row(nn.Embedding, (VOCAB, WIDTH), "embed")
HEAD = Row(nn.Embedding, (VOCAB, WIDTH), "embed", as_logits)
MIDDLE = Row(nn.Embedding, (VOCAB, WIDTH), "embed", soft_lookup)
OTHER = Row(nn.Linear, (WIDTH, WIDTH), "other", bent)
TIED_ENDS = (EMBED, SQUARE, SQUARE, SQUARE, SQUARE, HEAD)
TIED_THRICE = (EMBED, SQUARE, MIDDLE, SQUARE, SQUARE, SQUARE, SQUARE, HEAD)
TIED_TOGETHER = (Row(nn.Embedding, (VOCAB, WIDTH)), SQUARE, SQUARE, SQUARE, MIDDLE, HEAD)
TWO_KEYS = (EMBED, OTHER, SQUARE, SQUARE, OTHER, HEAD)  # in another order at the end


def micro_batch(table: Table, step: int, index: int, samples: int = MICRO) -> tuple[Any, Tensor]:
    """Inputs and labels as a table needs them."""
    generator = torch.Generator().manual_seed(100 * step + index)
    if table[0].make is nn.Embedding:
        tokens = torch.randint(0, VOCAB, (samples, 4), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    x, labels = torch.randn(samples, 5, generator=generator), torch.randn(samples, 3, generator=generator)
    if table[0].make is not Enter:
        return x, labels
    return (x, torch.randint(0, 2, (samples, 1), generator=generator)), labels


def global_batch(table: Table, step: int, samples: int = MICRO) -> list[tuple[Any, Tensor]]:
    """What all replicas together see in one step."""
    return [micro_batch(table, step, index, samples) for index in range(MICRO_BATCHES)]


def loss_of(table: Table) -> Callable[[Tensor, Tensor], Tensor]:
    return cross_entropy if table[0].make is nn.Embedding else square_error


class Plain(nn.Module):
    """The layers of a table, each drawn under its own seed, with torch's own clipping and Adam.

    Args:
        table: the layers.
        dtype: of the weights that compute; the optimizer has fp32 masters of them.
    """

    def __init__(self, table: Table, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table, self.layers = table, nn.ModuleDict()
        first: dict[str, nn.Parameter] = {}
        for index, row in enumerate(table):
            if not row.is_class:
                continue
            torch.manual_seed(SEED + index)
            layer = row.make(*row.args)
            if row.key:
                layer.weight = first.setdefault(row.key, layer.weight)
            self.layers[str(index)] = layer
        self.masters = {name: p.detach().clone() for name, p in self.named_parameters()}
        for name, p in self.named_parameters():
            self.masters[name].requires_grad_(p.requires_grad)
        self.to(dtype)
        self.dtype = dtype
        self.optimizer = torch.optim.Adam([p for p in self.masters.values() if p.requires_grad], lr=LR, eps=EPS)

    def forward(self, x: Any) -> Any:
        for index, row in enumerate(self.table):
            layer = self.layers[str(index)] if row.is_class else row.make
            x = row.use(layer, x) if row.use is not None else layer(x)
        return x

    def loss(self, batch: tuple[Any, Tensor]) -> Tensor:
        x, labels = copy.deepcopy(batch)
        if isinstance(x, tuple):
            x = tuple(t.to(self.dtype) if t.is_floating_point() else t for t in x)
        elif x.is_floating_point():
            x = x.to(self.dtype)
        return loss_of(self.table)(self(x), labels)

    def step(self, batches: Sequence[tuple[Any, Tensor]]) -> tuple[float, float]:
        """Loss and norm of one step; gradients add up in fp32."""
        for master in self.masters.values():
            master.grad = None
        total = 0.0
        for batch in batches:
            loss = self.loss(batch)
            (loss / len(batches)).backward()
            total += loss.item() / len(batches)
            for name, p in self.named_parameters():
                if p.grad is not None:
                    master, gradient = self.masters[name], p.grad.float()
                    master.grad = gradient if master.grad is None else master.grad + gradient
                    p.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters.values(), CLIP).item()
        self.optimizer.step()
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(self.masters[name])
        return total, norm

    def evaluate(self, batches: Sequence[tuple[Any, Tensor]]) -> float:
        self.eval()
        with torch.no_grad():
            mean = sum(self.loss(batch).item() for batch in batches) / len(batches)
        self.train()
        return mean

    def weights(self) -> dict[str, Tensor]:
        """Masters of what is trained; what is not has none."""
        used = {name: self.masters[name] if p.requires_grad else p for name, p in self.named_parameters()}
        return {name: tensor.detach().float().clone() for name, tensor in used.items()}


@cache
def train_plainly(table: Table, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    model = Plain(table, dtype)
    out: dict[str, Any] = {"initial": model.weights()}
    taken = [model.step(global_batch(table, step)) for step in range(steps)]
    out["loss"], out["norm"] = [loss for loss, _ in taken], [norm for _, norm in taken]
    out["evaluation"] = model.evaluate(global_batch(table, EVALUATION))
    return out | {"weights": model.weights(), "buffers": dict(model.named_buffers())}


# ---- one run of ours


@dataclass(frozen=True)
class Case:
    """A run: of which layers, cut how, kept how."""

    table: Table = TUPLES
    schedule: str = "1f1b"
    stage: int = 0
    interval: int = 0
    partition: str = "uniform"
    ready_made: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        layers = ", ".join(row.make.__name__ for row in self.table)
        return f"{layers}; {self.schedule}, stage {self.stage}, {self.interval=}, {self.partition}, {self.config}"


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")


def config_of(case: Case, dp: int) -> dict[str, Any]:
    zero = {"stage": case.stage, "reduce_bucket_size": 256}
    if case.stage == 3:
        zero["stage3_param_persistence_threshold"] = 8
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": MICRO_BATCHES // dp,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "Adam", "params": {"lr": LR, "eps": EPS, "weight_decay": 0.0}},
        "steps_per_print": 10_000,
        **case.config,
        "zero_optimization": zero | case.config.get("zero_optimization", {}),
    }


def state_of(rank: int, pp: int, dp: int) -> ParallelState:
    return ParallelState(RankGrid(pp=pp, dp=dp), rank, Links(timeout_seconds=30))


def module_of(case: Case, state: ParallelState, **others: Any) -> PipelineModule:
    layers = [row.spec() for row in case.table]
    if case.ready_made:
        built = Plain(case.table).layers
        layers = [built[str(i)] if row.is_class else row.make for i, row in enumerate(case.table)]
    settings = {
        "loss_fn": loss_of(case.table),
        "base_seed": SEED,
        "partition_method": case.partition,
        "activation_checkpoint_interval": case.interval,
        "schedule": case.schedule,
        "virtual_stages": 2 if case.schedule == "interleaved" else 1,
        "parallel_state": state,
    }
    return PipelineModule(layers, **(settings | others))


def engine_of(case: Case, state: ParallelState) -> Any:
    return megazero.initialize(model=module_of(case, state), config=config_of(case, state.dp.size))[0]


def stream(case: Case, state: ParallelState, step: int, samples: int = MICRO) -> Iterator[tuple[Any, Tensor]]:
    """This replica's micro-batches of a step."""
    share = MICRO_BATCHES // state.dp.size
    return iter(global_batch(case.table, step, samples)[state.dp.index * share :][:share])


def whole(engine: Any) -> dict[str, Any]:
    """Every logical tensor by name, on every rank: the fp32 master of what is trained, else the weight."""
    state, sharded = engine.parallel_state, engine.sharded_model.sharded_state
    frozen = {slot.info.spec.name for b in sharded.buckets if not b.layout.trains for slot in b.layout.slots}
    kinds = {kind: dict(gather_logical(sharded, kind, state)) for kind in ("model", "master")}
    mine = {name: kinds["model"][name] if name in frozen else tensor for name, tensor in kinds["master"].items()}
    merged: dict[str, Any] = {}
    for part in gather_objects({name: tensor.float().numpy().copy() for name, tensor in mine.items()}, state.world):
        assert not part.keys() & merged.keys(), "a logical tensor has two writers"
        merged |= part
    return merged


def train(case: Case, state: ParallelState, steps: int = STEPS) -> dict[str, Any]:
    engine = engine_of(case, state)
    out: dict[str, Any] = {"initial": whole(engine), "loss": [], "norm": []}
    for step in range(steps):
        out["loss"].append(float(engine.train_batch(stream(case, state, step))))
        out["norm"].append(engine.get_global_grad_norm())
    out["evaluation"] = float(engine.eval_batch(stream(case, state, EVALUATION)))
    assert engine.training
    out["weights"] = whole(engine)
    engine.close()
    return out


def train_all(rank: int, pp: int, dp: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    state, out = state_of(rank, pp, dp), []
    for case in cases:
        try:
            out.append(train(case, state))
        except BaseException as error:
            error.add_note(f"in the case: {case}")
            raise
    return out


def check_same(ours: dict[str, Any], plain: dict[str, Any], about: object, tolerance: float = 2e-5) -> None:
    """Losses, norms, weights and the evaluation."""
    assert ours["initial"].keys() == plain["initial"].keys()
    for name, weight in plain["initial"].items():
        assert torch.equal(torch.from_numpy(ours["initial"][name]), weight), (str(about), name)
    for kind in ("loss", "norm", "evaluation"):
        assert ours[kind] == pytest.approx(plain[kind], rel=tolerance), (str(about), kind)
    for name, weight in plain["weights"].items():
        found = torch.from_numpy(ours["weights"][name])
        torch.testing.assert_close(
            found, weight, rtol=10 * tolerance, atol=10 * tolerance, msg=lambda text, n=name: f"{about}: {n}: {text}"
        )


def check_world(pp: int, dp: int, cases: Sequence[Case], tolerance: float = 2e-5, **precision: Any) -> None:
    for found in run_world(pp * dp, train_all, pp, dp, cases):
        for case, ours in zip(cases, found, strict=True):
            check_same(ours, train_plainly(case.table, **precision), case, tolerance)


# ---- every schedule, stage and shape


@pytest.mark.parametrize("dp", [1, 2])
def test_every_schedule_and_stage_trains_as_the_plain_layers(dp: int) -> None:
    """Schedules, stages and dp pairwise."""
    cases = [case for case in pairwise(schedule=SCHEDULES, stage=range(4), dp=[1, 2]) if case["dp"] == dp]
    check_world(2, dp, [Case(schedule=case["schedule"], stage=case["stage"]) for case in cases])


def test_four_stages_train_as_the_plain_layers() -> None:
    check_world(4, 1, [Case(schedule="interleaved"), Case(schedule="zbv", stage=3)])


def test_activation_checkpoints_change_nothing() -> None:
    """In-place layers at the start of a group included."""
    settings = (("1f1b", 0, 1), ("1f1b", 3, 1), ("zbv", 2, 2), ("interleaved", 3, 2))
    check_world(2, 2, [Case(schedule=schedule, stage=stage, interval=i) for schedule, stage, i in settings])


def test_any_partition_gives_the_same_run() -> None:
    check_world(2, 1, [Case(partition=method) for method in ("uniform", "parameters", "type:mix|linear")])


def test_ready_made_modules_train_as_they_are() -> None:
    check_world(2, 2, [Case(ready_made=True, stage=stage) for stage in (0, 3)])


def test_a_chunk_may_have_no_parameters() -> None:
    bare = [Case(table, "interleaved", 3) for table in (BARE_SECOND, BARE_THIRD, BARE_LAST)]
    check_world(2, 2, [*bare, Case(BARE_LAST, "zbv", 0)])


def test_layers_behind_a_cut_may_write_in_place() -> None:
    check_world(
        2, 1, [Case(WRITING, schedule, stage) for schedule, stage in (("1f1b", 0), ("interleaved", 2), ("zbv", 1))]
    )


# ---- tied layers


def test_tied_ends_train_as_one_weight() -> None:
    cases = (("1f1b", 0), ("zbv", 1), ("1f1b", 2), ("zbv", 3))
    check_world(2, 2, [*(Case(TIED_ENDS, *case) for case in cases), Case(TIED_ENDS, "interleaved", 3, interval=1)])


def test_tied_layers_of_one_stage_train_as_one_weight() -> None:
    check_world(2, 2, [Case(TIED_TOGETHER, stage=stage) for stage in (0, 2, 3)])


@pytest.mark.slow
def test_a_weight_tied_in_three_places_trains_as_one() -> None:
    """On three ranks, and in a V with two copies on one rank and the third on the other."""
    check_world(4, 2, [Case(TIED_THRICE, stage=3)])
    check_world(2, 2, [Case(TIED_THRICE, "zbv", stage) for stage in (0, 3)])


def test_two_keys_may_come_in_different_orders_on_different_stages() -> None:
    check_world(2, 2, [Case(TWO_KEYS, stage=stage) for stage in (0, 2, 3)])


# ---- precision and offload


def test_bf16_trains_as_plain_layers_with_fp32_masters() -> None:
    cases = [Case(schedule=s, stage=n, config={"bf16": {"enabled": True}}) for s, n in (("1f1b", 1), ("zbv", 3))]
    check_world(2, 2, cases, tolerance=1e-3, dtype=torch.bfloat16)


def test_offloaded_optimizer_state_changes_nothing(tmp_path: Path) -> None:
    def offload(device: str) -> dict[str, Any]:
        place = {"nvme_path": str(tmp_path)} if device == "nvme" else {}
        return {"zero_optimization": {"offload_optimizer": {"device": device} | place}}

    settings = (("1f1b", 1, "cpu"), ("interleaved", 3, "cpu"), ("zbv", 2, "nvme"))
    check_world(2, 2, [Case(schedule=s, stage=n, config=offload(device)) for s, n, device in settings])


# ---- checkpoints


def save_and_go_on(rank: int, directory: Path) -> None:
    case = Case(TIED_ENDS, "interleaved", 3)
    state = state_of(rank, 2, 2)
    engine = engine_of(case, state)
    for step in range(2):
        float(engine.train_batch(stream(case, state, step)))
    engine.save_checkpoint(directory, client_state={"epoch": 3, "seen": torch.tensor([5, 7])})


def load_and_go_on(rank: int, pp: int, dp: int, case: Case, directory: Path) -> dict[str, Any]:
    state = state_of(rank, pp, dp)
    engine = engine_of(case, state)
    _, client = engine.load_checkpoint(directory)
    out: dict[str, Any] = {"client": (client["epoch"], client["seen"].tolist()), "copies": []}
    if case.stage < 3:
        out["copies"] = [
            parameter.detach().numpy().copy()
            for chunk in engine.module.chunks
            for name, parameter in chunk.named_parameters()
            if chunk.canonical_names[name] in engine.module.tied_copies
        ]
    out["counters"] = (engine.global_steps, engine.global_samples, engine.micro_steps)
    out["loss"] = [float(engine.train_batch(stream(case, state, step))) for step in (2,)]
    out["evaluation"] = float(engine.eval_batch(stream(case, state, EVALUATION)))
    return out


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_on_any_shape(tmp_path: Path) -> None:
    run_world(4, save_and_go_on, tmp_path)
    names: list[str] = []
    for file in tmp_path.glob("*/model-*.safetensors"):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    plain = train_plainly(TIED_ENDS, steps=3)
    assert sorted(names) == sorted(plain["weights"]), "one copy of the tied weight"
    saved = train_plainly(TIED_ENDS, steps=2)["weights"]["layers.0.weight"]
    for pp, dp, case in (
        (1, 1, Case(TIED_ENDS)),
        (4, 1, Case(TIED_ENDS, stage=1)),
        (2, 1, Case(TIED_ENDS, "zbv", 2)),
        (2, 2, Case(TIED_ENDS, "zb-h1", 3)),
    ):
        ranks = run_world(pp * dp, load_and_go_on, pp, dp, case, tmp_path)
        assert sum(len(found["copies"]) for found in ranks) == {1: 1, 4: 2, 2: 2 * (dp == 1)}[pp]
        for found in ranks:
            assert found["client"] == (3, [5, 7])
            assert found["counters"] == (2, 2 * MICRO_BATCHES * MICRO, 2 * MICRO_BATCHES // 2)
            assert found["loss"] == pytest.approx(plain["loss"][2:], rel=2e-5)
            assert found["evaluation"] == pytest.approx(plain["evaluation"], rel=2e-5)
            for copied in found["copies"]:
                torch.testing.assert_close(torch.from_numpy(copied), saved, rtol=1e-4, atol=1e-5)


def test_buffers_are_those_of_the_plain_layers_and_come_back(tmp_path: Path) -> None:
    def save(rank: int) -> float:
        case, state = Case(NORMED, "zbv"), state_of(rank, 2, 1)
        engine = engine_of(case, state)
        for step in range(STEPS):
            float(engine.train_batch(stream(case, state, step)))
        engine.save_checkpoint(tmp_path)
        return float(engine.eval_batch(stream(case, state, EVALUATION)))

    def load(rank: int, pp: int, dp: int, stage: int) -> tuple[float, dict[str, Any]]:
        case, state = Case(NORMED, stage=stage), state_of(rank, pp, dp)
        engine = engine_of(case, state)
        engine.load_checkpoint(tmp_path)
        buffers = {name.partition("layers.")[2]: b.numpy().copy() for name, b in engine.module.named_buffers()}
        return float(engine.eval_batch(stream(case, state, EVALUATION))), buffers

    plain = train_plainly(NORMED)
    assert run_world(2, save) == pytest.approx([plain["evaluation"]] * 2, rel=2e-5)
    for pp, dp, stage in ((1, 1, 0), (2, 2, 3)):
        ranks = run_world(pp * dp, load, pp, dp, stage)
        assert [loss for loss, _ in ranks] == pytest.approx([plain["evaluation"]] * pp * dp, rel=2e-5)
        found = {name: buffer for _, buffers in ranks for name, buffer in buffers.items()}
        expected = {name.removeprefix("layers."): buffer for name, buffer in plain["buffers"].items()}
        assert found.keys() == expected.keys()
        for name, buffer in expected.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), buffer, rtol=1e-4, atol=1e-5)


# ---- errors, told on every rank


def refusal(call: Callable[[], Any]) -> str:
    """Type and text of what a call raises, seen by a rank that goes on living, so that others cannot notice its end."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


PLAIN = Case((FIRST, SQUARE, SQUARE, LAST))


def test_errors_reach_every_rank_and_training_goes_on() -> None:
    samples = MICRO - 1

    def body(rank: int) -> tuple[list[str], list[float]]:
        state = state_of(rank, 4, 1)
        engine = engine_of(PLAIN, state)
        told = [refusal(call) for call in (lambda: engine(1), lambda: engine.backward(1), engine.step)]
        unpaired = (labels for _, labels in global_batch(PLAIN.table, 0))
        told.append(refusal(lambda: engine.train_batch(unpaired)))
        told.append(refusal(lambda: engine.train_batch(itertools.islice(stream(PLAIN, state, 0), 3))))
        told.append(refusal(lambda: engine.eval_batch(iter(()))))
        losses = [float(engine.train_batch(stream(PLAIN, state, 0)))]
        told.append(refusal(lambda: float(engine.train_batch(stream(PLAIN, state, 1, samples)))))
        engine.reset_activation_shape()
        losses.append(float(engine.train_batch(stream(PLAIN, state, 1, samples))))
        return told, losses

    plain = Plain(PLAIN.table)
    expected = [plain.step(global_batch(PLAIN.table, 0))[0], plain.step(global_batch(PLAIN.table, 1, samples))[0]]
    for told, losses in run_world(4, body, timeout=30):
        for text in told[:3]:
            assert "RuntimeError: a pipeline runs whole steps; call engine.train_batch" in text
        assert "ValueError: a pipeline's micro-batch is a pair" in told[3]
        assert told[4].startswith("StopIteration")
        assert told[5].startswith("StopIteration")
        assert told[6].startswith("ValueError: a micro-batch has inputs")
        assert "reset_activation_shape" in told[6]
        assert losses == pytest.approx(expected, rel=2e-5)


def fails(x: Tensor) -> Tensor:
    raise ValueError("of its own")


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, 3).requires_grad_(False)


def initialized(state: ParallelState, layers: list[Any]) -> Any:
    module = PipelineModule(layers, loss_fn=square_error, partition_method="uniform", parallel_state=state)
    return megazero.initialize(model=module, config=config_of(PLAIN, 1))[0]


def test_what_cannot_train_is_told_on_every_rank() -> None:
    """Each rank lives on after an error, and so others would wait for it if they had not been told."""

    def body(rank: int) -> list[str]:
        state = state_of(rank, 2, 1)
        first = LayerSpec(nn.Linear, 5, 3)

        def steps(layers: list[Any]) -> Callable[[], Any]:
            return lambda: initialized(state, layers).train_batch(stream(PLAIN, state, 0))

        return [
            refusal(lambda: initialized(state, [first, torch.tanh])),
            refusal(lambda: initialized(state, [nn.Linear(5, WIDTH), frozen()])),
            refusal(steps([first, fails, LayerSpec(nn.Linear, 3, 3), torch.tanh])),
            refusal(steps([first, LayerSpec(nn.Linear, 4, 4)])),
        ]

    for told in run_world(2, body, timeout=30):
        untrained = "ValueError: pipeline stage 1 has no parameter that requires a gradient"
        assert untrained in told[0]
        assert untrained in told[1]
        assert "of its own" in told[2]
        assert "mat1 and mat2 shapes cannot be multiplied" in told[3]


# ---- traffic

HIDDEN, MASK, BIAS = 4 * MICRO * 10, 8 * MICRO, 4 * MICRO  # what `TUPLES` passes before `mean_of_masked`, in bytes


@pytest.mark.parametrize(
    ("schedules", "of_rank_0", "of_rank_1"),
    [
        (("gpipe", "1f1b", "zb-h1"), HIDDEN + MASK + BIAS, HIDDEN + BIAS),
        # behind layers 2 (the tuple), 5 (hidden alone) and 7 (four features): down, down, down; up, up, up
        (("interleaved",), (HIDDEN + MASK + BIAS) + HIDDEN + 16 * MICRO, HIDDEN + (HIDDEN + BIAS) + 16 * MICRO),
        # in a V the middle cut lies within rank 1
        (("zbv",), (HIDDEN + MASK + BIAS) + 16 * MICRO, 16 * MICRO + (HIDDEN + BIAS)),
    ],
)
def test_bytes_over_pp_are_the_activations_and_gradients_of_the_cuts(
    schedules: tuple[str, ...], of_rank_0: int, of_rank_1: int
) -> None:
    def body(rank: int) -> list[int]:
        state, sent = state_of(rank, 2, 1), []
        for schedule in schedules:
            case = Case(schedule=schedule)
            engine = engine_of(case, state)
            engine.train_batch(stream(case, state, 0))  # finds the shapes
            state.traffic.reset()
            float(engine.train_batch(stream(case, state, 1)))
            sent.append(state.traffic.by_axis()["pp"])
        return sent

    expected = [[MICRO_BATCHES * of_rank_0] * len(schedules), [MICRO_BATCHES * of_rank_1] * len(schedules)]
    assert run_world(2, body) == expected
