"""Measures how fast a machine is at the moment: the seconds of a step that is always the same.

    calibration   probe | model | probe | model | probe ...      times are converted to the speed of the median probe

Virtual machines share cores, caches and memory with others, so the same step may take a third longer a minute later.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from megazero.config import ResolvedRun, RunConfig, resolve
from megazero.engine import BatchSlice, Engine, initialize
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import Links, ParallelState, RankGrid

LR = 1e-4
ON_GPU: dict[str, Any] = {"dtype": "bf16", "head_dim": 128, "longest": 4096}  # of `small_run`
_CALLS = 3


class OneRankState(ParallelState):
    """The state of a one-rank run in a process that belongs to a larger world."""

    def _started(self) -> int:
        return 1


def small_run(
    family: str, hidden: int, cut: int, tokens: int, *, dtype: str = "fp32", head_dim: int = 64, longest: int = 128
) -> ResolvedRun:
    """Return a one-rank run of two layers with the sizes of a tensor-parallel rank, and two micro-batches a step.

    Args:
        hidden: hidden size.
        cut: tensor-parallel degree whose sizes to imitate.
        tokens: tokens in a micro-batch.
        longest: longest sample.
    """
    ffn = (4 * hidden if family == "gpt2" else -(-8 * hidden // (3 * 256)) * 256) // cut
    model: dict[str, Any] = {"family": family, "hidden_size": hidden, "num_layers": 2, "ffn_hidden_size": ffn}
    model |= {"num_heads": max(1, hidden // head_dim // cut), "vocab_size": 512 // cut, "seq_len": min(longest, tokens)}
    if family == "llama":
        model["head_dim"] = head_dim
    document = {
        "model": model,
        "precision": {"dtype": dtype},
        "zero": {"stage": 0},
        "training": {"micro_batch_size": max(1, tokens // longest), "accumulation": 2, "compile": False},
    }
    return resolve(RunConfig.model_validate(document), 1)


def random_batches(run: ResolvedRun, batch_slice: BatchSlice) -> list[MicroBatch]:
    """Return this rank's micro-batches of random tokens, for steps that are measured.

    Sample i is drawn from i alone, so the ranks of tp and pp have equal samples.
    """
    model, size = run.config.model, run.micro_batch_size
    batches = []
    for number in range(run.accumulation):
        ids = np.arange(size) + (batch_slice.dp.index * run.accumulation + number) * size
        drawn = [np.random.default_rng(index).integers(model.vocab_size, size=model.seq_len + 1) for index in ids]
        samples = torch.from_numpy(np.stack(drawn)).t().contiguous().to(batch_slice.device)  # [seq + 1, batch]
        shard = batch_slice.sequence_shard([[model.seq_len]] * size if batch_slice.documents else None, model.seq_len)
        batches.append(batch_slice.cut(torch.from_numpy(ids).to(batch_slice.device), samples[:-1], samples[1:], shard))
    return batches


def started(run: ResolvedRun, state: ParallelState) -> tuple[Engine, list[MicroBatch]]:
    """Build an engine and run its first step; return the engine and the batches that every step uses."""
    engine = initialize(run.config, state)
    batches = random_batches(run, engine.batch_slice)
    engine.train_step(batches, LR)
    return engine, batches


def step_seconds(engine: Engine, batches: list[MicroBatch], synchronize: Callable[[], None] = lambda: None) -> float:
    """Return the seconds of one step.  `synchronize` waits for the device."""
    begin = time.perf_counter()
    engine.train_step(batches, LR)
    synchronize()
    return time.perf_counter() - begin


class SpeedProbe:
    """A step of a small Llama, about 0.05 s on a core.  On a GPU, the model is large enough that the host is no limit."""

    def __init__(self, device: torch.device, synchronize: Callable[[], None] = lambda: None) -> None:
        run = small_run("llama", 256, 1, 128) if device.type == "cpu" else small_run("llama", 2048, 1, 2048, **ON_GPU)
        self._engine, self._batches = started(run, OneRankState(RankGrid(), links=Links(device)))
        self._synchronize = synchronize

    def seconds(self) -> float:
        """Return the median seconds of a few steps."""
        return median(step_seconds(self._engine, self._batches, self._synchronize) for _ in range(_CALLS))
