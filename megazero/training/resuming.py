"""Which checkpoint a run continues from, as `checkpoint.resume` says.

auto                 the newest complete step of the run's own directory; the beginning if there is none
never                the beginning; refused if the directory holds a run
path or URL          that step, at the first start; after an interruption the newest of the run's own
"""

import os
from collections.abc import Callable
from contextlib import suppress

from megazero.checkpoint import index
from megazero.checkpoint.folder import Folder, folder_at
from megazero.checkpoint.load import check_state_kinds
from megazero.checkpoint.lock import checkpoints_of
from megazero.config import RunConfig
from megazero.engine import Position, phases
from megazero.engine.outline import optimizer_of
from megazero.optim.config import LrScheduleConfig
from megazero.settings import hide_passwords, toml_value

# These keys say where a run is, not what it does; a URL may hold a password.
_PLACES = {"training.run_dir", "checkpoint.directory", "checkpoint.resume", "checkpoint.accept_changes"}


def find_origin(requested: str, root: Folder) -> Folder | None:
    """Find the step directory to resume from, with the run's own checkpoints in `root`; None to start at step 0.

    Raises: CheckpointError.
    """
    newest = index.find_newest(root)
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if requested == "auto" or (requested == "never" and is_restart):
        return newest
    if requested == "never":
        if newest is not None:
            hint = "set training.run_dir to a new directory, or checkpoint.resume=auto to continue it"
            found = f"{root} holds the run that wrote {newest.name}"
            raise index.CheckpointError(f"checkpoint.resume=never, but {found}; {hint}")
        return None
    if newest is not None and _was_interrupted(root, requested):
        return newest
    origin = folder_at(requested)
    index.check_complete(origin, f"checkpoint.resume={requested}")
    step = index.read_trainer_state(origin).step
    if newest is not None and index.step_of(newest) > step:
        hint = "set training.run_dir to a new directory to branch off, or remove the later steps"
        found = f"{root} already holds {newest.name}"
        raise index.CheckpointError(f"checkpoint.resume={requested} is step {step}, but {found}; {hint}")
    return origin


def foresee(config: RunConfig, fingerprint_at: Callable[[int], str] | None) -> list[str]:
    """Describe where a run would resume and what it would do differently; empty if it would start at step 0.

    Args:
        fingerprint_at: returns the fingerprint of its data, cut into samples of a `seq_len`; None: unknown, so it is not
            compared.

    Raises: CheckpointError: the run would raise it, too.
    """
    requested = config.checkpoint.resume
    try:
        if "://" not in requested and requested not in ("auto", "never"):
            index.check_complete(folder_at(requested), f"checkpoint.resume={requested}")
        if "://" in requested + (config.checkpoint.directory or ""):
            return ["checkpoints at a URL were not looked at"]
        if (origin := find_origin(requested, checkpoints_of(config))) is None:
            return []
        trainer = index.read_trainer_state(origin)
        data = trainer.data_fingerprint if fingerprint_at is None else fingerprint_at(config.model.seq_len)
        phases.check_same_run(origin, config, data, trainer, fingerprint_at=fingerprint_at)
        check_state_kinds(origin, optimizer_of(config.optimizer).known_states if trainer.optimizer_steps else None)
        position = phases.position_after(trainer, config, data)
        lines = [f"goes on from {origin}, step {position.step:,}, whose files were not verified"]
        lines += tell_changes(trainer, config, position)
    except index.DamagedError as error:
        if config.checkpoint.on_damage == "stop":
            raise
        return [f"{error}; the run goes back to an older one, or ends (checkpoint.on_damage)"]
    except (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise index.CheckpointError(f"the checkpoint to go on from cannot be read: {error}") from error
    return lines if fingerprint_at is not None else [*lines, "its data was not compared: that of this run is not here"]


def resume_setting_of(folder: Folder) -> str | None:
    """Return `checkpoint.resume` of the run that wrote a checkpoint, without passwords; None if unknown."""
    with suppress(index.DamagedError):
        resume = index.read_trainer_state(folder).config.get("checkpoint", {}).get("resume")
        return None if resume is None else hide_passwords(str(resume))
    return None


def _was_interrupted(root: Folder, requested: str) -> bool:
    """Whether the run in a directory started from `requested`, according to the newest step that can be read."""
    settings = (resume_setting_of(folder) for folder in reversed(index.step_folders(root)) if index.is_complete(folder))
    return next((setting for setting in settings if setting is not None), None) == hide_passwords(requested)


def tell_changes(trainer: index.TrainerState, config: RunConfig, position: Position) -> list[str]:
    """Describe what a resumed run does differently from the run that wrote the checkpoint.

    Args:
        position: where the run continues, with its phases.
    """
    found, lines, phase = phases.changes(trainer, config), [], position.phase
    number = f"phase {len(position.phases) + 1} of the run"
    is_over, is_new = position.step >= config.training.steps, len(position.phases) > len(trainer.phases)
    if is_over:
        lines.append(
            f"nothing is left to train: the run is at step {position.step} and training.steps is {config.training.steps}; "
            f"raise it, or give another run its own training.run_dir (now {toml_value(config.training.run_dir)})"
        )
    elif is_new:
        changed = phase.changed
        found = {key: values for key, values in found.items() if key not in changed}
        lines.append(f"{number} begins (checkpoint.accept_changes): {phases.changes_text(changed)}")
        new_data, new_schedule = phases.begins_anew(changed)
        if new_data:
            lines.append(f"its data is read from the first sample, which is sample {position.samples} of the run")
        if new_schedule:
            steps = f"from step {position.step + 1} to {config.training.steps}"
            lines.append(f"its learning-rate schedule begins anew and runs {steps}")
    if position.phases and not is_new:
        lines.append(f"in {number}, which began after step {phase.step}")
    found = {key: values for key, values in found.items() if key not in _PLACES}
    if found:
        lines.append(f"changed since the checkpoint was written: {phases.changes_text(found)}")
    return lines + _tell_learning_rate(trainer, config, position)


def _tell_learning_rate(trainer: index.TrainerState, config: RunConfig, position: Position) -> list[str]:
    """Describe how a changed schedule changes the next learning rate; empty if nothing changed it."""
    steps, updates = config.training.steps, trainer.optimizer_steps
    if position.step >= steps or phases.changes(trainer, config).keys().isdisjoint(phases.KEYS_OF["lr_schedule"]):
        return []
    now = phases.learning_rates(config.lr_schedule, config.optimizer.lr, steps, position.phase)(updates)
    with suppress(Exception):  # a script's schedule may be gone, or not know a step beyond its end
        old_steps, peak = trainer.config["training"]["steps"], trainer.config["optimizer"]["lr"]
        schedule = LrScheduleConfig.model_validate(trainer.config["lr_schedule"])
        phase = phases.current(phases.recorded_phases(trainer))
        before = phases.learning_rates(schedule, peak, old_steps, phase)(updates)
        ended = ", which has ended" if position.step >= old_steps else ""
        by = f"by the checkpoint's schedule of {old_steps} steps{ended}"
        then = f"now {now:.4g}, in a run of {steps} steps"
        return [f"learning rate of step {position.step + 1}: {before:.4g} {by}; {then}"]
    return []
