"""Unknown fields of a request: ignored and named, or rejected in a strict request; never dropped silently."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Struct

from headrace.gateway.api_errors import ApiError
from headrace.observe import metrics
from headrace.server.http.body_parameters import Parameter, convert_value, parse_parameters
from headrace.server.http.unknown_fields import STRICT, UnknownFields
from tests.support.running_server import CHAT, asynchronous, count, serving, words

MESSAGES = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
RESPONSES = {"input": "Hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}


class Leaf(Struct, tag_field="type", tag="leaf", forbid_unknown_fields=True):
    weight: int = 0


class Twig(Struct, tag_field="type", tag="twig", forbid_unknown_fields=True):
    leaves: list[Leaf] = []


class Tree(Struct, forbid_unknown_fields=True):
    branches: str | list[Leaf | Twig] = ""
    labels: dict[str, Leaf] = {}


def lenient() -> UnknownFields:
    return UnknownFields(strict=False)


def test_unknown_fields_are_removed_at_any_depth_and_named_without_indices() -> None:
    unknown = lenient()
    leaf = {"type": "leaf", "weight": 2, "colour": "red"}
    tree = {"branches": [leaf, {"type": "twig", "leaves": [dict(leaf)], "age": 3}], "labels": {"a": dict(leaf)}}
    found = convert_value([tree, dict(tree)], list[Tree], "trees", unknown)
    assert found[0] == Tree([Leaf(2), Twig([Leaf(2)])], {"a": Leaf(2)})
    assert unknown.header.split(", ") == [
        "trees.branches.colour",
        "trees.branches.leaves.colour",
        "trees.branches.age",
        "trees.labels.colour",
    ]


def test_a_strict_request_is_rejected_with_the_path_of_the_field() -> None:
    with pytest.raises(ApiError) as raised:
        convert_value([{"branches": [{"type": "leaf", "colour": 1}]}], list[Tree], "trees", STRICT)
    assert (raised.value.parameter, raised.value.code) == ("trees[0].branches[0].colour", "unknown_parameter")


def test_other_mistakes_are_found_beside_unknown_fields() -> None:
    with pytest.raises(ApiError) as raised:
        convert_value({"colour": 1, "branches": [{"type": "leaf", "weight": "heavy"}]}, Tree, "tree", lenient())
    assert (raised.value.parameter, raised.value.code) == ("tree.branches[0].weight", "invalid_value")


@pytest.mark.parametrize("value", [{"leaf": 1, "branchess": ""}, {"branch": ""}, {"label": {}}])
def test_a_misspelled_field_is_rejected_with_a_suggestion(value: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="Did you mean 'tree"):
        convert_value(value, Tree, "tree", lenient())


def test_null_asks_for_nothing() -> None:
    unknown = lenient()
    assert parse_parameters({"colour": None}, {"a": Parameter("", int)}, unknown) == {}
    assert convert_value({"colour": None}, Tree, "tree", unknown) == Tree()
    assert unknown.header == ""


def test_a_hint_is_ignored_and_a_parameter_that_matters_is_not() -> None:
    table = {
        "hint": Parameter("", unsupported="not here", no_op_values=(1,), hint=True),
        "matters": Parameter("", unsupported="not here", no_op_values=(1,)),
    }
    unknown = lenient()
    assert parse_parameters({"hint": 2, "matters": 1}, table, unknown) == {}
    assert unknown.header == "hint"
    for values in ({"matters": 2}, {"matters": True}):
        with pytest.raises(ApiError) as raised:
            parse_parameters(values, table, unknown)
        assert raised.value.code == "unsupported_parameter"
    with pytest.raises(ApiError):
        parse_parameters({"hint": 2}, table, STRICT)


def test_the_header_is_bounded_and_safe() -> None:
    unknown = lenient()
    parse_parameters({"a\r\nset-cookie: x": 1, "é" * 3000: 1, **{f"field{i}": 1 for i in range(60)}}, {}, unknown)
    assert unknown.header.startswith("a??set-cookie??x, " + "?" * 100 + ", field0, ")
    assert unknown.header.endswith(", ...")
    assert len(unknown.header) < 16 * 102 + 5


def test_too_many_different_unknown_fields_are_rejected() -> None:
    with pytest.raises(ApiError) as raised:
        parse_parameters({f"field{i}": 1 for i in range(101)}, {}, lenient())
    assert raised.value.code == "too_many_values"


@asynchronous
async def test_every_dialect_ignores_a_field_and_names_it_once() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        before = count(metrics.ignored_parameters, "other")
        for path, body in BODIES.items():
            for stream in (False, True):
                answer = await running.ask("POST", path, {**body, "colour": "red", "stream": stream})
                assert (answer.status, answer.headers["x-headrace-ignored"]) == (200, "colour"), path
            assert "x-headrace-ignored" not in (await running.ask("POST", path, body)).headers
        assert count(metrics.ignored_parameters, "other") - before == 2 * len(BODIES)


OTHERS: dict[str, dict[str, Any]] = {
    "/api/chat": {"messages": [{"role": "user", "content": "Hello"}], "stream": False},
    "/api/generate": {"prompt": "Hello", "stream": False},
    "/api/show": {"model": "mini"},
    "/api/pull": {"model": "mini"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5]},
    "/v1/conversations": {"metadata": {"a": "b"}},
}


@asynchronous
async def test_the_other_endpoints_follow_the_same_rule() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        before = count(metrics.ignored_parameters, "other")
        for path, body in OTHERS.items():
            loose = await running.ask("POST", path, {**body, "colour": "red"})
            assert (loose.status, loose.headers["x-headrace-ignored"]) == (200, "colour"), path
            strict = await running.ask("POST", path, {**body, "colour": "red"}, x_headrace_strict_parameters="true")
            assert (strict.status, "'colour'" in strict.body.decode()) == (400, True), path
        assert count(metrics.ignored_parameters, "other") - before == len(OTHERS)


@asynchronous
async def test_fields_inside_an_ollama_request_are_named_with_their_path() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        called = {"function": {"name": "f", "arguments": {}, "index": 0, "colour": 1}}
        body = {
            "messages": [
                {"role": "user", "content": "Hello", "colour": "red"},
                {"role": "assistant", "content": "", "tool_calls": [called]},
                {"role": "tool", "content": "1", "tool_name": "f"},
            ],
            "options": {"num_predict": 3, "colour": 1},
            "stream": False,
        }
        answer = await running.ask("POST", "/api/chat", body)
        names = "messages.colour, messages.tool_calls.function.colour, options.colour"
        assert (answer.status, answer.headers["x-headrace-ignored"]) == (200, names)
        matters = await running.ask("POST", "/api/chat", {**body, "options": {"mirostat": 2}})
        assert (matters.status, "'options.mirostat' is not supported" in matters.json["error"]) == (400, True)
        misspelled = await running.ask("POST", "/api/chat", {**body, "options": {"temprature": 1}})
        assert (misspelled.status, "Did you mean 'options.temperature'?" in misspelled.json["error"]) == (400, True)


@asynchronous
async def test_an_upload_follows_the_same_rule() -> None:
    def form(*fields: str) -> bytes:
        parts = [f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\nbatch\r\n' for name in fields]
        file = '--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\na\r\n--x--\r\n'
        return ("".join(parts) + file).encode()

    kind = {"content_type": "multipart/form-data; boundary=x"}
    async with serving() as running:
        loose = await running.ask("POST", "/v1/files", form("purpose", "colour"), **kind)
        assert (loose.status, loose.headers["x-headrace-ignored"]) == (200, "colour")
        strict = {**kind, "x_headrace_strict_parameters": "true"}
        refused = await running.ask("POST", "/v1/files", form("purpose", "colour"), **strict)
        assert (refused.status, refused.error["param"]) == (400, "colour")
        misspelled = await running.ask("POST", "/v1/files", form("purposes"), **kind)
        assert (misspelled.status, misspelled.error["code"]) == (400, "unknown_parameter")


@asynchronous
async def test_items_of_a_conversation_follow_the_same_rule() -> None:
    async with serving() as running:
        item = {"role": "user", "content": "Hello", "colour": "red"}
        made = await running.ask("POST", "/v1/conversations", {"items": [item]})
        assert (made.status, made.headers["x-headrace-ignored"]) == (200, "items.colour")
        more = await running.ask("POST", f"/v1/conversations/{made.json['id']}/items", {"items": [item], "shape": 1})
        assert (more.status, more.headers["x-headrace-ignored"]) == (200, "shape, items.colour")


@asynchronous
async def test_a_header_makes_one_request_strict() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        for path, body in BODIES.items():
            body = {**body, "colour": "red"}
            strict = await running.ask("POST", path, body, x_headrace_strict_parameters="true")
            assert strict.status == 400
            assert "'colour'" in strict.error["message"]
            assert "x-headrace-ignored" not in strict.headers
            loose = await running.ask("POST", path, body, x_headrace_strict_parameters="false")
            assert loose.status == 200
        wrong = await running.ask("POST", "/v1/chat/completions", CHAT, x_headrace_strict_parameters="maybe")
        assert (wrong.status, wrong.error["param"]) == (400, "x-headrace-strict-parameters")


@asynchronous
async def test_the_configuration_makes_all_requests_strict_but_those_that_say_otherwise() -> None:
    async with serving(strict_parameters=True) as running:
        running.engine.answer = words("ok")
        body = {**CHAT, "store": True}
        refused = await running.ask("POST", "/v1/chat/completions", body)
        assert (refused.status, refused.error["code"]) == (400, "unsupported_parameter")
        loose = await running.ask("POST", "/v1/chat/completions", body, x_headrace_strict_parameters="false")
        assert (loose.status, loose.headers["x-headrace-ignored"]) == (200, "store")


@asynchronous
async def test_a_known_hint_is_counted_by_its_name() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        before = count(metrics.ignored_parameters, "keep_alive")
        for path in ("/v1/chat/completions", "/v1/completions"):
            assert (await running.ask("POST", path, {**BODIES[path], "keep_alive": "5m"})).status == 200
        assert count(metrics.ignored_parameters, "keep_alive") - before == 2


@asynchronous
async def test_the_log_has_the_ignored_names(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr("headrace.server.app.log_request", lambda logger, fields: lines.append(fields))
    async with serving() as running:
        running.engine.answer = words("ok")
        await running.ask("POST", "/v1/chat/completions", {**CHAT, "colour": 1, "taste": 2})
    assert [line["ignored"] for line in lines] == ["colour, taste"]
