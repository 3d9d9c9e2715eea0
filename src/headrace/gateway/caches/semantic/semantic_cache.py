"""The semantic cache as the flow uses it: recall before an answer is made, record after it.

Owns the namespaces, one for each tenant and never two at once, the options, and the order of what happens to a
request:

    recall   subject → vector → nearest, guards, verifier, judge → thresholds ─┬▶ hit: the kept answer, or an example
                                                                               └▶ anything else: generate
    settle   the fresh answer beside a candidate → was the kept one right? → thresholds; a new entry
    check    a hit's fresh answer, made in the background for a share of hits → thresholds

Off unless it is turned on. Whatever fails here (an encoder, a judge, a disk) costs a bounded wait and a miss.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Final, Literal

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.config import ConfigError, SemanticConfig
from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.cache_modes import CachePolicy
from headrace.gateway.caches.exact.cache_key import cache_tags
from headrace.gateway.caches.exact.entry_store import CacheSize
from headrace.gateway.caches.semantic.agreement import answers_agree
from headrace.gateway.caches.semantic.embedder import BoundedEmbedding, Embedder, ServedEmbedder
from headrace.gateway.caches.semantic.namespace import Bounds, CacheCandidate, Namespace
from headrace.gateway.caches.semantic.semantic_entry import SemanticEntry, SemanticKey, StoredAnswer, semantic_key_for
from headrace.gateway.caches.semantic.semantic_options import SemanticOptions
from headrace.gateway.caches.semantic.semantic_store import SemanticStore, StoredEntry
from headrace.gateway.caches.semantic.thresholds import ServeDecision, Thresholds
from headrace.gateway.caches.semantic.verifier import Judge
from headrace.gateway.database import Database
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.fleet import Fleet, ServedVariant
from headrace.observe import metrics

log = logging.getLogger(__name__)

SemanticOutcome = Literal["off", "none", "unavailable", "miss", "refused", "below", "explore", "record", "hit"]
OUTCOMES: Final = ("off", "none", "unavailable", "miss", "refused", "below", "explore", "record", "hit")


class SemanticLookup(msgspec.Struct):
    """What the cache had for a request. The flow hands it back to `settle` or `check`."""

    outcome: SemanticOutcome
    tenant: str = ""
    reason: str = ""  # of no subject, or of a refusal
    subject: SemanticKey | None = None
    vector: NDArray[np.float32] | None = None
    candidate: CacheCandidate | None = None
    decision: ServeDecision | None = None
    removals: int = 0  # that had been made when it began
    settled: bool = False

    @property
    def entry(self) -> SemanticEntry | None:
        """To be served or shown to the model; with "record", what would have been."""
        return self.candidate.entry if self.candidate is not None and self.outcome in ("hit", "record") else None

    @property
    def check(self) -> bool:
        """Whether a served answer is to be checked: a fresh one made in the background, and given to `check`."""
        return self.outcome == "hit" and self.decision is not None and self.decision.sampled


class Counts(msgspec.Struct):
    """Since the start; the labels are the code's own words."""

    outcomes: dict[str, int] = {}
    refusals: dict[str, int] = {}
    # Right, wrong or unsure: of checks of hits, and of fresh answers beside a candidate.
    comparisons: dict[str, int] = {}

    def add(self, which: Literal["outcomes", "refusals", "comparisons"], name: str) -> None:
        table: dict[str, int] = getattr(self, which)
        table[name] = table.get(name, 0) + 1


class Removals:
    """What an operator let go of lately, so that what had begun before does not bring it back."""

    def __init__(self, kept: int = 256) -> None:
        self.count = 0
        self._kept: deque[tuple[str | None, str | None]] = deque(maxlen=kept)

    def add(self, tenant: str | None, tag: str | None) -> None:
        self.count += 1
        self._kept.append((tenant, tag))

    def hit(self, since: int, tenant: str, tags: Collection[str]) -> bool:
        """Whether an entry of what began when there had been `since` removals is among what went."""
        missed = self.count - since
        if missed > len(self._kept):
            return True  # too many to know
        late = list(self._kept)[len(self._kept) - missed :]
        return any(whose in (None, tenant) and (tag is None or tag in tags) for whose, tag in late)


class SemanticCache:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        options: SemanticOptions,
        *,
        store: SemanticStore | None = None,
        judge: Judge | None = None,
        counted: Callable[[str, str], None] | None = None,  # table and name, for metrics
        encoder: ServedVariant | None = None,  # needed by `embedder_for` only
        clock: Callable[[], float] = time.time,  # of what is kept
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.counts = Counts()
        self._store = store
        self._judge = judge
        self._counted = counted
        self._encoder = encoder
        self._clock = clock
        self._embedding = BoundedEmbedding(wait_s=options.embed_wait_s, clock=monotonic)
        self.modes = CachePolicy(mode=options.mode, share=options.share, tenants=options.modes, salt="semantic")
        self._removals = Removals()
        self._namespaces: OrderedDict[str, Namespace] = OrderedDict()
        self._loading: dict[str, asyncio.Task[None]] = {}

    @classmethod
    def from_config(cls, config: SemanticConfig, database: Database, fleet: Fleet) -> SemanticCache | None:
        """Return None where no encoder is configured; otherwise even with mode "off", because a tenant's mode can be
        changed while the server runs. ConfigError where the embedder is not a served encoder."""
        if not config.embedder:
            return None
        encoder = fleet.served.get(config.embedder)
        if encoder is None or encoder.kind != "encoder":
            raise ConfigError(f"cache.semantic.embedder: expected a served encoder, found '{config.embedder}'")
        return cls(
            SemanticOptions.from_config(config),
            store=SemanticStore(database),
            counted=lambda table, name: metrics.of(metrics.semantic, table, name).inc(),
            encoder=encoder,
        )

    def embedder_for(self, caller: Caller, surface: str) -> ServedEmbedder:
        """Return an embedder that runs as the caller's work on the surface."""
        assert self._encoder is not None
        return ServedEmbedder(self._encoder, caller, surface=surface)

    # The way of a request

    async def recall(
        self, tenant: str, asked: TextRequest, embedder: Embedder, *, variant: str, surface: str
    ) -> SemanticLookup:
        """What there is for a request of this tenant. ApiError for tags that are none."""
        recall = await self._recall(tenant, asked, embedder, variant, surface)
        self._count("outcomes", recall.outcome)
        if recall.outcome in ("refused", "none"):
            self._count("refusals", recall.reason)
        return recall

    async def _recall(
        self, tenant: str, asked: TextRequest, embedder: Embedder, variant: str, surface: str
    ) -> SemanticLookup:
        options = self.options
        uses = self.modes.access(tenant, requested=asked.cache)
        if not uses.reads:
            return SemanticLookup("off", tenant)
        subject = semantic_key_for(
            asked,
            variant=f"{variant}\n{embedder.name}",
            policy=options.policy,
            sampled=options.sampled,
            tools=options.tools,
            surfaces=options.surfaces,
            surface=surface,
            longest=options.longest,
            tags=cache_tags(asked),
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
            subject, vector, now=now, nearest=options.nearest, floor=options.floor, guarded=options.guards
        )
        recall = SemanticLookup(
            "miss", tenant, search.reason, subject, vector, search.best, removals=self._removals.count
        )
        if search.best is None:
            recall.outcome = "refused" if search.reason else "miss"
            return recall
        if search.best.score < options.least:
            recall.outcome = "below"
            return recall
        if not await self._judged(recall, search.best):
            recall.outcome, recall.reason = "refused", "judge"
            return recall
        if namespace.get(search.best.entry.id) is not search.best.entry:  # gone while the judge thought
            recall.candidate = None
            return recall
        decision = self._decided(namespace, search.best)
        if options.serve == "prime":
            # An example misleads less than a wrong answer: it needs no bound and no check.
            decision = replace(decision, serve=True, sampled=False)
        recall.decision = decision
        if not decision.serve:
            recall.outcome = "explore"
        elif not uses.serves:
            recall.outcome = "record"
        else:
            recall.outcome = "hit"
            namespace.used(search.best.entry)
        return recall

    def _decided(self, namespace: Namespace, candidate: CacheCandidate) -> ServeDecision:
        decision = namespace.thresholds.decide(candidate.entry.id, candidate.entry.evidence, candidate.score)
        fixed = self.options.threshold
        if fixed is None:
            return decision
        return replace(decision, serve=candidate.score >= fixed, good=candidate.score >= fixed)

    async def _judged(self, recall: SemanticLookup, candidate: CacheCandidate) -> bool:
        if self._judge is None or recall.subject is None:
            return True
        try:
            async with asyncio.timeout(self.options.judge_wait_s):
                share = await self._judge.same(recall.subject.question, candidate.entry.question)
        except (TimeoutError, HeadraceError, ApiError, OSError):
            return False
        return share >= self.options.judge_least

    async def settle(self, recall: SemanticLookup, answer: StoredAnswer | None, embedder: Embedder) -> None:
        """After a fresh answer, whole and given to the client; None where there is none to keep. Once for a recall."""
        if recall.settled or recall.subject is None or recall.vector is None or answer is None:
            return
        if recall.outcome in ("off", "none", "unavailable", "hit"):
            return
        recall.settled = True
        if len(answer.content.encode()) + len(answer.reasoning.encode()) > self.options.answer_bytes:
            return
        same = await self._compare(recall, answer, embedder)
        if same:
            return  # the entry that is there says it already
        await self._add(recall, answer, embedder)

    async def check(self, recall: SemanticLookup, fresh: StoredAnswer | None, embedder: Embedder) -> bool | None:
        """After a hit whose `check` is set: whether the fresh answer says the same. None where it cannot be said."""
        if recall.settled or fresh is None or recall.outcome != "hit":
            return None
        recall.settled = True
        same = await self._compare(recall, fresh, embedder)
        if same is False and self.options.serve == "answer":
            await self._add(recall, fresh, embedder)
        return same

    async def _compare(self, recall: SemanticLookup, fresh: StoredAnswer, embedder: Embedder) -> bool | None:
        """Whether the candidate's answer says what the fresh one does; the thresholds learn of it."""
        candidate = recall.candidate
        if candidate is None or recall.decision is None:
            return None
        entry = candidate.entry
        options = self.options
        try:
            async with asyncio.timeout(options.agree_wait_s):
                same = await answers_agree(
                    entry.answer.content,
                    fresh.content,
                    by=options.agree_by,
                    embedder=embedder,
                    least=options.agree_least,
                )
        except (TimeoutError, HeadraceError, ApiError, OSError):
            same = None
        self._count("comparisons", "unsure" if same is None else "right" if same else "wrong")
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
        if namespace is None or self._removals.hit(recall.removals, recall.tenant, recall.subject.tags):
            return
        entry, gone = namespace.add(recall.subject, recall.vector, answer, now=self._clock())
        if self._store is not None:
            # In the disk's queue before anything else happens here: an invalidation that comes now finds it there.
            if entry is not None:
                await self._store.save(recall.tenant, embedder.name, [StoredEntry(entry, recall.vector)])
            if gone:
                await self._store.remove(recall.tenant, gone)
        await self._make_room()

    async def _make_room(self) -> None:
        """Where all tenants together take too much, the one that takes most gives: nobody pushes out another's."""
        gone: dict[str, list[int]] = {}
        total = sum(namespace.nbytes for namespace in self._namespaces.values())
        while total > self.options.total_bytes:
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

    # What an operator does

    async def invalidate(self, *, tenant: str | None = None, tag: str | None = None) -> int:
        """Lets go of the entries that have all of what is given, of every tenant where none is named; how many of those
        in memory. ApiError where the disk keeps its own. What is being generated is not kept then."""
        self._removals.add(tenant, tag)
        count = 0
        for name in [tenant] if tenant is not None else list(self._namespaces):
            namespace = self._namespaces.get(name)
            if namespace is not None:
                count += len(namespace.remove_tags([tag]) if tag is not None else namespace.clear())
        if self._store is not None:
            await self._store.invalidate(tenant, tag)
        return count

    async def sweep(self) -> int:
        """Lets go of what has expired; to be called now and then."""
        now = self._clock()
        count = sum(len(namespace.sweep(now)) for namespace in self._namespaces.values())
        if self._store is not None:
            await self._store.sweep(now)
        return count

    def about(self, tenant: str) -> Mapping[str, float]:
        """For an operator."""
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
        """Of what is in memory, of all tenants."""
        found = self._namespaces.values()
        return CacheSize(sum(map(len, found)), sum(namespace.nbytes for namespace in found))

    async def close(self) -> None:
        for tenant in list(self._loading):
            await self._stop_loading(tenant)

    # Namespaces

    def _namespace(self, tenant: str, embedder: Embedder) -> Namespace | None:
        """None while what a database has of the tenant is being read."""
        namespace = self._namespaces.get(tenant)
        if namespace is not None:
            self._namespaces.move_to_end(tenant)
            return namespace if tenant not in self._loading else None
        options = self.options
        while len(self._namespaces) >= options.tenants:
            gone, _ = self._namespaces.popitem(last=False)
            if (task := self._loading.pop(gone, None)) is not None:
                task.cancel()
        thresholds = Thresholds(
            delta=options.delta, per=options.per, seed=options.seed, check_share=options.check_share
        )
        bounds = Bounds(
            entries=options.entries,
            nbytes=options.tenant_bytes,
            ttl_s=options.ttl_s,
            tag_ttl_s=options.tag_ttl_s,
            vectors=options.vectors,
            exact=options.exact,
        )
        namespace = self._namespaces[tenant] = Namespace(thresholds, bounds)
        if self._store is None:
            return namespace
        self._loading[tenant] = asyncio.ensure_future(self._load(tenant, namespace, embedder.name, self._store))
        return None

    async def _load(self, tenant: str, namespace: Namespace, embedder: str, store: SemanticStore) -> None:
        removals = self._removals.count
        try:
            rows, last = await store.load(tenant, embedder, now=self._clock(), most=namespace.bounds.entries)
            namespace.skip_ids(last)
            for place, row in enumerate(rows):
                if not self._removals.hit(removals, tenant, row.entry.tags):
                    namespace.restore(row.entry, row.vector)
                if place % 64 == 63:
                    await asyncio.sleep(0)  # others have a turn too
        except (ApiError, OSError, sqlite3.Error) as error:
            # Without it nothing is known of the ids that are taken: the tenant begins again with its next request.
            log.warning("the semantic cache could not read its table: %s", error)
            self._namespaces.pop(tenant, None)
        finally:
            if self._loading.get(tenant) is asyncio.current_task():
                del self._loading[tenant]

    async def load(self, tenant: str, embedder: Embedder) -> None:
        """Returns when what a database has of the tenant is there; a request does not wait for it."""
        self._namespace(tenant, embedder)
        if (task := self._loading.get(tenant)) is not None:
            await asyncio.shield(task)

    async def _stop_loading(self, tenant: str) -> None:
        if (task := self._loading.pop(tenant, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _count(self, which: Literal["outcomes", "refusals", "comparisons"], name: str) -> None:
        self.counts.add(which, name)
        if self._counted is not None:
            self._counted(which, name)
