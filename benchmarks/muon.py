"""One update of Muon: ours on 1, 2 and 4 data-parallel ranks beside `torch.optim.Muon` on one.

    python -m benchmarks.muon [--hidden 512] [--layers 4] [--rounds 9]

Updates alone, without passes: momentum, exchange, iteration in bf16, step, and the gather of the weights (ZeRO-1, bf16).
torch's rank has the same matrices as parameters of their own, and AdamW (fused) for the rest.  All take turns; a figure is
processor time of a rank and update, all threads, so ranks may share cores: per rank, 1/dp of one rank's is the ideal.
"""

from __future__ import annotations

import argparse
from functools import partial
from math import prod
from statistics import median

import torch
from torch import Tensor

from benchmarks.report import markdown, middle_of, spread
from benchmarks.setting import MODELS, ModelSize, Setting, positive
from benchmarks.worlds import World
from megazero.engine import initialize
from megazero.parallel_state import Links, ParallelState, RankGrid

LR, DECAY = 1e-3, 0.1
OPTIONS = ("optimizer.name=muon", f"optimizer.weight_decay={DECAY}", "training.compile=false")


class Ours:
    """One rank of the engine."""

    def __init__(self, work: Setting, rank: int) -> None:
        self.dp_index = rank
        state = ParallelState(RankGrid(dp=work.world), rank, Links(local_world_size=work.world))
        self.engine = initialize(work.config(OPTIONS), state)
        for bucket in self.engine.sharded_model.reducer.buckets:
            bucket.allocate_gradient().normal_()
        for group in self.engine.sharded_model.optimizer.torch_optimizer.param_groups:
            group["lr"] = LR

    def step(self, *_: Tensor) -> None:
        """One update."""
        self.engine.sharded_model.update(1.0, 0.0)
        self.engine.sharded_model.parameters.gathers.wait()


class Torchs:
    """torch's Muon for the matrices, AdamW for the rest."""

    def __init__(self, work: Setting, rank: int) -> None:
        self.dp_index = rank
        engine = initialize(work.config(OPTIONS), ParallelState(RankGrid()))
        matrices, others = list[Tensor](), list[Tensor]()
        for bucket in engine.sharded_model.reducer.buckets:
            for slot in bucket.layout.slots:
                shapes = slot.info.spec.logical_shapes().values() if slot.info.matrix else [(prod(slot.info.shape),)]
                (matrices if slot.info.matrix else others).extend(torch.randn(shape) for shape in shapes)
        for tensor in (*matrices, *others):
            tensor.grad = torch.randn_like(tensor)
        muon = torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
        self._optimizers = muon, torch.optim.AdamW(others, lr=LR, fused=True)

    def step(self, *_: Tensor) -> None:
        """One update."""
        for optimizer in self._optimizers:
            optimizer.step()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 4), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    given = parser.parse_args()
    MODELS["muon"] = ModelSize(given.hidden, given.layers, num_heads=8, vocab_size=1024, seq_len=64, micro_batch_size=1)
    works = {f"megazero, dp {world}": Setting("muon", world, zero_stage=1, dtype="bf16") for world in (1, 2, 4)}
    worlds = {name: World(name, partial(Ours, work), work) for name, work in works.items()}
    one = works["megazero, dp 1"]
    worlds["torch.optim.Muon"] = World("torch", partial(Torchs, one), one)
    taken: dict[str, list[float]] = {name: [] for name in worlds}
    try:
        for number in range(given.rounds + 1):
            for name in list(worlds)[:: 1 if number % 2 else -1]:
                seconds = worlds[name].turn(range(3), run_in=1).processor_seconds
                taken[name] += [seconds] if number else []  # the first round warms up
    finally:
        for world in worlds.values():
            world.close()
    rows = []
    for name, seconds in taken.items():
        ratios = [its / alone for its, alone in zip(seconds, taken["megazero, dp 1"], strict=True)]
        shown = spread(middle_of(ratios), 3)
        rows.append([name, f"{median(seconds) * 1e3:.1f}", shown])
    print(markdown(("update", "processor ms of a rank", "over dp 1"), rows))


if __name__ == "__main__":
    main()
