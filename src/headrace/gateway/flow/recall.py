"""Recall: an existing answer (exact, semantic, extracted from the request's own sources), or the ladder's refusal."""

from __future__ import annotations

from contextlib import suppress

from headrace.gateway.accounts.tenant_policies import settings_of
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.cache_key import cache_key_for
from headrace.gateway.caches.exact.exact_cache import CacheHit
from headrace.gateway.caches.semantic.semantic_cache import SemanticLookup
from headrace.gateway.caches.semantic.semantic_entry import storable_answer
from headrace.gateway.degradation.ladder import ladder_steps as ladder
from headrace.gateway.degradation.ladder.extractive_answer import extract_answer, question_and_sources
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.message_fitting import fit_request, number_sources
from headrace.gateway.flow.course import Course
from headrace.gateway.flow.services import Services
from headrace.gateway.requests.text_request import ChoiceDelta, TokenUsage
from headrace.gateway.routing.composite_answerer import derive_exchange
from headrace.gateway.serving.engine_answering import prompts_of
from headrace.gateway.serving.exchange import Exchange
from headrace.observe import metrics

_REFUSED = frozenset(  # by who was to answer, for want of room or time
    {
        "overloaded",
        "deadline_unreachable",
        "upstream_unavailable",
        "upstream_busy",
        "upstream_overloaded",
        "upstream_unreachable",
        "upstream_rate_limit",
        "engine_lost",
        "variant_unavailable",
        "too_late",
    }
)


async def recalled(course: Course) -> bool:
    """Whether there is an answer that nobody needs to generate."""
    exchange, services, degraded = course.exchange, course.services, course.degraded
    stale = degraded is not None and degraded.stale_s is not None
    if course.recall is None and (hit := await exact(course, stale=stale)) is not None:
        _hit(course, hit, "stale" if hit.stale else "exact", f"age={hit.age_s:.0f}")
        if hit.stale:
            course.telling.add("stale", ShapingChange("age_s", None, round(hit.age_s)))
        return True
    if services.semantic is not None and course.recall is None:
        recall = course.recall = await look_up_similar(course)
        served = recall.outcome == "hit" and services.semantic.options.serve == "answer"
        if served and recall.entry is not None:
            answer = recall.entry.answer
            pieces = answer.pieces(prompt_tokens=exchange.prompt_tokens)
            _hit(course, CacheHit(pieces, n=1, machine_s=answer.machine_s), "semantic", "")
            if recall.check:
                services.background.run(_check(course.services, exchange, recall))
            return True
    if degraded is None:
        return False
    if degraded.extract and _extracted(course):
        return True
    if degraded.refuse:
        refused_by_ladder(course)
        raise ladder.overload_error(degraded.level, course.signals)
    return False


async def look_up_similar(course: Course) -> SemanticLookup:
    exchange, semantic = course.exchange, course.services.semantic
    assert semantic is not None
    return await semantic.recall(
        exchange.caller.tenant,
        exchange.asked,
        semantic.embedder_for(exchange.caller, exchange.surface),
        variant="\n".join((exchange.served.name, exchange.served.fingerprint, course.plan.small or "")),
        surface=exchange.surface,
    )


async def _check(services: Services, exchange: Exchange, recall: SemanticLookup) -> None:
    """Compare a semantic hit with a fresh answer, generated on the batch surface. Not charged."""
    assert services.semantic is not None
    asked = exchange.asked.but(surface="batch", deadline_s=None, stream=False)
    with suppress(ApiError):
        fresh = storable_answer(await services.dispatcher.generate(derive_exchange(exchange, exchange.served, asked)))
        await services.semantic.check(recall, fresh, services.semantic.embedder_for(exchange.caller, "batch"))


async def exact(course: Course, *, stale: bool) -> CacheHit | None:
    """The exact cache's, which is asked once."""
    exchange, exact = course.exchange, course.services.exact
    if exact is None or not exact.modes.uses(exchange.caller.tenant, wish=exchange.asked.cache).looks:
        return None
    return await _hit_of(course, stale=stale) if course.looked is None else course.looked.hit


async def _hit_of(course: Course, *, stale: bool) -> CacheHit | None:
    """What was kept of this very request: first of what was asked, then of what has become of it."""
    if course.whole is not None and course.whole.served.upstream is None:
        whole = course.whole
        if whole.asked is not course.exchange.asked or whole.served is not course.exchange.served:
            whole.prompts = {}
            with suppress(ApiError):  # what was too long before it was trimmed was never kept
                whole.asked = number_sources(whole.asked, whole.served, course.services.shaping)[0]
                whole.asked = (await fit_request(whole.asked, whole.served, course.services.shaping, None, None)).asked
                await prompts_of(whole)
                if (hit := await _look(course, whole, stale=stale)) is not None:
                    course.exchange.served = whole.served
                    course.telling.remove()  # nothing was made less of it
                    return hit
    return await _look(course, course.exchange, stale=stale)


async def _look(course: Course, exchange: Exchange, *, stale: bool) -> CacheHit | None:
    services, plan = course.services, course.plan
    assert services.exact is not None
    prompts = exchange.prompts.get(exchange.served.name)
    wanted = cache_key_for(
        tenant=exchange.caller.tenant,
        served=exchange.served,
        asked=exchange.asked,
        prompts=None if prompts is None else [prompt.tokens for prompt in prompts],
        seeded=exchange.asked.seeded,
        policy=f"{services.exact.options.policy}\n{plan.small or ''}",
    )
    course.looked = looked = await services.exact.look(wanted, wish=exchange.asked.cache, stale=stale)
    hit, degraded = looked.hit, course.degraded
    if hit is not None and hit.stale and wanted is not None and degraded is not None:
        expired = hit.age_s - services.exact.ttl(wanted.tags)
        return hit if expired <= (degraded.stale_s or 0.0) else None
    return hit


def _hit(course: Course, answer: CacheHit, by: str, what: str) -> None:
    course.answer, course.follows = answer, True
    course.exchange.answered_by = by
    course.exchange.headers["x-headrace-cache"] = f"{by}; {what}" if what else by
    course.exchange.notes["cache"] = by


def _extracted(course: Course) -> bool:
    """From the request's own sources, where it has any."""
    exchange = course.exchange
    given = () if course.selected is None else course.selected.sources
    question, before, sources = question_and_sources(exchange.asked.messages or (), given)
    if not sources or not question:
        return False
    found = extract_answer(question, sources, before=before)
    exchange.notes |= {
        "extracted": True,
        "confidence": round(found.confidence, 4),
        "citations": [
            {"number": each.number, "id": each.id, "start": each.start, "end": each.end} for each in found.quotes
        ],
    }
    course.selected = None
    course.telling.remove("max_tokens", "variant")  # which nothing came of
    course.telling.add("extract", ShapingChange("quotes", None, len(found.quotes)))
    pieces = [ChoiceDelta(0, content=found.text), ChoiceDelta(0, finish="stop", usage=TokenUsage())]
    course.answer, course.follows = CacheHit(pieces, n=1), True
    exchange.answered_by = "extract"
    return True


def instead(course: Course, error: ApiError) -> bool:
    """Where who answers refuses, or is not there: what the end of the surface's ladder has, before the client hears
    of it."""
    exchange, services = course.exchange, course.services
    if error.code not in _REFUSED or not services.ladder.has_steps(exchange.surface):
        return False
    before = course.answer
    allowed = ladder.AllowedSteps.of(exchange.asked.degrade, None if settings_of(exchange.caller).ladder else "off")
    degraded = ladder.plan_degradation(services.ladder.bottom(exchange.surface), exchange.asked, allowed)
    if not (degraded.extract and _extracted(course)):
        return False
    if before is not None:
        before.cancel()
    if course.wait is not None:
        course.wait.end()  # it has had no first token
        course.wait = None
    course.looks = True
    return True


def refused_by_ladder(course: Course) -> None:
    course.telling.remove()
    metrics.of(metrics.degraded, course.exchange.surface, "refuse").inc()
