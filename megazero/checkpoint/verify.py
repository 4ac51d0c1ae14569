"""Whether the files of a checkpoint are those that were written."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from megazero.checkpoint.folder import Place, folder_at
from megazero.checkpoint.index import CheckpointError, read_manifest


def find_damage(place: Place, names: Sequence[str] | None = None, *, by_hash: bool = True) -> list[str]:
    """One line for every file that is missing, or has another size or hash than when it was written.

    Args:
        place: a step directory.
        names: files to look at; None for all of the manifest.
        by_hash: read the files and compare their hashes; otherwise their sizes alone.

    Raises:
        CheckpointError: the manifest itself is missing or damaged, or the storage does not answer, which says nothing about
            the files.
    """
    folder = folder_at(place)
    files = read_manifest(folder)
    damage = []
    for name in sorted(files) if names is None else names:
        record = files[name]
        try:
            size = folder.size(name)
            if size is None:
                damage.append(f"{folder}/{name} is missing")
            elif size != record.bytes:
                damage.append(f"{folder}/{name} has {size} bytes, {record.bytes} were written")
            elif by_hash and folder.hash(name) != record.xxh3:
                damage.append(f"{folder}/{name} has changed since it was written (its hash differs)")
        except OSError as error:
            if error.errno != errno.EIO:  # that of a disk that has lost them
                raise CheckpointError(f"{folder}/{name} cannot be read ({error}); try again") from error
            damage.append(f"{folder}/{name} cannot be read ({error})")
    return damage
