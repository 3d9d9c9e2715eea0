"""`/v1/completions` as the openai package uses it."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion

SHORT: dict[str, Any] = {"model": "mini", "prompt": "The first token", "max_tokens": 6, "temperature": 0}


def ask(client: openai.OpenAI, **wishes: Any) -> Completion:
    found = client.completions.create(**{**SHORT, **wishes})
    assert isinstance(found, Completion)
    return found


def stream(client: openai.OpenAI, **wishes: Any) -> list[Completion]:
    return list(client.completions.create(**{**SHORT, **wishes}, stream=True))


def joined(chunks: list[Completion], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


@pytest.fixture(scope="module")
def tokens(http: httpx2.Client) -> list[int]:
    found = http.post("/tokenize", json={"prompt": SHORT["prompt"]}).json()["tokens"]
    assert len(found) > 1
    return found


def test_an_answer_has_the_shape_that_the_package_knows(client: openai.OpenAI, tokens: list[int]) -> None:
    answer = ask(client)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "mini")
    (choice,) = answer.choices
    assert (choice.index, choice.logprobs) == (0, None)
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_sixteen_tokens_where_no_limit_is_asked_for(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="mini", prompt="a", temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_prompt_may_be_its_tokens(client: openai.OpenAI, tokens: list[int]) -> None:
    assert ask(client, prompt=tokens).choices[0].text == ask(client).choices[0].text


def test_several_prompts_answer_in_their_order(client: openai.OpenAI, tokens: list[int]) -> None:
    other = "A stop sequence"
    alone = [ask(client, prompt=prompt) for prompt in (other, tokens)]
    together = ask(client, prompt=[other, tokens])
    assert [choice.index for choice in together.choices] == [0, 1]
    assert [choice.text for choice in together.choices] == [each.choices[0].text for each in alone]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone if each.usage is not None)
    of_tokens = ask(client, prompt=[tokens, tokens])
    assert [choice.text for choice in of_tokens.choices] == [alone[1].choices[0].text] * 2


def test_n_answers_of_each_prompt(client: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {"prompt": ["One", "Two and three"], "n": 2, "temperature": 2, "seed": 3}
    whole = ask(client, **wishes)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    chunks = stream(client, stream_options={"include_usage": True}, **wishes)
    for index in range(4):
        assert joined(chunks, index) == whole.choices[index].text
        ends = [c.finish_reason for chunk in chunks for c in chunk.choices if c.index == index and c.finish_reason]
        assert ends == [whole.choices[index].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_deltas_of_a_stream_are_the_whole_answer(client: openai.OpenAI) -> None:
    chunks = stream(client)
    assert joined(chunks) == ask(client).choices[0].text
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"text_completion"}


def test_logprobs_lie_where_the_text_does(client: openai.OpenAI) -> None:
    for answer in (ask(client, logprobs=2), ask(client, logprobs=2, stop=["e"])):
        (choice,) = answer.choices
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.text_offset is not None
        assert logprobs.top_logprobs is not None
        assert "".join(logprobs.tokens) == choice.text
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert choice.text[offset:].startswith(token)
        assert all(len(top) == 2 for top in logprobs.top_logprobs)


def test_streamed_logprobs_are_those_of_the_whole(client: openai.OpenAI) -> None:
    whole = ask(client, logprobs=1).choices[0].logprobs
    found = [c.logprobs for chunk in stream(client, logprobs=1) for c in chunk.choices if c.logprobs is not None]
    assert whole is not None
    for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [each for logprobs in found for each in getattr(logprobs, field)] == getattr(whole, field)


def test_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    answer, plain = ask(client, echo=True), ask(client)
    assert answer.choices[0].text == SHORT["prompt"] + plain.choices[0].text
    assert joined(stream(client, echo=True)) == answer.choices[0].text


def test_echo_measures_every_token_of_the_prompt(client: openai.OpenAI, tokens: list[int]) -> None:
    """As the evaluation harness uses it: the last of the tokens is the one that was made, whatever it is."""
    answer = ask(client, prompt=tokens, echo=True, logprobs=1, max_tokens=1)
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(tokens) + 1
    assert logprobs.token_logprobs[0] is None  # nothing foretells the very first token
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[:2] == [0, 0]  # it has no text
    assert logprobs.text_offset[-1] == len(SHORT["prompt"])


def test_max_tokens_0_with_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    """The classic scoring call: what comes is what a longer answer begins with."""
    prompts = ["The first token costs more — é, 😀 and ÿ.", SHORT["prompt"], "Oslo"]
    scored = ask(client, prompt=prompts, echo=True, logprobs=2, max_tokens=0)
    longer = ask(client, prompt=prompts, echo=True, logprobs=2, max_tokens=3)
    for prompt, choice, more in zip(prompts, scored.choices, longer.choices, strict=True):
        assert (choice.text, choice.finish_reason) == (prompt, "length")
        assert choice.logprobs is not None
        assert more.logprobs is not None
        tokens = choice.logprobs.tokens or []
        assert "".join(tokens) == prompt
        for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert getattr(choice.logprobs, field) == getattr(more.logprobs, field)[: len(tokens)]
        assert "".join(more.logprobs.tokens or []) == more.text
    assert scored.usage is not None
    assert longer.usage is not None
    assert (scored.usage.completion_tokens, scored.usage.prompt_tokens) == (0, longer.usage.prompt_tokens)
    chunks = stream(client, prompt=prompts[0], echo=True, logprobs=2, max_tokens=0)
    assert joined(chunks) == prompts[0]


@pytest.mark.parametrize("logprobs", [0, 1, 3])
def test_the_chosen_token_is_among_the_top(client: openai.OpenAI, logprobs: int) -> None:
    answer = ask(client, echo=True, logprobs=logprobs, temperature=2.0, seed=5, max_tokens=12)
    found = answer.choices[0].logprobs
    assert found is not None
    beside = 0
    for token, logprob, top in zip(
        found.tokens or [], found.token_logprobs or [], found.top_logprobs or [], strict=True
    ):
        if logprob is None:
            assert top is None
            continue
        assert top[token] == logprob
        assert logprobs <= len(top) <= logprobs + 1
        beside += len(top) == logprobs + 1
    assert beside > 3  # unlikely tokens come beside the likeliest


def test_max_tokens_0_without_echo_is_an_empty_text(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_echo_measures_what_score_does(client: openai.OpenAI, http: httpx2.Client) -> None:
    asked = {"prompt": "The first", "continuations": [" token"], "return_tokens": True}
    (score,) = http.post("/v1/score", json=asked).json()["data"]
    logprobs = ask(client, prompt="The first token", echo=True, logprobs=0, max_tokens=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    measured = logprobs.token_logprobs[-1 - score["tokens"] : -1]
    assert measured == [each["logprob"] for each in score["token_logprobs"]]


@pytest.mark.parametrize(
    ("wishes", "parameter"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [[1, 2], []]}, "prompt[1]"),
        ({"prompt": [[1, -2]]}, "prompt[0]"),
        ({"prompt": [10**9]}, "prompt"),
        ({"logprobs": 99}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0, "n": 2}, "n"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 17}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"min_tokens": 9}}, "min_tokens"),
        ({"extra_body": {"messages": []}}, "messages"),
        ({"extra_body": {"max_output_tokens": 5}}, "max_output_tokens"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, wishes: dict[str, Any], parameter: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **wishes)
    assert raised.value.param == parameter
