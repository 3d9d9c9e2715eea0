"""Runs one model call of a pipeline through the gateway's flow, within its time, and settles it however it ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from headrace.gateway.api_errors import ApiError, as_api_error
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, RestartDelta, TextRequest
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_clock import ClientGoneError, StageLateError
from headrace.pipelines.stage_services import StageServices

_MARGIN = 0.02  # of the time left, by which the engine is to end earlier, so that it cuts the answer itself
_MARGIN_S = 0.05


async def stream_call(
    services: StageServices, state: RunState, request: TextRequest, end: float, *, shares_timeline: bool = False
) -> AsyncGenerator[ChoiceDelta]:
    """Yield the deltas of one answer. StageLateError at `end`, ClientGoneError once the client has left.

    The engine gets `end`, a little early, as its deadline, so that it cuts the answer itself.
    """
    clock = services.clock
    left = end - clock.now()
    if left <= 0:
        raise StageLateError
    deadline_s = end - min(_MARGIN_S, left * _MARGIN) - state.began
    flow = services.models.open(state.exchange, request.but(deadline_s=deadline_s), shares_timeline=shares_timeline)
    state.open_flows.append(flow)
    error: ApiError | None = None
    held: list[ChoiceDelta] = []

    def hold(delta: ChoiceDelta) -> bool:
        held.append(delta)
        return False

    try:
        await clock.within(flow.begin(), end, state.gone)
        ended = False
        while not ended:
            ended = await clock.within(flow.run(hold), end, state.gone)
            ready, held = held, []
            for delta in ready:
                yield delta
        if flow.exchange.finish == "deadline" and not flow.exchange.first_at:
            raise StageLateError
    except (StageLateError, ClientGoneError):
        flow.cancel()
        raise
    except Exception as caught:
        error = as_api_error(caught)
        if error.code in ("deadline_unreachable", "too_late"):
            raise StageLateError from None
        raise
    finally:
        flow.settle(error)
        state.open_flows.remove(flow)
        state.usages.append(flow.exchange.usage)
        state.exchange.add_cost(flow.exchange.cost_micros)
        state.is_charged = state.is_charged or flow.is_charged
        if shares_timeline:
            state.answer_exchange = flow.exchange


async def call_model(services: StageServices, state: RunState, request: TextRequest, end: float) -> Choice:
    """Return one answer as a whole. Errors as of `stream_call`."""
    choice = Choice(0)
    async with aclosing(stream_call(services, state, request, end)) as deltas:
        async for delta in deltas:
            if isinstance(delta, RestartDelta):
                choice = Choice(0)
            else:
                choice.add(delta)
    return choice
