"""LLM: a model and its engine in this process, which runs requests to their end."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.engine.executors.adapter_table import AdapterMemoryError
from headrace.engine.interface.outputs import SequenceOutput
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.interface.sequence_result import SequenceResult
from headrace.engine.process.client_errors import OverloadedError
from headrace.engine.process.open_engine import OpenedVariant, open_variant
from headrace.errors import HeadraceError, RequestError
from headrace.llm.adapters import open_adapters
from headrace.llm.interrupts import held_interrupts
from headrace.llm.prompting import (
    Generation,
    Message,
    Prompt,
    RequestFactory,
    Score,
    as_generation,
    as_prompts,
    as_score,
    params_of,
    stack_vectors,
)
from headrace.models.model_folder import ModelFolder, find_model, open_model
from headrace.models.text.tokenizer import Tokenizer
from headrace.variant import DEFAULT_MODEL, Variant

_AT_ONCE: Final = 512  # requests in the engine at once; the others wait here


class LLM:
    """One model and its engine in this process. Calls from several threads take turns.

    Options are those of a Variant: weights, group, keep, kv, threads, context, kv_tokens, speculation, … Parameters of
    a generation are those of GenerationParams and SamplingParams: max_tokens, stop, n, grammar, temperature, seed, …
    """

    def __init__(
        self,
        model: str | Path | ModelFolder = DEFAULT_MODEL,
        *,
        progress: Callable[[int, int], None] | None = None,  # bytes of weights packed so far, bytes in all
        adapters: Mapping[str, str | Path] | None = None,  # folders of LoRA adapters, by the names that calls use
        **options: Any,
    ) -> None:
        """`model` is a folder, a GGUF file, or the name of a bundled or downloaded model."""
        folder = model if isinstance(model, ModelFolder) else open_model(find_model(str(model)))
        self._opened: OpenedVariant = open_variant(
            Variant.of(str(folder.path), **options), folder=folder, progress=progress
        )
        self._engine = self._opened.engine
        context = self._opened.executor.capacity.context
        folder = self._opened.folder
        self._asking = RequestFactory(
            self._opened.tokenizer,
            context=context,
            prompts=folder.prompts,
            ranking=folder.spec.ranking,
            adapters=open_adapters(adapters or {}, folder),
        )
        self._turn = threading.Lock()
        self._stream: weakref.ref[Generator[SequenceOutput]] | None = None  # that has the turn
        self._stream_thread = 0
        self._broken = False  # interrupted while its state changed
        self._closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._opened.tokenizer

    @property
    def opened(self) -> OpenedVariant:
        """The variant, model folder, executor and engine."""
        return self._opened

    def generate(self, prompts: Prompt | Iterable[Prompt], **params: Any) -> list[Generation]:
        """Continue all prompts together. Results are in the order of the prompts."""
        return self._generations(self._asking.generations(prompts, params_of(**params)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tools: Sequence[Message] | None = None,
        template: dict[str, Any] | None = None,
        **params: Any,
    ) -> list[Generation]:
        """Answer one chat or several. `template` holds further values for the chat template."""
        return self._generations(self._asking.chats(messages, tools, template or {}, params_of(**params)))

    def stream(self, prompt: Prompt, **params: Any) -> Iterator[SequenceOutput]:
        """Yield the outputs of one prompt as they come: `text`, `tokens`, and at last an `ending`."""

        def outputs() -> Generator[SequenceOutput]:
            request = self._asking.generate(self._asking.tokens(prompt), params_of(**params))
            with self._take_turn():
                self._stream, self._stream_thread = own, threading.get_ident()
                open_sequences = request.n
                try:
                    self._submit(request)
                    while open_sequences:
                        for output in self._run_step(self._engine.step):
                            if output.request == request.id:
                                open_sequences -= output.ending is not None
                                yield output
                finally:
                    self._stream = None
                    if open_sequences:
                        self._cancel([request.id])

        stream = outputs()
        own = weakref.ref(stream)  # weak, so that a stream that its caller drops ends at once
        return stream

    def score(self, pairs: Iterable[tuple[Prompt, Prompt]]) -> list[Score]:
        """Return how likely each pair's second text is after its first."""
        requests = [self._asking.score(before, text) for before, text in pairs]
        return [as_score(answer) for (answer,) in self._run(requests)]

    def embed(
        self, texts: Prompt | Iterable[Prompt], *, prompt_name: str | None = None, truncate: bool = False
    ) -> NDArray[np.float32]:
        """Return one vector for each text, pooled as the model specifies (default: the mean over its tokens).

        `prompt_name` is the name of a prompt of the model that is put before each text. `truncate` cuts texts that are
        too long; otherwise they are a RequestError.
        """
        prompts = as_prompts(texts)
        requests = [self._asking.embed(text, prompt_name=prompt_name, truncate=truncate) for text in prompts]
        width = self._opened.executor.spec.vector_size
        return stack_vectors((answer for (answer,) in self._run(requests)), width)

    def rerank(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None, truncate: bool = False
    ) -> list[float]:
        """Return a reranker's score of each document for the query: higher is more relevant.

        `instruction` says what a document must do for the query, for rerankers that take a prompt. `truncate` cuts
        pairs that are too long; otherwise they are a RequestError.
        """
        requests = self._asking.rank(query, documents, instruction=instruction, truncate=truncate)
        return self._asking.scores(answer for (answer,) in self._run(requests))

    def pin(self, prefix: Prompt | None = None, *, system: str | None = None) -> int:
        """Compute the beginning of prompts and keep it in memory. Return the number of tokens kept: whole blocks of 16.

        `prefix` is a text or token ids, `system` the system message of chats. With `saved_prefixes` it is kept over
        restarts.
        """
        tokens = self._asking.prefix(prefix, system)
        reasons: list[str | None] = []
        with self._take_turn():
            self._check_open()
            with held_interrupts():
                self._opened.pins.pin(tokens, "", reasons.append)
            while not reasons:
                for output in self._run_step(self._engine.step):
                    self._opened.pins.takes(output)
        if reasons[0] is not None:
            raise RequestError(reasons[0], parameter="prefix")
        return len(tokens) // self._engine.blocks.block_tokens * self._engine.blocks.block_tokens

    def unpin(self, prefix: Prompt | None = None, *, system: str | None = None) -> None:
        """Stop keeping what `pin` kept. RequestError if it is not pinned."""
        tokens = self._asking.prefix(prefix, system)
        with self._take_turn(), held_interrupts():
            self._check_open()
            self._opened.pins.unpin(tokens, "")

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def close(self) -> None:
        """Wait for the step under way and end the engine. A stream that is not at its end is cancelled."""
        stream = None if self._stream is None else self._stream()
        if stream is not None:
            with contextlib.suppress(ValueError):  # another thread runs it; it keeps its turn to its end
                stream.close()
        with self._turn:
            self._closed = True
            self._engine.close()

    def _generations(self, requests: list[GenerationRequest]) -> list[Generation]:
        return [as_generation(*found) for found in zip(requests, self._run(requests), strict=True)]

    def _run(self, requests: list[GenerationRequest]) -> list[list[SequenceResult]]:
        """Run all requests to their end. If one is rejected, or the caller interrupts, all are cancelled."""
        answers = {request.id: [SequenceResult(index) for index in range(request.n)] for request in requests}
        waiting = deque(requests)
        running: dict[str, int] = {}  # sequences that have not ended
        with self._take_turn():
            try:
                while waiting or running:
                    while waiting and len(running) < _AT_ONCE:
                        request, patient = waiting[0], bool(running)
                        running[request.id] = request.n  # before it is submitted, so that an interrupt cancels it
                        if not self._submit(request, patient=patient):
                            del running[request.id]
                            break
                        waiting.popleft()
                    for output in self._run_step(self._engine.overlapped_step):
                        if output.request not in running:
                            continue
                        answers[output.request][output.index].add(output)
                        if output.ending is not None:
                            running[output.request] -= 1
                            if not running[output.request]:
                                del running[output.request]
            finally:
                if running:
                    self._cancel(list(running))
        return [answers[request.id] for request in requests]

    def _submit(self, request: GenerationRequest, *, patient: bool = False) -> bool:
        """Submit a request. With `patient`, return False if the queue is full; otherwise raise OverloadedError."""
        self._check_open()
        if request.adapter is not None and self._engine.adapters is not None:
            try:
                self._engine.adapters.load(request.adapter).result()
            except AdapterMemoryError:
                if not patient:
                    raise
                return False
        with held_interrupts():
            admission = self._engine.submit(request)
        if not admission.accepted and not patient:
            raise OverloadedError(admission.why, retry_after=admission.retry_after, predicted=admission.predicted)
        return admission.accepted

    def _take_turn(self) -> threading.Lock:
        if self._stream is not None and self._stream_thread == threading.get_ident():
            raise HeadraceError("A stream of this LLM is open. Read it to its end or close it before the next call.")
        return self._turn

    def _run_step(self, step: Callable[[], list[SequenceOutput]]) -> list[SequenceOutput]:
        """Run a step of the engine. Ctrl-C takes effect at its end; the second one interrupts it and breaks the
        engine."""
        self._check_open()
        with held_interrupts():
            self._broken = True
            outputs = step()
            self._broken = False
        return outputs

    def _check_open(self) -> None:
        if self._closed:
            raise HeadraceError("This LLM is closed. Create a new one.")
        if self._broken:
            raise HeadraceError("This LLM was interrupted in the middle of a step. Create a new one.")

    def _cancel(self, ids: list[str]) -> None:
        if self._broken or self._closed:
            return
        with held_interrupts():
            for id in ids:
                self._engine.cancel(id)
        while not self._engine.idle:
            self._run_step(self._engine.step)
