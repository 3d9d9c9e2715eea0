"""RecordedRequest: one request with its answer, as recordings keep it and replay and the gate read it.

Its line is a line of a trace that `headrace bench --trace` reads, with everything else in the field `recorded`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.bench.simulation.synthetic_traffic import TraceLine, trace_lines
from headrace.config.upstream_section import KINDS, UpstreamConfig
from headrace.errors import RequestError
from headrace.gateway.flow.answer_observer import FinishedAnswer
from headrace.gateway.requests.text_request import Choice
from headrace.gateway.serving.upstream_answers.upstream_request import build_upstream_request
from headrace.lab.comparison.answer import Answer, AnsweredCall
from headrace.lab.recording.redaction import Redactor

MOST_LINE: Final = 64 * 1024 * 1024  # bytes of a line that is read
_LEFT_OUT: Final = frozenset({"stream", "stream_options", "user", "cache_salt", "cache"})  # of the recorded body
_SERVER: Final = UpstreamConfig(url="http://recorded", kind="headrace")
# Neutral settings are left out, so that other servers understand the request too.
_TAKES: Final = msgspec.structs.replace(KINDS["headrace"], defaults=False, max_completion_tokens=False)


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    arrived: float  # seconds since 1970
    endpoint: str = "/v1/chat/completions"
    tenant: str = ""
    surface: str = "chat"
    profile: str = "standard"
    priority: int = 0
    deadline_s: float | None = None
    body: dict[str, Any] = {}  # of an OpenAI request, redacted
    variant: str = ""  # that answered
    route: str = "direct"
    answers: tuple[Answer, ...] = ()  # one for each choice
    ended: str = "finished"
    replayed: Answer | None = None  # a replay's first answer, stored beside the original


def record_of(finished: FinishedAnswer, arrived: float, redactor: Redactor) -> RecordedRequest:
    """Build a record. ApiError for a request that cannot be written as an OpenAI request."""
    exchange = finished.exchange
    asked = msgspec.structs.replace(exchange, text_request=finished.requested)
    built = build_upstream_request(asked, _SERVER, _TAKES, model=finished.requested.model)
    body: dict[str, Any] = msgspec.json.decode(built.body)
    body = {name: value for name, value in body.items() if name not in _LEFT_OUT}
    if finished.requested.sources:
        body["sources"] = msgspec.to_builtins(finished.requested.sources)
    first = exchange.first_at - exchange.arrival if exchange.first_at else None
    last = exchange.last_at - exchange.arrival if exchange.last_at else None
    return RecordedRequest(
        id=exchange.id,
        arrived=arrived,
        endpoint=f"/v1{built.path}",
        tenant=exchange.caller.tenant,
        surface=exchange.surface,
        profile=finished.requested.profile,
        priority=finished.requested.priority,
        deadline_s=finished.requested.deadline_s,
        body=redactor.value(body),
        variant=exchange.served.name,
        route=exchange.route,
        answers=tuple(answer_of(choice, redactor, first, last) for choice in finished.choices),
        ended=finished.ended,
    )


def answer_of(choice: Choice, redactor: Redactor, ttft_s: float | None, e2el_s: float | None) -> Answer:
    """Return a choice as an answer, redacted."""
    return Answer(
        text=redactor.text(choice.content),
        calls=tuple(AnsweredCall(call.name, redactor.text(call.arguments)) for call in choice.calls),
        finish=choice.finish,
        prompt_tokens=choice.usage.prompt_tokens,
        output_tokens=choice.usage.output_tokens,
        ttft_s=None if ttft_s is None else round(ttft_s, 6),
        e2el_s=None if e2el_s is None else round(e2el_s, 6),
    )


def trace_line(record: RecordedRequest, start: float) -> TraceLine:
    """Return the record as a line of a trace that starts at `start`, in seconds since 1970."""
    return TraceLine(
        at=round(max(0.0, record.arrived - start), 6),
        prompt=max(1, max((answer.prompt_tokens for answer in record.answers), default=1)),
        answer=max(1, sum(answer.output_tokens for answer in record.answers)),
        tenant=record.tenant,
        surface=record.surface,
        priority=record.priority,
        deadline=record.deadline_s,
        recorded=msgspec.to_builtins(record),
    )


def write_trace(records: Iterable[RecordedRequest]) -> Iterator[bytes]:
    """Yield the lines of a trace, in the order of arrival."""
    ordered = sorted(records, key=lambda record: record.arrived)
    for record in ordered:
        yield msgspec.json.encode(trace_line(record, ordered[0].arrived)) + b"\n"


class _Line(msgspec.Struct):
    recorded: RecordedRequest


def read_trace(path: Path) -> list[RecordedRequest]:
    """Read an exported recording. RequestError for any other file."""
    decoder = msgspec.json.Decoder(_Line)
    found: list[RecordedRequest] = []
    for number, raw in trace_lines(path, MOST_LINE):
        try:
            found.append(decoder.decode(raw).recorded)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(
                f"{path}, line {number}: {error}. Expected a recording, as 'headrace recordings export' writes it.",
                parameter="trace",
            ) from None
    if not found:
        raise RequestError(f"{path} has no recorded requests.", parameter="trace")
    return found
