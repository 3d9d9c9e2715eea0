"""Files and the database under them: walls, bounds, names, what is left after failures."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.gateway.database import Database
from headrace.server.api.files import FileStore, plain_name
from tests.support.clock import Clock
from tests.support.file_storage import Limits, asynchronous, on_disk, pieces_of, refused, upload, whole


@asynccontextmanager
async def files_in(folder: Path, *, limits: Limits | None = None, **options: Any) -> AsyncGenerator[FileStore, None]:
    db = Database(folder)
    try:
        yield FileStore(db, folder, limits or Limits(), **options)
    finally:
        await db.close()


def test_a_file_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock()
        async with files_in(tmp_path / "new" / "storage", clock=clock) as files:
            record = await upload(files, b"one ", b"", b"two", purpose="user_data", filename="notes.txt")
            assert record.as_json() == {
                "id": record.id,
                "object": "file",
                "bytes": 7,
                "created_at": int(clock.now),
                "filename": "notes.txt",
                "purpose": "user_data",
                "status": "processed",
            }
            assert await files.get(record.id, "a") == record
            assert await whole(files, record.id) == b"one two"
            big = os.urandom(90_000)
            record = await upload(files, *(big[i : i + 1000] for i in range(0, len(big), 1000)))
            assert await whole(files, record.id) == big

    asynchronous(test)


def test_storage_is_private_to_its_owner(tmp_path: Path) -> None:
    async def test() -> None:
        folder = tmp_path / "storage"
        async with files_in(folder) as files:
            await upload(files, b"x")
            modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in (".", "files", "headrace.sqlite")}
            assert modes == {".": 0o700, "files": 0o700, "headrace.sqlite": 0o600}

    asynchronous(test)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("/", "upload"),
        ("..", "upload"),
        ("", "upload"),
        ("a\r\nSet-Cookie: x\x00.jsonl", "aSet-Cookie: x.jsonl"),
        ("gpj.\u202etxt", "gpj.txt"),
        ("bad\ud800name", "badname"),
        ("ünïcode 文件.jsonl", "ünïcode 文件.jsonl"),
        ("x" * 10_000, "x" * 255),
    ],
)
def test_a_filename_is_never_a_path(tmp_path: Path, sent: str, kept: str) -> None:
    assert plain_name(sent) == kept

    async def test() -> None:
        async with files_in(tmp_path) as files:
            record = await upload(files, b"x", filename=sent)
            assert record.filename == kept
            assert on_disk(tmp_path) == [record.id]

    asynchronous(test)


def test_ids_that_are_paths_are_unknown(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "secret").write_text("secret")
        async with files_in(tmp_path) as files:
            await upload(files, b"x")
            for id in (
                "../secret",
                "file-../../../secret",
                "",
                "file-" + "A" * 24,
                "file-" + "a" * 24 + "\n",
                "file-\0",
            ):
                assert (await refused(files.get(id, "a"))).status == 404
                assert (await refused(files.content(id, "a"))).status == 404
                assert (await refused(files.delete(id, "a"))).status == 404
        assert (tmp_path / "secret").exists()

    asynchronous(test)


def test_tenants_are_walls(tmp_path: Path) -> None:
    async def test() -> None:
        async with files_in(tmp_path) as files:
            record = await upload(files, b"x", tenant="a")
            unknown = "file-" + "0" * 24
            for act in (files.get, files.content, files.delete):
                theirs, nobodys = await refused(act(record.id, "b")), await refused(act(unknown, "b"))
                assert (theirs.status, theirs.openai()) == (nobodys.status, nobodys.openai())
                assert theirs.status == 404
            assert (await files.list("b")).data == []
            assert (await refused(files.list("b", after=record.id))).status == 400
            assert await whole(files, record.id) == b"x"

    asynchronous(test)


def test_lists_go_page_by_page(tmp_path: Path) -> None:
    async def test() -> None:
        async with files_in(tmp_path) as files:
            ids = [(await upload(files, b"x", purpose=p)).id for p in ("batch", "user_data", "batch", "batch")]
            page = await files.list("a", limit=3)
            assert ([file.id for file in page.data], page.has_more) == (ids[:0:-1], True)
            page = await files.list("a", limit=3, after=ids[1])
            assert ([file.id for file in page.data], page.has_more) == (ids[:1], False)
            page = await files.list("a", order="asc", purpose="batch")
            assert [file.id for file in page.data] == [ids[0], ids[2], ids[3]]
            shown = page.as_json(lambda file: file.as_json())
            assert (shown["first_id"], shown["last_id"], shown["has_more"]) == (ids[0], ids[3], False)
            mistakes: list[dict[str, Any]] = [{"limit": 0}, {"limit": 10_001}, {"order": "sideways"}]
            for wrong in mistakes:
                assert (await refused(files.list("a", **wrong))).status == 400

    asynchronous(test)


def test_purposes_that_nothing_would_honour_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with files_in(tmp_path) as files:
            for purpose in ("assistants", "evals", "fine-tune", "vision", "batch_output", "other", ""):
                error = await refused(upload(files, b"x", purpose=purpose))
                assert (error.status, error.parameter) == (400, "purpose")

    asynchronous(test)


def test_a_file_has_at_most_its_bound(tmp_path: Path) -> None:
    async def test() -> None:
        async with files_in(tmp_path, limits=Limits(file_bytes=10, files_bytes=25)) as files:
            await upload(files, b"12345", b"67890")
            error = await refused(upload(files, b"12345", b"67890", b"1"))
            assert (error.status, error.code) == (413, "file_too_large")
            assert len(on_disk(tmp_path)) == 1

    asynchronous(test)


def test_all_files_together_have_at_most_their_bound(tmp_path: Path) -> None:
    async def test() -> None:
        limits = Limits(file_bytes=10, files_bytes=20)
        async with files_in(tmp_path, limits=limits) as files:
            first = await upload(files, b"1234567890")
            error = await refused(upload(files, b"12345", b"67890", b"1", tenant="b"))
            assert error.status == 413
            await upload(files, b"1234567890", tenant="b")
            assert (await refused(upload(files, b"1"))).status == 507
            assert files.used() == (2, 20)
        async with files_in(tmp_path, limits=limits) as files:  # what is there counts after a restart
            assert (await refused(upload(files, b"1"))).status == 507
            await files.delete(first.id, "a")
            await upload(files, b"1234567890")
            assert (await refused(upload(files, b"1"))).status == 507

    asynchronous(test)


def test_uploads_at_once_share_the_bound(tmp_path: Path) -> None:
    async def test() -> None:
        async with files_in(tmp_path, limits=Limits(file_bytes=10, files_bytes=50)) as files:
            results = await asyncio.gather(
                *(upload(files, b"12345", b"67890") for _ in range(12)), return_exceptions=True
            )
            kept = [result for result in results if not isinstance(result, BaseException)]
            assert {result.status for result in results if isinstance(result, ApiError)} == {507}
            assert 1 <= len(kept) <= 5
            assert on_disk(tmp_path) == sorted(record.id for record in kept)
            for _ in range(5 - len(kept)):  # what failed takes no room
                await upload(files, b"1234567890")
            assert (await refused(upload(files, b"1"))).status == 507

    asynchronous(test)


def test_the_number_of_files_is_bounded(tmp_path: Path) -> None:
    async def test() -> None:
        async with files_in(tmp_path, count=2) as files:
            await upload(files)
            last = await upload(files)
            assert (await refused(upload(files))).status == 507
            await files.delete(last.id, "a")
            await upload(files)

    asynchronous(test)


def test_expired_files_vanish(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock()
        async with files_in(tmp_path, clock=clock) as files:
            record = await upload(files, b"x", purpose="user_data", expires_after=3600)
            stays = await upload(files, b"y", purpose="user_data")
            assert record.as_json()["expires_at"] == int(clock.now) + 3600
            clock.now += 3599
            assert await whole(files, record.id) == b"x"
            clock.now += 1
            assert (await refused(files.get(record.id, "a"))).status == 404
            assert [file.id for file in (await files.list("a")).data] == [stays.id]
            assert await files.sweep() == 1
            assert on_disk(tmp_path) == [stays.id]
            for seconds in (0, 3599, 30 * 24 * 3600 + 1):
                assert (await refused(upload(files, b"x", expires_after=seconds))).parameter == "expires_after"

    asynchronous(test)


def test_a_deleted_file_is_gone_and_who_reads_it_reads_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with files_in(tmp_path) as files:
            record = await upload(files, b"x" * 1000)
            _, pieces = await files.content(record.id, "a")
            await files.delete(record.id, "a")
            assert on_disk(tmp_path) == []
            assert (await refused(files.get(record.id, "a"))).status == 404
            assert b"".join([piece async for piece in pieces]) == b"x" * 1000

    asynchronous(test)


def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async def breaks() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        raise ConnectionResetError("the client is gone")

    async def stands_still() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        await asyncio.Event().wait()

    async def test() -> None:
        async with files_in(tmp_path, limits=Limits(files_bytes=1000, file_bytes=1000)) as files:
            with pytest.raises(ConnectionResetError):
                await files.create(breaks(), filename="x", purpose="batch", tenant="a")
            for pause in (0.0, 0.001, 0.01, 0.1):
                task = asyncio.create_task(files.create(stands_still(), filename="x", purpose="batch", tenant="a"))
                await asyncio.sleep(pause)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert on_disk(tmp_path) == []
            await upload(files, b"x" * 1000)

    asynchronous(test)


def test_what_a_dead_server_left_half_done_goes(tmp_path: Path) -> None:
    async def test() -> None:
        async with files_in(tmp_path) as files:
            record = await upload(files, b"x")
        (tmp_path / "files" / ("file-" + "0" * 24)).write_bytes(b"without a row")
        (tmp_path / "files" / (".file-" + "0" * 24 + ".0123456789abcdef.part")).write_bytes(b"half")
        (tmp_path / "files" / "somebody's own").write_bytes(b"not ours")
        async with files_in(tmp_path) as files:
            await upload(files, b"y", tenant="b")
            assert len(on_disk(tmp_path)) == 3
            assert {record.id, "somebody's own"} < set(on_disk(tmp_path))
            assert await whole(files, record.id) == b"x"

    asynchronous(test)


class FullDisk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def fill(self, _: Any = None) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def begin(self) -> None:
        self._monkeypatch.setattr(os, "fsync", self.fill)

    def end(self) -> None:
        self._monkeypatch.undo()


def test_a_full_disk_is_an_error_and_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        disk = FullDisk(monkeypatch)
        async with files_in(tmp_path, limits=Limits(files_bytes=1000)) as files:
            disk.begin()
            error = await refused(upload(files, b"x" * 1000))
            assert (error.status, error.kind, error.code) == (507, "server_error", "storage_unavailable")
            assert str(tmp_path) not in error.message
            disk.end()
            assert on_disk(tmp_path) == []
            await upload(files, b"x" * 1000)

    asynchronous(test)


def test_a_row_that_cannot_be_written_takes_its_file_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        db = Database(tmp_path)
        files = FileStore(db, tmp_path, Limits(files_bytes=1000))
        await upload(files, b"")
        run = db.run

        async def only_reads(function: Callable[[sqlite3.Connection], Any]) -> Any:
            if function.__name__ == "insert":
                raise ApiError("full", kind="server_error", code="storage_unavailable", status=507)
            return await run(function)

        monkeypatch.setattr(db, "run", only_reads)
        assert (await refused(upload(files, b"x" * 1000))).status == 507
        monkeypatch.undo()
        assert len(on_disk(tmp_path)) == 1
        await upload(files, b"x" * 1000)
        await db.close()

    asynchronous(test)


def test_a_file_that_is_not_there_any_more_is_an_error(tmp_path: Path) -> None:
    async def test() -> None:
        async with files_in(tmp_path) as files:
            record = await upload(files, b"x")
            (tmp_path / "files" / record.id).unlink()
            assert (await refused(files.content(record.id, "a"))).code == "storage_unavailable"
            await files.delete(record.id, "a")

    asynchronous(test)


# The database.


def test_an_exception_takes_the_transaction_back(tmp_path: Path) -> None:
    async def test() -> None:
        db = Database(tmp_path)

        def half(connection: sqlite3.Connection) -> None:
            insert(connection, "one")
            raise KeyError("no further")

        with pytest.raises(KeyError):
            await db.run(half)
        assert await db.run(count) == 0
        with pytest.raises(sqlite3.OperationalError):  # a mistake of ours is not told as the disk's
            await db.run(lambda connection: connection.execute("SELECT nothing FROM nowhere"))
        await db.run(lambda connection: insert(connection, "one"))
        with pytest.raises(sqlite3.IntegrityError):
            await db.run(lambda connection: insert(connection, "one"))
        assert await db.run(count) == 1
        await db.close()
        assert (await refused(db.run(count))).status == 503
        await db.close()

    asynchronous(test)


def insert(connection: sqlite3.Connection, id: str, size: int = 0) -> None:
    connection.execute(
        "INSERT INTO responses (id, tenant, created_at, expires_at, bytes, items, body) "
        "VALUES (?, 'a', 0, 0, 0, ?, '')",
        (id, b"x" * size),
    )


def count(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT COUNT(*) FROM responses").fetchone()[0]


def test_statements_that_wait_are_bounded_and_never_block_the_loop(tmp_path: Path) -> None:
    async def test() -> None:
        db = Database(tmp_path, waiting=2)
        gate = threading.Event()
        tasks = [asyncio.create_task(db.run(lambda _: gate.wait(20.0))) for _ in range(2)]
        await asyncio.sleep(0)
        error = await refused(db.run(count))
        assert (error.status, error.code, error.retry_after) == (503, "storage_unavailable", 1.0)
        gate.set()
        assert await asyncio.gather(*tasks) == [True, True]
        assert await db.run(count) == 0
        await db.close()

    asynchronous(test)


def test_what_was_asked_is_saved_though_the_caller_goes(tmp_path: Path) -> None:
    async def test() -> None:
        db = Database(tmp_path)
        task = asyncio.create_task(db.run(lambda connection: insert(connection, "one")))
        await asyncio.sleep(0)
        task.cancel()
        assert await db.run(count) == 1
        await db.close()

    asynchronous(test)


def test_a_full_database_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    async def test() -> None:
        db = Database(tmp_path, limit_bytes=512 * 1024)
        await db.run(lambda connection: insert(connection, "one", 1000))
        error = await refused(db.run(lambda connection: insert(connection, "two", 1024 * 1024)))
        assert (error.status, error.code) == (507, "storage_unavailable")
        await db.run(lambda connection: insert(connection, "three", 1000))
        assert await db.run(count) == 2
        await db.close()

    asynchronous(test)


def test_a_broken_file_is_an_error_until_it_is_mended(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "headrace.sqlite").write_bytes(b"this is no database" * 1000)
        db = Database(tmp_path)
        for _ in range(2):
            error = await refused(db.run(count))
            assert (error.status, error.code) == (503, "storage_unavailable")
            assert str(tmp_path) not in error.message
        (tmp_path / "headrace.sqlite").unlink()
        assert await db.run(count) == 0
        await db.close()

    asynchronous(test)


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "file").touch()
        db = Database(tmp_path / "file" / "storage")
        assert (await refused(db.run(count))).status == 503
        await db.close()

    asynchronous(test)


def test_a_newer_schema_is_left_alone(tmp_path: Path) -> None:
    async def test() -> None:
        with sqlite3.connect(tmp_path / "headrace.sqlite") as connection:
            connection.execute("PRAGMA user_version = 999")
        connection.close()
        db = Database(tmp_path)
        assert (await refused(db.run(count))).status == 503
        await db.close()

    asynchronous(test)


def test_a_second_server_is_kept_out_of_the_folder(tmp_path: Path) -> None:
    program = (
        "import fcntl, os, sys\n"
        "lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.lockf(lock, fcntl.LOCK_EX)\n"
        "print('mine', flush=True)\n"
        "sys.stdin.read()\n"
    )

    async def test() -> None:
        command = [sys.executable, "-c", program, str(tmp_path / "headrace.lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"mine\n"
            db = Database(tmp_path)
            assert (await refused(db.run(count))).status == 503
            other.communicate()
        assert await db.run(count) == 0
        await db.close()

    asynchronous(test)


def test_a_stream_may_end_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with files_in(tmp_path) as files:
            record = await files.create(pieces_of(), filename="empty", purpose="batch", tenant="a")
            assert (record.bytes, await whole(files, record.id)) == (0, b"")

    asynchronous(test)
