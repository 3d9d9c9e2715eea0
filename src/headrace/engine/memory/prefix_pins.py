"""PrefixPins: prefixes whose blocks stay in memory, computed or yet to be.

Counts no references: it holds and drops blocks by functions of the BlockManager, which also rejects models whose
prefixes cannot be pinned. Belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from headrace.engine.memory.prefix_tree import TOKEN_BYTES, Block, PrefixTree, unpack
from headrace.errors import RequestError

MOST_PINS: Final = 256


class PinnedPrefix(msgspec.Struct, frozen=True):
    """A pinned prefix in whole blocks. `blocks` lists those that are computed."""

    tokens: tuple[int, ...]
    salt: str
    variant: int
    blocks: tuple[int, ...]


class TrackedPin(msgspec.Struct, eq=False):
    packed: bytes
    salt: str
    variant: int
    path: list[Block] = []


class PrefixPins:
    def __init__(
        self,
        tree: PrefixTree,
        block_tokens: int,
        *,
        most_blocks: int,
        hold: Callable[[Block], None],
        drop: Callable[[Block], None],
    ) -> None:
        self.most_blocks = most_blocks
        self.unmet: list[TrackedPin] = []  # not fully computed
        self._pins: dict[tuple[str, int, bytes], TrackedPin] = {}
        self._tree = tree
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._hold = hold
        self._drop = drop

    def add(self, packed: bytes, salt: str, variant: int) -> TrackedPin:
        """Keep a prefix of whole blocks: what is computed now, and the rest once it is computed."""
        pin = self._pins.get((salt, variant, packed))
        if pin is None:
            reserved = self.reserved() + len(packed) // self._block_bytes
            if reserved > self.most_blocks or len(self._pins) == MOST_PINS:
                raise RequestError(
                    f"{len(self._pins) + 1} prefixes of {reserved} blocks together would be pinned: the bounds are "
                    f"{MOST_PINS} prefixes and {self.most_blocks} blocks",
                    parameter="pin",
                )
            pin = self._pins[salt, variant, packed] = TrackedPin(packed, salt, variant)
            if not self._extend(pin):
                self.unmet.append(pin)
        return pin

    def remove(self, packed: bytes, salt: str, variant: int) -> bool:
        """Stop keeping a prefix. Return False if it was not pinned."""
        pin = self._pins.pop((salt, variant, packed), None)
        if pin is None:
            return False
        if pin in self.unmet:
            self.unmet.remove(pin)
        for block in reversed(pin.path):
            self._drop(block)
        return True

    def extend(self) -> None:
        """Hold what has been computed since the last call."""
        for pin in [pin for pin in self.unmet if self._extend(pin)]:
            self.unmet.remove(pin)

    def listed(self) -> list[PinnedPrefix]:
        """Return the pinned prefixes in the order in which they were pinned."""
        found: list[PinnedPrefix] = []
        for pin in self._pins.values():
            tokens = unpack(pin.packed)
            found.append(PinnedPrefix(tuple(tokens), pin.salt, pin.variant, tuple(b.index for b in pin.path)))
        return found

    def reserved(self) -> int:
        """Return the blocks of all pinned prefixes, computed or not."""
        return sum(len(pin.packed) for pin in self._pins.values()) // self._block_bytes

    def held(self) -> list[Block]:
        """Return the blocks that pins hold, each as often as it is held."""
        return [block for pin in self._pins.values() for block in pin.path]

    def _extend(self, pin: TrackedPin) -> bool:
        """Hold what is computed by now. Return whether that is all of it."""
        size = self._block_bytes
        node = pin.path[-1] if pin.path else self._tree.root(pin.variant)
        for at in range(len(pin.path) * size, len(pin.packed), size):
            child = self._tree.child(node, pin.salt, pin.packed[at : at + size])
            if child is None:
                return False
            self._hold(child)
            pin.path.append(child)
            node = child
        return True
