"""Error responses of rate limits: which limit was reached, its code, when to retry, and the rate limit headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from headrace.gateway.api_errors import NO_RETRY_HEADERS, ApiError
from headrace.gateway.limits.limit_scopes import LimitRefusal, LimitRequest, LimitScope, windows_of
from headrace.gateway.limits.ratelimit_headers import rate_headers

_UNITS: Final = {
    "requests_per_s": "requests per second",
    "requests_per_min": "requests per minute",
    "concurrent": "concurrent requests",
    "input_tokens_per_s": "input tokens per second",
    "input_tokens_per_min": "input tokens per minute",
    "output_tokens_per_s": "output tokens per second",
    "output_tokens_per_min": "output tokens per minute",
}


class LimitError(ApiError):
    """A rejection by a limit. `exact` says whether `retry_after` is certain."""

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
        self.exact = exact  # there will be room at `retry_after`, however long other requests take


def limit_reached_error(refusal: LimitRefusal, request: LimitRequest | None = None) -> LimitError:
    limit = f"{refusal.scope.kind}'s limit of {refusal.limit} {_UNITS[refusal.field]}"
    headers = rate_headers(refusal.statuses)
    code = f"{refusal.scope.kind}_{refusal.field}"
    if refusal.wait is None:
        message = f"This request can never fit the {limit}. Send a smaller request."
        return LimitError(message, code=code, headers={**headers, **NO_RETRY_HEADERS})
    seconds = -(-refusal.wait // 1000) / 1000  # rounded up to milliseconds, as in the header
    return LimitError(
        f"The {limit} is reached{_remaining(refusal, request)}. Retry in {seconds:g} s.",
        code=code,
        retry_after=seconds,
        headers=headers,
        exact=refusal.exact,
    )


def _remaining(refusal: LimitRefusal, request: LimitRequest | None) -> str:
    """Say how much of the limit is left and how much the request needs, unless it counts concurrent requests."""
    for status in refusal.statuses:
        if (status.window.field, status.window.limit) == (refusal.field, refusal.limit):
            left = f", {max(0, status.left)} left"
            meter = status.window.meter
            if request is None or meter == "requests":
                return left
            amount = request.amount(status.window)
            if meter == "input_tokens":
                return f"{left}; the prompt has {amount}"
            if amount == request.most_output:
                return f"{left}; the answer may have {amount}"
            estimated = "estimated from recent answers; a lower max_tokens reserves less"
            return f"{left}; the request reserves {amount} ({estimated})"
    return ""


def check_size(scopes: Sequence[LimitScope], input_tokens: int) -> None:
    """Raise LimitError for a prompt that exceeds a token limit and so can never be admitted."""
    for scope in scopes:
        for window in windows_of(scope.limits):
            if window.meter == "input_tokens" and input_tokens > window.limit:
                raise LimitError(
                    f"The prompt has {input_tokens} tokens, more than the {scope.kind}'s limit of {window.limit} "
                    f"{_UNITS[window.field]}. Send a shorter prompt.",
                    code=f"{scope.kind}_{window.field}",
                    headers=NO_RETRY_HEADERS,
                )


def check_context(limit: int, scope: LimitScope, input_tokens: int) -> None:
    if input_tokens >= limit:
        raise LimitError(
            f"The prompt has {input_tokens} tokens, but the {scope.kind}'s limit on the context is {limit} tokens for "
            "prompt and output together. Send a shorter prompt.",
            kind="invalid_request_error",
            code="context_length_exceeded",
            parameter="prompt",
        )


def limits_unavailable_error(retry_after: float) -> LimitError:
    return LimitError(
        "Rate limits cannot be checked right now. Try again later.",
        kind="overloaded_error",
        code="limits_unavailable",
        retry_after=max(0.001, -(-retry_after * 1000 // 1) / 1000),
        exact=False,
    )


def too_many_scopes_error() -> LimitError:
    return LimitError(
        "Too many tenants and keys are active to track their limits. Try again later.",
        kind="overloaded_error",
        code="limits_full",
        retry_after=1.0,
        exact=False,
    )
