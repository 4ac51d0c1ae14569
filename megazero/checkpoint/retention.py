"""Which checkpoints are kept, and how the others are removed.

    keep_last = 2, keep_every_steps = 100      step 50  100  150  200  250  260
                                                     x  keep    x keep keep keep

The manifest is removed first, so that a checkpoint that is half removed does not count as one.  A checkpoint that is being
read is not removed, and none is removed unless one of those to keep is intact.

[Note: readers] A reader writes a marker into `reading/` beside the step directories, then looks for the manifest.  Pruning
removes the manifest, then looks for markers before it removes the rest.  So one of the two sees the other, on any storage.
The marker of a reader that was killed expires after a day.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite

from megazero.checkpoint.folder import Folder, Location, folder_at
from megazero.checkpoint.index import (
    MANIFEST,
    CheckpointError,
    TrainerState,
    find_damage,
    is_complete,
    is_step_name,
    read_trainer_state,
    step_folders,
    step_of,
    val_loss_of,
)

_READING = "reading"
_MARKER_SECONDS = 24 * 3600
_DAMAGED_MANIFEST = "damaged-manifest.json"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep."""

    keep_last: int = 0  # how many of the newest; 0 keeps everything
    keep_every_steps: int = 0  # every step that is a multiple of this; 0 for none
    keep_best: int = 0  # how many with the lowest validation loss, of each data that a run has read


def kept_steps(
    val_losses: dict[int, float | None], policy: Retention, data: Mapping[int, str] | None = None
) -> set[int]:
    """The steps to keep, of those in `val_losses`: validation loss by step, None if it was not evaluated.

    Args:
        data: fingerprint of the data by step, where it is known; losses on other data are ranked apart.
    """
    steps = sorted(val_losses)
    if not policy.keep_last:
        return set(steps)
    kept = set(steps[-policy.keep_last :])
    if policy.keep_every_steps:
        kept |= {step for step in steps if step % policy.keep_every_steps == 0}
    evaluated = sorted((loss, step) for step, loss in val_losses.items() if loss is not None and isfinite(loss))
    better: Counter[str] = Counter()  # by data, how many evaluated steps have a lower loss
    for _, step in evaluated:
        read = (data or {}).get(step, "")
        if better[read] < policy.keep_best:
            kept.add(step)
        better[read] += 1
    return kept


def prune(root: Location, policy: Retention) -> list[Folder]:
    """Remove what the policy does not keep, and incomplete directories of killed runs.  Called by one process at a time.

    None of the directories may be being written.  Returns: the removed ones.

    Raises:
        CheckpointError: none of those to keep is intact; nothing was removed.
        OSError: the storage refuses.
    """
    if not policy.keep_last:
        return []
    folders = step_folders(root)
    complete = [folder for folder in folders if is_complete(folder)]
    states = {step_of(folder): _state(folder) if policy.keep_best else None for folder in complete}
    data = {step: state.data_fingerprint for step, state in states.items() if state}
    losses = {step_of(folder): val_loss_of(folder) if policy.keep_best else None for folder in complete}
    kept = kept_steps(losses, policy, data)
    to_remove = [folder for folder in complete if step_of(folder) not in kept]
    to_keep = [folder for folder in complete if step_of(folder) in kept]
    if to_remove and not any(_is_intact(folder) for folder in reversed(to_keep)):
        keeping, removing = (", ".join(one.name for one in some) or "none" for some in (to_keep, to_remove))
        raise CheckpointError(
            f"of the checkpoints to keep in {root} ({keeping}) none is intact: {removing} not removed"
        )
    incomplete = [one for one in folders if one not in complete and complete and step_of(one) < step_of(complete[-1])]
    removed = [folder for folder in to_remove if _remove(folder)]
    for folder in incomplete:
        folder.remove_all()
    return [*removed, *incomplete]


def _state(folder: Folder) -> TrainerState | None:
    with suppress(CheckpointError):
        return read_trainer_state(folder)
    return None


def _is_intact(folder: Folder) -> bool:
    with suppress(CheckpointError):
        return not find_damage(folder, by_hash=False)
    return False


def _remove(folder: Folder) -> bool:
    """Remove a complete checkpoint unless it is being read; returns whether it was removed."""
    if _is_read(folder):
        return False
    manifest = folder.read(MANIFEST)
    folder.remove(MANIFEST)
    if _is_read(folder):
        folder.write(MANIFEST, manifest)
        return False
    folder.remove_all()
    return True


@contextmanager
def reading(location: Location) -> Iterator[Folder]:
    """Protect a step directory from pruning while it is read; one with another name is never pruned.

    Raises: CheckpointError, it is not complete, or is not any more.
    """
    folder = folder_at(location)
    marker = f"{folder.name}.{int(time.time())}.{uuid.uuid4().hex}"
    markers = folder.parent.child(_READING)
    if is_step_name(folder.name):
        with suppress(OSError):  # if nothing can be written there, nothing is pruned either
            markers.make()
            markers.write(marker, b"")
    try:
        if not is_complete(folder):
            raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}")
        yield folder
    finally:
        with suppress(OSError):
            markers.remove(marker)


def _is_read(folder: Folder) -> bool:
    markers, is_read = folder.parent.child(_READING), False
    for marker in markers.files():
        name, *rest = marker.split(".")
        if name != folder.name:
            continue
        if len(rest) > 1 and rest[0].isdigit() and time.time() - int(rest[0]) > _MARKER_SECONDS:
            markers.remove(marker)
        else:
            is_read = True
    return is_read


def mark_damaged(folder: Folder) -> None:
    """Rename the manifest, so that the checkpoint no longer counts; its files stay until it is saved again or pruned."""
    with suppress(FileNotFoundError):
        folder.write(_DAMAGED_MANIFEST, folder.read(MANIFEST))
    folder.remove(MANIFEST)
