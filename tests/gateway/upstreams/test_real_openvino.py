"""A real OpenVINO GenAI as a managed engine: used, left and killed. It needs the package openvino-genai."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from headrace.config.managed_section import ManagedConfig
from headrace.config.upstream_section import UpstreamConfig, UpstreamHealthConfig, UpstreamRetries
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.gateway.upstreams.upstream import Upstream
from headrace.gateway.upstreams.upstream_errors import BrokenStreamError
from tests.support.fake_upstream import answered, exchange, pieces_of, soon
from tests.support.models.smollm2 import smollm2_file
from tests.support.running_server import asynchronous_within, until

pytest.importorskip("openvino_genai", reason="the package openvino-genai is not installed")
PATIENCE = 300.0
SCHEMA = '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],"additionalProperties":false}'
asynchronous = asynchronous_within(900.0)


@asynchronous
async def test_a_real_openvino_is_started_used_left_killed_and_stopped() -> None:
    managed = ManagedConfig(
        model=str(smollm2_file()), sequences=2, restart_s=0.05, arguments=("--threads", "1"), stop_s=10.0
    )
    config = UpstreamConfig(
        kind="openvino",
        managed=managed,
        health=UpstreamHealthConfig(interval_s=0.5, timeout_s=5.0, failures=3),
        retries=UpstreamRetries(most=0),
        context=512,
    )
    upstream = Upstream.of("small@far", config, os.environ)
    await upstream.start()
    engine = upstream.engine
    assert engine is not None
    try:
        greedy = SamplingParams(temperature=0.0)
        found = await soon(pieces_of(upstream, sampling=greedy, max_tokens=8, ignore_eos=True), PATIENCE)
        assert found[-1].usage is not None
        assert found[-1].usage.output_tokens == 8
        (choice,) = await soon(answered(upstream, sampling=greedy, max_tokens=8, ignore_eos=True), PATIENCE)
        assert choice.content == "".join(piece.content for piece in found)
        grammar = Grammar("json_schema", SCHEMA)
        (choice,) = await soon(answered(upstream, sampling=greedy, max_tokens=64, grammar=grammar), PATIENCE)
        assert isinstance(json.loads(choice.content)["a"], bool)
        with pytest.raises(ApiError, match=r"has \d+ tokens\. Expected fewer than 512"):
            await soon(pieces_of(upstream, messages=[{"role": "user", "content": "word " * 600}]), PATIENCE)

        async def streaming() -> tuple[UpstreamGeneration, asyncio.Task[bool]]:
            answering = UpstreamGeneration(exchange(stream=True, max_tokens=400, ignore_eos=True), upstream)
            await answering.begin()
            pieces: list[ChoiceDelta] = []
            running = asyncio.create_task(answering.run(lambda piece: pieces.append(piece) is None))
            await until(lambda: bool(pieces), PATIENCE)
            return answering, running

        answering, running = await streaming()
        answering.cancel()
        assert await soon(running, PATIENCE) is True
        answering.settle()
        await until(lambda: engine.load.running == 0, PATIENCE)

        first = engine.pid
        assert first is not None
        answering, running = await streaming()
        os.kill(first, signal.SIGKILL)
        with pytest.raises(BrokenStreamError):
            await soon(running, PATIENCE)
        answering.settle()
        await until(lambda: engine.status == "ready" and engine.restarts == 1, PATIENCE)
        assert len(await soon(pieces_of(upstream, max_tokens=4, ignore_eos=True), PATIENCE)) >= 2
    finally:
        await upstream.close()
    assert engine.pid is None
