"""Model names with tags, as Ollama's clients write them."""

from __future__ import annotations

import pytest

from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.server.api.ollama.model_tags import find_name, tag_of
from tests.support.dialect_exchanges import NoEngine, tokenizer

NAMES = ("mini", "mini@int4", "other")
ALIASES = {"llama3:8b": "mini", "gpt": "other"}


def fleet() -> Fleet:
    served = {name: ServedVariant(name=name, engine=NoEngine(), tokenizer=tokenizer(), context=2048) for name in NAMES}
    return Fleet(served, ALIASES, "mini")


@pytest.mark.parametrize(
    ("tagged", "name"),
    [
        ("mini", "mini"),
        ("mini:latest", "mini"),
        ("mini:int4", "mini@int4"),
        ("mini@int4", "mini@int4"),
        ("llama3:8b", "llama3:8b"),
        ("llama3:8b:latest", "llama3:8b"),
        ("gpt:latest", "gpt"),
        ("", ""),
        ("mini:int8", "mini:int8"),
        ("nobody:latest", "nobody:latest"),
        (":latest", ":latest"),
    ],
)
def test_a_tag_finds_its_model(tagged: str, name: str) -> None:
    assert find_name(Caller(), fleet(), tagged) == name


@pytest.mark.parametrize("name", [*NAMES, *ALIASES])
def test_a_listed_name_finds_the_same_model(name: str) -> None:
    found = fleet()
    assert found.find(find_name(Caller(), found, tag_of(name))) is found.find(name)


def test_names_are_listed_with_a_tag() -> None:
    assert [tag_of(name) for name in NAMES] == ["mini:latest", "mini:int4", "other:latest"]
    assert tag_of("llama3:8b") == "llama3:8b"
    assert tag_of("mini", latest=False) == "mini"
