"""`/v1/pipelines`: list the pipelines, run one, and interrupt a run in progress."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

from msgspec import Meta

from headrace.pipelines.pipelines import Pipelines
from headrace.server.api.pipelines.pipeline_events import PipelineEvents, answer_body
from headrace.server.api.pipelines.pipeline_parameters import PIPELINE_PARAMETERS, read_pipeline_request
from headrace.server.api.text_endpoint import Dialect, answer_call
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_parameters import Parameter, ParameterTable
from headrace.server.http.route_table import Route

_INTERRUPT: Final[ParameterTable] = {
    "spoken": Parameter(
        "Sentence events that the user has heard. Default: all that were sent.", Annotated[int, Meta(ge=0)]
    ),
}


def routes(context: EndpointContext) -> tuple[Route, ...]:
    """None if no pipeline is declared."""
    pipelines = context.services.pipelines
    if not isinstance(pipelines, Pipelines):
        return ()

    async def list_pipelines(call: ApiCall) -> None:
        await context.reply(call, Response.json({"object": "list", "data": pipelines.described(call.caller)}))

    async def run(call: ApiCall) -> None:
        context.admit()
        limits, name = context.config.limits, call.params["name"]
        pipelines.find(call.caller, name)
        request = await context.read(
            call, lambda body: read_pipeline_request(name, body, call.headers, limits, call.unknown)
        )
        endpoint = f"/v1/pipelines/{name}"
        await answer_call(
            context, call, context.exchange(call.caller, request, endpoint, call.timeline), pipeline_dialect(name)
        )

    async def interrupt(call: ApiCall) -> None:
        given = await context.parameters(call, _INTERRUPT, optional=True)
        interrupted = pipelines.interrupt(call.caller, call.params["run"], given.get("spoken"))
        await context.reply(call, Response.json(interrupted))

    return (
        Route("GET", "/v1/pipelines", list_pipelines, "List the pipelines that the key may use."),
        Route(
            "POST",
            "/v1/pipelines/{name}",
            run,
            "Run a pipeline.",
            PIPELINE_PARAMETERS,
            reserves=True,
            lenient=True,
        ),
        Route(
            "POST",
            "/v1/pipelines/runs/{run}/interrupt",
            interrupt,
            "End a run's answer, because its user speaks.",
            _INTERRUPT,
            lenient=True,
        ),
    )


def pipeline_dialect(name: str) -> Dialect:
    """Return how `/v1/pipelines/NAME` reads and answers."""
    read = partial(read_pipeline_request, name)
    return Dialect("pipeline", PIPELINE_PARAMETERS, read, answer_body, PipelineEvents)
