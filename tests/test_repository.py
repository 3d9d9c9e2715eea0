"""The repository keeps its own promises: documented commands exist, and the default install stays small."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.cli import COMMANDS, app
from headrace.models.families import FAMILIES, HEADLESS, RERANKERS
from headrace.observe import computed_metrics, metrics

ROOT = Path(__file__).parent.parent
NOT_OURS = {
    "node_modules",
    ".git",
    ".venv",
    "build",
    "dist",
    "__pycache__",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def files() -> Iterator[Path]:
    folders = [ROOT]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.name in NOT_OURS or path.is_symlink():
                continue
            if path.is_dir():
                folders.append(path)
            else:
                yield path


def requirement_name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def required(name: str) -> set[str]:
    """What an installed distribution asks for without any extra; nothing where it is not installed here."""
    try:
        requirements = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return set()
    return {requirement_name(r) for r in requirements if not re.search(r";.*\bextra\b", r)}


def test_the_default_install_pulls_no_torch() -> None:
    pending = {requirement_name(requirement) for requirement in project()["project"]["dependencies"]}
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        seen.add(name)
        pending |= required(name) - seen
    assert {"numpy", "markupsafe"} <= seen  # the second is only reached through jinja2
    assert not seen & {"torch", "triton", "transformers", "safetensors"}


def test_what_is_installed_asks_for_what_pyproject_says() -> None:
    assert required("headrace") == {requirement_name(r) for r in project()["project"]["dependencies"]}


def test_the_version_is_the_same_everywhere() -> None:
    assert headrace.__version__ == project()["project"]["version"]


def test_nanobind_is_asked_for_in_the_same_way_by_pip_and_by_make() -> None:
    assert set(project()["build-system"]["requires"]) <= set(project()["dependency-groups"]["build"])


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_in_the_documents_exists(document: str) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / document).read_text()
    named = set(re.findall(r"(?:^|`|\s)make ((?!-)[a-z0-9-]+)(?=[`\s;]|$)", "\n".join(code_in(text))))
    assert named
    assert named <= targets


def code_in(text: str) -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return blocks + re.findall(r"`([^`\n]+)`", text)


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^## `headrace ([a-z-]+)`$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def flags_of(command: str) -> set[str]:
    """Of a command, or of all commands of a group."""
    found = app[command]
    commands = [found[name] for name in found if not name.startswith("-")]
    commands += [found] if found.default_command else []
    arguments = [argument for each in commands for argument in each.assemble_argument_collection()]
    return {name for argument in arguments for name in argument.names if name.startswith("-")}


def test_every_command_is_documented() -> None:
    assert set(sections((ROOT / "docs" / "reference" / "commands.md").read_text())) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_documented_and_every_documented_flag_exists(command: str) -> None:
    section = sections((ROOT / "docs" / "reference" / "commands.md").read_text())[command]
    documented = set(
        re.findall(r"(?<![\w-])--?[a-z][a-z-]*", "\n".join(re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)))
    )
    flags = flags_of(command)
    assert documented <= flags
    # Every switch has an off form; it needs words only where the switch is on by default.
    assert {flag for flag in flags - documented if f"--{flag.removeprefix('--no-')}" not in documented} == set()


def test_every_architecture_is_documented() -> None:
    documented = set(re.findall(r"`(\w+(?:For\w+|Model))`", (ROOT / "docs" / "reference" / "models.md").read_text()))
    assert documented - set(HEADLESS) == {name for family in FAMILIES for name in family.architectures} | set(RERANKERS)


def test_every_environment_variable_is_documented() -> None:
    sources = [path for path in files() if path.suffix in {".py", ".cpp", ".h"} and "tests" not in path.parts]
    read = re.compile(r"""(?:getenv\(|environ(?:\.get\(|\[)|env_var=\(?)\s*["'](HEADRACE_\w+)""")
    kept = re.compile(r"""^[A-Z_]+: Final = ["'](HEADRACE_\w+)["']""", re.MULTILINE)
    named = {name for path in sources for name in (*read.findall(path.read_text()), *kept.findall(path.read_text()))}
    assert "HEADRACE_ISA" in named
    section = (ROOT / "docs" / "reference" / "commands.md").read_text().partition("\n## ")[0]
    assert named == set(re.findall(r"^\| `(HEADRACE_\w+)` \|", section, re.MULTILINE))


def test_no_machine_and_no_registry_is_named() -> None:
    rules = {  # each with what it begins with, which is quick to look for; bytes, because models are files too
        b"/root/": rb"(?<![\w.~/*}])/root/",
        b"/work/": rb"(?<![\w.~/*}])/work/",
        b"/Users/": rb"(?<![\w.~/*}])/Users/",
        b"/home/": rb"(?<![\w.~/*}])/home/\w",
        b"/opt/": rb"(?<![\w.~/*}])/opt/(?:pypi|wheels)",
        b"pypi" + b".org": rb"pypi\.org",
        b"pythonhosted" + b".org": rb"pythonhosted\.org",
        b"registry.npmjs" + b".org": rb"registry\.npmjs\.org",
        b"extra-index-url": rb"extra-index-url",
        b"find-links": rb"find-links",
    }
    found = [
        f"{path.relative_to(ROOT)}: {match[0].decode()}"
        for path in files()
        if path != Path(__file__)
        for text in (path.read_bytes(),)
        for start, rule in rules.items()
        if start in text
        for match in re.finditer(rule, text)
    ]
    assert found == []


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `((?:headrace_|vllm:)\w+)` \|", page, re.MULTILINE))
    names = {each.name for each in computed_metrics.METRICS}
    found = {each.name + ("_total" if each.type == "counter" else "") for each in metrics.registry.collect()}
    assert names <= {each.removesuffix("_total") for each in found}
    assert documented == found


def test_no_two_public_classes_share_a_name() -> None:
    found = Counter(
        name
        for path in sorted((ROOT / "src").rglob("*.py"))
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert [name for name, count in found.items() if count > 1] == []
