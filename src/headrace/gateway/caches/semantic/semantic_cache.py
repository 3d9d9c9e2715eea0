"""The semantic cache: answers a question with the stored answer to the same question in other words.

Owns the namespaces, one for each tenant and never two at once, and the order of what happens to a request:

    recall   key → vector → nearest entries, guards, score → thresholds → verifier ─┬▶ hit: the stored answer
                                                                                    └▶ anything else: generate
    settle   compare the fresh answer with the candidate's → thresholds learn; store a new entry
    check    the same for a share of hits, with a fresh answer made in the background

Off unless you turn it on. Whatever fails here (an encoder, a disk) costs a bounded wait and a miss.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.config import ConfigError, SemanticConfig
from headrace.config.cache_section import ANSWERING_MODEL
from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.cache_modes import CachePolicy
from headrace.gateway.caches.exact.cache_key import cache_tags
from headrace.gateway.caches.exact.entry_store import CacheSize
from headrace.gateway.caches.invalidation_log import InvalidationLog, InvalidationScope
from headrace.gateway.caches.semantic.agreement import answers_agree
from headrace.gateway.caches.semantic.bounded_work import BoundedWork
from headrace.gateway.caches.semantic.embedder import BoundedEmbedding, Embedder, ServedEmbedder
from headrace.gateway.caches.semantic.hit_verifier import HitVerifier, Verification
from headrace.gateway.caches.semantic.namespace import CacheCandidate, Namespace
from headrace.gateway.caches.semantic.semantic_entry import SemanticEntry, StoredAnswer
from headrace.gateway.caches.semantic.semantic_key import SemanticKey, semantic_key_for
from headrace.gateway.caches.semantic.semantic_store import SemanticStore, StoredEntry
from headrace.gateway.caches.semantic.semantic_tuning import SemanticTuning
from headrace.gateway.caches.semantic.thresholds import ServeDecision, Thresholds
from headrace.gateway.database import Database
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.observe import metrics
from headrace.tasks import end_tasks

log = logging.getLogger(__name__)

SemanticOutcome = Literal["off", "none", "unavailable", "miss", "refused", "below", "explore", "record", "hit"]
OUTCOMES: Final = ("off", "none", "unavailable", "miss", "refused", "below", "explore", "record", "hit")


class SemanticLookup(msgspec.Struct):
    """The result of a lookup. Pass it back to `settle` or `check`."""

    outcome: SemanticOutcome
    tenant: str = ""
    reason: str = ""  # why the request has no key, or why the nearest entry was refused
    subject: SemanticKey | None = None
    vector: NDArray[np.float32] | None = None
    candidate: CacheCandidate | None = None
    decision: ServeDecision | None = None
    invalidations: int = 0  # before the lookup
    settled: bool = False
    is_trial: bool = False  # the tenant's mode serves nothing: every candidate is compared
    verification: Verification | None = None

    @property
    def entry(self) -> SemanticEntry | None:
        """The entry to serve or to show to the model; in mode record, what would have been served."""
        return self.candidate.entry if self.candidate is not None and self.outcome in ("hit", "record") else None

    @property
    def check(self) -> bool:
        """True if the served answer must be checked: generate a fresh one in the background and pass it to `check`."""
        return self.outcome == "hit" and self.decision is not None and self.decision.sampled


class SemanticComparison(msgspec.Struct, frozen=True):
    """A fresh answer, compared with the one that the cache had for the question."""

    score: float
    same: bool | None  # None: unclear
    would_serve: bool
    was_served: bool  # a hit that was checked
    is_trial: bool


def _is_reranker(fleet: Fleet, name: str) -> bool:
    return name in fleet.served and fleet.served[name].ranking is not None


class SemanticCache:
    """The semantic cache of all tenants. Used from one event loop only."""

    def __init__(
        self,
        config: SemanticConfig,
        *,
        tuning: SemanticTuning | None = None,
        store: SemanticStore | None = None,
        counted: Callable[[str, str], None] | None = None,  # table and name, for metrics
        encoder: ServedVariant | None = None,  # needed by `embedder_for` only
        clock: Callable[[], float] = time.time,  # wall clock of entries
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.tuning = tuning or SemanticTuning()
        self.compared: Callable[[SemanticComparison], None] | None = None  # is called with every comparison
        self._store = store
        self._counted = counted
        self._encoder = encoder
        self._clock = clock
        self._embedding = BoundedEmbedding(wait_s=config.wait_ms / 1e3, clock=monotonic)
        self._monotonic = monotonic
        self._verifying: dict[str, BoundedWork] = {}  # by variant: a broken one does not stop the others
        self.modes = CachePolicy(mode=config.mode, share=config.share, salt="semantic")
        self._invalidations = InvalidationLog()
        self._namespaces: OrderedDict[str, Namespace] = OrderedDict()
        self._loading: dict[str, asyncio.Task[None]] = {}

    @classmethod
    def from_config(cls, config: SemanticConfig, database: Database, fleet: Fleet) -> SemanticCache | None:
        """Build the cache even with mode "off", because a tenant's mode can change while the server runs.

        None if no encoder is configured. ConfigError if the embedder is not a served encoder, or the verifier can
        verify nothing.
        """
        if not config.embedder:
            return None
        encoder = fleet.served.get(config.embedder)
        if encoder is None or encoder.kind != "encoder":
            raise ConfigError(f"cache.semantic.embedder: expected a served encoder, found '{config.embedder}'")
        if config.verify not in ("", ANSWERING_MODEL):
            verifier = fleet.served.get(config.verify)
            if verifier is None or verifier.kind not in ("reranker", "decoder"):
                raise ConfigError(
                    f"cache.semantic.verify: expected 'model', or a served reranker or chat model, "
                    f"found '{config.verify}'"
                )
        if config.verify and config.serve == "prime" and not _is_reranker(fleet, config.verify):
            raise ConfigError(
                "cache.semantic.verify: with serve = 'prime' the model answers itself, so only a reranker may verify; "
                f"found '{config.verify}'"
            )
        return cls(
            config,
            store=SemanticStore(database),
            counted=lambda table, name: metrics.of(metrics.semantic, table, name).inc(),
            encoder=encoder,
        )

    def embedder_for(self, caller: Caller, surface: str) -> ServedEmbedder:
        """Return an embedder that runs as the caller's work on the surface."""
        assert self._encoder is not None
        return ServedEmbedder(self._encoder, caller, surface=surface)

    async def recall(
        self,
        tenant: str,
        text_request: TextRequest,
        embedder: Embedder,
        *,
        variant: str,
        surface: str,
        verifier: HitVerifier | None = None,
        can_verify: bool = True,
    ) -> SemanticLookup:
        """Look for the answer to a tenant's request. ApiError for invalid tags. `can_verify`: False if the caller may
        not use the configured verifier, so that only the same text is a hit."""
        recall = await self._recall(tenant, text_request, embedder, variant, surface, verifier, can_verify)
        self._count("outcomes", recall.outcome)
        if recall.outcome in ("refused", "none"):
            self._count("refusals", recall.reason)
        return recall

    async def _recall(
        self,
        tenant: str,
        text_request: TextRequest,
        embedder: Embedder,
        variant: str,
        surface: str,
        verifier: HitVerifier | None,
        can_verify: bool,
    ) -> SemanticLookup:
        config = self.config
        access = self.modes.access(tenant, requested=text_request.cache)
        if not access.reads:
            return SemanticLookup("off", tenant)
        subject = semantic_key_for(
            text_request,
            variant=f"{variant}\n{embedder.name}",
            policy=config.policy,
            sampled=config.sampled,
            tools=config.tools,
            surfaces=config.surfaces,
            surface=surface,
            longest=self.tuning.longest,
            tags=cache_tags(text_request),
        )
        if isinstance(subject, str):
            return SemanticLookup("none", tenant, subject)
        namespace = self._namespace(tenant, embedder)
        if namespace is None:
            return SemanticLookup("unavailable", tenant)
        vector = await self._embedding.vector(embedder, subject.question)
        if vector is None:
            return SemanticLookup("unavailable", tenant, subject=subject)
        now = self._clock()
        search = namespace.search(
            subject, vector, now=now, nearest=config.nearest, floor=config.floor, guarded=config.guards
        )
        recall = SemanticLookup(
            "miss",
            tenant,
            search.reason,
            subject,
            vector,
            search.best,
            invalidations=self._invalidations.count,
            is_trial=not access.serves,
        )
        if search.best is None:
            recall.outcome = "refused" if search.reason else "miss"
            return recall
        if search.best.score < self.tuning.least:
            recall.outcome = "below"
            return recall
        if not can_verify and self._needs_verification(search.best, subject.question):
            recall.outcome, recall.reason = "refused", "verifier_access"
            return recall
        if verifier is not None and self._needs_verification(search.best, subject.question):
            found = await self._verify(namespace, recall, search.best.entry, subject.question, verifier)
            if found is not None:
                recall.outcome = found
                return recall
        decision = self._decide(namespace, search.best)
        if config.serve == "prime":
            # An example misleads less than a wrong answer, so it needs no bound and no check.
            decision = replace(decision, serve=True, sampled=False)
        recall.decision = decision
        if not decision.serve:
            recall.outcome = "explore"
        elif not access.serves:
            recall.outcome = "record"
        else:
            recall.outcome = "hit"
            namespace.used(search.best.entry)
        return recall

    async def _verify(
        self, namespace: Namespace, lookup: SemanticLookup, entry: SemanticEntry, question: str, verifier: HitVerifier
    ) -> SemanticOutcome | None:
        """Return why a candidate is no hit by the verifier's reading of both questions; None if it may be one."""
        config, name = self.config, verifier.variant
        work = self._verifying.get(name)
        if work is None:
            work = self._verifying[name] = BoundedWork(wait_s=config.verify_wait_ms / 1e3, clock=self._monotonic)
        began = time.monotonic()
        score = await work.result(lambda: verifier.score(entry.question, question))
        lookup.verification = Verification(
            name, score, verifier.usage, began, time.monotonic(), is_charged=not lookup.is_trial
        )
        self._count("verifications", "failed" if score is None else "yes" if score >= config.verify_least else "no")
        if score is None:
            lookup.reason = "verifier"
            return "unavailable"
        if score < config.verify_least:
            lookup.reason = "verifier"
            return "refused"
        if self._namespaces.get(lookup.tenant) is not namespace or namespace.get(entry.id) is not entry:
            lookup.candidate = None  # it was invalidated or evicted meanwhile
            return "miss"
        return None

    def _needs_verification(self, candidate: CacheCandidate, question: str) -> bool:
        """False for the same text, and for a score that no verification makes a hit."""
        fixed = self.config.threshold
        return question != candidate.entry.question and (fixed is None or candidate.score >= fixed)

    def _decide(self, namespace: Namespace, candidate: CacheCandidate) -> ServeDecision:
        decision = namespace.thresholds.decide(candidate.entry.id, candidate.entry.evidence, candidate.score)
        fixed = self.config.threshold
        if fixed is None:
            return decision
        return replace(decision, serve=candidate.score >= fixed, good=candidate.score >= fixed)

    async def settle(self, recall: SemanticLookup, answer: StoredAnswer | None, embedder: Embedder) -> None:
        """Learn from a fresh answer and store it; None if it may not be stored. Call this once for each lookup."""
        if recall.settled or recall.subject is None or recall.vector is None or answer is None:
            return
        if recall.outcome in ("off", "none", "unavailable", "hit"):
            return
        recall.settled = True
        if len(answer.content.encode()) + len(answer.reasoning.encode()) > self.tuning.answer_bytes:
            return
        same = await self._compare(recall, answer, embedder)
        if same:
            return  # the existing entry has the same answer
        await self._add(recall, answer, embedder)

    async def check(self, recall: SemanticLookup, fresh: StoredAnswer | None, embedder: Embedder) -> bool | None:
        """Compare a hit with a fresh answer; return whether they agree, or None if that is unclear."""
        if recall.settled or fresh is None or recall.outcome != "hit":
            return None
        recall.settled = True
        same = await self._compare(recall, fresh, embedder)
        if same is False and self.config.serve == "answer":
            await self._add(recall, fresh, embedder)
        return same

    async def _compare(self, recall: SemanticLookup, fresh: StoredAnswer, embedder: Embedder) -> bool | None:
        """Return whether the candidate's answer agrees with the fresh one; the thresholds learn from it."""
        candidate = recall.candidate
        if candidate is None or recall.decision is None:
            return None
        entry, tuning = candidate.entry, self.tuning
        try:
            async with asyncio.timeout(tuning.agree_wait_s):
                same = await answers_agree(
                    entry.answer.content,
                    fresh.content,
                    by=tuning.agree_by,
                    embedder=embedder,
                    least=tuning.agree_least,
                )
        except (TimeoutError, HeadraceError, ApiError, OSError):
            same = None
        self._count("comparisons", "unsure" if same is None else "right" if same else "wrong")
        if self.compared is not None:
            decision, was_served = recall.decision, recall.outcome == "hit"
            self.compared(SemanticComparison(candidate.score, same, decision.serve, was_served, recall.is_trial))
        if same is None:
            return None
        namespace = self._namespaces.get(recall.tenant)
        if namespace is not None and namespace.get(entry.id) is entry:
            namespace.thresholds.learn(entry.evidence, candidate.score, same, good=recall.decision.good)
            if self._store is not None:
                await self._store.note(recall.tenant, [entry])
        return same

    async def _add(self, recall: SemanticLookup, answer: StoredAnswer, embedder: Embedder) -> None:
        assert recall.subject is not None
        assert recall.vector is not None
        namespace = self._namespace(recall.tenant, embedder)
        if namespace is None or self._invalidations.covers_since(
            recall.invalidations, recall.tenant, recall.subject.tags
        ):
            return
        entry, gone = namespace.add(recall.subject, recall.vector, answer, now=self._clock())
        if self._store is not None:
            # Queued before anything else can run here, so that an invalidation that comes next also removes it.
            if entry is not None:
                await self._store.save(recall.tenant, embedder.name, [StoredEntry(entry, recall.vector)])
            if gone:
                await self._store.remove(recall.tenant, gone)
        await self._make_room()

    async def _make_room(self) -> None:
        """Evict entries of the tenant that takes the most memory until all tenants together fit."""
        gone: dict[str, list[int]] = {}
        total = sum(namespace.nbytes for namespace in self._namespaces.values())
        while total > self.config.total_bytes:
            tenant = max(self._namespaces, key=lambda name: self._namespaces[name].nbytes)
            namespace = self._namespaces[tenant]
            before = namespace.nbytes
            id = namespace.remove_oldest()
            if id is None:
                break
            gone.setdefault(tenant, []).append(id)
            total -= before - namespace.nbytes
        if self._store is not None:
            for tenant, ids in gone.items():
                await self._store.remove(tenant, ids)

    # Administration

    async def invalidate(self, *, tenant: str | None = None, tag: str | None = None) -> int:
        """Remove the entries that match all given fields; return the number of those in memory.

        ApiError if entries on disk could not be removed. Answers under generation are then not stored.
        """
        self._invalidations.add(InvalidationScope(tenant=tenant, tag=tag))
        count = 0
        for name in [tenant] if tenant is not None else list(self._namespaces):
            namespace = self._namespaces.get(name)
            if namespace is not None:
                count += len(namespace.remove_tags([tag]) if tag is not None else namespace.clear())
        if self._store is not None:
            await self._store.invalidate(tenant, tag)
        return count

    async def sweep(self) -> int:
        """Remove expired entries; return the number of those in memory."""
        now = self._clock()
        count = sum(len(namespace.sweep(now)) for namespace in self._namespaces.values())
        if self._store is not None:
            await self._store.sweep(now)
        return count

    def about(self, tenant: str) -> Mapping[str, float]:
        """Return statistics of a tenant's namespace."""
        namespace = self._namespaces.get(tenant)
        if namespace is None:
            return {"entries": 0, "bytes": 0, "hits": 0, "evicted": 0, "right": 0, "wrong": 0, "braked": 0}
        entries = list(namespace)
        return {
            "entries": len(entries),
            "bytes": namespace.nbytes,
            "hits": sum(entry.hits for entry in entries),
            "evicted": namespace.evicted,
            "right": sum(entry.evidence.right for entry in entries),
            "wrong": sum(entry.evidence.wrong for entry in entries),
            "braked": int(namespace.thresholds.braked),
        }

    async def size(self) -> CacheSize:
        """Return the size of all tenants' entries in memory."""
        found = self._namespaces.values()
        return CacheSize(sum(map(len, found)), sum(namespace.nbytes for namespace in found))

    async def close(self) -> None:
        for tenant in list(self._loading):
            await self._stop_loading(tenant)

    # Namespaces

    def _namespace(self, tenant: str, embedder: Embedder) -> Namespace | None:
        """Return a tenant's namespace; None while its entries are read from the database."""
        namespace = self._namespaces.get(tenant)
        if namespace is not None:
            self._namespaces.move_to_end(tenant)
            return namespace if tenant not in self._loading else None
        config = self.config
        while len(self._namespaces) >= self.tuning.tenants:
            gone, _ = self._namespaces.popitem(last=False)
            if (task := self._loading.pop(gone, None)) is not None:
                task.cancel()
        thresholds = Thresholds(
            delta=config.delta, per=config.per, seed=self.tuning.seed, check_share=config.check_share
        )
        namespace = self._namespaces[tenant] = Namespace(thresholds, config, exact=self.tuning.exact)
        if self._store is None:
            return namespace
        self._loading[tenant] = asyncio.ensure_future(self._load(tenant, namespace, embedder.name, self._store))
        return None

    async def _load(self, tenant: str, namespace: Namespace, embedder: str, store: SemanticStore) -> None:
        mark = self._invalidations.count
        try:
            rows, last = await store.load(tenant, embedder, now=self._clock(), most=namespace.config.entries)
            namespace.skip_ids(last)
            for place, row in enumerate(rows):
                if not self._invalidations.covers_since(mark, tenant, row.entry.tags):
                    namespace.restore(row.entry, row.vector)
                if place % 64 == 63:
                    await asyncio.sleep(0)  # let others run
        except (ApiError, OSError, sqlite3.Error) as error:
            # The ids in use are unknown then, so the tenant starts again with its next request.
            log.warning("The semantic cache could not read its table: %s", error)
            self._namespaces.pop(tenant, None)
        finally:
            if self._loading.get(tenant) is asyncio.current_task():
                del self._loading[tenant]

    async def load(self, tenant: str, embedder: Embedder) -> None:
        """Wait until a tenant's entries are loaded; requests do not wait for this."""
        self._namespace(tenant, embedder)
        if (task := self._loading.get(tenant)) is not None:
            await asyncio.shield(task)

    async def _stop_loading(self, tenant: str) -> None:
        await end_tasks([self._loading.pop(tenant, None)])

    def _count(self, which: Literal["outcomes", "refusals", "verifications", "comparisons"], name: str) -> None:
        if self._counted is not None:
            self._counted(which, name)
