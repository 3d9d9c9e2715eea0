"""AllowedHosts: checks the `host` header, so that a web page cannot reach the server by a name of its own.

With DNS rebinding, a page lets its own name point to 127.0.0.1 and calls a server of your machine as if it were its
own. Its requests carry that name. Addresses cannot be rebound, so each of them is allowed.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from headrace.config import Config
from headrace.gateway.api_errors import ApiError

_KNOWN: Final = 64  # headers that are remembered
_ANY: Final = "*"
_PORT: Final = re.compile(r":\d{0,5}$")


class AllowedHosts:
    def __init__(self, names: tuple[str, ...]) -> None:
        """`names`: without ports; "*" allows all."""
        self._names = frozenset(name.lower() for name in names)
        self._known: set[str] = set()

    @classmethod
    def of(cls, config: Config, host: str) -> AllowedHosts | None:
        """Return None if every host is allowed: a public address, or keys, and no names configured.

        `host`: the address that the server listens on.
        """
        names = config.server.hosts
        if _ANY in names or (not names and (config.keys or not is_loopback(host))):
            return None
        return cls((*names, host))

    def check(self, header: str | None) -> None:
        """Raise ApiError for a `host` header that is not allowed. A request without one is not from a browser."""
        if header is None or header in self._known:
            return
        name = _PORT.sub("", header).lower().rstrip(".")
        if not (name in self._names or name == "localhost" or name.endswith(".localhost") or _is_address(name)):
            raise ApiError(
                f"This server does not answer the host '{header[:100]}'. Use localhost or an address, or add the name "
                "to server.hosts.",
                kind="permission_error",
                code="host_not_allowed",
            )
        if len(self._known) < _KNOWN:
            self._known.add(header)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on `host`. Of names, only localhost is known."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
