"""Identify: the request's surface, the fast profile, and the tenant's fast mode."""

from __future__ import annotations

from headrace.gateway.accounts.access import choose_surface
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.fast_profile import apply_fast_profile, cap_max_tokens
from headrace.gateway.flow.flow_state import FlowState


def identify(state: FlowState) -> None:
    exchange, services = state.exchange, state.services
    asked = exchange.asked
    surface = choose_surface(exchange.caller, asked.surface, exchange.served.surface)
    exchange.surface = surface
    if asked.surface != surface:
        exchange.asked = asked = asked.but(surface=surface)
    if asked.profile == "fast":
        can_reason = exchange.served.reasoning is not None
        exchange.asked, changes = apply_fast_profile(asked, services.fast, can_reason=can_reason)
        state.shaping.changes += changes
    fast_mode = services.accounts.switches.fast(exchange.caller.tenant, exchange.served.name)
    if fast_mode is None:
        return
    exchange.headers["x-headrace-fast"] = "on"
    if fast_mode.variant is not None:
        exchange.served = services.fleet.served[fast_mode.variant]
    asked = exchange.asked
    if fast_mode.slow_tools and asked.tools and asked.choosing == "auto":
        fast_tools = tuple(tool for tool in asked.tools if tool.name not in fast_mode.slow_tools)
        if len(fast_tools) < len(asked.tools):
            state.shaping.changes.append(ShapingChange("tools", len(asked.tools), len(fast_tools)))
            exchange.asked = asked.but(tools=fast_tools)
    if fast_mode.max_tokens is not None:  # after the tools: an answer that may be a tool call is not capped
        exchange.asked, changes = cap_max_tokens(exchange.asked, fast_mode.max_tokens)
        state.shaping.changes += changes
    state.shaping.prompt_limit = fast_mode.prompt_tokens
