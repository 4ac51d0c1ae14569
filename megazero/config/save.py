"""Writing a run back as a file: loading it gives the same run.

    [model]
    family = "llama"
    hidden_size = 1024

Every key that has a value is written; an unset one is left out, and is unset again when read.
"""

import os
from operator import attrgetter
from pathlib import Path

from megazero.config.resolve import ResolvedRun
from megazero.config.schema import RunConfig, keys
from megazero.settings import toml_value


def to_toml(run: RunConfig | ResolvedRun) -> str:
    """Write a run as TOML.

    Args:
        run: a config, or a resolved run, of which the filled-in config is written.
    """
    config = run.written if isinstance(run, ResolvedRun) else run
    tables = []
    for section, fields in keys().items():
        values = attrgetter(section)(config).model_dump()
        lines = [f"{key} = {toml_value(values[key])}\n" for key in fields if values[key] is not None]
        tables.append(f"[{section}]\n" + "".join(lines))
    return "\n".join(tables)


def save_config(run: RunConfig | ResolvedRun, path: str | Path) -> None:
    """Write a run to a file; whoever reads it meanwhile sees the old file or the new one, whole.

    Args:
        run: a config, or a resolved run, of which the filled-in config is written.
        path: the file; missing directories are made.

    Raises:
        OSError: the file cannot be written; an older one is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(to_toml(run))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
