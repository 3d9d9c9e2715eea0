"""`/v1/feedback`: attaches outcomes (a thumb, a conversion, any number) to a request of the caller's tenant."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from headrace.gateway.api_errors import ApiError
from headrace.gateway.observation.observation_keeper import ObservationKeeper
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_parameters import Parameter, ParameterTable
from headrace.server.http.route_table import Route

_Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z][a-z0-9_]*$")]
_Value = bool | Annotated[float, Meta(ge=-1e15, le=1e15)]

FEEDBACK_PARAMETERS: Final[ParameterTable] = {
    "request_id": Parameter(
        "The id of a response of yours, or its `x-request-id` header.",
        Annotated[str, Meta(min_length=1, max_length=200)],
        required=True,
    ),
    "outcomes": Parameter(
        "Outcomes by name: true, false or a number each. Names have lower-case letters, digits and underscores. A "
        "name that the request has already gets the new value.",
        Annotated[dict[_Name, _Value], Meta(min_length=1, max_length=16)],
        required=True,
    ),
}


def routes(context: EndpointContext) -> tuple[Route, ...]:
    async def take(call: ApiCall) -> None:
        given = await context.parameters(call, FEEDBACK_PARAMETERS)
        outcomes: dict[str, Any] = given["outcomes"]
        values = {name: float(value) for name, value in outcomes.items()}
        id, found = await keeper_of(context).feedback.put(call.caller.tenant, given["request_id"], values)
        await context.reply(call, Response.json({"object": "feedback", "id": id, "outcomes": found}))

    about = "Attach outcomes (a thumb, a conversion, any number) to one of your finished requests."
    return (Route("POST", "/v1/feedback", take, about, FEEDBACK_PARAMETERS),)


def keeper_of(context: EndpointContext) -> ObservationKeeper:
    keeper = context.services.keeper
    if keeper is None:  # a front process, which relays these calls
        raise ApiError("This process keeps no feedback.", kind="server_error", code="no_feedback", status=503)
    return keeper
