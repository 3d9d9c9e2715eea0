"""The tables of the endpoints: every documented parameter is honoured or refused, and nothing is dropped in silence."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta, Struct
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError
from headrace.server.api import chat_completions as chat
from headrace.server.api import completions, messages_parameters, vectors
from headrace.server.api import tokenize as tokens
from headrace.server.api.batches.batch_endpoints import BATCH_PARAMETERS
from headrace.server.api.common_parameters import extra_fields
from headrace.server.api.ollama import ollama_parameters
from headrace.server.api.responses import responses_parameters
from headrace.server.http.body_parameters import (
    Parameter,
    ParameterTable,
    body_schema,
    convert_value,
    parse_body,
    parse_parameters,
)
from tests.support.running_server import asynchronous, serving, words

TABLES: Mapping[str, ParameterTable] = {
    "chat": chat.CHAT_PARAMETERS,
    "completions": completions.COMPLETION_PARAMETERS,
    "responses": responses_parameters.RESPONSE_PARAMETERS,
    "messages": messages_parameters.MESSAGE_PARAMETERS,
    "embeddings": vectors.EMBEDDINGS_PARAMETERS,
    "rerank": vectors.RERANK_PARAMETERS,
    "score": vectors.SCORE_PARAMETERS,
    "tokenize": tokens.TOKENIZE_PARAMETERS,
    "detokenize": tokens.DETOKENIZE_PARAMETERS,
    "batches": BATCH_PARAMETERS,
    "ollama chat": ollama_parameters.CHAT_PARAMETERS,
    "ollama generate": ollama_parameters.GENERATE_PARAMETERS,
    "ollama options": ollama_parameters.OPTION_PARAMETERS,
    "ollama embed": ollama_parameters.EMBED_PARAMETERS,
    "ollama embeddings": ollama_parameters.OLDER_EMBEDDINGS_PARAMETERS,
    "ollama show": ollama_parameters.SHOW_PARAMETERS,
    "ollama pull": ollama_parameters.PULL_PARAMETERS,
}
EACH = [pytest.param(table, name, id=f"{where}-{name}") for where, table in TABLES.items() for name in table]
REFUSED = [
    pytest.param(table, name, id=f"{where}-{name}")
    for where, table in TABLES.items()
    for name, parameter in table.items()
    if parameter.unsupported is not None
]


# Hints of one service, which all endpoints may ignore.
MAY_BE_UNKNOWN = {"context_management", "compaction", "diagnostics", "billing_policy", "max_tool_calls"}


class Nothing:
    """A value of no type that JSON has."""


def error_of(values: Mapping[str, Any], table: ParameterTable) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse_parameters(values, table)
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize(("table", "name"), EACH)
def test_every_parameter_is_honoured_or_refused_with_a_reason(table: ParameterTable, name: str) -> None:
    parameter = table[name]
    if parameter.unsupported is None:
        assert parameter.description
        assert not parameter.no_op_values
        msgspec.json.schema(parameter.type)  # it can be documented
    else:
        assert len(parameter.unsupported) > 8
        assert not parameter.required


@pytest.mark.parametrize(("table", "name"), REFUSED)
def test_a_refused_parameter_is_named_with_the_reason(table: ParameterTable, name: str) -> None:
    parameter = table[name]
    error = error_of({name: Nothing()}, table)
    assert (error.parameter, error.code) == (name, "unsupported_parameter")
    assert str(parameter.unsupported) in error.message
    alone = {name: parameter}
    for value in (None, *parameter.no_op_values):
        assert parse_parameters({name: value}, alone) == {}  # it asks for nothing


@pytest.mark.parametrize("where", ["chat", "completions", "responses", "messages"])
def test_no_parameter_of_another_endpoint_is_ignored_as_unknown(where: str) -> None:
    others = {name for other in ("chat", "completions", "responses", "messages") for name in TABLES[other]}
    assert others - set(TABLES[where]) <= MAY_BE_UNKNOWN


@pytest.mark.parametrize("where", TABLES)
def test_an_unknown_parameter_is_named(where: str) -> None:
    error = error_of({"colour": "red"}, TABLES[where])
    assert (error.parameter, error.code) == ("colour", "unknown_parameter")
    assert "'colour'" in error.message


@pytest.mark.parametrize("where", TABLES)
def test_a_parameter_that_is_missing_is_named(where: str) -> None:
    required = [name for name, each in TABLES[where].items() if each.required]
    if required:
        error = error_of({}, TABLES[where])
        assert (error.parameter, error.code) == (required[0], "missing_required_parameter")


@pytest.mark.parametrize(
    ("table", "documented"),
    [
        (chat.CHAT_PARAMETERS, chat_create_params.CompletionCreateParamsStreaming),
        (completions.COMPLETION_PARAMETERS, completion_create_params.CompletionCreateParamsStreaming),
        (vectors.EMBEDDINGS_PARAMETERS, embedding_create_params.EmbeddingCreateParams),
    ],
)
def test_every_parameter_that_openai_documents_is_in_the_table(table: ParameterTable, documented: type) -> None:
    names = set(typing.get_type_hints(documented, localns=vars(chat_create_params)))
    assert names - set(table) == set()


class Inner(Struct, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=1)]


@pytest.mark.parametrize(
    ("value", "wanted", "path", "code"),
    [
        ("a", int, "name", "invalid_value"),
        ([1, "a"], list[int], "name[1]", "invalid_value"),
        ([{"count": 0}], list[Inner], "name[0].count", "invalid_value"),
        ([{"count": 1, "more": 2}], list[Inner], "name[0].more", "unknown_parameter"),
        ([{}], list[Inner], "name[0].count", "missing_required_parameter"),
        ({"key": "a"}, dict[str, int], "name", "invalid_value"),
        ({"key": {"more": 1}}, dict[str, Inner], "name.more", "unknown_parameter"),
        (True, int, "name", "invalid_value"),
        ("1", int, "name", "invalid_value"),
        (float("nan"), Annotated[float, Meta(ge=0)], "name", "invalid_value"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(value: Any, wanted: Any, path: str, code: str) -> None:
    with pytest.raises(ApiError) as raised:
        convert_value(value, wanted, "name")
    assert (raised.value.parameter, raised.value.code) == (path, code)
    assert path in raised.value.message
    assert "$" not in raised.value.message


@pytest.mark.parametrize(
    "body", [b"", b"x", b"[]", b"1", b"null", b'"a"', b'{"a":', b"{'a': 1}", b'{"a": "\xff"}', b"[" * 10**5]
)
def test_a_body_that_is_no_object_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        parse_body(body, {}, RequestLimits())
    assert raised.value.status == 400


def test_null_is_the_same_as_nothing() -> None:
    assert parse_parameters({"a": None}, {"a": Parameter("", int)}) == {}
    with pytest.raises(ApiError):
        parse_parameters({"a": None}, {"a": Parameter("", int, required=True)})


def test_a_misspelled_parameter_gets_a_suggestion() -> None:
    error = error_of({"max_token": 5}, chat.CHAT_PARAMETERS)
    assert error.message == "Unknown parameter 'max_token'. Did you mean 'max_tokens'?"
    # A parameter that is not supported is no help.
    assert error_of({"audios": 5}, chat.CHAT_PARAMETERS).message == "Unknown parameter 'audios'."


def test_a_misspelled_header_gets_a_suggestion() -> None:
    with pytest.raises(ApiError, match=r"Did you mean 'x-headrace-deadline-ms'\?"):
        extra_fields({}, {"x-headrace-deadline": "5"})


def test_a_long_name_is_cut_in_the_error() -> None:
    assert len(error_of({"x" * 10_000: 1}, {}).message) < 200


@pytest.mark.parametrize("where", TABLES)
def test_the_schema_has_what_is_honoured_and_no_more(where: str) -> None:
    components: dict[str, Any] = {}
    body_schema(TABLES[where], "Body", components)
    body = components["Body"]
    assert set(body["properties"]) == {name for name, each in TABLES[where].items() if each.unsupported is None}
    assert body["additionalProperties"] is False
    assert set(body["required"]) == {name for name, each in TABLES[where].items() if each.required}


def test_headers_are_read_where_the_body_says_nothing() -> None:
    headers = {"x-headrace-deadline-ms": "250", "x-headrace-priority": "-2", "x-headrace-cache": "off", "host": "x"}
    found = extra_fields({"priority": 4}, headers)
    assert (found["deadline_s"], found["priority"], found["cache"]) == (0.25, 4, "off")
    assert "deadline_ms" not in found


@asynchronous
async def test_speculation_is_chosen_by_request_in_every_dialect() -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    requests = (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {**chat, "max_tokens": 5}),
    )
    async with serving() as running:
        running.engine.answer = words("one")
        for path, body in requests:
            for given, header, expected in (
                ({}, None, True),
                ({"speculate": False}, None, False),
                ({}, "false", False),
                ({"speculate": True}, "false", True),
            ):
                headers = {} if header is None else {"x_headrace_speculate": header}
                answer = await running.ask("POST", path, {"model": "mini", **body, **given}, **headers)
                assert answer.status == 200, answer.body
                assert running.engine.streams[-1].request.speculate is expected
        wrong = await running.ask("POST", "/v1/completions", {"prompt": "Hello", "speculate": "often"})
        assert (wrong.status, wrong.error["param"]) == (400, "speculate")


@pytest.mark.parametrize(
    ("name", "value"), [("deadline-ms", "nan"), ("deadline-ms", "-1"), ("cache", ""), ("colour", "red")]
)
def test_a_header_that_is_wrong_is_named_even_where_the_body_has_the_last_word(name: str, value: str) -> None:
    with pytest.raises(ApiError) as raised:
        extra_fields({"deadline_ms": 5.0, "cache": "on"}, {f"x-headrace-{name}": value})
    assert (raised.value.status, raised.value.parameter) == (400, f"x-headrace-{name}")


def test_the_limits_of_the_configuration_hold() -> None:
    limits = RequestLimits(choices=2, messages=1, stop=1, logprobs=3, tools=1)
    say = {"role": "user", "content": "a"}
    for wishes, parameter in (
        ({"n": 3}, "n"),
        ({"messages": [say, say]}, "messages"),
        ({"stop": ["a", "b"]}, "stop"),
        ({"logprobs": True, "top_logprobs": 4}, "top_logprobs"),
    ):
        body = msgspec.json.encode({"messages": [say], **wishes})
        with pytest.raises(ApiError) as raised:
            chat.read_chat_request(body, {}, limits)
        assert raised.value.parameter == parameter
