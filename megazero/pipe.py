"""Pipelines of layers under the names that DeepSpeed's scripts import: `from megazero.pipe import PipelineModule`.

The annex of scripts adds the names.
"""

from typing import Any

from megazero.registry import added_name


def __getattr__(name: str) -> Any:
    return added_name(__name__, name)
