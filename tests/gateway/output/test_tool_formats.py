"""Tool calls in the text of models: what is read however the text is cut, and grammars that hold models to them."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from headrace import LLM
from headrace.engine.grammar.constraints import Grammar, GrammarCompiler, GrammarLimits
from headrace.errors import RequestError
from headrace.gateway.output.reasoning import REASONING_FORMATS, after_reasoning
from headrace.gateway.output.tool_formats import TOOL_FORMATS, ToolFormat, detect_tool_format
from headrace.gateway.output.tool_parsers import MOST_HELD, new_call_id
from headrace.gateway.requests.text_request import Tool, ToolCallDelta
from headrace.models.text.tokenizer import Tokenizer
from tests.support.models.small_tokenizers import byte_level, load

WEATHER = Tool(
    "get_weather",
    "The weather of a city",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    strict=True,
)
CLOCK = Tool(
    'get "time"', None, {"$ref": "#/$defs/zone", "$defs": {"zone": {"properties": {"zone": {"enum": ["UTC"]}}}}}
)
ANYTHING = Tool("anything")
TOOLS = (WEATHER, CLOCK, ANYTHING)

Call = tuple[str, str]  # name and arguments


def read(name: str, pieces: Sequence[str], *, parallel: bool = True) -> tuple[str, list[Call]]:
    """Content and calls, with the rules for deltas checked on the way."""
    count = itertools.count()
    parser = TOOL_FORMATS[name].parser(parallel=parallel, new_id=lambda: f"call_{next(count)}")
    contents: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for content, deltas in [*map(parser.push, pieces), parser.finish()]:
        contents.append(content)
        for delta in deltas:
            if delta.name is not None:
                assert (delta.index, delta.id) == (len(names), f"call_{delta.index}")
                names.append(delta.name)
                arguments.append([])
            assert delta.index == len(names) - 1
            arguments[-1].append(delta.arguments)
    return "".join(contents), list(zip(names, map("".join, arguments), strict=True))


ARGUMENTS = r'{"a": "}</tool_call>\"]\\", "b": [{}, {"c": [1, -2.5e3, null]}], "ü": "\u00e9 😀"}'

# format, text, content, calls
CASES: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", "just text, with < and <tool", "just text, with < and <tool", []),
    ("hermes", " text with space \n", " text with space \n", []),
    (
        "hermes",
        '\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n',
        "",
        [("f", '{"a": 1}')],
    ),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n Done. ',
        "Let me see.Done. ",
        [("f", ARGUMENTS), ("g", "{}")],
    ),
    ("mini", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"id": "x{", "name": "f", "parameters": {}}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "null")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "arguments": {"b": 1}}</tool_call>x', "x", [("f", "{}")]),
    (
        "hermes",
        r'<tool_call>{"name": "a\"\u00e9\n", "arguments": "{\"a\": \"\\n\ud83d\ude00\u00e9\ud83dx\"}"}</tool_call>',
        "",
        [('a"é\n', '{"a": "\\n😀é�x"}')],
    ),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "no \"JSON"}</tool_call>', "", [("f", r'"no \"JSON"')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}\n}</tool_call>x', "x", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}</tool_call> x', "x", [("f", '{"a": [1')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call><tool_call>{"name": "g"} <tool_call>{"name": "h"}',
        "",
        [("f", '{"a": 1}'), ("g", "{}"), ("h", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", oh no <tool_call>{"name": "g"}', "", [("f", ""), ("g", "{}")]),
    ("hermes", 'a <tool_call> {"name": ', 'a <tool_call> {"name": ', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    ("hermes", "a <tool_call> b </tool_call> c", "a <tool_call> b </tool_call> c", []),
    ("hermes", '<tool_call>{"nom": "f"}</tool_call>', '<tool_call>{"nom": "f"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
    ("hermes", r'<tool_call>{"name": "\ud800"}', r'<tool_call>{"name": "\ud800"}', []),
    ("hermes", r'<tool_call>{"name": "\x"}', r'<tool_call>{"name": "\x"}', []),
    ("hermes", "<tool_call><tool_call>[]", "<tool_call><tool_call>[]", []),
    ("llama3", '{"name": "f", "parameters": {"a": "}"}}', "", [("f", '{"a": "}"}')]),
    ("llama3", ' <|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        "llama3",
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}\n{"parameters": {}, "name": "h"}',
        "",
        [("f", "{}"), ("g", '{"a": 1}'), ("h", "{}")],
    ),
    (
        "llama3",
        '<|python_tag|> [{"name": "f", "parameters": {}}, {"type": "function", "name": "g", "parameters": {}} ] ',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("llama3", '{"name": "Ada", "born": 1815}\n', '{"name": "Ada", "born": 1815}\n', []),
    ("llama3", '{"name": "Ada", "parameters": [1]}', '{"name": "Ada", "parameters": [1]}', []),
    ("llama3", '{"name": "f", "parameters": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
    ("llama3", '{"name": "f", "parameters": "a"} b', '{"name": "f", "parameters": "a"} b', []),
    ("llama3", "[1, 2, 3] and <|python", "[1, 2, 3] and <|python", []),
    ("llama3", ' text {"name": "f", "parameters": {}}', ' text {"name": "f", "parameters": {}}', []),
    ("llama3", '<|python_tag|>print("{")', '<|python_tag|>print("{")', []),
    ("llama3", '{"name": "f", "parameters": {}}; {"a": 1} b', '{"a": 1} b', [("f", "{}")]),
    ("llama3", '{"name": "f", "param', '{"name": "f", "param', []),
    (
        "mistral",
        'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"arguments": {}, "name": "g", "id": "123456789"}] ',
        "Hm.",
        [("f", '{"a": "]"}'), ("g", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": "{"}[TOOL_CALLS]g{} [TOOL_CALLS] h[CALL_ID]123456789[ARGS] {"b": {}}',
        "",
        [("f", '{"a": "{"}'), ("g", "{}"), ("h", '{"b": {}}')],
    ),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}x', "x", [("f", "{}")]),
    ("mistral", "a [TOOL_CALLS] is a marker { ok", "a [TOOL_CALLS] is a marker { ok", []),
    ("mistral", "[TOOL_CALLS]get_wea", "[TOOL_CALLS]get_wea", []),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", '[TOOL_CALLS]f{"a": [}] oh [TOOL_CALLS]g{', "", [("f", '{"a": ['), ("g", "{")]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_text_is_read_the_same_however_it_is_cut(name: str, text: str, content: str, calls: list[Call]) -> None:
    assert read(name, [text]) == (content, calls)
    assert read(name, list(text)) == (content, calls)
    for cut in range(1, len(text)):
        assert read(name, [text[:cut], text[cut:]]) == (content, calls), cut


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_random_texts_are_read_the_same_however_they_are_cut(name: str) -> None:
    parts = [
        "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '{"name": "f", ', "{",
        '"arguments": ', '"parameters": ', '{"a": 1}', '"{\\"a\\": 1}"', "}", "[", "]", ";", ", ", " ", "\n", "text",
        '{"name": "f", "arguments": {"a": [1]}}', '"', "\\", "\\ud83d", "\\ude00", '"name": "g"', "<tool", " " * 3000,
    ]  # fmt: skip
    rng = random.Random(f"tool formats {name}")
    for _ in range(200):
        text = "".join(rng.choices(parts, k=rng.randrange(1, 14)))
        parallel = rng.random() < 0.8
        whole = read(name, [text], parallel=parallel)
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 12)))
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        assert read(name, pieces, parallel=parallel) == whole, text
        assert read(name, list(text), parallel=parallel) == whole, text


def test_content_and_arguments_come_out_at_once() -> None:
    parser = TOOL_FORMATS["hermes"].parser(new_id=lambda: "id")
    assert parser.push("Let me") == ("Let me", [])
    assert parser.push(" <") == ("", [])
    assert parser.push("b") == (" <b", [])
    assert parser.push('<tool_call>\n{"name": "f"') == ("", [ToolCallDelta(0, "id", "f")])
    assert parser.push(', "arguments": {"ci') == ("", [ToolCallDelta(0, arguments='{"ci')])
    assert parser.push('ty": "}') == ("", [ToolCallDelta(0, arguments='ty": "}')])
    assert parser.push('"}}\n</tool') == ("", [ToolCallDelta(0, arguments='"}')])
    assert parser.push("_call>\n") == ("", [])
    assert parser.finish() == ("", [])


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>\n{"name": "get_wea'),
        ("mini", '<tool_call>{"'),
        ("mistral", "[TOOL_CALLS]["),
        ("mistral", '[TOOL_CALLS][{"name": "get_wea'),
        ("mistral", "[TOOL_CALLS]get_wea"),
    ],
)
def test_a_call_that_is_cut_before_its_name_is_complete_is_no_content(name: str, begun: str) -> None:
    parser = TOOL_FORMATS[name].parser()
    pushed, calls = parser.push(f"Let me see. {begun}")
    rest, more = parser.finish(cut=True)
    assert (pushed + rest, calls + more) == ("Let me see.", [])


def test_a_cut_answer_that_only_looks_like_a_call_is_content() -> None:
    for name, text in [("llama3", '{"born": 18'), ("hermes", "a <tool"), ("hermes", "1 < ")]:
        parser = TOOL_FORMATS[name].parser()
        pushed, calls = parser.push(text)
        rest, more = parser.finish(cut=True)
        assert (pushed + rest, calls + more) == (text, [])


def test_arguments_wait_for_the_name() -> None:
    parser = TOOL_FORMATS["hermes"].parser(new_id=lambda: "id")
    assert parser.push('<tool_call>{"arguments": {"a": 1}') == ("", [])
    assert parser.push(', "name": "f"') == ("", [ToolCallDelta(0, "id", "f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'a <tool_call>{"name": "f"}</tool_call> b <tool_call>{"name": "g"}</tool_call> c'),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'),
        ("mistral", 'a [TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}] b'),
        ("mistral", "a [TOOL_CALLS]f{}[TOOL_CALLS]g{} b"),
    ],
)
def test_without_parallel_calls_what_follows_the_first_is_dropped(name: str, text: str) -> None:
    content, calls = read(name, [text], parallel=False)
    assert content == ("a" if text[0] == "a" else "")
    assert calls == [("f", "{}")]


def test_ids_are_long_and_differ() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(id.startswith("call_") and len(id) == 29 for id in ids)


HOSTILE = {
    "half markers": "<tool_call" * 100_000,  # 1 MB
    "markers": "<tool_call>" * 20_000,
    "list markers": "[TOOL_CALLS]" * 20_000,
    "names": "[TOOL_CALLS]a" * 20_000,
    "braces": "{" * 100_000,
    "deep": '<tool_call>{"name": "f", "arguments": ' + "{" * 100_000 + "}" * 100_000 + "}</tool_call>",
    "deep and marked": '[TOOL_CALLS]f{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "broken calls": '<tool_call>{"name": "f" x' * 10_000,
    "a long name": '<tool_call>{"name": "' + "f" * 300_000,
    "a long key": '<tool_call>{"name": "f", "' + "f" * 300_000,
    "escapes": '<tool_call>{"name": "f", "arguments": "{' + "\\ud83d" * 40_000,
    "no name": '<tool_call>{"arguments": {"a": "' + "b" * 300_000 + '"}, "name": "f"}',
    "spaces": "a" + " " * 300_000 + '<tool_call>{"name": "f"}',
    "spaces in a call": "<tool_call>" + " " * 300_000 + '{"name": "f"}',
}


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_hostile_text_is_read_to_its_end(kind: str) -> None:
    text = HOSTILE[kind]
    for name in ("hermes", "llama3", "mistral"):
        pieces = [text[at : at + 29] for at in range(0, len(text), 29)]
        assert read(name, pieces) == read(name, [text])


def test_deep_arguments_come_out_whole() -> None:
    arguments = '{"a": [' * 100_000 + "]}" * 100_000
    assert read("mistral", [f"[TOOL_CALLS]f{arguments}]}}"])[1] == [("f", arguments)]


def test_what_never_becomes_a_call_is_not_kept_for_ever() -> None:
    parser = TOOL_FORMATS["hermes"].parser()
    assert parser.push('<tool_call>{"a": "')[0] == ""
    content, calls = parser.push("b" * MOST_HELD)
    assert len(content) > MOST_HELD
    assert calls == []


# grammars


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("mini", threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Iterator[GrammarCompiler]:
    grammars = GrammarCompiler(llm.tokenizer, GrammarLimits(compile_seconds=120.0))  # on a busy machine too
    yield grammars
    grammars.close()


def prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    functions = [{"name": tool.name, "parameters": tool.parameters} for tool in TOOLS]
    tools = [{"type": "function", "function": function} for function in functions]
    chat = tokenizer.apply_template([{"role": "user", "content": text}], tools=tools)
    return tokenizer.encode(chat, add_special_tokens=False)


def check_weather(arguments: str) -> None:
    value: dict[str, Any] = json.loads(arguments)
    assert value.keys() == {"city", "days"}
    assert isinstance(value["city"], str)
    assert value["days"] <= 9


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_a_model_held_to_a_grammar_writes_one_call(llm: LLM, name: str) -> None:
    known = TOOL_FORMATS[name]
    ids = prompt(llm.tokenizer, "What is the weather in Seville?")
    grammar = known.grammar(TOOLS, only="get_weather", parallel=False)
    for seed in range(3):
        [answer] = llm.generate([ids], grammar=grammar, max_tokens=200, temperature=1.0, seed=seed)
        content, calls = read(name, [answer.text])
        assert content == ""
        [(called, arguments)] = calls
        assert called == "get_weather"
        check_weather(arguments)


def test_the_tokens_of_a_forced_call_are_those_of_its_text(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    # Nothing is left to the model, which may cut a text of its own in another way than the tokenizer would.
    schema = {"type": "object", "properties": {"city": {"const": "Seville"}}, "required": ["city"]}
    only = Tool("get_weather", parameters={**schema, "additionalProperties": False})
    grammar = TOOL_FORMATS["mini"].grammar([only], only=None, parallel=False)
    [answer] = llm.generate([prompt(tokenizer, "Hi")], grammar=grammar, max_tokens=200)
    tokens = [token for token in answer.completions[0].tokens if token not in tokenizer.eos_ids]
    assert tokens[0] == tokenizer.token_id("<tool_call>")
    assert tokens[-1] == tokenizer.token_id("</tool_call>")
    assert tokens == tokenizer.encode(answer.text, add_special_tokens=False)


def allows(grammars: GrammarCompiler, grammar: Grammar, text: str, tokenizer: Tokenizer | None = None) -> bool:
    """Whether the text, cut as the tokenizer does, is a whole answer."""
    tokens = (tokenizer or grammars.tokenizer).encode(text, add_special_tokens=False)
    state = grammars.compile(grammar)
    for token in tokens:
        if state.finished or not state.fitting([token]):
            return False
        state.advance([token])
    return state.accepting


GOOD = '{"city": "Rome", "days": 3}'
WRITTEN: dict[str, Callable[[str, str], str]] = {
    "hermes": lambda name, value: f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {value}}}\n</tool_call>',
    "mini": lambda name, value: f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {value}}}</tool_call>',
    "llama3": lambda name, value: f'{{"name": {json.dumps(name)}, "parameters": {value}}}',
    "mistral": lambda name, value: f'[TOOL_CALLS][{{"name": {json.dumps(name)}, "arguments": {value}}}]',
}


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_a_forced_grammar_takes_calls_and_nothing_else(grammars: GrammarCompiler, name: str) -> None:
    write = WRITTEN[name]
    one = TOOL_FORMATS[name].grammar(TOOLS, only=None, parallel=False)
    assert allows(grammars, one, write("get_weather", GOOD))
    assert allows(grammars, one, write('get "time"', '{"zone": "UTC"}'))
    assert allows(grammars, one, write("anything", '{"a": [{}, 1.5]}'))
    assert allows(grammars, one, write("anything", "{}"))
    assert not allows(grammars, one, write("anything", "[]"))
    assert not allows(grammars, one, write("get_weather", '{"city": "Rome", "days": 30}'))
    assert not allows(grammars, one, write("get_weather", "{}"))
    assert not allows(grammars, one, write('get "time"', '{"zone": "CET"}'))
    assert not allows(grammars, one, write("nothing", "{}"))
    assert not allows(grammars, one, "text")
    assert not allows(grammars, one, "text " + write("anything", "{}"))
    named = TOOL_FORMATS[name].grammar(TOOLS, only="anything", parallel=False)
    assert allows(grammars, named, write("anything", "{}"))
    assert not allows(grammars, named, write("get_weather", GOOD))


TWO = {
    "hermes": '<tool_call>\n{"name": "anything", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
    "mini": '<tool_call>{"name": "anything", "arguments": {}}</tool_call>'
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}</tool_call>',
    "llama3": '{"name": "anything", "parameters": {}}; '
    '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}',
    "mistral": '[TOOL_CALLS][{"name": "anything", "arguments": {}}, '
    '{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]',
}


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_several_calls_are_taken_where_they_are_allowed(grammars: GrammarCompiler, name: str) -> None:
    known = TOOL_FORMATS[name]
    assert read(name, [TWO[name]]) == ("", [("anything", "{}"), ("get_weather", GOOD)])
    assert allows(grammars, known.grammar(TOOLS, only=None, parallel=True), TWO[name])
    assert not allows(grammars, known.grammar(TOOLS, only=None, parallel=False), TWO[name])
    assert allows(grammars, known.auto_grammar(TOOLS), TWO[name])
    assert not allows(grammars, known.auto_grammar(TOOLS, parallel=False), TWO[name])


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_free_text_is_free_until_a_call_begins(grammars: GrammarCompiler, name: str) -> None:
    write = WRITTEN[name]
    auto = TOOL_FORMATS[name].auto_grammar(TOOLS)
    for text in ("Hello.", "a < b\n", "", " x [1] {}", "[a](b)", write("get_weather", GOOD), write("anything", "{}")):
        assert allows(grammars, auto, text), text
    assert not allows(grammars, auto, write("nothing", "{}"))
    assert not allows(grammars, auto, write("get_weather", '{"city": "Rome"}'))
    if name != "llama3":
        assert allows(grammars, auto, "Let me see.\n" + write("get_weather", GOOD))
        assert not allows(grammars, auto, "Let me see.\n" + write("nothing", GOOD))


LOOSE = tuple(msgspec.structs.replace(tool, strict=False) for tool in TOOLS)


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_a_call_that_has_begun_fits_its_schema_also_without_strict(grammars: GrammarCompiler, name: str) -> None:
    write = WRITTEN[name]
    auto = TOOL_FORMATS[name].auto_grammar(LOOSE)
    for text in ("Hello.", "a < b\n", "", " x [1] {}", "[a](b)", "[1, 2]", write("get_weather", GOOD)):
        assert allows(grammars, auto, text), text
    assert not allows(grammars, auto, write("get_weather", '{"city": "Rome"}'))
    assert not allows(grammars, auto, write("get_weather", "{oops"))
    assert not allows(grammars, auto, write("anything", '{"a": '))
    if name != "llama3":
        assert not allows(grammars, auto, "Let me see.\n" + write("nothing", GOOD))


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"get_weather","parameters":' + GOOD + "}",
        '{"type": "function", "name": "get_weather", "parameters": ' + GOOD + "}",
        ' <|python_tag|>{"name": "get_weather", "arguments": ' + GOOD + "}",
        '[{"name": "anything", "parameters": {}}, {"name": "get_weather", "parameters": ' + GOOD + "}]",
    ],
)
def test_calls_of_a_whole_answer_are_held_in_every_spelling(grammars: GrammarCompiler, text: str) -> None:
    auto = TOOL_FORMATS["llama3"].auto_grammar(LOOSE)
    assert read("llama3", [text])[1][-1] == ("get_weather", GOOD)
    assert allows(grammars, auto, text)
    assert not allows(grammars, auto, text.replace('"days"', '"hours"'))
    assert not allows(grammars, auto, text[:-1])


@pytest.mark.parametrize(
    "text",
    ['{"name": "Ada", "born": 1815}', '{"a": [1, {"name": "get_weather"}]}', '{"name": "get', '[{"a": 1}]', "{}"],
)
def test_json_that_is_no_call_stays_an_answer_of_a_model_whose_calls_are_whole_answers(
    grammars: GrammarCompiler, text: str
) -> None:
    assert allows(grammars, TOOL_FORMATS["llama3"].auto_grammar(LOOSE), text)


def test_markers_in_the_reasoning_begin_no_call(grammars: GrammarCompiler) -> None:
    think = REASONING_FORMATS["think"]
    auto = TOOL_FORMATS["mini"].auto_grammar(TOOLS)
    call, wrong = WRITTEN["mini"]("get_weather", GOOD), WRITTEN["mini"]("nothing", "{}")
    unknown = after_reasoning(auto, think, "<|assistant|>")
    assert allows(grammars, unknown, f"\n<think>Maybe {wrong}?</think>\n{call}")
    assert not allows(grammars, unknown, f"<think>Maybe.</think>{wrong}")
    assert not allows(grammars, unknown, f"So <think>{wrong}")
    opened = after_reasoning(auto, think, "<|assistant|><think>\n")
    assert allows(grammars, opened, f"Maybe {wrong}?</think>{call}")
    assert not allows(grammars, opened, f"Maybe.</think>{wrong}")
    closed = after_reasoning(auto, think, "<|assistant|><think>\n\n</think>\n\n")
    assert not allows(grammars, closed, wrong)


def test_a_grammar_for_a_tool_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match="names 'other', which is not in 'tools'"):
        TOOL_FORMATS["mini"].grammar(TOOLS, only="other", parallel=False)
    with pytest.raises(RequestError, match="is empty"):
        TOOL_FORMATS["mini"].grammar((), only=None, parallel=False)


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested deeper than 64 levels"):
        TOOL_FORMATS["mini"].grammar((Tool("deep", None, schema, strict=True),), only=None, parallel=False)


BAD_SCHEMAS: dict[str, dict[str, Any]] = {
    "reference to nothing": {"type": "object", "properties": {"a": {"$ref": "#/$defs/nothing"}}},
    "unknown type": {"type": "object", "properties": {"a": {"type": "colour"}}},
    "no regular expression": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
    "no object": {"type": "string"},
    "deep": functools.reduce(lambda inner, _: {"items": inner}, range(500), dict[str, Any]()),
    "long": {"type": "object", "properties": {f"p{index}": {"enum": ["x" * 1000]} for index in range(300)}},
}


@pytest.mark.parametrize("kind", list(BAD_SCHEMAS))
@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_a_schema_that_cannot_be_used_counts_as_any_object(grammars: GrammarCompiler, name: str, kind: str) -> None:
    write = WRITTEN[name]
    tools = (Tool("bad", None, BAD_SCHEMAS[kind]), WEATHER)
    loose = (tools[0], msgspec.structs.replace(WEATHER, strict=False))
    for grammar in (
        TOOL_FORMATS[name].auto_grammar(loose),
        TOOL_FORMATS[name].auto_grammar(tools),
        TOOL_FORMATS[name].grammar(tools, only=None, parallel=False),
    ):
        if kind != "no object":
            assert allows(grammars, grammar, write("bad", '{"b": [1, {}]}'))
        assert not allows(grammars, grammar, write("bad", '{"b": [1, {}'))
        assert allows(grammars, grammar, write("get_weather", GOOD))
        assert not allows(grammars, grammar, write("get_weather", '{"city": "Rome"}'))  # the good one still holds


def test_texts_that_only_describe_a_tool_take_no_room_in_its_grammar() -> None:
    words = "what it is for " * 500
    schema = {
        "type": "object",
        "description": words,
        "properties": {
            "description": {"type": "string", "description": words, "default": words},
            "title": {"enum": ["a"], "examples": [words]},
        },
        "required": ["title"],
    }
    grammar = TOOL_FORMATS["mini"].auto_grammar((Tool("f", words, schema),))
    [only] = grammar.schemas
    assert json.loads(only.schema)["properties"] == {"description": {"type": "string"}, "title": {"enum": ["a"]}}
    assert grammar.size < 1000


def test_more_tools_than_fit_are_held_as_far_as_they_fit(grammars: GrammarCompiler) -> None:
    big = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(60)}}
    small = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    tools = [Tool(f"tool_{index}", None, small if index == 100 else big) for index in range(128)]
    auto = TOOL_FORMATS["mini"].auto_grammar(tools)
    assert auto.size > grammars.limits.text_bytes
    assert allows(grammars, auto, WRITTEN["mini"]("tool_100", '{"a": 1}'))
    assert not allows(grammars, auto, WRITTEN["mini"]("tool_100", '{"a": 2}'))
    assert allows(grammars, auto, WRITTEN["mini"]("tool_0", '{"p0": "x"}'))
    assert not allows(grammars, auto, WRITTEN["mini"]("tool_0", "{oops}"))


def test_what_a_grammar_cannot_hold_matters_to_strict_tools_alone(grammars: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}
    loose = TOOL_FORMATS["mini"].grammar((Tool("f", None, schema),), only=None, parallel=False)
    assert allows(grammars, loose, '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>')
    strict = TOOL_FORMATS["mini"].grammar((Tool("f", None, schema, strict=True),), only=None, parallel=False)
    with pytest.raises(RequestError, match="grammar cannot be used"):
        grammars.compile(strict)


# which format a model has

HERMES = '{%- if tools %}<tools>{% endif %}\'<tool_call>\\n{"name": "\' + tool_call.name + \'", "arguments": \''
LLAMA = '{% if tools %}<|start_header_id|> \'{"name": "\' + tool_call.name \'", "parameters": \''
MISTRAL = '{% if tools %}[AVAILABLE_TOOLS] "[TOOL_CALLS][" name arguments'
NEWER = '{% if tools %}[AVAILABLE_TOOLS] "[TOOL_CALLS]" + name + "[ARGS]" + arguments'


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that has every format's markers as special tokens."""
    tokenizer = byte_level()
    texts = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    marks = [AddedToken(text, special=True) for text in texts]
    tokenizer.add_special_tokens(marks)  # pyright: ignore[reportUnknownMemberType] - a bare `list` in its stubs
    return load(tmp_path_factory.mktemp("marked"), tokenizer)


def of(source: str | None, tokenizer: Tokenizer) -> ToolFormat:
    found = detect_tool_format(source, tokenizer)
    assert found is not None
    return found


def test_the_bundled_model_writes_calls_in_its_own_format(llm: LLM) -> None:
    template = llm.tokenizer.template
    assert template is not None
    found = of(template.source, llm.tokenizer)
    assert (found.name, found.special) == ("mini", ())


def test_the_format_is_found_in_the_template(llm: LLM, marked: Tokenizer) -> None:
    plain = llm.tokenizer
    assert [of(source, plain).name for source in (HERMES, LLAMA, MISTRAL, NEWER)] == [
        "hermes", "llama3", "mistral", "mistral",
    ]  # fmt: skip
    assert of(HERMES, plain).special == ()
    assert of(HERMES, marked).special == ("<tool_call>", "</tool_call>")
    assert of(NEWER, marked).special == ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")


@pytest.mark.parametrize(
    "source", [None, "", "{{ messages }}", HERMES + "<function=", HERMES + "<arg_key>", "{% if tools %}<|im_start|>"]
)
def test_a_template_of_no_known_format_has_none(llm: LLM, source: str | None) -> None:
    assert detect_tool_format(source, llm.tokenizer) is None


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (HERMES, WRITTEN["hermes"]("get_weather", GOOD)),
        (LLAMA, WRITTEN["llama3"]("get_weather", GOOD)),
        (MISTRAL, WRITTEN["mistral"]("get_weather", GOOD)),
        (NEWER, f"[TOOL_CALLS]get_weather[ARGS]{GOOD}"),
        (NEWER + "[CALL_ID]", f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{GOOD}"),
    ],
)
def test_markers_that_are_special_tokens_are_written_as_those(marked: Tokenizer, source: str, text: str) -> None:
    grammars = GrammarCompiler(marked)
    known = of(source, marked)
    auto = known.auto_grammar(TOOLS)
    for grammar in (known.grammar(TOOLS, only=None, parallel=True), auto):
        assert allows(grammars, grammar, text)
        assert not allows(grammars, grammar, text.replace("get_weather", "nothing"))
        assert not allows(grammars, grammar, text.replace("3}", "33}"))
    assert allows(grammars, auto, "text")
    if known.name == "llama3":
        assert allows(grammars, auto, "<|python_tag|>" + text)
    grammars.close()
    assert read(known.name, [text]) == ("", [("get_weather", GOOD)])
