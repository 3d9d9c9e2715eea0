"""ApiError: an error that a client sees, in the shape of its dialect.

Holds the kinds of errors with their status codes, and translates the engine's errors. A message is safe to show to a
stranger: it names the offending parameter and never a path, a key or another tenant's data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.engine.process.client_errors import OverloadedError, WorkerLostError
from headrace.errors import RequestError, TemplateError

# Status codes by kind.
STATUS_BY_KIND: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "rate_limit_error": 429,
    "insufficient_quota": 429,
    "server_error": 500,
    "overloaded_error": 503,
}
# Anthropic's names for kinds and, more precisely, for status codes, where they differ.
_ANTHROPIC: Final = {"server_error": "api_error", "insufficient_quota": "rate_limit_error"}
_ANTHROPIC_BY_STATUS: Final = {408: "timeout_error", 413: "request_too_large", 504: "timeout_error"}
# The official clients retry unless this header forbids it.
NO_RETRY_HEADERS: Final[Mapping[str, str]] = {"x-should-retry": "false"}


class ApiError(Exception):
    def __init__(
        self,
        message: str,
        *,
        kind: str = "invalid_request_error",
        parameter: str | None = None,
        code: str | None = None,
        status: int | None = None,  # default: the kind's
        retry_after: float | None = None,  # seconds
        headers: Mapping[str, str] | None = None,  # of the response
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.parameter = parameter
        self.code = code
        self.status = STATUS_BY_KIND[kind] if status is None else status
        self.retry_after = retry_after
        self.headers: Mapping[str, str] = headers or {}

    def openai(self) -> dict[str, Any]:
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.parameter, "code": self.code},
        }

    def anthropic(self, request_id: str | None = None) -> dict[str, Any]:
        kind = _ANTHROPIC_BY_STATUS.get(self.status) or _ANTHROPIC.get(self.kind, self.kind)
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code is not None:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error, **({} if request_id is None else {"request_id": request_id})}

    def ollama(self) -> dict[str, Any]:
        return {"error": self.message}


def invalid_request(message: str, parameter: str | None = None, *, code: str | None = None) -> ApiError:
    return ApiError(message, parameter=parameter, code=code)


def as_api_error(error: Exception) -> ApiError:
    """Translate an error of Headrace. Any other error becomes an internal error without details."""
    match error:
        case ApiError():
            return error
        case TemplateError():
            return invalid_request(
                f"The model's chat template cannot render these messages: {error.reason}", "messages"
            )
        case RequestError(parameter="deadline"):  # the prompt alone takes longer
            return ApiError(str(error), parameter="deadline", kind="overloaded_error", code="deadline_unreachable")
        case RequestError():
            code = "context_length_exceeded" if error.parameter == "prompt" and "do not fit" in str(error) else None
            return invalid_request(str(error), error.parameter, code=code)
        case OverloadedError():
            # Without retry_after, no later time would do better: the deadline itself is too short.
            if error.retry_after is None:
                return ApiError(str(error), kind="overloaded_error", code="deadline_unreachable")
            return ApiError(str(error), kind="overloaded_error", code="overloaded", retry_after=error.retry_after)
        case WorkerLostError():
            return ApiError(
                "The engine is not available. Try again.", kind="overloaded_error", code="engine_lost", retry_after=1.0
            )
        case _:
            return ApiError(
                "Internal server error. The server's log has the details.", kind="server_error", code="internal_error"
            )


def unknown_url(path: str) -> ApiError:
    """Build the 404 for an unknown path. A hidden admin API must answer with exactly the same error."""
    return ApiError(f"Unknown path '{path[:200]}'.", kind="not_found_error", code="unknown_url")
