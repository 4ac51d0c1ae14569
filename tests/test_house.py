"""The house as docs/architecture.md tells it: floors, and the core path that a newcomer reads."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megazero"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def _lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _rooms_imported(path: Path) -> set[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("megazero.")}


def test_rooms_import_only_from_floors_below() -> None:
    """The floors are those that docs/architecture.md draws, top floor first."""
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", PAGE, re.MULTILINE)
    floors = {room: int(floor) for floor, rooms in rows for room in re.findall(r"`(\w+)`", rooms)}
    built = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(floors) == built - {"__init__", "__pycache__"}
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "__init__.py"}:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for other in _rooms_imported(path) - {room}:
            assert floors[other] < floors[room], f"{path.relative_to(ROOT)} imports {other}, which is not below {room}"


def test_nothing_that_trains_loads_the_tools() -> None:
    """Only the command line imports them at its top; a run imports a drawing when it draws."""
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in ("tools", "cli"):
            continue
        top = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
        assert not [node for node in top if (node.module or "").startswith("megazero.tools")], path


def test_the_core_path_is_a_days_reading() -> None:
    files = re.findall(r"^\| `([a-z0-9_/]+\.py)` \|", PAGE, re.MULTILINE)
    assert len(files) > 30
    assert sum(_lines(PACKAGE / file) for file in files) <= 8950


def test_the_package_stays_small() -> None:
    assert sum(map(_lines, PACKAGE.rglob("*.py"))) <= 48420


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "README.md", "docs/architecture.md"])
def test_pages_name_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:megazero|tests|docs|examples)/[A-Za-z0-9_./]+\.(?:py|md|toml))`", text))
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]
