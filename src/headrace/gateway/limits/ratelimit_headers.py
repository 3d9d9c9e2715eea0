"""The standard headers on limits: x-ratelimit-limit-requests and its kin, in OpenAI's names and formats.

Owns the choice of what they speak of, where several limits are in force: the one with the smallest share left.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.gateway.limits.limit_scopes import WindowStatus


def rate_headers(standings: Iterable[WindowStatus]) -> dict[str, str]:
    """Of requests and of tokens, each where there is such a limit. Input and output tokens have one set of headers."""
    found: dict[str, str] = {}
    every = tuple(standings)
    for what, meters in (("requests", ("requests",)), ("tokens", ("input_tokens", "output_tokens"))):
        these = [each for each in every if each.window.meter in meters]
        if these:
            tightest = min(these, key=lambda each: (each.left / each.window.limit, -each.reset))
            found[f"x-ratelimit-limit-{what}"] = str(tightest.window.limit)
            found[f"x-ratelimit-remaining-{what}"] = str(max(0, tightest.left))
            found[f"x-ratelimit-reset-{what}"] = format_duration(tightest.reset)
    return found


def format_duration(micros: int) -> str:
    """As "6m0s", "1.2s", "12ms"; never less than it is."""
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
