"""Whether a kept answer and a fresh one say the same: what checks of hits and fresh answers beside a candidate go by.

Owns the three comparisons, from strict to lenient: the same text, the same words, and near embeddings with the same
numbers and no denial on one side alone. Knows nothing of entries.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import Final, Literal

import numpy as np

from millrace.gateway.semantic.embedding import Embedder
from millrace.gateway.semantic.index import unit
from millrace.gateway.semantic.question import read

By = Literal["exact", "normalised", "embedding"]
_NUMBER: Final = re.compile(r"\d+(?:[.,]\d+)*")
_WORD: Final = re.compile(r"\w+")


async def agree(kept: str, fresh: str, *, by: By, embedder: Embedder | None = None, least: float = 0.9) -> bool | None:
    """None where it cannot be said, as without an embedder. `least`: the cosine from which on meanings count as one."""
    if kept == fresh:
        return True
    if by == "exact":
        return False
    if _normalised(kept) == _normalised(fresh):
        return True
    if by == "normalised":
        return False
    if embedder is None:
        return None
    if Counter(_NUMBER.findall(kept)) != Counter(_NUMBER.findall(fresh)):
        return False
    if bool(read(kept).denied) != bool(read(fresh).denied):  # of their beginnings
        return False
    one, other = await embedder.embed([kept, fresh])
    try:
        return float(np.dot(unit(one), unit(other))) >= least
    except ValueError:
        return None


def _normalised(text: str) -> list[str]:
    """Words in order, without case, punctuation and layout."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
