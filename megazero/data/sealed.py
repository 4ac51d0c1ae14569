"""JSON records that notice when a bit of them flips: each holds a checksum of the rest of it."""

import json
from typing import Any

import xxhash


def seal(record: dict[str, Any]) -> dict[str, Any]:
    """A record of JSON values with its checksum."""
    return {**record, "checksum": _checksum(record)}


def unseal(content: bytes) -> dict[str, Any]:
    """The record in the bytes of a file.  Raises: ValueError: it is not what `seal` was given."""
    record = json.loads(content)
    if not isinstance(record, dict) or record.pop("checksum", None) != _checksum(record):
        raise ValueError("its checksum does not match")
    return record


def _checksum(record: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(record).encode())
