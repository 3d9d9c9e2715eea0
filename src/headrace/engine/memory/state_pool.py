"""The slots of recurrent states: one for each running sequence, and a bounded number of snapshots of prefixes.

A snapshot is the state after a whole block, so a sequence with the same tokens can go on from there. The snapshot that
was used longest ago goes first. Owns which slot is whose, and the copies between slots that the next step makes before
it computes. Knows no state's bytes. Belongs to one thread, with its BlockManager.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace.engine.memory.prefix_tree import Block, must


class StatePool:
    """`running` slots are for sequences, `kept` for snapshots."""

    def __init__(self, running: int, kept: int) -> None:
        if running < 1 or kept < 0:
            raise ValueError(f"Cannot manage {running} running and {kept} kept states.")
        self.running = running
        self.kept = kept
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
        if not self._free_kept and not self._snapshots:
            return False
        kept = self._free_kept.pop() if self._free_kept else self._snapshots.popitem(last=False)[1]
        self._snapshots[block] = kept
        self._copies.append((slot, kept))
        return True

    def forget(self, block: Block) -> None:
        """Drop a block's snapshot, if it has one."""
        slot = self._snapshots.pop(block, None)
        if slot is not None:
            self._free_kept.append(slot)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies (source, target) to make, in this order, before the next step computes anything."""
        copies, self._copies = self._copies, []
        return copies

    def check(self, held: list[int]) -> None:
        """Raise IntegrityError if the accounting is inconsistent. `held`: the slots of all sequences."""
        must(sorted([*self._free, *held]) == list(range(self.running)), "a state slot is lost or held twice")
        kept = [*self._free_kept, *self._snapshots.values()]
        must(sorted(kept) == list(range(self.running, self.running + self.kept)), "a kept state is lost or held twice")
        must(all(block.parent is not None for block in self._snapshots), "a kept state's block is not in the tree")
