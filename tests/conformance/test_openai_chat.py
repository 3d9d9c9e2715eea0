"""`/v1/chat/completions` as the openai package uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": "What is time to first token?"}]
SHORT: dict[str, Any] = {"model": "mini", "messages": MESSAGES, "max_tokens": 12}


def ask(client: openai.OpenAI, **wishes: Any) -> ChatCompletion:
    found = client.chat.completions.create(**{**SHORT, **wishes})
    assert isinstance(found, ChatCompletion)
    return found


def stream(client: openai.OpenAI, **wishes: Any) -> list[ChatCompletionChunk]:
    return list(client.chat.completions.create(**{**SHORT, **wishes}, stream=True))


def text(answer: ChatCompletion, index: int = 0) -> str:
    found = answer.choices[index].message.content
    assert found is not None
    return found


def joined(chunks: Sequence[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index)


def only(answer: str, limit: int = 60) -> dict[str, Any]:
    """Wishes that make the model say just this."""
    return {"extra_body": {"guided_choice": [answer]}, "max_tokens": limit}


def test_an_answer_has_the_shape_that_the_package_knows(client: openai.OpenAI) -> None:
    answer = ask(client, temperature=0)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "mini"
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("fp_")
    (choice,) = answer.choices
    assert (choice.index, choice.message.role, choice.logprobs) == (0, "assistant", None)
    assert choice.message.tool_calls is None
    assert choice.message.refusal is None
    assert choice.finish_reason in ("stop", "length")


def test_usage_adds_up(client: openai.OpenAI) -> None:
    answer = ask(client, **only("one two three"))
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert usage.completion_tokens_details.rejected_prediction_tokens == 0
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_max_completion_tokens_is_the_newer_name(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=9, max_completion_tokens=2, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert answer.choices[0].finish_reason == "length"


def test_an_answer_that_is_done_stops(client: openai.OpenAI) -> None:
    answer = ask(client, **only("done"))
    assert (text(answer), answer.choices[0].finish_reason) == ("done", "stop")


@pytest.mark.parametrize("wishes", [{"temperature": 0}, {"temperature": 1.5, "seed": 7}, {"seed": -3}])
def test_the_deltas_of_a_stream_are_the_whole_answer(client: openai.OpenAI, wishes: dict[str, Any]) -> None:
    whole = ask(client, **wishes)
    chunks = stream(client, **wishes)
    assert joined(chunks) == text(whole)
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert ends == [whole.choices[0].finish_reason]


def test_the_chunks_of_a_stream_are_of_one_answer(client: openai.OpenAI) -> None:
    chunks = stream(client)
    for field in ("id", "created", "model", "system_fingerprint", "object"):
        assert len({getattr(chunk, field) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_in_a_last_chunk_of_its_own(client: openai.OpenAI) -> None:
    whole = ask(client, temperature=0)
    chunks = stream(client, temperature=0, stream_options={"include_usage": True})
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_a_seed_repeats_an_answer_and_another_draws_another(client: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {"temperature": 2, "max_tokens": 8}
    answers = [text(ask(client, seed=seed, **wishes)) for seed in (5, 5, 6)]
    assert answers[0] == answers[1] != answers[2]


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    answers = {text(ask(client, temperature=2, max_tokens=8)) for _ in range(3)}
    assert len(answers) > 1


def test_every_choice_ends_once_and_the_first_is_that_of_one(client: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {"temperature": 2, "seed": 11, "max_tokens": 6}
    alone = ask(client, **wishes)
    whole = ask(client, n=3, **wishes)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert text(whole) == text(alone)
    assert len({text(whole, index) for index in range(3)}) > 1
    assert whole.usage is not None
    assert alone.usage is not None
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens

    chunks = stream(client, n=3, stream_options={"include_usage": True}, **wishes)
    for index in range(3):
        ours = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert [choice.delta.role for choice in ours if choice.delta.role] == ["assistant"]
        assert [choice.finish_reason for choice in ours if choice.finish_reason] == [whole.choices[index].finish_reason]
        assert ours[-1].finish_reason is not None
        assert joined(chunks, index) == text(whole, index)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("said", ["one two three", "Grüße, 日本語 🦜!"])
def test_the_bytes_of_logprobs_are_the_text(client: openai.OpenAI, said: str) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3, **only(said))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(each.bytes or ()) for each in logprobs.content).decode() == text(answer) == said
    for each in logprobs.content:
        assert each.logprob <= 0
        tokens = [top.token for top in each.top_logprobs]
        assert each.token in tokens
        assert len(tokens) == (3 if each.token in tokens[:3] else 4)
        values = [top.logprob for top in each.top_logprobs]
        assert values == sorted(values, reverse=True)


def test_the_likeliest_token_is_the_greedy_one(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=2, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert all(each.token == each.top_logprobs[0].token for each in logprobs.content)
    assert b"".join(bytes(each.bytes or ()) for each in logprobs.content).decode() == text(answer)


def test_streamed_logprobs_are_those_of_the_whole(client: openai.OpenAI) -> None:
    whole = ask(client, logprobs=True, top_logprobs=1, seed=2).choices[0].logprobs
    chunks = stream(client, logprobs=True, top_logprobs=1, seed=2)
    found = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    assert whole is not None
    assert [each for logprobs in found for each in logprobs.content or ()] == whole.content


def test_a_stop_text_never_shows(client: openai.OpenAI) -> None:
    wishes = only("alpha beta gamma delta")
    for stop, left in (("gamma", "alpha beta "), (["nothing", "a g"], "alpha bet"), ("alpha", "")):
        answer = ask(client, stop=stop, logprobs=True, **wishes)
        assert (text(answer), answer.choices[0].finish_reason) == (left, "stop")
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert b"".join(bytes(each.bytes or ()) for each in logprobs.content or ()).decode() == left
        chunks = stream(client, stop=stop, **wishes)
        assert joined(chunks) == left


def test_a_stop_text_that_does_not_come_changes_nothing(client: openai.OpenAI) -> None:
    said = "alpha beta gamma"
    chunks = stream(client, stop=["gammas", "beta beta"], **only(said))
    assert joined(chunks) == said


def test_logit_bias_forces_and_forbids(client: openai.OpenAI, http: Any) -> None:
    token = http.post("/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()["tokens"][0]
    assert text(ask(client, logit_bias={str(token): 100}, max_tokens=3)) == "xxx"
    plain = ask(client, temperature=0, max_tokens=1, logprobs=True)
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    first = http.post("/tokenize", json={"prompt": text(plain), "add_special_tokens": False}).json()["tokens"]
    assert len(first) == 1
    assert text(ask(client, temperature=0, max_tokens=1, logit_bias={str(first[0]): -100})) != text(plain)


def test_penalties_keep_from_repeating(client: openai.OpenAI, http: Any) -> None:
    plain = {"add_special_tokens": False}
    tokens = [http.post("/tokenize", json={"prompt": each, **plain}).json()["tokens"][0] for each in "xy"]
    bias = {str(token): 99 for token in tokens}  # far above all others
    wishes: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "logit_bias": bias}
    punished = text(ask(client, frequency_penalty=2, presence_penalty=2, **wishes))
    assert set(punished) == {"x", "y"}
    assert set(text(ask(client, frequency_penalty=-2, presence_penalty=-2, **wishes))) in ({"x"}, {"y"})


def test_user_and_metadata_are_taken_and_metadata_is_handed_back(client: openai.OpenAI) -> None:
    answer = ask(client, user="somebody", metadata={"trace": "7"}, store=False, max_tokens=1)
    assert answer.metadata == {"trace": "7"}
    assert ask(client, max_tokens=1).metadata is None


def test_a_prediction_changes_no_answer(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is paging?"}]
    plain = client.chat.completions.create(model="mini", messages=messages, temperature=0, max_tokens=40)
    said = plain.choices[0].message.content or ""
    for text in (said, said[: len(said) // 2] + " but not so", "Nothing like it."):
        predicted = client.chat.completions.create(
            model="mini",
            messages=messages,
            temperature=0,
            max_tokens=40,
            prediction={"type": "content", "content": text},
        )
        assert predicted.choices[0].message.content == said


def test_parts_of_text_are_a_text(client: openai.OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "What is time to first token?"}]}]
    assert text(ask(client, messages=parts, temperature=0)) == text(ask(client, temperature=0))


def test_developer_messages_are_system_messages(client: openai.OpenAI) -> None:
    answers = [
        text(ask(client, messages=[{"role": role, "content": "Be brief."}, *MESSAGES], temperature=0))
        for role in ("system", "developer")
    ]
    assert answers[0] == answers[1]


def test_null_is_the_same_as_nothing(client: openai.OpenAI) -> None:
    nulls: dict[str, Any] = dict.fromkeys(("stop", "n", "seed", "logit_bias", "tools", "response_format", "user"))
    assert text(ask(client, temperature=0, **nulls)) == text(ask(client, temperature=0))


class City(BaseModel):
    name: str
    people: int
    capital: bool


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["colour", "size", "tags"],
    "additionalProperties": False,
}


class Tagged(BaseModel, extra="forbid"):
    colour: str
    size: int
    tags: list[str]


@pytest.mark.parametrize("streaming", [False, True])
def test_strict_json_is_of_its_schema(client: openai.OpenAI, streaming: bool) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
    wishes: dict[str, Any] = {"response_format": wanted, "max_tokens": 120, "temperature": 1, "seed": 4}
    if streaming:
        said = joined(stream(client, **wishes))
    else:
        answer = ask(client, **wishes)
        assert answer.choices[0].finish_reason == "stop"
        said = text(answer)
    found = Tagged.model_validate_json(said)
    assert found.colour in ("red", "green")
    assert 0 <= found.size <= 99
    assert len(found.tags) <= 2
    assert all(len(tag) <= 4 for tag in found.tags)


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    class Small(BaseModel):
        yes: bool
        size: int

    answer = client.chat.completions.parse(
        model="mini", messages=MESSAGES, response_format=Small, max_tokens=60, temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Small)


def test_parse_says_where_the_answer_was_cut(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="mini", messages=MESSAGES, response_format=City, max_tokens=2)


def test_a_json_object_begins_as_one(client: openai.OpenAI) -> None:
    answer = ask(client, response_format={"type": "json_object"}, temperature=0, max_tokens=20)
    assert text(answer).startswith("{")


def test_the_streaming_helper_follows(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**{**SHORT, **only("step by step")}) as events:
        deltas = "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    assert deltas == final.choices[0].message.content == "step by step"


def test_the_async_client_streams_several_at_once(base_url: str) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> tuple[str, str]:
        wishes: dict[str, Any] = {**SHORT, "seed": seed, "max_tokens": 6}
        whole = await client.chat.completions.create(**wishes)
        streamed = [chunk async for chunk in await client.chat.completions.create(**wishes, stream=True)]
        return text(whole), joined(streamed)

    async def all_of_them() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(4)))

    for whole, streamed in asyncio.run(all_of_them()):
        assert whole == streamed


def test_a_stream_that_is_left_early_leaves_the_server_well(client: openai.OpenAI) -> None:
    with client.chat.completions.create(**{**SHORT, "max_tokens": 500}, stream=True) as chunks:
        for _, chunk in zip(range(3), chunks, strict=False):
            assert chunk.id
    assert text(ask(client, **only("still here"))) == "still here"
