"""Prompts that were cut into tokens of late."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.gateway.caches.exact.tokenized_prompts import TokenizedPrompts
from headrace.gateway.requests.text_request import Tool
from headrace.gateway.serving.exchange import Caller, Exchange, Prompt
from headrace.models.text.tokenizer import Tokenizer
from tests.support.stores.exact_caches import asked, served


def of(tenant: str = "a", **changes: Any) -> Exchange:
    return Exchange(caller=Caller(tenant=tenant), text_request=asked(**changes), served=served())


def test_what_was_cut_is_found_again() -> None:
    prompts = TokenizedPrompts()
    name = prompts.name(of())
    assert name is not None
    assert prompts.find(name) is None
    prompts.keep(name, [Prompt((1, 2, 70_000), "the end")])
    assert prompts.find(name) == [Prompt((1, 2, 70_000), "the end")]


def test_all_that_a_prompt_is_made_of_tells_it_apart() -> None:
    prompts, tool = TokenizedPrompts(), Tool("weather")
    exchanges = [
        of(),
        of("b"),
        of(messages=[{"role": "user", "content": "Hello!"}]),
        of(tools=(tool,)),
        of(tools=(replace(tool, description="Tells it."),)),
        of(template={"date": "today"}),
        of(think=False),
    ]
    exchanges.append(replace(of(), served=served(name="mini@golden")))
    exchanges.append(replace(of(), served=replace(served(), fingerprint="fp_reloaded")))
    names = {prompts.name(each) for each in exchanges}
    assert len(names) == len(exchanges)
    assert None not in names
    # How it is answered makes no other prompt of it, and neither do tools that are not shown.
    assert prompts.name(of(max_tokens=5, stop=("x",))) == prompts.name(of())
    assert prompts.name(of(tools=(tool,), choosing="none")) == prompts.name(of(choosing="none"))


def test_what_cannot_be_written_down_and_what_has_no_messages_is_not_kept() -> None:
    prompts = TokenizedPrompts()
    assert prompts.name(of(messages=[{"role": "user", "content": "\ud800"}])) is None
    assert prompts.name(of(template={"a": object()})) is None
    assert prompts.name(of(messages=None, prompts=["Hello"])) is None


def test_a_prompt_that_tells_the_time_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = of()
    monkeypatch.setattr(Tokenizer, "uses_clock", True)
    assert TokenizedPrompts().name(exchange) is None


def test_it_keeps_to_its_bounds_and_drops_what_was_used_least() -> None:
    prompts = TokenizedPrompts(most=3, most_tokens=160)
    names = [bytes([number]) * 16 for number in range(5)]
    for name in names[:3]:
        prompts.keep(name, [Prompt((1,) * 10, "")])
    assert prompts.find(names[0]) is not None
    prompts.keep(names[3], [Prompt((1,) * 10, "")])
    assert [prompts.find(name) is not None for name in names] == [True, False, True, True, False]
    prompts.keep(names[4], [Prompt((1,) * 11, "")])  # one that is too long by itself
    assert (len(prompts), prompts.tokens) == (3, 30)
    several = TokenizedPrompts(most_tokens=160)
    for number in range(40):
        several.keep(bytes([number]) * 16, [Prompt((1,) * 10, "")])
    assert (len(several), several.tokens) == (16, 160)
