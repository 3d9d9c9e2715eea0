"""AsyncLLM: a model in worker processes, for many callers on one event loop.

It restarts a worker that dies, and streams continue where they were. Does not import the engine: its workers do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.engine.executors.default_sizes import default_context, usable_cores
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.interface.sequence_result import SequenceResult
from headrace.engine.process.engine_client import ClientTimeouts, EngineClient
from headrace.engine.process.output_stream import OutputStream
from headrace.engine.process.supervisor import Supervisor, SupervisorTimeouts
from headrace.engine.process.wire import WorkerConfig
from headrace.engine.process.worker_address import WorkerTls
from headrace.errors import RequestError
from headrace.llm.adapters import open_adapters
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
from headrace.models.model_folder import find_model, open_model
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.weight_cache import cache_folder
from headrace.variant import DEFAULT_MODEL, Variant

_AT_ONCE: Final = 512  # requests in the engine at once; the others wait here
_CONNECT: Final = 60.0  # seconds, to connect to workers that reported that they are ready


class AsyncLLM:
    """One model in worker processes, as an async context manager:

        async with AsyncLLM("path/to/model", replicas=2) as llm:
            async with llm.stream("The water ran") as stream:
                async for output in stream:
                    print(output.text, end="")

    Options and parameters are those of LLM. Replicas share the machine's cores unless `threads` says how many each may
    use.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        replicas: int = 1,
        standby: int = 0,  # further workers that are ready, for when a replica fails
        most_replicas: int | None = None,  # that `scale` may start; they share the machine's cores
        workers: Sequence[str] = (),  # on other hosts, such as tls://10.0.0.5:9000
        discovers: bool = False,  # workers on other hosts are added to `client` later
        tls: WorkerTls | None = None,  # between this process and them
        fingerprint: str = "",  # of the model's files, which every worker must have
        watch: SupervisorTimeouts | None = None,
        waits: ClientTimeouts | None = None,
        drain_seconds: float = 30.0,
        progress: Callable[[int, int], None] | None = None,  # bytes of weights packed so far, bytes in all
        early: bool = False,  # workers load before `start`; then call `start` or `abandon`
        adapters: Mapping[str, str | Path] | None = None,  # folders of LoRA adapters, by the names that calls use
        **options: Any,
    ) -> None:
        if replicas < (0 if workers or discovers else 1):
            raise RequestError(f"'replicas' must be at least 1, not {replicas}.", parameter="replicas")
        sharing = max(replicas, most_replicas or 0)
        if options.get("threads") is None and sharing > 1:
            options["threads"] = max(1, usable_cores() // sharing)
        folder = open_model(find_model(str(model)))
        self.variant = Variant.of(str(folder.path), **options)
        self.context = default_context(folder.spec) if self.variant.context is None else self.variant.context
        self._width = folder.spec.vector_size
        folder.tokenizer_cache = cache_folder() if self.variant.cache else None
        self._config = config = WorkerConfig(variant=self.variant, drain_seconds=drain_seconds, fingerprint=fingerprint)
        self.supervisor = Supervisor([config] * (replicas + standby), watch=watch, progress=progress)
        if early:
            self.supervisor.begin()
        try:
            self._asking = RequestFactory(
                folder.tokenizer,
                context=self.context,
                alone="chat",
                prompts=folder.prompts,
                ranking=folder.spec.ranking,
                adapters=open_adapters(adapters or {}, folder),
            )
        except BaseException:
            self.abandon()
            raise
        paths = self.supervisor.paths
        addresses = (*paths[:replicas], *workers, *paths[replicas:])
        self.client = EngineClient(addresses, standby=standby, tls=tls, fingerprint=fingerprint, waits=waits)
        self._active = list(paths[:replicas])  # sockets of the replicas of this machine, without standby

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Return when every replica of this machine can take requests. Workers on other hosts may come later."""
        await self.supervisor.start()
        self.client.start()
        if self.supervisor.paths:
            await self.client.ready(_CONNECT)

    @property
    def active_replicas(self) -> int:
        """How many replicas of this machine take requests, or will when they have started."""
        return len(self._active)

    async def scale(self, replicas: int) -> None:
        """Start or stop workers of this machine. Returns when new ones take requests, and when those that stop have
        finished theirs. HeadraceError if one does not start."""
        self.client.parked = self.client.parked or replicas == 0
        leaving, self._active = self._active[replicas:], self._active[:replicas]
        for path in leaving:
            self.client.retire_replica(path)
        starting = [self._add() for _ in range(replicas - len(self._active))]
        failures = await asyncio.gather(*starting, *map(self._remove, leaving), return_exceptions=True)
        for failure in failures:
            if isinstance(failure, BaseException):
                raise failure

    async def _add(self) -> None:
        path = await self.supervisor.add(self._config)
        self._active.append(path)
        self.client.parked = False
        self.client.add_replica(path)

    async def _remove(self, path: Path) -> None:
        await self.supervisor.remove(path)
        await self.client.remove_replica(path)

    def abandon(self) -> None:
        """Stop the workers of an object that was never started, in place of `close`."""
        self.supervisor.abandon()

    async def close(self) -> None:
        """Cancel what runs and stop the workers."""
        await self.client.close()
        await self.supervisor.stop()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._asking.tokenizer

    def stream(self, prompt: Prompt, **params: Any) -> OutputStream:
        """Return a stream of the outputs of one prompt."""
        return self.client.stream(self._asking.generate(self._asking.tokens(prompt), params_of(**params)))

    async def generate(self, prompts: Prompt | Iterable[Prompt], **params: Any) -> list[Generation]:
        """Continue all prompts. Several prompts run as background work; a single prompt is as urgent as a stream."""
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

    async def embed(
        self, texts: Prompt | Iterable[Prompt], *, prompt_name: str | None = None, truncate: bool = False
    ) -> NDArray[np.float32]:
        prompts = as_prompts(texts)
        requests = [self._asking.embed(text, prompt_name=prompt_name, truncate=truncate) for text in prompts]
        return stack_vectors((answer for (answer,) in await self._answers(requests)), self._width)

    async def rerank(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None, truncate: bool = False
    ) -> list[float]:
        requests = self._asking.rank(query, documents, instruction=instruction, truncate=truncate)
        return self._asking.scores(answer for (answer,) in await self._answers(requests))

    async def pin(self, prefix: Prompt | None = None, *, system: str | None = None) -> int:
        """As LLM.pin, in every worker. A worker that is restarted computes the prefix again."""
        tokens = self._asking.prefix(prefix, system)
        await self.client.pin(tokens)
        block_tokens = (await self.client.ready()).block_tokens
        return len(tokens) // block_tokens * block_tokens

    async def unpin(self, prefix: Prompt | None = None, *, system: str | None = None) -> None:
        """Stop keeping what `pin` kept. RequestError if it is not pinned."""
        await self.client.pin(self._asking.prefix(prefix, system), keep=False)

    async def _generations(self, requests: list[GenerationRequest]) -> list[Generation]:
        answers = await self._answers(requests)
        return [as_generation(*found) for found in zip(requests, answers, strict=True)]

    async def _answers(self, requests: list[GenerationRequest]) -> list[list[SequenceResult]]:
        # One call may fill only a part of the queue.
        at_once = max(1, min(_AT_ONCE, self.variant.queued_sequences // 4))
        return await self.client.complete_all(requests, at_once=at_once)
