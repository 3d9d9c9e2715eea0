"""What `Blocks` must do, said slowly: flat lists, scans, whole prefixes as keys; and the KV memory that follows.

Owns SlowBlocks, which foretells every answer of `Blocks`, and Memory, which knows what each slot of each block holds.
Neither knows a tree, reference counts or an order of eviction that is kept up to date.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from headrace.engine.memory.block_table import BlockTable
from headrace.engine.memory.prefix_tree import LOOK

Tokens = tuple[int, ...]
Key = tuple[int, str | None, Tokens]  # variant, salt or None where public, prefix


class Memory:
    """What is in every slot: which prefix's KV, and who computed it."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.size = block_tokens
        self.slots: list[list[tuple[int, str]]] = [[(0, "")] * block_tokens for _ in range(blocks)]
        self._names: dict[tuple[int, int], int] = {}

    def names(self, tokens: list[int], variant: int) -> list[int]:
        """A number for every prefix: equal numbers, equal prefixes."""
        name = -1 - variant
        found: list[int] = []
        for token in tokens:
            name = self._names.setdefault((name, token), len(self._names) + 1)
            found.append(name)
        return found

    def write(self, blocks: list[int], start: int, contents: list[tuple[int, str]]) -> None:
        for position, content in enumerate(contents, start):
            self.slots[blocks[position // self.size]][position % self.size] = content

    def read(self, blocks: list[int], end: int) -> list[tuple[int, str]]:
        return [self.slots[blocks[position // self.size]][position % self.size] for position in range(end)]

    def copy(self, source: int, target: int) -> None:
        self.slots[target] = list(self.slots[source])


@dataclass(eq=False)
class Entry:
    """A prefix that can be found: its last block, and by whom it is held."""

    key: Key
    salt: str  # whose block it was
    block: int
    holders: set[object] = field(default_factory=set[object])
    idle_since: int = 0

    @property
    def prefix(self) -> Tokens:
        return self.key[2]


@dataclass(eq=False)
class Run:
    """A sequence under way."""

    salt: str
    variant: int
    tokens: list[int]
    table: BlockTable
    computed: int
    published: int  # whole blocks
    source: int | None = None  # block that its first own one is a copy of


@dataclass(frozen=True)
class Found:
    whole: int
    cached: int
    source: Entry | None


class SlowBlocks:
    def __init__(self, blocks: int, block_tokens: int, most_pinned: int, public: list[Tokens]) -> None:
        self.blocks = blocks
        self.size = block_tokens
        self.most_pinned = most_pinned
        self.public = {
            prefix[: n * block_tokens] for prefix in public for n in range(1, len(prefix) // block_tokens + 1)
        }
        self.entries: dict[Key, Entry] = {}
        self.runs: list[Run] = []
        self.copies: list[tuple[int, int]] = []
        self.pins: dict[Key, list[Entry]] = {}
        self.clock = count(1)

    # What follows from the state

    def held_blocks(self) -> set[int]:
        """Blocks that are neither free nor idle."""
        tables = {block for run in self.runs for block in run.table.blocks}
        return tables | {source for source, _ in self.copies} | {e.block for e in self.entries.values() if e.holders}

    def free(self) -> int:
        return self.blocks - len(self.held_blocks() | {entry.block for entry in self.entries.values()})

    def idle(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if not entry.holders]

    def key(self, prefix: Tokens, salt: str, variant: int) -> Key:
        return (variant, None if prefix in self.public else salt, prefix)

    def chain(self, tokens: Tokens, salt: str, variant: int) -> list[Entry]:
        """The whole blocks that are there, from the head on."""
        found: list[Entry] = []
        for end in range(self.size, len(tokens) + 1, self.size):
            entry = self.entries.get(self.key(tokens[:end], salt, variant))
            if entry is None:
                break
            found.append(entry)
        return found

    def closest(self, tokens: Tokens, whole: int, salt: str, variant: int) -> tuple[Entry | None, int]:
        """The entry that goes on from `whole` blocks and shares most of what follows, and how many tokens."""
        start = whole * self.size
        best, most = None, 0
        for domain in (salt, None):
            group = [
                entry
                for (its_variant, its_domain, prefix), entry in self.entries.items()
                if (its_variant, its_domain) == (variant, domain)
                and start < len(prefix) <= start + self.size
                and prefix[:start] == tokens[:start]
            ]
            for entry in reversed(group[-LOOK:]):
                shared = 0
                for ours, theirs in zip(tokens[start:], entry.prefix[start:], strict=False):
                    if ours != theirs:
                        break
                    shared += 1
                if shared > most:
                    best, most = entry, shared
        return best, most

    def match(self, tokens: Tokens, salt: str, variant: int) -> Found:
        whole = len(self.chain(tokens[:-1], salt, variant))
        source, shared = self.closest(tokens[:-1], whole, salt, variant)
        return Found(whole, whole * self.size + shared, source)

    # What changes it

    def let_go(self, entry: Entry, holder: object) -> None:
        entry.holders.discard(holder)
        if not entry.holders:
            entry.idle_since = next(self.clock)

    def take(self, number: int) -> None:
        for _ in range(max(0, number - self.free())):
            oldest = min(self.idle(), key=lambda entry: entry.idle_since)
            del self.entries[oldest.key]

    def acquire(self, found: Found, tokens: Tokens, salt: str, variant: int, total: int) -> Found | None:
        """What is really held, after taking the blocks; None where memory does not suffice."""
        path = self.chain(tokens, salt, variant)[: found.whole]
        needed = -(-total // self.size) - len(path)
        spare = self.free() + sum(entry not in path for entry in self.idle())
        if found.source is not None and not found.source.holders and needed >= spare:
            found = Found(found.whole, found.whole * self.size, None)
        if needed > spare:
            return None
        guard = object()
        kept = path if found.source is None else [*path, found.source]
        for entry in kept:
            entry.holders.add(guard)
        self.take(needed)
        for entry in kept:
            entry.holders.remove(guard)
        return found

    def start(self, run: Run, found: Found) -> None:
        self.runs.append(run)
        for entry in self.chain(tuple(run.tokens), run.salt, run.variant)[: found.whole]:
            entry.holders.add(run)
        if found.source is not None:
            self.add_copy(found.source.block, run.table.blocks[found.whole])

    def add_copy(self, source: int, target: int) -> None:
        self.copies.append((source, target))
        for entry in self.entries.values():
            if entry.block == source:
                entry.holders.add(("copy", target))

    def copies_of(self, block: int) -> set[object]:
        return {("copy", target) for source, target in self.copies if source == block}

    def end_copy(self, copy: tuple[int, int]) -> None:
        self.copies.remove(copy)
        for entry in list(self.entries.values()):
            if entry.block == copy[0]:
                self.let_go(entry, ("copy", copy[1]))

    def present(self, run: Run) -> int:
        """Computed tokens before the first block that waits for its copy."""
        targets = {target for _, target in self.copies}
        for place, block in enumerate(run.table.blocks):
            if block in targets:
                return min(run.computed, place * self.size)
        return run.computed

    def publish(self, run: Run) -> None:
        first = run.published
        for place in range(first, self.present(run) // self.size):
            prefix = tuple(run.tokens[: (place + 1) * self.size])
            key = self.key(prefix, run.salt, run.variant)
            entry = self.entries.setdefault(key, Entry(key, run.salt, run.table.blocks[place]))
            entry.holders |= {run, *self.copies_of(entry.block)}
            run.published += 1
        if run.published > first:
            if run.source is not None:
                longer = tuple(run.tokens[: (first + 1) * self.size])
                self.forget_outgrown(run.source, first, longer, run.salt, run.variant)
                run.source = None
            self.extend_pins()

    def forget_outgrown(self, block: int, whole: int, longer: Tokens, salt: str, variant: int) -> None:
        for (its_variant, _, prefix), entry in list(self.entries.items()):
            outgrown = whole * self.size < len(prefix) < len(longer) and longer[: len(prefix)] == prefix
            same_owner = its_variant == variant and entry.salt == salt and entry.block == block
            if outgrown and same_owner and not entry.holders:
                del self.entries[entry.key]

    def release(self, run: Run) -> None:
        run.computed = self.present(run)
        self.publish(run)
        whole, part = divmod(run.computed, self.size)
        tail: Entry | None = None
        if part:
            prefix = tuple(run.tokens[: run.computed])
            child, shared = self.closest(prefix, whole, run.salt, run.variant)
            if child is not None and shared == part:
                if not child.holders:
                    child.idle_since = next(self.clock)
            else:
                key = (run.variant, run.salt, prefix)
                tail = self.entries[key] = Entry(key, run.salt, run.table.blocks[whole])
                tail.holders |= {run, *self.copies_of(tail.block)}
                if child is not None:
                    self.forget_outgrown(child.block, whole, prefix, run.salt, run.variant)
        self.runs.remove(run)
        if tail is not None:
            self.let_go(tail, run)
        self.cancel_copies()
        path = self.chain(tuple(run.tokens), run.salt, run.variant)[: run.published]
        for entry in reversed(path):
            self.let_go(entry, run)

    def cancel_copies(self) -> None:
        """Nobody waits for a copy whose target is in no table and is not to be copied on."""
        while True:
            wanted = {block for run in self.runs for block in run.table.blocks} | {source for source, _ in self.copies}
            unwanted = [copy for copy in self.copies if copy[1] not in wanted]
            if not unwanted:
                return
            self.end_copy(unwanted[0])

    def pin(self, prefix: Tokens, salt: str, variant: int) -> int | None:
        """Tokens that are computed; None where it must be refused."""
        key = (variant, salt, prefix)
        if key not in self.pins:
            if sum(len(prefix) for _, _, prefix in [*self.pins, key]) // self.size > self.most_pinned:
                return None
            self.pins[key] = []
            self.extend_pins()
        return len(self.pins[key]) * self.size

    def extend_pins(self) -> None:
        for key, held in self.pins.items():
            variant, salt, prefix = key
            held[:] = self.chain(prefix, salt, variant)
            for entry in held:
                entry.holders.add(("pin", key))

    def unpin(self, prefix: Tokens, salt: str, variant: int) -> bool:
        key = (variant, salt, prefix)
        for entry in reversed(self.pins.get(key, [])):
            self.let_go(entry, ("pin", key))
        return self.pins.pop(key, None) is not None
