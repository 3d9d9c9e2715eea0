"""What a client is told when something cannot be done: ApiError, in the shape of each dialect.

Owns the kinds of errors with their status codes, and the translation of the engine's own errors. A message is fit to
show to a stranger: it names the offending parameter and never a path, a key or another tenant's data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.engine.process.engine_client import OverloadedError, WorkerLostError
from headrace.errors import RequestError, TemplateError

# Status codes by kind, and the names that Anthropic's clients know the same kinds by.
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
_ANTHROPIC: Final = {"server_error": "api_error", "insufficient_quota": "rate_limit_error"}
# The official clients ask again by themselves unless they are told not to.
NO_RETRY_HEADERS: Final[Mapping[str, str]] = {"x-should-retry": "false"}


class ApiError(Exception):
    def __init__(
        self,
        message: str,
        *,
        kind: str = "invalid_request_error",
        parameter: str | None = None,
        code: str | None = None,
        status: int | None = None,  # the kind's by default
        retry_after: float | None = None,  # seconds
        headers: Mapping[str, str] | None = None,  # of the reply
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

    def anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC.get(self.kind, self.kind)
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def invalid_request(message: str, parameter: str | None = None, *, code: str | None = None) -> ApiError:
    return ApiError(message, parameter=parameter, code=code)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error of ours; of any other, only that there was one."""
    match error:
        case ApiError():
            return error
        case TemplateError():
            return invalid_request(f"the model's chat template cannot render this: {error.reason}", "messages")
        case RequestError():
            code = "context_length_exceeded" if error.parameter == "prompt" and "do not fit" in str(error) else None
            return invalid_request(str(error), error.parameter, code=code)
        case OverloadedError():
            # Where another time is no better, the request itself asks for too much.
            if error.retry_after is None:
                return ApiError(str(error), kind="overloaded_error", code="deadline_unreachable")
            return ApiError(str(error), kind="overloaded_error", code="overloaded", retry_after=error.retry_after)
        case WorkerLostError():
            return ApiError(
                "the engine is not there; try again", kind="overloaded_error", code="engine_lost", retry_after=1.0
            )
        case _:
            return ApiError("something went wrong inside of Headrace", kind="server_error", code="internal_error")
