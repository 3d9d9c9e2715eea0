"""Real servers as upstreams: Headrace's own, and llama.cpp's where it is there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config.upstream_section import UpstreamFeatures, UpstreamHealthConfig
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.request import FinishReason
from headrace.engine.interface.sampling import SamplingParams
from headrace.engine.process.client_errors import OverloadedError
from headrace.errors import RequestError
from headrace.gateway.requests.text_request import ChoiceDelta
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.gateway.upstreams.upstream_errors import BrokenStreamError, UpstreamError
from headrace.models.model_folder import BUNDLED
from tests.support.fake_upstream import answered, exchange, pieces_of, relayed, soon, text_of, upstream_of
from tests.support.running_server import LONG, Running, asynchronous, fails, say, serving, until, words

CONVERTER = Path(__file__).parents[4] / "benchmarks" / "core" / "convert" / "gguf_file.py"


def headrace(running: Running, **changes: Any) -> Any:
    return upstream_of(f"{running.server.url}/v1", kind="headrace", model="mini", **changes)


@asynchronous
async def test_headrace_behind_headrace_streams() -> None:
    async with serving() as running, headrace(running) as upstream:
        running.engine.answer = words("Hel", "lo", "!")
        found = await soon(pieces_of(upstream))
        assert [piece.content for piece in found] == ["Hel", "lo", "!", ""]
        (stream,) = running.engine.streams
        usage = found[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.output_tokens) == (len(stream.request.prompt), 3)
        state = upstream.state()
        assert (state["usage_wrong"], state["usage_estimated"], state["failed"]) == (0, 0, 0)
        data = await soon(relayed(upstream, include_usage=True))
        assert b'"model":"mini@far"' in data
        assert data.count(b"[DONE]") == 1


@asynchronous
async def test_headrace_takes_all_that_its_kind_says() -> None:
    async with serving() as running, headrace(running) as upstream:
        running.engine.answer = words("a")
        await soon(
            answered(
                upstream,
                sampling=SamplingParams(
                    temperature=0.5,
                    top_k=5,
                    top_p=0.5,
                    min_p=0.1,
                    repetition_penalty=1.1,
                    frequency_penalty=0.5,
                    presence_penalty=0.5,
                    logit_bias={5: -1.0},
                    seed=7,
                ),
                max_tokens=9,
                min_tokens=2,
                stop=("x", "y"),
                stop_ids=frozenset({3}),
                ignore_eos=True,
                priority=2,
                cache="off",
                template={"tone": "dry"},
                think=False,
            )
        )
        request = running.engine.streams[0].request
        assert request.sampling == SamplingParams(
            temperature=0.5,
            top_k=5,
            top_p=0.5,
            min_p=0.1,
            repetition_penalty=1.1,
            frequency_penalty=0.5,
            presence_penalty=0.5,
            logit_bias={5: -1.0},
            seed=7,
        )
        assert (request.max_tokens, request.min_tokens, request.stop, request.priority) == (9, 2, ("x", "y"), 2)
        assert 3 in request.stop_ids
        for asked in (
            {"grammar": Grammar("json_schema", '{"type":"object"}')},
            {"grammar": Grammar("json_object")},
            {"grammar": Grammar("choice", '["a","b"]')},
            {"grammar": Grammar("regex", "a+")},
            {"grammar": Grammar("lark", 'start: "a"')},
            {"prompts": ["one"], "grammar": Grammar("json_schema", '{"type":"object"}'), "echo": True},
        ):
            await soon(answered(upstream, **asked))
            assert running.engine.streams[-1].request.grammar == asked["grammar"]


@asynchronous
async def test_errors_of_headrace_come_through() -> None:
    async with serving() as running, headrace(running) as upstream:
        running.engine.answer = fails(OverloadedError("too much", retry_after=3.0))
        with pytest.raises(UpstreamError) as overloaded:
            await soon(pieces_of(upstream))
        assert (overloaded.value.status, overloaded.value.retry_after) == (503, 3.0)
        running.engine.answer = fails(RequestError("top_k must be less", parameter="top_k"))
        with pytest.raises(UpstreamError) as invalid:
            await soon(pieces_of(upstream))
        assert (invalid.value.status, invalid.value.parameter) == (400, "top_k")
        running.engine.answer = fails(RequestError("gone"), "one ", "two ")
        found: list[ChoiceDelta] = []
        with pytest.raises(BrokenStreamError) as broken:
            await soon(pieces_of(upstream, found))
        assert text_of(found) == broken.value.delivered[0].content == "one two "


@asynchronous
async def test_a_client_that_leaves_frees_the_slot_behind_two_servers() -> None:
    async with serving() as running, headrace(running) as upstream:
        answering = UpstreamGeneration(exchange(stream=True), upstream)
        await answering.begin()
        found: list[ChoiceDelta] = []

        def first(piece: ChoiceDelta) -> bool:
            found.append(piece)
            return False

        running.engine.answer = lambda stream: say(stream, "one ")
        assert await soon(answering.run(first)) is False
        answering.cancel()
        assert await soon(answering.run(first))
        answering.settle()
        await until(lambda: running.engine.dropped == running.engine.streams)


@asynchronous
async def test_headraces_own_deadline_is_an_end() -> None:
    async with serving() as running, headrace(running) as upstream:
        running.engine.answer = lambda stream: say(stream, "one", end=True, finish=FinishReason.DEADLINE)
        (choice,) = await soon(answered(upstream))
        assert (choice.content, choice.finish) == ("one", "deadline")


@asynchronous
async def test_headraces_health_is_asked_for() -> None:
    async with serving(loaded=False) as running:
        config = UpstreamHealthConfig(interval_s=0.01, failures=1)
        async with headrace(running, health=config) as upstream:
            await until(lambda: upstream.healthy is False)
            running.fleet.loaded.set()
            await until(lambda: upstream.healthy is True)


# llama.cpp

_SERVE = """
import sys
import xllamacpp as xlc
params = xlc.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 2048
params.n_parallel = 2
params.cpuparams.n_threads = 2
server = xlc.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a llama.cpp server in a process of its own, which serves our mini."""
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed: no llama.cpp server to ask")
    file = tmp_path_factory.mktemp("gguf") / "mini.gguf"
    subprocess.run([sys.executable, str(CONVERTER), str(BUNDLED / "mini"), str(file)], check=True)
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, "llama.cpp's server has ended before it listened"
        yield url + "/v1"
    finally:
        process.kill()
        process.wait()


@asynchronous
async def test_llama_cpp_streams_and_tells_its_usage(llama: str) -> None:
    async with upstream_of(llama, kind="llama.cpp", health=UpstreamHealthConfig(interval_s=0.1)) as upstream:
        await until(lambda: upstream.healthy is True, LONG)
        found = await soon(pieces_of(upstream, max_tokens=8, ignore_eos=True), LONG)
        assert found[-1].finish == "length"
        assert found[-1].usage is not None
        assert found[-1].usage.output_tokens == 8
        assert found[-1].usage.prompt_tokens > 0
        assert upstream.state()["usage_wrong"] == upstream.state()["failed"] == 0
        assert (await soon(relayed(upstream, max_tokens=4, ignore_eos=True), LONG)).endswith(b"data: [DONE]\n\n")


@asynchronous
async def test_llama_cpp_takes_all_that_its_kind_says(llama: str) -> None:
    async with upstream_of(llama, kind="llama.cpp") as upstream:
        sampling = SamplingParams(
            temperature=0.5,
            top_k=5,
            top_p=0.5,
            min_p=0.1,
            repetition_penalty=1.1,
            frequency_penalty=0.5,
            presence_penalty=0.5,
            logit_bias={5: -1.0},
            seed=2**63,
            logprobs=0,
        )
        asked = {"max_tokens": 4, "ignore_eos": True, "stop": ("\n\n\n",), "cache": "off", "sampling": sampling}
        (choice,) = await soon(answered(upstream, **asked), LONG)
        assert choice.logprobs is not None
        assert len(choice.logprobs) >= 1
        assert all(each.top == [] for each in choice.logprobs)
        schema = Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]}')
        (choice,) = await soon(answered(upstream, max_tokens=32, grammar=schema), LONG)
        assert choice.content.lstrip().startswith("{")
        (choice,) = await soon(answered(upstream, prompts=["Once"], echo=True, max_tokens=4), LONG)
        assert choice.content.startswith("Once")


@asynchronous
async def test_llama_cpps_errors_come_through(llama: str) -> None:
    async with upstream_of(llama, kind="llama.cpp", takes=UpstreamFeatures(n=True)) as upstream:
        with pytest.raises(UpstreamError) as error:
            await soon(pieces_of(upstream, messages=[{"role": "user", "content": "word " * 9000}]), LONG)
        assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
