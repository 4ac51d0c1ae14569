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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite

from megazero.checkpoint.folder import Folder, Location, folder_at
from megazero.checkpoint.index import (
    MANIFEST,
    CheckpointError,
    is_complete,
    is_step_name,
    read_trainer_state,
    step_folders,
    step_of,
)
from megazero.checkpoint.verify import find_damage

_READING = "reading"
_MARKER_SECONDS = 24 * 3600
_DAMAGED_MANIFEST = "damaged-manifest.json"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep.

    Args:
        keep_last: how many of the newest; 0 keeps everything.
        keep_every_steps: every step that is a multiple of this; 0 for none.
        keep_best: how many with the lowest validation loss.
    """

    keep_last: int = 0
    keep_every_steps: int = 0
    keep_best: int = 0


def kept_steps(val_losses: dict[int, float | None], policy: Retention) -> set[int]:
    """The steps to keep, of those in `val_losses`: validation loss by step, None if it was not evaluated."""
    steps = sorted(val_losses)
    if not policy.keep_last:
        return set(steps)
    kept = set(steps[-policy.keep_last :])
    if policy.keep_every_steps:
        kept |= {step for step in steps if step % policy.keep_every_steps == 0}
    evaluated = sorted((loss, step) for step, loss in val_losses.items() if loss is not None and isfinite(loss))
    return kept | {step for _, step in evaluated[: policy.keep_best]}


def prune(root: Location, policy: Retention) -> list[Folder]:
    """Remove what the policy does not keep, and incomplete directories of killed runs.  Called by one process at a time.

    Args:
        root: holds the step directories; none of them is being written.
        policy: what to keep.

    Returns: the removed directories.

    Raises:
        CheckpointError: none of those to keep is intact; nothing was removed.
        OSError: the storage refuses.
    """
    if not policy.keep_last:
        return []
    folders = step_folders(root)
    complete = [folder for folder in folders if is_complete(folder)]
    kept = kept_steps({step_of(folder): _val_loss(folder, policy) for folder in complete}, policy)
    to_remove = [folder for folder in complete if step_of(folder) not in kept]
    to_keep = [folder for folder in complete if step_of(folder) in kept]
    if to_remove and not any(_is_intact(folder) for folder in reversed(to_keep)):
        raise CheckpointError(
            f"of the checkpoints to keep in {root} ({_names(to_keep)}) none is intact: {_names(to_remove)} not removed"
        )
    newest = max((step_of(folder) for folder in complete), default=-1)
    incomplete = [folder for folder in folders if folder not in complete and step_of(folder) < newest]
    removed = [folder for folder in to_remove if _remove(folder)]
    for folder in incomplete:
        folder.remove_all()
    return [*removed, *incomplete]


def _names(folders: Sequence[Folder]) -> str:
    return ", ".join(folder.name for folder in folders) or "none"


def _val_loss(folder: Folder, policy: Retention) -> float | None:
    with suppress(CheckpointError):
        return read_trainer_state(folder).val_loss if policy.keep_best else None
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
    """Protect a step directory from pruning while it is read; yields the folder.

    A directory with another name is never pruned and needs no marker.

    Raises:
        CheckpointError: it is not complete, or is not any more.
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
    markers, now, is_read = folder.parent.child(_READING), time.time(), False
    for marker in markers.files():
        name, *rest = marker.split(".")
        if name != folder.name:
            continue
        if len(rest) > 1 and rest[0].isdigit() and now - int(rest[0]) > _MARKER_SECONDS:
            markers.remove(marker)
        else:
            is_read = True
    return is_read


def mark_damaged(folder: Folder) -> None:
    """Rename the manifest, so that the checkpoint no longer counts; its files stay until it is saved again or pruned."""
    with suppress(FileNotFoundError):
        folder.write(_DAMAGED_MANIFEST, folder.read(MANIFEST))
    folder.remove(MANIFEST)
