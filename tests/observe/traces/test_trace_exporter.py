"""Traces reach a collector, add up to the requests that they are of, and are bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config import ModelConfig, ObserveConfig, TracesConfig
from headrace.config.routing_section import ChainConfig, RoutingConfig, StepConfig
from headrace.observe.traces.request_record import RequestRecord
from headrace.observe.traces.timeline import Timeline
from headrace.observe.traces.trace_exporter import TraceExporter
from headrace.server.http.connection import Connection
from headrace.server.server import Server
from tests.support.clock import Clock
from tests.support.fake_upstream import ANSWER, config, faking, refuses, streams
from tests.support.programs.otlp_receiver import Receiver, receiving
from tests.support.running_server import (
    CHAT,
    FakeEngine,
    Running,
    asynchronous,
    config_of,
    living,
    serving,
    until,
    words,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def traced(folder: Path, receiver: Receiver, **traces: Any) -> Any:
    options = {"url": receiver.url, "sample": 1.0, "slowest_per_minute": 0} | traces
    return msgspec.structs.replace(config_of(folder), observe=ObserveConfig(traces=TracesConfig(**options)))


def check_tiling(receiver: Receiver) -> None:
    """The stages follow each other without a gap, from the beginning of the request's span to its end."""
    for root, stages in receiver.traces():
        at = root.start
        for stage in stages:
            assert abs(stage.start - at) <= 1000  # nanoseconds
            at = stage.end
        assert abs(at - root.end) <= 1000
        assert abs(sum(stage.length for stage in stages) - root.length) <= max(root.length // 100, 1000)


class EdgeTimes:
    """When the server's edge got the first byte of each request, and when it had written the last one of the answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[list[float]] = []  # seconds
        received, written = Connection.data_received, Connection.write

        def data_received(connection: Connection, data: bytes) -> None:
            self.spans.append([time.monotonic(), 0.0])
            received(connection, data)

        def write(connection: Connection, data: bytes) -> None:
            written(connection, data)
            self.spans[-1][1] = time.monotonic()

        monkeypatch.setattr(Connection, "data_received", data_received)
        monkeypatch.setattr(Connection, "write", write)

    @property
    def seconds(self) -> list[float]:
        return [ended - began for began, ended in self.spans]


@asynchronous
async def test_the_spans_of_whole_and_streamed_answers_add_up_to_the_time_at_the_edge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving() as receiver:
        waits: list[float] = []
        async with serving(config=traced(tmp_path, receiver)) as server:
            server.engine.answer = words("a ", "b ", "c")
            edge = EdgeTimes(monkeypatch)  # before the connection, which keeps its methods
            client = await server.client()
            for stream in (False, True) * 5:
                began = time.monotonic()
                assert (await client.chat(stream=stream)).status == 200
                waits.append(time.monotonic() - began)
        check_tiling(receiver)
        spans = [root.length / 1e9 for root, _ in receiver.traces()]
        assert len(spans) == len(edge.spans) == 10
        for first in (0, 1):  # whole answers, and streamed ones
            off = [abs(span - wall) for span, wall in zip(spans, edge.seconds, strict=True)][first::2]
            assert min(off) <= max(0.01 * min(edge.seconds[first::2]), 0.0005)
        # A client also waits for the kernel, twice, and for its own turn in the event loop that it shares with the
        # server here: never less than the spans, and how much more depends on the machine, not on the server.
        assert all(wait >= span - 1e-6 for wait, span in zip(waits, spans, strict=True))


@asynchronous
async def test_a_span_has_opentelemetrys_names_and_no_text_of_the_request(tmp_path: Path) -> None:
    async with receiving() as receiver:
        async with serving(config=traced(tmp_path, receiver)) as server:
            server.engine.answer = words("secret ", "answer")
            messages = [{"role": "user", "content": "confidential"}]
            header = f"00-{TRACE}-{SPAN}-00"
            answer = await server.ask("POST", "/v1/chat/completions", {"messages": messages}, traceparent=header)
        (root, stages), *rest = receiver.traces()
        assert not rest
        assert (root.trace, root.parent, root.name) == (TRACE, SPAN, "chat mini")
        assert {span.trace for span in receiver.spans} == {TRACE}
        expected = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "headrace",
            "gen_ai.response.model": "mini",
            "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.usage.output_tokens": 2,
            "gen_ai.usage.input_tokens": answer.json["usage"]["prompt_tokens"],
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "headrace.request_id": answer.headers["x-request-id"],
            "headrace.surface": "chat",
        }
        assert {name: root.known[name] for name in expected} == expected
        shape = next(stage for stage in stages if stage.name == "shape")
        assert [part.name for part in receiver.below(shape)] == ["template", "tokenise"]
        assert not any(word in body for body in receiver.bodies for word in (b"confidential", b"secret"))


@asynchronous
async def test_prompts_of_the_named_tenants_are_exported(tmp_path: Path) -> None:
    async with receiving() as receiver:
        async with serving(config=traced(tmp_path, receiver, prompts_of=("-",))) as server:
            server.engine.answer = words("a ", "b")
            await server.ask("POST", "/v1/chat/completions", CHAT)
        ((root, _),) = receiver.traces()
        prompt = [{"role": "user", "parts": [{"type": "text", "content": "Hello"}]}]
        assert msgspec.json.decode(root.known["gen_ai.input.messages"]) == prompt


@asynchronous
async def test_attempts_of_upstreams_and_fallbacks_are_spans_that_the_upstream_continues(tmp_path: Path) -> None:
    async with receiving() as receiver, faking(refuses(500)) as bad, faking(streams(*ANSWER)) as good:
        models = {"mini": ModelConfig(upstream=config(bad), upstreams={"spare": config(good)})}
        chain = ChainConfig(steps=(StepConfig(variant="mini"), StepConfig(variant="mini@spare")))
        settings = msgspec.structs.replace(
            traced(tmp_path, receiver), models=models, routing=RoutingConfig(chains={"safe": chain})
        )
        made = Server(settings)
        engine = FakeEngine()

        def running(task: asyncio.Task[None]) -> Running:
            return Running(made, engine, made.fleet, task)  # type: ignore[arg-type]

        async with living(made, running) as server:
            answer = await server.ask("POST", "/v1/chat/completions", CHAT)
            assert answer.status == 200
        check_tiling(receiver)
        attempts = [span for span in receiver.spans if span.name == "attempt"]
        assert [(span.known["headrace.upstream"], span.failed) for span in attempts][-1] == ("mini@spare", False)
        assert all(span.failed for span in attempts[:-1])
        assert attempts[:-1]
        heard = good.heard[-1].headers["traceparent"]
        assert heard == f"00-{attempts[-1].trace}-{attempts[-1].id}-01"
        variants = [span for span in receiver.spans if span.name == "variant"]
        assert [(span.known["headrace.variant"], span.failed) for span in variants] == [
            ("mini", True),
            ("mini@spare", False),
        ]


# What is chosen


class Collected:
    """A collector without a network."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.sent: list[int] = []

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> int:
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            spans = msgspec.json.decode(body)["resourceSpans"][0]["scopeSpans"][0]["spans"]
            self.sent += [int(span["name"].split("/")[-1]) for span in spans if span["kind"] == 2]
        return status


def record(number: int, seconds: float = 1.0, error: str = "", traceparent: str | None = None) -> RequestRecord:
    timeline = Timeline(0.0, traceparent)
    timeline.ended = seconds
    return RequestRecord(
        id="",
        request_id=f"req_{number}",
        tenant="",
        method="POST",
        endpoint=f"/{number}",
        status=500 if error else 200,
        error=error,
        timeline=timeline,
    )


def exporter(collected: Collected, clock: Clock, **options: Any) -> TraceExporter:
    config = TracesConfig(**({"url": "http://x", "sample": 0.0} | options))
    return TraceExporter(config, version="1", post=collected.post, clock=clock)


@asynchronous
async def test_failures_and_the_slowest_of_a_minute_are_kept() -> None:
    collected, clock = Collected(), Clock()
    made = exporter(collected, clock, slowest_per_minute=2)
    for number in range(100):
        made.take(record(number, seconds=float((number * 37) % 100), error="boom" if number == 3 else ""))
    clock.now += 61.0
    made.take(record(200, seconds=0.5))
    await made.close()
    slow = sorted(range(100), key=lambda number: (number * 37) % 100)[-2:]
    assert sorted(collected.sent) == sorted([3, *slow, 200])


@asynchronous
async def test_a_share_of_the_traces_and_those_that_clients_ask_for_are_kept() -> None:
    collected, clock = Collected(), Clock()
    made = exporter(collected, clock, sample=0.25, slowest_per_minute=0, buffer=5000)
    for number in range(2000):
        made.take(record(number, traceparent=f"00-{TRACE}-{SPAN}-01" if number == 0 else None))
    await made.close()
    assert 0 in collected.sent
    assert 350 < len(collected.sent) < 650


@asynchronous
async def test_a_collector_that_is_down_costs_the_oldest_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.observe.traces.trace_exporter._EVERY_S", 0.01)
    collected, clock = Collected(), Clock()
    collected.statuses = [503] * 3
    made = exporter(collected, clock, sample=1.0, buffer=10)
    for number in range(25):
        made.take(record(number))
    running = asyncio.create_task(made.run())
    await until(lambda: bool(collected.sent))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert collected.sent == list(range(15, 25))
