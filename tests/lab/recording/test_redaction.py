"""Secrets are replaced in every text, and what only looks like one stays."""

from __future__ import annotations

import re

import pytest

from headrace.gateway.accounts.key_secrets import make_secret
from headrace.lab.recording.redaction import Redactor, passes_luhn

ALL = Redactor(("keys", "emails", "cards"))


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-Abcd1234Efgh5678Ijkl",
        pytest.param(make_secret(), id="own"),
        "AKIA" + "IOSFODNN7EXAMPLE",
        "ghp_" + "0123456789abcdefghijABCDEFGHIJ",
        "xoxb-1234567890-abcdefgh",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END PRIVATE KEY-----",
    ],
)
def test_keys_are_replaced_wherever_they_stand(secret: str) -> None:
    found = ALL.text(f"Use {secret} please")
    assert secret not in found
    assert found == "Use [redacted key] please"


def test_a_value_beside_its_name_is_replaced_and_the_name_stays() -> None:
    assert ALL.text('"api_key": "hunter2hunter2"') == '"api_key": "[redacted key]"'
    assert ALL.text("DB_PASSWORD=correct-horse") == "DB_PASSWORD=[redacted key]"
    assert ALL.text("Authorization: Bearer abcdefghijklmnop123") == "Authorization: Bearer [redacted key]"


def test_mail_addresses_are_replaced() -> None:
    assert ALL.text("Write to ada.lovelace+x@example.co.uk.") == "Write to [redacted email]."
    assert ALL.text("@ada and ada@home are none") == "@ada and ada@home are none"


@pytest.mark.parametrize("card", ["4111 1111 1111 1111", "5500-0000-0000-0004", "378282246310005"])
def test_card_numbers_are_replaced(card: str) -> None:
    assert ALL.text(f"Card {card}, please") == "Card [redacted card], please"


@pytest.mark.parametrize("number", ["4111 1111 1111 1112", "1234567890123", "41111111111111111111111"])
def test_other_numbers_stay(number: str) -> None:
    assert ALL.text(f"Order {number}") == f"Order {number}"


def test_luhn() -> None:
    assert passes_luhn("79927398713")
    assert not passes_luhn("79927398710")


def test_own_patterns_are_applied_within_values() -> None:
    found = Redactor((), [r"\bEMP-\d+\b"]).value({"a": ["EMP-17", {"b": "is EMP-18."}], "c": 5, "EMP-1": None})
    assert found == {"a": ["[redacted]", {"b": "is [redacted]."}], "c": 5, "EMP-1": None}
    with pytest.raises(re.error):
        Redactor((), ["("])


def test_without_rules_nothing_changes() -> None:
    assert Redactor(()).text("sk-proj-Abcd1234Efgh5678Ijkl a@b.example") == "sk-proj-Abcd1234Efgh5678Ijkl a@b.example"


def test_long_texts_take_linear_time() -> None:
    text = "a" * 200_000 + " 1" * 100_000 + "password" * 10_000
    assert len(ALL.text(text)) > 0
