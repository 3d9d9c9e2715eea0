"""Embeddings, rerank and score, with an engine whose vectors and log-probabilities are known."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from headrace.config import RequestLimits
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.interface.sampling import SampledToken
from headrace.errors import RequestError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.fleet import ServedVariant
from headrace.server.api.vectors import PreparedCall, prepare_embeddings, prepare_rerank, prepare_score
from tests.support.dialect_exchanges import tokenizer

CALLER = Caller("key", "tenant", 2.0)
WIDTH = 4


def whole(prepare: Callable[..., Awaitable[PreparedCall]]) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Prepared and run at once."""

    async def it(*arguments: Any) -> dict[str, Any]:
        return await (await prepare(*arguments)).run()

    return it


embeddings, rerank, score = map(whole, (prepare_embeddings, prepare_rerank, prepare_score))


class Stream:
    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        self._engine = engine
        self._request = request

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.running -= 1

    async def __aiter__(self) -> AsyncIterator[SequenceOutput]:
        request = self._request
        await asyncio.sleep(0)
        if self._engine.fails_at is not None and len(self._engine.asked) > self._engine.fails_at:
            raise RequestError("too much of it", parameter="prompt")
        usage = SequenceUsage(len(request.prompt), 0, 1, 0, 0, 0.0, 0.0, 0.0)
        output = SequenceOutput("r", 0, [], "", ending=SequenceEnd(FinishReason.STOP, usage))
        if request.kind == "embed":
            output.vector = np.array([len(request.prompt), 3, 0, -1], dtype="<f4").tobytes()
        else:
            wanted = request.prompt[request.score_from :]
            output.prompt = [SampledToken(token, -0.5, ((token, -0.5),)) for token in wanted]
        yield output


class Engine:
    def __init__(self, fails_at: int | None = None) -> None:
        self.asked: list[GenerationRequest] = []
        self.running = 0
        self.most = 0
        self.fails_at = fails_at

    def stream(self, request: GenerationRequest) -> Any:
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        return Stream(self, request)

    async def stats(self) -> list[dict[str, Any]]:
        return []


def served(engine: Engine, **options: Any) -> ServedVariant:
    return ServedVariant(name="mini", engine=engine, tokenizer=tokenizer(), context=64, width=WIDTH, **options)


def run(work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    async def it() -> dict[str, Any]:
        return await work

    return asyncio.run(it())


def error_of(work: Awaitable[dict[str, Any]]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        run(work)
    return raised.value


def test_vectors_are_scaled_and_in_order() -> None:
    engine = Engine()
    found = run(embeddings(served(engine), CALLER, {"input": [[1, 2], [1, 2, 3]]}, RequestLimits()))
    for each, tokens in zip(found["data"], (2, 3), strict=True):
        wanted = np.array([tokens, 3, 0, -1]) / np.linalg.norm([tokens, 3, 0, -1])
        assert each["embedding"] == pytest.approx(wanted)
    assert [each["index"] for each in found["data"]] == [0, 1]
    details = {"cached_tokens": 2}
    assert found["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "prompt_tokens_details": details}


def test_base64_is_little_endian_floats() -> None:
    given = {"input": [1, 2], "encoding_format": "base64", "dimensions": 2}
    packed = run(embeddings(served(Engine()), CALLER, given, RequestLimits()))["data"][0]["embedding"]
    plain = run(embeddings(served(Engine()), CALLER, {**given, "encoding_format": "float"}, RequestLimits()))
    values = np.frombuffer(base64.b64decode(packed), dtype="<f4")
    assert values.tolist() == plain["data"][0]["embedding"]
    assert values == pytest.approx(np.array([2, 3]) / np.sqrt(13))


def test_requests_are_the_caller_s_and_in_the_background() -> None:
    engine = Engine()
    run(embeddings(served(engine), CALLER, {"input": "a", "priority": 3}, RequestLimits()))
    (request,) = engine.asked
    assert (request.kind, request.tenant, request.salt, request.weight) == ("embed", "tenant", "tenant", 2.0)
    assert (request.surface, request.priority) == ("batch", 3)
    run(embeddings(served(engine), CALLER, {"input": "a", "surface": "voice"}, RequestLimits()))
    assert engine.asked[-1].surface == "voice"


def test_texts_go_to_the_engine_a_few_at_a_time() -> None:
    engine = Engine()
    run(embeddings(served(engine), CALLER, {"input": [[1]] * 300}, RequestLimits()))
    assert len(engine.asked) == 300
    assert engine.most <= 64
    assert engine.running == 0


def test_one_that_fails_fails_the_call_and_ends_the_others() -> None:
    engine = Engine(fails_at=3)
    error = error_of(embeddings(served(engine), CALLER, {"input": [[1]] * 300}, RequestLimits()))
    assert error.status == 400
    assert engine.running == 0
    assert len(engine.asked) < 300


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
        ({"input": ["a"] * 9}, "input"),
        ({"input": ["a", [1] * 64]}, "input[1]"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(given: dict[str, Any], parameter: str) -> None:
    engine = Engine()
    error = error_of(embeddings(served(engine), CALLER, given, RequestLimits(texts=8)))
    assert (error.status, error.parameter) == (400, parameter)
    assert engine.asked == []


def test_rerank_is_by_the_cosine() -> None:
    given = {"query": "a", "documents": ["a b c d e f g", {"text": "a"}], "top_n": 1, "return_documents": True}
    found = run(rerank(served(Engine()), CALLER, given, RequestLimits()))
    (best,) = found["results"]
    assert (best["index"], best["document"]) == (1, {"text": "a"})
    assert best["relevance_score"] == pytest.approx(1)


def test_an_error_about_a_document_names_its_place() -> None:
    long = "word " * 100
    given = {"query": "a", "documents": ["b", long]}
    assert error_of(rerank(served(Engine()), CALLER, given, RequestLimits())).parameter == "documents[1]"
    assert error_of(rerank(served(Engine()), CALLER, {**given, "query": long}, RequestLimits())).parameter == "query"


def test_a_score_is_of_the_continuation_s_tokens_alone() -> None:
    engine = Engine()
    given = {"prompt": "The first", "continuations": [" token", " wheel here"], "return_tokens": True}
    found = run(score(served(engine), CALLER, given, RequestLimits()))
    start = len(tokenizer().encode("The first"))
    for each, request in zip(found["data"], engine.asked, strict=True):
        assert request.score_from == start
        assert each["tokens"] == len(request.prompt) - start == len(each["token_logprobs"])
        assert each["logprob"] == -0.5 * each["tokens"]
        assert each["likeliest"] is True


def test_an_encoder_scores_nothing() -> None:
    given = {"prompt": "a", "continuations": ["b"]}
    assert error_of(score(served(Engine(), kind="encoder"), CALLER, given, RequestLimits())).parameter == "model"


@pytest.mark.parametrize(
    ("prepare", "given"),
    [
        (prepare_embeddings, {"input": [[1, 2], [1, 2, 3]]}),
        (prepare_rerank, {"query": "a", "documents": ["b c", "d"]}),
        (prepare_score, {"prompt": "The first", "continuations": [" token", " wheel here"]}),
    ],
)
def test_a_call_is_counted_before_the_engine_hears_of_it(prepare: Any, given: dict[str, Any]) -> None:
    engine = Engine()

    async def it() -> tuple[PreparedCall, int, dict[str, Any]]:
        prepared = await prepare(served(engine), CALLER, given, RequestLimits())
        return prepared, len(engine.asked), await prepared.run()

    prepared, before, found = asyncio.run(it())
    assert before == 0
    assert prepared.input_tokens == sum(len(request.prompt) for request in engine.asked) > 0
    assert prepared.usage.prompt_tokens == found["usage"]["prompt_tokens"] == prepared.input_tokens
    assert prepared.usage.cached_tokens == len(engine.asked)


def test_what_was_computed_is_known_where_the_rest_failed() -> None:
    async def it() -> PreparedCall:
        prepared = await prepare_embeddings(
            served(Engine(fails_at=80)), CALLER, {"input": [[1]] * 100}, RequestLimits()
        )
        with pytest.raises(ApiError):
            await prepared.run()
        return prepared

    prepared = asyncio.run(it())
    assert prepared.input_tokens == 100
    assert 0 < prepared.usage.prompt_tokens < 100


def test_the_surface_is_the_request_s_or_the_caller_s_or_the_background() -> None:
    def surface(caller: Caller, **given: Any) -> str:
        return asyncio.run(
            prepare_embeddings(served(Engine()), caller, {"input": "a"} | given, RequestLimits())
        ).surface

    assert surface(CALLER) == "batch"
    assert surface(Caller("key", "tenant", 1.0, "voice")) == "voice"
    assert surface(Caller("key", "tenant", 1.0, "voice"), surface="agent") == "agent"


def test_a_call_may_be_moved_to_another_surface_before_it_runs() -> None:
    engine = Engine()

    async def it() -> None:
        prepared = await prepare_embeddings(served(engine), CALLER, {"input": ["a", "b"]}, RequestLimits())
        prepared.work.on("voice")
        await prepared.run()

    asyncio.run(it())
    assert {request.surface for request in engine.asked} == {"voice"}
