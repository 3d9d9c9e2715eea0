"""`/v1/embeddings` and `/v1/models` as the openai package uses them, and the endpoints beside them."""

from __future__ import annotations

import math
from typing import Any

import httpx2
import openai
import pytest


def test_vectors_have_the_length_of_one_and_their_places(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model="mini", input=["a wheel", "a river"])
    assert (found.object, found.model) == ("list", "mini")
    assert [(each.index, each.object) for each in found.data] == [(0, "embedding"), (1, "embedding")]
    for each in found.data:
        assert math.hypot(*each.embedding) == pytest.approx(1, abs=1e-5)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 0
    assert found.data[0].embedding != found.data[1].embedding


def test_base64_is_what_floats_are(client: openai.OpenAI) -> None:
    """The package asks for base64 unless it is told otherwise."""
    packed = client.embeddings.create(model="mini", input="a wheel").data[0].embedding
    plain = client.embeddings.create(model="mini", input="a wheel", encoding_format="float").data[0].embedding
    assert packed == pytest.approx(plain, abs=1e-7)
    raw = client.embeddings.create(model="mini", input="a wheel", encoding_format="base64").data[0].embedding
    assert isinstance(raw, str)


def test_fewer_dimensions_are_the_first_ones_scaled(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model="mini", input="a wheel").data[0].embedding
    few = client.embeddings.create(model="mini", input="a wheel", dimensions=8).data[0].embedding
    length = math.hypot(*whole[:8])
    assert few == pytest.approx([value / length for value in whole[:8]], abs=1e-5)


def test_an_embedding_does_not_depend_on_its_company(client: openai.OpenAI) -> None:
    alone = client.embeddings.create(model="mini", input="a wheel").data[0].embedding
    among = client.embeddings.create(model="mini", input=["other things", "a wheel", "more"]).data[1].embedding
    assert among == alone


def test_tokens_are_as_good_as_their_text(client: openai.OpenAI, http: httpx2.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "a wheel"}).json()["tokens"]
    text = client.embeddings.create(model="mini", input="a wheel")
    for given in (tokens, [tokens]):
        found = client.embeddings.create(model="mini", input=given)
        assert found.data[0].embedding == text.data[0].embedding
        assert found.usage == text.usage


@pytest.mark.parametrize(
    ("wishes", "parameter"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": ["a", {}]}, "input[1]"),
        ({"input": [10**9]}, "input[0]"),
        ({"input": "word " * 3000}, "input[0]"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 10**6}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"extra_body": {"truncate": "MIDDLE"}}, "truncate"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, wishes: dict[str, Any], parameter: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(**{"model": "mini", "input": "a", **wishes})
    assert raised.value.param == parameter


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("mini", "model", "headrace")
    assert client.models.retrieve("mini") == model
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("none")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def test_rerank_puts_the_same_text_first(http: httpx2.Client) -> None:
    asked = {"query": "a wheel", "documents": ["the sea", {"text": "a wheel"}, "x"], "return_documents": True}
    found = http.post("/v1/rerank", json=asked).json()
    assert sorted(each["index"] for each in found["results"]) == [0, 1, 2]
    assert http.post("/rerank", json=asked).json()["results"] == found["results"]
    first = found["results"][0]
    assert (first["index"], first["document"]) == (1, {"text": "a wheel"})
    assert first["relevance_score"] == pytest.approx(1, abs=1e-5)
    scores = [each["relevance_score"] for each in found["results"]]
    assert scores == sorted(scores, reverse=True)
    (best,) = http.post("/v1/rerank", json={**asked, "top_n": 1, "return_documents": False}).json()["results"]
    assert best == {"index": 1, "relevance_score": first["relevance_score"]}


def test_a_score_is_the_sum_of_its_tokens(http: httpx2.Client) -> None:
    asked = {"prompt": "The first", "continuations": [" token", " wheel of the"], "return_tokens": True}
    found = http.post("/v1/score", json=asked).json()
    for each in found["data"]:
        assert each["tokens"] == len(each["token_logprobs"])
        assert each["logprob"] == pytest.approx(sum(token["logprob"] for token in each["token_logprobs"]))
    (alone,) = http.post("/v1/score", json={"prompt": ["The first"], "continuations": [" token"]}).json()["data"]
    assert alone["logprob"] == found["data"][0]["logprob"]


def test_tokens_and_text_are_each_other_s(http: httpx2.Client) -> None:
    text = "Grüße, 日本語 🦜 and\n<|end|>"
    found = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}


def test_a_chat_s_tokens_are_what_its_answer_counts(client: openai.OpenAI, http: httpx2.Client) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi there"}]}]
    count = http.post("/tokenize", json={"messages": messages}).json()["count"]
    usage = client.chat.completions.create(model="mini", messages=messages, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens == count


@pytest.mark.parametrize(
    ("path", "asked", "parameter"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "a"}]}, "documents[0]"),
        ("/v1/score", {"prompt": "a", "continuations": [""]}, "continuations[0]"),
        ("/v1/score", {"prompt": ["a", "b"], "continuations": ["c"]}, "prompt"),
    ],
)
def test_what_is_wrong_elsewhere_is_named(
    http: httpx2.Client, path: str, asked: dict[str, Any], parameter: str
) -> None:
    reply = http.post(path, json=asked)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, parameter)
