"""AnswerCache: earlier answers of a pipeline to the same question, for its popular-answer mode."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from headrace.gateway.folded_words import folded
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_cache import StageCache

_SPACE: Final = re.compile(r"\s+")


class StoredAnswer(msgspec.Struct):
    text: str
    sources: list[dict[str, Any]]
    citations: list[dict[str, Any]]
    followups: list[str]


class AnswerCache:
    """The view of one run. Answers depend on the tenant, the whole conversation, the filters and the mode."""

    def __init__(self, cache: StageCache, state: RunState) -> None:
        self._cache = cache
        self._state = state
        request = state.exchange.text_request
        self._is_used = "cache" in state.config.generate.order and request.cache == "on"
        messages = [
            [each["role"], _SPACE.sub(" ", folded(str(each.get("content") or ""))).strip(" ?!.")]
            for each in request.messages or ()
        ]
        self._key = StageCache.key(
            state.exchange.caller.tenant,
            f"{state.name}/answer",
            state.exchange.served.fingerprint,
            messages,
            dict(request.pipeline.filters),
            request.pipeline.detail,
            request.max_tokens,
        )

    def find(self, *, stale: bool = False) -> StoredAnswer | None:
        entry = self._cache.get(self._key, stale=stale) if self._is_used else None
        return None if entry is None else msgspec.json.decode(entry.value, type=StoredAnswer)

    def store(self) -> None:
        """Keep the run's answer if it is complete and nothing was passed over."""
        state = self._state
        if not self._is_used or state.finish != "stop" or state.skipped or state.approvals or not state.text:
            return
        checked = () if state.citations is None else state.citations.citations
        stored = StoredAnswer(
            text=state.text,
            sources=state.source_entries,
            citations=[each.described(state.config.check.least_support) for each in checked],
            followups=state.followups,
        )
        self._cache.put(self._key, msgspec.json.encode(stored), state.config.generate.cache_s)
