"""A store that counts what one rank writes and reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass
class Counts:
    """Calls and bytes of values, of one rank."""

    written_keys: int = 0
    written_bytes: int = 0
    read_keys: int = 0
    read_bytes: int = 0
    added: int = 0
    waited: int = 0
    checked: int = 0

    def copy(self) -> Counts:
        return Counts(*(getattr(self, one.name) for one in fields(self)))


class CountingStore(dist.Store):  # type: ignore[misc]
    """Passes every call to another store; torch's C++ calls it as it calls its own stores."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store, self.counts = store, Counts()

    def set(self, key: str, value: Any) -> None:
        self.counts.written_keys += 1
        self.counts.written_bytes += len(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = [self._store.get(key) for key in keys]
        self.counts.read_keys += len(keys)
        self.counts.read_bytes += sum(map(len, found))
        return found

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.counts.added += 1
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        self.counts.checked += 1
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.counts.waited += len(keys)
        self._store.wait(keys, *([] if timeout is None else [timeout]))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.counts.written_keys += 1
        self.counts.written_bytes += len(desired)
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return False
