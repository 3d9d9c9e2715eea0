"""The query of a list: `after`, `limit`, `order` and what else an endpoint knows. Owns its reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.server.http.api_call import ApiCall


def parse_list_query(call: ApiCall, names: Sequence[str]) -> dict[str, Any]:
    """ApiError for a name that is none of these."""
    found: dict[str, Any] = {}
    for name, value in call.query().items():
        if name not in names:
            raise ApiError(f"there is no parameter '{name[:100]}'", parameter=name[:100], code="unknown_parameter")
        if name == "limit":
            if not (value.isascii() and value.isdigit() and len(value) < 9):
                raise invalid_request("'limit' must be a number", "limit")
            found[name] = int(value)
        else:
            found[name] = value
    return found
