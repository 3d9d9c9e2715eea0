"""WarmPassages: keeps the KV of passages that a pipeline's prompts often begin with, so that such answers start soon.

The KV of a passage depends on all that stands before it. So it is reused only where the same passages stand behind the
same instructions. The most used beginnings are pinned there (the instructions with the first passage, or with the first
passages that come together), within the pipeline's bounds, and let go when a passage's document changes. Answers keep
their bits: a pinned prefix is one that the engine computed, and would have found in its prefix cache had it not been
evicted.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Final, Literal

import msgspec
import structlog

from headrace.config.pipeline_section import AssembleStage
from headrace.errors import HeadraceError, RequestError
from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import SourceText, TextRequest
from headrace.gateway.serving.exchange import Caller
from headrace.observe import metrics
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_services import Models
from headrace.pipelines.stages.generate import answer_model, answer_request

log: Final = structlog.stdlib.get_logger("headrace.pipelines")

_HALF_LIFE_S: Final = 3600.0  # after which a use counts half
_LEAST_USES: Final = 1.5  # from which a beginning is worth keeping: it came twice
_RECENT_USES: Final = 0.1  # above which a beginning counts for its tenant's share: used in the last hours
_STAYS: Final = 1.5  # times a kept one's uses count, so that two of equal use do not take turns
_KNOWN: Final = 32  # beginnings whose uses are counted, for each that may be kept
_RETRY_S: Final = 300.0  # until one that could not be kept is tried again
_SOME_TEXT: Final = SourceText("-", "Another one.")

Outcome = Literal["warm", "cold"]


class _Beginning(msgspec.Struct):
    """The first passages behind the instructions of one tenant's prompts."""

    caller: Caller
    collection: str
    keys: tuple[bytes, ...]  # of the beginnings with one passage, two, and so on; the last is its own
    request: TextRequest  # a prompt that begins so
    uses: float = 0.0  # at the time `used`
    used: float = 0.0
    tokens: tuple[int, ...] = ()  # that all such prompts begin with, once they are known
    is_kept: bool = False
    is_gone: bool = False  # a document has changed
    retry: float = 0.0  # when it may be tried again

    def count(self, now: float) -> float:
        return self.uses * 0.5 ** ((now - self.used) / _HALF_LIFE_S)


class _Kept(msgspec.Struct):
    """The beginnings of one pipeline's prompts, and what keeping them has saved."""

    config: AssembleStage
    known: OrderedDict[bytes, _Beginning] = msgspec.field(default_factory=OrderedDict[bytes, _Beginning])
    # By tenant, because each sees its own only: answers, the seconds to their first texts, and what was not kept.
    answers: Counter[tuple[str, Outcome]] = msgspec.field(default_factory=Counter[tuple[str, Outcome]])
    first_s: defaultdict[tuple[str, Outcome], float] = msgspec.field(
        default_factory=lambda: defaultdict[tuple[str, Outcome], float](float)
    )
    failed: Counter[str] = msgspec.field(default_factory=Counter[str])
    is_settling: bool = False

    def is_warm(self, first: bytes) -> bool:
        """Return whether a beginning with this first passage is kept."""
        return any(each.is_kept and each.keys[0] == first for each in self.known.values())


class WarmPassages:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        models: Models,
        now: Callable[[], float],
        run_background: Callable[[Coroutine[Any, Any, Any]], None],
        *,
        in_system: bool = False,
        is_tenant: Callable[[str], bool] = lambda tenant: True,
    ) -> None:
        """`in_system`: sources stand in the system message, before all turns, and not in the user's last one.
        `is_tenant`: whether a tenant exists, so that answers that end after its deletion are not kept.
        """
        self._is_tenant = is_tenant
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
            if kept.is_warm(_key(head, source)):
                return (source, *sources[:first], *sources[first + 1 :])
        return tuple(sources)

    def note(self, state: RunState, first_s: float) -> None:
        """Count the beginnings of an answer that a model gave. `first_s`: seconds that it took to its first text."""
        head = self._head(state)
        hits = {hit.id for hit in state.hits}
        if head is None or not state.sources or state.sources[0].id not in hits:
            return
        if not self._is_tenant(state.exchange.caller.tenant):
            return
        kept = self._pipelines.setdefault(state.name, _Kept(state.config.assemble))
        outcome: Outcome = "warm" if kept.is_warm(_key(head, state.sources[0])) else "cold"
        kept.answers[state.exchange.caller.tenant, outcome] += 1
        kept.first_s[state.exchange.caller.tenant, outcome] += first_s
        metrics.of(metrics.pipeline_prompts, state.name, outcome).inc()
        self._use(kept, head, [source for source in state.sources if source.id in hits], state)
        self._settle(state.name, kept)

    def passages_removed(self, ids: Collection[str]) -> None:
        """Let go of passages: their documents have changed or are gone."""
        self._let_go(lambda each: any(source.id in ids for source in each.request.sources))

    def collection_removed(self, tenant: str, name: str) -> None:
        self._let_go(lambda each: each.collection == name and each.caller.tenant == tenant)

    def follow(self, changes: AccountChanges) -> None:
        """Let go of the passages of deleted tenants."""
        if deleted := changes.deleted_tenants:
            self._let_go(lambda each: each.caller.tenant in deleted)

    def described(self, name: str, tenant: str) -> dict[str, Any]:
        """Return what is kept for a tenant, and what that has saved. For `GET /v1/pipelines`."""
        kept = self._pipelines.get(name) or _Kept(AssembleStage())
        there = [each for each in kept.known.values() if each.is_kept and each.caller.tenant == tenant]

        def outcome(name: Outcome) -> dict[str, Any]:
            count = kept.answers[tenant, name]
            mean = {"first_text_ms": round(kept.first_s[tenant, name] / count * 1e3, 3)} if count else {}
            return {"answers": count, **mean}

        return {
            "kept": len(there),
            "tokens": sum(len(each.tokens) for each in there),
            "failed": kept.failed[tenant],
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

    def _use(self, kept: _Kept, head: bytes, sources: Sequence[SourceText], state: RunState) -> None:
        """Count the beginnings with the first of these passages, the first two, and so on."""
        now = self._now()
        keys: tuple[bytes, ...] = ()
        for count, source in enumerate(sources, start=1):
            keys = (*keys, _key(keys[-1] if keys else head, source))
            known = kept.known.get(keys[-1])
            if known is None:
                request = answer_request(state, answer_model(state))
                system = [each for each in request.messages or [] if each["role"] == "system"]
                known = kept.known[keys[-1]] = _Beginning(
                    state.exchange.caller,
                    state.config.search.collection,
                    keys,
                    request.but(messages=[*system, {"role": "user", "content": "a"}], sources=tuple(sources[:count])),
                )
            known.uses, known.used = known.count(now) + 1.0, now
            kept.known.move_to_end(keys[-1])
        surplus = len(kept.known) - max(1, kept.config.warm) * _KNOWN
        if surplus > 0:
            others = [(each.caller.tenant, key) for key, each in kept.known.items() if not each.is_kept]
            most = Counter(tenant for tenant, _ in others).most_common(1)
            for _, old in [(tenant, key) for tenant, key in others if tenant == most[0][0]][:surplus]:
                kept.known.pop(old).is_gone = True

    def _let_go(self, is_meant: Callable[[_Beginning], bool]) -> None:
        for name, kept in self._pipelines.items():
            meant = [key for key, each in kept.known.items() if is_meant(each)]
            for key in meant:
                kept.known[key].is_gone = True
                if not kept.known[key].is_kept:
                    del kept.known[key]
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
                for key in [key for key, each in kept.known.items() if each.is_gone and not each.is_kept]:
                    del kept.known[key]
                drop, add = self._changes(kept)
                if unknown := [each for each in add if not each.tokens]:
                    for each in unknown:
                        await self._measure(kept, each)
                    continue
                if not drop and not add:
                    return
                for each in add:  # first, so that no block that both have is evicted in between
                    if each.is_gone:
                        continue
                    each.is_kept = True  # so that it is let go if its document changes meanwhile
                    each.is_kept = await self._pin(name, kept, each, keep=True)
                for each in drop:
                    each.is_kept = False
                    await self._pin(name, kept, each, keep=False)
        except Exception as error:
            log.error("a pipeline's passages are not kept warm", pipeline=name, exc_info=error)
        finally:
            kept.is_settling = False

    def _changes(self, kept: _Kept) -> tuple[list[_Beginning], list[_Beginning]]:
        """Return the beginnings to let go, and those to keep from now on."""
        now, config = self._now(), kept.config

        def rank(each: _Beginning) -> tuple[float, int]:
            return each.count(now) * (_STAYS if each.is_kept else 1.0), len(each.keys)

        worth = [
            each
            for each in kept.known.values()
            if not each.is_gone and each.retry <= now and (each.is_kept or each.uses > _LEAST_USES)
        ]
        # The fair shares of tenants come first. What they leave goes to the most used of all.
        ranked = sorted(worth, key=rank, reverse=True)
        recent = [each for each in ranked if each.count(now) > _RECENT_USES]
        shares = max(1, min(config.warm, len({each.caller.tenant for each in recent})))
        fair = config.warm // shares, config.warm_tokens // shares
        wanted: dict[bytes, _Beginning] = {}  # by their own keys; the longest of those that continue each other
        for place, each in enumerate((*recent, *ranked)):
            if any(each.keys[-1] in longer.keys for longer in wanted.values()):
                continue
            others = {key: other for key, other in wanted.items() if key not in each.keys}
            own = [other for other in others.values() if other.caller.tenant == each.caller.tenant]
            if place < len(recent) and not _fits(each, own, *fair):
                continue
            if _fits(each, others.values(), config.warm, config.warm_tokens):
                wanted = {**others, each.keys[-1]: each}
        drop = [each for each in kept.known.values() if each.is_kept and each.keys[-1] not in wanted]
        return drop, [each for each in wanted.values() if not each.is_kept]

    async def _measure(self, kept: _Kept, each: _Beginning) -> None:
        """Find the tokens that all prompts with this beginning have."""
        request = each.request
        system = [each for each in request.messages or [] if each["role"] == "system"]
        other = [*system, {"role": "user", "content": "7?"}]
        likes = (request, request.but(messages=other), request.but(sources=(*request.sources, _SOME_TEXT)))
        try:
            each.tokens = await self._models.shared_tokens(each.caller, likes)
            if not each.tokens:
                raise RequestError("The model's prompts do not begin alike.")
        except (ApiError, HeadraceError) as error:
            self._failed(kept, each, error)

    async def _pin(self, name: str, kept: _Kept, each: _Beginning, *, keep: bool) -> bool:
        """Return whether it was done."""
        owner = f"pipeline/{name}/{each.keys[-1].hex()}"  # other beginnings may have the same tokens
        try:
            await self._models.keep_prefix(each.caller, each.request.model, each.tokens, keep=keep, owner=owner)
        except (ApiError, HeadraceError) as error:
            self._failed(kept, each, error)
            return False
        return True

    def _failed(self, kept: _Kept, each: _Beginning, error: Exception) -> None:
        kept.failed[each.caller.tenant] += 1
        each.retry = self._now() + _RETRY_S
        log.info(
            "passages are not kept warm", passages=[source.id for source in each.request.sources], error=str(error)
        )


def _fits(each: _Beginning, others: Collection[_Beginning], most: int, most_tokens: int) -> bool:
    return len(others) < most and len(each.tokens) + sum(len(other.tokens) for other in others) <= most_tokens


def _key(head: bytes, source: SourceText) -> bytes:
    text = f"{source.id}\0{source.text}".encode(errors="surrogatepass")
    return hashlib.blake2b(head + text, digest_size=16).digest()
