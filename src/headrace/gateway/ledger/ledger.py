"""The usage ledger: reserves the cost of a request before it is served and charges it exactly once afterwards.

Knows neither HTTP nor the engine.

    reserve ──▶ budgets (holds.py) ──▶ journal ──▶ served ──progress──▶ journal ──settle──▶ journal ──▶ done
                                                                a few ms later, in batches (charge_writer.py) ──▶ store

The journal records the reservation before the first byte is sent, the progress after each chunk, and the charge before
the last byte. That takes microseconds and survives the process; the store is written in the background. A charge leaves
the journal once the store has it, and the store identifies it by the request's id, so no charge is lost or counted
twice whenever the process is killed. docs/explanation/ledger.md states the exact guarantee.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.config import Config
from headrace.config.environment import required_secret
from headrace.errors import HeadraceError
from headrace.gateway.database import Database
from headrace.gateway.ledger.budget_alerts import AlertSender, AlertWebhook
from headrace.gateway.ledger.budget_report import BudgetLine, Budgets, budget_lines
from headrace.gateway.ledger.budgets import (
    FULL,
    UNAVAILABLE,
    Admitted,
    BudgetBook,
    BudgetDecision,
    BudgetRefusal,
    BudgetStatus,
    FallbackVariant,
    RefusalReason,
    TenantBudgets,
)
from headrace.gateway.ledger.charge_journal import ChargeJournal
from headrace.gateway.ledger.charge_writer import ChargeWriter
from headrace.gateway.ledger.charges import ChargeCalculator
from headrace.gateway.ledger.holds import BudgetHolds, OpenCharge
from headrace.gateway.ledger.ledger_bounds import CountLedgerEvent, LedgerBounds, LedgerEvent, LedgerStatistics
from headrace.gateway.ledger.ledger_records import BudgetScope, LedgerEntry, ReservedCharge
from headrace.gateway.ledger.ledger_store import BudgetAlert, LedgerStore
from headrace.gateway.ledger.ledger_upkeep import LedgerUpkeep
from headrace.gateway.ledger.periods import Calendar
from headrace.gateway.ledger.prices import PriceBook
from headrace.gateway.ledger.sqlite import SqliteLedgerStore
from headrace.gateway.requests.text_request import TokenUsage
from headrace.observe import metrics
from headrace.tasks import end_tasks

log: Final = logging.getLogger(__name__)

_REFUSED: Final[dict[RefusalReason, LedgerEvent]] = {
    "budget": "refused_budget",
    "held": "refused_held",
    "store": "refused_store",
    "full": "refused_full",
}


class LedgerError(HeadraceError):
    """Wrong use of the ledger."""


class Receipt(msgspec.Struct, frozen=True):
    """The charge of a request and the savings by cache or route, in micros."""

    micros: int
    saved: dict[str, int]


def _ignore(event: LedgerEvent, number: int) -> None: ...


class Ledger:
    """Use from one event loop only."""

    def __init__(
        self,
        store: LedgerStore,
        *,
        prices: PriceBook | None = None,
        accounts: BudgetBook | None = None,
        calendar: Calendar | None = None,
        journal: Path | None = None,  # None: charges that are not stored yet are lost if the process is killed
        bounds: LedgerBounds | None = None,
        courier: AlertSender | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        count: CountLedgerEvent = _ignore,
    ) -> None:
        self.store = store
        self._accounts = BudgetBook() if accounts is None else accounts
        self._calendar = Calendar() if calendar is None else calendar
        self._charging = ChargeCalculator(PriceBook() if prices is None else prices)
        self._bounds = LedgerBounds() if bounds is None else bounds
        self._courier = courier
        self._clock = clock
        self._monotonic = monotonic
        self._count = count
        self._run = secrets.token_hex(16)
        self._journal = ChargeJournal(
            journal, slots=self._bounds.exchanges, run=self._run, count=count, monotonic=monotonic
        )
        self._open: dict[str, OpenCharge] = {}  # running or not stored yet
        self._receipts: OrderedDict[str, Receipt] = OrderedDict()  # of recently settled requests
        self._ended: set[BudgetScope] = set()  # budgets that have rejected a request
        self._tasks: list[asyncio.Task[None]] = []
        self._lock = asyncio.Lock()  # held while a batch is written
        self._writer = ChargeWriter(
            store,
            watch=self._accounts.budget,
            running=self._open,
            written=self._written,
            apply=lambda readings: self._holds.apply(readings),
            lock=self._lock,
            bounds=self._bounds,
            courier=courier,
            clock=clock,
            monotonic=monotonic,
            count=count,
        )
        self._holds = BudgetHolds(
            self._accounts,
            self._calendar,
            store,
            wait_s=self._bounds.wait_s,
            lease_s=self._bounds.lease_s,
            monotonic=monotonic,
            ended=self._budget_ended,
            went_down=lambda: self._count("store_down", 1),
        )
        self._upkeep = LedgerUpkeep(
            store,
            journal=self._journal,
            holds=self._holds,
            writer=self._writer,
            calendar=self._calendar,
            bounds=self._bounds,
            running=self._open,
            ended=self._ended,
            recover=self._recover,
            cost_at=self._cost_at,
            lock=self._lock,
            clock=clock,
            monotonic=monotonic,
            count=count,
        )

    @staticmethod
    def is_kept(config: Config) -> bool:
        is_needed = bool(config.prices or config.tenants or config.keys)
        return config.ledger.keeps == "on" or (config.ledger.keeps == "auto" and is_needed)

    @classmethod
    def from_config(cls, config: Config, database: Database, environ: Mapping[str, str]) -> Ledger | None:
        """Return None if the ledger is off. ConfigError if a secret is missing in the environment."""
        if not cls.is_kept(config):
            return None
        ledger = config.ledger
        store: Any
        if ledger.store == "postgres":
            from headrace.gateway.ledger.postgres import PostgresLedgerStore

            dsn = required_secret(environ, ledger.dsn_env, "ledger.dsn_env")
            store = PostgresLedgerStore(
                dsn, schema=ledger.schema, lease_s=ledger.lease_s, lease_percent=ledger.lease_percent
            )
        else:
            store = SqliteLedgerStore(database)
        webhook = AlertWebhook.from_config(ledger, environ)
        return cls(
            store,
            prices=PriceBook.from_config(config.prices, config.models),
            calendar=Calendar(offset_minutes=ledger.utc_offset_minutes),
            journal=config.storage.path / "ledger.journal",
            bounds=LedgerBounds(
                exchanges=ledger.exchanges,
                wait_s=ledger.wait_ms / 1e3,
                lease_s=ledger.lease_s,
                gather_s=ledger.gather_ms / 1e3,
                sync_s=ledger.sync_s,
                keep_days=ledger.keep_days,
            ),
            courier=AlertSender(store, webhook, count=lambda outcome: metrics.of(metrics.alerts, outcome).inc()),
            count=lambda event, number: metrics.of(metrics.ledger, event).inc(number),
        )

    async def open(self) -> None:
        """Start, and charge what an earlier run left open. Raise JournalError if another process has the journal."""
        previous, left = self._journal.open()
        self._recover(left)
        await self.store.open(self._run, previous)
        work = [self._writer.run(), *self._upkeep.tasks()]
        if self.store.shared:
            with contextlib.suppress(Exception):  # logged; it is retried every second
                await self._holds.renew()
        if self._courier is not None:
            work.append(self._courier.run())
        self._tasks = [asyncio.create_task(each) for each in work]
        with contextlib.suppress(TimeoutError):  # the rest is written in the background
            async with asyncio.timeout(self._bounds.drain_s):
                await self.flush()
                if previous:  # what it left open is charged now
                    await self.end_leases(previous)

    async def close(self) -> None:
        """Write pending charges, for at most drain_s. The rest stays in the journal for the next start."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._bounds.drain_s):
                await self.flush()
                await self.end_leases(self._run)
        await end_tasks(self._tasks)
        for open in self._writer.waiting.values():
            if open.slot is None:
                self._lose(open)
        await self._journal.close()
        await self.store.close()

    async def flush(self) -> None:
        """Wait until everything settled is stored."""
        await self._writer.flush()

    async def end_leases(self, run: str) -> None:
        """Give back the leases of a process; if the store does not answer, they end by themselves."""
        try:
            await self.store.end_leases(run)
        except Exception as error:
            log.warning("leases of budgets could not be given back: %s", str(error) or type(error).__name__)

    # The life of a request

    async def reserve(
        self,
        entry: LedgerEntry,
        *,
        output_tokens: int,  # expected
        most_tokens: int | None = None,  # at most
        machine_s: float = 0.0,  # expected machine time; default: learned from its variant
        falls: bool = True,  # a fallback variant may answer
    ) -> BudgetDecision:
        """Decide whether a request may be served. After Admitted, call settle or release; otherwise nothing is held."""
        if entry.id in self._receipts:
            raise LedgerError("This request is already settled.")
        earlier = self._open.get(entry.id)
        if earlier is not None:
            if earlier.reserved.entry.variant == entry.variant:
                return Admitted(earlier.held)
            self.release(entry.id)
        if self._accounts.of(entry.tenant).when_down == "closed" and self._writer.behind:
            return self._count_decision(UNAVAILABLE)
        if len(self._open) >= self._bounds.exchanges:
            return self._count_decision(FULL)
        _check(entry)
        open = self._open_charge(entry, most_tokens)

        def estimate(variant: str) -> int:
            return self._charging.estimate(entry, variant, output_tokens, machine_s)

        verdict: BudgetDecision = UNAVAILABLE
        try:
            verdict = await self._holds.hold(open, estimate, self._clock(), falls=falls)
            if isinstance(verdict, Admitted):
                verdict = self._record_reservation(open, verdict)
        finally:
            if not isinstance(verdict, Admitted):
                self._drop(open)
        return self._count_decision(verdict)

    def progress(self, id: str, output_tokens: int, *, machine_s: float = 0.0) -> bool:
        """Make room for a chunk before it is sent. Return False if the lease has none: call `extend` then."""
        open = self._open.get(id)
        if open is None or open.settled is not None:
            return True
        self._charging.advance(open, output_tokens, machine_s)
        tokens = open.output_tokens
        need, more = self._costs_ahead(open, tokens)
        return not open.scopes or need <= open.held or self._holds.extend(open, need, more)

    def is_bounded(self, id: str) -> bool:
        """Return whether a budget bounds a running request."""
        open = self._open.get(id)
        return open is not None and open.settled is None and bool(open.scopes)

    def may_reach(self, id: str, output_tokens: int) -> bool:
        """Hold what a running request needs to reach so many tokens, if there is room. Record no progress."""
        open = self._open.get(id)
        if open is None or open.settled is not None:
            return True
        need, more = self._costs_ahead(open, output_tokens)
        return not open.scopes or need <= open.held or self._holds.extend(open, need, more)

    def sent(self, id: str, output_tokens: int) -> None:
        """Record how many tokens the client's connection has taken: a crash charges these."""
        open = self._open.get(id)
        if open is None or open.settled is not None or output_tokens <= open.sent_tokens:
            return
        open.sent_tokens = output_tokens
        self._journal.progress(open)

    async def extend(self, id: str, output_tokens: int) -> bool:
        """Wait for room after `progress` returned False. Return False if the response must end."""
        open = self._open.get(id)
        if open is None or open.settled is not None:
            return True
        if await self._holds.extend_later(open, *self._costs_ahead(open, output_tokens)):
            return True
        self._count("stopped", 1)
        return False

    def _costs_ahead(self, open: OpenCharge, tokens: int) -> tuple[int, int]:
        """Return what a request must hold to go on, and what it should hold."""
        ahead = tokens + self._bounds.ahead_tokens
        return self._cost_at(open, ahead), self._cost_at(open, ahead + self._bounds.extension_tokens)

    def _cost_at(self, open: OpenCharge, tokens: int) -> int:
        return self._charging.cost_at(open, tokens if open.most is None else min(tokens, open.most))

    def settle(
        self,
        id: str,
        usage: TokenUsage,
        *,
        ended: str = "finished",
        variant: str = "",  # that answered; default: the reserved one
        hit: str = "",  # the cache that answered; `usage` is then that of the original response
        instead_of: str = "",  # the variant that would have answered without routing
        route: str = "route",  # name under which the savings are counted
        entry: LedgerEntry | None = None,  # for a request that was not reserved
    ) -> Receipt:
        """Charge a request once; further calls return the same receipt. Never waits."""
        known = self._receipts.get(id)
        if known is not None:
            return known
        open = self._open.get(id)
        if open is None:
            if entry is None:
                raise LedgerError("This request was not reserved.")
            _check(entry)
            open = self._open_charge(entry)
            self._journal.reserve_late(open)
        settled = self._charging.settlement(
            open.reserved, usage, ended, variant=variant, hit=hit, instead_of=instead_of, route=route
        )
        open.settled = settled
        receipt = self._receipts[id] = Receipt(settled.micros, settled.saved)
        if len(self._receipts) > self._bounds.exchanges:
            self._receipts.popitem(last=False)
        if len(self._open) > 2 * self._bounds.exchanges:  # unreserved requests can exceed the bound
            del self._open[id]
            self._lose(open)
            return receipt
        self._holds.settle(open, settled.micros)
        self._journal.settle(open)
        self._writer.charge(open)
        self._count("settled", 1)
        return receipt

    def charge(
        self,
        id: str,
        usage: TokenUsage,
        *,
        ended: str,
        variant: str = "",
        hit: str = "",
        instead_of: str = "",
        entry: LedgerEntry | None = None,
    ) -> None:
        """Settle a request whose caller cannot handle a failure; a LedgerError is logged."""
        try:
            self.settle(id, usage, ended=ended, variant=variant, hit=hit, instead_of=instead_of, entry=entry)
        except LedgerError as error:
            log.error("a request was not charged: %s", error)

    def release(self, id: str) -> None:
        """Drop an admitted request that is not served after all, without a charge."""
        open = self._open.get(id)
        if open is not None and open.settled is None:
            self._drop(open)

    def _open_charge(self, entry: LedgerEntry, most: int | None = None) -> OpenCharge:
        now = self._clock()
        price = self._charging.prices.of(entry.variant)
        open = OpenCharge(ReservedCharge(entry, self._calendar.day(now), int(now), price), most=most)
        self._open[entry.id] = open
        return open

    def _drop(self, open: OpenCharge) -> None:
        """Undo a reservation."""
        self._open.pop(open.id, None)
        self._writer.drop(open)
        self._holds.release(open)
        if open.stored:
            self._writer.release(open.id)
        self._journal.free(open)

    def _written(self, open: OpenCharge, known: bool) -> None:
        """Called once the charge is stored. `known`: the store already had it."""
        assert open.settled is not None
        self._holds.written(open, open.settled.micros)
        if known:
            self._count("known", 1)
        self._open.pop(open.id, None)
        self._journal.free(open)

    def _count_decision(self, verdict: BudgetDecision) -> BudgetDecision:
        match verdict:
            case Admitted():
                self._count("admitted", 1)
            case FallbackVariant():
                self._count("fallback", 1)
            case BudgetRefusal():
                self._count(_REFUSED[verdict.why], 1)
        return verdict

    # Budgets

    def declare(self, tenant: str, account: TenantBudgets | None) -> None:
        """Set a tenant's budgets from now on; None: the default."""
        if self._accounts.declare(tenant, account):
            self._holds.declared(tenant, self._open.values())

    def standings(self, tenant: str) -> list[BudgetStatus]:
        """Return the budgets of a tenant used in this process, as last read from the store."""
        return self._holds.standings(tenant, self._calendar.day(self._clock()))

    async def budget_lines(self, budgets: Budgets) -> list[BudgetLine]:
        """Return what is spent, reserved and left of these budgets, in every gateway."""
        held = {tenant: self.standings(tenant) for tenant in budgets}
        return await budget_lines(self.store, budgets, held, self._calendar, self._calendar.day(self._clock()))

    def budget_left(self, tenant: str, endpoint: str) -> float | None:
        """Return the share (0 to 1) left of the tenant's tightest budget for the endpoint; None without budgets."""
        shares = [
            max(0.0, 1.0 - (standing.spent + standing.held) / max(1, standing.budget.limit_micros))
            for standing in self.standings(tenant)
            if standing.budget.endpoint in ("", endpoint)
        ]
        return min(shares, default=None)

    def statistics(self) -> LedgerStatistics:
        waiting = len(self._writer.waiting)
        down = self._holds.leases.health.is_down
        running = len(self._open) - waiting
        return LedgerStatistics(running, waiting, self._writer.behind_s, self._journal.is_healthy, down)

    def _budget_ended(self, standing: BudgetStatus, scope: BudgetScope) -> None:
        if standing.budget.alerts and scope not in self._ended:
            self._ended.add(scope)
            self._writer.alert(BudgetAlert(scope, 0, standing.budget.limit_micros, standing.spent, int(self._clock())))

    # The journal

    def _recover(self, left: list[OpenCharge]) -> None:
        """Charge what a previous run left in the journal."""
        for open in left:
            assert open.settled is not None
            self._open[open.id] = open
            self._holds.settle(open, open.settled.micros)
            self._writer.charge(open)

    def _record_reservation(self, open: OpenCharge, verdict: Admitted) -> BudgetDecision:
        """Write the reservation to the journal, after which the request may be served."""
        if not verdict.checked:
            self._count("unchecked", 1)
        match self._journal.reserve(open):
            case "full":
                return FULL
            case "failed" if self._accounts.of(open.reserved.entry.tenant).when_down == "closed":
                return UNAVAILABLE
            case _:
                pass
        if self.store.shared:
            self._writer.open(open)
        return verdict

    def _lose(self, open: OpenCharge) -> None:
        self._count("lost", 1)
        log.error("a charge was lost: %s", msgspec.json.encode((open.reserved, open.settled)).decode())

    # Background work, which also runs by itself

    async def renew(self) -> None:
        """Renew the leases now, and give back what other gateways want."""
        await self._holds.renew()

    async def tend(self) -> None:
        """Take over the open requests of dead servers in a shared store, and drop past periods."""
        await self._upkeep.tend()

    async def prune(self) -> int:
        """Delete charges past their retention and return how many. Their sums stay."""
        return await self._upkeep.prune()


def _check(entry: LedgerEntry) -> None:
    """Raise LedgerError for text that no database stores: it would block every other write."""
    texts = (entry.id, entry.tenant, entry.key, entry.endpoint, entry.model, entry.variant, entry.surface)
    joined = "\n".join(texts)
    try:
        joined.encode()
    except UnicodeEncodeError:
        raise LedgerError("The names of a request must be valid Unicode.") from None
    if "\0" in joined or not entry.id or not entry.endpoint:
        raise LedgerError("A request needs an id and an endpoint, and its names must not contain NUL.")
