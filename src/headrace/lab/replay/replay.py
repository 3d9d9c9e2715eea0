"""Replays a recording: sends its requests again, at their pace or faster, and keeps the answers beside the originals.

Open loop: each request is sent at its recorded time, whatever the server does, so that bursts come as they came. Closed
loop: a fixed number of requests is under way at any time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from headrace.errors import RequestError
from headrace.lab.answering.model_server import AnswererSpec, open_servers
from headrace.lab.cases.case import Case
from headrace.lab.cases.prompt_file import cases_of_records
from headrace.lab.comparison.answer import Answer
from headrace.lab.comparison.answer_comparison import AnswerComparison, compare_all
from headrace.lab.recording.recorded_request import RecordedRequest

MOST_OPEN: Final = 4096  # requests under way in an open loop; further ones wait

Watch = Callable[[int, int], None]  # requests done, and in all
Sleep = Callable[[float], Awaitable[object]]


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    speed: float = 1.0  # 2 sends the requests in half the time
    concurrency: int | None = None  # closed loop with so many requests; None: open loop
    key: str = ""  # API key of a server


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True):
    """The output of --json."""

    target: str
    requests: int
    failed: int
    exact: int  # the same text and tool calls as the original
    similarity: float | None  # mean, of requests that did not fail
    similarity_by: str
    seconds: float
    late_s: float  # the most that a request was sent after its time; 0 in a closed loop
    ttft_p50_s: float | None
    e2el_p50_s: float | None
    original_e2el_p50_s: float | None


async def replay(
    records: Sequence[RecordedRequest],
    target: AnswererSpec,
    options: ReplayOptions | None = None,
    *,
    watch: Watch = lambda _done, _total: None,
) -> tuple[list[RecordedRequest], ReplaySummary]:
    """Return the records with the new answers, in the order of arrival, and what became of them."""
    chosen = options or ReplayOptions()
    if chosen.speed <= 0:
        raise RequestError(f"'speed' must be above 0, not {chosen.speed:g}.", parameter="speed")
    ordered = sorted(records, key=lambda record: record.arrived)
    cases = cases_of_records(ordered)
    async with open_servers([target], key=chosen.key) as [server]:
        begun = time.perf_counter()
        if chosen.concurrency is None:
            answers, late = await open_loop(server.answer, cases, speed=chosen.speed, watch=watch)
        else:
            answers, late = await closed_loop(server.answer, cases, chosen.concurrency, watch=watch), 0.0
        seconds = time.perf_counter() - begun
    replayed = [
        msgspec.structs.replace(record, replayed=answer) for record, answer in zip(ordered, answers, strict=True)
    ]
    return replayed, _summary(target.name, replayed, cases, seconds, late)


AnswerCase = Callable[[Case], Awaitable[Answer]]


async def open_loop(
    answer: AnswerCase,
    cases: Sequence[Case],
    *,
    speed: float = 1.0,
    watch: Watch = lambda _done, _total: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Sleep = asyncio.sleep,
) -> tuple[list[Answer], float]:
    """Send each case at its time. Return the answers and the most seconds that one was late."""
    begun, late, done = clock(), 0.0, 0
    room = asyncio.Semaphore(MOST_OPEN)

    async def one(case: Case) -> Answer:
        nonlocal done
        try:
            return await answer(case)
        finally:
            room.release()
            done += 1
            watch(done, len(cases))

    tasks: list[asyncio.Task[Answer]] = []
    try:
        for case in cases:
            due = begun + case.at_s / speed
            while (wait := due - clock()) > 0:
                await sleep(wait)
            await room.acquire()
            late = max(late, clock() - due)
            tasks.append(asyncio.create_task(one(case)))
        return list(await asyncio.gather(*tasks)), late
    finally:
        for task in tasks:
            task.cancel()


async def closed_loop(
    answer: AnswerCase, cases: Sequence[Case], concurrency: int, *, watch: Watch = lambda _done, _total: None
) -> list[Answer]:
    """Keep `concurrency` requests under way until all are answered."""
    if concurrency < 1:
        raise RequestError(f"'concurrency' must be at least 1, not {concurrency}.", parameter="concurrency")
    answers: dict[int, Answer] = {}
    pending = iter(enumerate(cases))

    async def work() -> None:
        for place, case in pending:
            answers[place] = await answer(case)
            watch(len(answers), len(cases))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(cases))):
            group.create_task(work())
    return [answers[place] for place in range(len(cases))]


def _summary(
    target: str, records: Sequence[RecordedRequest], cases: Sequence[Case], seconds: float, late: float
) -> ReplaySummary:
    pairs = [
        (record.replayed, record.answers[0], case.context)
        for record, case in zip(records, cases, strict=True)
        if record.replayed is not None and not record.replayed.error and record.answers
    ]
    compared: list[AnswerComparison] = compare_all(pairs)
    good = [record.replayed for record in records if record.replayed is not None and not record.replayed.error]
    return ReplaySummary(
        target=target,
        requests=len(records),
        failed=len(records) - len(good),
        exact=sum(each.exact for each in compared),
        similarity=sum(each.similarity for each in compared) / len(compared) if compared else None,
        similarity_by=compared[0].similarity_by if compared else "",
        seconds=seconds,
        late_s=late,
        ttft_p50_s=_median([each.ttft_s for each in good]),
        e2el_p50_s=_median([each.e2el_s for each in good]),
        original_e2el_p50_s=_median([record.answers[0].e2el_s for record in records if record.answers]),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None
