"""RequestRecord: what is known of one finished request, without its text; and the bounded ring of recent ones."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from headrace.observe.traces.timeline import GenerationTimes, Part, Stage, Timeline

_PREFIXES: Final = ("chatcmpl-", "cmpl-", "msg_", "resp_")  # that dialects put before a request's id


def names_of(id: str) -> tuple[str, ...]:
    """Return what a client's id of a request may stand for: it as it is, and without the prefix of its dialect."""
    return (id, *(id.removeprefix(prefix) for prefix in _PREFIXES if id.startswith(prefix)))


class RequestRecord(msgspec.Struct, kw_only=True):
    id: str  # part of the response's id; empty where nothing was generated
    request_id: str  # the `x-request-id` header
    tenant: str
    method: str
    endpoint: str
    status: int
    error: str = ""  # its code
    fields: dict[str, Any] = {}  # as in the log line
    facts: dict[str, Any] = {}  # further attributes of the request's span
    times: GenerationTimes | None = None
    timeline: Timeline
    ended_at: float = msgspec.field(default_factory=time.time)  # seconds since 1970
    prompt: str | None = None  # only where the tenant's settings say so
    answer: str | None = None

    @property
    def seconds(self) -> float:
        return self.timeline.ended - self.timeline.began

    @property
    def stages(self) -> list[Stage]:
        return self.timeline.stages(self.times)

    @property
    def parts(self) -> list[Part]:
        return self.timeline.parts


class RecentRequests:
    """The most recent requests of all tenants, found by tenant and id."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._records: OrderedDict[int, RequestRecord] = OrderedDict()
        self._numbers: dict[tuple[str, str], int] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        self._last += 1
        self._records[self._last] = record
        for id in _ids(record):
            self._numbers[record.tenant, id] = self._last
        while len(self._records) > self._most:
            number, oldest = self._records.popitem(last=False)
            for id in _ids(oldest):
                if self._numbers.get((oldest.tenant, id)) == number:
                    del self._numbers[oldest.tenant, id]

    def find(self, tenant: str, id: str) -> RequestRecord | None:
        """Find by a response's id, with or without the prefix of its dialect, or by the request id header. Of requests
        with the same request id, the newest."""
        for name in names_of(id):
            number = self._numbers.get((tenant, name))
            if number is not None:
                return self._records[number]
        return None

    def find_any(self, id: str) -> RequestRecord | None:
        """The same among the requests of all tenants, for administrators. The newest of several."""
        names = set(names_of(id))
        return next((each for each in self.newest() if names & set(_ids(each))), None)

    def newest(self) -> Iterator[RequestRecord]:
        return reversed(self._records.values())


def _ids(record: RequestRecord) -> tuple[str, ...]:
    return (record.request_id, record.id) if record.id else (record.request_id,)
