"""Outlines of chats: a chat joined from an outline has the text that the sandbox renders."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.models.model_folder import BUNDLED, open_model
from headrace.models.text.chat_template import ChatTemplate
from headrace.models.text.template_bounds import RenderBudget, TemplateBounds
from headrace.models.text.template_outline import Outline, Place, trace, tracing_sandbox
from headrace.models.text.template_sandbox import sandbox
from tests.models.text.test_chat_template import CHATML, GEMMA, LLAMA, MISTRAL, SPECIAL

THINKING = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not (message.content.startswith('<tool_response>')) %}
        {%- set ns.last = (messages|length - 1) - loop.index0 %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {{- 'cut:' ~ message.content.split('</think>')[-1] }}
    {%- elif message.content %}
        {{- '<|' ~ message.role ~ loop.index ~ '|>' ~ message.content.strip() ~ '|' }}
    {%- endif %}
{%- endfor %}
{%- set kept %}{{ messages[0].content }}{%- endset %}
{{- kept | trim }}{{ ns.last }}{{ 'no' if enable_thinking is defined and enable_thinking is false }}
"""
MINI = open_model(BUNDLED / "mini").tokenizer.template
assert MINI is not None
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "thinking": THINKING,
    "mini": MINI.source,
}

TEXTS = st.one_of(
    st.sampled_from(["", " ", "Hi", " a\n", "<tool_response>x", "x</think> y", "no", "<think>", "\U000f0000"]),
    st.text(max_size=8),
)


def outline_of(source: str, roles: list[str], contents: list[str]) -> Outline | None:
    values: dict[str, Any] = {**SPECIAL, "tools": None, "strftime_now": datetime(2026, 11, 24).strftime}
    code, _ = sandbox().prepare(source)
    budget = RenderBudget(TemplateBounds(), 100)
    return trace(tracing_sandbox().template(code), values, roles, contents, budget)


def chat(roles: list[str], contents: list[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40)
@given(
    roles=st.sampled_from(
        [["user"], ["system", "user"], ["user", "assistant", "user"], ["system", "user", "assistant", "user"]]
    ),
    contents=st.lists(st.lists(TEXTS, min_size=4, max_size=4), min_size=3, max_size=6),
    thinking=st.sampled_from([{}, {"enable_thinking": False}, {"enable_thinking": True}]),
)
def test_a_template_that_knows_outlines_writes_what_a_new_one_writes(
    name: str, roles: list[str], contents: list[list[str]], thinking: dict[str, Any]
) -> None:
    known = KNOWN[name]
    for each in contents:
        messages = chat(roles, each[: len(roles)])
        try:
            expected = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL, now=at_noon).render(messages, **thinking)
        except RequestError:
            with pytest.raises(RequestError):
                known.render(messages, **thinking)
            continue
        assert known.render(messages, **thinking) == expected


def at_noon() -> datetime:
    return datetime(2026, 11, 24, 12)


KNOWN = {name: ChatTemplate(source, special_tokens=SPECIAL, now=at_noon) for name, source in TEMPLATES.items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_templates_of_known_families_have_outlines(name: str) -> None:
    assert outline_of(TEMPLATES[name], ["user", "assistant", "user"], ["Hi", "Hello", "Bye"]) is not None


def test_an_outline_says_where_contents_are_written() -> None:
    found = outline_of(CHATML, ["system", "user"], [" Be brief. ", "Hi"])
    assert found is not None
    assert found.parts == (
        "<|im_start|>system\n",
        Place(0, True),
        "<|im_end|>\n<|im_start|>user\n",
        Place(1, True),
        "<|im_end|>\n",
    )
    assert found.text(["  Be long.", "\nBye"]) == (
        "<|im_start|>system\nBe long.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )


def test_an_outline_fits_only_contents_with_the_same_answers() -> None:
    source = "{{ 'long' if 'x' in messages[0].content else messages[0].content }}"
    found = outline_of(source, ["user"], ["abc"])
    assert found is not None
    assert found.fits(["def"], str)
    assert not found.fits(["xyz"], str)


def test_an_outline_ends_with_its_day() -> None:
    days = [datetime(2026, 11, 24), datetime(2026, 11, 24), datetime(2026, 11, 25)]
    template = ChatTemplate(
        "{{ strftime_now('%d') }}{{ messages[0].content }}",
        special_tokens={},
        now=lambda: days.pop(0) if len(days) > 1 else days[0],
    )
    texts = {template.render(chat(["user"], [each])) for each in ("a", "b", "c", "d")}
    assert {text[-1] for text in texts} == {"a", "b", "c", "d"}
    assert template.render(chat(["user"], ["e"])) == "25e"


@pytest.mark.parametrize(
    "expression",
    [
        "messages[0].content | length",
        "messages[0].content | upper",
        "messages[0].content[0]",
        "messages[0].content.split()[0]",
        "messages[0].content * 2",
        "'%s' % messages[0].content",
        "'{}'.format(messages[0].content)",
        "messages[0].content in ['a', 'b']",
        "messages[0].content in 'abc'",
        "messages[0].content < 'b'",
        "messages[0].content == messages[1].content",
        "messages | tojson",
        "messages | map(attribute='content') | join(',')",
        "messages | string",
        "{messages[0].content: 1}",
        "'abc'.startswith(messages[0].content)",
        "'abc'.replace('a', messages[0].content)",
        "messages[0].content is iterable",
        "messages[0].content is eq('a')",
        "'a' is eq(messages[0].content)",
        "messages[0].content | default('x')",
        "(messages[0].content + 'x') | trim",
        "('x' ~ messages[0].content) == 'xa'",
        "messages[0].content.strip('x')",
        "messages[0].content | int",
        "messages | sort(attribute='content') | first",
        "messages | groupby('content') | list | length",
        "messages | selectattr('content', 'equalto', 'a') | list | length",
        "messages[0]['content']['text']",
        "(messages[0] == {'role': 'user', 'content': 'a'})",
        "messages[0].content * 0 or 'x'",
        "[messages[0].content] * 100",
        "messages[0].content + messages[0].content + messages[0].content + messages[0].content + messages[0].content",
    ],
)
def test_what_looks_at_contents_in_another_way_has_no_wrong_outline(expression: str) -> None:
    source = "{{ " + expression + " }}"
    template = ChatTemplate(source, special_tokens={})
    for contents in (["a", "b"], ["b", "a"], ["a", "a"], [" a", "c"], ["ab", "abc"], ["1", "2"]):
        messages = chat(["user", "user"], contents)
        assert template.render(messages) == ChatTemplate(source, special_tokens={}).render(messages)


def test_a_template_that_repeats_a_content_is_bounded_by_the_sandbox() -> None:
    source = "{% for n in range(1000) %}{{ messages[0].content }}{% endfor %}"
    assert outline_of(source, ["user"], ["a"]) is None
