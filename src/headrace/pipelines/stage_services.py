"""StageServices: what the stages of every run use, built once. Starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from headrace.config.shaping_section import ShapingConfig
from headrace.gateway.caches.results.result_cache import ResultCache
from headrace.gateway.flow.answer_flow import AnswerFlow
from headrace.gateway.ledger.prices import Price
from headrace.gateway.requests.text_request import SourceText, TextRequest
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.pipelines.retrieval import Retriever
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_clock import StageClock
from headrace.pipelines.tools.toolbox import Toolbox


class Models(Protocol):
    """See ModelAccess for what each does."""

    def find(self, caller: Caller, name: str) -> ServedVariant: ...

    def open(self, whole: Exchange, request: TextRequest, *, shares_timeline: bool = False) -> AnswerFlow: ...

    async def shared_tokens(self, caller: Caller, requests: Sequence[TextRequest]) -> tuple[int, ...]: ...

    async def keep_prefix(
        self, caller: Caller, name: str, tokens: Sequence[int], *, keep: bool, owner: str
    ) -> None: ...

    async def rank(self, whole: Exchange, name: str, query: str, texts: Sequence[str], surface: str) -> list[float]: ...

    def token_counter(self, caller: Caller, name: str) -> Callable[[str], int]: ...

    def price(self, name: str) -> Price: ...


class PassageKeeper(Protocol):
    """See WarmPassages for what each does."""

    def warm_first(self, state: RunState, sources: Sequence[SourceText]) -> tuple[SourceText, ...]: ...

    def note(self, state: RunState, first_s: float) -> None: ...

    def passages_removed(self, ids: Collection[str]) -> None: ...

    def collection_removed(self, tenant: str, name: str) -> None: ...

    def described(self, name: str, tenant: str) -> dict[str, Any]: ...


class StageServices(msgspec.Struct, kw_only=True):
    models: Models
    toolbox: Toolbox
    retriever: Retriever | None  # None: this server has no collections
    results: ResultCache
    warm: PassageKeeper
    clock: StageClock
    shaping: ShapingConfig
    run_background: Callable[[Coroutine[Any, Any, Any]], None]
