"""Encodes finished requests as OpenTelemetry spans, in OTLP's JSON form, with the GenAI names of attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from headrace.observe.traces.request_record import RequestRecord
from headrace.observe.traces.timeline import parts_in
from headrace.observe.traces.trace_context import new_span_id
from headrace.observe.traces.waterfall import stage_attributes

_INTERNAL, _SERVER, _CLIENT = 1, 2, 3  # kinds of spans
_ERROR: Final = 2  # status code
_OPERATIONS: Final = {"/v1/completions": "text_completion", "/api/generate": "text_completion"}
# OpenTelemetry's names of what the record knows under its own.
_GEN_AI: Final = {
    "model": "gen_ai.response.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "n": "gen_ai.request.choice.count",
}
_LEFT_OUT: Final = frozenset({"stages_ms", "user"})  # the spans themselves; and who asked, which is a client's text


def encode_traces(records: Iterable[RequestRecord], *, service: str, version: str) -> bytes:
    """Return the body of an ExportTraceServiceRequest."""
    spans = [span for record in records for span in spans_of(record)]
    resource = {"attributes": _attributes({"service.name": service, "service.version": version})}
    scope = {"name": "headrace", "version": version}
    return msgspec.json.encode(
        {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": spans}]}]}
    )


def spans_of(record: RequestRecord) -> list[dict[str, Any]]:
    """Return the request's span, then its stages with their parts. The stages have no gaps."""
    timeline = record.timeline
    context = timeline.context
    base = round((record.ended_at - record.seconds) * 1e9)

    def nanoseconds(at: float) -> str:
        return str(base + round((at - timeline.began) * 1e9))

    def span(
        name: str, id: str, parent: str, kind: int, began: float, ended: float, known: Mapping[str, Any]
    ) -> dict[str, Any]:
        made: dict[str, Any] = {
            "traceId": context.trace_id,
            "spanId": id,
            "name": name,
            "kind": kind,
            "startTimeUnixNano": nanoseconds(began),
            "endTimeUnixNano": nanoseconds(ended),
            "attributes": _attributes(known),
        }
        if parent:
            made["parentSpanId"] = parent
        return made

    operation = _OPERATIONS.get(record.endpoint, "chat")
    model = record.fields.get("model")
    root = span(
        f"{operation} {model}" if model else f"{record.method} {record.endpoint}".strip(),
        context.span_id,
        context.parent_id,
        _SERVER,
        timeline.began,
        timeline.ended,
        _request_attributes(record, operation if model else ""),
    )
    if record.error:
        root["status"] = {"code": _ERROR, "message": record.error} if record.status >= 500 else {}
    spans = [root]
    for stage in record.stages:
        id = new_span_id()
        known = {f"headrace.{name}": value for name, value in stage_attributes(record, stage.name).items()}
        spans.append(span(stage.name, id, context.span_id, _INTERNAL, stage.began, stage.ended, known))
        for part in parts_in(record.parts, stage.began, stage.ended):
            known = {f"headrace.{name}": value for name, value in part.attributes.items() if name != "span_id"}
            kind = _CLIENT if part.name == "attempt" else _INTERNAL
            own = part.attributes.get("span_id") or new_span_id()
            child = span(part.name, own, id, kind, part.began, part.ended, known)
            if error := part.attributes.get("error"):
                child["status"] = {"code": _ERROR, "message": str(error)}
            spans.append(child)
    return spans


def _request_attributes(record: RequestRecord, operation: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": record.method or None,
        "http.route": record.endpoint,
        "http.response.status_code": record.status,
        "error.type": record.error or None,
        "headrace.request_id": record.request_id,
        "headrace.tenant": record.tenant or None,
    }
    if operation:
        found |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "headrace"}
        found["gen_ai.response.id"] = record.id
        found["gen_ai.request.model"] = record.facts.get("requested") or record.fields.get("model")
        if finish := record.fields.get("finish"):
            found["gen_ai.response.finish_reasons"] = [finish]
    for name, value in {**record.fields, **record.facts}.items():
        if name not in _LEFT_OUT and name not in ("finish", "requested"):
            found[_GEN_AI.get(name, f"headrace.{name}")] = value
    if record.prompt is not None:
        found["gen_ai.input.messages"] = record.prompt
    return found


def _attributes(known: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in known.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}  # 64-bit numbers are texts in OTLP's JSON
        case float():
            return {"doubleValue": value}
        case list() | tuple():
            values = cast("Sequence[Any]", value)
            return {"arrayValue": {"values": [_value(each) for each in values]}}
        case str():
            return {"stringValue": value}
        case _:
            return {"stringValue": msgspec.json.encode(value, enc_hook=str).decode()}
