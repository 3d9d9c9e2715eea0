"""Fetches embeddings from an upstream: counts tokens, sends the request, retries and checks the vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.requests.text_request import TokenUsage
from headrace.gateway.serving.upstream_answers import upstream_usage as usage
from headrace.gateway.serving.upstream_answers.upstream_chunks import read_usage
from headrace.gateway.upstreams import upstream_errors
from headrace.gateway.upstreams.upstream import Upstream
from headrace.gateway.upstreams.upstream_errors import UpstreamError


class _Vector(msgspec.Struct):
    embedding: list[float]
    index: int | None = None


_NONE: Final = msgspec.Raw()


class _EmbeddingBody(msgspec.Struct):
    data: list[_Vector]
    usage: msgspec.Raw = _NONE


_bodies: Final = msgspec.json.Decoder(_EmbeddingBody)


async def count_embedding_tokens(upstream: Upstream, texts: Mapping[str, str | Sequence[int]]) -> int:
    """Return the tokens of all texts, by their names for errors: counted if a tokenizer is configured, else estimated.

    ApiError if the upstream has no embeddings, does not take token ids, or has too small a context.
    """
    if not upstream.takes.embeddings:
        raise ApiError(
            f"'{upstream.name}' generates text. Use a model that makes embeddings.",
            parameter="model",
            code="unsupported_parameter",
        )
    found, context = 0, upstream.config.context
    for name, text in texts.items():
        if not isinstance(text, str) and not upstream.takes.token_prompts:
            raise invalid_request(f"'{name}' has token ids, but the upstream of this model takes text only.", name)
        count = await _count(upstream, text, name)
        if upstream.tokenizer is not None and context is not None and count > context:
            raise ApiError(
                f"'{name}' has {count} tokens. The context of '{upstream.name}' is {context} tokens.",
                parameter=name,
                code="context_length_exceeded",
            )
        found += count
        await asyncio.sleep(0)  # thousands of texts take a while; let other requests run meanwhile
    return found


async def _count(upstream: Upstream, text: str | Sequence[int], name: str) -> int:
    if not isinstance(text, str):
        return len(text)
    tokenizer = upstream.tokenizer
    try:
        if tokenizer is None:
            return usage.estimate_prompt_tokens(len(text.encode()), 0)
        long = len(text) > usage.LONG_TEXT
        return len(await asyncio.to_thread(tokenizer.encode, text) if long else tokenizer.encode(text))
    except UnicodeEncodeError:
        raise invalid_request(f"'{name}' contains an unpaired surrogate. Send valid Unicode.", name) from None
    except HeadraceError as error:
        raise invalid_request(f"'{name}': {error}", name) from None


async def embed_texts(
    upstream: Upstream, texts: Sequence[str | Sequence[int]], *, tokens: int, due: float, priority: int = 0
) -> tuple[NDArray[np.float32], TokenUsage]:
    """Return a row for each text, and the usage. ApiError if the upstream fails.

    `tokens`: of all texts, from `count_embedding_tokens`. `due`: a time of the upstream's clock.
    """
    inputs: list[Any] = [text if isinstance(text, str) else list(text) for text in texts]
    body = msgspec.json.encode({"model": upstream.config.model or upstream.name, "input": inputs})
    upstream.count("requests")
    upstream.retry_budget.record_request()
    upstream.check_ready()
    await upstream.slots.acquire(priority, min(upstream.config.queue_s, due - upstream.clock()))
    try:
        answer = await _fetch_with_retries(upstream, body, due)
    finally:
        upstream.slots.release()
    return _check_vectors(answer, upstream.name, len(inputs)), _usage(upstream, answer, inputs, tokens)


async def _fetch_with_retries(upstream: Upstream, body: bytes, due: float) -> _EmbeddingBody:
    retries = upstream.config.retries
    for attempt in range(retries.most + 1):
        permit = upstream.enter()
        began = upstream.clock()
        try:
            answer = await _fetch(upstream, body, due)
        except UpstreamError as error:
            upstream.failed(permit, error)
            wait = min(retries.base_s * 2.0**attempt, retries.longest_s) * upstream.chance() + (error.wait or 0.0)
            late = wait > retries.longest_s or upstream.clock() + wait >= due
            if not error.again or attempt == retries.most or late or not upstream.ready:
                raise
            if not upstream.retry_budget.try_spend():
                upstream.count("retries_denied")
                raise
            upstream.count("retries")
        else:
            upstream.worked(permit, upstream.clock() - began)
            return answer
        finally:
            permit.dropped()
        await asyncio.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


async def _fetch(upstream: Upstream, body: bytes, due: float) -> _EmbeddingBody:
    reply = await upstream.client.post("/embeddings", body, due)
    parts = bytearray()
    try:
        while part := await reply.read(due):
            parts += part
            if len(parts) > upstream.config.answer_bytes:
                raise upstream_errors.invalid_answer(upstream.name, "sent an answer that is too long", again=False)
    except TimeoutError:
        raise upstream_errors.too_slow(upstream.name, "to complete its answer") from None
    finally:
        reply.close()
    try:
        return _bodies.decode(parts)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise upstream_errors.invalid_answer(upstream.name, "sent no embeddings") from None


def _check_vectors(answer: _EmbeddingBody, name: str, count: int) -> NDArray[np.float32]:
    rows: list[list[float] | None] = [None] * count
    for place, vector in enumerate(answer.data):
        index = place if vector.index is None else vector.index
        if 0 <= index < count:
            rows[index] = vector.embedding
    found = [row for row in rows if row]
    if len(found) < count or len({len(row) for row in found}) > 1:
        raise upstream_errors.invalid_answer(
            name, "sent the wrong number of embeddings, or embeddings of different lengths", again=False
        )
    return np.array(found, dtype=np.float32)


def _usage(upstream: Upstream, answer: _EmbeddingBody, inputs: Sequence[str | list[int]], tokens: int) -> TokenUsage:
    reported = read_usage(answer.usage)
    length = sum(len(text.encode()) if isinstance(text, str) else usage.bytes_of_tokens(text) for text in inputs)
    if reported is not None and reported.prompt_tokens is not None:
        if usage.is_plausible_prompt(reported.prompt_tokens, length):
            return TokenUsage(prompt_tokens=reported.prompt_tokens)
        upstream.count("usage_wrong")
    else:
        upstream.count("usage_estimated" if upstream.tokenizer is None else "usage_counted")
    return TokenUsage(prompt_tokens=tokens)
