"""Replay keeps the recorded times, and its answers stand beside the originals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.lab.answering.model_server import AnswererSpec, parse_spec
from headrace.lab.cases.case import Case
from headrace.lab.comparison.answer import Answer
from headrace.lab.recording.recorded_request import RecordedRequest, read_trace, write_trace
from headrace.lab.replay.replay import ReplayOptions, closed_loop, open_loop, replay
from tests.support.caching_server import caching
from tests.support.running_server import asynchronous, words


def case(at: float) -> Case:
    return Case(id=f"at {at}", body={"messages": []}, at_s=at)


def record(arrived: float, text: str, answer: str, **fields: Any) -> RecordedRequest:
    body = {"model": "mini", "messages": [{"role": "user", "content": text}], "temperature": 0.0}
    return RecordedRequest(id=text, arrived=arrived, body=body, answers=(Answer(text=answer, e2el_s=0.5),), **fields)


@asynchronous
async def test_an_open_loop_sends_each_request_at_its_time_whatever_the_server_does() -> None:
    now = 0.0
    sent: list[tuple[str, float]] = []
    never = asyncio.Event()

    async def sleep(seconds: float) -> None:
        nonlocal now
        await asyncio.sleep(0)  # what was sent begins
        now += seconds

    async def answer(case: Case) -> Answer:
        sent.append((case.id, now))
        if len(sent) == 4:
            never.set()
        await never.wait()  # none is answered before the last one is sent
        return Answer(text=case.id)

    cases = [case(each) for each in (0.0, 0.1, 0.1, 5.0)]
    answers, late = await open_loop(answer, cases, speed=2.0, clock=lambda: now, sleep=sleep)
    assert [answer.text for answer in answers] == [each.id for each in cases]
    assert [at for _, at in sent] == pytest.approx([0.0, 0.05, 0.05, 2.5])
    assert now == pytest.approx(2.5)
    assert late == pytest.approx(0.0)


@asynchronous
async def test_a_closed_loop_keeps_its_number_of_requests_under_way() -> None:
    under_way = most = 0

    async def answer(case: Case) -> Answer:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return Answer(text=case.id)

    cases = [case(float(each)) for each in range(10)]
    answers = await closed_loop(answer, cases, 3)
    assert most == 3
    assert [answer.text for answer in answers] == [each.id for each in cases]
    with pytest.raises(RequestError):
        await closed_loop(answer, cases, 0)


@asynchronous
async def test_answers_stand_beside_the_originals(tmp_path: Path) -> None:
    async with caching(tmp_path, keys=()) as running:
        running.engine.answer = words("Hello ", "you")
        records = [record(1000.0, "first", "Hello you"), record(1000.1, "second", "Goodbye", surface="agent")]
        target = AnswererSpec(name="server", url=running.server.url)
        found, summary = await replay(records, target, ReplayOptions(speed=100.0))
        assert [each.replayed.text for each in found if each.replayed] == ["Hello you"] * 2
        assert [each.answers[0].text for each in found] == ["Hello you", "Goodbye"]
        assert (summary.requests, summary.failed, summary.exact) == (2, 0, 1)
        assert summary.ttft_p50_s is not None
        assert summary.original_e2el_p50_s == 0.5
        assert [stream.request.surface for stream in running.engine.streams] == ["chat", "agent"]
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"".join(write_trace(found)))
    assert read_trace(path) == found


@asynchronous
async def test_failures_are_counted(tmp_path: Path) -> None:
    async with caching(tmp_path, keys=()) as running:
        running.engine.answer = words("ok")
        broken = record(1000.0, "first", "Hello", surface="nowhere")
        found, summary = await replay([broken], AnswererSpec(name="x", url=running.server.url, model="mini"))
        assert summary.failed == 1
        assert summary.similarity is None
        assert found[0].replayed is not None
        assert found[0].replayed.error.startswith("http 400")


def test_specs_name_a_server_or_a_model_with_a_precision() -> None:
    server = parse_spec("http://localhost:1/v1#m", parameter="x")
    assert (server.url, server.model, server.is_local) == ("http://localhost:1/v1", "m", False)
    local = parse_spec("mini@int8-g32", parameter="x", options={"kv": "int8"})
    assert local.variant is not None
    assert (local.variant.weights, local.variant.kv) == ("int8-g32", "int8")
    with pytest.raises(RequestError, match="Unknown model"):
        parse_spec("no-such-model", parameter="x")
    with pytest.raises(RequestError, match="Invalid server URL"):
        parse_spec("http://", parameter="x")


def test_a_file_that_is_no_recording_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "hi"}\n')
    with pytest.raises(RequestError, match=r"line 1: .*headrace recordings export"):
        read_trace(path)
