"""How far a cache is trusted: off, record, share or on, for every tenant or for one.

Owns Modes, which turns a tenant and a request's wish into what may be done (Uses). Both the exact and the semantic
cache have one. Knows nothing of entries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.config.cache_section import CacheMode


class CacheAccess(msgspec.Struct, frozen=True):
    """What may be done with a cache for one request."""

    looks: bool  # whether there is an entry is found out
    serves: bool  # and what is found is the answer
    stores: bool  # a fresh answer becomes an entry


NO_ACCESS: Final = CacheAccess(looks=False, serves=False, stores=False)
RECORD_ONLY: Final = CacheAccess(looks=True, serves=False, stores=True)
FULL_ACCESS: Final = CacheAccess(looks=True, serves=True, stores=True)


class CachePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`record` finds out what would have been served and serves the fresh answer; `share` is `on` for a share of the
    tenants and `record` for the others."""

    mode: CacheMode = "off"
    share: float = 0.0  # of the tenants, where the mode is share; 0 to 1
    tenants: Mapping[str, CacheMode] = {}  # those that have a mode of their own
    salt: str = ""  # caches with different ones choose different tenants

    def uses(self, tenant: str, *, wish: str = "on") -> CacheAccess:
        """`wish`: the request's own `cache`; "off" neither reads nor writes."""
        if wish == "off":
            return NO_ACCESS
        match self.tenants.get(tenant, self.mode):
            case "off":
                return NO_ACCESS
            case "record":
                return RECORD_ONLY
            case "share":
                return FULL_ACCESS if self.chosen(tenant) else RECORD_ONLY
            case "on":
                return FULL_ACCESS

    def chosen(self, tenant: str) -> bool:
        """Whether the tenant is in the share: the same on every gateway, and still so when the share grows."""
        digest = hashlib.sha256(f"{self.salt}\0{tenant}".encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") < self.share * 2**64
