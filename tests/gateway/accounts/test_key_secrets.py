"""Secrets of keys: their form, and finding them in other text."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.accounts.key_secrets import HIDDEN, hidden, holds_secret, last_four, make_secret, secrets_in


def test_a_secret_has_its_form_and_no_two_are_the_same() -> None:
    found = {make_secret() for _ in range(1000)}
    assert len(found) == 1000
    for secret in found:
        assert re.fullmatch(r"mr-[A-Za-z0-9_-]{49}", secret)
        assert [match[1] for match in secrets_in(secret)] == [secret]
        assert last_four(secret) == secret[-4:]


def test_a_text_of_the_form_with_another_checksum_is_none() -> None:
    secret = make_secret()
    for place in (3, 20, 45, 46, 50):
        changed = secret[:place] + ("A" if secret[place] != "A" else "B") + secret[place + 1 :]
        assert not holds_secret(changed)
    assert not holds_secret(secret[:-1])
    assert not holds_secret("mr-" + "A" * 49)


@settings(deadline=None)
@given(before=st.text(max_size=60), after=st.text(max_size=60))
def test_a_secret_is_found_and_hidden_whatever_stands_around_it(before: str, after: str) -> None:
    secret = make_secret()
    text = before + secret + after
    assert secret in {match[1] for match in secrets_in(text)}
    assert secret not in hidden(text)
    assert HIDDEN in hidden(text)


@settings(deadline=None)
@given(st.text())
def test_a_text_without_a_secret_stays_as_it_is(text: str) -> None:
    assert hidden(text) == text


def test_several_are_hidden_also_where_one_follows_another() -> None:
    one, other = make_secret(), make_secret()
    assert hidden(f"{one}{other} and mr-{one}") == f"{HIDDEN}{HIDDEN} and mr-{HIDDEN}"
