"""Identify: the request's surface and its default length, the fast profile, and the tenant's fast mode."""

from __future__ import annotations

from headrace.gateway.accounts.access import choose_surface
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.fast_profile import apply_fast_profile, cap_max_tokens
from headrace.gateway.flow.flow_state import FlowState


def identify(state: FlowState) -> None:
    exchange, services = state.exchange, state.services
    text_request = exchange.text_request
    surface = choose_surface(exchange.caller, text_request.surface, exchange.served.surface)
    exchange.surface = surface
    exchange.set_max_tokens = text_request.max_tokens is not None
    if text_request.surface != surface:
        exchange.text_request = text_request = text_request.but(surface=surface)
    usual = services.answer_tokens.get(surface)
    if usual is not None and text_request.max_tokens is None:
        # A default is no change that the answer reports.
        exchange.text_request, _ = cap_max_tokens(text_request, usual)
        text_request = exchange.text_request
    if text_request.profile == "fast":
        can_reason = exchange.served.reasoning is not None
        exchange.text_request, changes = apply_fast_profile(text_request, services.fast, can_reason=can_reason)
        state.shaping.changes += changes
    fast_mode = services.accounts.switches.fast(exchange.caller.tenant, exchange.served.variant)
    if fast_mode is None:
        return
    exchange.headers["x-headrace-fast"] = "on"
    if fast_mode.variant is not None and exchange.served.adapter is None:
        fast = services.fleet.served[fast_mode.variant]
        if fast.why_not_for(text_request) is None:
            exchange.served = fast
    text_request = exchange.text_request
    if fast_mode.slow_tools and text_request.tools and text_request.choosing == "auto":
        fast_tools = tuple(tool for tool in text_request.tools if tool.name not in fast_mode.slow_tools)
        if len(fast_tools) < len(text_request.tools):
            state.shaping.changes.append(ShapingChange("tools", len(text_request.tools), len(fast_tools)))
            text_request = text_request.but(tools=fast_tools)
            exchange.text_request = text_request if text_request.callable_tools else text_request.but(choosing="none")
    if fast_mode.max_tokens is not None:  # after the tools: an answer that may be a tool call is not capped
        exchange.text_request, changes = cap_max_tokens(exchange.text_request, fast_mode.max_tokens)
        state.shaping.changes += changes
    state.shaping.prompt_limit = fast_mode.prompt_tokens
