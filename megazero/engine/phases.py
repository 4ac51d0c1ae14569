"""What a run changes on purpose: its phases, as checkpoints record them.

    steps      0 ------------- 1000 ------------- 1200 ----------- 1500
    data       web             web and books      long documents           read from its first sample where it changes
    schedule   wsd             linear to 0                                 begins anew where it changes
    phases     ()              (a,)               (a, b)

Steps, samples and tokens count on over the whole run.  A phase begins where a run goes on from a checkpoint with something
changed that `checkpoint.accept_changes` names.  The checkpoints of the phase record the changed configuration, so the same
command, repeated, goes on within the phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megazero.checkpoint.folder import Location
from megazero.checkpoint.index import CheckpointError, TrainerState, versions
from megazero.config import RunConfig
from megazero.config.schema import sections
from megazero.data.identity import changes_between, tokenizer_part
from megazero.data.tokenizer import load_tokenizer
from megazero.models.registry import FAMILIES
from megazero.optim.config import LrScheduleConfig
from megazero.optim.lr_schedule import learning_rate_factor
from megazero.settings import toml_value
from megazero.zero.sharded_model import ShardedModel

# The keys that each name of checkpoint.accept_changes stands for.
KEYS_OF = {
    "data": ("data.sources", "data.tokenizer", "data.eod_token", "data.validation_fraction", "training.seed"),
    "document_mask": ("data.document_mask",),
    "seq_len": ("model.seq_len",),
    "rope": ("model.rope_theta", "model.rope_scaling"),
    "lr_schedule": (*(f"lr_schedule.{key}" for key in LrScheduleConfig.model_fields), "optimizer.lr", "training.steps"),
    "batch": ("training.global_batch_size", "training.batch_ramp"),
}
_SHOWN_LETTERS = 200  # of a value
_FREE_TO_CHANGE = {"dropout", "init_std"}  # model keys that a resumed run may set anew
FINGERPRINT = "data fingerprint"  # among the changes of a phase, where its samples are others


@dataclass(frozen=True)
class Phase:
    """A part of a run with data and a learning-rate schedule of its own, or those of the phase before."""

    step: int = 0  # steps done before it
    changed: Mapping[str, list[Any]] = field(default_factory=dict)  # [old, new] by key
    first_sample: int = 0  # global index of the sample that is the first of its data
    schedule_step: int = 0  # steps done before its schedule began
    schedule_update: int = 0  # updates of the weights done before its schedule began


def current(phases: tuple[Phase, ...]) -> Phase:
    """The current phase of a run; the first phase, which begins at step 0, is not recorded."""
    return phases[-1] if phases else Phase()


def recorded_phases(trainer: TrainerState) -> tuple[Phase, ...]:
    """The phases that a checkpoint records."""
    return tuple(Phase(**table) for table in trainer.phases)


def phases_after(trainer: TrainerState, config: RunConfig, data_fingerprint: str) -> tuple[Phase, ...]:
    """The phases of a run that resumes from a checkpoint: the recorded ones, and a new one if an accepted change was made.

    Args:
        trainer: of a checkpoint whose model and data this run may go on with; see `check_same_run`.
        data_fingerprint: of the data that the samples will come from.
    """
    phases, found = recorded_phases(trainer), changes(trainer, config)
    last, accepted = current(phases), config.checkpoint.accept_changes
    is_same = is_same_data(trainer.data_fingerprint, data_fingerprint)
    # the same data under another path is no change
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
    """Whether a phase that changes these keys restarts the data, and whether it restarts the learning-rate schedule."""
    keys = changed.keys()
    return not keys.isdisjoint({FINGERPRINT, *KEYS_OF["seq_len"]}), not keys.isdisjoint(KEYS_OF["lr_schedule"])


def is_same_data(stored: str, fingerprint: str) -> bool:
    """Whether two fingerprints are of the same data, as far as they can be compared; see `changes_between`."""
    return not changes_between(stored, fingerprint)


def changes(trainer: TrainerState, config: RunConfig) -> dict[str, list[Any]]:
    """[old, new] of every key that differs from the run that wrote a checkpoint.

    A key that the checkpoint does not know had its default; an imported model has no configuration but `[model]`.
    """
    new = values_by_key(config.model_dump(mode="json"))
    defaults = RunConfig().model_dump(mode="json")
    old = values_by_key(defaults if trainer.config else {"model": defaults["model"]})
    return _differing(old | values_by_key(trainer.config) | values_by_key({"model": trainer.model}), new)


def changed_keys(before: RunConfig, after: RunConfig) -> dict[str, list[Any]]:
    """[old, new] of every key that differs."""
    return _differing(*(values_by_key(config.model_dump(mode="json")) for config in (before, after)))


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [old[key], value] for key, value in new.items() if key in old and old[key] != value}


def changes_text(changed: Mapping[str, Sequence[Any]]) -> str:
    """a.b 1 -> 2, c.d "x" -> "y" """

    def shown(value: Any) -> str:
        text = "unset" if value is None else toml_value(value)
        return text if len(text) <= _SHOWN_LETTERS else text[:_SHOWN_LETTERS] + "…"

    return ", ".join(f"{key} {shown(old)} -> {shown(new)}" for key, (old, new) in changed.items())


def values_by_key(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"zero.offload.ratio": 1.0, ...}; a key whose value is a table is one key."""
    known, found = sections(), dict[str, Any]()
    for name, value in tables.items():
        is_section = prefix + name in known and isinstance(value, dict)
        found |= values_by_key(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return found


@dataclass(frozen=True)
class Position:
    """The position of a run: optimizer steps done, samples consumed (the next global index), and tokens counted."""

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
    """The position of a run that resumes from a checkpoint which `check_same_run` has accepted."""
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
    """Check that a checkpoint has this model and this data, except for accepted changes, before anything is loaded.

    Args:
        fingerprint_at: of this run's data, cut into samples of another `seq_len`.

    Raises: CheckpointError.
    """
    accepted, (model, differs) = config.checkpoint.accept_changes, _model_changes(path, config, trainer)
    free = _FREE_TO_CHANGE | {key.removeprefix("model.") for name in accepted for key in KEYS_OF[name]}
    changed = {f"model.{key}": (model[key], getattr(config.model, key)) for key in differs if key not in free}
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


def _model_changes(path: Location, config: RunConfig, trainer: TrainerState) -> tuple[dict[str, Any], list[str]]:
    """The [model] of a checkpoint, and its keys that differ from those of a run.  Raises: CheckpointError."""
    family, wanted = FAMILIES[config.model.family], config.model.model_dump()
    # a key that the writer did not know yet has its default
    model = family.complete(type(config.model).model_construct(**trainer.model)).model_dump(warnings=False)
    differs = [key for key in wanted if model[key] != wanted[key]]
    if family.learns_positions and "seq_len" in differs and "family" not in differs:
        raise CheckpointError(
            f"{path} has learned {model['seq_len']} positions, and this run has model.seq_len = {wanted['seq_len']}; a "
            f"{config.model.family} keeps the length that it was made with: set model.seq_len to {model['seq_len']}"
        )
    return model, differs


def _end_of(config: RunConfig, stored: str) -> str:
    """Hint at the `data.eod_token` that reproduces the tokenizer of a checkpoint's fingerprint; empty if none does."""
    try:
        then = load_tokenizer(config.data.tokenizer, None, stored)
    except (OSError, ValueError):
        return ""
    is_it = then.eod_token and then.fingerprint == tokenizer_part(stored)
    return f". data.eod_token = {toml_value(then.eod_token)} ends documents as before" if is_it else ""


def _shown(value: object) -> str:
    return "unset" if value is None else toml_value(value)


def learning_rate(schedule: LrScheduleConfig, peak: float, steps: int, phase: Phase, updates: int) -> float:
    """The learning rate of the next update, by the schedule that began with the phase.

    Args:
        peak: `optimizer.lr`.
        steps: of the whole run, all phases together.
        updates: of the weights, done so far in the whole run.
    """
    return peak * learning_rate_factor(schedule, updates - phase.schedule_update, steps - phase.schedule_step)


def trained_steps(first: int, last: int, skipped: Sequence[tuple[int, int]]) -> list[range]:
    """The steps from `first` to `last` without the (first, last) ranges of `training.skip_steps`."""
    left = []
    for begin, end in sorted(skipped):
        left.append(range(first, min(begin, last + 1)))
        first = max(first, end + 1)
    return [steps for steps in (*left, range(first, last + 1)) if steps]


def unfinished_schedule(config: RunConfig, phase: Phase, step: int, updates: int) -> list[str]:
    """Warn if `training.skip_steps` keeps the learning rate from the end of its schedule, with `updates` done at `step`."""
    steps, skipped = config.training.steps, config.training.skip_steps
    updates += sum(map(len, trained_steps(step + 1, steps, skipped)))
    due = phase.schedule_update + steps - phase.schedule_step
    last, end = (
        f"{learning_rate(config.lr_schedule, config.optimizer.lr, steps, phase, max(count - 1, 0)):.3g}"
        for count in (updates, due)
    )
    if not skipped or step >= steps or last == end:
        return []
    done, of = updates - phase.schedule_update, due - phase.schedule_update
    return [
        "training.skip_steps leaves the learning rate's schedule unfinished, which counts updates: the last is update "
        f"{done:,} of {of:,}, and the learning rate ends at {last}, not {end}"
    ]
