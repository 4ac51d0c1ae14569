"""What a run file names on this machine, as far as it is known in a second: without torch, and without reading a token.

    tokenizer      can be loaded, and has an embedding for each id
    sources        are there, and were written by this tokenizer
    directories    can be made, and no run of this machine owns them

`megazero train` asks before it starts ranks, and one rank of each host under a launcher; `megazero check` reads tokens too.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from megazero.config import RunConfig
from megazero.data.corpus import PYTHON_STDLIB, check_source, tokenizer_of
from megazero.data.indexed import pair_paths
from megazero.settings import Problem


def start_problems(config: RunConfig) -> Iterator[Problem]:
    """What keeps a run from starting on this machine; one of the ranks that a launcher has started here asks."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    yield from directory_problems(config)
    yield from _owner_problems(config)
    found = list(tokenizer_problems(config))
    yield from found
    data = config.data
    names = [source.path for source in data.sources]
    own = None if found else tokenizer_of(names, data.tokenizer, data.eod_token)
    for key in ("sources", "validation_sources"):
        for path in dict.fromkeys(source.path for source in getattr(data, key)):
            try:
                check_source(path, data.tokenizer, own, config.model.vocab_size)
            except (ValueError, OSError) as error:
                yield Problem(f"data.{key}", path, "cannot be used", str(error))


def tokenizer_problems(config: RunConfig, elsewhere: Collection[str] = ()) -> Iterator[Problem]:
    """The tokenizer can be loaded, and the embedding has a row for each of its ids; not looked at if it is `elsewhere`."""
    name, rows = config.data.tokenizer, config.model.vocab_size
    if name in elsewhere:
        return
    try:
        ids = tokenizer_of([source.path for source in config.data.sources], name, config.data.eod_token).vocab_size
    except (ValueError, OSError) as error:
        yield Problem("data.tokenizer", name, "must be a tokenizer", str(error))
        return
    if ids > rows:
        yield Problem("model.vocab_size", rows, f"must be >= {ids}, the ids of data.tokenizer={name}", f"write {ids}")


def directory_problems(config: RunConfig) -> Iterator[Problem]:
    """The directories of the run can be made: no file has their path."""
    named = {"training.run_dir": config.training.run_dir, "checkpoint.directory": config.checkpoint.directory}
    for key, name in named.items():
        if name is None or "://" in name:
            continue
        path = Path(name).absolute()
        there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
        if not there.is_dir():
            yield Problem(key, name, "must be a directory, or not exist", f"{there} is none")


def _owner_problems(config: RunConfig) -> Iterator[Problem]:
    """No run of this host owns the directories.  One elsewhere may have ended: rank 0 waits to see whether it has."""
    run_dir = Path(config.training.run_dir)
    for folder in (run_dir, Path(config.checkpoint.directory or run_dir / "checkpoints")):
        if not (folder / "owner").is_dir():
            continue
        from megazero.checkpoint.folder import folder_at
        from megazero.checkpoint.index import OwnerError
        from megazero.checkpoint.lock import DirectoryLock

        try:
            with suppress(OSError):  # the storage does not answer: the ranks ask again
                DirectoryLock(folder_at(folder)).look()
        except OwnerError as error:
            yield Problem("training.run_dir", config.training.run_dir, str(error))
            return


def not_here(config: RunConfig) -> list[str]:
    """List the tokenizer and the sources that are not on this machine."""
    data, tokenizer = config.data, config.data.tokenizer
    sources = dict.fromkeys(
        [source.path for source in data.sources] + [source.path for source in data.validation_sources]
    )
    missing = [
        name for name in sources if name != PYTHON_STDLIB and not any(path.exists() for path in pair_paths(name))
    ]
    return missing if tokenizer == "byte" or Path(tokenizer).exists() else [tokenizer, *missing]
