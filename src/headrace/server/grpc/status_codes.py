"""Translates the errors of the HTTP API into the status of an RPC and its trailing metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

# HTTP status to the name of a gRPC status code.
_NAMES: Final[Mapping[int, str]] = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
# By our own code, where the HTTP status says less.
_NAMES_BY_CODE: Final[Mapping[str, str]] = {"deadline_unreachable": "DEADLINE_EXCEEDED"}
_LONGEST: Final = 1024  # characters of a value in the metadata


class RpcStatus(NamedTuple):
    code: str  # the name of a gRPC status code
    details: str
    metadata: tuple[tuple[str, str], ...]  # trailing


def rpc_status(status: int, body: bytes, headers: Mapping[str, str]) -> RpcStatus:
    """`body` and `headers`: of the HTTP response."""
    try:
        error: dict[str, Any] = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        error = {}
    code: str = error.get("code") or error.get("type") or "unknown"
    message: str = error.get("message") or f"HTTP status {status}"
    named = {
        "error-code": code,
        "error-type": error.get("type"),
        "error-param": error.get("param"),
        "retry-after-ms": headers.get("retry-after-ms"),
        "grpc-retry-pushback-ms": headers.get("retry-after-ms"),  # which gRPC's own retries follow
    }
    kept = {name: value for name, value in headers.items() if name.startswith(("x-request-id", "x-ratelimit-"))}
    metadata = tuple((name, ascii_value(value)) for name, value in (named | kept).items() if value)
    default = "INTERNAL" if status >= 500 else "FAILED_PRECONDITION"
    return RpcStatus(_NAMES_BY_CODE.get(code) or _NAMES.get(status, default), f"{code}: {message}", metadata)


def ascii_value(value: str) -> str:
    """Return a text as metadata can hold it."""
    kept = value.encode("ascii", "backslashreplace").decode("ascii")
    return "".join(each if " " <= each <= "~" else "?" for each in kept)[:_LONGEST]
