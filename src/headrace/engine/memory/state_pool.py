"""The slots of recurrent states: one for each running sequence, and a bounded number of snapshots of prefixes.

A snapshot is the state after a whole block, so a sequence with the same tokens can go on from there. The snapshot that
was used longest ago goes first. Some slots of snapshots are lent to sequences for their states before drafts: if a
draft is rejected, the sequence goes on from one of them. Owns which slot is whose, and the copies between slots that
the next step makes before it computes. Knows no state's bytes. Belongs to one thread, with its BlockManager.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace.engine.memory.prefix_tree import Block, must


class StatePool:
    """`running` slots are for sequences, `kept` for snapshots; of those, `most_lent` may be lent."""

    def __init__(self, running: int, kept: int, most_lent: int = 0) -> None:
        if running < 1 or kept < 0:
            raise ValueError(f"Cannot manage {running} running and {kept} kept states.")
        self.running = running
        self.kept = kept
        self.most_lent = min(kept, most_lent)
        self.lent = 0
        self._free = list(range(running))[::-1]
        self._free_kept = list(range(running, running + kept))[::-1]
        self._snapshots: OrderedDict[Block, int] = OrderedDict()  # slots; used longest ago first
        self._copies: list[tuple[int, int]] = []

    @property
    def available(self) -> int:
        """Slots for sequences that can be taken now."""
        return len(self._free)

    @property
    def snapshots(self) -> int:
        return len(self._snapshots)

    def has(self, block: Block) -> bool:
        """Whether the state after this block is kept."""
        return block in self._snapshots

    def take(self, block: Block | None) -> int:
        """Return a slot for a sequence that goes on after `block`; None: it begins."""
        slot = self._free.pop()
        if block is not None:
            self._snapshots.move_to_end(block)
            self._copies.append((self._snapshots[block], slot))
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def keep(self, slot: int, block: Block) -> bool:
        """Keep a sequence's state as the one after this block. Return whether it is new."""
        if block in self._snapshots:
            self._snapshots.move_to_end(block)
            return False
        kept = self._take_kept()
        if kept is None:
            return False
        self._snapshots[block] = kept
        self._copies.append((slot, kept))
        return True

    def lend(self) -> int | None:
        """Return a slot for a sequence's state before a draft; None if too many are lent."""
        slot = self._take_kept() if self.lent < self.most_lent else None
        self.lent += slot is not None
        return slot

    def take_back(self, slots: list[int]) -> None:
        """Take lent slots back, or as many others for which they were exchanged."""
        self.lent -= len(slots)
        self._free_kept += slots

    def _take_kept(self) -> int | None:
        if self._free_kept:
            return self._free_kept.pop()
        return self._snapshots.popitem(last=False)[1] if self._snapshots else None

    def forget(self, block: Block) -> None:
        """Drop a block's snapshot, if it has one."""
        slot = self._snapshots.pop(block, None)
        if slot is not None:
            self._free_kept.append(slot)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies (source, target) to make, in this order, before the next step computes anything."""
        copies, self._copies = self._copies, []
        return copies

    def check(self, held: list[int], lent: list[int]) -> None:
        """Raise IntegrityError if the accounting is inconsistent. `held`: the slots of all sequences; `lent`: those of
        their drafts."""
        must(len(self._free) + len(held) == self.running, "a sequence's state slot is lost or held twice")
        must(len(lent) == self.lent <= self.most_lent, "a lent state slot is lost or held twice")
        every = [*self._free, *held, *self._free_kept, *self._snapshots.values(), *lent]
        must(sorted(every) == list(range(self.running + self.kept)), "a state slot is lost or held twice")
        must(all(block.parent is not None for block in self._snapshots), "a kept state's block is not in the tree")
