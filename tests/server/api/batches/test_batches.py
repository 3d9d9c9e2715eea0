"""Batches: every request has one line in one file, whatever happens to the server, the disk and the others."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.server.api.batches.batch_kind import OPENAI_BATCH
from headrace.server.api.batches.batches import Batches, BatchOwner
from tests.support.file_storage import (
    Limits,
    Store,
    asynchronous,
    on_disk,
    open_store,
    refused,
    requests,
    storing,
    upload,
    whole,
)

Answer = tuple[int, dict[str, Any]]


class Engine:
    """Runs requests, and remembers them."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, str]] = []  # tenant, custom id
        self.keys: set[str] = set()
        self.running = 0
        self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def run(self, url: str, body: dict[str, Any], owner: BatchOwner, batch_id: str, custom_id: str) -> Answer:
        assert url in OPENAI_BATCH.endpoints
        assert batch_id.startswith("batch_")
        self.ran.append((owner.tenant, custom_id))
        self.keys.add(owner.key)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            return await self.answer(body, custom_id)
        finally:
            self.running -= 1

    async def answer(self, body: dict[str, Any], custom_id: str) -> Answer:
        return 200, {"place": body["place"]}

    def counts(self) -> Counter[str]:
        return Counter(custom_id for _, custom_id in self.ran)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in lines]


def numbered(*places: int) -> list[str]:
    return [f"r{place}" for place in places]


def test_a_batch_is_run_to_its_end(tmp_path: Path) -> None:
    class Picky(Engine):
        async def answer(self, body: dict[str, Any], custom_id: str) -> Answer:
            match body["place"]:
                case 1:
                    return 400, {"error": {"message": "no"}}
                case 2:
                    raise ApiError("not this one", status=422, code="odd")
                case 3:
                    raise RuntimeError("a secret of the inside")
                case 4:
                    return 200, {"text": "a lone \ud800"}
                case 5:
                    return 200, {"no JSON": object()}
                case _:
                    return 200, {"place": body["place"]}

    async def test() -> None:
        engine = Picky()
        async with storing(tmp_path, engine.run) as store:
            created = await store.batch(requests(7), metadata={"team": "search"})
            shown = created.as_json()
            assert shown["object"] == "batch"
            assert shown["status"] == "validating"
            assert shown["expires_at"] == shown["created_at"] + 24 * 3600
            assert shown["metadata"] == {"team": "search"}
            assert shown["errors"] is shown["output_file_id"] is shown["error_file_id"] is None
            done = await store.ended(created.id)
            shown = done.as_json()
            assert shown["status"] == "completed"
            assert shown["request_counts"] == {"total": 7, "completed": 3, "failed": 4}
            assert None not in (shown["in_progress_at"], shown["finalizing_at"], shown["completed_at"])
            assert shown["cancelled_at"] is shown["expired_at"] is shown["failed_at"] is None

            good = await store.lines(done.output_file_id)
            assert ids(good) == numbered(0, 4, 6)
            assert set(good[0]) == {"id", "custom_id", "response", "error"}
            assert good[0]["response"]["status_code"] == 200
            assert good[0]["response"]["body"] == {"place": 0}
            assert good[0]["response"]["request_id"].startswith("req_")
            assert good[0]["error"] is None
            bad = await store.lines(done.error_file_id)
            assert ids(bad) == numbered(1, 2, 3, 5)
            assert [line["response"]["status_code"] for line in bad] == [400, 422, 500, 500]
            assert bad[1]["response"]["body"]["error"]["code"] == "odd"
            assert "secret" not in json.dumps(bad)

            assert done.output_file_id is not None
            output = await store.files.get(done.output_file_id, "a")
            assert output.purpose == "batch_output"
            assert output.expires_at is not None
            rows = await store.db.run(
                lambda connection: connection.execute("SELECT COUNT(*) FROM batch_requests").fetchone()
            )
            assert rows == (0,)

    asynchronous(test)


def line(**changes: Any) -> str:
    request: dict[str, Any] = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {}}
    request.update(changes)
    return json.dumps({name: value for name, value in request.items() if value is not ...})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", [("empty_file", None, None)]),
        ("\n  \r\n\n", [("empty_file", None, None)]),
        ("no json\n" + line() + "\n[1]\n", [("invalid_json_line", 1, None), ("invalid_json_line", 3, None)]),
        ("[" * 100_000, [("invalid_json_line", 1, None)]),
        ('{"custom_id": "\\ud800"}', [("invalid_json_line", 1, None)]),
        (line() + "\n\n" + line(), [("duplicate_custom_id", 3, "custom_id")]),
        (line(custom_id=...), [("missing_required_parameter", 1, "custom_id")]),
        (line(body=...), [("missing_required_parameter", 1, "body")]),
        (line(custom_id=5), [("invalid_custom_id", 1, "custom_id")]),
        (line(custom_id=""), [("invalid_custom_id", 1, "custom_id")]),
        (line(custom_id="x" * 513), [("invalid_custom_id", 1, "custom_id")]),
        (line(method="GET"), [("invalid_method", 1, "method")]),
        (line(url="/v1/embeddings"), [("invalid_url", 1, "url")]),
        (line(body=[]), [("invalid_type", 1, "body")]),
        (line(body={"stream": True}), [("invalid_value", 1, "body.stream")]),
        (line(extra=1), [("unknown_parameter", 1, "extra")]),
        ("x" * 3000 + "\n" + line(), [("line_too_long", 1, None)]),
        ("[[" + "," * 150_000 + "]]\n" + line(), [("too_many_values", 1, None)]),
        ("\n".join(line(custom_id=str(i)) for i in range(5)), [("request_limit_exceeded", None, None)]),
    ],
)
def test_mistakes_of_the_input_are_listed(
    tmp_path: Path, content: str, expected: list[tuple[str, int | None, str | None]]
) -> None:
    async def test() -> None:
        engine = Engine()
        limits = Limits(batch_requests=4, file_bytes=200_000, files_bytes=400_000)
        line_bytes = 200_000 if content.startswith("[[") else 2000
        async with storing(tmp_path, engine.run, limits=limits, line_bytes=line_bytes, line_values=120_000) as store:
            done = await store.ended((await store.batch(content.encode())).id)
            shown = done.as_json()
            assert shown["status"] == "failed"
            assert shown["errors"]["object"] == "list"
            found = [(error["code"], error["line"], error["param"]) for error in shown["errors"]["data"]]
            assert found == expected
            assert all(error["message"] for error in shown["errors"]["data"])
            assert engine.ran == []
            await store.files.delete(done.input_file_id, "a")  # nothing holds it any more

    asynchronous(test)


def test_a_file_at_the_bound_is_run(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Engine()
        async with storing(tmp_path, engine.run, limits=Limits(batch_requests=4)) as store:
            content = b"\xef\xbb\xbf" + requests(4).replace(b"\n", b"\r\n\r\n").rstrip()
            done = await store.ended((await store.batch(content)).id)
            assert (done.status, done.completed) == ("completed", 4)

    asynchronous(test)


def test_only_so_many_mistakes_are_listed(tmp_path: Path) -> None:
    async def test() -> None:
        async with storing(tmp_path, Engine().run, limits=Limits(batch_requests=1000)) as store:
            done = await store.ended((await store.batch(b"wrong\n" * 500)).id)
            assert len(done.errors) == 100

    asynchronous(test)


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with storing(tmp_path, Engine().run) as store:
            good = await upload(store.files, requests(1))
            other = await upload(store.files, requests(1), purpose="user_data")
            theirs = await upload(store.files, requests(1), tenant="b")
            asked: dict[str, Any] = {
                "input_file_id": good.id,
                "endpoint": OPENAI_BATCH.endpoints[0],
                "completion_window": "24h",
                "tenant": "a",
            }
            wrong: list[tuple[dict[str, Any], int, str]] = [
                ({"endpoint": "/v1/files"}, 400, "endpoint"),
                ({"completion_window": "1h"}, 400, "completion_window"),
                ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
                ({"metadata": {"x": "y" * 513}}, 400, "metadata"),
                ({"output_expires_after": 1}, 400, "output_expires_after"),
                ({"input_file_id": other.id}, 400, "input_file_id"),
                ({"input_file_id": theirs.id}, 404, "input_file_id"),
                ({"input_file_id": "../../etc/passwd"}, 404, "input_file_id"),
            ]
            for changes, status, parameter in wrong:
                error = await refused(store.batches.create(**(asked | changes)))
                assert (error.status, error.parameter) == (status, parameter)
            await store.files.delete(other.id, "a")  # a refusal holds nothing
            assert (await store.batches.list("a")).data == []

    asynchronous(test)


def test_tenants_are_walls(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Engine()
        async with storing(tmp_path, engine.run) as store:
            batch = await store.batch(requests(1), key="app")
            for act in (store.batches.retrieve, store.batches.cancel):
                for id in (batch.id, "batch_" + "0" * 32, "batch_\ud800", ""):
                    error = await refused(act(id, "b"))
                    assert (error.status, error.code) == (404, "batch_not_found")
            assert (await store.batches.list("b")).data == []
            assert (await refused(store.batches.list("b", after=batch.id))).status == 400
            done = await store.ended(batch.id)
            assert done.output_file_id is not None
            assert (await refused(store.files.get(done.output_file_id, "b"))).status == 404
            assert (engine.ran, engine.keys) == ([("a", "r0")], {"app"})

    asynchronous(test)


def test_lists_go_page_by_page(tmp_path: Path) -> None:
    async def test() -> None:
        async with storing(tmp_path, Engine().run) as store:
            made = [(await store.batch(requests(1))).id for _ in range(3)]
            page = await store.batches.list("a", limit=2)
            assert ([batch.id for batch in page.data], page.has_more) == (made[:0:-1], True)
            page = await store.batches.list("a", limit=2, after=made[1])
            assert ([batch.id for batch in page.data], page.has_more) == (made[:1], False)
            assert (await refused(store.batches.list("a", limit=101))).status == 400

    asynchronous(test)


def test_requests_at_once_are_bounded_and_batches_take_turns(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Engine()
        engine.gate.clear()
        async with storing(tmp_path, engine.run, running=3) as store:
            first = await store.batch(requests(60), tenant="a")
            await until(lambda: engine.running == 3)
            second = await store.batch(requests(10), tenant="b")
            await asyncio.sleep(0.1)
            assert (engine.running, store.batches.running(), store.batches.unfinished()) == (3, 3, 2)
            engine.gate.set()
            await store.ended(second.id, "b")
            await store.ended(first.id)
            assert engine.most == 3
            turns = [tenant for tenant, _ in engine.ran]
            last_of_second = len(turns) - 1 - turns[::-1].index("b")
            assert turns[: last_of_second + 1].count("a") <= 10 + 2 * 3
            assert set(engine.counts().values()) <= {1, 2}
            assert len(engine.ran) == 70

    asynchronous(test)


def test_a_cancelled_batch_ends_with_what_it_has(tmp_path: Path) -> None:
    class SlowFromFive(Engine):
        async def answer(self, body: dict[str, Any], custom_id: str) -> Answer:
            if body["place"] >= 5:
                await asyncio.Event().wait()
            return 200, {}

    async def test() -> None:
        engine = SlowFromFive()
        async with storing(tmp_path, engine.run, running=2) as store:
            batch = await store.batch(requests(10))
            while (await store.batches.retrieve(batch.id, "a")).completed < 5:
                await asyncio.sleep(0.005)
            assert (await refused(store.files.delete(batch.input_file_id, "a"))).code == "file_in_use"
            cancelling = await store.batches.cancel(batch.id, "a")
            assert cancelling.status == "cancelling"
            done = await store.ended(batch.id)
            assert (done.status, engine.running) == ("cancelled", 0)
            assert (done.total, done.completed, done.failed) == (10, 5, 5)
            assert ids(await store.lines(done.output_file_id)) == numbered(0, 1, 2, 3, 4)
            errors = await store.lines(done.error_file_id)
            assert ids(errors) == numbered(5, 6, 7, 8, 9)
            assert {(line["response"], line["error"]["code"]) for line in errors} == {(None, "batch_cancelled")}
            assert None not in (done.times["cancelling_at"], done.times["cancelled_at"])
            error = await refused(store.batches.cancel(batch.id, "a"))
            assert (error.status, error.code) == (409, "batch_not_cancellable")
            await store.files.delete(batch.input_file_id, "a")

    asynchronous(test)


def test_a_batch_may_be_cancelled_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Engine()
        engine.gate.clear()
        async with storing(tmp_path, engine.run) as store:
            batch = await store.batch(requests(10))
            await store.batches.cancel(batch.id, "a")
            ended = await store.ended(batch.id)
            assert ended.status == "cancelled"
            # Cancelled before its input was read, it still has a line for each request.
            assert (ended.total, ended.completed, ended.failed, ended.unrun) == (10, 0, 10, 10)
            lines = await store.lines(ended.error_file_id)
            assert ids(lines) == numbered(*range(10))
            assert {each["error"]["code"] for each in lines} == {"batch_cancelled"}

    asynchronous(test)


def test_a_batch_expires_with_what_it_has(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Engine()
        engine.gate.clear()
        store = open_store(tmp_path, engine.run, running=2)
        batch = await store.batch(requests(5))
        await until(lambda: engine.running == 2)
        await store.batches.close()
        await store.db.close()
        store.clock.now += 24 * 3600
        async with storing(tmp_path, engine.run, clock=store.clock) as store:
            await store.batches.resume()
            done = await store.ended(batch.id)
            assert (done.status, done.total, done.failed) == ("expired", 5, 5)
            errors = await store.lines(done.error_file_id)
            assert {line["error"]["code"] for line in errors} == {"batch_expired"}
            assert ids(errors) == numbered(0, 1, 2, 3, 4)
            assert done.output_file_id is None

    asynchronous(test)


def test_the_window_ends_while_requests_run(tmp_path: Path) -> None:
    class Stuck(Engine):
        async def answer(self, body: dict[str, Any], custom_id: str) -> Answer:
            if body["place"]:
                await asyncio.Event().wait()
            return 200, {}

    async def test() -> None:
        engine = Stuck()
        store = open_store(tmp_path, engine.run)
        batch = await store.batch(requests(3))
        while (await store.batches.retrieve(batch.id, "a")).completed < 1:
            await asyncio.sleep(0.005)
        await store.batches.close()
        await store.db.close()
        store.clock.now += 24 * 3600 - 1  # a second is left when the next server begins
        async with storing(tmp_path, engine.run, clock=store.clock) as store:
            await store.batches.resume()
            done = await store.ended(batch.id)
            assert (done.status, done.completed, done.failed) == ("expired", 1, 2)
            assert engine.counts() == {"r0": 1, "r1": 2, "r2": 2}

    asynchronous(test)


def test_refusals_are_tried_again_until_they_pass(tmp_path: Path) -> None:
    class Busy(Engine):
        refusals = 0

        async def answer(self, body: dict[str, Any], custom_id: str) -> Answer:
            if self.refusals < 12:
                self.refusals += 1
                if self.refusals % 2:
                    raise ApiError("busy", kind="overloaded_error", retry_after=0.001)
                return 429, {"error": {}}
            return 200, {}

    async def test() -> None:
        engine = Busy()
        async with storing(tmp_path, engine.run, running=4) as store:
            done = await store.ended((await store.batch(requests(8))).id)
            assert (done.status, done.completed, done.failed) == ("completed", 8, 0)
            assert len(engine.ran) == 8 + 12

    asynchronous(test)


def test_tries_are_bounded_and_others_run_meanwhile(tmp_path: Path) -> None:
    others_have_run = asyncio.Event()

    class NoBudget(Engine):
        async def run(self, url: str, body: dict[str, Any], owner: BatchOwner, batch_id: str, custom_id: str) -> Answer:
            status, answer = await super().run(url, body, owner, batch_id, custom_id)
            poor = owner.tenant == "poor"
            if poor and len(self.ran) > 4:
                await others_have_run.wait()  # however fast the tries follow each other
            return (429, {"error": {"code": "budget"}}) if poor else (status, answer)

    async def test() -> None:
        engine = NoBudget()
        async with storing(tmp_path, engine.run, running=2) as store:
            poor = await store.batch(requests(3), tenant="poor")
            await until(lambda: len(engine.ran) >= 2)
            rich = await store.batch(requests(20), tenant="rich")
            assert (await store.ended(rich.id, "rich")).completed == 20
            assert (await store.batches.retrieve(poor.id, "poor")).status == "in_progress"
            others_have_run.set()
            done = await store.ended(poor.id, "poor")
            assert (done.status, done.failed) == ("completed", 3)
            lines = await store.lines(done.error_file_id, "poor")
            assert [line["response"]["status_code"] for line in lines] == [429] * 3
            assert Counter(engine.ran)["poor", "r0"] == 5

    asynchronous(test)


def test_a_cancellation_from_inside_is_tried_again(tmp_path: Path) -> None:
    class Restarting(Engine):
        async def answer(self, body: dict[str, Any], custom_id: str) -> Answer:
            if self.counts()[custom_id] == 1:
                raise asyncio.CancelledError
            return 200, {}

    async def test() -> None:
        async with storing(tmp_path, Restarting().run) as store:
            done = await store.ended((await store.batch(requests(3))).id)
            assert (done.status, done.completed) == ("completed", 3)

    asynchronous(test)


async def drop(store: Store) -> None:
    """As a server that dies: nothing is told to the storage."""
    for task in list(store.batches._tasks):  # pyright: ignore[reportPrivateUsage]
        task.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize("clean", [True, False])
def test_the_next_server_goes_on_with_what_has_no_result(tmp_path: Path, clean: bool) -> None:
    class Stops(Engine):
        stop_at = 7

        async def answer(self, body: dict[str, Any], custom_id: str) -> Answer:
            if body["place"] >= self.stop_at:
                await asyncio.Event().wait()
            return (404 if body["place"] == 3 else 200), {"by": id(self)}

    async def test() -> None:
        first = Stops()
        store = open_store(tmp_path, first.run, running=3)
        batch = await store.batch(requests(20))
        await until(lambda: first.running == 3 and max(first.counts()) and "r9" in first.counts())
        if clean:
            await store.batches.close()
            await store.db.close()
            assert (await refused(store.batches.create(**NEW, input_file_id=batch.input_file_id))).status == 503
        else:
            await drop(store)
        second = Stops()
        second.stop_at = 100
        async with storing(tmp_path, second.run, clock=store.clock) as again:
            await again.batches.resume()
            await again.batches.resume()  # once is enough
            done = await again.ended(batch.id)
            assert (done.status, done.total, done.completed, done.failed) == ("completed", 20, 19, 1)
            assert sorted(second.counts()) == sorted(numbered(*range(7, 20)))
            assert set(second.counts().values()) == {1}
            lines = await again.lines(done.output_file_id)
            assert sorted(ids(lines)) == sorted(numbered(*(i for i in range(20) if i != 3)))
            assert ids(await again.lines(done.error_file_id)) == ["r3"]
        await store.db.close()

    asynchronous(test)


NEW: dict[str, Any] = {"endpoint": OPENAI_BATCH.endpoints[0], "completion_window": "24h", "tenant": "a"}

# A server that tells each result that `run` gave, until it is killed.
KILLED = """
import asyncio, sys
from pathlib import Path
from tests.support.file_storage import open_store, requests

async def run(url, body, owner, batch_id, custom_id):
    await asyncio.sleep(0.002)
    print(custom_id, flush=True)
    return 200, {"by": "first"}

async def main():
    store = open_store(Path(sys.argv[1]), run)
    print((await store.batch(requests(100), key="app")).id, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_server_loses_at_most_what_was_running(tmp_path: Path) -> None:
    async def test() -> None:
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            batch_id = server.stdout.readline().strip()
            told = [server.stdout.readline().strip() for _ in range(30)]
            server.kill()
            told += server.stdout.read().split()
        engine = Engine()
        async with storing(tmp_path, engine.run) as store:
            await store.batches.resume()
            done = await store.ended(batch_id)
            assert (done.status, done.completed) == ("completed", 100)
            lines = await store.lines(done.output_file_id)
            assert ids(lines) == numbered(*range(100))
            kept = [line["custom_id"] for line in lines if line["response"]["body"] == {"by": "first"}]
            assert set(kept) | set(engine.counts()) == set(numbered(*range(100)))
            assert not set(kept) & set(engine.counts())
            assert engine.keys <= {"app"}
            assert len(kept) >= len(told) - 4  # `running`

    asynchronous(test)


def test_a_server_that_died_while_writing_writes_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Half(Engine):
        async def answer(self, body: dict[str, Any], custom_id: str) -> Answer:
            return (200 if body["place"] % 2 else 400), {}

    async def test() -> None:
        engine = Half()
        store = open_store(tmp_path, engine.run)
        written = asyncio.Event()
        write = Batches._write  # pyright: ignore[reportPrivateUsage]

        async def first_only(self: Batches, live: Any, column: str, which: str) -> None:
            if column == "error_file_id":
                written.set()
                await asyncio.Event().wait()
            await write(self, live, column, which)

        monkeypatch.setattr(Batches, "_write", first_only)
        batch = await store.batch(requests(4))
        await written.wait()
        assert (await store.batches.retrieve(batch.id, "a")).status == "finalizing"
        error = await refused(store.batches.cancel(batch.id, "a"))
        assert error.status == 409
        await drop(store)
        monkeypatch.undo()
        async with storing(tmp_path, engine.run, clock=store.clock) as again:
            await again.batches.resume()
            done = await again.ended(batch.id)
            assert ids(await again.lines(done.output_file_id)) == numbered(1, 3)
            assert ids(await again.lines(done.error_file_id)) == numbered(0, 2)
            assert on_disk(tmp_path) == sorted(
                [batch.input_file_id, done.output_file_id or "", done.error_file_id or ""]
            )
            assert set(engine.counts().values()) == {1}
        await store.db.close()

    asynchronous(test)


def test_results_wait_for_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        engine = Engine()
        engine.gate.clear()
        async with storing(tmp_path, engine.run, running=2) as store:
            batch = await store.batch(requests(6))
            await until(lambda: engine.running == 2)
            run, refusals = store.db.run, 0

            async def full(function: Any) -> Any:
                nonlocal refusals
                refusals += 1
                raise ApiError("full", kind="server_error", code="storage_unavailable", status=507)

            monkeypatch.setattr(store.db, "run", full)
            engine.gate.set()
            await until(lambda: refusals >= 2)
            await asyncio.sleep(0.1)
            assert len(engine.ran) == 2  # nothing more is run while nothing can be saved
            monkeypatch.setattr(store.db, "run", run)
            done = await store.ended(batch.id)
            assert (done.status, done.completed) == ("completed", 6)
            assert set(engine.counts().values()) == {1}

    asynchronous(test)


def test_an_output_waits_for_room(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Engine()
        content = requests(5)
        limits = Limits(file_bytes=2000, files_bytes=3000)
        async with storing(tmp_path, engine.run, limits=limits) as store:
            engine.gate.clear()
            batch = await store.batch(content)
            await until(lambda: engine.running)
            other = await upload(store.files, b"x" * 2000, tenant="b")
            engine.gate.set()
            while (await store.batches.retrieve(batch.id, "a")).status != "finalizing":
                await asyncio.sleep(0.01)
            await store.files.delete(other.id, "b")
            done = await store.ended(batch.id)
            assert (done.status, done.completed) == ("completed", 5)
            assert len((await whole(store.files, done.output_file_id or "")).splitlines()) == 5

    asynchronous(test)


def test_an_input_that_expires_is_kept_for_its_batch(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Engine()
        engine.gate.clear()
        async with storing(tmp_path, engine.run, running=1) as store:
            file = await upload(store.files, requests(3), expires_after=3600)
            batch = await store.batches.create(**NEW, input_file_id=file.id)
            await until(lambda: engine.running)
            store.clock.now += 4000
            assert await store.files.sweep() == 0
            engine.gate.set()
            assert (await store.ended(batch.id)).completed == 3
            assert await store.files.sweep() == 1

    asynchronous(test)


def test_unfinished_batches_are_bounded(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Engine()
        engine.gate.clear()
        async with storing(tmp_path, engine.run, unfinished=3, unfinished_of_tenant=2) as store:
            made = [await store.batch(requests(1)) for _ in range(2)]
            error = await refused(store.batch(requests(1)))
            assert (error.status, error.code) == (429, "too_many_batches")
            await store.batch(requests(1), tenant="b")
            assert (await refused(store.batch(requests(1), tenant="c"))).status == 429
            engine.gate.set()
            await store.ended(made[0].id)
            await store.batch(requests(1))

    asynchronous(test)


def test_ended_batches_are_forgotten_at_the_bound(tmp_path: Path) -> None:
    async def test() -> None:
        async with storing(tmp_path, Engine().run, kept=2) as store:
            made: list[str] = []
            for _ in range(4):
                made.append((await store.batch(requests(1))).id)
                await store.ended(made[-1])
            assert [batch.id for batch in (await store.batches.list("a")).data] == made[:0:-1]

    asynchronous(test)


def test_resuming_waits_for_a_storage_that_is_not_there(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "headrace.sqlite").write_bytes(b"this is no database" * 1000)
        async with storing(tmp_path, Engine().run) as store:
            await store.batches.resume()

    asynchronous(test)
