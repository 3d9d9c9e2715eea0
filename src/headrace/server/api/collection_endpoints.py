"""`/v1/collections`: collections of documents, and their search. headrace.pipelines.collections keeps them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.pipelines.collections.collection import MOST_HITS, SearchOptions, SearchResult
from headrace.pipelines.collections.collections import Collections
from headrace.pipelines.collections.document_intake import GivenDocument
from headrace.server.api.files import FileStore
from headrace.server.api.list_query import parse_list_query
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_parameters import Parameter, ParameterTable
from headrace.server.http.route_table import Route

_PATH: Final = "/v1/collections"
_QUERY_CHARACTERS: Final = 8192
_Recall = Literal["fast", "balanced", "high", "exact"]
_Metadata = dict[str, str | int | float | bool]


class DocumentBody(Struct, forbid_unknown_fields=True):
    """One document: `text`, `content`, `url` or `file_id`."""

    id: str | None = None  # default: made from the source, else from the text
    text: str | None = None
    content: bytes | None = None  # base64, for PDF files
    url: str | None = None
    file_id: str | None = None  # an upload of /v1/files
    type: str | None = None  # text, markdown, html or pdf; default: by the source's suffix
    source: str | None = None  # what hits name: a path, a URL
    title: str | None = None
    metadata: dict[str, Any] | None = None


CREATE_PARAMETERS: Final[ParameterTable] = {
    "name": Parameter("Name of the collection: letters, digits and _ . -", str, required=True),
    "model": Parameter("Model that makes the embeddings. Default: the configured one, else the first encoder.", str),
    "mode": Parameter("keyword: without embeddings, so that no model is needed.", Literal["hybrid", "keyword"]),
    "chunk_tokens": Parameter("Tokens of a chunk.", Annotated[int, Meta(ge=32, le=8192)]),
    "overlap_tokens": Parameter(
        "Tokens that a chunk repeats of the one before it.", Annotated[int, Meta(ge=0, le=1024)]
    ),
    "recall": Parameter("What searches trade: more of the nearest vectors for time.", _Recall),
    "metadata": Parameter("Pairs to keep with the collection.", _Metadata),
}
DOCUMENTS_PARAMETERS: Final[ParameterTable] = {
    "documents": Parameter(
        "Documents to add. One with the id of another takes its place once it is ready.",
        Annotated[list[DocumentBody], Meta(min_length=1)],
        required=True,
    ),
}
SEARCH_PARAMETERS: Final[ParameterTable] = {
    "query": Parameter("What to look for.", Annotated[str, Meta(min_length=1)], required=True),
    "k": Parameter("Hits to return. Default: 10.", Annotated[int, Meta(ge=1, le=MOST_HITS)]),
    "filters": Parameter(
        'What the document\'s metadata must have: {"lang": "en", "year": {"gte": 2020}}. Operators: eq, ne, gt, gte, '
        "lt, lte, in, nin, exists.",
        dict[str, Any],
    ),
    "mode": Parameter("Default: hybrid, keywords and vectors.", Literal["hybrid", "keyword", "vector"]),
    "recall": Parameter("Replaces the collection's.", _Recall),
    "rerank": Parameter("true: reranks with the configured model. A name: with that reranker.", bool | str),
    "rerank_ms": Parameter("Budget of reranking in milliseconds.", Annotated[float, Meta(ge=1, le=60_000)]),
    "deadline_ms": Parameter(
        "Stages that would miss it are left out and named in `skipped`.", Annotated[float, Meta(ge=1, le=60_000)]
    ),
}


def routes(context: EndpointContext, collections: Collections, files: FileStore) -> tuple[Route, ...]:
    config = context.config.collections
    if not config.enabled:
        return ()

    async def create(call: ApiCall) -> None:
        given = await context.parameters(call, CREATE_PARAMETERS)
        record = await collections.create(call.caller, given.pop("name"), **given)
        await context.reply(call, Response.json(record.as_json()))

    async def list_collections(call: ApiCall) -> None:
        query = parse_list_query(call, ("after", "limit", "order"))
        page = await collections.list(call.caller.tenant, **query)
        await context.reply(call, Response.json(page.as_json(lambda record: record.as_json())))

    async def retrieve(call: ApiCall) -> None:
        record = await collections.find(call.caller.tenant, call.params["collection"])
        stats = await collections.stats(record)
        await context.reply(call, Response.json(record.as_json() | {"stats": stats.as_json()}))

    async def delete(call: ApiCall) -> None:
        name = call.params["collection"]
        await collections.delete(call.caller.tenant, name)
        await context.reply(call, Response.json({"id": name, "object": "collection.deleted", "deleted": True}))

    async def search(call: ApiCall) -> None:
        context.admit()
        given = await context.parameters(call, SEARCH_PARAMETERS)
        query: str = given["query"]
        if len(query) > _QUERY_CHARACTERS:
            raise invalid_request(f"'query' is longer than {_QUERY_CHARACTERS} characters.", "query")
        call.timeline.enter("compute")
        wish: bool | str = given.get("rerank", bool(config.reranker))
        budget_ms: float = given.get("rerank_ms", config.rerank_ms)
        options = SearchOptions(
            k=given.get("k", 10),
            filters=given.get("filters"),
            mode=given.get("mode", "hybrid"),
            recall=given.get("recall"),
            deadline_s=given["deadline_ms"] / 1e3 if "deadline_ms" in given else None,
            rerank_s=budget_ms / 1e3 if wish else 0.0,
        )
        reranker = None if wish is False else wish if isinstance(wish, str) else ""
        with context.count_running():
            found = await collections.open(call.caller, call.params["collection"], rerank=reranker)
            result = await call.unless_gone(found.find(query, options))
        await context.reply(call, Response.json(search_json(result)))

    collection = f"{_PATH}/{{collection}}"
    return (
        Route("POST", _PATH, create, "Create a collection of documents.", CREATE_PARAMETERS, lenient=True),
        Route("GET", _PATH, list_collections, "List the collections."),
        Route("GET", collection, retrieve, "Retrieve a collection with its statistics."),
        Route("DELETE", collection, delete, "Delete a collection with its documents."),
        *_document_routes(context, collections, files),
        Route("POST", f"{collection}/search", search, "Search a collection.", SEARCH_PARAMETERS, lenient=True),
    )


def _document_routes(context: EndpointContext, collections: Collections, files: FileStore) -> tuple[Route, ...]:
    config = context.config.collections

    async def add(call: ApiCall) -> None:
        context.admit()
        given = await context.parameters(call, DOCUMENTS_PARAMETERS)
        bodies: list[DocumentBody] = given["documents"]
        documents = [await _given_document(body, call.caller.tenant, place) for place, body in enumerate(bodies)]
        added = await collections.add(call.caller, call.params["collection"], documents)
        data = [each.record.as_json(unchanged=each.unchanged) for each in added]
        await context.reply(call, Response.json({"object": "list", "data": data}, status=202))

    async def _given_document(body: DocumentBody, tenant: str, place: int) -> GivenDocument:
        content, source = body.content, body.source
        if body.file_id is not None:
            if body.text is not None or body.url is not None or content is not None:
                raise invalid_request(
                    f"'documents[{place}]' must have one of 'text', 'content', 'url' and 'file_id'.", "documents"
                )
            content, filename = await _file(body.file_id, tenant, place)
            source = source or filename
        return GivenDocument(
            id=body.id,
            text=body.text,
            content=content,
            url=body.url,
            type=body.type,
            source=source or "",
            title=body.title or "",
            metadata=body.metadata or {},
        )

    async def _file(id: str, tenant: str, place: int) -> tuple[bytes, str]:
        record, pieces = await files.content(id, tenant)
        if record.bytes > config.document_bytes:
            raise ApiError(
                f"'documents[{place}]' is longer than {config.document_bytes} bytes (collections.document_bytes).",
                parameter="documents",
                code="document_too_long",
                status=413,
            )
        return b"".join([piece async for piece in pieces]), record.filename

    async def list_documents(call: ApiCall) -> None:
        query = parse_list_query(call, ("after", "limit", "order", "status"))
        page = await collections.list_documents(call.caller.tenant, call.params["collection"], **query)
        await context.reply(call, Response.json(page.as_json(lambda record: record.as_json())))

    async def retrieve_document(call: ApiCall) -> None:
        names = call.params["collection"], call.params["document"]
        record = await collections.document(call.caller.tenant, *names)
        await context.reply(call, Response.json(record.as_json()))

    async def delete_document(call: ApiCall) -> None:
        names = call.params["collection"], call.params["document"]
        await collections.delete_document(call.caller.tenant, *names)
        deleted = {"id": names[1], "object": "collection.document.deleted", "deleted": True}
        await context.reply(call, Response.json(deleted))

    documents = f"{_PATH}/{{collection}}/documents"
    document = f"{documents}/{{document}}"
    return (
        Route("POST", documents, add, "Add or replace documents.", DOCUMENTS_PARAMETERS, lenient=True),
        Route("GET", documents, list_documents, "List a collection's documents."),
        Route("GET", document, retrieve_document, "Retrieve a document's record."),
        Route("DELETE", document, delete_document, "Delete a document."),
    )


def search_json(result: SearchResult) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [msgspec.structs.asdict(hit) for hit in result.hits],
        "version": result.version,
        "skipped": dict(result.skipped),
        "reranked": result.reranked,
        "cached": result.cached,
        "stages_ms": dict(result.stages_ms),
    }
