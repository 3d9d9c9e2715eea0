"""DriftWatch: profiles a share of the traffic by day: languages, lengths, topics, cost, quality and supported facts.
Keeps no texts.

Topics are clusters of the questions' embeddings, made as they come: a question that is near no cluster begins one,
until there are enough. Clusters and profiles are saved, so that weeks can be compared after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.config.lab.drift_section import DriftConfig
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.semantic.embedder import ServedEmbedder
from headrace.gateway.flow.answer_observer import FinishedAnswer
from headrace.gateway.language_detection import language_of
from headrace.gateway.ledger.prices import PriceBook, microseconds
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.routing.rules import last_user_text
from headrace.gateway.routing.splits import BUCKETS, bucket_of
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.lab.comparison.factual_consistency import check_facts
from headrace.lab.online.background_copies import SURFACE
from headrace.lab.online.drift import DailyTraffic, DriftReport, compare_traffic, total_of
from headrace.lab.online.lab_store import LabStore
from headrace.observe.latency.latency_book import length_bucket

log: Final = logging.getLogger(__name__)

DAY_S: Final = 86_400
_DAYS: Final = 63  # kept
_SAVE_S: Final = 60.0
_NAME: Final = "drift"
_MOST_WAITING: Final = 64  # questions that wait for their embedding
_QUESTION_CHARS: Final = 1000
_FACT_CHARS: Final = 50_000  # of an answer and its sources: longer ones are not checked, which would hold up others


class _Saved(msgspec.Struct):
    days: dict[int, DailyTraffic] = {}
    encoder: str = ""
    clusters: list[list[float]] = []
    sizes: list[int] = []


class TopicClusters:
    """Clusters of unit vectors, bounded in number. Each has the mean direction of its members."""

    def __init__(self, most: int, *, near: float) -> None:
        self.centres: list[NDArray[np.float32]] = []
        self.sizes: list[int] = []
        self._most = most
        self._near = near

    def assign(self, vector: NDArray[np.float32]) -> int:
        """Return the cluster of a vector, and move its centre towards it."""
        unit = vector / max(float(np.linalg.norm(vector)), 1e-12)
        cosines = [float(centre @ unit) / max(float(np.linalg.norm(centre)), 1e-12) for centre in self.centres]
        place = int(np.argmax(cosines)) if cosines else -1
        if place < 0 or (cosines[place] < self._near and len(self.centres) < self._most):
            self.centres.append(unit.astype(np.float32))
            self.sizes.append(1)
            return len(self.centres) - 1
        self.sizes[place] += 1
        self.centres[place] += (unit - self.centres[place]) / min(self.sizes[place], 1000)
        return place


class DriftWatch:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        config: DriftConfig,
        store: LabStore,
        *,
        encoder: ServedVariant | None = None,
        prices: PriceBook | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.days: dict[int, DailyTraffic] = {}  # by day since 1970
        self.topics = TopicClusters(config.topics, near=config.near)
        self._store = store
        self._encoder = encoder
        self._prices = prices or PriceBook()
        self._clock = clock
        self._limit = round(config.share * BUCKETS)
        self._questions: asyncio.Queue[tuple[Caller, str]] = asyncio.Queue(_MOST_WAITING)

    def wants(self, exchange: Exchange, plan: RoutePlan) -> bool:
        del plan
        return exchange.surface != SURFACE and bucket_of(_NAME, exchange.id.encode()) < self._limit

    def take(self, finished: FinishedAnswer) -> None:
        exchange, request = finished.exchange, finished.requested
        if finished.error is not None:
            return
        profile, usage = self._today(), exchange.usage
        question = last_user_text(request.messages, request.prompts)
        profile.requests += 1
        profile.count("language", language_of(question) or "unknown")
        profile.count("length", length_bucket(exchange.prompt_tokens))
        profile.count("route", exchange.route)
        profile.note("prompt_tokens", float(exchange.prompt_tokens))
        if finished.is_generated:
            profile.note("output_tokens", float(usage.output_tokens))
            self._note_facts(profile, finished)
            price = self._prices.of(exchange.served.name)
            if not price.free:
                machine = microseconds(usage.prefill_s + usage.decode_s)
                cost = price.micros(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, machine)
                profile.note("micros", float(cost))
        if self._encoder is not None and question.strip() and not self._questions.full():
            self._questions.put_nowait((exchange.caller, question[:_QUESTION_CHARS]))

    def _note_facts(self, profile: DailyTraffic, finished: FinishedAnswer) -> None:
        """Note the share of an answer's numbers and names that its sources or its prompt have."""
        request, answer = finished.requested, "\n".join(choice.content for choice in finished.choices)
        texts = [source.text for source in request.sources]
        if not texts or not finished.is_complete:
            return
        texts += [str(message.get("content") or "") for message in request.messages or ()]
        if len(answer) + sum(map(len, texts)) > _FACT_CHARS:
            return
        check = check_facts(answer, texts)
        if check.facts:
            profile.note_facts(finished.exchange.served.name, check.consistency)

    def note_quality(self, variant: str, value: float) -> None:
        """Take the agreement of a served answer with a better variant's, 0 to 1."""
        self._today().note_quality(variant, value)

    def report(self, days: int = 7) -> DriftReport:
        """Compare the last days with as many before them."""
        today = int(self._clock() // DAY_S)

        def span(first: int) -> DailyTraffic:
            return total_of(each for day, each in self.days.items() if first <= day < first + days)

        return compare_traffic(span(today - 2 * days + 1), span(today - days + 1))

    def _today(self) -> DailyTraffic:
        day = int(self._clock() // DAY_S)
        if day not in self.days:
            self.days[day] = DailyTraffic()
            for old in [each for each in self.days if each <= day - _DAYS]:
                del self.days[old]
        return self.days[day]

    async def run(self) -> None:
        """Load what was saved, then embed questions and save until cancelled."""
        await self.load()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._save_forever())
            if self._encoder is not None:
                group.create_task(self._embed_forever(self._encoder))

    async def _embed_forever(self, encoder: ServedVariant) -> None:
        while True:
            caller, question = await self._questions.get()
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    (vector,) = await ServedEmbedder(encoder, caller, surface=SURFACE).embed([question])
            except Exception as error:  # the next question is embedded all the same
                log.debug("a question was not embedded", exc_info=error)
                continue
            self._today().count("topic", f"topic {self.topics.assign(np.asarray(vector, dtype=np.float32)) + 1}")

    async def _save_forever(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_S)
            try:
                await self.save()
            except ApiError as error:
                log.warning("the traffic's profile was not saved: %s", error)

    async def load(self) -> None:
        try:
            saved = msgspec.json.decode(await self._store.load(_NAME) or b"{}", type=_Saved)
        except (ApiError, msgspec.MsgspecError) as error:
            log.warning("the traffic's profile cannot be read: %s", error)
            return
        for day, profile in saved.days.items():
            self.days.setdefault(day, DailyTraffic()).merge(profile)
        if saved.encoder == self._encoder_name():
            self.topics.centres = [np.array(each, dtype=np.float32) for each in saved.clusters]
            self.topics.sizes = saved.sizes

    async def save(self) -> None:
        clusters = [[round(float(value), 5) for value in centre] for centre in self.topics.centres]
        saved = _Saved(self.days, self._encoder_name(), clusters, self.topics.sizes)
        await self._store.save(_NAME, msgspec.json.encode(saved))

    def _encoder_name(self) -> str:
        return "" if self._encoder is None else f"{self._encoder.name} {self._encoder.fingerprint}"

    def as_json(self, days: int) -> dict[str, Any]:
        return {
            "object": "drift",
            "days": days,
            "share": self.config.share,
            **self.report(days).as_json(),
            "facts_by_day": self._facts_by_day(days),
        }

    def _facts_by_day(self, days: int) -> list[dict[str, Any]]:
        first = int(self._clock() // DAY_S) - days + 1
        return [
            {
                "day": datetime.fromtimestamp(day * DAY_S, UTC).date().isoformat(),
                "variant": variant,
                "answers": sums.count,
                "supported": None if sums.mean is None else round(sums.mean, 4),
            }
            for day, profile in sorted(self.days.items())
            if day >= first
            for variant, sums in sorted(profile.facts.items())
        ]
