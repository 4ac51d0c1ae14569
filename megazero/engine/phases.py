"""Phases of a run, which begin with intended changes and are recorded in checkpoints.

    steps      0 ------------- 1000 ------------- 1200 ----------- 1500
    data       web             web and books      long documents           new data is read from its first sample
    schedule   wsd             linear to 0                                 a new schedule begins at its start
    phases     ()              (a,)               (a, b)

Steps, samples and tokens are counted over the whole run.  A phase begins when a run resumes from a checkpoint with a
change that `checkpoint.accept_changes` names.  The checkpoints of the phase record the changed configuration, so the
same command, repeated, resumes within the phase.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megazero.checkpoint.folder import Location
from megazero.checkpoint.index import CheckpointError, TrainerState, versions
from megazero.config import RunConfig
from megazero.config.schema import sections
from megazero.data.identity import changes_between, stored_identity, tokenizer_hash
from megazero.data.tokenizer import load_tokenizer
from megazero.models.registry import FAMILIES
from megazero.optim import lr_schedule
from megazero.optim.config import LrScheduleConfig
from megazero.settings import toml_value
from megazero.zero.sharded_model import ShardedModel

# The keys that each name in checkpoint.accept_changes allows to change.
KEYS_OF = {
    "data": ("data.sources", "data.tokenizer", "data.eod_token", "data.validation_fraction", "training.seed"),
    "document_mask": ("data.document_mask",),
    "seq_len": ("model.seq_len",),
    "rope": ("model.rope_theta", "model.rope_scaling"),
    "lr_schedule": (*(f"lr_schedule.{key}" for key in LrScheduleConfig.model_fields), "optimizer.lr", "training.steps"),
    "batch": ("training.global_batch_size", "training.batch_ramp"),
}
_SHOWN_LETTERS = 200  # of a value in a message
_FREE_TO_CHANGE = {"dropout", "init_std"}  # model keys that a resumed run may change
FINGERPRINT = "data fingerprint"  # key in the changes of a phase with other samples


@dataclass(frozen=True)
class Phase:
    """A part of a run.  It may have its own data and learning-rate schedule, or continue those of the previous phase."""

    step: int = 0  # steps before it
    changed: Mapping[str, list[Any]] = field(default_factory=dict)  # [old, new] by key
    first_sample: int = 0  # global index of the first sample of its data
    schedule_step: int = 0  # steps before its schedule began
    schedule_update: int = 0  # updates of the weights before its schedule began


def current(phases: tuple[Phase, ...]) -> Phase:
    """Return the current phase of a run.  The first phase, which begins at step 0, is not recorded."""
    return phases[-1] if phases else Phase()


def recorded_phases(trainer: TrainerState) -> tuple[Phase, ...]:
    """Return the phases that a checkpoint records."""
    return tuple(Phase(**table) for table in trainer.phases)


def phases_after(trainer: TrainerState, config: RunConfig, data_fingerprint: str) -> tuple[Phase, ...]:
    """Return the phases of a run that resumes from a checkpoint: the recorded ones, and a new one after an accepted
    change.

    Args:
        trainer: state in a checkpoint that `check_same_run` has accepted.
        data_fingerprint: identifies the data that the samples will come from.
    """
    phases, found = recorded_phases(trainer), changes(trainer, config)
    last, accepted = current(phases), config.checkpoint.accept_changes
    is_same = not changes_between(trainer.data_fingerprint, data_fingerprint)
    # the same data in another path is not a change
    names = [name for name in accepted if name != "data" or not is_same]
    changed = {key: found[key] for name in names for key in KEYS_OF[name] if key in found}
    if not is_same:
        changed[FINGERPRINT] = [trainer.data_fingerprint, data_fingerprint]
    if not changed:
        return phases
    new_data, new_schedule = begins_anew(changed)
    begun = Phase(
        trainer.step,
        changed,
        first_sample=trainer.consumed_samples if new_data else last.first_sample,
        schedule_step=trainer.step if new_schedule else last.schedule_step,
        schedule_update=trainer.optimizer_steps if new_schedule else last.schedule_update,
    )
    return (*phases, begun)


def begins_anew(changed: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a phase that changes these keys restarts the data, and whether it restarts the learning-rate
    schedule.
    """
    keys = changed.keys()
    return not keys.isdisjoint({FINGERPRINT, *KEYS_OF["seq_len"]}), not keys.isdisjoint(KEYS_OF["lr_schedule"])


def changes(trainer: TrainerState, config: RunConfig) -> dict[str, list[Any]]:
    """Return [old, new] of every key that differs from the run that wrote a checkpoint.

    A key that is not in the checkpoint had its default.  An imported model has only the section `[model]`.
    """
    new = values_by_key(config.model_dump(mode="json"))
    defaults = RunConfig().model_dump(mode="json")
    old = values_by_key(defaults if trainer.config else {"model": defaults["model"]})
    return _differing(old | values_by_key(trainer.config) | values_by_key({"model": trainer.model}), new)


def changed_keys(before: RunConfig, after: RunConfig) -> dict[str, list[Any]]:
    """Return [old, new] of every key that differs."""
    return _differing(*(values_by_key(config.model_dump(mode="json")) for config in (before, after)))


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [old[key], value] for key, value in new.items() if key in old and old[key] != value}


def changes_text(changed: Mapping[str, Sequence[Any]]) -> str:
    """Return changes as text, such as: a.b 1 -> 2, c.d "x" -> 3"""

    def shown(value: Any) -> str:
        text = "unset" if value is None else toml_value(value)
        return text if len(text) <= _SHOWN_LETTERS else text[:_SHOWN_LETTERS] + "…"

    return ", ".join(f"{key} {shown(old)} -> {shown(new)}" for key, (old, new) in changed.items())


def values_by_key(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten sections: {"zero.offload.ratio": 1.0, ...}.  A key with a table as its value stays one key."""
    known, found = sections(), dict[str, Any]()
    for name, value in tables.items():
        is_section = prefix + name in known and isinstance(value, dict)
        found |= values_by_key(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return found


@dataclass(frozen=True)
class Position:
    """Position of a run: optimizer steps, samples (the next global index) and counted tokens so far."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    phases: tuple[Phase, ...] = ()
    trained: Mapping[str, int] = field(default_factory=dict)  # by source, the end of its tokens in any phase

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return current(self.phases)


def position_after(trainer: TrainerState, config: RunConfig, data_fingerprint: str) -> Position:
    """Return the position of a run that resumes from a checkpoint that `check_same_run` has accepted."""
    phases = phases_after(trainer, config, data_fingerprint)
    return Position(trainer.step, trainer.consumed_samples, trainer.consumed_tokens, phases, trainer.trained)


def trainer_state(sharded: ShardedModel, position: Position, **more: Any) -> TrainerState:
    """Return the trainer state to save; `more` are its other fields.  Call it on every rank."""
    grid, scaler = sharded.state.grid, sharded.scaler
    stage = sharded.policy.zero_stage
    return TrainerState(
        step=position.step,
        consumed_samples=position.samples,
        consumed_tokens=position.tokens,
        phases=[asdict(phase) for phase in position.phases],
        trained=dict(position.trained),
        optimizer_steps=sharded.optimizer.steps_taken,
        shape={"tp": grid.tp, "cp": grid.cp, "ep": grid.ep, "pp": grid.pp, "dp": grid.dp, "zero_stage": stage},
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
    """Check, before anything is loaded, that a checkpoint has this run's model and data, except for accepted changes.

    Args:
        fingerprint_at: returns the fingerprint of this run's data with another `seq_len`.

    Raises: CheckpointError, it differs.
    """
    accepted, (model, differs) = config.checkpoint.accept_changes, _model_changes(path, config, trainer)
    free = _FREE_TO_CHANGE | {key.removeprefix("model.") for name in accepted for key in KEYS_OF[name]}
    changed = {f"model.{key}": (model[key], getattr(config.model, key)) for key in differs if key not in free}
    mask = changes(trainer, config).get("data.document_mask")
    if mask and "document_mask" not in accepted:
        changed["data.document_mask"] = (mask[0], mask[1])
    names, faults = [name for name, keys in KEYS_OF.items() if changed.keys() & {*keys}], []
    if changed:
        texts = [f"{key} is {_shown(new)}, the checkpoint has {_shown(old)}" for key, (old, new) in changed.items()]
        what = "model" if any(key.startswith("model.") for key in changed) else "run"
        faults.append(f"is of another {what}: {'; '.join(texts)}")
    stored = trainer.data_fingerprint
    is_same = "data" in accepted or not changes_between(stored, data_fingerprint)
    if not is_same and "seq_len" in differs and fingerprint_at:
        is_same = not changes_between(stored, fingerprint_at(model["seq_len"]))
    if not is_same:
        names.append("data")
        faults.append(
            f"was trained on other data. What differs: {'; '.join(changes_between(stored, data_fingerprint))}"
            + (_end_of(config, stored) if tokenizer_hash(stored) != tokenizer_hash(data_fingerprint) else "")
            + _other_sources(config, trainer)
        )
    if faults:
        together = [name for name in KEYS_OF if name in names or name in accepted]
        hint = f"checkpoint.accept_changes = {toml_value(together)} begins a new phase of it"
        if changed.keys() - {key for keys in KEYS_OF.values() for key in keys}:  # no name accepts these
            hint = "give it a training.run_dir of its own; to go on, set the keys back"
        raise CheckpointError(f"{path} {' and '.join(faults)}. If the run is to change here, {hint}")


def _model_changes(path: Location, config: RunConfig, trainer: TrainerState) -> tuple[dict[str, Any], list[str]]:
    """Return the [model] of a checkpoint, and its keys that differ from the run's.  Raises: CheckpointError."""
    family, wanted = FAMILIES[config.model.family], config.model.model_dump()
    # a key that the writer did not know has its default
    model = family.complete(type(config.model).model_construct(**trainer.model)).model_dump(warnings=False)
    differs = [key for key in wanted if model[key] != wanted[key]]
    if family.learns_positions and "seq_len" in differs and "family" not in differs:
        raise CheckpointError(
            f"{path} has learned {model['seq_len']} positions, and this run has model.seq_len = {wanted['seq_len']}; a "
            f"{config.model.family} keeps the length that it was made with: set model.seq_len to {model['seq_len']}"
        )
    return model, differs


def _end_of(config: RunConfig, stored: str) -> str:
    """Return the advice to set a `data.eod_token` with which the fingerprint matches the checkpoint; "" if none does."""
    try:
        then = load_tokenizer(config.data.tokenizer, None, stored)
    except (OSError, ValueError):
        return ""
    is_it = then.eod_token and then.fingerprint == tokenizer_hash(stored)
    return f". data.eod_token = {toml_value(then.eod_token)} ends documents as before" if is_it else ""


def _other_sources(config: RunConfig, trainer: TrainerState) -> str:
    """Say which data the checkpoint was trained on, and which sources have other tokens, as far as their identity files
    tell.
    """
    before = trainer.config.get("data", {}).get("sources", "unknown")
    found = {source.path: stored_identity(source.path) for source in config.data.sources}
    other = [path for path, own in found.items() if own is not None and own.content not in trainer.trained]
    return f". Its data.sources were {_shown(before)}" + (f"; other tokens are in {', '.join(other)}" if other else "")


def _shown(value: object) -> str:
    return "unset" if value is None else toml_value(value)


def learning_rates(schedule: LrScheduleConfig, peak: float, steps: int, phase: Phase) -> Callable[[int], float]:
    """Return the learning rate of the next update as a function of the updates so far, both in the whole run.

    Args:
        schedule: began with the phase.
        peak: `optimizer.lr`.
        steps: steps of the whole run, all phases together.
    """
    return lr_schedule.learning_rates(schedule, peak, steps - phase.schedule_step, phase.schedule_update)


def trained_steps(first: int, last: int, skipped: Sequence[tuple[int, int]]) -> list[range]:
    """Return the steps from `first` to `last` without the (first, last) ranges of `training.skip_steps`."""
    left = []
    for begin, end in sorted(skipped):
        left.append(range(first, min(begin, last + 1)))
        first = max(first, end + 1)
    return [steps for steps in (*left, range(first, last + 1)) if steps]


def unfinished_schedule(config: RunConfig, phase: Phase, step: int, updates: int) -> list[str]:
    """Return a warning if `training.skip_steps` stops the learning rate before the end of its schedule.

    Args:
        updates: updates of the weights up to `step`.
    """
    steps, skipped = config.training.steps, config.training.skip_steps
    updates += sum(map(len, trained_steps(step + 1, steps, skipped)))
    due = phase.schedule_update + steps - phase.schedule_step
    rate_of = learning_rates(config.lr_schedule, config.optimizer.lr, steps, phase)
    last, end = (f"{rate_of(max(count - 1, 0)):.3g}" for count in (updates, due))
    if not skipped or step >= steps or last == end:
        return []
    done, of = updates - phase.schedule_update, due - phase.schedule_update
    return [
        "training.skip_steps leaves the learning rate's schedule unfinished, which counts updates: the last is update "
        f"{done:,} of {of:,}, and the learning rate ends at {last}, not {end}"
    ]
