"""Builds the documentation site into build/docs with zensical. Run it with `make docs`.

Copies the pages to build/docs-source first and turns links that leave docs/ into plain text, because a site has no page
for them. zensical runs in strict mode: a link to a page or heading that does not exist fails the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
SOURCE = ROOT / "build" / "docs-source"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def without_outside_links(text: str, page: Path) -> str:
    """Replace links to files outside docs/ by their text and the file's path in the repository."""

    def replaced(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        file = target.partition("#")[0]
        if not file or "://" in target:
            return link[0]
        path = Path(os.path.normpath(page.parent / file))
        if path.is_relative_to(DOCS):
            return link[0]
        if image:
            copy = SOURCE / "assets" / path.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            return f"![{label}]({os.path.relpath(DOCS / 'assets' / path.name, page.parent)})"
        name = str(path.relative_to(ROOT))
        return f"`{name}`" if label.strip("`") in name else f"{label} (`{name}`)"

    return LINK.sub(replaced, text)


def main() -> int:
    shutil.rmtree(SOURCE, ignore_errors=True)
    for path in sorted(DOCS.rglob("*")):
        copy = SOURCE / path.relative_to(DOCS)
        if path.suffix == ".md":
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(without_outside_links(path.read_text(encoding="utf-8"), path), encoding="utf-8")
        elif path.suffix in {".svg", ".png"}:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    zensical = Path(sys.executable).parent / "zensical"
    config = ROOT / "build" / "zensical.toml"
    shutil.copyfile(DOCS / "zensical.toml", config)
    done = subprocess.run([str(zensical), "build", "--strict", "--clean", "--config-file", str(config)], check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
