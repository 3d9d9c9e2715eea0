"""Pages under docs/ are in the index, their links lead somewhere, and generated parts match the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
KINDS = {"tutorials", "how-to", "reference", "explanation", "benchmarks"}


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[tuple[Path, str]]:
    """The target file and anchor of each link that stays in the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
    parts = [target.partition("#") for target in targets if "://" not in target]
    return [(Path(os.path.normpath(page.parent / file)) if file else page, anchor) for file, _, anchor in parts]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = [
        f"{os.path.relpath(target, ROOT)}#{anchor}"
        for target, anchor in links(page)
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target))
    ]
    assert broken == []


def test_the_index_links_to_every_page() -> None:
    linked = {target for target, _ in links(DOCS / "index.md")}
    missing = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page not in linked]
    assert missing == ["index.md"]


def test_every_page_is_of_one_kind() -> None:
    assert {path.name for path in DOCS.iterdir() if path.is_dir()} - {"assets", "__pycache__"} <= KINDS


def test_the_reference_is_what_the_generator_writes() -> None:
    """Run `python docs/generate.py` after a change of commands, keys, metrics, headers or error codes."""
    done = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_capability_has_a_number_and_a_state() -> None:
    page = (DOCS / "explanation" / "capabilities.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| (DONE|PARTIAL|ABSENT) \|", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    totals = dict(re.findall(r"^\| (DONE|PARTIAL|ABSENT) \|.*\| (\d+) \|$", page, re.MULTILINE))
    assert totals == {state: str(sum(each == state for _, each in rows)) for state in totals}


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    texts = [path.read_text(encoding="utf-8") for path in [*PAGES, *(ROOT / "src").rglob("*.py")]]
    assert {name for text in texts for name in re.findall(r"headrace\[(\w+)\]", text)} == set(extras)
