"""Which checkpoints are retained, and how the others are removed.

    keep_last = 2, keep_every_steps = 100      step 50  100  150  200  250  260
                                                     x  keep    x keep keep keep

The manifest is removed first, so a half-removed checkpoint does not count as one.  A checkpoint is not removed while it
is being read.  None is removed unless at least one of the retained checkpoints is intact, by the hashes of its files.
Step directories that are links, and files that no checkpoint of ours has written, are left alone.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite

from megazero.checkpoint import index
from megazero.checkpoint.folder import Folder, Location, folder_at
from megazero.checkpoint.load import READING, find_damage_together
from megazero.checkpoint.lock import has_ended
from megazero.comm.agreement import on_first
from megazero.parallel_state import Axis

_MARKER_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to retain."""

    keep_last: int = 0  # how many of the newest; 0 keeps everything
    keep_every_steps: int = 0  # every step that is a multiple of this; 0 for none
    keep_best: int = 0  # how many with the lowest validation loss, of each data that a run has read
    # Verify the hashes of a retained one before others are removed, not only the sizes of its files.
    by_hash: bool = True


def retained_steps(
    val_losses: dict[int, float | None], policy: Retention, data: Mapping[int, str] | None = None
) -> set[int]:
    """Return the steps to retain, given the validation loss of each step (None if it was not evaluated).

    Args:
        data: fingerprint of the validation data by step, if known; losses on different data are ranked separately.
    """
    steps = sorted(val_losses)
    if not policy.keep_last:
        return set(steps)
    retained = set(steps[-policy.keep_last :])
    if policy.keep_every_steps:
        retained |= {step for step in steps if step % policy.keep_every_steps == 0}
    evaluated = sorted((loss, step) for step, loss in val_losses.items() if loss is not None and isfinite(loss))
    better: Counter[str] = Counter()  # for each evaluated step, the number of better ones on the same data
    for _, step in evaluated:
        read = (data or {}).get(step, "")
        if better[read] < policy.keep_best:
            retained.add(step)
        better[read] += 1
    return retained


class Pruner:
    """Removes checkpoints that the policy does not retain, and incomplete directories of killed runs.

    Every rank constructs and calls one.

    Args:
        world: all ranks.  Rank 0 removes; all ranks verify.
        clock: returns the time in seconds.
    """

    def __init__(
        self, root: Location, policy: Retention, world: Axis, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root, self._policy, self._world, self._clock = folder_at(root), policy, world, clock
        self._seen: dict[str, float] = {}  # markers of readers on other hosts, and when this process first saw them

    def prune(self) -> tuple[list[Folder], list[str]]:
        """Remove the checkpoints that are not retained.  No save may be in progress.

        Returns: on rank 0, the removed checkpoints, and a line for every damaged file of the retained ones.

        Raises:
            CheckpointError: on every rank: none of the retained checkpoints is intact, and nothing was removed; or the
                storage fails.
        """
        if not self._policy.keep_last:
            return [], []
        retained, remove, unfinished = on_first(self._plan, self._world, index.CheckpointError)
        damage: list[str] = []
        for name in reversed(retained if remove else []):
            intact = self._root.child(name)
            if not (found := find_damage_together(intact, self._world, by_hash=self._policy.by_hash)):
                # what is newer than this one may be intact, too
                remove = [old for old in remove if index.step_of(self._root.child(old)) < index.step_of(intact)]
                break
            damage += found
        else:
            if remove:
                raise index.CheckpointError(
                    f"of the checkpoints to keep in {self._root} ({', '.join(retained) or 'none'}) none is intact: "
                    f"{', '.join(remove)} not removed\n" + "\n".join(damage)
                )

        def remove_all() -> list[str]:
            removed = [name for name in remove if self._remove(self._root.child(name))]
            for name in unfinished:
                index.remove_own_files(self._root.child(name))
            return removed + unfinished

        removed = on_first(remove_all, self._world, index.CheckpointError)
        return [self._root.child(name) for name in removed], damage

    def _plan(self) -> tuple[list[str], list[str], list[str]]:
        """Return the names of directories to retain, to remove, and of unfinished ones to clear, each in the order of
        steps.
        """
        folders = [folder for folder in index.step_folders(self._root) if not folder.is_link]
        complete = {index.step_of(folder): folder for folder in folders if index.is_complete(folder)}
        ranked = complete if self._policy.keep_best else {}
        states = {step: _state(folder) for step, folder in ranked.items()}
        data = {step: state.data_fingerprint for step, state in states.items() if state}
        losses, unknown = dict[int, float | None].fromkeys(complete), set()
        for step, folder in ranked.items():
            try:
                losses[step] = index.val_loss_of(folder)
            except index.CheckpointError:
                unknown.add(step)  # it may be the best one
        retained = retained_steps(losses, self._policy, data) | unknown
        old = [folder for folder in folders if complete and index.step_of(folder) < max(complete)]
        return (
            [folder.name for step, folder in complete.items() if step in retained],
            [folder.name for step, folder in complete.items() if step not in retained],
            [folder.name for folder in old if folder not in complete.values() and _is_ours(folder)],
        )

    def _remove(self, folder: Folder) -> bool:
        """Remove a complete checkpoint, unless it is being read or is not ours.  Return whether it was removed."""
        if self._is_read(folder):
            return False
        try:
            names = index.files_of_save(folder)
        except index.CheckpointError:  # not ours; or the storage fails, and the next pruning removes it
            return False
        manifest = folder.read(index.MANIFEST)
        index.write_unfinished(folder, names)
        folder.remove(index.MANIFEST)
        if self._is_read(folder):
            folder.write(index.MANIFEST, manifest)
            folder.remove(index.UNFINISHED)
            return False
        index.remove_own_files(folder)
        return True

    def _is_read(self, folder: Folder) -> bool:
        markers, is_read = folder.parent.child(READING), False
        for marker in markers.files():
            if marker.partition(".")[0] != folder.name:
                continue
            gone = has_ended(markers.read_if_there(marker).decode(errors="replace"))
            first = self._seen.setdefault(marker, self._clock())
            if gone or (gone is None and self._clock() - first > _MARKER_SECONDS):
                with suppress(OSError):  # another user's directory: it stays, but does not count any more
                    markers.remove(marker)
            else:
                is_read = True
        return is_read


def _is_ours(folder: Folder) -> bool:
    """Whether an unfinished step directory is empty or contains files of ours."""
    return bool(index.own_files(folder)) or not (folder.files() or folder.folders())


def _state(folder: Folder) -> index.TrainerState | None:
    with suppress(index.CheckpointError):
        return index.read_trainer_state(folder)
    return None
