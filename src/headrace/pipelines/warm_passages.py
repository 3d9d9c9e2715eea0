"""WarmPassages: keeps the KV of passages that a pipeline's prompts often begin with, so that such answers start soon.

The KV of a passage depends on all that stands before it. So it is reused only where the passage is the first one behind
the same instructions. The most used passages are pinned there, each with the instructions, within the pipeline's
bounds; a passage whose document changes is let go. Answers keep their bits: a pinned prefix is one that the engine
computed, and would have found in its prefix cache had it not been evicted.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Final, Literal

import msgspec
import structlog

from headrace.config.pipeline_section import AssembleStage
from headrace.errors import HeadraceError, RequestError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import SourceText, TextRequest
from headrace.gateway.serving.exchange import Caller
from headrace.observe import metrics
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_services import Models
from headrace.pipelines.stages.generate import answer_model, answer_request

log: Final = structlog.stdlib.get_logger("headrace.pipelines")

_HALF_LIFE_S: Final = 3600.0  # after which a use counts half
_LEAST_USES: Final = 1.5  # from which a passage is worth keeping: it came twice
_STAYS: Final = 1.5  # times a kept passage's uses count, so that two of equal use do not take turns
_KNOWN: Final = 8  # passages whose uses are counted, for each that may be kept
_RETRY_S: Final = 300.0  # until a passage that could not be kept is tried again
_SOME_TEXT: Final = SourceText("-", "Another one.")

Outcome = Literal["warm", "cold"]


class _Passage(msgspec.Struct):
    """A passage behind the instructions of one tenant's prompts."""

    caller: Caller
    collection: str
    id: str
    request: TextRequest  # a prompt that begins with it
    uses: float = 0.0  # at the time `used`
    used: float = 0.0
    tokens: tuple[int, ...] = ()  # that all such prompts begin with, once they are known
    is_kept: bool = False
    is_gone: bool = False  # its document has changed
    retry: float = 0.0  # when it may be tried again

    def count(self, now: float) -> float:
        return self.uses * 0.5 ** ((now - self.used) / _HALF_LIFE_S)


class _Kept(msgspec.Struct):
    """The passages of one pipeline, and what they have saved."""

    config: AssembleStage
    passages: OrderedDict[bytes, _Passage] = msgspec.field(default_factory=OrderedDict[bytes, _Passage])
    outcomes: dict[Outcome, int] = msgspec.field(default_factory=lambda: {"warm": 0, "cold": 0})
    first_s: dict[Outcome, float] = msgspec.field(default_factory=lambda: {"warm": 0.0, "cold": 0.0})
    failed: int = 0
    is_settling: bool = False


class WarmPassages:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        models: Models,
        now: Callable[[], float],
        run_background: Callable[[Coroutine[Any, Any, Any]], None],
        *,
        in_system: bool = False,
    ) -> None:
        """`in_system`: sources stand in the system message, before all turns, and not in the user's last one."""
        self._models = models
        self._now = now
        self._run_background = run_background
        self._in_system = in_system
        self._pipelines: dict[str, _Kept] = {}

    def warm_first(self, state: RunState, sources: Sequence[SourceText]) -> tuple[SourceText, ...]:
        """Return the sources with the best of those first whose KV is kept; as they are if there is none.

        The best by score, so that the same sources come in the same order as long as it is kept: then the prefix cache
        has those behind it as well.
        """
        kept = self._pipelines.get(state.name)
        head = self._head(state)
        if kept is None or head is None:
            return tuple(sources)
        for first, source in enumerate(sources):
            passage = kept.passages.get(_key(head, source))
            if passage is not None and passage.is_kept:
                return (source, *sources[:first], *sources[first + 1 :])
        return tuple(sources)

    def note(self, state: RunState, first_s: float) -> None:
        """Count the first passage of an answer that a model gave. `first_s`: seconds that it took to its first text."""
        head = self._head(state)
        hits = {hit.id for hit in state.hits}
        if head is None or not state.sources or state.sources[0].id not in hits:
            return
        kept = self._pipelines.setdefault(state.name, _Kept(state.config.assemble))
        first = kept.passages.get(_key(head, state.sources[0]))
        outcome: Outcome = "warm" if first is not None and first.is_kept else "cold"
        kept.outcomes[outcome] += 1
        kept.first_s[outcome] += first_s
        metrics.of(metrics.pipeline_prompts, state.name, outcome).inc()
        self._use(kept, head, state.sources[0], state)
        self._settle(state.name, kept)

    def passages_removed(self, ids: Collection[str]) -> None:
        """Let go of passages: their documents have changed or are gone."""
        self._let_go(lambda passage: passage.id in ids)

    def collection_removed(self, tenant: str, name: str) -> None:
        self._let_go(lambda passage: passage.collection == name and passage.caller.tenant == tenant)

    def described(self, name: str) -> dict[str, Any]:
        """Return how many passages are kept, and what that has saved. For `GET /v1/pipelines`."""
        kept = self._pipelines.get(name)
        if kept is None:
            return {"kept": 0, "tokens": 0, "failed": 0, "warm": {"answers": 0}, "cold": {"answers": 0}}
        there = [passage for passage in kept.passages.values() if passage.is_kept]

        def outcome(name: Outcome) -> dict[str, Any]:
            count = kept.outcomes[name]
            mean = {"first_text_ms": round(kept.first_s[name] / count * 1e3, 3)} if count else {}
            return {"answers": count, **mean}

        return {
            "kept": len(there),
            "tokens": sum(len(passage.tokens) for passage in there),
            "failed": kept.failed,
            "warm": outcome("warm"),
            "cold": outcome("cold"),
        }

    def _head(self, state: RunState) -> bytes | None:
        """Return a digest of what stands before the first passage. None if that is not the same for many prompts."""
        request = state.exchange.text_request
        if not state.config.assemble.warm or request.cache != "on":
            return None
        messages = answer_request(state, answer_model(state)).messages or []
        turns = [each for each in messages if each["role"] != "system"]
        if len(turns) != 1 and not self._in_system:
            return None  # the passages stand behind earlier turns
        system = [each.get("content") or "" for each in messages if each["role"] == "system"]
        parts = [state.exchange.caller.tenant, answer_model(state), system]
        return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).digest()

    def _use(self, kept: _Kept, head: bytes, source: SourceText, state: RunState) -> None:
        key, now = _key(head, source), self._now()
        passage = kept.passages.get(key)
        if passage is None:
            request = answer_request(state, answer_model(state))
            system = [each for each in request.messages or [] if each["role"] == "system"]
            passage = kept.passages[key] = _Passage(
                state.exchange.caller,
                state.config.search.collection,
                source.id,
                request.but(messages=[*system, {"role": "user", "content": "a"}], sources=(source,)),
            )
        passage.uses, passage.used = passage.count(now) + 1.0, now
        kept.passages.move_to_end(key)
        surplus = len(kept.passages) - max(1, kept.config.warm) * _KNOWN
        for old in [old for old, each in kept.passages.items() if not each.is_kept][: max(0, surplus)]:
            del kept.passages[old]

    def _let_go(self, is_meant: Callable[[_Passage], bool]) -> None:
        for name, kept in self._pipelines.items():
            meant = [key for key, passage in kept.passages.items() if is_meant(passage)]
            for key in meant:
                if kept.passages[key].is_kept:
                    kept.passages[key].is_gone = True
                else:
                    del kept.passages[key]
            if meant:
                self._settle(name, kept)

    # In the background

    def _settle(self, name: str, kept: _Kept) -> None:
        if not kept.is_settling and self._changes(kept) != ([], []):
            kept.is_settling = True
            self._run_background(self._follow(name, kept))

    async def _follow(self, name: str, kept: _Kept) -> None:
        """Have the engine keep what is wanted, until that is so."""
        try:
            while True:
                drop, add = self._changes(kept)
                if unknown := [passage for passage in add if not passage.tokens]:
                    for passage in unknown:
                        await self._measure(kept, passage)
                    continue
                if not drop and not add:
                    return
                for passage in drop:
                    passage.is_kept = False
                    await self._pin(kept, passage, keep=False)
                for passage in add:
                    passage.is_kept = await self._pin(kept, passage, keep=True)
                for key in [key for key, each in kept.passages.items() if each.is_gone and not each.is_kept]:
                    del kept.passages[key]
        except Exception as error:
            log.error("a pipeline's passages are not kept", pipeline=name, exc_info=error)
        finally:
            kept.is_settling = False

    def _changes(self, kept: _Kept) -> tuple[list[_Passage], list[_Passage]]:
        """Return the passages to let go, and those to keep from now on."""
        now, config = self._now(), kept.config

        def rank(passage: _Passage) -> float:
            return passage.count(now) * (_STAYS if passage.is_kept else 1.0)

        worth = [
            passage
            for passage in kept.passages.values()
            if not passage.is_gone and passage.retry <= now and (passage.is_kept or passage.uses > _LEAST_USES)
        ]
        wanted: list[_Passage] = []
        left = config.warm_tokens
        for passage in sorted(worth, key=rank, reverse=True):
            if len(wanted) < config.warm and len(passage.tokens) <= left:
                wanted.append(passage)
                left -= len(passage.tokens)
        chosen = {id(passage) for passage in wanted}
        drop = [each for each in kept.passages.values() if each.is_kept and id(each) not in chosen]
        return drop, [each for each in wanted if not each.is_kept]

    async def _measure(self, kept: _Kept, passage: _Passage) -> None:
        """Find the tokens that all prompts with the passage in front begin with."""
        request = passage.request
        system = [each for each in request.messages or [] if each["role"] == "system"]
        other = [*system, {"role": "user", "content": "7?"}]
        likes = (request, request.but(messages=other), request.but(sources=(*request.sources, _SOME_TEXT)))
        try:
            passage.tokens = await self._models.shared_tokens(passage.caller, likes)
            if not passage.tokens:
                raise RequestError("The model's prompts do not begin alike.")
        except (ApiError, HeadraceError) as error:
            self._failed(kept, passage, error)

    async def _pin(self, kept: _Kept, passage: _Passage, *, keep: bool) -> bool:
        """Return whether it was done."""
        try:
            await self._models.keep_prefix(passage.caller, passage.request.model, passage.tokens, keep=keep)
        except (ApiError, HeadraceError) as error:
            self._failed(kept, passage, error)
            return False
        return True

    def _failed(self, kept: _Kept, passage: _Passage, error: Exception) -> None:
        kept.failed += 1
        passage.retry = self._now() + _RETRY_S
        log.warning("a passage is not kept warm", passage=passage.id, error=str(error))


def _key(head: bytes, source: SourceText) -> bytes:
    text = f"{source.id}\0{source.text}".encode(errors="surrogatepass")
    return hashlib.blake2b(head + text, digest_size=16).digest()
