"""The source's layout: no module reaches itself by imports, and no folder is too large to read."""

from __future__ import annotations

import ast
import graphlib
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
MOST_MODULES = 25


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def imported(path: Path) -> set[str]:
    """Modules of ours that a module imports, in functions and for types too; not the packages on the way to them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & MODULES.keys() or {node.module}
    return found & MODULES.keys() - {module_name(path)}


def test_no_module_reaches_itself_by_imports() -> None:
    graph = {name: imported(path) for name, path in MODULES.items()}
    assert len(graph["headrace.cli"]) > 1
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the way round


def test_no_folder_is_too_large_to_read() -> None:
    sizes = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    assert {str(folder): count for folder, count in sizes.items() if count > MOST_MODULES} == {}
