"""The secrets of keys: how one is made, told from any other text, and hidden.

    mr-  4xW…43 characters…  k3Yd0Q
    │    32 random bytes      CRC-32 of those characters: 4 bytes
    prefix, then base64 for URLs without padding

The checksum is no secret. With it a scanner of repositories and logs knows a leaked key from other text without asking
anybody: one text in four thousand million of this form passes by chance. Knows no key in particular.

Only the SHA-256 of a secret is kept. A slow hash (bcrypt, scrypt, Argon2) is for passwords, which people choose from so
few that all can be tried; it makes each try cost milliseconds. There are 2^256 of these secrets, so that nobody tries
them at any price, and each request would pay those milliseconds.
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
# Within a lookahead, so that of texts that overlap all are tried.
_FORM: Final = re.compile(r"(?=(mr-([A-Za-z0-9_-]{43})([A-Za-z0-9_-]{6})))")


def make_secret() -> str:
    body = _text(secrets.token_bytes(_RANDOM))
    return f"{PREFIX}{body}{_checksum(body)}"


def digest_of_secret(secret: str) -> bytes:
    """Of the bytes that came in a header, which decodes them as Latin-1."""
    return hashlib.sha256(secret.encode("latin-1", "replace")).digest()


def last_four(secret: str) -> str:
    """By these a person knows which of the keys it is. Part of them is the checksum."""
    return secret[-4:]


def secrets_in(text: str) -> Iterator[re.Match[str]]:
    """Where in a text the secrets of keys stand; group 1 of each match is one."""
    for found in _FORM.finditer(text) if PREFIX in text else ():  # which most texts have not
        if _checksum(found[2]) == found[3]:
            yield found


def holds_secret(text: str) -> bool:
    return next(secrets_in(text), None) is not None


def hidden(text: str) -> str:
    """The text with every secret in it replaced."""
    for found in reversed(list(secrets_in(text))):
        text = text[: found.start(1)] + HIDDEN + text[found.end(1) :]
    return text


def _checksum(body: str) -> str:
    return _text(zlib.crc32(body.encode("ascii")).to_bytes(4, "big"))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
