"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`: what a model makes of texts without writing any.

Owns the tables of these endpoints, their reading and their answers. All of it runs on the background surface unless the
caller says otherwise, in as many engine requests as there are texts.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from millrace.config import Limits
from millrace.engine.answer import Answer
from millrace.engine.request import Finish, Request
from millrace.engine.sampling import Sampling
from millrace.errors import MillraceError
from millrace.gateway.asked import Usage
from millrace.gateway.completions import prompts_of
from millrace.gateway.errors import ApiError, as_api_error, invalid
from millrace.gateway.exchange import Caller
from millrace.gateway.fleet import Served
from millrace.gateway.flow import tokens_of
from millrace.gateway.parameters import Parameter, Table
from millrace.gateway.shared_parameters import EXTRAS, check_count

_AT_ONCE: Final = 64  # texts of one call that are with the engine
_OWN: Final = {name: EXTRAS[name] for name in ("surface", "priority", "user")}
_MODEL: Final = Parameter("The model; the configured one where none is named.", str)

EMBEDDINGS: Final[Table] = {
    "model": _MODEL,
    "input": Parameter("A text, token ids, or a list of either.", str | list[Any], required=True),
    "encoding_format": Parameter(
        "float: numbers; base64: 32-bit floats, little end first.", Literal["float", "base64"]
    ),
    "dimensions": Parameter("Keeps the first so many numbers, scaled to the length of 1.", Annotated[int, Meta(ge=1)]),
    **_OWN,
}
RERANK: Final[Table] = {
    "model": _MODEL,
    "query": Parameter("What is looked for.", str, required=True),
    "documents": Parameter(
        "Texts to put in order.", Annotated[list[str | dict[str, str]], Meta(min_length=1)], required=True
    ),
    "top_n": Parameter("How many of them to hand back; all by default.", Annotated[int, Meta(ge=1)]),
    "return_documents": Parameter("Whether their texts are handed back too.", bool),
    "max_chunks_per_doc": Parameter("", refused="documents are not cut", harmless=(1,)),
    "rank_fields": Parameter("", refused="a document is its `text`", harmless=(["text"],)),
    **_OWN,
}
SCORE: Final[Table] = {
    "model": _MODEL,
    "prompt": Parameter("The text before, or one for each of `continuations`.", str | list[str], required=True),
    "continuations": Parameter(
        "Texts whose likelihood after it is wanted.", Annotated[list[str], Meta(min_length=1)], required=True
    ),
    "return_tokens": Parameter("Whether each token's log-probability is reported too.", bool),
    **_OWN,
}


class Work:
    """Texts of one call, for one model."""

    def __init__(self, served: Served, caller: Caller, given: Mapping[str, Any]) -> None:
        self.served = served
        self.usage = Usage()
        self._caller = caller
        self._surface: str = given.get("surface") or caller.surface or "batch"
        self._priority: int = given.get("priority", 0)
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def run(self, requests: Sequence[Request]) -> list[Answer]:
        """ApiError where one of them fails; then the others are cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(request)) for request in requests]
        except BaseExceptionGroup as errors:
            raise as_api_error(_first(errors)) from None
        return [task.result() for task in tasks]

    async def _one(self, request: Request) -> Answer:
        answer = Answer(0)
        async with self._room:
            stream = self.served.engine.stream(request)
            async with stream:
                async for output in stream:
                    answer.add(output)
        ending = answer.ending
        if ending is None or ending.finish not in (Finish.STOP, Finish.LENGTH):
            raise MillraceError(ending.why if ending is not None and ending.why else "the engine gave no result")
        self.usage.prompt_tokens += ending.usage.prompt_tokens
        self.usage.cached_tokens += ending.usage.cached_tokens
        return answer

    def request(self, tokens: tuple[int, ...], kind: Literal["embed", "score"], *, score_from: int = 0) -> Request:
        return Request(
            id="",
            prompt=tokens,
            kind=kind,
            score_from=score_from,
            sampling=Sampling(logprobs=1) if kind == "score" else Sampling(),
            tenant=self._caller.tenant,
            weight=self._caller.weight,
            salt=self._caller.tenant,
            surface=self._surface,
            priority=self._priority,
        )

    async def embed(self, texts: Mapping[str, str | Sequence[int]]) -> NDArray[np.float32]:
        """The vectors of texts, each with its name for errors."""
        requests: list[Request] = []
        for name, text in texts.items():
            requests.append(self.request(await tokens_of(self.served, text, name), "embed"))
            await asyncio.sleep(0)  # cutting thousands of texts takes a while, and others are to be served meanwhile
        answers = await self.run(requests)
        return np.stack([np.frombuffer(answer.vector or b"", dtype="<f4") for answer in answers])


def _first(errors: BaseExceptionGroup[BaseException]) -> Exception:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return _first(error)  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(error, Exception):
            return error
    return MillraceError("cancelled")


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12)


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


async def embeddings(served: Served, caller: Caller, given: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    texts = prompts_of(given["input"], "input", limits.texts)
    dimensions = given.get("dimensions")
    if dimensions is not None and dimensions > served.width:
        raise invalid(f"'dimensions' must be 1 to {served.width}, not {dimensions}", "dimensions")
    work = Work(served, caller, given)
    vectors = _unit(await work.embed({f"input[{place}]": text for place, text in enumerate(texts)}))
    if dimensions is not None:
        vectors = _unit(vectors[:, :dimensions])
    plain = given.get("encoding_format", "float") == "float"
    return {
        "object": "list",
        "model": served.name,
        "data": [
            {"object": "embedding", "index": place, "embedding": vector.tolist() if plain else _base64(vector)}
            for place, vector in enumerate(vectors)
        ],
        "usage": _usage(work.usage),
    }


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode("ascii")


async def rerank(served: Served, caller: Caller, given: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """By the cosine between the embeddings of the query and of each document."""
    documents = [_document(each, place) for place, each in enumerate(given["documents"])]
    check_count("documents", len(documents), limits.texts)
    work = Work(served, caller, given)
    named = {f"documents[{place}]": document for place, document in enumerate(documents)}
    vectors = _unit(await work.embed({"query": given["query"], **named}))
    scores = (vectors[1:] @ vectors[0]).tolist()
    order = sorted(range(len(documents)), key=lambda place: -scores[place])[: given.get("top_n")]
    results: list[dict[str, Any]] = []
    for place in order:
        result: dict[str, Any] = {"index": place, "relevance_score": scores[place]}
        if given.get("return_documents"):
            result["document"] = {"text": documents[place]}
        results.append(result)
    return {"model": served.name, "results": results, "usage": _usage(work.usage)}


def _document(document: str | dict[str, str], place: int) -> str:
    if isinstance(document, str):
        return document
    if set(document) != {"text"}:
        raise invalid(f"'documents[{place}]' must be a text, or an object with a text", f"documents[{place}]")
    return document["text"]


async def score(served: Served, caller: Caller, given: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """The log-probability of each continuation after its prompt."""
    if served.kind != "decoder":
        raise invalid(f"'{served.name}' makes embeddings; a score needs a model that writes", "model")
    continuations: list[str] = given["continuations"]
    check_count("continuations", len(continuations), limits.texts)
    prompts = given["prompt"]
    before = [prompts] * len(continuations) if isinstance(prompts, str) else prompts
    if len(before) != len(continuations):
        raise invalid("'prompt' must be one text, or as many as there are continuations", "prompt")
    work = Work(served, caller, given)
    requests: list[Request] = []
    for place, (prompt, text) in enumerate(zip(before, continuations, strict=True)):
        # Cut as one text: what comes before may change where the first token of the rest begins.
        start = await tokens_of(served, prompt, "prompt")
        whole = await tokens_of(served, prompt + text, f"continuations[{place}]")
        if len(whole) <= len(start):
            raise ApiError("a continuation has no tokens of its own", parameter=f"continuations[{place}]")
        requests.append(work.request(whole, "score", score_from=len(start)))
    answers = await work.run(requests)
    data: list[dict[str, Any]] = []
    for place, answer in enumerate(answers):
        tokens = answer.prompt or []
        item: dict[str, Any] = {
            "index": place,
            "logprob": float(sum(token.logprob or 0.0 for token in tokens)),
            "tokens": len(tokens),
            "likeliest": all(token.top and token.top[0][0] == token.token for token in tokens),
        }
        if given.get("return_tokens"):
            item["token_logprobs"] = [{"token": token.token, "logprob": token.logprob} for token in tokens]
        data.append(item)
    return {"object": "list", "model": served.name, "data": data, "usage": _usage(work.usage)}
