"""Recorder: takes finished answers of tenants that opted in, and writes them in a thread of its own.

The event loop only puts an answer into a bounded queue: redaction, encryption and the disk cost a response no time.
What finds no room is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from headrace.config import Config
from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.accounts.account_sync import AccountSync
from headrace.gateway.api_errors import ApiError
from headrace.gateway.flow.answer_observer import FinishedAnswer
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.exchange import Exchange
from headrace.lab.recording.line_cipher import LineCipher, RecordingError
from headrace.lab.recording.recorded_request import record_of
from headrace.lab.recording.recording_store import RecordingStore
from headrace.lab.recording.redaction import Redactor
from headrace.observe import metrics
from headrace.observe.outage_log import OutageLog

log: Final = logging.getLogger(__name__)

_TIDY_S: Final = 3600.0  # seconds between two checks of the recordings' age
_CLOSE_S: Final = 5.0  # seconds for what is queued at shutdown


class _Queued(msgspec.Struct):
    finished: FinishedAnswer
    arrived: float
    bytes: int


class _Deletion(msgspec.Struct):
    tenant: str


class _Tidy(msgspec.Struct):
    """Apply the bounds."""


class Recorder:
    """An AnswerObserver. `wants`, `take` and `follow` belong to the event loop."""

    def __init__(
        self,
        store: RecordingStore,
        redactor: Redactor,
        *,
        is_recorded: Callable[[str], bool],
        unnamed: bool = False,
        share: float = 1.0,
        most_queued: int = 1024,
        most_queued_bytes: int = 64 * 1024 * 1024,
        most_record_bytes: int = 1024 * 1024,
        chance: random.Random | None = None,
    ) -> None:
        """`is_recorded`: whether a tenant exists and opts into recordings now."""
        self._store = store
        self._redactor = redactor
        self._is_recorded = is_recorded
        self._unnamed = unnamed
        self._share = share
        self._most_queued = most_queued
        self._most_queued_bytes = most_queued_bytes
        self._most_record_bytes = most_record_bytes
        self._chance = chance or random.Random()
        self._queue: queue.SimpleQueue[_Queued | _Deletion | _Tidy | None] = queue.SimpleQueue()
        self._bytes_lock = threading.Lock()
        self._queued_bytes = 0
        self._deleted: set[str] = set()  # tenants whose queued records are not written any more
        self._outage = OutageLog(log, "recordings cannot be written")
        self._thread: threading.Thread | None = None

    @classmethod
    def from_config(cls, config: Config, environ: Mapping[str, str], *, is_recorded: Callable[[str], bool]) -> Recorder:
        """ConfigError where the key or its package is missing."""
        recording = config.recording
        return cls(
            store_of(config, environ),
            Redactor.from_config(recording),
            is_recorded=is_recorded,
            unnamed=recording.unnamed,
            share=recording.share,
            most_queued=recording.queue,
            most_queued_bytes=recording.queue_bytes,
            most_record_bytes=recording.record_bytes,
        )

    def wants(self, exchange: Exchange, plan: RoutePlan) -> bool:
        del plan
        return self._may_record(exchange) and (self._share >= 1.0 or self._chance.random() < self._share)

    def _may_record(self, exchange: Exchange) -> bool:
        tenant = exchange.caller.tenant
        return self._is_recorded(tenant) if tenant else self._unnamed

    def take(self, finished: FinishedAnswer) -> None:
        """Queue the record, unless its tenant was deleted or has left recordings while the answer was made."""
        if finished.error is not None or not finished.choices or not self._may_record(finished.exchange):
            return
        size = _text_bytes(finished)
        if size > self._most_record_bytes:
            metrics.of(metrics.recorded, "too_long").inc()
            return
        with self._bytes_lock:
            full = self._queue.qsize() >= self._most_queued or self._queued_bytes + size > self._most_queued_bytes
            if not full:
                self._queued_bytes += size
        if full:
            metrics.of(metrics.dropped, "recordings").inc()
            return
        arrived = time.time() - (time.monotonic() - finished.exchange.arrival)
        self._start()
        self._queue.put(_Queued(finished, arrived, size))

    def follow(self, accounts: AccountSync) -> None:
        """Delete a tenant's recordings when it is deleted, also by another gateway or while this one was down."""
        accounts.listen(self._account_changes)

    def _account_changes(self, changes: AccountChanges) -> None:
        for tenant in changes.deleted_tenants:
            self.delete(tenant)

    async def run(self) -> None:
        """Delete what is too old, now and every hour; write what is queued when this is cancelled."""
        try:
            while True:
                if self._store.exists:
                    self._start()
                    self._queue.put(_Tidy())
                await asyncio.sleep(_TIDY_S)
        finally:
            await asyncio.to_thread(self.close)

    def delete(self, tenant: str) -> None:
        """Delete a tenant's recordings, in the thread. What is still queued of it is not written."""
        self._deleted.add(tenant)
        self._start()
        self._queue.put(_Deletion(tenant))

    def close(self) -> None:
        """Write what is queued, within 5 s."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(_CLOSE_S)
            if thread.is_alive():
                log.warning("recordings that were queued at shutdown are lost")

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            match item:
                case _Tidy():
                    self._guarded(self._store.apply_bounds)
                case _Deletion():
                    self._guarded(partial(self._store.delete, item.tenant))
                case _Queued():
                    if item.finished.exchange.caller.tenant not in self._deleted:
                        self._guarded(partial(self._write, item))
                    with self._bytes_lock:
                        self._queued_bytes -= item.bytes

    def _write(self, item: _Queued) -> None:
        try:
            record = record_of(item.finished, item.arrived, self._redactor)
        except ApiError:  # token ids as a prompt, and the like
            metrics.of(metrics.recorded, "unsupported").inc()
            return
        self._store.append(record)
        metrics.of(metrics.recorded, "written").inc()

    def _guarded(self, work: Callable[[], object]) -> None:
        """The thread outlives a full disk and a bug."""
        try:
            work()
        except (OSError, RecordingError) as error:
            metrics.of(metrics.recorded, "failed").inc()
            self._outage.failed(error)
        except Exception as error:
            metrics.of(metrics.recorded, "failed").inc()
            log.error("a recording failed", exc_info=error)
        else:
            self._outage.succeeded()


def store_of(config: Config, environ: Mapping[str, str]) -> RecordingStore:
    """Open the recordings of a configuration. ConfigError where the key or its package is missing."""
    recording = config.recording
    cipher = None if recording.key_env is None else LineCipher.from_environment(recording.key_env, environ)
    return RecordingStore(config.storage.path, most_bytes=recording.bytes, days=recording.days, cipher=cipher)


def _text_bytes(finished: FinishedAnswer) -> int:
    """Estimate the bytes of a record, without writing it."""
    request = finished.requested
    total = 512
    for message in request.messages or ():
        total += 64 + len(str(message.get("content") or ""))
    for prompt in request.prompts or ():
        total += len(prompt) if isinstance(prompt, str) else 8 * len(prompt)
    total += sum(len(source.text) + 64 for source in request.sources)
    for tool in request.tools:
        total += 256 + len(tool.description or "")
    for choice in finished.choices:
        total += len(choice.content) + sum(len(call.arguments) for call in choice.calls)
    return total
