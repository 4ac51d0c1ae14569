"""One rank of a dry run: its engine is built, and runs a step on tensors that hold nothing.

pass (schedule's action)       forward, micro-batch 3        backward, micro-batch 3
layer (module hooks)           layer 0, layer 1, head        again, where something is recomputed
                                    |
                               label of what is made then    -> what lives at the peak, and what made it
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from megazero.config import ResolvedRun
from megazero.config.derive import micro_batch_multiple
from megazero.engine import BatchShare, Engine, initialize
from megazero.layers.sample_part import part_of
from megazero.models.gpt import MicroBatch
from megazero.models.stages import cut_by_rank
from megazero.parallel_state.grid import Coordinate
from megazero.plan.fake_tensors import Message
from megazero.plan.kernel_memory import kernel_bytes
from megazero.plan.labelled_tensors import LabelledTensors, Living
from megazero.plan.silent import Kind, RecordedTraffic
from megazero.plan.silent_state import SilentState
from megazero.plan.simulated_world import SimulatedWorld
from megazero.plan.unit_trace import PASS_NAMES
from megazero.schedules.action import Action, ActionKind, read_schedule
from megazero.zero.units import reading_no_weights

_LR = 1e-4

Build: TypeAlias = Callable[[ResolvedRun, SilentState], Engine]


@dataclass(frozen=True)
class MadeGroup:
    """A process group that has this rank as a member."""

    ranks: tuple[int, ...]
    purpose: str
    kind: Kind


@dataclass(frozen=True)
class DryRank:
    """What one simulated rank did.

    Args:
        groups: in the order in which it made them.
        start, step: what it sent and took part in while it was built, and in its last step, in order.
        peak: most bytes that lived at once in that step; moment: what ran then; living: of what the bytes were.
        state: bytes of model state and buffers by kind, as the engine counts them after the step.
        sent, linked, calls: of that step, by axis and operation.
    """

    rank: int
    at: Coordinate
    groups: tuple[MadeGroup, ...]
    start: tuple[Message, ...]
    step: tuple[Message, ...]
    peak: int
    moment: str
    living: tuple[Living, ...]
    state: Mapping[str, int]
    sent: Mapping[tuple[str, str], int]
    linked: Mapping[tuple[str, str], int]
    calls: Mapping[tuple[str, str], int]


def build_engine(run: ResolvedRun, state: SilentState) -> Engine:
    """Build the engine as training does, without drawing initial weights."""
    parallel = run.config.parallel
    own = None
    if parallel.schedule_file is not None:
        own = read_schedule(Path(parallel.schedule_file), parallel.schedule_placement)
    engine = initialize(run.config, state, init_weights=False, schedule=own)
    engine.sharded_model.parameters.sync_from_master()
    return engine


def run_rank(
    run: ResolvedRun,
    rank: int,
    world: SimulatedWorld,
    per_node: int,
    on_cuda: bool,
    build: Build,
    *,
    is_built_only: bool,
) -> DryRank | None:
    """Build a rank's engine and, unless `is_built_only`, run two steps, of which the second counts.

    Args: as for `dry_run`; `world` has the other simulated ranks.
    """
    with LabelledTensors(kernel_bytes(on_cuda=on_cuda)) as fake:
        traffic = RecordedTraffic(fake.operators)
        state = SilentState(run, rank, per_node, world, traffic, on_cuda=on_cuda)
        engine = build(run, state)
        start = tuple(one for one in fake.operators if isinstance(one, Message))
        if is_built_only:
            return None
        batches = [_batch(run, engine.share) for _ in range(run.accumulation)]
        with _labelled(engine, fake, batches):
            engine.train_step(batches[: _warming(run)], _LR)
            fake.operators.clear()
            traffic.reset()
            gc.collect()
            fake.begin()
            engine.train_step(batches, _LR)
        return DryRank(
            rank,
            state.at,
            tuple(MadeGroup(*one) for one in state.made),
            start,
            tuple(one for one in fake.operators if isinstance(one, Message)),
            fake.peak,
            _moment(*fake.peak_label),
            tuple(fake.at_peak(_kinds(engine, fake))),
            engine.memory_bytes(),
            dict(traffic.sent_bytes),
            dict(traffic.link_bytes),
            dict(traffic.calls),
        )


def _moment(what: str, micro_batch: int) -> str:
    return what if micro_batch < 0 else f"{what}, micro-batch {micro_batch}"


def _warming(run: ResolvedRun) -> int:
    """Return the micro-batches of the first step, in which an optimizer may allocate its state.

    As few as the schedule takes, but at stage 3, where weights are gathered ahead in the order of the step before.
    """
    return run.accumulation if run.config.zero.stage == 3 else fewest_micro_batches(run, 1)


def fewest_micro_batches(run: ResolvedRun, least: int) -> int:
    """Return the fewest micro-batches, but `least`, that the schedule takes; at most the run's."""
    parallel = run.config.parallel
    if parallel.schedule_file is not None:
        return run.accumulation
    multiple = micro_batch_multiple(parallel)
    return min(run.accumulation, -(-least // multiple) * multiple)


def _batch(run: ResolvedRun, share: BatchShare) -> MicroBatch:
    """Return a micro-batch of zeros; with documents, each sample is one document."""
    model, size = run.config.model, run.micro_batch_size
    samples = torch.zeros(model.seq_len + 1, size, dtype=torch.int64)
    part = None
    if share.documents or share.ulysses.size * share.ring.size > 1:
        # with lengths, nothing of it is kept after this run
        lengths = [[model.seq_len]] * (size if share.documents else 1)
        part = part_of(lengths, model.seq_len, share.ulysses, share.ring, share.device)
        part = part and replace(part, of_any=not share.documents)
    return share.cut(torch.zeros(size, dtype=torch.int64), samples[:-1], samples[1:], part)


@contextmanager
def _labelled(engine: Engine, fake: LabelledTensors, batches: Sequence[MicroBatch]) -> Iterator[None]:
    """A context in which tensors are labelled with the pass and the layer that make them."""
    running: list[Action] = []
    hooks = []

    def watch(action: Action) -> None:  # before and after every action
        if running and running.pop() == action:
            fake.label = "optimizer or between passes", -1
        else:
            running.append(action)
            fake.label = PASS_NAMES[action.kind], action.microbatch

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            again = "" if running and running[-1].kind is ActionKind.FORWARD else " again"
            fake.label = f"{name}, forward{again}", fake.label[1]

        return hook

    for name, module in _units(engine, batches):
        hooks.append(module.register_forward_pre_hook(reading_no_weights(enter(name))))
    engine.on_action = watch
    try:
        yield
    finally:
        engine.on_action = None
        for one in hooks:
            one.remove()


def _units(engine: Engine, batches: Sequence[MicroBatch]) -> Iterator[tuple[str, nn.Module]]:
    """Yield embedding, layers and head of this rank with their names."""
    placement = engine._executor_of(batches, trains=True).schedule.placement
    mine = cut_by_rank(engine.config.model, engine.config.parallel.layout, placement)[engine.state.at.pp]
    for layout, stage in zip(mine, engine._stages, strict=True):
        yield from ((name, module) for name, module in (("embedding", stage.embedding), ("head", stage.head)) if module)
        yield from ((f"layer {at}", block) for at, block in zip(layout.layers, stage.blocks, strict=True))


def _kinds(engine: Engine, fake: LabelledTensors) -> dict[int, str]:
    """Name what ZeRO holds, by storage number."""
    found: dict[int, str] = {}

    def name(kind: str, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.numel():
            found.setdefault(fake.value(tensor).storage, kind)

    for bucket in engine.sharded_model.parameters.buckets:
        name("weights" if bucket.holds_weights else "buffers of gathered weights", bucket.weights)
        name("weights", bucket.weight_shard.tensor)
        name("master weights", bucket.master.tensor)
        name("gradients", bucket.full_gradient)
        name("gradients", bucket.gradient)
    for state in engine.sharded_model.optimizer.torch_optimizer.state.values():
        for key, value in state.items():
            name(f"optimizer, {key}", value if isinstance(value, Tensor) else None)
    return found
