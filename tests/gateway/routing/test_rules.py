"""Rules, languages and the complexity score: what a request is like, and which rule holds first."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.routing_section import RuleConditions, RuleConfig
from headrace.engine.interface.grammar_spec import Grammar
from headrace.gateway.language_detection import LANGUAGES, language_of
from headrace.gateway.requests.text_request import TextRequest, Tool
from headrace.gateway.routing.complexity import FEATURES, classifier, complexity, features
from headrace.gateway.routing.rules import RoutingFacts, Rule, first_match, parse_hours
from tests.support.scripted_answers import asked_for, exchange_of

WEDNESDAY = datetime(2026, 11, 18, 14, 30, tzinfo=UTC).timestamp()


def facts_of(
    asked: TextRequest | None = None, *, tokens: int = 100, wall: float = WEDNESDAY, zone: str = "UTC"
) -> RoutingFacts:
    exchange = exchange_of(asked)
    exchange.prompt_tokens = tokens
    return RoutingFacts(exchange, lambda: wall, ZoneInfo(zone))


def holds(when: RuleConditions, facts: RoutingFacts | None = None) -> bool:
    return Rule.of(RuleConfig(name="rule", when=when, variant="mini")).matches(facts or facts_of())


TOOLS = asked_for(tools=(Tool("look_up"),))
JSON = asked_for(grammar=Grammar("json_schema", "{}"))
CASES: list[tuple[RuleConditions, RoutingFacts, bool]] = [
    (RuleConditions(), facts_of(), True),
    (RuleConditions(least_tokens=100, most_tokens=100), facts_of(), True),
    (RuleConditions(least_tokens=101), facts_of(), False),
    (RuleConditions(most_tokens=99), facts_of(), False),
    (RuleConditions(least_characters=6), facts_of(asked_for("Hello")), False),
    (RuleConditions(most_characters=5), facts_of(asked_for("Hello")), True),
    (RuleConditions(surfaces=("chat",)), facts_of(), True),
    (RuleConditions(surfaces=("voice", "agent")), facts_of(asked_for(surface="agent")), True),
    (RuleConditions(surfaces=("voice",)), facts_of(), False),
    (RuleConditions(profiles=("fast",)), facts_of(asked_for(profile="fast")), True),
    (RuleConditions(profiles=("fast",)), facts_of(), False),
    (RuleConditions(), facts_of(asked_for(profile="golden")), False),
    (RuleConditions(tenants=("acme",)), facts_of(), True),
    (RuleConditions(tenants=("globex",)), facts_of(), False),
    (RuleConditions(tags={"team": "search"}), facts_of(asked_for(metadata={"team": "search"})), True),
    (RuleConditions(tags={"team": "*"}), facts_of(asked_for(metadata={"team": "any"})), True),
    (RuleConditions(tags={"team": "*"}), facts_of(), False),
    (RuleConditions(tags={"team": "search", "kind": "*"}), facts_of(asked_for(metadata={"team": "search"})), False),
    (RuleConditions(models=("mini",)), facts_of(), True),
    (RuleConditions(models=("auto",)), facts_of(), False),
    (RuleConditions(), facts_of(asked_for(model="mini@int4")), False),
    (RuleConditions(models=("mini@int4",)), facts_of(asked_for(model="mini@int4")), True),
    (RuleConditions(tools=True), facts_of(TOOLS), True),
    (RuleConditions(tools=True), facts_of(asked_for(tools=(Tool("look_up"),), choosing="none")), False),
    (RuleConditions(tools=False), facts_of(TOOLS), False),
    (RuleConditions(json=True), facts_of(JSON), True),
    (RuleConditions(json=True), facts_of(asked_for(grammar=Grammar("regex", "a"))), False),
    (RuleConditions(json=False), facts_of(), True),
    (RuleConditions(streamed=True), facts_of(asked_for(stream=True)), True),
    (RuleConditions(streamed=True), facts_of(), False),
    (RuleConditions(days=("wed",)), facts_of(), True),
    (RuleConditions(days=("sat", "sun")), facts_of(), False),
    (RuleConditions(hours=("14:00-15:00",)), facts_of(), True),
    (RuleConditions(hours=("22:00-06:00", "09:00-12:00")), facts_of(), False),
    (RuleConditions(hours=("15:00-16:00",)), facts_of(zone="Europe/Berlin"), True),
    (RuleConditions(hours=("22:00-06:00",)), facts_of(wall=WEDNESDAY + 9 * 3600), True),
    (RuleConditions(hours=("22:00-06:00",)), facts_of(wall=WEDNESDAY + 15 * 3600), True),
    (
        RuleConditions(languages=("de",)),
        facts_of(asked_for("Wie viele Räder hat die Mühle und wo ist der Stein?")),
        True,
    ),
    (
        RuleConditions(languages=("en",)),
        facts_of(asked_for("Wie viele Räder hat die Mühle und wo ist der Stein?")),
        False,
    ),
    (RuleConditions(least_complexity=0.0), facts_of(), True),
    (RuleConditions(most_complexity=0.0), facts_of(), False),
]


@pytest.mark.parametrize(("when", "facts", "held"), CASES)
def test_a_condition_holds_where_it_says(when: RuleConditions, facts: RoutingFacts, held: bool) -> None:
    assert holds(when, facts) == held


def test_all_that_is_said_must_hold() -> None:
    assert holds(RuleConditions(surfaces=("chat",), least_tokens=50, tools=False))
    assert not holds(RuleConditions(surfaces=("chat",), least_tokens=50, tools=True))


def test_the_first_rule_that_holds_has_the_word() -> None:
    rules = [
        Rule.of(RuleConfig(name=name, when=when, variant="mini"))
        for name, when in (
            ("never", RuleConditions(tools=True)),
            ("first", RuleConditions()),
            ("second", RuleConditions()),
        )
    ]
    found = first_match(rules, facts_of())
    assert found is not None
    assert found.config.name == "first"
    assert first_match(rules[:1], facts_of()) is None


def test_what_no_rule_asks_for_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("nobody asked")

    for name in ("complexity", "language_of"):
        monkeypatch.setattr(f"headrace.gateway.routing.rules.{name}", never)
    assert holds(RuleConditions(surfaces=("chat",), most_tokens=1000))
    assert not holds(RuleConditions(tools=True, languages=("en",), least_complexity=0.1))


@pytest.mark.parametrize("hours", ["", "8:00-9:00", "08:00", "08:00-08:00", "24:00-01:00", "01:00-24:30", "08-09"])
def test_hours_that_are_none_are_refused(hours: str) -> None:
    with pytest.raises(ValueError, match="Invalid hours"):
        parse_hours(hours)


def test_hours_may_go_to_the_end_of_the_day() -> None:
    assert parse_hours("18:00-24:00") == (18 * 60, 24 * 60)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("How many wheels does the mill have, and what is the stone for?", "en"),
        ("Wie viele Räder hat die Mühle, und wozu ist der Stein da?", "de"),
        ("Combien de roues a le moulin, et quelle est la pierre pour vous ?", "fr"),
        ("¿Cuál es el precio de los molinos y cómo están hechos?", "es"),
        ("Qual è il prezzo del mulino e come sono fatte le ruote?", "it"),
        ("Quais são os preços dos moinhos, e como você está?", "pt"),
        ("Hoeveel kost het wiel van de molen en wat is een steen?", "nl"),
        ("Сколько колёс там на мельнице?", "ru"),
        ("水車には車輪がいくつありますか", "ja"),
        ("磨坊有几个轮子", "zh"),
        ("방앗간에는 바퀴가 몇 개 있습니까", "ko"),
        ("كم عدد عجلات الطاحونة", "ar"),
        ("", ""),
        ("ok", ""),
        ("3 + 4 = 7", ""),
        ("xyzzy plugh", ""),
    ],
)
def test_a_language_is_told_by_its_commonest_words_or_its_script(text: str, language: str) -> None:
    assert language_of(text) == language
    assert not language or language in LANGUAGES


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300))
def test_no_text_has_a_language_that_there_is_not(text: str) -> None:
    assert language_of(text) in LANGUAGES | {""}


# Complexity


def test_a_score_is_between_nothing_and_one() -> None:
    for asked in (
        asked_for(""),
        asked_for("why " * 5000),
        TextRequest(model="", prompts=[[1, 2]]),
        TextRequest(model=""),
    ):
        assert 0.0 <= complexity(asked) <= 1.0


def test_the_weights_are_numbers_for_every_feature() -> None:
    assert set(classifier().weights) == set(FEATURES)
    assert all(abs(weight) < 100 for weight in classifier().weights.values())


@pytest.mark.parametrize(
    ("feature", "more"),
    [
        ("asked", lambda: asked_for("How many wheels turn in the mill by the river? " * 3)),
        ("system", lambda: asked_for(messages=[{"role": "system", "content": "Be brief."}, *HELLO])),
        ("question_words", lambda: asked_for("Where does it turn")),
        ("reasons", lambda: asked_for("Explain why")),
        ("constraints", lambda: asked_for("Only the exactly right one, without more")),
        ("digits", lambda: asked_for("17 of 19")),
        ("operators", lambda: asked_for("a + b = c")),
        ("code", lambda: asked_for("{a;}")),
        ("sources", lambda: asked_for("[1] The mill. [2] The river.")),
        ("lines", lambda: asked_for("one\ntwo\nthree")),
        ("turns", lambda: asked_for(messages=[*HELLO, {"role": "assistant", "content": None}, *HELLO])),
        ("tools", lambda: TOOLS),
        ("formatted", lambda: JSON),
    ],
)
def test_a_feature_sees_what_it_is_for(feature: str, more: Callable[[], TextRequest]) -> None:
    place = FEATURES.index(feature)
    assert features(more())[place] > features(asked_for("Hello"))[place]


HELLO = [{"role": "user", "content": "Hello"}]


def test_of_a_long_text_only_its_ends_are_looked_at() -> None:
    plain = asked_for("a " * 5000)
    within = asked_for("a " * 2500 + "why {} 17 " + "a " * 2495)
    assert features(within)[2:] == features(plain)[2:]
