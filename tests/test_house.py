"""The house as docs/architecture.md tells it: floors, and the core path that a newcomer reads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megazero"
ANNEXES = {"cpu", "deepspeed", "formats", "plan"}
MOST_LOADED = 99
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


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


def test_the_trunk_imports_no_annex() -> None:
    """Not even inside a function, nor by a name in a string.  What a room of `ANNEXES` has, it adds itself."""
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in ANNEXES:
            continue
        named = {
            node.value.split(".")[1].partition(":")[0]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if re.fullmatch(r"megazero\.\w+(\.[\w.]+)?(:\w+)?", node.value)
        }
        assert not (_rooms_imported(path) | named) & ANNEXES, path


def test_a_run_loads_few_files() -> None:
    """Tiny files of one idea that are always loaded together are one file.  The number only falls."""
    code = (
        "import sys, megazero.training.trainer; print(*(one for one in sys.modules if one.split('.')[0] == 'megazero'))"
        "; assert 'torch._dynamo' not in sys.modules, 'the compiler is loaded before anything compiles'"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert len(loaded) <= MOST_LOADED, f"{len(loaded)} files of the package are loaded: {', '.join(sorted(loaded))}"


def test_the_core_path_names_files_that_exist() -> None:
    files = re.findall(r"^\| `([a-z0-9_/]+\.py)` \|", PAGE, re.MULTILINE)
    assert len(files) > 20
    assert not [file for file in files if not (PACKAGE / file).is_file()]


def test_pages_name_tests_that_exist() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = {test for page in pages for test in re.findall(r"\b(test_\w+)", page.read_text(encoding="utf-8"))}
    known = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for path in (ROOT / "tests").rglob("*.py"):
        known |= set(re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8")))
    assert len(named) > 60
    assert not sorted(named - known)


def test_the_site_and_the_readme_list_every_page() -> None:
    """`nav` of mkdocs.yml, and the tables of the README."""
    listed = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(listed) == sorted({*pages, "index.md", "contributing.md", "changelog.md"})
    rows = re.findall(r"^\| \[docs/(\S+)\]", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(pages)


PAGES = ["CONTRIBUTING.md", "README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_files_that_exist(page: str) -> None:
    """Whole paths, and those within a folder of the package."""
    named = re.findall(r"`([\w.]+/[\w/.]+\.(?:py|md|toml))`", (ROOT / page).read_text(encoding="utf-8"))
    ours = [name for name in sorted({*named}) if not name.endswith("NAME.py")]
    places = [ROOT, PACKAGE, ROOT / "docs", *(ROOT / folder for folder in ("tests", "examples", "benchmarks"))]
    assert not [name for name in ours if not any((place / name).exists() for place in places)]
