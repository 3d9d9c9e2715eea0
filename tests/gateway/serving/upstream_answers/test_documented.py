"""docs/reference/upstreams.md documents every kind of upstream. Keys are checked with the configuration's page."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.config import upstream_section as upstreams

DOCUMENT = Path(__file__).parents[4] / "docs" / "reference" / "upstreams.md"


def test_every_kind_is_documented() -> None:
    documented = set(re.findall(r"^\| `([a-z.]+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(upstreams.KINDS) <= documented
