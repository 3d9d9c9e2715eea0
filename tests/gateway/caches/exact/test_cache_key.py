"""What makes two requests the same request."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import UNUSED_WHEN_GREEDY, SamplingParams
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.cache_key import OF_THE_PROMPT, WITHOUT_EFFECT, CacheKey, cache_key_for
from headrace.gateway.output.reasoning import REASONING_FORMATS
from headrace.gateway.requests.text_request import PipelineOptions, SourceText, TextRequest, Tool
from tests.support.stores.exact_caches import asked, served

PROMPT = [(1, 2, 3)]
DRAWN = SamplingParams(temperature=0.7, seed=7)

# Another value for every field that matters. A field that is missing here was added later: either it belongs here, or
# it makes no difference to an answer and belongs to WITHOUT_EFFECT with the reason.
OTHER_ASKED: dict[str, Any] = {
    "tools": (Tool("weather", "Tells the weather.", {"type": "object"}),),
    "choosing": "required",
    "only_tool": "weather",
    "allowed_tools": ("weather",),
    "parallel_calls": False,
    "grammar": Grammar("regex", "[0-9]+"),
    "max_tokens": 5,
    "min_tokens": 2,
    "stop": ("\n",),
    "stop_ids": frozenset({9}),
    "ignore_eos": True,
    "n": 2,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "echo": True,
    "begun": "Hello",
    "profile": "fast",
}
OTHER_SAMPLING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {3: 1.0},
    "seed": 8,
    "logprobs": 0,
}
OTHER_WITHOUT_EFFECT: dict[str, Any] = {
    "grammar_of": "response_format",
    "model": "mini@int4",
    "stream": True,
    "include_usage": True,
    "continuous_usage": True,
    "show_reasoning": False,
    "prediction": "Hello",
    "deadline_s": 1.0,
    "surface": "voice",
    "priority": 3,
    "speculate": False,
    "cache": "off",
    "seeded": True,
    "sources": (SourceText("mill", "The mill is old."),),
    "overflow": "drop",
    "rewrite": "steady",
    "degrade": "off",
    "user": "somebody",
    "metadata": {"order": "17"},
    "pipeline": PipelineOptions(detail=True),
}


def key(changed: TextRequest | None = None, **options: Any) -> bytes:
    given: dict[str, Any] = {"tenant": "a", "served": served(), "prompts": PROMPT, "seeded": True, **options}
    return found(changed or asked(sampling=DRAWN), **given).digest


def found(changed: TextRequest, **options: Any) -> CacheKey:
    cache_key = cache_key_for(text_request=changed, **options)
    assert cache_key is not None
    return cache_key


@pytest.mark.parametrize("field", TextRequest.__struct_fields__)
def test_every_field_of_a_request_is_in_the_key_or_in_a_list_with_its_reason(field: str) -> None:
    plain = asked(sampling=DRAWN)
    if field == "sampling" or field in OF_THE_PROMPT:
        return  # below
    if field in WITHOUT_EFFECT:
        assert WITHOUT_EFFECT[field]
        assert key(plain.but(**{field: OTHER_WITHOUT_EFFECT[field]})) == key(plain)
    else:
        assert key(plain.but(**{field: OTHER_ASKED[field]})) != key(plain)


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_every_field_of_sampling_is_in_the_key_of_a_drawn_answer(field: str) -> None:
    given: dict[str, Any] = {"temperature": 0.7, "seed": 7, field: OTHER_SAMPLING[field]}
    changed = SamplingParams(**given)
    assert key(asked(sampling=changed)) != key(asked(sampling=DRAWN))


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_the_likeliest_tokens_do_not_depend_on_how_others_would_be_drawn(field: str) -> None:
    if field == "temperature":
        return
    greedy = asked(sampling=SamplingParams())
    changed = asked(sampling=SamplingParams(**{field: OTHER_SAMPLING[field]}))
    for seeded in (True, False):
        assert (key(changed, seeded=seeded) == key(greedy, seeded=seeded)) is (field in UNUSED_WHEN_GREEDY)


def test_the_lists_name_fields_that_there_are() -> None:
    there = set(TextRequest.__struct_fields__)
    assert {*WITHOUT_EFFECT, *OF_THE_PROMPT} <= there
    assert set(UNUSED_WHEN_GREEDY) <= set(SamplingParams.__struct_fields__)
    assert {*OTHER_ASKED, *WITHOUT_EFFECT, *OF_THE_PROMPT} == there


def test_who_asks_and_what_answers_is_in_the_key() -> None:
    keys = [
        key(),
        key(tenant="b"),
        key(policy="2"),
        key(prompts=[(1, 2, 4)]),
        key(served=served(name="mini@golden")),
        key(served=served(fingerprint="fp_2")),
        key(served=served(max_tokens=100)),
        key(served=served(context=1024)),
        key(served=served(reasoning=REASONING_FORMATS["think"])),
        key(asked(sampling=DRAWN).but(messages=None, prompts=["Hello"])),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(each) == 32 for each in keys)


def test_tokens_of_one_prompt_are_not_those_of_another() -> None:
    assert key(prompts=[(1, 2), (3,)]) != key(prompts=[(1,), (2, 3)]) != key(prompts=[(1, 2, 3)])


def test_a_seed_that_nobody_gave_is_no_part_of_the_key() -> None:
    one, other = asked(sampling=DRAWN), asked(sampling=SamplingParams(temperature=0.7, seed=99))
    assert key(one, seeded=False) == key(other, seeded=False)
    assert key(one, seeded=True) != key(other, seeded=True)
    options: dict[str, Any] = {"tenant": "a", "served": served(), "prompts": PROMPT}
    assert found(one, seeded=True, **options).repeatable
    assert not found(one, seeded=False, **options).repeatable
    assert found(asked(sampling=SamplingParams(seed=4)), seeded=False, **options).repeatable


def test_what_has_no_order_has_none_in_the_key_and_what_has_one_keeps_it() -> None:
    biased = [asked(sampling=SamplingParams(logit_bias=bias)) for bias in ({1: 1.0, 2: 2.0}, {2: 2.0, 1: 1.0})]
    assert key(biased[0]) == key(biased[1])
    stopping = [asked(stop_ids=frozenset(ids)) for ids in ([8, 16, 1], [1, 16, 8])]
    assert key(stopping[0]) == key(stopping[1])
    # The order of a schema's properties is the order in which they are written.
    tools = [asked(tools=(Tool("t", None, names),)) for names in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    assert key(tools[0]) != key(tools[1])


def test_without_tokens_the_messages_are_in_the_key() -> None:
    plain = asked(sampling=DRAWN)
    others = (
        plain.but(messages=[{"role": "user", "content": "Hello!"}]),
        plain.but(template={"enable_thinking": False}),
        plain.but(think=False),
        plain.but(messages=None, prompts=["Hello"]),
        plain.but(messages=None, prompts=["Hello", "there"]),
    )
    keys = {key(each, prompts=None) for each in (plain, *others)}
    assert len(keys) == len(others) + 1
    assert found(others[-1], tenant="a", served=served(), prompts=None, seeded=True).choices == 2


def test_choices_are_those_of_all_prompts() -> None:
    cache_key = found(asked(n=3), tenant="a", served=served(), prompts=[(1,), (2,)], seeded=False)
    assert (cache_key.n, cache_key.choices) == (3, 6)


@pytest.mark.parametrize(
    "changes",
    [
        {"stop": ("\ud800",)},
        {"tools": (Tool("t", None, {"maximum": 2**70}),)},
        {"tools": (Tool("t", None, {"anything": object()}),)},
    ],
)
def test_what_cannot_be_written_down_has_no_key(changes: dict[str, Any]) -> None:
    assert (
        cache_key_for(tenant="a", served=served(), text_request=asked(**changes), prompts=PROMPT, seeded=False) is None
    )


def test_tags_are_a_part_of_the_key() -> None:
    tagged = [asked(metadata={"cache_tags": text, "other": "x"}) for text in ("pricing, docs", "docs,pricing,docs", "")]
    options: dict[str, Any] = {"tenant": "a", "served": served(), "prompts": PROMPT, "seeded": False}
    one, same, none = (found(each, **options) for each in tagged)
    assert one == same
    assert one.tags == ("docs", "pricing")
    assert none.tags == ()
    assert none.digest != one.digest


@pytest.mark.parametrize("text", ["a b", "-", "x" * 65, "a,,b", "ä", "a\nb", ",".join(map(str, range(9)))])
def test_wrong_tags_are_refused(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        key(asked(metadata={"cache_tags": text}))
    assert refused.value.parameter == "metadata.cache_tags"
    assert refused.value.status == 400
