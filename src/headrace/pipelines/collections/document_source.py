"""Turns what a client sends or names (text, bytes with a type, a URL) into a document's blocks."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import urlsplit

from headrace.errors import RequestError
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.pipelines.collections.blocks import ReadDocument, read_markdown, read_text
from headrace.pipelines.collections.html_reader import read_html
from headrace.pipelines.collections.pdf_reader import read_pdf
from headrace.pipelines.public_fetch import FetchPolicy, fetch

# By media type; the short names are what clients may send.
TYPES: Final[Mapping[str, str]] = {
    "text": "text",
    "text/plain": "text",
    "markdown": "markdown",
    "text/markdown": "markdown",
    "text/x-markdown": "markdown",
    "html": "html",
    "text/html": "html",
    "application/xhtml+xml": "html",
    "pdf": "pdf",
    "application/pdf": "pdf",
}
SUFFIXES: Final[Mapping[str, str]] = {
    ".txt": "text",
    ".text": "text",
    ".rst": "text",
    ".md": "markdown",
    ".markdown": "markdown",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".pdf": "pdf",
}


def document_files(paths: Iterable[str]) -> Iterator[Path]:
    """Yield files, and of folders the files that can be documents, in order. RequestError for a path without one."""
    for each in paths:
        path = Path(each)
        if path.is_dir():
            yield from sorted(
                child for child in path.rglob("*") if child.suffix.lower() in SUFFIXES and child.is_file()
            )
        elif path.is_file():
            yield path
        else:
            raise RequestError(f"No file or folder '{each}'.")


def document_type(given: str | None, source: str, data: bytes | None) -> str:
    """Return text, markdown, html or pdf: what the client says, else by the name's suffix or the first bytes."""
    if given is not None:
        found = TYPES.get(given.partition(";")[0].strip().lower())
        if found is None:
            raise invalid_request(
                f"Unknown document type '{given[:60]}'. Expected text, markdown, html or pdf.", "documents"
            )
        return found
    if data is not None and data.startswith(b"%PDF-"):
        return "pdf"
    return SUFFIXES.get(PurePosixPath(source).suffix.lower(), "text")


async def read_document(data: bytes | str, kind: str, *, charset: str | None = None) -> ReadDocument:
    """Read a document of a type. ApiError if it cannot be read."""
    if kind == "pdf":
        if isinstance(data, str):
            raise invalid_request("A PDF document must be sent as 'content' in base64, or as a 'file_id'.", "documents")
        return await read_pdf(data)
    text = data if isinstance(data, str) else _decode(data, charset)
    read = {"markdown": read_markdown, "html": read_html}.get(kind, read_text)
    return await asyncio.to_thread(read, text)


async def fetch_document(url: str, policy: FetchPolicy) -> tuple[ReadDocument, int]:
    """Fetch and read a URL. Return the document and its size in bytes. ApiError if it is not allowed or fails."""
    page = await fetch(url, policy)
    if not 200 <= page.status < 300:
        raise ApiError(f"The URL answered with status {page.status}: {url.partition('?')[0][:200]}", parameter="url")
    known = TYPES.get(page.content_type)
    if known is None and page.content_type not in ("", "application/octet-stream"):
        raise invalid_request(
            f"The URL has the type '{page.content_type[:60]}'. Expected text, markdown, html or pdf.", "url"
        )
    suffixed = document_type(None, urlsplit(page.url).path, page.body)
    kind = suffixed if known is None or (known == "text" and suffixed == "markdown") else known
    return await read_document(page.body, kind, charset=page.charset), len(page.body)


def _decode(data: bytes, charset: str | None) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    try:
        return data.decode(charset or "cp1252", "replace")
    except LookupError:
        return data.decode("cp1252", "replace")
