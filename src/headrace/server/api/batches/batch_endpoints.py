"""`/v1/batches`: create, list, retrieve and cancel batches in OpenAI's shape. Batches runs them."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from headrace.server.api.batches.batches import Batches
from headrace.server.api.list_query import parse_list_query
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_parameters import Parameter, ParameterTable
from headrace.server.http.route_table import Route


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=1)]


BATCH_PARAMETERS: Final[ParameterTable] = {
    "input_file_id": Parameter("A file of requests, one in a line.", str, required=True),
    "endpoint": Parameter("The path that all of them are for.", str, required=True),
    "completion_window": Parameter("24h.", str, required=True),
    "metadata": Parameter("Pairs of texts that are handed back.", Annotated[dict[str, str], Meta(max_length=16)]),
    "output_expires_after": Parameter("When the files of results go.", ExpiresAfter),
}


def routes(context: EndpointContext, batches: Batches) -> tuple[Route, ...]:
    async def create(call: ApiCall) -> None:
        given = await context.parameters(call, BATCH_PARAMETERS)
        expires: ExpiresAfter | None = given.get("output_expires_after")
        record = await batches.create(
            input_file_id=given["input_file_id"],
            endpoint=given["endpoint"],
            completion_window=given["completion_window"],
            tenant=call.caller.tenant,
            key=call.caller.key,
            metadata=given.get("metadata"),
            output_expires_after=None if expires is None else expires.seconds,
        )
        await context.reply(call, Response.json(record.as_json()))

    async def list_batches(call: ApiCall) -> None:
        page = await batches.list(call.caller.tenant, **parse_list_query(call, ("after", "limit")))
        await context.reply(call, Response.json(page.as_json(lambda record: record.as_json())))

    async def retrieve(call: ApiCall) -> None:
        record = await batches.retrieve(call.params["batch"], call.caller.tenant)
        await context.reply(call, Response.json(record.as_json()))

    async def cancel(call: ApiCall) -> None:
        record = await batches.cancel(call.params["batch"], call.caller.tenant)
        await context.reply(call, Response.json(record.as_json()))

    return (
        Route(
            "POST", "/v1/batches", create, "Run a file of requests in the background.", BATCH_PARAMETERS, lenient=True
        ),
        Route("GET", "/v1/batches", list_batches, "List the batches."),
        Route("GET", "/v1/batches/{batch}", retrieve, "Retrieve one batch."),
        Route("POST", "/v1/batches/{batch}/cancel", cancel, "End a batch with the results it has."),
    )
