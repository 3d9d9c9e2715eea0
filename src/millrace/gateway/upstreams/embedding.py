"""Vectors of texts from an upstream: for `/v1/embeddings`, and for caches that compare meanings.

Owns the request, its further attempts, and the check of what comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from millrace.gateway.asked import Usage
from millrace.gateway.errors import ApiError
from millrace.gateway.upstreams import faults, usage
from millrace.gateway.upstreams.chunks import read_usage
from millrace.gateway.upstreams.faults import UpstreamError
from millrace.gateway.upstreams.upstream import Upstream


class _Vector(msgspec.Struct):
    embedding: list[float]
    index: int | None = None


_NONE: Final = msgspec.Raw()


class _Answer(msgspec.Struct):
    data: list[_Vector]
    usage: msgspec.Raw = _NONE


_answers: Final = msgspec.json.Decoder(_Answer)


async def embedded(
    upstream: Upstream, texts: Sequence[str | Sequence[int]], *, model: str = "", due: float, priority: int = 0
) -> tuple[NDArray[np.float32], Usage]:
    """A row for each text. `due`: on the upstream's clock. ApiError where the upstream has no such thing, or fails."""
    if not upstream.takes.embeddings:
        raise ApiError(f"'{upstream.name}' makes text, not embeddings", parameter="model", code="unsupported_parameter")
    inputs: list[Any] = [text if isinstance(text, str) else list(text) for text in texts]
    if not upstream.takes.token_prompts and not all(isinstance(text, str) for text in inputs):
        raise ApiError("'input': the server behind this model takes texts only", parameter="input")
    body = msgspec.json.encode({"model": upstream.config.model or model or upstream.name, "input": inputs})
    upstream.count("requests")
    upstream.budget.earn()
    upstream.refuse_where_shut()
    await upstream.places.take(priority, min(upstream.config.queue_s, due - upstream.clock()))
    try:
        answer = await _asked(upstream, body, due)
    finally:
        upstream.places.give()
    return _checked(answer, upstream.name, len(inputs)), _usage(answer, inputs)


async def _asked(upstream: Upstream, body: bytes, due: float) -> _Answer:
    retries = upstream.config.retries
    for attempt in range(retries.most + 1):
        permit = upstream.enter()
        began = upstream.clock()
        try:
            answer = await _once(upstream, body, due)
        except UpstreamError as error:
            upstream.failed(permit, error)
            wait = min(retries.base_s * 2.0**attempt, retries.longest_s) * upstream.chance() + (error.wait or 0.0)
            late = wait > retries.longest_s or upstream.clock() + wait >= due
            if not error.again or attempt == retries.most or late or not upstream.ready:
                raise
            if not upstream.budget.spend():
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


async def _once(upstream: Upstream, body: bytes, due: float) -> _Answer:
    reply = await upstream.wires.post("/embeddings", body, due)
    parts = bytearray()
    try:
        while part := await reply.read(due):
            parts += part
            if len(parts) > upstream.config.answer_bytes:
                raise faults.garbled(upstream.name, "sent an answer that is too long", again=False)
    except TimeoutError:
        raise faults.too_slow(upstream.name, "for its whole answer") from None
    finally:
        reply.close()
    try:
        return _answers.decode(parts)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise faults.garbled(upstream.name, "sent no embeddings") from None


def _checked(answer: _Answer, name: str, count: int) -> NDArray[np.float32]:
    rows: list[list[float] | None] = [None] * count
    for place, vector in enumerate(answer.data):
        index = place if vector.index is None else vector.index
        if 0 <= index < count:
            rows[index] = vector.embedding
    found = [row for row in rows if row]
    if len(found) < count or len({len(row) for row in found}) > 1:
        raise faults.garbled(name, "sent other embeddings than it was asked for", again=False)
    return np.array(found, dtype=np.float32)


def _usage(answer: _Answer, inputs: Sequence[str | Sequence[int]]) -> Usage:
    told = read_usage(answer.usage)
    if told is not None and told.prompt_tokens is not None and told.prompt_tokens >= 0:
        return Usage(prompt_tokens=told.prompt_tokens)
    length = sum(len(text.encode(errors="replace")) if isinstance(text, str) else 4 * len(text) for text in inputs)
    return Usage(prompt_tokens=usage.estimated_prompt(length, 0))
