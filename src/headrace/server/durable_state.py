"""What outlives a request: files, batches and stored responses, with their routes.

Owns State: the stores, opened in one folder, and the endpoints on them. What is kept and how is the stores' own.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from headrace.config import Config
from headrace.gateway.accounts.access import find_model
from headrace.gateway.accounts.directory import AccountDirectory
from headrace.gateway.api_errors import ApiError, as_api_error, invalid_request
from headrace.gateway.database import Database
from headrace.server.api import response_endpoints
from headrace.server.api.batches import Batches, BatchOwner
from headrace.server.api.files import FileStore
from headrace.server.api.list_query import parse_list_query
from headrace.server.api.metered_endpoint import run_metered
from headrace.server.api.response_store import ResponseStore
from headrace.server.api.text_endpoint import answer_in_full
from headrace.server.api.vectors import EMBEDDINGS_PARAMETERS, prepare_embeddings
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_parameters import Parameter, ParameterTable, parse_body, parse_parameters
from headrace.server.http.multipart_upload import FIRST_FIELDS, Upload

if TYPE_CHECKING:
    from headrace.server.app import App
    from headrace.server.http.route import Route

log: Final = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 600.0  # between two looks at what has expired
_UPLOAD_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=1)]


BATCHES: Final[ParameterTable] = {
    "input_file_id": Parameter("A file of requests, one in a line.", str, required=True),
    "endpoint": Parameter("The path that all of them are for.", str, required=True),
    "completion_window": Parameter("24h.", str, required=True),
    "metadata": Parameter("Pairs of texts that are handed back.", Annotated[dict[str, str], Meta(max_length=16)]),
    "output_expires_after": Parameter("When the files of results go.", ExpiresAfter),
}


class State:
    """All of it belongs to one event loop. Nothing is opened before it is used."""

    def __init__(self, config: Config, database: Database, directory: AccountDirectory) -> None:
        """`directory`: says what those may do for whom something runs without a connection."""
        storage = config.storage
        self._config = config
        self._directory = directory
        self._app: App | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self.files = FileStore(database, storage.path, storage)
        self.batches = Batches(database, self.files, self._run, storage, running=storage.batch_running)
        self.responses = ResponseStore(database, hours=storage.response_hours)

    def attach(self, app: App) -> None:
        self._app = app

    async def start(self) -> None:
        self._sweeping = asyncio.create_task(self._sweep())
        await self.batches.resume()

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self.batches.close()

    async def _sweep(self) -> None:
        """What has expired goes, also where nobody writes anything new."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for sweep in (self.files.sweep, self.responses.sweep):
                try:
                    await sweep()
                except ApiError as error:
                    log.warning("what has expired is still there: %s", error)

    def routes(self) -> tuple[Route, ...]:
        from headrace.server.http.route import Route

        return (
            Route("POST", "/v1/files", self._create_file, "Upload a file."),
            Route("GET", "/v1/files", self._list_files, "The files that are there."),
            Route("GET", "/v1/files/{file}", self._file, "One of them."),
            Route("DELETE", "/v1/files/{file}", self._delete_file, "Remove it."),
            Route("GET", "/v1/files/{file}/content", self._content, "Its bytes."),
            Route("POST", "/v1/batches", self._create_batch, "Run a file of requests in the background.", BATCHES),
            Route("GET", "/v1/batches", self._list_batches, "The batches that are there."),
            Route("GET", "/v1/batches/{batch}", self._batch, "One of them."),
            Route("POST", "/v1/batches/{batch}/cancel", self._cancel_batch, "End it with what it has."),
            *response_endpoints.routes(self._attached, self.responses),
        )

    def _attached(self) -> App:
        assert self._app is not None
        return self._app

    async def _reply(self, call: ApiCall, reply: Response) -> None:
        assert self._app is not None
        await self._app.reply(call, reply)

    # Files

    async def _create_file(self, call: ApiCall) -> None:
        storage, server = self._config.storage, self._config.server
        # As long as a body of the usual size may take, for each such part of it.
        seconds = server.body_s * max(1.0, storage.file_bytes / server.body_bytes)
        upload = Upload(call.headers.get("content-type", ""), call.chunks(storage.file_bytes + 64 * 1024, seconds))
        await upload.begin()
        fields = upload.fields
        for name in fields:
            if name not in _UPLOAD_FIELDS:
                raise ApiError(f"there is no parameter '{name[:100]}'", parameter=name[:100], code="unknown_parameter")
        if "purpose" not in fields:
            raise invalid_request(f"'purpose' is missing; {FIRST_FIELDS}", "purpose", code="missing_required_parameter")
        if fields.get("expires_after[anchor]", "created_at") != "created_at":
            raise invalid_request("'expires_after.anchor' must be created_at", "expires_after")
        seconds_text = fields.get("expires_after[seconds]")
        if seconds_text is None and "expires_after[anchor]" in fields:
            raise invalid_request(
                "'expires_after.seconds' is missing", "expires_after", code="missing_required_parameter"
            )
        if seconds_text is not None and not (seconds_text.isascii() and seconds_text.isdigit()):
            raise invalid_request("'expires_after.seconds' must be a number", "expires_after")
        record = await self.files.create(
            upload.file(),
            filename=upload.filename or "file",
            purpose=fields["purpose"],
            tenant=call.caller.tenant,
            expires_after=None if seconds_text is None else int(seconds_text[:12]),
        )
        await self._reply(call, Response.json(record.as_json()))

    async def _list_files(self, call: ApiCall) -> None:
        asked = parse_list_query(call, ("after", "limit", "order", "purpose"))
        page = await self.files.list(call.caller.tenant, **asked)
        await self._reply(call, Response.json(page.as_json(lambda record: record.as_json())))

    async def _file(self, call: ApiCall) -> None:
        record = await self.files.get(call.params["file"], call.caller.tenant)
        await self._reply(call, Response.json(record.as_json()))

    async def _delete_file(self, call: ApiCall) -> None:
        id = call.params["file"]
        await self.files.delete(id, call.caller.tenant)
        await self._reply(call, Response.json({"id": id, "object": "file", "deleted": True}))

    async def _content(self, call: ApiCall) -> None:
        record, pieces = await self.files.content(call.params["file"], call.caller.tenant)
        try:
            headers = self._attached().cors(call)
            await call.begin_download(record.bytes, "application/octet-stream", record.id, headers)
            if call.scope["method"] != "HEAD":
                async for piece in pieces:
                    await call.write(piece)
            await call.write(b"", more=False)
        finally:
            await pieces.aclose()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    # Batches

    async def _create_batch(self, call: ApiCall) -> None:
        given = parse_body(await self._attached().body(call), BATCHES)
        expires: ExpiresAfter | None = given.get("output_expires_after")
        record = await self.batches.create(
            input_file_id=given["input_file_id"],
            endpoint=given["endpoint"],
            completion_window=given["completion_window"],
            tenant=call.caller.tenant,
            key=call.caller.key,
            metadata=given.get("metadata"),
            output_expires_after=None if expires is None else expires.seconds,
        )
        await self._reply(call, Response.json(record.as_json()))

    async def _list_batches(self, call: ApiCall) -> None:
        page = await self.batches.list(call.caller.tenant, **parse_list_query(call, ("after", "limit")))
        await self._reply(call, Response.json(page.as_json(lambda record: record.as_json())))

    async def _batch(self, call: ApiCall) -> None:
        record = await self.batches.retrieve(call.params["batch"], call.caller.tenant)
        await self._reply(call, Response.json(record.as_json()))

    async def _cancel_batch(self, call: ApiCall) -> None:
        record = await self.batches.cancel(call.params["batch"], call.caller.tenant)
        await self._reply(call, Response.json(record.as_json()))

    async def _run(
        self, url: str, body: dict[str, Any], owner: BatchOwner, batch: str, custom_id: str
    ) -> tuple[int, dict[str, Any]]:
        """One request of a batch. What is refused for now is raised, with the pause that it asks for."""
        from headrace.server.app import BATCHED

        app = self._attached()
        try:
            caller = self._directory.on_behalf(owner.tenant, key=owner.key or None, surface="batch")
            if body.get("stream"):
                raise invalid_request("a batch's answers are whole: 'stream' must be false", "stream")
            if url == "/v1/embeddings":
                given = parse_parameters(body, EMBEDDINGS_PARAMETERS)
                served = find_model(caller, app.fleet, given.get("model", ""))
                prepared = await prepare_embeddings(served, caller, given, self._config.limits)
                found, _ = await run_metered(app.services, caller, prepared, url, model=given.get("model", ""))
                return 200, found
            encoded = json.dumps(body).encode()
            if url == "/v1/responses":
                found = await response_endpoints.read(encoded, {}, self._config.limits, self.responses, owner.tenant)
                dialect = response_endpoints.Answered(found, self.responses, owner.tenant).dialect()
                asked = found.asked
            else:
                dialect = BATCHED[url]
                asked = dialect.read(encoded, {}, self._config.limits)
            asked = asked.but(surface=asked.surface or "batch")
            return 200, await answer_in_full(app.exchange(caller, asked, url), dialect, app.services)
        except Exception as error:
            told = as_api_error(error)
            if told.status in (429, 503):
                raise told from None
            return told.status, told.openai()
