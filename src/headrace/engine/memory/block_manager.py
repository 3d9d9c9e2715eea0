"""KV memory as the host sees it: which blocks are used, which can be found again, and which go when memory is needed.

Owns every block's references, the order of eviction, the copies that are due and the pinned prefixes; the prefix tree
(`prefix_tree.py`) says what can be found. Knows nothing of the KV bytes, of requests or of time, and belongs to one
thread. A block is in one of three states:

    free ──take──▶ used (refs > 0) ──last holder lets go──▶ idle, if it is in the tree ──oldest first──▶ free
                        ▲                                      │             └ else free at once
                        └──────────── found again ─────────────┘

Two things hold at all times, and make eviction O(1): whoever holds a block of the tree holds all that come before it;
and holders let go from the tail to the head. So an idle block was let go no earlier than its children, and the one that
was let go first has none.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.engine.memory.prefix_tree import TOKEN_BYTES, Block, PrefixTree, must, pack
from headrace.errors import RequestError

MOST_SALTS: Final = 256  # salts with statistics of their own; later ones are counted together, as OTHER_SALTS
MOST_PINS: Final = 256
OTHER_SALTS: Final = "*"


class PrefixMatch(msgspec.Struct, eq=False):
    """The longest prefix that can be reused, as far as is known: `BlockManager.acquire` looks again if the tree
    changed."""

    salt: str
    variant: int
    packed: bytes  # the tokens
    count: int  # of the tokens
    cached_tokens: int
    path: list[Block]
    source: Block | None  # begins with the tokens that come after the path
    stamp: int  # of the tree


class BlockTable(msgspec.Struct, eq=False):
    """What one sequence holds. `blocks` only ever grows at its end."""

    blocks: list[int]
    salt: str
    variant: int
    cached_tokens: int  # computed already, once the copy that may be due is done
    path: list[Block]  # of the tree, for the part that is published; may be another's block with the same tokens
    source: Block | None  # what its first own block begins as a copy of
    tokens: int  # that it was last asked to have room for


class PinnedPrefix(msgspec.Struct, frozen=True):
    """A pinned prefix, in whole blocks; `blocks` has those that are computed."""

    tokens: tuple[int, ...]
    salt: str
    variant: int
    blocks: tuple[int, ...]


class _Pin(msgspec.Struct, eq=False):
    packed: bytes
    salt: str
    variant: int
    path: list[Block] = []


class SaltStats(msgspec.Struct):
    asked: int = 0  # tokens of the sequences that acquired blocks
    hit: int = 0  # of those, tokens that did not have to be computed


class BlockStats(msgspec.Struct, frozen=True):
    total: int
    free: int
    cached: int  # idle: found by whoever has the same prefix, and evicted when memory is needed
    used: int
    pinned: int  # of the used ones
    unfilled: int  # token slots of sequences' blocks that they have not asked for
    fragmentation: float  # their share of all slots of used blocks
    evictions: int  # since the beginning, as are the copies and the tokens of salts
    copies: int
    salts: dict[str, SaltStats]


class BlockManager:
    """`copies`: whether part of a block may be reused, by copying it. `reuse`: False finds nothing again, as is right
    for an encoder, whose KV depends on the tokens that follow. `most_pinned`: blocks; half of all by default."""

    def __init__(
        self,
        count: int,
        block_tokens: int = 16,
        *,
        copies: bool = True,
        reuse: bool = True,
        most_pinned: int | None = None,
    ) -> None:
        if count < 1 or block_tokens < 1:
            raise ValueError(f"{count} blocks of {block_tokens} tokens")
        self.count = count
        self.block_tokens = block_tokens
        self.most_pinned = count // 2 if most_pinned is None else most_pinned
        self._key_bytes = block_tokens * TOKEN_BYTES
        self._partial = copies
        self._reuse = reuse
        self._tree = PrefixTree(block_tokens)
        self._blocks = [Block(index) for index in range(count)]
        self._free = self._blocks[::-1]
        self._idle: OrderedDict[Block, None] = OrderedDict()  # let go longest ago first
        self._copies: dict[Block, Block] = {}  # target -> source, in the order in which they must be made
        self._tables: set[BlockTable] = set()
        self._pins: dict[tuple[str, int, bytes], _Pin] = {}
        self._unmet: list[_Pin] = []  # pins of which not all is computed
        self._evictions = 0
        self._copied = 0
        self._salts: dict[str, SaltStats] = {}

    @property
    def available(self) -> int:
        """BlockManager that can be had now."""
        return len(self._free) + len(self._idle)

    @property
    def largest_sequence(self) -> int:
        """Tokens of a sequence that fits whenever no other runs, whatever is pinned."""
        return (self.count - self._reserved()) * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    # Finding and holding

    def match(self, tokens: Sequence[int], salt: str, *, variant: int = 0) -> PrefixMatch:
        """The longest prefix to reuse, always short of the last token, whose result is wanted. Takes no reference."""
        return self._find(pack(tokens), len(tokens), salt, variant)

    def refresh(self, match: PrefixMatch) -> PrefixMatch:
        """The same anew; costs nothing where the tree has not changed."""
        if match.stamp == self._tree.stamp:
            return match
        return self._find(match.packed, match.count, match.salt, match.variant)

    def _find(self, packed: bytes, count: int, salt: str, variant: int) -> PrefixMatch:
        tree = self._tree
        usable = (count - 1) * TOKEN_BYTES
        path, at = tree.walk(packed, usable, salt, variant)
        source, shared = None, 0
        if self._partial and at < usable:
            node = path[-1] if path else tree.root(variant)
            source, shared = tree.closest(node, salt, packed[at : min(at + self._key_bytes, usable)])
        return PrefixMatch(salt, variant, packed, count, at // TOKEN_BYTES + shared, path, source, tree.stamp)

    def acquire(self, match: PrefixMatch, total_tokens: int) -> BlockTable | None:
        """Holds what was found and takes blocks for the rest of `total_tokens`; None, and nothing changed, where they
        are not to be had."""
        match = self.refresh(match)
        table = self._acquire(match, total_tokens)
        if table is not None:
            label = match.salt if match.salt in self._salts or len(self._salts) < MOST_SALTS else OTHER_SALTS
            stats = self._salts.setdefault(label, SaltStats())
            stats.asked += match.count
            stats.hit += table.cached_tokens
        return table

    def _acquire(self, match: PrefixMatch, total_tokens: int) -> BlockTable | None:
        path, source, cached = match.path, match.source, match.cached_tokens
        needed = self.blocks_for(total_tokens) - len(path)
        if total_tokens < cached:
            raise ValueError(f"room for {total_tokens} tokens, of which {cached} are cached")
        idle = self._idle
        spare = self.available - sum(1 for block in path if not block.refs)
        if source is not None and not source.refs and needed >= spare:
            # Its own block may be needed: to compute a few tokens again is better than to wait for it for ever.
            source, cached = None, len(path) * self.block_tokens
        if needed > spare:
            return None
        for block in path:
            if not block.refs:
                del idle[block]
            block.refs += 1
        if source is not None:
            self._hold(source)
        own = [self._take() for _ in range(needed)]
        if source is not None:
            self._copies[own[0]] = source
        blocks = [block.index for block in path]
        blocks += [block.index for block in own]
        table = BlockTable(blocks, match.salt, match.variant, cached, path[:], source, total_tokens)
        self._tables.add(table)
        return table

    def grow(self, table: BlockTable, total_tokens: int) -> bool:
        """Room for `total_tokens`; False, and nothing changed, where it is not to be had."""
        needed = self.blocks_for(total_tokens) - len(table.blocks)
        if needed > 0:
            self._check_open(table)
            if needed > len(self._free) + len(self._idle):
                return False
            table.blocks += [self._take().index for _ in range(needed)]
        if total_tokens > table.tokens:
            table.tokens = total_tokens
        return True

    def fork(self, table: BlockTable, tokens: int) -> BlockTable | None:
        """A second table over the first `tokens`, all of them computed and published: whole blocks are shared, and of
        the block that both go on to write it gets a copy. None, and nothing changed, where no block is to be had."""
        self._check_open(table)
        whole, part = divmod(tokens, self.block_tokens)
        if self.blocks_for(tokens) > len(table.blocks):
            raise ValueError(f"a fork at {tokens} tokens of a table of {len(table.blocks)} blocks")
        if self._reuse and whole > len(table.path):
            # Published later by one alone, a shared block would hang below blocks that the other does not hold.
            raise ValueError(f"a fork at {tokens} tokens, of which {len(table.path) * self.block_tokens} are published")
        if part and not self.available:
            return None
        path = table.path[:whole]
        shared = path + [self._blocks[index] for index in table.blocks[len(path) : whole]]
        for block in shared:
            block.refs += 1
        blocks = [block.index for block in shared]
        if part:
            source = self._blocks[table.blocks[whole]]
            source.refs += 1
            target = self._take()
            self._copies[target] = source
            blocks.append(target.index)
        fork = BlockTable(blocks, table.salt, table.variant, tokens, path, None, tokens)
        self._tables.add(fork)
        return fork

    def take_copies(self) -> list[tuple[int, int]]:
        """Copies (source, target) to make, in this order, before the next step writes anything."""
        due, self._copies = self._copies, {}
        self._copied += len(due)
        copies = [(source.index, target.index) for target, source in due.items()]
        for source in due.values():
            self._drop(source)
        return copies

    def release(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Lets all of it go; what is computed stays to be found until its memory is needed, tails going first."""
        self._check_open(table)
        if self._reuse:
            computed = self._present(table, computed)
            self.publish(table, tokens, computed)
            if computed % self.block_tokens:
                self._keep_tail(table, tokens, computed)
        self._tables.remove(table)
        blocks, idle, path = self._blocks, self._idle, table.path
        for index in reversed(table.blocks[len(path) :]):
            self._drop(blocks[index])
        for block, index in zip(reversed(path), reversed(table.blocks[: len(path)]), strict=True):
            if block.index != index:
                self._drop(blocks[index])
            block.refs -= 1
            if not block.refs:
                idle[block] = None

    def _check_open(self, table: BlockTable) -> None:
        if table not in self._tables:
            raise ValueError("the table was released before, or is another's")

    def _take(self) -> Block:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._tree.detach(block)
            self._evictions += 1
        block.refs = 1
        return block

    def _hold(self, block: Block) -> None:
        if not block.refs:
            del self._idle[block]
        block.refs += 1

    def _drop(self, block: Block) -> None:
        block.refs -= 1
        if block.refs:
            return
        if block.parent is not None:
            self._idle[block] = None
            return
        self._free.append(block)
        source = self._copies.pop(block, None)  # a copy that nobody waits for any more
        if source is not None:
            self._drop(source)

    # Publishing

    def publish(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Whole blocks among the first `computed` tokens can be found from now on. Cheap where there is none new."""
        path = table.path
        first = len(path)
        last = computed // self.block_tokens
        if last <= first or not self._reuse:
            return
        if self._copies:
            last = max(first, self._present(table, computed) // self.block_tokens)
        packed = self._packed_part(tokens, first * self.block_tokens, last * self.block_tokens)
        parent = path[-1] if path else self._tree.root(table.variant)
        chain = [self._blocks[index] for index in table.blocks[first:last]]
        found = self._tree.attach(parent, chain, packed, table.salt)
        if found != chain:
            for own, block in zip(chain, found, strict=True):
                if own is not block:
                    self._hold(block)  # another computed the same: ours stays ours until it is released
        path += found
        if table.source is not None and last > first:
            self._forget_outgrown(table.source, path[first], table.salt)
            table.source = None
        for pin in [pin for pin in self._unmet if self._extend(pin)]:
            self._unmet.remove(pin)

    def _present(self, table: BlockTable, computed: int) -> int:
        """Computed tokens before the first block that still waits for its copy."""
        if self._copies:
            first = len(table.path)
            for place, index in enumerate(table.blocks[first : self.blocks_for(computed)], first):
                if self._blocks[index] in self._copies:
                    return place * self.block_tokens
        return computed

    def _packed_part(self, tokens: Sequence[int], start: int, end: int) -> bytes:
        packed = pack(tokens[start:end])
        if len(packed) != (end - start) * TOKEN_BYTES:
            raise ValueError(f"{end} tokens are computed, and only {len(tokens)} given")
        return packed

    def _keep_tail(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Keeps the part of a block at a sequence's end, unless a block that begins with it is there."""
        whole = computed // self.block_tokens
        parent = table.path[-1] if table.path else self._tree.root(table.variant)
        key = self._packed_part(tokens, whole * self.block_tokens, computed)
        child, shared = self._tree.closest(parent, table.salt, key)
        if child is not None and shared * TOKEN_BYTES == len(key):
            if not child.refs:
                self._idle.move_to_end(child)  # as recent as if it were ours; its parent is let go after it
            return
        own = self._blocks[table.blocks[whole]]
        self._tree.attach(parent, [own], key, table.salt)
        if child is not None:
            self._forget_outgrown(child, own, table.salt)

    def _forget_outgrown(self, part: Block, longer: Block, salt: str) -> None:
        """Frees the part of a block that the same conversation has since filled further."""
        in_tree = part.parent is not None and part.parent is longer.parent and part.salt == salt
        if in_tree and not part.refs and len(part.key) < len(longer.key) and longer.key.startswith(part.key):
            del self._idle[part]
            self._tree.detach(part)
            self._free.append(part)

    # Public and pinned prefixes

    def declare_public(self, tokens: Sequence[int]) -> int:
        """All salts share what is computed of this prefix, in whole blocks; returns their tokens."""
        whole = self._whole_blocks(tokens)
        self._tree.declare_public(whole)
        return len(whole) // TOKEN_BYTES

    def pin(self, tokens: Sequence[int], salt: str, *, variant: int = 0) -> int:
        """Keeps this prefix in memory, in whole blocks: what is computed of it now, and the rest when it gets computed.
        Returns how many of its tokens are computed."""
        packed = self._whole_blocks(tokens)
        pin = self._pins.get((salt, variant, packed))
        if pin is None:
            if not packed:
                raise RequestError(f"a prefix of {len(tokens)} tokens fills no block to pin", parameter="pin")
            reserved = self._reserved() + len(packed) // self._key_bytes
            if reserved > self.most_pinned or len(self._pins) == MOST_PINS:
                raise RequestError(
                    f"{len(self._pins) + 1} prefixes of {reserved} blocks together would be pinned: the bounds are "
                    f"{MOST_PINS} prefixes and {self.most_pinned} blocks",
                    parameter="pin",
                )
            pin = self._pins[salt, variant, packed] = _Pin(packed, salt, variant)
            if not self._extend(pin):
                self._unmet.append(pin)
        return len(pin.path) * self.block_tokens

    def unpin(self, tokens: Sequence[int], salt: str, *, variant: int = 0) -> bool:
        """False where it was not pinned."""
        pin = self._pins.pop((salt, variant, self._whole_blocks(tokens)), None)
        if pin is None:
            return False
        if pin in self._unmet:
            self._unmet.remove(pin)
        for block in reversed(pin.path):
            self._drop(block)
        return True

    def pinned(self) -> list[PinnedPrefix]:
        """In the order in which they were pinned."""
        found: list[PinnedPrefix] = []
        for pin in self._pins.values():
            tokens = array("i", pin.packed)
            found.append(PinnedPrefix(tuple(tokens), pin.salt, pin.variant, tuple(b.index for b in pin.path)))
        return found

    def restore(self, tokens: Sequence[int], salt: str, *, variant: int = 0) -> BlockTable | None:
        """Blocks for a prefix that was saved. The caller writes the KV of those after `cached_tokens`, which end with a
        block, and releases the table with all its tokens computed. None where memory does not suffice."""
        packed = pack(tokens)
        path, at = self._tree.walk(packed, len(packed), salt, variant)
        cached = at // TOKEN_BYTES
        return self._acquire(PrefixMatch(salt, variant, packed, len(tokens), cached, path, None, 0), len(tokens))

    def _extend(self, pin: _Pin) -> bool:
        """Holds what is computed by now; True where that is all of it."""
        size = self._key_bytes
        node = pin.path[-1] if pin.path else self._tree.root(pin.variant)
        for at in range(len(pin.path) * size, len(pin.packed), size):
            child = self._tree.child(node, pin.salt, pin.packed[at : at + size])
            if child is None:
                return False
            self._hold(child)
            pin.path.append(child)
            node = child
        return True

    def _whole_blocks(self, tokens: Sequence[int]) -> bytes:
        return pack(tokens[: len(tokens) // self.block_tokens * self.block_tokens])

    def _reserved(self) -> int:
        return sum(len(pin.packed) for pin in self._pins.values()) // self._key_bytes

    # Watching

    def stats(self) -> BlockStats:
        used = self.count - self.available
        unfilled = sum(len(table.blocks) * self.block_tokens - table.tokens for table in self._tables)
        return BlockStats(
            total=self.count,
            free=len(self._free),
            cached=len(self._idle),
            used=used,
            pinned=len({block for pin in self._pins.values() for block in pin.path}),
            unfilled=unfilled,
            fragmentation=unfilled / (used * self.block_tokens) if used else 0.0,
            evictions=self._evictions,
            copies=self._copied,
            salts={salt: SaltStats(stats.asked, stats.hit) for salt, stats in self._salts.items()},
        )

    def check(self) -> None:
        """IntegrityError where the books do not agree. Looks at everything: for tests and idle moments."""
        refs = [0] * self.count
        for table in self._tables:
            for index in table.blocks:
                refs[index] += 1
            for block, index in zip(table.path, table.blocks, strict=False):
                refs[block.index] += block.index != index
        for pin in self._pins.values():
            for block in pin.path:
                refs[block.index] += 1
        for target, source in self._copies.items():
            refs[source.index] += 1
            must(target.refs > 0 and target.parent is None, f"block {target.index} waits for a copy that none needs")
        must([block.refs for block in self._blocks] == refs, "references are not what tables, pins and copies hold")
        free = {block.index for block in self._free}
        idle = {block.index for block in self._idle}
        must(len(free) == len(self._free) and not free & idle, "a block is free twice")
        must(free | idle == {index for index in range(self.count) if not refs[index]}, "a block is lost")
        must(all(self._blocks[index].parent is None for index in free), "a free block is in the tree")
        must(all(self._blocks[index].parent is not None for index in idle), "an idle block is not in the tree")
        self._tree.check(self._blocks, {block: place for place, block in enumerate(self._idle)})
