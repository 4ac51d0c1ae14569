"""The identity of a token pair: a hash of its content and its range of ids, stored next to it and in the cache.

    prefix.bin, prefix.idx    every byte, in blocks --threads--> hash of the content, smallest and largest id
    prefix.identity.json      the identity that the writer computed; for a pair of Megatron's tools, its first reader
    cache_dir/identities/     verified identities, a file for each state of a pair: size, times and inode of both files

A start reads one small file for each source.  The pair itself is read only if it has not been verified in this state.
Machines that share a file system see the same state.  So one of all processes that share a cache reads the pair while the
others wait, and a later machine reads nothing.  A copy on a machine's own disk has another state, which is verified
separately.  If file locks do not work across machines, several may read the pair, without harm.
"""

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from megazero.data.indexed import IndexedDataset, pair_paths
from megazero.data.sealed import parse_json, seal, unseal
from megazero.settings import Log, write_text

_BLOCK_BYTES: Final = 1 << 24  # part of the format: the content's hash is a hash of the blocks' hashes
_LARGE_BYTES: Final = 1 << 30  # reading more takes long enough to say so
_LOOK_SECONDS: Final = 2.0  # between two attempts to take the lock of a large pair, for which a whole cluster may wait
_TURN_SECONDS: Final = 1.0  # of waiting for another process, until it says so
_CHECKS: Final = 1  # raised where `_verify` checks more: what was verified before is verified again
_HASHED: Final = (  # of a fingerprint, after its version
    "the order of the samples (weights of data.sources, data.validation_fraction, model.seq_len, training.seed)",
    "the tokenizer (data.tokenizer, data.eod_token)",
    "the tokens (data.sources)",
)


@dataclass(frozen=True)
class Identity:
    """The identity of a pair's content.  If two are equal, the pairs are equal to the byte, up to a chance of 2^-128."""

    content: str  # hex
    smallest_id: int
    largest_id: int  # below `smallest_id` where there is no token
    tokenizer: str = ""  # fingerprint of the tokenizer that wrote the pair; "" where it is unknown


def identity_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the identity that is stored next to a pair."""
    return Path(f"{os.fspath(prefix)}.identity.json")


def read_identity(bin_path: Path, idx_path: Path, dtype: "np.dtype[Any]", tokenizer: str = "") -> Identity:
    """Compute the identity of a pair from every byte of both files, with one reading thread per core."""
    from concurrent.futures import ThreadPoolExecutor

    sizes = [path.stat().st_size for path in (bin_path, idx_path)]
    paths = zip((bin_path, idx_path), sizes, strict=True)
    blocks = [(path, start) for path, size in paths for start in range(0, size, _BLOCK_BYTES)]

    def look(some: Sequence[tuple[Path, int]]) -> list[tuple[bytes, int, int]]:
        found = []
        for path, start in some:
            with path.open("rb") as file:
                file.seek(start)
                block = file.read(_BLOCK_BYTES)
            ids = np.frombuffer(block, dtype) if path == bin_path else np.empty(0, dtype)
            limits = (int(ids.min()), int(ids.max())) if ids.size else (0, -1)
            found.append((xxhash.xxh3_128_digest(block), *limits))
        return found

    threads = max(1, min(len(blocks), len(os.sched_getaffinity(0))))
    found: list[Any] = [None] * len(blocks)
    with ThreadPoolExecutor(threads) as pool:
        for first, looked in enumerate(pool.map(look, [blocks[number::threads] for number in range(threads)])):
            found[first::threads] = looked
    content = xxhash.xxh3_128_hexdigest(repr(sizes).encode() + b"".join(digest for digest, _, _ in found))
    ranges = [(low, high) for _, low, high in found if low <= high] or [(0, -1)]
    return Identity(content, min(low for low, _ in ranges), max(high for _, high in ranges), tokenizer)


def write_identity(path: Path, identity: Identity) -> None:
    """Write an identity to a file, which appears whole or not at all."""
    write_text(path, json.dumps({"format": 1, **asdict(identity)}, indent=2) + "\n")


def verified_identity(
    dataset: IndexedDataset, cache_dir: str | os.PathLike[str], log: Log = lambda _: None
) -> Identity:
    """Return the identity of a pair.  Its bytes are read once, and again if its files change.

    Args:
        dataset: the opened pair.
        cache_dir: a directory of this machine, or one that several machines share.
        log: called with a line before a long read, or before a wait for a process that reads.

    Raises:
        ValueError: the pair differs from what its writer wrote, or changes while it is read.
        OSError: the pair cannot be read, or `cache_dir` cannot be written.
    """
    pair = pair_paths(dataset.prefix)
    before = _state_of(pair, dataset.stats)  # of what is mapped
    memory = Path(cache_dir) / "identities" / f"{xxhash.xxh3_128_hexdigest(repr(before).encode())}.json"
    if (known := _remembered(memory, before)) is not None:
        return known
    size = sum(state[0] for state in before["files"])
    if is_large := size >= _LARGE_BYTES:
        log(f"verifying {dataset.prefix}, {size / 1e9:,.1f} GB, once; {memory.parent} remembers it")
    with locked(memory, "verified data is remembered", log, poll_seconds=_LOOK_SECONDS if is_large else 0.05):
        if (known := _remembered(memory, before)) is not None:  # another process has read it meanwhile
            return known
        identity = _verify(dataset, pair)
        if _state_of(pair, [path.stat() for path in pair]) != before:
            raise ValueError(f"{dataset.prefix} changed while it was read; start again when it is complete")
        write_text(memory, json.dumps(seal({**before, "identity": asdict(identity)}), indent=2) + "\n")
    return identity


def locked(path: Path, what: str, log: Log, *, poll_seconds: float = 0.05) -> AbstractContextManager[object]:
    """Hold the lock of a file in the cache within a `with` block.

    Args:
        path: the file.
        what: what the directory contains, for messages.
        log: called with a line if another process holds the lock for long.
        poll_seconds: time between two attempts.

    Raises: OSError: the directory cannot be written.
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock")
        try:
            return lock.acquire(timeout=max(_TURN_SECONDS, poll_seconds), poll_interval=poll_seconds)
        except Timeout:
            log(f"waiting for the process that holds {path}.lock: it works on the same data")
            return lock.acquire(poll_interval=poll_seconds)
    except OSError as error:
        hint = "set data.cache_dir to a directory that can"
        raise OSError(f"{path.parent} cannot be written ({error}), where {what}; {hint}") from error


def stored_identity(prefix: str | os.PathLike[str]) -> Identity | None:
    """Return the identity stored next to a pair; None if there is none.  Raises: ValueError: it is damaged."""
    path = identity_path(prefix)
    try:
        stored = parse_json(path.read_bytes())
        if stored.pop("format") != 1:
            raise ValueError("it is of a later release")
        return Identity(**stored)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        hint = "copy it again, or remove it to trust the pair as it is"
        raise ValueError(f"{path} is damaged ({error}); {hint}") from None


def _verify(dataset: IndexedDataset, pair: Sequence[Path]) -> Identity:
    """Read a pair and compare it with the identity file beside it, or write that file if there is none."""
    dataset.check_layout()
    path = identity_path(dataset.prefix)
    found, stored = read_identity(pair[0], pair[1], dataset.dtype), stored_identity(dataset.prefix)
    if stored is None:
        with suppress(OSError):  # the directory may be read-only: then only the cache remembers it
            write_identity(path, found)
        return found
    if stored.content != found.content:
        raise ValueError(
            f"{dataset.prefix}.bin or .idx is not what was written: its content has hash {found.content}, {path.name} "
            f"says {stored.content}; copy all three files again or tokenize again, or remove {path.name} to trust the "
            "pair as it is"
        )
    return Identity(found.content, found.smallest_id, found.largest_id, stored.tokenizer)


def _state_of(paths: Sequence[Path], found: Sequence[os.stat_result]) -> dict[str, Any]:
    """Return the sizes, times and inodes of a pair, which change when a file is written, copied or replaced."""
    files = [[each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino] for each in found]
    return {"path": os.path.abspath(paths[0]), "files": files, "checks": _CHECKS}


def _remembered(memory: Path, state: dict[str, Any]) -> Identity | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = unseal(memory.read_bytes())
        identity = Identity(**known.pop("identity"))
        return identity if known == state else None
    return None


def fingerprint_of(order: Sequence[object], tokenizer: str, contents: Sequence[str]) -> str:
    """Return the fingerprint of a run's data: hashes of the settings of the sample order, the tokenizer and the tokens."""
    order_hash, content_hash = (xxhash.xxh3_128_hexdigest(repr(tuple(values)).encode()) for values in (order, contents))
    return "-".join(("2", order_hash, tokenizer, content_hash))


def hashes_in(fingerprint: str) -> dict[str, str]:
    """Return the hashes in a fingerprint, by what they identify; empty for fingerprints of earlier releases or scripts."""
    version, *hashes = fingerprint.split("-")
    return dict(zip(_HASHED, hashes, strict=True)) if version == "2" and len(hashes) == len(_HASHED) else {}


def tokenizer_hash(fingerprint: str) -> str | None:
    """Return the tokenizer's fingerprint within the fingerprint of a run's data; None if unknown."""
    return hashes_in(fingerprint).get(_HASHED[1])


def is_of_earlier_release(fingerprint: str) -> bool:
    """Whether release 0.1 made a fingerprint: it hashed a sample of the tokens, so newer ones cannot be compared with it."""
    return len(fingerprint) == 32 and not set(fingerprint) - set("0123456789abcdef")


def changes_between(saved: str, now: str) -> list[str]:
    """Describe the differences between the data of two fingerprints; empty if `saved` cannot be compared.

    That is so for "" (no data has been read yet) and for fingerprints of an earlier release.
    """
    old, new = hashes_in(saved), hashes_in(now)
    if saved in ("", now) or (new and is_of_earlier_release(saved)):
        return []
    if not (old and new):
        return [f"the data (fingerprint {saved}, now {now})"]
    return [name for name in _HASHED if old[name] != new[name]]
