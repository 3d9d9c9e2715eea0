"""Identifies a client without a key by its address."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Any

from headrace.server.http.allowed_hosts import is_loopback


def client_address(peer: Any) -> str:
    """Return the address of a connection's peer. For IPv6, its /64 network, because one client has all of it.

    Empty for a Unix socket.
    """
    if not isinstance(peer, tuple):
        return ""
    host = str(peer[0])  # pyright: ignore[reportUnknownArgumentType]
    return _network(host) if ":" in host else host


def is_from_here(peer: Any) -> bool:
    """Return whether a connection's peer is on this machine."""
    if not isinstance(peer, tuple):
        return False
    host = str(peer[0])  # pyright: ignore[reportUnknownArgumentType]
    return is_loopback(host.removeprefix("::ffff:"))


@lru_cache(maxsize=4096)
def _network(host: str) -> str:
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
