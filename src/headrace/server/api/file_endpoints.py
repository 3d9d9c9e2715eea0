"""`/v1/files`: upload, list, retrieve, download and delete files. FileStore keeps them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Final

from headrace.gateway.api_errors import invalid_request
from headrace.server.api.files import FileStore
from headrace.server.api.list_query import parse_list_query
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.multipart_upload import FIRST_FIELDS, Upload
from headrace.server.http.route_table import Route

_UPLOAD_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


def routes(context: EndpointContext, files: FileStore) -> tuple[Route, ...]:
    async def create(call: ApiCall) -> None:
        storage, server = context.config.storage, context.config.server
        # As long as a body of the usual size may take, for each such part of it.
        seconds = server.body_s * max(1.0, storage.file_bytes / server.body_bytes)
        chunks = context.paced(call, call.chunks(storage.file_bytes + 64 * 1024, seconds))
        upload = Upload(call.headers.get("content-type", ""), chunks)
        await upload.begin()
        fields = upload.fields
        for name in fields:
            if name not in _UPLOAD_FIELDS:
                call.unknown.ignore_unknown(name, name, _UPLOAD_FIELDS)
        if "purpose" not in fields:
            raise invalid_request(
                f"Missing required parameter 'purpose'. Note that {FIRST_FIELDS}.",
                "purpose",
                code="missing_required_parameter",
            )
        if fields.get("expires_after[anchor]", "created_at") != "created_at":
            raise invalid_request("'expires_after[anchor]' must be created_at.", "expires_after")
        seconds_text = fields.get("expires_after[seconds]")
        if seconds_text is None and "expires_after[anchor]" in fields:
            raise invalid_request(
                "Missing required parameter 'expires_after[seconds]'.",
                "expires_after",
                code="missing_required_parameter",
            )
        if seconds_text is not None and not (seconds_text.isascii() and seconds_text.isdigit()):
            raise invalid_request("'expires_after[seconds]' must be a number.", "expires_after")
        record = await files.create(
            upload.file(),
            filename=upload.filename or "file",
            purpose=fields["purpose"],
            tenant=call.caller.tenant,
            expires_after=None if seconds_text is None else int(seconds_text[:12]),
        )
        await context.reply(call, Response.json(record.as_json()))

    async def list_files(call: ApiCall) -> None:
        query = parse_list_query(call, ("after", "limit", "order", "purpose"))
        page = await files.list(call.caller.tenant, **query)
        await context.reply(call, Response.json(page.as_json(lambda record: record.as_json())))

    async def retrieve(call: ApiCall) -> None:
        record = await files.get(call.params["file"], call.caller.tenant)
        await context.reply(call, Response.json(record.as_json()))

    async def delete(call: ApiCall) -> None:
        id = call.params["file"]
        await files.delete(id, call.caller.tenant)
        await context.reply(call, Response.json({"id": id, "object": "file", "deleted": True}))

    async def content(call: ApiCall) -> None:
        id = call.params["file"]
        await send_files(context, call, files, [id], "application/octet-stream", id)

    return (
        Route("POST", "/v1/files", create, "Upload a file.", lenient=True),
        Route("GET", "/v1/files", list_files, "List the files."),
        Route("GET", "/v1/files/{file}", retrieve, "Retrieve one file's record."),
        Route("DELETE", "/v1/files/{file}", delete, "Delete a file."),
        Route("GET", "/v1/files/{file}/content", content, "Download a file."),
    )


async def send_files(
    context: EndpointContext, call: ApiCall, files: FileStore, ids: Sequence[str], type: str, filename: str
) -> None:
    """Reply with the contents of the caller's files, one after the other."""
    async with AsyncExitStack() as opened:
        length = 0
        contents: list[AsyncGenerator[bytes]] = []
        for id in ids:
            record, pieces = await files.content(id, call.caller.tenant)
            contents.append(await opened.enter_async_context(aclosing(pieces)))
            length += record.bytes
        await call.begin_download(length, type, filename, context.cors_headers(call))
        if call.scope["method"] != "HEAD":
            for pieces in contents:
                async for piece in pieces:
                    await call.write(piece)
        await call.write(b"", more=False)
