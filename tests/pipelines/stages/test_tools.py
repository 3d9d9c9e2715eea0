"""The tools stage: only for tenants that opted in, approvals for effects, results as sources, budgets that end it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from headrace.config.pipeline_section import PipelineConfig, ToolsStage
from headrace.config.tenant_section import TenantConfig
from headrace.gateway.accounts.directory import IdentifiedCaller
from headrace.gateway.requests.text_request import TextRequest
from headrace.pipelines.tools.tool import FixedTools, ToolError, ToolSpec
from tests.support.pipeline_runs import FOREVER, Call, Script, World, says
from tests.support.running_server import asynchronous

ACME = IdentifiedCaller(key="k", tenant="acme", settings=TenantConfig(tools=("orders",)))
OTHER = IdentifiedCaller(key="o", tenant="other")
STAGE = ToolsStage(tools=("orders",), model="small")


class Orders:
    """A tool that looks an order up, in a pipeline with a small model for the steps."""

    def __init__(self, script: Script, *, stage: ToolsStage = STAGE, seconds: float = 0.0, **spec: Any) -> None:
        self.called: list[Mapping[str, Any]] = []
        self.tenants: list[str] = []
        self.error: Exception | None = None
        self._seconds = seconds
        schema = {"type": "object", "properties": {"id": {"type": "string"}}}
        tool = ToolSpec("orders", "Looks an order up.", schema, self._call, **spec)
        config = PipelineConfig(stages=("tools", "generate"), deadline_ms=10_000.0, tools=stage)
        self.world = World(config, says("It is on its way [1]."), tools={"orders": FixedTools(tool)}, small=script)

    async def _call(self, arguments: Mapping[str, Any], tenant: str) -> str:
        self.called.append(arguments)
        self.tenants.append(tenant)
        if self.error is not None:
            raise self.error
        if self._seconds:
            await self.world.clock.sleep(self._seconds)
        return f"Order {arguments.get('id')} is on its way."


def looks_up(*ids: str) -> Script:
    """Asks for these orders at once, and then answers."""

    def script(request: TextRequest) -> Call:
        knows = any(message["role"] == "tool" for message in request.messages or [])
        return Call(("Known.",)) if knows else Call(calls=[("orders", f'{{"id": "{id}"}}') for id in ids])

    return script


@asynchronous
async def test_a_small_model_calls_tools_and_the_large_one_answers_from_the_results() -> None:
    orders = Orders(looks_up("7", "8"))
    outcome = await orders.world.run("Where are my orders?", caller=ACME)
    assert [each["id"] for each in orders.called] == ["7", "8"]
    assert [request.model for request in orders.world.models.requests] == ["small", "small", "mini"]
    texts = {source.text for source in orders.world.models.requests[-1].sources}
    assert texts & {"Order 7 is on its way.", "Order 8 is on its way."}
    assert outcome.text == "It is on its way [1]."
    assert outcome.report["conclusion"] == "answered"
    assert outcome.report["agent"]["steps"] == 2
    assert {"stage": "tools", "tool": "orders", "state": "done"} in outcome.notes("progress")


@asynchronous
async def test_a_tenant_that_did_not_opt_in_gets_no_tools() -> None:
    for caller in (OTHER, IdentifiedCaller()):
        orders = Orders(looks_up("7"))
        outcome = await orders.world.run("Where is my order?", caller=caller)
        assert orders.called == []
        assert outcome.stage("tools")["why"] == "not_allowed"
        assert outcome.text == "It is on its way [1]."
        assert all(not request.tools for request in orders.world.models.requests)


@asynchronous
async def test_a_server_without_keys_can_allow_its_tools() -> None:
    orders = Orders(looks_up("7"), stage=ToolsStage(tools=("orders",), model="small", keyless=True))
    await orders.world.run("Where is my order?", caller=IdentifiedCaller())
    assert len(orders.called) == 1


@asynchronous
async def test_an_effect_needs_an_approval_of_exactly_this_call() -> None:
    orders = Orders(looks_up("7"), effects=True)
    refused = await orders.world.run("Cancel order 7", caller=ACME)
    assert orders.called == []
    (wanted,) = refused.report["approvals"]
    assert (wanted["tool"], wanted["arguments"]) == ("orders", {"id": "7"})
    assert refused.notes("approvals") == [refused.report["approvals"]]
    approved = {"approvals": (wanted["token"],)}
    evil = IdentifiedCaller(key="k", tenant="evil", settings=ACME.settings)
    stolen = await orders.world.run("Cancel order 7", caller=evil, pipeline=approved)
    assert orders.called == []
    assert stolen.report["approvals"]
    await orders.world.run("Cancel order 7", caller=ACME, pipeline=approved)
    assert orders.called == [{"id": "7"}]
    await orders.world.run("Cancel order 7", caller=ACME, pipeline=approved)
    assert len(orders.called) == 1  # a token is valid once


@asynchronous
async def test_an_approval_expires() -> None:
    orders = Orders(looks_up("7"), effects=True)
    (wanted,) = (await orders.world.run("Cancel order 7", caller=ACME)).report["approvals"]
    orders.world.clock.now += 1000.0
    await orders.world.run("Cancel order 7", caller=ACME, pipeline={"approvals": (wanted["token"],)})
    assert orders.called == []


@asynchronous
async def test_a_frozen_tool_leaves_time_for_the_answer() -> None:
    stage = ToolsStage(tools=("orders",), model="small", budget_ms=2000.0)
    orders = Orders(looks_up("7"), stage=stage, seconds=FOREVER, timeout_s=FOREVER)
    outcome = await orders.world.run("Where is my order?", caller=ACME)
    assert outcome.seconds == pytest.approx(2.0, abs=0.05)
    report = outcome.stage("tools")
    assert (report["outcome"], report["why"], report["budget_ms"]) == ("fewer", "time", 2000.0)
    assert "could not be fetched in time" in (orders.world.models.requests[-1].messages or [])[-1]["content"]
    assert outcome.report["skipped"] == ["tools"]


@asynchronous
async def test_a_pipeline_can_insist_on_its_tools() -> None:
    stage = ToolsStage(tools=("orders",), model="small", budget_ms=2000.0, late="stop")
    orders = Orders(looks_up("7"), stage=stage, seconds=FOREVER, timeout_s=FOREVER)
    outcome = await orders.world.run("Where is my order?", caller=ACME)
    assert outcome.error is not None
    assert outcome.error.code == "stage_late"


@asynchronous
async def test_an_error_of_a_tool_is_read_by_the_model_and_tells_no_secrets() -> None:
    for error, text in ((ToolError("No such order."), "No such order."), (RuntimeError("s3cret"), "the tool failed")):
        orders = Orders(looks_up("7"))
        orders.error = error
        outcome = await orders.world.run("Where is my order?", caller=ACME)
        content = (orders.world.models.requests[1].messages or [])[-1]["content"]
        assert text in content
        assert "s3cret" not in content
        assert outcome.report["agent"]["calls"][0]["outcome"] == "failed"


@asynchronous
async def test_results_are_cached_for_one_tenant() -> None:
    orders = Orders(looks_up("7"), cache_s=60.0)
    again = IdentifiedCaller(key="x", tenant="x", settings=ACME.settings)
    for caller, calls in ((ACME, 1), (ACME, 1), (again, 2)):
        await orders.world.run("Where is my order?", caller=caller)
        assert len(orders.called) == calls
    assert orders.tenants == ["acme", "x"]


@asynchronous
async def test_one_model_that_needs_no_tool_answers_in_one_call() -> None:
    orders = Orders(says(), stage=ToolsStage(tools=("orders",)))
    outcome = await orders.world.run("Hi", caller=ACME)
    assert outcome.text == "It is on its way [1]."
    assert len(orders.world.models.requests) == 1


@asynchronous
async def test_a_flooding_tool_is_cut() -> None:
    orders = Orders(looks_up("7" * 200_000))
    await orders.world.run("Where is my order?", caller=ACME)
    results = [each for each in orders.world.models.requests[1].messages or [] if each["role"] == "tool"]
    assert len(results[0]["content"]) <= 2048
