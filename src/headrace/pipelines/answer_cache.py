"""RunAnswerCache: earlier answers of a pipeline to the same question, for its popular-answer mode."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from headrace.gateway.caches.exact.cache_key import answer_shape
from headrace.gateway.caches.results.result_cache import ResultLookup
from headrace.gateway.folded_words import folded
from headrace.pipelines.kept_passages import are_passages_kept, collection_uid
from headrace.pipelines.run_state import STALE_S, RunState
from headrace.pipelines.stage_services import StageServices

_SPACE: Final = re.compile(r"\s+")


class StoredPipelineAnswer(msgspec.Struct):
    text: str
    sources: list[dict[str, Any]]
    citations: list[dict[str, Any]]
    followups: list[str]


class RunAnswerCache:
    """The view of one run. Answers depend on the tenant, the whole conversation, the filters, the pipeline's
    configuration, and on everything that shapes an answer: images, format, sampling."""

    def __init__(self, services: StageServices, state: RunState) -> None:
        self._services = services
        self._state = state
        request = state.exchange.text_request
        self._shape: bytes | None = None
        if "cache" in state.config.generate.order and request.cache == "on" and request.sampling.logprobs is None:
            self._shape = answer_shape(request)
        self._lookup: ResultLookup | None = None  # the last one

    async def find(self, *, stale: bool = False) -> StoredPipelineAnswer | None:
        """Return an answer; with `stale`, also one that is older than `cache_s`."""
        if self._shape is None:
            return None
        state = self._state
        uid = await collection_uid(self._services, state)
        if uid is None:
            return None
        self._lookup = await self._services.results.look(
            "answer",
            state.exchange.caller.tenant,
            [uid, *self._parts()],
            tags=state.config.tags,
            declared=True,
            fresh_s=state.config.generate.cache_s,
        )
        data = self._lookup.old if stale and self._lookup.data is None else self._lookup.data
        answer = None if data is None else msgspec.json.decode(data, type=StoredPipelineAnswer)
        if answer is None:
            return None
        shows = await are_passages_kept(self._services, state, (each["id"] for each in answer.sources))
        return answer if shows else None  # else a document that it was made of has changed or is gone

    async def store(self) -> None:
        """Keep the run's answer if it is complete and nothing was passed over."""
        state = self._state
        if self._lookup is None or state.finish != "stop" or state.skipped or state.approvals or not state.text:
            return
        checked = () if state.citations is None else state.citations.citations
        stored = StoredPipelineAnswer(
            text=state.text,
            sources=state.source_entries,
            citations=[each.described(state.config.check.least_support) for each in checked],
            followups=state.followups,
        )
        generate = state.config.generate
        kept_s = max(generate.cache_s, STALE_S) if generate.late == "cached" else generate.cache_s
        await self._services.results.keep(self._lookup, msgspec.json.encode(stored), ttl_s=kept_s)

    def _parts(self) -> list[Any]:
        state = self._state
        request = state.exchange.text_request
        messages = [
            [each["role"], _SPACE.sub(" ", folded(str(each.get("content") or ""))).strip(" ?!.")]
            for each in request.messages or ()
        ]
        return [
            state.name,
            state.exchange.served.fingerprint,
            messages,
            dict(request.pipeline.filters),
            request.pipeline.detail,
            self._shape,
            msgspec.json.encode(state.config, order="deterministic"),
        ]
