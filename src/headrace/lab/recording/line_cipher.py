"""Encrypts single lines of recordings with AES-256-GCM, so that a file can be appended to and read line by line.

The tenant is bound into each line: a line that is copied into another tenant's file cannot be read there.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Final

from headrace.aes_cipher import KEY_BYTES, AesCipher, DamagedError, MissingCipherError
from headrace.config import ConfigError
from headrace.config.environment import required_secret
from headrace.errors import HeadraceError

_WHERE: Final = "recording.key_env"


class RecordingError(HeadraceError):
    """A recording cannot be read."""


class LineCipher:
    def __init__(self, key: bytes) -> None:
        """ConfigError if the extra 'encryption' is not installed or the key has a wrong length."""
        if len(key) != KEY_BYTES:
            raise ConfigError(f"{_WHERE}: The key has {len(key)} bytes. Expected {KEY_BYTES}, in base64.")
        try:
            self._cipher = AesCipher(key)
        except MissingCipherError as error:
            raise ConfigError(f"{_WHERE}: Recordings cannot be encrypted. {error}") from None

    @classmethod
    def from_environment(cls, variable: str, environ: Mapping[str, str]) -> LineCipher:
        """Read the key, 32 bytes in base64, from an environment variable. ConfigError if it is not one."""
        text = required_secret(environ, variable, _WHERE)
        try:
            key = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError(
                f"{_WHERE}: The environment variable {variable} is not base64. Make a key with: openssl rand -base64 32"
            ) from None
        return cls(key)

    def encrypt(self, line: bytes, tenant: str) -> bytes:
        return base64.b64encode(self._cipher.seal(line, tenant.encode(errors="replace")))

    def decrypt(self, line: bytes, tenant: str) -> bytes:
        """RecordingError for a wrong key or a changed line."""
        try:
            return self._cipher.open(base64.b64decode(line, validate=True), tenant.encode(errors="replace"))
        except (DamagedError, ValueError) as error:
            raise RecordingError(
                "A line of the recording cannot be decrypted: the key is another one, or the file was changed."
            ) from error
