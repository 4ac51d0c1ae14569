"""The checkpoints of a run: which one it goes on from, when one is written, which ones stay."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from megazero.checkpoint.folder import Folder, folder_at
from megazero.checkpoint.index import (
    CheckpointError,
    DamagedError,
    find_newest,
    is_complete,
    read_trainer_state,
    step_folder,
    step_folders,
    step_of,
)
from megazero.checkpoint.retention import Retention, mark_damaged, prune, reading
from megazero.checkpoint.saver import Saver, SaveReport
from megazero.comm.collectives import LostPeerError, agree, gather_objects
from megazero.config import RunConfig
from megazero.engine import Engine, Position
from megazero.parallel_state import ParallelState

CHECKPOINTS = "checkpoints"
_PROBE = "probe-"
_PROBE_SECONDS = 5.0  # a shared file system may show a new file a moment late
_MIB = 2**20


def checkpoints_of(config: RunConfig) -> Folder:
    """Where a run keeps its checkpoints.  Raises: ValueError for a URL that cannot be used."""
    return folder_at(config.checkpoint.directory or Path(config.training.run_dir) / CHECKPOINTS)


class Checkpoints:
    """Reads and writes the checkpoints of one run.  Called on every rank.

    Args:
        config: the resolved run.
        state: this rank's place.
        fingerprint: of the run's data.
        say: takes lines for the terminal, on rank 0; also from another thread.

    Attributes:
        newest: the newest complete step directory that this run has read or written, or None.

    Raises:
        CheckpointError: the ranks do not share the place where checkpoints go, or it cannot be written.
    """

    def __init__(self, config: RunConfig, state: ParallelState, fingerprint: str, say: Callable[[str], None]) -> None:
        self._config, self._state, self._fingerprint, self._say = config, state, fingerprint, say
        self._root = agree(lambda: checkpoints_of(config), state.world, CheckpointError)
        _check_shared(self._root, state)
        state.saving_axes(config.checkpoint.timeout_seconds)
        self.newest: str | None = None
        self._origin: Folder | None = None  # what was found, then what was loaded last
        self._loaded_step = 0
        self._saver: Saver | None = None
        self._last: Folder | None = None  # what was saved last, or is being saved

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """However the run ends, what is being written becomes durable; not where a rank is lost: it never would."""
        if self._saver is not None and error is not None and not isinstance(error, LostPeerError):
            with suppress(Exception):  # has been reported; the run ends for another reason
                self._saver.finish()

    def find(self) -> bool:
        """Look for the checkpoint to go on from; whether there is one.  Raises: CheckpointError."""
        self._origin = self._look(lambda: _find_origin(self._config.checkpoint.resume, self._root))
        return self._origin is not None

    def _look(self, look: Callable[[], Folder | None]) -> Folder | None:
        """What rank 0 finds, so that all ranks see the same."""
        found = agree(lambda: _path(look()) if self._state.rank == 0 else None, self._state.world, CheckpointError)
        path = gather_objects(found, self._state.world)[0]
        return None if path is None else folder_at(path)

    def resume(self, engine: Engine) -> Position:
        """Take over what `find` has found; the beginning where it found none.

        Raises:
            CheckpointError: it is damaged and `checkpoint.on_damage` says stop, or no intact one is left.
        """
        if self._origin is None:
            return Position()
        position = self._load(engine, self._origin)
        self._say(f"resumed {self.newest} at step {position.step}")
        return position

    def _load(self, engine: Engine, origin: Folder) -> Position:
        while True:
            try:
                position = self._read(engine, origin)
            except DamagedError as error:
                if self._config.checkpoint.on_damage == "stop" or origin.parent != self._root:
                    raise
                damaged, older = origin, self._drop(origin)
                if older is None:
                    raise CheckpointError(f"{error}\nno older checkpoint is left in {self._root}") from error
                self._say(
                    f"{error}\n{damaged.name} is marked as damaged; going back to {older.name} (checkpoint.on_damage)"
                )
                origin = older
            else:
                self._last, self.newest = origin, str(origin)
                self._origin, self._loaded_step = origin, position.step
                return position

    def _read(self, engine: Engine, origin: Folder) -> Position:
        with ExitStack() as until_read:
            mark = partial(until_read.enter_context, reading(origin))
            agree(mark if self._state.rank == 0 else lambda: origin, self._state.world, CheckpointError)
            return engine.load(origin, self._fingerprint)

    def _drop(self, damaged: Folder) -> Folder | None:
        """Set a damaged checkpoint aside; what is left to go on from, which may be where this run began."""

        def drop() -> Folder | None:
            mark_damaged(damaged)
            newest, wish = find_newest(self._root), self._config.checkpoint.resume
            if wish in ("auto", "never") or (newest is not None and _beginning_of(newest) == wish):
                return newest
            return folder_at(wish)

        return self._look(drop)

    def _newest_of_this_run(self) -> Folder | None:
        """Steps before the one that was loaded may lie in the directory from another beginning."""
        newest = find_newest(self._root)
        return newest if newest is not None and step_of(newest) >= self._loaded_step else self._origin

    def save(self, engine: Engine, position: Position, val_loss: float | None) -> None:
        """Begin a checkpoint, unless this step has one; earlier ones that failed have been told and are forgotten.

        Args:
            engine: holds the state.
            position: how far the run has come.
            val_loss: of this very step, where it was evaluated.

        Raises:
            LostPeerError: a rank is gone.
        """
        folder = step_folder(self._root, position.step)
        if self._last is not None and str(self._last) == str(folder):
            return
        self._saver = self._saver or self._make_saver(engine)
        self._last = folder
        engine.save(folder, position, self._fingerprint, val_loss=val_loss, saver=self._saver)

    def _make_saver(self, engine: Engine) -> Saver:
        config = self._config.checkpoint
        limit = None if config.host_memory_bytes == "auto" else config.host_memory_bytes
        keep = Retention(config.keep_last, config.keep_every_steps, config.keep_best)
        saver = Saver(
            engine.sharded_model.sharded_state,
            self._state,
            host_memory_bytes=limit if config.asynchronous else 0,
            timeout_seconds=config.timeout_seconds,
            report=self._tell,
            after=lambda _: self._prune(keep),
        )
        if saver.refusal is not None and config.asynchronous:
            self._say(
                f"training waits while checkpoints are written: {saver.refusal} (checkpoint.host_memory_bytes, "
                "or checkpoint.asynchronous = false)"
            )
        return saver

    def _prune(self, keep: Retention) -> None:
        try:
            removed = prune(self._root, keep)
        except (CheckpointError, OSError) as error:
            self._say(f"checkpoints were not pruned: {error}")
            return
        if removed:
            self._say(f"removed {', '.join(folder.name for folder in removed)} (checkpoint.keep_last)")

    def _tell(self, report: SaveReport) -> None:
        if report.error is not None:
            self._say(f"{report.error}; training goes on")
            return
        waited = f", {report.waited_seconds:.2f} s for the one before" if report.waited_seconds > 0.1 else ""
        self._say(
            f"saved {report.folder.name}: {report.bytes / _MIB:,.1f} MiB in {report.seconds:.2f} s; "
            f"training stood still for {report.copy_seconds:.3f} s{waited}"
        )

    def roll_back(self, engine: Engine) -> Position | None:
        """Load the newest complete checkpoint again; None where there is none yet.  Raises: CheckpointError."""
        if self._saver is not None:
            with suppress(CheckpointError):  # has been told
                self._saver.finish()
        newest = self._look(self._newest_of_this_run)
        return None if newest is None else self._load(engine, newest)

    def finish(self) -> None:
        """Wait until what is being written is durable, and rank 0 has pruned.  Raises: CheckpointError, LostPeerError."""
        if self._saver is not None:
            self._saver.finish()
            # Together: a launcher that sees the first rank end with 75 ends the others.
            gather_objects(None, self._state.saving_axes(self._config.checkpoint.timeout_seconds).world)
            self.newest = str(self._last)


def _path(folder: Folder | None) -> str | None:
    return None if folder is None else str(folder)


def _find_origin(wish: str, root: Folder) -> Folder | None:
    newest = find_newest(root)
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if wish == "auto" or (wish == "never" and is_restart):
        return newest
    if wish == "never":
        if newest is not None:
            raise CheckpointError(
                f"checkpoint.resume=never, but {root} holds the run that wrote {newest.name}; "
                "set training.run_dir to a new directory, or checkpoint.resume=auto to go on with it"
            )
        return None
    if newest is not None and _was_interrupted(root, wish):
        return newest
    origin = folder_at(wish)
    if not is_complete(origin):
        raise CheckpointError(f"checkpoint.resume={wish} is not a complete checkpoint (it has no manifest.json)")
    step = read_trainer_state(origin).step
    if newest is not None and step_of(newest) > step:
        raise CheckpointError(
            f"checkpoint.resume={wish} is step {step}, but {root} already holds {newest.name}; "
            "set training.run_dir to a new directory to branch off, or remove the later steps"
        )
    return origin


def _beginning_of(folder: Folder) -> str | None:
    """`checkpoint.resume` of the run that wrote a checkpoint; None where that cannot be told."""
    with suppress(DamagedError):
        resume = read_trainer_state(folder).config.get("checkpoint", {}).get("resume")
        return None if resume is None else str(resume)
    return None


def _was_interrupted(root: Folder, wish: str) -> bool:
    """Whether the run in a directory began at `wish`.  The newest step that can be read tells; the newest may be damaged."""
    complete = (folder for folder in reversed(step_folders(root)) if is_complete(folder))
    beginnings = (_beginning_of(folder) for folder in complete)
    return next((one for one in beginnings if one is not None), None) == wish


def _check_shared(root: Folder, state: ParallelState) -> None:
    """Make sure that every rank sees the files of rank 0.  Raises: CheckpointError naming those that do not."""
    if state.world.size == 1:
        return
    probe = gather_objects(f"{_PROBE}{uuid.uuid4().hex}", state.world)[0]

    def put() -> None:
        root.make()
        for left in root.files():  # by a run that was killed right here
            if left.startswith(_PROBE):
                root.remove(left)
        root.write(probe, b"")

    agree(put if state.rank == 0 else lambda: None, state.world, CheckpointError)
    seen = gather_objects((_appears(root, probe), socket.gethostname()), state.world)
    if state.rank == 0:
        with suppress(OSError):
            root.remove(probe)
    blind = [f"rank {rank} on {host}" for rank, (sees, host) in enumerate(seen) if not sees]
    if blind:
        shown = ", ".join(blind[:8]) + (f" and {len(blind) - 8} more" if len(blind) > 8 else "")
        raise CheckpointError(
            f"{shown} cannot see what rank 0 on {seen[0][1]} writes in {root}: checkpoints need a place that all ranks "
            "share. Set checkpoint.directory to a shared file system, or to a URL such as s3://bucket/run"
        )


def _appears(root: Folder, name: str) -> bool:
    end = time.monotonic() + _PROBE_SECONDS
    while True:
        with suppress(OSError):
            if root.has(name):
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
