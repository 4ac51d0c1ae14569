"""Whether the files of a checkpoint are those that were written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megazero.checkpoint.index import hash_file, read_manifest


def find_damage(directory: Path, names: Sequence[str] | None = None) -> list[str]:
    """One line for every file that is missing, or has another size or hash than when it was written.

    Args:
        directory: a step directory.
        names: files to look at; None for all of the manifest.

    Raises:
        CheckpointError: the manifest itself is missing or damaged.
    """
    files = read_manifest(directory)
    damage = []
    for name in sorted(files) if names is None else names:
        path, record = directory / name, files[name]
        if not path.is_file():
            damage.append(f"{path} is missing")
        elif path.stat().st_size != record.bytes:
            damage.append(f"{path} has {path.stat().st_size} bytes, {record.bytes} were written")
        elif hash_file(path) != record.xxh3:
            damage.append(f"{path} has changed since it was written (its hash differs)")
    return damage
