"""`/v1/completions` without a server: what is read of bodies, and what is written of pieces."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headrace.config import RequestLimits
from headrace.engine.interface import outputs
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput
from headrace.engine.interface.request import FinishReason
from headrace.engine.interface.sampling import SampledToken
from headrace.gateway.api_errors import ApiError
from headrace.gateway.output.choice_reader import ChoiceReader
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, TextRequest, TokenLogprob, TokenUsage
from headrace.server.api.completions import CompletionStream, completion_body, parse_prompts, read_completion_request
from tests.support.dialect_exchanges import exchange_for, streamed, tokenizer


def asked(**wishes: Any) -> TextRequest:
    return read_completion_request(msgspec.json.encode({"prompt": "Hi", **wishes}), {}, RequestLimits())


def chunks(stream: bytes) -> list[dict[str, Any]]:
    parts = stream.decode().split("\n\n")
    assert parts.pop() == ""
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [2]], ["a", [2]]),
    ],
)
def test_a_prompt_is_a_text_tokens_or_several_of_either(given: Any, prompts: list[Any]) -> None:
    assert asked(prompt=given).prompts == prompts


@pytest.mark.parametrize(
    "given", [[], [[]], [1, "a"], [True], [1.0], [None], [[1, None]], [["a"]], {"a": 1}, 5, [[-1]]]
)
def test_anything_else_is_no_prompt(given: Any) -> None:
    with pytest.raises(ApiError) as raised:
        asked(prompt=given)
    assert raised.value.parameter is not None
    assert raised.value.parameter.startswith("prompt")


def test_there_are_not_too_many_prompts() -> None:
    assert len(parse_prompts(["a"] * 4, "prompt", 4)) == 4
    with pytest.raises(ApiError):
        parse_prompts(["a"] * 5, "prompt", 4)
    with pytest.raises(ApiError) as raised:
        asked(prompt=["a"] * 1000, n=2)
    assert raised.value.parameter == "n"


def test_sixteen_tokens_by_default() -> None:
    assert asked().max_tokens == 16
    with pytest.raises(ApiError) as raised:
        asked(min_tokens=17)
    assert raised.value.parameter == "min_tokens"


def test_nothing_is_generated_where_the_prompt_is_scored() -> None:
    found = asked(max_tokens=0, echo=True, logprobs=1)
    assert (found.max_tokens, found.echo, found.prompt_logprobs) == (0, True, 1)
    for wishes, parameter in (({"n": 2}, "n"), ({"min_tokens": 1}, "min_tokens")):
        with pytest.raises(ApiError) as raised:
            asked(max_tokens=0, **wishes)
        assert raised.value.parameter == parameter


def test_a_prompt_that_was_not_scored_to_its_end_before_the_deadline_has_all_of_its_tokens() -> None:
    prompt = tuple(tokenizer().encode("The first token costs more", False))
    reader = ChoiceReader(0, tokenizer(), echo=prompt, logprobs=True, only_prompt=True)
    measured = [SampledToken(each, -1.0) for each in prompt[1:3]]
    ending = SequenceEnd(FinishReason.DEADLINE, outputs.SequenceUsage(len(prompt), 0, 0, 0, 0, 0.0, 0.0, 0.0))
    piece = reader.read(SequenceOutput("one", 0, [], "", [], measured, None, ending))
    assert piece.finish == "deadline"
    assert piece.logprobs is not None
    assert [each.logprob for each in piece.logprobs] == [None, -1.0, -1.0, *[None] * (len(prompt) - 3)]
    assert "".join(each.shown for each in piece.logprobs) == piece.content == tokenizer().decode(prompt)


def token(text: str, shown: str | None = None) -> TokenLogprob:
    return TokenLogprob(text, text.encode(), -1.0, [(text, text.encode(), -1.0)], text if shown is None else shown)


def test_offsets_are_those_of_the_text() -> None:
    first = TokenLogprob("<|begin|>", b"<|begin|>", None, [])  # no part of the text
    parts = [token("\ufffd", ""), token("\ufffd", "é")]
    found = [first, token("One"), *parts, token(" two"), token("<|end|>", "")]
    exchange = exchange_for(asked(logprobs=1))
    logprobs = completion_body(exchange, [Choice(0, content="Oneé two", logprobs=found)])["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 3, 3, 4, 8]
    assert logprobs["token_logprobs"] == [None, -1, -1, -1, -1, -1]
    assert logprobs["top_logprobs"][:2] == [None, {"One": -1.0}]
    assert logprobs["tokens"] == ["", "One", "", "é", " two", ""]
    pieces = [
        ChoiceDelta(0, content="One", logprobs=found[:2]),
        ChoiceDelta(0, content="é two", logprobs=found[2:]),
        ChoiceDelta(0, finish="stop", logprobs=[], usage=TokenUsage()),
    ]
    told = chunks(streamed(CompletionStream(exchange), pieces))
    offsets = [offset for chunk in told for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == logprobs["text_offset"]


def test_of_tokens_that_look_alike_the_likelier_is_told() -> None:
    alike = TokenLogprob("\ufffd", b"\xc3", -0.1, [("\ufffd", b"\xc3", -0.1), ("\ufffd", b"\xe2", -3.0)])
    found = completion_body(exchange_for(asked(logprobs=2)), [Choice(0, logprobs=[alike])])
    assert found["choices"][0]["logprobs"]["top_logprobs"] == [{"": -0.1, "\ufffd": -3.0}]
    other = TokenLogprob("\ufffd", b"\xe3", -9.0, [*alike.top, ("a", b"a", -4.0)])
    found = completion_body(exchange_for(asked(logprobs=2)), [Choice(0, logprobs=[other])])
    assert found["choices"][0]["logprobs"]["top_logprobs"] == [{"": -9.0, "\ufffd": -0.1, "a": -4.0}]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_usage_does_not_depend_on_which_choice_ends_first(order: tuple[int, ...]) -> None:
    """Two prompts, two answers of each: every prompt counts once."""
    wishes = asked(prompt=["a", "b c d"], n=2, stream=True, stream_options={"include_usage": True})
    usages = [TokenUsage(prompt_tokens=2 if index < 2 else 40, output_tokens=1) for index in range(4)]
    pieces = [ChoiceDelta(index, content="x", finish="stop", usage=usages[index]) for index in order]
    last = chunks(streamed(CompletionStream(exchange_for(wishes)), pieces))[-1]
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (42, 4)
    assert last["choices"] == []


# Echo, on outputs as the engine gives them


def echoed(index: int, shared: list[SampledToken], prompt: list[int], first: SequenceOutput) -> ChoiceDelta:
    return ChoiceReader(index, tokenizer(), logprobs=True, echo=prompt, measured=shared).read(first)


def test_echo_measures_the_prompt_for_every_choice() -> None:
    """The engine tells the prompt's log-probabilities with the first choice alone."""
    prompt = tokenizer().encode("The first token")
    told = [SampledToken(each, -2.0) for each in prompt[1:]]
    new = tokenizer().encode(" is", add_special_tokens=False)[:1]
    text = tokenizer().decode(new)
    shared: list[SampledToken] = []
    usage = outputs.SequenceUsage(len(prompt), 1, 0, 0, 0, 0.0, 0.0, 0.0)
    for index in range(2):
        output = SequenceOutput(
            "r", index, new, text, chosen=[SampledToken(new[0], -1.0)], ending=SequenceEnd(FinishReason.LENGTH, usage)
        )
        output.prompt = told if index == 0 else None
        piece = echoed(index, shared, prompt, output)
        assert piece.content == "The first token" + text
        assert piece.logprobs is not None
        assert [each.logprob for each in piece.logprobs] == [None, *[-2.0] * len(told), -1.0]
        assert "".join(each.shown for each in piece.logprobs) == piece.content
