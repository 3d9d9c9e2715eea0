"""Encrypts KV that is written to a disk, with AES-256-GCM and a key for each tenant.

The tenants' keys are derived from one master key, so a file can be read with the master key and the tenant's name only.
Needs the extra `encryption`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from headrace.aes_cipher import AesCipher, MissingCipherError
from headrace.errors import HeadraceError

_KEY: Final = re.compile(r"[0-9A-Fa-f]{64}")
_MOST_KEYS: Final = 256  # of tenants, kept ready


class CipherError(HeadraceError):
    """The key or the extra that encryption needs is missing."""


class KvCipher:
    def __init__(self, master: bytes) -> None:
        self._master = master
        self._cipher = lru_cache(_MOST_KEYS)(self._cipher_of)
        try:
            self._cipher("")
        except MissingCipherError as error:
            raise CipherError(f"KV on disk cannot be encrypted. {error}") from None

    @classmethod
    def from_environment(cls, name: str, environ: Mapping[str, str]) -> KvCipher:
        """Read the master key from an environment variable: 32 bytes as 64 hexadecimal digits."""
        text = environ.get(name, "")
        if not _KEY.fullmatch(text):
            raise CipherError(
                f"The environment variable {name} must hold a key of 64 hexadecimal digits. Make one with "
                "'openssl rand -hex 32'."
            )
        return cls(bytes.fromhex(text))

    @property
    def naming_key(self) -> bytes:
        """A secret for the names of files, so that they do not reveal which prompts were seen."""
        return self._derived(b"names")

    def seal(self, salt: str, purpose: bytes, data: bytes) -> bytes:
        return self._cipher(salt).seal(data, purpose)

    def open(self, salt: str, purpose: bytes, sealed: bytes) -> bytes:
        """Return the data. Raise DamagedError if it is not what `seal` made of it."""
        return self._cipher(salt).open(sealed, purpose)

    def _cipher_of(self, salt: str) -> AesCipher:
        return AesCipher(self._derived(b"tenant " + salt.encode()))

    def _derived(self, purpose: bytes) -> bytes:
        return hmac.digest(self._master, b"headrace kv " + purpose, "sha256")
