"""The agent loop ends within every budget, whatever the model asks for and however the tools behave."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.api_errors import ApiError
from headrace.gateway.ledger.prices import Price
from headrace.gateway.requests.text_request import Choice, TokenUsage, ToolCall
from headrace.pipelines.agent.agent_loop import AgentBudget, AgentResult, run_agent
from headrace.pipelines.stage_clock import StageClock, StageLateError
from headrace.pipelines.tools.tool import FixedTools, ToolError, ToolSpec
from headrace.pipelines.tools.toolbox import Toolbox
from tests.support.clock import Clock
from tests.support.pipeline_runs import memory_results

PRICE = Price(input=1_000_000, output=2_000_000)  # a micro for each prompt token, two for each output token
QUESTION = [{"role": "user", "content": "Where is my order?"}]
FROZEN = 1e7


class AgentWorld:
    """A model that follows a plan of tool calls, and tools with given durations."""

    def __init__(
        self, plan: Sequence[Sequence[tuple[str, Any]] | str], seconds: Mapping[str, float], **more: Any
    ) -> None:
        self.clock = Clock(100.0)
        self.plan = list(plan)
        self.steps = 0
        self.started: list[str] = []
        self.running = self.most_running = 0
        self.think_s: float = more.get("think_s", 0.5)
        self.output: int = more.get("output", 1000)  # tokens that the model would write
        self._seconds = dict(seconds)
        self._clock = StageClock(self.clock, self.clock.sleep)
        specs = {name: ToolSpec(name, name, {"type": "object"}, self._tool(name), timeout_s=FROZEN) for name in seconds}
        self._specs = specs
        self._toolbox = Toolbox({"all": FixedTools(*specs.values())}, memory_results(self.clock), self._clock)

    def _tool(self, name: str) -> Any:
        async def call(arguments: Mapping[str, Any], tenant: str) -> str:
            self.started.append(name)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                await self.clock.sleep(self._seconds[name])
            finally:
                self.running -= 1
            if name.startswith("bad"):
                raise ToolError("It does not work.")
            return "x" * 100_000 if name.startswith("flood") else f"result of {name}"

        return call

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int, end: float, /) -> Choice:
        step = self.steps
        self.steps += 1
        left = end - self.clock.now
        await self.clock.sleep(min(self.think_s, left))
        if self.think_s >= left:
            raise StageLateError
        wanted = self.plan[step % len(self.plan)]
        output = min(self.output, max_tokens)
        choice = Choice(0, usage=TokenUsage(prompt_tokens=self.count(messages), output_tokens=output))
        if isinstance(wanted, str):
            choice.content = wanted
        else:
            choice.calls = [ToolCall(f"{step}.{n}", name, json.dumps(given)) for n, (name, given) in enumerate(wanted)]
        return choice

    @staticmethod
    def count(messages: Sequence[Mapping[str, Any]]) -> int:
        return sum(len(str(message.get("content"))) // 4 + 4 for message in messages)

    async def call(self, name: str, arguments: Mapping[str, Any], end: float) -> Any:
        spec = self._specs.get(name)
        if spec is None:
            spec = ToolSpec(name, name, {}, self._missing)
        return await self._toolbox.call(spec, arguments, tenant="a", end=end)

    @staticmethod
    async def _missing(arguments: Mapping[str, Any], tenant: str) -> str:
        raise ToolError("There is no such tool.")

    def run(self, **budget: Any) -> AgentResult:
        given = AgentBudget(end=self.clock.now + budget.pop("seconds", 60.0), **budget)

        async def it() -> AgentResult:
            return await self.clock.run(
                run_agent(
                    QUESTION,
                    ask=self.ask,
                    call=self.call,
                    budget=given,
                    now=self.clock,
                    count=self.count,
                    price=PRICE,
                )
            )

        return asyncio.run(it())


def test_independent_calls_take_as_long_as_the_slowest() -> None:
    world = AgentWorld([[("a", {}), ("b", {}), ("c", {})], "Done."], {"a": 1.0, "b": 5.0, "c": 3.0})
    began = world.clock.now
    result = world.run()
    assert (result.conclusion, result.draft, result.steps) == ("answered", "Done.", 2)
    assert world.clock.now - began == pytest.approx(0.5 + 5.0 + 0.5, abs=0.01)


def test_calls_beyond_the_width_wait() -> None:
    world = AgentWorld([[("a", {"n": n}) for n in range(6)], "Done."], {"a": 1.0})
    world.run(parallel=2)
    assert world.most_running == 2


def test_the_same_call_again_is_a_cycle() -> None:
    world = AgentWorld([[("a", {"x": 1})], [("a", {"x": 1})]], {"a": 0.1})
    result = world.run(steps=10)
    assert (result.conclusion, result.steps, world.started) == ("cycle", 2, ["a"])


def test_two_calls_in_turn_are_a_cycle_too() -> None:
    world = AgentWorld([[("a", {})], [("b", {})]], {"a": 0.1, "b": 0.1})
    result = world.run(steps=10)
    assert (result.conclusion, result.steps) == ("cycle", 3)


@pytest.mark.parametrize(
    ("budget", "conclusion"),
    [
        ({"steps": 2}, "steps"),
        ({"calls": 3}, "calls"),
        ({"seconds": 2.0}, "time"),
        ({"tokens": 700}, "tokens"),
        ({"micros": 500}, "money"),
    ],
)
def test_each_budget_ends_the_loop_with_what_is_known(budget: dict[str, Any], conclusion: str) -> None:
    plan = [[("a", {"n": n})] for n in range(50)]
    result = AgentWorld(plan, {"a": 0.3}, output=50).run(**({"steps": 50, "calls": 50} | budget))
    assert result.conclusion == conclusion
    assert any(record.is_known for record in result.records)


def test_a_frozen_tool_ends_with_the_time_and_the_others_results_count() -> None:
    world = AgentWorld([[("a", {}), ("b", {})], "Done."], {"a": 1.0, "b": FROZEN})
    began = world.clock.now
    result = world.run(seconds=5.0)
    assert result.conclusion == "time"
    assert {record.tool: record.outcome for record in result.records} == {"a": "done", "b": "late"}
    assert world.clock.now - began <= 5.0


def test_what_is_no_call_is_a_result_for_the_model() -> None:
    world = AgentWorld([[("nothing", {}), ("a", [1])], "Done."], {"a": 1.0})
    result = world.run()
    assert [record.outcome for record in result.records] == ["failed", "failed"]
    assert result.conclusion == "answered"


def test_a_model_that_fails_ends_the_loop() -> None:
    world = AgentWorld(["never"], {"a": 1.0})

    async def ask(messages: list[dict[str, Any]], max_tokens: int, end: float, /) -> Choice:
        raise ApiError("lost", kind="server_error")

    world.ask = ask  # type: ignore[method-assign]
    assert world.run().conclusion == "failed"


TOOLS = st.sampled_from(["a", "b", "bad", "flood", "frozen", "nothing"])
CALLS = st.lists(st.tuples(TOOLS, st.fixed_dictionaries({"n": st.integers(0, 5)}) | st.just(3)), max_size=6)
PLANS = st.lists(st.one_of(CALLS.filter(bool), st.just("Done.")), min_size=1, max_size=6)


@settings(max_examples=1000, deadline=None)
@given(
    plan=PLANS,
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 8),
    calls=st.integers(1, 12),
    parallel=st.integers(1, 4),
    tokens=st.integers(1, 3000),
    micros=st.none() | st.integers(0, 3000),
    seconds=st.floats(0.1, 30.0),
    output=st.integers(1, 400),
)
def test_every_loop_ends_within_every_budget(
    plan: list[Any],
    seed: int,
    steps: int,
    calls: int,
    parallel: int,
    tokens: int,
    micros: int | None,
    seconds: float,
    output: int,
) -> None:
    """Over a thousand random graphs of tool calls, with fast, slow, failing, flooding and frozen tools."""
    draw = random.Random(seed)
    durations = {name: draw.choice([0.0, 0.2, 3.0]) for name in ("a", "b", "bad", "flood")} | {"frozen": FROZEN}
    world = AgentWorld(plan, durations, output=output, think_s=draw.choice([0.01, 0.5, 4.0]))
    began = world.clock.now
    result = world.run(
        steps=steps, calls=calls, parallel=parallel, tokens=tokens, micros=micros, seconds=seconds, step_tokens=200
    )
    assert result.steps <= steps
    assert len(world.started) <= calls
    assert world.most_running <= parallel
    assert result.tokens <= tokens
    assert micros is None or result.micros <= micros
    assert world.clock.now - began <= seconds + 0.01
    assert world.running == 0
    assert all(record.outcome for record in result.records)
