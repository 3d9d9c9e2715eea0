"""Embeds or scores texts with a served model, without generating any.

Engines take one request per text, at most 64 of a call at once; an upstream takes all texts in one request. Reserving
limits and budgets between counting and running is the caller's job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.interface.sampling import SamplingParams
from headrace.engine.interface.sequence_result import SequenceResult
from headrace.errors import HeadraceError, RequestError
from headrace.gateway.api_errors import ApiError, as_api_error
from headrace.gateway.requests.text_request import TokenUsage
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.gateway.serving.truncation import LONG_TEXT, Truncation, read_truncation, tokens_within
from headrace.gateway.serving.upstream_answers.upstream_embeddings import count_embedding_tokens, embed_texts
from headrace.models.spec import RankingSpec
from headrace.models.text.pair_encoder import PairEncoder

_AT_ONCE: Final = 64  # texts of one call that are with the engine


class VectorCache(Protocol):
    """Vectors of texts that were computed before, for one call: `find` once, then `keep` once."""

    async def find(self, texts: Sequence[Any]) -> list[NDArray[np.float32] | None]:
        """Return the vector of each text, or None. `texts`: tokens, or what an upstream gets."""
        ...

    async def keep(self, places: Sequence[int], rows: NDArray[np.float32]) -> None:
        """Keep the vectors of the texts at these places."""
        ...


class TextEvaluation:
    """The texts of one call, for one model: add them, which counts their tokens, then run them together."""

    def __init__(self, served: ServedVariant, caller: Caller, given: Mapping[str, Any]) -> None:
        self.served = served
        self.wished: str = given.get("surface") or ""  # the surface that the request itself names
        self.surface = self.wished or caller.surface or "batch"
        self.input_tokens = 0  # of what was taken; estimated for an upstream without a tokenizer
        self.usage = TokenUsage()  # of what was computed, also where the rest failed
        self._caller = caller
        self._priority: int = given.get("priority", 0)
        self._room = asyncio.Semaphore(_AT_ONCE)
        self.vector_cache: VectorCache | None = None
        self.use_cache = False  # whether its vectors may come from a cache
        self.truncated: list[str] = []  # names of the texts that were cut
        self._truncation = read_truncation(given, served.context)
        self._prompt_name: str | None = given.get("prompt_name")
        self._requests: list[GenerationRequest] = []
        self._texts: list[str | Sequence[int]] = []  # that an upstream gets

    def on(self, surface: str) -> None:
        """Runs there."""
        if surface != self.surface:
            self.surface = surface
            self._requests = [replace(request, surface=surface) for request in self._requests]

    async def embed(self, texts: Mapping[str, str | Sequence[int]]) -> NDArray[np.float32]:
        """The vectors of texts, each with its name for errors."""
        await self.take(texts)
        return await self.vectors()

    async def take(self, texts: Mapping[str, str | Sequence[int]], *, prompt_name: str | None = None) -> None:
        """Texts to be embedded. ApiError where one of them cannot be. `prompt_name`: the prompt before them, if the
        request names none and the model has it."""
        upstream = self.served.upstream
        if upstream is not None:
            if self._truncation is not None or self._prompt_name is not None:
                name = "truncate" if self._truncation is not None else "prompt_name"
                raise ApiError(
                    f"'{name}' is not supported for '{self.served.name}', which an upstream serves.",
                    parameter=name,
                    code="unsupported_parameter",
                )
            self.input_tokens += await count_embedding_tokens(upstream, texts)
            self._texts += texts.values()
            return
        prompts = self.served.prompts
        if self._prompt_name is None and prompt_name not in prompts.texts:
            prompt_name = None
        prompt = prompts.text(self._prompt_name or prompt_name)
        for name, text in texts.items():
            given = prompt + text if isinstance(text, str) else text
            tokens, cut = await tokens_within(self.served, given, name, self._truncation)
            if cut:
                self.truncated.append(name)
            self.add(tokens, "embed")
            await asyncio.sleep(0)  # cutting thousands of texts takes a while, and others are to be served meanwhile

    async def take_pairs(
        self, ranking: RankingSpec, query: str, documents: Sequence[str], *, instruction: str | None = None
    ) -> None:
        """A query and documents to be scored by a reranker. ApiError where a pair does not fit."""
        cut = self._truncation or Truncation()
        context = self.served.context
        try:
            encoder = PairEncoder(self.served.tokenizer, ranking, query, context=context, instruction=instruction)
        except RequestError as error:
            raise as_api_error(error) from None
        for place, document in enumerate(documents):
            encode = partial(
                encoder.encode, document, most=cut.most, cut=self._truncation is not None, keep_end=cut.keep_end
            )
            try:
                pair = await asyncio.to_thread(encode) if len(document) > LONG_TEXT else encode()
            except RequestError as error:
                if error.parameter == "documents":
                    error.parameter = f"documents[{place}]"
                raise as_api_error(error) from None
            if pair.cut:
                self.truncated.append(f"documents[{place}]")
            self.add(pair.tokens, "embed", second_text=pair.second_text)
            await asyncio.sleep(0)

    def add(
        self, tokens: tuple[int, ...], kind: Literal["embed", "score"], *, score_from: int = 0, second_text: int = -1
    ) -> None:
        """One text, for an engine."""
        self.input_tokens += len(tokens)
        self._requests.append(
            GenerationRequest(
                id="",
                prompt=tokens,
                kind=kind,
                score_from=score_from,
                second_text=second_text,
                sampling=SamplingParams(logprobs=1) if kind == "score" else SamplingParams(),
                tenant=self._caller.tenant,
                weight=self._caller.weight,
                salt=self._caller.tenant,
                adapter=self.served.adapter,
                surface=self.surface,
                priority=self._priority,
            )
        )

    async def vectors(self) -> NDArray[np.float32]:
        """A row for each text that was taken."""
        cache = self.vector_cache
        if cache is None:
            return await self._computed(range(len(self._texts) or len(self._requests)))
        keys = self._texts or [(request.prompt, request.second_text) for request in self._requests]
        known = await cache.find(keys)
        missing = [place for place, row in enumerate(known) if row is None]
        if missing:
            rows = await self._computed(missing)
            for place, row in zip(missing, rows, strict=True):
                known[place] = row
            await cache.keep(missing, rows)
        if len(missing) < len(known):
            self._count_cached(set(range(len(known))) - set(missing))
        return np.stack([row for row in known if row is not None])

    def _count_cached(self, places: Collection[int]) -> None:
        """Count the tokens of texts that were not computed. An upstream's are a share of the estimate."""
        if self._requests:
            tokens = sum(len(self._requests[place].prompt) for place in places)
        else:
            tokens = round(self.input_tokens * len(places) / len(self._texts))
        self.usage.prompt_tokens += tokens
        self.usage.cached_tokens += tokens

    async def _computed(self, places: Sequence[int]) -> NDArray[np.float32]:
        upstream = self.served.upstream
        if upstream is None:
            answers = await self.answers([self._requests[place] for place in places])
            return np.stack([np.frombuffer(answer.vector or b"", dtype="<f4") for answer in answers])
        found, self.usage = await embed_texts(
            upstream,
            [self._texts[place] for place in places],
            tokens=round(self.input_tokens * len(places) / max(1, len(self._texts))),
            due=upstream.clock() + upstream.config.timeouts.total_s,
            priority=self._priority,
        )
        self.served.width = found.shape[1]
        return found

    async def answers(self, requests: Sequence[GenerationRequest] | None = None) -> list[SequenceResult]:
        """The engine's, by default of all requests. ApiError where one text fails; then the others are cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(each)) for each in requests or self._requests]
        except BaseExceptionGroup as errors:
            raise as_api_error(_first(errors)) from None
        return [task.result() for task in tasks]

    async def _one(self, request: GenerationRequest) -> SequenceResult:
        answer = SequenceResult(0)
        async with self._room:
            stream = self.served.engine.stream(request)
            async with stream:
                async for output in stream:
                    answer.add(output)
        ending = answer.ending
        if ending is None or ending.finish not in (FinishReason.STOP, FinishReason.LENGTH):
            raise HeadraceError(ending.why if ending is not None and ending.why else "the engine gave no result")
        self.usage.prompt_tokens += ending.usage.prompt_tokens
        self.usage.cached_tokens += ending.usage.cached_tokens
        self.usage.prefill_s += ending.usage.prefill_s
        self.usage.decode_s += ending.usage.decode_s
        return answer


def _first(errors: BaseExceptionGroup[BaseException]) -> Exception:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return _first(error)  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(error, Exception):
            return error
    return HeadraceError("cancelled")
