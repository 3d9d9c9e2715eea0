"""`/v1/messages/batches`: message batches in Anthropic's shape.

The requests of a message batch become the input file of an ordinary batch, and its results are read from that batch's
output files. Batches runs it like any other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.server.api.batches.batch_kind import MESSAGE_BATCH
from headrace.server.api.batches.batch_lines import request_line
from headrace.server.api.batches.batch_table import BatchRecord
from headrace.server.api.batches.batches import Batches
from headrace.server.api.file_endpoints import send_files
from headrace.server.api.files import FileStore
from headrace.server.api.list_query import anthropic_page, parse_list_query, rfc3339
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ANTHROPIC, ApiCall, Response
from headrace.server.http.body_parameters import Parameter, ParameterTable
from headrace.server.http.route_table import Route

_PATH: Final = "/v1/messages/batches"
_MOST: Final = 1000  # batches of a page
_ENDS: Final = ("completed_at", "failed_at", "expired_at", "cancelled_at")


class MessageBatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


MESSAGE_BATCH_PARAMETERS: Final[ParameterTable] = {
    "requests": Parameter(
        "Requests, each with a custom_id that is unique in the batch, and params as /v1/messages takes them.",
        Annotated[list[MessageBatchRequest], Meta(min_length=1)],
        required=True,
    ),
}


def routes(context: EndpointContext, batches: Batches, files: FileStore) -> tuple[Route, ...]:
    async def create(call: ApiCall) -> None:
        parameters = await context.parameters(call, MESSAGE_BATCH_PARAMETERS)
        given: list[MessageBatchRequest] = parameters["requests"]
        _check(given, context.config.storage.batch_requests)
        tenant = call.caller.tenant
        file = await files.create(_lines(given), filename="message_batch.jsonl", purpose="batch", tenant=tenant)
        try:
            record = await batches.create(
                input_file_id=file.id,
                endpoint=MESSAGE_BATCH.endpoints[0],
                completion_window="24h",
                tenant=tenant,
                key=call.caller.key,
                kind=MESSAGE_BATCH,
                total=len(given),
            )
        except ApiError:
            await files.delete(file.id, tenant)
            raise
        await context.reply(call, Response.json(message_batch_json(record)))

    async def list_batches(call: ApiCall) -> None:
        query = parse_list_query(call, ("after_id", "before_id", "limit"))
        after, before = query.get("after_id"), query.get("before_id")
        if after is not None and before is not None:
            raise invalid_request("Send 'after_id' or 'before_id', not both.", "before_id")
        limit = query.get("limit", 20)
        page = await batches.list(
            call.caller.tenant, after=after, before=before, limit=limit, most=_MOST, kind=MESSAGE_BATCH
        )
        data = [message_batch_json(record) for record in page.data]
        await context.reply(call, Response.json(anthropic_page(data, has_more=page.has_more)))

    async def retrieve(call: ApiCall) -> None:
        record = await batches.retrieve(call.params["batch"], call.caller.tenant, MESSAGE_BATCH)
        await context.reply(call, Response.json(message_batch_json(record)))

    async def cancel(call: ApiCall) -> None:
        record = await batches.cancel(call.params["batch"], call.caller.tenant, MESSAGE_BATCH)
        await context.reply(call, Response.json(message_batch_json(record)))

    async def delete(call: ApiCall) -> None:
        id = call.params["batch"]
        await batches.delete(id, call.caller.tenant, MESSAGE_BATCH)
        await context.reply(call, Response.json({"id": id, "type": "message_batch_deleted"}))

    async def results(call: ApiCall) -> None:
        tenant = call.caller.tenant
        record = await batches.retrieve(call.params["batch"], tenant, MESSAGE_BATCH)
        _check_has_results(record)
        written = [id for id in (record.output_file_id, record.error_file_id) if id is not None]
        await send_files(context, call, files, written, "application/x-jsonl", f"{record.id}_results.jsonl")

    errors = ANTHROPIC
    return (
        Route("POST", _PATH, create, "Run messages in the background.", MESSAGE_BATCH_PARAMETERS, errors=errors),
        Route("GET", _PATH, list_batches, "List the message batches.", errors=errors),
        Route("GET", f"{_PATH}/{{batch}}", retrieve, "Retrieve one message batch.", errors=errors),
        Route("DELETE", f"{_PATH}/{{batch}}", delete, "Delete an ended message batch and its results.", errors=errors),
        Route("POST", f"{_PATH}/{{batch}}/cancel", cancel, "End a batch with the results it has.", errors=errors),
        Route("GET", f"{_PATH}/{{batch}}/results", results, "Read the results, one in a line.", errors=errors),
    )


def _check(given: list[MessageBatchRequest], most: int) -> None:
    """Raise ApiError if the requests cannot form a batch. Their params are checked when they run."""
    if len(given) > most:
        raise invalid_request(f"'requests' has {len(given)} entries. Expected at most {most}.", "requests")
    seen: set[str] = set()
    for index, request in enumerate(given):
        if request.custom_id in seen:
            raise invalid_request(
                f"'requests[{index}].custom_id' repeats '{request.custom_id}'. Expected unique ids.",
                f"requests[{index}].custom_id",
            )
        seen.add(request.custom_id)
        if request.params.get("stream"):
            where = f"requests[{index}].params.stream"
            raise invalid_request(f"'{where}' is set. A batch cannot stream: leave it out.", where)


async def _lines(given: list[MessageBatchRequest]) -> AsyncIterator[bytes]:
    for request in given:
        yield request_line(request.custom_id, MESSAGE_BATCH.endpoints[0], request.params)


def _check_has_results(record: BatchRecord) -> None:
    if _ended_at(record) is None:
        raise ApiError(
            "The batch has no results yet. Read them when its processing_status is ended.",
            kind="not_found_error",
            code="batch_not_ended",
        )
    if record.status == "failed":
        reason = record.errors[0]["message"] if record.errors else "Internal server error."
        raise ApiError(f"The batch failed and has no results: {reason}", kind="server_error", code="batch_failed")


def _ended_at(record: BatchRecord) -> int | None:
    return next((at for name in _ENDS if (at := record.times[name]) is not None), None)


def message_batch_json(record: BatchRecord) -> dict[str, Any]:
    ended_at = _ended_at(record)
    has_ended = ended_at is not None
    return {
        "id": record.id,
        "type": "message_batch",
        "processing_status": _processing_status(record, has_ended=has_ended),
        "request_counts": _counts(record, has_ended=has_ended),
        "created_at": _time(record, "created_at"),
        "expires_at": _time(record, "expires_at"),
        "ended_at": None if ended_at is None else rfc3339(ended_at),
        "cancel_initiated_at": _time(record, "cancelling_at"),
        "archived_at": None,
        # Relative: Anthropic's clients resolve it against their base URL, which also works behind a proxy.
        "results_url": f"{_PATH}/{record.id}/results" if has_ended else None,
    }


def _processing_status(record: BatchRecord, *, has_ended: bool) -> str:
    if has_ended:
        return "ended"
    return "canceling" if record.status == "cancelling" else "in_progress"


def _counts(record: BatchRecord, *, has_ended: bool) -> dict[str, int]:
    """Count requests as Anthropic does: all are processing until the batch has ended."""
    succeeded, unrun = record.completed, record.unrun
    if not has_ended:
        return {"processing": record.total, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    return {
        "processing": 0,
        "succeeded": succeeded if record.status != "failed" else 0,
        "errored": record.total - unrun - (succeeded if record.status != "failed" else 0),
        "canceled": 0 if record.status == "expired" else unrun,
        "expired": unrun if record.status == "expired" else 0,
    }


def _time(record: BatchRecord, name: str) -> str | None:
    at = record.times[name]
    return None if at is None else rfc3339(at)
