"""Chat templates: the same text as transformers; hostile ones cannot escape, loop or flood."""

from __future__ import annotations

import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import RequestError, TemplateError
from headrace.models.text.chat_template import ChatTemplate
from headrace.models.text.template_bounds import TemplateBounds
from headrace.models.text.user_text import UserText, plain

CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# System prompt, tools as JSON, tool calls, content in parts, a macro, namespaces and a date.
LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content if part.type == 'text' %}{{- part.text }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set ns = namespace(calls=0) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = text_of(messages[0].content) | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have access to these functions:\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- message.content | tojson if message.content is mapping else text_of(message.content) }}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- set ns.calls = ns.calls + 1 %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- generation %}{{- text_of(message.content) | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
{{- ns.calls ~ '/' ~ messages | selectattr('role', 'equalto', 'user') | list | length }}
"""

MISTRAL = """\
{%- set loop_messages = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}\
{% if loop.index > 90 %}{% break %}{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""

# Reasoning of earlier turns is cut off, from the last message backwards.
REASONING = """\
{%- set ns = namespace(last=messages|length - 1, multi=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi and message.role == "user" %}{%- set ns.multi = false %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
    {%- else %}
        {{- "%s: %s|" | format(message.role, message.content | replace('a', 'A')) }}
    {%- endif %}
{%- endfor %}
{{- messages | map(attribute='role') | join(', ') }}{{- {'b': [1, 2.5, none], 'a': 'é<'} | tojson }}
{%- for key, value in {'x': 1, 'y': [true]} | items %}{{- key }}={{- value }};{%- endfor %}
{{- '{}-{:>4}'.format('a', 7) }}{{- [3, 1, 2] | sort | first }}{{- 'abc'[1:] * 2 }}{{- (1, 2) }}{{- 7 // 2 ** 2 }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- 'no' }}{%- endif %}
"""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "  What is 2 + 2, \u00e9\u4e2d\U0001f600 <b>?\n"}
ASSISTANT = {"role": "assistant", "content": "Four.\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}],
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "\u00e9"}}}],
}
RESULT = {"role": "tool", "content": {"sum": 4}}
THOUGHT = {"role": "assistant", "content": "<think>hm</think>\n\nYes.", "reasoning": "\nhm\n"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("source", "messages", "extra"),
    [
        (CHATML, [USER], {}),
        (CHATML, [SYSTEM, USER, ASSISTANT, USER], {}),
        (LLAMA, [USER], {"date_string": "1 Jan 2026"}),
        (LLAMA, [SYSTEM, USER, CALL, RESULT, ASSISTANT, PARTS], {"date_string": "1 Jan 2026", "tools": TOOLS}),
        (MISTRAL, [USER, ASSISTANT, USER], {}),
        (MISTRAL, [SYSTEM, USER], {}),
        (GEMMA, [USER, ASSISTANT, USER], {}),
        (REASONING, [USER, THOUGHT, USER, THOUGHT], {"enable_thinking": False}),
        (REASONING, [USER, ASSISTANT], {}),
    ],
)
def test_the_text_is_that_of_transformers(
    source: str, messages: list[dict[str, Any]], extra: dict[str, Any], add_generation_prompt: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = extra.pop("tools", None) if (extra := dict(extra)) else None
    expected, _ = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        **SPECIAL,
        **extra,
    )
    template = ChatTemplate(source, special_tokens=SPECIAL)
    rendered = template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **extra)
    assert rendered == expected[0]
    assert rendered == template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **extra)
    # A text whose user text is followed is the same, and all of the users' characters are known.
    followed = template.render(
        messages, lambda _: True, tools=tools, add_generation_prompt=add_generation_prompt, **extra
    )
    assert followed == rendered
    assert isinstance(followed, UserText)
    assert "<|" not in "".join(followed[start:stop] for start, stop in followed.spans)
    users = "".join(plain(followed[start:stop]) for start, stop in followed.spans).replace("a", "A")
    assert USER["content"].strip().replace("a", "A") in users


def test_a_chatml_prompt() -> None:
    template = ChatTemplate(CHATML, special_tokens={})
    assert template.render([SYSTEM, {"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_date_comes_from_the_given_clock() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", special_tokens={}, now=lambda: datetime(2026, 3, 4, 5, 6, 7)
    )
    assert template.render([USER]) == "04 Mar 2026"
    assert template.uses_clock
    assert not ChatTemplate(CHATML, special_tokens={}).uses_clock


def test_messages_are_not_changed_by_rendering() -> None:
    message = dict(THOUGHT)
    ChatTemplate("{{ messages[0].reasoning_content }}", special_tokens={}).render([message])
    assert message == THOUGHT


def test_extra_values_may_have_any_name() -> None:
    template = ChatTemplate("{{ self }}{{ messages[0].role }}", special_tokens={})
    assert template.render([USER], **{"self": 1, "messages": 2}).endswith("user")


@pytest.mark.parametrize(
    ("source", "messages", "reason"),
    [
        (MISTRAL, [USER, USER], "roles must alternate"),
        (GEMMA, [SYSTEM, USER], "System role not supported"),
        ("{{ raise_exception(messages[0]) }}", [{"role": "user"}], "role"),
    ],
)
def test_messages_that_a_template_rejects_are_a_request_error(
    source: str, messages: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        ChatTemplate(source, special_tokens=SPECIAL).render(messages)
    assert caught.value.parameter == "messages"


@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": object()}], [{"role": b"user"}], ["user"], [{"role": {1, 2}}]]
)
def test_messages_that_are_not_json_are_refused(messages: list[Any]) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate("x", special_tokens={}).render(messages)
    assert caught.value.parameter == "messages"


def test_messages_nested_without_end_or_too_large_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    template = ChatTemplate("x", special_tokens={}, bounds=TemplateBounds(input=1000))
    with pytest.raises(RequestError, match="nested too deep"):
        template.render([{"role": "user", "content": deep}])
    with pytest.raises(RequestError, match="too large"):
        template.render([{"role": "user", "content": "x" * 1001}])


# Short enough to be reached in milliseconds; the checks are the same at any size.
TIGHT = TemplateBounds(ticks=20_000, value=20_000, memory=2_000_000)
GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(200) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"
NESTED = "{% for i in range(100000) %}{% for j in range(100000) %}%s{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        # endless
        NESTED.replace("%s", ""),
        NESTED.replace("%s", "{% continue %}"),
        "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) if i < 0 %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{{ m() }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
        "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
        "{{ range(100000) | map('upper') | list | length }}",
        "{{ range(100000) | select('defined') | list | length }}",
        "{{ range(100000) | sum }}",
        "{{ range(10 ** 12) }}",
        # large texts
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'a' }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a'.rjust(10 ** 9) }}",
        "{{ 'a'.zfill(10 ** 9) }}",
        "{{ 'a'['ljust'](10 ** 9) }}",
        "{{ '\\t'.expandtabs(10 ** 9) }}",
        "{{ '\\t'.expandtabs(tabsize=10 ** 9) }}",
        "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999).replace('', 'b' * 9999) }}",
        "{{ ('a' * 9999).join(['b'] * 999) }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ 'a' | center(width=10 ** 9) }}",
        "{{ ['a'] | map('center', 10 ** 9) | list }}",
        "{{ ('a\\n' * 999) | indent(10 ** 9) }}",
        "{{ ('a\\n' * 999) | indent('b' * 9999) }}",
        "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
        "{{ ['b'] * 999 | join('a' * 9999) }}",
        "{{ (['b'] * 999) | join('a' * 9999) }}",
        "{{ range(19999) | join('a' * 9999) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1.0 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ ('%(a)s' * 999) % {'a': 'b' * 9999} }}",
        "{{ '%(()1000000000d' % {'(': 1} }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ ('%(a)s' * 999) | format(a='b' * 9999) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 9) }}",
        "{{ ('{0}' * 999).format('b' * 9999) }}",
        "{{ ('{a}' * 999).format_map({'a': 'b' * 9999}) }}",
        "{{ '{0!r:>1000000000}'.format(1) }}",
        "{{ {'a': [[1]]} | tojson(indent=10 ** 9) }}",
        "{{ [1, 2] | tojson(separators=('a' * 9999, ':')) }}",
        "{{ [1] | batch(10 ** 9, 'x') | list }}",
        "{{ [1] | slice(10 ** 9) | list }}",
        GROW % ("'a'", "ns.x + ns.x"),
        GROW % ("'a'", "ns.x ~ ns.x"),
        GROW % ("'a'", "[ns.x, ns.x] | join"),
        GROW % ("'a'", "'%s%s' % (ns.x, ns.x)"),
        GROW % ("'a'", "'%s%s' | format(ns.x, ns.x)"),
        GROW % ("'a'", "'{}{}'.format(ns.x, ns.x)"),
        GROW % ("'a'", "ns.x.replace('a', 'aa')"),
        GROW % ("'<'", "ns.x | forceescape | string | replace('&', '<<')"),
        "{% set x %}{% for i in range(9999) %}" + "text " * 100 + "{% endfor %}{% endset %}",
        "{% macro m() %}" + "text " * 1000 + "{% endmacro %}{% for i in range(9999) %}{% set x = m() %}{% endfor %}",
        "{% set t = 'a' * 9999 %}{% for i in range(9999) %}{{ t }}{% endfor %}",
        "{% set t = 'a' * 9999 %}{% for i in range(9999) %}{% set x = t[1:] %}{% endfor %}",
        # small objects with a large text
        GROW % ("[1]", "[ns.x, ns.x]"),
        GROW % ("[1]", "(ns.x, ns.x)"),
        GROW % ("[1]", "{'a': ns.x, 'b': ns.x}"),
        GROW % ("[1]", "dict(a=ns.x, b=ns.x)"),
        GROW % ("[1]", "ns.x + ns.x"),
        GROW % ("[1]", "ns.x * 2"),
        GROW % ("[1]", "[ns.x] * 2"),
        GROW % ("[1]", "[ns.x, ns.x] | list"),
        GROW % ("[1]", "[ns.x, ns.x] | batch(2) | list"),
        GROW % ("[[1]]", "(ns.x | list) | sum(start=ns.x)"),
        "{% set ns = namespace(x=[1]) %}{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
        "{% for i in range(200) %}{{ m(ns.x, ns.x) }}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% macro m() %}{% set ns.x = kwargs %}{% endmacro %}"
        "{% for i in range(200) %}{{ m(a=ns.x, b=ns.x) }}{% endfor %}",
        # large integers
        "{{ 10 ** 10000 ** 10000 }}",
        GROW % ("3", "ns.x * ns.x"),
        "{{ 2 ** 20000 }}",
        "{{ ('9' * 9999) | int }}",
        "{{ ('f' * 9999) | int(base=16) }}",
        "{{ 1 | round(-10 ** 9) }}",
        "{{ 1 | round(10 ** 9, 'floor') }}",
        "{{ (5).to_bytes(10 ** 9, 'big') }}",
        "{{ strftime_now('%1000000000Y') }}",
    ],
)
def test_a_template_beyond_its_limits_is_stopped(source: str) -> None:
    template = ChatTemplate(source, special_tokens={}, bounds=TIGHT, path="model/chat_template.jinja")
    with pytest.raises(TemplateError) as caught:
        template.render([{"role": "user", "content": "x"}])
    assert caught.value.path == "model/chat_template.jinja"
    assert len(caught.value.reason) < 400


def test_searches_of_quadratic_cost_are_stopped() -> None:
    for call in ("rfind('a' * 999999 + 'b')", "rsplit('a' * 999999 + 'b')", "strip('b' * 999999 + 'a')"):
        template = ChatTemplate("{{ ('a' * 2000000)." + call + " }}", special_tokens={})
        with pytest.raises(TemplateError, match="takes too long"):
            template.render([USER])


def test_time_is_bounded() -> None:
    template = ChatTemplate(
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        special_tokens={},
        bounds=TemplateBounds(ticks=10**12, seconds=0.05),
    )
    with pytest.raises(TemplateError, match=r"longer than 0\.05 seconds"):
        template.render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'].mro() }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{{ ([''] | map(attribute='__class__') | first).mro() }}",
        "{{ '{0.__class__.__mro__}'.format('').x }}",
        "{{ ('{0.__class__}'.format_map({'0': 1})).x }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ joiner.__init__.__globals__['os'] }}",
        "{{ namespace.__init__.__globals__['os'] }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ strftime_now.__self__.source }}",
        "{{ dict.__class__.mro() }}",
        "{{ range.__globals__['x'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.environment }}",
        "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
        "{% macro m() %}{% endmacro %}{{ m._environment.x }}",
        "{% for i in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{{ environment.globals.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages[0].setdefault('x', 1) }}",
        "{{ 'a'.encode() }}",
        "{{ (messages | map('upper')).gi_frame.f_globals }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(**{'__class__': 1}) }}",
        "{{ namespace({'_x': 1}) }}",
        "{% include 'secret' %}",
        "{% import 'secret' as x %}",
        "{% from 'secret' import x %}",
        "{% extends 'secret' %}",
        "{% autoescape true %}{% endautoescape %}",
        "{{ lipsum(n=10) }}",
        "{{ 'x' | pprint }}",
        "{{ 'http://x' | urlize }}",
        "{{ undefined_thing.x }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ 'a' | no_such_filter }}",
        "{{ unclosed",
        "{% for x in y %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
        "{{ 1" + " + 1" * 20000 + " }}",
        "x" * 200_000,
    ],
)
def test_a_broken_or_escaping_template_is_rejected(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, special_tokens={}).render([{"role": "user", "content": "x"}])


def test_hidden_attributes_are_undefined() -> None:
    template = ChatTemplate("{{ ''.__class__ is defined }}{{ messages.append is defined }}", special_tokens={})
    assert template.render([USER]) == "FalseFalse"


def test_an_error_says_where_in_the_template() -> None:
    with pytest.raises(TemplateError, match=r"a\.jinja: The chat template fails: 'x' is undefined \(line 3\)"):
        ChatTemplate("a\nb\n{{ x.y }}", special_tokens={}, path=Path("a.jinja")).render([USER])
    with pytest.raises(TemplateError, match=r"a\.jinja: .*\(line 2\)"):
        ChatTemplate("a\n{{ x", special_tokens={}, path=Path("a.jinja"))


def test_a_long_chat_fits_in_the_bounds() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 100} for i in range(2001)]
    gathered = "{% set ns = namespace(a=[], t='') %}{% for m in messages %}{% set ns.a = ns.a + [m] %}{% endfor %}"
    template = ChatTemplate(gathered + "{{ ns.a | length }}" + MISTRAL, special_tokens=SPECIAL)
    rendered = template.render(messages)
    assert rendered.startswith("2001<s>[INST] word ")
    assert len(rendered) > 1_000_000


def test_one_template_serves_several_threads() -> None:
    template = ChatTemplate(CHATML, special_tokens={})
    results: list[str] = []

    def render(name: str) -> None:
        for _ in range(20):
            results.append(template.render([{"role": "user", "content": name}]).split("\n")[3] + name)

    threads = [threading.Thread(target=render, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(f"{name}<|im_end|>{name}" for name in "abcd" for _ in range(20))


def test_a_rendering_that_failed_leaves_the_template_usable() -> None:
    template = ChatTemplate("{% if messages[0].content == 'x' %}{{ 'a' * 10 ** 9 }}{% endif %}ok", special_tokens={})
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": "x"}])
    assert template.render([{"role": "user", "content": "y"}]) == "ok"
