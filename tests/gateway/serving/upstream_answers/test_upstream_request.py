"""What is asked of an upstream: every field is sent, done here, or refused by its parameter's name."""

from __future__ import annotations

import json
from typing import Any, Final, get_args

import msgspec
import pytest

from headrace.config.upstream_section import (
    KINDS,
    UpstreamConfig,
    UpstreamFeatures,
    UpstreamKind,
    check_upstream,
    features_of,
)
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import PipelineOptions, SourceText, TextRequest, Tool
from headrace.gateway.serving.upstream_answers.upstream_request import (
    FIELD_HANDLING,
    UpstreamRequest,
    build_upstream_request,
)
from tests.support.fake_upstream import exchange

TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}}, strict=True)
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}}}'


def wanted(kind: UpstreamKind = "compatible", takes: UpstreamFeatures | None = None, **asked: Any) -> UpstreamRequest:
    config = UpstreamConfig(url="http://upstream/v1", kind=kind, takes=takes or UpstreamFeatures(), context=4096)
    return build_upstream_request(exchange(**asked), config, features_of(config), model="theirs", secret="s")


def body(kind: UpstreamKind = "compatible", takes: UpstreamFeatures | None = None, **asked: Any) -> dict[str, Any]:
    return json.loads(wanted(kind, takes, **asked).body)


def refused(
    parameter: str, kind: UpstreamKind = "compatible", takes: UpstreamFeatures | None = None, **asked: Any
) -> str:
    with pytest.raises(ApiError) as error:
        wanted(kind, takes, **asked)
    assert error.value.status == 400
    assert error.value.parameter == parameter
    return str(error.value)


# A value of each field that asks for something, what is asked beside it, and the parameter that an upstream which takes
# nothing refuses by. None: it is done here, or is a wish, so that nobody has to refuse it.
ASKING: Final[dict[str, tuple[dict[str, Any], str | None]]] = {
    "model": ({}, None),
    "messages": ({"messages": [{"role": "user", "content": "Hi"}]}, None),
    "prompts": ({"prompts": [[1, 2]]}, "prompt"),
    "tools": ({"tools": (TOOL,)}, "tools"),
    "choosing": ({"tools": (TOOL,), "choosing": "required"}, "tools"),
    "only_tool": ({"tools": (TOOL,), "choosing": "required", "only_tool": "look"}, "tools"),
    "allowed_tools": ({"tools": (TOOL, Tool("other")), "allowed_tools": ("look",)}, "tools"),
    "parallel_calls": ({"tools": (TOOL,), "parallel_calls": False}, "tools"),
    "grammar": ({"grammar": Grammar("json_object"), "grammar_of": "response_format"}, "response_format"),
    "grammar_of": ({"grammar": Grammar("regex", "a"), "grammar_of": "guided_regex"}, "guided_regex"),
    "template": ({"template": {"tone": "dry"}}, "chat_template_kwargs"),
    "template_hints": ({"template_hints": {"reasoning_effort": "low"}}, None),
    "show_reasoning": ({"show_reasoning": False}, None),
    "prediction": ({"prediction": "Hello"}, None),
    "begun": ({"begun": "Hello"}, None),
    "think": ({"think": False}, None),
    "max_tokens": ({"max_tokens": 7}, None),
    "min_tokens": ({"min_tokens": 7}, "min_tokens"),
    "stop": ({"stop": ("a",)}, "stop"),
    "stop_ids": ({"stop_ids": frozenset({3})}, "stop_token_ids"),
    "ignore_eos": ({"ignore_eos": True}, "ignore_eos"),
    "n": ({"n": 2}, "n"),
    "prompt_logprobs": ({"prompts": ["Hi"], "prompt_logprobs": 1, "echo": True}, "echo"),
    "speculate": ({"speculate": False}, None),
    "skip_special_tokens": ({"skip_special_tokens": False}, None),
    "echo": ({"prompts": ["Hi"], "echo": True, "sampling": SamplingParams(logprobs=1)}, "echo"),
    "stream": ({"stream": True}, None),
    "include_usage": ({"stream": True, "include_usage": True}, None),
    "continuous_usage": ({"stream": True, "include_usage": True, "continuous_usage": True}, None),
    "deadline_s": ({"deadline_s": 1.0}, None),
    "surface": ({"surface": "voice"}, None),
    "profile": ({"profile": "fast"}, None),
    "priority": ({"priority": 3}, None),
    "cache": ({"cache": "off"}, "cache"),
    "user": ({"user": "somebody"}, None),
    "metadata": ({"metadata": {"a": "b"}}, None),
    "sources": ({"sources": (SourceText("a", "A text"),)}, None),
    "overflow": ({"overflow": "drop"}, None),
    "rewrite": ({"rewrite": "steady"}, None),
    "seeded": ({"seeded": True}, None),
    "degrade": ({"degrade": "off"}, None),
    "pipeline": ({"pipeline": PipelineOptions(filters={"year": 2026})}, None),
    "sampling": ({"sampling": SamplingParams(temperature=0.5)}, None),
    "temperature": ({"sampling": SamplingParams(temperature=0.5)}, None),
    "top_k": ({"sampling": SamplingParams(top_k=5)}, "top_k"),
    "top_p": ({"sampling": SamplingParams(top_p=0.5)}, None),
    "min_p": ({"sampling": SamplingParams(min_p=0.5)}, "min_p"),
    "repetition_penalty": ({"sampling": SamplingParams(repetition_penalty=1.5)}, "repetition_penalty"),
    "frequency_penalty": ({"sampling": SamplingParams(frequency_penalty=0.5)}, "frequency_penalty"),
    "presence_penalty": ({"sampling": SamplingParams(presence_penalty=0.5)}, "presence_penalty"),
    "logit_bias": ({"sampling": SamplingParams(logit_bias={5: 1.0})}, "logit_bias"),
    "seed": ({"sampling": SamplingParams(seed=5)}, None),
    "logprobs": ({"sampling": SamplingParams(logprobs=2)}, "logprobs"),
}
FIELDS: Final = list(TextRequest.__struct_fields__) + list(SamplingParams.__struct_fields__)
# Chat and completions, and nothing beyond them.
_SWITCHES: Final[dict[str, Any]] = {
    name: False for name in UpstreamFeatures.__struct_fields__ if isinstance(getattr(KINDS["vllm"], name), bool)
}
_LEAST: Final[dict[str, Any]] = {"chat": True, "completions": True, "grammars": (), "stops": 0, "thinking": "none"}
NOTHING: Final = UpstreamFeatures(**(_SWITCHES | _LEAST))


def test_every_field_has_a_fate_and_a_trial() -> None:
    assert set(FIELD_HANDLING) == set(FIELDS) == set(ASKING)


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_is_dropped_by_an_upstream_that_takes_little(field: str) -> None:
    asked, parameter = ASKING[field]
    if parameter is not None:
        assert f"'{parameter}'" in refused(parameter, takes=NOTHING, **asked)
    else:
        wanted(takes=NOTHING, **asked)
        assert FIELD_HANDLING[field].startswith(("done here", "wish", "each")) or field in (
            "model",
            "messages",
            "max_tokens",
            "temperature",
            "top_p",
            "priority",
            "user",
            "seed",
        )


@pytest.mark.parametrize("field", FIELDS)
def test_what_an_upstream_takes_changes_the_body(field: str) -> None:
    everything = UpstreamFeatures(user=True, priority=True, token_prompts=True, thinking="template")
    asked, _ = ASKING[field]
    plain = wanted("vllm", everything)
    told = wanted("vllm", everything, **asked)
    if FIELD_HANDLING[field].startswith("done here: ") or field == "model":
        return
    if field == "messages":
        assert json.loads(told.body)["messages"] == asked["messages"]
    else:
        assert json.loads(told.body) != json.loads(plain.body)


@pytest.mark.parametrize("kind", get_args(UpstreamKind))
def test_every_kind_says_everything_of_itself(kind: UpstreamKind) -> None:
    takes = features_of(UpstreamConfig(url="http://upstream/v1", kind=kind))
    assert [name for name in UpstreamFeatures.__struct_fields__ if getattr(takes, name) is None] == []
    assert json.loads(wanted(kind).body)["messages"] == [{"role": "user", "content": "Hello there"}]


def test_what_the_configuration_says_has_the_last_word() -> None:
    refused("tools", "vllm", UpstreamFeatures(tools=False), tools=(TOOL,))
    assert "top_k" not in body("vllm", UpstreamFeatures(top_k=False))


def test_hints_for_the_template_are_sent_where_they_can_be() -> None:
    hints = {"reasoning_effort": "low", "verbosity": "high"}
    effort = UpstreamFeatures(thinking="effort", template=False)
    assert body(takes=effort, template_hints=hints)["reasoning_effort"] == "low"
    assert "chat_template_kwargs" not in body(takes=effort, template_hints=hints)
    assert body("vllm", template_hints=hints, template={"verbosity": "low"})["chat_template_kwargs"] == {
        "reasoning_effort": "low",
        "verbosity": "low",
    }
    nothing = body(takes=NOTHING, template_hints=hints)
    assert "reasoning_effort" not in nothing
    assert "chat_template_kwargs" not in nothing


def test_a_chat_in_the_shape_of_the_api() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look", "name": "bob"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "seen", "tool_call_id": "c1", "name": "look"},
    ]
    told = {**call, "function": {"name": "look", "arguments": '{"at":"x"}'}}
    wished = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look", "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [told]},
        {"role": "tool", "content": "seen", "tool_call_id": "c1"},
    ]
    assert body(messages=messages)["messages"] == wished
    wished[2] = {**wished[2], "reasoning_content": "hm"}
    assert body("vllm", messages=messages)["messages"] == wished


def test_the_body_of_a_plain_chat_has_nothing_that_is_not_needed() -> None:
    asked: dict[str, Any] = {"sampling": SamplingParams(temperature=1.0, seed=7), "max_tokens": 9}
    assert body(**asked) == {
        "model": "theirs",
        "messages": [{"role": "user", "content": "Hello there"}],
        "temperature": 1.0,
        "seed": 7,
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert body("openai", **asked)["max_completion_tokens"] == 9
    assert "stream" not in body(takes=UpstreamFeatures(stream=False))
    assert "stream_options" not in body(takes=UpstreamFeatures(stream_options=False))
    assert "seed" not in body(takes=UpstreamFeatures(seed=False))


def test_servers_with_defaults_of_their_own_are_told_every_setting() -> None:
    common = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    told_more: tuple[tuple[UpstreamKind, dict[str, float]], ...] = (
        ("vllm", {"top_k": -1, "repetition_penalty": 1.0}),
        ("sglang", {"top_k": -1, "repetition_penalty": 1.0}),
        ("llama.cpp", {"top_k": 0, "repeat_penalty": 1.0}),
    )
    for kind, more in told_more:
        told = body(kind)
        assert {name: told[name] for name in (common | more)} == common | more


def test_tools_and_how_they_are_chosen() -> None:
    function = {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        "strict": True,
    }
    told = body(tools=(TOOL, Tool("wait")), parallel_calls=False)
    assert told["tools"][0] == {"type": "function", "function": function}
    assert told["tools"][1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert told["tool_choice"] == "auto"
    assert told["parallel_tool_calls"] is False
    assert body(tools=(TOOL,), choosing="required")["tool_choice"] == "required"
    named = body(tools=(TOOL,), choosing="required", only_tool="look")
    assert named["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert "tools" not in body(tools=(TOOL,), choosing="none")
    assert wanted(tools=(TOOL,), parallel_calls=False).one_call


def test_what_an_answer_is_held_to() -> None:
    schema = Grammar("json_schema", SCHEMA)
    told = body(grammar=schema)["response_format"]
    assert told == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": json.loads(SCHEMA), "strict": True},
    }
    assert body(grammar=Grammar("json_object"))["response_format"] == {"type": "json_object"}
    assert body("vllm", grammar=Grammar("regex", "a+"))["structured_outputs"] == {"regex": "a+"}
    assert body("vllm", grammar=Grammar("choice", '["a","b"]'))["structured_outputs"] == {"choice": ["a", "b"]}
    assert body("vllm", grammar=Grammar("lark", "start: A"))["structured_outputs"] == {"grammar": "start: A"}
    assert body("sglang", grammar=Grammar("regex", "a+"))["regex"] == "a+"
    assert body("headrace", grammar=Grammar("choice", '["a"]'))["guided_choice"] == ["a"]
    assert body("headrace", prompts=["x"], grammar=schema)["guided_json"] == SCHEMA
    refused("guided_choice", "sglang", grammar=Grammar("choice", '["a"]'), grammar_of="guided_choice")
    refused("response_format", "tgi", grammar=schema, grammar_of="response_format")
    refused("guided_json", grammar=Grammar("json_schema", '{"a":'), grammar_of="guided_json")


def test_reasoning_is_wished_for_in_the_servers_own_words() -> None:
    assert body("vllm", think=False)["chat_template_kwargs"] == {"enable_thinking": False}
    assert body("vllm", think=True, template={"enable_thinking": False})["chat_template_kwargs"] == {
        "enable_thinking": False
    }
    assert body("openai", think=False)["reasoning_effort"] == "none"
    assert body("openai", think=True)["reasoning_effort"] == "medium"
    assert body("openai", think=True, template={"reasoning_effort": "high"})["reasoning_effort"] == "high"
    assert wanted(think=False).hide_reasoning
    assert not wanted(think=True).hide_reasoning
    assert not wanted("vllm", think=False).hide_reasoning


def test_completions_are_prompts() -> None:
    told = wanted("vllm", prompts=["one", [4, 5]], n=2)
    assert told.path == "/completions"
    assert told.choices == 4
    assert json.loads(told.body)["prompt"] == ["one", [4, 5]]
    assert body("vllm", prompts=["one"])["prompt"] == "one"
    refused("prompt", prompts=["one"])
    refused("prompt", "tgi", prompts=["one", "two"])
    refused("prompt", "tgi", prompts=[[1]])
    refused("messages", takes=UpstreamFeatures(chat=False, completions=True))


def test_a_prompt_is_put_before_its_answer_by_the_upstream_or_here() -> None:
    assert body("vllm", prompts=["Hi"], echo=True)["echo"] is True
    here = wanted("llama.cpp", prompts=["Hi"], echo=True)
    assert "echo" not in json.loads(here.body)
    assert here.echo == ("Hi",)
    assert not here.plain
    refused("echo", "llama.cpp", prompts=["Hi"], echo=True, prompt_logprobs=0)


def test_log_probabilities() -> None:
    told = body(sampling=SamplingParams(logprobs=0))
    assert told["logprobs"] is True
    assert told["top_logprobs"] == 0
    assert body("llama.cpp", sampling=SamplingParams(logprobs=0))["top_logprobs"] == 1
    assert body("vllm", prompts=["x"], sampling=SamplingParams(logprobs=3))["logprobs"] == 3


def test_lengths_are_held_to_the_context_where_the_prompt_is_known() -> None:
    config = UpstreamConfig(url="http://upstream/v1", context=100)
    for most, known, told in ((50, 90, 10), (50, 20, 50), (50, None, 50), (5, 200, 1)):
        made = build_upstream_request(
            exchange(max_tokens=most), config, features_of(config), model="x", prompt_tokens=known
        )
        assert json.loads(made.body)["max_tokens"] == told


def test_too_many_stop_texts_are_refused() -> None:
    assert body(stop=("a", "b"))["stop"] == ["a", "b"]
    assert "at most 4" in refused("stop", stop=tuple("abcde"))


def test_large_biases_and_seeds_fit_what_others_take() -> None:
    told = body(sampling=SamplingParams(logit_bias={1: 10000.0, 2: -10000.0, 3: 1.5}, seed=2**63 + 12345))
    assert told["logit_bias"] == {"1": 100.0, "2": -100.0, "3": 1.5}
    assert 0 <= told["seed"] < 2**31
    assert told["seed"] == body(sampling=SamplingParams(seed=2**63 + 12345))["seed"]
    assert body(sampling=SamplingParams(seed=42))["seed"] == 42


def test_tenants_have_salts_of_their_own_that_do_not_tell_their_names() -> None:
    one, other = body("vllm", tenant="acme"), body("vllm", tenant="globex")
    assert one["cache_salt"] != other["cache_salt"]
    assert one["cache_salt"] == body("vllm", tenant="acme")["cache_salt"]
    assert "acme" not in one["cache_salt"]
    alone = body("vllm", cache="off")
    assert alone["cache_salt"] not in (one["cache_salt"], body("vllm", cache="off")["cache_salt"])
    assert body("llama.cpp", cache="off")["cache_prompt"] is False
    assert body("headrace", cache="off")["cache"] == "off"


def test_priorities_are_told_the_way_round_that_the_server_has_them() -> None:
    assert body("headrace", priority=3)["priority"] == 3
    assert body("vllm", UpstreamFeatures(priority=True), priority=3)["priority"] == -3
    assert "priority" not in body("vllm", priority=3)


def test_half_a_character_is_refused() -> None:
    with pytest.raises(ApiError, match="surrogate"):
        wanted(messages=[{"role": "user", "content": "\ud83d"}])


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"url": "ftp://x"}, "u.url"),
        ({"url": "http://"}, "u.url"),
        ({"url": "http://me:secret@host/v1"}, "u.url"),
        ({"url": "http://host:99999/v1"}, "u.url"),
        ({"url": "http://host/v1?a=b"}, "u.url"),
        ({"key": "a", "key_env": "B"}, "u"),
        ({"key_env": "NONE"}, "u.key_env"),
        ({"key": "a\nb"}, "u.key"),
        ({"headers": {"x y": "z"}}, "u.headers"),
        ({"headers": {"x": "a\r\nb: c"}}, "u.headers"),
        ({"headers": {"Content-Length": "3"}}, "u.headers"),
        ({"takes": UpstreamFeatures(chat=False)}, "u.takes"),
        ({"health": {"path": "health"}}, "u.health.path"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_told_with_its_place(changes: dict[str, Any], where: str) -> None:
    fields = {"url": "http://host/v1"} | {
        name: msgspec.to_builtins(value) if isinstance(value, UpstreamFeatures) else value
        for name, value in changes.items()
    }
    config = msgspec.convert(fields, UpstreamConfig)
    found = list(check_upstream(config, {"KEY": "k"}, "u"))
    assert [place for place, _ in found] == [where]
    assert "secret" not in str(found)


def test_a_right_configuration_has_nothing_wrong() -> None:
    config = UpstreamConfig(url="https://[::1]:8443/v1", key_env="KEY", headers={"x-team": "a"}, key_header="api-key")
    assert list(check_upstream(config, {"KEY": "k"}, "u")) == []
