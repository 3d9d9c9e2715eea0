"""A collector that speaks OTLP over HTTP: it parses what it is sent, strictly, and keeps the spans."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

_SPAN_FIELDS = {"traceId", "spanId", "parentSpanId", "name", "kind", "startTimeUnixNano", "endTimeUnixNano"}
_SPAN_FIELDS |= {"attributes", "status"}


@dataclass
class Span:
    trace: str
    id: str
    parent: str
    name: str
    kind: int
    start: int  # nanoseconds
    end: int
    known: dict[str, Any]
    failed: bool

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass
class Receiver:
    url: str = ""
    status: int = 200
    spans: list[Span] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def take(self, call: web.Request) -> web.Response:
        body = await call.read()
        self.headers.append({name.lower(): value for name, value in call.headers.items()})
        assert call.path == "/v1/traces"
        if self.status != 200:
            return web.Response(status=self.status)
        self.bodies.append(body)
        assert call.content_type == "application/json"
        for resource in (await call.json())["resourceSpans"]:
            assert attributes(resource["resource"]["attributes"])["service.name"]
            for scope in resource["scopeSpans"]:
                assert scope["scope"]["name"] == "headrace"
                self.spans += [parse_span(each) for each in scope["spans"]]
        return web.json_response({})

    def traces(self) -> list[tuple[Span, list[Span]]]:
        """Each request's span with its stages, in their order."""
        roots = [span for span in self.spans if span.kind == 2]
        return [(root, sorted(self.below(root), key=lambda each: (each.start, each.end))) for root in roots]

    def below(self, span: Span) -> list[Span]:
        return [each for each in self.spans if each.parent == span.id]


def parse_span(given: dict[str, Any]) -> Span:
    assert set(given) <= _SPAN_FIELDS, given
    assert len(bytes.fromhex(given["traceId"])) == 16
    assert len(bytes.fromhex(given["spanId"])) == 8
    assert isinstance(given["startTimeUnixNano"], str)
    parent = given.get("parentSpanId", "")
    assert not parent or len(bytes.fromhex(parent)) == 8
    start, end = int(given["startTimeUnixNano"]), int(given["endTimeUnixNano"])
    assert start <= end
    failed = given.get("status", {}).get("code") == 2
    known = attributes(given["attributes"])
    return Span(given["traceId"], given["spanId"], parent, given["name"], given["kind"], start, end, known, failed)


def attributes(given: list[dict[str, Any]]) -> dict[str, Any]:
    found = {each["key"]: value(each["value"]) for each in given}
    assert len(found) == len(given)
    return found


def value(given: dict[str, Any]) -> Any:
    ((kind, found),) = given.items()
    match kind:
        case "intValue":
            assert isinstance(found, str)
            return int(found)
        case "stringValue":
            assert isinstance(found, str)
        case "boolValue":
            assert isinstance(found, bool)
        case "doubleValue":
            assert isinstance(found, float)
        case "arrayValue":
            return [value(each) for each in found["values"]]
        case _:
            raise AssertionError(kind)
    return found


@contextlib.asynccontextmanager
async def receiving() -> AsyncGenerator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/{path:.*}", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield receiver
    finally:
        await runner.cleanup()
