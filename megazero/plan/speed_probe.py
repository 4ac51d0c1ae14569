"""How fast a machine is now: the seconds of a step that is always the same.

    calibration   probe | model | probe | model | probe ...      every model's times are those at the median probe's speed

Virtual machines share cores, caches and memory with strangers: the same step may take a third more a minute later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from megazero.config import ResolvedRun, RunConfig, resolve
from megazero.engine import Engine, initialize
from megazero.engine.random_batches import random_batches
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import ParallelState, RankGrid

LR = 1e-4
_CALLS = 3


class Alone(ParallelState):
    """The state of a run of one rank, beside others."""

    def _started(self) -> int:
        return 1


def small_run(family: str, hidden: int, cut: int, tokens: int) -> ResolvedRun:
    """Two layers with a part of the heads, of the MLP and of the vocabulary, as tp cuts them; two micro-batches."""
    ffn = (4 * hidden if family == "gpt2" else -(-8 * hidden // (3 * 256)) * 256) // cut
    model: dict[str, Any] = {"family": family, "hidden_size": hidden, "num_layers": 2, "ffn_hidden_size": ffn}
    model |= {"num_heads": max(1, hidden // 64 // cut), "vocab_size": 512 // cut, "seq_len": min(128, tokens)}
    if family == "llama":
        model["head_dim"] = 64
    document = {
        "model": model,
        "precision": {"dtype": "fp32"},
        "zero": {"stage": 0},
        "training": {"micro_batch_size": max(1, tokens // 128), "accumulation": 2, "compile": False},
    }
    return resolve(RunConfig.model_validate(document), 1)


def started(run: ResolvedRun, device: torch.device) -> tuple[Engine, list[MicroBatch]]:
    """An engine behind its first step, and the batches of every one."""
    engine = initialize(run.config, Alone(RankGrid(), device=device))
    batches = random_batches(run, engine.share)
    engine.train_step(batches, LR)
    return engine, batches


def step_seconds(engine: Engine, batches: list[MicroBatch], synchronize: Callable[[], None]) -> float:
    """Of one step."""
    begin = time.perf_counter()
    engine.train_step(batches, LR)
    synchronize()
    return time.perf_counter() - begin


class SpeedProbe:
    """A step of a small Llama, about 0.05 s on a core.  `synchronize` waits for the device."""

    def __init__(self, device: torch.device, synchronize: Callable[[], None] = lambda: None) -> None:
        self._engine, self._batches = started(small_run("llama", 256, 1, 128), device)
        self._synchronize = synchronize

    def seconds(self) -> float:
        """The median of a few."""
        return median(step_seconds(self._engine, self._batches, self._synchronize) for _ in range(_CALLS))
