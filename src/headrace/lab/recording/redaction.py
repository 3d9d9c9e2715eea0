"""Replaces secrets in texts before they are written: API keys, e-mail addresses, card numbers, your own patterns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

from headrace.config.lab.recording_section import RecordingConfig, RedactionRule

_KEYS: Final = re.compile(
    r"""
    -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----[\s\S]{0,8192}?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|$)
    | \beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{4,}                 # JSON web tokens
    | \b(?:sk|pk|rk|mr)-[A-Za-z0-9_-]{16,}                 # OpenAI, Anthropic, Stripe, this server
    | \b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}
    | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_\w{20,}
    | \bglpat-[\w-]{16,} | \bxox[abeoprs]-[\w-]{10,} | \bhf_[A-Za-z0-9]{20,} | \bnpm_[A-Za-z0-9]{30,}
    | \bA(?:KIA|SIA)[0-9A-Z]{16}\b | \bAIza[\w-]{35}
    | (?<=Bearer\ )[\w.~+/=-]{16,} | (?<=bearer\ )[\w.~+/=-]{16,}
    """,
    re.VERBOSE,
)
# A value beside its name: password = ..., "api_key": "...". The name stays.
_NAMED: Final = re.compile(
    r"""(\b[\w-]{0,40}(?:api[_-]?key|secret|token|passw(?:or)?d|credential)s?["']?\s{0,3}[:=]\s{0,3}["']?)"""
    r"""([^\s"',;]{8,})""",
    re.IGNORECASE,
)
_EMAIL: Final = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*\.[A-Za-z]{2,24}\b")
_CARD: Final = re.compile(r"(?<![\d.])\d(?:[ -]?\d){12,18}(?![\d])")


def _redact_keys(text: str) -> str:
    text = _KEYS.sub("[redacted key]", text)
    return _NAMED.sub(r"\1[redacted key]", text)


def _redact_emails(text: str) -> str:
    return _EMAIL.sub("[redacted email]", text) if "@" in text else text


def _redact_cards(text: str) -> str:
    return _CARD.sub(lambda found: "[redacted card]" if passes_luhn(found[0]) else found[0], text)


def passes_luhn(number: str) -> bool:
    """Check the last digit of a card number; other characters are skipped."""
    digits = [int(each) for each in reversed(number) if each.isdigit()]
    doubled = (2 * digit - 9 * (digit > 4) for digit in digits[1::2])
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


_RULES: Final[Mapping[RedactionRule, Callable[[str], str]]] = {
    "keys": _redact_keys,
    "emails": _redact_emails,
    "cards": _redact_cards,
}


class Redactor:
    def __init__(self, rules: Iterable[RedactionRule], patterns: Iterable[str] = ()) -> None:
        """Raise re.error for an invalid pattern."""
        self._rules = [_RULES[rule] for rule in rules]
        self._patterns = [re.compile(pattern) for pattern in patterns]

    @classmethod
    def from_config(cls, config: RecordingConfig) -> Redactor:
        return cls(config.redact, config.redact_patterns)

    def text(self, text: str) -> str:
        for rule in self._rules:
            text = rule(text)
        for pattern in self._patterns:
            text = pattern.sub("[redacted]", text)
        return text

    def value(self, value: Any) -> Any:
        """Redact every text within a JSON value, its keys excepted."""
        match value:
            case str():
                return self.text(value)
            case dict():
                return {key: self.value(each) for key, each in cast(dict[str, Any], value).items()}
            case list() | tuple():
                return [self.value(each) for each in cast(list[Any], value)]
            case _:
                return value
