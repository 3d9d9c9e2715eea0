"""Sequences that come and go, for tests of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.memory.block_table import BlockTable

SIZE = 16  # tokens of a block


def text(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def opened(blocks: BlockManager, tokens: Sequence[int], salt: str = "", *, total: int | None = None) -> BlockTable:
    table = blocks.acquire(blocks.match(tokens, salt), len(tokens) if total is None else total)
    assert table is not None
    return table


def ran(blocks: BlockManager, tokens: Sequence[int], salt: str = "") -> BlockTable:
    """A sequence that came, was computed whole, and went."""
    table = opened(blocks, tokens, salt)
    blocks.take_copies()
    blocks.release(table, tokens, len(tokens))
    blocks.check()
    return table


def cached(blocks: BlockManager, tokens: Sequence[int], salt: str = "", **more: Any) -> int:
    return blocks.match(tokens, salt, **more).cached_tokens
