"""The checkpoints of a run: which one it goes on from, when one is written, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megazero.checkpoint.index import (
    CheckpointError,
    find_newest,
    is_complete,
    read_trainer_state,
    step_directory,
    step_of,
)
from megazero.comm.collectives import agree, gather_objects
from megazero.config import RunConfig
from megazero.engine import Engine, Position
from megazero.parallel_state import ParallelState

CHECKPOINTS = "checkpoints"


class Checkpoints:
    """Reads and writes the checkpoints of one run.  Called on every rank.

    Args:
        config: the resolved run.
        state: this rank's place.
        fingerprint: of the run's data.
        say: takes lines for the terminal, on rank 0.
    """

    def __init__(self, config: RunConfig, state: ParallelState, fingerprint: str, say: Callable[[str], None]) -> None:
        self._config, self._state, self._fingerprint, self._say = config, state, fingerprint, say
        self._root = Path(config.training.run_dir) / CHECKPOINTS
        self.newest: str | None = None  # the step directory of the newest complete checkpoint
        self._origin: Path | None = None

    def find(self) -> bool:
        """Look for the checkpoint to go on from; whether there is one.  Raises: CheckpointError."""
        look = (
            (lambda: _find_origin(self._config.checkpoint.resume, self._root))
            if self._state.rank == 0
            else lambda: None
        )
        self._origin = gather_objects(agree(look, self._state.world, CheckpointError), self._state.world)[0]
        return self._origin is not None

    def resume(self, engine: Engine) -> Position:
        """Take over what `find` has found; the beginning where it found none.  Raises: CheckpointError."""
        if self._origin is None:
            return Position()
        position = engine.load(self._origin, self._fingerprint)
        self.newest = str(self._origin)
        self._say(f"resumed {self._origin} at step {position.step}")
        return position

    def save(self, engine: Engine, position: Position, val_loss: float | None) -> None:  # noqa: ARG002
        """Write a checkpoint.

        Args:
            engine: holds the state.
            position: how far the run has come.
            val_loss: of this very step, where it was evaluated.
        """
        directory = step_directory(self._root, position.step)
        engine.save(directory, position, self._fingerprint)
        self.newest = str(directory)

    def roll_back(self, engine: Engine) -> Position | None:
        """Load the newest complete checkpoint again; None where there is none yet."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until what is being written is durable.  Raises: CheckpointError."""


def _find_origin(wish: str, root: Path) -> Path | None:
    newest = find_newest(root)
    if wish == "auto":
        return newest
    if wish == "never":
        if newest is not None:
            raise CheckpointError(
                f"checkpoint.resume=never, but {root.parent} holds the run that wrote {newest.name}; "
                "set training.run_dir to a new directory, or checkpoint.resume=auto to go on with it"
            )
        return None
    origin = Path(wish)
    if not is_complete(origin):
        raise CheckpointError(f"checkpoint.resume={wish} is not a complete checkpoint (it has no manifest.json)")
    step = read_trainer_state(origin).step
    if newest is not None and step_of(newest) > step:
        raise CheckpointError(
            f"checkpoint.resume={wish} is step {step}, but {root.parent} already holds {newest.name}; "
            "set training.run_dir to a new directory to branch off, or remove the later steps"
        )
    return origin
