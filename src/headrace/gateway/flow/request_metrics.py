"""Counts a request for text that has ended in the server's metrics."""

from __future__ import annotations

from typing import Final

from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.exchange import Exchange
from headrace.observe import metrics

_ENDED: Final = {"stop": "finished", "tool_calls": "finished", "length": "limited", "deadline": "deadline"}


def count_ended(model: str, exchange: Exchange, error: ApiError | None, *, gone: bool) -> None:
    """A request for text has ended."""
    tenant = metrics.tenant_label(exchange.caller.tenant)
    ended = error.kind if error is not None else "gone" if gone else _ENDED.get(exchange.finish, "finished")
    metrics.of(metrics.answers, model, tenant, ended).inc()
    usage = exchange.usage
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
