"""Formats the x-ratelimit-… headers with OpenAI's names.

If several limits apply, the headers describe the one with the smallest share left.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.gateway.limits.limit_scopes import WindowStatus


def rate_headers(statuses: Iterable[WindowStatus]) -> dict[str, str]:
    """Return the headers for requests and for tokens, if limited. Input and output tokens share one set."""
    headers: dict[str, str] = {}
    every = tuple(statuses)
    for what, meters in (("requests", ("requests",)), ("tokens", ("input_tokens", "output_tokens"))):
        matching = [each for each in every if each.window.meter in meters]
        if matching:
            tightest = min(matching, key=lambda each: (each.left / each.window.limit, -each.reset))
            headers[f"x-ratelimit-limit-{what}"] = str(tightest.window.limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(max(0, tightest.left))
            headers[f"x-ratelimit-reset-{what}"] = format_duration(tightest.reset)
    return headers


def format_duration(micros: int) -> str:
    """Format as "6m0s", "1.2s" or "12ms", rounded up."""
    millis = -(-micros // 1000)
    if millis <= 0:
        return "0s"
    if millis < 1000:
        return f"{millis}ms"
    minutes, millis = divmod(millis, 60_000)
    seconds = f"{millis / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if not minutes:
        return seconds
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}"
