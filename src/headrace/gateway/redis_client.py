"""Opens clients of Redis or Valkey with a timeout on every use. Knows no keys and sends nothing itself.

The package redis is imported with the first client.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from headrace.errors import HeadraceError

_CONNECTIONS: Final = 24


def connect(url: str, *, seconds: float = 0.05, used_for: str = "cache") -> Any:
    """Return a client that connects on first use. `seconds`: timeout of one connect, write or read. HeadraceError if
    the package is missing or the URL is invalid."""
    try:
        client: Any = importlib.import_module("redis.asyncio")
        retry: Any = importlib.import_module("redis.asyncio.retry")
        backoff: Any = importlib.import_module("redis.backoff")
    except ImportError:
        raise HeadraceError(f"The {used_for} in Redis needs an extra. Install headrace[redis].") from None
    try:
        pool = client.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=1.0,  # seconds to wait for a free connection
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            # One attempt: callers have a timeout, and decide about retries.
            retry=retry.Retry(backoff.NoBackoff(), 0),
        )
        return client.Redis.from_pool(pool)
    except ValueError as error:
        raise HeadraceError(f"The Redis URL of the {used_for} is invalid: {error}") from None
