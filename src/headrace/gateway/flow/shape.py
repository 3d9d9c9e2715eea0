"""Shape: number the sources, fit the conversation, and turn the messages into prompt tokens."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.semantic.semantic_entry import with_example
from headrace.gateway.degradation.shaping.message_fitting import fit_request, number_sources
from headrace.gateway.flow.flow_state import FlowState
from headrace.gateway.flow.recall import look_up_exact, look_up_semantic
from headrace.gateway.flow.summariser import ModelSummariser
from headrace.gateway.routing.composite_answerer import derive_exchange
from headrace.gateway.serving.engine_answering import prompts_of
from headrace.gateway.serving.prompt_length import estimated_prompt_tokens, prompt_tokens
from headrace.observe.traces.timeline import Timeline


async def shape(state: FlowState) -> None:
    exchange, services, shaping = state.exchange, state.services, state.shaping
    text_request, plan = exchange.text_request, state.degradation.plan
    if text_request.messages is not None:
        sources_limit = None if plan is None else plan.sources_tokens
        exchange.text_request, shaping.sources = number_sources(
            text_request, exchange.served, services.shaping, sources_limit
        )
        exchange.sources = () if shaping.sources is None else shaping.sources.sources
        changes = () if shaping.sources is None else shaping.sources.changes
        limit, history_limit = shaping.prompt_limit, None if plan is None else plan.history_tokens
        if history_limit is not None:
            degraded_limit = history_limit + (0 if shaping.sources is None else shaping.sources.tokens)
            limit = degraded_limit if limit is None else min(limit, degraded_limit)
        # A summary costs a generation, so there is none under pressure.
        summarises = plan is None and "summarise" in (services.shaping.overflow, exchange.text_request.overflow)
        summariser = ModelSummariser(state) if summarises else None
        fitted = await fit_request(exchange.text_request, exchange.served, services.shaping, limit, summariser)
        exchange.text_request = fitted.text_request
        if history_limit is not None:
            trimmed = [change for change in changes if change.name == "sources"]
            state.degradation.record.add("trim", *trimmed, *fitted.changes)
            shaping.changes += (change for change in changes if change.name != "sources")
        else:
            shaping.changes += (*changes, *fitted.changes)
    await tokenise(state)


async def measure(state: FlowState) -> None:
    """Set the length of the prompt as the client sent it, for the rules of routing: before a variant is chosen, by the
    tokenizer of the one that is named. It is estimated where the prompt does not fit or cannot be counted."""
    exchange, text_request = state.exchange, state.exchange.text_request
    try:
        if text_request.messages is not None:
            text_request, _ = number_sources(text_request, exchange.served, state.services.shaping)
        asked = derive_exchange(exchange, exchange.served, text_request)
        # What is shaped later is not this prompt, and neither are its tokens and times.
        exchange.prompt_tokens = await prompt_tokens(replace(asked, prompts={}, notes={}, timeline=Timeline()))
    except ApiError as error:
        least = exchange.served.context if error.code == "context_length_exceeded" else 1
        exchange.prompt_tokens = max(least, estimated_prompt_tokens(exchange.text_request))


async def tokenise(state: FlowState) -> None:
    """Set the exchange's prompts and their length. An upstream's prompts are only counted."""
    exchange, exact = state.exchange, state.services.exact
    if exchange.served.upstream is not None:
        exchange.prompt_tokens = await prompt_tokens(exchange)
        return
    if exact is None or not state.reads_exact:
        await prompts_of(exchange)
        return
    name = exact.prompts.name(exchange)  # a repeated request is not rendered and tokenised again
    if name is not None and (known := exact.prompts.find(name)) is not None:
        exchange.prompts[exchange.served.name] = known
    prompts = await prompts_of(exchange)
    if name is not None:
        exact.prompts.keep(name, prompts)


async def prime(state: FlowState) -> None:
    """Add a similar answered question to the prompt, where the semantic cache serves examples.

    Runs before `admit`, because the example is paid for as a part of the prompt. There is none where the exact cache
    has the answer, or where the example does not fit."""
    exchange, semantic = state.exchange, state.services.semantic
    if semantic is None or semantic.config.serve != "prime" or state.degradation.plan is not None:
        return
    access = semantic.modes.access(exchange.caller.tenant, requested=exchange.text_request.cache)
    if not access.reads or await look_up_exact(state, stale=False) is not None:
        return
    lookup = state.lookups.semantic = await look_up_semantic(state)
    if lookup.entry is None or lookup.outcome != "hit":
        return
    text_request, prompts, length = exchange.text_request, exchange.prompts, exchange.prompt_tokens
    exchange.text_request, exchange.prompts = with_example(text_request, lookup.entry), {}
    try:
        await tokenise(state)
    except ApiError:
        exchange.text_request, exchange.prompts, exchange.prompt_tokens = text_request, prompts, length
        return
    state.lookups.exact = None  # an answer made with an example is neither stored for this request nor shared
    exchange.headers["x-headrace-cache"] = exchange.notes["cache"] = "primed"
