"""Settle: however an exchange ended, count, charge and store what was used, exactly once."""

from __future__ import annotations

import time
from typing import Final

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.exact_cache import CacheHit
from headrace.gateway.caches.exact.in_flight import AnswerFacts
from headrace.gateway.caches.semantic.semantic_entry import storable_answer
from headrace.gateway.flow.admit import ledger_entry
from headrace.gateway.flow.answer_observer import FinishedAnswer
from headrace.gateway.flow.flow_state import Ending, FlowState, Origin, Outcome
from headrace.gateway.flow.shared_generation import is_by_plan
from headrace.gateway.ledger.prices import microseconds
from headrace.gateway.ledger.request_ledger import RequestLedger
from headrace.gateway.requests.text_request import Choice, TokenUsage, combine_usages
from headrace.gateway.routing.composite_answerer import CompositeAnswerer, VariantCharge, choice_count, sum_usage
from headrace.gateway.routing.golden import failed_golden_check
from headrace.gateway.routing.plan_composer import routing_decisions
from headrace.observe import metrics

_LABELS: Final = {"stop": "finished", "tool_calls": "finished", "length": "limited", "deadline": "deadline"}


def settle(state: FlowState, error: ApiError | None = None) -> None:
    """Charge and record an exchange once. Further calls do nothing."""
    if state.outcome is not None:
        return
    state.exchange.timeline.enter("settle")
    facts = _stop(state, error)
    origin = _origin(state, facts)
    if facts is not None and origin in (Origin.CACHED, Origin.SHARED):
        state.exchange.saved = facts.saved
    is_whole = _has_all_choices(state) and error is None
    _complete_usage(state, origin)
    state.outcome = outcome = _outcome(state, error, origin, is_whole=is_whole)
    state.exchange.ended = outcome.label
    _settle_limits(state, outcome)
    if error is not None and not _sent_tokens(state):  # what fails before anything was sent costs nothing
        charged = Outcome(Origin.NONE, outcome.ending, outcome.label)
    else:
        charged = outcome
    state.exchange.cost_micros = _cost(state, charged, facts)
    _charge_verifications(state, outcome.label)
    if state.admission.has_ledger_hold:
        _settle_ledger(state, charged, facts)
    _store_semantic(state, outcome)
    _count(state, outcome)
    if steps := state.degradation.record.steps:
        state.exchange.notes["degraded"] = list(steps)
    _note_route(state)
    _note_golden(state)
    _note_option(state)
    _finish_observed(state, outcome, error)
    state.exchange.timeline.enter("post")


def _note_golden(state: FlowState) -> None:
    """Mark an answer that the golden variant gave because another one failed a check."""
    generation = state.generation
    if not state.plan.golden or generation is None or state.exchange.answered_by not in ("", "shared"):
        return
    if (found := failed_golden_check(routing_decisions(generation))) is not None:
        check, instead_of, variant = found
        state.exchange.notes["golden"] = {"check": check, "instead_of": instead_of, "variant": variant}
        metrics.of(metrics.golden, instead_of, check).inc()


def _note_option(state: FlowState) -> None:
    """Tell the client what the fast profile that it chose costs and gains, as far as that was measured."""
    exchange, note = state.exchange, state.services.option_note
    if note is None or exchange.text_request.profile != "fast" or exchange.answered_by:
        return
    if (price := note(exchange.served.name, "fast")) is not None:
        exchange.notes["option"] = price


def _finish_observed(state: FlowState, outcome: Outcome, error: ApiError | None) -> None:
    if (observed := state.observed) is not None:
        observed.finish(
            FinishedAnswer(
                exchange=state.exchange,
                requested=observed.requested,
                plan=state.plan,
                choices=observed.choices,
                ended=outcome.label,
                is_complete=outcome.ending is Ending.COMPLETE,
                error=error,
            )
        )


def _note_route(state: FlowState) -> None:
    exchange, generation = state.exchange, state.generation
    if exchange.answered_by:
        exchange.route = exchange.answered_by
    elif state.plan.decisions or generation is not None:
        decisions = (*state.plan.decisions, *(routing_decisions(generation) if generation is not None else ()))
        exchange.route = decisions[-1].stage if decisions else "direct"


def _stop(state: FlowState, error: ApiError | None) -> AnswerFacts | None:
    """End whatever still runs for this exchange alone, and return how its answer came about."""
    if state.wait is not None:
        state.wait.end()
    facts = None
    if state.answer is not None:
        state.answer.cancel()
        facts = state.answer.facts()  # after cancel: leaving a shared generation early hands the payment over
    if state.own_generation is not None:
        state.own_generation.settle(error)
    if (shared := state.shared_generation) is not None and facts is not None and facts.pays:
        shared.answerer.settle(error)
    return facts


def _origin(state: FlowState, facts: AnswerFacts | None) -> Origin:
    exchange = state.exchange
    if facts is None:
        return Origin.NONE
    if facts.pays:
        if exchange.answered_by == "shared":
            exchange.answered_by = ""  # the exchange that began the generation has left, and this one pays
        return Origin.GENERATED
    match exchange.answered_by:
        case "extract":
            return Origin.EXTRACTED
        case "shared":
            return Origin.SHARED
        case "":
            return Origin.HANDED_OVER
        case _:
            return Origin.CACHED


def _has_all_choices(state: FlowState) -> bool:
    exchange, answer = state.exchange, state.answer
    if state.delivery.is_inspected:
        return len(state.delivery.usages) == choice_count(exchange.text_request)
    if isinstance(answer, CacheHit):
        return answer.over
    return bool(exchange.finish)


def _complete_usage(state: FlowState, origin: Origin) -> None:
    """Set usage and timestamps where the generation has not set them on this exchange."""
    exchange, answer, usages = state.exchange, state.answer, state.delivery.usages
    if isinstance(answer, CacheHit) and not state.delivery.is_inspected:
        exchange.usage, exchange.finish = answer.usage, answer.finish
        exchange.last_at = time.monotonic()
        exchange.first_at = exchange.first_at or exchange.last_at
    if exchange.cut_by:
        exchange.usage = combine_usages([usages[index] for index in sorted(usages)], exchange.text_request.n)
        exchange.finish = "length"
    elif state.ended_by is not None and origin is Origin.GENERATED and state.delivery.is_inspected:
        sent = _sent_tokens(state)
        exchange.usage = TokenUsage(prompt_tokens=exchange.prompt_tokens if sent else 0, output_tokens=sent)
    elif origin is Origin.HANDED_OVER:
        exchange.usage = TokenUsage()
    elif origin is Origin.GENERATED and (shared := state.shared_generation) is not None:
        exchange.usage = shared.exchange.usage


def _outcome(state: FlowState, error: ApiError | None, origin: Origin, *, is_whole: bool) -> Outcome:
    exchange = state.exchange
    if error is not None:
        usage = exchange.usage
        is_unused = not (usage.prompt_tokens or usage.output_tokens or state.delivery.tokens)
        if error.kind == "overloaded_error" and is_unused:
            origin = Origin.NONE
        return Outcome(origin, Ending.FAILED, error.kind)
    if state.is_client_gone and not is_whole:
        return Outcome(origin, Ending.CLIENT_GONE, "gone")
    label = _LABELS.get(exchange.finish, "finished")
    if not is_whole:
        return Outcome(origin, Ending.FAILED, label)
    return Outcome(origin, Ending.CUT if exchange.cut_by else Ending.COMPLETE, label)


def _sent_tokens(state: FlowState) -> int:
    """Return how many tokens the client has. It has a whole answer at the end only."""
    return state.delivery.tokens if state.exchange.text_request.stream else 0


def _settle_limits(state: FlowState, outcome: Outcome) -> None:
    exchange, services, reservation = state.exchange, state.services, state.admission.reservation
    usage = exchange.usage
    is_measured = outcome.has_all_choices and usage.output_tokens > 0
    if reservation is not None:
        is_complete = outcome.ending is Ending.COMPLETE
        if outcome.origin is Origin.NONE:
            reservation.release_soon()
        elif outcome.origin is not Origin.GENERATED:  # only what was delivered while this exchange paid counts
            reservation.settle_soon(0, reservation.out, whole=False)
        elif isinstance(state.generation, CompositeAnswerer):  # first tries count in the ledger alone
            reservation.settle_soon(exchange.prompt_tokens, state.delivery.tokens, whole=is_complete)
        else:
            prompt_tokens = usage.prompt_tokens or exchange.prompt_tokens
            reservation.settle_soon(prompt_tokens, usage.output_tokens, whole=is_complete)
    elif services.ledger is not None and is_measured and outcome.origin is Origin.GENERATED:
        micros = round((exchange.last_at - exchange.arrival) * 1e6)
        services.limiter.estimates.learn(exchange.caller.tenant, exchange.surface, usage.output_tokens, micros)
    has_ladder = services.ladder.has_steps(exchange.surface)
    if has_ladder and outcome.has_all_choices and not exchange.answered_by and exchange.first_at:
        seconds = exchange.last_at - exchange.first_at
        services.pressure.record_answer(
            exchange.served.variant, exchange.surface, tokens=usage.output_tokens, seconds=seconds
        )


def _charge_verifications(state: FlowState, ended: str) -> None:
    """Charge what verified a cached answer, however the request ended: the work was the caller's."""
    if (ledger := state.services.ledger) is not None:
        for place, charge in enumerate(state.lookups.charges):
            _charge_part(state, ledger, f"{state.exchange.id}.verify{place}", charge, ended)


def _settle_ledger(state: FlowState, outcome: Outcome, facts: AnswerFacts | None) -> None:
    exchange, ledger = state.exchange, state.services.ledger
    assert ledger is not None
    id, ended = exchange.id, outcome.label
    match outcome.origin:
        case Origin.NONE:
            ledger.release(id)
        case Origin.EXTRACTED:
            ledger.charge(id, TokenUsage(), ended=ended, hit="extract")
        case Origin.GENERATED:
            _charge_generation(state, ledger, ended)
        case _ if exchange.cut_by:  # it was shared while it was cut
            ledger.charge(id, exchange.usage, ended=ended, hit="shared")
        case Origin.HANDED_OVER:
            ledger.charge(id, TokenUsage(), ended=ended)
        case Origin.CACHED | Origin.SHARED:
            cache = "exact" if exchange.answered_by == "stale" else exchange.answered_by
            ledger.charge(id, TokenUsage() if facts is None else facts.saved, ended=ended, hit=cache)


def _cost(state: FlowState, outcome: Outcome, facts: AnswerFacts | None) -> int | None:
    """Return what the request costs, in micros, as the ledger charges it; None without prices."""
    exchange, prices = state.exchange, state.services.prices
    if prices.is_empty:
        return None
    price = prices.of(exchange.served.name)
    match outcome.origin:
        case Origin.GENERATED:
            micros = sum(prices.of(each.variant).micros(*_priced(each.usage)) for each in _variant_charges(state))
        case Origin.CACHED | Origin.SHARED:
            usage = exchange.usage if exchange.cut_by else TokenUsage() if facts is None else facts.saved
            micros = price.hit_micros(*_priced(usage))
        case Origin.HANDED_OVER:  # another request pays for the generation
            micros = price.hit_micros(*_priced(exchange.usage)) if exchange.cut_by else 0
        case _:
            micros = 0
    beside = (*state.lookups.charges, *state.shaping.charges)
    return micros + sum(prices.of(each.variant).micros(*_priced(each.usage)) for each in beside)


def _priced(usage: TokenUsage) -> tuple[int, int, int, int]:
    machine_us = microseconds(usage.prefill_s + usage.decode_s)
    return usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, machine_us


def _variant_charges(state: FlowState) -> list[VariantCharge]:
    """Return what every variant computed. The answer comes last."""
    exchange, generation = state.exchange, state.generation
    answer = VariantCharge(exchange.served.name, exchange.usage, "answer")
    charges = [answer]
    if isinstance(generation, CompositeAnswerer):
        charges = [charge for charge in generation.charges if charge.charged]
        if exchange.cut_by:  # charge what the client has of the answer, not all that was made of it
            tries = state.first_tries
            delivered = _subtract(exchange.usage, sum_usage(charge.usage for charge in tries))
            charges = [*tries, VariantCharge(exchange.served.name, delivered, "answer")]
        charges = charges or [VariantCharge(exchange.served.name, TokenUsage(), "answer")]
    return charges


def _charge_generation(state: FlowState, ledger: RequestLedger, ended: str) -> None:
    """Charge every variant that computed something. A cascade's first try is charged under an id of its own."""
    exchange = state.exchange
    instead_of = state.requested if exchange.served.name != state.requested else ""
    *tries, last = _variant_charges(state)
    for place, charge in enumerate(tries):
        _charge_part(state, ledger, f"{exchange.id}.{place}", charge, ended)
    ledger.charge(
        exchange.id,
        last.usage,
        ended=ended,
        variant=last.variant,
        instead_of=instead_of if last.variant != instead_of else "",
    )


def _charge_part(state: FlowState, ledger: RequestLedger, id: str, charge: VariantCharge, ended: str) -> None:
    """Charge work beside the answer's own, under an id of its own."""
    entry = ledger_entry(state, id=id, variant=charge.variant, counted=False)
    ledger.charge(id, charge.usage, ended=ended, variant=charge.variant, entry=entry)


def _store_semantic(state: FlowState, outcome: Outcome) -> None:
    lookup, exchange = state.lookups.semantic, state.exchange
    if lookup is None or lookup.outcome == "hit" or outcome.ending is not Ending.COMPLETE or exchange.answered_by:
        return
    if not is_by_plan(exchange, state.plan):
        return
    choice = Choice(0)
    for delta in state.delivery.first_choice:
        choice.add(delta)
    if (answer := storable_answer([choice])) is not None:
        semantic = state.services.semantic
        assert semantic is not None
        embedder = semantic.embedder_for(exchange.caller, "batch")
        state.services.background.run(semantic.settle(lookup, answer, embedder))


def _count(state: FlowState, outcome: Outcome) -> None:
    exchange, usage = state.exchange, state.exchange.usage
    model, tenant = exchange.served.name, metrics.tenant_label(exchange.caller.tenant)
    metrics.of(metrics.answers, model, tenant, outcome.label).inc()
    if exchange.answered_by:
        metrics.of(metrics.answered_by, model, exchange.answered_by).inc()
    elif usage.prompt_tokens:
        metrics.of(metrics.tokens, model, tenant, "prompt").inc(usage.prompt_tokens)
        metrics.of(metrics.tokens, model, tenant, "cached").inc(usage.cached_tokens)
        metrics.of(metrics.tokens, model, tenant, "output").inc(usage.output_tokens)
    if exchange.first_at:
        metrics.of(metrics.ttft, model).observe(exchange.first_at - exchange.arrival)
        metrics.of(metrics.duration, model).observe(exchange.last_at - exchange.arrival)
        metrics.of(metrics.stages, "shape").observe(max(0.0, exchange.shaped_at - exchange.arrival))
        metrics.of(metrics.stages, "queue").observe(usage.queue_s)
        metrics.of(metrics.stages, "prefill").observe(usage.prefill_s)
        metrics.of(metrics.stages, "decode").observe(usage.decode_s)
    for step in state.degradation.record.steps:
        metrics.of(metrics.degraded, exchange.surface, step).inc()


def _subtract(usage: TokenUsage, other: TokenUsage) -> TokenUsage:
    """Return the tokens of `usage` beyond those of `other`."""
    return TokenUsage(
        prompt_tokens=max(0, usage.prompt_tokens - other.prompt_tokens),
        output_tokens=max(0, usage.output_tokens - other.output_tokens),
        cached_tokens=max(0, usage.cached_tokens - other.cached_tokens),
    )
