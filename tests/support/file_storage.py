"""Storage for tests: small limits, a clock that is set by hand, streams of given pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.gateway.database import Database
from headrace.server.api.batches.batch_table import BatchRecord
from headrace.server.api.batches.batches import BatchBackoff, Batches, RunRequest
from headrace.server.api.files import FileRecord, FileStore
from tests.support.clock import Clock

PATIENCE = 300.0  # seconds, after which a whole test has failed; on a busy machine it may take long
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True)
class Limits:
    file_bytes: int = 100_000
    files_bytes: int = 200_000
    batch_requests: int = 100


def asynchronous(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), PATIENCE)

    asyncio.run(limited())


async def pieces_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def upload(
    files: FileStore,
    *pieces: bytes,
    filename: str = "input.jsonl",
    purpose: str = "batch",
    tenant: str = "a",
    expires_after: int | None = None,
) -> FileRecord:
    return await files.create(
        pieces_of(*pieces), filename=filename, purpose=purpose, tenant=tenant, expires_after=expires_after
    )


async def whole(files: FileStore, id: str, tenant: str = "a") -> bytes:
    _, pieces = await files.content(id, tenant)
    return b"".join([piece async for piece in pieces])


async def refused(work: Awaitable[Any]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await work
    return raised.value


def on_disk(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "files").iterdir())


def requests(count: int, *, url: str = "/v1/chat/completions") -> bytes:
    lines = ({"custom_id": f"r{i}", "method": "POST", "url": url, "body": {"place": i}} for i in range(count))
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@dataclass
class Store:
    folder: Path
    clock: Clock
    db: Database
    files: FileStore
    batches: Batches

    async def batch(self, content: bytes, tenant: str = "a", **options: Any) -> BatchRecord:
        file = await upload(self.files, content, tenant=tenant)
        asked: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **options}
        return await self.batches.create(input_file_id=file.id, tenant=tenant, **asked)

    async def ended(self, id: str, tenant: str = "a") -> BatchRecord:
        while (record := await self.batches.retrieve(id, tenant)).status not in ENDED:
            await asyncio.sleep(0.01)
        return record

    async def lines(self, id: str | None, tenant: str = "a") -> list[dict[str, Any]]:
        assert id is not None
        return [json.loads(line) for line in (await whole(self.files, id, tenant)).splitlines()]


def open_store(
    folder: Path,
    run: RunRequest,
    *,
    limits: Limits | None = None,
    running: int = 4,
    clock: Clock | None = None,
    **options: Any,
) -> Store:
    limits, clock = limits or Limits(), clock or Clock()
    db = Database(folder)
    files = FileStore(db, folder, limits, clock=clock)
    backoff = BatchBackoff(first_s=0.01, longest_s=0.05, tries=5)
    batches = Batches(db, files, run, limits, running=running, backoff=backoff, clock=clock, **options)
    return Store(folder, clock, db, files, batches)


@asynccontextmanager
async def storing(folder: Path, run: RunRequest, **options: Any) -> AsyncGenerator[Store, None]:
    store = open_store(folder, run, **options)
    try:
        yield store
    finally:
        await store.batches.close()
        await store.db.close()
