"""What is made of texts without writing any, where an upstream serves the model: vectors, ranks, tokens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from headrace.config import Config, ModelConfig, RequestLimits
from headrace.config.upstream_section import UpstreamFeatures, UpstreamRetries
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.semantic.embedder import BoundedEmbedding, ServedEmbedder
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.gateway.serving.variant_engines import served_by_upstream
from headrace.server.api.tokenize import DETOKENIZE_PARAMETERS, TOKENIZE_PARAMETERS, detokenize, tokenize
from headrace.server.api.vectors import PreparedCall, prepare_embeddings, prepare_rerank, prepare_score
from headrace.server.http.body_parameters import ParameterTable, parse_body
from tests.support.fake_upstream import Fake, Handler, Line, faking, refuses, soon, tokenizer, upstream_of
from tests.support.running_server import asynchronous

CALLER = Caller("key", "tenant", 2.0)
EMBEDS = UpstreamFeatures(embeddings=True)
ROWS = {"Hello": [3.0, 4.0, 0.0], "world": [0.0, 2.0, 0.0], "Hello there": [3.0, 3.9, 0.0]}


def whole(prepare: Callable[..., Awaitable[PreparedCall]]) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Prepared and run at once."""

    async def it(*arguments: Any) -> dict[str, Any]:
        return await (await prepare(*arguments)).run()

    return it


embeddings, rerank, score = map(whole, (prepare_embeddings, prepare_rerank, prepare_score))


async def embeds(line: Line) -> None:
    """The rows of the texts that are asked for."""
    texts: list[str] = line.heard.json["input"]
    data = [{"index": place, "embedding": ROWS[text]} for place, text in enumerate(texts)]
    body = json.dumps({"data": data, "usage": {"prompt_tokens": 10 * len(texts)}})
    await line.head(200, "application/json")
    await line.say(body.encode())


@contextlib.asynccontextmanager
async def far(handler: Handler = embeds, **changes: Any) -> AsyncGenerator[tuple[ServedVariant, Fake]]:
    changes.setdefault("takes", EMBEDS)
    async with faking(handler) as fake, upstream_of(fake, **changes) as upstream:
        yield served_by_upstream(upstream, ModelConfig(), Config()), fake


async def refused(work: Awaitable[Any], parameter: str) -> ApiError:
    with pytest.raises(ApiError) as error:
        await soon(work)
    assert (error.value.status, error.value.parameter) == (400, parameter)
    return error.value


@asynchronous
async def test_embeddings_are_the_upstreams_scaled_as_ours_are() -> None:
    async with far() as (served, fake):
        found = await soon(embeddings(served, CALLER, {"input": ["Hello", "world"]}, RequestLimits()))
        assert found["model"] == "mini@far"
        assert [each["embedding"] for each in found["data"]] == [pytest.approx([0.6, 0.8, 0.0]), [0.0, 1.0, 0.0]]
        assert found["usage"] == {"prompt_tokens": 20, "total_tokens": 20}
        assert len(fake.heard) == 1  # all texts in one request
        assert served.width == 3
        await refused(embeddings(served, CALLER, {"input": "Hello", "dimensions": 4}, RequestLimits()), "dimensions")
        assert len(fake.heard) == 1  # by now it is known how long they are


@asynchronous
async def test_embeddings_are_counted_before_the_upstream_hears_of_them() -> None:
    async with far(tokenizer=tokenizer()) as (served, fake):
        prepared = await prepare_embeddings(served, CALLER, {"input": ["Hello", "world"]}, RequestLimits())
        assert prepared.input_tokens == sum(len(tokenizer().encode(text)) for text in ("Hello", "world"))
        assert (prepared.usage.prompt_tokens, prepared.surface, fake.heard) == (0, "batch", [])
        await soon(prepared.run())
        assert prepared.usage.prompt_tokens == 20


@asynchronous
async def test_dimensions_that_there_are_not_are_refused_once_that_is_known() -> None:
    async with far() as (served, _):
        await refused(embeddings(served, CALLER, {"input": "Hello", "dimensions": 4}, RequestLimits()), "dimensions")
        found = await soon(embeddings(served, CALLER, {"input": "Hello", "dimensions": 1}, RequestLimits()))
        assert found["data"][0]["embedding"] == [1.0]


@asynchronous
async def test_documents_are_ranked_by_the_upstreams_vectors() -> None:
    asked = {"query": "Hello", "documents": ["world", "Hello there"], "return_documents": True}
    async with far() as (served, _):
        found = await soon(rerank(served, CALLER, asked, RequestLimits()))
        assert [each["document"]["text"] for each in found["results"]] == ["Hello there", "world"]
        assert found["usage"]["prompt_tokens"] == 30


@asynchronous
async def test_what_an_upstream_cannot_do_with_texts_is_refused_before_it_hears_of_it() -> None:
    async with far(takes=UpstreamFeatures()) as (served, fake):
        await refused(embeddings(served, CALLER, {"input": "Hello"}, RequestLimits()), "model")
        await refused(score(served, CALLER, {"prompt": "a", "continuations": ["b"]}, RequestLimits()), "model")
        assert fake.heard == []
    async with far() as (served, fake):
        await refused(embeddings(served, CALLER, {"input": [[1, 2]]}, RequestLimits()), "input[0]")
        assert fake.heard == []


@asynchronous
async def test_an_upstream_that_fails_is_told_as_with_texts_that_it_writes() -> None:
    async with far(refuses(500), retries=UpstreamRetries(most=0)) as (served, _):
        with pytest.raises(ApiError) as error:
            await soon(embeddings(served, CALLER, {"input": "Hello"}, RequestLimits()))
        assert (error.value.status, error.value.code) == (502, "upstream_failed")


@asynchronous
async def test_the_semantic_cache_may_have_its_vectors_from_an_upstream() -> None:
    async with far(takes=UpstreamFeatures(chat=False, embeddings=True)) as (served, _):
        vector = await BoundedEmbedding(wait_s=10.0).vector(ServedEmbedder(served, CALLER), "Hello")
        assert vector is not None
        assert vector == pytest.approx(np.array([0.6, 0.8, 0.0]))


def given(table: ParameterTable, **fields: Any) -> Any:
    return parse_body(json.dumps(fields).encode(), table, RequestLimits())


CHAT = [{"role": "user", "content": "Hello"}]
STRINGS = {"add_special_tokens": False, "return_token_strs": True}


@asynchronous
async def test_tokens_are_known_where_the_configuration_names_a_tokenizer() -> None:
    async with far(tokenizer=tokenizer()) as (served, fake):
        found = await tokenize(served, given(TOKENIZE_PARAMETERS, prompt="Hello there", **STRINGS))
        assert found["tokens"] == tokenizer().encode("Hello there", False)
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), None)
        assert "".join(found["token_strs"]) == "Hello there"
        assert await detokenize(served, given(DETOKENIZE_PARAMETERS, tokens=found["tokens"])) == {
            "prompt": "Hello there"
        }
        chat = await tokenize(served, given(TOKENIZE_PARAMETERS, messages=CHAT))
        assert chat["count"] > found["count"]
        assert fake.heard == []
    async with far(tokenizer=tokenizer(), context=64) as (served, _):
        assert (await tokenize(served, given(TOKENIZE_PARAMETERS, prompt="Hello")))["max_model_len"] == 64


@asynchronous
async def test_tokens_are_refused_where_it_names_none() -> None:
    async with far() as (served, fake):
        for fields in ({"prompt": "Hello"}, {"prompt": ""}, {"messages": CHAT}):
            error = await refused(tokenize(served, given(TOKENIZE_PARAMETERS, **fields)), "model")
            assert "names no tokenizer" in error.message
        await refused(detokenize(served, given(DETOKENIZE_PARAMETERS, tokens=[])), "model")
        assert fake.heard == []
