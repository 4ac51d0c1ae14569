"""Puts README, CONTRIBUTING, CHANGELOG and benchmarks/results, which lie above docs/, on the site, and turns their links."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
ABOVE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files, config):
    """Add the pages and pictures from above."""
    for source, name in ABOVE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.[ms][dv]*")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    """docs/zero.md -> zero.md; ../README.md -> index.md; ../benchmarks/results/ -> results/.  Code has no link."""
    for source, name in ABOVE.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{source}", f"]({name}", markdown)
    markdown = re.sub(r"\[([^]]*)\]\(\.\./\w+\.py\)", r"\1", markdown)
    return markdown.replace("](docs/", "](").replace("](../benchmarks/", "](")
