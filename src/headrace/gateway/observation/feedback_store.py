"""FeedbackStore: outcomes that clients attach to their finished requests, in the server's storage.

An outcome is a name and a number: a thumb, a conversion, an order's value. It is stored beside the model, route,
latency and price of its request, so that outcomes can be grouped by them. A request is found only by its own tenant.
Requests, outcomes and a tenant's names are bounded. All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.database import Database, make_room
from headrace.observe import metrics
from headrace.observe.latency.latency_book import RequestSample
from headrace.observe.traces.request_record import RequestRecord, names_of

MOST_NAMES: Final = 32  # of a tenant
_WAITING: Final = 8192  # finished requests that are not stored yet
_MOST_GROUPS: Final = 10_000  # of a summary

By = Literal["outcome", "day", "tenant", "model", "surface", "endpoint", "length", "route"]
COLUMNS: Final[Mapping[By, str]] = {
    "outcome": "name",
    "day": "day",
    "tenant": "tenant",
    "model": "model",
    "surface": "surface",
    "endpoint": "endpoint",
    "length": "length",
    "route": "route",
}


class AnsweredRequest(msgspec.Struct, array_like=True):
    """What outcomes of a request are grouped by."""

    model: str
    surface: str
    endpoint: str
    length: str
    route: str
    ttft_ms: float | None
    e2e_ms: float | None
    micros: int


class OutcomeGroup(msgspec.Struct):
    """The sums of some outcomes."""

    key: tuple[str, ...]
    count: int
    sum: float
    squares: float  # sum of the values' squares
    binary: bool  # all values are 0 or 1
    ttft_ms: float | None  # means of the requests
    e2e_ms: float | None
    micros: int  # price of the requests


class FeedbackStore:
    def __init__(
        self,
        database: Database,
        *,
        requests: int = 100_000,  # finished requests that are remembered; 0: no feedback is taken
        outcomes: int = 1_000_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._requests = requests
        self._outcomes = outcomes
        self._clock = clock
        self.heard: Callable[[str, str, float], None] | None = None  # told each outcome: response, name, value
        self._waiting: deque[tuple[str, str, str, AnsweredRequest]] = deque(maxlen=_WAITING)
        self._flushing = asyncio.Lock()
        self.filling = asyncio.Event()  # requests would soon be dropped

    def note(self, record: RequestRecord, sample: RequestSample) -> None:
        """Remember a finished request that generated something, or was answered from a cache."""
        if not self._requests or not record.id:
            return
        if len(self._waiting) == _WAITING:
            metrics.of(metrics.dropped, "feedback").inc()
        slice, seconds = sample.slice, sample.seconds
        request = AnsweredRequest(
            slice.model,
            slice.surface,
            slice.endpoint,
            slice.length,
            slice.route,
            _ms(seconds.get("ttft")),
            _ms(seconds.get("e2e")),
            sample.micros,
        )
        self._waiting.append((record.tenant, record.id, record.request_id, request))
        if len(self._waiting) > _WAITING // 2:
            self.filling.set()

    async def flush(self) -> None:
        """Store the requests that wait for it. ApiError where storage fails; the next call stores them."""
        async with self._flushing:
            taken = list(self._waiting)
            if not taken:
                return
            await self._database.run(lambda connection: self._store(connection, taken))
            stored = set(map(id, taken))
            while self._waiting and id(self._waiting[0]) in stored:
                self._waiting.popleft()
            self.filling.clear()

    def _store(self, connection: sqlite3.Connection, taken: Sequence[tuple[str, str, str, AnsweredRequest]]) -> None:
        connection.executemany(
            "INSERT INTO answered_requests (tenant, id, request_id, facts) VALUES (?, ?, ?, ?)",
            [(tenant, id, request_id, msgspec.json.encode(facts)) for tenant, id, request_id, facts in taken],
        )
        connection.execute(
            "DELETE FROM answered_requests WHERE seq <= (SELECT MAX(seq) FROM answered_requests) - ?",
            (self._requests,),
        )

    async def put(self, tenant: str, request: str, values: Mapping[str, float]) -> tuple[str, dict[str, float]]:
        """Attach outcomes to a request of the tenant. A name that it has already gets the new value.

        `request`: the id of the response, or the request id header; of several requests with the same, the newest.
        Return the response's id and all outcomes of the request. ApiError if it is unknown.
        """
        if not self._requests:
            raise ApiError(
                "This server takes no feedback. Set observe.feedback_requests to a number above 0.",
                kind="not_found_error",
                code="no_feedback",
            )
        await self.flush()
        now = self._clock()

        def put(connection: sqlite3.Connection) -> tuple[str, str, dict[str, float]]:
            id, facts = self._find(connection, tenant, request)
            names = {
                name for (name,) in connection.execute("SELECT DISTINCT name FROM outcomes WHERE tenant = ?", (tenant,))
            }
            if len(names | set(values)) > MOST_NAMES:
                new = next(name for name in values if name not in names)
                raise invalid_request(
                    f"Too many names of outcomes: '{new}' would be one of more than {MOST_NAMES}. Use one of "
                    f"{', '.join(sorted(names))}.",
                    "outcomes",
                    code="too_many_outcomes",
                )
            make_room(connection, "outcomes", rows=len(values), count=self._outcomes)
            day = datetime.fromtimestamp(now, UTC).date().isoformat()
            for name, value in values.items():
                connection.execute(
                    "INSERT INTO outcomes (tenant, request, name, value, at, day, model, surface, endpoint, length, "
                    "route, ttft_ms, e2e_ms, micros) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                    "ON CONFLICT (tenant, request, name) DO UPDATE SET value = excluded.value, at = excluded.at",
                    (tenant, id, name, value, int(now), day, *msgspec.structs.astuple(facts)),
                )
            return id, facts.model, _outcomes_of(connection, tenant, id)

        id, model, found = await self._database.run(put)
        for name, value in values.items():
            metrics.count_outcome(name, value, model, tenant)
            if self.heard is not None:
                self.heard(id, name, value)
        return id, found

    def _find(self, connection: sqlite3.Connection, tenant: str, request: str) -> tuple[str, AnsweredRequest]:
        for column, names in (("id", names_of(request)), ("request_id", (request,))):
            for name in names:
                found = connection.execute(
                    f"SELECT id, facts FROM answered_requests WHERE {column} = ? AND tenant = ? ORDER BY seq DESC "
                    "LIMIT 1",
                    (name, tenant),
                ).fetchone()
                if found is not None:
                    return found[0], msgspec.json.decode(found[1], type=AnsweredRequest)
        raise ApiError(
            f"No finished request of yours has this id. The server remembers the last {self._requests} requests; pass "
            "the id of a response, or its x-request-id header.",
            kind="not_found_error",
            parameter="request_id",
            code="request_not_found",
        )

    async def of_request(self, tenant: str, id: str) -> dict[str, float]:
        """Return the outcomes of a request, by the response's id."""
        return await self._database.run(lambda connection: _outcomes_of(connection, tenant, id))

    async def summary(
        self,
        by: Sequence[By],
        *,
        tenant: str | None = None,
        first_day: str = "0000-00-00",
        last_day: str = "9999-99-99",
    ) -> list[OutcomeGroup]:
        """Return the sums of outcomes by some columns; without `outcome` among them, it comes first all the same,
        because values of different outcomes cannot be added up."""
        columns = [COLUMNS[name] for name in by if name != "outcome"]
        names = ", ".join(["name", *columns])
        which = "" if tenant is None else "AND tenant = ?"
        values = [first_day, last_day, *([] if tenant is None else [tenant])]

        def read(connection: sqlite3.Connection) -> list[OutcomeGroup]:
            found = connection.execute(
                f"SELECT {names}, COUNT(*), SUM(value), SUM(value * value), MIN(value IN (0, 1)), AVG(ttft_ms), "
                f"AVG(e2e_ms), SUM(micros) FROM outcomes WHERE day BETWEEN ? AND ? {which} GROUP BY {names} "
                f"ORDER BY {names} LIMIT {_MOST_GROUPS}",
                values,
            )
            width = 1 + len(columns)
            groups: list[OutcomeGroup] = []
            for each in found:
                count, total, squares, binary, ttft_ms, e2e_ms, micros = each[width:]
                groups.append(OutcomeGroup(each[:width], count, total, squares, bool(binary), ttft_ms, e2e_ms, micros))
            return groups

        return await self._database.run(read)


def _outcomes_of(connection: sqlite3.Connection, tenant: str, id: str) -> dict[str, float]:
    found = connection.execute(
        "SELECT name, value FROM outcomes WHERE tenant = ? AND request = ? ORDER BY name", (tenant, id)
    )
    return {name: value for name, value in found}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
