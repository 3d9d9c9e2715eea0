"""The waterfall of one request as JSON: its stages and their parts, in milliseconds from its arrival."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from headrace.observe.traces.request_record import RequestRecord
from headrace.observe.traces.timeline import parts_in


def waterfall(record: RequestRecord) -> dict[str, Any]:
    began = record.timeline.began
    spans: list[dict[str, Any]] = []
    for stage in record.stages:
        span: dict[str, Any] = {
            "name": stage.name,
            "start_ms": _ms(stage.began - began),
            "duration_ms": _ms(stage.seconds),
        }
        if facts := stage_attributes(record, stage.name):
            span["attributes"] = facts
        parts = [
            {
                "name": part.name,
                "start_ms": _ms(part.began - began),
                "duration_ms": _ms(part.ended - part.began),
                **({"attributes": dict(part.attributes)} if part.attributes else {}),
            }
            for part in parts_in(record.parts, stage.began, stage.ended)
        ]
        if parts:
            span["parts"] = parts
        spans.append(span)
    return {
        "object": "request",
        "id": record.id or None,
        "request_id": record.request_id,
        "trace_id": record.timeline.context.trace_id,
        "tenant": record.tenant or None,
        "endpoint": record.endpoint,
        "status": record.status,
        "error": record.error or None,
        "started_at": datetime.fromtimestamp(record.ended_at - record.seconds, UTC).isoformat(timespec="milliseconds"),
        "duration_ms": _ms(record.seconds),
        "fields": record.fields,
        "spans": spans,
    }


_OF_STAGE = {
    "prefill": ("prompt_tokens", "cached_tokens", "prefill_steps"),
    "decode": ("output_tokens", "decode_steps", "drafted", "accepted", "reading_ms"),
    "replay": ("by",),
}


def stage_attributes(record: RequestRecord, stage: str) -> dict[str, Any]:
    """Return what is known about a stage's work: steps, tokens, drafts."""
    known = {**record.fields, **record.facts}
    return {name: known[name] for name in _OF_STAGE.get(stage, ()) if known.get(name) is not None}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
