"""A clock that is set by hand, requests that come, stream and end on it, and an oracle that keeps its own books.

The oracle knows nothing of how limits are counted: it has lists of what happened when, and adds them up.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.gateway.limits.limit_errors import LimitError
from headrace.gateway.limits.limit_scopes import LimitScope, LimitSet
from headrace.gateway.limits.rate_limiter import RateLimiter, Reservation
from tests.support.clock import Clock

SPANS = {"s": 1_000, "min": 60_000}  # milliseconds


def scope(name: str = "acme", kind: str = "tenant", **limits: int) -> LimitScope:
    return LimitScope(kind, name, LimitSet(**limits))  # pyright: ignore[reportArgumentType]


async def admitted(limiter: RateLimiter, *scopes: LimitScope, input_tokens: int = 1, most: int = 0) -> bool:
    """Whether such a request is let in now. It is gone again at once."""
    try:
        reservation = await limiter.reserve(scopes, input_tokens=input_tokens, most_output=most)
    except LimitError:
        return False
    await reservation.release()
    return True


async def refusal(limiter: RateLimiter, *scopes: LimitScope, input_tokens: int = 1, most: int = 0) -> LimitError:
    try:
        await limiter.reserve(scopes, input_tokens=input_tokens, most_output=most)
    except LimitError as error:
        return error
    raise AssertionError("it was let in")


@dataclass(slots=True)
class Plan:
    """A request that is to come."""

    arrival: int
    scopes: tuple[LimitScope, ...]
    input_tokens: int
    most: int
    real: int  # output tokens, where it may
    pieces: list[tuple[int, int]]  # milliseconds until each, and its tokens
    tries: int  # to have more granted, 50 ms apart, before it stops
    ending: str  # how it ends: settled, failed (nothing was computed)


@dataclass(slots=True)
class _Running:
    plan: Plan
    reservation: Reservation
    since: int
    wanted: int = 0  # tokens in all, asked for in vain


class Ledger:
    """What happened in one meter of one scope: amounts by time."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.amounts: list[int] = []

    def add(self, time: int, amount: int) -> None:
        assert not self.times or time >= self.times[-1]
        self.times.append(time)
        self.amounts.append(amount)

    def within(self, now: int, span: int) -> int:
        return sum(self.amounts[bisect_right(self.times, now - span) : bisect_right(self.times, now)])

    def most(self, span: int) -> int:
        """In any stretch of time so long."""
        most = total = start = 0
        for place, (time, amount) in enumerate(zip(self.times, self.amounts, strict=True)):
            total += amount
            while self.times[start] <= time - span:
                total -= self.amounts[start]
                start += 1
            # What comes at the same time belongs to it.
            if place + 1 == len(self.times) or self.times[place + 1] > time:
                most = max(most, total)
        return most


@dataclass
class Oracle:
    limiter: RateLimiter
    ledgers: dict[tuple[str, str, str], Ledger] = field(default_factory=lambda: defaultdict(Ledger))
    running: list[_Running] = field(default_factory=list[_Running])
    most_running: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    scopes: set[LimitScope] = field(default_factory=set[LimitScope])
    admitted: int = 0
    refused: int = 0
    checked: int = 0  # refusals whose time was checked
    stopped: int = 0

    def add(self, scopes: Iterable[LimitScope], meter: str, time: int, amount: int) -> None:
        for each in scopes:
            if amount:
                self.ledgers[each.kind, each.name, meter].add(time, amount)

    def remove(self, scopes: Iterable[LimitScope], meter: str, time: int, amount: int) -> None:
        for each in scopes:
            ledger = self.ledgers[each.kind, each.name, meter]
            place, left = ledger.times.index(time), amount
            while left:
                part = min(left, ledger.amounts[place])
                ledger.amounts[place] -= part
                left -= part
                place += 1

    def over(self) -> list[str]:
        """Every limit that was passed."""
        found: list[str] = []
        for each in self.scopes:
            for name, limit in limits_of(each):
                if name == "concurrent":
                    most = self.most_running[each.kind, each.name]
                else:
                    meter, _, span = name.rpartition("_per_")
                    most = self.ledgers[each.kind, each.name, meter].most(SPANS[span])
                if most > limit:
                    found.append(f"{each.kind} {each.name} {name}: {most} of {limit}")
        return found

    def missing(self, plan: Plan, now: int) -> list[tuple[str, int]]:
        """The limits that have no room for it, and how much is missing."""
        found: list[tuple[str, int]] = []
        likely = self.limiter.estimates.tokens("", "", plan.most)
        strictest = {
            name: min(limit for each in plan.scopes for other, limit in limits_of(each) if other == name)
            for each in plan.scopes
            for name, _ in limits_of(each)
        }
        for each in plan.scopes:
            these = [one for one in self.running if each in one.plan.scopes]
            for name, limit in limits_of(each):
                if name == "concurrent":
                    found.append((f"{each.kind}_{name}", len(these) + 1 - limit))
                    continue
                meter, _, span = name.rpartition("_per_")
                used = self.ledgers[each.kind, each.name, meter].within(now, SPANS[span])
                amount = 1 if meter == "requests" else plan.input_tokens
                if meter == "output_tokens":
                    pace = 0 if span == "s" else 1
                    amount = min(likely, strictest[name])
                    if pace == 0:
                        amount = min(amount, max(16, strictest[name] // 32))
                    for one in these:
                        granted = one.reservation.granted[pace]
                        used += granted - one.reservation.out + max(0, one.wanted - granted)
                found.append((f"{each.kind}_{name}", used + amount - limit))
        return [(name, short) for name, short in found if short > 0]

    def first_time(self, plan: Plan, now: int) -> int:
        """The first at which it would fit if nothing else happened."""
        times = {
            time + span
            for each in plan.scopes
            for meter in ("requests", "input_tokens", "output_tokens")
            for span in SPANS.values()
            for time in self.ledgers[each.kind, each.name, meter].times[-3000:]
            if time + span > now
        }
        return next(time for time in sorted(times) if not self.missing(plan, time))


def limits_of(scope: LimitScope) -> list[tuple[str, int]]:
    found = {name: getattr(scope.limits, name) for name in scope.limits.__struct_fields__ if name != "context"}
    return [(name, limit) for name, limit in found.items() if limit is not None]


async def simulate(
    limiter: RateLimiter,
    clock: Clock,
    plans: Sequence[Plan],
    *,
    strict: bool = True,  # check every refusal, and not only those while nothing runs
    settle_down: Callable[[], Awaitable[None]] | None = None,  # called before the books are compared
    check_time_of: int = 20,  # of so many refusals, check the time they name
) -> Oracle:
    oracle = Oracle(limiter)
    start = clock.millis
    order = 0
    agenda: list[tuple[int, int, Callable[[], Awaitable[None]]]] = []

    def at(time: int, action: Callable[[], Awaitable[None]]) -> None:
        nonlocal order
        order += 1
        heapq.heappush(agenda, (time, order, action))

    async def arrive(plan: Plan) -> None:
        oracle.scopes.update(plan.scopes)
        if settle_down is not None:
            await settle_down()
        now = clock.millis
        try:
            reservation = await limiter.reserve(plan.scopes, input_tokens=plan.input_tokens, most_output=plan.most)
        except LimitError as error:
            refuse(plan, now, error)
            return
        one = _Running(plan, reservation, now)
        oracle.admitted += 1
        oracle.running.append(one)
        for each in plan.scopes:
            count = sum(each in other.plan.scopes for other in oracle.running)
            oracle.most_running[each.kind, each.name] = max(oracle.most_running[each.kind, each.name], count)
        oracle.add(plan.scopes, "requests", now, 1)
        oracle.add(plan.scopes, "input_tokens", now, plan.input_tokens)
        go_on(one, 0)

    def refuse(plan: Plan, now: int, error: LimitError) -> None:
        oracle.refused += 1
        if not strict and oracle.running:
            return
        missing = oracle.missing(plan, now)
        assert missing, f"refused though there is room: {error.code}"
        assert error.code in {name for name, _ in missing}
        if error.exact and oracle.checked < check_time_of:
            oracle.checked += 1
            assert error.retry_after is not None
            assert now + round(error.retry_after * 1000) == oracle.first_time(plan, now)

    def go_on(one: _Running, place: int) -> None:
        if place < len(one.plan.pieces):
            delay, tokens = one.plan.pieces[place]
            at(clock.millis + delay, lambda: stream(one, place, tokens, one.plan.tries))
        else:
            at(clock.millis + 1, lambda: end(one))

    async def stream(one: _Running, place: int, tokens: int, tries: int) -> None:
        reservation = one.reservation
        total = reservation.out + tokens
        if not reservation.allow(total):
            if not await reservation.extend(total, wait_s=0.0):
                one.wanted = total
                if tries:
                    at(clock.millis + 50, lambda: stream(one, place, tokens, tries - 1))
                else:
                    oracle.stopped += 1
                    at(clock.millis + 1, lambda: end(one))
                return
            assert reservation.allow(total)
        one.wanted = 0
        oracle.add(one.plan.scopes, "output_tokens", clock.millis, tokens)
        go_on(one, place + 1)

    async def end(one: _Running) -> None:
        plan, reservation = one.plan, one.reservation
        oracle.running.remove(one)
        used = plan.input_tokens
        if plan.ending == "failed" and not reservation.out:
            used = 0
            oracle.remove(plan.scopes, "input_tokens", one.since, plan.input_tokens)
        await reservation.settle(used, reservation.out)
        await reservation.settle(0, 0)

    for plan in plans:
        at(start + plan.arrival, lambda plan=plan: arrive(plan))
    while agenda:
        time, _, action = heapq.heappop(agenda)
        clock.millis = max(clock.millis, time)
        await action()
    return oracle


def random_plans(seed: int, count: int, *, within: int = 4000, scopes: Sequence[tuple[LimitScope, ...]]) -> list[Plan]:
    """`within`: milliseconds in which they come."""
    chance = random.Random(seed)
    plans: list[Plan] = []
    for _ in range(count):
        most = chance.choice([8, 64, 256, 1024])
        real = min(most, int(chance.expovariate(1 / 40)) + 1)
        pieces: list[tuple[int, int]] = []
        left = real
        while left:
            tokens = min(left, chance.choice([1, 1, 2, 4, 16]))
            pieces.append((chance.choice([0, 5, 20, 60, 400]), tokens))
            left -= tokens
        plans.append(
            Plan(
                arrival=chance.randrange(within),
                scopes=chance.choice(scopes),
                input_tokens=chance.choice([1, 10, 50, 200]),
                most=most,
                real=real,
                pieces=pieces if chance.random() < 0.9 else pieces[: len(pieces) // 2],
                tries=chance.choice([0, 2, 20]),
                ending="failed" if chance.random() < 0.05 else "settled",
            )
        )
    return plans


def random_scopes(seed: int) -> list[tuple[LimitScope, ...]]:
    """Of requests of two tenants with three keys to one model, under limits that bind."""
    chance = random.Random(seed)

    def limits(factor: float) -> LimitSet:
        every = {
            "requests_per_s": chance.randrange(20, 200),
            "requests_per_min": chance.randrange(150, 700),
            "concurrent": chance.randrange(20, 200),
            "input_tokens_per_s": chance.randrange(1_000, 10_000),
            "input_tokens_per_min": chance.randrange(5_000, 40_000),
            "output_tokens_per_s": chance.randrange(300, 3_000),
            "output_tokens_per_min": chance.randrange(3_000, 30_000),
        }
        chosen = chance.sample(sorted(every), chance.randrange(2, len(every) + 1))
        return LimitSet(**{name: max(1, int(every[name] * factor)) for name in chosen})

    model = LimitScope("model", "mini", limits(1.5))
    found: list[tuple[LimitScope, ...]] = []
    for tenant in ("acme", "bolt"):
        whole = LimitScope("tenant", tenant, limits(1.0))
        for key in range(3):
            found.append((whole, LimitScope("key", f"{tenant}-{key}", limits(0.5)), model))
    return found
