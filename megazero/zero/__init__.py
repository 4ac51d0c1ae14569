"""ZeRO: state sharded over data-parallel ranks.  Scripts find `Init` and `GatheredParameters` here, too."""

from typing import Any

from megazero.registry import added_name


def __getattr__(name: str) -> Any:
    return added_name(__name__, name)
