"""Settle: once, however a request has ended, what was used is counted, charged and kept."""

from __future__ import annotations

import time

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.exact_cache import CacheHit
from headrace.gateway.caches.exact.in_flight import AnswerFacts
from headrace.gateway.caches.semantic.semantic_entry import storable_answer
from headrace.gateway.flow.admit import entry_of
from headrace.gateway.flow.course import Course
from headrace.gateway.flow.request_metrics import count_ended
from headrace.gateway.flow.shared_generation import by_plan
from headrace.gateway.ledger.ledger import Ledger
from headrace.gateway.requests.text_request import Choice, TokenUsage, combine_usages
from headrace.gateway.routing.composite_answerer import CompositeAnswerer, VariantCharge, choice_count, sum_usage
from headrace.observe import metrics

_ENDED = {"stop": "finished", "tool_calls": "finished", "length": "limited", "deadline": "deadline"}


def settle(course: Course, error: ApiError | None = None) -> None:
    """Once, however it ended."""
    if course.settled:
        return
    course.settled = True
    exchange = course.exchange
    answer, own = course.answer, course.own
    if course.wait is not None:
        course.wait.end()
    facts = None
    if answer is not None:
        answer.cancel()
        facts = answer.facts()  # who leaves a shared generation before its end no longer pays for it
        course.free = not facts.pays
        if exchange.answered_by == "shared" and facts.pays:
            exchange.answered_by = ""  # who began it has left, and it became this one's
    if own is not None:
        own.settle(error)
    shared = course.shared
    if shared is not None and not course.free:
        shared.answers.settle(error)  # it has ended, or nobody is left who wants it
    whole = len(course.usages) == choice_count(exchange.asked) if course.looks else bool(exchange.finish)
    if isinstance(answer, CacheHit) and not course.looks:
        whole = answer.over
        exchange.usage, exchange.finish = answer.usage, answer.finish
        exchange.last_at = time.monotonic()
        exchange.first_at = exchange.first_at or exchange.last_at
    whole = whole and error is None
    gone = course.gone and not whole
    if exchange.cut_by:
        exchange.usage = combine_usages([course.usages[index] for index in sorted(course.usages)], exchange.asked.n)
        exchange.finish = "length"
    elif shared is not None and not (course.free and exchange.answered_by):
        exchange.usage = TokenUsage() if course.free else shared.exchange.usage
    ended = error.kind if error is not None else "gone" if gone else _ENDED.get(exchange.finish, "finished")
    # Where nothing was done for it, it never was.
    used = exchange.usage.prompt_tokens or exchange.usage.output_tokens or course.out
    course.refused = answer is None or (error is not None and error.kind == "overloaded_error" and not used)
    _count(course, whole)
    if course.charged:
        _charge(course, facts, ended)
    _keep(course, whole)
    count_ended(exchange.served.name, exchange, error, gone=gone)
    for step in course.telling.steps:
        metrics.of(metrics.degraded, exchange.surface, step).inc()
    if course.telling.steps:
        exchange.notes["degraded"] = list(course.telling.steps)


def _count(course: Course, whole: bool) -> None:
    exchange, services = course.exchange, course.services
    used = exchange.usage
    if course.reservation is not None:
        if course.refused:
            course.reservation.release_soon()
        elif course.free:  # but for what was let out while it paid
            course.reservation.settle_soon(0, course.reservation.out, whole=False)
        elif isinstance(course.made, CompositeAnswerer):  # what was tried before counts in the ledger alone
            course.reservation.settle_soon(exchange.prompt_tokens, course.out, whole=whole and not exchange.cut_by)
        else:
            course.reservation.settle_soon(
                used.prompt_tokens or exchange.prompt_tokens, used.output_tokens, whole=whole and not exchange.cut_by
            )
    elif whole and not course.free and services.ledger is not None and used.output_tokens:
        services.limiter.estimates.learn(
            exchange.caller.tenant,
            exchange.surface,
            used.output_tokens,
            round((exchange.last_at - exchange.arrival) * 1e6),
        )
    if services.ladder.has_steps(exchange.surface) and whole and not exchange.answered_by and exchange.first_at:
        services.pressure.record_answer(
            exchange.served.name,
            exchange.surface,
            tokens=used.output_tokens,
            seconds=exchange.last_at - exchange.first_at,
        )


def _charge(course: Course, facts: AnswerFacts | None, ended: str) -> None:
    exchange, services = course.exchange, course.services
    assert services.ledger is not None
    if course.refused:
        services.ledger.release(exchange.id)
        return
    made = course.made
    instead = course.named if exchange.served.name != course.named else ""
    if exchange.answered_by == "extract":
        services.ledger.charge(exchange.id, TokenUsage(), ended=ended, hit="extract")
    elif course.free and exchange.cut_by:  # others have it, and one of them pays
        services.ledger.charge(exchange.id, exchange.usage, ended=ended, hit="shared")
    elif course.free:
        saved = facts.saved if facts is not None and exchange.answered_by else TokenUsage()
        services.ledger.charge(
            exchange.id, saved, ended=ended, hit="exact" if exchange.answered_by == "stale" else exchange.answered_by
        )
    elif isinstance(made, CompositeAnswerer):
        charges = [charge for charge in made.charges if charge.charged]
        if exchange.cut_by:  # what the client has of the answer, and not what was made of it
            tried = course.tried()
            answer = _without(exchange.usage, sum_usage(charge.usage for charge in tried))
            charges = [*tried, VariantCharge(exchange.served.name, answer, "answer")]
        _charge_each(
            course,
            services.ledger,
            charges or [VariantCharge(exchange.served.name, TokenUsage(), "answer")],
            ended,
            instead,
        )
    else:
        variant = exchange.served.name
        services.ledger.charge(exchange.id, exchange.usage, ended=ended, variant=variant, instead_of=instead)


def _charge_each(course: Course, ledger: Ledger, charges: list[VariantCharge], ended: str, instead: str) -> None:
    """The last is the answer; what was computed before it (a cascade's first try) is a part of the same request."""
    for place, charge in enumerate(charges):
        last = place == len(charges) - 1
        id = course.exchange.id if last else f"{course.exchange.id}.{place}"
        ledger.charge(
            id,
            charge.usage,
            ended=ended,
            variant=charge.variant,
            instead_of=instead if last and charge.variant != instead else "",
            entry=None if last else entry_of(course, id=id, variant=charge.variant, counted=False),
        )


def _keep(course: Course, whole: bool) -> None:
    recall = course.recall
    if recall is None or recall.outcome == "hit" or not whole or course.exchange.answered_by:
        return
    if not course.exchange.cut_by and by_plan(course.exchange, course.plan):
        choice = Choice(0)
        for piece in course.said:
            choice.add(piece)
        if (answer := storable_answer([choice])) is not None:
            semantic = course.services.semantic
            assert semantic is not None
            embedder = semantic.embedder_for(course.exchange.caller, "batch")
            course.services.background.run(semantic.settle(recall, answer, embedder))


def _without(usage: TokenUsage, other: TokenUsage) -> TokenUsage:
    """The tokens that are left."""
    return TokenUsage(
        prompt_tokens=max(0, usage.prompt_tokens - other.prompt_tokens),
        output_tokens=max(0, usage.output_tokens - other.output_tokens),
        cached_tokens=max(0, usage.cached_tokens - other.cached_tokens),
    )
