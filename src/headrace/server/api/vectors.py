"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`: their parameters and answers.

A call is prepared first, which checks it and counts its tokens, and then run; limits and budgets are reserved in
between. Calls run on the background surface by default, one engine request per text; an upstream gets all texts in
one request.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple, cast

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.requests.text_request import TokenUsage
from headrace.gateway.serving.engine_answering import tokens_of
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.gateway.serving.text_evaluation import TextEvaluation
from headrace.models.spec import RankingSpec
from headrace.server.api.common_parameters import EXTRAS, MODEL, check_count
from headrace.server.api.completions import parse_prompts
from headrace.server.api.foreign_parameters import VECTORS
from headrace.server.http.body_parameters import Parameter, ParameterTable

_CHECKED_AT_ONCE: Final = 4096  # texts and token ids that are checked on the event loop
_OWN: Final = {name: EXTRAS[name] for name in ("surface", "priority", "user")}

_TRUNCATION: Final[ParameterTable] = {
    "truncate": Parameter(
        "Cuts texts that are too long: true or END at the end, START at the start. NONE or false: rejects them (the "
        "default).",
        bool | Literal["NONE", "START", "END"],
    ),
    "truncation_direction": Parameter(
        "left: cuts at the start, with `truncate`.", Literal["left", "right", "Left", "Right"]
    ),
    "truncate_prompt_tokens": Parameter(
        "Cuts texts at the end to this many tokens; -1: to what the model takes.", Annotated[int, Meta(ge=-1)]
    ),
}

EMBEDDINGS_PARAMETERS: Final[ParameterTable] = {
    "model": MODEL,
    "input": Parameter("A text, token ids, or a list of either.", str | list[Any], required=True),
    "encoding_format": Parameter("float: numbers. base64: little-endian 32-bit floats.", Literal["float", "base64"]),
    "dimensions": Parameter(
        "Truncates each embedding to this many numbers and normalises it again.", Annotated[int, Meta(ge=1)]
    ),
    "prompt_name": Parameter(
        "Name of a prompt in the model's config_sentence_transformers.json that is put before each text.", str
    ),
    "input_type": Parameter(
        "What the texts are. Puts the model's prompt for it before each text; rejected if the model has none.",
        Literal["query", "search_query", "document", "passage", "search_document", "classification", "clustering"],
    ),
    **_TRUNCATION,
    **_OWN,
    "cache": EXTRAS["cache"],
    **{name: parameter for name, parameter in VECTORS.items() if name != "input_type"},
}
RERANK_PARAMETERS: Final[ParameterTable] = {
    "model": MODEL,
    "query": Parameter("Query to rank the documents by.", str, required=True),
    "documents": Parameter(
        "Texts to rank.", Annotated[list[str | dict[str, str]], Meta(min_length=1)], required=True, limit="texts"
    ),
    "top_n": Parameter("Number of documents to return. Default: all.", Annotated[int, Meta(ge=1)]),
    "return_documents": Parameter("Returns the documents' texts too.", bool),
    "max_chunks_per_doc": Parameter("", unsupported="documents are not split into chunks", no_op_values=(1,)),
    "rank_fields": Parameter("", unsupported="a document has one field, `text`", no_op_values=(["text"],)),
    **_TRUNCATION,
    "prompt_name": Parameter("", unsupported="the model's prompts `query` and `document` are used"),
    **_OWN,
    **VECTORS,
    "raw_scores": Parameter("Returns a reranker's logits instead of scores from 0 to 1.", bool),
    "instruction": Parameter("What a document must do for the query. Only for rerankers that take a prompt.", str),
    "top_k": Parameter("", unsupported="use `top_n`"),
    "return_text": Parameter("", unsupported="use `return_documents`", no_op_values=(False,)),
}
SCORE_PARAMETERS: Final[ParameterTable] = {
    "model": MODEL,
    "prompt": Parameter("Prompt, or one for each of `continuations`.", str | list[str], required=True, limit="texts"),
    "continuations": Parameter(
        "Texts to score as continuations of the prompt.",
        Annotated[list[str], Meta(min_length=1)],
        required=True,
        limit="texts",
    ),
    "return_tokens": Parameter("Returns each token's log-probability too.", bool),
    **_OWN,
    "keep_alive": VECTORS["keep_alive"],
}


# Names that models give their prompts for an input type.
_QUERY: Final = ("query", "search_query")
_DOCUMENT: Final = ("document", "passage", "search_document")
_PROMPTS_OF: Final = {name: _QUERY for name in _QUERY} | {name: _DOCUMENT for name in _DOCUMENT}


class PreparedCall(msgspec.Struct, frozen=True):
    """A call that was read and counted, and found to be right. Nothing of it runs before `run`."""

    work: TextEvaluation
    finish: Callable[[], Awaitable[dict[str, Any]]]

    @property
    def input_tokens(self) -> int:
        """Tokens of all texts together, as charged. Estimated for an upstream without a tokenizer."""
        return self.work.input_tokens

    @property
    def surface(self) -> str:
        return self.work.surface

    @property
    def usage(self) -> TokenUsage:
        """Usage, final once the work has run or failed."""
        return self.work.usage

    async def run(self) -> dict[str, Any]:
        """The answer's body. ApiError where the model fails. To be called once."""
        return await self.finish()


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12)


def _usage(usage: TokenUsage) -> dict[str, Any]:
    told: dict[str, Any] = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    if usage.cached_tokens:  # they may have another price
        told["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return told


def _truncated(work: TextEvaluation) -> dict[str, Any]:
    """Name the texts that were cut."""
    return {"headrace": {"truncated": work.truncated}} if work.truncated else {}


# Embeddings


async def prepare_embeddings(
    served: ServedVariant, caller: Caller, given: Mapping[str, Any], limits: RequestLimits
) -> PreparedCall:
    if served.kind == "reranker":
        raise invalid_request(f"'{served.name}' {served.purpose}. Use a model that makes embeddings.", "model")
    texts = await _parse_input(given["input"], limits)
    dimensions: int | None = given.get("dimensions")
    _check_dimensions(dimensions, served.width)
    work = TextEvaluation(served, caller, _with_prompt(served, given))
    work.use_cache = given.get("cache") != "off"
    await work.take({f"input[{place}]": text for place, text in enumerate(texts)})
    plain = given.get("encoding_format", "float") == "float"
    return PreparedCall(work, partial(_embeddings, work, dimensions, plain=plain))


def _with_prompt(served: ServedVariant, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters with the prompt's name that an `input_type` stands for."""
    wish: str | None = given.get("input_type")
    if wish is None:
        return given
    if given.get("prompt_name") is not None:
        raise invalid_request("Set either 'input_type' or 'prompt_name', not both.", "input_type")
    prompts = {name.lower(): name for name in served.prompts.texts}
    found = next((prompts[name] for name in _PROMPTS_OF.get(wish, (wish,)) if name in prompts), None)
    if found is None:
        known = f"Its prompts are {', '.join(sorted(served.prompts.texts))}." if prompts else "It has no prompts."
        raise ApiError(
            f"'{served.name}' has no prompt for the input type '{wish}'. {known} Put the prompt in front of the text.",
            parameter="input_type",
            code="unsupported_parameter",
        )
    return {**given, "prompt_name": found}


async def _parse_input(value: str | list[Any], limits: RequestLimits) -> list[str | list[int]]:
    """Token ids may be many: then they are checked in a thread."""
    if isinstance(value, str):
        return [value]
    few = len(value) <= _CHECKED_AT_ONCE
    if few and sum(len(cast("list[Any]", item)) for item in value if isinstance(item, list)) <= _CHECKED_AT_ONCE:
        return parse_prompts(value, "input", limits.texts)
    return await asyncio.to_thread(parse_prompts, value, "input", limits.texts)


async def _embeddings(work: TextEvaluation, dimensions: int | None, *, plain: bool) -> dict[str, Any]:
    vectors = _unit(await work.vectors())
    _check_dimensions(dimensions, vectors.shape[1])  # an upstream's first vectors tell how long they are
    if dimensions is not None:
        vectors = _unit(vectors[:, :dimensions])
    return {
        "object": "list",
        "model": work.served.name,
        "data": [
            {"object": "embedding", "index": place, "embedding": vector.tolist() if plain else _base64(vector)}
            for place, vector in enumerate(vectors)
        ],
        "usage": _usage(work.usage),
        **_truncated(work),
    }


def _check_dimensions(dimensions: int | None, width: int) -> None:
    """`width`: 0 where it is not known yet."""
    if dimensions is not None and width and dimensions > width:
        raise invalid_request(f"'dimensions' must be between 1 and {width}, not {dimensions}.", "dimensions")


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode("ascii")


# Rerank


async def prepare_rerank(
    served: ServedVariant, caller: Caller, given: Mapping[str, Any], limits: RequestLimits
) -> PreparedCall:
    """By a reranker's scores, or by the cosine between the embeddings of the query and of each document."""
    check_count("documents", len(given["documents"]), limits.texts)
    documents = [_document(each, place) for place, each in enumerate(given["documents"])]
    work = TextEvaluation(served, caller, given)
    if served.ranking is not None:
        await work.take_pairs(served.ranking, given["query"], documents, instruction=given.get("instruction"))
        return PreparedCall(work, partial(_rerank_pairs, work, served.ranking, documents, given))
    for name in ("instruction", "raw_scores"):
        if given.get(name):
            raise ApiError(
                f"'{name}' is for rerankers. '{served.name}' compares embeddings.",
                parameter=name,
                code="unsupported_parameter",
            )
    named = {f"documents[{place}]": document for place, document in enumerate(documents)}
    # An embedder's prompts for the two sides, if it has them, as sentence-transformers takes them.
    await work.take({"query": given["query"]}, prompt_name="query")
    await work.take(named, prompt_name="document")
    return PreparedCall(work, partial(_rerank, work, documents, given))


async def _rerank(work: TextEvaluation, documents: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    vectors = _unit(await work.vectors())
    return _ranked(work, (vectors[1:] @ vectors[0]).tolist(), documents, given)


async def _rerank_pairs(
    work: TextEvaluation, ranking: RankingSpec, documents: Sequence[str], given: Mapping[str, Any]
) -> dict[str, Any]:
    if given.get("raw_scores"):
        ranking = replace(ranking, activation="identity")
    scores = [ranking.score(vector) for vector in (await work.vectors()).tolist()]
    return _ranked(work, scores, documents, given)


def _ranked(
    work: TextEvaluation, scores: Sequence[float], documents: Sequence[str], given: Mapping[str, Any]
) -> dict[str, Any]:
    order = sorted(range(len(documents)), key=lambda place: -scores[place])[: given.get("top_n")]
    results: list[dict[str, Any]] = []
    for place in order:
        result: dict[str, Any] = {"index": place, "relevance_score": scores[place]}
        if given.get("return_documents"):
            result["document"] = {"text": documents[place]}
        results.append(result)
    return {"model": work.served.name, "results": results, "usage": _usage(work.usage), **_truncated(work)}


def _document(document: str | dict[str, str], place: int) -> str:
    if isinstance(document, str):
        return document
    if set(document) != {"text"}:
        raise invalid_request(
            f"'documents[{place}]' must be a text or an object with the field 'text' only.", f"documents[{place}]"
        )
    return document["text"]


# Score


async def prepare_score(
    served: ServedVariant, caller: Caller, given: Mapping[str, Any], limits: RequestLimits
) -> PreparedCall:
    """The log-probability of each continuation after its prompt."""
    if served.upstream is not None:
        raise ApiError(
            f"'{served.name}' is served by an upstream. Scoring needs a model that this server runs.",
            parameter="model",
            code="unsupported_parameter",
        )
    if served.kind != "decoder":
        raise invalid_request(f"'{served.name}' {served.purpose}. Scoring needs a model that generates text.", "model")
    continuations: list[str] = given["continuations"]
    check_count("continuations", len(continuations), limits.texts)
    prompts = given["prompt"]
    before = [prompts] * len(continuations) if isinstance(prompts, str) else prompts
    if len(before) != len(continuations):
        raise invalid_request(
            f"'prompt' has {len(before)} texts. Expected one, or {len(continuations)} as in 'continuations'.", "prompt"
        )
    work = TextEvaluation(served, caller, given)
    for place, (prompt, text) in enumerate(zip(before, continuations, strict=True)):
        # Cut as one text: what comes before may change where the first token of the rest begins.
        start = await tokens_of(served, served.prompt_text(prompt), "prompt")
        whole = await tokens_of(served, served.prompt_text(prompt + text), f"continuations[{place}]")
        if len(whole) <= len(start):
            raise ApiError(
                f"'continuations[{place}]' adds no tokens to its prompt.", parameter=f"continuations[{place}]"
            )
        work.add(whole, "score", score_from=len(start))
        await asyncio.sleep(0)
    return PreparedCall(work, partial(_score, work, tokens=bool(given.get("return_tokens"))))


async def _score(work: TextEvaluation, *, tokens: bool) -> dict[str, Any]:
    """`tokens`: whether each one's log-probability is told."""
    data: list[dict[str, Any]] = []
    for place, answer in enumerate(await work.answers()):
        found = answer.prompt or []
        item: dict[str, Any] = {
            "index": place,
            "logprob": float(sum(token.logprob or 0.0 for token in found)),
            "tokens": len(found),
            "likeliest": all(token.top and token.top[0][0] == token.token for token in found),
        }
        if tokens:
            item["token_logprobs"] = [{"token": token.token, "logprob": token.logprob} for token in found]
        data.append(item)
    return {"object": "list", "model": work.served.name, "data": data, "usage": _usage(work.usage)}


class MeteredCall(NamedTuple):
    """How the endpoint of such a call reads and prepares it."""

    table: ParameterTable
    prepare: Callable[[ServedVariant, Caller, Mapping[str, Any], RequestLimits], Coroutine[Any, Any, PreparedCall]]


# By path; batches run these too.
METERED_CALLS: Final[Mapping[str, MeteredCall]] = {
    "/v1/embeddings": MeteredCall(EMBEDDINGS_PARAMETERS, prepare_embeddings),
    "/v1/rerank": MeteredCall(RERANK_PARAMETERS, prepare_rerank),
    "/v1/score": MeteredCall(SCORE_PARAMETERS, prepare_score),
}
