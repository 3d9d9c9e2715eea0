"""`headrace collection`: fills and searches collections of documents of a running server.

The key is read from OPENAI_API_KEY. Exit codes: 2 if the server rejects the request, 1 if it cannot be reached, or if a
document could not be embedded.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.text import Text

from headrace.cli.admin.admin_client import path_segment, printable, request_json
from headrace.cli.admin.admin_output import print_json, print_list, print_one
from headrace.errors import HeadraceError, RequestError
from headrace.pipelines.collections.document_source import document_files

_BODY_BYTES: Final = 4 * 1024 * 1024  # of the documents that one request sends
_DOCUMENTS: Final = 64
_POLL_S: Final = 0.5
_SNIPPET: Final = 300  # characters of a hit's text that are printed

Recall = Literal["fast", "balanced", "high", "exact"]


@Parameter(name="*")
@dataclass(frozen=True)
class CollectionTarget:
    """The server to ask and the output format.

    Parameters
    ----------
    url
        URL of the server. Default: $HEADRACE_URL, else http://localhost:8000.
    json
        Print the response as JSON.
    """

    url: Annotated[str, Parameter(env_var="HEADRACE_URL")] = "http://localhost:8000"
    json: Annotated[bool, Parameter(negative=())] = False

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, **query: Any) -> dict[str, Any]:
        key = "OPENAI_API_KEY"
        return request_json(self.url, method, f"collections{path}", body, root="/v1/", key_variable=key, **query)


DEFAULT_TARGET: Final = CollectionTarget()

collection = App(
    name="collection", help="Add documents to collections of a running server, and search them.", version_flags=[]
)


@collection.command
def create(
    name: str,
    /,
    *,
    model: str | None = None,
    mode: Literal["hybrid", "keyword"] = "hybrid",
    chunk_tokens: int | None = None,
    overlap_tokens: int | None = None,
    recall: Recall | None = None,
    to: CollectionTarget = DEFAULT_TARGET,
) -> None:
    """Create a collection.

    Parameters
    ----------
    name
        Name of the collection.
    model
        Model that makes the embeddings. Default: the server's.
    mode
        keyword: without embeddings, so that no model is needed.
    chunk_tokens
        Tokens of a chunk.
    overlap_tokens
        Tokens that a chunk repeats of the one before it.
    recall
        What searches trade: more of the nearest vectors for time.
    """
    wanted = {
        "name": name,
        "model": model,
        "mode": mode,
        "chunk_tokens": chunk_tokens,
        "overlap_tokens": overlap_tokens,
        "recall": recall,
    }
    body = {key: value for key, value in wanted.items() if value is not None}
    print_one(to.ask("POST", "", body), as_json=to.json)


@collection.command
def add(
    name: str,
    paths: Annotated[list[str], Parameter(negative=())],
    /,
    *,
    metadata: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    wait: bool = True,
    to: CollectionTarget = DEFAULT_TARGET,
) -> None:
    """Add files, folders or URLs to a collection, which is created if it does not exist.

    Usage: headrace collection add docs ./docs README.md

    Of a folder, the files that end with .md, .txt, .rst, .html and .pdf are added. A file that was added before takes
    the place of its earlier version; one that has not changed costs nothing. An interrupted command can be repeated.

    Parameters
    ----------
    name
        Name of the collection.
    paths
        Files, folders and URLs. The server fetches URLs, if its configuration allows their hosts.
    metadata
        KEY=VALUE to keep with each document, for filters. The value is JSON or a plain string.
    wait
        Wait until all of the collection's documents are embedded, and show the progress.
    """
    extra = parse_pairs(metadata)
    documents = list(read_documents(paths, extra))
    if not documents:
        raise RequestError("Found no files that end with .md, .txt, .rst, .html or .pdf.")
    _create_if_missing(to, name)
    counts = {"added": 0, "unchanged": 0}
    for batch in batches(documents):
        answer = to.ask("POST", f"/{path_segment(name)}/documents", {"documents": batch})
        for record in answer["data"]:
            counts["unchanged" if record.get("unchanged") else "added"] += 1
    stats = _wait(to, name) if wait else _stats(to, name)
    if to.json:
        print_json({"object": "collection.added", **counts, "stats": stats})
    else:
        print(f"{counts['added']} added, {counts['unchanged']} unchanged. {describe(stats)}")
    if stats["documents"]["failed"]:
        raise ConnectionError(
            f"{stats['documents']['failed']} documents failed. List them: headrace collection documents {name}"
            " --status failed"
        )


@collection.command
def search(
    name: str,
    query: str,
    /,
    *,
    k: int = 5,
    filters: Annotated[list[str] | None, Parameter(name="--filter", negative=())] = None,
    mode: Literal["hybrid", "keyword", "vector"] = "hybrid",
    recall: Recall | None = None,
    rerank: str | None = None,
    deadline_ms: float | None = None,
    to: CollectionTarget = DEFAULT_TARGET,
) -> None:
    """Search a collection.

    Usage: headrace collection search docs "How do I set a budget?" --filter lang=en

    Parameters
    ----------
    name
        Name of the collection.
    query
        What to look for.
    k
        Hits to print.
    filters
        KEY=VALUE that a document's metadata must have. The value is JSON, such as {"gte": 2020}, or a plain string.
    mode
        hybrid searches by keywords and by vectors.
    recall
        Replaces the collection's.
    rerank
        Reranker to use; "true" for the configured one.
    deadline_ms
        Milliseconds; stages that would miss it are left out and named.
    """
    body: dict[str, Any] = {"query": query, "k": k, "mode": mode, "filters": parse_pairs(filters)}
    if recall is not None:
        body["recall"] = recall
    if rerank is not None:
        body["rerank"] = True if rerank == "true" else rerank
    if deadline_ms is not None:
        body["deadline_ms"] = deadline_ms
    answer = to.ask("POST", f"/{path_segment(name)}/search", body)
    if to.json:
        print_json(answer)
        return
    console = Console(highlight=False, soft_wrap=True)
    for place, hit in enumerate(answer["data"], start=1):
        where = printable(" > ".join(part for part in (hit["source"] or hit["document"], hit["heading"]) if part))
        console.print(Text(f"{place}. {where}  ({hit['score']:.3f})", style="bold"))
        text = " ".join(printable(line) for line in str(hit["text"]).split("\n"))
        console.print(Text(f"   {text[:_SNIPPET]}{'…' if len(text) > _SNIPPET else ''}"))
    if not answer["data"]:
        console.print("Nothing found.")
    for stage, reason in answer["skipped"].items():
        console.print(Text(f"Skipped: {printable(stage)} ({printable(str(reason))})", style="yellow"))


@collection.command(name="list")
def list_collections(*, to: CollectionTarget = DEFAULT_TARGET) -> None:
    """List the collections."""
    answer = to.ask("GET", "", limit=1000)
    columns = ("id", "model", "chunk_tokens", "recall", "version", "created_at")
    print_list(answer, columns, as_json=to.json)


@collection.command
def documents(
    name: str,
    /,
    *,
    status: Literal["ready", "pending", "failed"] | None = None,
    after: str | None = None,
    limit: int = 100,
    to: CollectionTarget = DEFAULT_TARGET,
) -> None:
    """List a collection's documents, the newest first.

    Parameters
    ----------
    name
        Name of the collection.
    status
        Only documents with this status.
    after
        Continue after this id, the last of the previous page.
    limit
        Documents to list, at most.
    """
    answer = to.ask("GET", f"/{path_segment(name)}/documents", status=status, after=after, limit=limit)
    print_list(answer, ("id", "source", "status", "chunks", "tokens", "error"), as_json=to.json)


@collection.command
def stats(name: str, /, *, to: CollectionTarget = DEFAULT_TARGET) -> None:
    """Show a collection with its statistics."""
    print_one(to.ask("GET", f"/{path_segment(name)}"), as_json=to.json)


@collection.command
def delete(name: str, document: str | None = None, /, *, to: CollectionTarget = DEFAULT_TARGET) -> None:
    """Delete a collection, or one document of it.

    Parameters
    ----------
    name
        Name of the collection.
    document
        Id of the document; default: the whole collection.
    """
    below = "" if document is None else f"/documents/{path_segment(document)}"
    print_one(to.ask("DELETE", f"/{path_segment(name)}{below}"), as_json=to.json)


def parse_pairs(values: Sequence[str] | None) -> dict[str, Any]:
    """Parse KEY=VALUE pairs. A value that is not JSON is a string."""
    pairs: dict[str, Any] = {}
    for each in values or ():
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise RequestError(f"Expected KEY=VALUE, found '{each}'.")
        try:
            pairs[key] = json.loads(value)
        except ValueError:
            pairs[key] = value
    return pairs


def read_documents(paths: Sequence[str], metadata: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the bodies of documents. A document's source is its path as given."""
    for each in paths:
        if each.startswith(("http://", "https://")):
            yield {"url": each, "metadata": metadata}
            continue
        for file in document_files([each]):
            content = base64.b64encode(file.read_bytes()).decode("ascii")
            yield {"content": content, "source": file.as_posix(), "metadata": metadata}


def batches(documents: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield documents in groups that a request may have."""
    batch: list[dict[str, Any]] = []
    size = 0
    for document in documents:
        length = len(document.get("content", ""))
        if batch and (size + length > _BODY_BYTES or len(batch) == _DOCUMENTS):
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += length
    if batch:
        yield batch


def _create_if_missing(to: CollectionTarget, name: str) -> None:
    try:
        to.ask("GET", f"/{path_segment(name)}")
    except HeadraceError as error:
        if "Unknown collection" not in str(error):
            raise
        to.ask("POST", "", {"name": name})


def _stats(to: CollectionTarget, name: str) -> dict[str, Any]:
    return to.ask("GET", f"/{path_segment(name)}")["stats"]


def _wait(to: CollectionTarget, name: str) -> dict[str, Any]:
    shown = sys.stderr.isatty()
    while True:
        found = _stats(to, name)
        if shown:
            print(f"\r{describe(found)}\x1b[K", end="", file=sys.stderr, flush=True)
        if not found["documents"]["pending"]:
            if shown:
                print(file=sys.stderr)
            return found
        time.sleep(_POLL_S)


def describe(stats: dict[str, Any]) -> str:
    documents = stats["documents"]
    text = f"{documents['ready']} documents ready, {stats['embedded']} of {stats['chunks']} chunks embedded"
    if documents["pending"]:
        text += f", {documents['pending']} pending"
    if stats["duplicates"]:
        text += f", {stats['duplicates']} duplicates left out"
    return f"{text}."
