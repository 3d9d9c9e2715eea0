"""Injected regressions on made-up traffic: how many requests of the candidate pass until a canary is rolled back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from headrace.config import CanaryConfig
from headrace.gateway.accounts.account_store import SqliteAccountStore
from headrace.gateway.accounts.account_sync import AccountSync
from headrace.gateway.accounts.admin_operations import Actor
from headrace.gateway.database import Database
from headrace.gateway.flow.answer_observer import FinishedAnswer
from headrace.gateway.requests.text_request import Choice
from headrace.gateway.routing.canary_routes import CanaryRoute, CanaryRoutes
from headrace.gateway.routing.router import RoutePlan
from headrace.lab.online.canaries import Canaries
from headrace.lab.online.canary_operations import CanaryOperations, NewCanary
from headrace.lab.online.lab_store import SqliteLabStore
from tests.support.running_server import asynchronous
from tests.support.scripted_answers import asked_for, exchange_of, served

EVERY = 50  # requests between two looks
NEW = NewCanary(control="mini", candidate="mini@new", stages=(50.0,), auto=True)


class Traffic:
    """Requests in both arms, whose durations and qualities are drawn."""

    def __init__(self, canaries: Canaries, routes: CanaryRoutes, random: Random) -> None:
        self.canaries = canaries
        self.routes = routes
        self.random = random
        self.variants = {name: served(name) for name in ("mini", "mini@new")}
        self.candidates = 0

    def request(self, number: int, *, slower: float) -> None:
        exchange = exchange_of(asked_for(metadata={"conversation": str(number)}))
        plan = self.routes.apply(exchange, RoutePlan("mini"))
        exchange.served = self.variants[plan.variant]
        is_candidate = plan.arm == "candidate"
        self.candidates += is_candidate
        seconds = self.random.lognormvariate(-1.0, 0.25) * (slower if is_candidate else 1.0)
        began = exchange.timeline.began
        exchange.first_at, exchange.last_at = began + seconds / 4, began + seconds
        finished = FinishedAnswer(
            exchange=exchange,
            requested=exchange.text_request,
            plan=plan,
            choices=[Choice(0, "yes")],
            ended="finished",
            is_complete=True,
        )
        assert self.canaries.wants(exchange, plan)
        self.canaries.take(finished)

    def pair(self, *, drop: float) -> None:
        control, candidate = (min(1.0, max(0.0, self.random.gauss(0.85 - each, 0.1))) for each in (0.0, drop))
        self.canaries._evidence["mini"].note_quality(control, candidate)


async def run_until_it_ends(folder: Path, most: int, step: Callable[[Traffic, int], None]) -> tuple[str, str, int]:
    """Return the phase, the reason, and the candidate's requests."""
    database = Database(folder)
    shared = AccountSync(SqliteAccountStore(database), poll_s=3600.0)
    await shared.start()
    try:
        operations = CanaryOperations(shared, ("mini", "mini@new"))
        config = CanaryConfig(pairs=0.0, stage_requests=10_000_000)
        canaries = Canaries(config, operations, SqliteLabStore(database), {}, _no_answer, lambda one, other: 1.0)
        record = await operations.start(Actor("ops", ""), NEW)
        routes = CanaryRoutes()
        routes.by_control = {"mini": CanaryRoute(record.run, "mini@new", 50.0)}
        traffic = Traffic(canaries, routes, Random(5))
        for number in range(most):
            step(traffic, number)
            if number % EVERY == EVERY - 1:
                await canaries.look()
                found = operations.records()["mini"]
                if found.phase != "running":
                    return found.phase, found.reason, traffic.candidates
        return "running", "", traffic.candidates
    finally:
        await shared.close()
        await database.close()


async def _no_answer(exchange: object) -> list[Choice]:
    raise AssertionError("nothing is copied")


@asynchronous
async def test_a_candidate_that_is_20_percent_slower_is_rolled_back_within_1000_of_its_requests(tmp_path: Path) -> None:
    phase, reason, candidates = await run_until_it_ends(
        tmp_path, 4000, lambda traffic, number: traffic.request(number, slower=1.2)
    )
    assert phase == "rolled_back"
    assert reason.startswith("worse than mini: ")
    assert {*reason.removeprefix("worse than mini: ").split(", ")} <= {"ttft", "e2e"}
    assert candidates <= 1000


@asynchronous
async def test_5_points_of_quality_are_rolled_back_within_1000_pairs(tmp_path: Path) -> None:
    def step(traffic: Traffic, number: int) -> None:
        traffic.request(number, slower=1.0)
        if number % 2:
            traffic.pair(drop=0.05)

    phase, reason, candidates = await run_until_it_ends(tmp_path, 2000, step)
    assert (phase, reason) == ("rolled_back", "worse than mini: quality")
    assert candidates <= 1000


@pytest.mark.parametrize("slower", [1.0, 0.8])
@asynchronous
async def test_an_equal_and_a_faster_candidate_stay(tmp_path: Path, slower: float) -> None:
    phase, _, candidates = await run_until_it_ends(
        tmp_path, 2000, lambda traffic, number: traffic.request(number, slower=slower)
    )
    assert phase == "running"
    assert candidates > 800
