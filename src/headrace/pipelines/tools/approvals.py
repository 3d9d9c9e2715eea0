"""Approvals: signed tokens for single calls of tools with effects.

A token names one call: tenant, pipeline, tool and arguments. A client gets it with an answer whose model wanted the
call, and sends it back with the request once a person has agreed. Each is valid once and for a limited time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

LIFETIME_S: Final = 900
_REMEMBERED: Final = 10_000  # used tokens; older ones have expired long before


class Approvals:
    """The key is this process's own: a token is valid at the process that gave it."""

    def __init__(self, key: bytes | None = None, clock: Callable[[], float] = time.time) -> None:
        self._key = key or secrets.token_bytes(32)
        self._clock = clock
        self._used: OrderedDict[str, None] = OrderedDict()

    def issue(self, tenant: str, pipeline: str, tool: str, arguments: Mapping[str, Any]) -> tuple[str, int]:
        """Return a token for a call and when it expires, in seconds since the epoch."""
        expires = int(self._clock()) + LIFETIME_S
        return f"{expires}.{self._sign(expires, tenant, pipeline, tool, arguments)}", expires

    def redeem(self, token: str, tenant: str, pipeline: str, tool: str, arguments: Mapping[str, Any]) -> bool:
        """Return whether the token allows this call now. It allows it once."""
        expires, dot, signature = token.partition(".")
        if not dot or not expires.isascii() or not expires.isdigit() or len(expires) > 12:
            return False
        if int(expires) < self._clock() or token in self._used:
            return False
        wanted = self._sign(int(expires), tenant, pipeline, tool, arguments)
        if not hmac.compare_digest(wanted.encode(), signature.encode()):
            return False
        self._used[token] = None
        while len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)
        return True

    def _sign(self, expires: int, *parts: Any) -> str:
        named = msgspec.json.encode([expires, *parts], order="sorted")
        return hmac.new(self._key, named, hashlib.sha256).hexdigest()
