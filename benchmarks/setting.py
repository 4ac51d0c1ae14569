"""What is the same for every contender of a row: the model, the cluster's shape, the batch, the optimizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.worlds import Given
from megazero.config import RunConfig, resolve
from megazero.models.config import ModelConfig

LR, GRAD_CLIP, SEED = 3e-4, 1.0, 7
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def positive(text: str) -> int:
    """A whole number from 1 on, of a command line.  Raises: ValueError."""
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is not positive")
    return number


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, of a command line, comma-separated.  Raises: ValueError."""
    return tuple(map(positive, text.split(",")))


def _value(written: str) -> object:
    try:
        return json.loads(written)
    except json.JSONDecodeError:
        return written


def with_options(document: dict[str, Any], options: Sequence[str]) -> dict[str, Any]:
    """Set keys of a run file's document, "section.key=value" each, with a value of JSON or a word."""
    for option in options:
        name, _, written = option.partition("=")
        *sections, key = name.split(".")
        table = document
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = _value(written)
    return document


@dataclass(frozen=True)
class ModelSize:
    """A Llama, or with experts a Mixtral, and how many samples of it a micro-batch has here."""

    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    seq_len: int
    micro_batch_size: int
    num_experts: int | None = None


MODELS = {
    "smoke": ModelSize(64, 2, 2, 128, 32, 2),
    "tiny": ModelSize(256, 4, 4, 512, 128, 4),
    "small": ModelSize(512, 8, 8, 8192, 256, 2),
    "experts": ModelSize(256, 4, 4, 512, 128, 4, 8),
}


@dataclass(frozen=True)
class Setting(Given):
    """One row's work.

    Args:
        model: a key of `MODELS`.
        world: ranks.
        tp, pp: of the ranks; the rest is data-parallel.
        ep: ours, with experts.
        sequence_parallel: with tp.
        zero_stage: ours.
        schedule: ours, a name of the configuration.
        dtype: "fp32" or "bf16".
        micro_batch_size: samples.
        accumulation: micro-batches per step and data-parallel rank.
    """

    model: str
    world: int
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 0
    schedule: str = "1f1b"
    dtype: str = "fp32"
    micro_batch_size: int = 1
    accumulation: int = 1
    ep: int = 1

    @property
    def size(self) -> ModelSize:
        """The model."""
        return MODELS[self.model]

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.world // (self.tp * self.pp)

    @property
    def rank_samples(self) -> int:
        """Samples of a step on one data-parallel rank."""
        return self.micro_batch_size * self.accumulation

    @property
    def virtual_stages(self) -> int:
        """Model chunks of a pipeline rank, where the schedule leaves the choice."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def tokens(self) -> int:
        """Tokens of a step on all ranks."""
        return self.rank_samples * self.dp * self.size.seq_len

    def config(self, options: Sequence[str] = ()) -> RunConfig:
        """megazero's configuration of this work.

        Args:
            options: "section.key=value" each, with a value of JSON or a word.
        """
        model = {
            key: value for key, value in asdict(self.size).items() if key != "micro_batch_size" and value is not None
        }
        model |= {"family": "mixtral" if self.size.num_experts else "llama"}
        parallel: dict[str, Any] = {
            "ep": self.ep,
            "tp": self.tp,
            "pp": self.pp,
            "sequence_parallel": self.sequence_parallel,
        }
        if self.pp > 1:
            parallel["schedule"] = self.schedule
            if self.virtual_stages > 1:
                parallel["virtual_stages"] = self.virtual_stages
        document: dict[str, dict[str, Any]] = {
            "model": model,
            "parallel": parallel,
            "zero": {"stage": self.zero_stage},
            "precision": {"dtype": self.dtype},
            "optimizer": {"lr": LR, "grad_clip": GRAD_CLIP},
            "training": {"micro_batch_size": self.micro_batch_size, "accumulation": self.accumulation, "seed": SEED},
        }
        return resolve(RunConfig.model_validate(with_options(document, options)), self.world).config

    def model_config(self) -> ModelConfig:
        """The model with everything that follows from its sizes."""
        return self.config().model

    def batch(self, step: int, dp_index: int) -> tuple[Tensor, Tensor]:
        """A data-parallel rank's part of a step: tokens and labels, int64 [rank_samples, seq]."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.rank_samples * self.dp, self.size.seq_len + 1)
        samples = torch.randint(0, self.size.vocab_size, shape, generator=generator)
        mine = samples[dp_index * self.rank_samples : (dp_index + 1) * self.rank_samples]
        return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
