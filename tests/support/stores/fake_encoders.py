"""Fake encoders and requests for the tests of the semantic cache."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.interface.sampling import SamplingParams
from headrace.engine.process.client_errors import OverloadedError
from headrace.gateway.caches.semantic.guarded_question import parse_question
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.serving.exchange import Caller
from headrace.models.text.tokenizer import Tokenizer

WIDTH = 64


class WordEmbedder:
    """Texts of the same content words are near each other; everything else is not."""

    name = "words"
    width = WIDTH

    def __init__(self) -> None:
        self.text_request: list[str] = []
        self.delay_s = 0.0
        self.fails = False

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.text_request += texts
        await asyncio.sleep(self.delay_s)
        if self.fails:
            raise OSError("the encoder is gone")
        return np.stack([self.vector(text) for text in texts])

    def vector(self, text: str) -> NDArray[np.float32]:
        words = parse_question(text).content or (text,)
        rows = [
            np.random.default_rng(int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())).normal(
                size=WIDTH
            )
            for word in words
        ]
        total = np.sum(rows, axis=0)
        return (total / np.linalg.norm(total)).astype(np.float32)


class WordEncoder:
    """An encoder of collections, with WordEmbedder's vectors. Counts a word as a token."""

    def __init__(self, name: str = "words", *, context: int = 256) -> None:
        self.identity = name
        self.context = context
        self.embedder = WordEmbedder()
        self.embedded: list[str] = []  # texts of documents
        self.callers: list[tuple[str, str]] = []  # tenant and key of each call
        self.error: Exception | None = None
        self.held: asyncio.Event | None = None  # calls wait for it

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    async def embed(self, texts: Sequence[str], caller: Caller, purpose: str) -> NDArray[np.float32]:
        self.callers.append((caller.tenant, caller.key))
        if self.held is not None:
            await self.held.wait()
        if self.error is not None:
            raise self.error
        if purpose == "document":
            self.embedded += texts
        return await self.embedder.embed(texts)


def asking(
    text: str, *, before: Sequence[dict[str, Any]] = (), temperature: float = 0.0, **options: Any
) -> TextRequest:
    messages = [*before, {"role": "user", "content": text}]
    return TextRequest(model="mini", messages=messages, sampling=SamplingParams(temperature=temperature), **options)


class EncoderStream:
    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self.vector: NDArray[np.float32] | None = np.array([3.0, len(request.prompt), 0.0, 4.0], dtype="<f4")

    async def __aenter__(self) -> EncoderStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[SequenceOutput]:
        if self.vector is None:  # it says nothing
            await asyncio.Event().wait()
        usage = SequenceUsage(len(self._request.prompt), 0, 0, 0, 0, 0.0, 0.0, 0.0)
        output = SequenceOutput("r", 0, [], "", ending=SequenceEnd(FinishReason.STOP, usage))
        assert self.vector is not None
        output.vector = self.vector.astype("<f4").tobytes()
        yield output


class WordEngine:
    """An engine whose vectors are WordEmbedder's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text_request: list[GenerationRequest] = []
        self.embedder = WordEmbedder()
        self.silent = self.fails = False
        self._tokenizer = tokenizer

    def stream(self, request: GenerationRequest) -> Any:
        self.text_request.append(request)
        if self.fails:
            raise OverloadedError("the encoder is gone")
        stream = EncoderStream(request)
        words = [token for token in request.prompt if not self._tokenizer.is_special(token)]
        stream.vector = None if self.silent else self.embedder.vector(self._tokenizer.decode(words))
        return stream

    async def stats(self) -> list[dict[str, Any]]:
        return []


class EncoderEngine:
    """An engine whose vectors say how long a text was."""

    def __init__(self) -> None:
        self.text_request: list[GenerationRequest] = []

    def stream(self, request: GenerationRequest) -> Any:
        self.text_request.append(request)
        return EncoderStream(request)

    async def stats(self) -> list[dict[str, Any]]:
        return []
