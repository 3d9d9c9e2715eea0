"""Worker processes that die, hang, drain or never start: nothing is lost, nothing comes twice, and the bytes stay."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.engine.grammar.constraints import Grammar
from headrace.engine.interface.grammar_spec import GrammarTrigger
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.interface.sampling import SamplingParams
from headrace.engine.interface.sequence_result import SequenceResult
from headrace.engine.process import supervisor as supervisor_module
from headrace.engine.process import wire
from headrace.engine.process.engine_client import ClientTimeouts, EngineClient
from headrace.engine.process.output_stream import OutputStream
from headrace.engine.process.supervisor import StartError, Supervisor, SupervisorTimeouts
from headrace.errors import RequestError
from headrace.variant import Variant
from tests.support.tiny_engine import open_tiny, run

STREAMS = 32
WAITS = ClientTimeouts(patience=30.0, silence=20.0, ping=0.1)
# Free text in which every "e" begins a call.
CALLS = Grammar("lark", 'start: "e" /[a-d]{2,6}/ ";"', trigger=GrammarTrigger(("e",), repeats=True))
# Speculation is on, memory is too small for all at once, and each test starts from the same variant.
OPTIONS: dict[str, Any] = {"speculation": "ngram", "context": 512, "kv_tokens": 4096, "threads": 1}


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run_it(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 120.0))

    return run_it


def variant(folder: Path, **changes: Any) -> Variant:
    options = {"weights": "int8", "cache": False, "checks": True} | OPTIONS | changes
    return Variant.of(str(folder), **options)


def requests(max_tokens: int = 150) -> list[GenerationRequest]:
    """Greedy, seeded, penalised, held by a grammar from the start or from a marker on, with stop strings, and several
    sequences of one prompt."""
    schema = json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 60})
    kinds: list[dict[str, Any]] = [
        {},
        {"sampling": SamplingParams(temperature=1.0, seed=5)},
        {"sampling": SamplingParams(temperature=0.8, seed=6, repetition_penalty=1.2, frequency_penalty=0.1)},
        {"grammar": Grammar("json_schema", schema), "sampling": SamplingParams(temperature=0.7, seed=7)},
        {"stop": ("zzzz", "never there"), "sampling": SamplingParams(temperature=1.0, top_p=0.9, seed=8)},
        {"grammar": CALLS, "sampling": SamplingParams(temperature=1.0, top_p=0.9, seed=10)},
        {"n": 2, "sampling": SamplingParams(temperature=1.2, seed=9, logprobs=1)},
    ]
    return [
        GenerationRequest(
            id=str(n),
            prompt=tuple(5 + (n * 31 + place * 7) % 4000 for place in range(10 + n * 3)),
            max_tokens=max_tokens,
            **kinds[n % len(kinds)],
        )
        for n in range(STREAMS)
    ]


@pytest.fixture(scope="module")
def undisturbed(tiny_folder: Path) -> list[list[SequenceResult]]:
    """What the requests come to without a process, a socket or a fault."""
    opened = open_tiny(tiny_folder, **OPTIONS)
    answers = run(opened.engine, requests())
    return [answers[str(n)] for n in range(STREAMS)]


def assert_same(found: list[list[SequenceResult]], expected: list[list[SequenceResult]]) -> None:
    for mine, others in zip(found, expected, strict=True):
        for answer, other in zip(mine, others, strict=True):
            assert answer.tokens == other.tokens
            assert answer.text == other.text
            assert answer.chosen == other.chosen
            assert answer.ending is not None
            assert other.ending is not None
            assert (answer.ending.finish, answer.ending.stop) == (other.ending.finish, other.ending.stop)
            assert answer.ending.usage.output_tokens == len(answer.tokens)


async def answered(
    client: EngineClient, disturb: Callable[[int], None], at: tuple[int, ...]
) -> list[list[SequenceResult]]:
    """All requests at once; `disturb` is called when so many tokens have come, all streams together."""
    wanted = requests()
    answers = [[SequenceResult(index) for index in range(request.n)] for request in wanted]
    count = 0
    due = list(at)

    async def follow(place: int, request: GenerationRequest) -> None:
        nonlocal count
        async with client.stream(request) as stream:
            async for output in stream:
                answers[place][output.index].add(output)
                count += len(output.tokens)
                while due and count >= due[0]:
                    disturb(due.pop(0))

    await asyncio.gather(*(follow(place, request) for place, request in enumerate(wanted)))
    assert not due
    return answers


def kill(supervisor: Supervisor, number: int = 0, how: signal.Signals = signal.SIGKILL) -> None:
    pid = supervisor.pids[number]
    assert pid is not None
    os.kill(pid, how)


@asynchronous
async def test_a_killed_worker_leaves_no_trace_in_any_stream(
    tiny_folder: Path, undisturbed: list[list[SequenceResult]]
) -> None:
    config = wire.WorkerConfig(variant=variant(tiny_folder))
    async with Supervisor([config]) as supervisor, EngineClient(supervisor.paths, waits=WAITS) as client:
        found = await answered(client, lambda _: kill(supervisor), (300, 1500))
        assert supervisor.restarts == [2]
        assert_same(found, undisturbed)
        (stats,) = await client.stats()
        assert stats["blocks"]["used"] == 0


@asynchronous
async def test_another_replica_goes_on_with_what_a_killed_one_had(
    tiny_folder: Path, undisturbed: list[list[SequenceResult]]
) -> None:
    config = wire.WorkerConfig(variant=variant(tiny_folder))
    async with Supervisor([config, config]) as supervisor, EngineClient(supervisor.paths, waits=WAITS) as client:
        await client.ready()
        while len(await client.stats()) < 2:
            await asyncio.sleep(0.01)
        found = await answered(client, lambda count: kill(supervisor, int(count > 1000)), (300, 1500))
        assert_same(found, undisturbed)
        while supervisor.restarts[0] != 1:  # the other replica may have finished the streams first
            await asyncio.sleep(0.01)


@asynchronous
async def test_a_frozen_worker_is_replaced_and_its_streams_continue(
    tiny_folder: Path, undisturbed: list[list[SequenceResult]]
) -> None:
    config = wire.WorkerConfig(variant=variant(tiny_folder))
    watch = SupervisorTimeouts(ping=0.1, silence=0.5)
    async with Supervisor([config], watch=watch) as supervisor, EngineClient(supervisor.paths, waits=WAITS) as client:
        found = await answered(client, lambda _: kill(supervisor, how=signal.SIGSTOP), (500,))
        assert supervisor.restarts == [1]
        assert_same(found, undisturbed)


@asynchronous
async def test_the_streams_of_a_frozen_worker_continue_on_another_replica(
    tiny_folder: Path, undisturbed: list[list[SequenceResult]]
) -> None:
    config = wire.WorkerConfig(variant=variant(tiny_folder))
    watch = SupervisorTimeouts(ping=0.1, silence=0.5)
    async with (
        Supervisor([config, config], watch=watch) as supervisor,
        EngineClient(supervisor.paths, waits=WAITS) as client,
    ):
        await client.ready()
        while len(await client.stats()) < 2:
            await asyncio.sleep(0.01)
        found = await answered(client, lambda _: kill(supervisor, how=signal.SIGSTOP), (500,))
        assert_same(found, undisturbed)
        while supervisor.restarts != [1, 0]:  # the other replica may have finished the streams first
            await asyncio.sleep(0.01)


@asynchronous
async def test_a_worker_that_is_stopped_for_a_moment_is_kept(tiny_folder: Path) -> None:
    config = wire.WorkerConfig(variant=variant(tiny_folder))
    watch = SupervisorTimeouts(ping=0.05, silence=30.0)
    waits = ClientTimeouts(ping=0.02, suspicion=0.1)
    async with Supervisor([config], watch=watch) as supervisor, EngineClient(supervisor.paths, waits=waits) as client:
        await client.ready()
        assert client.responsive
        kill(supervisor, how=signal.SIGSTOP)
        while client.responsive:
            await asyncio.sleep(0.01)
        stream = client.stream(GenerationRequest(id="a", prompt=(5, 6, 7), max_tokens=4))
        kill(supervisor, how=signal.SIGCONT)
        assert sum([len(output.tokens) async for output in stream]) == 4
        while not client.responsive:
            await asyncio.sleep(0.01)
        assert supervisor.restarts == [0]


@asynchronous
async def test_a_worker_told_to_end_finishes_first(tiny_folder: Path, undisturbed: list[list[SequenceResult]]) -> None:
    config = wire.WorkerConfig(variant=variant(tiny_folder))
    async with Supervisor([config, config]) as supervisor, EngineClient(supervisor.paths, waits=WAITS) as client:
        await client.ready()
        while len(await client.stats()) < 2:
            await asyncio.sleep(0.01)
        found = await answered(client, lambda _: kill(supervisor, how=signal.SIGTERM), (300,))
        assert_same(found, undisturbed)
        for _ in range(2000):  # its successor is started
            if supervisor.restarts == [1, 0]:
                break
            await asyncio.sleep(0.01)
        assert supervisor.restarts == [1, 0]


@asynchronous
async def test_stopping_the_supervisor_lets_running_requests_finish(tiny_folder: Path) -> None:
    config = wire.WorkerConfig(variant=variant(tiny_folder))
    supervisor = Supervisor([config])
    await supervisor.start()
    async with EngineClient(supervisor.paths, waits=WAITS) as client:
        stream = client.stream(GenerationRequest(id="a", prompt=(5, 6, 7), max_tokens=300))
        first = await stream.__anext__()
        stopping = asyncio.create_task(supervisor.stop())
        made = len(first.tokens) + sum([len(output.tokens) async for output in stream])
        await stopping
    assert made == 300
    assert not supervisor.paths[0].parent.exists()
    assert supervisor.restarts == [0]


@asynchronous
async def test_a_model_that_cannot_be_loaded_is_an_error_of_the_start(tmp_path: Path, tiny_folder: Path) -> None:
    for broken, message in (
        (Variant(model=str(tmp_path / "nowhere")), "nowhere"),
        (variant(tiny_folder, weights="int5"), "int5"),
    ):
        supervisor = Supervisor([wire.WorkerConfig(variant=broken)])
        with pytest.raises(StartError, match=message):
            await supervisor.start()
        assert supervisor.restarts == [0]
        assert not supervisor.paths[0].parent.exists()


class Pauses:
    """Records the pauses before restarts instead of waiting for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[float] = []
        sleep = asyncio.sleep

        async def record(seconds: float) -> None:
            self.found.append(seconds)
            await sleep(0)

        monkeypatch.setattr(supervisor_module, "_pause", record)


async def die(supervisor: Supervisor, client: EngineClient, *, after_an_answer: bool) -> None:
    """Kill the worker, if wanted right after it served a request, and wait until its successor is connected."""
    if after_an_answer:
        await client.complete(GenerationRequest(id="a", prompt=(5, 6, 7), max_tokens=2))
    restarts = supervisor.restarts[0]
    kill(supervisor)
    while supervisor.restarts[0] == restarts or client.responsive is False:
        await asyncio.sleep(0.005)


@asynchronous
async def test_a_worker_that_dies_without_serving_is_restarted_ever_more_slowly(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = Pauses(monkeypatch)
    config = wire.WorkerConfig(variant=variant(tiny_folder))
    watch = SupervisorTimeouts(ping=0.05, pause=2.0, pause_most=3.0, healthy=1e6)
    async with Supervisor([config], watch=watch) as supervisor, EngineClient(supervisor.paths, waits=WAITS) as client:
        await client.ready()
        for _ in range(3):
            await die(supervisor, client, after_an_answer=False)
        assert pauses.found == [2.0, 3.0]


@asynchronous
async def test_a_worker_that_served_is_restarted_at_once(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Pauses(monkeypatch)
    config = wire.WorkerConfig(variant=variant(tiny_folder))
    # Pings are so rare that none finds the step: the worker itself reports its first one.
    watch = SupervisorTimeouts(ping=1000.0, pause=2.0, pause_most=5.0, healthy=1e6)
    async with Supervisor([config], watch=watch) as supervisor, EngineClient(supervisor.paths, waits=WAITS) as client:
        await client.ready()
        for after_an_answer in (False, True, False, False):
            await die(supervisor, client, after_an_answer=after_an_answer)
        assert pauses.found == [2.0]  # after the second in a row that served nothing


@asynchronous
async def test_cancelled_streams_leave_the_worker_idle(tiny_folder: Path) -> None:
    config = wire.WorkerConfig(variant=variant(tiny_folder))
    async with Supervisor([config]) as supervisor, EngineClient(supervisor.paths, waits=WAITS) as client:
        streams = [client.stream(request) for request in requests(300)]

        async def cancel(stream: OutputStream) -> None:
            await stream.__anext__()
            stream.cancel()

        await asyncio.gather(*map(cancel, streams))  # each at once: while a grammar compiles, others would end
        for _ in range(500):
            (stats,) = await client.stats()
            if not stats["scheduler"]["running"] + stats["scheduler"]["waiting"]:
                break
            await asyncio.sleep(0.01)
        assert stats["blocks"]["used"] == 0
        assert stats["scheduler"]["cancelled"] >= STREAMS


@asynchronous
async def test_a_tokenizer_that_is_gone_is_the_grammars_matter_alone(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    grammar = Grammar("regex", "[ab]+")
    async with (
        Supervisor([wire.WorkerConfig(variant=variant(folder))]) as supervisor,
        EngineClient(supervisor.paths, waits=WAITS) as client,
    ):
        (folder / "tokenizer.json").unlink()
        for id in ("first", "again"):
            with pytest.raises(RequestError, match=r"Grammars are not available: .*Expected tokenizer\.json"):
                async with client.stream(
                    GenerationRequest(id=id, prompt=(5, 6), max_tokens=4, grammar=grammar)
                ) as stream:
                    await stream.__anext__()
        async with client.stream(GenerationRequest(id="plain", prompt=(5, 6), max_tokens=4)) as stream:
            assert [output async for output in stream][-1].ending is not None
        assert supervisor.restarts == [0]


def start(config: wire.WorkerConfig) -> tuple[subprocess.Popen[bytes], wire.StartReport]:
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.engine.process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    process.stdin.flush()
    kinds = wire.LoadProgress | wire.StartReport
    while isinstance(said := msgspec.json.decode(process.stdout.readline(), type=kinds), wire.LoadProgress):
        pass  # packing takes long on a busy machine
    return process, said


def test_a_worker_does_not_outlive_whoever_started_it(tiny_folder: Path, tmp_path: Path) -> None:
    config = wire.WorkerConfig(variant=variant(tiny_folder), socket=str(tmp_path / "folder" / "s"))
    process, started = start(config)
    assert started.error is None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(120) == 0
    assert not (tmp_path / "folder").exists()


def test_a_worker_that_is_told_twice_ends_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    config = wire.WorkerConfig(variant=variant(tiny_folder), socket=str(tmp_path / "s"), drain_seconds=1000.0)
    process, _ = start(config)

    async def told() -> None:
        async with EngineClient([tmp_path / "s"], waits=WAITS) as client:
            stream = client.stream(
                GenerationRequest(id="a", prompt=(5,), max_tokens=500, sampling=SamplingParams(logprobs=500))
            )
            await stream.__anext__()
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait, 20)

    asyncio.run(told())
    assert process.returncode == 0


def test_a_configuration_that_is_none_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "headrace.engine.process"],
        input=b'{"variant": 3}\n',
        capture_output=True,
        check=False,
    )
    assert process.returncode == 2
    assert "variant" in (msgspec.json.decode(process.stdout, type=wire.StartReport).error or "")
    assert b"Traceback" not in process.stderr
