"""Leases of budgets: the slices that this process may spend without asking the store for each request.

A store that gateways share grants a lease in one statement that locks the budget, so what is spent and what all
gateways have leased never exceeds the limit together. A request that fits into the lease waits for nothing. sqlite
belongs to one process, which has a lease on everything.

A reading from the store is absolute and has a version. Answers may come late, out of order or not at all: the newest
one counts, and a statement that timed out and took effect all the same is seen in the next reading.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from headrace.gateway.ledger.ledger_records import BudgetScope
from headrace.gateway.ledger.ledger_store import LAPSE, BudgetReading, LeaseRequest, LedgerStore
from headrace.gateway.postgres_pool import StoreBusyError

log: Final = logging.getLogger(__name__)

T = TypeVar("T")
Wants: TypeAlias = Mapping[BudgetScope, tuple[int, int]]  # (limit, micros) by scope
Take: TypeAlias = Callable[[], bool]  # takes what is wanted, if there is room for it now
_DOWN: Final = 3  # failures in a row after which the store counts as down
# A wait is cut into so many, each of which takes a turn of the event loop: a loop that is busy for longer than the wait
# has not seen an answer that was there all the time.
_TURNS: Final = 10
_FRESH_S: Final = 1.0  # a denial is repeated for this long without asking again
_MOST: Final = 256  # requests per statement
_MARGIN: Final = 0.1  # of lease_s: this process stops using its leases so much earlier than the store frees them


class ScopeSum(msgspec.Struct):
    """One budget as this process knows it, in micros."""

    reading: BudgetReading | None = None  # the store's newest answer; None: never read
    denied_at: float = float("-inf")  # when the store last had less than was needed
    waiting: int = 0  # charged, not stored yet
    held: int = 0  # by running requests
    slice: int = 0  # what was free to use after the last answer
    is_topping_up: bool = False

    @property
    def spent(self) -> int:
        return self.waiting + (0 if self.reading is None else self.reading.spent)

    @property
    def unused(self) -> int:
        """Leased and unused micros. Negative if requests took more than they held."""
        return (0 if self.reading is None else self.reading.leased) - self.waiting - self.held

    def left(self, limit: int) -> int:
        """Return what the store could lease on top, by the last answer."""
        found = self.reading
        return 0 if found is None else max(0, limit - found.spent - found.others - found.leased)

    def room(self, limit: int) -> int:
        """Return what may be held on top, by the lease and by the limit."""
        found = self.reading
        if found is None:
            return -1
        return min(found.leased, limit - found.spent - found.others) - self.waiting - self.held

    def room_alone(self, limit: int) -> int | None:
        """Return what would be left if no other gateway spent anything; None if nothing is known."""
        return None if self.reading is None else limit - self.spent - self.held


class StoreHealth:
    """Several failures in a row, each a timeout or an error, make a store count as down until it answers."""

    def __init__(self, went_down: Callable[[], None]) -> None:
        self._went_down = went_down
        self.failures = 0

    @property
    def is_down(self) -> bool:
        return self.failures >= _DOWN

    def failed(self, error: str) -> None:
        self.failures += 1
        if self.failures == _DOWN:
            log.error("the ledger's database does not respond; serving within leases only: %s", error)
            self._went_down()

    def answered(self) -> None:
        if self.is_down:
            log.info("the ledger's database answers again")
        self.failures = 0


class BudgetLeases:
    """Use from one event loop only."""

    def __init__(
        self,
        store: LedgerStore,
        sums: dict[BudgetScope, ScopeSum],
        *,
        wait_s: float,
        lease_s: float,
        monotonic: Callable[[], float],
        went_down: Callable[[], None],
    ) -> None:
        self._store = store
        self._sums = sums
        self._wait_s = wait_s
        self._lease_s = lease_s
        self._monotonic = monotonic
        self._valid_until = float("-inf") if store.shared else float("inf")
        self._asking: dict[asyncio.Future[bool | None], tuple[Wants, Take]] = {}
        self._worker: asyncio.Task[None] | None = None
        self.health = StoreHealth(went_down)

    @property
    def are_valid(self) -> bool:
        """True if the leases may be used: this process renewed them recently enough."""
        return self._monotonic() < self._valid_until

    async def ask(self, wants: Wants, take: Take) -> bool | None:
        """Ask for a lease that has room for `wants`.

        Return what `take` does, which is called as soon as the store has answered; None without an answer in time.
        """
        if not self.health.is_down and self._is_hopeless(wants):
            return False
        future = self._enqueue(wants, take)
        if self.health.is_down:
            self._leave(future)  # this request does not wait, but its question shows when the store answers again
            return None
        for _ in range(_TURNS):
            if future.done():
                break
            await asyncio.wait((future,), timeout=self._wait_s / _TURNS)
        self._leave(future)
        return None if future.cancelled() else future.result()

    def _leave(self, future: asyncio.Future[bool | None]) -> None:
        """Ask no more, or take nothing when the answer comes."""
        self._asking.pop(future, None)
        future.cancel()

    def top_up(self, scope: BudgetScope, limit: int) -> None:
        """Ask for more in the background once half of a lease is used and the store has more."""
        sum = self._sums[scope]
        if not self._store.shared or sum.is_topping_up or 2 * sum.unused >= sum.slice:
            return
        if sum.left(limit) > sum.unused and not self.health.is_down:
            sum.is_topping_up = True
            self._enqueue({scope: (limit, 0)}, lambda: True)

    def apply(self, readings: Mapping[BudgetScope, BudgetReading]) -> None:
        """Take over what the store says, where it is news."""
        for scope, reading in readings.items():
            sum = self._sums.get(scope)  # None: no budget counts it
            if sum is not None and (sum.reading is None or reading.version > sum.reading.version):
                sum.reading = reading
                sum.slice = max(0, sum.unused)

    async def renew(self) -> None:
        """Keep the leases, and give back what others want. Raise if the store does not answer."""
        sent = self._monotonic()
        renewal = await self._answer(self._store.renew())
        if renewal.lapsed:  # others may have been granted what this process had leased
            for sum in self._sums.values():
                if sum.reading is not None:
                    sum.reading = replace(sum.reading, leased=0, version=sum.reading.version + LAPSE)
        if self._store.shared:
            self._valid_until = sent + self._lease_s * (1 - _MARGIN)
        await self._give_back(renewal.wanted)

    async def _give_back(self, scopes: Iterable[BudgetScope]) -> None:
        requests: list[LeaseRequest] = []
        for scope in sorted(scopes):
            sum = self._sums.get(scope)
            if sum is not None and sum.reading is not None and sum.unused > 0:
                requests.append(LeaseRequest(scope, 0, -sum.unused, version=sum.reading.version))
                # Used no more from now on. The store only takes it while the lease has this version, so a statement
                # that is late cannot take what was leased after it.
                sum.reading = replace(sum.reading, leased=sum.reading.leased - sum.unused)
        for start in range(0, len(requests), _MOST):
            await self._lease(requests[start : start + _MOST])

    def _is_hopeless(self, wants: Wants) -> bool:
        """True if the store has just denied this amount."""
        found = [(self._sums[scope], limit, micros) for scope, (limit, micros) in wants.items()]
        if any(sum.reading is None for sum, _, _ in found):
            return False
        lacking = [each for each in found if each[0].room(each[1]) < each[2]]
        if not self._store.shared:
            return bool(lacking)
        now = self._monotonic()
        return any(
            now - sum.denied_at < _FRESH_S and sum.left(limit) < max(1, micros - sum.unused)
            for sum, limit, micros in lacking
        )

    def _enqueue(self, wants: Wants, take: Take) -> asyncio.Future[bool | None]:
        future: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
        self._asking[future] = wants, take
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return future

    async def _work(self) -> None:
        """Ask for what waits, in one statement after another; first come, first served."""
        try:
            while self._asking:
                some = list(self._asking.items())[:_MOST]
                for future, _ in some:
                    del self._asking[future]
                answered = await self._ask_for([wants for _, (wants, _) in some])
                for future, (_, take) in some:
                    if not future.done():
                        future.set_result(take() if answered else None)
        finally:
            self._worker = None

    async def _ask_for(self, all_wants: Sequence[Wants]) -> bool:
        total: dict[BudgetScope, tuple[int, int, int]] = {}
        for wants in all_wants:
            for scope, (limit, micros) in wants.items():
                highest, all, least = total.get(scope, (0, 0, micros))
                total[scope] = max(limit, highest), micros + all, min(micros, least)
        try:
            if not self.are_valid:
                await self.renew()
            requests: list[LeaseRequest] = []
            for scope, (limit, micros, least) in sorted(total.items()):
                sum = self._sums.get(scope)
                if sum is not None:
                    missing = max(0, micros - sum.unused)
                    requests.append(LeaseRequest(scope, limit, missing, max(0, least - sum.unused)))
            await self._lease(requests)
            for scope, (_, micros, _) in total.items():
                if (sum := self._sums.get(scope)) is not None and sum.unused < micros:
                    sum.denied_at = self._monotonic()
        except Exception as error:
            log.debug("no lease: %s", error)  # counted and logged by its health
            return False
        finally:
            for scope in total:
                if (sum := self._sums.get(scope)) is not None:
                    sum.is_topping_up = False
        return True

    async def _lease(self, requests: list[LeaseRequest]) -> None:
        self.apply(await self._answer(self._store.lease(requests)))

    async def _answer(self, work: Awaitable[T]) -> T:
        """Await the store. Every `wait_s` without an answer counts as a failure."""
        loop = asyncio.get_running_loop()

        def tick() -> None:
            nonlocal timer, turns
            turns += 1
            if turns % _TURNS == 0:
                self.health.failed(f"no answer within {self._wait_s:g} s")
            timer = loop.call_later(self._wait_s / _TURNS, tick)

        turns = 0
        timer = loop.call_later(self._wait_s / _TURNS, tick)
        try:
            result = await work
        except StoreBusyError:
            raise
        except Exception as error:
            self.health.failed(str(error) or type(error).__name__)
            raise
        finally:
            timer.cancel()
        self.health.answered()
        return result
