"""Decides how far a cache is used for a request: off, record, share or on, by tenant.

Both the exact and the semantic cache have a CachePolicy. Does not know entries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.config.cache_section import CacheMode


class CacheAccess(msgspec.Struct, frozen=True):
    """What a request may do with a cache."""

    reads: bool  # look for an entry
    serves: bool  # answer with the entry
    writes: bool  # store a fresh answer


NO_ACCESS: Final = CacheAccess(reads=False, serves=False, writes=False)
RECORD_ONLY: Final = CacheAccess(reads=True, serves=False, writes=True)
FULL_ACCESS: Final = CacheAccess(reads=True, serves=True, writes=True)


class CachePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Mode `record` measures what would have been served and serves fresh answers. Mode `share` is `on` for a share of
    the tenants and `record` for the others."""

    mode: CacheMode = "off"
    share: float = 0.0  # of the tenants, in mode share; 0 to 1
    tenants: Mapping[str, CacheMode] = {}  # tenants with a mode of their own
    salt: str = ""  # caches with different salts select different tenants

    def access(self, tenant: str, *, requested: str = "on", declared: bool = False) -> CacheAccess:
        """Return the access of a tenant's request. `requested`: its `cache`; "off" neither reads nor writes.
        `declared`: mode off means on, except a tenant's own."""
        if requested == "off":
            return NO_ACCESS
        match self.tenants.get(tenant, "on" if declared and self.mode == "off" else self.mode):
            case "off":
                return NO_ACCESS
            case "record":
                return RECORD_ONLY
            case "share":
                return FULL_ACCESS if self.is_selected(tenant) else RECORD_ONLY
            case "on":
                return FULL_ACCESS

    def is_selected(self, tenant: str) -> bool:
        """True if a tenant is in the share: the same on every gateway, and still so when the share grows."""
        digest = hashlib.sha256(f"{self.salt}\0{tenant}".encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") < self.share * 2**64
