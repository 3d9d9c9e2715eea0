"""Every key of an upstream's configuration is documented, with its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config import upstream_section as upstreams
from headrace.config.breaker_section import UpstreamBreakerConfig

DOCUMENT = Path(__file__).parents[4] / "docs" / "how-to" / "use-upstreams.md"
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "`[models.NAME.upstream]`": upstreams.UpstreamConfig,
    "`timeouts`": upstreams.UpstreamTimeouts,
    "`retries`": upstreams.UpstreamRetries,
    "`breaker`": UpstreamBreakerConfig,
    "`health`": upstreams.UpstreamHealthConfig,
    "`takes`": upstreams.UpstreamFeatures,
}


def rows(heading: str) -> list[list[str]]:
    text = DOCUMENT.read_text()
    found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found
    table = [line.strip("|").split(" | ") for line in found[1].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in table]


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_is_documented(heading: str) -> None:
    fields = {field.name: field for field in msgspec.structs.fields(SECTIONS[heading])}
    plain = {name for name, field in fields.items() if not _is_section(field.type)}
    documented = {name: row for row in rows(heading) for name in re.findall(r"`(\w+)`", row[0])}
    assert set(documented) - {"takes"} == plain
    for name in plain - {"takes"}:
        if len(documented[name]) == 3 and "`" in documented[name][2] and fields[name].default not in (None, ""):
            assert re.findall(r"`([^`]*)`", documented[name][2])[0] == _spelled(fields[name])


def test_every_kind_is_documented() -> None:
    documented = set(re.findall(r"^\| `([a-z.]+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert set(upstreams.KINDS) <= documented


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _spelled(field: Any) -> str:
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value}"'
        case _:
            return str(value)
