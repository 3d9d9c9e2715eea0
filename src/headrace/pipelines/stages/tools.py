"""The tools stage: lets a model call the tools that the tenant may use, and makes sources of the results.

The answer is written from the sources, by another model if the pipeline says so. A budget that ends leaves what was
learned by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.accounts.tenant_policies import settings_of
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, NoteDelta, SourceText, TextRequest, Tool
from headrace.pipelines.agent.agent_loop import AgentBudget, AgentResult, CallRecord, Message, run_agent
from headrace.pipelines.model_call import call_model
from headrace.pipelines.run_state import PendingApproval, RunState
from headrace.pipelines.stage_services import StageServices
from headrace.pipelines.stages.assemble import as_source, choose
from headrace.pipelines.tools.tool import ToolSpec
from headrace.pipelines.tools.toolbox import ALL, ToolResult

_INSTRUCTIONS: Final = (
    "Call the tools that help to answer the question. Call tools that do not depend on each other at once. "
    "When you know enough, answer in one sentence."
)
_TEMPLATE_TOKENS: Final = 16  # that a template puts around a message, at most
_CHARS_PER_TOKEN: Final = 4


async def offered_tools(services: StageServices, state: RunState, end: float) -> list[ToolSpec]:
    """Return the tools of the stage that the caller's tenant has opted in to."""
    caller, config = state.exchange.caller, state.config.tools
    allowed: Sequence[str] = settings_of(caller).tools
    if not caller.tenant and config.keyless:
        allowed = (ALL,)
    return await services.toolbox.offer(config.tools, allowed, end) if allowed else []


async def run_tools(
    services: StageServices, state: RunState, specs: Sequence[ToolSpec], end: float
) -> AsyncGenerator[ChoiceDelta]:
    """Run the loop, yield its progress, and put the outcome into the state."""
    notes: asyncio.Queue[CallRecord] = asyncio.Queue()
    loop = asyncio.ensure_future(_loop(services, state, specs, end, notes.put_nowait))
    try:
        while not loop.done() or not notes.empty():
            waiting = asyncio.ensure_future(notes.get())
            await asyncio.wait({loop, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                continue
            record = waiting.result()
            data = {"stage": "tools", "tool": record.tool, "state": record.outcome or "called"}
            yield NoteDelta(0, event="progress", data=data)
        _apply(services, state, loop.result())
    finally:
        loop.cancel()
        await asyncio.sleep(0)
    if state.approvals:
        yield NoteDelta(0, event="approvals", data=[each.described() for each in state.approvals])


async def _loop(
    services: StageServices, state: RunState, specs: Sequence[ToolSpec], end: float, note: Any
) -> AgentResult:
    config, exchange = state.config.tools, state.exchange
    model = config.model or state.model
    by_name = {spec.name: spec for spec in specs}
    tools = tuple(Tool(spec.name, spec.description, spec.schema) for spec in specs)
    count_text = services.models.token_counter(exchange.caller, model)
    tools_text = msgspec.json.encode([[tool.name, tool.description, tool.parameters] for tool in tools]).decode()
    tools_tokens = count_text(tools_text) + _TEMPLATE_TOKENS * (len(tools) + 1)

    async def ask(messages: list[Message], max_tokens: int, until: float) -> Choice:
        began = services.clock.now()
        request = TextRequest(
            model=model,
            messages=list(messages),
            tools=tools,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            surface=state.surface,
            cache=exchange.text_request.cache,
            user=exchange.text_request.user,
            think=False,
        )
        choice = await call_model(services, state, request, until)
        exchange.timeline.part("tools", "step", began, calls=len(choice.calls))
        return choice

    async def call(name: str, arguments: Mapping[str, Any], until: float) -> ToolResult:
        spec = by_name.get(name)
        if spec is None:
            return ToolResult(f"Error: there is no tool '{name[:100]}'.", "failed")
        if spec.effects and not _is_approved(services, state, spec, arguments):
            return ToolResult("This call changes something and needs the user's approval. It was not made.", "refused")
        began = services.clock.now()
        caches = exchange.text_request.cache == "on"
        found = await services.toolbox.call(spec, arguments, tenant=exchange.caller.tenant, end=until, caches=caches)
        exchange.timeline.part("tools", spec.name, began, outcome=found.outcome)
        return found

    def count(messages: Sequence[Message]) -> int:
        return tools_tokens + sum(
            count_text(msgspec.json.encode(message).decode()) + _TEMPLATE_TOKENS for message in messages
        )

    return await run_agent(
        [{"role": "system", "content": config.instructions or _INSTRUCTIONS}, *_conversation(state)],
        ask=ask,
        call=call,
        budget=AgentBudget(
            end=end,
            steps=config.steps,
            calls=config.calls,
            parallel=config.parallel,
            tokens=config.tokens,
            micros=config.micros,
            step_tokens=config.step_tokens,
            result_chars=config.result_tokens * _CHARS_PER_TOKEN,
        ),
        now=services.clock.now,
        count=count,
        price=services.models.price(model),
        note=note,
    )


def _conversation(state: RunState) -> list[Message]:
    return [each for each in state.exchange.text_request.messages or [] if each["role"] != "system"]


def _is_approved(services: StageServices, state: RunState, spec: ToolSpec, arguments: Mapping[str, Any]) -> bool:
    """Use one of the request's approvals. Without, note the call, so that the client can approve it."""
    approvals, exchange = services.toolbox.approvals, state.exchange
    tenant = f"{exchange.caller.tenant}/{exchange.caller.key}"
    for token in exchange.text_request.pipeline.approvals:
        if approvals.redeem(token, tenant, state.name, spec.name, arguments):
            return True
    token, expires = approvals.issue(tenant, state.name, spec.name, arguments)
    state.approvals.append(PendingApproval(spec.name, arguments, token, expires))
    return False


def _apply(services: StageServices, state: RunState, result: AgentResult) -> None:
    state.conclusion, state.draft = result.conclusion, result.draft
    state.agent = {
        "steps": result.steps,
        "tokens": result.tokens,
        "micros": result.micros,
        "calls": [
            {"tool": each.tool, "arguments": dict(each.arguments), "outcome": each.outcome, "ms": round(each.ms, 3)}
            for each in result.records
        ],
    }
    known = [each for each in result.records if each.is_known and each.text.strip()]
    results = [SourceText(f"tool:{each.tool}:{number}", each.text) for number, each in enumerate(known, start=1)]
    if results:
        before = state.sources or [as_source(hit) for hit in state.hits]
        try:
            state.show_sources(choose(services, state, [*results, *before]))
        except ApiError:
            state.show_sources([*results, *before])
