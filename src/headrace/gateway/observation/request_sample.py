"""Turns a finished exchange into the sample that latencies, costs and objectives are counted from."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.gateway.api_errors import ApiError
from headrace.gateway.ledger.prices import PriceBook, microseconds
from headrace.gateway.requests.text_request import TokenUsage
from headrace.gateway.routing.composite_answerer import choice_count
from headrace.gateway.serving.exchange import Exchange
from headrace.observe import metrics
from headrace.observe.latency.answer_lengths import length_key
from headrace.observe.latency.latency_book import RequestSample, Slice, length_bucket
from headrace.observe.traces.timeline import Timeline

_STAGES = ("queue", "prefill", "decode", "post", "hop")


def sample_of(
    exchange: Exchange, stages: Mapping[str, float], error: ApiError | None, prices: PriceBook
) -> RequestSample:
    """`stages`: seconds of each."""
    usage, timeline = exchange.usage, exchange.timeline
    seconds = {"e2e": timeline.ended - timeline.began} if error is None else {}
    if exchange.first_at:
        seconds["ttft"] = exchange.first_at - timeline.began
    if usage.output_tokens > 1 and exchange.last_at > exchange.first_at:
        seconds["tpot"] = (exchange.last_at - exchange.first_at) / (usage.output_tokens - 1)
    for name in _STAGES:
        if name in stages:
            seconds[name] = stages[name]
    for part in timeline.parts:
        if part.name == "tokenise":
            seconds["tokenise"] = seconds.get("tokenise", 0.0) + part.ended - part.began
    sample = RequestSample(
        slice=Slice(
            exchange.served.name,
            exchange.surface or "-",
            metrics.tenant_label(exchange.caller.tenant),
            exchange.endpoint or "-",
            length_bucket(exchange.prompt_tokens),
            exchange.route,
            exchange.text_request.profile,
        ),
        seconds=seconds,
        gaps=exchange.gaps,
        stages=stages,
        failed=error is not None and error.status >= 500,
    )
    _add_usage(sample, exchange, prices)
    if error is None and usage.output_tokens and not exchange.answered_by:
        ending = "gone" if exchange.ended == "gone" else exchange.cut_by or exchange.finish
        sample.ending = length_key(ending or "stop", set_by_client=exchange.set_max_tokens)
        sample.answer_tokens = usage.output_tokens / choice_count(exchange.text_request)
    return sample


def _add_usage(sample: RequestSample, exchange: Exchange, prices: PriceBook) -> None:
    usage, price = exchange.usage, prices.of(exchange.served.name)
    sample.micros = exchange.cost_micros or 0
    if exchange.answered_by:
        saved = exchange.saved or TokenUsage()
        sample.cache, sample.saved_s = exchange.answered_by, saved.prefill_s + saved.decode_s
        if not price.free:
            counts = (saved.prompt_tokens, saved.cached_tokens, saved.output_tokens, microseconds(sample.saved_s))
            sample.saved_micros = price.micros(*counts) - price.hit_micros(*counts)
        return
    sample.prompt_tokens, sample.output_tokens = usage.prompt_tokens, usage.output_tokens
    sample.cached_tokens, sample.drafted, sample.accepted = usage.cached_tokens, usage.drafted, usage.accepted
    sample.machine_s = usage.prefill_s + usage.decode_s


def plain_sample(endpoint: str, tenant: str, timeline: Timeline, error: ApiError | None) -> RequestSample:
    """Return the sample of a request that asked for no text: embeddings, rerank, a rejected body."""
    return RequestSample(
        slice=Slice("-", "-", metrics.tenant_label(tenant), endpoint, "-", "direct"),
        seconds={"e2e": timeline.ended - timeline.began},
        failed=error is not None and error.status >= 500,
    )
