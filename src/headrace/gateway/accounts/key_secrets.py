"""Generates, recognises and hides the secrets of API keys.

    mr-  4xW…43 characters…  k3Yd0Q
    │    32 random bytes      CRC-32 of those characters: 4 bytes
    prefix, then base64 for URLs without padding

With the checksum a scanner of repositories and logs recognises leaked keys offline: one in four thousand million texts
of this form passes by chance.

Only the SHA-256 of a secret is stored. Slow hashes (bcrypt, scrypt, Argon2) protect passwords, which can be guessed.
These secrets have 256 random bits and cannot be guessed, so a slow hash would only cost milliseconds per request.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import zlib
from collections.abc import Iterator
from typing import Final

PREFIX: Final = "mr-"
HIDDEN: Final = "mr-***"
_RANDOM: Final = 32  # bytes
# A lookahead, so that overlapping candidates are all tried.
_FORM: Final = re.compile(r"(?=(mr-([A-Za-z0-9_-]{43})([A-Za-z0-9_-]{6})))")


def make_secret() -> str:
    body = _text(secrets.token_bytes(_RANDOM))
    return f"{PREFIX}{body}{_checksum(body)}"


def digest_of_secret(secret: str) -> bytes:
    """Return the SHA-256 of a secret from a header, which is decoded as Latin-1."""
    return hashlib.sha256(secret.encode("latin-1", "replace")).digest()


def last_four(secret: str) -> str:
    """Return the last four characters, by which people identify a key. They are part of the checksum."""
    return secret[-4:]


def secrets_in(text: str) -> Iterator[re.Match[str]]:
    """Find the secrets in a text; group 1 of each match is a secret."""
    if PREFIX not in text:  # fast path: most texts have none
        return
    for match in _FORM.finditer(text):
        if _checksum(match[2]) == match[3]:
            yield match


def holds_secret(text: str) -> bool:
    return next(secrets_in(text), None) is not None


def hidden(text: str) -> str:
    """Replace every secret in the text."""
    for match in reversed(list(secrets_in(text))):
        text = text[: match.start(1)] + HIDDEN + text[match.end(1) :]
    return text


def _checksum(body: str) -> str:
    return _text(zlib.crc32(body.encode("ascii")).to_bytes(4, "big"))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
