"""Compares a stored answer with a fresh one.

Owns three comparisons, from strict to lenient: the same text, the same words, and near embeddings with the same numbers
and no negation on only one side. The embedding of a long answer is the mean of its parts'. Does not know entries.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from headrace.gateway.caches.semantic.embedder import Embedder, Floats
from headrace.gateway.caches.semantic.guarded_question import parse_question
from headrace.gateway.vector_index import unit

AgreementMethod = Literal["exact", "normalised", "embedding"]
_NUMBER: Final = re.compile(r"\d+(?:[.,]\d+)*")
_WORD: Final = re.compile(r"\w+")
_PART: Final = 1000  # characters, some 250 tokens


async def answers_agree(
    kept: str, fresh: str, *, by: AgreementMethod, embedder: Embedder | None = None, least: float = 0.9
) -> bool | None:
    """Return whether two answers agree; None if unclear, as without an embedder. `least`: the least cosine."""
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
    if bool(parse_question(kept).denied) != bool(parse_question(fresh).denied):  # of their first characters
        return False
    parts = [_parts(kept), _parts(fresh)]
    rows = await embedder.embed([*parts[0], *parts[1]])
    try:
        one, other = _mean(rows[: len(parts[0])], parts[0]), _mean(rows[len(parts[0]) :], parts[1])
        return float(np.dot(one, other)) >= least
    except ValueError:
        return None


def _parts(text: str) -> list[str]:
    """Split a text between words into parts that an encoder can read at once."""
    found: list[str] = []
    while len(text) > _PART:
        at = max(text.rfind(" ", _PART // 2, _PART), text.rfind("\n", _PART // 2, _PART)) + 1
        found.append(text[: at or _PART])
        text = text[at or _PART :]
    return [*found, text] if text.strip() or not found else found


def _mean(rows: Floats, parts: Sequence[str]) -> Floats:
    """Return the mean of the parts, weighted by length."""
    lengths = np.array([len(part) for part in parts], dtype=np.float32)
    return unit((np.stack([unit(row) for row in rows]) * lengths[:, None]).sum(axis=0))


def _normalised(text: str) -> list[str]:
    """Return the words in order, without case, punctuation and layout."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
