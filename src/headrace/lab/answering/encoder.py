"""Opens the encoder that measures similarity, if one is named."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import RequestError
from headrace.lab.comparison.similarity import EncoderSimilarity, LexicalSimilarity, Similarity


@contextmanager
def open_encoder(model: str | None, threads: int | None = None) -> Generator[Similarity]:
    """Yield the measure: an encoder's cosine, or shared words where `model` is None. RequestError for a decoder."""
    if model is None:
        yield LexicalSimilarity()
        return
    from headrace.llm import LLM

    options: dict[str, Any] = {} if threads is None else {"threads": threads}
    with LLM(model, **options) as encoder:
        if encoder.opened.folder.spec.kind != "encoder":
            raise RequestError(f"'{model}' is no encoder. Pass an embedding model.", parameter="encoder")

        def embed(texts: Sequence[str]) -> NDArray[np.float32]:
            return encoder.embed(list(texts), truncate=True)

        yield EncoderSimilarity(embed, encoder.opened.folder.path.name)
