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
from headrace.engine.process.output_stream import OutputStream
from headrace.errors import RequestError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.models.sentence_files import Prompts
from headrace.models.spec import RankingSpec
from headrace.server.api.vectors import (
    EMBEDDINGS_PARAMETERS,
    RERANK_PARAMETERS,
    PreparedCall,
    prepare_embeddings,
    prepare_rerank,
    prepare_score,
)
from headrace.server.http.body_parameters import ParameterTable
from tests.support.dialect_exchanges import tokenizer
from tests.support.running_server import asynchronous, serving

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
        if self._engine.fails_at is not None and len(self._engine.text_request) > self._engine.fails_at:
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
        self.text_request: list[GenerationRequest] = []
        self.running = 0
        self.most = 0
        self.fails_at = fails_at

    def stream(self, request: GenerationRequest) -> Any:
        self.text_request.append(request)
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
    (request,) = engine.text_request
    assert (request.kind, request.tenant, request.salt, request.weight) == ("embed", "tenant", "tenant", 2.0)
    assert (request.surface, request.priority) == ("batch", 3)
    run(embeddings(served(engine), CALLER, {"input": "a", "surface": "voice"}, RequestLimits()))
    assert engine.text_request[-1].surface == "voice"


def test_texts_go_to_the_engine_a_few_at_a_time() -> None:
    engine = Engine()
    run(embeddings(served(engine), CALLER, {"input": [[1]] * 300}, RequestLimits()))
    assert len(engine.text_request) == 300
    assert engine.most <= 64
    assert engine.running == 0


def test_one_that_fails_fails_the_call_and_ends_the_others() -> None:
    engine = Engine(fails_at=3)
    error = error_of(embeddings(served(engine), CALLER, {"input": [[1]] * 300}, RequestLimits()))
    assert error.status == 400
    assert engine.running == 0
    assert len(engine.text_request) < 300


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
        ({"input": ["a"] * 9}, "input"),
        ({"input": ["a", [1] * 65]}, "input[1]"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(given: dict[str, Any], parameter: str) -> None:
    engine = Engine()
    error = error_of(embeddings(served(engine), CALLER, given, RequestLimits(texts=8)))
    assert (error.status, error.parameter) == (400, parameter)
    assert engine.text_request == []


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
    for each, request in zip(found["data"], engine.text_request, strict=True):
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
        return prepared, len(engine.text_request), await prepared.run()

    prepared, before, found = asyncio.run(it())
    assert before == 0
    assert prepared.input_tokens == sum(len(request.prompt) for request in engine.text_request) > 0
    assert prepared.usage.prompt_tokens == found["usage"]["prompt_tokens"] == prepared.input_tokens
    assert prepared.usage.cached_tokens == len(engine.text_request)


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
    assert {request.surface for request in engine.text_request} == {"voice"}


LONG = "the water runs down to the narrow wheel " * 40


def test_a_long_text_is_refused_unless_the_request_has_it_cut() -> None:
    refused = error_of(embeddings(served(Engine()), CALLER, {"input": ["a", LONG]}, RequestLimits()))
    assert (refused.code, refused.parameter) == ("context_length_exceeded", "input[1]")
    assert "truncate" in refused.message
    whole = tokenizer().encode(LONG)
    for wish, kept in (
        ({"truncate": True}, whole[:64]),
        ({"truncate": "END"}, whole[:64]),
        ({"truncate": "START"}, [whole[0], *whole[-63:]]),
        ({"truncate_prompt_tokens": 10}, whole[:10]),
    ):
        engine = Engine()
        found = run(embeddings(served(engine), CALLER, {"input": ["a", LONG], **wish}, RequestLimits()))
        assert list(engine.text_request[1].prompt) == kept
        assert found["headrace"] == {"truncated": ["input[1]"]}
        assert found["usage"]["prompt_tokens"] == len(tokenizer().encode("a")) + len(kept)


def test_a_text_as_long_as_the_context_is_embedded_whole() -> None:
    engine = Engine()
    found = run(embeddings(served(engine), CALLER, {"input": [[5] * 64], "truncate": True}, RequestLimits()))
    assert len(engine.text_request[0].prompt) == 64
    assert "headrace" not in found
    assert (
        error_of(embeddings(served(Engine()), CALLER, {"input": [[5] * 65]}, RequestLimits())).parameter == "input[0]"
    )


def test_documents_are_cut_too() -> None:
    engine = Engine()
    given = {"query": "q", "documents": ["short", LONG], "truncate": "END"}
    found = run(rerank(served(engine), CALLER, given, RequestLimits()))
    assert found["headrace"] == {"truncated": ["documents[1]"]}
    assert len(engine.text_request[2].prompt) == 64


def test_a_models_prompts_are_put_before_its_texts() -> None:
    prompts = Prompts({"query": "find: ", "document": "text: "}, "document")
    encode = tokenizer().encode

    def asked(call: Any, given: dict[str, Any]) -> list[list[int]]:
        engine = Engine()
        run(call(served(engine, prompts=prompts), CALLER, given, RequestLimits()))
        return [list(request.prompt) for request in engine.text_request]

    assert asked(embeddings, {"input": "a"}) == [encode("text: a")]
    assert asked(embeddings, {"input": "a", "prompt_name": "query"}) == [encode("find: a")]
    assert asked(rerank, {"query": "a", "documents": ["b"]}) == [encode("find: a"), encode("text: b")]
    unknown = {"input": "a", "prompt_name": "other"}
    with pytest.raises(RequestError, match="Its prompts are document, query"):
        run(embeddings(served(Engine(), prompts=prompts), CALLER, unknown, RequestLimits()))


@asynchronous
async def test_over_http_the_response_says_what_was_cut_and_takes_a_prompts_name() -> None:
    def answer(stream: OutputStream) -> None:
        usage = SequenceUsage(len(stream.request.prompt), 0, 0, 0, 0, 0.0, 0.0, 0.0)
        vector = np.ones(WIDTH, dtype="<f4").tobytes()
        stream.push(SequenceOutput("", 0, [], "", vector=vector, ending=SequenceEnd(FinishReason.STOP, usage)))

    async with serving() as running:
        running.engine.answer = answer
        running.fleet.served["mini"].prompts = Prompts({"query": "find: "})
        asked = {"model": "mini", "input": ["a", LONG * 10], "truncate": True, "prompt_name": "query"}
        found = await running.ask("POST", "/v1/embeddings", asked)
        assert found.headers["x-headrace-truncated"] == "1"
        assert found.json["headrace"] == {"truncated": ["input[1]"]}
        assert list(running.engine.streams[0].request.prompt) == tokenizer().encode("find: a")
        assert len(running.engine.streams[1].request.prompt) == 2048
        unknown = await running.ask("POST", "/v1/embeddings", {"model": "mini", "input": "a", "prompt_name": "other"})
        assert (unknown.status, unknown.error["param"]) == (400, "prompt_name")
        ranked = {"model": "mini", "query": "a", "documents": ["b"], "prompt_name": "query"}
        assert (await running.ask("POST", "/v1/rerank", ranked)).error["param"] == "prompt_name"
        whole = await running.ask("POST", "/v1/rerank", ranked | {"prompt_name": None, "truncate": "NONE"})
        assert whole.status == 200, whole.body
        assert "x-headrace-truncated" not in whole.headers


@pytest.mark.parametrize("table", [EMBEDDINGS_PARAMETERS, RERANK_PARAMETERS], ids=["embeddings", "rerank"])
def test_parameters_that_cut_texts_are_not_rejected_as_those_of_others(table: ParameterTable) -> None:
    given = {"truncate": True, "truncation_direction": "left", "truncate_prompt_tokens": 10}
    assert {name for name in given if table[name].unsupported} == set()


class RankingEngine(Engine):
    """Its number for a pair is the pair's length, less ten."""

    def stream(self, request: GenerationRequest) -> Any:
        stream = super().stream(request)

        class Ranked(type(stream)):
            async def __aiter__(self) -> AsyncIterator[SequenceOutput]:
                async for output in super().__aiter__():
                    output.vector = np.array([len(request.prompt) - 10], dtype="<f4").tobytes()
                    yield output

        return Ranked(self, request)


def reranker(engine: Engine) -> ServedVariant:
    return served(engine, kind="reranker", ranking=RankingSpec(template="pair", activation="sigmoid"))


def test_a_reranker_orders_documents_by_its_scores() -> None:
    engine = RankingEngine()
    given = {"query": "a b", "documents": ["c", {"text": "c d e f g h i"}, "c d"], "return_documents": True}
    found = run(rerank(reranker(engine), CALLER, given, RequestLimits()))
    assert [each["index"] for each in found["results"]] == [1, 2, 0]
    assert found["results"][0]["document"] == {"text": "c d e f g h i"}
    logits = [len(request.prompt) - 10 for request in engine.text_request]
    for each in found["results"]:
        assert each["relevance_score"] == pytest.approx(1 / (1 + np.exp(-logits[each["index"]])))
    assert found["usage"]["prompt_tokens"] == sum(len(request.prompt) for request in engine.text_request)
    raw = run(rerank(reranker(RankingEngine()), CALLER, given | {"raw_scores": True, "top_n": 1}, RequestLimits()))
    assert [each["relevance_score"] for each in raw["results"]] == [logits[1]]


def test_a_pair_that_is_too_long_is_rejected_by_name_or_cut() -> None:
    given = {"query": "a b", "documents": ["c", "c " * 200]}
    error = error_of(rerank(reranker(RankingEngine()), CALLER, given, RequestLimits()))
    assert error.parameter == "documents[1]"
    assert "The model takes 64" in str(error)
    engine = RankingEngine()
    found = run(rerank(reranker(engine), CALLER, given | {"truncate": True}, RequestLimits()))
    assert found["headrace"] == {"truncated": ["documents[1]"]}
    assert len(engine.text_request[1].prompt) == 64


def test_each_kind_of_model_is_named_where_it_does_not_belong() -> None:
    error = error_of(embeddings(reranker(RankingEngine()), CALLER, {"input": "a"}, RequestLimits()))
    assert "'mini' reranks documents (/v1/rerank)" in str(error)
    error = error_of(score(reranker(RankingEngine()), CALLER, {"prompt": "a", "continuations": ["b"]}, RequestLimits()))
    assert "'mini' reranks documents (/v1/rerank)" in str(error)
    for name in ("instruction", "raw_scores"):
        given = {"query": "a", "documents": ["b"], name: "x"}
        error = error_of(rerank(served(Engine()), CALLER, given, RequestLimits()))
        assert error.parameter == name
        assert "compares embeddings" in str(error)
    given = {"query": "a", "documents": ["b"], "instruction": "find it"}
    assert "takes no instruction" in str(error_of(rerank(reranker(RankingEngine()), CALLER, given, RequestLimits())))


def test_an_input_type_stands_for_the_models_prompt() -> None:
    prompts = Prompts({"query": "find the wheel: ", "passage": ""})
    for input_type, name in (("query", "query"), ("search_query", "query"), ("search_document", "passage")):
        engine, other = Engine(), Engine()
        run(
            embeddings(
                served(engine, prompts=prompts), CALLER, {"input": "a", "input_type": input_type}, RequestLimits()
            )
        )
        run(embeddings(served(other, prompts=prompts), CALLER, {"input": "a", "prompt_name": name}, RequestLimits()))
        assert engine.text_request[0].prompt == other.text_request[0].prompt
    given = {"input": "a", "input_type": "clustering"}
    error = error_of(embeddings(served(Engine(), prompts=prompts), CALLER, given, RequestLimits()))
    assert error.parameter == "input_type"
    assert "Its prompts are passage, query" in str(error)
    assert "It has no prompts" in str(error_of(embeddings(served(Engine()), CALLER, given, RequestLimits())))
    given = {"input": "a", "input_type": "query", "prompt_name": "query"}
    assert "not both" in str(error_of(embeddings(served(Engine(), prompts=prompts), CALLER, given, RequestLimits())))
