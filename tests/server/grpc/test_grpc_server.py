"""The gRPC interface, with grpcio's own client: streams, cancellation, deadlines, errors and limits."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from headrace.config import KeyConfig, LimitSet
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason
from headrace.engine.process.client_errors import OverloadedError
from headrace.observe import metrics
from tests.support.grpc_client import GrpcClient, grpc_client
from tests.support.running_server import CHAT, Running, asynchronous, count, ended, fails, say, serving, until, words

grpc: Any = pytest.importorskip("grpc")
pytest.importorskip("grpc_health")

KEYS = (KeyConfig(name="one", key="sk-test-key-number-1"),)
BEARER = (("authorization", "Bearer sk-test-key-number-1"),)


async def texts(call: Any) -> str:
    return "".join([response.delta.text async for response in call])


async def failure(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await texts(call) if hasattr(call, "__aiter__") else await call
    return caught.value


async def next_stream(running: Running, count_before: int) -> Any:
    await until(lambda: len(running.engine.streams) > count_before)
    return running.engine.streams[count_before]


@asynchronous
async def test_an_answer_streams_with_its_start_its_end_and_its_usage() -> None:
    async with serving(grpc_port=0) as running, grpc_client(running.server) as client:
        running.engine.answer = words("Two ", "words")
        call = client.stub.Generate(client.chat(max_tokens=5, seed=7, stop=["!"]), metadata=(("x-request-id", "r1"),))
        events = [response async for response in call]
        assert [each.WhichOneof("event") for each in events] == ["started", "delta", "delta", "finished", "summary"]
        assert events[0].started.model == "mini"
        assert "".join(each.delta.text for each in events) == "Two words"
        assert events[3].finished.reason == "stop"
        assert events[4].summary.usage.output_tokens == 2
        assert "queue_ms" in events[4].summary.report
        assert dict(await call.initial_metadata())["x-request-id"] == "r1"
        request = running.engine.streams[0].request
        assert (request.max_tokens, request.sampling.seed, request.stop) == (5, 7, ("!",))


@asynchronous
async def test_the_answer_is_that_of_the_http_api() -> None:
    async with serving(grpc_port=0) as running, grpc_client(running.server) as client:
        running.engine.answer = words("one ", "two")
        parameters = {"top_k": 3, "min_tokens": 1, "response_format": {"type": "json_object"}}
        request = client.chat(temperature=0.5)
        request.parameters.update({"min_tokens": 1, "response_format": {"type": "json_object"}})
        request.top_k = 3
        await texts(client.stub.Generate(request))
        connection = await running.client()
        await connection.chat(temperature=0.5, stream=True, **parameters)
        ours, theirs = (stream.request for stream in running.engine.streams)
        assert ours.prompt == theirs.prompt
        assert (ours.grammar, ours.min_tokens) == (theirs.grammar, theirs.min_tokens)
        assert (ours.sampling.top_k, ours.sampling.temperature) == (theirs.sampling.top_k, theirs.sampling.temperature)


@asynchronous
async def test_a_prompt_is_continued_and_a_conversation_with_a_call_is_read() -> None:
    async with serving(grpc_port=0) as running, grpc_client(running.server) as client:
        running.engine.answer = words("on")
        assert await texts(client.stub.Generate(client.messages.GenerateRequest(prompt="Once up", n=1))) == "on"
        tool_call = client.messages.ToolCall(id="c1", name="look", arguments='{"at": 1}')
        said = [
            client.messages.Message(role="user", content="Look"),
            client.messages.Message(role="assistant", tool_calls=[tool_call]),
            client.messages.Message(role="tool", tool_call_id="c1", content="seen"),
        ]
        assert await texts(client.stub.Generate(client.messages.GenerateRequest(messages=said))) == "on"


@asynchronous
async def test_a_client_that_cancels_ends_its_generation() -> None:
    async with serving(grpc_port=0) as running, grpc_client(running.server) as client:
        gone = ended("gone")
        call = client.stub.Generate(client.chat())
        reading = asyncio.ensure_future(texts(call))
        stream = await next_stream(running, 0)
        say(stream, "one ")
        await until(lambda: bool(running.server.grpc and running.server.grpc.tasks))
        call.cancel()
        await until(lambda: stream in running.engine.dropped)
        await asyncio.gather(reading, return_exceptions=True)
        await running.settled()
        assert ended("gone") == gone + 1


@asynchronous
async def test_the_deadline_of_a_call_is_that_of_its_request_and_ends_it() -> None:
    async with serving(grpc_port=0) as running, grpc_client(running.server) as client:
        far = client.stub.Generate(client.chat(), timeout=1000)
        reading = asyncio.ensure_future(texts(far))
        first = await next_stream(running, 0)
        assert first.request.deadline is not None
        # gRPC sends three digits, rounded up.
        assert 700 < first.request.deadline - first.request.arrival <= 1010
        say(first, "done", end=True)
        assert await reading == "done"
        near = client.stub.Generate(client.chat(deadline_ms=5000), timeout=1000)
        reading = asyncio.ensure_future(texts(near))
        second = await next_stream(running, 1)
        assert second.request.deadline - time.monotonic() <= 5
        near.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        wrong = client.chat()
        wrong.parameters.update({"deadline_ms": "soon"})
        for message, metadata, name in (
            (wrong, (), "deadline_ms"),
            (client.chat(deadline_ms=5000), (("x-headrace-deadline-ms", "soon"),), "x-headrace-deadline-ms"),
        ):
            error = await failure(client.stub.Generate(message, timeout=1000, metadata=metadata))
            assert (error.code(), name in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True), error
        timeout = 0.1
        while len(running.engine.streams) < 3:  # on a busy machine it may expire before it reaches the engine
            timeout *= 2
            error = await failure(client.stub.Generate(client.chat(), timeout=timeout))
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(running.engine.dropped) >= 2)


@asynchronous
async def test_errors_have_a_code_our_own_code_and_the_message() -> None:
    async with serving(grpc_port=0, keys=KEYS) as running, grpc_client(running.server) as client:
        generate = client.stub.Generate
        without = await failure(generate(client.chat()))
        wrong = await failure(generate(client.chat(), metadata=(("authorization", "Bearer sk-nothing-like-it"),)))
        assert {without.code(), wrong.code()} == {grpc.StatusCode.UNAUTHENTICATED}
        assert (await failure(client.stub.ListModels(client.messages.ListModelsRequest()))).code() == without.code()

        hot = await failure(generate(client.chat(temperature=9), metadata=BEARER))
        assert hot.code() == grpc.StatusCode.INVALID_ARGUMENT
        told = dict(hot.trailing_metadata())
        assert told["error-param"] == "temperature"
        assert hot.details().startswith(f"{told['error-code']}: ")
        assert told["x-request-id"].startswith("req_")

        unknown = await failure(generate(client.chat(model="nothing"), metadata=BEARER))
        assert unknown.code() == grpc.StatusCode.NOT_FOUND
        twice = client.chat()
        twice.parameters.update({"stream": False})
        assert "always streams" in (await failure(generate(twice, metadata=BEARER))).details()
        empty = await failure(generate(client.messages.GenerateRequest(), metadata=BEARER))
        assert (empty.code(), dict(empty.trailing_metadata())["error-param"]) == (hot.code(), "messages")

        running.engine.answer = fails(OverloadedError("too much", retry_after=2.5), "some ")
        full = await failure(generate(client.chat(), metadata=BEARER))  # after the answer has begun
        assert (full.code(), full.details()) == (grpc.StatusCode.UNAVAILABLE, "overloaded: too much")
        running.engine.answer = fails(OverloadedError("too much", retry_after=2.5))
        full = await failure(generate(client.chat(), metadata=BEARER))
        assert dict(full.trailing_metadata())["grpc-retry-pushback-ms"] == "2500"


@asynchronous
async def test_a_message_that_is_none_or_too_long_is_refused() -> None:
    async with serving(grpc_port=0, body_bytes=1000) as running, grpc_client(running.server) as client:
        raw = client.channel.unary_stream("/headrace.v1.Headrace/Generate")
        assert (await failure_of_raw(raw(b"\xff\xff\xff"))).code() == grpc.StatusCode.INVALID_ARGUMENT
        long = await failure(client.stub.Generate(client.chat("word " * 1000)))
        assert long.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        nowhere = client.channel.unary_stream("/headrace.v1.Headrace/Nothing")
        assert (await failure_of_raw(nowhere(b""))).code() == grpc.StatusCode.UNIMPLEMENTED


async def failure_of_raw(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


@asynchronous
async def test_limits_count_calls_of_both_interfaces_together() -> None:
    keys = (KeyConfig(name="one", key="sk-test-key-number-1", limits=LimitSet(requests_per_min=2)),)
    async with serving(grpc_port=0, keys=keys) as running, grpc_client(running.server) as client:
        running.engine.answer = words("yes")
        answer = await running.ask("POST", "/v1/chat/completions", CHAT, authorization=BEARER[0][1])
        assert answer.status == 200
        assert await texts(client.stub.Generate(client.chat(), metadata=BEARER)) == "yes"
        third = await failure(client.stub.Generate(client.chat(), metadata=BEARER))
        assert third.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "retry-after-ms" in dict(third.trailing_metadata())


@asynchronous
async def test_a_hundred_streams_are_answered_at_once() -> None:
    async with serving(grpc_port=0) as running, grpc_client(running.server) as client:
        readings = [asyncio.ensure_future(texts(client.stub.Generate(client.chat(str(n))))) for n in range(100)]
        await until(lambda: len(running.engine.streams) == 100)
        for place, stream in enumerate(running.engine.streams):
            for word in range(3):
                say(stream, f"{place}.{word} ", end=word == 2)
        answers = await asyncio.gather(*readings)
        assert sorted(answers) == sorted(f"{n}.0 {n}.1 {n}.2 " for n in range(100))


@asynchronous
async def test_a_client_that_does_not_read_pauses_the_answer_and_is_cut() -> None:
    small = (("grpc.http2.bdp_probe", 0),)  # the client's window stays at 64 KiB
    async with serving(grpc_port=0, reader_s=0.2) as running, grpc_client(running.server, small) as client:
        call = client.stub.Generate(client.chat())
        stream = await next_stream(running, 0)
        for _ in range(300):
            say(stream, "x" * 4096)
        await until(lambda: stream in running.engine.dropped)
        call.cancel()


@asynchronous
async def test_models_are_listed_and_health_follows_the_server() -> None:
    health_pb2: Any = pytest.importorskip("grpc_health.v1.health_pb2")
    health_pb2_grpc: Any = pytest.importorskip("grpc_health.v1.health_pb2_grpc")
    async with serving(grpc_port=0, loaded=False) as running:
        await until(lambda: bool(running.server.grpc and running.server.grpc.port))
        async with grpc_client(running.server) as client:
            health = health_pb2_grpc.HealthStub(client.channel)
            serving_now = health_pb2.HealthCheckResponse.SERVING
            starting = await health.Check(health_pb2.HealthCheckRequest())
            assert starting.status == health_pb2.HealthCheckResponse.NOT_SERVING
            early = await failure(client.stub.Generate(client.chat()))
            assert (early.code(), early.details()[:9]) == (grpc.StatusCode.UNAVAILABLE, "starting:")
            watch = health.Watch(health_pb2.HealthCheckRequest(service="headrace.v1.Headrace"))
            assert (await watch.read()).status == starting.status
            running.fleet.loaded.set()
            assert (await watch.read()).status == serving_now
            watch.cancel()
            listed = await client.stub.ListModels(client.messages.ListModelsRequest())
            assert [(each.id, each.details["kind"]) for each in listed.models] == [("mini", "decoder")]
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await health.Check(health_pb2.HealthCheckRequest(service="other"))
            assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


@asynchronous
async def test_reflection_describes_the_service_unless_the_docs_are_off() -> None:
    reflection_pb2: Any = pytest.importorskip("grpc_reflection.v1alpha.reflection_pb2")
    reflection_pb2_grpc: Any = pytest.importorskip("grpc_reflection.v1alpha.reflection_pb2_grpc")

    async def names(client: GrpcClient) -> list[str]:
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        call = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo(asked)
        answer = await call.read()
        return [each.name for each in answer.list_services_response.service]

    async with serving(grpc_port=0) as running, grpc_client(running.server) as client:
        assert "headrace.v1.Headrace" in await names(client)
    async with serving(grpc_port=0, docs=False) as running, grpc_client(running.server) as client:
        with pytest.raises(grpc.aio.AioRpcError) as off:
            await names(client)
        assert off.value.code() == grpc.StatusCode.UNIMPLEMENTED


@asynchronous
async def test_calls_in_progress_finish_when_the_server_ends() -> None:
    async with serving(grpc_port=0) as running, grpc_client(running.server) as client:
        reading = asyncio.ensure_future(texts(client.stub.Generate(client.chat())))
        stream = await next_stream(running, 0)
        say(stream, "one ")
        running.server.end()
        late = await failure(client.stub.Generate(client.chat()))
        assert (late.code(), late.details()[:9]) == (grpc.StatusCode.UNAVAILABLE, "draining:")
        say(stream, "two", end=True)
        assert await reading == "one two"
        await running.task


@asynchronous
async def test_calls_are_counted_by_method() -> None:
    async with serving(grpc_port=0) as running, grpc_client(running.server) as client:
        running.engine.answer = words("yes")
        before = count(metrics.http_requests, "/headrace.v1.Headrace/Generate", "200")
        await texts(client.stub.Generate(client.chat()))
        await running.settled()
        assert count(metrics.http_requests, "/headrace.v1.Headrace/Generate", "200") == before + 1


@asynchronous
async def test_texts_become_vectors() -> None:
    async with serving(grpc_port=0) as running, grpc_client(running.server) as client:

        def vector(stream: Any) -> None:
            usage = SequenceUsage(len(stream.request.prompt), 0, 0, 0, 0, 0.001, 0.002, 0.003)
            ending = SequenceEnd(FinishReason.STOP, usage)
            values = np.array([3.0, 4.0], "<f4").tobytes()
            stream.push(SequenceOutput("", 0, [], "", vector=values, ending=ending))

        running.engine.answer = vector
        embedded = await client.stub.Embed(client.messages.EmbedRequest(texts=["one", "two words"]))
        assert [list(each.values) for each in embedded.embeddings] == [pytest.approx([0.6, 0.8])] * 2
        assert embedded.usage.prompt_tokens == sum(len(stream.request.prompt) for stream in running.engine.streams)
        cut = await client.stub.Embed(client.messages.EmbedRequest(texts=["one"], dimensions=1))
        assert list(cut.embeddings[0].values) == [1.0]
        empty = await failure(client.stub.Embed(client.messages.EmbedRequest()))
        assert (empty.code(), dict(empty.trailing_metadata())["error-param"]) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "texts",
        )
