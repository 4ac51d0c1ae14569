"""DeepSpeed's names for scripts that were written for it, and the engines behind them.

    import megazero.deepspeed as deepspeed                  # was: import deepspeed
    from megazero.deepspeed.utils import RepeatingLoader    # was: from deepspeed.utils import RepeatingLoader

Names and modules are made on first use (`mirror.py`), from the tables in `names.toml`.
`torchrun ... -m megazero.deepspeed script.py` runs an unchanged script.
"""

from typing import Any

from megazero.deepspeed.mirror import find_modules_of_the_mirror, lookup

__version__, __git_hash__, __git_branch__ = "0.19.8", "unknown", "unknown"  # of the DeepSpeed whose names these are
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
find_modules_of_the_mirror()


def __getattr__(name: str) -> Any:
    return lookup("", name)
