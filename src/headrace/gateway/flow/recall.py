"""Recall: an existing answer, or the ladder's refusal.

Looks into catalogues, the exact and the semantic cache, and the request's own sources, in this order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.cache_key import cache_key_for
from headrace.gateway.caches.exact.exact_cache import CacheHit
from headrace.gateway.caches.semantic.semantic_entry import storable_answer
from headrace.gateway.degradation.ladder.extractive_answer import extract_answer, question_and_sources
from headrace.gateway.degradation.ladder.ladder_steps import overload_error, plan_degradation
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.message_fitting import fit_request, number_sources
from headrace.gateway.flow.degrade import allowed_steps
from headrace.gateway.flow.flow_state import FlowState
from headrace.gateway.flow.services import Services
from headrace.gateway.requests.text_request import ChoiceDelta, TokenUsage
from headrace.gateway.routing.composite_answerer import VariantCharge, derive_exchange
from headrace.gateway.serving.engine_answering import prompts_of
from headrace.gateway.serving.exchange import Exchange
from headrace.observe import metrics

if TYPE_CHECKING:
    from headrace.gateway.caches.semantic.hit_verifier import HitVerifier, Verification
    from headrace.gateway.caches.semantic.semantic_cache import SemanticLookup

# Errors from overload, outage or deadlines, which an extracted answer may replace.
_REPLACEABLE_ERRORS: Final = frozenset(
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


async def recall(state: FlowState) -> bool:
    """Look for an answer that needs no generation; True if found. ApiError if the ladder refuses the request."""
    exchange, services, lookups, degradation = state.exchange, state.services, state.lookups, state.degradation
    plan = degradation.plan
    if answer_from_catalogue(state):
        return True
    takes_stale = plan is not None and plan.stale_s is not None
    if lookups.semantic is None and (hit := await look_up_exact(state, stale=takes_stale)) is not None:
        _answer_from_cache(state, hit, "stale" if hit.stale else "exact", f"age={hit.age_s:.0f}")
        if hit.stale:
            degradation.record.add("stale", ShapingChange("age_s", None, round(hit.age_s)))
        return True
    if services.semantic is not None and lookups.semantic is None:
        lookup = lookups.semantic = await look_up_semantic(state)
        is_served = lookup.outcome == "hit" and services.semantic.config.serve == "answer"
        if is_served and lookup.entry is not None:
            answer = lookup.entry.answer
            deltas = answer.pieces(prompt_tokens=exchange.prompt_tokens)
            verified = lookup.verification
            detail = f"verified={verified.score:.2f}" if verified is not None and verified.score is not None else ""
            _answer_from_cache(state, CacheHit(deltas, n=1, machine_s=answer.machine_s), "semantic", detail)
            if lookup.check:
                services.background.run(_check_hit(services, exchange, lookup))
            return True
    if plan is None:
        return False
    if plan.extract and _extract(state):
        return True
    if plan.refuse:
        count_refusal(state)
        raise overload_error(plan.level, degradation.signals)
    return False


async def look_up_semantic(state: FlowState) -> SemanticLookup:
    """Look up the semantic cache. What runs for it ends where the client leaves; a verification is charged anyway."""
    exchange, semantic = state.exchange, state.services.semantic
    assert semantic is not None
    began = time.monotonic()
    verifier = _verifier(state) if semantic.config.verify else None
    running = state.running = asyncio.ensure_future(
        semantic.recall(
            exchange.caller.tenant,
            exchange.text_request,
            semantic.embedder_for(exchange.caller, exchange.surface),
            variant="\n".join((exchange.served.name, exchange.served.fingerprint, _recipe(state, exchange))),
            surface=exchange.surface,
            verifier=verifier,
            can_verify=verifier is not None or not semantic.config.verify,
        )
    )
    try:
        lookup = await running
    except asyncio.CancelledError:
        serves = semantic.modes.access(exchange.caller.tenant, requested=exchange.text_request.cache).serves
        if verifier is not None and serves:
            _charge_verification(state, verifier.variant, verifier.usage)
        if not state.is_only_work_cancelled(running):
            raise
        from headrace.gateway.caches.semantic.semantic_cache import SemanticLookup

        lookup = SemanticLookup("unavailable", exchange.caller.tenant, "stopped")
    finally:
        state.running = None
    known: dict[str, Any] = {"reason": lookup.reason} if lookup.reason else {}
    exchange.timeline.part("recall", "semantic", began, outcome=lookup.outcome, **known)
    if (found := lookup.verification) is not None:
        _note_verification(state, lookup, found)
    return lookup


def _charge_verification(state: FlowState, variant: str, usage: TokenUsage) -> None:
    if usage.prompt_tokens or usage.output_tokens:
        state.lookups.charges.append(VariantCharge(variant, usage, "verify"))


def _verifier(state: FlowState) -> HitVerifier | None:
    from headrace.gateway.flow.model_verifier import verifier_for

    return verifier_for(state)


def _note_verification(state: FlowState, lookup: SemanticLookup, found: Verification) -> None:
    """Show a verified candidate in the request's trace, also a refused one, and charge it with the answer."""
    known: dict[str, Any] = {"variant": found.variant, "outcome": lookup.outcome}
    if found.score is not None:
        known["score"] = round(found.score, 4)
    if lookup.candidate is not None:
        known["cosine"] = round(lookup.candidate.cosine, 4)
    state.exchange.timeline.part("recall", "verify", found.began, found.ended, **known)
    metrics.semantic_verify_seconds.observe(found.ended - found.began)
    if found.is_charged:
        _charge_verification(state, found.variant, found.usage)


def _recipe(state: FlowState, exchange: Exchange) -> str:
    """Return what makes the plan's answers others than the variant's own, with the files of the further variants."""
    plan, variant = state.plan, state.services.fleet.variant
    further = sorted(plan.further - {exchange.served.name})
    return "\n".join((plan.recipe, *(f"{name} {variant(name).fingerprint}" for name in further)))


async def _check_hit(services: Services, exchange: Exchange, lookup: SemanticLookup) -> None:
    """Compare a semantic hit with a fresh answer, generated on the batch surface without a charge."""
    assert services.semantic is not None
    text_request = exchange.text_request.but(surface="batch", deadline_s=None, stream=False)
    with suppress(ApiError):
        fresh = storable_answer(
            await services.dispatcher.generate(derive_exchange(exchange, exchange.served, text_request))
        )
        await services.semantic.check(lookup, fresh, services.semantic.embedder_for(exchange.caller, "batch"))


async def look_up_exact(state: FlowState, *, stale: bool) -> CacheHit | None:
    """Look up the exact cache once: first the original request, then the degraded one."""
    exchange = state.exchange
    if not state.reads_exact:
        return None
    if state.lookups.exact is not None:
        return state.lookups.exact.hit
    original = state.degradation.original
    is_changed = original is not None and (
        original.text_request is not exchange.text_request or original.served is not exchange.served
    )
    if original is not None and is_changed and original.served.upstream is None:
        original.prompts = {}
        with suppress(ApiError):  # a request that does not fit untrimmed was never stored
            shaping = state.services.shaping
            original.text_request = number_sources(original.text_request, original.served, shaping)[0]
            original.text_request = (
                await fit_request(original.text_request, original.served, shaping, None, None)
            ).text_request
            await prompts_of(original)
            if (hit := await _look_up(state, original, stale=stale)) is not None:
                exchange.served = original.served
                state.degradation.record.remove()
                return hit
    return await _look_up(state, exchange, stale=stale)


async def _look_up(state: FlowState, exchange: Exchange, *, stale: bool) -> CacheHit | None:
    exact, plan = state.services.exact, state.degradation.plan
    assert exact is not None
    prompts = exchange.prompts.get(exchange.served.name)
    key = cache_key_for(
        tenant=exchange.caller.tenant,
        served=exchange.served,
        text_request=exchange.text_request,
        prompts=None if prompts is None else [prompt.tokens for prompt in prompts],
        seeded=exchange.text_request.seeded,
        policy=f"{exact.config.policy}\n{_recipe(state, exchange)}",
        images=[image.image.digest for prompt in prompts or () for image in prompt.images],
    )
    began = time.monotonic()
    lookup = state.lookups.exact = await exact.look(key, requested=exchange.text_request.cache, stale=stale)
    hit = lookup.hit
    outcome = "miss" if hit is None else "stale" if hit.stale else "hit"
    exchange.timeline.part("recall", "exact", began, outcome=outcome)
    if hit is not None and hit.stale and key is not None and plan is not None:
        expired_s = hit.age_s - exact.ttl_s(key.tags)
        return hit if expired_s <= (plan.stale_s or 0.0) else None
    return hit


def _answer_from_cache(state: FlowState, hit: CacheHit, cache: str, detail: str = "") -> None:
    state.answer, state.delivery.sets_timestamps = hit, True
    state.exchange.answered_by = cache
    state.exchange.headers["x-headrace-cache"] = f"{cache}; {detail}" if detail else cache
    state.exchange.notes["cache"] = cache


def answer_from_catalogue(state: FlowState) -> bool:
    """Answer with an approved text, if a catalogue has one for the question."""
    exchange, catalogues, original = state.exchange, state.services.catalogues, state.degradation.original
    if catalogues is None:
        return False
    asked = exchange if original is None else original
    hit = catalogues.find(
        asked.text_request, tenant=exchange.caller.tenant, variant=asked.served.name, surface=exchange.surface
    )
    if hit is None:
        return False
    exchange.served = asked.served
    state.degradation.record.remove()  # it had no effect on this answer
    text = hit.found.text
    usage = TokenUsage(exchange.prompt_tokens, text.output_tokens)
    deltas = [ChoiceDelta(0, content=hit.found.answer), ChoiceDelta(0, finish="stop", usage=usage)]
    detail = f"name={hit.catalogue}; version={hit.version}"
    _answer_from_cache(state, CacheHit(deltas, n=1, machine_s=text.machine_s), "catalogue", detail)
    exchange.notes["catalogue"] = {"name": hit.catalogue, "version": hit.version, "text": text.name}
    return True


def _extract(state: FlowState) -> bool:
    """Answer with sentences from the request's sources. False if it has no sources or no question."""
    exchange, shaping, record = state.exchange, state.shaping, state.degradation.record
    given = () if shaping.sources is None else shaping.sources.sources
    question, before, sources = question_and_sources(exchange.text_request.messages or (), given)
    if not sources or not question:
        return False
    extract = extract_answer(question, sources, before=before)
    exchange.notes |= {
        "extracted": True,
        "confidence": round(extract.confidence, 4),
        "citations": citation_notes(extract.quotes),
    }
    shaping.sources = None
    record.remove("max_tokens", "variant")  # they had no effect on this answer
    record.add("extract", ShapingChange("quotes", None, len(extract.quotes)))
    deltas = [ChoiceDelta(0, content=extract.text), ChoiceDelta(0, finish="stop", usage=TokenUsage())]
    state.answer, state.delivery.sets_timestamps = CacheHit(deltas, n=1), True
    exchange.answered_by = "extract"
    return True


def citation_notes(citations: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"number": each.number, "id": each.id, "start": each.start, "end": each.end} for each in citations]


def replace_error(state: FlowState, error: ApiError) -> bool:
    """Replace an overload or deadline error with an extracted answer, if the surface's ladder has that step.

    Call it only before the client has received anything."""
    exchange, services = state.exchange, state.services
    if error.code not in _REPLACEABLE_ERRORS or not services.ladder.has_steps(exchange.surface):
        return False
    failed = state.answer
    plan = plan_degradation(services.ladder.bottom(exchange.surface), exchange.text_request, allowed_steps(exchange))
    if not (plan.extract and _extract(state)):
        return False
    if failed is not None:
        failed.cancel()
    if state.wait is not None:
        state.wait.end()
        state.wait = None
    state.delivery.is_inspected = True
    return True


def count_refusal(state: FlowState) -> None:
    state.degradation.record.remove()
    metrics.of(metrics.degraded, state.exchange.surface, "refuse").inc()
