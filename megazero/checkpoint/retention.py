"""Which checkpoints stay, and how the others go.

    keep_last = 2, keep_every_steps = 100      step 50  100  150  200  250  260
                                                     x  keep    x keep keep keep

A checkpoint goes manifest first, so one that is half removed is not taken for one.  Nothing goes that someone reads, and
nothing at all unless one of those that stay is intact.

[Note: readers] A reader leaves a marker in `reading/` beside the step directories and looks whether the manifest is still
there; whoever removes takes the manifest away and looks for markers again before the rest.  So one of the two sees the
other, on any storage.  A marker of a reader that was killed counts for a day.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite

from megazero.checkpoint.folder import Folder, Place, folder_at
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
_SET_ASIDE = "damaged-manifest.json"


@dataclass(frozen=True)
class Retention:
    """What stays.

    Args:
        keep_last: so many of the newest; 0 keeps everything.
        keep_every_steps: every step that is a multiple of this; 0 for none.
        keep_best: so many with the lowest validation loss.
    """

    keep_last: int = 0
    keep_every_steps: int = 0
    keep_best: int = 0


def kept_steps(val_losses: dict[int, float | None], policy: Retention) -> set[int]:
    """The steps that stay.

    Args:
        val_losses: of every checkpoint there is, by step; None where it was not evaluated.
        policy: what stays.
    """
    steps = sorted(val_losses)
    if not policy.keep_last:
        return set(steps)
    kept = set(steps[-policy.keep_last :])
    if policy.keep_every_steps:
        kept |= {step for step in steps if step % policy.keep_every_steps == 0}
    evaluated = sorted((loss, step) for step, loss in val_losses.items() if loss is not None and isfinite(loss))
    return kept | {step for _, step in evaluated[: policy.keep_best]}


def prune(root: Place, policy: Retention) -> list[Folder]:
    """Remove what the policy does not keep, and what killed runs have left half written.  By one process at a time.

    Args:
        root: holds the step directories; none of them is being written.
        policy: what stays.

    Returns: what was removed.

    Raises:
        CheckpointError: none of those that would stay is intact; nothing was removed.
        OSError: the storage refuses.
    """
    if not policy.keep_last:
        return []
    folders = step_folders(root)
    complete = [folder for folder in folders if is_complete(folder)]
    kept = kept_steps({step_of(folder): _val_loss(folder, policy) for folder in complete}, policy)
    going = [folder for folder in complete if step_of(folder) not in kept]
    staying = [folder for folder in complete if step_of(folder) in kept]
    if going and not any(_is_whole(folder) for folder in reversed(staying)):
        raise CheckpointError(
            f"of the checkpoints to keep in {root} ({_names(staying)}) none is intact: {_names(going)} not removed"
        )
    newest = max((step_of(folder) for folder in complete), default=-1)
    half = [folder for folder in folders if folder not in complete and step_of(folder) < newest]
    removed = [folder for folder in going if _remove(folder)]
    for folder in half:
        folder.remove_all()
    return [*removed, *half]


def _names(folders: Sequence[Folder]) -> str:
    return ", ".join(folder.name for folder in folders) or "none"


def _val_loss(folder: Folder, policy: Retention) -> float | None:
    with suppress(CheckpointError):
        return read_trainer_state(folder).val_loss if policy.keep_best else None
    return None


def _is_whole(folder: Folder) -> bool:
    with suppress(CheckpointError):
        return not find_damage(folder, by_hash=False)
    return False


def _remove(folder: Folder) -> bool:
    """Remove a complete checkpoint, unless someone reads it; whether it is gone."""
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
def reading(place: Place) -> Iterator[Folder]:
    """Keep a step directory from being pruned while it is read; gives the folder.

    A directory of another name is never pruned, and no marker is left beside it.

    Raises:
        CheckpointError: it is not complete, or not any more.
    """
    folder = folder_at(place)
    marker = f"{folder.name}.{int(time.time())}.{uuid.uuid4().hex}"
    markers = folder.parent.child(_READING)
    if is_step_name(folder.name):
        with suppress(OSError):  # where nothing can be written, nothing is pruned from here either
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
    markers, now, found = folder.parent.child(_READING), time.time(), False
    for marker in markers.files():
        name, *rest = marker.split(".")
        if name != folder.name:
            continue
        if len(rest) > 1 and rest[0].isdigit() and now - int(rest[0]) > _MARKER_SECONDS:
            markers.remove(marker)
        else:
            found = True
    return found


def set_aside(folder: Folder) -> None:
    """Let a damaged checkpoint no longer count as one; its files stay until its step is saved again, or it is pruned."""
    with suppress(FileNotFoundError):
        folder.write(_SET_ASIDE, folder.read(MANIFEST))
    folder.remove(MANIFEST)
