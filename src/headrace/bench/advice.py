"""Advice for a running server: what to change, why, what it would gain, and the command or the keys that do it.

Pure: takes what the admin API answered. Gains are estimates from the server's own figures, and say how they are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

LEAST_REQUESTS: Final = 50  # below, figures are too few to advise
_IMBALANCE: Final = 0.5  # share of the traffic from which a tenant is said to crowd out others
_BACKGROUND: Final = ("batch",)

Row = Mapping[str, Any]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    subject: str  # context, speculation, ...
    finding: str
    change: str
    gain: str
    command: str


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of the admin API."""

    live: Row  # GET /admin/v1/live
    by_model: Sequence[Row]  # GET /admin/v1/latency, window total
    by_surface: Sequence[Row]
    by_tenant: Sequence[Row]
    by_length: Sequence[Row]


def advise(seen: Observed) -> list[Advice]:
    """Return what to change, what gains most first; empty if nothing stands out."""
    requests = sum(row.get("requests", 0) for row in seen.by_model)
    if requests < LEAST_REQUESTS:
        return []
    found = [
        *_queueing(seen),
        *_memory(seen),
        *_context(seen),
        *_speculation(seen),
        *_tenants(seen, requests),
        *_batch(seen),
        *_caches(seen, requests),
        *_host(seen),
    ]
    return found


def _ms(row: Row, name: str) -> float:
    """Return the p95 of a latency in milliseconds; 0 if the row does not have it."""
    percentiles: dict[str, dict[str, float | None]] = row.get("percentiles") or {}
    return float(percentiles.get(name, {}).get("p95_ms") or 0.0)


def _engines(seen: Observed) -> list[Row]:
    return [engine for engine in seen.live.get("engines", ()) if engine.get("answers")]


def _queueing(seen: Observed) -> Iterator[Advice]:
    for row in seen.by_model:
        queue, ttft = _ms(row, "queue"), _ms(row, "ttft")
        if row.get("requests", 0) >= LEAST_REQUESTS and ttft > 0.0 and queue > 0.5 * ttft and queue > 100.0:
            model = row["model"]
            yield Advice(
                subject="replicas",
                finding=f"{model}: requests wait {queue:,.0f} ms at the p95, of a TTFT of {ttft:,.0f} ms",
                change="add a replica on another machine or more cores, or let the surface degrade under pressure",
                gain=f"TTFT p95 down to about {ttft - queue / 2:,.0f} ms with twice the capacity: half of the wait",
                command=f"headrace plan {model} --traffic TRACE --slo ttft_p95=... --device here",
            )


def _memory(seen: Observed) -> Iterator[Advice]:
    for engine in _engines(seen):
        preempted, admitted = engine.get("preempted") or 0, engine.get("admitted") or 0
        if admitted >= LEAST_REQUESTS and preempted > 0.02 * admitted:
            yield Advice(
                subject="KV memory",
                finding=f"{engine['model']}: {preempted:,} preemptions for {admitted:,} requests; each computes its "
                "sequence again",
                change="raise kv_tokens, or keep the KV cache in int8 after a gate on your prompts",
                gain=f"about {preempted / admitted:.0%} of the requests no longer computed twice; int8 holds 1.9 times "
                "the tokens",
                command=f"headrace evaluate {engine['model']} --prompts FILE --kv int8 --against-kv bf16",
            )


def _context(seen: Observed) -> Iterator[Advice]:
    """Advise a context limit where few requests are long and take much of the time."""
    rows = [row for row in seen.by_length if row.get("requests")]
    total = sum(row["requests"] for row in rows)
    tokens = sum(row.get("prompt_tokens", 0) for row in rows)
    longest = [row for row in rows if str(row.get("length", "")).startswith(">")]
    for row in longest:
        few, share = row["requests"] / total, row.get("prompt_tokens", 0) / max(tokens, 1)
        if few <= 0.05 and share >= 0.25:
            bound = str(row["length"]).lstrip(">")
            yield Advice(
                subject="context",
                finding=f"{few:.1%} of the requests have prompts of more than {bound} tokens, and {share:.0%} of all "
                "prompt tokens",
                change="limit the context of those who do not need it, or drop old turns (overflow)",
                gain=f"up to {share:.0%} of the prefill time for the other {1 - few:.1%} of the requests",
                command=f"headrace admin change-tenant TENANT --set 'limits={{\"context\": {bound}}}'",
            )


def _speculation(seen: Observed) -> Iterator[Advice]:
    for row in seen.by_model:
        acceptance = row.get("draft_acceptance")
        if row.get("requests", 0) < LEAST_REQUESTS:
            continue
        if acceptance is not None and acceptance < 0.3:
            yield Advice(
                subject="speculation",
                finding=f"{row['model']}: {acceptance:.0%} of the draft tokens are accepted",
                change="try another drafter or shorter drafts",
                gain=f"up to {1 - acceptance:.0%} of the draft rows saved; headrace tune measures it on your prompts",
                command=f"headrace tune {row['model']} --level speculation --prompts FILE",
            )
        elif acceptance is not None and acceptance > 0.8:
            rows = 1.0 / (1.0 - acceptance)
            yield Advice(
                subject="speculation",
                finding=f"{row['model']}: {acceptance:.0%} of the draft tokens are accepted",
                change="allow longer drafts: raise most_drafts, or try a draft model",
                gain=f"up to {rows:.1f} tokens per step where acceptance stays as it is",
                command=f"headrace tune {row['model']} --level speculation --prompts FILE",
            )


def _tenants(seen: Observed, requests: int) -> Iterator[Advice]:
    """Advise a limit for a tenant with most of the machine's time, if others meet their objectives less often."""
    rows = [row for row in seen.by_tenant if row.get("requests")]
    seconds = {row["tenant"]: _machine_seconds(row) for row in rows}
    total = sum(seconds.values())
    if len(rows) < 2 or not total:
        return
    busiest = max(rows, key=lambda row: seconds[row["tenant"]])
    share = seconds[busiest["tenant"]] / total
    others = [row for row in rows if row is not busiest]
    count = sum(row["requests"] for row in others)
    good = sum(row.get("good", 0) for row in others) / max(count, 1)
    if share > _IMBALANCE and good < 0.95 and count >= 0.1 * requests:
        yield Advice(
            subject="tenants",
            finding=f"{busiest['tenant']} takes {share:.0%} of the engine's time; {good:.0%} of the other tenants' "
            "requests meet their objectives",
            change=f"cap {busiest['tenant']}, or give the others more weight",
            gain=f"up to {share:.0%} of the engine's time for the others while it is busy",
            command=f"headrace admin change-tenant {busiest['tenant']} --set 'limits={{\"concurrent\": 4}}'",
        )


def _batch(seen: Observed) -> Iterator[Advice]:
    """Advise the batch surface for work that nobody waits for: many requests at once, far beyond their objective."""
    background = sum(row.get("requests", 0) for row in seen.by_surface if row.get("surface") in _BACKGROUND)
    for row in seen.by_surface:
        count, good = row.get("requests", 0), row.get("good", 0)
        if row.get("surface") in _BACKGROUND or count < LEAST_REQUESTS or background > 0.05 * count:
            continue
        if good < 0.8 * count and _ms(row, "queue") > 2000.0:
            yield Advice(
                subject="batch surface",
                finding=f"{row['surface']}: {good / count:.0%} of the requests meet their objectives, and they wait "
                f"{_ms(row, 'queue') / 1e3:,.1f} s at the p95; nothing runs on the surface batch",
                change="send work that nobody waits for with surface: batch, or through /v1/batches",
                gain="foreground requests no longer wait for it: background work takes only what they leave",
                command="headrace simulate --ask overload --surfaces chat=0.7,batch=0.3",
            )


def _caches(seen: Observed, requests: int) -> Iterator[Advice]:
    for cache in seen.live.get("caches", ()):
        ratio = cache.get("hit_ratio")
        recent = cache.get("recent_hit_ratio")
        if cache.get("cache") == "prefix":
            prompt = cache.get("prompt_tokens") or 0
            if ratio is not None and ratio < 0.05 and prompt > 100 * requests:
                yield Advice(
                    subject="prefix cache",
                    finding=f"{ratio:.0%} of the prompt tokens come from the prefix cache",
                    change="put what requests share first and what differs last, or pin system prompts",
                    gain="a cached prompt takes about 0.03 of the time of a cold one",
                    command="headrace admin create-pin --help",
                )
        elif ratio is not None and recent is not None and requests >= 10 * LEAST_REQUESTS:
            entries = cache.get("entries") or 0
            if recent > 1.5 * ratio + 0.02 and entries:
                saved = (cache.get("saved_s") or 0.0) / max(cache.get("hits") or 1, 1)
                yield Advice(
                    subject="cache TTL",
                    finding=f"{cache['cache']}: {recent:.0%} of recent requests hit, {ratio:.0%} of all",
                    change="raise the time to live: entries are asked for again soon after they are made",
                    gain=f"{saved:.2f} s of the engine's time for each further hit",
                    command="headrace config show",
                )
            elif ratio < 0.005 and entries > 100:
                yield Advice(
                    subject="cache TTL",
                    finding=f"{cache['cache']}: {entries:,} entries, and {ratio:.2%} of the requests hit",
                    change="switch it off, or let only tenants use it whose requests repeat",
                    gain=f"{(cache.get('bytes') or 0) / 1e6:,.1f} MB",
                    command="headrace config show",
                )


def _host(seen: Observed) -> Iterator[Advice]:
    for engine in _engines(seen):
        device, between = engine.get("device_seconds") or 0.0, engine.get("between_seconds") or 0.0
        steps, rows = engine.get("steps") or 0, engine.get("rows") or 0
        if steps > 1000 and between > 0.3 * device:
            yield Advice(
                subject="host",
                finding=f"{engine['model']}: the engine waits {between / (between + device):.0%} of its time for "
                f"Python between two steps, with {rows / steps:.1f} rows in a step",
                change="serve more requests on fewer replicas, so that more rows share a step",
                gain=f"at most {between / (between + device):.0%} of the engine's time",
                command=f"headrace tune {engine['model']} --level batching",
            )


def _machine_seconds(row: Row) -> float:
    return float(row.get("machine_s_per_1000_requests") or 0.0) * row["requests"] / 1000.0
