"""Reads the query of a list endpoint: `after`, `limit`, `order` and the endpoint's own filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.gateway.api_errors import invalid_request
from headrace.server.http.api_call import ApiCall
from headrace.server.http.body_parameters import unknown_parameter


def parse_list_query(call: ApiCall, names: Sequence[str]) -> dict[str, Any]:
    """Return the query's parameters. ApiError for a name not in `names` or a limit that is not a number."""
    query: dict[str, Any] = {}
    for name, value in call.query().items():
        if name not in names:
            raise unknown_parameter(name, names)
        if name == "limit":
            if not (value.isascii() and value.isdigit() and len(value) < 9):
                raise invalid_request(f"'limit' is '{value[:20]}'. Expected a number.", "limit")
            query[name] = int(value)
        else:
            query[name] = value
    return query
