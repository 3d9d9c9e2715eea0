"""What AesCipher seals is opened with its key and purpose only."""

from __future__ import annotations

import sys

import pytest

from headrace.aes_cipher import NONCE_BYTES, TAG_BYTES, AesCipher, DamagedError, MissingCipherError


def test_only_the_same_key_and_purpose_open_what_was_sealed() -> None:
    pytest.importorskip("cryptography")
    cipher = AesCipher(bytes(range(32)))
    sealed = cipher.seal(b"words", b"purpose")
    assert len(sealed) == NONCE_BYTES + len(b"words") + TAG_BYTES
    assert cipher.open(sealed, b"purpose") == b"words"
    assert cipher.seal(b"words", b"purpose") != sealed  # a new nonce
    for other, data, purpose in (
        (AesCipher(bytes(32)), sealed, b"purpose"),
        (cipher, sealed, b"another"),
        (cipher, sealed[:-1] + bytes([sealed[-1] ^ 1]), b"purpose"),
        (cipher, sealed[:NONCE_BYTES], b"purpose"),
        (cipher, b"", b"purpose"),
    ):
        with pytest.raises(DamagedError):
            other.open(data, purpose)


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(MissingCipherError, match=r"pip install 'headrace\[encryption\]'"):
        AesCipher(bytes(32))
