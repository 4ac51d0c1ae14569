"""A corpus that every machine has: the standard library of the running interpreter.

About twelve megabytes of real text without a download, enough for a first run, a smoke test or a benchmark.  Each node
builds its own copy, in about a second with the byte tokenizer; if many ranks ask at once, one of them builds.
"""

import os
import platform
import sysconfig
from pathlib import Path
from typing import Final

from megazero.data.identity import verified_identity
from megazero.data.indexed import IndexedDataset
from megazero.data.tokenizer import load_tokenizer

_LEFT_OUT: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_LOCK_SECONDS: Final = 600.0


def stdlib_files() -> list[Path]:
    """The `.py` sources of the standard library, sorted by their path within it.

    Left out: installed packages, test suites, and `_sysconfigdata*`, which differs from build to build.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _LEFT_OUT]
        sources = (name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata"))
        found += [Path(directory, name) for name in sources]
    if not found:
        raise FileNotFoundError(f"no standard-library sources in {root}; name a .bin/.idx prefix as the data source")
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def build_python_stdlib(
    cache_dir: str | os.PathLike[str], tokenizer: str | os.PathLike[str], eod_token: str | None = None
) -> Path:
    """The prefix of the tokenized standard library, which is built if it is not in `cache_dir` yet.

    Any number of processes of a node may call it at once: one builds, the others wait up to ten minutes.  Files that are
    not UTF-8 are left out.  The pair's name holds the Python version and the tokenizer's fingerprint.

    Raises: OSError: `cache_dir` cannot be written, or the others take longer.
    """
    from filelock import FileLock, Timeout

    fingerprint = load_tokenizer(os.fspath(tokenizer), eod_token).fingerprint
    prefix = Path(cache_dir) / f"python-stdlib-{platform.python_version()}-{fingerprint}"
    if _is_complete(prefix):
        return prefix
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock := f"{prefix}.lock", timeout=_LOCK_SECONDS).acquire()
    except Timeout as error:
        raise TimeoutError(
            f"waited {_LOCK_SECONDS:.0f} s for another process to build {prefix}; see who holds {lock}"
        ) from error
    except OSError as error:
        raise OSError(
            f"{cache_dir} cannot be written ({error}), where python-stdlib is kept; "
            "set data.cache_dir to a directory that can"
        ) from error
    with held:
        if not _is_complete(prefix):  # it may have been built while this process waited
            from megazero.data.tokenize import tokenize_files  # a run that finds its data imports no writer

            tokenize_files(
                stdlib_files(), prefix, tokenizer, eod_token=eod_token, overwrite=True, go_on_without=lambda _: True
            )
    return prefix


def _is_complete(prefix: Path) -> bool:
    try:
        verified_identity(IndexedDataset(prefix), prefix.parent)
    except (FileNotFoundError, ValueError):  # a damaged cache is built again
        return False
    return True
