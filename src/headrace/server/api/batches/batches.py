"""Runs batches: files of requests that run in the background within a day.

Holds the life cycle of a batch and schedules the requests of all batches. Does not know HTTP or models: it runs a
request with the function that it is given. batch_table.py persists batches; batch_lines.py reads and writes lines.

    validating ─▶ in_progress ─▶ finalizing ─▶ completed
        │             │    │         └───────▶ expired       past its window; unrun requests are in the error file
        ▼             │    └─▶ cancelling ───▶ cancelled     results so far are in the output files
      failed ◀────────┘ (an internal error)

A result is saved before the next request takes its slot, so a restarted server runs exactly the requests that have no
result. A request that is rejected temporarily (429, 503) pauses its batch and is retried; until a request succeeds,
the batch runs one request at a time and leaves its other slots to other batches. Each request ends in exactly one
line of one of the two files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from headrace.gateway.api_errors import ApiError, as_api_error, invalid_request
from headrace.gateway.database import LONGEST_PAUSE_S, Database, ListPage, check_listing
from headrace.server.api.batches import batch_lines
from headrace.server.api.batches import batch_table as table
from headrace.server.api.batches.batch_kind import OPENAI_BATCH, BatchKind, kind_of
from headrace.server.api.batches.batch_lines import InputLine
from headrace.server.api.batches.batch_table import BatchRecord, BatchRequest
from headrace.server.api.files import EXPIRY, FileStore, on_disk
from headrace.tasks import end_tasks

log = logging.getLogger(__name__)


class BatchOwner(NamedTuple):
    tenant: str
    key: str  # name or id of the key that created the batch


# url, body, owner, batch id, custom id → HTTP status, body. An exception becomes the error that the client gets.
RunRequest = Callable[[str, dict[str, Any], BatchOwner, str, str], Awaitable[tuple[int, dict[str, Any]]]]

WINDOWS: Final = {"24h": 24 * 3600}  # seconds
_REFUSED: Final = (429, 503)
_OUTPUT_SECONDS: Final = 30 * 24 * 3600


class BatchLimits(Protocol):
    """config.Storage has it."""

    @property
    def batch_requests(self) -> int: ...  # of one batch


class BatchBackoff(msgspec.Struct, frozen=True):
    """The pauses of a batch whose requests are rejected temporarily."""

    first_s: float = 1.0
    longest_s: float = 60.0
    tries: int = 20  # of one request; then the rejection is its result


class _Live(msgspec.Struct):
    """The state of an unfinished batch in this process."""

    seq: int
    id: str
    tenant: str
    key: str
    endpoint: str
    input_file_id: str
    expires_at: int
    output_seconds: int
    kind: BatchKind
    cancelled: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    waiting: deque[BatchRequest] = msgspec.field(default_factory=deque[BatchRequest])  # to be run or retried
    running: int = 0
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)  # a request has ended
    refusals: int = 0  # in a row
    paused_until: float = 0.0  # of the loop's clock


class Batches:
    def __init__(
        self,
        db: Database,
        files: FileStore,
        run: RunRequest,
        limits: BatchLimits,
        *,
        running: int,  # requests at once, of all batches together
        unfinished: int = 1000,  # batches
        unfinished_of_tenant: int = 100,
        kept: int = 10_000,  # ended batches; older ones are deleted, their files are not
        line_bytes: int = 8 * 1024 * 1024,  # 8 MiB
        line_values: int = 262_144,
        backoff: BatchBackoff | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._db = db
        self._files = files
        self._run = run
        self._limits = limits
        # Waiters are served in order and each batch has at most one, so batches take turns.
        self._slots = asyncio.Semaphore(running)
        self._unfinished = unfinished
        self._unfinished_of_tenant = unfinished_of_tenant
        self._kept = kept
        self._line_bytes = line_bytes
        self._line_values = line_values
        self._backoff = BatchBackoff() if backoff is None else backoff
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def create(
        self,
        *,
        input_file_id: str,
        endpoint: str,
        completion_window: str,
        tenant: str,
        key: str = "",
        metadata: Mapping[str, str] | None = None,
        output_expires_after: int | None = None,  # seconds
        kind: BatchKind = OPENAI_BATCH,
        total: int = 0,  # requests, where that is known
    ) -> BatchRecord:
        if self._closed:
            raise ApiError("The server is shutting down. Try again later.", kind="overloaded_error", code="draining")
        if endpoint not in kind.endpoints:
            raise invalid_request(f"'endpoint' must be one of {', '.join(kind.endpoints)}.", "endpoint")
        if completion_window not in WINDOWS:
            raise invalid_request(f"'completion_window' must be {' or '.join(WINDOWS)}.", "completion_window")
        if output_expires_after is not None and not EXPIRY[0] <= output_expires_after <= EXPIRY[1]:
            raise invalid_request(
                f"'output_expires_after.seconds' must be between {EXPIRY[0]} and {EXPIRY[1]}.", "output_expires_after"
            )
        _check_metadata(metadata)
        new = table.NewBatch(
            id=f"{kind.prefix}_{secrets.token_hex(16)}",
            tenant=tenant,
            key=key,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            metadata=None if metadata is None else dict(metadata),
            output_seconds=output_expires_after or _OUTPUT_SECONDS,
            created_at=int(self._clock()),
            seconds=WINDOWS[completion_window],
            total=total,
        )

        def insert(connection: sqlite3.Connection) -> sqlite3.Row:
            everybody, own = table.count_unfinished(connection, tenant)
            if everybody >= self._unfinished:
                raise _too_many("The server has too many unfinished batches. Try again later.")
            if own >= self._unfinished_of_tenant:
                raise _too_many(f"You have {own} unfinished batches, which is the limit. Wait for one to finish.")
            return table.insert(connection, new, kind, kept=self._kept)

        # If the caller is cancelled, the row may still be written; then the batch runs anyway.
        task = asyncio.ensure_future(self._db.run(insert))
        task.add_done_callback(self._begin_new)
        return table.record(await asyncio.shield(task))

    async def retrieve(self, id: str, tenant: str, kind: BatchKind = OPENAI_BATCH) -> BatchRecord:
        return table.record(await self._db.run(lambda connection: table.find(connection, id, tenant, kind)))

    async def list(
        self,
        tenant: str,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
        most: int = 100,
        kind: BatchKind = OPENAI_BATCH,
    ) -> ListPage[BatchRecord]:
        """Return a page, the newest first: the ones after an id, or the ones before it."""
        check_listing(limit=limit, most=most, order="desc")
        return await self._db.run(lambda connection: table.page(connection, tenant, after, limit, kind, before=before))

    async def delete(self, id: str, tenant: str, kind: BatchKind) -> None:
        """Delete an ended batch with its files."""
        record = await self._db.run(lambda connection: table.delete(connection, id, tenant, kind))
        for file in (record.input_file_id, record.output_file_id, record.error_file_id):
            if file is not None:
                with contextlib.suppress(ApiError):  # it has expired, was deleted, or is another batch's input too
                    await self._files.delete(file, tenant)

    async def cancel(self, id: str, tenant: str, kind: BatchKind = OPENAI_BATCH) -> BatchRecord:
        """Cancel running requests. The results so far are written."""
        now = int(self._clock())
        row = await self._db.run(lambda connection: table.cancel(connection, id, tenant, now, kind))
        if (live := self._live.get(id)) is not None:
            live.cancelled.set()
        return table.record(row)

    async def resume(self) -> None:
        """Resume the batches that an earlier server left unfinished; retry in the background if storage fails."""
        try:
            await self._resume()
        except ApiError as error:
            log.error("unfinished batches wait for the storage: %s", error)
            self._spawn(self._resume_later())

    async def close(self) -> None:
        """Cancel what runs. Results are saved; the next server's `resume` continues."""
        self._closed = True
        await end_tasks(self._tasks)

    def running(self) -> int:
        """Return the number of running requests."""
        return sum(live.running for live in self._live.values())

    def unfinished(self) -> int:
        return len(self._live)

    async def _resume(self) -> None:
        for row in await self._db.run(table.unfinished):
            self._begin(row)

    async def _resume_later(self) -> None:
        while True:
            await asyncio.sleep(5.0)
            with contextlib.suppress(ApiError):
                return await self._resume()

    def _begin_new(self, task: asyncio.Future[sqlite3.Row]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._begin(task.result())

    def _begin(self, row: sqlite3.Row) -> None:
        if not self._closed and row["id"] not in self._live:
            names = "seq", "id", "tenant", "key", "endpoint", "input_file_id", "expires_at", "output_seconds"
            live = self._live[row["id"]] = _Live(kind=kind_of(row["id"]), **{name: row[name] for name in names})
            self._spawn(self._run_batch(live))

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Life cycle of one batch

    async def _run_batch(self, live: _Live) -> None:
        try:
            await self._advance(live)
        except Exception:
            log.exception("batch %s failed", live.id)
            with contextlib.suppress(Exception):
                message = "Internal server error."
                await self._fail(live, [batch_lines.batch_error("internal_error", message)])
        finally:
            self._live.pop(live.id, None)

    async def _advance(self, live: _Live) -> None:
        """Run a batch from its saved state to its end, whether it is new or resumed."""
        row = await self._db.retry(lambda connection: table.find(connection, live.id, live.tenant, live.kind))
        unread = row["in_progress_at"] is None and row["status"] in ("validating", "cancelling")
        if unread and not await self._validate(live):
            return
        row = await self._db.retry(lambda connection: table.find(connection, live.id, live.tenant, live.kind))
        if row["status"] == "in_progress":
            await self._run_all(live)
        await self._finish(live)

    async def _validate(self, live: _Live) -> bool:
        def read() -> tuple[list[InputLine], list[dict[str, Any]]]:
            with self._files.open(live.input_file_id) as file:
                return batch_lines.read_input(
                    file,
                    live.endpoint,
                    most=self._limits.batch_requests,
                    line_bytes=self._line_bytes,
                    line_values=self._line_values,
                )

        try:
            lines, errors = await on_disk(read)
        except ApiError:
            lines, errors = [], [batch_lines.batch_error("input_file_unreadable", "The input file could not be read.")]
        if errors:
            await self._fail(live, errors)
            return False
        now = int(self._clock())
        await self._db.retry(lambda connection: table.begin(connection, live.seq, lines, now))
        return True

    async def _run_all(self, live: _Live) -> None:
        """Run requests until all have results, the window ends, or the batch is cancelled."""
        work = asyncio.create_task(self._run_requests(live))
        cancelled = asyncio.create_task(live.cancelled.wait())
        left = max(0.0, live.expires_at - self._clock())
        try:
            await asyncio.wait({work, cancelled}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            cancelled.cancel()
            await asyncio.gather(work, cancelled, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _run_requests(self, live: _Live) -> None:
        last, more = 0, True
        async with asyncio.TaskGroup() as group:
            while True:
                if more and not live.waiting:
                    page = await self._db.retry(lambda connection, last=last: table.pending(connection, live.seq, last))
                    live.waiting.extend(page)
                    last, more = (page[-1].line, True) if page else (last, False)
                elif live.waiting:
                    await self._take_slot(live)
                    task = group.create_task(self._run_one(live, live.waiting.popleft()))
                    live.running += 1
                    task.add_done_callback(lambda _: self._request_ended(live))
                elif live.running:
                    await self._wait_for_change(live)
                else:
                    return

    async def _take_slot(self, live: _Live) -> None:
        """Wait until the batch may start one more request, and take a slot for it."""
        loop = asyncio.get_running_loop()
        while True:
            if (left := live.paused_until - loop.time()) > 0:
                await asyncio.sleep(left)
            elif live.refusals and live.running:
                await self._wait_for_change(live)  # one at a time until one succeeds
            else:
                await self._slots.acquire()
                if live.paused_until <= loop.time() and not (live.refusals and live.running):
                    return
                self._slots.release()

    async def _wait_for_change(self, live: _Live) -> None:
        live.changed.clear()
        await live.changed.wait()

    def _request_ended(self, live: _Live) -> None:
        live.running -= 1
        live.changed.set()
        self._slots.release()

    async def _run_one(self, live: _Live, request: BatchRequest) -> None:
        retry_after: float | None = None
        try:
            body = await on_disk(
                lambda: batch_lines.body_of(self._files.read(live.input_file_id, request.start, request.length))
            )
            status, answer = await self._run(
                live.endpoint, body, BatchOwner(live.tenant, live.key), live.id, request.custom_id
            )
            line = live.kind.result_line(request.custom_id, status, answer)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not this task but the runner was cancelled: the server is shutting down.
            status = 503
            line = live.kind.error_line(request.custom_id, as_api_error(RuntimeError()))
        except Exception as error:
            api_error = as_api_error(error)
            if api_error is not error and api_error.status == 500:
                log.exception("request %s of batch %s failed", request.line, live.id)
            status, retry_after = api_error.status, api_error.retry_after
            line = live.kind.error_line(request.custom_id, api_error)
        if status in _REFUSED:
            request.tries += 1
            if request.tries < self._backoff.tries:
                self._pause(live, retry_after)
                live.waiting.append(request)  # last, so that a long outage does not use up the tries of a few requests
                return
        else:
            live.refusals = 0
        await self._db.retry(lambda connection: table.save(connection, live.seq, request.line, status, line))

    def _pause(self, live: _Live, retry_after: float | None) -> None:
        """Pause once for a burst of rejections: requests that began before the pause carry no news."""
        now = asyncio.get_running_loop().time()
        if now >= live.paused_until:
            pause = self._backoff.first_s * 2 ** min(live.refusals, 30)
            pause = max(pause * random.uniform(0.75, 1.25), retry_after or 0.0)
            live.refusals += 1
            live.paused_until = now + min(pause, self._backoff.longest_s)

    async def _finish(self, live: _Live) -> None:
        """Write the output files. Each step is saved, so a restarted server does only the remaining ones."""
        row = await self._db.retry(lambda connection: table.decide(connection, live.seq, int(self._clock())))
        ending = row["ending"]

        def unrun_line(custom_id: str) -> bytes:
            return live.kind.unrun_line(custom_id, ending)

        while await self._db.retry(lambda connection: table.give_up(connection, live.seq, unrun_line)):
            pass
        columns = ("output_file_id", "status BETWEEN 1 AND 399"), ("error_file_id", "(status = 0 OR status >= 400)")
        try:
            for column, which in columns:
                if row[column] is None:
                    await self._write(live, column, which)
        except ApiError as error:
            log.error("the results of batch %s cannot be written: %s", live.id, error)
            return await self._fail(live, [batch_lines.batch_error("storage_unavailable", error.message)])
        await self._db.retry(lambda connection: table.end(connection, live.seq, ending, int(self._clock())))

    async def _write(self, live: _Live, column: str, which: str) -> None:
        """Write one output file. Retry while storage is full, for at most the length of the window."""
        if not await self._db.retry(lambda connection: table.lines(connection, live.seq, which, 0)):
            return
        until = self._clock() + max(WINDOWS.values())
        pause = 1.0
        while True:
            try:
                await self._files.create_output(
                    self._stream(live.seq, which),
                    filename=f"{live.id}_{column.removesuffix('_file_id')}.jsonl",
                    tenant=live.tenant,
                    expires_after=live.output_seconds,
                    also=lambda connection, id: table.link(connection, live.seq, column, id),
                )
                return
            except ApiError:
                if self._clock() >= until:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def _stream(self, seq: int, which: str) -> AsyncIterator[bytes]:
        last = 0
        while lines := await self._db.run(lambda connection, last=last: table.lines(connection, seq, which, last)):
            last = lines[-1][0]
            yield b"".join(answer for _, answer in lines)

    async def _fail(self, live: _Live, errors: list[dict[str, Any]]) -> None:
        await self._db.retry(lambda connection: table.end(connection, live.seq, "failed", int(self._clock()), errors))


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    if metadata is not None:
        if len(metadata) > 16:
            raise invalid_request(f"'metadata' has {len(metadata)} entries. Expected at most 16.", "metadata")
        for key, value in metadata.items():
            if len(key) > 64 or len(value) > 512:
                raise invalid_request("'metadata' keys may have at most 64 characters, values at most 512.", "metadata")


def _too_many(message: str) -> ApiError:
    return ApiError(message, kind="rate_limit_error", code="too_many_batches", retry_after=60.0)
