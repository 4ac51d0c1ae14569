"""What a run file names on this machine, as far as it is known in a second: without torch, and without reading a token.

    tokenizer      can be loaded, and has an embedding for each id
    sources        are there, and were written by this tokenizer
    directories    can be made, and no run of this machine owns them

`megazero train` asks before it starts ranks, and one rank of each host under a launcher; `megazero check` reads tokens too.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from megazero.config import RunConfig
from megazero.data.corpus import PYTHON_STDLIB, check_source, is_raw, tokenizer_of
from megazero.data.indexed import pair_paths
from megazero.data.tokenizer import tokenizer_path
from megazero.settings import Problem


def start_problems(config: RunConfig) -> Iterator[Problem]:
    """Return the problems that keep a run from starting on this machine.  One of the ranks started here calls this."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    yield from directory_problems(config)
    yield from _owner_problems(config)
    yield from (found := [*tokenizer_problems(config, may_lack=False)])
    data, trained = config.data, [source.path for source in config.data.sources]
    own = None if found else tokenizer_of(trained, data.tokenizer, data.eod_token)
    rows = config.model.vocab_size
    yield from source_problems(config, lambda path: check_source(path, data.tokenizer, own, rows), may_lack=False)


def source_problems(config: RunConfig, check: Callable[[str], object], *, may_lack: bool = True) -> Iterator[Problem]:
    """Return the errors that a check raises for the sources of a run.  `may_lack`: skip sources that are not on this
    machine.
    """
    missing = not_here(config) if may_lack else []
    for path in [path for path in sources_of(config) if path not in missing]:
        try:
            check(path)
        except (ValueError, OSError) as error:
            is_trained = path in [source.path for source in config.data.sources]
            key = "data.sources" if is_trained else "data.validation_sources"
            yield Problem(key, path, "cannot be used", str(error))


def sources_of(config: RunConfig) -> dict[str, None]:
    """Return the paths of a run's sources as keys, the training sources first."""
    data = config.data
    return dict.fromkeys([source.path for source in data.sources] + [source.path for source in data.validation_sources])


def tokenizer_problems(config: RunConfig, *, may_lack: bool = True) -> Iterator[Problem]:
    """Check that the tokenizer can be loaded and that the embedding has a row for each of its ids.

    `may_lack`: accept a tokenizer that is not on this machine.
    """
    name, rows = config.data.tokenizer, config.model.vocab_size
    if may_lack and name in not_here(config):
        return
    try:
        ids = tokenizer_of([source.path for source in config.data.sources], name, config.data.eod_token).vocab_size
    except (ValueError, OSError) as error:
        yield Problem("data.tokenizer", name, "must be a tokenizer", str(error))
        return
    if ids > rows:
        yield Problem("model.vocab_size", rows, f"must be >= {ids}, the ids of data.tokenizer={name}", f"write {ids}")


def directory_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that the directories of the run can be created: no file has the same path."""
    named = {"training.run_dir": config.training.run_dir, "checkpoint.directory": config.checkpoint.directory}
    for key, name in named.items():
        if name is None or "://" in name:
            continue
        path = Path(name).absolute()
        there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
        if not there.is_dir():
            yield Problem(key, name, "must be a directory, or not exist", f"{there} is none")


def _owner_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that no run of this host owns run_dir.  A run of another host may have ended; rank 0 waits to find out."""
    run_dir = config.training.run_dir
    if (Path(run_dir) / "owner").is_dir():
        from megazero.checkpoint.folder import folder_at
        from megazero.checkpoint.index import OwnerError
        from megazero.checkpoint.lock import DirectoryLock

        try:
            DirectoryLock(folder_at(run_dir)).look()
        except (OwnerError, OSError) as error:
            yield Problem("training.run_dir", run_dir, str(error))


def not_here(config: RunConfig) -> list[str]:
    """List the tokenizer and the sources that are not on this machine."""
    tokenizer, own = config.data.tokenizer, [name for name in sources_of(config) if name != PYTHON_STDLIB]
    missing = [name for name in own if not (is_raw(Path(name)) or any(path.exists() for path in pair_paths(name)))]
    return missing if tokenizer == "byte" or Path(tokenizer_path(tokenizer)).exists() else [tokenizer, *missing]
