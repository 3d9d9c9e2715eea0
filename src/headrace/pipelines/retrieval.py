"""Retriever: how pipelines reach collections, and how a hit appears in an answer's sources."""

from __future__ import annotations

from typing import Any, Protocol

from headrace.gateway.serving.exchange import Caller
from headrace.pipelines.collections.hits import Hit, SearchableCollection


class Retriever(Protocol):
    async def open(self, caller: Caller, name: str) -> SearchableCollection:
        """Return a collection of the caller's tenant. ApiError if it has none of this name."""
        ...


def source_entry(number: int, hit: Hit) -> dict[str, Any]:
    """Return the entry of an answer's `sources`."""
    entry: dict[str, Any] = {"number": number, "id": hit.id, "source": hit.source}
    if hit.heading:
        entry["heading"] = hit.heading
    entry |= {"score": round(hit.score, 6), "text": hit.text}
    if hit.metadata:
        entry["metadata"] = dict(hit.metadata)
    return entry
