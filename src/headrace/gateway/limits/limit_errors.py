"""What a client is told when a limit has no room.

Owns the errors of the limits: which limit it is, in words and as a code, when to come back, and the headers for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from headrace.gateway.api_errors import NO_RETRY_HEADERS, ApiError
from headrace.gateway.limits.limit_scopes import LimitRefusal, LimitScope, windows_of
from headrace.gateway.limits.ratelimit_headers import rate_headers

_WHAT: Final = {
    "requests_per_s": "requests a second",
    "requests_per_min": "requests a minute",
    "concurrent": "requests at once",
    "input_tokens_per_s": "input tokens a second",
    "input_tokens_per_min": "input tokens a minute",
    "output_tokens_per_s": "output tokens a second",
    "output_tokens_per_min": "output tokens a minute",
}


class LimitError(ApiError):
    """Says whether the time that it names is certain."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        kind: str = "rate_limit_error",
        retry_after: float | None = None,
        parameter: str | None = None,
        headers: Mapping[str, str] | None = None,
        exact: bool = True,
    ) -> None:
        super().__init__(message, kind=kind, code=code, retry_after=retry_after, parameter=parameter, headers=headers)
        self.exact = exact  # at `retry_after` there is room, however long others take


def limit_reached_error(refusal: LimitRefusal) -> LimitError:
    what = f"the {refusal.scope.kind}'s limit of {refusal.limit} {_WHAT[refusal.field]}"
    headers = rate_headers(refusal.standings)
    code = f"{refusal.scope.kind}_{refusal.field}"
    if refusal.wait is None:
        return LimitError(f"{what} is too small for this", code=code, headers={**headers, **NO_RETRY_HEADERS})
    seconds = -(-refusal.wait // 1000) / 1000  # whole milliseconds, as the header has them; never fewer than it takes
    return LimitError(
        f"{what} is reached; try again in {seconds:g} s",
        code=code,
        retry_after=seconds,
        headers=headers,
        exact=refusal.exact,
    )


def check_size(scopes: Sequence[LimitScope], input_tokens: int) -> None:
    """LimitError for a prompt that no time is right for."""
    for scope in scopes:
        for window in windows_of(scope.limits):
            if window.meter == "input_tokens" and input_tokens > window.limit:
                raise LimitError(
                    f"{input_tokens} input tokens are more than the {scope.kind}'s limit of {window.limit} "
                    f"{_WHAT[window.field]}",
                    code=f"{scope.kind}_{window.field}",
                    headers=NO_RETRY_HEADERS,
                )


def check_context(limit: int, scope: LimitScope, input_tokens: int) -> None:
    if input_tokens >= limit:
        raise LimitError(
            f"the {scope.kind}'s limit on the context is {limit} tokens, and the prompt alone has {input_tokens}",
            kind="invalid_request_error",
            code="context_length_exceeded",
            parameter="prompt",
        )


def limits_unavailable_error(retry_after: float) -> LimitError:
    return LimitError(
        "the limits cannot be checked right now",
        kind="overloaded_error",
        code="limits_unavailable",
        retry_after=max(0.001, -(-retry_after * 1000 // 1) / 1000),
        exact=False,
    )


def too_many_scopes_error() -> LimitError:
    return LimitError(
        "more tenants and keys are active than limits are kept for",
        kind="overloaded_error",
        code="limits_full",
        retry_after=1.0,
        exact=False,
    )
