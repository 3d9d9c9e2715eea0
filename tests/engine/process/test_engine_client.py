"""The client against workers that are played: continuation, refusals, routing, patience, and the order of it all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.interface.sampling import SamplingParams, sequence_seed
from headrace.engine.process import wire
from headrace.engine.process.client_errors import OverloadedError, WorkerLostError
from headrace.engine.process.engine_client import MOST_ATTEMPTS, ClientTimeouts, EngineClient
from headrace.errors import HeadraceError, RequestError

PROMPT = tuple(range(100))
WAITS = ClientTimeouts(patience=5.0, silence=5.0, ping=0.02, reconnect=0.01, reconnect_most=0.02)
USAGE = SequenceUsage(100, 3, 0, 0, 0, 0.0, 0.0, 0.0)


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 30.0))

    return run


class Played:
    """A worker whose part the test plays: it greets, and what it is sent waits to be read."""

    def __init__(self, path: Path, *, variant: str = "int8", version: int = wire.VERSION) -> None:
        self.path = path
        self.received: asyncio.Queue[wire.ClientMessage] = asyncio.Queue()
        self.connections = 0
        self.pongs = True
        self.busy = 0.0
        self._welcome = wire.Welcome(
            version=version,
            pid=1,
            model="m",
            kind="decoder",
            vocab_size=1000,
            hidden_size=8,
            context=512,
            block_tokens=16,
            blocks=9,
            variant=variant,
        )
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Played:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        frames = wire.from_clients()
        while data := await reader.read(65536):
            for message in frames.feed(data):
                match message:
                    case wire.Hello():
                        writer.write(wire.encode_frame(self._welcome))
                    case wire.Ping(number):
                        if self.pongs:
                            writer.write(wire.encode_frame(wire.Pong(number, 1, self.busy)))
                    case wire.AskStats(number):
                        writer.write(wire.encode_frame(wire.Stats(number, {"who": str(self.path)})))
                    case _:
                        self.received.put_nowait(message)
        writer.close()

    async def submitted(self) -> wire.Submit:
        message = await self.received.get()
        assert isinstance(message, wire.Submit), message
        return message

    def say(self, *messages: wire.WorkerMessage) -> None:
        for writer in self._writers:
            writer.write(b"".join(wire.encode_frame(message) for message in messages))

    def tell(self, id: str, tokens: list[int], *, index: int = 0, end: FinishReason | None = None) -> None:
        ending = None if end is None else SequenceEnd(end, USAGE)
        self.say(wire.Outputs([SequenceOutput(id, index, tokens, "".join(f"<{t}>" for t in tokens), ending=ending)]))

    def hang_up(self) -> None:
        """Close the connections. The client still reads what was said before."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def die(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.hang_up()
        self.path.unlink(missing_ok=True)


@asynccontextmanager
async def one_of(path: Path, waits: ClientTimeouts = WAITS) -> AsyncIterator[tuple[Played, EngineClient]]:
    async with Played(path) as worker, EngineClient([path], waits=waits) as client:
        await client.ready()
        yield worker, client


@asynccontextmanager
async def two(folder: Path, waits: ClientTimeouts = WAITS) -> AsyncIterator[tuple[Played, Played, EngineClient]]:
    async with (
        Played(folder / "a") as first,
        Played(folder / "b") as second,
        EngineClient([folder / "a", folder / "b"], waits=waits) as client,
    ):
        while len(await client.stats()) < 2:
            await asyncio.sleep(0.005)
        yield first, second, client


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.002)


async def asked_first(first: Played, second: Played) -> tuple[Played, Played]:
    """The one of two workers that has been sent a request, and the other."""
    await until(lambda: not (first.received.empty() and second.received.empty()))
    return (second, first) if first.received.empty() else (first, second)


async def refuse_all(worker: Played, *, never: bool) -> None:
    while True:
        submit = await worker.submitted()
        reason = {"parameter": "deadline"} if never else {"retry_after": 0.01}
        worker.say(wire.Rejected(id=submit.request.id, reason="too late", **reason))  # type: ignore[arg-type]


def request(id: str = "r", **changes: Any) -> GenerationRequest:
    return GenerationRequest(**({"id": id, "prompt": PROMPT, "max_tokens": 10} | changes))


@asynchronous
async def test_a_stream_is_what_the_worker_says(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        stream = client.stream(request(deadline=time.monotonic() + 2.0, arrival=time.monotonic()))
        submit = await worker.submitted()
        assert (submit.request.prompt, submit.output, submit.request.max_tokens) == (PROMPT, (), 10)
        assert submit.deadline_in_s == pytest.approx(2.0, abs=0.5)
        worker.tell(submit.request.id, [1])
        worker.tell(submit.request.id, [2, 3], end=FinishReason.STOP)
        outputs = [output async for output in stream]
    assert [output.tokens for output in outputs] == [[1], [2, 3]]
    assert "".join(output.text for output in outputs) == "<1><2><3>"
    assert outputs[-1].ending is not None
    assert outputs[-1].ending.finish is FinishReason.STOP


@asynchronous
async def test_a_stream_goes_on_where_a_lost_worker_left_it(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        task = asyncio.create_task(client.complete(request(sampling=SamplingParams(seed=7))))
        submit = await worker.submitted()
        worker.tell(submit.request.id, [1, 2])
        worker.hang_up()
        again = await worker.submitted()
        assert again.request.id != submit.request.id
        assert (again.request.prompt, again.output, again.request.max_tokens) == (PROMPT, (1, 2), 10)
        assert again.request.sampling == submit.request.sampling
        worker.tell(submit.request.id, [99])  # of the lost submission: nobody listens
        worker.tell(again.request.id, [3], end=FinishReason.LENGTH)
        (answer,) = await task
    assert (answer.tokens, answer.text) == ([1, 2, 3], "<1><2><3>")


@asynchronous
async def test_a_frame_that_came_in_part_counts_for_nothing(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        task = asyncio.create_task(client.complete(request()))
        submit = await worker.submitted()
        worker.tell(submit.request.id, [1])
        whole = wire.encode_frame(wire.Outputs([SequenceOutput(submit.request.id, 0, [2], "<2>")]))
        for writer in worker._writers:  # pyright: ignore[reportPrivateUsage]
            writer.write(whole[:-3])
            await writer.drain()
        worker.hang_up()
        assert (await worker.submitted()).output == (1,)
        task.cancel()


@asynchronous
async def test_another_replica_takes_over_at_once(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, client):
        task = asyncio.create_task(client.complete(request()))
        lost, heir = await asked_first(first, second)
        submit = await lost.submitted()
        lost.tell(submit.request.id, [5])
        await lost.die()
        again = await heir.submitted()
        assert again.output == (5,)
        heir.tell(again.request.id, [6], end=FinishReason.LENGTH)
        (answer,) = await task
    assert answer.tokens == [5, 6]


@asynchronous
async def test_sequences_that_have_parted_go_on_one_by_one(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        task = asyncio.create_task(client.complete(request(n=3, sampling=SamplingParams(temperature=1.0, seed=7))))
        submit = await worker.submitted()
        assert submit.request.n == 3
        worker.tell(submit.request.id, [10], index=0)
        worker.tell(submit.request.id, [11], index=1, end=FinishReason.STOP)
        worker.tell(submit.request.id, [12, 13], index=2)
        worker.hang_up()
        again = [await worker.submitted(), await worker.submitted()]
        assert [(s.request.n, s.output, s.request.sampling.seed) for s in again] == [
            (1, (10,), 7),
            (1, (12, 13), sequence_seed(7, 2)),
        ]
        worker.tell(again[1].request.id, [14], end=FinishReason.LENGTH)
        worker.tell(again[0].request.id, [15], end=FinishReason.LENGTH)
        answers = await task
    assert [answer.tokens for answer in answers] == [[10, 15], [11], [12, 13, 14]]


@asynchronous
async def test_a_request_of_which_nothing_came_begins_again_whole(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        task = asyncio.create_task(client.complete(request(n=2, prompt_logprobs=1)))
        await worker.submitted()
        worker.hang_up()
        again = await worker.submitted()
        assert (again.request.n, again.output, again.request.prompt_logprobs) == (2, (), 1)
        task.cancel()


@asynchronous
async def test_a_request_that_takes_every_worker_with_it_ends(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        task = asyncio.create_task(client.complete(request()))
        for _ in range(MOST_ATTEMPTS):
            await worker.submitted()
            worker.hang_up()
        with pytest.raises(WorkerLostError, match=str(MOST_ATTEMPTS)):
            await task
        assert worker.received.empty()


@asynchronous
async def test_patience_without_a_worker_has_an_end(tmp_path: Path) -> None:
    waits = ClientTimeouts(patience=0.1, reconnect=0.01)
    async with EngineClient([tmp_path / "nowhere"], waits=waits) as client:
        with pytest.raises(WorkerLostError, match="no worker"):
            await client.complete(request())
        with pytest.raises(WorkerLostError):
            await client.ready()


@asynchronous
async def test_requests_wait_for_a_worker_that_is_yet_to_come(tmp_path: Path) -> None:
    async with EngineClient([tmp_path / "s"], waits=WAITS) as client:
        task = asyncio.create_task(client.complete(request()))
        await asyncio.sleep(0.05)
        async with Played(tmp_path / "s") as worker:
            submit = await worker.submitted()
            worker.tell(submit.request.id, [1], end=FinishReason.STOP)
            assert (await task)[0].tokens == [1]


@asynchronous
async def test_an_unknown_grammar_kind_is_rejected_before_it_reaches_a_worker(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        with pytest.raises(RequestError, match="Unknown grammar kind 'paint'") as wrong:
            await client.complete(request(grammar=Grammar("paint")))  # type: ignore[arg-type]
        assert wrong.value.parameter == "grammar"
        assert worker.received.empty()


@asynchronous
async def test_a_refusal_is_an_error_of_its_kind(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        task = asyncio.create_task(client.complete(request()))
        submit = await worker.submitted()
        worker.say(wire.Rejected(id=submit.request.id, reason="no such token", parameter="prompt"))
        with pytest.raises(RequestError, match="no such token") as wrong:
            await task
        assert wrong.value.parameter == "prompt"
        task = asyncio.create_task(client.complete(request()))
        submit = await worker.submitted()
        worker.say(wire.Rejected(id=submit.request.id, reason="too many wait", retry_after=1.5, predicted=9.0))
        with pytest.raises(OverloadedError, match="too many") as full:
            await task
        assert (full.value.retry_after, full.value.predicted) == (1.5, 9.0)


@asynchronous
async def test_what_one_replica_has_no_room_for_goes_to_another(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, client):
        task = asyncio.create_task(client.complete(request()))
        full, other = await asked_first(first, second)
        submit = await full.submitted()
        full.say(wire.Rejected(id=submit.request.id, reason="too many wait", retry_after=1.0))
        again = await other.submitted()
        other.tell(again.request.id, [1], end=FinishReason.STOP)
        assert (await task)[0].tokens == [1]


@asynchronous
async def test_a_continuation_is_not_refused_but_tried_again(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        task = asyncio.create_task(client.complete(request()))
        submit = await worker.submitted()
        worker.tell(submit.request.id, [1])
        worker.hang_up()
        again = await worker.submitted()
        worker.say(wire.Rejected(id=again.request.id, reason="too many wait", retry_after=0.01))
        again = await worker.submitted()
        assert again.output == (1,)
        worker.tell(again.request.id, [2], end=FinishReason.STOP)
        assert (await task)[0].tokens == [1, 2]


@asynchronous
async def test_a_continuation_that_comes_too_late_ends_at_its_deadline(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        for kind in ("never in time", "not now", "nobody there"):
            task = asyncio.create_task(client.complete(request(deadline=time.monotonic() + 1.0)))
            submit = await worker.submitted()
            worker.tell(submit.request.id, [1])
            if kind == "nobody there":
                await worker.die()
            else:
                worker.hang_up()
                refuser = asyncio.create_task(refuse_all(worker, never=kind == "never in time"))
                await asyncio.wait({task})
                refuser.cancel()
            (answer,) = await task
            assert answer.tokens == [1]
            assert answer.ending is not None
            assert (answer.ending.finish, answer.ending.usage.output_tokens) == (FinishReason.DEADLINE, 1)


@asynchronous
async def test_a_draining_worker_gets_nothing_new_and_finishes_what_it_has(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, client):
        running = asyncio.create_task(client.complete(request("a")))
        draining, other = await asked_first(first, second)
        submit = await draining.submitted()
        draining.say(wire.Draining())
        await asyncio.sleep(0.05)
        fresh = [asyncio.create_task(client.complete(request(str(n)))) for n in range(3)]
        for _ in range(3):
            other.tell((await other.submitted()).request.id, [2], end=FinishReason.STOP)
        draining.tell(submit.request.id, [1], end=FinishReason.STOP)
        assert (await running)[0].tokens == [1]
        assert [(await task)[0].tokens for task in fresh] == [[2]] * 3
        assert draining.received.empty()


@asynchronous
async def test_a_request_refused_for_draining_goes_elsewhere_unharmed(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, client):
        task = asyncio.create_task(client.complete(request()))
        draining, other = await asked_first(first, second)
        submit = await draining.submitted()
        draining.say(wire.Rejected(id=submit.request.id, reason="draining", draining=True))
        other.tell((await other.submitted()).request.id, [1], end=FinishReason.STOP)
        assert (await task)[0].tokens == [1]


@asynchronous
async def test_leaving_a_stream_cancels_it(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        async with client.stream(request()) as stream:
            submit = await worker.submitted()
            worker.tell(submit.request.id, [1])
            assert (await stream.__anext__()).tokens == [1]
        assert await worker.received.get() == wire.Cancel(submit.request.id)
        task = asyncio.create_task(client.complete(request()))
        submit = await worker.submitted()
        task.cancel()
        assert await worker.received.get() == wire.Cancel(submit.request.id)


@asynchronous
async def test_who_listens_is_called_for_each_output_and_for_the_end(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        stream = client.stream(request())
        heard: list[list[int]] = []
        over = asyncio.Event()

        def listener() -> None:
            while (output := stream.take()) is not None:
                heard.append(output.tokens)
            if stream.closed:
                over.set()

        submit = await worker.submitted()
        worker.tell(submit.request.id, [1])
        assert (await stream.__anext__()).tokens == [1]  # until somebody listens
        stream.listen(listener)
        worker.tell(submit.request.id, [2])
        worker.tell(submit.request.id, [3], end=FinishReason.STOP)
        await over.wait()
        assert heard == [[2], [3]]
        assert stream.take() is None
        stream.listen(None)
        stream.end(WorkerLostError("gone"))
        with pytest.raises(WorkerLostError):
            stream.take()


@asynchronous
async def test_a_worker_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    waits = ClientTimeouts(patience=5.0, silence=0.1, ping=0.02, reconnect=0.01)
    async with two(tmp_path, waits) as (first, second, client):
        task = asyncio.create_task(client.complete(request()))
        silent, other = await asked_first(first, second)
        silent.pongs = False
        again = await other.submitted()
        other.tell(again.request.id, [1], end=FinishReason.STOP)
        assert (await task)[0].tokens == [1]


@asynchronous
async def test_a_worker_that_is_stuck_in_a_step_is_given_up(tmp_path: Path) -> None:
    waits = ClientTimeouts(patience=5.0, ping=0.02, reconnect=0.01, longest_step=60.0)
    async with two(tmp_path, waits) as (first, second, client):
        task = asyncio.create_task(client.complete(request()))
        stuck, other = await asked_first(first, second)
        stuck.busy = 61.0
        other.tell((await other.submitted()).request.id, [1], end=FinishReason.STOP)
        assert (await task)[0].tokens == [1]


@asynchronous
async def test_requests_with_one_prefix_go_to_one_replica(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, client):
        for n in range(6):
            task = asyncio.create_task(client.complete(request(str(n), prompt=(*range(500), n))))
            worker, _ = await asked_first(first, second)
            worker.tell((await worker.submitted()).request.id, [1], end=FinishReason.STOP)
            await task
            if n == 0:
                chosen = worker
            assert worker is chosen
        tasks = [asyncio.create_task(client.complete(request(str(n), prompt=(n,) * 300))) for n in range(4)]
        await until(lambda: first.received.qsize() + second.received.qsize() == 4)
        assert (first.received.qsize(), second.received.qsize()) == (2, 2)
        for task in tasks:
            task.cancel()


@asynchronous
async def test_workers_of_another_variant_or_version_are_not_used(tmp_path: Path) -> None:
    async with (
        Played(tmp_path / "a"),
        Played(tmp_path / "b", variant="int4") as other,
        EngineClient([tmp_path / "a", tmp_path / "b"], waits=WAITS) as client,
    ):
        await client.ready()
        await asyncio.sleep(0.1)
        tasks = [asyncio.create_task(client.complete(request(str(n)))) for n in range(4)]
        await asyncio.sleep(0.05)
        assert other.received.empty()
        for task in tasks:
            task.cancel()
    async with Played(tmp_path / "c", version=wire.VERSION + 1), EngineClient([tmp_path / "c"], waits=WAITS) as client:
        with pytest.raises(wire.WireError, match="version"):
            await client.ready()


@asynchronous
async def test_a_client_has_a_bound_on_requests(tmp_path: Path) -> None:
    async with Played(tmp_path / "s"), EngineClient([tmp_path / "s"], waits=WAITS, most_requests=2) as client:
        await client.ready()
        running = [client.stream(request("a")), client.stream(request("b"))]
        with pytest.raises(OverloadedError, match="2 requests"):
            await client.complete(request("c"))
        running[0].cancel()
        assert not client.stream(request("d")).closed


@asynchronous
async def test_many_requests_are_answered_in_their_order(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):

        async def play() -> None:
            held: list[str] = []
            for n in range(20):
                submit = await worker.submitted()
                held.append(submit.request.id)
                if len(held) == 4 or n == 19:  # backwards, four at a time
                    for id in reversed(held):
                        worker.tell(id, [int(id.split(".")[1])], end=FinishReason.STOP)
                    held.clear()

        player: Awaitable[None] = asyncio.create_task(play())
        found = await client.complete_all([request(str(n)) for n in range(20)], at_once=4)
        await player
    numbers = [answers[0].tokens[0] for answers in found]
    assert numbers == sorted(numbers)


@asynchronous
async def test_a_question_to_a_worker_that_dies_is_an_error(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        pinning = asyncio.create_task(client.pin([1] * 16))
        pin = await worker.received.get()
        assert isinstance(pin, wire.Pin)
        worker.say(wire.Pinned(pin.number))
        await pinning
        task = asyncio.create_task(client.pin([1] * 16, keep=False))
        assert isinstance(await worker.received.get(), wire.Pin)
        worker.hang_up()
        with pytest.raises(HeadraceError, match="did not answer"):
            await task


@asynchronous
async def test_a_worker_that_comes_back_gets_the_pins_again_before_any_request(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):
        pinning = asyncio.create_task(client.pin([1] * 16, "red", public=True))
        assert isinstance(await worker.received.get(), wire.Pin)
        worker.hang_up()  # before it is done: its successor computes it
        await pinning
        again = await worker.received.get()
        assert isinstance(again, wire.Pin)
        assert (again.tokens, again.salt, again.public, again.keep) == ((1,) * 16, "red", True, True)
        unpinning = asyncio.create_task(client.pin([1] * 16, "red", keep=False))
        ended = await worker.received.get()
        assert isinstance(ended, wire.Pin)
        assert not ended.keep
        worker.say(wire.Pinned(ended.number))
        await unpinning
        worker.hang_up()
        await client.ready()
        stream = client.stream(request("a"))
        assert (await worker.submitted()).request.prompt == PROMPT  # and no pin before it
        stream.cancel()


@asynchronous
async def test_a_pin_that_one_worker_rejects_is_kept_by_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with two(tmp_path) as (first, second, client):
        pinning = asyncio.create_task(client.pin([1] * 16))
        accepted, rejected = await first.received.get(), await second.received.get()
        assert isinstance(accepted, wire.Pin)
        assert isinstance(rejected, wire.Pin)
        first.say(wire.Pinned(accepted.number))
        second.say(wire.Pinned(rejected.number, "no room"))
        for worker, reason in ((first, None), (second, "not pinned there")):
            undone = await worker.received.get()
            assert isinstance(undone, wire.Pin)
            assert not undone.keep
            worker.say(wire.Pinned(undone.number, reason))
        with pytest.raises(RequestError, match="no room"):
            await pinning
        with pytest.raises(RequestError, match="not pinned"):
            await client.pin([1] * 16, keep=False)
    assert "not pinned there" not in caplog.text  # of no interest: that worker has rejected it


@asynchronous
async def test_a_prefix_is_kept_until_its_last_owner_lets_it_go(tmp_path: Path) -> None:
    async with one_of(tmp_path / "s") as (worker, client):

        async def tells(*, keep: bool, call: Coroutine[Any, Any, None]) -> int:
            """Answer the one message that a call sends, and return its number of tokens."""
            calling = asyncio.create_task(call)
            pin = await worker.received.get()
            assert isinstance(pin, wire.Pin)
            assert pin.keep is keep
            worker.say(wire.Pinned(pin.number))
            await calling
            return len(pin.tokens)

        for owner in ("a", "b", "b"):
            await tells(keep=True, call=client.pin([1] * 16, owner=owner))
        await client.pin([1] * 16, keep=False, owner="a")  # without a message
        with pytest.raises(RequestError, match="not pinned"):
            await client.pin([1] * 16, keep=False, owner="a")
        # Its blocks are those of a longer prefix, whose last tokens fill no block.
        await tells(keep=True, call=client.pin([1] * 20, owner="c"))
        await client.pin([1] * 16, keep=False, owner="b")
        assert await tells(keep=False, call=client.pin([1] * 20, keep=False, owner="c")) == 20
        assert worker.received.empty()
