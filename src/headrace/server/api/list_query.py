"""Lists: reads the query of a list endpoint (`after`, `limit`, ...) and writes pages in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from headrace.gateway.api_errors import invalid_request
from headrace.server.http.api_call import ApiCall
from headrace.server.http.unknown_fields import unknown_parameter

# Parameters that official clients add and that change nothing here.
_IGNORED: Final = ("beta", "include", "include[]", "include_obfuscation")


def parse_list_query(call: ApiCall, names: Sequence[str]) -> dict[str, Any]:
    """Return the query's parameters. ApiError for a name not in `names` or a limit that is not a number."""
    query: dict[str, Any] = {}
    for name, value in call.query().items():
        if name in _IGNORED:
            continue
        if name not in names:
            raise unknown_parameter(name, names)
        if name == "limit":
            if not (value.isascii() and value.isdigit() and len(value) < 9):
                raise invalid_request(f"'limit' is '{value[:20]}'. Expected a number.", "limit")
            query[name] = int(value)
        else:
            query[name] = value
    return query


def anthropic_page(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a page of a list in Anthropic's shape."""
    return {
        "data": data,
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def rfc3339(seconds: float) -> str:
    """Return a time as Anthropic's API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
