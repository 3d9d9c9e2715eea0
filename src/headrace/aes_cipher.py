"""AesCipher: seals data with AES-256-GCM. What is sealed, and where keys come from, is decided by those who use it.

Needs the extra `encryption`.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Final

from headrace.errors import HeadraceError

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16


class MissingCipherError(HeadraceError):
    """The extra that encryption needs is not installed."""


class DamagedError(Exception):
    """Data that was not sealed with this key for this purpose, or was changed."""


class AesCipher:
    def __init__(self, key: bytes) -> None:
        """`key`: KEY_BYTES long. MissingCipherError without the extra."""
        try:
            self._damaged: type[Exception] = import_module("cryptography.exceptions").InvalidTag
            aes: Any = import_module("cryptography.hazmat.primitives.ciphers.aead").AESGCM
        except ImportError:
            raise MissingCipherError("Run pip install 'headrace[encryption]'.") from None
        self._aes = aes(key)

    def seal(self, data: bytes, purpose: bytes) -> bytes:
        """Return the nonce, the encrypted data and its tag. Only `open` with the same purpose accepts them."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._aes.encrypt(nonce, data, purpose)

    def open(self, sealed: bytes, purpose: bytes) -> bytes:
        """Return the data. Raise DamagedError if it is not what `seal` made of it."""
        try:
            return self._aes.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], purpose)
        except (self._damaged, ValueError):
            raise DamagedError from None
