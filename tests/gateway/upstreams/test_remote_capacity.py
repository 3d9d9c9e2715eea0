"""What an upstream learns from another Headrace server's `GET /v1/capacity`, and what it makes of bad answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.gateway.upstreams.remote_capacity import parse_capacity
from headrace.observe import metrics
from tests.support.clock import Clock
from tests.support.fake_upstream import faking, hangs, refuses, says, soon, upstream_of
from tests.support.running_server import asynchronous, count

SURFACES = frozenset(("chat", "voice"))
MODEL = {
    "model": "theirs",
    "served_by": "engine",
    "available": True,
    "ttft_ms": {"chat": 200.0, "voice": 100.0, "made-up": 1.0},
    "prompt_tokens_per_s": 1000.0,
    "free_output_tokens_per_s": 50.0,
    "free_kv_tokens": 960,
    "running": 2,
    "waiting": 1,
}


def said(status: str = "ready", *models: Any) -> bytes:
    return json.dumps({"object": "capacity", "status": status, "free_requests": 9, "data": models or [MODEL]}).encode()


def test_the_model_of_the_upstream_is_found_in_the_answer() -> None:
    found = parse_capacity(said("ready", MODEL | {"model": "other"}, MODEL), "theirs", SURFACES, 5.0)
    assert found is not None
    assert found.ttft_s == {"chat": 0.2, "voice": 0.1}
    assert (found.at, found.prompt_tokens_per_s, found.free_kv_tokens, found.sheds) == (5.0, 1000.0, 960, False)
    unnamed = parse_capacity(said("draining"), "another", SURFACES, 5.0)
    assert unnamed is not None
    assert (unnamed.ttft_s, unnamed.sheds) == ({}, True)
    down = parse_capacity(said("ready", MODEL | {"available": False}), "theirs", SURFACES, 5.0)
    assert down is not None
    assert down.sheds


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b'{"status": 3, "data": []}',
        b'{"status": "ready"}',
        said("ready", MODEL | {"ttft_ms": {"chat": -1.0}}),
        said("ready", MODEL | {"ttft_ms": {"chat": "soon"}}),
        said("ready", MODEL | {"ttft_ms": {"chat": 1e300}}),
        said("ready", MODEL | {"prompt_tokens_per_s": -5}),
        said().replace(b"200.0", b"NaN"),
        said()[:-1] + b"\xff",
    ],
)
def test_other_answers_say_nothing(body: bytes) -> None:
    assert parse_capacity(body, "theirs", SURFACES, 0.0) is None


@asynchronous
async def test_a_server_that_sheds_gets_no_new_work_until_it_is_ready_or_silent() -> None:
    clock = Clock()
    answers = [says(said(status), kind="application/json") for status in ("ready", "overloaded", "ready", "draining")]
    async with (
        faking(*answers, refuses(404), says(said()), hangs) as fake,
        upstream_of(fake, kind="headrace", capacity_s=0.0, clock=clock, key="sk-far") as upstream,
    ):
        assert upstream.capacity is None
        found: list[str | None] = []
        for _ in range(5):
            await soon(upstream.read_capacity())
            found.append(upstream.why_not())
            assert upstream.available == (found[-1] is None)
        assert found == [None, "it is overloaded", None, "it is draining", None]
        assert upstream.capacity is None  # 404: an older release
        assert {each.path for each in fake.heard} == {"/v1/capacity"}
        assert fake.heard[0].headers["authorization"] == "Bearer sk-far"
        await soon(upstream.read_capacity())
        assert upstream.capacity is not None
        metrics.upstream("capacity-test", upstream.state())
        assert count(metrics.upstreams, "capacity-test", "capacity_ttft_s_chat") == 0.2
        assert count(metrics.upstreams, "capacity-test", "capacity_known") == 1
        clock.now += 6.0  # what is old says nothing
        assert upstream.capacity is None
        assert upstream.state()["capacity"] == {"known": False}


@asynchronous
async def test_only_headrace_servers_are_asked() -> None:
    async with faking(says(said())) as fake:
        async with upstream_of(fake, kind="vllm") as upstream:
            assert not upstream._watching
        async with upstream_of(fake, kind="headrace", capacity_s=0.0) as upstream:
            assert not upstream._watching
        async with upstream_of(fake, kind="headrace") as upstream:
            assert len(upstream._watching) == 1
