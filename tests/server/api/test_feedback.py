"""Feedback reaches its request, its tenant only, and the exports, metrics and history of administrators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config.ledger_section import PriceConfig
from headrace.observe import metrics
from tests.support.accounts import bearer, declared
from tests.support.admin_server import ADMIN, CALLER, READER, Administered, administered
from tests.support.running_server import Answer, asynchronous, count, serving, words

PRICES = {"mini": PriceConfig(input=1000.0, output=2000.0)}


async def send(server: Administered, id: str, secret: str = "caller-secret", **outcomes: Any) -> Answer:
    body = {"request_id": id, "outcomes": outcomes}
    return await server.ask("POST", "/v1/feedback", body, **bearer(secret))


@asynchronous
async def test_outcomes_are_attached_and_exported_beside_latency_and_cost(tmp_path: Path) -> None:
    before = count(metrics.feedback, "thumbs", "mini", "red", "positive")
    async with administered(tmp_path, prices=PRICES) as server:
        server.engine.answer = words("a ", "b")
        answers = [await server.chat("caller-secret") for _ in range(4)]
        ids = [each.json["id"] for each in answers]
        assert (await send(server, ids[0], thumbs=True, order=20)).json == {
            "object": "feedback",
            "id": ids[0].removeprefix("chatcmpl-"),
            "outcomes": {"order": 20.0, "thumbs": 1.0},
        }
        for id, thumb in zip(ids[1:], (True, True, False), strict=True):
            assert (await send(server, id, thumbs=thumb)).status == 200
        cost = answers[0].json["headrace"]["cost_micros"]
        found = await server.did("GET", "feedback?by=model,tenant")
        order, thumbs = found["data"]
        assert found["by"] == ["outcome", "model", "tenant"]
        assert (order["outcome"], order["count"], order["micros"], order["micros_per_unit"]) == (
            "order",
            1,
            cost,
            round(cost / 20),
        )
        assert (thumbs["tenant"], thumbs["count"], thumbs["mean"], thumbs["micros"]) == ("red", 4, 0.75, 4 * cost)
        assert (thumbs["mean_low"], thumbs["mean_high"]) == (0.300642, 0.954413)  # Wilson's interval of 3 of 4
        csv = (await server.admin("GET", "feedback?by=outcome&format=csv")).body.decode().splitlines()
        assert csv[0].startswith("outcome,count,sum,mean,")
        assert [line.split(",")[:2] for line in csv[1:]] == [["order", "1"], ["thumbs", "4"]]
        shown = (await server.ask("GET", f"/v1/requests/{ids[0]}", **bearer("caller-secret"))).json
        assert shown["outcomes"] == {"order": 20.0, "thumbs": 1.0}
        live = await server.did("GET", "live")
        assert [(each["outcome"], each["count"]) for each in live["outcomes"]] == [("order", 1), ("thumbs", 4)]
        assert await server.refused("GET", "feedback?by=colour") == (400, None, "by")
    assert count(metrics.feedback, "thumbs", "mini", "red", "positive") == before + 3


@asynchronous
async def test_other_tenants_cannot_see_or_rate_a_request(tmp_path: Path) -> None:
    blue = declared("blue", "blue-secret", tenant="blue")
    async with administered(tmp_path, keys=(ADMIN, READER, CALLER, blue)) as server:
        server.engine.answer = words("a ", "b")
        answer = await server.chat("caller-secret")
        for id in (answer.json["id"], answer.headers["x-request-id"]):
            refused = await send(server, id, "blue-secret", thumbs=False)
            assert (refused.status, refused.error["code"]) == (404, "request_not_found")
        assert (await server.did("GET", "feedback"))["data"] == []
        assert (await server.ask("GET", "/admin/v1/feedback", **bearer("blue-secret"))).status == 403


@asynchronous
async def test_wrong_feedback_is_refused_by_name(tmp_path: Path) -> None:
    async with serving() as server:
        for body, parameter in (
            ({"outcomes": {"thumbs": True}}, "request_id"),
            ({"request_id": "x", "outcomes": {}}, "outcomes"),
            ({"request_id": "x", "outcomes": {"Thumbs Up": 1}}, "outcomes"),
            ({"request_id": "x", "outcomes": {"thumbs": "yes"}}, "outcomes.thumbs"),
            ({"request_id": "x", "outcomes": {"thumbs": 1e300}}, "outcomes.thumbs"),
            ({"request_id": "x", "outcomes": {"thumbs": 1}, "mood": 1}, "mood"),
        ):
            answer = await server.ask("POST", "/v1/feedback", body)
            assert answer.status == 400, body
            assert str(answer.error["param"]).startswith(parameter.split(".")[0]), answer.error


@asynchronous
async def test_history_has_the_hours_and_objectives_of_all_traffic(tmp_path: Path) -> None:
    from headrace.config import SloConfig

    async with administered(tmp_path, prices=PRICES, slo={"chat": SloConfig(availability=0.99)}) as server:
        server.engine.answer = words("a ", "b")
        for _ in range(3):
            await server.chat("caller-secret")
        found = await server.did("GET", "history?by=surface,model")
        while sum(each["sums"]["requests"] for each in found["data"]) < 3:  # counted after their last byte is sent
            found = await server.did("GET", "history?by=surface,model")
        (hour,) = found["data"]
        assert (hour["surface"], hour["model"], hour["sums"]["requests"]) == ("chat", "mini", 3)
        (objective,) = found["objectives"]
        assert (objective["objective"], objective["good"], objective["total"]) == ("availability", 3, 3)
        assert objective["hour"] == hour["hour"]
        assert (await server.refused("GET", "history?first=0"))[2] == "first"
    async with administered(tmp_path, slo={"chat": SloConfig(availability=0.99)}) as again:
        live = await again.did("GET", "live")
        while not live["objectives"][0]["events"]:  # they are restored in the background
            live = await again.did("GET", "live")
        assert live["objectives"][0]["events"] == 3
        assert (await again.did("GET", "history?by=model"))["data"][0]["sums"]["requests"] == 3
