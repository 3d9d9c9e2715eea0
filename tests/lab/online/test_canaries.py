"""Canaries on a running server: shares, evidence, rollback, promotion, feedback and who may do what."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace.config import CanaryConfig, ModelConfig
from headrace.engine.process.client_errors import WorkerLostError
from headrace.engine.process.output_stream import OutputStream
from headrace.lab.online.canaries import Canaries
from tests.support.admin_server import ADMIN, CALLER, READER, Administered, administered
from tests.support.running_server import FakeEngine, asynchronous, fails, until, words

NEVER = 3600.0
CALLING = {"authorization": "Bearer caller-secret"}


@contextlib.asynccontextmanager
async def trying(folder: Path, **settings: Any) -> AsyncGenerator[tuple[Administered, FakeEngine, Canaries]]:
    """A server whose `mini` has a variant `new` and a golden one, each with its own engine; a test calls `look`."""
    config = CanaryConfig(**{"every_s": NEVER, "pairs": 0.0, **settings})
    models = {"mini": ModelConfig(variants={"new": {}, "golden": {}})}
    async with administered(folder, keys=(ADMIN, READER, CALLER), models=models, canary=config) as running:
        engine, golden = FakeEngine(), FakeEngine()
        served = running.server.fleet.served
        served["mini@new"] = replace(served["mini@new"], engine=engine)
        served["mini@golden"] = replace(served["mini@golden"], engine=golden)
        running.engine.answer = words("the ", "good ", "answer")
        engine.answer = words("the ", "good ", "answer")
        golden.answer = words("the ", "good ", "answer")
        [canaries] = [each for each in running.server.services.answer_observers if isinstance(each, Canaries)]
        yield running, engine, canaries


async def chat(running: Administered, number: int, **changes: Any) -> str:
    """The variant that answered a conversation's request."""
    answer = await running.chat("caller-secret", metadata={"conversation": str(number)}, **changes)
    assert answer.status == 200
    return answer.json["model"]


async def ask_many(running: Administered, count: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for number in range(count):
        model = await chat(running, number)
        found[model] = found.get(model, 0) + 1
    return found


def sometimes(share: float, bad: Callable[[OutputStream], None], good: Callable[[OutputStream], None]) -> Any:
    random_ = random.Random(7)
    return lambda stream: (bad if random_.random() < share else good)(stream)


@asynchronous
async def test_a_canary_takes_its_share_and_both_arms_are_shown(tmp_path: Path) -> None:
    async with trying(tmp_path) as (running, _, _):
        new = {"candidate": "mini@new", "stages": [40, 80], "reason": "cheaper"}
        started = await running.did("POST", "canary", new)
        assert (started["control"], started["phase"], started["percent"]) == ("mini", "running", 40.0)
        found = await ask_many(running, 60)
        assert set(found) == {"mini", "mini@new"}
        assert 10 <= found["mini@new"] <= 40
        first = [await chat(running, number) for number in range(8)]
        assert first == [await chat(running, number) for number in range(8)]  # it stays with its variant
        [shown] = (await running.did("GET", "canary"))["data"]
        evidence = shown["evidence"]
        assert evidence["control"]["requests"] + evidence["candidate"]["requests"] == 76
        assert evidence["candidate"]["failures"] == 0.0
        assert evidence["candidate"]["latency"]["ttft"]["count"] == evidence["candidate"]["requests"]
        [row] = (await running.did("GET", "audit?limit=1"))["data"]
        assert (row["what"], row["target"], row["reason"]) == ("canary.start", "canary:mini", "cheaper")


@asynchronous
async def test_users_get_the_control_where_the_candidate_fails_and_it_is_rolled_back(tmp_path: Path) -> None:
    async with trying(tmp_path) as (running, engine, canaries):
        engine.answer = sometimes(0.7, fails(WorkerLostError("it is gone")), words("the ", "good ", "answer"))
        await running.did("POST", "canary", {"candidate": "mini@new", "stages": [50]})
        for number in range(60):
            answer = await running.chat("caller-secret", metadata={"conversation": str(number)})
            assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, "the good answer")
        await canaries.look()
        [shown] = (await running.did("GET", "canary"))["data"]
        assert (shown["phase"], shown["percent"], shown["by"]) == ("rolled_back", 0.0, "canary")
        assert shown["reason"] == "worse than mini: failures"
        assert await ask_many(running, 12) == {"mini": 12}
        [row] = (await running.did("GET", "audit?limit=1"))["data"]
        assert (row["what"], row["who"]) == ("canary.roll_back", "canary")


@asynchronous
async def test_worse_quality_on_pairs_is_rolled_back(tmp_path: Path) -> None:
    async with trying(tmp_path, pairs=1.0, reference="mini@golden", queue=4096) as (running, engine, canaries):
        engine.answer = words("something ", "else entirely")
        await running.did("POST", "canary", {"candidate": "mini@new", "stages": [50]})
        await ask_many(running, 16)
        await until(
            lambda: not canaries.copies.waiting and canaries._evidence["mini"].rates["quality"].worse.values == 16
        )
        await canaries.look()
        [shown] = (await running.did("GET", "canary"))["data"]
        assert (shown["phase"], shown["reason"]) == ("rolled_back", "worse than mini: quality")
        assert shown["evidence"]["control"]["quality"] == 1.0
        assert shown["evidence"]["candidate"]["quality"] < 0.5
        assert shown["evidence"]["agreement"]["compared"] == 16


@asynchronous
async def test_copies_wait_for_an_idle_server_unless_they_may_run_at_any_time(tmp_path: Path) -> None:
    for when, waits in ((None, True), ("idle", True), ("always", False)):
        async with trying(tmp_path / str(when), pairs=1.0, reference="mini@golden", when=when) as (
            running,
            _,
            canaries,
        ):
            await running.did("POST", "canary", {"candidate": "mini@new", "stages": [50]})
            running.server.context.running += 1  # a request that is still answered
            assert await chat(running, 1) in ("mini", "mini@new")
            quality = canaries._evidence["mini"].rates["quality"].worse
            if waits:
                await asyncio.sleep(0)
                assert (canaries.copies.tokens_today, quality.values) == (0, 0)
                running.server.context.running -= 1
            await until(lambda rate=quality: rate.values == 1)
            running.server.context.running = 0


@asynchronous
async def test_copies_for_upstreams_run_at_any_time(tmp_path: Path) -> None:
    async with trying(tmp_path, reference="mini@golden") as (running, _, canaries):
        await running.did("POST", "canary", {"candidate": "mini@new", "stages": [50]})
        record = canaries.operations.records()["mini"]
        assert canaries._when("mini", record, "control") == "idle"
        canaries._runs_here = lambda served: served.name == "mini"
        assert canaries._when("mini", record, "control") == "always"  # the candidate and the reference answer
        assert canaries._when("mini", record, "candidate") == "idle"  # the control answers


@asynchronous
async def test_no_stage_ends_before_the_quality_was_measured(tmp_path: Path) -> None:
    settings = {"stage_requests": 1, "stage_s": 1e-9, "promote": "auto", "reference": "mini@golden", "pairs": 1.0}
    settings |= {"stage_pairs": 5, "queue": 4096}
    async with trying(tmp_path, **settings) as (running, _, canaries):
        await running.did("POST", "canary", {"candidate": "mini@new", "stages": [50]})
        running.server.context.running += 1
        await ask_many(running, 20)
        await canaries.look()
        assert canaries.operations.records()["mini"].phase == "running"
        running.server.context.running -= 1
        measured = canaries._evidence["mini"].arms["candidate"].count
        await until(lambda: measured("quality") == 20)
        canaries._stage_began["mini"] = (canaries.operations.records()["mini"].changed, 0, 16)
        await canaries.look()
        assert canaries.operations.records()["mini"].phase == "running"  # 4 of 5
        canaries._stage_began["mini"] = (canaries.operations.records()["mini"].changed, 0, 15)
        await canaries.look()
        assert canaries.operations.records()["mini"].phase == "promoted"


@asynchronous
async def test_a_good_candidate_is_promoted_in_its_stages(tmp_path: Path) -> None:
    async with trying(tmp_path, stage_requests=4, stage_s=1e-9, promote="auto") as (running, _, canaries):
        await running.did("POST", "canary", {"candidate": "mini@new", "stages": [30, 60]})
        phases: list[tuple[str, float]] = []
        for _ in range(12):
            await ask_many(running, 40)  # conversations: of a dozen, none may fall into the share
            await canaries.look()
            [shown] = (await running.did("GET", "canary"))["data"]
            if not phases or phases[-1] != (shown["phase"], shown["percent"]):
                phases.append((shown["phase"], shown["percent"]))
        assert phases[-2:] == [("running", 60.0), ("promoted", 100.0)]
        assert await ask_many(running, 6) == {"mini@new": 6}
        assert await chat(running, 1, model="mini@golden") == "mini@golden"  # a named variant is that variant


@asynchronous
async def test_proof_is_awaited_where_it_is_asked_for(tmp_path: Path) -> None:
    async with trying(tmp_path, stage_requests=1, stage_s=1e-9, promote="auto", proof=True) as (running, _, canaries):
        await running.did("POST", "canary", {"candidate": "mini@new", "stages": [50]})
        await ask_many(running, 20)
        await canaries.look()
        [shown] = (await running.did("GET", "canary"))["data"]
        assert shown["phase"] == "running"


@asynchronous
async def test_the_lab_shows_all_that_is_on_trial_at_once(tmp_path: Path) -> None:
    async with trying(tmp_path) as (running, _, _):
        empty = await running.did("GET", "lab")
        assert (empty["canaries"], empty["shadows"], empty["quality"], empty["drift"]) == ([], [], [], None)
        assert empty["variants"] == ["mini", "mini@golden", "mini@new"]
        assert empty["canary"]["stages"] == [5.0, 25.0, 50.0]
        await running.did("POST", "canary", {"candidate": "mini@new", "stages": [50]})
        await ask_many(running, 8)
        lab = await running.did("GET", "lab")
        assert lab["canaries"] == (await running.did("GET", "canary"))["data"]
        assert (await running.admin("GET", "lab", key="caller-secret")).status == 403


@asynchronous
async def test_administrators_promote_and_roll_back(tmp_path: Path) -> None:
    async with trying(tmp_path) as (running, _, _):
        assert (await running.refused("POST", "canary/promote"))[:2] == (404, "no_canary")
        await running.did("POST", "canary", {"candidate": "mini@new"})
        promoted = await running.did("POST", "canary/promote", {"reason": "measured offline"})
        assert (promoted["phase"], promoted["percent"]) == ("promoted", 100.0)
        assert (await running.refused("POST", "canary/promote"))[:2] == (409, "canary_ended")
        back = await running.did("POST", "canary/rollback", {"control": "mini"})
        assert (back["phase"], back["percent"]) == ("rolled_back", 0.0)
        assert await ask_many(running, 4) == {"mini": 4}
        again = await running.did("POST", "canary", {"candidate": "mini@new"})
        assert (again["phase"], again["evidence"]) == ("running", None)  # of its own


@asynchronous
async def test_mistakes_and_readers_are_rejected(tmp_path: Path) -> None:
    async with trying(tmp_path) as (running, _, _):
        reader = await running.admin("POST", "canary", {"candidate": "mini@new"}, key="reader-secret")
        assert (reader.status, reader.error["code"]) == (403, "admin_read_only")
        for body, parameter in (
            ({"candidate": "mini@gone"}, "candidate"),
            ({"candidate": "mini@new", "control": "maxi"}, "control"),
            ({"candidate": "mini@new", "control": "mini@new"}, "candidate"),
            ({"candidate": "mini@new", "stages": [50, 20]}, "stages"),
            ({"candidate": "mini@new", "stages": [0]}, "stages[0]"),
        ):
            assert (await running.refused("POST", "canary", body))[::2] == (400, parameter)
        await running.did("POST", "canary", {"candidate": "mini@new"})
        assert (await running.refused("POST", "canary", {"candidate": "mini@new"}))[:2] == (409, "canary_running")


@asynchronous
async def test_feedback_counts_for_the_arm_that_answered(tmp_path: Path) -> None:
    async with trying(tmp_path) as (running, _, canaries):
        await running.did("POST", "canary", {"candidate": "mini@new", "stages": [50]})
        await ask_many(running, 20)
        for id, (_, _, arm) in dict(canaries._arm_of).items():
            values = {"thumbs": -1.0 if arm == "candidate" else 1.0, "other": 0.5}
            answer = await running.ask("POST", "/v1/feedback", {"request_id": id, "outcomes": values}, **CALLING)
            assert answer.status == 200, answer.body
        assert not canaries._arm_of  # each counts once
        [shown] = (await running.did("GET", "canary"))["data"]
        assert (shown["evidence"]["control"]["feedback"], shown["evidence"]["candidate"]["feedback"]) == (1.0, 0.0)


@asynchronous
async def test_a_restart_goes_on_with_the_same_canary_and_its_evidence(tmp_path: Path) -> None:
    async with trying(tmp_path) as (running, _, canaries):
        await running.did("POST", "canary", {"candidate": "mini@new", "stages": [40]})
        before = [await chat(running, number) for number in range(20)]
        await canaries.save()
        [saved] = (await running.did("GET", "canary"))["data"]
    async with trying(tmp_path) as (running, _, canaries):
        await until(lambda: "mini" in canaries._evidence)  # it is loaded while the server starts to serve
        [shown] = (await running.did("GET", "canary"))["data"]
        assert shown == saved
        assert [await chat(running, number) for number in range(20)] == before
