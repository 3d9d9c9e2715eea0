"""A mock engine that computes nothing: it repeats the same words at a given pace.

Outputs go through the engine client's own OutputStream, one per token, as from a worker; only the worker's socket is
missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from pace import Wheel

from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.process.output_stream import OutputStream
from headrace.models.text.tokenizer import Tokenizer

TEXT: Final = " The river runs past the old mill, turns the wheel and goes on to the sea."


class MockEngine:
    def __init__(self, tokenizer: Tokenizer, tokens_per_s: float | None) -> None:
        """`tokens_per_s`: per stream; None: all at once."""
        tokens = tokenizer.encode(TEXT, True)
        self._words = [(token, tokenizer.decode([token])) for token in tokens if tokenizer.decode([token])]
        self._wheel = None if tokens_per_s is None else Wheel(tokens_per_s)

    def stream(self, request: GenerationRequest) -> OutputStream:
        stream = OutputStream(self, request)
        for index in range(request.n):
            step = self._answer(stream, index)
            if self._wheel is None:
                asyncio.get_running_loop().call_soon(_run_to_end, step)
            else:
                self._wheel.add(step)
        return stream

    def drop(self, stream: OutputStream) -> None:
        """Forget an abandoned stream; closing it ends its steps."""

    async def stats(self) -> list[dict[str, Any]]:
        return []

    def _answer(self, stream: OutputStream, index: int) -> Callable[[], bool]:
        request = stream.request
        words, count, most = self._words, 0, request.max_tokens

        def step() -> bool:
            nonlocal count
            if stream.closed:
                return False
            token, text = words[count % len(words)]
            count += 1
            if count < most:
                stream.push(SequenceOutput("", index, [token], text))
                return True
            usage = SequenceUsage(len(request.prompt), count, 0, 0, 0, 0.0, 0.0, 0.0)
            stream.push(SequenceOutput("", index, [token], text, ending=SequenceEnd(FinishReason.LENGTH, usage)))
            return False

        return step


def _run_to_end(step: Callable[[], bool]) -> None:
    while step():
        pass
