"""BlockKv: the core's KV memory in blocks of one or more pages.

A page is what the kernels read at once, 16 tokens. A block is the unit of paging and of prefix reuse above the
executor: pages in a row. Tables of blocks become tables of pages here and nowhere else, so the bits of a step do not
depend on the size of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.precision import KvType

PAGE_TOKENS: Final = _core.BLOCK
MOST_PAGES: Final = 2**31 - 1  # tables hold 32-bit numbers

Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]
KvShapes = Sequence[tuple[int, int, int]]


def block_bytes(shapes: KvShapes, kv: KvType, block_tokens: int, *, values_in_keys: bool = False) -> int:
    """Return the bytes of a block in all layers."""
    return _core.Kv.block_bytes(shapes, kv, values_in_keys) * (block_tokens // PAGE_TOKENS)


class BlockKv:
    def __init__(
        self, shapes: KvShapes, blocks: int, kv: KvType, *, block_tokens: int, values_in_keys: bool = False
    ) -> None:
        self._shapes = shapes
        self._block_tokens = block_tokens
        self._pages = block_tokens // PAGE_TOKENS
        self._places = np.arange(self._pages, dtype=np.int32)
        self.core = _core.Kv(shapes, blocks * self._pages, kv, values_in_keys)
        self._page_bytes = self.core.bytes_per_block
        self.block_bytes = self._pages * self._page_bytes

    def page_tables(self, tables: Int32s, computed: Int32s, offsets: Int32s) -> Int32s:
        """Return the pages of a step's block tables, as far as its sequences go."""
        pages = self._pages
        if pages == 1 or not len(tables):
            return tables
        longest = int((computed + offsets[1:] - offsets[:-1]).max())
        used = tables[:, : -(-longest // self._block_tokens), None]
        return (used * np.int32(pages) + self._places).reshape(len(tables), -1)

    def copy(self, source: int, target: int) -> None:
        pages = self._pages
        for page in range(pages):
            self.core.copy_block(source * pages + page, target * pages + page)

    def read(self, block: int) -> Bytes:
        data = np.empty(self.block_bytes, dtype=np.uint8)
        for page, part in self._parts(block, data):
            self.core.read_block(page, part)
        return data

    def write(self, block: int, data: Bytes) -> None:
        if data.size != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {data.size}")
        for page, part in self._parts(block, data):
            self.core.write_block(page, part)

    def keys(self, layer: int, blocks: Sequence[int]) -> NDArray[np.float32]:
        """Return the keys that blocks of f32 memory hold, [tokens, KV heads, head size]."""
        heads, size, _ = self._shapes[layer]
        found = np.empty((len(blocks) * self._pages, PAGE_TOKENS, heads, size), np.float32)
        for place, page in enumerate(block * self._pages + page for block in blocks for page in range(self._pages)):
            self.core.read_keys(layer, page, found[place])
        return found.reshape(-1, heads, size)

    def _parts(self, block: int, data: Bytes) -> list[tuple[int, Bytes]]:
        first, size = block * self._pages, self._page_bytes
        return [(first + place, data[place * size : (place + 1) * size]) for place in range(self._pages)]
