"""Embeds texts for the semantic cache, with an encoder that Headrace serves or anything else with the same interface.

Owns the Embedder protocol, the embedder over a served encoder, and the timeout and pause around it: a slow or broken
encoder costs a bounded wait for a while, and then nothing. Does not know entries or questions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.text_evaluation import TextEvaluation
from headrace.gateway.vector_index import unit

if TYPE_CHECKING:
    from headrace.gateway.serving.exchange import Caller
    from headrace.gateway.serving.fleet import ServedVariant

Floats = NDArray[np.float32]

_FAILURES: Final = 5  # in a row, before the encoder is skipped for a while


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


class BoundedEmbedding:
    """Embeds one text within a timeout; after several failures it skips the encoder until a pause is over."""

    def __init__(
        self,
        *,
        wait_s: float = 0.05,
        pause_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wait_s = wait_s
        self._pause_s = pause_s
        self._clock = clock
        self._failures = 0
        self._closed_until = 0.0  # on the clock

    @property
    def paused(self) -> bool:
        return self._failures >= _FAILURES and self._clock() < self._closed_until

    async def vector(self, embedder: Embedder, text: str) -> Floats | None:
        if self.paused:
            return None
        try:
            async with asyncio.timeout(self._wait_s):
                (row,) = await embedder.embed([text])
            found = unit(np.asarray(row, dtype=np.float32))
            if len(found) != embedder.width:
                raise ValueError("a vector of another width")
        except (TimeoutError, HeadraceError, ApiError, OSError, ValueError) as error:
            if isinstance(error, ApiError) and error.kind == "invalid_request_error":
                return None  # a text that the encoder cannot read, such as a too long one, is no failure of it
            # After a pause, a single failure starts the next one.
            self._failures = min(self._failures + 1, _FAILURES)
            self._closed_until = self._clock() + self._pause_s
            return None
        self._failures = 0
        return found
