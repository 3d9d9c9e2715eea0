"""Finished requests of front processes, which the main process keeps and counts with its own."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.gateway.observation.request_observer import RequestObserver
from headrace.observe.latency.latency_book import RequestSample
from headrace.observe.traces.request_record import RequestRecord
from headrace.observe.traces.timeline import GenerationTimes, Part, Timeline


class FinishedRequest(msgspec.Struct, array_like=True):
    """A record and its sample. Times are on the machine's monotonic clock, which its processes share."""

    names: tuple[str, str, str, str, str, int, str]
    fields: dict[str, Any]
    facts: dict[str, Any]
    times: GenerationTimes | None
    began: float
    ended: float
    entered: list[tuple[str, float]]
    parts: list[Part]
    traceparent: str | None
    ended_at: float
    sample: RequestSample | None


def finished(record: RequestRecord, sample: RequestSample | None) -> FinishedRequest:
    timeline = record.timeline
    return FinishedRequest(
        (
            record.id,
            record.request_id,
            record.tenant,
            record.method,
            record.endpoint,
            record.status,
            record.error,
        ),
        record.fields,
        record.facts,
        record.times,
        timeline.began,
        timeline.ended,
        timeline.entered,
        timeline.parts,
        timeline.traceparent,
        record.ended_at,
        sample,
    )


def adopt(observer: RequestObserver, request: FinishedRequest) -> None:
    timeline = Timeline(request.began, request.traceparent)
    timeline.ended, timeline.entered, timeline.parts = request.ended, request.entered, request.parts
    id, request_id, tenant, method, endpoint, status, error = request.names
    record = RequestRecord(
        id=id,
        request_id=request_id,
        tenant=tenant,
        method=method,
        endpoint=endpoint,
        status=status,
        error=error,
        fields=request.fields,
        facts=request.facts,
        times=request.times,
        timeline=timeline,
        ended_at=request.ended_at,
    )
    observer.adopt(record, request.sample)
