"""AgentLoop: asks a model for tool calls and runs them, until it answers, repeats itself or a budget ends.

Knows neither the gateway nor HTTP: the model, the tools and the clock are passed in. Every wait is bounded by the end
of the time, and no step begins that may exceed another budget. What was learned by then stays usable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.ledger.prices import FREE, Price, microseconds
from headrace.gateway.requests.text_request import Choice, TokenUsage, ToolCall
from headrace.pipelines.stage_clock import StageLateError
from headrace.pipelines.tools.toolbox import ToolResult

Conclusion = Literal["answered", "steps", "calls", "time", "tokens", "money", "cycle", "failed"]
Message = dict[str, Any]


class AgentBudget(msgspec.Struct, frozen=True, kw_only=True):
    end: float  # of the time, on the clock
    steps: int = 4  # model calls
    calls: int = 16  # tool calls
    parallel: int = 8  # tool calls at once
    tokens: int = 8192  # of all steps: prompts and outputs
    micros: int | None = None
    step_tokens: int = 256  # output of one step
    result_chars: int = 2048  # of one result, that the model reads


class CallRecord(msgspec.Struct):
    """A tool call that the model has asked for."""

    tool: str
    arguments: Mapping[str, Any]
    text: str = ""
    outcome: str = ""
    ms: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.outcome in ("done", "cached")


class AgentResult(msgspec.Struct):
    conclusion: Conclusion = "answered"
    draft: str = ""  # the model's own answer, if it gave one
    records: list[CallRecord] = []
    steps: int = 0
    tokens: int = 0
    micros: int = 0


class AgentModel(Protocol):
    async def __call__(self, messages: list[Message], max_tokens: int, end: float, /) -> Choice:
        """Answer one step, within `max_tokens`. StageLateError at `end`; ApiError if the model fails."""
        ...


# Runs one call. The last argument is the end of the time.
CallTool = Callable[[str, Mapping[str, Any], float], Awaitable[ToolResult]]


async def run_agent(
    messages: Sequence[Message],
    *,
    ask: AgentModel,
    call: CallTool,
    budget: AgentBudget,
    now: Callable[[], float],
    count: Callable[[Sequence[Message]], int],
    price: Price = FREE,
    note: Callable[[CallRecord], None] = lambda record: None,
) -> AgentResult:
    """Run the loop. `count`: tokens of a prompt, at least as many as the model counts. `note`: hears of each call, when
    it begins and, with its outcome, when it has ended."""
    result = AgentResult()
    transcript = list(messages)
    seen: set[bytes] = set()
    while True:
        prompt = count(transcript)
        most, why = _affordable(budget, result, prompt, price, now())
        if why is not None:
            result.conclusion = why
            return result
        result.steps += 1
        try:
            choice = await ask(transcript, most, budget.end)
        except StageLateError:
            # What a cut step has used is unknown, so it counts as a whole.
            _count(result, TokenUsage(prompt_tokens=prompt, output_tokens=most), price)
            result.conclusion = "time"
            return result
        except ApiError:
            result.conclusion = "failed"
            return result
        _count(result, choice.usage, price)
        if not choice.calls:
            result.draft = choice.content.strip()
            result.conclusion = "answered"
            return result
        records = [_read_call(each) for each in choice.calls]
        room = budget.calls - len([each for each in result.records if each.outcome != "repeated"])
        fresh = _fresh(records, seen)
        for record in fresh[room:]:
            record.outcome, record.text = "refused", "No further calls are possible."
        running = [record for record in fresh[:room] if not record.outcome]
        result.records += records
        await _run_calls(running, call, budget, now, note)
        if not fresh:
            result.conclusion = "cycle"
            return result
        if len(fresh) > room:
            result.conclusion = "calls"
            return result
        transcript.append(_assistant_message(choice))
        transcript += [
            {"role": "tool", "tool_call_id": each.id, "name": each.name, "content": record.text[: budget.result_chars]}
            for each, record in zip(choice.calls, records, strict=True)
        ]


def _affordable(
    budget: AgentBudget, result: AgentResult, prompt: int, price: Price, now: float
) -> tuple[int, Conclusion | None]:
    """Return how many tokens the next step may write, or the budget that has no room for it."""
    if now >= budget.end:
        return 0, "time"
    if result.steps >= budget.steps:
        return 0, "steps"
    most = min(budget.step_tokens, budget.tokens - result.tokens - prompt)
    if most < 1:
        return 0, "tokens"
    if budget.micros is not None:
        left = budget.micros - result.micros
        # Machine time is paid until the end at most.
        machine = microseconds(budget.end - now) if price.second else 0
        while most and price.micros(prompt, 0, most, machine) > left:
            most //= 2
        if not most:
            return 0, "money"
    return most, None


def _count(result: AgentResult, usage: TokenUsage, price: Price) -> None:
    result.tokens += usage.prompt_tokens + usage.output_tokens
    machine = microseconds(usage.prefill_s + usage.decode_s)
    result.micros += price.micros(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, machine)


def _read_call(call: ToolCall) -> CallRecord:
    try:
        decoded: object = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        return CallRecord(call.name, {}, "Error: the arguments are not a JSON object.", "failed")
    return CallRecord(call.name, cast(dict[str, Any], decoded))


def _fresh(records: Sequence[CallRecord], seen: set[bytes]) -> list[CallRecord]:
    """Return the calls that were not made before, and mark the others."""
    fresh: list[CallRecord] = []
    for record in records:
        key = msgspec.json.encode([record.tool, dict(record.arguments)], order="sorted")
        if key in seen:
            record.outcome, record.text = "repeated", "This call was made before; its result is above."
        else:
            seen.add(key)
            fresh.append(record)
    return fresh


async def _run_calls(
    records: Sequence[CallRecord],
    call: CallTool,
    budget: AgentBudget,
    now: Callable[[], float],
    note: Callable[[CallRecord], None],
) -> None:
    """Run calls side by side: they take as long as the slowest."""
    room = asyncio.Semaphore(budget.parallel)

    async def one(record: CallRecord) -> None:
        async with room:
            began = now()
            note(record)
            found = await call(record.tool, record.arguments, budget.end)
            record.text, record.outcome = found.text, found.outcome
            record.ms = (now() - began) * 1e3
            note(record)

    async with asyncio.TaskGroup() as group:
        for record in records:
            group.create_task(one(record))


def _assistant_message(choice: Choice) -> Message:
    calls: list[dict[str, Any]] = []
    for each in choice.calls:
        arguments: Any = _read_call(each).arguments
        calls.append({"id": each.id, "type": "function", "function": {"name": each.name, "arguments": arguments}})
    return {"role": "assistant", "content": choice.content, "tool_calls": calls}
