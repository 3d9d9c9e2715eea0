"""KV memory in blocks of several pages: tables name pages, and a block's bytes are those of its pages."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.executors.block_kv import PAGE_TOKENS, BlockKv, block_bytes
from headrace.variant import DEFAULT_KV_BLOCK, KV_BLOCKS

SHAPES = [(2, 24, 20), (1, 32, 32)]


def ints(*values: object) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def test_every_size_is_whole_pages_and_the_default_is_one() -> None:
    assert DEFAULT_KV_BLOCK == PAGE_TOKENS
    assert all(size % PAGE_TOKENS == 0 for size in KV_BLOCKS)


def test_tables_of_blocks_become_tables_of_pages_as_far_as_sequences_go() -> None:
    kv = BlockKv(SHAPES, 8, "bf16", block_tokens=32)
    tables = ints([3, 0, 7, 0], [1, 5, 0, 0])
    # The longest sequence has 63 tokens after the step: two blocks.
    pages = kv.page_tables(tables, ints(60, 10), ints(0, 3, 14))
    assert pages.dtype == np.int32
    assert pages.flags.c_contiguous
    assert pages.tolist() == [[6, 7, 0, 1], [2, 3, 10, 11]]
    assert kv.page_tables(tables, ints(60, 10), ints(0, 5, 16)).tolist()[0] == [6, 7, 0, 1, 14, 15]
    one = BlockKv(SHAPES, 8, "bf16", block_tokens=16)
    assert one.page_tables(tables, ints(60, 10), ints(0, 3, 14)) is tables


@pytest.mark.parametrize("kind", ["f32", "int4"])
def test_a_block_is_copied_read_and_written_whole(kind: str) -> None:
    kv = BlockKv(SHAPES, 3, kind, block_tokens=64)  # pyright: ignore[reportArgumentType]
    assert kv.core.blocks == 12
    assert kv.block_bytes == block_bytes(SHAPES, kind, 64) == 4 * block_bytes(SHAPES, kind, 16)  # pyright: ignore[reportArgumentType]
    rng = np.random.default_rng(1)
    first, second = (rng.integers(0, 256, kv.block_bytes).astype(np.uint8) for _ in range(2))
    kv.write(0, first)
    kv.write(2, second)
    kv.copy(0, 1)
    assert [np.array_equal(kv.read(block), bytes) for block, bytes in enumerate((first, first, second))] == [True] * 3
    with pytest.raises(ValueError, match="a block has"):
        kv.write(0, first[:-1])
