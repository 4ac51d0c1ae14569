"""Importing the Python files and modules that `launch.extensions` names, so that a run file may use what they register."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb

from megazero.settings import Problem


def import_extensions(names: object) -> list[Problem]:
    """Import each file or module once per process; say which cannot be imported and why.

    Args:
        names: `launch.extensions` as the run file has it; a value of another type is left to the schema.
    """
    listed = names if isinstance(names, Sequence) and not isinstance(names, str) else ()
    found = [_import(name) for name in listed if isinstance(name, str) and name]
    return [problem for problem in found if problem is not None]


def _import(name: str) -> Problem | None:
    try:
        if name.endswith(".py"):
            _import_file(Path(name).resolve())
        else:
            import_module(name)
    except Exception as error:
        last = extract_tb(error.__traceback__)[-1]
        where = f" ({last.filename}:{last.lineno})" if Path(last.filename).is_file() else ""  # not inside importlib
        return Problem("launch.extensions", name, f"cannot be imported: {type(error).__name__}: {error}{where}")
    return None


def _import_file(path: Path) -> None:
    key = f"extension {path}"  # no name that an import statement could mean
    if key in sys.modules:
        return
    spec = spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    sys.modules[key] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
