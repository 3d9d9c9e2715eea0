"""Routing rules: the first rule whose conditions a request meets decides where it goes.

Owns RoutingFacts, which rules look at and which are computed on first use, and the conditions. Does not know variants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, tzinfo
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.config.routing_section import DAYS, RuleConditions, RuleConfig
from headrace.gateway.language_detection import language_of
from headrace.gateway.routing.complexity import WEIGHTS, complexity
from headrace.gateway.serving.exchange import Exchange

STANDARD: Final = "standard"  # the profile of requests that name no profile
_HOURS: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")

Test = Callable[["RoutingFacts"], bool]


class RoutingFacts:
    """The properties of one request that rules test."""

    def __init__(self, exchange: Exchange, wall: Callable[[], float], zone: tzinfo, weights: Path = WEIGHTS) -> None:
        """`wall`: the wall clock, in seconds since 1970. `weights`: file of the complexity classifier."""
        self.exchange = exchange
        self.text_request = exchange.text_request
        self._wall = wall
        self._zone = zone
        self._weights = weights

    @property
    def model(self) -> str:
        return self.text_request.model

    @property
    def surface(self) -> str:
        return self.exchange.effective_surface

    @property
    def tokens(self) -> int:
        return self.exchange.prompt_tokens

    @property
    def tools(self) -> bool:
        return bool(self.text_request.tools) and self.text_request.choosing != "none"

    @property
    def json(self) -> bool:
        grammar = self.text_request.grammar
        return grammar is not None and grammar.kind in ("json_object", "json_schema")

    @cached_property
    def characters(self) -> int:
        text_request = self.text_request
        if text_request.messages is not None:
            return sum(len(message.get("content") or "") for message in text_request.messages)
        return sum(len(prompt) for prompt in text_request.prompts or () if isinstance(prompt, str))

    @cached_property
    def complexity(self) -> float:
        return complexity(self.text_request, self._weights)

    @cached_property
    def language(self) -> str:
        return language_of(last_user_text(self.text_request.messages, self.text_request.prompts))

    @cached_property
    def now(self) -> datetime:
        return datetime.fromtimestamp(self._wall(), self._zone)


def last_user_text(messages: Sequence[Mapping[str, Any]] | None, prompts: Sequence[str | list[int]] | None) -> str:
    """Return the last user message, or the first prompt that is a text."""
    for message in reversed(messages or ()):
        if message["role"] == "user":
            return message.get("content") or ""
    return next((prompt for prompt in prompts or () if isinstance(prompt, str)), "")


class Rule(msgspec.Struct, frozen=True):
    config: RuleConfig
    tests: tuple[Test, ...]  # cheap ones first

    @classmethod
    def of(cls, config: RuleConfig) -> Rule:
        return cls(config, tuple(_tests(config.when)))

    def matches(self, facts: RoutingFacts) -> bool:
        return all(test(facts) for test in self.tests)


def first_match(rules: Sequence[Rule], facts: RoutingFacts) -> Rule | None:
    for rule in rules:
        if rule.matches(facts):
            return rule
    return None


def _tests(when: RuleConditions) -> list[Test]:
    tests: list[Test] = []
    if when.models:
        models = frozenset(when.models)
        tests.append(lambda facts: facts.model in models)
    else:
        tests.append(lambda facts: "@" not in facts.model)  # a request that names a variant gets it
    profiles = frozenset(when.profiles) or frozenset((STANDARD,))
    tests.append(lambda facts: facts.text_request.profile in profiles)
    if when.surfaces:
        surfaces = frozenset(when.surfaces)
        tests.append(lambda facts: facts.surface in surfaces)
    if when.tenants:
        tenants = frozenset(when.tenants)
        tests.append(lambda facts: facts.exchange.caller.tenant in tenants)
    if when.tags:
        tags = tuple(when.tags.items())
        tests.append(lambda facts: all(_has_tag(facts.text_request.metadata, *tag) for tag in tags))
    for expected, test in ((when.tools, _has_tools), (when.json, _has_json), (when.streamed, _is_streamed)):
        if expected is not None:
            tests.append(_equals(test, expected))
    tests += _between(lambda facts: facts.tokens, when.least_tokens, when.most_tokens)
    tests += _between(lambda facts: facts.characters, when.least_characters, when.most_characters)
    if when.days:
        days = frozenset(map(DAYS.index, when.days))
        tests.append(lambda facts: facts.now.weekday() in days)
    if when.hours:
        hours = tuple(map(parse_hours, when.hours))
        tests.append(lambda facts: any(_within(facts.now.hour * 60 + facts.now.minute, *each) for each in hours))
    if when.languages:
        languages = frozenset(when.languages)
        tests.append(lambda facts: facts.language in languages)
    tests += _between(lambda facts: facts.complexity, when.least_complexity, when.most_complexity)
    return tests


def parse_hours(hours: str) -> tuple[int, int]:
    """Return the first and last minute of the day; "22:00-06:00" spans midnight. ValueError for other texts."""
    match = _HOURS.fullmatch(hours)
    if match is None:
        raise ValueError(f"Invalid hours: {hours}")
    begin_hour, begin_minute, end_hour, end_minute = map(int, match.groups())
    begin, end = begin_hour * 60 + begin_minute, end_hour * 60 + end_minute
    if end > 24 * 60 or begin == end:
        raise ValueError(f"Invalid hours: {hours}")
    return begin, end


def _within(minute: int, begin: int, end: int) -> bool:
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def _between(value: Callable[[RoutingFacts], float], least: float | None, most: float | None) -> list[Test]:
    tests: list[Test] = []
    if least is not None:
        tests.append(lambda facts: value(facts) >= least)
    if most is not None:
        tests.append(lambda facts: value(facts) <= most)
    return tests


def _equals(test: Test, expected: bool) -> Test:
    return lambda facts: test(facts) == expected


def _has_tools(facts: RoutingFacts) -> bool:
    return facts.tools


def _has_json(facts: RoutingFacts) -> bool:
    return facts.json


def _is_streamed(facts: RoutingFacts) -> bool:
    return facts.text_request.stream


def _has_tag(metadata: Mapping[str, str], key: str, expected: str) -> bool:
    value = metadata.get(key)
    return value is not None and expected in ("*", value)
