"""`/v1/batches`, and BatchRunner, which answers one request of a batch. Batches schedules and records them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from headrace.gateway.accounts.access import find_model
from headrace.gateway.api_errors import as_api_error, invalid_request
from headrace.server.api.batches import Batches, BatchOwner
from headrace.server.api.chat_completions import CHAT_DIALECT
from headrace.server.api.completions import COMPLETION_DIALECT
from headrace.server.api.list_query import parse_list_query
from headrace.server.api.metered_endpoint import run_metered
from headrace.server.api.response_endpoints import StoredAnswer, read_with_history
from headrace.server.api.response_store import ResponseStore
from headrace.server.api.text_endpoint import answer_in_full
from headrace.server.api.vectors import EMBEDDINGS_PARAMETERS, prepare_embeddings
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_parameters import Parameter, ParameterTable, parse_body, parse_parameters
from headrace.server.http.route_table import Route

# Text endpoints that batches may use, beside /v1/responses.
_DIALECTS: Final = {"/v1/chat/completions": CHAT_DIALECT, "/v1/completions": COMPLETION_DIALECT}


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
        given = parse_body(await context.body(call), BATCH_PARAMETERS)
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
        Route("POST", "/v1/batches", create, "Run a file of requests in the background.", BATCH_PARAMETERS),
        Route("GET", "/v1/batches", list_batches, "List the batches."),
        Route("GET", "/v1/batches/{batch}", retrieve, "Retrieve one batch."),
        Route("POST", "/v1/batches/{batch}/cancel", cancel, "End a batch with the results it has."),
    )


class BatchRunner:
    def __init__(self, context: EndpointContext, responses: ResponseStore) -> None:
        self._context = context
        self._responses = responses

    async def run(
        self, url: str, body: dict[str, Any], owner: BatchOwner, batch: str, custom_id: str
    ) -> tuple[int, dict[str, Any]]:
        """Return the status and body of the answer. ApiError, with the pause to keep, for a request to be retried."""
        context = self._context
        services, limits = context.services, context.config.limits
        try:
            caller = services.accounts.directory.on_behalf(owner.tenant, key=owner.key or None, surface="batch")
            if body.get("stream"):
                raise invalid_request("A batch cannot stream. Set 'stream' to false or leave it out.", "stream")
            if url == "/v1/embeddings":
                given = parse_parameters(body, EMBEDDINGS_PARAMETERS)
                model = given.get("model", "")
                served = find_model(caller, services.fleet, model)
                prepared = await prepare_embeddings(served, caller, given, limits)
                answer, _ = await run_metered(services, caller, prepared, url, model=model)
                return 200, answer
            encoded = json.dumps(body).encode()
            if url == "/v1/responses":
                request = await read_with_history(encoded, {}, limits, self._responses, owner.tenant)
                dialect = StoredAnswer(request, self._responses, owner.tenant).dialect()
                asked = request.asked
            else:
                dialect = _DIALECTS[url]
                asked = dialect.read(encoded, {}, limits)
            asked = asked.but(surface=asked.surface or "batch")
            return 200, await answer_in_full(context.exchange(caller, asked, url), dialect, services)
        except Exception as caught:
            error = as_api_error(caught)
            if error.status in (429, 503):
                raise error from None
            return error.status, error.openai()
