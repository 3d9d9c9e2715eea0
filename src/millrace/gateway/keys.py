"""Who calls: from the secret in a request's headers to a Caller.

Owns the keys of the configuration, which are kept as digests alone, and their comparison in constant time. No secret
leaves this module, not even into an error.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from millrace.config import ConfigError, KeyConfig, digest_of
from millrace.gateway.errors import ApiError
from millrace.gateway.exchange import Caller


class Keys:
    """Without any key everybody may call."""

    def __init__(self, configs: Sequence[KeyConfig], environ: Mapping[str, str]) -> None:
        self._known = [(_digest(config, environ), _caller(config)) for config in configs]

    @property
    def needed(self) -> bool:
        return bool(self._known)

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """By `Authorization: Bearer`, or else by x-api-key. ApiError where the secret is nobody's."""
        if not self._known:
            return Caller()
        secret = headers.get("x-api-key", "")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            secret = token.strip()
        if not secret:
            raise ApiError(
                "an API key is needed: Authorization: Bearer KEY", kind="authentication_error", code="missing_api_key"
            )
        digest = hashlib.sha256(secret.encode("latin-1", "replace")).digest()  # the bytes that came
        found: Caller | None = None
        for known, caller in self._known:  # all of them, however early one fits
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise ApiError("the API key is not known", kind="authentication_error", code="invalid_api_key")
        return found


def _digest(config: KeyConfig, environ: Mapping[str, str]) -> bytes:
    try:
        return bytes.fromhex(digest_of(config, environ))
    except KeyError:
        raise ConfigError(f"keys: the variable of the key '{config.name}' is not set: {config.key_env}") from None


def _caller(config: KeyConfig) -> Caller:
    return Caller(config.name, config.tenant or config.name, config.weight, config.surface)
