"""What is spent, reserved and left of budgets: of the day, the month, an endpoint, and while requests run."""

from __future__ import annotations

from pathlib import Path

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.ledger.budget_report import BudgetLine
from headrace.gateway.ledger.budgets import Admitted, BudgetBook, TenantBudgets
from tests.support.running_server import asynchronous
from tests.support.stores.ledgers import CHAT, DAY, NOON, Opened, entry, ledger_in, used

BUDGETS = {
    "a": (
        BudgetConfig(limit_micros=100, period="day"),
        BudgetConfig(limit_micros=1000, period="month"),
        BudgetConfig(limit_micros=500, period="month", endpoint="/v1/embeddings"),
    ),
    "b": (BudgetConfig(limit_micros=40, period="day", endpoint=CHAT),),
}
MIDNIGHT = int(NOON + DAY / 2)  # 2025-11-23, after which November has eight days
MONTH_END = MIDNIGHT + 8 * int(DAY)


def book() -> BudgetBook:
    return BudgetBook({tenant: TenantBudgets(budgets) for tenant, budgets in BUDGETS.items()})


async def lines(opened: Opened) -> dict[tuple[str, str, str], BudgetLine]:
    await opened.ledger.flush()
    return {(each.tenant, each.period, each.endpoint): each for each in await opened.ledger.budget_lines(BUDGETS)}


@asynchronous
async def test_unused_budgets_are_left_whole(tmp_path: Path) -> None:
    async with ledger_in(tmp_path, book()) as opened:
        assert list((await lines(opened)).values()) == [
            BudgetLine("a", "2025-11-22", "", 100, 0, 0, 100, MIDNIGHT),
            BudgetLine("a", "2025-11", "", 1000, 0, 0, 1000, MONTH_END),
            BudgetLine("a", "2025-11", "/v1/embeddings", 500, 0, 0, 500, MONTH_END),
            BudgetLine("b", "2025-11-22", CHAT, 40, 0, 0, 40, MIDNIGHT),
        ]


@asynchronous
async def test_charges_count_in_their_day_month_and_endpoint(tmp_path: Path) -> None:
    async with ledger_in(tmp_path, book()) as opened:
        assert await opened.exchange("first") == 30
        opened.clock.now += DAY
        await opened.exchange("second")
        await opened.exchange("third", endpoint="/v1/embeddings")
        found = await lines(opened)
        spent = {place: line.spent_micros for place, line in found.items()}
        assert spent == {
            ("a", "2025-11-23", ""): 60,
            ("a", "2025-11", ""): 90,
            ("a", "2025-11", "/v1/embeddings"): 30,
            ("b", "2025-11-23", CHAT): 0,
        }
        assert found["a", "2025-11", ""].left_micros == 910


@asynchronous
async def test_sums_of_an_earlier_run_are_known_before_a_request(tmp_path: Path) -> None:
    async with ledger_in(tmp_path, book()) as opened:
        await opened.exchange("first")
    async with ledger_in(tmp_path, book()) as opened:
        assert (await lines(opened))["a", "2025-11-22", ""].spent_micros == 30


@asynchronous
async def test_running_requests_reserve_and_an_overspent_budget_has_nothing_left(tmp_path: Path) -> None:
    async with ledger_in(tmp_path, book()) as opened:
        verdict = await opened.ledger.reserve(entry("one"), output_tokens=10)
        assert isinstance(verdict, Admitted)
        line = (await lines(opened))["a", "2025-11-22", ""]
        assert (line.spent_micros, line.reserved_micros, line.left_micros) == (0, verdict.micros, 100 - verdict.micros)
        opened.ledger.settle("one", used(output=90))
        line = (await lines(opened))["a", "2025-11-22", ""]
        assert (line.spent_micros, line.reserved_micros, line.left_micros) == (190, 0, 0)
