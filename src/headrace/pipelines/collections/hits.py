"""What a search returns, and the interface that pipelines search by. Collection implements it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

if TYPE_CHECKING:
    from headrace.gateway.serving.exchange import Caller

_DIGITS: Final = 18  # of a chunk's number, at most

Metadata = Mapping[str, str | int | float | bool]
# {"language": "en", "year": {"gte": 2020}}: every entry must hold. See metadata_filters.
Filters = Mapping[str, Any]


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk that a search found."""

    text: str
    source: str  # where the document came from: a path, a URL or a title
    score: float  # 0 to 1; comparable within one search only
    id: str  # of the chunk; the same until its document changes
    document: str  # the document's id
    heading: str = ""  # titles above the chunk, outermost first, joined by " > "
    metadata: Metadata = {}
    scores: Mapping[str, float] = {}  # of each stage that ranked it: keyword, vector, rerank


def passage_id(chunk: int) -> str:
    """Return the id of a chunk as clients see it."""
    return f"chunk_{chunk}"


class Passages(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found, and what it left out."""

    hits: list[Hit]
    skipped: Mapping[str, str] = {}  # ways of searching that contributed nothing, each with the reason


class QueryVector(msgspec.Struct, frozen=True):
    """A query as a vector. It is used only while the collection has vectors of the same encoder."""

    encoder: str  # its identity
    values: tuple[float, ...]


def passage_seq(id: str) -> int | None:
    """Return the chunk of a passage's id; None for ids of other sources."""
    number = id.removeprefix("chunk_")
    return int(number) if number != id and number.isascii() and number.isdigit() and len(number) <= _DIGITS else None


class SearchableCollection(Protocol):
    @property
    def uid(self) -> str:
        """What tells it from every other collection, also from one of the same name on another server."""
        ...

    async def has_all(self, ids: Collection[str]) -> bool:
        """Return whether all passages of these ids are still there. Ids of other sources do not count."""
        ...

    async def embed_query(self, query: str, caller: Caller) -> QueryVector | None:
        """Return the query's vector, for `search`. None if the collection has no vectors."""
        ...

    async def search(
        self,
        query: str,
        *,
        k: int = 10,
        filters: Filters | None = None,
        deadline_s: float | None = None,  # seconds from now; None: the collection's own bounds apply
        tenant: str = "",
        caller: Caller | None = None,  # pays for the query's embedding and reranking; default: the tenant
        vector: QueryVector | None = None,  # of the query, if it is known
    ) -> Passages:
        """Return the best chunks, best first. ApiError if the tenant has no such collection or a filter is invalid.

        Stages that would miss the deadline are skipped, so that what the others found comes in time.
        """
        ...
