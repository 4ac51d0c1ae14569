"""The checkpoints of a run: load the one to continue from, save while training continues, remove old ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from megazero.checkpoint import index
from megazero.checkpoint.folder import Folder, folder_at
from megazero.checkpoint.load import reading
from megazero.checkpoint.saver import Saver, SaveReport, snapshot_of
from megazero.comm.agreement import agree
from megazero.comm.collectives import from_first, gather_objects
from megazero.comm.messages import LostPeerError
from megazero.config import RunConfig
from megazero.data.identity import is_of_earlier_release
from megazero.engine import Engine, Position
from megazero.settings import Log, hide_passwords
from megazero.training.callbacks.base import Callback, StepRecord
from megazero.training.heartbeat import BETWEEN, SAVING
from megazero.training.resuming import find_origin, resume_setting_of, tell_changes
from megazero.training.watchdog import Watchdog

if TYPE_CHECKING:
    from megazero.checkpoint.retention import Pruner


class Checkpointing(Callback):
    """Saves every `checkpoint.save_every_steps` steps and after the last step; finds and loads checkpoints.

    Args:
        root: the directory of the checkpoints, which the run owns.
        watchdog: the run's watchdog.
        log: prints a line on the terminal of rank 0; other threads may call it.
    """

    def __init__(self, config: RunConfig, root: Folder, watchdog: Watchdog, log: Log) -> None:
        self._run_config, self._config, self._root, self._log = config, config.checkpoint, root, log
        self._watchdog, self._state = watchdog, watchdog.state
        self._axes = self._state.saving_axes(config.checkpoint.timeout_seconds)
        self._pruner = self._make_pruner() if self._config.keep_last else None
        # From `resume` on.
        self._engine: Engine
        self._fingerprint: str
        self._fingerprint_at: Callable[[int], str] | None
        self._origin: Folder | None = None  # what was found, then what was loaded last
        self._loaded_step = 0
        self._saver: Saver | None = None
        self._last: Folder | None = None  # what was loaded, or saved last, or is being saved
        # Of steps evaluated after their save, to be noted.  The saving threads of the ranks may take them at other times, so
        # whether there were any is a thing of its own.
        self._val_losses: deque[tuple[Folder, float]] = deque()
        self._has_losses_after_save = False

    @property
    def newest(self) -> str | None:
        """The newest step directory that this run has loaded or saved.  It is complete after `on_end`."""
        return None if self._last is None else str(self._last)

    def finish_save(self, error: BaseException | None) -> None:
        """Complete the current save when the run fails, unless a lost rank or directory makes that impossible."""
        if self._saver is not None and error is not None and not isinstance(error, LostPeerError | index.OwnerError):
            with suppress(Exception):  # already reported; the run ends for another reason
                self._saver.finish()
                self._note_val_losses()

    def after_step(self, record: StepRecord) -> None:
        """Save a checkpoint if this step is due.  Called a second time after the step's evaluation."""
        if not (record.is_last or self._is_due(record.step)):
            return
        if self._last == index.step_folder(self._root, record.step):
            if record.val_loss is not None:
                self._val_losses.append((self._last, record.val_loss))
                self._has_losses_after_save = True
        else:
            self.save(record.position, record.val_loss)

    def on_rollback(self, position: Position) -> None:
        """Save if a save is due: the loaded step may be in the directory of another run."""
        if self._is_due(position.step):
            self.save(position, None)

    def _is_due(self, step: int) -> bool:
        return bool(self._config.save_every_steps) and step % self._config.save_every_steps == 0

    def on_end(self, position: Position) -> None:
        """Block until the last save is durable and rank 0 has removed old steps.  Raises: CheckpointError, LostPeerError."""
        self._watchdog.at(position.step, SAVING)
        if self._saver is not None:
            self._saver.finish()
            if self._has_losses_after_save:
                self._prune()
            # All ranks leave together: a launcher that sees the first one end with 75 kills the others.
            gather_objects(None, self._axes.world)

    # Loading

    def find(self) -> bool:
        """Look for the checkpoint to continue from; return whether there is one.  Raises: CheckpointError."""
        self._origin = self._look(lambda: find_origin(self._config.resume, self._root))
        return self._origin is not None

    def _look(self, look: Callable[[], Folder | None]) -> Folder | None:
        """Call `look` on rank 0, and return its result on every rank."""
        found = agree(look if self._state.rank == 0 else lambda: None, self._state.world, index.CheckpointError)
        is_own = found is not None and found.parent == self._root  # then its name will do: not every URL names its host
        sent = from_first(None if found is None else (is_own, found.name if is_own else str(found)), self._state.world)
        if sent is None:
            return None
        is_own, path = sent
        return self._root.child(path) if is_own else folder_at(path)

    def resume(self, engine: Engine, fingerprint: str, fingerprint_at: Callable[[int], str] | None = None) -> Position:
        """Load the checkpoint that `find` found; return its position.

        Args:
            engine: the engine to load into.
            fingerprint: fingerprint of the run's data.
            fingerprint_at: `seq_len` -> fingerprint of the same data, cut into samples of this length.

        Raises: CheckpointError: the checkpoint is damaged.
        """
        self._engine, self._fingerprint, self._fingerprint_at = engine, fingerprint, fingerprint_at
        if self._origin is None:
            return Position()
        position = self._load(self._origin)
        self._log(f"resumed {self.newest} at step {position.step}")
        if self._state.rank == 0:
            written = index.read_trainer_state(self._origin)
            for line in tell_changes(written, self._run_config, position):
                self._log(line)
            if is_of_earlier_release(written.data_fingerprint):
                hint = "an earlier release noted only a sample of it"
                self._log(f"its data was not compared with that of this run: {hint}")
        return position

    def roll_back(self, step: int) -> Position | None:
        """Load the newest complete checkpoint before a step; return its position, or None if there is none.

        Raises: CheckpointError.
        """
        if self._saver is not None:
            try:
                self._saver.finish()
            except index.OwnerError:
                raise
            except index.CheckpointError:  # already reported
                pass
        newest = self._look(lambda: self._newest_of_this_run(step))
        if newest is None:
            return None
        rejected, was_saved = index.step_folder(self._root, step), self._last == index.step_folder(self._root, step)
        position = self._load(newest, before=step)

        def forget() -> None:
            if was_saved and self._state.rank == 0 and index.is_complete(rejected):
                index.discard(rejected)
                index.renew_latest(self._root)

        # saved before its evaluation, and now another one is loaded
        agree(forget, self._state.world, index.CheckpointError)
        return position

    def _newest_of_this_run(self, before: int) -> Folder | None:
        """Return the newest checkpoint of this run below step `before`.  Steps before the one that it loaded may belong
        to another run.
        """
        older = [folder for folder in self._complete_before(before) if self._loaded_step <= index.step_of(folder)]
        if older or self._origin is None:
            return older[-1] if older else None
        return self._origin if index.is_complete(self._origin) else None  # it may have been pruned

    def _complete_before(self, step: float) -> list[Folder]:
        earlier = [folder for folder in index.step_folders(self._root) if index.step_of(folder) < step]
        return list(filter(index.is_complete, earlier))

    def _load(self, origin: Folder, before: float = inf) -> Position:
        """Load a step.  If it is damaged and `checkpoint.on_damage` allows it, load an older one below `before`."""
        try:
            with ExitStack() as until_read:
                mark = partial(until_read.enter_context, reading(origin))
                agree(mark if self._state.rank == 0 else lambda: origin, self._state.world, index.CheckpointError)
                position = self._engine.load(origin, self._fingerprint, fingerprint_at=self._fingerprint_at)
        except index.DamagedError as error:
            if self._config.on_damage == "stop" or origin.parent != self._root:
                raise
            older = self._look(lambda: self._set_aside(origin, before))
            if older is None:
                hint = "nothing was changed"
                raise index.CheckpointError(f"{error}\nno older checkpoint is left in {self._root}; {hint}") from error
            self._log(f"{error}\n{origin.name} is marked as damaged; going back to {older.name} (checkpoint.on_damage)")
            return self._load(older, before)
        self._last = self._origin = origin
        self._loaded_step = position.step
        return position

    def _set_aside(self, damaged: Folder, before: float) -> Folder | None:
        """Mark a damaged checkpoint, and return the next one to try, possibly the one where this run began.

        The last one is not marked: without any checkpoint the same command would begin the run anew.
        """
        older = [folder for folder in self._complete_before(before) if folder.name != damaged.name]
        found, requested = older[-1] if older else None, self._config.resume
        if requested not in ("auto", "never") and (
            found is None or resume_setting_of(found) != hide_passwords(requested)
        ):
            found = folder_at(requested)
        if found is not None:
            index.mark_damaged(damaged)
            index.renew_latest(self._root)
        return found

    # Saving

    def save(self, position: Position, val_loss: float | None) -> None:
        """Start to save a checkpoint of this step, unless it is saved already.

        `val_loss`: the step's validation loss, if it was evaluated.  Raises: LostPeerError.
        """
        folder = index.step_folder(self._root, position.step)
        if self._last == folder:
            return
        self._watchdog.at(position.step, SAVING)
        self._saver = self._saver or self._make_saver()
        self._last = folder
        self._engine.save(folder, position, self._fingerprint, val_loss=val_loss, saver=self._saver)
        self._watchdog.at(position.step, BETWEEN)

    def _make_saver(self) -> Saver:
        config = self._config
        limit = None if config.host_memory_bytes == "auto" else config.host_memory_bytes
        state = self._engine.sharded_model.sharded_state
        snapshot = snapshot_of(state, self._state, limit if config.asynchronous else 0)
        if snapshot.refusal is not None and config.asynchronous:
            hint = f"{snapshot.refusal} (checkpoint.host_memory_bytes, or checkpoint.asynchronous = false)"
            self._log(f"training waits while checkpoints are written: {hint}")
        return Saver(snapshot, self._axes, self._report, after=lambda _: self._prune())

    def _make_pruner(self) -> Pruner:
        from megazero.checkpoint.retention import Pruner, Retention

        own = self._config
        policy = Retention(own.keep_last, own.keep_every_steps, own.keep_best, by_hash=own.verify == "hash")
        return Pruner(self._root, policy, self._axes.world)

    def _note_val_losses(self) -> None:
        """Add validation losses to complete checkpoints that were saved before their evaluation.  Not collective."""
        while self._val_losses:
            folder, val_loss = self._val_losses.popleft()
            with suppress(Exception):  # it only helps `keep_best`, and whatever writes next finds a lost directory
                if self._state.rank == 0:
                    index.note_val_loss(folder, val_loss)

    def _prune(self) -> None:
        """Remove old checkpoints.  A collective call."""
        self._note_val_losses()
        if self._pruner is None:
            return
        try:
            removed, damage = self._pruner.prune()
        except index.OwnerError:
            raise
        except index.CheckpointError as error:
            self._log(f"checkpoints were not pruned: {error}")
            return
        if damage:
            self._log("\n".join(["a checkpoint that is kept is damaged:", *damage]))
        if removed:
            self._log(f"removed {', '.join(folder.name for folder in removed)} (checkpoint.keep_last)")

    def _report(self, report: SaveReport) -> None:
        if report.error is not None:
            self._log(f"{report.error}; training {'ends' if report.ends_run else 'continues'}")
            return
        waited = f", {report.waited_seconds:.2f} s for the one before" if report.waited_seconds > 0.1 else ""
        hint = f"training paused for {report.copy_seconds:.3f} s{waited}"
        self._log(f"saved {report.folder.name}: {report.bytes / 2**20:,.1f} MiB in {report.seconds:.2f} s; {hint}")
