"""The script of docs/extending.md, and one TOML file on eight ranks: tp 2 with sequence parallelism, pp 2, dp 2, ZeRO 3."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import run_world
from quickstart import ROOT
from worlds import engine_on, over, train_on

from megazero.config import ResolvedRun, load_config
from megazero.registry import Registry
from megazero.settings import toml_value

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 64}
    | {"vocab_size": 61, "seq_len": 16},
    "parallel": {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True},
    "zero": {"stage": 3, "bucket_bytes": 8192},
    "precision": {"dtype": "fp32"},
    "optimizer": {"lr": 3e-3, "eps": 1e-5, "grad_clip": 0.5},
    "training": {"global_batch_size": 8, "accumulation": 4, "seed": 7, "compile": False, "steps": 3},
}


BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"), re.DOTALL)


@contextmanager
def registered(registry: Registry[Any], *names: str) -> Iterator[None]:
    """Run the block of the page that registers these names, which end with the tests of a file."""
    (block,) = [block for block in BLOCKS if f'register("{names[0]}"' in block]
    exec(block, {"__name__": "my_run"})
    yield
    for name in names:
        registry._registered.pop(name)


def run_with(directory: Path, **sections: dict[str, Any]) -> ResolvedRun:
    """Write the file, with these keys in it, and load it for eight ranks."""
    text = "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in table.items())
        for name, table in over(SECTIONS, sections).items()
    )
    path = directory / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, world_size=8)


def steps_of(run: ResolvedRun, body: Callable[..., Any] = train_on) -> Any:
    """What rank 0 gives of `body(engine, run)`; three steps, where not said otherwise."""
    return run_world(8, lambda rank: body(engine_on(rank, run), run))[0]
