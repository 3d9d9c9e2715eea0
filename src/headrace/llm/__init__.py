"""`headrace.LLM` and `headrace.AsyncLLM`: a model for a program, without a server.

LLM owns an engine in this process and the loop that runs requests to their end. AsyncLLM owns worker processes, one or
several replicas, and the client to them, for as_prompts callers on one event loop; a worker that dies is started again,
and what it ran goes on as if nothing had happened. Texts, token ids and chats go in, whole results come out; `stream`
gives them piece by piece.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.engine.executors.cpu_executor import default_context, usable_cores
from headrace.engine.interface.outputs import SequenceOutput
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.interface.sequence_result import SequenceResult
from headrace.engine.process.engine_client import ClientTimeouts, EngineClient, OverloadedError
from headrace.engine.process.open_engine import OpenedVariant, open_variant
from headrace.engine.process.output_stream import OutputStream
from headrace.engine.process.supervisor import Supervisor, SupervisorTimeouts
from headrace.engine.process.wire import WorkerConfig
from headrace.errors import RequestError
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

_AT_ONCE: Final = 512  # requests that are with the engine; the others wait here
_CONNECT: Final = 60.0  # seconds, for workers that have said that they are ready


class LLM:
    """One model, its engine, and this thread. Calls from several threads take turns.

    Options are those of a Variant: weights, group, keep, kv, threads, context, kv_tokens, speculation, ...
    Parameters of a as_generation are those of Wishes and of Sampling: max_tokens, stop, n, grammar, temperature, seed,
    ...
    """

    def __init__(
        self,
        model: str | Path | ModelFolder = DEFAULT_MODEL,
        *,
        progress: Callable[[int, int], None] | None = None,  # bytes of weights that are packed, and of all
        **options: Any,
    ) -> None:
        """`model`: a folder, the name of a bundled model, or a hub id."""
        folder = model if isinstance(model, ModelFolder) else open_model(find_model(str(model)))
        self._opened: OpenedVariant = open_variant(
            Variant.of(str(folder.path), **options), folder=folder, progress=progress
        )
        self._engine = self._opened.engine
        context = self._opened.executor.capacity.context
        self._asking = RequestFactory(self._opened.tokenizer, context=context)
        self._turn = threading.Lock()

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
        """The parts: variant, model folder, executor, engine."""
        return self._opened

    def generate(self, prompts: Prompt | Iterable[Prompt], **params: Any) -> list[Generation]:
        """Continues each prompt, all of them together; the results are in the prompts' order."""
        return self._generations(self._asking.generations(prompts, params_of(**params)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tools: Sequence[Message] | None = None,
        template: dict[str, Any] | None = None,
        **params: Any,
    ) -> list[Generation]:
        """The answer to a chat, or to each of several. `template`: further values for the chat template."""
        return self._generations(self._asking.chats(messages, tools, template or {}, params_of(**params)))

    def stream(self, prompt: Prompt, **params: Any) -> Iterator[SequenceOutput]:
        """The continuation of one prompt, piece by piece: `text` and `tokens` of each, and at last its `ending`."""
        request = self._asking.generate(self._asking.tokens(prompt), params_of(**params))
        with self._turn:
            self._submit(request)
            open_sequences = request.n
            try:
                while open_sequences:
                    for output in self._engine.step():
                        if output.request == request.id:
                            open_sequences -= output.ending is not None
                            yield output
            finally:
                if open_sequences:
                    self._cancel([request.id])

    def score(self, pairs: Iterable[tuple[Prompt, Prompt]]) -> list[Score]:
        """How likely each pair's second text is after its first."""
        requests = [self._asking.score(before, text) for before, text in pairs]
        return [as_score(answer) for (answer,) in self._run(requests)]

    def embed(self, texts: Prompt | Iterable[Prompt]) -> NDArray[np.float32]:
        """A vector for each text, pooled as the model says; the mean over its tokens where it says nothing."""
        requests = [self._asking.embed(text) for text in as_prompts(texts)]
        width = self._opened.executor.spec.hidden_size
        return stack_vectors((answer for (answer,) in self._run(requests)), width)

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def close(self) -> None:
        with self._turn:
            self._engine.close()

    def _generations(self, requests: list[GenerationRequest]) -> list[Generation]:
        return [as_generation(*found) for found in zip(requests, self._run(requests), strict=True)]

    def _run(self, requests: list[GenerationRequest]) -> list[list[SequenceResult]]:
        """All requests to their end. Where one is refused, or the caller interrupts, none goes on."""
        answers = {request.id: [SequenceResult(index) for index in range(request.n)] for request in requests}
        waiting = deque(requests)
        running: dict[str, int] = {}  # sequences that have not ended
        with self._turn:
            try:
                while waiting or running:
                    while waiting and len(running) < _AT_ONCE:
                        request = waiting[0]
                        if not self._submit(request, patient=bool(running)):
                            break
                        waiting.popleft()
                        running[request.id] = request.n
                    for output in self._engine.overlapped_step():
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
        """False where it is to be tried again once something has ended, and the caller is patient."""
        admission = self._engine.submit(request)
        if not admission.accepted and not patient:
            raise OverloadedError(admission.why, retry_after=admission.retry_after, predicted=admission.predicted)
        return admission.accepted

    def _cancel(self, ids: list[str]) -> None:
        for id in ids:
            self._engine.cancel(id)
        while not self._engine.idle:
            self._engine.step()


class AsyncLLM:
    """One model in worker processes; to be entered, as in

    async with AsyncLLM("path/to/model", replicas=2) as llm:
        async with llm.stream("The water ran") as stream:
            async for output in stream:
                print(output.text, end="")

    Options and parameters are LLM's. Replicas share the machine's cores unless `threads` says how as_prompts each may
    use.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        replicas: int = 1,
        watch: SupervisorTimeouts | None = None,
        waits: ClientTimeouts | None = None,
        drain_seconds: float = 30.0,
        progress: Callable[[int, int], None] | None = None,  # bytes of weights that a worker has packed, and of all
        early: bool = False,  # the workers begin to load before `start`; then it is to be started or abandoned
        **options: Any,
    ) -> None:
        if replicas < 1:
            raise RequestError(f"replicas must be at least 1, not {replicas}", parameter="replicas")
        if options.get("threads") is None and replicas > 1:
            options["threads"] = max(1, usable_cores() // replicas)
        folder = open_model(find_model(str(model)))
        self.variant = Variant.of(str(folder.path), **options)
        self.context = default_context(folder.spec) if self.variant.context is None else self.variant.context
        self._width = folder.spec.hidden_size
        config = WorkerConfig(variant=self.variant, drain_seconds=drain_seconds)
        self.supervisor = Supervisor([config] * replicas, watch=watch, progress=progress)
        if early:
            self.supervisor.begin()
        try:
            self._asking = RequestFactory(folder.tokenizer, context=self.context, alone="chat")
        except BaseException:
            self.abandon()
            raise
        self.client = EngineClient(self.supervisor.paths, waits=waits)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Returns when every replica can take requests."""
        await self.supervisor.start()
        self.client.start()
        await self.client.ready(_CONNECT)

    def abandon(self) -> None:
        """In the place of `close`, where it was never started."""
        self.supervisor.abandon()

    async def close(self) -> None:
        """Cancels what runs, and ends the workers."""
        await self.client.close()
        await self.supervisor.stop()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._asking.tokenizer

    def stream(self, prompt: Prompt, **params: Any) -> OutputStream:
        """The continuation of one prompt, piece by piece."""
        return self.client.stream(self._asking.generate(self._asking.tokens(prompt), params_of(**params)))

    async def generate(self, prompts: Prompt | Iterable[Prompt], **params: Any) -> list[Generation]:
        """Several prompts are one job in the background; one alone is as urgent as a stream."""
        return await self._generations(self._asking.generations(prompts, params_of(**params)))

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tools: Sequence[Message] | None = None,
        template: dict[str, Any] | None = None,
        **params: Any,
    ) -> list[Generation]:
        return await self._generations(self._asking.chats(messages, tools, template or {}, params_of(**params)))

    async def score(self, pairs: Iterable[tuple[Prompt, Prompt]]) -> list[Score]:
        requests = [self._asking.score(before, text) for before, text in pairs]
        return [as_score(answer) for (answer,) in await self._answers(requests)]

    async def embed(self, texts: Prompt | Iterable[Prompt]) -> NDArray[np.float32]:
        requests = [self._asking.embed(text) for text in as_prompts(texts)]
        return stack_vectors((answer for (answer,) in await self._answers(requests)), self._width)

    async def _generations(self, requests: list[GenerationRequest]) -> list[Generation]:
        answers = await self._answers(requests)
        return [as_generation(*found) for found in zip(requests, answers, strict=True)]

    async def _answers(self, requests: list[GenerationRequest]) -> list[list[SequenceResult]]:
        # No caller may fill more than a part of the queue.
        at_once = max(1, min(_AT_ONCE, self.variant.queued_sequences // 4))
        return await self.client.complete_all(requests, at_once=at_once)
