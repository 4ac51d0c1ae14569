"""Checking the files of a checkpoint against its manifest."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from megazero.checkpoint.folder import Location, folder_at
from megazero.checkpoint.index import CheckpointError, read_manifest


def find_damage(location: Location, names: Sequence[str] | None = None, *, by_hash: bool = True) -> list[str]:
    """One line for every file that is missing, or whose size or hash is not that of the manifest.

    Args:
        location: a step directory.
        names: files to check; None for all of the manifest.
        by_hash: read the files and compare their hashes; otherwise compare only sizes.

    Raises:
        CheckpointError: the manifest itself is missing or damaged, or the storage does not answer, which says nothing about
            the files.
    """
    folder = folder_at(location)
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
            if error.errno != errno.EIO:  # which a disk reports for data that it has lost
                raise CheckpointError(f"{folder}/{name} cannot be read ({error}); try again") from error
            damage.append(f"{folder}/{name} cannot be read ({error})")
    return damage
