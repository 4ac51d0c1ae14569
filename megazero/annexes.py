"""What rooms that no training needs add to the others: commands, callbacks, readers of checkpoints.

    megazero/plan/annex.toml   [command]
                               plan = "megazero.plan.commands:plan"
                                 |
    added("command")  <----------+     every room with an `annex.toml` adds to a seam, by name

The trunk imports no annex: it asks a seam, and trains the same where nothing was added to it.

    seam             what is added                                                                      asked by
    command          a command of the command line, or a group of commands (`typer.Typer`)              cli
    checkpoint command   a command of `megazero checkpoint`                                             cli
    check            (ResolvedRun, gpu, device_gib, ranks of a node) -> Schedule -> `check.DeviceNeeds` cli
    context          (ResolvedRun, document lengths of some samples | None) -> lines of `check` on attention   training
    export           (step, out, dtype, names) -> `Exported`, by the form that --to names                cli
    token file       (path, cache, Tokenizer, say) -> prefix of a pair with its tokens, by suffix                  data
    start line       (ResolvedRun, Schedule, torch.device) -> a line for the terminal                   training
    callback         RunContext -> Callback, after the metrics are written             training
    out of memory    (error, ResolvedRun, ParallelState, Engine | None) -> text                         training
    peak FLOP/s      (name of a CUDA device, dtype) -> number | None                                    training
    backend          (Axis, Group, gather) -> `Backend` of tensors on a type of device, as by "cpu"              comm
    messages         () -> `Messages` of a run on a type of device                                      comm
    weight gathers   () -> `WeightGathers` of a run on a type of device                                 zero
    rank             ranks of this host -> None, before a rank on a type of device makes process groups    comm
    kernel           () -> a kernel that is faster on this machine than torch's, or None, by what it computes   layers
    name             what a script finds in a module of the trunk, by its full name                     megazero, pipe, zero
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def added(seam: str) -> dict[str, Any]:
    """What annexes add at a seam, by name.  It is imported now, so a command that asks for nothing stays fast."""
    return {name: _imported(path) for table in _tables() for name, path in table.get(seam, {}).items()}


def added_name(module: str, name: str) -> Any:
    """An attribute that an annex adds to a module of the trunk, for its `__getattr__`.  Raises: AttributeError."""
    for table in _tables():
        if path := table.get("name", {}).get(f"{module}.{name}"):
            return _imported(path)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


@cache
def _tables() -> list[Mapping[str, Mapping[str, str]]]:
    """Return the table of each annex, in alphabetical order."""
    return [tomllib.loads(table.read_text("utf-8")) for table in sorted(Path(__file__).parent.glob("*/annex.toml"))]
