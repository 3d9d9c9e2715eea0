"""Embeds texts for the semantic cache, with an encoder that Headrace serves or anything else with the same interface.

Owns the Embedder protocol, the embedder over a served encoder, and the timeout and pause around it: a slow or broken
encoder costs a bounded wait for a while, and then nothing. Does not know entries or questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError
from headrace.gateway.caches.semantic.bounded_work import BoundedWork
from headrace.gateway.serving.text_evaluation import TextEvaluation
from headrace.gateway.vector_index import unit

if TYPE_CHECKING:
    from headrace.gateway.serving.exchange import Caller
    from headrace.gateway.serving.served_variant import ServedVariant

Floats = NDArray[np.float32]


class Embedder(Protocol):
    """Makes a vector of each text. Vectors of embedders with different names are never compared."""

    @property
    def name(self) -> str: ...

    @property
    def width(self) -> int: ...

    async def embed(self, texts: Sequence[str]) -> Floats: ...


class ServedEmbedder:
    """An encoder among the served variants. Its work counts as the caller's: its tenant and fair share."""

    def __init__(self, served: ServedVariant, caller: Caller, *, surface: str = "chat") -> None:
        if served.kind != "encoder":
            raise HeadraceError(f"'{served.name}' makes no embeddings; the semantic cache needs an encoder")
        self._served = served
        self._caller = caller
        self._given: Mapping[str, Any] = {"surface": surface}

    @property
    def name(self) -> str:
        return f"{self._served.name} {self._served.fingerprint}"

    @property
    def width(self) -> int:
        return self._served.width

    async def embed(self, texts: Sequence[str]) -> Floats:
        evaluation = TextEvaluation(self._served, self._caller, self._given)
        return await evaluation.embed({f"text {place}": text for place, text in enumerate(texts)})


class BoundedEmbedding(BoundedWork):
    """Embeds one text within a bounded wait."""

    async def vector(self, embedder: Embedder, text: str) -> Floats | None:
        async def embed() -> Floats:
            (row,) = await embedder.embed([text])
            found = unit(np.asarray(row, dtype=np.float32))
            if len(found) != embedder.width:
                raise ValueError("a vector of another width")
            return found

        return await self.result(embed)
