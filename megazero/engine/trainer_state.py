"""Where a run stands, as checkpoints hold it: written and checked here for a GPT and for a script's own module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megazero.checkpoint.folder import Location
from megazero.checkpoint.index import CheckpointError, TrainerState, versions
from megazero.config import RunConfig
from megazero.zero.sharded_model import ShardedModel

_FREE_TO_CHANGE = {"dropout", "init_std"}  # model keys that a resumed run may set anew


@dataclass(frozen=True)
class Position:
    """How far a run has come: optimizer steps done, samples (the next one's global index) and counted tokens consumed."""

    step: int = 0
    samples: int = 0
    tokens: int = 0


def trainer_state(sharded: ShardedModel, position: Position, **more: Any) -> TrainerState:
    """The trainer state to be saved; `more` are its other fields.  Called on every rank."""
    grid, scaler = sharded.state.grid, sharded.scaler
    stage = sharded.policy.zero_stage
    return TrainerState(
        step=position.step,
        consumed_samples=position.samples,
        consumed_tokens=position.tokens,
        optimizer_steps=sharded.optimizer.steps_taken,
        shape={"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp, "zero_stage": stage},
        versions=versions(),
        optimizer_scalars=sharded.optimizer_scalars(),
        loss_scaler=None if scaler is None else scaler.state_dict(),
        **more,
    )


def check_same_run(path: Location, config: RunConfig, data_fingerprint: str, trainer: TrainerState) -> None:
    """Make sure that a checkpoint is of this model and this data, before anything is loaded.  Raises: CheckpointError."""
    wanted = config.model.model_dump()
    changed = [
        f"model.{key} is {wanted[key]!r}, the checkpoint has {trainer.model.get(key)!r}"
        for key in wanted
        if key not in _FREE_TO_CHANGE and trainer.model.get(key) != wanted[key]
    ]
    if changed:
        raise CheckpointError(f"{path} is of another model: " + "; ".join(changed))
    if trainer.data_fingerprint not in ("", data_fingerprint):  # "" where no data has been read yet: it was imported
        raise CheckpointError(
            f"{path} was trained on other data (fingerprint {trainer.data_fingerprint}, now {data_fingerprint}): "
            "the sources, their weights, data.tokenizer, data.validation_fraction, model.seq_len and training.seed "
            "must be those of the run"
        )
