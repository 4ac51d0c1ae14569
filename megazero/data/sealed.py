"""JSON that somebody else may have written, and records that notice when a bit of them flips: each holds a checksum of
the rest of it."""

import json
from typing import Any, Final

import xxhash

LFS_POINTER: Final = b"version https://git-lfs"  # how a file begins that git has not fetched
LFS_HINT: Final = "a git-lfs pointer in place of the file; fetch it with git lfs pull"


def seal(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of JSON values with its checksum added."""
    return {**record, "checksum": _checksum(record)}


def parse_json(content: str | bytes) -> Any:
    """Parse JSON.  Raises: ValueError: the content is no JSON, or is nested deeper than Python can parse."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def unseal(content: bytes) -> dict[str, Any]:
    """Parse a sealed record and check it.  Raises: ValueError: it differs from the record that was sealed."""
    record = parse_json(content)
    if not isinstance(record, dict) or record.pop("checksum", None) != _checksum(record):
        raise ValueError("its checksum does not match")
    return record


def _checksum(record: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(record).encode())
