"""Where a run stands, as checkpoints hold it: written and checked here for a GPT and for a script's own module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megazero.checkpoint.folder import Location
from megazero.checkpoint.index import CheckpointError, TrainerState, versions
from megazero.config import RunConfig
from megazero.data.identity import changes_between, tokenizer_part
from megazero.data.tokenizer import load_tokenizer
from megazero.engine.phases import KEYS_OF, Phase, changes, current, is_same_data, phases_after
from megazero.models.registry import FAMILIES
from megazero.settings import toml_value
from megazero.zero.sharded_model import ShardedModel

_FREE_TO_CHANGE = {"dropout", "init_std"}  # model keys that a resumed run may set anew


@dataclass(frozen=True)
class Position:
    """How far a run has come: optimizer steps done, samples (the next one's global index) and counted tokens consumed."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    phases: tuple[Phase, ...] = ()
    trained: Mapping[str, int] = field(default_factory=dict)  # the token up to which any phase trains on a source

    @property
    def phase(self) -> Phase:
        """The phase that the run is in."""
        return current(self.phases)


def position_after(trainer: TrainerState, config: RunConfig, data_fingerprint: str) -> Position:
    """Where a run goes on from a checkpoint that `check_same_run` lets it use."""
    phases = phases_after(trainer, config, data_fingerprint)
    return Position(trainer.step, trainer.consumed_samples, trainer.consumed_tokens, phases, trainer.trained)


def trainer_state(sharded: ShardedModel, position: Position, **more: Any) -> TrainerState:
    """The trainer state to be saved; `more` are its other fields.  Called on every rank."""
    grid, scaler = sharded.state.grid, sharded.scaler
    stage = sharded.policy.zero_stage
    return TrainerState(
        step=position.step,
        consumed_samples=position.samples,
        consumed_tokens=position.tokens,
        phases=[asdict(phase) for phase in position.phases],
        trained=dict(position.trained),
        optimizer_steps=sharded.optimizer.steps_taken,
        shape={"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp, "zero_stage": stage},
        versions=versions(),
        optimizer_scalars=sharded.optimizer_scalars(),
        loss_scaler=None if scaler is None else scaler.state_dict(),
        **more,
    )


def check_same_run(
    path: Location,
    config: RunConfig,
    data_fingerprint: str,
    trainer: TrainerState,
    *,
    fingerprint_at: Callable[[int], str] | None = None,
) -> None:
    """Make sure that a checkpoint is of this model and this data but for accepted changes, before anything is loaded.

    Args:
        fingerprint_at: of this run's data, cut into samples of another `seq_len`.

    Raises: CheckpointError.
    """
    accepted, wanted = config.checkpoint.accept_changes, config.model.model_dump()
    # a key that the writer did not know yet has its default
    written = type(config.model).model_construct(**trainer.model)
    family = FAMILIES[config.model.family]
    model = family.complete(written).model_dump(warnings=False)
    free = _FREE_TO_CHANGE | {key.removeprefix("model.") for name in accepted for key in KEYS_OF[name]}
    differs = [key for key in wanted if model[key] != wanted[key]]
    if family.learns_positions and "seq_len" in differs and "family" not in differs:
        raise CheckpointError(
            f"{path} has learned {model['seq_len']} positions, and this run has model.seq_len = {wanted['seq_len']}; a "
            f"{config.model.family} keeps the length that it was made with: set model.seq_len to {model['seq_len']}"
        )
    changed = {f"model.{key}": (model[key], wanted[key]) for key in differs if key not in free}
    mask = changes(trainer, config).get("data.document_mask")
    if mask and "document_mask" not in accepted:
        changed["data.document_mask"] = (mask[0], mask[1])
    names, faults = [name for name, keys in KEYS_OF.items() if changed.keys() & {*keys}], []
    if changed:
        told = [f"{key} is {_shown(new)}, the checkpoint has {_shown(old)}" for key, (old, new) in changed.items()]
        what = "model" if any(key.startswith("model.") for key in changed) else "run"
        faults.append(f"is of another {what}: {'; '.join(told)}")
    stored = trainer.data_fingerprint
    is_same = "data" in accepted or is_same_data(stored, data_fingerprint)
    if not is_same and "seq_len" in differs and fingerprint_at:
        is_same = is_same_data(stored, fingerprint_at(model["seq_len"]))
    if not is_same:
        names.append("data")
        faults.append(
            f"was trained on other data. What differs: {'; '.join(changes_between(stored, data_fingerprint))}"
            + (_end_of(config, stored) if tokenizer_part(stored) != tokenizer_part(data_fingerprint) else "")
        )
    if faults:
        together = [name for name in KEYS_OF if name in names or name in accepted]
        hint = f"checkpoint.accept_changes = {toml_value(together)} begins a new phase of it"
        if changed.keys() - {key for keys in KEYS_OF.values() for key in keys}:  # nothing accepts them
            hint = "give it a training.run_dir of its own; to go on, set the keys back"
        raise CheckpointError(f"{path} {' and '.join(faults)}. If the run is to change here, {hint}")


def _end_of(config: RunConfig, stored: str) -> str:
    """Which data.eod_token makes the tokenizer that of a checkpoint's fingerprint; nothing where none does."""
    try:
        then = load_tokenizer(config.data.tokenizer, None, stored)
    except (OSError, ValueError):
        return ""
    is_it = then.eod_token and then.fingerprint == tokenizer_part(stored)
    return f". data.eod_token = {toml_value(then.eod_token)} ends documents as before" if is_it else ""


def _shown(value: object) -> str:
    return "unset" if value is None else toml_value(value)
