"""PipelineThread: one thread that steps a pipeline of OpenVINO GenAI, for requests that come and leave at any time.

    event loop ──submit, cancel──▶ PipelineThread ──step──▶ pipeline
         ◀──────────tokens of each step, the end──────────┘

The pipeline batches continuously and shares the KV of equal beginnings; this class only feeds it.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

FinishReason = str  # "stop", "length" or "error"
Receiver = Callable[[list[int], FinishReason | None], None]  # new tokens, and why the answer ends with them


class OpenVinoGeneration:
    """A request. Its receiver is called in the thread of the pipeline."""

    def __init__(self, prompt: Any, config: Any, receive: Receiver) -> None:
        self.prompt: Final = prompt
        self.config: Final = config
        self.receive: Final = receive
        self.cancelled = False
        self.handle: Any = None
        self.rejection = ""  # why the pipeline does not take it


class PipelineThread(threading.Thread):
    def __init__(self, genai: Any, pipeline: Any) -> None:
        super().__init__(name="pipeline", daemon=True)
        self.running = 0
        self.broken = ""  # why it steps no more
        self._genai = genai
        self._pipeline = pipeline
        self._coming: queue.SimpleQueue[OpenVinoGeneration | None] = queue.SimpleQueue()  # None wakes the thread
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        return self._coming.qsize()

    def submit(self, prompt: Any, config: Any, receive: Receiver) -> OpenVinoGeneration:
        generation = OpenVinoGeneration(prompt, config, receive)
        self._coming.put(generation)
        if self.broken:  # perhaps since the caller looked
            self._fail_waiting()
        return generation

    def cancel(self, generation: OpenVinoGeneration) -> None:
        """Stop computing it. Its receiver is not called any more."""
        generation.cancelled = True
        self._coming.put(None)

    def run(self) -> None:
        running: list[OpenVinoGeneration] = []
        try:
            while True:
                self._take_new(running)
                cancelled = [generation for generation in running if self._left(generation)]
                running = [generation for generation in running if not generation.cancelled]
                self.running = len(running)
                if running or cancelled:
                    self._pipeline.step()  # which also frees the KV of what was cancelled
                    running = [generation for generation in running if not self._deliver(generation)]
        except Exception as error:  # the pipeline is of no use afterwards, and its health check says so
            self.broken = f"{type(error).__name__}: {error}"
            for generation in running:
                generation.receive([], "error")
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        """End the requests that a broken pipeline has not taken. Several threads may do it at once."""
        with contextlib.suppress(queue.Empty):
            while True:
                generation = self._coming.get_nowait()
                if generation is not None:
                    generation.receive([], "error")

    def _take_new(self, running: list[OpenVinoGeneration]) -> None:
        """Add the requests that have come; wait for one if nothing runs."""
        while not running or not self._coming.empty():
            generation = self._coming.get()
            if generation is None:
                if not running:
                    continue
            elif not generation.cancelled and self._add(generation):
                running.append(generation)

    def _add(self, generation: OpenVinoGeneration) -> bool:
        """Hand a request to the pipeline. Return whether it is taken: what is wrong with one ends no other."""
        try:
            generation.handle = self._pipeline.add_request(next(self._numbers), generation.prompt, generation.config)
        except Exception as error:
            generation.rejection = last_line(error)
            generation.receive([], "error")
            return False
        return True

    def _left(self, generation: OpenVinoGeneration) -> bool:
        if generation.cancelled:
            generation.handle.cancel()
        return generation.cancelled

    def _deliver(self, generation: OpenVinoGeneration) -> bool:
        """Hand out what the step produced. Return whether the answer has ended."""
        handle, states = generation.handle, self._genai.GenerationStatus
        ended = handle.get_status() != states.RUNNING
        tokens: list[int] = []
        reason: FinishReason = "stop"
        while handle.can_read():
            for output in handle.read().values():
                tokens += output.generated_ids
                if output.finish_reason == self._genai.GenerationFinishReason.LENGTH:
                    reason = "length"
        if ended and handle.get_status() == states.IGNORED:
            reason = "error"  # it does not fit into the KV memory
        if (tokens or ended) and not generation.cancelled:
            generation.receive(tokens, reason if ended else None)
        return ended


def last_line(error: Exception) -> str:
    """Return what its message says at the end: the lines before name places in OpenVINO's source."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


class TextPieces:
    """Turns tokens into text piece by piece. A piece ends where no later token changes it."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # the token from which text is decoded, because the first one of a text may lose its space
        self._written = 0  # tokens whose text is out

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        self._tokens += tokens
        before = self._decode(self._tokens[self._context : self._written])
        text = self._decode(self._tokens[self._context :])
        if not last and text.endswith("\ufffd"):  # a character whose bytes are not all there
            return ""
        self._context, self._written = self._written, len(self._tokens)
        return text[len(before) :]
