"""Does reserved memory grow while micro-batches of varying size come and go?

    torchrun --nproc-per-node 4 -m benchmarks.fragmentation --tp 2 --pp 2
    python -m benchmarks.fragmentation --steps 1000

Every step has micro-batches of another size: 1, 2, 3, 4, 1, ... samples.  Each rank prints a line at every report: on a CPU
its resident memory, on CUDA what torch's allocator has reserved and how much of that lies idle in blocks that were split.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import torch

from megazero.config import RunConfig, resolve
from megazero.engine import Engine, initialize
from megazero.models.gpt import MicroBatch
from megazero.training.world import join_world, leave_world, prefer_expandable_segments, started_ranks

MODEL = {
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "ffn_hidden_size": 320,
    "vocab_size": 1000,
    "seq_len": 128,
}
SIZES, MICRO_BATCHES, LR = (1, 2, 3, 4), 4, 1e-4


def reserved(device: torch.device) -> dict[str, int]:
    """Bytes that this rank has taken from the device."""
    if device.type == "cuda":
        statistics = torch.cuda.memory_stats(device)
        return {key: statistics[f"{key}_bytes.all.current"] for key in ("reserved", "inactive_split")}
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return {"resident": next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))}


def batches(engine: Engine) -> Iterator[list[MicroBatch]]:
    """The micro-batches of every step, on the engine's device."""
    model, device = engine.config.model, engine.state.device
    for samples in cycle(SIZES):
        ids = torch.randint(0, model.vocab_size, (model.seq_len, samples), device=device)
        yield [MicroBatch(torch.arange(samples, device=device), ids, ids)] * MICRO_BATCHES


def main() -> None:
    """Train, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 1000), ("every", 50), ("tp", 1), ("pp", 1), ("zero-stage", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    prefer_expandable_segments(os.environ)
    document = {
        "model": {"family": "llama", **MODEL},
        "parallel": {"tp": given.tp, "pp": given.pp, "sequence_parallel": given.tp > 1},
        "zero": {"stage": given.zero_stage},
        "precision": {"dtype": "bf16"},
        "training": {"micro_batch_size": 1, "accumulation": MICRO_BATCHES, "compile": False},
    }
    run = resolve(RunConfig.model_validate(document), started_ranks())
    state = join_world(run)
    engine = initialize(run.config, state)
    for step, micro_batches in enumerate(islice(batches(engine), given.steps), start=1):
        engine.train_step(micro_batches, LR)
        if step % given.every == 0:
            taken = {key: f"{value / 2**20:.1f} MiB" for key, value in reserved(state.device).items()}
            print(f"step {step} rank {state.rank} {taken}", flush=True)
    state.leave()
    leave_world()


if __name__ == "__main__":
    main()
